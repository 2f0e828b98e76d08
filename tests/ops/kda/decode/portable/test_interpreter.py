"""The portable decode kernel in Triton's interpreter, through the public functions, against the float64 reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cula.checks.cases import Case, Problem, make, normal
from cula.checks.runs import errors, limits, reference, run_decode, run_recurrent, run_verify, serve
from cula.checks.tolerance import bits_equal, relative_error

pytestmark = pytest.mark.usefixtures("interpreted")

CASE = Case(B=3, T=1, H=1, HV=2, K=24, V=20, gate="softplus", beta="logits", l2norm=True, v_first=True)
SLOTS = 9
INDEX = [6, 2, 5]

CASES = [
    Case(B=2, T=2, K=16, V=16, gate="softplus"),
    Case(B=1, T=2, K=128, V=24, H=1, HV=2, gate="sigmoid", beta="logits", l2norm=True),
    Case(B=2, T=2, K=64, V=40, dtype="fp16", gate="softplus", beta="logits", l2norm=True),
    Case(B=1, T=2, K=256, V=12, gate="sigmoid_bare", beta="logits_doubled", l2norm=True),
    Case(B=2, T=3, K=40, V=3, gate="sigmoid_no_A", gates="same", dtype="fp16"),
    Case(B=1, T=3, K=1, V=1, gate="softplus_nobias", l2norm=True, beta="two"),
    Case(B=1, T=3, K=16, V=16, gate="softplus_wall", beta="one"),
    Case(B=1, T=3, K=16, V=16, gate="sigmoid_full", beta="zero", scale=0.0),
    Case(B=1, T=3, K=16, V=16, gate="channels", scale=0.3),
]
RAGGED = Case(T=22, lengths=(3, 0, 1, 16), K=24, V=20, H=1, HV=2, gate="sigmoid", beta="logits", l2norm=True)


def held(p: Problem, got: dict, truth: dict) -> None:
    found, limit = errors(p, got, truth), limits(p, got)
    assert all(found[name] <= limit[name] for name in found), (found, limit)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_and_verify_are_the_reference_and_each_other_in_bits(case: Case) -> None:
    p = make(case)
    truth = reference(p, gradients=False)
    decode, verify = run_decode(p, "portable"), run_verify(p, "portable")
    held(p, decode, truth)
    assert all(bits_equal(decode[name], verify[name]) for name in decode)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("lengths", [None, (0, 17, 3, 0)], ids=["batch", "packed"])
def test_recurrent_is_the_reference(v_first: bool, state: bool, lengths: tuple | None) -> None:
    case = Case(B=1 if lengths else 2, T=20, K=24, V=20, HV=2, gate="softplus", lengths=lengths, state=state)
    p = make(case.replace(v_first=v_first))
    held(p, run_recurrent(p, "portable"), reference(p, gradients=False))


def test_ragged_drafts_are_the_reference() -> None:
    p = make(RAGGED)
    held(p, run_verify(p, "portable"), reference(p, gradients=False))


def pool_of(p: Problem, dtype: torch.dtype = torch.float32, slots: int = SLOTS) -> torch.Tensor:
    return normal(slots, p.case.HV, p.case.V, p.case.K, seed=5, dtype=dtype)


def decode(p: Problem, pool: torch.Tensor, index, **options) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    return serve("kda_decode", p, state_pool=pool, state_indices=index, implementation="portable", **options)


def verify(p: Problem, pool: torch.Tensor, index, **options) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    flags = {"cu_seqlens": p.cu_seqlens, "implementation": "portable", **options}
    return serve("kda_verify", p, state_pool=pool, state_indices=index, **flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
def test_every_state_of_a_draft_is_decodes_in_bits(dtype: torch.dtype) -> None:
    p = make(CASE.replace(T=4))
    stepped, pool, kept = pool_of(p, dtype), pool_of(p, dtype), pool_of(p, dtype, 12).fill_(math.nan)
    slots = torch.arange(12).view(4, 3).t()
    keep = {"states_out": kept, "states_out_indices": slots, "update_state": True}
    out = verify(p, pool, INDEX, **keep)
    for t in range(4):
        assert bits_equal(decode(p.tokens(t, t + 1), stepped, INDEX), out[:, t : t + 1])
        assert bits_equal(kept[slots[:, t]], stepped[INDEX])
    assert bits_equal(pool, stepped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_kept_in_another_type(dtype: torch.dtype) -> None:
    p = make(CASE.replace(T=2, K=64))
    fine, other = (torch.full((6, 2, 20, 64), math.nan, dtype=x) for x in (torch.float32, dtype))
    slots = torch.arange(6).view(3, 2)
    outs = [verify(p, pool_of(p), INDEX, states_out=x, states_out_indices=slots) for x in (fine, other)]
    assert bits_equal(*outs)
    assert relative_error(other, fine.double()) <= 8e-3


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("null, index", [(-1, [3, -1, 99]), (0, [0, 5, -7]), (5, [5, 5, 1])], ids=str)
def test_rows_that_read_null_give_zeros_and_touch_nothing(null: int, index: list[int], kind: torch.dtype) -> None:
    p, pool = make(CASE), None
    dead = [n for n, i in enumerate(index) if i == null or not 0 <= i < SLOTS]
    pool, expected = pool_of(p), pool_of(p)
    table = torch.full((3, 2), 77, dtype=kind)
    table[:, 1] = torch.tensor(index)
    spare = [8 - n if n in dead else i for n, i in enumerate(index)]
    right = decode(p, expected, spare)
    for x in p.five():
        x[dead] = math.nan
    out = torch.full_like(p.v, math.nan)
    assert decode(p, pool, table[:, 1], null_index=null, out=out) is out
    alive = [n for n in range(3) if n not in dead]
    assert not out[dead].any() and bits_equal(out[alive], right[alive])
    written = [index[n] for n in alive]
    rest = [i for i in range(SLOTS) if i not in written]
    assert bits_equal(pool[written], expected[written]) and bits_equal(pool[rest], pool_of(p)[rest])
    wide = {"cu_seqlens": torch.tensor([0, 1, 2, 3]), "update_state": True, "null_index": null}
    flat = p.map(lambda x: x, **{n: getattr(p, n).transpose(0, 1) for n in ("q", "k", "v", "g", "beta")})
    again = pool_of(p)
    packed = verify(flat, again, table[:, 1], **wide)
    assert bits_equal(packed.transpose(0, 1).contiguous(), out) and bits_equal(again, pool)


def test_slots_to_write_and_accepted_columns() -> None:
    p = make(CASE)
    pool, inplace = pool_of(p), pool_of(p)
    out = decode(p, inplace, INDEX)
    write = torch.tensor([7, -1, 99])
    assert bits_equal(decode(p, pool, INDEX, write_indices=write), out)
    assert bits_equal(pool[7], inplace[6]) and bits_equal(pool[:7], pool_of(p)[:7])
    table = torch.tensor([[1, 6, 3], [2, 4, 0], [8, 7, 5]], dtype=torch.int32)
    for accepted in ([2, 1, 3], [2, -9, 40]):
        accepted = torch.tensor(accepted)
        fresh = pool_of(p)
        got = decode(p, fresh, table, num_accepted_tokens=accepted, write_indices=torch.tensor(INDEX))
        assert bits_equal(got, out) and bits_equal(fresh, inplace)
        assert bits_equal(verify(p, fresh.copy_(pool_of(p)), table, num_accepted_tokens=accepted), out)
        assert bits_equal(fresh, pool_of(p))


def test_a_null_row_writes_no_given_slot() -> None:
    p = make(CASE)
    pool = pool_of(p)
    assert not decode(p, pool, [-1, -1, -1], write_indices=torch.tensor([1, 2, 3])).any()
    assert bits_equal(pool, pool_of(p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_of_any_strides(dtype: torch.dtype) -> None:
    p = make(CASE.replace(K=32))
    plain = pool_of(p, dtype)
    expected = plain.clone()
    out = decode(p, expected, INDEX)
    shapes = [(SLOTS, 5, 20, 32), (SLOTS, 2 * 20 * 32 + 24), (SLOTS, 2, 20, 64), (2, SLOTS, 32, 20)]
    bases = [torch.full(shape, math.nan, dtype=dtype) for shape in shapes]
    views = [
        bases[0][:, 1:3], bases[1][:, 8 : 8 + 1280].view(SLOTS, 2, 20, 32), bases[2][..., ::2],
        bases[3].transpose(0, 1).mT,
    ]  # fmt: skip
    for base, pool in zip(bases, views):
        pool.copy_(plain)
        around = base.clone()
        assert bits_equal(decode(p, pool, INDEX), out) and bits_equal(pool.contiguous(), expected)
        torch.as_strided(around, pool.shape, pool.stride(), pool.storage_offset()).copy_(expected)
        assert bits_equal(base, around), "what lies between slots was written"


def test_views_of_one_projection_and_a_strided_out() -> None:
    p = make(CASE.replace(T=3, K=16, V=16))
    packed = torch.cat([p.q.flatten(2), p.k.flatten(2), p.v.flatten(2), p.g.flatten(2), p.beta], -1)
    sizes = [16, 16, 32, 32, 2]
    q, k, v, g, beta = (x.unflatten(-1, (-1, 16)) if x.shape[-1] > 2 else x for x in packed.split(sizes, -1))
    wide = torch.full((3, 3, 6, 16), math.nan)
    out = wide[:, :, 1:3]
    expected = verify(p, pool_of(p), INDEX)
    assert verify(p.map(lambda x: x, q=q, k=k, v=v, g=g, beta=beta), pool_of(p), INDEX, out=out) is out
    assert bits_equal(out.contiguous(), expected) and wide[:, :, [0, 3, 4, 5]].isnan().all()
    odd = p.map(lambda x: x, g=p.g[..., :1].expand_as(p.g), q=p.q.mT.contiguous().mT)
    dense = p.map(lambda x: x, g=odd.g.contiguous())
    assert bits_equal(verify(odd, pool_of(p), INDEX), verify(dense, pool_of(p), INDEX))


def test_both_forms_of_decode_give_the_same_bits() -> None:
    p = make(CASE)
    tall, wide = pool_of(p), pool_of(p)
    out = decode(p, tall, INDEX)
    flat = p.map(lambda x: x, **{n: getattr(p, n).transpose(0, 1) for n in ("q", "k", "v", "g", "beta")})
    assert bits_equal(decode(flat, wide, INDEX).transpose(0, 1).contiguous(), out) and bits_equal(tall, wide)


def test_calls_that_look_alike_are_still_themselves() -> None:
    """The second call of a form goes by what the first left: other strides, slots and values must count."""
    p = make(CASE)
    for n in (2, 3, 2):
        part = p.map(lambda x: x, **{f: getattr(p, f)[3 - n :] for f in ("q", "k", "v", "g", "beta")})
        strided = {f: torch.stack([getattr(part, f)] * 2, 2).select(2, 1) for f in ("q", "v", "beta")}
        results = []
        for problem in (part, part.map(lambda x: x, **strided), part):
            pool = pool_of(p)
            results.append((decode(problem, pool, INDEX[3 - n :]), pool))
        for out, pool in results[1:]:
            assert bits_equal(out, results[0][0]) and bits_equal(pool, results[0][1])


def test_boundaries_that_only_a_device_knows_are_clamped() -> None:
    from cula.ops.kda.decode.eager import stepwise
    from cula.ops.kda.decode.parse import ServingArguments, parse_serving
    from cula.ops.kda.decode.portable import launch
    from cula.ops.kda.problem import ActivationArguments

    p = make(Case(T=12, lengths=(3, 4, 5), K=16, V=16))
    for bounds in ([0, 9, 4, 30], [-5, 2, 1, 3], [0, 12, 12, 12], [4, 5, 6, 7], [0, 0, 0, 0], [20, 20, 20, 20]):
        results = []
        for run in (stepwise.run, launch.run):
            pool, out = pool_of(p), torch.full_like(p.v, math.nan)
            problem, x = parse_serving(
                *p.five(), ActivationArguments(False, False, False), ServingArguments(None, False, -1, out),
                pool=pool, indices=torch.tensor(INDEX), accepted=None, cu_seqlens=p.cu_seqlens,
            )  # fmt: skip
            x.update_state, x.boundaries, x.cu_seqlens = True, None, torch.tensor(bounds)
            run(dataclasses.replace(problem, lengths=None, tokens=5), x)
            results.append((out, pool))
        for (a, b), name in zip(zip(*results), ("out", "pool")):
            assert relative_error(b, a.double()) <= 1e-5, (bounds, name)


def test_more_sequences_than_one_look_at_the_boundaries() -> None:
    lengths = tuple(n % 3 for n in range(130))
    p = make(Case(T=sum(lengths) + 2, lengths=lengths, K=16, V=1))
    pool, apart = pool_of(p, slots=130), pool_of(p, slots=130)
    out = verify(p, pool, list(range(130)), update_state=True)
    expected = serve(
        "kda_verify", p, state_pool=apart, state_indices=torch.arange(130), cu_seqlens=p.cu_seqlens,
        update_state=True, implementation="eager",
    )  # fmt: skip
    assert relative_error(out, expected.double()) <= 1e-5 and relative_error(pool, apart.double()) <= 1e-5
    assert not out[:, -2:].any()


def test_offsets_beyond_two_to_the_31_elements() -> None:
    p = make(CASE.replace(B=1, T=2, HV=1, K=16, V=16))
    plain, far = normal(2, 1, 16, 16, seed=1), 2**31 + 64
    pool = torch.as_strided(torch.empty(far + 512), plain.shape, (far, 256, 16, 1)).copy_(plain)
    q = torch.as_strided(torch.empty(far + 64), p.q.shape, (far, far, 16, 1)).copy_(p.q)
    expected = plain.clone()
    outs = [verify(x, y, [1], update_state=True) for x, y in ((p, expected), (p.map(lambda x: x, q=q), pool))]
    assert bits_equal(*outs) and bits_equal(pool.contiguous(), expected)


@pytest.mark.parametrize("function", ["kda_decode", "kda_verify", "fused_recurrent_kda"])
def test_no_rows(function: str) -> None:
    from cula.kda import fused_recurrent_kda

    p = make(CASE.replace(B=0))
    pool = pool_of(p)
    if function == "fused_recurrent_kda":
        options = {"A_log": p.A_log, "dt_bias": p.dt_bias, "initial_state": p.h0, "implementation": "portable"}
        o, state = fused_recurrent_kda(*p.five(), **p.flags(), **options)
        assert o.shape == p.v.shape and state.shape == p.h0.shape
        o, state = fused_recurrent_kda(*(x[:, :0] for x in make(CASE).five()), output_final_state=True,
                                       implementation="portable")  # fmt: skip
        assert o.shape == (3, 0, 2, 20) and state.shape == (3, 2, 24, 20) and not state.any()
        return
    out = serve(
        function, p, state_pool=pool, state_indices=torch.zeros(0, dtype=torch.int64), implementation="portable"
    )
    assert out.shape == p.v.shape and bits_equal(pool, pool_of(p))


def test_a_known_launch_passes_what_the_kernel_takes_in_its_order() -> None:
    """The second launch of a form gives everything by position."""
    from cula.ops.kda.decode.portable import launch, step

    seen = []

    class Kernel:
        packed_metadata = None

        def __getitem__(self, grid):
            return lambda *args, **named: seen.append((grid, args, named)) or self

    names = list(step.step_kernel.arg_names)
    count = names.index("q_n")
    constants = names[count + len(step.INTEGERS) + 2 :]
    tensors = tuple(torch.zeros(4) for _ in range(count))
    integers, kernel = tuple(range(len(step.INTEGERS))), Kernel()
    made = launch.Launch(kernel, (1, 1, 1), integers, (0.5, -5.0), dict.fromkeys(constants, 7), launch.ALIGNED)
    made.run(tensors)
    assert made.kernel is kernel
    made.run(tensors)
    made.run((torch.zeros(5)[1:], *tensors[1:]))
    (_, first, named), (_, second, nothing), (_, third, again) = seen
    assert second == (*first, *(7 for _ in constants)) and not nothing
    assert dict(zip(names, second))["null_index"] == step.INTEGERS.index("null_index")
    assert list(named)[: len(constants)] == constants and third[1:] == first[1:] and again == named
    asked = [names[i] for i in launch.ALIGNED]
    assert asked == ["q", "k", "v", "g", "dt_bias", "o", "source", "target", "kept", "roll_k", "roll_u", "roll_g"]
    assert set(names[:count]) - set(asked) == set(step.SCALARS)
    p = make(CASE)
    x = _operands(p)
    assert list(launch.prepare(*x).constants) == constants
    assert len(launch.prepare(*x).integers) == len(step.INTEGERS)


def _operands(p: Problem):
    from cula.ops.kda.decode.parse import ServingArguments, parse_serving
    from cula.ops.kda.decode.portable.launch import INDEX as BY_INDEX
    from cula.ops.kda.decode.portable.launch import SAME
    from cula.ops.kda.problem import ActivationArguments

    pool = pool_of(p)
    problem, x = parse_serving(
        *p.five(), ActivationArguments(True, True, False, None, p.A_log, p.dt_bias),
        ServingArguments(None, True, -1, None), pool=pool, indices=torch.tensor(INDEX), accepted=None, one_token=True,
    )  # fmt: skip
    return problem, x, (p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.v, pool, pool, *[None] * 11), BY_INDEX, SAME
