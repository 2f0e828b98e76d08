"""Kimi Delta Attention: the public functions. Names load when first used; no kernel DSL before it runs."""

from cula.host.lazy import attach

_NAMES = {
    "chunk_kda": "cula.ops.kda.chunk.op:chunk_kda",
    "kda_prefill": "cula.ops.kda.chunk.prefill:kda_prefill",
    "fused_recurrent_kda": "cula.ops.kda.decode.op:fused_recurrent_kda",
    "kda_decode": "cula.ops.kda.decode.op:kda_decode",
    "kda_verify": "cula.ops.kda.decode.op:kda_verify",
    "kda_decode_fused": "cula.ops.kda.decode.fused_step:kda_decode_fused",
    "kda_rollback": "cula.ops.kda.decode.rollback:kda_rollback",
    "KDARollback": "cula.ops.kda.decode.rollback:KDARollback",
    "fused_kda_gate": "cula.ops.kda.gate.op:fused_kda_gate",
    "kda_recurrent_reference": "cula.ops.kda.reference:kda_recurrent_reference",
    "kda_chunk_reference": "cula.ops.kda.chunk.reference:kda_chunk_reference",
}
_ABSENT = {
    "decode": "use kda_decode",
    "prefill": "use kda_prefill",
    "naive_recurrent_kda": "use kda_recurrent_reference",
    "naive_chunk_kda": "use kda_chunk_reference",
    "kda_prefill_hopper": "use kda_prefill(..., implementation='sm90')",
    "flashkda_prefill": "use kda_prefill",
    "kda_decode_mtp": "use kda_verify",
    "kda_packed_decode": "use kda_decode, which takes strided slices of a packed projection",
    "fused_sigmoid_gating_delta_rule_update": "use kda_decode",
}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, absent=_ABSENT)

TYPE_CHECKING = False  # type checkers take it for true; importing typing costs more than all the rest of a door
if TYPE_CHECKING:
    from cula.ops.kda.chunk.op import chunk_kda
    from cula.ops.kda.chunk.prefill import kda_prefill
    from cula.ops.kda.chunk.reference import kda_chunk_reference
    from cula.ops.kda.decode.fused_step import kda_decode_fused
    from cula.ops.kda.decode.op import fused_recurrent_kda, kda_decode, kda_verify
    from cula.ops.kda.decode.rollback import KDARollback, kda_rollback
    from cula.ops.kda.gate.op import fused_kda_gate
    from cula.ops.kda.reference import kda_recurrent_reference
