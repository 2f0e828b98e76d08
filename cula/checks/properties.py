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
SPLIT_LENGTH = 100
SPLITS = ((64, 90), (1, 60), (63, 97), (0, 90), (95, 100))


def stage_names(functions: Iterable[str], label: str, device: str) -> dict[str, str | None]:
    """For each function: the name to ask for where `label` has that stage on the device, else None (auto)."""
    return {f: name_of(label) if label in labels(f, device) else None for f in functions}


def each_accepted(check: Callable[[Case], None]) -> list[Case]:
    """Run `check` on every case of `CASES` that is not refused; AssertionError where all are."""
    from cula import NotSupportedError

    done, reasons = [], []
    for case in CASES:
        try:
            check(case)
        except NotSupportedError as error:
            reasons.append(f"{case.id}: {error}")
            continue
        done.append(case)
    assert done, "the implementation accepts none of the property's cases: " + "; ".join(reasons)
    return done


# ---------------------------------------------------------------------------------------------- split anywhere


def split_anywhere(label: str, device: str) -> None:
    """Serving: prefill a, prefill b, decode c over one pool; training door: chunk, chunk, recurrent, both layouts."""
    names = stage_names(("kda_prefill", "kda_decode", "chunk_kda", "fused_recurrent_kda"), label, device)
    if names["kda_prefill"] or names["kda_decode"]:
        each_accepted(lambda case: _split_serving(names, case.replace(B=2, T=SPLIT_LENGTH, seed=1), device))
    if names["chunk_kda"] or names["fused_recurrent_kda"]:
        for v_first in (False, True):
            change = {"B": 2, "T": SPLIT_LENGTH, "seed": 2, "v_first": v_first}
            each_accepted(lambda case, c=change: _split_chunk(names, case.replace(**c), device))


def _split_serving(names: dict[str, str | None], case: Case, device: str) -> None:
    p = make(case, device)
    limit = tolerance("split", p.q.dtype, device)
    options = {"cp_mode": False, "implementation": names["kda_prefill"]}
    whole, index = runs.fresh_pool(p)
    expected = runs.serve("kda_prefill", p, state_pool=whole, read_indices=index, **options)
    for a, b in SPLITS:
        pool, index = runs.fresh_pool(p)
        outs = []
        for start, end in ((0, a), (a, b)):
            slots = {"state_pool": pool, "read_indices": index}
            outs.append(runs.serve("kda_prefill", p.tokens(start, end), **slots, **options))
        step = {"state_pool": pool, "state_indices": index, "implementation": names["kda_decode"]}
        outs += [runs.serve("kda_decode", p.tokens(t, t + 1), **step) for t in range(b, case.T)]
        place = f"{case.id} split at {a}, {b}"
        _close(torch.cat(outs, 1), expected, limit, f"out, {place}")
        _close(pool[index.long()], whole[index.long()], limit, f"pool, {place}")


def _split_chunk(names: dict[str, str | None], case: Case, device: str) -> None:
    from cula.kda import chunk_kda, fused_recurrent_kda

    p = make(case, device)
    limit = tolerance("split", p.q.dtype, device)
    extra = {"A_log": p.A_log, "dt_bias": p.dt_bias}
    options = {"cp_mode": False, "implementation": names["chunk_kda"]}
    with torch.no_grad():
        o, last = chunk_kda(*p.five(), initial_state=p.h0, **p.flags(), **extra, **options)
        for a, b in SPLITS:
            parts, state = [], p.h0
            for start, end in ((0, a), (a, b)):
                x = p.tokens(start, end).five()
                part, state = chunk_kda(*x, initial_state=state, **p.flags(), **extra, **options)
                parts.append(part)
            x, step = p.tokens(b, case.T).five(), {"implementation": names["fused_recurrent_kda"]}
            part, state = fused_recurrent_kda(*x, initial_state=state, **p.flags(), **extra, **step)
            place = f"{case.id} split at {a}, {b}"
            _close(torch.cat([*parts, part], 1), o, limit, f"o, {place}")
            _close(state, last, limit, f"final_state, {place}")


