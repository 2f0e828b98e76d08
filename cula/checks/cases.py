"""Random problems of every algorithm, each named by a frozen `Case` and made from it alone, in bits, on any machine.

Numbers are drawn in float64 on the CPU, rounded to the case's dtypes, then moved to the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Where a gate of -1000 is put, one at a time: chunk edges and the edges of 16-token sub-chunks.
CLIFFS = (0, 15, 16, 63, 64)

LOWER_BOUND = -5.0


@dataclass(frozen=True)
class GateInputs:
    """What one kind of gate feeds a call: `g` as given, and the in-kernel gate's parameters where it is raw."""

    g: torch.Tensor | None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    lower_bound: float | None = None
    raw: bool = False


Draw = Callable[[torch.Generator, tuple[int, int, int, int]], GateInputs]


def _normal(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64, device="cpu")


def _uniform(rng: torch.Generator, low: float, high: float, *shape: int) -> torch.Tensor:
    return low + (high - low) * torch.rand(*shape, generator=rng, dtype=torch.float64, device="cpu")


def _constant(value: float) -> Draw:
    return lambda rng, shape: GateInputs(torch.full(shape, value, dtype=torch.float64, device="cpu"))


def _cliff(position: int) -> Draw:
    def draw(rng: torch.Generator, shape: tuple[int, int, int, int]) -> GateInputs:
        g = torch.zeros(shape, dtype=torch.float64, device="cpu")
        g[:, position : position + 1] = -1000.0
        return GateInputs(g)

    return draw


def _alternating(rng: torch.Generator, shape: tuple[int, int, int, int]) -> GateInputs:
    g = torch.zeros(shape, dtype=torch.float64, device="cpu")
    g[:, 1::2] = LOWER_BOUND
    return GateInputs(g)


def _channels(rng: torch.Generator, shape: tuple[int, int, int, int]) -> GateInputs:
    """Some channels remember for thousands of tokens, others forget at once."""
    rate = torch.exp(_uniform(rng, math.log(1e-5), math.log(60.0), 1, 1, *shape[2:]))
    return GateInputs(-rate * _uniform(rng, 0.5, 1.5, *shape))


def _mild(rng: torch.Generator, shape: tuple[int, int, int, int]) -> GateInputs:
    return GateInputs(-_uniform(rng, 0.001, 0.3, *shape))


def _raw(
    *,
    a_log: float | None = 0.0,
    spread: float = 0.5,
    bias: bool = True,
    centre: float = 0.0,
    bound: float | None = None,
) -> Draw:
    """An in-kernel gate: A_log around `a_log` (None: no A_log), raw values around `centre`."""

    def draw(rng: torch.Generator, shape: tuple[int, int, int, int]) -> GateInputs:
        heads, width = shape[2:]
        return GateInputs(
            g=centre + _normal(rng, *shape),
            A_log=None if a_log is None else a_log + spread * _normal(rng, heads),
            dt_bias=0.3 * _normal(rng, heads, width) if bias else None,
            lower_bound=bound,
            raw=True,
        )

    return draw


#: Every kind of gate, by name. Finished gates are natural logs; raw ones go through the in-kernel gate.
GATES: dict[str, Draw] = {
    "zero": _constant(0.0),
    "tiny": _constant(-1e-6),
    "tenth": _constant(-0.1),
    "mild": _mild,
    "bound": _constant(LOWER_BOUND),
    "steep": _constant(-20.0),
    "wall": _constant(-1e3),
    "alternating": _alternating,
    "channels": _channels,
    **{f"cliff{position}": _cliff(position) for position in CLIFFS},
    "softplus": _raw(),
    "softplus_nobias": _raw(bias=False),
    "softplus_hard": _raw(a_log=math.log(16.0), spread=0.0, centre=5.0),
    "softplus_wall": _raw(a_log=math.log(16.0), spread=0.0, centre=62.5),
    "sigmoid": _raw(bound=LOWER_BOUND),
    "sigmoid_deep": _raw(bound=-20.0),
    "sigmoid_full": _raw(bound=LOWER_BOUND, spread=0.0, centre=1e4),
    "sigmoid_no_A": _raw(a_log=None, bound=LOWER_BOUND),
    "sigmoid_bare": _raw(a_log=None, bias=False, bound=LOWER_BOUND),
}

