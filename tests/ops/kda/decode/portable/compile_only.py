"""Compile the decode kernels for an architecture that need not be there, by the host code that a GPU would run.

    TRITON_INTERPRET=0 python compile_only.py ARCH JOB...

A stub driver names the architecture, a launch compiles and stops there, CPU tensors give the arguments. Prints one
JSON object {job: [facts of each compilation]}: 128-bit loads and stores of global memory, shared memory in bytes,
arithmetic instructions by kind, spilled bytes, seconds, and which call of the job compiled it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cula.host.arch import parse_target
from cula.kda import KDARollback, fused_recurrent_kda, kda_decode, kda_decode_fused, kda_rollback, kda_verify
from cula.ops.kda.decode import calls as forms
from cula.ops.kda.decode import fused_step, parse, rollback
from cula.ops.kda.decode.portable import config

ARITHMETIC = {
    "fma": r"fma\.rn\.f32", "mul": r"mul(?:\.rn)?\.f32", "add": r"add(?:\.rn)?\.f32", "sub": r"sub(?:\.rn)?\.f32",
    "ex2": r"ex2\.approx", "rcp": r"rcp\.approx", "sqrt": r"sqrt\.",
}  # fmt: skip

compiled: list[dict[str, Any]] = []
seen: set[int] = set()
calls = 0


def install(arch: str) -> None:
    """Make `arch` what cula and Triton see, and let no kernel run."""
    target = parse_target(arch)
    major, minor = target.capability
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    parse.target_of = rollback.target_of = fused_step.target_of = lambda device: target
    JITFunction.__getitem__ = lambda self, grid: lambda *args, **options: note(self, grid, args, options)


def note(function: JITFunction, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compile what this launch would run, and note it the first time."""
    began = time.perf_counter()
    kernel = function.run(*args, grid=grid, warmup=True, **options)
    if id(kernel) in seen:
        return
    seen.add(id(kernel))
    ptx = kernel.asm["ptx"]
    compiled.append(
        {
            "name": function.fn.__name__,
            "seconds": time.perf_counter() - began,
            "shared": kernel.metadata.shared,
            "loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
            "stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
            "arithmetic": {kind: len(re.findall(pattern, ptx)) for kind, pattern in ARITHMETIC.items()},
            "spills": spills(ptx),
            "call": calls,
        }
    )


def spills(ptx: str) -> int:
    """Bytes that Triton's own assembler spills."""
    arch = re.search(r"\.target (\w+)", ptx)[1]
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = folder / "ptxas-blackwell"
    tools = [folder / "ptxas", *([newer] if newer.exists() else [])]
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "kernel.ptx"
        source.write_text(ptx)
        for tool in tools:
            command = [tool, "-v", f"--gpu-name={arch}", source, "-o", Path(place) / "kernel.cubin"]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            found = re.findall(r"(\d+) bytes spill stores", said.stderr)
            if said.returncode == 0 and found:
                return sum(map(int, found))
    raise RuntimeError(f"no assembler took the kernel: {said.stderr[-500:]}")


