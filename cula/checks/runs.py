"""One problem through one public function, forward and backward, and what the float64 recurrence says of it.

Every runner returns `{quantity: tensor}` under the names of the tolerance table, states K-first, whatever layout the
call used. `fill` surrounds all inputs with poisoned memory and checks that none was written.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from cula.checks.cases import BETAS, Case, Problem, natural_gate, normal
from cula.checks.poison import Poison
from cula.checks.rows import algorithm_of
from cula.checks.tolerance import FLOORS, GROUPS, relative_error, rms, tolerance

Quantities = dict[str, torch.Tensor]

#: Functions that the check grid drives, with the quantities that each is judged by.
FUNCTIONS = (
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_prefill",
    "kda_decode",
    "kda_verify",
    "fused_kda_gate",
    "chunk_lightning_attn",
    "lightning_prefill",
    "lightning_decode",
    "lightning_verify",
)

MAX_STEPS = 4
MAX_DRAFT = 16


def reference(problem: Problem, *, gradients: bool = True) -> Quantities:
    """o, final_state (K-first) and every gradient from the algorithm's recurrence in float64."""
    if problem.case.algorithm == "lightning":
        from cula.ops.lightning.reference import lightning_recurrent_reference as recurrence
    else:
        from cula.kda import kda_recurrent_reference as recurrence

    p = problem.map(lambda x: x.double() if x.is_floating_point() else x)
    return _forward_backward(recurrence, p, gradients, {})


def function_named(name: str) -> Any:
    """The public function of this name."""
    from importlib import import_module

    return getattr(import_module(f"cula.{algorithm_of(name)}"), name)


def chunk_function(problem: Problem) -> Any:
    """chunk_kda, or Lightning's; plain imports, which torch.compile can trace."""
    if problem.case.algorithm == "lightning":
        from cula.lightning import chunk_lightning_attn

        return chunk_lightning_attn
    from cula.kda import chunk_kda

    return chunk_kda


def run_chunk(
    problem: Problem,
    implementation: Any = None,
    *,
    gradients: bool = True,
    fill: float | None = math.nan,
    **options: Any,
) -> Quantities:
    """The chunk function through the public door; cp_mode=False unless `options` says otherwise."""
    poison, p = _poison(problem, fill)
    chosen = {"cp_mode": False, "chunk_size": problem.case.chunk_size, "implementation": implementation, **options}
    result = _forward_backward(chunk_function(problem), p, gradients, chosen)
    poison.check()
    return result


def chunk(problem: Problem, **options: Any) -> Any:
    """The chunk function on the problem's tensors as they are, no context parallelism; `options` win over its flags."""
    named = {"initial_state": problem.h0, "cp_mode": False, "chunk_size": problem.case.chunk_size}
    if problem.case.algorithm == "kda":
        named |= {"A_log": problem.A_log, "dt_bias": problem.dt_bias}
    return chunk_function(problem)(*problem.operands(), **{**problem.flags(), **named, **options})


def serve(name: str, problem: Problem, **options: Any) -> torch.Tensor:
    """The serving function of this name on the problem's tensors; `options` win over its flags.

    Of "prefill", "decode" and "verify" it is the problem's own algorithm's.
    """
    name = name if "_" in name else f"{problem.case.algorithm}_{name}"
    return function_named(name)(*problem.operands(), **{**problem.serving_flags(), **options})


def run_recurrent(problem: Problem, implementation: Any = None, *, fill: float | None = math.nan) -> Quantities:
    """fused_recurrent_kda, forward."""
    from cula.kda import fused_recurrent_kda

    poison, p = _poison(problem, fill)
    with torch.no_grad():
        result = _forward_backward(fused_recurrent_kda, p, False, {"implementation": implementation})
    poison.check()
    return result


