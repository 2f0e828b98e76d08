"""Context-parallel vocabulary that every arch shares."""

from __future__ import annotations

from cula.ops.common.cp_mode import CPMode, NotSplittableError

__all__ = ["CPMode", "NotSplittableError"]
