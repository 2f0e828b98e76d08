"""Public faults 37 to 50: state layouts, strides, dtypes, aliasing, scales, head groups, head counts and sizes."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.poison import Poison
from cula.checks.runs import (
    chunk,
    errors,
    floors,
    fresh_pool,
    gradients_of,
    limits,
    reference,
    run_chunk,
    run_decode,
    run_prefill,
    run_recurrent,
    run_verify,
    serve,
)
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.kda import fused_recurrent_kda

pytestmark = pytest.mark.usefixtures("each_prefill")

NAMES = ("q", "k", "v", "g", "beta")


def assert_right(p: Problem, got: dict, truth: dict) -> None:
    allowed = limits(p, got)
    wrong = {n: f"{e:.1e}" for n, e in errors(p, got, truth).items() if not e <= allowed[n]}
    assert not wrong, f"{p.case.id}: {wrong}"


@pytest.mark.parametrize("K, V", [(32, 16), (16, 16), (16, 40)])
@pytest.mark.parametrize("v_first", [False, True])
def test_fault_37_prefill_then_decode_in_one_layout(K: int, V: int, v_first: bool) -> None:
    """Half by prefill or chunk, half by decode or recurrent, with a state that is not symmetric: the one-shot call."""
    p = make(Case(B=2, T=40, HV=2, K=K, V=V, gate="zero", v_first=v_first))
    truth = reference(p, gradients=False)
    _, middle = chunk(p.tokens(0, 20))
    rest = p.tokens(20, 40)
    o, last = fused_recurrent_kda(*rest.five(), **{**rest.flags(), "initial_state": middle})
    last = last.mT if v_first else last
    assert relative_error(o, truth["o"][:, 20:]) <= 1e-5 and relative_error(last, truth["final_state"]) <= 1e-5
    pool, index = fresh_pool(p)
    serve("kda_prefill", p.tokens(0, 20), state_pool=pool, read_indices=index)
    v_first_middle = middle if v_first else middle.mT
    assert relative_error(pool[index.long()], v_first_middle.double()) <= 1e-5
    for t in range(20, 40):
        serve("kda_decode", p.tokens(t, t + 1), state_pool=pool, state_indices=index)
    assert relative_error(pool[index.long()].mT, truth["final_state"]) <= 1e-5


def test_fault_38_the_layout_flag_has_one_name_and_feeds_back() -> None:
    """V-first is the transpose of K-first; the returned state is the next call's; the old name is a TypeError."""
    a, b = (make(Case(B=2, T=40, HV=2, K=16, V=24, v_first=flag)) for flag in (False, True))
    (_, first), (_, second) = chunk(a), chunk(b)
    assert relative_error(second.mT, first.double()) <= 1e-5
    for p, state in ((a, first), (b, second)):
        chunk(p, initial_state=state)
    with pytest.raises(cula.ShapeError, match="state_v_first"):
        chunk(a, initial_state=second)
    with pytest.raises(TypeError, match="transpose_state_layout"):
        chunk(a, transpose_state_layout=True)
    with pytest.raises(TypeError, match="transpose_state_layout"):
        chunk(a, state_v_first=True, transpose_state_layout=False)


def packed_projection(p: Problem) -> Problem:
    """q, k, v, g and beta as slices of one tensor, at an odd offset."""
    flat = [getattr(p, name).flatten(2) if name != "beta" else p.beta for name in NAMES]
    lead = torch.full((*p.q.shape[:2], 3), math.nan)
    whole = torch.cat([lead, *flat, lead], -1)
    parts = whole.split([3, *[x.shape[-1] for x in flat], 3], -1)[1:-1]
    shaped = [x.unflatten(-1, getattr(p, n).shape[2:]) if n != "beta" else x for n, x in zip(NAMES, parts)]
    return p.map(lambda x: x, **dict(zip(NAMES, shaped)))


def transposed_views(p: Problem) -> Problem:
    """[B, H, T, D] memory seen as [B, T, H, D]."""
    return p.map(lambda x: x, **{n: getattr(p, n).transpose(1, 2).contiguous().transpose(1, 2) for n in NAMES})


