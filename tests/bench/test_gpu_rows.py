"""GPU rows without a GPU: their shapes and floors, the inputs and gates, the check, the records, the filters."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cula.bench.cases import Case, select
from cula.bench.cuda import clock, inputs, runner, session, truth
from cula.bench.cuda.implementations import CUDNN_FLAGS, PEERS, Cudnn, Fla, Ours, bind_kda
from cula.bench.facts import Facts
from cula.bench.inputs import OFFSETS
from cula.bench.records import Record, read
from cula.bench.timing import Timing
from cula.kda import chunk_kda, kda_recurrent_reference

PREFILL = Case("kda_prefill", B=2, T=70, H=3, K=16, dtype="bf16", states=True)
PACKED = Case("kda_prefill", T=90, H=2, K=16, dtype="bf16", states=True, lengths=(20, 0, 70))
TRAIN = Case("kda_train", B=2, T=70, H=2, K=16, dtype="bf16")
FACTS = Facts(
    device="cuda", cpu="some CPU", cores=2, threads=0, flags="", python="3", torch="2", numba=None, load=0.0,
    commit="abc", run="2030-01-02T03:04:05Z", peers={"fla": "0.6", "cudnn": None}, gpu="Some GPU", triton="3.6",
)  # fmt: skip


@dataclass
class Machine:
    """A device that takes `ms` for everybody and copies 4 TB/s."""

    ms: float = 2.0
    count: int = 2
    timed: list[tuple[str, ...]] = field(default_factory=list)

    def buffers(self, case: Case, gate: str) -> list[inputs.RawInputs]:
        return [inputs.make(case, gate, seed) for seed in range(self.count)]

    def time(self, case: Case, calls: Mapping[str, Sequence[Any]]) -> runner.Times:
        self.timed.append(tuple(calls))
        outputs = {name: order[0]() for name, order in calls.items()}
        timings = {name: Timing([self.ms, 3 * self.ms, 2 * self.ms]) for name in calls}
        methods, counts = dict.fromkeys(calls, "graph"), dict.fromkeys(calls, 4)
        return runner.Times(timings, counts, methods, outputs, copy_gb_s=4000.0, matmul_gflop_s=7e5)

    def peak(self, call: Any) -> int:
        call()
        return 1_000_000

    def release(self) -> None:
        """Nothing to give back."""


@dataclass
class StandIn:
    """chunk_kda under a peer's name, its o multiplied by `factor`."""

    name: str
    factor: float = 1.0

    def available(self) -> tuple[bool, str]:
        return True, ""

    def version(self) -> str | None:
        return "1.0"

    def refusal(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, buffer: inputs.RawInputs) -> Any:
        call = bind_kda(chunk_kda, case, buffer)

        def run() -> dict[str, Any]:
            outputs = call()
            return {**outputs, "o": self.factor * outputs["o"]}

        return run


def rows(case: Case, *peers: StandIn, gate: str = "mixed", machine: Machine | None = None) -> list[Record]:
    return runner.run_case(case, gate, [Ours()], peers, FACTS, machine or Machine(), runner.Options())


# ---- shapes ------------------------------------------------------------------------------------------------------


def test_the_rows_of_the_gpu() -> None:
    names = {op: [case.name for case in select("cuda", (op,))] for op in ("kda_prefill", "kda_train", "kda_decode")}
    assert names == {
        "kda_prefill": [
            "B1-T8192-H64", "B1-T8192-H96", "B1-T1024-H64", "B2-T8192-H64", "B1-T32768-H32", "B1-T32768-H8",
            "B1-T131072-H4", "packed6-8192-H64", "packed8x1024-H96", "packed20-16384-H64", "B1-T1024-H64-small",
        ],
        "kda_train": ["B1-T8192-H64", "B4-T4096-H32"],
        "kda_decode": [],
    }  # fmt: skip
    for case in select("cuda"):
        assert (case.K, case.value_dim, case.dtype, case.state_dtype) == (128, 128, "bf16", "fp32")
        assert not case.lengths or sum(case.lengths) == case.T


