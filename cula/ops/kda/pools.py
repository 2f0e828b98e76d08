"""Slots of state pools, under the name that the stages of KDA know."""

from __future__ import annotations

from cula.ops.common.pools import scatter_rows, slot_ids

__all__ = ["scatter_rows", "slot_ids"]
