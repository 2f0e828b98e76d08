"""Four properties that hold for every implementation, checked without knowing any.

- split anywhere: prefill a + prefill b + decode c is the one-shot call, within the 'agreement' tolerance;
- prefix stability: later tokens never change an earlier output, in bits;
- sequence isolation: a NaN stays in its sequence, the order of the batch and packing change nothing, in bits;
- call-order independence: any order of unlike calls gives what each gives in a fresh process, in bits.

Each check takes an implementation's name and a device, runs the cases that this implementation accepts, and raises
AssertionError with the case and the place. One that accepts no case at all is an AssertionError too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cula.checks import runs
from cula.checks.cases import Case, Problem, make
from cula.checks.rows import labels, name_of, only
from cula.checks.tolerance import bits_equal, relative_error, tolerance

#: Cases of the properties, from small and odd to what one-size kernels take, and one of so many heads that work is
#: cut into parts. T and N are set by each property.
CASES = (
    Case(H=1, HV=2, K=32, V=16, dtype="fp32", gate="channels"),
    Case(H=2, HV=2, K=20, V=36, dtype="fp32", gate="softplus", l2norm=True, beta="logits"),
    Case(H=1, HV=1, K=64, V=64, dtype="bf16", gate="mild", l2norm=True),
    Case(H=2, HV=2, K=128, V=128, dtype="bf16", gate="sigmoid", l2norm=True, beta="logits"),
    Case(H=256, HV=256, K=4, V=4, dtype="fp32", gate="channels"),
)
LIGHTNING_CASES = (
    Case(H=1, HV=2, K=32, V=16, dtype="fp32", gate="slopes_mixed"),
    Case(H=2, HV=2, K=20, V=36, dtype="fp32", gate="slopes_alibi"),
    Case(H=1, HV=1, K=64, V=64, dtype="bf16", gate="slopes_last"),
    Case(H=2, HV=2, K=128, V=128, dtype="bf16", gate="slopes_fla"),
    Case(H=256, HV=256, K=4, V=4, dtype="fp32", gate="slopes_fla"),
)
#: Per algorithm: its functions, by what they do.
FUNCTIONS = {
    "kda": {
        "chunk": "chunk_kda", "prefill": "kda_prefill", "decode": "kda_decode", "verify": "kda_verify",
        "recurrent": "fused_recurrent_kda",
    },
    "lightning": {
        "chunk": "chunk_lightning_attn", "prefill": "lightning_prefill", "decode": "lightning_decode",
        "verify": "lightning_verify",
    },
}  # fmt: skip
SPLIT_LENGTH = 100
SPLITS = ((64, 90), (1, 60), (63, 97), (0, 90), (95, 100))


def stage_names(functions: Iterable[str], label: str, device: str) -> dict[str, str | None]:
    """For each function: the name to ask for where `label` has that stage on the device, else None (auto)."""
    return {f: name_of(label) if label in labels(f, device) else None for f in functions}


def each_accepted(check: Callable[[Case], None], algorithm: str = "kda") -> list[Case]:
    """Run `check` on every case of the algorithm that is not refused; AssertionError where all are."""
    from cula import NotSupportedError

    done, reasons = [], []
    for case in CASES if algorithm == "kda" else LIGHTNING_CASES:
        try:
            check(case)
        except NotSupportedError as error:
            reasons.append(f"{case.id}: {error}")
            continue
        done.append(case)
    assert done, "the implementation accepts none of the property's cases: " + "; ".join(reasons)
    return done


# ---------------------------------------------------------------------------------------------- split anywhere


def split_anywhere(label: str, device: str, algorithm: str | None = None) -> None:
    """Serving: prefill a, prefill b, decode c over one pool; training door: chunk, chunk, and the rest, both layouts.

    The rest goes through KDA's recurrent function, and in Lightning through the chunk function once more.
    """
    for kind in FUNCTIONS if algorithm is None else (algorithm,):
        names = stage_names(FUNCTIONS[kind].values(), label, device)
        named = {what: names[function] for what, function in FUNCTIONS[kind].items()}
        if named["prefill"] or named["decode"]:
            each_accepted(lambda c, n=named: _split_serving(n, c.replace(B=2, T=SPLIT_LENGTH, seed=1), device), kind)
        if named["chunk"] or named.get("recurrent"):
            for v_first in (False, True):
                change = {"B": 2, "T": SPLIT_LENGTH, "seed": 2, "v_first": v_first}
                each_accepted(lambda c, n=named, x=change: _split_chunk(n, c.replace(**x), device), kind)


def _split_serving(names: dict[str, str | None], case: Case, device: str) -> None:
    p = make(case, device)
    limit = tolerance("split", p.q.dtype, device)
    options = {"cp_mode": False, "implementation": names["prefill"]}
    whole, index = runs.fresh_pool(p)
    expected = runs.serve("prefill", p, state_pool=whole, read_indices=index, **options)
    for a, b in SPLITS:
        pool, index = runs.fresh_pool(p)
        outs = []
        for start, end in ((0, a), (a, b)):
            slots = {"state_pool": pool, "read_indices": index}
            outs.append(runs.serve("prefill", p.tokens(start, end), **slots, **options))
        step = {"state_pool": pool, "state_indices": index, "implementation": names["decode"]}
        outs += [runs.serve("decode", p.tokens(t, t + 1), **step) for t in range(b, case.T)]
        place = f"{case.id} split at {a}, {b}"
        _close(torch.cat(outs, 1), expected, limit, f"out, {place}")
        _close(pool[index.long()], whole[index.long()], limit, f"pool, {place}")


def _split_chunk(names: dict[str, str | None], case: Case, device: str) -> None:
    p = make(case, device)
    limit = tolerance("split", p.q.dtype, device)
    options = {"implementation": names["chunk"]}
    with torch.no_grad():
        o, last = runs.chunk(p, **options)[:2]
        for a, b in SPLITS:
            parts, state = [], p.h0
            for start, end in ((0, a), (a, b)):
                part, state = runs.chunk(p.tokens(start, end), initial_state=state, **options)[:2]
                parts.append(part)
            rest = p.tokens(b, case.T, h0=state)
            part, state = (_recurrent if "recurrent" in names else _chunked)(rest, names)
            place = f"{case.id} split at {a}, {b}"
            _close(torch.cat([*parts, part], 1), o, limit, f"o, {place}")
            _close(state, last, limit, f"final_state, {place}")


def _recurrent(p: Problem, names: dict[str, str | None]) -> tuple[torch.Tensor, torch.Tensor]:
    from cula.kda import fused_recurrent_kda

    extra = {"A_log": p.A_log, "dt_bias": p.dt_bias, "implementation": names["recurrent"]}
    return fused_recurrent_kda(*p.five(), initial_state=p.h0, **p.flags(), **extra)


def _chunked(p: Problem, names: dict[str, str | None]) -> tuple[torch.Tensor, torch.Tensor]:
    return runs.chunk(p, implementation=names["chunk"])[:2]


def _close(got: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    error = relative_error(got, expected.double())
    assert error <= limit, f"{what}: error {error:.2e} is above {limit:.0e}"


# ---------------------------------------------------------------------------------------------- prefix stability


def prefix_stability(label: str, device: str, algorithm: str | None = None) -> None:
    """Outputs of tokens 0..n-1 are the same bits when later tokens are absent or hold anything else.

    Token by token functions: NaN too. Chunked ones: any finite number of any size, and NaN from the next chunk on,
    since a product with a masked operand turns 0 * NaN of one chunk into NaN.
    """
    for kind, what, function in functions_of(algorithm, PREFIXES):
        if label in labels(function, device):
            T, cuts = PREFIXES[what]
            each_accepted(
                lambda case, f=function, t=T, n=cuts: _prefix(f, label, case.replace(B=2, T=t, seed=3), device, n), kind
            )


#: Per kind of function: tokens, and after how many of them the rest is changed.
PREFIXES = {
    "chunk": (130, (1, 16, 33, 64, 65, 129)),
    "prefill": (130, (63, 64, 100)),
    "recurrent": (20, (1, 7, 16)),
    "verify": (9, (1, 8)),
}


def functions_of(algorithm: str | None, wanted: Iterable[str]) -> list[tuple[str, str, str]]:
    """(algorithm, what it does, name) of the functions of one algorithm or all that do one of the wanted things."""
    return [
        (kind, what, found[what])
        for kind, found in FUNCTIONS.items()
        for what in wanted
        if algorithm in (None, kind) and what in found
    ]


def _prefix(function: str, label: str, case: Case, device: str, cuts: tuple[int, ...]) -> None:
    p = make(case, device)
    expected = output(function, p, label)
    step = case.chunk_size if "chunk" in function or function.endswith("_prefill") else 1
    for n in cuts:
        place = f"{function} {case.id}: the first {n} outputs"
        got = output(function, p.tokens(0, n), label)
        assert bits_equal(got, expected[:, :n]), f"{place} change when later tokens are appended"
        for what, later in later_tokens(p, n, -(-n // step) * step).items():
            got = output(function, later, label)[:, :n]
            assert bits_equal(got, expected[:, :n]), f"{place} change with {what} in later tokens"


def later_tokens(p: Problem, n: int, chunk_end: int) -> dict[str, Problem]:
    """The problem with other tokens from n on: random ones, huge values with closed gates, NaN from a chunk on."""
    names = p.names
    other = make(p.case.replace(seed=p.case.seed + 1), p.q.device)

    def with_later(start: int, **values: float | torch.Tensor) -> Problem:
        changed = {name: getattr(p, name).clone() for name in values}
        for name, value in values.items():
            changed[name][:, start:] = value[:, start:] if isinstance(value, torch.Tensor) else value
        return p.map(lambda x: x, **changed)

    closed = {} if p.g is None else {"g": 1e4 if p.raw_gate else -1e3}
    return {
        "other numbers": with_later(n, **{name: getattr(other, name) for name in names}),
        "huge values and closed gates": with_later(n, v=1e4, q=-1e4, **closed),
        "NaN": with_later(chunk_end, **dict.fromkeys(names, math.nan)),
    }


def output(function: str, p: Problem, label: str) -> torch.Tensor:
    """The outputs of one call without grad, context parallelism off."""
    return call(function, p, label)["o"]


def call(function: str, p: Problem, label: str) -> runs.Quantities:
    """Outputs and states of one call without grad, context parallelism off, memory not poisoned."""
    if "chunk" in function:
        return runs.run_chunk(p, name_of(label), gradients=False, fill=None)
    runners = {"prefill": runs.run_prefill, "verify": runs.run_verify, "decode": runs.run_decode}
    return runners.get(function.rpartition("_")[2], runs.run_recurrent)(p, name_of(label), fill=None)


# -------------------------------------------------------------------------------------------- sequence isolation

LENGTHS = (17, 0, 64, 1, 70)


def sequence_isolation(label: str, device: str, algorithm: str | None = None) -> None:
    """Batch order, batch size, packing and a NaN elsewhere change no bit of a sequence's outputs and state."""
    tokens = {"chunk": 70, "prefill": 70, "recurrent": 20, "verify": 5, "decode": 1}
    for kind, what, function in functions_of(algorithm, tokens):
        if label not in labels(function, device):
            continue
        T, B = tokens[what], 5 if what == "decode" else 3
        each_accepted(lambda c, f=function, b=B, t=T: _batch(f, label, c.replace(B=b, T=t, seed=4), device), kind)
        if what != "decode":
            lengths = tuple(min(n, T) for n in LENGTHS)
            change = {"lengths": lengths, "T": sum(lengths) + 3, "seed": 5}
            each_accepted(lambda c, f=function, x=change: _packed(f, label, c.replace(**x), device), kind)


