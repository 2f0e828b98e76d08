"""The portable decode kernels on a GPU: fast sizes against float64 and eager, bits, graphs, streams, large pools."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cula.checks.cases import Case, Problem, make, normal
from cula.checks.runs import reference, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.kda import KDARollback, fused_recurrent_kda, kda_decode_fused, kda_rollback

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = "cuda"
FAST = Case(B=5, T=1, H=2, HV=4, K=128, V=128, dtype="bf16", gate="sigmoid", beta="logits", l2norm=True, v_first=True)
INDEX = [6, 2, 5, 0, 8]


@pytest.fixture(autouse=True)
def _on_the_gpu():
    with torch.device(DEVICE):
        yield


def drawn(case: Case) -> Problem:
    return make(case).map(lambda x: x.to(DEVICE))


def pool_of(p: Problem, dtype: torch.dtype = torch.float32, slots: int = 9) -> torch.Tensor:
    return normal(slots, p.case.HV, p.case.V, p.case.K, seed=5, dtype=dtype).to(DEVICE)


def call(name: str, p: Problem, pool: torch.Tensor, index: Any, **options: Any) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    given = {"cu_seqlens": p.cu_seqlens} if name == "kda_verify" else {}
    given |= {"state_pool": pool, "state_indices": index, "implementation": "portable"}
    return serve(name, p, **{**given, **options})


SIZES = [(64, 64), (128, 128), (256, 256), (128, 256), (100, 72), (16, 300)]


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("K, V", SIZES)
def test_sizes_against_the_recurrence_and_decode_against_verify(K: int, V: int, dtype: str, pool_dtype: Any) -> None:
    for gate in ("softplus", "sigmoid"):
        p = drawn(FAST.replace(K=K, V=V, dtype=dtype, gate=gate, T=4))
        pool, stepped, kept = pool_of(p, pool_dtype), pool_of(p, pool_dtype), pool_of(p, pool_dtype, 20)
        kept.fill_(math.nan)
        truth = reference(p.map(lambda x: x, h0=pool[INDEX].float()), gradients=False)
        slots = torch.arange(20).view(5, 4)
        keep = {"states_out": kept, "states_out_indices": slots, "update_state": True}
        out = call("kda_verify", p, pool, INDEX, **keep)
        for t in range(4):
            assert bits_equal(call("kda_decode", p.tokens(t, t + 1), stepped, INDEX), out[:, t : t + 1]), t
            assert bits_equal(kept[slots[:, t]], stepped[INDEX]), t
        assert bits_equal(pool, stepped)
        if pool_dtype == torch.float32:
            assert relative_error(out, truth["o"]) <= tolerance("o", p.q.dtype, DEVICE)
            assert relative_error(pool[INDEX].mT, truth["final_state"]) <= tolerance("pool", p.q.dtype, DEVICE)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
def test_no_bit_depends_on_the_batch_the_tile_or_the_draft(pool_dtype: torch.dtype) -> None:
    """One sequence alone gets small tiles, one of 300 large ones, and verify of many tokens larger ones."""
    p = drawn(FAST.replace(B=300, T=5, H=16, HV=16))
    pool, alone = pool_of(p, pool_dtype, 300), pool_of(p, pool_dtype, 300)
    many = call("kda_verify", p, pool, torch.arange(300), update_state=True)
    for n in (0, 7, 299):
        row = p.map(lambda x: x, **{f: getattr(p, f)[n : n + 1] for f in ("q", "k", "v", "g", "beta")})
        for t in range(5):
            assert bits_equal(call("kda_decode", row.tokens(t, t + 1), alone, [n])[0, 0], many[n, t]), (n, t)
        assert bits_equal(alone[n], pool[n])


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 24, 48, 96])
def test_heads(heads: int) -> None:
    p = drawn(FAST.replace(B=3, H=heads, HV=heads, gates="same"))
    pool = pool_of(p)
    truth = reference(p.map(lambda x: x, h0=pool[INDEX[:3]].clone()), gradients=False)
    out = call("kda_decode", p, pool, INDEX[:3])
    assert relative_error(out, truth["o"]) <= tolerance("o", p.q.dtype, DEVICE)


def test_trees_and_rollbacks() -> None:
    p = drawn(FAST.replace(T=8, B=3))
    index, parents = INDEX[:3], [[-1, 0, 0, 1, 1, 2, 2, 3], [-1, 0, 1, 2, 3, 4, 5, 6], [-1, -1, -1, 0, 1, 2, 9, 4]]
    for pool_dtype in (torch.float32, torch.bfloat16):
        pool, kept = pool_of(p, pool_dtype), pool_of(p, pool_dtype, 24)
        start, slots = pool.clone(), torch.arange(24).view(3, 8)
        keep = {"states_out": kept, "states_out_indices": slots}
        out = call("kda_verify", p, pool, index, parent=torch.tensor(parents), **keep)
        assert bits_equal(pool, start)
        for n in range(3):
            for t in range(8):
                path = [t]
                while 0 <= parents[n][path[0]] < path[0]:
                    path.insert(0, parents[n][path[0]])
                one = start[index[n]][None].clone()
                for step in path:
                    cut = {f: getattr(p, f)[n : n + 1, step : step + 1] for f in ("q", "k", "v", "g", "beta")}
                    o = call("kda_decode", p.map(lambda x: x, **cut), one, [0])
                assert bits_equal(o[0, 0], out[n, t]) and bits_equal(one[0], kept[slots[n, t]]), (n, t)
        r = KDARollback.allocate(3, 8, 4, 128, 128, DEVICE)
        call("kda_verify", p, pool, index, rollback=r, **keep)
        kda_rollback(pool, torch.tensor(index), r, torch.tensor([0, 3, 99]), implementation="portable")
        assert bits_equal(pool[index[0]], start[index[0]])
        for n, count in ((1, 3), (2, 8)):
            assert relative_error(pool[index[n]], kept[slots[n, count - 1]].double()) <= 5e-5


def fused_arguments(N: int, H: int, HV: int, K: int, V: int, slots: int) -> dict[str, torch.Tensor]:
    channels = 2 * H * K + HV * V
    shapes = {
        "x": (N, channels), "g": (N, HV, K), "beta": (N, HV), "conv_weight": (channels, 4), "conv_bias": (channels,),
        "conv_pool": (slots, channels, 3), "state_pool": (slots, HV, V, K), "output_gate": (N, HV, V),
        "norm_weight": (V,), "A_log": (HV,), "dt_bias": (HV * K,),
    }  # fmt: skip
    narrow = ("x", "g", "beta", "conv_pool", "output_gate")
    return {
        name: normal(*shape, seed=seed, dtype=torch.bfloat16 if name in narrow else torch.float32).to(DEVICE)
        for seed, (name, shape) in enumerate(shapes.items(), 60)
    }


@pytest.mark.parametrize("sizes", [(12, 12, 128, 128), (2, 8, 128, 128), (4, 4, 64, 64), (2, 4, 256, 256)], ids=str)
def test_the_fused_step_is_eagers(sizes: tuple[int, int, int, int]) -> None:
    results = []
    for name in ("portable", "eager"):
        a = fused_arguments(7, *sizes, 20)
        for step in range(3):
            a["x"] = normal(*a["x"].shape, seed=step, dtype=torch.bfloat16).to(DEVICE)
            index = torch.tensor([3, 7, -1, 19, 0, 5, 11])
            out = kda_decode_fused(**a, state_indices=index, lower_bound=-5.0, implementation=name)
        results.append((out, a["state_pool"], a["conv_pool"]))
    assert relative_error(results[0][0], results[1][0].double()) <= 6e-3
    assert relative_error(results[0][1], results[1][1].double()) <= 5e-5
    assert bits_equal(results[0][2], results[1][2])


def test_the_fused_step_is_the_same_in_bits_a_thousand_times() -> None:
    """A thread that shifted the convolution's window before another had read it would show."""
    a = fused_arguments(64, 12, 12, 128, 128, 64)
    pools = {name: a[name].clone() for name in ("conv_pool", "state_pool")}
    index, first = torch.arange(64), None
    for _ in range(1000):
        for name, x in pools.items():
            a[name].copy_(x)
        out = kda_decode_fused(**a, state_indices=index, implementation="portable")
        first = first or (out, a["conv_pool"].clone(), a["state_pool"].clone())
        assert all(bits_equal(x, y) for x, y in zip(first, (out, a["conv_pool"], a["state_pool"])))


