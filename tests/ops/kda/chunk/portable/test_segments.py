"""Long sequences in segments: pre_scan and merge give the serial walk's states, whatever the cut."""

from __future__ import annotations

import pytest
import torch

from cula.checks.cases import Case, make
from cula.checks.runs import chunk, fresh_pool, reference, run_chunk, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.host.errors import NotSplittableError
from cula.ops.kda.chunk.cp.plan import Plan

pytestmark = pytest.mark.usefixtures("interpreted")

CASE = Case(B=2, T=100, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True, chunk_size=16, dtype="fp32")
CASES = {
    "batch": CASE,
    "fp16-v-first": CASE.replace(dtype="fp16", v_first=True, K=40, V=40, B=1),
    "packed": CASE.replace(B=1, T=150, lengths=(0, 83, 1, 0, 50, 16), K=64, V=80, chunk_size=16),
    "steep": CASE.replace(gate="steep", B=1),
    "no-decay": CASE.replace(gate="zero", B=1),
}


@pytest.fixture(params=[1, 3], ids=lambda cut: f"cut{cut}")
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every call with cp_mode="auto" is cut into segments of so many chunks."""
    from cula.ops.kda.chunk.portable import forward

    monkeypatch.setattr(forward, "SEGMENTS_VERIFIED", True)
    monkeypatch.setattr(forward, "make_plan", lambda chunks, shape: Plan(chunks, request.param))
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_against_the_recurrence(cut: int, name: str) -> None:
    p = make(CASES[name])
    got = run_chunk(p, "portable", gradients=False, cp_mode="auto")
    truth = reference(p, gradients=False)
    for quantity in ("o", "final_state"):
        error = relative_error(got[quantity], truth[quantity])
        assert error <= tolerance(quantity, p.q.dtype), f"{quantity}: {error:.2e}"


@pytest.mark.parametrize("whole", [False, True])
def test_only_a_plan_of_whole_sequences_is_serial_in_bits(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cula.ops.kda.chunk.portable import forward

    monkeypatch.setattr(forward, "SEGMENTS_VERIFIED", True)
    monkeypatch.setattr(forward, "make_plan", lambda chunks, shape: Plan(chunks, 20 if whole else 2))
    p = make(CASE)
    with torch.no_grad():
        serial = chunk(p, implementation="portable")
        auto = chunk(p, implementation="portable", cp_mode="auto")
    assert all(bits_equal(a, b) for a, b in zip(serial, auto)) == whole


def test_under_grad_sequences_stay_whole(cut: int) -> None:
    p = make(CASE)
    leaf = p.map(lambda x: x, q=p.q.clone().requires_grad_())
    serial = chunk(p, implementation="portable")
    assert all(
        bits_equal(a, b.detach()) for a, b in zip(serial, chunk(leaf, implementation="portable", cp_mode="auto"))
    )


@pytest.mark.parametrize("separate", [False, True], ids=["in-place", "other-slots"])
def test_pools(cut: int, separate: bool) -> None:
    p = make(CASES["packed"].replace(v_first=True, K=24, V=20))
    results = []
    for mode in (False, "auto"):
        pool, slots = fresh_pool(p, slots=2 * p.case.N + 3)
        write = slots
        if separate:
            free = [n for n in range(pool.shape[0]) if n not in slots.tolist()]
            write = torch.tensor(free[: p.case.N], dtype=slots.dtype)
        given = {"state_pool": pool, "read_indices": slots, "write_indices": write}
        o = serve("kda_prefill", p, **given, cu_seqlens=p.cu_seqlens, implementation="portable", cp_mode=mode)
        results.append((o, pool))
    for serial, split in zip(*results):
        assert bits_equal(serial.isnan(), split.isnan())
        assert relative_error(split.nan_to_num(), serial.nan_to_num()) <= 1e-5


def test_intermediate_states(cut: int) -> None:
    p = make(CASES["packed"].replace(K=24, V=20))
    with torch.no_grad():
        serial = chunk(p, implementation="portable", return_intermediate_states=True)
        auto = chunk(p, implementation="portable", return_intermediate_states=True, cp_mode="auto")
    for a, b in zip(serial, auto):
        assert a.shape == b.shape and relative_error(b, a) <= 1e-5


def test_a_table_that_cannot_be_made_leaves_the_call_serial(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cula.ops.kda.chunk.portable import forward

    def refuse(*_):
        raise NotSplittableError("not now")

    monkeypatch.setattr(forward, "segment_tables", refuse)
    p = make(CASE)
    with torch.no_grad():
        pairs = zip(chunk(p, implementation="portable"), chunk(p, implementation="portable", cp_mode="auto"))
        assert all(bits_equal(a, b) for a, b in pairs)
