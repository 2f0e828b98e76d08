"""chunk_lightning_attn and lightning_prefill: slopes, states, checkpoints, packing, bad input."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make, normal
from cula.checks.runs import chunk, errors, limits, reference, run_chunk, serve
from cula.checks.tolerance import bits_equal, relative_error
from cula.lightning import chunk_lightning_attn, lightning_slopes

CASE = Case(B=2, T=70, H=1, HV=2, K=16, V=20, gate="slopes_mixed")
PACKED = CASE.replace(B=1, T=100, lengths=(17, 0, 64, 16))
EVERY = [CASE, PACKED]
cases = pytest.mark.parametrize("case", EVERY, ids=["batch", "packed"])


# ---- slopes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [None, -8, -4, -1, 0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_slopes_from_a_256th_to_8_and_zero(on_lightning_chunk, exponent: int | None, dtype: str) -> None:
    p = make(Case(T=300, H=1, HV=1, K=16, V=16, gate="slopes_zero", dtype=dtype))
    slope = 0.0 if exponent is None else 2.0**exponent
    p = p.map(lambda x: x, slopes=torch.full((1,), slope))
    got = run_chunk(p, on_lightning_chunk.name)
    found, allowed = errors(p, got, reference(p)), limits(p, got)
    assert all(found[name] <= allowed[name] for name in found), found


@pytest.mark.parametrize("slope", [1e-5, 4e-7])
def test_a_decay_of_almost_one_stays_that_decay_for_a_hundred_thousand_tokens(on_lightning_chunk, slope) -> None:
    """exp(-slope) rounded to fp32 and taken 2^17 times would be off by 1e-3."""
    T = 1 << 17
    one = torch.zeros(1, T, 1, 1)
    k = one.clone()
    k[:, 0] = 1.0
    state = torch.zeros(1, 1, 1, 1)
    o, last = chunk_lightning_attn(
        one + 1, k, one + 1, scale=1.0, slopes=torch.tensor([slope]), initial_state=state, output_final_state=True,
        implementation=on_lightning_chunk.name,
    )  # fmt: skip
    exact = math.exp(-float(torch.tensor([slope])) * (T - 1))
    assert abs(float(last) / exact - 1) <= 1e-5 and abs(float(o[0, -1]) / exact - 1) <= 1e-5


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_slopes_of_any_dtype_stride_and_by_layer(on_lightning_chunk, kind: torch.dtype) -> None:
    p = make(CASE.replace(H=2, HV=4))
    slopes = lightning_slopes(4, 3, 12).to(p.q.device, kind)
    named = {"implementation": on_lightning_chunk.name, "output_final_state": True, "initial_state": p.h0}
    expected = chunk_lightning_attn(*p.operands(), slopes=slopes, **named)
    strided = slopes.repeat_interleave(3)[::3]
    assert all(map(bits_equal, chunk_lightning_attn(*p.operands(), slopes=strided, **named), expected))
    if kind == torch.float32:
        assert all(map(bits_equal, chunk_lightning_attn(*p.operands(), 3, 12, **named), expected))


# ---- states, layouts, memory -------------------------------------------------------------------------------------


@cases
def test_the_other_layout_is_the_transposed_state(on_lightning_chunk, case: Case) -> None:
    p = make(case)
    o, last = chunk(p, implementation=on_lightning_chunk.name)
    turned = chunk(p, initial_state=p.h0.mT.contiguous(), state_v_first=True, implementation=on_lightning_chunk.name)
    assert bits_equal(turned[0], o) and bits_equal(turned[1], last.mT.contiguous()) and last.is_contiguous()
    assert chunk(p, output_final_state=False, implementation=on_lightning_chunk.name)[1] is None


@cases
def test_strides_inputs_and_fresh_outputs(on_lightning_chunk, case: Case) -> None:
    p = make(case)
    expected = chunk(p, implementation=on_lightning_chunk.name)
    rows = torch.cat([p.q.flatten(2), p.k.flatten(2), p.v.flatten(2)], -1)
    q, k, v = rows.split([16, 16, 40], -1)
    views = {"q": q.unflatten(2, (1, 16)), "k": k.unflatten(2, (1, 16)), "v": v.unflatten(2, (2, 20))}
    turned = {n: getattr(p, n).transpose(2, 3).contiguous().transpose(2, 3) for n in p.names}
    for change in (views, turned):
        copies = [x.clone() for x in change.values()]
        got = chunk(p.map(lambda x: x, **change), implementation=on_lightning_chunk.name)
        assert all(map(bits_equal, got, expected)) and got[0].data_ptr() != expected[0].data_ptr()
        assert all(map(bits_equal, change.values(), copies))


def test_grouped_heads_are_repeated_heads_and_their_gradients_sums(on_lightning_chunk) -> None:
    p = make(CASE.replace(H=2, HV=6, dtype="fp64", gate="slopes_fla"))
    wide = p.map(lambda x: x, q=p.q.repeat_interleave(3, 2), k=p.k.repeat_interleave(3, 2))
    few, many = run_chunk(p, on_lightning_chunk.name), run_chunk(wide, on_lightning_chunk.name)
    assert bits_equal(few["o"], many["o"]) and bits_equal(few["dv"], many["dv"])
    for name in ("dq", "dk"):
        summed = many[name].unflatten(2, (2, 3)).sum(3)
        assert relative_error(few[name], summed) <= 1e-12


def test_gradients_alone_and_of_what_is_asked(on_lightning_chunk) -> None:
    p = make(PACKED)
    full = run_chunk(p, on_lightning_chunk.name)
    for name in ("q", "k", "v", "h0"):
        leaf = getattr(p, name).clone().requires_grad_()
        o, last = chunk(p.map(lambda x: x, **{name: leaf}), implementation=on_lightning_chunk.name)
        (grad,) = torch.autograd.grad([o, last], [leaf], [p.do, p.dht])
        assert bits_equal(grad, full[f"d{name}"])
    leaf = p.h0.clone().requires_grad_()
    o, last = chunk(p.map(lambda x: x, h0=leaf), implementation=on_lightning_chunk.name)
    (grad,) = torch.autograd.grad(last, leaf, p.dht)
    decay = torch.exp(-p.slopes[None, :, None, None] * torch.tensor(p.case.lengths)[:, None, None, None])
    assert relative_error(grad, (p.dht * decay).double()) <= 1e-6
    with pytest.raises(RuntimeError):
        (grad,) = torch.autograd.grad(chunk(p.map(lambda x: x, h0=leaf))[0].sum(), leaf, create_graph=True)
        grad.sum().backward()


def test_a_non_contiguous_and_an_expanded_grad_output(on_lightning_chunk) -> None:
    p = make(CASE)
    for do in (torch.ones(1).expand(p.v.shape), p.do.transpose(1, 2).contiguous().transpose(1, 2)):
        leaves = [getattr(p, n).clone().requires_grad_() for n in p.names]
        o = chunk(p.map(lambda x: x, **dict(zip(p.names, leaves))), implementation=on_lightning_chunk.name)[0]
        same = torch.autograd.grad(o, leaves, do, retain_graph=True)
        assert all(map(bits_equal, same, torch.autograd.grad(o, leaves, do.contiguous())))


# ---- pools and checkpoints ---------------------------------------------------------------------------------------


def test_prefill_reads_and_writes_slots(on_lightning_prefill) -> None:
    p = make(PACKED.replace(v_first=True))
    name = on_lightning_prefill.name
    pool = normal(9, 2, 20, 16, seed=4)
    pool[3] = math.nan
    before = pool.clone()
    out = serve(
        "prefill", p, state_pool=pool, read_indices=torch.tensor([5, 3, -1, 3]), cu_seqlens=p.cu_seqlens,
        write_indices=torch.tensor([2, 99, 5, -1]), implementation=name,
        has_initial_state=torch.tensor([True, False, True, False]), out=torch.full_like(p.v, math.nan),
    )  # fmt: skip
    h0 = torch.stack([before[5], *[torch.zeros(2, 20, 16)] * 3])
    o, last = chunk(p.map(lambda x: x, h0=h0), implementation=name)
    assert bits_equal(out, o) and not out[:, 97:].any()
    assert bits_equal(pool[[2, 5]], last[[0, 2]])
    rest = [0, 1, 3, 4, 6, 7, 8]
    assert bits_equal(pool[rest], before[rest])


def checkpoints(p: Problem, every: int, first: list[int] | None, name: str, kind: torch.dtype) -> int:
    """How many checkpoints the call left, each of them what the truncated call leaves, in bits."""
    rows = torch.full((40, 2, 20, 16), math.nan, dtype=kind)
    pool = normal(p.case.N, 2, 20, 16, seed=4, dtype=kind)
    offsets = torch.arange(0, 10 * p.case.N + 1, 10, device="cpu")
    positions = None if first is None else torch.tensor(first, device="cpu")
    serve(
        "prefill", p, state_pool=pool.clone(), cu_seqlens=p.cu_seqlens, checkpoints=rows, checkpoint_every=every,
        checkpoint_offsets=offsets, position_offsets=positions, implementation=name,
    )  # fmt: skip
    kept = 0
    for n, (b, start, end) in enumerate(p.spans()):
        place = 0 if first is None else first[n]
        row = 10 * n
        for done in range(1, end - start + 1):
            if (place + done) % every == 0:
                one = p.map(
                    lambda x: x, cu_seqlens=None, **{m: getattr(p, m)[b : b + 1, start : start + done] for m in p.names}
                )
                cut = pool[n : n + 1].clone()
                serve("prefill", one, state_pool=cut, implementation=name)
                assert bits_equal(rows[row], cut[0]), (n, done)
                row, kept = row + 1, kept + 1
        assert bool(rows[row : 10 * n + 10].isnan().all())
    return kept


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every, first", [(16, None), (64, None), (32, "some"), (16, "some")], ids=str)
@cases
def test_each_checkpoint_is_what_the_truncated_call_leaves(on_lightning_prefill, kind, every, first, case) -> None:
    p = make(case)
    first = None if first is None else [100, 7, 33, 5][: p.case.N]
    try:
        assert checkpoints(p, every, first, on_lightning_prefill.name, kind) >= 1
    except cula.NotSupportedError as error:
        assert on_lightning_prefill.name != "eager"
        pytest.skip(str(error))


# ---- bad input ---------------------------------------------------------------------------------------------------

BAD = [
    (lambda p: {"q": p.q[0]}, cula.ShapeError, "q"),
    (lambda p: {"k": p.k[:, 1:]}, cula.ShapeError, "k"),
    (lambda p: {"v": p.v[..., 0]}, cula.ShapeError, "v"),
    (lambda p: {"v": p.v.bfloat16()}, cula.DtypeError, "v"),
    (lambda p: {"slopes": None}, cula.RangeError, "layer_idx"),
    (lambda p: {"slopes": None, "layer_idx": 1}, cula.RangeError, "num_layers"),
    (lambda p: {"layer_idx": 1, "num_layers": 2}, cula.RangeError, "layer_idx"),
    (lambda p: {"slopes": None, "layer_idx": 2, "num_layers": 2}, cula.RangeError, "layer_idx"),
    (lambda p: {"slopes": None, "layer_idx": 1.0, "num_layers": 2}, cula.DtypeError, "layer_idx"),
    (lambda p: {"slopes": [0.0, 1.0]}, cula.DtypeError, "slopes"),
    (lambda p: {"slopes": p.slopes[:1]}, cula.ShapeError, "slopes"),
    (lambda p: {"slopes": p.slopes.int()}, cula.DtypeError, "slopes"),
    (lambda p: {"slopes": p.slopes.to("meta")}, cula.DeviceError, "slopes"),
    (lambda p: {"slopes": -p.slopes - 1}, cula.RangeError, "slopes"),
    (lambda p: {"slopes": p.slopes * math.nan}, cula.RangeError, "slopes"),
    (lambda p: {"slopes": p.slopes + math.inf}, cula.RangeError, "slopes"),
    (lambda p: {"slopes": p.slopes.clone().requires_grad_()}, cula.NotSupportedError, "slopes"),
    (lambda p: {"scale": math.nan}, cula.RangeError, "scale"),
    (lambda p: {"chunk_size": 48}, cula.RangeError, "chunk_size"),
    (lambda p: {"initial_state": p.h0.mT}, cula.ShapeError, "state_v_first"),
    (lambda p: {"initial_state": p.h0.bfloat16()}, cula.DtypeError, "initial_state"),
    (lambda p: {"cu_seqlens": torch.tensor([0, 5])}, cula.ShapeError, "batch"),
    (lambda p: {"cp_mode": "force"}, cula.NotSplittableError, "cp_mode"),
    (lambda p: {"cp_context": object()}, cula.NotSupportedError, "cp_context"),
    (lambda p: {"implementation": "sm90"}, cula.NotSupportedError, "sm90"),
    (lambda p: {"implementation": "fastest"}, cula.RangeError, "implementation"),
]


@pytest.mark.parametrize("change, error, name", BAD, ids=[f"{i}-{name}" for i, (_, _, name) in enumerate(BAD)])
def test_a_bad_call_is_one_sentence(change, error: type, name: str) -> None:
    p = make(CASE)
    change = change(p)
    inputs = {n: change.pop(n) for n in p.names if n in change}
    with pytest.raises(error, match=name) as caught:
        chunk(p.map(lambda x: x, **inputs), **change)
    assert "\n" not in str(caught.value)


def test_unknown_arguments_are_type_errors() -> None:
    p = make(CASE)
    with pytest.raises(TypeError):
        chunk_lightning_attn(*p.operands(), 0, 1, use_gate_in_kernel=True)
    with pytest.raises(TypeError):
        cula.explain("lightning_decode", flags={"rollback": None})
