"""Compile the portable kernels for an architecture that need not be there, by the host code that a GPU would run.

    TRITON_INTERPRET=0 python compile_only.py ARCH JOB...

A stub driver names the architecture, a launch compiles and stops there, CPU tensors give the arguments. Prints one
JSON object: {job: {kernel: [{"shared", "products", "cubin", "call"} of each compilation]}}: the tensor-core
instructions in its PTX, and which call of the job compiled it.
"""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cula.host.arch import parse_target
from cula.lightning import chunk_lightning_attn, lightning_decode, lightning_prefill, lightning_verify
from cula.ops.lightning import problem
from cula.ops.lightning.chunk.portable import forward
from cula.ops.lightning.decode import op

PRODUCTS = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
NAME = {"implementation": "portable"}

compiled: dict[str, list[dict[str, Any]]] = {}
seen: set[tuple[str, int]] = set()
calls = 0


def install(arch: str) -> None:
    """Make `arch` what cula and Triton see, and let no kernel run."""
    target = parse_target(arch)
    major, minor = target.capability
    stub = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(stub)
    problem.target_of = op.target_of = lambda device: target
    JITFunction.__getitem__ = lambda self, grid: lambda *args, **options: compile_kernel(self, grid, args, options)


def compile_kernel(function: JITFunction, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile what this launch would run, and note it the first time."""
    kernel = function.run(*args, grid=grid, warmup=True, **options)
    name = function.fn.__name__
    if (name, id(kernel)) not in seen:
        seen.add((name, id(kernel)))
        facts = {
            "shared": kernel.metadata.shared,
            "products": sorted(set(PRODUCTS.findall(kernel.asm["ptx"]))),
            "cubin": len(kernel.asm["cubin"]),
            "call": calls,
        }
        compiled.setdefault(name, []).append(facts)
    return kernel


def called() -> None:
    """Count the public calls of a job."""
    global calls
    calls += 1


def train(dtype: torch.dtype, T: int = 256, lengths: tuple[int, ...] = (), B: int = 1, K: int = 128, **options: Any):
    """A forward and a backward."""
    called()
    q, k = (torch.empty(B, T, 2, K, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.empty(B, T, 4, K, dtype=dtype, requires_grad=True)
    if lengths:
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).int()
    h0 = torch.empty(len(lengths) or B, 4, K, K, requires_grad=True)
    o, last = chunk_lightning_attn(q, k, v, 1, 4, initial_state=h0, output_final_state=True, **options, **NAME)
    torch.autograd.grad([o, last], [q, k, v, h0], [torch.empty_like(o), torch.empty_like(last)])


def infer(dtype: torch.dtype, K: int = 128) -> None:
    """A forward alone."""
    called()
    q = torch.empty(1, 256, 2, K, dtype=dtype)
    chunk_lightning_attn(q, q, q, 1, 4, output_final_state=True, **NAME)


def serve(T: int = 100, N: int = 3, **options: Any) -> None:
    """A prefill over a pool, packed."""
    called()
    q = torch.empty(1, T, 2, 128, dtype=torch.bfloat16)
    cu = torch.tensor([0] + [T] * N, dtype=torch.int32)
    pool, slots = torch.empty(N + 3, 2, 128, 128), torch.zeros(N, dtype=torch.int32)
    lightning_prefill(
        q, q, q, slopes=torch.ones(2), cu_seqlens=cu, state_pool=pool, read_indices=slots,
        has_initial_state=torch.ones(N, dtype=torch.bool), **options, **NAME,
    )  # fmt: skip


def segments() -> None:
    """A long prefill with few heads, cut."""
    forward.segments_of = lambda p, c, sms: 8
    serve(T=8192, N=1)


def decode() -> None:
    """Steps of several batch sizes, and drafts."""
    for N in (1, 3, 17, 64):
        called()
        q, pool = torch.empty(N, 1, 2, 128, dtype=torch.bfloat16), torch.empty(N + 2, 2, 128, 128)
        slots = torch.zeros(N, dtype=torch.int32)
        lightning_decode(q, q, q, slopes=torch.ones(2), state_pool=pool, state_indices=slots, **NAME)
    for T in (3, 5, 7):
        called()
        q, pool = torch.empty(4, T, 2, 128, dtype=torch.bfloat16), torch.empty(30, 2, 128, 128)
        lightning_verify(
            q, q, q, slopes=torch.ones(2), state_pool=pool, state_indices=torch.zeros(4, dtype=torch.int32),
            states_out=torch.empty(30, 2, 128, 128), states_out_indices=torch.zeros(4, T, dtype=torch.int32), **NAME,
        )  # fmt: skip


def lengths_vary() -> None:
    """Batches and lengths that one compilation must serve."""
    for B, T in ((1, 256), (1, 257), (3, 1000), (16, 63), (2, 16)):
        train(torch.bfloat16, T, B=B)


def packings_vary() -> None:
    """The same for packed sequences and for prefills."""
    for lengths in ((100, 156), (1, 2, 3, 300), (16,) * 16, (33,)):
        train(torch.bfloat16, sum(lengths) + 5, lengths)
    for T, N in ((100, 3), (1001, 1), (64, 16)):
        serve(T, N)


JOBS = {
    "bf16": lambda: train(torch.bfloat16),
    "bf16_packed": lambda: train(torch.bfloat16, 300, (100, 156)),
    "fp16": lambda: train(torch.float16),
    "fp32": lambda: infer(torch.float32),
    "wide": lambda: infer(torch.bfloat16, K=256),
    "segments": segments,
    "decode": decode,
    "lengths_vary": lengths_vary,
    "packings_vary": packings_vary,
}


def main(arch: str, *jobs: str) -> None:
    """Run the jobs, one after the other."""
    global calls
    install(arch)
    result = {}
    for job in jobs:
        compiled.clear()
        seen.clear()
        calls = 0
        JOBS[job]()
        result[job] = dict(compiled)
    print(json.dumps({"triton": triton.__version__, "jobs": result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
