"""The portable chunk kernels in Triton's interpreter, through the public functions, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from cula.checks.cases import Case, make, normal
from cula.checks.runs import chunk, errors, limits, reference, run_chunk, run_prefill, serve
from cula.checks.tolerance import bits_equal, relative_error
from cula.ops.lightning.chunk.portable import forward

pytestmark = pytest.mark.usefixtures("interpreted")

PACKED = (0, 17, 1, 40, 0)

CASES = [
    Case(B=2, T=20, K=16, V=16, gate="slopes_zero"),
    Case(T=70, K=24, V=40, H=1, HV=2, gate="slopes_mixed"),
    Case(T=70, K=64, V=24, H=2, HV=2, dtype="fp16", gate="slopes_fla"),
    Case(T=130, K=64, V=80, gate="slopes_weak", v_first=True),
    Case(T=61, K=96, V=16, chunk_size=32, lengths=PACKED, gate="slopes_alibi"),
    Case(T=58, K=40, V=24, chunk_size=16, lengths=PACKED, gate="slopes_mixed", H=1, HV=3, v_first=True),
    Case(T=58, K=64, V=24, dtype="fp16", lengths=PACKED, gate="slopes_steep", state=False),
    Case(T=66, K=16, V=16, gate="slopes_wall", scale=0.25),
    Case(T=66, K=16, V=16, gate="slopes_last"),
    Case(T=1, K=1, V=3, gate="slopes_steep"),
    Case(T=0, K=16, V=16, gate="slopes_fla"),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def held(problem, got, truth) -> None:
    found, limit = errors(problem, got, truth), limits(problem, got)
    assert all(found[name] <= limit[name] for name in found), (found, limit)


@cases
def test_outputs_and_gradients_are_the_references(case: Case) -> None:
    p = make(case)
    held(p, run_chunk(p, "portable"), reference(p))


@cases
def test_prefill_over_a_pool_is_the_reference(case: Case) -> None:
    p = make(case)
    held(p, run_prefill(p, "portable"), reference(p, gradients=False))


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=100, K=16, V=24, H=1, HV=2, gate="slopes_mixed", chunk_size=16),
        Case(T=130, K=16, V=24, lengths=(0, 17, 1, 70, 16, 0), gate="slopes_weak", chunk_size=16, v_first=True),
    ],
    ids=["batch", "packed"],
)
def test_segments(monkeypatch: pytest.MonkeyPatch, parts: int, pool: bool, case: Case) -> None:
    asked = []
    monkeypatch.setattr(forward, "segments_of", lambda p, c, sms: asked.append(p.cp.value) or parts)
    p = make(case)
    if pool:
        held(p, run_prefill(p, "portable", cp_mode="auto"), reference(p, gradients=False))
    else:
        held(p, run_chunk(p, "portable", gradients=False, cp_mode="auto"), reference(p, gradients=False))
        got = chunk(p, implementation="portable", cp_mode="auto")[0]
        assert not got[:, sum(case.lengths or (case.T,)) :].any()
    assert asked


def test_rows_behind_the_last_boundary_are_zeros_in_outputs_and_gradients() -> None:
    case = Case(T=58, K=16, V=16, lengths=PACKED, gate="slopes_alibi")
    p = make(case)
    more = {n: torch.cat([getattr(p, n), normal(1, 40, *getattr(p, n).shape[2:])], 1) for n in "qkv"}
    longer = p.map(lambda x: x, **more)
    out, state = chunk(longer, implementation="portable")
    short, same = chunk(p, implementation="portable")
    assert bits_equal(out[:, :58], short) and bits_equal(state, same) and not out[:, 58:].any()
    leaves = [x.requires_grad_() for x in longer.operands()]
    for grad in torch.autograd.grad(chunk(longer, implementation="portable")[0].sum(), leaves):
        assert not grad[:, 58:].any() and bool(grad.isfinite().all())


def test_no_output_depends_on_later_tokens_or_the_batch() -> None:
    p = make(Case(B=3, T=70, K=16, V=16, gate="slopes_weak"))
    whole, state = chunk(p, implementation="portable", cp_mode=False)
    for cut in (1, 13, 64):
        changed = {n: getattr(p, n).clone() for n in p.names}
        for x in changed.values():
            x[:, cut:] = 0.5
        other = chunk(p.map(lambda x: x, **changed), implementation="portable")[0]
        assert bits_equal(other[:, :cut], whole[:, :cut])
        assert bits_equal(chunk(p.tokens(0, cut), implementation="portable")[0], whole[:, :cut])
    one = p.map(lambda x: x[1:2] if x.dim() > 1 else x)
    alone, last = chunk(one, implementation="portable")
    assert bits_equal(alone, whole[1:2]) and bits_equal(last, state[1:2])


def test_views_and_slopes_of_any_stride() -> None:
    p = make(Case(T=40, K=16, V=16, H=2, HV=2, gate="slopes_fla"))
    views = dict(zip("qkv", torch.cat(p.operands(), -1).split(16, -1), strict=True))
    expected = chunk(p, implementation="portable")
    strided = p.map(lambda x: x, **views, slopes=p.slopes.double().repeat_interleave(2)[::2])
    assert all(map(bits_equal, chunk(strided, implementation="portable"), expected))


def test_a_slow_decay_stays_that_decay() -> None:
    T, slope = 1 << 13, 1e-4
    k = torch.zeros(1, T, 1, 16)
    k[:, 0] = 1.0
    one = torch.ones(1, T, 1, 16)
    p = make(Case(T=T, K=16, V=16, gate="slopes_zero", state=False)).map(lambda x: x, k=k, v=one)
    last = chunk(p, slopes=torch.tensor([slope]), implementation="portable")[1]
    exact = torch.exp(-torch.tensor([slope]).double() * (T - 1))
    assert bool(((last.double() / exact - 1).abs() <= 1e-6).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_checkpoints_and_null_indices(dtype: torch.dtype) -> None:
    case = Case(T=58, K=16, V=24, lengths=(17, 1, 40), gate="slopes_fla")
    p = make(case)
    results = []
    for name in ("portable", "eager"):
        pool = normal(6, 1, 24, 16, seed=3).to(dtype)
        rows = torch.full((5, 1, 24, 16), 7.0, dtype=dtype)
        out = serve(
            "prefill", p, cu_seqlens=p.cu_seqlens, state_pool=pool, implementation=name,
            read_indices=torch.tensor([4, -1, 0], dtype=torch.int32),
            write_indices=torch.tensor([2, 5, -1], dtype=torch.int32),
            has_initial_state=torch.tensor([True, True, False]),
            checkpoints=rows, checkpoint_every=16, checkpoint_offsets=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
        )  # fmt: skip
        results.append((out, pool, rows))
    start = normal(6, 1, 24, 16, seed=3).to(dtype)
    assert bits_equal(results[0][1][[0, 1, 3, 4]], start[[0, 1, 3, 4]])
    for got, truth in zip(*results, strict=True):
        assert relative_error(got, truth) <= (1e-5 if got.dtype == torch.float32 else 8e-3)


def test_a_gradient_alone_and_a_final_states_alone() -> None:
    p = make(Case(T=40, K=16, V=24, lengths=(0, 17, 23), gate="slopes_mixed", H=1, HV=2))
    for through in ("o", "state"):
        grads = []
        for name in ("portable", "eager"):
            leaves = {n: x.clone().requires_grad_() for n, x in p.inputs().items()}
            o, last = chunk(p.map(lambda x: x, **leaves), implementation=name)
            y, d = (o, p.do) if through == "o" else (last, p.dht)
            grads.append(torch.autograd.grad(y, list(leaves.values()), d, materialize_grads=True))
        for got, truth in zip(*grads, strict=True):
            assert relative_error(got, truth) <= 2e-5 or (not truth.any() and not got.any())