@pytest.mark.parametrize("case", select("cuda"), ids=lambda case: f"{case.op}-{case.name}")
def test_floors_are_1280_bytes_a_token_and_head_and_the_states(case: Case) -> None:
    per_token = 1280 if case.op == "kda_prefill" else 1280 + 2304
    states = 2 * case.sequences * case.H * 128 * 128 * 4 if case.op == "kda_prefill" else 0
    assert case.moved_bytes == case.B * case.T * case.H * per_token + states
    floor = runner.rates(case, copy_gb_s=4270.0, matmul_gflop_s=7e5)["floor_ms"]
    assert floor == pytest.approx(case.moved_bytes / 4.27e12 * 1e3)


def test_the_floor_of_the_first_row_is_the_known_one() -> None:
    (case,) = select("cuda", ("kda_prefill",), ("B1-T8192-H64",))
    assert runner.rates(case, 4270.0, 7e5)["floor_ms"] == pytest.approx(0.157 + 0.002, abs=1e-3)


# ---- inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", list(OFFSETS))
def test_the_gate_has_an_offset_per_head_and_channel(gate: str) -> None:
    low, high = OFFSETS[gate]
    offsets = inputs.gate_offsets(gate, 64, 128, torch.Generator().manual_seed(1))
    assert offsets.shape == (64, 128)
    assert low <= float(offsets.min()) and float(offsets.max()) <= high
    assert float(offsets.max() - offsets.min()) >= 0.98 * (high - low)
    raw = inputs.make(Case("kda_prefill", T=500, H=4, K=32, dtype="fp32"), gate).g
    assert float((raw - raw.mean(1, keepdim=True)).std()) == pytest.approx(1.0, abs=0.02)
    assert float(raw.mean()) == pytest.approx((low + high) / 2, abs=0.6)


def test_inputs_are_raw_seeded_and_of_the_rows_types() -> None:
    a, b, other = (inputs.make(PREFILL, "strong", seed) for seed in (0, 0, 1))
    for item in fields(inputs.RawInputs):
        x, y, z = (getattr(made, item.name) for made in (a, b, other))
        if x is not None:
            assert torch.equal(x, y) and not torch.equal(x, z)
    assert {x.dtype for x in (a.q, a.k, a.v, a.g, a.beta)} == {torch.bfloat16}
    assert {x.dtype for x in (a.A_log, a.dt_bias, a.state)} == {torch.float32}
    assert a.state.shape == (2, 3, 16, 16) and a.dt_bias.shape == (48,) and a.do is None
    assert float(a.A_log.abs().mean()) < 2 and a.bytes == 2 * (4 * a.q.numel() + a.beta.numel()) + 4 * a.state.numel()
    packed = inputs.make(PACKED, "weak")
    assert packed.cu_seqlens_cpu.tolist() == [0, 20, 20, 90] and packed.state.shape[0] == 3
    assert inputs.make(TRAIN, "weak").state is None and inputs.make(TRAIN, "weak").do.shape == (2, 70, 2, 16)


# ---- the check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [PREFILL, PACKED], ids=["fixed", "packed"])
def test_the_truth_is_the_recurrence_of_the_checked_heads(case: Case) -> None:
    made = inputs.make(case, "mixed")
    found, _ = truth.expected(case, made)
    part = inputs.head_slice(made, truth.checked_heads(case), torch.float64)
    packing = {} if part.cu_seqlens is None else {"cu_seqlens": part.cu_seqlens}
    o, final = kda_recurrent_reference(
        part.q, part.k, part.v, part.g, part.beta, A_log=part.A_log, dt_bias=part.dt_bias, initial_state=part.state,
        output_final_state=True, **inputs.FLAGS, **packing,
    )  # fmt: skip
    torch.testing.assert_close(found["o"], o)
    torch.testing.assert_close(found["final_state"], final)


def test_a_reference_that_is_off_is_an_error() -> None:
    part = inputs.head_slice(inputs.make(PREFILL, "mixed"), (0, 2), torch.float64)
    o = truth.call_kda(chunk_kda, part, implementation="eager")["o"]
    truth.hold_to_recurrence(part, o)
    with pytest.raises(RuntimeError, match="reference itself is off by 1.0e-03"):
        truth.hold_to_recurrence(part, 1.001 * o)


