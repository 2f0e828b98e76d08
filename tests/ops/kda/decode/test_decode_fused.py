"""kda_decode_fused: convolution, SiLU, norms, gate, step and gated RMSNorm, against float64 and against its parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cula
from cula.checks.cases import DTYPES, normal
from cula.checks.poison import Poison
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.kda import kda_decode, kda_decode_fused, kda_recurrent_reference

N, H, HV, K, V, SLOTS = 4, 1, 2, 16, 12, 9
CHANNELS = 2 * H * K + HV * V
INDEX = [6, 2, 0, 5]


def arguments(dtype: str = "fp32", width: int = 4, **changes: Any) -> dict[str, Any]:
    """Everything a call can have, drawn anew each time in the same bits; the gates fp32 beside 16-bit x."""
    kind = DTYPES[dtype]
    wide = torch.float64 if dtype == "fp64" else torch.float32
    shapes = {
        "x": (N, CHANNELS), "g": (N, HV, K), "beta": (N, HV), "conv_weight": (CHANNELS, width),
        "conv_bias": (CHANNELS,), "conv_pool": (SLOTS, CHANNELS, width - 1), "state_pool": (SLOTS, HV, V, K),
        "output_gate": (N, HV, V), "norm_weight": (V,), "A_log": (HV,), "dt_bias": (HV * K,),
    }  # fmt: skip
    narrow = ("x", "conv_pool", "output_gate")
    made = {
        name: normal(*shape, seed=seed, dtype=kind if name in narrow else wide)
        for seed, (name, shape) in enumerate(shapes.items(), 30)
    }
    return {**made, "state_indices": torch.tensor(INDEX, dtype=torch.int32), **changes}


def truth(a: dict[str, Any], index: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, rows of conv_pool, rows of state_pool) in float64 for the live slots `index`, by the definition."""
    flat = {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in a.items()}
    window = torch.cat([flat["conv_pool"][index], flat["x"].unsqueeze(-1)], -1)
    y = (window * flat["conv_weight"]).sum(-1) + (0 if a["conv_bias"] is None else flat["conv_bias"])
    y = y * torch.sigmoid(y)
    q, k, v = y[:, : H * K], y[:, H * K : 2 * H * K], y[:, 2 * H * K :]
    o, state = kda_recurrent_reference(
        q.view(N, 1, H, K), k.view(N, 1, H, K), v.view(N, 1, HV, V), flat["g"].view(N, 1, HV, K),
        flat["beta"].view(N, 1, HV), scale=a.get("scale"), initial_state=flat["state_pool"][index],
        output_final_state=True, use_qk_l2norm_in_kernel=a.get("normalize_qk", True),
        use_gate_in_kernel=a.get("gate_is_raw", True), use_beta_sigmoid_in_kernel=a.get("beta_is_logits", True),
        allow_neg_eigval=a.get("allow_neg_eigval", False), lower_bound=a.get("lower_bound"), state_v_first=True,
        A_log=flat["A_log"], dt_bias=flat["dt_bias"],
    )  # fmt: skip
    o = o[:, 0]
    if a["norm_weight"] is not None:
        o = o / (o.square().mean(-1, keepdim=True) + a.get("norm_eps", 1e-5)).sqrt() * flat["norm_weight"]
    if a["output_gate"] is not None:
        o = o / (1 + torch.exp(-flat["output_gate"]))
    return o, window[..., 1:], state


VARIATIONS = {
    "softplus": {},
    "lower bound": {"lower_bound": -5.0},
    "a bound alone": {"lower_bound": -5.0, "A_log": None, "dt_bias": None},
    "finished": {"gate_is_raw": False, "beta_is_logits": False, "g": -normal(N, HV, K, seed=3).abs(),
                 "beta": normal(N, HV, seed=4).sigmoid()},
    "doubled": {"allow_neg_eigval": True, "scale": 0.3},
    "no norm of q and k": {"normalize_qk": False, "norm_eps": 1e-2},
    "no bias": {"conv_bias": None},
    "no output gate": {"output_gate": None},
    "no output norm": {"norm_weight": None},
    "bare": {"output_gate": None, "norm_weight": None, "conv_bias": None},
}  # fmt: skip


def moved(a: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in a.items()}


