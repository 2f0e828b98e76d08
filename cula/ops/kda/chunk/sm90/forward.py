"""chunk forward, sm90: one launch of `fused`, whose kernels are compiled once for each set of options."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cula.ops.kda.chunk.saved import ForwardResult
from cula.ops.kda.chunk.sm90.options import Options
from cula.ops.kda.chunk.states import NONE, POOL, States, entry, leaving
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor
STATES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def run(p: KDAProblem, x: Operands) -> ForwardResult:
    """Run the problem; nothing is saved for a backward, which then recomputes what it needs."""
    with torch.no_grad(), torch.cuda.device_of(x.q):
        return _run(p, x)


def _run(p: KDAProblem, x: Operands) -> ForwardResult:
    o = x.out if x.out is not None else torch.empty_like(x.v, memory_format=torch.contiguous_format)
    final = None
    if p.final_state:
        tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        final = torch.empty(p.N, p.HV, *tail, dtype=torch.float32, device=x.q.device)
    if p.N == 0:
        return ForwardResult(o.zero_(), final)
    source, target = entry(p, x), leaving(p, x, final)
    o_rows = o if o.dim() == 4 else o.view(p.B, p.T, p.HV, p.V)
    launch(options_of(p, x, source, target), arguments(p, x, source, target, o_rows))
    return ForwardResult(o, final)


def options_of(p: KDAProblem, x: Operands, source: States, target: States) -> Options:
    """What the kernel of this call is compiled for."""
    flag = x.has_initial_state if source.mode == POOL else None
    return Options(
        consumers=2 if x.target.sm_count <= p.N * p.HV else 1,
        wide_gate=x.g.dtype == torch.float32,
        wide_beta=x.beta.dtype == torch.float32,
        has_A=x.A_log is not None,
        has_bias=x.dt_bias is not None,
        sigmoid=p.beta_sigmoid,
        doubled=p.neg_eigval,
        packed=x.cu_seqlens.element_size() if p.packed else 0,
        state_in="" if source.mode == NONE else STATES[source.tensor.dtype],
        state_out="" if target.mode == NONE else STATES[target.tensor.dtype],
        index_in=0 if source.indices is None else source.indices.element_size(),
        index_out=0 if target.indices is None else target.indices.element_size(),
        flagged=flag is not None,
        checkpoints="" if x.checkpoints is None else STATES[x.checkpoints.dtype],
        offset=0 if x.checkpoints is None else x.checkpoint_offsets.element_size(),
    )


def arguments(p: KDAProblem, x: Operands, source: States, target: States, o: Tensor) -> list[int | float]:
    """The kernel's arguments, in its order."""
    device = x.q.device
    A_log = None if x.A_log is None else x.A_log.float().contiguous()
    dt_bias = None if x.dt_bias is None else x.dt_bias.float().contiguous()
    cu = None if x.cu_seqlens is None else x.cu_seqlens.to(device)
    flag = x.has_initial_state if source.mode == POOL else None
    given = (x.q, x.k, x.v, x.g, x.beta, A_log, dt_bias, cu, source.tensor, o, target.tensor)
    addresses = [0 if y is None else y.data_ptr() for y in given]
    strides = [n for y in (x.q, x.k, x.v, x.g, x.beta, o) for n in y.stride()[:3]]
    slots = [*source.strides, *target.strides]
    for indices in (source.indices, target.indices, flag):
        slots += [0, 0] if indices is None else [indices.data_ptr(), indices.stride(0)]
    slots += [0 if cu is None else cu.stride(0)]
    marks, offsets = x.checkpoints, None
    if marks is None:
        slots += [0] * 7
    else:
        offsets = x.checkpoint_offsets.to(device)
        slots += [marks.data_ptr(), *marks.stride(), offsets.data_ptr(), offsets.stride(0)]
    x.memo["kept alive"] = (A_log, dt_bias, cu, offsets)
    return [
        *addresses, *strides, *slots, source.tensor.shape[0], target.tensor.shape[0], x.null_index,
        0 if marks is None else marks.shape[0], p.checkpoint_every or 64,
        p.T, p.HV, p.HV // p.H, p.N, p.scale, p.lower_bound or 0.0,
    ]  # fmt: skip


def launch(options: Options, values: list[int | float]) -> None:
    """Start the kernel on the current stream."""
    compiled(options)(*values, torch.cuda.current_stream().cuda_stream)


@cache
def compiled(options: Options) -> Callable[..., Any]:
    """The kernel of these options, compiled for this machine's GPU."""
    return compile_kernel(options, "--enable-tvm-ffi")


def compile_kernel(options: Options, flags: str) -> Any:
    """Compile a kernel with the CuTe DSL's options `flags`; needs no GPU."""
    from cutlass import cute
    from cutlass.runtime import make_fake_stream

    from cula.ops.kda.chunk.sm90.fused import Fused, example_arguments

    return cute.compile(Fused(options), *example_arguments(), make_fake_stream(), options=f"--gpu-arch sm_90a {flags}")
