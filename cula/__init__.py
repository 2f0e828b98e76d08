"""cula: linear-attention kernels (Kimi Delta Attention, Lightning Attention) for CPU and GPU.

Importing this package loads no torch and no kernel DSL; every public name is imported when first used.
"""

from cula.host.lazy import attach

__version__ = "0.1.0"

_NAMES = {
    "CulaError": "cula.host.errors:CulaError",
    "ShapeError": "cula.host.errors:ShapeError",
    "DtypeError": "cula.host.errors:DtypeError",
    "DeviceError": "cula.host.errors:DeviceError",
    "RangeError": "cula.host.errors:RangeError",
    "NotSupportedError": "cula.host.errors:NotSupportedError",
    "NotSplittableError": "cula.host.errors:NotSplittableError",
    "explain": "cula.host.explain:explain",
    "available": "cula.host.explain:available",
}
_ABSENT = {
    "chunk_kda": "use `from cula.kda import chunk_kda`",
    "kda_prefill": "use `from cula.kda import kda_prefill`",
    "kda_decode": "use `from cula.kda import kda_decode`",
}

__getattr__, __dir__, __all__ = attach(
    __name__,
    _NAMES,
    submodules=("integrations", "kda", "layers", "lightning", "ops"),
    absent=_ABSENT,
)

TYPE_CHECKING = False  # type checkers take it for true; importing typing costs more than all the rest of a door
if TYPE_CHECKING:
    from cula import integrations, kda, layers, lightning, ops
    from cula.host.errors import (
        CulaError,
        DeviceError,
        DtypeError,
        NotSplittableError,
        NotSupportedError,
        RangeError,
        ShapeError,
    )
    from cula.host.explain import available, explain
