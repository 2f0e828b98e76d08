"""chunk_lightning_attn as an op: torch.compile in one graph, opcheck, the same bits as the eager call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.runs import chunk
from cula.checks.tolerance import bits_equal
from cula.ops.lightning.chunk import library

CASE = Case(B=2, T=37, H=1, HV=2, K=16, V=12, gate="slopes_fla")
CASES = {
    "batch": CASE,
    "packed": CASE.replace(B=1, T=70, lengths=(0, 33, 1, 30)),
    "v_first": CASE.replace(v_first=True, gate="slopes_steep"),
    "fp64": CASE.replace(dtype="fp64", state=False),
    "bf16": CASE.replace(dtype="bf16", K=32, V=32, chunk_size=32, scale=0.3),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _no_compiled_code() -> None:
    torch._dynamo.reset()


def leaves_of(p: Problem) -> dict[str, torch.Tensor]:
    return {name: x.clone().requires_grad_() for name, x in p.inputs().items()}


def run(p: Problem, function=chunk, **options) -> list[torch.Tensor]:
    leaves = leaves_of(p)
    o, state = function(p.map(lambda x: x, **leaves), **options)
    return [o, state, *torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])]


def op_arguments(p: Problem, grad: bool, **options) -> tuple:
    inputs = {"initial_state" if name == "h0" else name: x for name, x in p.inputs().items()}
    call = {name: None if kind.endswith("?") else False for name, kind in library._ARGUMENTS.items()}
    flags = {name: x for name, x in p.flags().items() if name in call}
    call |= {**inputs, **flags, "chunk_size": p.case.chunk_size, **options}
    return (*library.Call(**call), grad)


@cases
def test_opcheck(case: Case) -> None:
    p = make(case)
    opcheck(torch.ops.cula.lightning_chunk.default, op_arguments(p.map(lambda x: x, **leaves_of(p)), True))


def test_opcheck_by_layer_and_of_the_backward() -> None:
    p = make(CASE)
    by_layer = op_arguments(p, False, slopes=None, layer_idx=1, num_layers=3)
    opcheck(torch.ops.cula.lightning_chunk.default, by_layer)
    arguments = (*op_arguments(p, True)[:-1], p.do, p.dht, [True, False, True, True])
    opcheck(torch.ops.cula.lightning_chunk_backward.default, arguments)


@cases
def test_compiled_equals_eager_in_bits(on_lightning_chunk, case: Case) -> None:
    p = make(case)
    compiled = torch.compile(chunk, backend="aot_eager", fullgraph=True)
    name = on_lightning_chunk.name
    with torch.no_grad():
        assert all(map(bits_equal, compiled(p, implementation=name), chunk(p, implementation=name)))
    for got, expected in zip(run(p, compiled, implementation=name), run(p, implementation=name), strict=True):
        assert bits_equal(got, expected)


def test_one_node_dynamic_sizes_and_layers_by_number() -> None:
    backend = CompileCounterWithBackend("eager")

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def call(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cula.lightning.chunk_lightning_attn(q, q, v, 1, 4)[0]

    for T in (33, 60, 90):
        p = make(CASE.replace(T=T))
        expected = cula.lightning.chunk_lightning_attn(p.q, p.q, p.v, 1, 4)[0]
        assert bits_equal(call(p.q, p.v), expected)
    assert backend.frame_count == 1 and backend.op_count == 2  # the op, and its first output
    q = torch.zeros(1, 4, 2, 16)
    again = cula.lightning.chunk_lightning_attn(q + 1, q + 1, q + 1, 1, 4)[0]
    assert type(again) is torch.Tensor and bool(again.isfinite().all()), "a tensor of the trace outlived it"


def test_errors_are_said_under_compile() -> None:
    p = make(CASE)
    compiled = torch.compile(chunk, backend="eager")
    with pytest.raises(cula.ShapeError, match="slopes"):
        compiled(p, slopes=p.slopes[:1])
    with pytest.raises(cula.NotSupportedError, match="sm90"):
        compiled(p, implementation="sm90")


def test_eager_calls_go_round_the_op() -> None:
    program = (
        "import sys, torch\nfrom cula.lightning import chunk_lightning_attn\n"
        "x = torch.ones(1, 2, 1, 16, requires_grad=True)\n"
        "chunk_lightning_attn(x, x, x, 0, 1)[0].sum().backward()\n"
        "assert 'cula.ops.lightning.chunk.library' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[4]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, stdin=subprocess.DEVNULL)
