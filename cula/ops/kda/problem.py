"""KDAProblem: one frozen description of a call, parsed and checked once, at the door.

`KDAProblem` holds plain Python values only, so every policy can be asked about any device on a CPU.
The `parse_*` functions check tensors (shape, dtype, device, host-visible values), raise before anything is
written, and return the problem with its `Operands`. The host copy of `cu_seqlens` is made here, at most once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from cula.host import env
from cula.host.arch import Target, target_of
from cula.host.errors import DeviceError, DtypeError, NotSplittableError, NotSupportedError, RangeError, ShapeError
from cula.host.varlen import check_boundaries, check_cu_seqlens, to_host
from cula.ops.kda.cp_mode import CPMode

Tensor = torch.Tensor

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
CHUNK_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class KDAProblem:
    """Everything that decides which implementation may serve a KDA call.

    Sizes as in the public API (T: tokens in dim 1, for packed input their total). lengths: tokens per packed
    sequence, None for a fixed batch or where only the device knows them (`packed` tells which).
    gate: "finished", "softplus" or "lower_bound". tokens: most tokens per sequence in the decode stage, else 0.
    wide_rows: 64 tokens of an input span 2^31 elements or more, so that even offsets inside a chunk need 64 bits.
    rows_aligned: the channels of q, k, v, g and out are contiguous and begin at multiples of 16 bytes.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: str = "bf16"
    gate_dtype: str = "fp32"
    beta_dtype: str = "fp32"
    state_dtype: str = "fp32"
    packed: bool = False
    lengths: tuple[int, ...] | None = None
    gate: str = "finished"
    lower_bound: float | None = None
    has_A_log: bool = False
    has_dt_bias: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    l2norm: bool = False
    scale: float = 1.0
    initial_state: bool = False
    final_state: bool = False
    state_v_first: bool = False
    intermediate_states: bool = False
    disable_recompute: bool = False
    chunk_size: int = 64
    grad: bool = False
    use_graph: bool = False
    cp: CPMode = CPMode.OFF
    pool: bool = False
    checkpoint_every: int = 0
    position_offsets: bool = False
    host_offsets: bool = True
    tokens: int = 0
    tree: bool = False
    rollback: bool = False
    conv_width: int = 0
    wide_rows: bool = False
    rows_aligned: bool = True

    @property
    def host_lengths(self) -> bool:
        """The host knows how long each sequence is."""
        return not self.packed or self.lengths is not None

    @property
    def compute_dtype(self) -> str:
        """What the eager rows compute in."""
        return "fp64" if self.dtype == "fp64" else "fp32"

    @property
    def tokens_stage(self) -> bool:
        """A kda_decode or kda_verify call (kda_prefill describes its pool too, but no token count)."""
        return self.pool and self.tokens > 0

    def __str__(self) -> str:
        shape = f"B{self.B}-T{self.T}-H{self.H}" + (f"-HV{self.HV}" if self.HV != self.H else "")
        return f"{shape}-K{self.K}" + (f"-V{self.V}" if self.V != self.K else "") + f"-{self.dtype}"


