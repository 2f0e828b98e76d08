"""The tolerance table as data, and the one metric that it is in: RMS(difference) / RMS(reference).

The reference is always the float64 recurrence. Two rules make the ratio sane where the reference says nothing:

- a reference that is exactly zero gives the RMS of the difference itself;
- a quantity that is a difference of larger terms (the gate's gradients) or the product of many decays (dh0) may
  be far below what its terms allow to be computed. Below `FLOORS[group]` times the unit of its terms, the
  denominator is that floor. Units come with the problem (`cula.checks.runs.units`); the default unit is 0, no floor.
"""

from __future__ import annotations

import math

import torch

#: Columns of the table: float64 (eager), fp32 on a CPU, fp32 on a GPU, fp16 and bf16.
COLUMNS = ("fp64", "fp32 cpu", "fp32 gpu", "16 bit")

#: Rows of the table by group of quantities.
TABLE: dict[str, tuple[float | None, ...]] = {
    "value": (1e-10, 1e-5, 5e-5, 6e-3),
    "gradient": (1e-10, 2e-5, 1e-4, 8e-3),
    "gate gradient": (1e-10, 5e-5, 2e-4, 2e-2),
    "parameter gradient": (1e-10, 5e-5, 2e-4, 8e-3),
    "agreement": (1e-10, 1e-5, 5e-5, 6e-3),
    "bf16 pool": (None, 8e-3, 8e-3, 8e-3),
}

#: Which row a quantity reads.
GROUPS: dict[str, str] = {
    **dict.fromkeys(("o", "final_state", "out", "pool", "states_out", "checkpoints", "h", "gate"), "value"),
    **dict.fromkeys(("dq", "dk", "dv", "dh0"), "gradient"),
    **dict.fromkeys(("dg", "dbeta"), "gate gradient"),
    **dict.fromkeys(("dA_log", "ddt_bias"), "parameter gradient"),
    **dict.fromkeys(("v_first", "split", "context_parallel"), "agreement"),
    "bf16_pool": "bf16 pool",
}

#: The share of its terms' unit below which a quantity is not held to its own size.
FLOORS = {"value": 1e-12, "gradient": 1e-12, "gate gradient": 1e-3, "parameter gradient": 1e-2}

#: 1.05 x FLA's error in the same run is the second bar of 16-bit values where FLA is installed.
PEER_FACTOR = 1.05


def column(dtype: torch.dtype, device_type: str) -> str:
    """The table's column for a call whose q has `dtype` on a device of `device_type`."""
    if dtype == torch.float64:
        return "fp64"
    if dtype == torch.float32:
        return "fp32 cpu" if device_type == "cpu" else "fp32 gpu"
    if dtype in (torch.float16, torch.bfloat16):
        return "16 bit"
    raise ValueError(f"no tolerance column for {dtype}")


def tolerance(quantity: str, dtype: torch.dtype, device_type: str = "cpu") -> float:
    """The largest error that `quantity` may have. KeyError for a quantity that the table does not know."""
    value = TABLE[GROUPS[quantity]][COLUMNS.index(column(dtype, device_type))]
    if value is None:
        raise ValueError(f"the table gives no number for {quantity} in {dtype}")
    return value


def rms(x: torch.Tensor) -> float:
    """Root mean square in float64, 0 for a tensor with no element; safe against overflow of the squares."""
    if x.numel() == 0:
        return 0.0
    x = x.detach().to(torch.float64)
    peak = float(x.abs().max())
    if peak == 0.0 or not math.isfinite(peak):
        return peak
    return peak * float((x / peak).square().mean().sqrt())


def relative_error(got: torch.Tensor, reference: torch.Tensor, *, floor: float = 0.0) -> float:
    """RMS(got - reference) / max(RMS(reference), floor); inf where `got` is not finite, the RMS where that is 0.

    A shape that differs is an AssertionError: a broadcast would hide it.
    """
    assert got.shape == reference.shape, f"shape {tuple(got.shape)} is not the reference's {tuple(reference.shape)}"
    if got.numel() == 0:
        return 0.0
    reference = reference.detach().to(device=got.device, dtype=torch.float64)
    got = got.detach().to(torch.float64)
    if not bool(torch.isfinite(got).all()):
        return math.inf
    size = max(rms(reference), floor)
    difference = rms(got - reference)
    return difference if size == 0.0 else difference / size


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same shape, dtype and bits (a NaN equals the same NaN; 0.0 and -0.0 differ)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(x: torch.Tensor) -> torch.Tensor:
    as_int = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return x.detach().cpu().contiguous().view(as_int[x.element_size()])