def last_dim_strided(p: Problem) -> Problem:
    """Channels two elements apart."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*x.shape, 2), math.nan, dtype=x.dtype)
        wide[..., 0] = x
        return wide[..., 0]

    return p.map(lambda x: x, **{n: spread(getattr(p, n)) for n in NAMES}, h0=spread(p.h0), A_log=spread(p.A_log))


@pytest.mark.parametrize("layout", [packed_projection, transposed_views, last_dim_strided], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fault_39_inputs_of_any_stride_are_the_contiguous_call(layout, dtype: str) -> None:
    """Every function, forward and gradients, bit for bit."""
    case = Case(B=2, T=20, H=1, HV=2, K=16, V=12, dtype=dtype, gates="same", gate="softplus", beta="logits")
    p = make(case)
    q = layout(p) if dtype == "fp32" else layout(make(case.replace(dtype="fp32"))).map(lambda x: x.to(torch.bfloat16))
    if dtype == "bf16":
        keep = {n: getattr(p, n) for n in ("h0", "dht", "do", "A_log", "dt_bias")}
        q = q.map(lambda x: x, case=case, **keep)
        p = q.map(lambda x: x.contiguous())
    short, short_q = p.tokens(0, 3), q.tokens(0, 3)
    pairs = [
        (run_chunk(p, fill=None), run_chunk(q, fill=None)),
        (run_prefill(p, fill=None), run_prefill(q, fill=None)),
        (run_recurrent(p, fill=None), run_recurrent(q, fill=None)),
        (run_decode(short, fill=None), run_decode(short_q, fill=None)),
        (run_verify(short, fill=None), run_verify(short_q, fill=None)),
    ]
    for plain, strided in pairs:
        for name, x in plain.items():
            assert bits_equal(strided[name], x), name


def test_fault_39_expanded_gates() -> None:
    """g and beta with stride 0, forward and gradients (which keep the expanded shape)."""
    p = make(Case(B=2, T=20, HV=2, K=16, V=12))
    wide = p.map(lambda x: x, g=p.g[:, :, :1, :1].expand_as(p.g), beta=p.beta[:, :1].expand_as(p.beta))
    dense = wide.map(lambda x: x.contiguous())
    for name, x in run_chunk(dense, fill=None).items():
        assert bits_equal(run_chunk(wide, fill=None)[name], x), name
    assert bits_equal(run_prefill(wide, fill=None)["o"], run_prefill(dense, fill=None)["o"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fault_40_a_strided_pool_is_updated_not_copied(dtype: torch.dtype) -> None:
    """A slice of heads of a wider pool: the caller's memory changes, the padding does not."""
    p = make(Case(B=2, T=1, HV=2, K=16, V=12, v_first=True))
    for function, options in (("kda_prefill", {}), ("kda_decode", {}), ("kda_verify", {"update_state": True})):
        wide = torch.randn(5, 6, 12, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        plain, before = wide[:, 2:4].clone(), wide.clone()
        pool = wide[:, 2:4]
        index = "read_indices" if function == "kda_prefill" else "state_indices"
        outs = [serve(function, p, state_pool=x, **{index: torch.tensor([3, 1])}, **options) for x in (pool, plain)]
        assert bits_equal(*outs) and bits_equal(wide[:, 2:4].contiguous(), plain), function
        assert not bits_equal(wide[[3, 1], 2:4].contiguous(), before[[3, 1], 2:4].contiguous()), function
        assert bits_equal(wide[:, [0, 1, 4, 5]], before[:, [0, 1, 4, 5]]), function


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_fault_41_each_dtype_is_itself(dtype: str) -> None:
    """Values whose fp16 bits read as bf16 would be finite and wrong; every function against the recurrence."""
    p = make(Case(B=2, T=16, HV=2, K=16, V=12, dtype=dtype, gates="same"))
    truth = reference(p)
    assert_right(p, run_chunk(p), truth)
    for run in (run_prefill, run_recurrent, run_decode, run_verify):
        assert_right(p, run(p), truth)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8, torch.complex64, torch.bool], ids=str)
def test_fault_41_other_dtypes_are_refused(kind: torch.dtype) -> None:
    """fp8, integers, complex numbers: a DtypeError that names what is taken."""
    p = make(Case(B=2, T=1, K=16, V=16))
    bad = p.map(lambda x: x, **{n: torch.zeros(getattr(p, n).shape).to(kind) for n in ("q", "k", "v")})
    pool, index = fresh_pool(p)
    with pytest.raises(cula.DtypeError, match="bf16"):
        chunk(bad)
    with pytest.raises(cula.DtypeError, match="bf16"):
        serve("kda_decode", bad, state_pool=pool, state_indices=index)