@dataclass
class Operands:
    """The tensors of a call, as the caller gave them (A_log is `[HV]`, dt_bias `[HV, K]`: views)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    boundaries: tuple[int, ...] | None = None  # cu_seqlens on the host
    state_pool: Tensor | None = None
    read_indices: Tensor | None = None
    write_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    checkpoints: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    position_offsets: Tensor | None = None
    states_out: Tensor | None = None
    states_out_indices: Tensor | None = None
    parent: Tensor | None = None
    rollback: Any = None
    step: Any = None  # the tensors that kda_decode_fused has beyond these
    update_state: bool = False
    null_index: int = -1
    out: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)  # a row's own facts of calls that look just like this one
    target: Target = field(default_factory=lambda: target_of(torch.device("cpu")))


def dtype_name(x: Tensor) -> str:
    """ "bf16", "fp16", "fp32", "fp64" or the torch name of another dtype."""
    return DTYPE_NAMES.get(x.dtype, str(x.dtype))


def check_tensor(name: str, x: Any, shape: tuple[int, ...], device: Any, axes: str) -> None:
    """Check that `x` is a floating tensor of this shape on this device; `axes` names the shape in messages."""
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor {axes}; got {type(x).__name__}")
    if x.shape != shape:
        raise ShapeError(f"{name} must be {axes} = {list(shape)}; got {list(x.shape)}")
    if x.dtype not in DTYPE_NAMES:
        raise DtypeError(f"{name} must be bf16, fp16, fp32 or fp64; got {x.dtype}")
    if x.device != device:
        raise DeviceError(f"{name} must be on {device} as q is; got {x.device}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[int, int, int, int, int, int]:
    """Check the five inputs of every KDA call and return (B, T, H, HV, K, V)."""
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        got = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise ShapeError(f"q must be a tensor [B, T, H, K]; got {got}")
    B, T, H, K = q.shape
    if not isinstance(v, torch.Tensor) or v.dim() != 4:
        got = list(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__
        raise ShapeError(f"v must be a tensor [B, T, HV, V]; got {got}")
    HV, V = v.shape[2:]
    device = q.device
    check_tensor("q", q, (B, T, H, K), device, "[B, T, H, K]")
    check_tensor("k", k, (B, T, H, K), device, "[B, T, H, K] like q")
    check_tensor("v", v, (B, T, HV, V), device, "[B, T, HV, V]")
    if H < 1 or HV < 1 or K < 1 or V < 1:
        raise ShapeError(f"H, HV, K and V must be at least 1; got H={H}, HV={HV}, K={K}, V={V}")
    if HV % H:
        raise ShapeError(f"v must have HV heads, a multiple of q's H={H}; got HV={HV}")
    check_tensor("g", g, (B, T, HV, K), device, "[B, T, HV, K]")
    check_tensor("beta", beta, (B, T, HV), device, "[B, T, HV]")
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"q, k and v must share one dtype; got {dtype_name(q)}, {dtype_name(k)} and {dtype_name(v)}")
    return B, T, H, HV, K, V


@dataclass(frozen=True)
class Activation:
    """Which activations happen in the kernel, after the checks of `parse_activation`."""

    gate: str
    lower_bound: float | None
    beta_sigmoid: bool
    neg_eigval: bool
    A_log: Tensor | None
    dt_bias: Tensor | None


def parse_lower_bound(lower_bound: Any) -> float | None:
    """`lower_bound` as a finite number < 0, or None."""
    if lower_bound is None:
        return None
    if isinstance(lower_bound, bool) or not isinstance(lower_bound, (int, float)):
        raise DtypeError(f"lower_bound must be None or a number < 0; got {type(lower_bound).__name__}")
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise RangeError(f"lower_bound must be finite and < 0; got {lower_bound}")
    return float(lower_bound)


def parse_gate(
    A_log: Any, dt_bias: Any, lower_bound: Any, HV: int, K: int, device: Any
) -> tuple[str, float | None, Tensor | None, Tensor | None]:
    """Check the arguments of the in-kernel gate: (its kind, lower_bound, A_log `[HV]`, dt_bias `[HV, K]`)."""
    lower_bound = parse_lower_bound(lower_bound)
    if A_log is not None:
        if not isinstance(A_log, torch.Tensor) or A_log.numel() != HV:
            got = list(A_log.shape) if isinstance(A_log, torch.Tensor) else type(A_log).__name__
            raise ShapeError(f"A_log must be a tensor of HV={HV} elements, [HV] or [1, 1, HV, 1]; got {got}")
        check_tensor("A_log", A_log, tuple(A_log.shape), device, "[HV]")
        A_log = A_log.reshape(HV)
    elif lower_bound is None:
        raise RangeError("A_log must be given for the in-kernel softplus gate (lower_bound=None); got None")
    if dt_bias is not None:
        if not isinstance(dt_bias, torch.Tensor) or tuple(dt_bias.shape) not in ((HV * K,), (HV, K)):
            got = list(dt_bias.shape) if isinstance(dt_bias, torch.Tensor) else type(dt_bias).__name__
            raise ShapeError(f"dt_bias must be [HV*K] = [{HV * K}] or [HV, K] = [{HV}, {K}]; got {got}")
        check_tensor("dt_bias", dt_bias, tuple(dt_bias.shape), device, "[HV, K]")
        dt_bias = dt_bias.reshape(HV, K)
    return ("softplus" if lower_bound is None else "lower_bound"), lower_bound, A_log, dt_bias


@dataclass(frozen=True)
class ActivationArguments:
    """The gate and beta arguments of a call, unchecked. sigmoid_flag: what the caller calls `beta_logits`."""

    raw_gate: bool
    beta_logits: bool
    neg_eigval: bool
    lower_bound: Any = None
    A_log: Any = None
    dt_bias: Any = None
    safe_gate: bool = False
    sigmoid_flag: str = "use_beta_sigmoid_in_kernel"


def parse_activation(g: Tensor, a: ActivationArguments) -> Activation:
    """Check the gate and beta flags; with a finished gate A_log, dt_bias and lower_bound are ignored."""
    if a.neg_eigval and not a.beta_logits:
        raise RangeError(f"allow_neg_eigval doubles the in-kernel sigmoid: it needs {a.sigmoid_flag}=True; got False")
    if not a.raw_gate:
        return Activation("finished", None, bool(a.beta_logits), bool(a.neg_eigval), None, None)
    HV, K = g.shape[-2:]
    kind, bound, A_log, dt_bias = parse_gate(a.A_log, a.dt_bias, a.lower_bound, HV, K, g.device)
    if a.safe_gate and not (bound is not None and -5 <= bound < 0):
        raise RangeError(f"safe_gate with the in-kernel gate needs -5 <= lower_bound < 0; got {bound}")
    return Activation(kind, bound, bool(a.beta_logits), bool(a.neg_eigval), A_log, dt_bias)


def parse_scale(scale: Any, K: int) -> float:
    """`scale` as a float, K**-0.5 for None."""
    if scale is None:
        return K**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise DtypeError(f"scale must be None or a number; got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise RangeError(f"scale must be finite; got {scale}")
    return float(scale)


def parse_sequences(
    B: int, T: int, device: Any, cu_seqlens: Any, cu_seqlens_cpu: Any, *, host_copy: bool, traced: bool = False
) -> tuple[int, tuple[int, ...] | None]:
    """(N, boundaries on the host or None). The one place that copies `cu_seqlens` from a device.

    A host copy that the caller gives is trusted to equal the device's, but its values are checked.
    traced: the tensors have no values yet.
    """
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ShapeError("cu_seqlens_cpu is the host copy of cu_seqlens, which must be given too; got None")
        return B, None
    if B != 1:
        raise ShapeError(f"cu_seqlens packs all sequences into dim 1, so the batch size must be 1; got B={B}")
    N = check_cu_seqlens("cu_seqlens", cu_seqlens, device, host_ok=True)
    name, source = "cu_seqlens", cu_seqlens
    if cu_seqlens_cpu is not None:
        name, source = "cu_seqlens_cpu", cu_seqlens_cpu
        if isinstance(source, torch.Tensor) and source.device.type != "cpu":
            raise DeviceError(f"cu_seqlens_cpu must be on the CPU; got {source.device}")
        if check_cu_seqlens(name, source, torch.device("cpu"), host_ok=True) != N:
            raise ShapeError(f"cu_seqlens_cpu must have the {N + 1} entries of cu_seqlens; got {source.numel()}")
    elif source.device.type == "meta":
        raise DeviceError("cu_seqlens must be on the CPU or the device of q; got meta")
    elif source.device.type != "cpu" and not host_copy:
        return N, None
    if traced:
        return N, None
    boundaries = to_host(source)
    check_boundaries(name, boundaries, T)
    return N, boundaries


def parse_state(name: str, state: Any, shape: tuple[int, ...], axes: str, dtype: str, device: Any) -> None:
    """Check an initial state: fp32 in every call but fp64 ones, where it is fp64."""
    if not isinstance(state, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor {axes}; got {type(state).__name__}")
    need = "fp64" if dtype == "fp64" else "fp32"
    if DTYPE_NAMES.get(state.dtype) != need:
        raise DtypeError(f"{name} must be {need} for {dtype} inputs; got {dtype_name(state)}")
    if tuple(state.shape) != shape:
        other = (*shape[:2], shape[3], shape[2])
        hint = "; it looks like the other layout, see state_v_first" if tuple(state.shape) == other else ""
        raise ShapeError(f"{name} must be {axes} = {list(shape)}; got {list(state.shape)}{hint}")
    if state.device != device:
        raise DeviceError(f"{name} must be on {device} as q is; got {state.device}")


def wants_grad(*tensors: Tensor | None) -> bool:
    """Autograd will be asked for the gradient of at least one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def capturing(device: Any) -> bool:
    """A CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class ChunkOptions:
    """The other arguments of a `chunk_kda` or `kda_prefill` call, unchecked.

    grad: whether gradients are wanted, None to ask autograd. traced: the tensors have no values yet.
    """

    scale: Any = None
    final_state: bool = False
    l2norm: bool = False
    disable_recompute: bool = False
    intermediate_states: bool = False
    state_v_first: bool = False
    use_graph: bool = False
    max_num_seqs: Any = None
    chunk_size: Any = 64
    cp_mode: Any = None
    plan: Any = None
    cp_context: Any = None
    grad: bool | None = None
    traced: bool = False


def check_chunk_size(value: Any) -> int:
    """`value` if it is one of the integers 16, 32 and 64; RangeError otherwise."""
    if type(value) is not int or value not in CHUNK_SIZES:
        raise RangeError(f"chunk_size must be 16, 32 or 64; got {value!r}")
    return value


def parse_context_parallel(options: ChunkOptions, grad: bool) -> CPMode:
    """The CP mode; plans and contexts have no implementation in this version and are refused."""
    if options.cp_context is not None:
        raise NotSupportedError("cp_context is not supported by any implementation in this version; pass None")
    if options.plan is not None:
        raise NotSupportedError("plan is not supported by any implementation in this version; pass None")
    mode = CPMode.parse(options.cp_mode, grad=grad)
    if mode is CPMode.FORCE:
        raise NotSplittableError("cp_mode='force' needs an implementation that splits a sequence; there is none yet")
    return mode


def parse_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, activation: ActivationArguments, options: ChunkOptions,
    *, initial_state: Any = None, cu_seqlens: Any = None, cu_seqlens_cpu: Any = None,
) -> tuple[KDAProblem, Operands]:  # fmt: skip
    """Check a chunk call and describe it."""
    env.check_all()
    B, T, H, HV, K, V = check_qkv(q, k, v, g, beta)
    act = parse_activation(g, activation)
    opt = options
    check_chunk_size(opt.chunk_size)
    host_copy = not (opt.use_graph or capturing(q.device))
    N, bounds = parse_sequences(B, T, q.device, cu_seqlens, cu_seqlens_cpu, host_copy=host_copy, traced=opt.traced)
    integers = (int, torch.SymInt) if opt.traced else (int,)
    if opt.max_num_seqs is not None and (type(opt.max_num_seqs) not in integers or opt.max_num_seqs != N):
        raise RangeError(f"max_num_seqs must equal the number of sequences N={N}; got {opt.max_num_seqs!r}")
    dtype = DTYPE_NAMES[q.dtype]
    if initial_state is not None:
        axes, tail = ("[N, HV, V, K]", (V, K)) if opt.state_v_first else ("[N, HV, K, V]", (K, V))
        parse_state("initial_state", initial_state, (N, HV, *tail), axes, dtype, q.device)
    given = (q, k, v, g, beta, initial_state, act.A_log, act.dt_bias)
    grad = wants_grad(*given) if opt.grad is None else opt.grad
    if opt.intermediate_states and grad:
        raise NotSupportedError("return_intermediate_states needs torch.no_grad(); got inputs that require grad")
    problem = KDAProblem(
        B, T, H, HV, K, V, N, dtype=dtype, gate_dtype=DTYPE_NAMES[g.dtype], beta_dtype=DTYPE_NAMES[beta.dtype],
        state_dtype="fp64" if dtype == "fp64" else "fp32", packed=cu_seqlens is not None, lengths=lengths_of(bounds),
        gate=act.gate, lower_bound=act.lower_bound, has_A_log=act.A_log is not None,
        has_dt_bias=act.dt_bias is not None, beta_sigmoid=act.beta_sigmoid, neg_eigval=act.neg_eigval,
        l2norm=bool(opt.l2norm), scale=parse_scale(opt.scale, K), initial_state=initial_state is not None,
        final_state=bool(opt.final_state), state_v_first=bool(opt.state_v_first),
        intermediate_states=bool(opt.intermediate_states), disable_recompute=bool(opt.disable_recompute),
        chunk_size=opt.chunk_size, grad=grad, use_graph=bool(opt.use_graph), cp=parse_context_parallel(opt, grad),
        wide_rows=not opt.traced and has_wide_rows(q, k, v, g, beta),
        rows_aligned=opt.traced or has_aligned_rows(q, k, v, g),
    )  # fmt: skip
    operands = Operands(
        q, k, v, g, beta, A_log=act.A_log, dt_bias=act.dt_bias, initial_state=initial_state,
        cu_seqlens=cu_seqlens, boundaries=bounds, target=target_of(q.device),
    )  # fmt: skip
    return problem, operands


def has_wide_rows(*tensors: Tensor) -> bool:
    """Whether 64 tokens of one head span 2^31 elements in any of these `[B, T, heads, ...]` tensors."""
    return any(
        64 * x.stride(1) + (x.shape[3] * x.stride(3) if x.dim() == 4 else 0) >= 1 << 31
        for x in tensors
        if x.shape[1] > 1
    )


def has_aligned_rows(*tensors: Tensor | None) -> bool:
    """Whether the last axis of each is contiguous and begins at a multiple of 16 bytes wherever it begins."""
    for x in tensors:
        if x is None or x.numel() == 0:
            continue
        step = 16 // x.element_size()
        if x.stride(-1) != 1 or x.data_ptr() % 16:
            return False
        if any(n > 1 and s % step for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)):
            return False
    return True


def lengths_of(bounds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Tokens of each sequence from boundaries on the host."""
    return None if bounds is None else tuple(b - a for a, b in pairwise(bounds))


