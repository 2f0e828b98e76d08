"""Poisoned memory: tensors that lie inside buffers of NaN or 1e30, so that a stray read or write shows.

A `Poison` hands out copies of tensors as views into larger buffers and remembers every byte. A read outside a view
meets a NaN; `check()` says which tensor was written that should not have been, inside its view or around it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cula.checks.tolerance import bits_equal

NAN = float("nan")
LARGE = 1e30


@dataclass
class _Held:
    name: str
    buffer: torch.Tensor
    view: torch.Tensor
    snapshot: torch.Tensor
    writable: bool


@dataclass
class Poison:
    """An allocator of poisoned tensors.

    fill: what surrounds each tensor (NaN or 1e30; dtypes that cannot hold it get their largest value).
    pad: elements of fill before and after it. gap: elements of fill after each row of the last dimension, which
    makes the tensor strided (0 keeps it contiguous).
    """

    fill: float = NAN
    pad: int = 64
    gap: int = 0
    _held: list[_Held] = field(default_factory=list)

    def tensor(self, x: torch.Tensor, name: str = "tensor", *, writable: bool = False) -> torch.Tensor:
        """A view equal to `x` inside a poisoned buffer. A writable one may change; what surrounds it may not."""
        rows = tuple(x.shape[:-1]) if x.dim() else ()
        width = (x.shape[-1] if x.dim() else 1) + (self.gap if x.dim() > 1 else 0)
        count = width
        for n in rows:
            count *= n
        buffer = torch.full((count + 2 * self.pad,), self._fill_for(x.dtype), dtype=x.dtype, device=x.device)
        body = buffer[self.pad : self.pad + count]
        view = body.view(*rows, width)[..., : x.shape[-1]] if x.dim() else body[:1].view(())
        view.copy_(x)
        self._held.append(_Held(name, buffer, view, buffer.clone(), writable))
        return view

    def tensors(self, items: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """`tensor` over a dict; None and non-tensors pass through."""
        return {k: self.tensor(x, k) if isinstance(x, torch.Tensor) else x for k, x in items.items()}

    def check(self) -> None:
        """AssertionError naming the first tensor whose bytes, or whose surroundings, were written."""
        for held in self._held:
            now = held.buffer
            if held.writable:
                now = now.clone()
                was = held.snapshot.clone()
                for buffer in (now, was):
                    torch.as_strided(buffer, held.view.shape, held.view.stride(), held.view.storage_offset()).zero_()
                assert bits_equal(now, was), f"{held.name}: memory around the tensor was written"
            else:
                assert bits_equal(now, held.snapshot), f"{held.name}: an input or its surroundings were written"

    def _fill_for(self, dtype: torch.dtype) -> float | int:
        if dtype.is_floating_point:
            limit = torch.finfo(dtype).max
            return self.fill if self.fill != self.fill else min(self.fill, limit)
        if dtype == torch.bool:
            return True
        return torch.iinfo(dtype).max


def poisoned(x: torch.Tensor, *, fill: float = NAN, pad: int = 64, gap: int = 0) -> torch.Tensor:
    """One tensor in poisoned surroundings, for a test that keeps no books."""
    return Poison(fill=fill, pad=pad, gap=gap).tensor(x)
