"""chunk_kda as two `torch.library` ops, for calls that are traced: torch.compile, torch.export, AOT autograd.

`cula::kda_chunk` returns [o, final_state and h where asked, the boundaries where `_returns_boundaries`, then what the
forward row keeps for its backward row]; `cula::kda_chunk_backward` returns the gradients that are needed. Both parse
their arguments and choose their rows again when they run, so every check of an eager call is made. Their fake
implementations parse the same arguments without values: sizes may be SymInts, lengths are unknown.

What a forward row keeps is promised in its table row: `Row.kept` names a function of the problem alone. Rows are
chosen with the environment of the moment, at tracing and at each run: it must not change in between.
Importing this file registers the ops; `chunk_kda` does when it is first traced.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from cula.host.errors import NotSupportedError
from cula.host.table import Row, request_for
from cula.ops.common.traced import left_to_eager, number
from cula.ops.kda.chunk.policy import choose_rows
from cula.ops.kda.chunk.saved import Saved
from cula.ops.kda.cp_mode import CPMode
from cula.ops.kda.problem import (
    ActivationArguments,
    ChunkOptions,
    KDAProblem,
    Operands,
    check_chunk_size,
    parse_chunk,
    parse_lower_bound,
    parse_scale,
    wants_grad,
)

Tensor = torch.Tensor

#: The inputs that have gradients, in the order of the ops.
_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

#: The arguments that both ops begin with, as those of `chunk_kda`: name -> type in the schema.
_ARGUMENTS = {
    **dict.fromkeys(_INPUTS[:5], "Tensor"),
    **dict.fromkeys((*_INPUTS[5:], "cu_seqlens", "cu_seqlens_cpu"), "Tensor?"),
    "scale": "float?",
    "output_final_state": "bool",
    "use_qk_l2norm_in_kernel": "bool",
    "use_gate_in_kernel": "bool",
    "use_beta_sigmoid_in_kernel": "bool",
    "allow_neg_eigval": "bool",
    "safe_gate": "bool",
    "lower_bound": "float?",
    "disable_recompute": "bool",
    "return_intermediate_states": "bool",
    "state_v_first": "bool",
    "use_graph": "bool",
    "max_num_seqs": "SymInt?",
    "chunk_size": "int",
    "cp_mode": "str?",
    "forward": "str?",
    "backward": "str?",
}

Call = namedtuple("Call", _ARGUMENTS)
_TENSORS = tuple(name for name, kind in _ARGUMENTS.items() if kind.startswith("Tensor"))


# ---- the traced call ---------------------------------------------------------------------------------------------


def traced_chunk(
    five: tuple[Tensor, ...], activation: ActivationArguments, options: ChunkOptions, implementation: Any,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`chunk_kda` by way of the op. `five`: q, k, v, g, beta. Flat, so that torch.compile traces it in one graph."""
    if options.plan is not None or options.cp_context is not None:
        raise NotSupportedError("plan and cp_context are not supported under torch.compile; pass None")
    gated = bool(activation.raw_gate)  # with a finished gate its parameters are ignored
    A_log, dt_bias = (activation.A_log, activation.dt_bias) if gated else (None, None)
    call = Call(
        *five,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        scale=number(options.scale, lambda wrong: parse_scale(wrong, 1)),
        output_final_state=bool(options.final_state),
        use_qk_l2norm_in_kernel=bool(options.l2norm),
        use_gate_in_kernel=gated,
        use_beta_sigmoid_in_kernel=bool(activation.beta_logits),
        allow_neg_eigval=bool(activation.neg_eigval),
        safe_gate=bool(activation.safe_gate),
        lower_bound=number(activation.lower_bound, parse_lower_bound) if gated else None,
        disable_recompute=bool(options.disable_recompute),
        return_intermediate_states=bool(options.intermediate_states),
        state_v_first=bool(options.state_v_first),
        use_graph=bool(options.use_graph),
        max_num_seqs=options.max_num_seqs,
        chunk_size=check_chunk_size(options.chunk_size),
        cp_mode=None if options.cp_mode is None else CPMode.parse(options.cp_mode).value,
        forward=request_for(implementation, "forward"),
        backward=request_for(implementation, "backward"),
    )
    grad = wants_grad(*five, A_log, dt_bias, initial_state)
    outputs = torch.ops.cula.kda_chunk.default(*call, grad)
    final = outputs[1] if call.output_final_state else None
    if call.return_intermediate_states:
        return outputs[0], final, outputs[1 + call.output_final_state]
    return outputs[0], final


