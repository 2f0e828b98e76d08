"""LightningProblem: one frozen description of a call, parsed and checked once, at the door.

The `parse_*` functions check tensors and host-visible values, raise before anything is written, and return the
problem with its `Operands`. A slope s >= 0 of a head means a decay of exp(-s) per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cula.host import env
from cula.host.arch import target_of
from cula.host.errors import DeviceError, DtypeError, NotSupportedError, RangeError, ShapeError
from cula.ops.common.arguments import (
    DTYPE_NAMES,
    capturing,
    check_chunk_size,
    check_heads,
    has_wide_rows,
    lengths_of,
    parse_scale,
    parse_sequences,
    parse_state,
    wants_grad,
)
from cula.ops.common.cp_mode import parse_context_parallel
from cula.ops.common.problem import SequenceOperands, SequenceProblem
from cula.ops.lightning.slopes import check_layer, fla_step, lightning_slopes

Tensor = torch.Tensor


@dataclass(frozen=True)
class LightningProblem(SequenceProblem):
    """Everything that decides which implementation may serve a Lightning call."""


@dataclass
class Operands(SequenceOperands):
    """The tensors of a call; slopes `[HV]` on the inputs' device, any floating dtype and stride."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor


@dataclass(frozen=True)
class SlopeArguments:
    """The arguments that say how fast heads forget, unchecked: `slopes`, or the other two."""

    slopes: Any = None
    layer_idx: Any = None
    num_layers: Any = None


def parse_slopes(s: SlopeArguments, HV: int, device: Any, *, traced: bool = False) -> Tensor:
    """Slopes `[HV]`: those given, or FLA's of a layer. Values are checked where the host has them.

    traced: tensors have no values, and none that is made now may outlive the trace.
    """
    named = {"layer_idx": s.layer_idx, "num_layers": s.num_layers}
    if s.slopes is None:
        for name, value in named.items():
            if value is None:
                raise RangeError(f"slopes, or layer_idx and num_layers, must be given; {name} is None")
            if isinstance(value, bool) or not isinstance(value, int):
                raise DtypeError(f"{name} must be an int; got {type(value).__name__}")
        check_layer(HV, s.layer_idx, s.num_layers)
        return torch.empty(HV, device=device) if traced else layer_slopes(HV, s.layer_idx, s.num_layers, device)
    for name, value in named.items():
        if value is not None:
            raise RangeError(f"slopes exclude layer_idx and num_layers; got slopes and {name}={value!r}")
    slopes = s.slopes
    if not isinstance(slopes, torch.Tensor):
        raise DtypeError(f"slopes must be a tensor [HV]; got {type(slopes).__name__}")
    if slopes.dim() != 1 or slopes.shape[0] != HV:
        raise ShapeError(f"slopes must be [HV] = [{HV}]; got {list(slopes.shape)}")
    if slopes.dtype not in DTYPE_NAMES:
        raise DtypeError(f"slopes must be bf16, fp16, fp32 or fp64; got {slopes.dtype}")
    if slopes.device != device:
        raise DeviceError(f"slopes must be on {device} as q is; got {slopes.device}")
    if wants_grad(slopes):
        raise NotSupportedError("slopes get no gradient; pass slopes.detach()")
    if not traced and (slopes.device.type == "cpu" or env.debug()):
        low, high = (float(x) for x in slopes.aminmax())  # NaN where one of them is
        if not 0.0 <= low <= high < math.inf:
            raise RangeError(f"slopes must be finite and >= 0; got {low} to {high}")
    return slopes.detach()


def layer_slopes(HV: int, layer_idx: int, num_layers: int, device: Any) -> Tensor:
    """FLA's slopes of a layer on a device, kept from call to call. A captured graph must own what it reads."""
    if capturing(device):
        return torch.arange(HV, dtype=torch.float32, device=device) * fla_step(HV, layer_idx, num_layers)
    return _kept_slopes(HV, layer_idx, num_layers, device)


@lru_cache(maxsize=512)
def _kept_slopes(HV: int, layer_idx: int, num_layers: int, device: Any) -> Tensor:
    return lightning_slopes(HV, layer_idx, num_layers).to(device)


@dataclass(frozen=True)
class ChunkOptions:
    """The other arguments of a `chunk_lightning_attn` or `lightning_prefill` call, unchecked.

    grad: whether gradients are wanted, None to ask autograd. traced: the tensors have no values yet.
    """

    scale: Any = None
    final_state: bool = False
    state_v_first: bool = False
    chunk_size: Any = 64
    cp_mode: Any = None
    plan: Any = None
    cp_context: Any = None
    grad: bool | None = None
    traced: bool = False


def parse_chunk(
    q: Tensor, k: Tensor, v: Tensor, slopes: SlopeArguments, options: ChunkOptions, *, initial_state: Any = None,
    cu_seqlens: Any = None, cu_seqlens_cpu: Any = None,
) -> tuple[LightningProblem, Operands]:  # fmt: skip
    """Check a chunk call and describe it."""
    env.check_all()
    B, T, H, HV, K, V = check_heads(q, k, v)
    opt = options
    s = parse_slopes(slopes, HV, q.device, traced=opt.traced)
    check_chunk_size(opt.chunk_size)
    host_copy = not capturing(q.device)
    N, bounds = parse_sequences(B, T, q.device, cu_seqlens, cu_seqlens_cpu, host_copy=host_copy, traced=opt.traced)
    dtype = DTYPE_NAMES[q.dtype]
    if initial_state is not None:
        axes, tail = ("[N, HV, V, K]", (V, K)) if opt.state_v_first else ("[N, HV, K, V]", (K, V))
        parse_state("initial_state", initial_state, (N, HV, *tail), axes, dtype, q.device)
    grad = wants_grad(q, k, v, initial_state) if opt.grad is None else opt.grad
    problem = LightningProblem(
        B, T, H, HV, K, V, N, dtype=dtype, state_dtype="fp64" if dtype == "fp64" else "fp32",
        packed=cu_seqlens is not None, lengths=lengths_of(bounds), scale=parse_scale(opt.scale, K),
        initial_state=initial_state is not None, final_state=bool(opt.final_state),
        state_v_first=bool(opt.state_v_first), chunk_size=opt.chunk_size, grad=grad,
        cp=parse_context_parallel(opt.cp_mode, opt.plan, opt.cp_context, grad),
        wide_rows=not opt.traced and has_wide_rows(q, k, v),
    )  # fmt: skip
    operands = Operands(
        q, k, v, s, initial_state=initial_state, cu_seqlens=cu_seqlens, boundaries=bounds, target=target_of(q.device)
    )
    return problem, operands
