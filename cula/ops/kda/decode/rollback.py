"""KDARollback and kda_rollback: verify keeps what each draft token did, so that the accepted ones can be committed.

A token changes a state by S <- S diag(exp(g)) + u k^T (V-first), where u = beta (v - S k) is the only part that needs
the state. Per token and value head k, u and g are 2 K + V numbers instead of the K V of a state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cula.host import env
from cula.host.arch import Target, target_of
from cula.host.errors import DeviceError, DtypeError, RangeError, ShapeError
from cula.host.table import choose, forward_only_name
from cula.host.varlen import check_index_tensor
from cula.ops.kda.debug import check_range, check_slots
from cula.ops.kda.decode.parse import MAX_VERIFY_TOKENS
from cula.ops.kda.decode.policy import ROLLBACK, STAGES
from cula.ops.kda.problem import DTYPE_NAMES, KDAProblem, Operands, check_pool, dtype_name, parse_null_index

Tensor = torch.Tensor


@dataclass
class KDARollback:
    """What `kda_verify(..., rollback=r)` keeps of each draft token, for `kda_rollback`. Made by `allocate`.

    k: `[N, T, HV, K]` finished keys. u: `[N, T, HV, V]` what the token added along its key. g: `[N, T, HV, K]` finished
    natural-log gates. count: `[N]` int32 tokens that were kept; 0 for a sequence that read a null slot.
    """

    k: Tensor
    u: Tensor
    g: Tensor
    count: Tensor

    @classmethod
    def allocate(
        cls, N: int, T: int, HV: int, K: int, V: int, device: Any, dtype: torch.dtype = torch.float32
    ) -> KDARollback:
        """Room for N sequences of at most T tokens each (1 to 16): 4 N T HV (2 K + V) bytes on `device`.

        dtype: float32; float64 for fp64 calls.

        Raises:
            RangeError: a size is no integer of at least 1 (N: 0), or T is above 16. DtypeError: another dtype.
        """
        for name, value, least in (("N", N, 0), ("T", T, 1), ("HV", HV, 1), ("K", K, 1), ("V", V, 1)):
            if type(value) is not int or value < least:
                raise RangeError(f"{name} must be an integer of at least {least}; got {value!r}")
        if T > MAX_VERIFY_TOKENS:
            raise RangeError(f"T must be at most {MAX_VERIFY_TOKENS}, as in kda_verify; got {T}")
        if dtype not in (torch.float32, torch.float64):
            raise DtypeError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
        made = [torch.zeros(N, T, HV, D, dtype=dtype, device=device) for D in (K, V, K)]
        return cls(*made, torch.zeros(N, dtype=torch.int32, device=device))

    def record(self, t: int, keep: Tensor, k: Tensor, u: Tensor, g: Tensor) -> None:
        """Keep token t of the sequences where `keep` `[N]`: k, g `[N, HV, K]` and u `[N, HV, V]`, finished."""
        if t >= self.k.shape[1]:
            return
        for kept, given in ((self.k, k), (self.u, u), (self.g, g)):
            kept[:, t] = torch.where(keep[:, None, None], given.to(kept.dtype), kept[:, t])


@dataclass
class RollbackOperands:
    """The tensors of a `kda_rollback` call."""

    state_pool: Tensor
    indices: Tensor
    rollback: KDARollback
    accepted: Tensor
    null_index: int
    target: Target


def check_rollback(r: Any, sizes: tuple[int, int, int, int], tokens: int, dtype: str, device: Any) -> None:
    """Check a buffer for calls of (N, HV, K, V), of `tokens` tokens or more."""
    if not isinstance(r, KDARollback):
        raise DtypeError(f"rollback must be a KDARollback; got {type(r).__name__}")
    N, HV, K, V = sizes
    T = r.k.shape[1] if r.k.dim() == 4 else 0
    shapes = {"k": (N, T, HV, K), "u": (N, T, HV, V), "g": (N, T, HV, K), "count": (N,)}
    for name, shape in shapes.items():
        part = getattr(r, name)
        if tuple(part.shape) != shape or not part.is_contiguous():
            raise ShapeError(f"rollback.{name} must be contiguous, {list(shape)}; got {list(part.shape)}")
        if part.device != device:
            raise DeviceError(f"rollback.{name} must be on {device} as the states are; got {part.device}")
        need = torch.int32 if name == "count" else torch.float64 if dtype == "fp64" else torch.float32
        if part.dtype != need:
            raise DtypeError(f"rollback.{name} must be {need}; got {part.dtype}")
    if tokens > T:
        raise ShapeError(f"rollback has room for T={T} tokens; the call has {tokens}")


def with_drafts(p: KDAProblem, x: Operands, rollback: Any) -> KDAProblem:
    """The problem of a kda_verify call with `parent` or `rollback`, the latter checked and put among the operands."""
    if rollback is None:
        return replace(p, tree=x.parent is not None)
    check_rollback(rollback, (p.N, p.HV, p.K, p.V), p.tokens if p.host_lengths else 1, p.dtype, x.q.device)
    x.rollback = rollback
    return replace(p, rollback=True, tokens=min(p.tokens, rollback.k.shape[1]))


def kda_rollback(
    state_pool: Tensor,
    state_indices: Tensor,
    rollback: KDARollback,
    num_accepted_tokens: Tensor,
    *,
    null_index: int = -1,
    implementation: Any = None,
) -> None:
    """Advance committed states by the draft tokens that stand, from what a `kda_verify` call kept; no host copy.

    Args:
        state_pool: `[slots, HV, V, K]` fp32 or bf16 (fp64 beside fp64 buffers), any slot stride, updated in place.
        state_indices: `[N]` int32 or int64, any stride: the slots that `kda_verify` read, unchanged since. A null or
            out-of-range one is skipped.
        rollback: filled by `kda_verify(..., rollback=rollback)`.
        num_accepted_tokens: `[N]` int32 or int64: the first so many tokens stand, clamped to 0..tokens of the sequence.
            0 leaves the slot as it is, in bits.
        null_index: the index that means no slot (negative ones always do). implementation: None, "auto" or a name.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: the forced implementation refuses the call; says why.
    """
    env.check_all()
    if not isinstance(rollback, KDARollback):
        raise DtypeError(f"rollback must be a KDARollback; got {type(rollback).__name__}")
    N, T, HV, K = rollback.k.shape if rollback.k.dim() == 4 else (0, 0, 0, 0)
    V = rollback.u.shape[-1]
    dtype = DTYPE_NAMES.get(rollback.k.dtype, "fp32")
    device = rollback.k.device
    check_rollback(rollback, (N, HV, K, V), T, dtype, device)
    check_pool("state_pool", state_pool, (HV, V, K), dtype, device)
    check_index_tensor("state_indices", state_indices, (N,), device)
    check_index_tensor("num_accepted_tokens", num_accepted_tokens, (N,), device)
    null_index, target = parse_null_index(null_index), target_of(device)
    x = RollbackOperands(state_pool, state_indices, rollback, num_accepted_tokens, null_index, target)
    if env.debug():
        check_slots("state_indices", state_indices, state_pool.shape[0], x.null_index)
        check_range("num_accepted_tokens", num_accepted_tokens, 0, T)
    problem = KDAProblem(
        N, T, HV, HV, K, V, N, dtype=dtype, state_dtype=dtype_name(state_pool), pool=True, state_v_first=True,
        tokens=T, rollback=True,
    )  # fmt: skip
    name = forward_only_name(implementation, "kda_rollback")
    choose(STAGES[ROLLBACK], problem, target, name).load()(problem, x)
