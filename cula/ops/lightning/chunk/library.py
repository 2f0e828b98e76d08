"""chunk_lightning_attn as two `torch.library` ops, for calls that are traced: torch.compile, torch.export, AOT.

`cula::lightning_chunk` returns [o, final_state where asked, the boundaries where `_returns_boundaries`];
`cula::lightning_chunk_backward` returns the gradients that are needed. Both parse their arguments and choose their
rows again when they run, so every check of an eager call is made. Their fake implementations parse the same arguments
without values: sizes may be SymInts, lengths are unknown. Importing this file registers the ops;
`chunk_lightning_attn` does when it is first traced.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import Any

import torch

from cula.host.errors import NotSupportedError
from cula.host.table import Row, request_for
from cula.ops.common.arguments import check_chunk_size, parse_scale, wants_grad
from cula.ops.common.cp_mode import CPMode
from cula.ops.common.traced import left_to_eager, number
from cula.ops.lightning.chunk.policy import choose_rows
from cula.ops.lightning.problem import ChunkOptions, LightningProblem, Operands, SlopeArguments, parse_chunk

Tensor = torch.Tensor

#: The inputs that have gradients, in the order of the ops.
_INPUTS = ("q", "k", "v", "initial_state")

#: The arguments that both ops begin with, as those of `chunk_lightning_attn`: name -> type in the schema.
_ARGUMENTS = {
    **dict.fromkeys(_INPUTS[:3], "Tensor"),
    **dict.fromkeys(("initial_state", "slopes", "cu_seqlens", "cu_seqlens_cpu"), "Tensor?"),
    "layer_idx": "int?",
    "num_layers": "int?",
    "scale": "float?",
    "output_final_state": "bool",
    "state_v_first": "bool",
    "chunk_size": "int",
    "cp_mode": "str?",
    "forward": "str?",
    "backward": "str?",
}

Call = namedtuple("Call", _ARGUMENTS)
_TENSORS = tuple(name for name, kind in _ARGUMENTS.items() if kind.startswith("Tensor"))
_UNKNOWN = -1  # fills the boundaries where the run could not copy them: during graph capture


def traced_chunk(
    inputs: tuple[Tensor, Tensor, Tensor], slopes: SlopeArguments, options: ChunkOptions, implementation: Any,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`chunk_lightning_attn` by way of the op. Flat, so that torch.compile traces it in one graph."""
    if options.cp_context is not None:
        raise NotSupportedError("cp_context is not supported under torch.compile; pass None")
    call = Call(
        *inputs,
        initial_state=initial_state,
        slopes=slopes.slopes,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        layer_idx=slopes.layer_idx,
        num_layers=slopes.num_layers,
        scale=number(options.scale, lambda wrong: parse_scale(wrong, 1)),
        output_final_state=bool(options.final_state),
        state_v_first=bool(options.state_v_first),
        chunk_size=check_chunk_size(options.chunk_size),
        cp_mode=None if options.cp_mode is None else CPMode.parse(options.cp_mode).value,
        forward=request_for(implementation, "forward"),
        backward=request_for(implementation, "backward"),
    )
    outputs = torch.ops.cula.lightning_chunk.default(*call, wants_grad(*inputs, initial_state))
    return outputs[0], (outputs[1] if call.output_final_state else None)


def _plan(c: Call, grad: bool, traced: bool = False) -> tuple[LightningProblem, Operands, Row, Row | None]:
    """Parse the call and choose its rows: the same rows when traced and at each run."""
    options = ChunkOptions(
        c.scale, c.output_final_state, c.state_v_first, c.chunk_size, c.cp_mode, grad=grad, traced=traced
    )
    problem, x = parse_chunk(
        c.q, c.k, c.v, SlopeArguments(c.slopes, c.layer_idx, c.num_layers), options, initial_state=c.initial_state,
        cu_seqlens=c.cu_seqlens, cu_seqlens_cpu=c.cu_seqlens_cpu,
    )  # fmt: skip
    known = replace(problem, lengths=None, lengths_later=True) if problem.packed else problem
    rows = choose_rows(known, x.target, {"forward": c.forward, "backward": c.backward})
    for row in rows if problem.packed and not traced else ():
        reason = None if row is None else row.refusal(problem, x.target)
        if reason is not None:  # no lengths after all: during graph capture
            raise NotSupportedError(f"{row.name} {reason}")
    return problem, x, *rows