def test_fault_42_interleaved_dtypes_never_meet_each_others_code() -> None:
    """A (bf16 gate), B (fp32 gate), A, with biases and indices of both kinds: A keeps its bits."""
    a = make(Case(B=2, T=20, HV=2, K=16, V=16, dtype="bf16", gates="same", gate="softplus"))
    b = make(Case(B=2, T=20, HV=2, K=16, V=16, dtype="bf16", gate="softplus"))
    c = b.map(lambda x: x, dt_bias=b.dt_bias.bfloat16(), A_log=b.A_log.double())

    def all_calls(p: Problem, kind: torch.dtype) -> list[torch.Tensor]:
        pool, index = fresh_pool(p)
        out = serve("kda_decode", p.tokens(0, 1), state_pool=pool, state_indices=index.to(kind))
        return [*run_chunk(p, fill=None).values(), *run_prefill(p, fill=None).values(), out, pool[index.long()]]

    first = [all_calls(p, kind) for p in (a, b, c) for kind in (torch.int32, torch.int64)]
    again = [all_calls(p, kind) for p in (c, a, b) for kind in (torch.int64, torch.int32)]
    order = [3, 2, 5, 4, 1, 0]
    for i, found in zip(order, first):
        assert all(bits_equal(x, y) for x, y in zip(found, again[i]))
    for p in (a, b, c):
        assert_right(p, run_chunk(p), reference(p))


def test_fault_43_nothing_given_is_changed_by_forward_or_backward() -> None:
    """Inputs, initial state, boundaries and both cotangents keep their bytes."""
    poison = Poison(fill=1e30, gap=3)
    p = make(Case(T=70, lengths=(33, 0, 30), HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True))
    fields = (*p.inputs(), "cu_seqlens", "do", "dht")
    held = p.map(lambda x: x, **{n: poison.tensor(getattr(p, n), n) for n in fields})
    leaves = {n: getattr(held, n).detach().requires_grad_() for n in p.inputs()}
    outputs = list(chunk(held.map(lambda x: x, **leaves)))
    poison.check()
    grads = gradients_of(outputs, [held.do, held.dht], list(leaves.values()))
    for x in grads:
        x.fill_(7.0)
    poison.check()


