"""The sm90 chunk rows on CPU tensors: their kernels compiled, and the PTX run on numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cula.host.arch import parse_target
from cula.ops.kda import problem
from cula.ops.kda.chunk.sm90.options import Options
from tests.ptx.machine import Kernel, Memory


class Compiler:
    """Kernels by their options, compiled once in a session: PTX and cubin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[Options, SimpleNamespace] = {}

    def __call__(self, options: Options) -> SimpleNamespace:
        if options not in self.found:
            from cula.ops.kda.chunk.sm90.forward import compile_kernel

            place = self.folder / str(len(self.found))
            place.mkdir()
            compile_kernel(options, f"--keep-ptx --keep-cubin --dump-dir={place}")
            ptx, cubin = (next(place.glob(f"*.{kind}")) for kind in ("ptx", "cubin"))
            self.found[options] = SimpleNamespace(ptx=ptx.read_text(), cubin=cubin)
        return self.found[options]


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    pytest.importorskip("cutlass")
    return Compiler(tmp_path_factory.mktemp("cute"))


@lru_cache(maxsize=16)
def machine(ptx: str) -> Kernel:
    return Kernel(ptx)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> Callable[..., None]:
    """Calls with implementation="sm90" run on CPU tensors; the fixture's value sets the order of warps and lateness."""
    from cula.ops.kda.chunk.sm90 import forward

    target = parse_target("sm90")
    monkeypatch.setattr(problem, "target_of", lambda device: target)
    how: dict[str, Any] = {"warps": 0, "late": True, "races": True}
    memory = SimpleNamespace(now=None, kept=None)
    arguments = forward.arguments

    def record(p: Any, x: Any, source: Any, leaving: Any, o: torch.Tensor) -> Any:
        values = arguments(p, x, source, leaving, o)
        memory.now, memory.kept = Memory(), x
        extra = x.memo["kept alive"]
        given = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "o": o, "state in": source.tensor,
                 "state out": leaving.tensor, "read": source.indices, "write": leaving.indices,
                 "flag": x.has_initial_state, "A_log": extra[0], "dt_bias": extra[1], "cu": extra[2],
                 "offsets": extra[3], "checkpoints": x.checkpoints}  # fmt: skip
        for name, tensor in given.items():
            if tensor is not None and tensor.numel():
                span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                memory.now.add(tensor.data_ptr(), span * tensor.element_size(), name)
        return values

    def launch(options: Options, values: list[int | float]) -> None:
        kernel = machine(compiler(options).ptx)
        bits = [torch.tensor(x).view(torch.int32).item() if isinstance(x, float) else x for x in values]
        HV, N = values[-5], values[-3]
        grid = (HV * (2 // options.consumers), N)
        kernel.run(grid, options.threads, bits, memory.now, shared=227 * 1024, **how)

    monkeypatch.setattr(forward, "arguments", record)
    monkeypatch.setattr(forward, "launch", launch)
    return how.update
