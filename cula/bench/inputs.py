"""Seeded random inputs of a row: never zeros, drawn in float64 on the CPU, then rounded to the row's dtypes.

The gate, per value head h and key channel c, with raw ~ N(0,1), A_log ~ 0.5 N(0,1) `[HV]`, dt_bias ~ 0.1 N(0,1)
`[HV, K]` and the lower bound -5:

    g = -5 * sigmoid(exp(A_log[h]) * (raw + offset[h, c] + dt_bias[h, c]))

A Lightning row has slopes `[HV]` in the gate's place, those of MiniMax's first layer of 80 ('alibi'), and scale 1.

offset is 0 for 'strong' (a state is forgotten within 16 tokens), uniform in -9..1 for 'mixed' (some channels
remember for thousands of tokens) and uniform in -12..-7 for 'weak' (all of them do).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cula.bench.cases import Case

LOWER_BOUND = -5.0

OFFSETS: dict[str, tuple[float, float]] = {"strong": (0.0, 0.0), "mixed": (-9.0, 1.0), "weak": (-12.0, -7.0)}

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Inputs:
    """What every implementation of one row is given.

    q, k `[B,T,H,K]` normalised to length 1; v `[B,T,HV,V]`; g `[B,T,HV,K]` finished, natural log; beta `[B,T,HV]`
    finished; do like v, the cotangent of o. raw_g, A_log, dt_bias, beta_logits: what g and beta were made from.
    state `[N,HV,V,K]` (V-first) before a decode step, None elsewhere. cu_seqlens int32 `[N+1]` of a packed row.
    slopes `[HV]`: of a Lightning row, where g, beta and what they were made from are None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    do: torch.Tensor
    raw_g: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    beta_logits: torch.Tensor | None
    state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    slopes: torch.Tensor | None = None

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, and KDA's g and beta."""
        return (self.q, self.k, self.v) if self.g is None else (self.q, self.k, self.v, self.g, self.beta)

    @property
    def options(self) -> dict[str, object]:
        """What the functions and the reference of the row's algorithm take beyond the operands."""
        return {} if self.slopes is None else {"slopes": self.slopes, "scale": 1.0}

    @property
    def bytes(self) -> int:
        """Size of q, k, v, g, beta and the state: the inputs that peak memory is compared with."""
        state = () if self.state is None else (self.state,)
        return sum(x.numel() * x.element_size() for x in (*self.operands, *state))


def raw_gate(gate: str, shape: tuple[int, int, int, int], rng: torch.Generator) -> torch.Tensor:
    """The raw gate `[B,T,HV,K]` in float64 for one of 'strong', 'mixed', 'weak'; KeyError for another name."""
    low, high = OFFSETS[gate]
    raw = torch.randn(*shape, generator=rng, dtype=torch.float64)
    offset = low + (high - low) * torch.rand(*shape[2:], generator=rng, dtype=torch.float64)
    return raw + offset


def finish_gate(raw: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """The natural-log gate of the formula above, in float64."""
    rate = A_log.double().exp()[:, None]
    return LOWER_BOUND * torch.sigmoid(rate * (raw.double() + dt_bias.double()))


def make_inputs(case: Case, gate: str, seed: int = 0) -> Inputs:
    """The inputs of `case` with the gate named `gate`; the same seed gives the same numbers."""
    rng = torch.Generator().manual_seed(seed)
    B, T = (case.N, case.tokens) if case.decodes else (case.B, case.T)
    H, HV, K, V = case.H, case.value_heads, case.K, case.value_dim
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    q, k, v, do = unit(normal(B, T, H, K)), unit(normal(B, T, H, K)), normal(B, T, HV, V), normal(B, T, HV, V)
    if case.lightning:
        return _without_gate(case, (q, k, v, do), normal)
    raw, A_log, dt_bias = raw_gate(gate, (B, T, HV, K), rng), 0.5 * normal(HV), 0.1 * normal(HV, K)
    logits = normal(B, T, HV)
    state = normal(case.N, HV, V, K) if case.decodes else None
    bounds = torch.tensor([0, *case.lengths]).cumsum(0).int() if case.lengths else None

    def place(x: torch.Tensor, to: torch.dtype = torch.float32) -> torch.Tensor:
        return x.to(to).to(case.device).contiguous()

    return Inputs(
        q=place(q, dtype), k=place(k, dtype), v=place(v, dtype), do=place(do, dtype),
        g=place(finish_gate(raw, A_log, dt_bias)), beta=place(torch.sigmoid(logits)),
        raw_g=place(raw, dtype), A_log=place(A_log), dt_bias=place(dt_bias), beta_logits=place(logits, dtype),
        state=None if state is None else place(state, DTYPES[case.state_dtype]),
        cu_seqlens=None if bounds is None else bounds.to(case.device),
    )  # fmt: skip


def _without_gate(case: Case, drawn: tuple[torch.Tensor, ...], normal: Callable[..., torch.Tensor]) -> Inputs:
    """The inputs of a Lightning row: q, k, v, do as drawn, and the slopes."""
    from cula.lightning import lightning_slopes

    HV, K, V = case.value_heads, case.K, case.value_dim
    state = normal(case.N, HV, V, K) if case.decodes else None
    q, k, v, do = (x.to(DTYPES[case.dtype]).to(case.device).contiguous() for x in drawn)
    return Inputs(
        q=q, k=k, v=v, do=do, g=None, beta=None, raw_g=None, A_log=None, dt_bias=None, beta_logits=None,
        state=None if state is None else state.to(DTYPES[case.state_dtype]).to(case.device),
        cu_seqlens=torch.tensor([0, *case.lengths]).cumsum(0).int().to(case.device) if case.lengths else None,
        slopes=lightning_slopes(HV, 0, 80, "minimax").to(case.device),
    )  # fmt: skip