# ---- what tracing and running agree on ---------------------------------------------------------------------------


def _parse(c: Call, grad: bool, traced: bool = False) -> tuple[KDAProblem, Operands]:
    activation = ActivationArguments(
        c.use_gate_in_kernel, c.use_beta_sigmoid_in_kernel, c.allow_neg_eigval, c.lower_bound, c.A_log, c.dt_bias,
        c.safe_gate,
    )  # fmt: skip
    options = ChunkOptions(
        c.scale, c.output_final_state, c.use_qk_l2norm_in_kernel, c.disable_recompute, c.return_intermediate_states,
        c.state_v_first, c.use_graph, c.max_num_seqs, c.chunk_size, c.cp_mode, grad=grad, traced=traced,
    )  # fmt: skip
    return parse_chunk(
        c.q, c.k, c.v, c.g, c.beta, activation, options, initial_state=c.initial_state, cu_seqlens=c.cu_seqlens,
        cu_seqlens_cpu=c.cu_seqlens_cpu,
    )  # fmt: skip


class Plan(NamedTuple):
    """A parsed call and its rows. known: the problem without what only a run knows, from which the rows follow."""

    problem: KDAProblem
    x: Operands
    known: KDAProblem
    forward: Row
    backward: Row | None


def _plan(c: Call, grad: bool, traced: bool = False) -> Plan:
    """Parse the call and choose its rows: the same rows when traced and at each run."""
    problem, x = _parse(c, grad, traced)
    known = problem
    if problem.packed:
        later = not c.use_graph or c.cu_seqlens_cpu is not None or c.cu_seqlens.device.type == "cpu"
        known = replace(problem, lengths=None, lengths_later=later)
    rows = choose_rows(known, x.target, {"forward": c.forward, "backward": c.backward})
    for row in rows if problem.packed and not traced else ():
        reason = None if row is None else row.refusal(problem, x.target)
        if reason is not None:  # no lengths after all: during graph capture
            raise NotSupportedError(f"{row.name} {reason}")
    return Plan(problem, x, known, *rows)