def inputs(N: int, T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, g, beta, values unset."""
    shapes = ((N, T, H, K), (N, T, H, K), (N, T, HV, V), (N, T, HV, K), (N, T, HV))
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def call(
    N: int = 64, T: int = 1, H: int = 64, HV: int = 64, K: int = 128, V: int = 128, pool: str = "float32",
    bound: float | None = -5.0, verify: bool = False, keep: bool = False, lengths: tuple[int, ...] | None = None,
    pad: int = 0, **options: Any,
) -> None:  # fmt: skip
    """kda_decode, or kda_verify; keep: with the states of all tokens; lengths: packed; pad: elements after a slot."""
    global calls
    calls += 1
    states = torch.empty(N + 1, HV * V * K + pad, dtype=getattr(torch, pool))[:, : HV * V * K].view(N + 1, HV, V, K)
    given: dict[str, Any] = {
        "A_log": torch.empty(HV), "dt_bias": torch.empty(HV * K), "lower_bound": bound, "state_pool": states,
        "state_indices": torch.empty(N, dtype=torch.int32), "implementation": "portable", **options,
    }  # fmt: skip
    rows = (1, sum(lengths)) if lengths else (N, T)
    if lengths:
        given["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    if keep:
        given["states_out"] = torch.empty(2, HV, V, K, dtype=states.dtype)
        given["states_out_indices"] = torch.empty(rows if not lengths else rows[1:], dtype=torch.int32)
    (kda_verify if verify else kda_decode)(*inputs(*rows, H, HV, K, V, torch.bfloat16), **given)


def drafts() -> None:
    """A tree, and a rollback filled and committed."""
    call(T=4, verify=True, parent=torch.empty(64, 4, dtype=torch.int32))
    r = KDARollback.allocate(64, 4, 64, 128, 128, "cpu")
    call(T=4, verify=True, rollback=r)
    index = torch.empty(64, dtype=torch.int32)
    kda_rollback(torch.empty(65, 64, 128, 128), index, r, index, implementation="portable")


def serving(
    N: int = 64, H: int = 64, HV: int = 64, K: int = 128, V: int = 128, pool: str = "float32", bare: bool = False
) -> None:
    """kda_decode_fused, bare: without the gated norm."""
    global calls
    calls += 1
    channels, kind = 2 * H * K + HV * V, torch.bfloat16
    gated = {} if bare else {"output_gate": torch.empty(N, HV, V, dtype=kind), "norm_weight": torch.empty(V)}
    kda_decode_fused(
        torch.empty(N, channels, dtype=kind), torch.empty(N, HV, K, dtype=kind), torch.empty(N, HV, dtype=kind),
        conv_weight=torch.empty(channels, 4), conv_pool=torch.empty(N + 1, channels, 3, dtype=kind),
        state_pool=torch.empty(N + 1, HV, V, K, dtype=getattr(torch, pool)),
        state_indices=torch.empty(N, dtype=torch.int32), A_log=torch.empty(HV), dt_bias=torch.empty(HV * K),
        lower_bound=-5.0, implementation="portable", **gated,
    )  # fmt: skip


def servings_vary() -> None:
    """kda_decode_fused of many batch sizes."""
    for N in (1, 2, 7, 16, 33, 100):
        serving(N, H=12, HV=12)


def recurrent(**flags: Any) -> None:
    """fused_recurrent_kda with states, K-first unless told otherwise."""
    q, k, v, g, beta = inputs(2, 100, 4, 4, 128, 128, torch.bfloat16)
    state = torch.empty(2, 4, 128, 128)
    fused_recurrent_kda(
        q, k, v, g, beta, initial_state=state, output_final_state=True, implementation="portable", **flags
    )


def batches_vary() -> None:
    """Decode of many batch sizes, over pools of as many slots, at two numbers of heads."""
    for N in (1, 2, 3, 7, 16, 33, 64, 100, 256):
        call(N=N, H=12, HV=12)


def drafts_vary() -> None:
    """Verify of many lengths and batches."""
    for N, T in ((64, 2), (65, 3), (100, 4), (77, 5), (64, 16), (101, 7)):
        call(N=N, T=T, H=48, HV=48, verify=True, keep=True)


def packings_vary() -> None:
    """Ragged verify of many numbers of sequences and lengths."""
    for lengths in ((1, 2, 3) * 40, (16,) * 128, (0, 5) * 50, (4, 0, 1) * 51):
        call(N=len(lengths), H=48, HV=48, lengths=lengths, verify=True)


def one_arithmetic() -> None:
    """The same tile for all: decode, verify with and without states out and update, ragged."""
    elements = config.ONE_TOKEN, config.MANY_TOKENS
    config.ONE_TOKEN = config.MANY_TOKENS = config.FEW
    call()
    call(T=4, verify=True)
    call(T=4, verify=True, keep=True, update_state=True)
    call(lengths=(3, 4) * 32, verify=True)
    config.ONE_TOKEN, config.MANY_TOKENS = elements


JOBS: dict[str, Callable[[], None]] = {
    "decode": call,
    "few": lambda: call(N=1),
    "K64": lambda: call(K=64, V=64, bound=None),
    "K256": lambda: call(K=256, V=256, H=16, HV=16),
    "bf16_pool": lambda: call(pool="bfloat16"),
    "padded": lambda: call(pad=4),
    "unaligned": lambda: call(pad=2),
    "verify": lambda: call(T=4, verify=True),
    "keep": lambda: call(T=4, verify=True, keep=True, update_state=True),
    "drafts": drafts,
    "serving": serving,
    "serving_bf16": lambda: serving(pool="bfloat16", bare=True),
    "serving_K256": lambda: serving(K=256, V=256, H=16, HV=16),
    "serving_K64": lambda: serving(K=64, V=64, H=16, HV=64),
    "servings_vary": servings_vary,
    "recurrent": recurrent,
    "batches_vary": batches_vary,
    "drafts_vary": drafts_vary,
    "packings_vary": packings_vary,
    "one_arithmetic": one_arithmetic,
}


def main(arch: str, *jobs: str) -> None:
    """Run the jobs, one after the other."""
    global calls
    install(arch)
    result = {}
    for job in jobs:
        compiled.clear()
        seen.clear()
        forms._seen.clear()
        calls = 0
        JOBS[job]()
        result[job] = list(compiled)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
