"""CULA_DEBUG=1: see `cula.ops.common.debug`."""

from __future__ import annotations

from cula.ops.common.debug import check_range, check_slots, check_values

__all__ = ["check_range", "check_slots", "check_values"]
