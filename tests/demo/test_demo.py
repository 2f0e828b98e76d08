"""The demo on a tiny model: files appear, an interrupted run goes on exactly, wrong options are refused in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cula.__main__ import main
from cula.demo import checkpoint, data, train
from cula.demo.config import DemoConfig
from cula.demo.generate import sample
from cula.demo.selfcheck import self_check
from cula.host.errors import RangeError

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--width", "32", "--layers", "1", "--heads", "1", "--context", "32", "--batch", "2"]
SMALL = DemoConfig(width=32, layers=2, heads=1, head_dim=16, context=32, batch=2, steps=8)
Capture = pytest.CaptureFixture[str]


def demo(folder: Path, *arguments: str) -> int:
    return main(["demo", "--out", str(folder), "--length", "20", *arguments])


def train_small(folder: Path, stop_after: int | None = None, resume: bool = False) -> bool:
    """Train SMALL in `folder`; SIGINT arrives during step `stop_after`."""
    folder.mkdir(exist_ok=True)
    corpus = data.load(SMALL)
    model, optimizer = train.build(SMALL, "cpu")
    history = checkpoint.History()
    if resume:
        _, history, tensors = checkpoint.read(folder)
        checkpoint.restore(tensors, model, optimizer)

    def report(seen: checkpoint.History, speed: float) -> None:
        assert speed > 0
        if seen.step == stop_after:
            signal.raise_signal(signal.SIGINT)

    return train.train(folder, SMALL, corpus, model, optimizer, history, report, every=3)


def test_a_run_leaves_its_files_and_agrees_with_itself(tmp_path: Path, capsys: Capture) -> None:
    assert demo(tmp_path, "--steps", "4", "--prompt", "Python", *TINY) == 0
    out = capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.safetensors", "loss.png", "sample.txt"}
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8").startswith("Python")
    assert out.count(" ok") == 4
    assert "bits per byte after 4 steps" in out
    assert "Self check passed" in out


def test_a_finished_run_resumes_into_generation(tmp_path: Path, capsys: Capture) -> None:
    assert demo(tmp_path, "--steps", "2", *TINY) == 0
    before = (tmp_path / checkpoint.FILE).read_bytes()
    assert demo(tmp_path, "--resume", "--prompt", "A ") == 0
    assert (tmp_path / checkpoint.FILE).read_bytes() == before
    assert demo(tmp_path, "--resume", "--steps", "3") == 0
    assert "Resumed at step 2 of 3" in capsys.readouterr().out
    assert checkpoint.read(tmp_path)[1].step == 3


def test_a_second_run_keeps_the_first_ones_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    assert demo(tmp_path, "--steps", "1", *TINY) == 0
    first = (tmp_path / checkpoint.FILE).read_bytes()
    assert demo(tmp_path, "--steps", "2", *TINY) == 0
    assert "earlier run is kept" in capsys.readouterr().out
    assert (tmp_path / checkpoint.EARLIER).read_bytes() == first


def test_the_same_seed_writes_the_same_text(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert demo(tmp_path / name, "--steps", "2", "--seed", seed, *TINY) == 0
        texts.append((tmp_path / name / "sample.txt").read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    assert train_small(tmp_path / "whole")
    assert not train_small(tmp_path / "parts", stop_after=2)
    assert checkpoint.read(tmp_path / "parts")[1].step == 2
    assert not train_small(tmp_path / "parts", stop_after=5, resume=True)
    assert train_small(tmp_path / "parts", resume=True)
    (_, whole, a), (_, parts, b) = checkpoint.read(tmp_path / "whole"), checkpoint.read(tmp_path / "parts")
    assert parts.train == whole.train
    assert parts.validation == whole.validation
    assert [step for step, _ in whole.validation] == [3, 6, 8]
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train_small(tmp_path)
    before = (tmp_path / checkpoint.FILE).read_bytes()

    def half(tensors: dict, filename: str, metadata: dict) -> None:
        Path(filename).write_bytes(before[:1000])
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", half)
    model, optimizer = train.build(SMALL, "cpu")
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, SMALL, model, optimizer, checkpoint.History())
    assert (tmp_path / checkpoint.FILE).read_bytes() == before
    assert checkpoint.read(tmp_path)[1].step == 8


def test_sigint_leaves_a_checkpoint_that_resumes(tmp_path: Path, capsys: Capture) -> None:
    command = [sys.executable, "-m", "cula", "demo", "--out", str(tmp_path), "--steps", "100000", *TINY]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 50
        while not (tmp_path / checkpoint.FILE).exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"To go on: cula demo --resume --out {tmp_path}" in out
    assert "Traceback" not in out
    step = checkpoint.read(tmp_path)[1].step
    assert demo(tmp_path, "--resume", "--steps", str(step + 2)) == 0
    assert f"Resumed at step {step} of {step + 2}" in capsys.readouterr().out


def test_ctrl_c_after_training_keeps_the_checkpoint(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cula.demo.generate.sample", interrupted)
    assert demo(tmp_path, "--steps", "1", *TINY) == 130
    assert "Interrupted after step 1 of 1" in capsys.readouterr().out
    assert checkpoint.read(tmp_path)[1].step == 1


def test_a_miss_of_the_self_check_is_exit_code_1(tmp_path: Path, capsys: Capture, monkeypatch) -> None:
    monkeypatch.setattr("cula.demo.selfcheck.self_check", lambda model, tokens: {"decode": 0.5})
    assert demo(tmp_path, "--steps", "1", *TINY) == 1
    out = capsys.readouterr().out
    assert "MISS" in out
    assert "Self check MISSED" in out


def test_the_self_check_finds_a_wrong_state() -> None:
    model, _ = train.build(SMALL, "cpu")
    tokens = data.load(SMALL).validation[:64].view(2, 32).long()
    assert max(self_check(model, tokens).values()) < 1e-4
    step = type(model).step

    def forgetful(self, tokens, caches, slots):
        caches[1].reset([0])
        return step(self, tokens, caches, slots)

    model.step = forgetful.__get__(model)
    found = self_check(model, tokens)
    assert found["decode, token by token"] > 1e-3
    assert found["chunked prefill"] < 1e-4


def test_training_learns(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    arguments = [*TINY, "--file", str(text), "--steps", "30", "--prompt", "the cat "]
    assert demo(tmp_path / "out", *arguments) == 0
    _, history, _ = checkpoint.read(tmp_path / "out")
    assert history.train[0] > 6
    assert history.validation[-1][1] < 3


def test_samples_share_one_prefilled_prompt() -> None:
    model, _ = train.build(SMALL, "cpu")
    both = sample(model, b"ab", length=5, samples=2, seed=1)
    assert [len(text) for text in both] == [5, 5]
    assert both[0] != both[1]
    assert sample(model, b"ab", length=0) == [b""]


def test_batches_depend_on_seed_and_step_alone() -> None:
    corpus = data.load(SMALL)
    x, y = data.batch(corpus, SMALL, 5)
    assert x.shape == y.shape == (2, 32)
    assert torch.equal(x[:, 1:], y[:, :-1])
    data.batch(corpus, SMALL, 6)
    assert torch.equal(data.batch(corpus, SMALL, 5)[0], x)
    assert not torch.equal(data.batch(corpus, SMALL, 6)[0], x)


def test_the_documentation_is_text_and_nothing_in_it_stands_twice() -> None:
    paragraphs = data.documentation().decode().split("\n\n")
    assert sum(map(len, paragraphs)) > 200_000
    assert len({p.strip("\n") for p in paragraphs}) > 0.99 * len(paragraphs)


def test_learning_rate_rises_and_falls() -> None:
    config = DemoConfig(steps=100)
    rates = [config.learning_rate(step) for step in range(100)]
    assert max(rates) == pytest.approx(config.rate)
    assert rates[0] < rates[5] < rates[9]
    assert rates[30] > rates[60] > rates[99] > 0


def test_config_survives_json() -> None:
    assert DemoConfig.from_json(SMALL.to_json()) == SMALL


BAD = [
    (["--file", "no-such.txt"], "--file no-such.txt does not exist: name a text file"),
    (["--file", "."], "--file . is not a file"),
    (["--file", "short.txt"], "short.txt has 100 bytes, context 128 needs at least 5160"),
    (["--resume"], "holds no checkpoint.safetensors"),
    (["--steps", "0"], "--steps must be at least 1, got 0"),
    (["--steps", "many"], "--steps"),
    (["--seed", "-1"], "--seed must be at least 0, got -1"),
    (["--width", "2"], "--width must be at least 8, got 2"),
    (["--prompt", ""], "--prompt must not be empty"),
    (["--length", "-1"], "--length must be at least 0, got -1"),
    (["--device", "nonsense"], "--device nonsense is not there: use --device cpu"),
    (["--out", "short.txt"], "--out short.txt cannot be made a folder"),
    (["--nonsense"], "--nonsense"),
]


@pytest.mark.parametrize("arguments, sentence", BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_arguments_are_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("x" * 100)
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err


def test_resume_refuses_other_settings_and_another_text(tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words and others. " * 200)
    out = tmp_path / "out"
    assert demo(out, "--steps", "2", "--file", str(text), *TINY) == 0
    assert demo(out, "--resume", "--width", "64") == 2
    assert "--width 64 differs from the checkpoint's 32" in capsys.readouterr().err
    assert demo(out, "--resume", "--steps", "1") == 2
    assert "--steps 1 lies behind the checkpoint's 2" in capsys.readouterr().err
    text.write_text("other words and some. " * 200)
    assert demo(out, "--resume") == 2
    assert "has changed since the checkpoint was written" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(os.urandom(100))
    with pytest.raises(RangeError, match="is not a whole safetensors file"):
        checkpoint.read(tmp_path)
