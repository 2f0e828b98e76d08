"""Lightning Attention (fixed decay per head): the public functions, loaded when first used."""

from cula.host.lazy import attach

_NAMES = {"lightning_slopes": "cula.ops.lightning.slopes:lightning_slopes"}
_LATER = "not in this version of cula; lightning_slopes is"
_ABSENT = dict.fromkeys(("chunk_lightning_attn", "lightning_prefill", "lightning_decode", "lightning_verify"), _LATER)

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, absent=_ABSENT)

TYPE_CHECKING = False  # type checkers take it for true; importing typing costs more than all the rest of a door
if TYPE_CHECKING:
    from cula.ops.lightning.slopes import lightning_slopes
