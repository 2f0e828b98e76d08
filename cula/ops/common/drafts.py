"""Calls of one or a few tokens a sequence against a pool, whatever the algorithm: their arguments, and who is where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cula.host.errors import DtypeError, NotSupportedError, RangeError, ShapeError
from cula.host.varlen import check_index_tensor, clamp_boundaries
from cula.ops.common.arguments import check_pool, lengths_of, parse_sequences
from cula.ops.common.pools import slot_ids
from cula.ops.common.problem import SequenceProblem

Tensor = torch.Tensor

MAX_VERIFY_TOKENS = 16


def parse_rows(
    function: str, B: int, T: int, device: Any, cu_seqlens: Any, *, one_token: bool
) -> tuple[int, int, tuple[int, ...] | None]:
    """(N, most tokens per sequence, boundaries on the host). `function`: who asks, for messages."""
    if one_token:
        if B != 1 and T != 1:
            raise ShapeError(f"{function} takes one token per sequence, [N, 1, ...] or [1, N, ...]; got B={B}, T={T}")
        return B * T, 1, None
    if cu_seqlens is None:
        if not 1 <= T <= MAX_VERIFY_TOKENS:
            raise ShapeError(f"{function} takes 1 to {MAX_VERIFY_TOKENS} tokens per sequence; got T={T}")
        return B, T, None
    N, bounds = parse_sequences(B, T, device, cu_seqlens, None, host_copy=False)
    longest = min(T, MAX_VERIFY_TOKENS) if bounds is None else max(lengths_of(bounds), default=0)
    if longest > MAX_VERIFY_TOKENS:
        raise RangeError(f"{function} takes at most {MAX_VERIFY_TOKENS} tokens per sequence; got {longest}")
    return N, longest, bounds


def parse_indices(N: int, device: Any, indices: Any, accepted: Any, write: Any) -> None:
    """Check state_indices `[N]`, or `[N, S+1]` with num_accepted_tokens `[N]`, and write_indices `[N]`."""
    columns = isinstance(indices, torch.Tensor) and indices.dim() == 2
    if columns != (accepted is not None):
        got = list(indices.shape) if isinstance(indices, torch.Tensor) else type(indices).__name__
        other = "None" if accepted is None else "a tensor"
        raise ShapeError(
            f"state_indices [N, S+1] and num_accepted_tokens [N] go together; got state_indices {got} and {other}"
        )
    if columns and indices.shape[1] < 1:
        raise ShapeError(f"state_indices [N, S+1] needs at least one column; got {list(indices.shape)}")
    check_index_tensor("state_indices", indices, (N, indices.shape[1]) if columns else (N,), device)
    if accepted is not None:
        check_index_tensor("num_accepted_tokens", accepted, (N,), device)
    if write is not None:
        check_index_tensor("write_indices", write, (N,), device)


def parse_states_out(p: SequenceProblem, x: Any, states_out: Any, indices: Any, update_state: Any) -> None:
    """A verify call's pool of per-token states, and whether the state that was read moves on; filled into `x`."""
    if (states_out is None) is not (indices is None):
        missing = "states_out" if states_out is None else "states_out_indices"
        raise ShapeError(f"states_out and states_out_indices go together; {missing} is None")
    if states_out is not None:
        device = x.q.device
        check_pool("states_out", states_out, (p.HV, p.V, p.K), p.dtype, device)
        check_index_tensor("states_out_indices", indices, (p.T,) if p.packed else (p.N, p.T), device)
    if not isinstance(update_state, bool):
        raise DtypeError(f"update_state must be a bool; got {type(update_state).__name__}")
    x.states_out, x.states_out_indices, x.update_state = states_out, indices, update_state


def refuse_trees(parent: Any, update_state: bool) -> None:
    """Tree drafts: their contract is checked, no implementation has them in this version."""
    if parent is not None and update_state:
        raise RangeError("parent (tree drafts) excludes update_state; got both")
    if parent is not None:
        raise NotSupportedError("parent (tree drafts) is not supported by any implementation in this version")


@dataclass
class Work:
    """One call, flattened: token i of sequence n is row first[n] + i of the inputs seen as `[tokens, heads, D]`.

    first, count: int64 `[N]` on the inputs' device; most: an upper bound of count on the host.
    read, write: slots of the pool, -1 for none. out_ids: `[tokens]` slots of states_out, or None.
    """

    first: Tensor
    count: Tensor
    most: int
    read: Tensor
    write: Tensor
    out_ids: Tensor | None


def find_work(p: SequenceProblem, x: Any) -> Work:
    """Who reads which slot, writes which, and has which tokens; nothing is read back from a device."""
    device, slots = x.q.device, x.state_pool.shape[0]
    if p.packed:
        if x.boundaries is None:
            bounds = clamp_boundaries(x.cu_seqlens.to(torch.int64), p.T)
        else:
            bounds = torch.tensor(x.boundaries, device=device)
        first, count = bounds[:-1], bounds.diff().clamp(max=max(p.tokens, 0))
    else:
        each = 1 if p.N == p.B * p.T else p.T
        first, count = torch.arange(p.N, device=device) * each, torch.full((p.N,), each, device=device)
    read = slot_ids(accepted_column(x), p.N, slots, x.null_index, device)
    write = read if x.write_indices is None else slot_ids(x.write_indices, p.N, slots, x.null_index, device)
    write = torch.where(read >= 0, write, -1) if x.update_state else torch.full_like(read, -1)
    out_ids = None
    if x.states_out is not None:
        out_ids = slot_ids(x.states_out_indices.flatten(), 0, x.states_out.shape[0], x.null_index, device)
    return Work(first, count, p.tokens if p.packed else min(p.T, p.tokens), read, write, out_ids)


def accepted_column(x: Any) -> Tensor:
    """`[N]` indices to read: those given, or of `[N, S+1]` the column of the last accepted token."""
    if x.num_accepted_tokens is None:
        return x.read_indices
    last = x.read_indices.shape[1] - 1
    column = (x.num_accepted_tokens.to(torch.int64) - 1).clamp(0, last)
    return x.read_indices.gather(1, column[:, None])[:, 0]
