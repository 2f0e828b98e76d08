"""Decode, verify and the fused serving step on a GPU, beside their limit and FLA's decode.

    python -m cula.bench.cuda.decode                          # kda_decode, N = 1..256, H = 64
    python -m cula.bench.cuda.decode --op kda_verify --tokens 4 --N 32 64 --implementation portable

A step is one CUDA graph of up to 40 calls, each on inputs and a pool of its own, so that no state is in the L2 cache
when its turn comes; the time is the step's, divided by its calls. The limit is timed beside it in the same way: a pool
multiplied by one in place, or read once where nothing is written. Who is off by more than the tolerance gets no time.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cula.bench.cases import ITEM_BYTES
from cula.bench.inputs import LOWER_BOUND
from cula.bench.records import Record
from cula.bench.timing import Timing
from cula.bench.truth import Check
from cula.checks.tolerance import relative_error, tolerance

OPS = ("kda_decode", "kda_verify", "kda_decode_fused")
LIMIT = "(limit)"
POOL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_POOLS = 40
L2_MULTIPLE = 4
#: Sequences whose outputs are compared with the float64 recurrence.
CHECKED = 4
WIDTH = 4

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One line: N sequences, H heads of D = K = V, `tokens` drafts of kda_verify, which writes no state."""

    op: str
    N: int
    H: int = 64
    D: int = 128
    tokens: int = 1
    state_dtype: str = "fp32"

    @property
    def name(self) -> str:
        """As in result files."""
        return f"N{self.N}-H{self.H}"

    @property
    def writes(self) -> bool:
        """Whether the call writes the states that it reads."""
        return self.op != "kda_verify"

    @property
    def pool_bytes(self) -> int:
        """Bytes of the states of one call."""
        return self.N * self.H * self.D * self.D * ITEM_BYTES[self.state_dtype]

    @property
    def moved_bytes(self) -> int:
        """Bytes that a call must move: q, k, v, g, o in bf16, the states once or twice."""
        return 2 * 5 * self.N * self.tokens * self.H * self.D + self.pool_bytes * (2 if self.writes else 1)


@dataclass
class Buffer:
    """Arguments of one call: raw gate and logits, bf16; a pool whose slots are used in a random order."""

    row: Row
    inputs: tuple[torch.Tensor, ...]  # q, k, v, g, beta `[N, T, ...]`
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    pool: torch.Tensor
    index: torch.Tensor
    step: dict[str, torch.Tensor]  # what kda_decode_fused has instead of q, k, v


def make(row: Row, seed: int, device: str) -> Buffer:
    """The arguments of a row, drawn on the device."""
    rng = torch.Generator(device).manual_seed(seed)
    N, T, H, D = row.N, row.tokens, row.H, row.D

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device).to(dtype)

    step = {}
    if row.op == "kda_decode_fused":
        channels = 3 * H * D
        step = {
            "x": normal(N, channels), "conv_weight": 0.5 * normal(channels, WIDTH, dtype=torch.float32),
            "conv_pool": normal(N, channels, WIDTH - 1), "output_gate": normal(N, H, D),
            "norm_weight": normal(D, dtype=torch.float32),
        }  # fmt: skip
    return Buffer(
        row, (*(normal(N, T, H, D) for _ in range(4)), normal(N, T, H)), 0.5 * normal(H, dtype=torch.float32),
        0.1 * normal(H * D, dtype=torch.float32), normal(N, H, D, D, dtype=POOL_DTYPES[row.state_dtype]),
        torch.randperm(N, generator=rng, device=device).int(), step,
    )  # fmt: skip


def ours(b: Buffer, implementation: str) -> Call:
    """The public function, as an engine calls it: out and indices are its own."""
    from cula import kda

    common = {
        "A_log": b.A_log, "dt_bias": b.dt_bias, "lower_bound": LOWER_BOUND, "state_pool": b.pool,
        "state_indices": b.index, "implementation": implementation,
    }  # fmt: skip
    function = getattr(kda, b.row.op)
    if b.row.op == "kda_decode_fused":
        g, beta = b.inputs[3][:, 0], b.inputs[4][:, 0]
        x, rest = b.step["x"], {name: t for name, t in b.step.items() if name != "x"}
        return lambda: function(x, g, beta, **rest, **common)
    return lambda: function(*b.inputs, **common)


