"""Facts of compiled kernels, read from stand-ins for Triton's objects: no Triton is needed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cula.bench.cuda import kernels


class Compiled:
    """What Triton keeps of a compiled kernel that was launched."""

    def __init__(self, name: str, registers: int = 64, spills: int = 0) -> None:
        self.name, self.n_regs, self.n_spills = name, registers, spills
        self.metadata = SimpleNamespace(name=name, shared=2048, num_warps=4)


class Function:
    """A JITFunction: `run` launches and returns its kernel, `device_caches` holds what was compiled."""

    def __init__(self, kernel: Compiled, module: str = "cula.ops.kda.chunk.portable.intra", width: int = 5) -> None:
        self.kernel, self.module = kernel, module
        self.device_caches = {0: ({"key": kernel}, *[None] * (width - 1))}

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Compiled:
        return self.kernel


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("triton.runtime.jit")
    module.JITFunction = Function
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)


def facts(name: str, registers: int = 64, spills: int | None = 0) -> dict[str, Any]:
    return {"name": name, "registers": registers, "spills": spills, "shared": 2048, "warps": 4}


def test_the_kernels_of_a_call_are_those_that_it_launched(triton: None) -> None:
    original = Function.run
    intra, state, unused = (Function(Compiled(name)) for name in ("intra", "state", "unused"))
    foreign = Function(Compiled("foreign"), module="fla.ops.kda")

    def call() -> None:
        for function in (state, intra, state, foreign):
            function.run(1, grid=(1,))

    assert kernels.launched(call) == [facts("state"), facts("intra")]
    assert Function.run is original
    assert unused.kernel.name == "unused"


def test_an_exception_leaves_triton_as_it_was(triton: None) -> None:
    original = Function.run
    with pytest.raises(ZeroDivisionError):
        kernels.launched(lambda: 1 / 0)
    assert Function.run is original


@pytest.mark.parametrize("width", [4, 5], ids=["four entries", "five entries"])
def test_kernels_launched_another_way_are_found_in_the_caches(triton: None, width: int) -> None:
    held = [Function(Compiled("a", 255, 12), width=width), Function(Compiled("b"), module="fla.x", width=width)]
    found = kernels.launched(lambda: None)
    assert found is not None and facts("a", 255, 12) in found
    assert all(fact["name"] != "b" for fact in found) and len(held) == 2


def test_a_cache_of_another_form_is_no_error(triton: None) -> None:
    strange = Function(Compiled("a"))
    for entry in ((), None, 3, ("x",)):
        strange.device_caches = {0: entry}
        assert list(kernels.cached(type("Other", (), {}))) == []
        assert all(kernel is not strange.kernel for kernel in kernels.cached(Function))


def test_what_this_triton_does_not_tell_is_none() -> None:
    bare = SimpleNamespace(metadata=SimpleNamespace(name="k"))
    assert kernels.describe(bare) == dict.fromkeys(("registers", "spills", "shared", "warps")) | {"name": "k"}
    assert kernels.describe(object()) is None
    assert kernels.distinct([bare, bare, None]) == [kernels.describe(bare)]


def test_without_triton_there_are_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.runtime.jit", raising=False)
    made: list[int] = []
    assert kernels.launched(lambda: made.append(1)) is None
    assert made == [1]
