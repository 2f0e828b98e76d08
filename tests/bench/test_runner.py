"""One row from end to end with stand-ins: checked first, timed only if right, written with every field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch

from cula.bench.bars import MEMORY, SPEED
from cula.bench.cases import Case
from cula.bench.facts import Facts, collect, slug
from cula.bench.inputs import Inputs, make_inputs
from cula.bench.memory import Peak
from cula.bench.ours import Cula
from cula.bench.peers import PEERS
from cula.bench.records import Record, append, default_name, newest, ratio, read
from cula.bench.report import absent, case_table, cells, verdicts
from cula.bench.runner import Options, run_case
from cula.bench.runs import Run, forward_run, training_run
from cula.bench.timing import interleave, takes_part
from cula.bench.truth import check, expected
from cula.kda import kda_recurrent_reference

FORWARD = Case("kda_prefill", B=1, T=20, H=2, K=16)
TRAIN = replace(FORWARD, op="kda_train", T=70)
DECODE = Case("kda_decode", N=2, H=2, K=16, buffers=3)
FACTS = Facts(
    device="cpu", cpu="some CPU", cores=2, threads=2, flags="", python="3", torch="2", numba=None, load=0.0,
    commit="abc", run="2030-01-02T03:04:05Z", peers={"ggml": None, "transformers": "5.0"},
)  # fmt: skip
QUICK = Options(rounds=2, threads=2, memory=False)


@dataclass
class StandIn:
    """The reference itself, in fp32, its o multiplied by `factor`, or an exception in its place."""

    name: str
    factor: float = 1.0
    error: Exception | None = None
    here: bool = True

    def available(self) -> tuple[bool, str]:
        return (True, "") if self.here else (False, "not installed (pip install it)")

    def version(self) -> str | None:
        return "1.0"

    def refusal(self, case: Case) -> str | None:
        return "has no backward" if self.name == "ggml" and case.op == "kda_train" else None

    def mechanism(self, case: Case) -> str | None:
        return None

    def run(self, case: Case, inputs: Inputs, threads: int) -> Run:
        state = None if inputs.state is None else inputs.state.transpose(-1, -2)

        def call(*operands: torch.Tensor) -> tuple:
            if self.error is not None:
                raise self.error
            o, final = kda_recurrent_reference(*operands, initial_state=state, output_final_state=True)
            return self.factor * o.float(), final.float()

        return training_run(call, inputs) if case.op == "kda_train" else forward_run(call, inputs)


@pytest.fixture(autouse=True)
def small_machine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cula.bench.timing.COPY_BYTES", 1 << 16)
    monkeypatch.setattr("cula.bench.timing.MATMUL_SIZE", 16)
    monkeypatch.setattr("cula.bench.timing.SETTLE_SECONDS", 0.0)


def rows(case: Case, *implementations: StandIn, options: Options = QUICK, **more: object) -> list[Record]:
    return run_case(case, "mixed", implementations, FACTS, options, **more)


@pytest.mark.parametrize("case", [FORWARD, TRAIN, DECODE], ids=["forward", "train", "decode"])
def test_a_right_implementation_gets_a_time(case: Case) -> None:
    ours, peer = rows(case, StandIn("eager"), StandIn("transformers"))
    for record in (ours, peer):
        assert record.reason is None
        assert record.ms is not None and record.ms > 0
        assert record.error is not None and record.tolerance is not None and record.error <= record.tolerance
        assert record.rounds == 2
    assert (ours.limit_ms is not None) == case.decodes
    gradients = {"dq", "dk", "dv", "dg", "dbeta"}
    assert (gradients <= set(ours.errors or {})) == (case.op == "kda_train")


def test_a_red_check_gets_no_time_and_prints_none() -> None:
    found = rows(FORWARD, StandIn("eager", factor=1.001), StandIn("transformers"))
    red, peer = found
    assert red.ms is red.ms_least is red.ms_most is red.fraction_of_copy is red.peak_bytes is None
    assert red.error == pytest.approx(1e-3, rel=1e-3)
    assert red.reason is not None and red.reason.startswith("red: o is off by 1.0e-03")
    assert peer.ms is not None
    assert ratio(red, peer) is None
    assert [text for text in cells(red, found) if text] == ["eager", red.reason, "1e-03"]


def test_a_red_peer_gives_no_ratio() -> None:
    found = rows(FORWARD, StandIn("eager"), StandIn("ggml", factor=math.nan))
    assert found[1].ms is None and found[1].error is None and found[1].errors is not None
    assert verdicts(found) == []


def test_a_run_that_turns_wrong_while_it_is_timed_gets_no_time() -> None:
    @dataclass
    class Decaying(StandIn):
        def run(self, case: Case, inputs: Inputs, threads: int) -> Run:
            run = super().run(case, inputs, threads)
            inner = run.step

            def step() -> None:
                inner()
                run.outputs()["o"].mul_(self.factor)
                self.factor = 1.5

            run.step = step
            return run

    (record,) = rows(FORWARD, Decaying("eager"))
    assert record.ms is None and record.reason is not None and record.reason.startswith("red")


def test_an_exception_is_a_reason() -> None:
    ours, peer = rows(FORWARD, StandIn("eager"), StandIn("transformers", error=RuntimeError("no\nluck")))
    assert ours.ms is not None
    assert peer.ms is None and peer.reason == "failed: RuntimeError: no"


def test_who_is_absent_or_cannot_do_the_row_is_left_out() -> None:
    here = rows(TRAIN, StandIn("eager"), StandIn("ggml"), StandIn("transformers", here=False))
    assert [record.impl for record in here] == ["eager"]
    assert absent([StandIn("ggml", here=False)]) == ["ggml: not measured, not installed (pip install it)"]


def test_a_failed_memory_measurement_leaves_the_time() -> None:
    def measure(*_: object) -> Peak:
        raise RuntimeError("memory of eager: no such thing")

    heard: list[str] = []
    options = replace(QUICK, memory=True, note=heard.append)
    (record,) = rows(FORWARD, StandIn("eager"), options=options, measure=measure)
    assert record.ms is not None and record.peak_bytes is None
    assert heard == ["no peak: memory of eager: no such thing"]


def test_peaks_are_compared_with_the_inputs() -> None:
    size = make_inputs(FORWARD, "mixed").bytes
    assert size == 4 * (4 * 20 * 2 * 16 + 20 * 2)
    options = replace(QUICK, memory=True)
    found = rows(FORWARD, StandIn("eager"), options=options, measure=lambda *_: Peak(13 * size, 12 * size, "VmHWM"))
    assert found[0].peak_ratio == pytest.approx(13.0)
    assert [(what, value, bar, met) for _, what, value, bar, met in verdicts(found)] == [
        ("memory", pytest.approx(13.0), 12.0, False)
    ]


def record(impl: str, ms: float | None, **more: object) -> Record:
    base = {"op": "kda_prefill", "case": "B1-T2048-H4", "gate": "strong", "error": 1e-7, "tolerance": 1e-5}
    return Record(impl=impl, ms=ms, **{**base, "run": "1", **more})


def test_ratios_are_the_peers_time_over_ours() -> None:
    ours = record("eager", 20.0)
    found = [ours, record("ggml", 25.0), record("transformers", 390.0)]
    assert ratio(ours, found[1]) == 1.25
    assert [(row.impl, value, bar, met) for row, _, value, bar, met in verdicts(found)] == [
        ("ggml", 1.25, 1.0, True),
        ("transformers", 19.5, 20.0, False),
    ]
    assert "1.25x" in cells(found[1], found) and ">= 1x met" in cells(found[1], found)
    assert "19.50x" in cells(found[2], found) and ">= 20x MISSED" in cells(found[2], found)


def test_only_rows_of_one_run_and_gate_are_compared() -> None:
    ours = record("eager", 20.0)
    assert ratio(ours, record("ggml", 25.0, run="2")) is None
    assert ratio(ours, record("ggml", 25.0, gate="weak")) is None
    assert ratio(ours, record("ggml", None)) is None


def test_the_bars() -> None:
    assert {key: bar.least for key, bar in SPEED.items()} == {
        ("kda_prefill", "ggml"): 1.0,
        ("kda_prefill", "transformers"): 20.0,
        ("kda_train", "transformers"): 25.0,
        ("kda_decode", "ggml"): 0.6,
        ("kda_decode", "transformers"): 3.0,
        ("lightning_prefill", "transformers"): 3.0,
    }
    algorithms = ("kda", "lightning")
    assert {f"{a}_{op}": most for a in algorithms for op, most in (("prefill", 12.0), ("train", 24.0))} == MEMORY


WRITTEN = {
    "op", "case", "impl", "cp", "gate", "ms", "floor_ms", "limit_ms", "fraction_of_copy", "peak_bytes", "error",
    "tolerance", "gpu", "torch", "triton", "dsl", "commit", "date", "state_dtype", "tokens", "head_dim", "device",
    "cpu", "threads", "peers", "impl_version",
}  # fmt: skip


def test_result_lines_have_every_field_and_are_read_back(tmp_path: Path) -> None:
    found = rows(FORWARD, StandIn("eager"), StandIn("ggml", factor=math.inf))
    path = tmp_path / "new" / "x.jsonl"
    append(path, found[:1])
    append(path, found[1:])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert WRITTEN <= set(line) == {field.name for field in fields(Record)}
    assert lines[0]["cpu"] == "some CPU" and lines[0]["date"] == "2030-01-02" and lines[0]["device"] == "cpu"
    assert lines[0]["fraction_of_copy"] == pytest.approx(lines[0]["floor_ms"] / lines[0]["ms"])
    assert lines[1]["ms"] is None
    assert read(path) == found


def test_a_broken_result_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"op": "kda_prefill"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl line 1"):
        read(path)


def test_the_newest_run_of_a_row_wins_as_a_whole() -> None:
    old = [record("eager", 1.0), record("ggml", 2.0)]
    new = [record("eager", 3.0, run="2"), record("eager", 4.0, run="2")]
    other = [record("eager", 5.0, gate="weak")]
    assert [(r.impl, r.ms) for r in newest([*old, *new, *other])] == [("eager", 4.0), ("eager", 5.0)]


def test_file_names() -> None:
    assert default_name(slug("AMD EPYC (family 25 model 17)"), "2030-01-02", "kda") == "amd-epyc-2030-01-02-kda.jsonl"


def test_rounds_are_interleaved_and_slow_ones_take_part_in_fewer() -> None:
    now = [0.0]
    order: list[str] = []

    def step(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            now[0] += seconds

        return run

    steps = {"a": (step("a", 0.1), 1), "b": (step("b", 3.0), 2)}
    timings = interleave(steps, rounds=10, budget=6.0, settle=0.0, clock=lambda: now[0])
    assert timings["a"].samples == pytest.approx([100.0] * 10)
    assert timings["b"].samples == pytest.approx([1500.0] * 5)
    assert "".join(order[-6:]) == "aabaab"
    assert (timings["a"].ms, timings["a"].least, timings["a"].most) == pytest.approx((100.0, 100.0, 100.0))


def test_rounds_are_spread_evenly() -> None:
    assert [i for i in range(10) if takes_part(i, 10, 5)] == [1, 3, 5, 7, 9]
    assert [i for i in range(4) if takes_part(i, 4, 4)] == [0, 1, 2, 3]


def test_gradients_of_the_truth_are_those_of_one_pass() -> None:
    """Taken a segment at a time, they equal autograd through the whole recurrence."""
    inputs = make_inputs(TRAIN, "mixed")
    leaves = [x.double().requires_grad_() for x in inputs.operands]
    o = kda_recurrent_reference(*leaves)[0]
    o.backward(inputs.do.double())
    truth = expected(TRAIN, inputs)
    torch.testing.assert_close(truth["o"], o.detach())
    for name, leaf in zip(("dq", "dk", "dv", "dg", "dbeta"), leaves):
        torch.testing.assert_close(truth[name], leaf.grad)


def test_the_worst_output_is_the_one_nearest_to_its_tolerance() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    truth = {"o": ones, "dg": ones}
    result = check(TRAIN, {"o": 1 + 0.9e-5 * ones, "dg": 1 + 2e-5 * ones}, truth)
    assert result.output == "o" and result.passed
    assert not check(TRAIN, {"o": ones, "dg": 1 + 6e-5 * ones}, truth).passed


@pytest.mark.parametrize("case", [FORWARD, TRAIN, DECODE], ids=["forward", "train", "decode"])
def test_our_own_calls_are_right(case: Case) -> None:
    (found,) = rows(case, Cula())
    assert found.reason is None and found.ms is not None
    assert found.impl == "eager" and found.mechanism


def test_peers_are_probed_without_an_import() -> None:
    assert set(PEERS) == {"ggml", "transformers"}
    for peer in PEERS.values():
        here, why = peer.available()
        assert here or "pip install" in why
        assert (peer.version() is not None) == here
    assert PEERS["ggml"].refusal(TRAIN) == "has no backward"
    assert "HV=4" in (PEERS["ggml"].refusal(replace(FORWARD, HV=4)) or "")
    assert PEERS["transformers"].refusal(replace(FORWARD, lengths=(5, 15))) is not None


def test_a_table_has_a_line_for_each_implementation() -> None:
    found = rows(FORWARD, StandIn("eager"), StandIn("ggml"))
    assert case_table(found).row_count == 2


def test_facts_are_collected() -> None:
    facts = collect("cpu", 2, {"ggml": None})
    assert facts.cpu and facts.cores >= 1 and facts.torch == torch.__version__
    assert len(facts.run) == 20 and facts.date == facts.run[:10]


LIGHTNING = [
    Case("lightning_prefill", B=1, T=70, H=2, HV=4, K=16),
    Case("lightning_train", B=1, T=70, H=2, K=16),
    Case("lightning_decode", N=2, H=2, K=16, buffers=3),
]


@pytest.mark.parametrize("case", LIGHTNING, ids=lambda case: case.op)
def test_lightning_rows_are_checked_and_timed(case: Case) -> None:
    from cula.bench.ours import Cula

    assert case.gates() == case.gates(("mixed",)) == ("alibi",)
    (row,) = run_case(case, "alibi", [Cula()], FACTS, QUICK)
    assert row.ms and row.reason is None and row.error <= 1e-6 and "fused, numba" in row.mechanism
    names = {"o", "dq", "dk", "dv"} if case.trains else {"o", "final_state"}
    assert set(row.errors) == names and row.floor_ms


def test_lightning_moves_no_gate() -> None:
    case = Case("lightning_prefill", B=1, T=100, H=3)
    assert case.moved_bytes == 100 * 3 * 4 * 128 * 4
    assert replace(case, op="lightning_train").moved_bytes == 100 * 3 * 11 * 128 * 4
    assert PEERS["ggml"].refusal(case) and PEERS["transformers"].refusal(case) is None