def check_pool(name: str, pool: Any, tail: tuple[int, int, int], dtype: str, device: Any) -> None:
    """Check a pool `[slots, HV, V, K]`: fp32 or bf16 (fp64 calls: fp64 too), any slot stride, rows not overlapping."""
    if not isinstance(pool, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor [slots, HV, V, K]; got {type(pool).__name__}")
    if pool.dim() != 4 or tuple(pool.shape[1:]) != tail:
        raise ShapeError(f"{name} must be [slots, HV, V, K] = [slots, {', '.join(map(str, tail))}]; "
                         f"got {list(pool.shape)}")  # fmt: skip
    allowed = ("fp32", "bf16", "fp64") if dtype == "fp64" else ("fp32", "bf16")
    if dtype_name(pool) not in allowed:
        raise DtypeError(f"{name} must be {' or '.join(allowed)} for {dtype} inputs; got {dtype_name(pool)}")
    if pool.device != device:
        raise DeviceError(f"{name} must be on {device} as q is; got {pool.device}")
    if any(size > 1 and stride == 0 for size, stride in zip(pool.shape, pool.stride(), strict=True)):
        raise ShapeError(f"{name} is written in place: no dimension may be expanded (stride 0); got {pool.stride()}")


def check_out(out: Any, like: Tensor) -> Tensor | None:
    """Check a caller's output tensor: shape, dtype and device of `like` (v)."""
    if out is None:
        return None
    if not isinstance(out, torch.Tensor):
        raise DtypeError(f"out must be a tensor like v; got {type(out).__name__}")
    if out.shape != like.shape:
        raise ShapeError(f"out must be shaped as v, {list(like.shape)}; got {list(out.shape)}")
    if out.dtype != like.dtype:
        raise DtypeError(f"out must be {dtype_name(like)} as v is; got {dtype_name(out)}")
    if out.device != like.device:
        raise DeviceError(f"out must be on {like.device} as v is; got {out.device}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ShapeError(f"out is written in place: no dimension may be expanded (stride 0); got {out.stride()}")
    return out


def parse_null_index(null_index: Any) -> int:
    """`null_index` as an int."""
    if isinstance(null_index, bool) or not isinstance(null_index, int):
        raise DtypeError(f"null_index must be an int; got {type(null_index).__name__}")
    return null_index
