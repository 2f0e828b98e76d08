"""The fused SM90 kernel: its PTX on numpy against the float64 reference, what it is compiled to, what it refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cula.checks.cases import Case, make, normal
from cula.checks.runs import chunk, errors, limits, reference, run_chunk, run_prefill, serve
from cula.checks.tolerance import bits_equal, relative_error
from cula.host.arch import parse_target
from cula.host.errors import NotSupportedError
from cula.kda import chunk_kda
from cula.ops.kda.chunk.sm90.options import GROUP, PRODUCERS, REGISTERS, Options
from tests.ptx.machine import Fault

pytest.importorskip("cutlass")
from cula.ops.kda.chunk.sm90 import fused

PACKED = (0, 17, 1, 40, 0)
BASE = {"K": 128, "V": 128, "dtype": "bf16", "beta": "logits", "l2norm": True}

CASES = [
    Case(T=70, gate="sigmoid", **BASE),
    Case(B=2, T=33, H=1, HV=2, gate="sigmoid_no_A", v_first=True, **BASE),
    Case(T=64, gate="sigmoid_full", **BASE),
    Case(T=32, gate="sigmoid_bare", state=False, **BASE),
    Case(T=1, gate="sigmoid", gates="same", **BASE),
    Case(T=58, lengths=PACKED, gate="sigmoid", **BASE),
    Case(T=40, gate="sigmoid", **{**BASE, "beta": "uniform"}),
]


def held(p, got, truth) -> None:
    found, limit = errors(p, got, truth), limits(p, got)
    missed = {name: (found[name], limit[name]) for name in found if not found[name] <= limit[name]}
    assert not missed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_outputs_are_the_references(emulated, case: Case) -> None:
    p = make(case)
    with torch.no_grad():
        held(p, run_chunk(p, "sm90", gradients=False), reference(p, gradients=False))


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=lambda case: case.id)
def test_prefill_over_a_pool_is_the_reference(emulated, case: Case) -> None:
    p = make(case)
    held(p, run_prefill(p, "sm90"), reference(p, gradients=False))


def test_no_order_of_warps_changes_a_bit(emulated) -> None:
    p = make(Case(T=300, gate="sigmoid", **BASE))
    first = None
    for seed, late in ((0, True), (1, True), (2, False), (3, True)):
        emulated(warps=seed, late=late)
        with torch.no_grad():
            found = chunk(p, implementation="sm90")[:2]
        first = found if first is None else first
        assert bits_equal(found[0], first[0])
        assert bits_equal(found[1], first[1])
    held(p, {"o": first[0], "final_state": first[1]}, reference(p, gradients=False))


@pytest.mark.parametrize("line", range(1, 4))
def test_each_barrier_of_a_producer_is_needed(emulated, compiler, monkeypatch, line: int) -> None:
    """Of the barriers before norms, before factors and before pairs, none can go."""
    p = make(Case(T=70, gate="sigmoid", **BASE))
    whole = compiler.__call__

    def without(self, options: Options):
        found = whole(options)
        parts = re.split(r"(\n\s*bar\.sync [^\n]*)", found.ptx)
        assert len(parts) == 2 * 4 + 1  # the first is of all threads
        del parts[2 * line + 1]
        return SimpleNamespace(ptx="".join(parts))

    monkeypatch.setattr(type(compiler), "__call__", without)
    with torch.no_grad(), pytest.raises(Fault, match="does not wait for|may still read"):
        chunk(p, implementation="sm90")


def test_its_barriers_are_those_of_its_table(compiler) -> None:
    table = dict(re.findall(r"\| (full|empty)\[stage\] \| [^|]* \| ([^|]*) \|", fused.__doc__))
    counts = re.findall(r"mbarrier\.init\.shared\.b64 \[[^\]]*\], (\d+)", compiler(Options(state_out="fp32")).ptx)
    assert [int(x) for x in counts] == [int(table["full"]), 2 * int(table["empty"].split()[0])]


def test_rows_after_the_last_boundary_are_zeros(emulated) -> None:
    case = Case(T=58, lengths=PACKED, gate="sigmoid", **BASE)
    p = make(case)
    more = {
        n: torch.cat([getattr(p, n), normal(1, 40, *getattr(p, n).shape[2:]).to(getattr(p, n).dtype)], 1)
        for n in "qkvg"
    }
    beta = torch.cat([p.beta, torch.rand(1, 40, case.HV)], 1)
    longer = p.map(lambda x: x, beta=beta, case=case, **more)
    with torch.no_grad():
        out = chunk(longer, implementation="sm90")[0]
        short = chunk(p, implementation="sm90")[0]
    assert bits_equal(out[:, :58], short)
    assert not out[:, 58:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_slots_checkpoints_and_null_indices(emulated, dtype: torch.dtype, index: torch.dtype) -> None:
    p = make(Case(T=58, lengths=(17, 1, 40), gate="sigmoid", **BASE))
    results = []
    for name in ("sm90", "eager"):
        pool = normal(6, 1, 128, 128, seed=3).to(dtype)
        rows = torch.full((5, 1, 128, 128), 7.0, dtype=dtype)
        out = serve(
            "kda_prefill", p, cu_seqlens=p.cu_seqlens, state_pool=pool, implementation=name,
            read_indices=torch.tensor([4, -1, 0], dtype=index), write_indices=torch.tensor([2, 5, -1], dtype=index),
            has_initial_state=torch.tensor([True, True, False]), checkpoints=rows, checkpoint_every=16,
            checkpoint_offsets=torch.tensor([0, 1, 1, 3], dtype=index),
        )  # fmt: skip
        results.append((out, pool, rows))
    start = normal(6, 1, 128, 128, seed=3).to(dtype)
    assert bits_equal(results[0][1][[0, 1, 3, 4]], start[[0, 1, 3, 4]])
    for got, truth in zip(*results, strict=True):
        assert relative_error(got, truth) <= 8e-3


def test_views_of_one_packed_projection(emulated) -> None:
    p = make(Case(T=40, H=2, HV=2, gate="sigmoid", **BASE))
    qkv = torch.cat([p.q, p.k, p.v], -1)
    views = dict(zip("qkv", qkv.split(128, -1), strict=True))
    with torch.no_grad():
        o, state = chunk(p, implementation="sm90")[:2]
        other, same = chunk(p.map(lambda x: x, **views), implementation="sm90")[:2]
    assert bits_equal(o, other)
    assert bits_equal(state, same)


def test_rows_that_are_not_aligned_are_refused(emulated) -> None:
    p = make(Case(T=40, gate="sigmoid", **BASE))
    wide = torch.zeros(1, 40, 1, 129, dtype=torch.bfloat16)[..., 1:]
    with pytest.raises(NotSupportedError, match="aligned to 16 bytes"), torch.no_grad():
        chunk(p.map(lambda x: x, q=wide), implementation="sm90")


def test_every_sm_gets_work() -> None:
    target = parse_target("sm90")
    from cula.ops.kda.chunk.sm90.forward import options_of
    from cula.ops.kda.chunk.states import NONE, States
    from cula.ops.kda.problem import KDAProblem, Operands

    x = [torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16)] * 4
    operands = Operands(*x, torch.zeros(1, 1, 1), target=target)
    none = States(NONE, x[0])
    for heads, consumers in ((64, 1), (131, 1), (132, 2), (256, 2)):
        p = KDAProblem(1, 1, heads, heads, 128, 128, 1)
        assert options_of(p, operands, none, none).consumers == consumers


ALL = [
    Options(consumers=1, state_out="fp32"),
    Options(consumers=2, state_out="fp32"),
    Options(
        consumers=2, wide_gate=True, packed=4, state_in="bf16", state_out="bf16", index_in=4, index_out=8, flagged=True
    ),
    Options(consumers=2, state_out="fp32", checkpoints="bf16", offset=8),
    Options(consumers=1, wide_gate=True, wide_beta=False, packed=8, state_in="fp32", has_A=False, has_bias=False),
]


@pytest.mark.parametrize(
    "options", ALL, ids=lambda o: f"{o.consumers}{'w' if o.wide_gate else ''}{o.state_in}{o.checkpoints}"
)
def test_what_it_is_compiled_to(compiler, options: Options) -> None:
    """wgmma in the PTX, no register spilled in either loop, and what one SM has."""
    found = compiler(options)
    assert len(re.findall(r"wgmma\.mma_async\S*m64n128k16", found.ptx)) == 2
    assert len(re.findall(r"wgmma\.mma_async\S*m64n16k16", found.ptx)) == 2 * (8 + 8 + 2)
    assert f".reqntid {options.threads}," in found.ptx
    producer, consumer = REGISTERS[options.consumers]
    assert GROUP * (PRODUCERS * producer + options.consumers * consumer) <= 65536
    assert options.stages * -(-options.stage_bytes // 1024) * 1024 + 5120 <= 227 * 1024
    tool = shutil.which("cuobjdump") or bundled("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump here")
    usage = subprocess.run([tool, "-res-usage", str(found.cubin)], capture_output=True, text=True, check=True).stdout
    registers, local = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "LOCAL"))
    assert registers <= 65536 // options.threads
    assert local == 0


def bundled(name: str) -> str | None:
    """A tool that comes with triton."""
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path) if path.exists() else None


def test_it_says_what_it_needs() -> None:
    q = torch.zeros(1, 16, 1, 128, dtype=torch.bfloat16)
    with pytest.raises(NotSupportedError, match="compute capability 9.0"):
        chunk_kda(q, q, q, q, torch.zeros(1, 16, 1), implementation="sm90")