def test_recurrent_in_both_layouts() -> None:
    p = drawn(FAST.replace(B=1, T=300, lengths=(200, 0, 99), v_first=False))
    named = {"A_log": p.A_log, "dt_bias": p.dt_bias, "implementation": "portable"}
    truth = reference(p, gradients=False)
    o, state = fused_recurrent_kda(*p.five(), **p.flags(), initial_state=p.h0, **named)
    assert relative_error(o, truth["o"]) <= tolerance("o", p.q.dtype, DEVICE)
    assert relative_error(state, truth["final_state"]) <= tolerance("final_state", p.q.dtype, DEVICE)
    flags = {**p.flags(), "state_v_first": True}
    other, turned = fused_recurrent_kda(*p.five(), **flags, initial_state=p.h0.mT.contiguous(), **named)
    assert relative_error(other, truth["o"]) <= tolerance("o", p.q.dtype, DEVICE)
    assert relative_error(turned.mT, truth["final_state"]) <= tolerance("final_state", p.q.dtype, DEVICE)


def captured(run: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `run()`, compiled before on a side stream, and what it returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        result = run()
    return graph, result


@pytest.mark.parametrize("N", [1, 2, 7, 256])
def test_a_replay_reads_the_indices_anew(N: int) -> None:
    p = drawn(FAST.replace(B=N))
    pool, start = pool_of(p, slots=N + 3), pool_of(p, slots=N + 3)
    index = torch.arange(N, dtype=torch.int32)
    graph, out = captured(lambda: call("kda_decode", p, pool, index))
    for step in range(3):
        pool.copy_(start)
        index.copy_(torch.randperm(N + 3)[:N])
        index[step :: 3 if N > 2 else 99] = -1
        expected_pool = start.clone()
        expected = call("kda_decode", p, expected_pool, index.clone())
        graph.replay()
        assert bits_equal(out, expected) and bits_equal(pool, expected_pool)
        assert not out[index < 0].any()


def test_a_replay_reads_lengths_and_accepted_counts_anew() -> None:
    p = drawn(FAST.replace(B=1, T=64, lengths=(4,) * 16))
    pool, start = pool_of(p, slots=80), pool_of(p, slots=80)
    table = torch.arange(80).view(16, 5)
    cu, accepted = p.cu_seqlens.clone(), torch.ones(16, dtype=torch.int32)
    slots = torch.full((64,), -1)
    keep = {"states_out": pool, "states_out_indices": slots, "cu_seqlens": cu, "num_accepted_tokens": accepted}
    graph, out = captured(lambda: call("kda_verify", p, pool, table, **keep))
    for lengths in ([1] * 16, [0, 16] + [3] * 14, [4] * 15 + [20], [0] * 16):
        pool.copy_(start)
        cu[1:] = torch.tensor(lengths).cumsum(0)
        accepted.copy_(torch.randint(1, 6, (16,)))
        slots.fill_(-1)
        kept, apart = start.clone(), {**keep, "cu_seqlens": cu.clone(), "states_out_indices": slots.clone()}
        for n in range(16):  # the states of the first four tokens go to the sequence's own other slots
            for t in range(min(lengths[n], 4)):
                column = (int(accepted[n]) + t) % 5
                slots[int(cu[n]) + t] = apart["states_out_indices"][int(cu[n]) + t] = int(table[n, column])
        expected = call("kda_verify", p, kept, table, **{**apart, "states_out": kept})
        graph.replay()
        assert bits_equal(out, expected) and bits_equal(pool, kept)
        assert not out[:, int(cu[-1]) :].any()


def test_a_hundred_replays_of_all_stages_are_stable() -> None:
    p = drawn(FAST.replace(T=4))
    pool, r = pool_of(p), KDARollback.allocate(5, 4, 4, 128, 128, DEVICE)
    a, index = fused_arguments(5, 2, 4, 128, 128, 9), torch.tensor(INDEX)
    accepted, start = torch.tensor([4, 0, 2, 1, 3]), pool.clone()
    conv, state = a["conv_pool"].clone(), a["state_pool"].clone()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        pool.copy_(start)
        a["conv_pool"].copy_(conv)
        a["state_pool"].copy_(state)
        out = call("kda_verify", p, pool, index, rollback=r)
        kda_rollback(pool, index, r, accepted, implementation="portable")
        return out, kda_decode_fused(**a, state_indices=index, implementation="portable")

    graph, outs = captured(run)
    kept = None
    for _ in range(100):
        graph.replay()
        now = (*outs, pool, a["conv_pool"], a["state_pool"])
        kept = kept or [x.clone() for x in now]
        assert all(bits_equal(x, y) for x, y in zip(kept, now))


def test_nothing_waits_for_the_device() -> None:
    p, packed = drawn(FAST.replace(T=4)), drawn(FAST.replace(B=1, T=10, lengths=(4, 1, 0, 3, 2)))
    pool, index = pool_of(p), torch.tensor(INDEX)
    r, a = KDARollback.allocate(5, 4, 4, 128, 128, DEVICE), fused_arguments(5, 2, 4, 128, 128, 9)
    accepted = torch.tensor([4, 0, 2, 1, 3])
    for mode in (0, "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            call("kda_decode", p.tokens(0, 1), pool, index)
            call("kda_verify", p, pool, index, rollback=r)
            call("kda_verify", packed, pool, index, update_state=True)
            kda_rollback(pool, index, r, accepted, implementation="portable")
            kda_decode_fused(**a, state_indices=index, implementation="portable")
        finally:
            torch.cuda.set_sync_debug_mode(0)


def test_a_side_stream_waits_for_its_producer_alone() -> None:
    p = drawn(FAST)
    expected_pool, pool = pool_of(p), pool_of(p)
    expected = call("kda_decode", p, expected_pool, INDEX)
    late, index = p.map(torch.zeros_like, A_log=p.A_log, dt_bias=p.dt_bias), torch.tensor(INDEX)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for name in ("q", "k", "v", "g", "beta"):
            getattr(late, name).copy_(getattr(p, name))
        out = call("kda_decode", late, pool, index)
    stream.synchronize()
    assert bits_equal(out, expected) and bits_equal(pool, expected_pool)


def test_4100_slots_with_canaries() -> None:
    """Beyond 2^31 elements; only the slots that are named change, and what lies before and behind the pool does not."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs a card of 40 GiB")
    p = drawn(FAST.replace(B=3, H=32, HV=64))
    base = torch.full((4102 * 64 * 128 * 128,), math.nan)
    pool = base.view(4102, 64, 128, 128)[1:-1]
    index = [4099, 17, 2100]
    small = pool_of(p, slots=3)
    pool[index] = small
    out = call("kda_decode", p, pool, index)
    assert bits_equal(out, call("kda_decode", p, small, [0, 1, 2])) and bits_equal(pool[index], small)
    pool[index] = math.nan
    for part in base.view(4102, -1).split(128):
        assert bool(part.isnan().all())


def test_more_programs_than_a_grid_axis_of_65535() -> None:
    p = drawn(FAST.replace(B=2050, H=32, HV=32, K=16, V=16))
    pool, halves = pool_of(p, slots=2050), pool_of(p, slots=2050)
    out = call("kda_decode", p, pool, torch.arange(2050))
    for rows in (slice(0, 1025), slice(1025, 2050)):
        part = p.map(lambda x: x, **{f: getattr(p, f)[rows] for f in ("q", "k", "v", "g", "beta")})
        assert bits_equal(call("kda_decode", part, halves, torch.arange(2050)[rows]), out[rows])
    assert bits_equal(pool, halves)


def test_a_prompt_of_32k_in_four_pieces_then_decode() -> None:
    p = drawn(FAST.replace(B=1, T=4 * 8192 + 1, H=2, HV=2))
    pools, outs = [], []
    for pieces in (1, 4):
        pool, size = pool_of(p), 32768 // pieces
        made = []
        for first in range(0, 32768, size):
            part = p.tokens(first, first + size)
            given = {"state_pool": pool, "read_indices": torch.tensor([6]), "implementation": "portable"}
            made.append(serve("kda_prefill", part, **given, cp_mode=False))
        made.append(call("kda_decode", p.tokens(32768, 32769), pool, [6]))
        outs.append(torch.cat(made, 1))
        pools.append(pool)
    limit = tolerance("o", p.q.dtype, DEVICE)
    for first in range(0, 32769, 8192):  # no piece may be off, however small its part of the whole
        part = slice(first, first + 8192)
        assert relative_error(outs[1][:, part], outs[0][:, part].double()) <= limit, first
    assert relative_error(pools[1], pools[0].double()) <= limit


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    p = make(FAST).map(lambda x: x.to("cuda:1"))
    here = drawn(FAST)
    pool, expected_pool = pool_of(here).to("cuda:1"), pool_of(here)
    expected = call("kda_decode", here, expected_pool, INDEX)
    for _ in range(2):
        out = call("kda_decode", p, pool, torch.tensor(INDEX, device="cuda:1"))
        assert out.device == p.q.device and torch.cuda.current_device() == 0
        assert bits_equal(out.to(DEVICE), expected) and bits_equal(pool.to(DEVICE), expected_pool)
        expected = call("kda_decode", here, expected_pool, INDEX)