@pytest.mark.parametrize("case", [PREFILL, PACKED, TRAIN], ids=["fixed", "packed", "train"])
@pytest.mark.parametrize("gate", list(OFFSETS))
def test_our_call_passes(case: Case, gate: str) -> None:
    made = inputs.make(case, gate)
    outputs = Ours().bind(case, made)()
    found = truth.check(case, outputs, *truth.expected(case, made))
    assert found.passed, found
    names = {"o", *(f"d{name}" for name in inputs.LEAVES)} if case.op == "kda_train" else {"o", "final_state"}
    assert set(found.errors) == names


@pytest.mark.parametrize("name", ["o", "final_state"])
def test_an_error_in_a_checked_head_and_a_nan_anywhere_are_red(name: str) -> None:
    made = inputs.make(PREFILL, "mixed")
    known = truth.expected(PREFILL, made)
    outputs = Ours().bind(PREFILL, made)()
    head = (slice(None),) * (2 if name == "o" else 1)
    wrong = {**outputs, name: outputs[name].clone()}
    wrong[name][(*head, 2)] *= 1.05
    assert not truth.check(PREFILL, wrong, *known).passed
    wrong[name] = outputs[name].clone()
    wrong[name][(*head, 1)] = math.nan
    found = truth.check(PREFILL, wrong, *known)
    assert found.output == name and math.isinf(found.error)
    with pytest.raises(AssertionError, match="outputs are"):
        truth.check(PREFILL, {"o": outputs["o"]}, *known)


# ---- records -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [PREFILL, TRAIN], ids=["prefill", "train"])
def test_a_row_has_its_fields(case: Case) -> None:
    ours, peer = rows(case, StandIn("fla"))
    assert ours.impl == "eager" and ours.dsl and ours.mechanism
    assert (peer.impl, peer.mechanism, peer.cp) == ("fla", None, "off")
    assert ours.cp == ("auto" if case.op == "kda_prefill" else "off")
    for record in (ours, peer):
        assert (record.ms, record.ms_least, record.ms_most, record.rounds, record.calls) == (4.0, 2.0, 6.0, 3, 4)
        assert (record.method, record.peak_bytes, record.buffers, record.dtype) == ("graph", 1_000_000, 2, "bf16")
        assert (record.gpu, record.triton, record.device, record.commit) == ("Some GPU", "3.6", "cuda", "abc")
        assert record.floor_ms == pytest.approx(case.moved_bytes / 4e12 * 1e3)
        assert record.fraction_of_copy == pytest.approx(record.floor_ms / 4.0)
        assert record.error is not None and record.tolerance is not None and record.error < record.tolerance
    assert (ours.ceiling_ms is None) == (case.op == "kda_train")
    assert peer.tolerance == pytest.approx(truth.PEER_FACTOR * ours.tolerance)


def test_a_red_row_and_a_failed_one_have_no_time() -> None:
    heard: list[str] = []
    machine = Machine()
    found = runner.run_case(
        PREFILL, "weak", [Ours(), Ours("sm100")], [StandIn("fla", factor=1.2)], FACTS, machine,
        runner.Options(note=heard.append),
    )  # fmt: skip
    ours, forced, peer = found
    assert ours.ms is not None and machine.timed == [("cula",)]
    assert forced.ms is None and forced.impl == "sm100" and forced.reason.startswith("failed: NotSupportedError")
    assert peer.ms is peer.fraction_of_copy is peer.peak_bytes is peer.method is None
    assert peer.reason.startswith("red: o is off by 2.0e-01")
    assert len(heard) == 2 and heard[1].endswith(peer.reason)


def test_what_turns_wrong_under_the_clock_has_no_time() -> None:
    class Later(Machine):
        def time(self, case: Case, calls: Mapping[str, Sequence[Any]]) -> runner.Times:
            times = super().time(case, calls)
            times.outputs["cula"]["o"].mul_(2.0)
            return times

    (ours,) = rows(PREFILL, machine=Later())
    assert ours.ms is None and ours.reason.startswith("red: o")


