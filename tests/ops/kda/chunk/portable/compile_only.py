"""Compile the chunk kernels for an architecture that need not be there, by the host code that a GPU would run.

    TRITON_INTERPRET=0 python compile_only.py ARCH JOB...

A stub driver names the architecture, a launch compiles and stops there, CPU tensors give the arguments. Prints one
JSON object: {job: {kernel: [{"seconds", "shared", "products", "call", "arguments"} of each compilation]}}: the
tensor-core instructions in its PTX, which call of the job compiled it, and how its arguments were specialised.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cula.host.arch import parse_target
from cula.kda import chunk_kda, kda_prefill
from cula.ops.kda import problem
from cula.ops.kda.chunk.portable import forward

PRODUCTS = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")

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
    problem.target_of = lambda device: target
    JITFunction.__getitem__ = lambda self, grid: lambda *args, **options: compile_kernel(self, grid, args, options)


def compile_kernel(function: JITFunction, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile what this launch would run, and note it the first time."""
    began = time.perf_counter()
    kernel = function.run(*args, grid=grid, warmup=True, **options)
    name = function.fn.__name__
    if (name, id(kernel)) not in seen:
        seen.add((name, id(kernel)))
        facts = {
            "seconds": time.perf_counter() - began,
            "shared": kernel.metadata.shared,
            "products": sorted(set(PRODUCTS.findall(kernel.asm["ptx"]))),
            "cubin": len(kernel.asm["cubin"]),
            "call": calls,
            "arguments": describe(function, kernel),
        }
        compiled.setdefault(name, []).append(facts)
    return kernel


def describe(function: JITFunction, kernel: Any) -> dict[str, Any]:
    """What each argument was compiled for: its type, its constant, or that it is a multiple of 16."""
    names = list(kernel.src.signature)
    facts = dict(kernel.src.signature)
    for path, value in kernel.src.constants.items():
        facts[names[path[0]]] = repr(value)
    for path in kernel.src.attrs:
        facts[names[path[0]]] += " aligned"
    return facts


def inputs(B: int, T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, grad: bool) -> dict[str, torch.Tensor]:
    """Arguments of chunk_kda, values unset."""
    gates = torch.float32 if dtype != torch.float32 else dtype
    shapes = {
        "q": ((B, T, H, K), dtype), "k": ((B, T, H, K), dtype), "v": ((B, T, HV, V), dtype),
        "g": ((B, T, HV, K), gates), "beta": ((B, T, HV), gates), "A_log": ((HV,), gates), "dt_bias": ((HV, K), gates),
    }  # fmt: skip
    return {name: torch.zeros(shape, dtype=kind, requires_grad=grad) for name, (shape, kind) in shapes.items()}


def call(
    B: int = 2, T: int = 200, H: int = 2, HV: int = 2, K: int = 128, V: int = 128, dtype: str = "bfloat16",
    bound: float | None = -5.0, lengths: tuple[int, ...] | None = None, grad: bool = True, **options: Any,
) -> None:  # fmt: skip
    """chunk_kda forward, and backward where `grad`; lengths: packed, B is then 1 and T their sum."""
    global calls
    calls += 1
    if lengths is not None:
        B, T = 1, sum(lengths)
    N = B if lengths is None else len(lengths)
    x = inputs(B, T, H, HV, K, V, getattr(torch, dtype), grad)
    state = torch.zeros(N, HV, K, V, requires_grad=grad)
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    o, final = chunk_kda(
        **x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, lower_bound=bound, cu_seqlens=cu, implementation="portable", **options,
    )  # fmt: skip
    if grad:
        torch.autograd.grad([o, final], [*x.values(), state], [torch.zeros_like(o), torch.zeros_like(final)])


def serve(B: int, T: int, lengths: tuple[int, ...] | None = None, slots: int = 9) -> None:
    """kda_prefill over a pool, with checkpoints."""
    global calls
    calls += 1
    if lengths is not None:
        B, T = 1, sum(lengths)
    N = B if lengths is None else len(lengths)
    x = inputs(B, T, 2, 2, 128, 128, torch.bfloat16, False)
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    index = torch.arange(N, dtype=torch.int32)
    rows = torch.zeros(max(T // 64, 1) + N, 2, 128, 128)
    offsets = torch.arange(N + 1, dtype=torch.int32)
    pool = torch.zeros(slots, 2, 128, 128)
    kda_prefill(
        **x, cu_seqlens=cu, state_pool=pool, read_indices=index, lower_bound=-5.0, checkpoints=rows,
        checkpoint_offsets=offsets, implementation="portable",
    )  # fmt: skip


def lengths_vary() -> None:
    """Fixed batches and packed ones of many sizes: each kernel may be compiled once for each of the two forms."""
    for B, T in ((1, 100), (2, 128), (3, 1000), (1, 4096), (2, 64), (1, 1), (16, 16)):
        call(B=B, T=T, H=1, HV=1)


def odd_widths() -> None:
    """Fixed batches whose strides from sequence to sequence are no multiples of 16."""
    for B, T in ((2, 100), (2, 101), (1, 128), (2, 37)):
        call(B=B, T=T, H=1, HV=1, K=24, V=24)


def packings_vary() -> None:
    """Packed sequences of many numbers and lengths."""
    for lengths in ((1,), (100,), (128, 1), (0, 64, 1000), (16,) * 16, (5, 0, 1, 17, 64, 65, 200), (4096,)):
        call(lengths=lengths, H=1, HV=1)


def serving_varies() -> None:
    """kda_prefill with pools, fixed and packed, of many sizes."""
    for B, T, slots in ((1, 100, 1), (2, 128, 2), (3, 1000, 7), (1, 4096, 16), (1, 1, 33)):
        serve(B, T, slots=slots)


def segments() -> None:
    """pre_scan and merge, by a plan that cuts every sequence in two."""
    forward.SEGMENTS_VERIFIED = True
    call(B=1, T=16384, H=1, HV=1, grad=False)


JOBS: dict[str, Callable[[], None]] = {
    "bf16": lambda: call(),
    "bf16_packed": lambda: call(lengths=(70, 0, 1, 129)),
    "bf16_unbounded": lambda: call(bound=None),
    "fp16": lambda: call(dtype="float16", bound=None),
    "fp32": lambda: call(dtype="float32", bound=None),
    "wide": lambda: call(K=256, V=256, bound=None),
    "segments": segments,
    "lengths_vary": lengths_vary,
    "odd_widths": odd_widths,
    "packings_vary": packings_vary,
    "serving_varies": serving_varies,
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