#: Every kind of beta: (low, high, is_logits, doubled). Finished ones are drawn between low and high.
BETAS: dict[str, tuple[float, float, bool, bool]] = {
    "uniform": (0.05, 0.95, False, False),
    "zero": (0.0, 0.0, False, False),
    "tiny": (1e-6, 1e-6, False, False),
    "half": (0.5, 0.5, False, False),
    "one": (1.0, 1.0, False, False),
    "two": (2.0, 2.0, False, False),
    "logits": (-3.0, 3.0, True, False),
    "logits_doubled": (-3.0, 3.0, True, True),
}


#: Every kind of Lightning slopes, by name: slopes `[HV]` from the number of heads. "last" are those of MiniMax's last
#: layer, which remembers a hundred thousand tokens.
SLOPES: dict[str, Callable[[int], torch.Tensor]] = {
    "slopes_zero": torch.zeros,
    "slopes_last": lambda n: lightning_slopes(n, 79, 80, "minimax"),
    "slopes_weak": lambda n: torch.full((n,), 2.0**-8),
    "slopes_alibi": lambda n: lightning_slopes(n, 1, 80, "minimax"),
    "slopes_fla": lambda n: lightning_slopes(n, 0, 12),
    "slopes_steep": lambda n: torch.full((n,), 8.0),
    "slopes_wall": lambda n: torch.full((n,), 1e3),
    "slopes_mixed": lambda n: torch.tensor([0.0, 8.0, 2.0**-8, 0.7] * n)[:n],
}

ALGORITHMS = ("kda", "lightning")


def lightning_slopes(*arguments: Any) -> torch.Tensor:
    """`cula.lightning.lightning_slopes`, imported when it is called."""
    from cula.lightning import lightning_slopes as slopes

    return slopes(*arguments)


