"""What a KimiDeltaAttention layer carries from one call to the next: recurrent states and convolution rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cula.host.errors import DtypeError, RangeError, ShapeError

Slots = Tensor | Sequence[int]


class KDACache:
    """One layer's pools; a sequence owns one slot of both.

    state_pool: [slots,HV,V,K], fp32 or bf16, V-first, as `cula.kda.kda_decode` takes it.
    conv_pool: [slots,channels,W-1], channels = 2*H*K + HV*V (q | k | v before the convolution), oldest row first.

    Slots start as zeros, which is the state of an empty sequence. `slots` arguments are int32 or int64 tensors
    [N] or sequences of ints. In a tensor, an id outside 0..slots-1 (commonly -1) is a padding row: it reads zeros
    and writes nothing; in a sequence of ints only -1 is, anything else outside is a RangeError. Two rows of one
    call must not write the same slot.
    """

    def __init__(self, states: Tensor, conv: Tensor) -> None:
        """Use `allocate`. Both tensors carry one more row than there are slots, where padding rows write."""
        self._states, self._conv = states, conv
        self.slots = states.shape[0] - 1
        self.state_pool = states[: self.slots]
        self.conv_pool = conv[: self.slots]

    @classmethod
    def allocate(
        cls,
        slots: int,
        *,
        num_v_heads: int,
        head_dim: int,
        head_v_dim: int,
        conv_channels: int,
        conv_size: int = 4,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> KDACache:
        """Zeroed pools. dtype: of the convolution rows (the layer's); state_dtype: fp32 or bf16, else DtypeError."""
        if slots < 1:
            raise RangeError(f"slots must be at least 1, got {slots}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise DtypeError(f"state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype}")
        states = torch.zeros(slots + 1, num_v_heads, head_v_dim, head_dim, dtype=state_dtype, device=device)
        return cls(states, torch.zeros(slots + 1, conv_channels, conv_size - 1, dtype=dtype, device=device))

    @property
    def device(self) -> torch.device:
        """Where both pools live."""
        return self._states.device

    @property
    def nbytes(self) -> int:
        """Bytes of both pools."""
        return sum(t.numel() * t.element_size() for t in (self.state_pool, self.conv_pool))

    def reset(self, slots: Slots | None = None) -> None:
        """Zero the given slots (None: all), which makes them those of empty sequences."""
        if slots is None:
            self._states.zero_()
            self._conv.zero_()
            return
        target = self.rows(slots)
        self._states.index_fill_(0, target, 0)
        self._conv.index_fill_(0, target, 0)

    def copy(self, source: Slots, target: Slots) -> None:
        """Slots `target[i]` become those of `source[i]`, e.g. to continue one prefix in several ways.

        All sources are read before any target is written. ShapeError where the lengths differ.
        """
        read, write = self.rows(source), self.rows(target)
        if read.numel() != write.numel():
            raise ShapeError(f"source and target must be equally long, got {read.numel()} and {write.numel()}")
        states, conv = self._states[read], self._conv[read]
        self._put(write, states, conv)

    def clone(self) -> KDACache:
        """An independent cache with the same contents."""
        return KDACache(self._states.clone(), self._conv.clone())

    def ids(self, slots: Slots, sequences: int | None = None) -> Tensor:
        """`slots` as an int64 tensor [N] on this device, every padding id as -1.

        ShapeError unless it is one-dimensional and (if given) has `sequences` elements.
        """
        if isinstance(slots, Tensor):
            if slots.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"slots must be int32 or int64, got {slots.dtype}")
            if slots.dim() != 1:
                raise ShapeError(f"slots must be one-dimensional, got shape {tuple(slots.shape)}")
            found = slots.to(device=self.device, dtype=torch.int64)
            found = torch.where((found < 0) | (found >= self.slots), -1, found)
        else:
            for slot in slots:
                if not -1 <= slot < self.slots:
                    raise RangeError(f"slots must lie in 0..{self.slots - 1} (or be -1 for padding), got {slot}")
            found = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        if sequences is not None and found.numel() != sequences:
            raise ShapeError(f"slots must have one element per sequence ({sequences}), got {found.numel()}")
        return found

    def rows(self, slots: Slots) -> Tensor:
        """`slots` as row numbers of the tensors with the spare row, which padding ids get."""
        found = self.ids(slots)
        return torch.where(found < 0, self.slots, found)

    def history(self, ids: Tensor, has_initial_state: Tensor | None = None) -> Tensor:
        """The convolution rows [N,channels,W-1] of `ids`; zeros for padding and where `has_initial_state` is False."""
        keep = ids >= 0
        if has_initial_state is not None:
            keep = keep & has_initial_state.to(device=self.device, dtype=torch.bool)
        past = self._conv[ids.clamp(min=0)]
        return torch.where(keep[:, None, None], past, past.new_zeros(()))

    def put_history(self, ids: Tensor, history: Tensor) -> None:
        """Write convolution rows [N,channels,W-1] to `ids`."""
        self._conv.index_copy_(0, self.rows(ids), history.to(self._conv.dtype))

    def _put(self, rows: Tensor, states: Tensor, conv: Tensor) -> None:
        self._states.index_copy_(0, rows, states.to(self._states.dtype))
        self._conv.index_copy_(0, rows, conv.to(self._conv.dtype))


@dataclass(frozen=True)
class KDADraft:
    """What `KimiDeltaAttention.verify` found: the state after each draft token, nothing of it committed yet.

    states: [N,T,HV,V,K] in the pool's dtype. rows: [N,channels,W-1+T], the convolution's history and draft rows.
    ids: int64 [N], the slots that were read (-1 for padding).
    """

    states: Tensor
    rows: Tensor
    ids: Tensor

    def commit(self, cache: KDACache, accepted: Tensor | Sequence[int]) -> None:
        """Advance the slots by the first `accepted[n]` draft tokens (0..T; 0 leaves a slot as it is).

        accepted: int32 or int64 tensor [N], whose values are clamped to 0..T, or ints, checked (RangeError).
        """
        sequences, tokens = self.states.shape[:2]
        if not isinstance(accepted, Tensor):
            for count in accepted:
                if not 0 <= count <= tokens:
                    raise RangeError(f"accepted must lie in 0..{tokens}, got {count}")
            accepted = torch.tensor(list(accepted), dtype=torch.int64)
        if accepted.shape != (sequences,):
            raise ShapeError(f"accepted must have shape [{sequences}], got {tuple(accepted.shape)}")
        count = accepted.to(device=cache.device, dtype=torch.int64).clamp(0, tokens)
        each = torch.arange(sequences, device=cache.device)
        states = self.states[each, (count - 1).clamp(min=0)]
        taps = torch.arange(self.rows.shape[2] - tokens, device=cache.device)
        where = (count[:, None] + taps)[:, None].expand(-1, self.rows.shape[1], -1)
        target = cache.rows(torch.where(count > 0, self.ids, -1))
        cache._put(target, states, self.rows.gather(2, where))
