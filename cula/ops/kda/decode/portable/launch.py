"""recurrent, decode and verify, portable: one launch of `step`."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton

from cula.ops.kda.decode.portable import step
from cula.ops.kda.decode.portable.config import configure
from cula.ops.kda.decode.portable.layout import (
    COLUMN,
    INDEX,
    NONE,
    ROW,
    SAME,
    on_device_of,
    programs_of,
    rows_of,
    states,
)
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor

GATES = {"finished": step.FINISHED.value, "softplus": step.SOFTPLUS.value, "lower_bound": step.LOWER_BOUND.value}
#: A compiled kernel is launched again without Triton's binder, through an interface that these versions have.
DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
#: Positions of q, k, v, g, dt_bias, o, source, target, kept, roll_k, roll_u and roll_g in `step`.
ALIGNED = (0, 1, 2, 3, 6, 7, 8, 9, 10, 17, 18, 19)
#: Tokens of a sequence of kda_verify.
MAX_TOKENS = 16


@dataclass
class Launch:
    """What a launch needs besides its tensors: programs, integers and scalars in the order of the kernel, constants.

    aligned: the positions of the tensors whose alignment Triton asks for.
    """

    function: Any
    grid: tuple[int, int, int]
    integers: tuple[int, ...]
    scalars: tuple[float, ...]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    warps: int = 1
    kernel: Any = None

    def run(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch; where it was launched before, without Triton's binder."""
        at = 0
        for position in self.aligned:
            at |= tensors[position].data_ptr()
        direct = not at & 15
        if direct and self.kernel is not None:
            self.kernel[self.grid](*tensors, *self.integers, *self.scalars, *self.constants.values())
            return
        kernel = self.function[self.grid](
            *tensors, *self.integers, *self.scalars, **self.constants, num_warps=self.warps, num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip
        if direct and DIRECT and hasattr(kernel, "packed_metadata"):
            self.kernel = kernel


def strides_of(p: KDAProblem, t: Tensor) -> tuple[int, int, int]:
    """From sequence to sequence (from token to token where packed or `[1, N, ...]`), token to token, head to head."""
    across, along, head = t.stride()[:3]
    if p.packed or p.N != p.B:
        across = along
    return (across if p.N > 1 else 0, along if t.shape[1] > 1 else 0, head if t.shape[2] > 1 else 0)


def run(p: KDAProblem, x: Operands) -> Any:
    """(o, final_state) of fused_recurrent_kda; the output alone of kda_decode and kda_verify."""
    if not p.pool:
        return _recurrent(p, x)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device) if x.out is None else x.out
    if not p.N or not p.T:
        return o.zero_()
    to = NONE if not x.update_state else SAME if x.write_indices is None else INDEX
    with on_device_of(o):
        launch_step(p, x, o, (INDEX if x.num_accepted_tokens is None else COLUMN, x.state_pool), (to, x.state_pool))
    return o


def _recurrent(p: KDAProblem, x: Operands) -> tuple[Tensor, Tensor | None]:
    """fused_recurrent_kda: states in tensors of their own, K-first ones seen through a transpose."""
    device, v_first = x.q.device, p.state_v_first
    shape = (p.N, p.HV, *((p.V, p.K) if v_first else (p.K, p.V)))
    with torch.no_grad():
        o = torch.empty(x.v.shape, dtype=x.v.dtype, device=device)
        final = torch.empty(shape, dtype=torch.float32, device=device) if p.final_state else None
        if not p.N or not p.T:
            if final is not None and p.N:
                final.zero_() if x.initial_state is None else final.copy_(x.initial_state)
            return o.zero_(), final
        initial = None if x.initial_state is None else rows_of(x.initial_state)
        source = NONE if initial is None else ROW
        target = NONE if final is None else ROW
        with on_device_of(o):
            launch_step(p, x, o, (source, o if initial is None else initial), (target, o if final is None else final))
    return o, final


