"""Scratch tensors of one call, by name, reused from slab to slab: fresh memory costs more than the arithmetic."""

from __future__ import annotations

from math import prod

import torch

Tensor = torch.Tensor

_ALIGN = 64  # elements: no two buffers share a cache line, and every one starts on a vector boundary


class Workspace:
    """`ws("P", n, C, K)` is a contiguous tensor of the compute dtype; the same name gives the same memory again.

    A name stands for one role, whose trailing sizes never change within a call. Contents persist between uses,
    which `zeroed` relies on: it fills a buffer once, and its users only ever write the same places.

    Buffers are cut from one block of `elements`: a single block below 32 MiB is what the C library's allocator
    keeps for the next call, where many blocks of 1 MiB are returned and faulted in again each time. What does
    not fit gets memory of its own.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, elements: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self._block = torch.empty(elements, dtype=dtype, device=device)
        self._used = 0
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The buffer, its contents whatever they were."""
        view = self._views.get((name, shape))
        return self._get(name, shape) if view is None else view

    def zeroed(self, name: str, *shape: int) -> Tensor:
        """The buffer, zero when it is first made."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._get(name, shape).zero_()
        return self(name, *shape)

    def _get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._make(size)
        view = self._views[name, shape] = buffer[:size].view(shape)
        return view

    def _make(self, size: int) -> Tensor:
        start = self._used
        if start + size > self._block.numel():
            return torch.empty(size, dtype=self.dtype, device=self.device)
        self._used = -(-(start + size) // _ALIGN) * _ALIGN
        return self._block[start : start + size]