def _close(got: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    error = relative_error(got, expected.double())
    assert error <= limit, f"{what}: error {error:.2e} is above {limit:.0e}"


# ---------------------------------------------------------------------------------------------- prefix stability


def prefix_stability(label: str, device: str) -> None:
    """Outputs of tokens 0..n-1 are the same bits when later tokens are absent or hold anything else.

    Token by token functions: NaN too. Chunked ones: any finite number of any size, and NaN from the next chunk on,
    since a product with a masked operand turns 0 * NaN of one chunk into NaN.
    """
    for function, (T, _) in PREFIXES.items():
        if label in labels(function, device):
            each_accepted(lambda case, f=function, t=T: _prefix(f, label, case.replace(B=2, T=t, seed=3), device))


#: Per function: tokens, and after how many of them the rest is changed.
PREFIXES = {
    "chunk_kda": (130, (1, 16, 33, 64, 65, 129)),
    "kda_prefill": (130, (63, 64, 100)),
    "fused_recurrent_kda": (20, (1, 7, 16)),
    "kda_verify": (9, (1, 8)),
}


def _prefix(function: str, label: str, case: Case, device: str) -> None:
    p = make(case, device)
    expected = output(function, p, label)
    step = case.chunk_size if function in ("chunk_kda", "kda_prefill") else 1
    for n in PREFIXES[function][1]:
        place = f"{function} {case.id}: the first {n} outputs"
        got = output(function, p.tokens(0, n), label)
        assert bits_equal(got, expected[:, :n]), f"{place} change when later tokens are appended"
        for what, later in later_tokens(p, n, -(-n // step) * step).items():
            got = output(function, later, label)[:, :n]
            assert bits_equal(got, expected[:, :n]), f"{place} change with {what} in later tokens"


def later_tokens(p: Problem, n: int, chunk_end: int) -> dict[str, Problem]:
    """The problem with other tokens from n on: random ones, huge values with closed gates, NaN from a chunk on."""
    names = ("q", "k", "v", "g", "beta")
    other = make(p.case.replace(seed=p.case.seed + 1), p.q.device)

    def with_later(start: int, **values: float | torch.Tensor) -> Problem:
        changed = {name: getattr(p, name).clone() for name in values}
        for name, value in values.items():
            changed[name][:, start:] = value[:, start:] if isinstance(value, torch.Tensor) else value
        return p.map(lambda x: x, **changed)

    return {
        "other numbers": with_later(n, **{name: getattr(other, name) for name in names}),
        "huge values and closed gates": with_later(n, v=1e4, q=-1e4, g=1e4 if p.raw_gate else -1e3),
        "NaN": with_later(chunk_end, **dict.fromkeys(names, math.nan)),
    }


def output(function: str, p: Problem, label: str) -> torch.Tensor:
    """The outputs of one call without grad, context parallelism off."""
    return call(function, p, label)["o"]


def call(function: str, p: Problem, label: str) -> runs.Quantities:
    """Outputs and states of one call without grad, context parallelism off, memory not poisoned."""
    if function == "chunk_kda":
        return runs.run_chunk(p, name_of(label), gradients=False, fill=None)
    if function == "kda_prefill":
        return runs.run_prefill(p, name_of(label), fill=None)
    if function == "kda_verify":
        return runs.run_verify(p, name_of(label), fill=None)
    if function == "kda_decode":
        return runs.run_decode(p, name_of(label), fill=None)
    return runs.run_recurrent(p, name_of(label), fill=None)


# -------------------------------------------------------------------------------------------- sequence isolation

LENGTHS = (17, 0, 64, 1, 70)


def sequence_isolation(label: str, device: str) -> None:
    """Batch order, batch size, packing and a NaN elsewhere change no bit of a sequence's outputs and state."""
    for function, T in (("chunk_kda", 70), ("kda_prefill", 70), ("fused_recurrent_kda", 20), ("kda_verify", 5)):
        if label in labels(function, device):
            each_accepted(lambda case, f=function, t=T: _batch(f, label, case.replace(B=3, T=t, seed=4), device))
            lengths = tuple(min(n, T) for n in LENGTHS)
            change = {"lengths": lengths, "T": sum(lengths) + 3, "seed": 5}
            each_accepted(lambda case, f=function, c=change: _packed(f, label, case.replace(**c), device))
    if label in labels("kda_decode", device):
        each_accepted(lambda case: _batch("kda_decode", label, case.replace(B=5, T=1, seed=4), device))


def _rows(p: Problem, index: torch.Tensor) -> Problem:
    """The batch rows `index` of an unpacked problem."""
    index = index.to(p.q.device)
    fields = ("q", "k", "v", "g", "beta", "do", "dht", "h0")
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
        for x in (ill.q, ill.k, ill.v, ill.g, ill.beta, ill.h0):
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
        for x in (ill.q, ill.k, ill.v, ill.g, ill.beta):
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
    fields = ("q", "k", "v", "g", "beta", "do")
    cut = {f: getattr(p, f)[:, start:end] for f in fields}
    length = end - start
    states = {"dht": p.dht[n : n + 1], "h0": None if p.h0 is None else p.h0[n : n + 1]}
    cu = torch.tensor([0, length], dtype=torch.int32, device=p.q.device) if packed else None
    case = p.case.replace(T=length, lengths=(length,) if packed else None)
    return p.map(lambda x: x, case=case, cu_seqlens=cu, **cut, **states)


# ---------------------------------------------------------------------------------------- call-order independence


def call_order_independence(label: str, device: str) -> None:
    """A shuffled list of unlike calls, twice, gives each call's bits from a process that made no other call."""
    from cula.checks import fresh

    expected = fresh.in_fresh_processes(label, device)
    assert any(d is not None for d in expected.values()), "the implementation accepts none of the calls"
    for seed in (1, 2):
        for call_name, digest in fresh.shuffled(label, device, seed).items():
            assert digest == expected[call_name], f"{call_name} differs from its fresh process (shuffle {seed})"


PROPERTIES: dict[str, Callable[..., Any]] = {
    "split anywhere": split_anywhere,
    "prefix stability": prefix_stability,
    "sequence isolation": sequence_isolation,
    "call-order independence": call_order_independence,
}


def check(property_name: str, label: str, device: str = "cpu") -> None:
    """Hold the implementation `label` on `device` to one property of `PROPERTIES`."""
    with only(label):
        PROPERTIES[property_name](label, device)