def test_a_peer_is_timed_once_for_the_gates_it_does_not_tell_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "fla", StandIn("fla"))
    monkeypatch.setitem(PEERS, "cudnn", StandIn("cudnn"))
    shown: list[int] = []
    path = tmp_path / "x.jsonl"
    found = session.run(
        [PREFILL], ("strong", "mixed", "weak"), ([Ours()], ["fla", "cudnn"]), FACTS, Machine(count=1),
        json_file=path, show=lambda now, records: shown.append(len(now)),
    )  # fmt: skip
    assert [(r.gate, r.impl) for r in found] == [
        ("strong", "eager"), ("strong", "fla"), ("strong", "cudnn"), ("mixed", "eager"), ("mixed", "cudnn"),
        ("weak", "eager"),
    ]  # fmt: skip
    assert shown == [3, 2, 1]
    assert read(path) == found


def test_a_row_that_cannot_be_run_is_shown_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(Machine):
        def buffers(self, case: Case, gate: str) -> list[inputs.RawInputs]:
            if gate == "strong":
                raise torch.OutOfMemoryError("no room\nmore")
            return super().buffers(case, gate)

    monkeypatch.setitem(PEERS, "fla", StandIn("fla"))
    path = tmp_path / "x.jsonl"
    found = session.run([PREFILL], ("strong", "mixed"), ([Ours()], ["fla"]), FACTS, Small(), json_file=path)
    assert [(r.gate, r.impl, r.ms is None) for r in found] == [
        ("strong", "cula", True), ("mixed", "eager", False), ("mixed", "fla", False),
    ]  # fmt: skip
    assert found[0].reason == "failed: OutOfMemoryError: no room"
    assert read(path) == found[1:]


def test_kernels_of_the_call_stand_in_our_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fact = {"name": "f", "registers": 32, "spills": 0, "shared": 1024, "warps": 4}
    monkeypatch.setattr("cula.bench.cuda.kernels.launched", lambda call: [fact])
    ours, peer = rows(PREFILL, StandIn("fla"))
    assert ours.kernels == [fact] and peer.kernels is None


# ---- implementations ---------------------------------------------------------------------------------------------


def test_what_cula_would_choose_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(TRAIN, device="sm90", K=128)
    assert [row.stage for row in Ours().chosen(case)] == ["chunk forward", "chunk backward"]
    named = runner.named(case, Ours("eager"))
    assert (named["impl"], named["dsl"]) == ("eager", "torch")
    assert runner.named(case, Ours("sm100")) == {"impl": "sm100", "mechanism": None, "dsl": None, "cp": "off"}
    monkeypatch.setenv("CULA_IMPLEMENTATION", "eager")
    assert runner.named(case, Ours())["impl"] == "eager"


def test_peers_are_probed_without_an_import() -> None:
    for peer in PEERS.values():
        here, why = peer.available()
        assert here or "pip install" in why
        assert (peer.version() is not None) == here
    assert set(session.versions(["fla"])) == {"fla", "cudnn"} and session.versions(["fla"])["cudnn"] is None
    assert Cudnn().refusal(replace(PREFILL, K=128)) is None
    assert "K = V = 128" in (Cudnn().refusal(PREFILL) or "")
    assert "prefill" in (Cudnn().refusal(TRAIN) or "")


def test_a_package_that_was_brought_along_says_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_peer").mkdir()
    (tmp_path / "some_peer" / "__init__.py").write_text('raise SystemExit\n__version__ = "1.2.3"\n')
    monkeypatch.syspath_prepend(tmp_path)
    peer = Fla()
    monkeypatch.setattr(peer, "package", "some_peer")
    monkeypatch.setattr(peer, "distribution", "no-such-distribution")
    assert peer.available()[0] and peer.version() == "1.2.3"


@pytest.mark.parametrize("case", [PREFILL, PACKED, TRAIN], ids=["fixed", "packed", "train"])
def test_fla_gets_the_same_call(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, "fla.ops.kda", chunk_kda=chunk_kda)
    made = inputs.make(case, "mixed")
    for name, x in Ours().bind(case, made)().items():
        assert torch.equal(x, Fla().bind(case, made)()[name])


