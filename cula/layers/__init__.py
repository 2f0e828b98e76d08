"""Layers (torch.nn.Module) built on the public functions. Names load when first used."""

from typing import TYPE_CHECKING

from cula.host.lazy import attach

_NAMES = {
    "KimiDeltaAttention": "cula.layers.kda:KimiDeltaAttention",
    "KDACache": "cula.layers.cache:KDACache",
    "KDADraft": "cula.layers.cache:KDADraft",
}
_ABSENT = {"LightningAttention": "not in this version; KimiDeltaAttention is"}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, absent=_ABSENT)

if TYPE_CHECKING:
    from cula.layers.cache import KDACache, KDADraft
    from cula.layers.kda import KimiDeltaAttention