@pytest.mark.parametrize("what", VARIATIONS)
def test_it_is_the_definition(on_fused, what: str) -> None:
    a = moved(arguments(**VARIATIONS[what]), on_fused.device)
    before = {name: a[name].clone() for name in ("conv_pool", "state_pool")}
    o, window, state = truth(a, INDEX)
    out = kda_decode_fused(**a, implementation=on_fused.name)
    assert (out.shape, out.dtype) == ((N, HV, V), a["x"].dtype)
    assert relative_error(out, o) <= tolerance("o", torch.float32, on_fused.device)
    assert relative_error(a["state_pool"][INDEX], state) <= tolerance("pool", torch.float32, on_fused.device)
    assert bits_equal(a["conv_pool"][INDEX], window.to(a["conv_pool"].dtype))
    rest = [i for i in range(SLOTS) if i not in INDEX]
    assert all(bits_equal(a[name][rest], before[name][rest]) for name in before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_dtypes_and_widths(on_fused, dtype: str, width: int) -> None:
    if on_fused.name == "portable" and dtype == "fp64":
        pytest.skip("portable takes no fp64")
    a = moved(arguments(dtype, width), on_fused.device)
    o, window, state = truth(a, INDEX)
    out = kda_decode_fused(**a, implementation=on_fused.name)
    assert out.dtype == DTYPES[dtype]
    assert relative_error(out, o) <= tolerance("o", DTYPES[dtype], on_fused.device)
    assert relative_error(a["state_pool"][INDEX], state) <= tolerance("pool", DTYPES[dtype], on_fused.device)
    assert bits_equal(a["conv_pool"][INDEX], window.to(DTYPES[dtype]))


def test_a_bf16_pool(on_fused) -> None:
    a = moved(arguments("bf16"), on_fused.device)
    a["state_pool"] = a["state_pool"].bfloat16()
    o, _, state = truth(a, INDEX)
    out = kda_decode_fused(**a, implementation=on_fused.name)
    assert relative_error(out, o) <= tolerance("o", torch.bfloat16, on_fused.device)
    assert relative_error(a["state_pool"][INDEX], state) <= tolerance("bf16_pool", torch.bfloat16, on_fused.device)


@pytest.mark.parametrize("null, index", [(-1, [6, -1, 99, 0]), (0, [0, 2, -7, 5])], ids=str)
def test_null_rows_give_zeros_and_touch_neither_pool(on_fused, null: int, index: list[int]) -> None:
    a = moved(arguments(), on_fused.device)
    dead = [n for n, i in enumerate(index) if i == null or not 0 <= i < SLOTS]
    alive = [n for n in range(N) if n not in dead]
    right = moved(arguments(), on_fused.device)
    spare = [i for i in range(SLOTS) if i not in index]
    right["state_indices"] = torch.tensor([i if n in alive else spare[n] for n, i in enumerate(index)])
    expected = kda_decode_fused(**right, implementation=on_fused.name)
    for name in ("x", "g", "beta", "output_gate"):
        a[name][dead] = math.nan
    kept = {name: a[name].clone() for name in ("conv_pool", "state_pool")}
    a["state_indices"] = torch.tensor(index)
    out = kda_decode_fused(**a, null_index=null, implementation=on_fused.name)
    assert not out[dead].any() and bits_equal(out[alive], expected[alive])
    written = [index[n] for n in alive]
    rest = [i for i in range(SLOTS) if i not in written]
    for name in ("conv_pool", "state_pool"):
        assert bits_equal(a[name][written], right[name][written]) and bits_equal(a[name][rest], kept[name][rest])


def test_strided_everything(on_fused) -> None:
    a = moved(arguments(), on_fused.device)
    plain = moved(arguments(), on_fused.device)
    expected = kda_decode_fused(**plain, implementation=on_fused.name)
    wide = torch.full((SLOTS, HV, V, 2 * K), math.nan)
    bases = {"state_pool": wide, "conv_pool": torch.full((SLOTS, 5, CHANNELS), math.nan)}
    views = {"state_pool": wide[..., K:], "conv_pool": bases["conv_pool"][:, 1:4].transpose(1, 2)}
    for name, view in views.items():
        a[name] = view.copy_(a[name])
    a["x"] = torch.cat([a["x"], a["x"] * math.nan], 1)[:, :CHANNELS]
    a["g"], a["beta"] = a["g"].unsqueeze(0), a["beta"].repeat_interleave(2, 1)[:, ::2].unsqueeze(0)
    a["conv_weight"] = a["conv_weight"].t().contiguous().t()
    a["output_gate"] = a["output_gate"].transpose(0, 1).contiguous().transpose(0, 1)
    a["state_indices"] = torch.tensor([INDEX, INDEX]).t()[:, 0]
    big = torch.full((N, HV + 2, V), math.nan)
    out = big[:, 1:-1]
    assert kda_decode_fused(**a, out=out, implementation=on_fused.name) is out
    assert relative_error(out, expected.double()) <= 1e-6 and big[:, [0, -1]].isnan().all()
    assert relative_error(views["state_pool"], plain["state_pool"].double()) <= 1e-6
    assert bits_equal(views["conv_pool"].contiguous(), plain["conv_pool"])
    assert wide[..., :K].isnan().all() and bases["conv_pool"][:, [0, 4]].isnan().all()


def test_its_parts_give_the_same(on_fused) -> None:
    """Without convolution (a weight of 0, 0, 0, 1) and output norms it is kda_decode of silu(x)."""
    a = moved(arguments(conv_bias=None, output_gate=None, norm_weight=None), on_fused.device)
    a["conv_weight"] = torch.zeros(CHANNELS, 4)
    a["conv_weight"][:, 3] = 1.0
    pool = a["state_pool"].clone()
    out = kda_decode_fused(**a, implementation=on_fused.name)
    q, k, v = torch.nn.functional.silu(a["x"]).split([H * K, H * K, HV * V], -1)
    expected = kda_decode(
        q.view(N, 1, H, K), k.view(N, 1, H, K), v.view(N, 1, HV, V), a["g"].unsqueeze(1), a["beta"].unsqueeze(1),
        state_pool=pool, state_indices=a["state_indices"], A_log=a["A_log"], dt_bias=a["dt_bias"],
    )  # fmt: skip
    limit = tolerance("o", torch.float32, on_fused.device)
    assert relative_error(out, expected[:, 0].double()) <= limit
    assert relative_error(a["state_pool"], pool.double()) <= limit


def test_many_steps_carry_both_pools(on_fused) -> None:
    a = moved(arguments(), on_fused.device)
    exact = {name: x.double() if name in ("conv_pool", "state_pool") else x for name, x in a.items()}
    for step in range(6):
        x = normal(N, CHANNELS, seed=step).to(on_fused.device)
        o, window, state = truth({**exact, "x": x}, INDEX)
        exact["conv_pool"], exact["state_pool"] = exact["conv_pool"].clone(), exact["state_pool"].clone()
        exact["conv_pool"][INDEX], exact["state_pool"][INDEX] = window, state
        out = kda_decode_fused(**{**a, "x": x}, implementation=on_fused.name)
        assert relative_error(out, o) <= tolerance("o", torch.float32, on_fused.device), step


def test_inputs_are_not_written(on_fused) -> None:
    poison, a = Poison(fill=1e30), moved(arguments(), on_fused.device)
    plain = kda_decode_fused(**moved(arguments(), on_fused.device), implementation=on_fused.name)
    held = {
        name: poison.tensor(x, name, writable=name in ("conv_pool", "state_pool")) if torch.is_tensor(x) else x
        for name, x in a.items()
    }
    held = {n: x.requires_grad_() if n in ("x", "g", "conv_weight") else x for n, x in held.items()}
    out = kda_decode_fused(**held, implementation=on_fused.name)
    assert bits_equal(out, plain) and not out.requires_grad
    poison.check()


def test_no_rows(on_fused) -> None:
    a = moved(arguments(), on_fused.device)
    for name in ("x", "g", "beta", "output_gate", "state_indices"):
        a[name] = a[name][:0]
    assert kda_decode_fused(**a, implementation=on_fused.name).shape == (0, HV, V)


BAD = [
    ({"x": torch.zeros(N, CHANNELS + 1)}, "x"),
    ({"x": torch.zeros(N, 1, CHANNELS)}, "x"),
    ({"x": torch.zeros(N, CHANNELS).int()}, "x"),
    ({"g": torch.zeros(N, HV, V)}, "g"),
    ({"beta": torch.zeros(N, HV, 1)}, "beta"),
    ({"conv_weight": torch.zeros(4, CHANNELS)}, "conv_weight"),
    ({"conv_bias": torch.zeros(CHANNELS + 1)}, "conv_bias"),
    ({"conv_pool": torch.zeros(SLOTS, CHANNELS, 4)}, "conv_pool"),
    ({"conv_pool": torch.zeros(SLOTS + 1, CHANNELS, 3)}, "conv_pool"),
    ({"conv_pool": torch.zeros(1, CHANNELS, 3).expand(SLOTS, CHANNELS, 3)}, "conv_pool"),
    ({"state_pool": torch.zeros(SLOTS, HV, V, K, dtype=torch.float16)}, "state_pool"),
    ({"state_indices": torch.zeros(N)}, "state_indices"),
    ({"output_gate": torch.zeros(N, HV, K)}, "output_gate"),
    ({"norm_weight": torch.zeros(K)}, "norm_weight"),
    ({"norm_eps": -1.0}, "norm_eps"),
    ({"norm_eps": None}, "norm_eps"),
    ({"A_log": None}, "A_log"),
    ({"out": torch.zeros(N, HV, V, dtype=torch.float16)}, "out"),
    ({"null_index": 1.0}, "null_index"),
    ({"implementation": "sm90"}, "sm90"),
]


@pytest.mark.parametrize("change, name", BAD, ids=lambda x: str(x)[:40])
def test_bad_arguments_touch_nothing(change: dict, name: str) -> None:
    a = arguments(out=torch.full((N, HV, V), math.nan))
    a |= change
    pools = [a[n] for n in ("conv_pool", "state_pool", "out")]
    before = [x.clone() for x in pools]
    with pytest.raises(cula.CulaError, match=name):
        kda_decode_fused(**a)
    assert all(bits_equal(x, was) for x, was in zip(pools, before))
