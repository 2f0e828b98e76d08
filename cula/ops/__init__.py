"""Internal kernels, by algorithm / stage / arch / part. Nothing here is public API."""

from cula.host.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {}, submodules=("common", "kda", "lightning"))
