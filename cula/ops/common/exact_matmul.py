"""Keep the caller's global precision switches away from the eager path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
