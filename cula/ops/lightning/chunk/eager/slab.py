"""One slab of the batched path: its inputs, the powers of its decays, and the states' walk through its chunks.

For a chunk of n tokens that starts from the state h, with slope s of the head and 0-based rows i, j:

    o_i = e^{-s(i+1)} h^T q_i + sum_{j<=i} e^{-s(i-j)} (q_i . k_j) v_j
    h  <- e^{-sn} h + sum_j e^{-s(n-1-j)} k_j v_j^T

No exponent is positive. Slabs are laid out as `cula.ops.common.chunk_layout` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cula.ops.common.chunk_layout import Group, Slab, SlabIndex, padded, slab_chunk_heads
from cula.ops.common.exact_matmul import bmm
from cula.ops.common.workspace import Workspace
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor


@dataclass(frozen=True)
class Powers:
    """Decays of every head over 0 .. C tokens, in the compute dtype, made once a call.

    table: exp(-s m) `[HV, C + 1]`. rest: what rounding took from it. pairs: exp(-s (i - j)) `[HV, C, C]`, zero for
    j > i. rows: exp(-s (i + 1)) `[HV, C, 1]`.
    """

    table: Tensor
    rest: Tensor
    pairs: Tensor
    rows: Tensor

    def tail(self, tokens: int) -> Tensor:
        """exp(-s (tokens - 1 - j)) `[HV, C, 1]`; 1 behind the last token, where keys are zeros."""
        C = self.rows.shape[1]
        back = torch.arange(tokens - 1, tokens - 1 - C, -1, device=self.table.device).clamp(min=0)
        return self.table.index_select(1, back).unsqueeze(-1)

    def total(self, tokens: int) -> tuple[Tensor, Tensor]:
        """exp(-s tokens) `[HV, 1, 1]` and its rest."""
        at = slice(tokens, tokens + 1)
        return self.table[:, at].unsqueeze(-1), self.rest[:, at].unsqueeze(-1)


@dataclass(frozen=True)
class Constants:
    """Made once a call."""

    dtype: torch.dtype
    powers: Powers
    ws: Workspace
    tails: dict[int, Tensor] = field(default_factory=dict)

    def tail(self, tokens: int) -> Tensor:
        """`Powers.tail`, made once."""
        if tokens not in self.tails:
            self.tails[tokens] = self.powers.tail(tokens)
        return self.tails[tokens]


def constants(p: LightningProblem, x: Operands, *, backward: bool = False) -> Constants:
    """The call's constants in the compute dtype."""
    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    s, C = x.slopes.double(), p.chunk_size
    steps = torch.arange(C + 1, dtype=torch.float64, device=s.device)
    exact = torch.exp(-s[:, None] * steps)
    table = exact.to(dtype)
    apart = steps[:C, None] - steps[None, :C]
    pairs = torch.where(apart >= 0, torch.exp(-s[:, None, None] * apart.clamp(min=0)), 0.0).to(dtype)
    powers = Powers(table, (exact - table.double()).to(dtype), pairs, table[:, 1:].unsqueeze(-1))
    return Constants(dtype, powers, Workspace(dtype, x.q.device, scratch_elements(p, backward=backward)))