def launch_step(p: KDAProblem, x: Operands, o: Tensor, source: tuple[int, Tensor], target: tuple[int, Tensor]) -> None:
    """One launch, from what an earlier call of the same form and strides left in `x.memo`."""
    q, kept, roll = x.q, x.states_out, x.rollback
    cu = x.cu_seqlens
    if cu is not None and cu.device != q.device:
        cu = cu.to(q.device)
    given = (q, x.k, x.v, x.g, x.beta, o, source[1], target[1], kept, x.read_indices, x.write_indices,
             x.num_accepted_tokens, cu, x.states_out_indices, x.parent)  # fmt: skip
    form = [None if t is None else t.stride() for t in given]
    known = x.memo.get("launch")  # one entry, replaced whole: calls of one form may run in several threads
    tensors = (
        rows_of(q), rows_of(x.k), rows_of(x.v), rows_of(x.g), x.beta, None if x.A_log is None else x.A_log.contiguous(),
        None if x.dt_bias is None else x.dt_bias.contiguous(), *given[5:12], cu, *given[13:],
        *((None,) * 4 if roll is None else (roll.k, roll.u, roll.g, roll.count)),
    )  # fmt: skip
    if known is None or known[0] != form:
        known = x.memo["launch"] = (form, prepare(p, x, tensors, source[0], target[0]))
    known[1].run(tensors)


def prepare(p: KDAProblem, x: Operands, tensors: tuple[Tensor | None, ...], read: int, write: int) -> Launch:
    """The integers and constants of a launch."""
    q, k, v, g, beta, _, _, o, source, target, kept = tensors[:11]
    c = configure(p, x.target)
    k_first = not p.pool and not p.state_v_first
    src, dst = states(read, source, k_first), states(write, target, k_first)
    out = states(NONE if x.states_out is None else ROW, kept, False)
    outer = [strides_of(p, t) for t in (q, k, v, g)]
    unit = gcd(16, p.K, p.V, *(s for strides in outer for s in strides))
    indices = x.read_indices
    integers = (
        *(s // unit for strides in outer for s in strides), *strides_of(p, beta), *strides_of(p, o),
        *src.strides, *dst.strides, *out.strides,
        0 if indices is None else indices.stride(0), 0 if read != COLUMN else indices.stride(1),
        *(0 if t is None else t.stride(0) for t in (x.write_indices, x.num_accepted_tokens)),
        tensors[14].stride(0) if p.packed else 0,
        *token_strides(x.states_out_indices), *token_strides(x.parent),
        src.rows, dst.rows, out.rows, x.null_index, 1 if read != COLUMN else indices.shape[1],
        p.N, min(p.tokens, MAX_TOKENS if p.pool else p.tokens), p.T, 0 if x.rollback is None else x.rollback.k.shape[1],
    )  # fmt: skip
    constants = {
        "HV": p.HV, "GROUP": p.HV // p.H, "K": p.K, "KP": c.KP, "KI": c.KI, "V": p.V, "BV": c.BV,
        "IN": unit, "SRC": src.unit, "DST": dst.unit, "OUT": out.unit,
        "SRC_K": src.inner, "DST_K": dst.inner, "OUT_K": out.inner, "O_V": o.stride(3),
        "GATE": GATES[p.gate], "HAS_A": x.A_log is not None, "HAS_BIAS": x.dt_bias is not None,
        "SIGMOID": p.beta_sigmoid, "DOUBLE": p.neg_eigval, "L2NORM": p.l2norm, "PACKED": p.packed,
        "READ": read, "WRITE": write, "KEEP": x.states_out is not None, "TREE": x.parent is not None,
        "ROLL": x.rollback is not None, "ROUND": p.pool and source.dtype != torch.float32,
    }  # fmt: skip
    scalars = (p.scale, p.lower_bound or 0.0)
    present = tuple(at for at in ALIGNED if tensors[at] is not None)
    return Launch(step.step_kernel, (programs_of(p, c), 1, 1), integers, scalars, constants, present)


def token_strides(indices: Tensor | None) -> tuple[int, int]:
    """Of an index per token, `[N, T]` or packed `[total]`: from sequence to sequence, token to token."""
    if indices is None:
        return 0, 0
    return indices.stride(0), indices.stride(-1)
