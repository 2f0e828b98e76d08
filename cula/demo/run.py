"""The whole demo: text, training with a progress bar, loss curve, self check, generated text."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cula.demo.config import DemoConfig
from cula.host.errors import RangeError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from cula.demo.checkpoint import History
    from cula.demo.data import Corpus
    from cula.demo.model import ByteLM

#: Exit code after Ctrl-C, as shells count it: 128 + SIGINT.
INTERRUPTED = 130


@dataclass
class Options:
    """What the command line says. `given`: fields of DemoConfig that were given; the rest concerns one run only."""

    out: Path
    resume: bool = False
    device: str = "cpu"
    prompt: str = "The "
    length: int = 400
    given: dict[str, Any] = field(default_factory=dict)


@dataclass
class Plan:
    """Everything that can be wrong with the options has been found: the text is loaded, the checkpoint read."""

    options: Options
    config: DemoConfig
    corpus: Corpus
    history: History
    tensors: dict[str, Tensor] | None


def prepare(options: Options) -> Plan:
    """Check the options and load what they name; RangeError says in one line what to change."""
    for module in ("safetensors", "matplotlib", "rich"):
        if find_spec(module) is None:
            raise RangeError(f"the demo needs {module}: pip install 'cula[demo]'")
    _check_device(options.device)
    if not options.prompt:
        raise RangeError("--prompt must not be empty: give the text at least one letter to go on from")
    if options.length < 0:
        raise RangeError(f"--length must be at least 0, got {options.length}")
    from cula.demo import checkpoint, data

    if options.resume:
        stored, history, tensors = checkpoint.read(options.out)
        config = stored.override(options.given, resumed=True)
        if config.steps < history.step:
            raise RangeError(f"--steps {config.steps} lies behind the checkpoint's {history.step}: name more, or none")
    else:
        config, history, tensors = DemoConfig().override(options.given), checkpoint.History(), None
    corpus = data.load(config)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RangeError(f"--out {options.out} cannot be made a folder ({error.strerror}): name another") from None
    return Plan(options, replace(config, text=corpus.sha256), corpus, history, tensors)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise RangeError(f"--device {device} is not there: use --device cpu") from None


def execute(plan: Plan, console: Console) -> int:
    """Run the plan; exit code 0, 1 where the self check misses, 130 after Ctrl-C."""
    began = time.perf_counter()
    try:
        model = _train(plan, console)
        if model is None:
            return _interrupted(plan, console)
        good = _check(plan, model, console)
        _generate(plan, model, console)
    except KeyboardInterrupt:
        return _interrupted(plan, console)
    value = plan.history.validation[-1][1] if plan.history.validation else float("nan")
    _say(
        console,
        f"Validation {value:.3f} bits per byte after {plan.history.step} steps; training took "
        f"{plan.history.seconds:.0f} s, this run {time.perf_counter() - began:.0f} s. "
        f"Self check {'passed' if good else 'MISSED'}.",
    )
    _say(console, f"Checkpoint, loss curve and sample: {plan.options.out}")
    return 0 if good else 1


def _interrupted(plan: Plan, console: Console) -> int:
    from cula.demo.checkpoint import FILE

    place = plan.options.out / FILE
    if place.is_file():
        _say(console, f"\nInterrupted after step {plan.history.step} of {plan.config.steps}; {place} is whole.")
        _say(console, f"To go on: cula demo --resume --out {shlex.quote(str(plan.options.out))}")
    else:
        _say(console, "\nInterrupted before the first checkpoint; start again with the same command.")
    return INTERRUPTED


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _train(plan: Plan, console: Console) -> ByteLM | None:
    """The trained model, or None after Ctrl-C."""
    from cula.demo import checkpoint
    from cula.demo.plot import loss_curve
    from cula.demo.train import build, train

    config, corpus, history, out = plan.config, plan.corpus, plan.history, plan.options.out
    model, optimizer = build(config, plan.options.device)
    parameters = sum(p.numel() for p in model.parameters())
    _say(
        console,
        f"{corpus.name}: {len(corpus.train):,} bytes for training, {len(corpus.validation):,} for validation. "
        f"{config.layers} layers, width {config.width}, {parameters:,} parameters, {plan.options.device}.",
    )
    if plan.tensors is not None:
        checkpoint.restore(plan.tensors, model, optimizer)
        _say(console, f"Resumed at step {history.step} of {config.steps}.")
    elif checkpoint.keep_earlier(out):
        _say(console, f"The checkpoint of an earlier run is kept as {out / checkpoint.EARLIER}.")
    if history.step < config.steps:
        with _Bar(console, config, history) as report:
            done = train(out, config, corpus, model, optimizer, history, report)
    else:
        done = True
    if history.step:
        loss_curve(history, out / "loss.png", f"KDA byte model, {parameters:,} parameters, {corpus.name}")
    return model if done else None


class _Bar:
    """A progress bar; each validation also prints a line, which is all that a log file sees."""

    def __init__(self, console: Console, config: DemoConfig, history: History) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._config, self._seen = config, len(history.validation)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]} bits per byte"),
            TextColumn("{task.fields[speed]} bytes/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=config.steps, completed=history.step, loss="-", speed="-")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, history: History, speed: float) -> None:
        recent = history.train[-10:]
        self._progress.update(
            self._task, completed=history.step, loss=f"{sum(recent) / len(recent):.2f}", speed=f"{speed:,.0f}"
        )
        if len(history.validation) > self._seen:
            self._seen = len(history.validation)
            step, value = history.validation[-1]
            text = f"step {step:>5}/{self._config.steps}   training {sum(recent) / len(recent):.3f}"
            _say(self._progress.console, f"{text}   validation {value:.3f} bits per byte   {history.seconds:.0f} s")


def _check(plan: Plan, model: ByteLM, console: Console) -> bool:
    """Print the self check's table; True where every way agrees."""
    from rich.table import Table

    from cula.demo.selfcheck import self_check, tolerance

    size = min(96, plan.config.context)
    tokens = plan.corpus.validation[: 2 * size].view(2, size).long()
    found, bound = self_check(model, tokens), tolerance(model)
    table = Table(title=f"Self check: logits against one-shot prefill, tolerance {bound:g}")
    table.add_column("way")
    table.add_column("max relative difference", justify="right")
    table.add_column("")
    for way, difference in found.items():
        table.add_row(way, f"{difference:.1e}", "ok" if difference <= bound else "MISS")
    console.print(table)
    return all(difference <= bound for difference in found.values())


def _generate(plan: Plan, model: ByteLM, console: Console) -> None:
    from cula.demo.generate import sample

    prompt, length = plan.options.prompt, plan.options.length
    if not length:
        return
    began = time.perf_counter()
    (text,) = sample(model, prompt.encode(), length=length, seed=plan.config.seed)
    seconds = time.perf_counter() - began
    written = prompt + text.decode(errors="replace")
    (plan.options.out / "sample.txt").write_text(written + "\n", encoding="utf-8")
    _say(console, f"\nGenerated through prefill and decode, {length / seconds:.0f} bytes/s:\n")
    _say(console, written + "\n")
