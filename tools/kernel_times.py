"""Each launch of a portable chunk_kda call: its time on a GPU, or its registers and spills without one.

    python tools/kernel_times.py [--T 8192] [--H 64] [--chunk 64] [--grad] [--set intra.num_warps=2]...
    python tools/kernel_times.py --compile sm90 ...

--set changes a field of `Config` (cula/ops/kda/chunk/portable/config.py) for this run: the way to try a configuration
before it goes into the table. With --compile the call's launches are compiled for that architecture and do not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 20
#: The kernels that each launch of `Config` is for; maxnreg, which is not in the table, limits their registers.
KERNELS = {
    "intra": ("intra_kernel",),
    "walk": ("delta_h_kernel", "bwd_dhu_kernel", "pre_scan_kernel"),
    "gradients": ("bwd_dqk_kernel",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; 2 for a bad argument, 1 where it needs a GPU that is not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("B", 1), ("T", 8192), ("H", 64), ("K", 128), ("V", 128), ("chunk", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--softplus", action="store_true", help="the unbounded gate instead of lower_bound=-5")
    parser.add_argument("--grad", action="store_true", help="forward and backward")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--compile", metavar="ARCH", help="sm80, sm90, sm100: compile only")
    options = parser.parse_args(arguments)
    try:
        changes = [parse_change(text) for text in options.set]
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("TRITON_INTERPRET", "0")
    sys.path.insert(0, str(ROOT))
    import torch

    if not options.compile and not torch.cuda.is_available():
        print("kernel_times: no GPU here; --compile sm90 shows registers and spills without one", file=sys.stderr)
        return 1
    change_configuration(changes)
    launches = record(options, changes)
    print(f"{'kernel':16} {'warps':>5} {'registers':>9} {'spills':>6} {'shared':>7} {'ms':>8}")
    total = 0.0
    for name, kernel, again in launches:
        registers, spills = ptxas(kernel)
        ms = None if options.compile else timed(again)
        total += ms or 0.0
        shown = "" if ms is None else f"{ms:8.3f}"
        print(f"{name:16} {kernel.metadata.num_warps:5} {registers:9} {spills:6} {kernel.metadata.shared:7} {shown}")
    if not options.compile:
        print(f"{'sum':16} {total:46.3f}")
    return 0


def parse_change(text: str) -> tuple[str, str, int]:
    """("intra", "num_warps", 2) from "intra.num_warps=2"."""
    match = re.fullmatch(r"(intra|walk|gradients)\.(block|num_warps|num_stages|maxnreg)=(\d+)", text)
    if match is None:
        fields = "block, num_warps, num_stages or maxnreg"
        raise ValueError(f"--set takes intra, walk or gradients . {fields} = number; got {text!r}")
    return match[1], match[2], int(match[3])


def change_configuration(changes: Sequence[tuple[str, str, int]]) -> None:
    """Make the portable rows use these values."""
    from cula.ops.kda.chunk.portable import backward, config, forward

    def configure(*args: Any, **options: Any) -> Any:
        c = config.configure(*args, **options)
        for launch, field, value in changes:
            if field == "maxnreg":
                continue
            c = dataclasses.replace(c, **{launch: dataclasses.replace(getattr(c, launch), **{field: value})})
        return c

    forward.configure = backward.configure = configure


def record(
    options: argparse.Namespace, changes: Sequence[tuple[str, str, int]] = ()
) -> list[tuple[str, Any, Callable[[], Any]]]:
    """(name, compiled kernel, the launch again) of each launch of the call, in order."""
    import torch
    from triton.runtime.jit import JITFunction

    from cula.kda import chunk_kda

    if options.compile:
        pretend(options.compile)
    launches: list[tuple[str, Any, Callable[[], Any]]] = []
    limits = {kernel: value for group, field, value in changes if field == "maxnreg" for kernel in KERNELS[group]}

    def launcher(function: JITFunction, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            if function.fn.__name__ in limits:
                named["maxnreg"] = limits[function.fn.__name__]

            def run() -> Any:
                return function.run(*args, grid=grid, warmup=bool(options.compile), **named)

            kernel = run()
            launches.append((function.fn.__name__.removesuffix("_kernel"), kernel, run))
            return kernel

        return launch

    JITFunction.__getitem__ = launcher
    device = "cpu" if options.compile else "cuda"
    dtype = getattr(torch, options.dtype)
    B, T, H, K, V = options.B, options.T, options.H, options.K, options.V
    if options.compile:
        T = min(T, 4 * options.chunk)
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V), "g": (B, T, H, K), "beta": (B, T, H)}
    torch.manual_seed(0)
    x = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
    x |= {"A_log": torch.randn(H, device=device) / 2, "dt_bias": torch.randn(H, K, device=device) / 10}
    for tensor in x.values():
        tensor.requires_grad_(options.grad)
    o, _ = chunk_kda(
        **x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        lower_bound=None if options.softplus else -5.0, chunk_size=options.chunk, implementation="portable",
    )  # fmt: skip
    if options.grad:
        torch.autograd.grad(o, list(x.values()), torch.randn_like(o))
    return launches


def pretend(arch: str) -> None:
    """Make `arch` what cula and Triton see."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from cula.host.arch import parse_target
    from cula.ops.kda import problem

    target = parse_target(arch)
    stub = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * target.capability[0] + target.capability[1], 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(stub)
    problem.target_of = lambda device: target


def ptxas(kernel: Any) -> tuple[str, str]:
    """(registers a thread, bytes of spill stores), as Triton's own assembler counts them."""
    import triton

    ptx = kernel.asm["ptx"]
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    arch = re.search(r"\.target (\w+)", ptx)[1]
    newer = folder / "ptxas-blackwell"
    tool = newer if newer.exists() and int(re.search(r"\d+", arch)[0]) >= 100 else folder / "ptxas"
    with tempfile.TemporaryDirectory() as home:
        source = Path(home, "kernel.ptx")
        source.write_text(ptx)
        command = [str(tool), "-v", "--gpu-name", arch, str(source), "-o", str(Path(home, "kernel.cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return registers[1] if registers else "?", spills[1] if spills else "?"


def timed(launch: Callable[[], Any]) -> float:
    """Milliseconds of one launch, the mean of a queue of them."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        launch()
    start.record()
    for _ in range(REPEATS):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS


if __name__ == "__main__":
    sys.exit(main())