def _returns_boundaries(c: Call, grad: bool) -> bool:
    """The forward copies `cu_seqlens` to the host; the backward gets that copy, so that no call makes two."""
    return grad and c.cu_seqlens is not None and c.cu_seqlens_cpu is None and c.cu_seqlens.device.type != "cpu"


def _forward(*args: Any) -> list[Tensor]:
    """cula::lightning_chunk where the tensors have values."""
    c, grad = Call(*args[:-1]), args[-1]
    problem, x, forward, _ = _plan(c, grad)
    result = forward.load()(problem, x)
    outputs = [result.o, result.final_state]
    if _returns_boundaries(c, grad):
        bounds = (_UNKNOWN,) * (problem.N + 1) if x.boundaries is None else x.boundaries
        outputs.append(torch.tensor(bounds, dtype=torch.int64, device="cpu"))
    return [t.contiguous() for t in outputs if t is not None]


def _fake_forward(*args: Any) -> list[Tensor]:
    """cula::lightning_chunk without values: the outputs' shapes and dtypes, or the error that the run would raise."""
    c, grad = Call(*args[:-1]), args[-1]
    p, *_ = _plan(c, grad, traced=True)
    outputs = [c.v.new_empty(c.v.shape)]
    if p.final_state:
        tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        dtype = torch.float64 if p.state_dtype == "fp64" else torch.float32
        outputs.append(c.v.new_empty((p.N, p.HV, *tail), dtype=dtype))
    if _returns_boundaries(c, grad):
        outputs.append(torch.empty(c.cu_seqlens.shape, dtype=torch.int64, device="cpu"))
    return outputs


def _backward(*args: Any) -> list[Tensor]:
    """cula::lightning_chunk_backward where the tensors have values."""
    c, (do, dht, needed) = Call(*args[:-3]), args[-3:]
    if c.cu_seqlens_cpu is not None and c.cu_seqlens_cpu[0] == _UNKNOWN:
        c = c._replace(cu_seqlens_cpu=None)
    problem, x, _, backward = _plan(c, grad=True)
    grads = backward.load()(problem, x, torch.zeros_like(c.v) if do is None else do, dht)
    wanted = [name for name, need in zip(_INPUTS, needed, strict=True) if need]
    return [getattr(grads, name).contiguous() for name in wanted]


def _fake_backward(*args: Any) -> list[Tensor]:
    """cula::lightning_chunk_backward without values; the forward made the checks."""
    c, needed = Call(*args[:-3]), args[-1]
    return [x.new_empty(x.shape) for x, need in zip(c, needed) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep what the backward takes: every argument, and the boundaries where the forward copied them."""
    c, grad = Call(*inputs[:-1]), inputs[-1]
    if _returns_boundaries(c, grad):
        c = c._replace(cu_seqlens_cpu=output[-1])
        ctx.mark_non_differentiable(output[-1])
    ctx.save_for_backward(*c[: len(_TENSORS)])
    ctx.options = c[len(_TENSORS) :]
    ctx.final_state = c.output_final_state
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Call the backward op."""
    needed = list(ctx.needs_input_grad[: len(_INPUTS)])
    dht = grads[1] if ctx.final_state else None
    found = iter(
        torch.ops.cula.lightning_chunk_backward.default(*ctx.saved_tensors, *ctx.options, grads[0], dht, needed)
    )
    none = (None,) * (len(_ARGUMENTS) - len(_INPUTS) + 1)
    return (*(next(found) if need else None for need in needed), *none)


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotSupportedError("chunk_lightning_attn can be differentiated once; a double backward is not supported")


_SHARED = ", ".join(f"{kind} {name}" for name, kind in _ARGUMENTS.items())
_LIBRARY = torch.library.Library("cula", "FRAGMENT")
for _name, _extra, _run, _fake in (
    ("lightning_chunk", "bool grad", _forward, _fake_forward),
    ("lightning_chunk_backward", "Tensor? do, Tensor? dht, bool[] needed", _backward, _fake_backward),
):
    _LIBRARY.define(f"{_name}({_SHARED}, {_extra}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cula::{_name}", left_to_eager(_fake), lib=_LIBRARY)
torch.library.register_autograd("cula::lightning_chunk", _differentiate, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("cula::lightning_chunk_backward", _refuse_second_derivative, lib=_LIBRARY)