def _rows(p: Problem, index: torch.Tensor) -> Problem:
    """The batch rows `index` of an unpacked problem."""
    index = index.to(p.q.device)
    fields = (*p.names, "do", "dht", "h0")
    picked = {f: getattr(p, f)[index] for f in fields if getattr(p, f) is not None}
    return p.map(lambda x: x, case=p.case.replace(B=len(index)), **picked)


def _batch(function: str, label: str, case: Case, device: str) -> None:
    p = make(case, device)
    expected = call(function, p, label)
    order = torch.arange(case.B).flip(0)
    got = call(function, _rows(p, order), label)
    for n in range(case.B):
        alone = call(function, _rows(p, torch.tensor([n])), label)
        for key in ("o", "final_state"):
            place = f"{function} {case.id}: {key} of batch row {n}"
            assert bits_equal(got[key][case.B - 1 - n], expected[key][n]), f"{place} changes with the batch's order"
            assert bits_equal(alone[key][0], expected[key][n]), f"{place} changes with the batch's size"
    for n in range(case.B):
        ill = p.map(torch.clone)
        for x in (*ill.operands(), ill.h0):
            x[n] = math.nan
        got = call(function, ill, label)
        _others_equal(got, expected, [m for m in range(case.B) if m != n], f"{function} {case.id}: NaN in row {n}")