@dataclass(frozen=True)
class Case:
    """One problem by name; `make` turns it into tensors. A gate of `SLOPES` makes it one of Lightning Attention.

    HV value heads (a multiple of H). lengths: packed sequences, B is then 1 and T the number of rows, which may
    be more than the lengths' sum. l2norm: q and k are left unnormalised and the call normalises them.
    gates: dtype of g and beta, "own" (fp32 for 16-bit calls) or "same" as q.
    """

    B: int = 1
    T: int = 64
    H: int = 1
    HV: int = 1
    K: int = 16
    V: int = 16
    dtype: str = "fp32"
    gate: str = "mild"
    beta: str = "uniform"
    lengths: tuple[int, ...] | None = None
    state: bool = True
    v_first: bool = False
    l2norm: bool = False
    scale: float | None = None
    chunk_size: int = 64
    gates: str = "own"
    seed: int = 0

    @property
    def N(self) -> int:
        """Sequences."""
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def algorithm(self) -> str:
        """ "kda" or "lightning"."""
        return "lightning" if self.gate in SLOPES else "kda"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return DTYPES[self.dtype]

    @property
    def id(self) -> str:
        """A readable test id: B2-T63-H4-K128-bf16, then what differs from the defaults."""
        parts = [f"B{self.B}", f"T{self.T}", f"H{self.H}"]
        parts += [f"HV{self.HV}"] if self.HV != self.H else []
        parts += [f"K{self.K}"] + ([f"V{self.V}"] if self.V != self.K else [])
        parts += [self.dtype, self.gate] + ([f"beta_{self.beta}"] if self.algorithm == "kda" else [])
        parts += [f"packed{len(self.lengths)}"] if self.lengths is not None else []
        parts += ["vfirst"] if self.v_first else []
        parts += ["norm"] if self.l2norm else []
        parts += [] if self.state else ["nostate"]
        parts += [f"C{self.chunk_size}"] if self.chunk_size != 64 else []
        parts += ["gates16"] if self.gates == "same" and self.dtype in ("bf16", "fp16") else []
        return "-".join(parts)

    def replace(self, **changes: Any) -> Case:
        """A case with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass
class Problem:
    """The tensors of a case: q, k `[B,T,H,K]`, v `[B,T,HV,V]`, g `[B,T,HV,K]`, beta `[B,T,HV]`, A_log `[HV]`,
    dt_bias `[HV,K]`, h0 in the case's state layout, cu_seqlens int32 `[N+1]`, and cotangents do and dht. One of
    Lightning Attention has slopes `[HV]` in place of g, beta and the gate's parameters."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    h0: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    do: torch.Tensor
    dht: torch.Tensor
    lower_bound: float | None
    raw_gate: bool
    slopes: torch.Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the positional arguments of every function: q, k, v, and KDA's g and beta."""
        return ("q", "k", "v") if self.g is None else ("q", "k", "v", "g", "beta")

    def operands(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments of every function."""
        return tuple(getattr(self, name) for name in self.names)

    def inputs(self) -> dict[str, torch.Tensor]:
        """The differentiable inputs that are there, by name."""
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def five(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, g, beta: the positional arguments of every function of KDA."""
        return self.q, self.k, self.v, self.g, self.beta

    def flags(self) -> dict[str, Any]:
        """Keyword arguments of the chunk function beyond the positional ones and the tensors of `inputs`."""
        if self.slopes is not None:
            return {
                "slopes": self.slopes,
                "scale": self.case.scale,
                "output_final_state": True,
                "state_v_first": self.case.v_first,
                "cu_seqlens": self.cu_seqlens,
            }
        _, _, logits, doubled = BETAS[self.case.beta]
        return {
            "scale": self.case.scale,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": self.case.l2norm,
            "use_gate_in_kernel": self.raw_gate,
            "use_beta_sigmoid_in_kernel": logits,
            "allow_neg_eigval": doubled,
            "lower_bound": self.lower_bound,
            "state_v_first": self.case.v_first,
            "cu_seqlens": self.cu_seqlens,
        }

    def serving_flags(self) -> dict[str, Any]:
        """The common keyword arguments of an algorithm's prefill, decode and verify."""
        if self.slopes is not None:
            return {"slopes": self.slopes, "scale": self.case.scale}
        _, _, logits, doubled = BETAS[self.case.beta]
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "scale": self.case.scale,
            "gate_is_raw": self.raw_gate,
            "beta_is_logits": logits,
            "normalize_qk": self.case.l2norm,
            "allow_neg_eigval": doubled,
        }

    def spans(self) -> list[tuple[int, int, int]]:
        """(batch row, first token, end) of every sequence."""
        if self.case.lengths is None:
            return [(b, 0, self.case.T) for b in range(self.case.B)]
        spans, start = [], 0
        for length in self.case.lengths:
            spans.append((0, start, start + length))
            start += length
        return spans

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> Problem:
        """A copy with every tensor passed through `function`, then `changes` applied."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        mapped = {k: function(x) if isinstance(x, torch.Tensor) else x for k, x in fields.items()}
        return Problem(**{**mapped, **changes})

    def tokens(self, start: int, end: int, **changes: Any) -> Problem:
        """Tokens start..end of every sequence of an unpacked problem (h0 unless `changes` says otherwise)."""
        assert self.case.lengths is None, "cut an unpacked problem"
        cut = {name: getattr(self, name)[:, start:end] for name in (*self.names, "do")}
        return self.map(lambda x: x, case=self.case.replace(T=end - start), **{**cut, **changes})


def make(case: Case, device: torch.device | str | None = None) -> Problem:
    """The problem that `case` names, on `device` (None: torch's default device)."""
    device = torch.get_default_device() if device is None else device
    rng = torch.Generator("cpu").manual_seed(hash_seed(case))
    dtype = case.torch_dtype
    own = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    gate_dtype = dtype if case.gates == "same" else own
    q, k = (_vectors(rng, case) for _ in range(2))
    v = _normal(rng, case.B, case.T, case.HV, case.V)
    gate, beta = _gate_and_beta(rng, case)
    h0, dht = (_normal(rng, case.N, case.HV, case.K, case.V) for _ in range(2))
    if case.v_first:
        h0, dht = h0.transpose(-1, -2), dht.transpose(-1, -2)
    offsets = None if case.lengths is None else torch.tensor([0, *case.lengths], device="cpu").cumsum(0)

    def to(x: torch.Tensor | None, kind: torch.dtype) -> torch.Tensor | None:
        return None if x is None else x.to(kind).to(device).contiguous()

    return Problem(
        case=case,
        q=to(q, dtype),
        k=to(k, dtype),
        v=to(v, dtype),
        g=to(gate.g, gate_dtype),
        beta=to(beta, gate_dtype),
        A_log=to(gate.A_log, own),
        dt_bias=to(gate.dt_bias, own),
        h0=to(h0, own) if case.state else None,
        cu_seqlens=to(offsets, torch.int32),
        do=to(_normal(rng, *v.shape), dtype),
        dht=to(dht, own),
        lower_bound=gate.lower_bound,
        raw_gate=gate.raw,
        slopes=to(_slopes(case), own),
    )


def _gate_and_beta(rng: torch.Generator, case: Case) -> tuple[GateInputs, torch.Tensor | None]:
    if case.algorithm != "kda":
        return GateInputs(None), None
    gate = GATES[case.gate](rng, (case.B, case.T, case.HV, case.K))
    low, high, _, _ = BETAS[case.beta]
    if high > low:
        return gate, _uniform(rng, low, high, case.B, case.T, case.HV)
    return gate, torch.full((case.B, case.T, case.HV), low, dtype=torch.float64, device="cpu")


def _slopes(case: Case) -> torch.Tensor | None:
    if case.algorithm != "lightning":
        return None
    with torch.device("cpu"):
        return SLOPES[case.gate](case.HV)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, the same on every device, on torch's default one."""
    return _normal(torch.Generator("cpu").manual_seed(seed), *shape).to(torch.get_default_device(), dtype)


def hash_seed(case: Case) -> int:
    """A seed from the case's own fields, the same in every process (dtype and layout draw the same numbers)."""
    import zlib

    plain = case.replace(dtype="fp32", v_first=False, chunk_size=64, gates="own", scale=None)
    return zlib.crc32(repr(plain).encode()) + 1000003 * case.seed


def _vectors(rng: torch.Generator, case: Case) -> torch.Tensor:
    """Queries or keys: any length where the call normalises them, else of norm 1 or less."""
    x = _normal(rng, case.B, case.T, case.H, case.K)
    if case.l2norm:
        return x * torch.exp(_uniform(rng, -2.0, 2.0, case.B, case.T, case.H, 1))
    x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return x * _uniform(rng, 0.5, 1.0, case.B, case.T, case.H, 1) if case.seed % 2 else x


def natural_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """The natural-log gate of raw values, written straight from the formulas; float64 in, float64 out."""
    heads, width = g.shape[-2:]
    x = g.double()
    if dt_bias is not None:
        x = x + dt_bias.double().reshape(heads, width)
    rate = torch.ones(heads, 1, dtype=torch.float64, device=g.device)
    if A_log is not None:
        rate = A_log.double().reshape(heads, 1).exp()
    if lower_bound is None:
        return -rate * torch.logaddexp(x, torch.zeros_like(x))
    return lower_bound * torch.sigmoid(rate * x)
