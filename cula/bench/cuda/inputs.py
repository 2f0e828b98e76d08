"""Seeded random inputs of a GPU row, drawn on its device: raw, as a model hands them to the kernel.

Per value head h and key channel c, with raw ~ N(0,1) and the offsets of `cula.bench.inputs` ('strong', 'mixed',
'weak'), the kernel is to compute q, k normalised, beta = sigmoid(logits) and

    g = -5 * sigmoid(exp(A_log[h]) * (raw + offset[h, c] + dt_bias[h, c]))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cula.bench.cases import Case
from cula.bench.inputs import DTYPES, LOWER_BOUND, OFFSETS

#: The in-kernel activations, by the names that cula and FLA share.
FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": LOWER_BOUND,
}

#: What a training row takes gradients of.
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


@dataclass(frozen=True)
class RawInputs:
    """One buffer of a GPU row.

    q, k `[B,T,H,K]`, v, do `[B,T,HV,V]`, g `[B,T,HV,K]` raw, beta `[B,T,HV]` logits, all in the row's dtype; do is
    None in a forward row. A_log `[HV]`, dt_bias `[HV*K]`, state `[N,HV,K,V]` (K-first; None where the row has none)
    in fp32. cu_seqlens int64 `[N+1]` of a packed row, and its copy on the CPU.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor | None
    do: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    cu_seqlens_cpu: torch.Tensor | None

    @property
    def bytes(self) -> int:
        """Size of q, k, v, g, beta and the state: what peak memory is compared with."""
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.state)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def gate_offsets(gate: str, heads: int, width: int, rng: torch.Generator) -> torch.Tensor:
    """The offset `[HV, K]` of the raw gate, fp32, for one of 'strong', 'mixed', 'weak'; KeyError for another name."""
    low, high = OFFSETS[gate]
    return low + (high - low) * torch.rand(heads, width, generator=rng, device=rng.device)


def make(case: Case, gate: str, seed: int = 0, device: str | None = None) -> RawInputs:
    """The inputs of `case` with the gate named `gate`, on `device` (the row's); a seed gives the same numbers there."""
    device = device or case.device
    rng = torch.Generator(device).manual_seed(seed)
    B, T, H, HV, K, V = case.B, case.T, case.H, case.value_heads, case.K, case.value_dim
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    bounds = torch.tensor([0, *case.lengths]).cumsum(0) if case.lengths else None
    return RawInputs(
        q=normal(B, T, H, K).to(dtype), k=normal(B, T, H, K).to(dtype), v=normal(B, T, HV, V).to(dtype),
        g=(normal(B, T, HV, K) + gate_offsets(gate, HV, K, rng)).to(dtype), beta=normal(B, T, HV).to(dtype),
        A_log=0.5 * normal(HV), dt_bias=0.1 * normal(HV * K),
        state=normal(case.sequences, HV, K, V) if case.states else None,
        do=normal(B, T, HV, V).to(dtype) if case.op == "kda_train" else None,
        cu_seqlens=None if bounds is None else bounds.to(device), cu_seqlens_cpu=bounds,
    )  # fmt: skip


def head_slice(inputs: RawInputs, heads: tuple[int, ...], dtype: torch.dtype) -> RawInputs:
    """The inputs of some heads alone, in `dtype`. Needs as many value heads as query heads."""
    index = torch.tensor(heads, device=inputs.q.device)
    K = inputs.q.shape[-1]

    def take(x: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return None if x is None else x.index_select(dim, index).to(dtype)

    return RawInputs(
        *(take(x, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)),
        A_log=take(inputs.A_log, 0), dt_bias=take(inputs.dt_bias.view(-1, K), 0).reshape(-1),
        state=take(inputs.state, 1), do=take(inputs.do, 2),
        cu_seqlens=inputs.cu_seqlens, cu_seqlens_cpu=inputs.cu_seqlens_cpu,
    )  # fmt: skip