def _others_equal(got: runs.Quantities, expected: runs.Quantities, rows: list[int], place: str) -> None:
    for key in ("o", "final_state"):
        for m in rows:
            assert bits_equal(got[key][m], expected[key][m]), f"{place} changes {key} of sequence {m}"


def _packed(function: str, label: str, case: Case, device: str) -> None:
    p = make(case, device)
    expected = call(function, p, label)
    used = sum(case.lengths or ())
    assert not bool(expected["o"][:, used:].any()), f"{function} {case.id}: rows after the last sequence are not 0"
    for n, (_, start, end) in enumerate(p.spans()):
        alone = {"one sequence packed": sequence(p, n, packed=True), "a batch of one": sequence(p, n, packed=False)}
        for what, single in alone.items():
            if not single.case.T:
                continue
            got = call(function, single, label)
            place = f"{function} {case.id}: sequence {n} as {what}"
            assert bits_equal(got["o"], expected["o"][:, start:end]), f"{place} has another o"
            assert bits_equal(got["final_state"][0], expected["final_state"][n]), f"{place} has another state"
        ill = p.map(torch.clone)
        for x in ill.operands():
            x[:, start:end] = math.nan
        ill.h0[n] = math.nan
        got = call(function, ill, label)
        place = f"{function} {case.id}: NaN in sequence {n} changes"
        for m, (_, s, e) in enumerate(p.spans()):
            if m != n:
                assert bits_equal(got["o"][:, s:e], expected["o"][:, s:e]), f"{place} o of sequence {m}"
                assert bits_equal(got["final_state"][m], expected["final_state"][m]), f"{place} state {m}"


