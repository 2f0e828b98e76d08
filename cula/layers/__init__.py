"""Layers (torch.nn.Module) built on the public functions. Names load when first used."""

from cula.host.lazy import attach

_NAMES = {
    "KimiDeltaAttention": "cula.layers.kda:KimiDeltaAttention",
    "KDACache": "cula.layers.cache:KDACache",
    "KDADraft": "cula.layers.cache:KDADraft",
}
_ABSENT = {"LightningAttention": "not in this version; KimiDeltaAttention is"}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, absent=_ABSENT)

TYPE_CHECKING = False  # type checkers take it for true; importing typing costs more than all the rest of a door
if TYPE_CHECKING:
    from cula.layers.cache import KDACache, KDADraft
    from cula.layers.kda import KimiDeltaAttention
