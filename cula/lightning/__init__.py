"""Lightning Attention (fixed decay per head): the public functions. Names load when first used."""

from cula.host.lazy import attach

_NAMES = {
    "chunk_lightning_attn": "cula.ops.lightning.chunk.op:chunk_lightning_attn",
    "lightning_prefill": "cula.ops.lightning.chunk.prefill:lightning_prefill",
    "lightning_decode": "cula.ops.lightning.decode.op:lightning_decode",
    "lightning_verify": "cula.ops.lightning.decode.op:lightning_verify",
    "lightning_slopes": "cula.ops.lightning.slopes:lightning_slopes",
}
_ABSENT = {
    "decode": "use lightning_decode",
    "prefill": "use lightning_prefill",
    "fused_recurrent_lightning_attn": "use chunk_lightning_attn, or lightning_decode over a pool",
    "lightning_attn_fwd": "use chunk_lightning_attn(q, k, v, slopes=decay, scale=1.0, state_v_first=True)",
    "lightning_attn_fwd_varlen": "use lightning_prefill",
    "linear_attention_decode": "use lightning_decode",
}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, absent=_ABSENT)

TYPE_CHECKING = False  # type checkers take it for true; importing typing costs more than all the rest of a door
if TYPE_CHECKING:
    from cula.ops.lightning.chunk.op import chunk_lightning_attn
    from cula.ops.lightning.chunk.prefill import lightning_prefill
    from cula.ops.lightning.decode.op import lightning_decode, lightning_verify
    from cula.ops.lightning.slopes import lightning_slopes