def scratch_elements(p: LightningProblem, *, backward: bool) -> int:
    """Elements of all named buffers of a slab of the usual size; a larger slab finds memory of its own."""
    K, V, C = padded(p.K), padded(p.V), p.chunk_size
    row = 3 * K + 3 * V + C + 2 * -(-K * V // C)
    if backward:
        row += 4 * K + 3 * V + 2 * C + 2 * -(-K * V // C)
    heads = p.HV * max(1, slab_chunk_heads(p) // p.HV)
    tokens = p.HV * (p.T if p.packed else p.B * p.T) + p.N * p.HV * C
    return min(heads * C, tokens) * row + 64 * 32


@dataclass
class Inputs:
    """A slab's inputs `[n, C, ...]`, q scaled and all repeated to HV heads; kd: the keys as the state gets them."""

    q: Tensor
    k: Tensor
    v: Tensor
    kd: Tensor


def load(p: LightningProblem, x: Operands, const: Constants, index: SlabIndex) -> Inputs:
    """Gather a slab's inputs."""
    ws, C = const.ws, p.chunk_size
    n, Kp, Vp = index.slab.chunks * p.HV, padded(p.K), padded(p.V)
    q = index.gather(x.q, ws("q", n, C, Kp), p.HV // p.H).mul_(p.scale)
    k = index.gather(x.k, ws("k", n, C, Kp), p.HV // p.H)
    v = index.gather(x.v, ws("v", n, C, Vp))
    kd = ws("kd", n, C, Kp)
    for at, tokens in pieces(p, index.slab):
        heads(kd[at], p).copy_(heads(k[at], p) * const.tail(tokens))
    return Inputs(q, k, v, kd)


def heads(x: Tensor, p: LightningProblem) -> Tensor:
    """`[chunks * HV, ...]` as `[chunks, HV, ...]`."""
    return x.view(-1, p.HV, *x.shape[1:])


def pieces(p: LightningProblem, slab: Slab) -> list[tuple[slice, int]]:
    """Runs of neighbouring chunk-heads of a slab that hold as many tokens: (their rows, tokens of a chunk)."""
    found: list[tuple[slice, int]] = []
    start = 0
    for step, active in zip(range(slab.first, slab.last), slab.active, strict=True):
        for r in range(active):
            tokens = min(p.chunk_size, slab.group.lengths[r] - step * p.chunk_size)
            stop = start + p.HV
            if found and found[-1][1] == tokens:
                found[-1] = (slice(found[-1][0].start, stop), tokens)
            else:
                found.append((slice(start, stop), tokens))
            start = stop
    return found


def advance(h: Tensor, update: Tensor, p: LightningProblem, const: Constants, tokens: int) -> None:
    """h <- exp(-s tokens) h + update, in place; both `[sequences * HV, K, V]`. `update` is used up."""
    decay, rest = const.powers.total(tokens)
    state, new = heads(h, p), heads(update, p)
    if const.dtype != torch.float64:
        new.addcmul_(state, rest)
    torch.addcmul(new, state, decay, out=state)


def walk(p: LightningProblem, const: Constants, x: Inputs, h: Tensor, slab: Slab) -> Tensor:
    """Carry the states h `[sequences * HV, K, V]` through the slab, in place; returns those before each chunk."""
    n, _, K = x.q.shape
    V = x.v.shape[2]
    before = const.ws("h", n, K, V)
    update = bmm(x.kd.mT, x.v, const.ws("update", n, K, V))
    start = 0
    for step, active in zip(range(slab.first, slab.last), slab.active, strict=True):
        before[start : start + active * p.HV] = h[: active * p.HV]
        for r, last, tokens in runs(p, slab.group, step, active):
            rows = slice(r * p.HV, last * p.HV)
            advance(h[rows], update[start + rows.start : start + rows.stop], p, const, tokens)
        start += active * p.HV
    return before


def runs(p: LightningProblem, group: Group, step: int, active: int) -> list[tuple[int, int, int]]:
    """Runs of the active sequences of one step whose chunks hold as many tokens: (first, after the last, tokens)."""
    found: list[tuple[int, int, int]] = []
    for r in range(active):
        tokens = min(p.chunk_size, group.lengths[r] - step * p.chunk_size)
        if found and found[-1][2] == tokens:
            found[-1] = (found[-1][0], r + 1, tokens)
        else:
            found.append((r, r + 1, tokens))
    return found


def entry_state(p: LightningProblem, x: Operands, group: Group, dtype: torch.dtype) -> Tensor:
    """States that enter the group's first step, K-first `[sequences * HV, Kp, Vp]`, a fresh tensor."""
    from cula.ops.common.pools import read_slots

    count = len(group.ids)
    h = torch.zeros(count, p.HV, padded(p.K), padded(p.V), dtype=dtype, device=x.q.device)
    if p.pool:
        read_slots(p, x, group.ids, h[..., : p.K, : p.V].mT)
    elif x.initial_state is not None:
        source = x.initial_state.mT if p.state_v_first else x.initial_state
        h[..., : p.K, : p.V] = source[list(group.ids)]
    return h.view(count * p.HV, padded(p.K), padded(p.V))


def states(p: LightningProblem, h: Tensor, count: int) -> Tensor:
    """The first `count` states `[count, HV, K, V]` without padding: a view."""
    return heads(h[: count * p.HV], p)[..., : p.K, : p.V]
