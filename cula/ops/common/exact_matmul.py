"""Products of plain torch whose bits depend on nothing but their operands: no switch of the caller's, no batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Tensor = torch.Tensor


@contextmanager
def exact_matmul(device: torch.device) -> Iterator[None]:
    """IEEE fp32 products inside: no autocast, and no TF32 on CUDA whatever the caller has allowed elsewhere."""
    if not torch.is_autocast_enabled(device.type):
        with _no_tf32(device):
            yield
        return
    with torch.autocast(device.type, enabled=False), _no_tf32(device):
        yield


@contextmanager
def _no_tf32(device: torch.device) -> Iterator[None]:
    allowed = torch.get_float32_matmul_precision()
    if device.type != "cuda" or allowed == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


#: Matrices that one call multiplies on a GPU. cuBLAS picks its kernel, and so the bits, by the size of the batch.
BLOCK = 32


def bmm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`, each product the same in bits whatever batch it is in.

    MKL's batched product is so on a CPU. On a GPU blocks of one fixed size and layout are multiplied.
    """
    if a.device.type == "cpu":
        return torch.bmm(a, b, out=out)
    a, b = a.contiguous(), b.contiguous()
    for i in range(0, a.shape[0], BLOCK):
        x, y = a[i : i + BLOCK], b[i : i + BLOCK]
        count = x.shape[0]
        if count < BLOCK:
            x, y = (torch.cat((t, t.new_zeros(BLOCK - count, *t.shape[1:]))) for t in (x, y))
        out[i : i + count] = torch.bmm(x, y)[:count]
    return out


def add_bmm(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out <- out + a @ b, in place, as `bmm`."""
    if out.device.type == "cpu":
        return out.baddbmm_(a, b)
    return out.add_(bmm(a, b, torch.empty_like(out)))


def sum_last(x: Tensor) -> Tensor:
    """Sum of `x` `[n, rows, D]` over D, the same in bits whatever n is."""
    if x.device.type == "cpu":
        return x.sum(-1)
    n, rows, D = x.shape
    return bmm(x, x.new_ones(n, D, 1), x.new_empty(n, rows, 1)).squeeze(-1)