def _kept(plan: Plan) -> Sequence[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of each tensor that the forward row keeps for its backward row.

    Shapes may hold SymInts when traced. They follow from `known` alone, so that what depends on the lengths of packed
    sequences (a number of chunks, say) is given by its upper bound.
    """
    if plan.forward.kept is None or not plan.known.grad:
        return ()
    module, _, attribute = plan.forward.kept.partition(":")
    return getattr(import_module(module), attribute)(plan.known)


def _returns_boundaries(c: Call, grad: bool) -> bool:
    """The forward copies `cu_seqlens` to the host; the backward gets that copy, so that no call makes two."""
    copied = c.cu_seqlens is not None and c.cu_seqlens_cpu is None and c.cu_seqlens.device.type != "cpu"
    return grad and copied and not c.use_graph


# ---- the ops -----------------------------------------------------------------------------------------------------


def _forward(*args: Any) -> list[Tensor]:
    """cula::kda_chunk where the tensors have values."""
    c, grad = Call(*args[:-1]), args[-1]
    plan = _plan(c, grad)
    result = plan.forward.load()(plan.problem, plan.x)
    outputs = [result.o, result.final_state, result.h]
    if _returns_boundaries(c, grad):
        bounds = plan.x.boundaries
        bounds = (_UNKNOWN,) * (plan.problem.N + 1) if bounds is None else bounds
        outputs.append(torch.tensor(bounds, dtype=torch.int64, device="cpu"))
    outputs += [result.saved.tensors[name] for name, _, _ in _kept(plan)]
    return [t.contiguous() for t in outputs if t is not None]


def _fake_forward(*args: Any) -> list[Tensor]:
    """cula::kda_chunk without values: the outputs' shapes and dtypes, or the error that the run would raise."""
    c, grad = Call(*args[:-1]), args[-1]
    plan = _plan(c, grad, traced=True)
    p, make = plan.known, c.v.new_empty
    outputs = [make(c.v.shape)]
    state = (p.HV, p.V, p.K) if p.state_v_first else (p.HV, p.K, p.V)
    if p.final_state:
        outputs.append(make((p.N, *state), dtype=torch.float64 if p.state_dtype == "fp64" else torch.float32))
    if p.intermediate_states:
        chunks = torch.library.get_ctx().new_dynamic_size() if p.packed else -(-p.T // p.chunk_size)
        outputs.append(make((p.B, chunks, *state)))
    if _returns_boundaries(c, grad):
        outputs.append(torch.empty(c.cu_seqlens.shape, dtype=torch.int64, device="cpu"))
    return outputs + [make(shape, dtype=dtype) for _, shape, dtype in _kept(plan)]


def _backward(*args: Any) -> list[Tensor]:
    """cula::kda_chunk_backward where the tensors have values."""
    c, (do, dht, kept, needed) = Call(*args[:-4]), args[-4:]
    if c.cu_seqlens_cpu is not None and c.cu_seqlens_cpu[0] == _UNKNOWN:
        c = c._replace(cu_seqlens_cpu=None)
    plan = _plan(c, grad=True)
    names = [name for name, _, _ in _kept(plan)]
    saved = Saved(plan.forward.name, dict(zip(names, kept, strict=True))) if kept else None
    do = torch.zeros_like(c.v) if do is None else do
    grads = plan.backward.load()(plan.problem, plan.x, saved, do, dht)
    wanted = [name for name, need in zip(_INPUTS, needed, strict=True) if need]
    return [getattr(grads, name).reshape(getattr(c, name).shape).contiguous() for name in wanted]


def _fake_backward(*args: Any) -> list[Tensor]:
    """cula::kda_chunk_backward without values; the forward made the checks."""
    c, needed = Call(*args[:-4]), args[-1]
    return [x.new_empty(x.shape) for x, need in zip(c, needed) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep what the backward takes: every argument, and what follows the visible outputs."""
    c, grad = Call(*inputs[:-1]), inputs[-1]
    visible = 1 + c.output_final_state + c.return_intermediate_states
    if _returns_boundaries(c, grad):
        c = c._replace(cu_seqlens_cpu=output[visible])
        visible += 1
    kept = output[visible:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*c[: len(_TENSORS)], *kept)
    ctx.options = c[len(_TENSORS) :]
    ctx.final_state = c.output_final_state
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Call the backward op."""
    tensors, kept = ctx.saved_tensors[: len(_TENSORS)], ctx.saved_tensors[len(_TENSORS) :]
    needed = list(ctx.needs_input_grad[: len(_INPUTS)])
    dht = grads[1] if ctx.final_state else None
    found = iter(torch.ops.cula.kda_chunk_backward.default(*tensors, *ctx.options, grads[0], dht, list(kept), needed))
    none = (None,) * (len(_ARGUMENTS) - len(_INPUTS) + 1)
    return (*(next(found) if need else None for need in needed), *none)


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotSupportedError("chunk_kda can be differentiated once; a double backward is not supported")


_UNKNOWN = -1  # fills the boundaries where the run could not copy them: during graph capture
_SHARED = ", ".join(f"{kind} {name}" for name, kind in _ARGUMENTS.items())
_LIBRARY = torch.library.Library("cula", "FRAGMENT")
for _name, _extra, _run, _fake in (
    ("kda_chunk", "bool grad", _forward, _fake_forward),
    ("kda_chunk_backward", "Tensor? do, Tensor? dht, Tensor[] kept, bool[] needed", _backward, _fake_backward),
):
    _LIBRARY.define(f"{_name}({_SHARED}, {_extra}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cula::{_name}", left_to_eager(_fake), lib=_LIBRARY)
torch.library.register_autograd("cula::kda_chunk", _differentiate, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("cula::kda_chunk_backward", _refuse_second_derivative, lib=_LIBRARY)