def _forward_backward(function: Any, p: Problem, gradients: bool, options: dict[str, Any]) -> Quantities:
    leaves = {name: x.detach().requires_grad_(gradients) for name, x in p.inputs().items()}
    named = {"initial_state": leaves.get("h0")}
    if p.case.algorithm == "kda":
        named |= {"A_log": leaves.get("A_log"), "dt_bias": leaves.get("dt_bias")}
    first = [leaves[name] for name in p.names]
    o, state = function(*first, **p.flags(), **named, **options)[:2]
    result = {"o": o.detach(), "final_state": k_first(state.detach(), p.case)}
    if gradients:
        grads = gradients_of([o, state], [p.do, p.dht], list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            result[f"d{name}"] = k_first(grad, p.case) if name == "h0" else grad
    return result


def gradients_of(
    outputs: list[torch.Tensor], cotangents: list[torch.Tensor], leaves: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of the leaves, zeros where nothing reaches one; an output may have no graph (no tokens)."""
    pairs = [(y, d.to(y.dtype)) for y, d in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in leaves]
    ys, ds = zip(*pairs, strict=True)
    return list(torch.autograd.grad(ys, leaves, ds, materialize_grads=True))


def k_first(state: torch.Tensor, case: Case) -> torch.Tensor:
    """A state in the case's layout as `[N, HV, K, V]`."""
    return state.transpose(-1, -2) if case.v_first else state


def v_first(state: torch.Tensor, case: Case) -> torch.Tensor:
    """A state in the case's layout as `[N, HV, V, K]`."""
    return state if case.v_first else state.transpose(-1, -2)


def _poison(problem: Problem, fill: float | None) -> tuple[Poison, Problem]:
    poison = Poison(fill=math.nan if fill is None else fill)
    if fill is None:
        return poison, problem
    tensors = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    held = {k: poison.tensor(x, k) for k, x in tensors.items() if isinstance(x, torch.Tensor)}
    return poison, problem.map(lambda x: x, **held)


def fresh_pool(
    problem: Problem, slots: int | None = None, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A V-first pool of `slots` slots with NaN in those that no sequence owns, and the slot of each sequence.

    dtype: fp32 unless given, fp64 in an fp64 call.
    """
    case = problem.case
    if dtype is None:
        dtype = torch.float64 if problem.q.dtype == torch.float64 else torch.float32
    slots = 2 * case.N + 1 if slots is None else slots
    device = problem.q.device
    pool = torch.full((slots, case.HV, case.V, case.K), math.nan, dtype=dtype, device=device)
    index = torch.tensor([slots - 1 - 2 * n for n in range(case.N)], dtype=torch.int32, device=device)
    pool[index.long()] = 0.0 if problem.h0 is None else v_first(problem.h0, case).to(dtype)
    return pool, index


def run_prefill(
    problem: Problem, implementation: Any = None, *, fill: float | None = math.nan, **options: Any
) -> Quantities:
    """The prefill function over a pool: `out` and the states that the pool then holds (K-first, as final_state)."""
    poison, p = _poison(problem, fill)
    base, index = fresh_pool(problem)
    pool = poison.tensor(base, "state_pool", writable=True)
    slots = {"state_pool": pool, "read_indices": index, "cu_seqlens": p.cu_seqlens}
    out = serve("prefill", p, **slots, **{"cp_mode": False, **options}, implementation=implementation)
    poison.check()
    _untouched(pool, base, index)
    return {"o": out, "final_state": pool[index.long()].transpose(-1, -2)}


def run_decode(problem: Problem, implementation: Any = None, *, fill: float | None = math.nan) -> Quantities:
    """The decode function over the first tokens of an unpacked problem: outputs of all steps, states after the last."""
    poison, p = _poison(problem, fill)
    base, index = fresh_pool(problem)
    pool = poison.tensor(base, "state_pool", writable=True)
    slots = {"state_pool": pool, "state_indices": index, "implementation": implementation}
    steps = [serve("decode", p.tokens(t, t + 1), **slots) for t in range(p.case.T)]
    poison.check()
    _untouched(pool, base, index)
    return {"o": torch.cat(steps, 1), "final_state": pool[index.long()].transpose(-1, -2)}


def run_verify(problem: Problem, implementation: Any = None, *, fill: float | None = math.nan) -> Quantities:
    """The verify function over a whole (short) problem: outputs, and the states it leaves with update_state."""
    poison, p = _poison(problem, fill)
    base, index = fresh_pool(problem)
    pool = poison.tensor(base, "state_pool", writable=True)
    slots = {"state_pool": pool, "state_indices": index, "update_state": True}
    out = serve("verify", p, cu_seqlens=p.cu_seqlens, **slots, implementation=implementation)
    poison.check()
    _untouched(pool, base, index)
    return {"o": out, "final_state": pool[index.long()].transpose(-1, -2)}


def run_gate(problem: Problem, *, fill: float | None = math.nan) -> Quantities:
    """fused_kda_gate and its gradients, for a problem with a raw gate."""
    from cula.kda import fused_kda_gate

    poison, p = _poison(problem, fill)
    kind = torch.float64 if p.g.dtype == torch.float64 else torch.float32
    return _gate_gradients(lambda g, a, b: fused_kda_gate(g, a, b, p.lower_bound, output_dtype=kind), p, poison, kind)


def gate_reference(problem: Problem) -> Quantities:
    """The gate's formula in float64 and its gradients by autograd."""
    p = problem.map(lambda x: x.double() if x.is_floating_point() else x)
    return _gate_gradients(lambda g, a, b: natural_gate(g, a, b, p.lower_bound), p, Poison(), torch.float64)


def _gate_gradients(function: Any, p: Problem, poison: Poison, kind: torch.dtype) -> Quantities:
    names = [name for name in ("g", "A_log", "dt_bias") if getattr(p, name) is not None]
    leaves = {name: getattr(p, name).detach().requires_grad_() for name in names}
    gate = function(leaves["g"], leaves.get("A_log"), leaves.get("dt_bias"))
    cotangent = normal(*gate.shape, seed=7, dtype=kind).to(gate.device)
    grads = torch.autograd.grad(gate, list(leaves.values()), cotangent)
    poison.check()
    return {"gate": gate.detach(), **{f"d{name}": grad for name, grad in zip(names, grads, strict=True)}}


def _untouched(pool: torch.Tensor, base: torch.Tensor, index: torch.Tensor) -> None:
    keep = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    keep[index.long()] = False
    assert bool(torch.isnan(pool[keep]).all()), "a slot that no sequence owns was written"


def units(problem: Problem, truth: Quantities) -> dict[str, float]:
    """The size of the terms that a gradient is a sum or difference of.

    dg: q dq, k dk and what v puts into the state. A_log and dt_bias: their sums over all tokens without signs, or
    what those terms of dg sum to, whichever is larger.
    """
    if "dq" not in truth:
        return {}
    if problem.g is None:
        return {"dh0": 1.0}
    q, k = problem.q.double(), problem.k.double()
    scale = [1.0, 1.0]
    if problem.case.l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6) for x in (q, k))
        scale = [rms(x) / max(rms(y), 1e-30) for x, y in ((problem.q, q), (problem.k, k))]
    term = rms(q) * rms(truth["dq"]) * scale[0] + rms(k) * rms(truth["dk"]) * scale[1]
    term += rms(problem.v) * rms(truth["dv"]) * problem.case.V / problem.case.K
    if not problem.raw_gate:
        return {"dg": term, "dh0": 1.0}
    raw = problem.g.detach().double().requires_grad_()
    gate = natural_gate(raw, problem.A_log, problem.dt_bias, problem.lower_bound)
    (slope,) = torch.autograd.grad(gate.sum(), raw) if raw.numel() else (raw,)
    tokens = math.sqrt(problem.g.shape[0] * problem.g.shape[1])
    width = math.sqrt(problem.g.shape[3])
    through_rate = torch.where(slope == 0.0, 0.0, truth["dg"] / slope) * gate
    if problem.lower_bound is not None:
        through_rate = truth["dg"] * (raw if problem.dt_bias is None else raw + problem.dt_bias.double())
    return {
        "dg": term * rms(slope),
        "dh0": 1.0,
        "ddt_bias": max(rms(truth["dg"].abs().sum((0, 1))), 0.1 * term * rms(slope) * tokens),
        "dA_log": max(rms(through_rate.abs().sum((0, 1, 3))), 0.1 * term * rms(gate) * tokens * width),
    }


def floors(problem: Problem, truth: Quantities) -> dict[str, float]:
    """The smallest denominator of each quantity's error: the floor of its unit, and what its dtype can hold."""
    unit = units(problem, truth)
    dtype, device = problem.q.dtype, problem.q.device.type
    result = {}
    for name in truth:
        holds = torch.finfo(dtype).smallest_normal
        holds *= torch.finfo(dtype).eps if dtype == torch.float16 else 1.0
        floor = FLOORS.get(GROUPS[name], 0.0) * unit.get(name, 0.0)
        result[name] = max(floor, holds / tolerance(name, dtype, device))
    return result


def errors(problem: Problem, got: Quantities, truth: Quantities) -> dict[str, float]:
    """The error of every quantity that `got` has, by the tolerance table's metric."""
    floor = floors(problem, truth)
    return {name: relative_error(x, truth[name], floor=floor[name]) for name, x in got.items()}


def limits(problem: Problem, got: Quantities) -> dict[str, float]:
    """The tolerance of every quantity."""
    return {name: tolerance(name, problem.q.dtype, problem.q.device.type) for name in got}


def promised(case: Case, quantity: str) -> bool:
    """False where the table promises finite numbers only: 16-bit calls with beta up to 2."""
    doubled = case.beta == "two" or BETAS[case.beta][3]
    return not (doubled and case.dtype in ("bf16", "fp16"))