def fla(b: Buffer) -> Call:
    """FLA's decode over the same pool, in place."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    q, k, v, g, beta = (x.transpose(0, 1) for x in b.inputs)
    cu = torch.arange(b.row.N + 1, device=q.device)
    return lambda: fused_recurrent_kda_fwd(
        q=q, k=k, v=v, g=g, beta=beta, A_log=b.A_log, dt_bias=b.dt_bias, scale=b.row.D**-0.5, initial_state=b.pool,
        inplace_final_state=True, ssm_state_indices=b.index, cu_seqlens=cu, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=LOWER_BOUND, state_v_first=True,
    )[0].transpose(0, 1)  # fmt: skip


def limit(b: Buffer) -> Call:
    """What only moves the states: times one in place, or read once."""
    pool = b.pool
    return (lambda: pool.mul_(1.0)) if b.row.writes else (lambda: pool.view(b.row.N * b.row.H, -1).sum(1))


def truth(b: Buffer) -> torch.Tensor:
    """The float64 output `[CHECKED, T, H, D]` of the first sequences, from the pool as it is now."""
    from cula.kda import kda_decode_fused, kda_recurrent_reference

    n = min(CHECKED, b.row.N)
    index = b.index[:n].long()
    if b.row.op == "kda_decode_fused":
        wide = {name: t.double() for name, t in b.step.items()}
        x, gate = wide.pop("x")[:n], wide.pop("output_gate")[:n]
        wide["conv_pool"] = wide["conv_pool"][index]
        return kda_decode_fused(
            x, b.inputs[3][:n, 0].double(), b.inputs[4][:n, 0].double(), **wide, output_gate=gate,
            state_pool=b.pool[index].double(), state_indices=torch.arange(n, device=index.device), A_log=b.A_log,
            dt_bias=b.dt_bias, lower_bound=LOWER_BOUND, implementation="eager",
        )[:, None]  # fmt: skip
    return kda_recurrent_reference(
        *(x[:n] for x in b.inputs), initial_state=b.pool[index].double(), use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=LOWER_BOUND, state_v_first=True,
        A_log=b.A_log, dt_bias=b.dt_bias,
    )[0]  # fmt: skip


def bind(row: Row, names: Sequence[str], buffers: Sequence[Buffer]) -> tuple[dict[str, list[Call]], dict[str, Any]]:
    """Calls of everybody that is right, one per buffer, and per name its `Check` or the sentence that says why not."""
    calls: dict[str, list[Call]] = {LIMIT: [limit(b) for b in buffers]}
    verdicts: dict[str, Any] = {}
    allowed = tolerance("o", torch.bfloat16, buffers[0].pool.device.type)
    for name in names:
        try:
            bound = [fla(b) if name == "fla" else ours(b, name) for b in buffers]
            right = truth(buffers[0])
            got = bound[0]().reshape(row.N, row.tokens, row.H, row.D)
            error = relative_error(got[: right.shape[0]], right) if bool(torch.isfinite(got).all()) else math.inf
            verdicts[name] = Check(output="o", error=error, tolerance=allowed, errors={"o": error})
            if verdicts[name].passed:
                calls[name] = bound
        except Exception as problem:  # whoever fails says so in its line
            verdicts[name] = f"failed: {type(problem).__name__}: {problem}".splitlines()[0]
    return calls, verdicts


def records(row: Row, timings: dict[str, Timing], verdicts: dict[str, Any], facts: Any, pools: int) -> list[Record]:
    """One line of a result file for each name."""
    least = timings[LIMIT].ms
    found = []
    for name, verdict in verdicts.items():
        checked = isinstance(verdict, Check)
        timing = timings.get(name)
        reason = None if checked and verdict.passed else f"red: o is off by {verdict.error:.1e}" if checked else verdict
        error = verdict.error if checked and math.isfinite(verdict.error) else None
        found.append(
            Record(
                op=row.op, case=row.name, impl=name, gate="strong", ms=timing.ms if timing else None, error=error,
                tolerance=verdict.tolerance if checked else None, output="o", reason=reason,
                ms_least=timing.least if timing else None, ms_most=timing.most if timing else None,
                rounds=len(timing.samples) if timing else 0, limit_ms=least, dtype="bf16",
                state_dtype=row.state_dtype, tokens=row.tokens, head_dim=row.D, buffers=pools, method="graph",
                **{key: getattr(facts, key) for key in ("device", "cpu", "gpu", "torch", "triton", "python", "peers",
                                                        "commit", "date", "run")},
            )
        )  # fmt: skip
    return found


def run(row: Row, names: Sequence[str], rounds: int, facts: Any, clock: Any, device: str = "cuda") -> list[Record]:
    """Bind, check and time one row. clock: `cula.bench.cuda.clock`, or what stands for it."""
    pools = max(1, min(MOST_POOLS, math.ceil(L2_MULTIPLE * clock.l2_bytes() / row.pool_bytes)))
    buffers = [make(row, seed, device) for seed in range(pools)]
    calls, verdicts = bind(row, names, buffers)
    steps = {name: clock.prepare(bound) for name, bound in calls.items()}
    return records(row, clock.interleave(steps, rounds=rounds), verdicts, facts, pools)


def line(record: Record) -> str:
    """A result as text: microseconds, and in multiples of the limit."""
    head = f"{record.op:16} {record.case:10} T{record.tokens:<2} {record.state_dtype} {record.impl:9}"
    if record.ms is None:
        return f"{head} {record.reason}"
    return f"{head} {1e3 * record.ms:8.2f} us  {record.ms / record.limit_ms:5.2f}x limit  error {record.error:.1e}"


def main(arguments: list[str] | None = None) -> int:
    """The rows that are asked for; exit code 1 where somebody of ours is wrong."""
    parser = argparse.ArgumentParser(description="Time decode calls beside the limit of the states' bytes.")
    parser.add_argument("--op", choices=OPS, default="kda_decode")
    parser.add_argument("--N", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--H", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1, help="drafts of kda_verify")
    parser.add_argument("--state-dtype", choices=POOL_DTYPES, default="fp32")
    parser.add_argument("--implementation", nargs="+", default=["portable"])
    parser.add_argument("--fla", action="store_true", help="FLA's decode beside ours")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append result lines to this file")
    given = parser.parse_args(arguments)
    if min(*given.N, given.H, given.head_dim, given.rounds, given.tokens) < 1:
        parser.error("--N, --H, --head-dim, --rounds and --tokens must be at least 1")
    if given.tokens > 1 and given.op != "kda_verify":
        parser.error("--tokens needs --op kda_verify")
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here")
    from cula.bench import facts as machine
    from cula.bench.cuda import clock
    from cula.bench.records import append

    facts, wrong = machine.collect("cuda", 0, {}, None), False
    names = [*given.implementation, *(["fla"] if given.fla and given.op == "kda_decode" else [])]
    for N in given.N:
        row = Row(given.op, N, given.H, given.head_dim, given.tokens, given.state_dtype)
        found = run(row, names, given.rounds, facts, clock)
        for record in found:
            print(line(record), flush=True)
            wrong |= record.ms is None and record.impl != "fla"
        if given.json is not None:
            append(given.json, found)
        torch.cuda.empty_cache()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
