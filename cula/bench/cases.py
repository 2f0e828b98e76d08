"""Rows of shapes to time, as data. A row is one line here; its name is made from its fields.

Names: `B1-T8192-H64`, with grouped value heads `B1-T8192-H16-HV64`, packed `packed6-8192-H64` (six lengths that sum
to 8192) or `packed8x1024-H96` (eight equal ones), decode `N64-H64`. A decode row that repeats one state instead of
walking over many ends in `-warm`. A GPU row whose calls are launched one by one, without a CUDA graph, ends in
`-small`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: What a row may time. A `_train` is forward + backward.
OPS = ("kda_prefill", "kda_train", "kda_decode", "lightning_prefill", "lightning_train", "lightning_decode")

#: How fast states of KDA are forgotten; `cula.bench.inputs` has the formulas.
GATES = ("strong", "mixed", "weak")
#: What stands in the gate's place of a Lightning row: the slopes of MiniMax's first layer.
SLOPES = "alibi"

DEVICES = ("cpu", "cuda")

#: Bytes of an element, by dtype name.
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

#: Decode rows walk over this many states, so that none is in cache when its turn comes: a model's other layers
#: evict it. 24 states of 2 MiB are more than the last-level cache of the machines measured so far.
DECODE_BUFFERS = 24


@dataclass(frozen=True)
class Case:
    """One row: an op at one shape.

    B batch, T tokens (of all sequences where `lengths` packs several into one row), H query/key heads, HV value
    heads (0: as many as H), K and V head dims (V 0: as K). N sequences of a decode row. dtype of q, k, v;
    state_dtype of decode pools. tokens: per sequence and decode step. buffers: how many states a decode run walks
    over, one call each. states: a prefill reads an initial state and leaves a final one, which counts as moved.
    graph: a GPU row's calls are timed inside a CUDA graph.
    """

    op: str
    B: int = 1
    T: int = 1
    H: int = 1
    HV: int = 0
    K: int = 128
    V: int = 0
    lengths: tuple[int, ...] = ()
    N: int = 0
    tokens: int = 1
    buffers: int = 1
    dtype: str = "fp32"
    state_dtype: str = "fp32"
    device: str = "cpu"
    states: bool = False
    graph: bool = True

    @property
    def value_heads(self) -> int:
        """HV, with its default filled in."""
        return self.HV or self.H

    @property
    def value_dim(self) -> int:
        """V, with its default filled in."""
        return self.V or self.K

    @property
    def decodes(self) -> bool:
        """Whether the row advances states that are there already."""
        return self.op.endswith("_decode")

    @property
    def trains(self) -> bool:
        """Whether the row is forward + backward."""
        return self.op.endswith("_train")

    @property
    def lightning(self) -> bool:
        """Whether the row is one of Lightning Attention."""
        return self.op.startswith("lightning")

    def gates(self, wanted: tuple[str, ...] = GATES) -> tuple[str, ...]:
        """The gates of the row: those wanted, or a Lightning row's one."""
        return (SLOPES,) if self.lightning else wanted

    @property
    def sequences(self) -> int:
        """How many states the call has."""
        return self.N if self.decodes else (len(self.lengths) or self.B)

    @property
    def turns(self) -> tuple[int, ...]:
        """The buffer of each call of one timed step: one for each of many states, or one state over and over."""
        calls = max(self.buffers, DECODE_BUFFERS) if self.decodes else 1
        return tuple(i % self.buffers for i in range(calls))

    @property
    def from_memory(self) -> bool:
        """Whether the copy rate bounds the row: a decode row that repeats one state finds it in cache."""
        return not self.decodes or self.buffers > 1

    @property
    def rows(self) -> int:
        """Tokens of all sequences together."""
        return self.N * self.tokens if self.decodes else self.B * self.T

    @property
    def name(self) -> str:
        """The row's name in tables and result files."""
        heads = f"H{self.H}" + (f"-HV{self.HV}" if self.HV not in (0, self.H) else "")
        if self.decodes:
            return f"N{self.N}-{heads}" + ("-warm" if self.buffers == 1 else "")
        if not self.lengths:
            return f"B{self.B}-T{self.T}-{heads}" + ("" if self.graph else "-small")
        n, total = len(self.lengths), sum(self.lengths)
        equal = len(set(self.lengths)) == 1
        return f"packed{n}x{self.lengths[0]}-{heads}" if equal else f"packed{n}-{total}-{heads}"

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one call."""
        per_head = self.K * self.value_dim * ITEM_BYTES[self.state_dtype]
        return self.sequences * self.value_heads * per_head

    @property
    def moved_bytes(self) -> int:
        """Bytes that one call must move: the numerator of its floor.

        Forward: q, k, v, g read, o written. Training adds the backward: q, k, v, g, do read, dq, dk, dv, dg
        written. Decode, and a prefill with `states`: the same as a forward plus every state read and written once.
        g counts in q's dtype; Lightning has none.
        """
        keys = self.H * self.K
        values = self.value_heads * self.value_dim
        gates = 0 if self.lightning else self.value_heads * self.K
        read = 2 * keys + values + gates
        elements = read + values
        if self.trains:
            elements += (read + values) + (2 * keys + values + gates)
        bytes_ = self.rows * elements * ITEM_BYTES[self.dtype]
        return bytes_ + (2 * self.state_bytes if self.decodes or self.states else 0)

    @property
    def forward_flop(self) -> int:
        """Multiply-adds x 2 of the chunked forward at 64 tokens a chunk, triangles counted as halves."""
        K, V, half_chunk = self.K, self.value_dim, 32
        if self.lightning:
            return 2 * self.rows * self.value_heads * (2 * K * V + half_chunk * (K + V))
        return 2 * self.rows * self.value_heads * (3 * K * V + half_chunk * (3 * K + 2 * V))


_PACKED6 = (1300, 547, 2048, 963, 271, 3063)
_PACKED20 = (
    19, 3147, 431, 1024, 77, 2048, 512, 800, 333, 1001, 64, 65, 63, 1, 700, 1500, 900, 400, 1200, 2099,
)  # fmt: skip

CASES: tuple[Case, ...] = (
    Case("kda_prefill", B=1, T=2048, H=4),
    Case("kda_train", B=1, T=2048, H=4),
    Case("kda_decode", N=1, H=32, buffers=DECODE_BUFFERS),
    Case("kda_decode", N=1, H=32),
    Case("lightning_prefill", B=1, T=2048, H=8),
    Case("lightning_train", B=1, T=2048, H=8),
    Case("lightning_decode", N=1, H=32, buffers=DECODE_BUFFERS),
    *(
        Case("kda_prefill", dtype="bf16", device="cuda", states=True, **shape)
        for shape in (
            {"B": 1, "T": 8192, "H": 64},
            {"B": 1, "T": 8192, "H": 96},
            {"B": 1, "T": 1024, "H": 64},
            {"B": 2, "T": 8192, "H": 64},
            {"B": 1, "T": 32768, "H": 32},
            {"B": 1, "T": 32768, "H": 8},
            {"B": 1, "T": 131072, "H": 4},
            {"T": 8192, "H": 64, "lengths": _PACKED6},
            {"T": 8192, "H": 96, "lengths": (1024,) * 8},
            {"T": 16384, "H": 64, "lengths": _PACKED20},
            {"B": 1, "T": 1024, "H": 64, "graph": False},
        )
    ),
    Case("kda_train", B=1, T=8192, H=64, dtype="bf16", device="cuda"),
    Case("kda_train", B=4, T=4096, H=32, dtype="bf16", device="cuda"),
)


def select(device: str, ops: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> list[Case]:
    """The rows of `device`, restricted to `ops` and to case names where given. Empty where nothing fits."""
    return [
        case
        for case in CASES
        if case.device == device and (not ops or case.op in ops) and (not names or case.name in names)
    ]


def names(device: str, ops: tuple[str, ...] = ()) -> list[str]:
    """The distinct case names of `device` (and of `ops`), in table order."""
    return list(dict.fromkeys(case.name for case in select(device, ops)))
