"""The checks of CULA_DEBUG=1, under the name that the stages of KDA know."""

from __future__ import annotations

from cula.ops.common.debug import check_values

__all__ = ["check_values"]
