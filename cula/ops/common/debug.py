"""CULA_DEBUG=1: check the values that only the device knows, at the price of a sync, before anything runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from cula.host.errors import RangeError
from cula.host.varlen import check_boundaries
from cula.ops.common.problem import SequenceProblem

Tensor = torch.Tensor


def check_values(p: SequenceProblem, x: Any) -> None:
    """RangeError for the first slot, accepted count, offset or boundary that is out of range."""
    slots = 0 if x.state_pool is None else x.state_pool.shape[0]
    read = "state_indices" if p.tokens_stage else "read_indices"
    check_slots(read, x.read_indices, slots, x.null_index)
    check_slots("write_indices", x.write_indices, slots, x.null_index)
    _distinct("write_indices" if x.write_indices is not None else read, p, x)
    if x.states_out is not None:
        check_slots("states_out_indices", x.states_out_indices, x.states_out.shape[0], x.null_index)
    if x.num_accepted_tokens is not None:
        check_range("num_accepted_tokens", x.num_accepted_tokens, 1, x.read_indices.shape[1])
    if x.position_offsets is not None:
        check_range("position_offsets", x.position_offsets, 0, 2**62)
    if x.checkpoint_offsets is not None:
        offsets = x.checkpoint_offsets.tolist()
        if any(b < a for a, b in pairwise(offsets)) or offsets[0] < 0 or offsets[-1] > x.checkpoints.shape[0]:
            raise RangeError(
                f"checkpoint_offsets must not decrease and lie in 0..{x.checkpoints.shape[0]} (rows); got {offsets}"
            )
    if x.cu_seqlens is not None:
        check_boundaries("cu_seqlens", x.cu_seqlens.tolist(), p.T)


def check_slots(name: str, indices: Tensor | None, slots: int, null_index: int) -> None:
    """RangeError for the first index that is neither null nor a slot."""
    if indices is None or indices.numel() == 0:
        return
    bad = indices[(indices != null_index) & ((indices < -1) | (indices >= slots))]
    if bad.numel():
        raise RangeError(f"{name} must be null ({null_index}) or lie in 0..{slots - 1}; got {bad[0].item()}")


def check_range(name: str, values: Tensor, low: int, high: int) -> None:
    """RangeError for the first value outside low..high."""
    bad = values[(values < low) | (values > high)]
    if bad.numel():
        raise RangeError(f"{name} must lie in {low}..{high}; got {bad[0].item()}")


def _distinct(name: str, p: SequenceProblem, x: Any) -> None:
    """Two sequences of one call must not write one slot."""
    target = x.write_indices if x.write_indices is not None else x.read_indices
    if target is None or target.dim() != 1 or (p.tokens_stage and not x.update_state):
        return
    live = target[(target != x.null_index) & (target >= 0)]
    if live.unique().numel() != live.numel():
        raise RangeError(f"{name} must name each written slot once; got {live.tolist()}")
