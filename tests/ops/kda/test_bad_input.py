"""Bad calls: one clear sentence with the right type, before anything is written; and what is merely odd works."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.runs import chunk, serve
from cula.checks.tolerance import bits_equal

CASE = Case(B=2, T=20, H=2, HV=4, K=16, V=12, gate="sigmoid", beta="logits", l2norm=True)
PACKED = CASE.replace(B=1, T=40, lengths=(7, 0, 30))
ROWS = torch.zeros
META = "meta"

#: (what is wrong, function of the problem giving the changes, error, what the message names)
INPUTS = [
    ("q of 3 dimensions", lambda p: {"q": p.q[0]}, cula.ShapeError, "q"),
    ("k of another T", lambda p: {"k": p.k[:, 1:]}, cula.ShapeError, "k"),
    ("k of another K", lambda p: {"k": p.k[..., 1:]}, cula.ShapeError, "k"),
    ("v of another T", lambda p: {"v": p.v[:, 1:]}, cula.ShapeError, "v"),
    ("v of 3 dimensions", lambda p: {"v": p.v[..., 0]}, cula.ShapeError, "v"),
    ("HV no multiple of H", lambda p: {"v": p.v[:, :, :3]}, cula.ShapeError, "H"),
    ("HV below H", lambda p: {"v": p.v[:, :, :1]}, cula.ShapeError, "H"),
    ("g per head", lambda p: {"g": p.g[..., 0]}, cula.ShapeError, "g"),
    ("g of H heads", lambda p: {"g": p.g[:, :, :2]}, cula.ShapeError, "g"),
    ("beta per channel", lambda p: {"beta": p.g}, cula.ShapeError, "beta"),
    ("beta of H heads", lambda p: {"beta": p.beta[:, :, :2]}, cula.ShapeError, "beta"),
    ("k of another dtype", lambda p: {"k": p.k.double()}, cula.DtypeError, "k"),
    ("v of another dtype", lambda p: {"v": p.v.bfloat16()}, cula.DtypeError, "v"),
    ("integer inputs", lambda p: {n: getattr(p, n).int() for n in "qkv"}, cula.DtypeError, "q"),
    ("integer g", lambda p: {"g": p.g.int()}, cula.DtypeError, "g"),
    ("bool beta", lambda p: {"beta": p.beta > 0}, cula.DtypeError, "beta"),
    ("complex g", lambda p: {"g": p.g.to(torch.complex64)}, cula.DtypeError, "g"),
    ("no tensor for g", lambda p: {"g": None}, cula.CulaError, "g"),
    ("a list for q", lambda p: {"q": [1.0]}, cula.CulaError, "q"),
    ("k elsewhere", lambda p: {"k": p.k.to(META)}, cula.DeviceError, "k"),
    ("v elsewhere", lambda p: {"v": p.v.to(META)}, cula.DeviceError, "v"),
    ("g elsewhere", lambda p: {"g": p.g.to(META)}, cula.DeviceError, "g"),
    ("beta elsewhere", lambda p: {"beta": p.beta.to(META)}, cula.DeviceError, "beta"),
    ("A_log elsewhere", lambda p: {"A_log": p.A_log.to(META)}, cula.DeviceError, "A_log"),
    ("A_log of H heads", lambda p: {"A_log": p.A_log[:2]}, cula.ShapeError, "A_log"),
    ("integer A_log", lambda p: {"A_log": p.A_log.int()}, cula.DtypeError, "A_log"),
    ("A_log no tensor", lambda p: {"A_log": 0.5}, cula.CulaError, "A_log"),
    ("dt_bias per head", lambda p: {"dt_bias": p.dt_bias[:, 0]}, cula.ShapeError, "dt_bias"),
    ("dt_bias transposed", lambda p: {"dt_bias": p.dt_bias.T}, cula.ShapeError, "dt_bias"),
    ("dt_bias elsewhere", lambda p: {"dt_bias": p.dt_bias.to(META)}, cula.DeviceError, "dt_bias"),
    ("lower_bound 0", lambda p: {"lower_bound": 0.0}, cula.RangeError, "lower_bound"),
    ("lower_bound above 0", lambda p: {"lower_bound": 1.0}, cula.RangeError, "lower_bound"),
    ("lower_bound nan", lambda p: {"lower_bound": math.nan}, cula.RangeError, "lower_bound"),
    ("lower_bound -inf", lambda p: {"lower_bound": -math.inf}, cula.RangeError, "lower_bound"),
    ("lower_bound inf", lambda p: {"lower_bound": math.inf}, cula.RangeError, "lower_bound"),
    ("lower_bound a string", lambda p: {"lower_bound": "-5"}, cula.CulaError, "lower_bound"),
    ("softplus without A_log", lambda p: {"lower_bound": None, "A_log": None}, cula.CulaError, "A_log"),
    ("scale nan", lambda p: {"scale": math.nan}, cula.CulaError, "scale"),
    ("scale a string", lambda p: {"scale": "1"}, cula.CulaError, "scale"),
    ("unknown implementation", lambda p: {"implementation": "fastest"}, cula.RangeError, "implementation"),
    ("an implementation that is not here", lambda p: {"implementation": "sm90"}, cula.NotSupportedError, "sm90"),
]
SEQUENCES = [
    ("B above 1 with cu_seqlens", lambda p: _stacked(p), cula.ShapeError, "batch"),
    ("not from 0", lambda p: {"cu_seqlens": _cu(1, 7, 7, 37)}, cula.RangeError, "cu_seqlens"),
    ("beyond T", lambda p: {"cu_seqlens": _cu(0, 7, 7, 41)}, cula.RangeError, "cu_seqlens"),
    ("decreasing", lambda p: {"cu_seqlens": _cu(0, 7, 5, 37)}, cula.RangeError, "cu_seqlens"),
    ("negative", lambda p: {"cu_seqlens": _cu(0, -7, 5, 37)}, cula.RangeError, "cu_seqlens"),
    ("float", lambda p: {"cu_seqlens": _cu(0, 7, 7, 37).float()}, cula.DtypeError, "cu_seqlens"),
    ("bool", lambda p: {"cu_seqlens": _cu(0, 1, 1, 1).bool()}, cula.DtypeError, "cu_seqlens"),
    ("int16", lambda p: {"cu_seqlens": _cu(0, 7, 7, 37).short()}, cula.DtypeError, "cu_seqlens"),
    ("a list", lambda p: {"cu_seqlens": [0, 7, 7, 37]}, cula.DtypeError, "cu_seqlens"),
    ("elsewhere", lambda p: {"cu_seqlens": _cu(0, 7, 7, 37).to(META)}, cula.DeviceError, "cu_seqlens"),
    ("two dimensions", lambda p: {"cu_seqlens": _cu(0, 7, 7, 37)[None]}, cula.ShapeError, "cu_seqlens"),
    ("no entry", lambda p: {"cu_seqlens": _cu()}, cula.ShapeError, "cu_seqlens"),
]
HOST_COPY = [
    ("host copy alone", lambda p: {"cu_seqlens": None, "cu_seqlens_cpu": p.cu_seqlens}, cula.CulaError, "cu_seqlens"),
    ("host copy of another N", lambda p: {"cu_seqlens_cpu": _cu(0, 37)}, cula.ShapeError, "cu_seqlens_cpu"),
    ("float host copy", lambda p: {"cu_seqlens_cpu": p.cu_seqlens.float()}, cula.DtypeError, "cu_seqlens_cpu"),
    ("decreasing host copy", lambda p: {"cu_seqlens_cpu": _cu(0, 7, 5, 37)}, cula.RangeError, "cu_seqlens_cpu"),
    ("context parallelism of a word", lambda p: {"cp_mode": "sometimes"}, cula.RangeError, "cp_mode"),
]
CHUNK = [
    ("state of N - 1", lambda p: {"initial_state": p.h0[1:]}, cula.ShapeError, "initial_state"),
    ("state in the other layout", lambda p: {"initial_state": p.h0.mT}, cula.ShapeError, "initial_state"),
    ("state with the wrong flag", lambda p: {"state_v_first": True}, cula.ShapeError, "initial_state"),
    ("state of H heads", lambda p: {"initial_state": p.h0[:, :2]}, cula.ShapeError, "initial_state"),
    ("bf16 state", lambda p: {"initial_state": p.h0.bfloat16()}, cula.DtypeError, "initial_state"),
    ("fp64 state in an fp32 call", lambda p: {"initial_state": p.h0.double()}, cula.DtypeError, "initial_state"),
    ("state elsewhere", lambda p: {"initial_state": p.h0.to(META)}, cula.DeviceError, "initial_state"),
    ("safe_gate beyond -5", lambda p: {"safe_gate": True, "lower_bound": -5.5}, cula.RangeError, "lower_bound"),
    ("safe_gate with softplus", lambda p: {"safe_gate": True, "lower_bound": None}, cula.RangeError, "lower_bound"),
    ("doubled without logits", lambda p: {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False},
     cula.CulaError, "allow_neg_eigval"),
    ("chunk of 48", lambda p: {"chunk_size": 48}, cula.RangeError, "chunk_size"),
    ("chunk of 128", lambda p: {"chunk_size": 128}, cula.RangeError, "chunk_size"),
    ("chunk of 0", lambda p: {"chunk_size": 0}, cula.RangeError, "chunk_size"),
    ("chunk of True", lambda p: {"chunk_size": True}, cula.CulaError, "chunk_size"),
    ("max_num_seqs above N", lambda p: {"max_num_seqs": 9}, cula.RangeError, "max_num_seqs"),
    ("max_num_seqs below N", lambda p: {"max_num_seqs": 1}, cula.RangeError, "max_num_seqs"),
    ("unknown direction", lambda p: {"implementation": {"sideways": "eager"}}, cula.RangeError, "sideways"),
    ("unknown forward", lambda p: {"implementation": {"forward": "fastest"}}, cula.RangeError, "fastest"),
    ("forced splitting of nothing", lambda p: {"cp_mode": "force"}, cula.CulaError, "cp_mode"),
]  # fmt: skip
POOL = [
    ("pool K-first", lambda p: {"state_pool": ROWS(5, 4, 16, 12)}, cula.ShapeError, "state_pool"),
    ("pool of H heads", lambda p: {"state_pool": ROWS(5, 2, 12, 16)}, cula.ShapeError, "state_pool"),
    ("fp16 pool", lambda p: {"state_pool": ROWS(5, 4, 12, 16).half()}, cula.DtypeError, "state_pool"),
    ("integer pool", lambda p: {"state_pool": ROWS(5, 4, 12, 16).int()}, cula.DtypeError, "state_pool"),
    ("pool elsewhere", lambda p: {"state_pool": ROWS(5, 4, 12, 16, device=META)}, cula.DeviceError, "state_pool"),
    ("no tensor", lambda p: {"state_pool": 5}, cula.CulaError, "state_pool"),
    ("expanded pool", lambda p: {"state_pool": ROWS(1, 4, 12, 16).expand(5, -1, -1, -1)}, cula.ShapeError,
     "state_pool"),
    ("doubled without logits", lambda p: {"allow_neg_eigval": True, "beta_is_logits": False}, cula.CulaError,
     "allow_neg_eigval"),
    ("null_index of None", lambda p: {"null_index": None}, cula.CulaError, "null_index"),
    ("out of another shape", lambda p: {"out": p.v[..., 1:].clone()}, cula.ShapeError, "out"),
    ("out of another dtype", lambda p: {"out": p.v.double()}, cula.DtypeError, "out"),
    ("out elsewhere", lambda p: {"out": p.v.to(META)}, cula.DeviceError, "out"),
    ("expanded out", lambda p: {"out": p.v[..., :1].clone().expand_as(p.v)}, cula.ShapeError, "out"),
]  # fmt: skip
PREFILL = [
    ("pool with fewer slots than N", lambda p: {"state_pool": ROWS(1, 4, 12, 16)}, cula.ShapeError, "state_pool"),
    ("read of another N", lambda p: {"read_indices": torch.zeros(9).int()}, cula.ShapeError, "read_indices"),
    ("float read", lambda p: {"read_indices": torch.zeros(p.case.N)}, cula.DtypeError, "read_indices"),
    ("float write", lambda p: {"write_indices": torch.zeros(p.case.N)}, cula.DtypeError, "write_indices"),
    ("write of two columns", lambda p: {"write_indices": torch.zeros(p.case.N, 2).int()}, cula.ShapeError,
     "write_indices"),
    ("read elsewhere", lambda p: {"read_indices": torch.zeros(p.case.N, device=META).int()}, cula.DeviceError,
     "read_indices"),
    ("mask of integers", lambda p: {"has_initial_state": torch.ones(p.case.N).int()}, cula.DtypeError,
     "has_initial_state"),
    ("mask of another N", lambda p: {"has_initial_state": torch.ones(9).bool()}, cula.ShapeError,
     "has_initial_state"),
    ("forced splitting of nothing", lambda p: {"cp_mode": "force"}, cula.CulaError, "cp_mode"),
]  # fmt: skip
DECODE = [
    ("two tokens", lambda p: _tokens(p), cula.ShapeError, "token"),
    ("indices of another N", lambda p: {"state_indices": torch.zeros(9).int()}, cula.ShapeError, "state_indices"),
    ("float indices", lambda p: {"state_indices": torch.zeros(2)}, cula.DtypeError, "state_indices"),
    ("no indices", lambda p: {"state_indices": None}, cula.CulaError, "state_indices"),
    ("float write", lambda p: {"write_indices": torch.zeros(2)}, cula.DtypeError, "write_indices"),
    ("write of another N", lambda p: {"write_indices": torch.zeros(3).int()}, cula.ShapeError, "write_indices"),
]  # fmt: skip


def _cu(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _stacked(p: Problem) -> dict:
    return {n: torch.cat([getattr(p, n)] * 2) for n in ("q", "k", "v", "g", "beta")}


def _tokens(p: Problem) -> dict:
    return {n: torch.cat([getattr(p, n)] * 2, 1) for n in ("q", "k", "v", "g", "beta")}


def refuse(function: str, p: Problem, change: dict, error: type, name: str, **base) -> None:
    """The call raises `error` naming `name`, and every tensor it was given keeps its bits."""
    fields = {n: change.pop(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias") if n in change}
    given = p.map(lambda x: x, **fields)
    call = {**base, **change}
    tensors = [x for x in (*given.inputs().values(), *call.values()) if isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if x.device.type == "cpu"]
    kept = [x.clone() for x in tensors]
    with pytest.raises(error) as caught:
        chunk(given, **call) if function == "chunk_kda" else serve(function, given, **call)
    message = str(caught.value)
    assert name in message and "\n" not in message and len(message) < 300, message
    assert all(bits_equal(x, was) for x, was in zip(tensors, kept)), "something was written"


def ids(table: list) -> list[str]:
    return [entry[0] for entry in table]


@pytest.mark.parametrize("_, change, error, name", INPUTS + CHUNK, ids=ids(INPUTS + CHUNK))
def test_chunk(_, change, error, name) -> None:
    p = make(CASE)
    refuse("chunk_kda", p, change(p), error, name)


@pytest.mark.parametrize("_, change, error, name", SEQUENCES + HOST_COPY, ids=ids(SEQUENCES + HOST_COPY))
@pytest.mark.parametrize("grad", [False, True])
def test_chunk_packed(_, change, error, name, grad: bool) -> None:
    p = make(PACKED)
    refuse("chunk_kda", p, {"q": p.q.requires_grad_(grad), **change(p)}, error, name)


@pytest.mark.parametrize("_, change, error, name", INPUTS + POOL + PREFILL, ids=ids(INPUTS + POOL + PREFILL))
def test_prefill(_, change, error, name) -> None:
    p = make(CASE)
    refuse("kda_prefill", p, change(p), error, name, state_pool=ROWS(5, 4, 12, 16), out=torch.ones_like(p.v))


@pytest.mark.parametrize("_, change, error, name", SEQUENCES + HOST_COPY, ids=ids(SEQUENCES + HOST_COPY))
def test_prefill_packed(_, change, error, name) -> None:
    p = make(PACKED)
    base = {"state_pool": ROWS(5, 4, 12, 16), "out": torch.ones_like(p.v), "cu_seqlens": p.cu_seqlens}
    if "batch" in name:
        base["out"] = torch.ones(2, 40, 4, 12)
    refuse("kda_prefill", p, change(p), error, name, **base)


@pytest.mark.parametrize("_, change, error, name", INPUTS + POOL + DECODE, ids=ids(INPUTS + POOL + DECODE))
def test_decode(_, change, error, name) -> None:
    p = make(CASE).tokens(0, 1)
    base = {"state_pool": ROWS(5, 4, 12, 16), "out": torch.ones_like(p.v), "state_indices": _cu(1, 2)}
    refuse("kda_decode", p, change(p), error, name, **base)


@pytest.mark.parametrize("_, change, error, name", INPUTS + POOL, ids=ids(INPUTS + POOL))
def test_verify(_, change, error, name) -> None:
    p = make(CASE.replace(T=4))
    base = {"state_pool": ROWS(5, 4, 12, 16), "out": torch.ones_like(p.v), "state_indices": _cu(1, 2)}
    refuse("kda_verify", p, change(p), error, name, update_state=True, **base)


def test_fp64_calls_want_fp64_states() -> None:
    p = make(CASE.replace(dtype="fp64"))
    refuse("chunk_kda", p, {"initial_state": p.h0.float()}, cula.DtypeError, "initial_state")


def test_a_state_for_every_packed_sequence() -> None:
    p = make(PACKED)
    refuse("chunk_kda", p, {"initial_state": p.h0[:1]}, cula.ShapeError, "initial_state")


def test_errors_are_also_the_builtin_kinds() -> None:
    assert issubclass(cula.ShapeError, ValueError) and issubclass(cula.RangeError, ValueError)
    assert issubclass(cula.DeviceError, ValueError) and issubclass(cula.NotSplittableError, ValueError)
    assert issubclass(cula.DtypeError, TypeError) and issubclass(cula.NotSupportedError, NotImplementedError)
    from cula.ops.kda import cp_mode

    assert cp_mode.NotSplittableError is cula.NotSplittableError
    for name in ("ShapeError", "DtypeError", "DeviceError", "RangeError", "NotSupportedError", "NotSplittableError"):
        assert issubclass(getattr(cula, name), cula.CulaError)


def test_a_message_says_what_is_needed_and_what_came() -> None:
    p = make(CASE)
    with pytest.raises(cula.ShapeError) as caught:
        chunk(p, initial_state=p.h0.mT.contiguous())
    for part in ("initial_state", "[2, 4, 16, 12]", "[2, 4, 12, 16]"):
        assert part in str(caught.value)
    with pytest.raises(cula.DtypeError) as caught:
        chunk(p.map(lambda x: x, k=p.k.bfloat16()))
    assert "fp32" in str(caught.value) and "bf16" in str(caught.value)


def test_finished_gates_ignore_bad_gate_parameters() -> None:
    p = make(CASE.replace(gate="mild"))
    plain = chunk(p)[0]
    odd = {"lower_bound": 3.0, "A_log": torch.zeros(99), "dt_bias": torch.zeros(1, device=META)}
    assert bits_equal(chunk(p, **odd)[0], plain)


def test_a_forced_name_without_a_backward_is_refused_before_the_forward() -> None:
    p = make(CASE)
    q = p.q.clone().requires_grad_()
    with pytest.raises(cula.NotSupportedError):
        chunk(p.map(lambda x: x, q=q), implementation={"forward": "eager", "backward": "sm100"})
