"""Triton kernels on CPU tensors, compiled for a GPU and run by `machine`: the host code that a GPU would run."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.ptx.machine import Kernel, Memory

kernels: dict[str, Kernel] = {}


def extent(x: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if x.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


class Runs:
    """Every launch inside `with Runs("sm90"):` compiles for that architecture and runs on numpy.

    Triton's cache must be this process's own: what it holds afterwards has PTX and no machine code.
    """

    def __init__(self, arch: str, **options: Any) -> None:
        self.arch, self.options = arch, options
        self.launches: dict[str, int] = {}  # kernel -> products

    def __enter__(self) -> Runs:
        number = int(self.arch[2:])
        self.before, self.getitem = driver._active, JITFunction.__getitem__
        self.assemble, CUDABackend.make_cubin = CUDABackend.make_cubin, lambda *args: b""  # PTX is all it takes
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: GPUTarget("cuda", number, 32),
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
                get_active_torch_device=lambda: torch.device("cpu"),
            )
        )
        JITFunction.__getitem__ = lambda function, grid: (
            lambda *args, **options: self.launch(function, grid, args, options)
        )
        return self

    def __exit__(self, *error: object) -> None:
        JITFunction.__getitem__ = self.getitem
        CUDABackend.make_cubin = self.assemble
        driver._active = self.before

    def launch(self, function: JITFunction, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile what the launch asks for, and run it."""
        compiled = function.run(*args, grid=grid, warmup=True, **options)
        text = compiled.asm["ptx"]
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in kernels:
            kernels[key] = Kernel(text)
        memory, values = Memory(), []
        given = dict(zip(function.arg_names, args, strict=False)) | options
        fixed = {path[0] for path in compiled.src.constants}
        for k, name in enumerate(compiled.src.signature):
            if k in fixed or compiled.src.signature[name] == "constexpr":
                continue
            value = given[name]
            if isinstance(value, torch.Tensor):
                memory.add(value.data_ptr(), extent(value), name)
                value = value.data_ptr()
            elif isinstance(value, float):
                value = torch.tensor(value, dtype=torch.float32).view(torch.int32).item()
            values.append(int(value))
        values += [0] * (len(kernels[key].program.params) - len(values))
        grid = grid(given) if callable(grid) else grid
        threads = 32 * compiled.metadata.num_warps
        done = kernels[key].run(grid, threads, values, memory, shared=compiled.metadata.shared, **self.options)
        name = function.fn.__name__
        self.launches[name] = self.launches.get(name, 0) + done
