"""The portable chunk kernels in Triton's interpreter, through the public functions, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from cula.checks.cases import Case, make, normal
from cula.checks.runs import chunk, errors, limits, reference, run_chunk, run_prefill, serve
from cula.checks.tolerance import bits_equal, relative_error

pytestmark = pytest.mark.usefixtures("interpreted")

PACKED = (0, 17, 1, 40, 0)

CASES = [
    Case(B=2, T=20, K=16, V=16, gate="softplus"),
    Case(T=70, K=24, V=40, H=1, HV=2, gate="sigmoid", beta="logits", l2norm=True),
    Case(T=70, K=64, V=24, dtype="fp16", gate="softplus", l2norm=True),
    Case(T=130, K=64, V=16, gate="mild", l2norm=True, v_first=True),
    Case(T=58, K=96, V=16, chunk_size=32, lengths=PACKED, gate="mild"),
    Case(T=58, K=40, V=24, chunk_size=16, lengths=PACKED, gate="sigmoid", H=1, HV=2, v_first=True, l2norm=True),
    Case(T=58, K=64, V=24, dtype="fp16", lengths=PACKED, gate="sigmoid_no_A", beta="logits", l2norm=True),
    Case(T=40, K=40, V=16, gate="softplus_nobias", beta="logits_doubled", state=False, l2norm=True),
    Case(T=66, K=64, V=16, gate="steep"),
    Case(T=66, K=64, V=16, gate="wall"),
    Case(T=66, K=64, V=16, gate="cliff15"),
    Case(T=66, K=64, V=16, dtype="fp16", gate="softplus_wall"),
    Case(T=66, K=64, V=16, dtype="fp16", gate="channels", l2norm=True),
    Case(T=66, K=64, V=16, gate="sigmoid_deep"),
    Case(T=1, K=16, V=16, gate="mild"),
]


def held(problem, got, truth) -> None:
    found, limit = errors(problem, got, truth), limits(problem, got)
    assert all(found[name] <= limit[name] for name in found), (found, limit)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_outputs_and_gradients_are_the_references(case: Case) -> None:
    p = make(case)
    held(p, run_chunk(p, "portable"), reference(p))


@pytest.mark.parametrize("case", [x for x in CASES if x.state], ids=lambda case: case.id)
def test_prefill_over_a_pool_is_the_reference(case: Case) -> None:
    p = make(case)
    held(p, run_prefill(p, "portable"), reference(p, gradients=False))


@pytest.mark.parametrize("gate", ["sigmoid", "sigmoid_full", "sigmoid_bare"])
@pytest.mark.parametrize(
    ("K", "l2norm", "chunk_size"), [(40, True, 64), (64, True, 16), (64, False, 64), (16, False, 64)]
)
@pytest.mark.usefixtures("bounded")
def test_blocks_of_rows_of_a_bounded_gate(gate: str, K: int, l2norm: bool, chunk_size: int) -> None:
    """The paths that bf16 takes with lower_bound >= -5, in float32: whole tiles of 32 and 16 rows, blocks."""
    p = make(Case(T=70, K=K, V=24, gate=gate, beta="logits", l2norm=l2norm))
    held(p, run_chunk(p, "portable", chunk_size=chunk_size), reference(p))


def test_rows_after_the_last_boundary_are_zeros() -> None:
    case = Case(T=58, K=16, V=16, lengths=PACKED, gate="softplus")
    p = make(case)
    more = {n: torch.cat([getattr(p, n), normal(1, 40, *getattr(p, n).shape[2:])], 1) for n in "qkvg"}
    beta = torch.cat([p.beta, torch.rand(1, 40, case.HV)], 1)
    longer = p.map(lambda x: x, beta=beta, case=case, **more)
    out, state = chunk(longer, implementation="portable")[:2]
    short, same = chunk(p, implementation="portable")[:2]
    assert bits_equal(out[:, :58], short)
    assert bits_equal(state, same)
    assert not out[:, 58:].any()
    leaves = [getattr(longer, n).requires_grad_() for n in ("q", "k", "v", "g", "beta")]
    for grad in torch.autograd.grad(chunk(longer, implementation="portable")[0].sum(), leaves):
        assert not grad[:, 58:].any()
        assert torch.isfinite(grad).all()


def test_no_output_depends_on_later_tokens_and_their_gates() -> None:
    p = make(Case(T=70, K=16, V=16, gate="softplus"))
    whole = chunk(p, implementation="portable")[0]
    for cut in (1, 13, 33):
        changed = {n: getattr(p, n).clone() for n in ("q", "k", "v", "g", "beta")}
        for n, x in changed.items():
            x[:, cut:] = 40.0 if n == "g" else 0.5
        other = chunk(p.map(lambda x: x, **changed), implementation="portable")[0]
        assert bits_equal(other[:, :cut], whole[:, :cut])


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    p = make(Case(B=3, T=40, K=24, V=16, gate="mild"))
    o, state = chunk(p, implementation="portable")[:2]
    one = p.map(lambda x: x[1:2] if x.shape[0] == 3 else x)
    alone, last = chunk(one, implementation="portable")[:2]
    assert bits_equal(alone, o[1:2])
    assert bits_equal(last, state[1:2])


def test_a_closed_gate_lets_nothing_through() -> None:
    p = make(Case(T=40, K=16, V=16, gate="zero"))
    g = p.g.clone()
    g[:, 20] = -1e4
    p = p.map(lambda x: x, g=g)
    changed = p.map(lambda x: x, h0=p.h0 * 100.0, v=torch.cat([p.v[:, :20] * 100.0, p.v[:, 20:]], 1))
    a, b = (chunk(x, implementation="portable")[:2] for x in (p, changed))
    assert bits_equal(a[0][:, 20:], b[0][:, 20:])
    assert bits_equal(a[1], b[1])


def test_views_of_one_packed_projection() -> None:
    p = make(Case(T=40, K=16, V=16, H=2, HV=2, gate="mild"))
    qkv = torch.cat([p.q, p.k, p.v], -1)
    views = dict(zip("qkv", qkv.split(16, -1), strict=True))
    o, state = chunk(p, implementation="portable")[:2]
    other, same = chunk(p.map(lambda x: x, **views), implementation="portable")[:2]
    assert bits_equal(o, other)
    assert bits_equal(state, same)


@pytest.mark.parametrize("v_first", [False, True])
def test_states_before_each_chunk(v_first: bool) -> None:
    p = make(Case(T=40, K=16, V=24, gate="mild", chunk_size=16, v_first=v_first))
    with torch.no_grad():
        h = chunk(p, implementation="portable", return_intermediate_states=True)[2]
    assert bits_equal(h[:, 0], p.h0)
    for at in (1, 2):
        assert (
            relative_error(
                h[:, at],
                reference(p.tokens(0, 16 * at), gradients=False)["final_state"].transpose(-1, -2)
                if v_first
                else reference(p.tokens(0, 16 * at), gradients=False)["final_state"],
            )
            <= 1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_checkpoints_and_null_indices(dtype: torch.dtype) -> None:
    case = Case(T=58, K=16, V=24, lengths=(17, 1, 40), gate="softplus", beta="logits", l2norm=True)
    p = make(case)
    results = []
    for name in ("portable", "eager"):
        pool = normal(6, 1, 24, 16, seed=3).to(dtype)
        rows = torch.full((5, 1, 24, 16), 7.0, dtype=dtype)
        out = serve(
            "kda_prefill", p, cu_seqlens=p.cu_seqlens, state_pool=pool, implementation=name,
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


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("lengths", [(70,), (0, 1, 16, 17, 0, 33), (1,) * 70], ids=lambda x: f"N{len(x)}")
def test_tables_of_tiles(lengths: tuple[int, ...], step: int) -> None:
    from cula.ops.kda.chunk.portable.tiles import BLOCK_N, BLOCK_TILES, COLUMNS, tiles_kernel

    BT, rest = 16, 20
    total = sum(lengths) + rest
    cu = torch.tensor([0, *lengths]).cumsum(0).int().repeat_interleave(step)[::step]
    sequences, tiles, start = [], [], 0
    for n, length in enumerate(lengths):
        sequences.append([start, length, len(tiles), 0, n])
        for c in range(-(-length // BT)):
            tiles.append([start + c * BT, min(BT, length - c * BT), n, c])
        start += length
    tiles += [[start, 16, -1, 0], [start + 16, 4, -1, 0]]
    table = torch.full((len(tiles), 4), 99, dtype=torch.int32)
    found = torch.full((len(lengths), COLUMNS.value), 99, dtype=torch.int32)
    grid = (-(-len(tiles) // BLOCK_TILES),)
    tiles_kernel[grid](
        cu, table, found, cu.stride(0), len(lengths), total, len(tiles), BT=BT, BN=BLOCK_N, BI=BLOCK_TILES
    )
    assert found.tolist() == sequences
    assert table[:, :3].tolist() == [row[:3] for row in tiles]
    assert table[:-2].tolist() == tiles[:-2]