@pytest.mark.parametrize("beta_dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_fault_44_decode_and_verify_round_beta_alike(beta_dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """One token through both, logits of each dtype: equal bits, outputs and states."""
    p = make(Case(B=4, T=1, HV=2, K=64, V=64, dtype="bf16", gate="sigmoid", beta="logits", l2norm=True))
    p = p.map(lambda x: x, beta=p.beta.to(beta_dtype))
    pools = [fresh_pool(p, dtype=pool_dtype) for _ in range(2)]
    (a, index), (b, _) = pools
    x = serve("kda_decode", p, state_pool=a, state_indices=index)
    y = serve("kda_verify", p, state_pool=b, state_indices=index, update_state=True)
    assert bits_equal(x, y) and bits_equal(a, b)


@pytest.mark.parametrize("logit, beta", [(math.inf, 1.0), (-math.inf, 0.0), (200.0, 1.0), (-200.0, 0.0)])
def test_fault_44_saturated_logits_are_exactly_0_and_1(logit: float, beta: float) -> None:
    """An adapter that inverts the sigmoid at 0 or 1 sends an infinite logit: no NaN, and beta is exact."""
    p = make(Case(B=2, T=20, HV=2, K=16, V=16, beta="logits", dtype="fp64"))
    raw = p.map(lambda x: x, beta=torch.full_like(p.beta, logit))
    done = make(p.case.replace(beta="uniform")).map(lambda x: x, q=p.q, k=p.k, v=p.v, g=p.g, h0=p.h0)
    done = done.map(lambda x: x, beta=torch.full_like(p.beta, beta))
    expected = chunk(done)
    for a, b in zip(chunk(raw), expected):
        assert relative_error(a, b) <= 1e-10
    for run in (run_prefill, run_recurrent):
        assert relative_error(run(raw)["o"], expected[0]) <= 1e-10


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_fault_45_norms_of_zero_and_of_almost_zero(dtype: str) -> None:
    """k = 0, k = 1e-20, q = 0: finite forward and gradients, equal to normalising outside with the same epsilon."""
    p = make(Case(B=2, T=20, HV=2, K=16, V=16, dtype=dtype, l2norm=True))
    p.k[:, 3] = 0.0
    p.k[:, 5] = 1e-20
    p.q[:, 7] = 0.0
    p.q[:, 3] = 1e-20
    truth = reference(p)
    got = run_chunk(p)
    assert all(bool(torch.isfinite(x).all()) for x in got.values())
    assert_right(p, got, truth)
    norm = {n: (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)) for n, x in (("q", p.q), ("k", p.k))}
    outside = chunk(p.map(lambda x: x, **norm), use_qk_l2norm_in_kernel=False)
    assert relative_error(got["o"], outside[0].double()) <= 2 * tolerance("o", p.q.dtype)
    for run in (run_prefill, run_recurrent, run_decode):
        assert_right(p, run(p), truth)


@pytest.mark.parametrize("scale", [None, 1.0, 0.1, 0.0, -2.0])
@pytest.mark.parametrize("K, V", [(16, 48), (48, 16)])
def test_fault_46_scale_multiplies_every_column_of_o(scale: float | None, K: int, V: int) -> None:
    """Every function, K above and below V, and a scale of zero that is not taken for 'not given'."""
    p = make(Case(B=2, T=16, HV=2, K=K, V=V, scale=scale))
    truth = reference(p)
    assert_right(p, run_chunk(p), truth)
    for run in (run_prefill, run_recurrent, run_decode, run_verify):
        got = run(p)
        assert_right(p, got, truth)
        assert got["o"].any() or scale == 0.0


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_fault_47_grouped_value_heads(group: int) -> None:
    """HV / H of 1 to 8 equals repeated q and k, and dq, dk are the group's sums."""
    p = make(Case(B=2, T=40, H=2, HV=2 * group, K=16, V=12, dtype="fp64"))
    repeated = p.map(lambda x: x, q=p.q.repeat_interleave(group, 2), k=p.k.repeat_interleave(group, 2))
    got, wide = run_chunk(p), run_chunk(repeated)
    for name, x in wide.items():
        expected = x.unflatten(2, (2, group)).sum(3) if name in ("dq", "dk") else x
        assert relative_error(got[name], expected) <= 1e-10, name
    for run in (run_prefill, run_recurrent):
        assert relative_error(run(p)["o"], wide["o"]) <= 1e-10
    assert relative_error(run_decode(p.tokens(0, 3))["o"], wide["o"][:, :3]) <= 1e-10


def test_fault_47_heads_that_do_not_divide() -> None:
    """HV = 3 with H = 2 is refused by every function, and the message has both numbers."""
    p = make(Case(B=2, T=1, H=2, HV=4, K=16, V=16))
    odd = p.map(lambda x: x, v=p.v[:, :, :3], g=p.g[:, :, :3], beta=p.beta[:, :, :3], h0=None)
    pool, index = torch.zeros(3, 3, 16, 16), torch.tensor([0, 1])
    calls = [
        lambda: chunk(odd),
        lambda: fused_recurrent_kda(*odd.five()),
        lambda: serve("kda_prefill", odd),
        lambda: serve("kda_decode", odd, state_pool=pool, state_indices=index),
        lambda: serve("kda_verify", odd, state_pool=pool, state_indices=index),
    ]
    for call in calls:
        with pytest.raises(cula.ShapeError, match=r"H=2.*HV=3"):
            call()


@pytest.mark.parametrize("H", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96])
def test_fault_48_any_number_of_heads(H: int) -> None:
    """bf16 beta rows of any number of bytes, through every function."""
    p = make(Case(B=2, T=5, H=H, HV=H, K=8, V=8, dtype="bf16", gates="same", gate="sigmoid", beta="logits"))
    truth = reference(p)
    assert_right(p, run_chunk(p), truth)
    for run in (run_prefill, run_recurrent, run_decode, run_verify):
        assert_right(p, run(p), truth)


@pytest.mark.parametrize("K, V", [(1, 1), (8, 3), (32, 64), (64, 32), (96, 128), (128, 96), (192, 192), (256, 64)])
def test_fault_49_any_head_size(K: int, V: int) -> None:
    """K and V from 1 to 256, equal or not."""
    p = make(Case(B=1, T=20, H=1, HV=2, K=K, V=V, dtype="bf16"))
    truth = reference(p)
    assert_right(p, run_chunk(p), truth)
    for run in (run_prefill, run_recurrent, run_decode):
        assert_right(p, run(p), truth)


@pytest.mark.parametrize("T", [1, 16, 31, 33, 48, 65, 100])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_fault_50_every_chunk_size_at_every_tail(T: int, chunk_size: int) -> None:
    """A smaller chunk has fewer sub-blocks: forward and gradients."""
    p = make(Case(B=2, T=T, HV=2, K=16, V=16, chunk_size=chunk_size, gate="softplus"))
    assert_right(p, run_chunk(p), reference(p))


@pytest.mark.parametrize("chunk_size", [0, 1, 8, 17, 48, 128, -64, 64.0, "64", None])
def test_fault_50_other_chunk_sizes_are_refused(chunk_size) -> None:
    """16, 32 and 64 are all there is."""
    with pytest.raises(cula.CulaError, match="chunk_size"):
        chunk(make(Case(T=5)), chunk_size=chunk_size)


def test_the_floors_of_these_tests_are_small() -> None:
    p = make(Case(T=16, HV=2))
    truth = reference(p)
    assert all(floor <= 1e-3 for floor in floors(p, truth).values())
