"""explain and available: what the implementation tables say, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cula.host import env
from cula.host.arch import CPU, Target, parse_target
from cula.host.errors import RangeError, ShapeError
from cula.host.table import Row, Verdict, verdicts

#: public function -> (policy module, stages that it runs, the stage that only a gradient needs).
_FUNCTIONS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "chunk_kda": ("cula.ops.kda.chunk.policy", ("chunk forward",), "chunk backward"),
    "kda_prefill": ("cula.ops.kda.chunk.policy", ("chunk forward",), None),
    "fused_recurrent_kda": ("cula.ops.kda.decode.policy", ("recurrent",), None),
    "kda_decode": ("cula.ops.kda.decode.policy", ("decode",), None),
    "kda_verify": ("cula.ops.kda.decode.policy", ("verify",), None),
    "kda_rollback": ("cula.ops.kda.decode.policy", ("rollback",), None),
    "kda_decode_fused": ("cula.ops.kda.decode.policy", ("decode fused",), None),
    "fused_kda_gate": ("cula.ops.kda.gate.policy", ("gate",), None),
    "chunk_lightning_attn": ("cula.ops.lightning.chunk.policy", ("lightning forward",), "lightning backward"),
    "lightning_prefill": ("cula.ops.lightning.chunk.policy", ("lightning forward",), None),
    "lightning_decode": ("cula.ops.lightning.decode.policy", ("lightning decode",), None),
    "lightning_verify": ("cula.ops.lightning.decode.policy", ("lightning verify",), None),
}
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32",
           "float32": "fp32", "float": "fp32", "fp64": "fp64", "float64": "fp64", "double": "fp64"}  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """Per stage, every row in the order in which auto tries them. Prints as a table."""

    problem: str
    target: Target
    stages: tuple[tuple[str, tuple[Verdict, ...]], ...]

    def __str__(self) -> str:
        rows = [
            (stage, v.row.name, v.row.mechanism, v.row.dsl, v.reason or "accepted", v.row.status)
            for stage, found in self.stages
            for v in found
        ]
        head = ("stage", "implementation", "mechanism", "DSL", "verdict", "status")
        return f"{self.problem} on {self.target.name}\n{text_table(head, rows)}"


@dataclass(frozen=True)
class Available:
    """Every row with None where this machine can run it, else the reason. Prints as a table."""

    rows: tuple[tuple[Row, str | None], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations that can run something here."""
        return tuple(dict.fromkeys(row.name for row, reason in self.rows if reason is None))

    def __str__(self) -> str:
        head = ("algorithm", "stage", "implementation", "mechanism", "DSL", "here", "status")
        return text_table(
            head,
            [(r.algorithm, r.stage, r.name, r.mechanism, r.dsl, why or "yes", r.status) for r, why in self.rows],
        )


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of plain text, two spaces apart."""
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def functions() -> tuple[str, ...]:
    """The public functions that have an implementation table."""
    return tuple(_FUNCTIONS)


def explain(
    name: str | None = None,
    *,
    device: Any = None,
    B: int = 1,
    T: int = 1024,
    H: int = 1,
    HV: int | None = None,
    K: int = 128,
    V: int | None = None,
    lengths: Sequence[int] | None = None,
    dtype: Any = "bf16",
    grad: bool = False,
    flags: Mapping[str, Any] | None = None,
) -> Explanation:
    """Which implementation serves a call, and why the others do not. Needs no GPU and runs nothing.

    Args:
        name: a public function ("chunk_kda"), or None for all of them.
        device: "cpu", "sm90", "sm100", "cuda", a torch.device, or None for this machine's best.
        B, T, H, HV, K, V: sizes (HV defaults to H, V to K). lengths: tokens of each packed sequence (B is 1, T at
            least their sum). dtype: of q, k, v. grad: gradients are wanted.
        flags: arguments of the function itself, e.g. {"use_gate_in_kernel": True}; values may stand for tensors.

    Raises:
        RangeError: an unknown function, device or dtype. ShapeError: sizes that no call can have.
        TypeError: a flag that the function does not have.
    """
    env.check_all()
    names = tuple(_FUNCTIONS) if name is None else (name,)
    if name is not None and name not in _FUNCTIONS:
        raise RangeError(f"name must be one of {', '.join(_FUNCTIONS)}; got {name!r}")
    target = parse_target(device)
    sizes = _sizes(B, T, H, HV, K, V, lengths)
    stages: dict[str, tuple[Verdict, ...]] = {}
    problem = None
    for function in names:
        _check_flags(function, flags or {})
        module, needed, backward = _FUNCTIONS[function]
        problem = _problem(function, sizes, lengths, _dtype(dtype), grad, dict(flags or {}))
        table = import_module(module).STAGES
        for stage in (*needed, *((backward,) if backward and grad else ())):
            stages.setdefault(stage, tuple(verdicts(table[stage], problem, target)))
    return Explanation(f"{name or 'every function'} {problem}", target, tuple(stages.items()))


def available() -> Available:
    """What this machine can run: every row of every table, with the reason where it cannot."""
    from cula.ops.kda.problem import KDAProblem
    from cula.ops.lightning.problem import LightningProblem

    targets = [CPU, *_live_gpus()]
    found: list[tuple[Row, str | None]] = []
    for module in dict.fromkeys(module for module, _, _ in _FUNCTIONS.values()):
        for rows in import_module(module).STAGES.values():
            for row in rows:
                kind = LightningProblem if row.algorithm == "lightning" else KDAProblem
                reasons = [row.refusal(kind(1, 128, 1, 1, 128, 128, 1), t) for t in targets]
                found.append((row, None if None in reasons else reasons[0]))
    return Available(tuple(found))


def _live_gpus() -> list[Target]:
    import torch

    if not torch.cuda.is_available():
        return []
    return list(dict.fromkeys(parse_target(f"cuda:{i}") for i in range(torch.cuda.device_count())))


def _dtype(dtype: Any) -> str:
    text = str(dtype).removeprefix("torch.")
    if text not in _DTYPES:
        raise RangeError(f"dtype must be bf16, fp16, fp32 or fp64; got {dtype!r}")
    return _DTYPES[text]


def _sizes(B: int, T: int, H: int, HV: Any, K: int, V: Any, lengths: Any) -> dict[str, int]:
    HV, V = H if HV is None else HV, K if V is None else V
    for label, value, least in (("B", B, 0), ("T", T, 0), ("H", H, 1), ("HV", HV, 1), ("K", K, 1), ("V", V, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ShapeError(f"{label} must be an integer of at least {least}; got {value!r}")
    if HV % H:
        raise ShapeError(f"HV must be a multiple of H={H}; got HV={HV}")
    if lengths is not None:
        if B != 1:
            raise ShapeError(f"lengths describe packed sequences, so B must be 1; got B={B}")
        if any(n < 0 for n in lengths):
            raise ShapeError(f"lengths must be at least 0; got {min(lengths)}")
        T = max(T, sum(lengths))
    return {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}


def _function(name: str) -> Callable[..., Any]:
    return getattr(import_module("cula.lightning" if "lightning" in name else "cula.kda"), name)


def _check_flags(name: str, flags: Mapping[str, Any]) -> None:
    import inspect

    known = inspect.signature(_function(name)).parameters
    for flag in flags:
        if flag not in known:
            raise TypeError(f"{name}() has no argument {flag!r}; it has {', '.join(known)}")


def _problem(
    name: str, sizes: dict[str, int], lengths: Sequence[int] | None, dtype: str, grad: bool, flags: dict[str, Any]
) -> Any:
    """The problem that a call with these flags would parse to."""
    if "lightning" in name:
        from cula.ops.lightning.problem import LightningProblem

        return LightningProblem(**_common(name, sizes, lengths, dtype, grad, flags))
    from cula.ops.kda.problem import KDAProblem, parse_lower_bound

    serving = _serves(name)
    raw = flags.get("gate_is_raw", True) if serving else flags.get("use_gate_in_kernel", name == "fused_kda_gate")
    bound = parse_lower_bound(flags.get("lower_bound")) if raw else None
    return KDAProblem(
        **_common(name, sizes, lengths, dtype, grad, flags),
        gate_dtype=dtype,
        beta_dtype=dtype,
        gate="finished" if not raw else "softplus" if bound is None else "lower_bound",
        lower_bound=bound,
        has_A_log=bool(raw) and (bound is None or flags.get("A_log") is not None),
        has_dt_bias=bool(raw) and flags.get("dt_bias") is not None,
        beta_sigmoid=bool(flags.get("beta_is_logits", True) if serving else flags.get("use_beta_sigmoid_in_kernel")),
        neg_eigval=bool(flags.get("allow_neg_eigval")),
        l2norm=bool(flags.get("normalize_qk", True) if serving else flags.get("use_qk_l2norm_in_kernel")),
        intermediate_states=bool(flags.get("return_intermediate_states")),
        disable_recompute=bool(flags.get("disable_recompute")),
        use_graph=bool(flags.get("use_graph")),
        rollback=name == "kda_rollback" or flags.get("rollback") is not None,
        conv_width=4 if name == "kda_decode_fused" else 0,
    )


def _serves(name: str) -> bool:
    """The function works on a pool, if it gets one."""
    return name.endswith(("_prefill", "_decode", "_decode_fused", "_verify", "_rollback"))


def _common(
    name: str, sizes: dict[str, int], lengths: Sequence[int] | None, dtype: str, grad: bool, flags: dict[str, Any]
) -> dict[str, Any]:
    """What the problems of every algorithm say of such a call."""
    from cula.ops.common.arguments import check_chunk_size, parse_scale
    from cula.ops.common.cp_mode import CPMode

    pool = flags.get("state_pool")
    one_token, drafts = name.endswith(("_decode", "_decode_fused")), name.endswith(("_verify", "_rollback"))
    wide = "fp64" if dtype == "fp64" else "fp32"
    return {
        **sizes,
        "N": len(lengths) if lengths is not None else sizes["B"] * (sizes["T"] if one_token else 1),
        "dtype": dtype,
        "state_dtype": _dtype(getattr(pool, "dtype", wide)),
        "packed": lengths is not None,
        "lengths": None if lengths is None else tuple(lengths),
        "scale": parse_scale(flags.get("scale"), sizes["K"]),
        "initial_state": flags.get("initial_state") is not None,
        "final_state": bool(flags.get("output_final_state")),
        "state_v_first": _serves(name) or bool(flags.get("state_v_first")),
        "chunk_size": check_chunk_size(flags.get("chunk_size", 64)),
        "grad": grad,
        "cp": CPMode.parse(flags.get("cp_mode"), grad=grad),
        "pool": pool is not None or one_token or drafts,
        "checkpoint_every": flags.get("checkpoint_every", 64) if flags.get("checkpoints") is not None else 0,
        "position_offsets": flags.get("position_offsets") is not None,
        "tokens": 1 if one_token else sizes["T"] if drafts or name == "fused_recurrent_kda" else 0,
        "tree": flags.get("parent") is not None,
    }