@pytest.mark.parametrize("case", [replace(PREFILL, K=128), replace(PACKED, K=128)], ids=["fixed", "packed"])
def test_cudnn_gets_addresses_of_what_it_reads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}

    def launch(
        device: int, stream: int, q: int, k: int, v: int, g: int, beta: int, cu_seqlens: int, initial_state: int,
        o: int, final_state: int, total_tokens: int, n_seqs: int, n_heads: int, a_log: int = 0, dt_bias: int = 0,
        gate_lower_bound: float = 0.0, flags: int = 0, q_scale: float = 0.0,
    ) -> None:  # fmt: skip
        got.update(locals())

    package = "cudnn.linear_attention.hopper"
    _plant(monkeypatch, package, cuda_host=_plant(monkeypatch, f"{package}.cuda_host", launch=launch))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    made = inputs.make(case, "mixed")
    outputs = Cudnn().bind(case, made)()
    assert got["stream"] == 7 and got["flags"] == CUDNN_FLAGS == 7 and got["gate_lower_bound"] == -5.0
    assert (got["total_tokens"], got["n_seqs"], got["n_heads"]) == (case.B * case.T, case.sequences, case.H)
    assert (got["q"], got["o"], got["a_log"]) == (made.q.data_ptr(), outputs["o"].data_ptr(), made.A_log.data_ptr())
    assert got["q_scale"] == pytest.approx(128**-0.5)
    state = outputs["final_state"]
    assert state.shape == made.state.shape and state.transpose(-1, -2).is_contiguous()


def _plant(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """A module of this name, its parents included, for the length of a test."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    for key, value in contents.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


# ---- the clock ---------------------------------------------------------------------------------------------------


def test_short_steps_hold_several_calls_over_all_buffers() -> None:
    assert [clock.calls_for(ms, 1) for ms in (5.0, 1.0, 0.3, 0.02, 0.0)] == [1, 1, 4, 40, 40]
    assert [clock.calls_for(ms, 3) for ms in (5.0, 0.3, 0.02)] == [3, 6, 42]


def test_buffers_outgrow_the_cache() -> None:
    assert [clock.buffers_for(size, 50_000_000) for size in (0, 1000, 92_000_000, 200_000_000, 10**9)] == [
        8,
        8,
        3,
        1,
        1,
    ]


def test_rounds_are_interleaved_after_an_untimed_launch() -> None:
    order: list[str] = []
    cost = {"a": 2.0, "b": 4000.0}

    def step(name: str, calls: int) -> clock.Step:
        return clock.Step(lambda: order.append(name), calls, "graph")

    def sample(launch: Any) -> float:
        launch()
        return cost[order[-1]]

    found = clock.interleave({"a": step("a", 4), "b": step("b", 1)}, rounds=10, budget=10.0, sample=sample)
    assert found["a"].samples == [0.5] * 10 and found["b"].samples == [4000.0] * 5
    assert "".join(order) == "aabb" + "aaaabb" * 5


def test_loops_count_the_host_and_synchronise_once() -> None:
    now, syncs = [0.0], [0]

    def call() -> None:
        now[0] += 1e-3

    def sync() -> None:
        syncs[0] += 1
        now[0] += 5e-3

    timings, counts = clock.loops({"a": [call, call]}, rounds=3, synchronize=sync, clock=lambda: now[0])
    assert counts == {"a": 19} and timings["a"].samples == pytest.approx([(19 + 5) / 19] * 3)
    assert syncs[0] == 2 * (2 + 3)


def test_a_graph_holds_more_calls_where_the_host_was_the_slow_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def __init__(self, calls: int) -> None:
            self.calls = calls

        def replay(self) -> int:
            return self.calls

    monkeypatch.setattr(clock, "_capture", lambda order: (Graph(len(order)), "first"))
    monkeypatch.setattr(clock, "_event_ms", lambda launch, times=1: 0.09 * launch() if times and launch() else 0.35)
    step = clock.prepare([lambda: 0, lambda: 0, lambda: 0])
    assert (step.method, step.calls, step.output, step.launch()) == ("graph", 12, "first", 12)


def test_what_cannot_be_captured_is_launched_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(order: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(clock, "_capture", capture)
    monkeypatch.setattr(clock, "_event_ms", lambda launch, times=1: 0.5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    heard: list[str] = []
    counter = iter(range(100))
    step = clock.prepare([lambda: next(counter)], heard.append)
    assert (step.method, step.calls) == ("events", 2)
    assert heard == ["no graph, events instead: RuntimeError: operation not permitted"]
    step.launch()
    assert step.output == 1