def sequence(p: Problem, n: int, *, packed: bool) -> Problem:
    """Sequence n of a packed problem alone, packed or as a fixed batch of one."""
    _, start, end = p.spans()[n]
    fields = (*p.names, "do")
    cut = {f: getattr(p, f)[:, start:end] for f in fields}
    length = end - start
    states = {"dht": p.dht[n : n + 1], "h0": None if p.h0 is None else p.h0[n : n + 1]}
    cu = torch.tensor([0, length], dtype=torch.int32, device=p.q.device) if packed else None
    case = p.case.replace(T=length, lengths=(length,) if packed else None)
    return p.map(lambda x: x, case=case, cu_seqlens=cu, **cut, **states)


# ---------------------------------------------------------------------------------------- call-order independence


def call_order_independence(label: str, device: str, algorithm: str | None = None) -> None:
    """A shuffled list of unlike calls, twice, gives each call's bits from a process that made no other call."""
    from cula.checks import fresh

    served = 0
    for kind in FUNCTIONS if algorithm is None else (algorithm,):
        expected = fresh.in_fresh_processes(label, device, kind)
        served += sum(d is not None for d in expected.values())
        for seed in (1, 2):
            for call_name, digest in fresh.shuffled(label, device, seed, kind).items():
                assert digest == expected[call_name], f"{call_name} differs from its fresh process (shuffle {seed})"
    assert served, "the implementation accepts none of the calls"


PROPERTIES: dict[str, Callable[..., Any]] = {
    "split anywhere": split_anywhere,
    "prefix stability": prefix_stability,
    "sequence isolation": sequence_isolation,
    "call-order independence": call_order_independence,
}


def check(property_name: str, label: str, device: str = "cpu", algorithm: str | None = None) -> None:
    """Hold the implementation `label` on `device` to one property of `PROPERTIES`, in one algorithm or in all."""
    with only(label):
        PROPERTIES[property_name](label, device, *(() if algorithm is None else (algorithm,)))
