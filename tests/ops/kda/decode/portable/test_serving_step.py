"""kda_decode_fused of the portable kernel in Triton's interpreter, against eager, which is held to float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cula.checks.cases import normal
from cula.checks.poison import Poison
from cula.checks.tolerance import bits_equal, relative_error
from cula.kda import kda_decode_fused

pytestmark = pytest.mark.usefixtures("interpreted")

SLOTS = 6
SIZES = {
    "one block": (1, 2, 16, 12), "groups": (2, 4, 24, 20), "blocks of V": (1, 2, 256, 40), "K 1": (1, 1, 1, 1),
}  # fmt: skip


def arguments(sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, width: int = 4) -> dict[str, Any]:
    H, HV, K, V = sizes
    channels = 2 * H * K + HV * V
    shapes = {
        "x": (3, channels), "g": (3, HV, K), "beta": (3, HV), "conv_weight": (channels, width),
        "conv_bias": (channels,), "conv_pool": (SLOTS, channels, width - 1), "state_pool": (SLOTS, HV, V, K),
        "output_gate": (3, HV, V), "norm_weight": (V,), "A_log": (HV,), "dt_bias": (HV * K,),
    }  # fmt: skip
    narrow = ("x", "conv_pool", "output_gate")
    return {
        name: normal(*shape, seed=seed, dtype=dtype if name in narrow else torch.float32)
        for seed, (name, shape) in enumerate(shapes.items(), 40)
    }


def both(a: dict[str, Any], index: torch.Tensor, **options: Any) -> None:
    """Both implementations on copies of the pools agree, and what no row owns keeps its bits."""
    results = []
    for name in ("portable", "eager"):
        poison = Poison()
        held = {n: poison.tensor(x, n, writable=n.endswith("pool")) if torch.is_tensor(x) else x for n, x in a.items()}
        out = torch.full((3, *a["state_pool"].shape[1:3]), math.nan, dtype=a["x"].dtype)
        given = {**held, "state_indices": index, **options}
        assert kda_decode_fused(**given, out=out, implementation=name) is out
        poison.check()
        results.append((out, held["conv_pool"], held["state_pool"]))
    limit = 1e-5 if a["x"].dtype == torch.float32 else 6e-3
    for got, right in zip(*results):
        assert relative_error(got, right.double()) <= limit
    assert bits_equal(results[0][1], results[1][1])
    rest = [i for i in range(SLOTS) if i not in index.tolist()]
    assert bits_equal(results[0][2][rest], a["state_pool"][rest])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0, "allow_neg_eigval": True, "scale": 0.7}], ids=str)
def test_it_is_eagers(sizes: tuple[int, int, int, int], options: dict) -> None:
    both(arguments(sizes), torch.tensor([4, 0, 2]), **options)


@pytest.mark.parametrize("absent", ["conv_bias", "output_gate", "norm_weight", "dt_bias"])
def test_without_one_of_its_tensors(absent: str) -> None:
    both({**arguments(SIZES["blocks of V"]), absent: None}, torch.tensor([4, 0, 2]), norm_eps=1e-2)


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_widths_and_fp16(width: int) -> None:
    both(arguments(SIZES["groups"], torch.float16, width), torch.tensor([4, 0, 2], dtype=torch.int32))


def test_finished_gates_and_no_norm() -> None:
    a = arguments(SIZES["groups"])
    a["g"], a["beta"] = -a["g"].abs(), a["beta"].sigmoid()
    both(a, torch.tensor([4, 0, 2]), gate_is_raw=False, beta_is_logits=False, normalize_qk=False)


@pytest.mark.parametrize("null, index", [(-1, [4, -1, 77]), (0, [0, 3, -2]), (3, [3, 3, 3])], ids=str)
def test_null_rows(null: int, index: list[int]) -> None:
    a = arguments(SIZES["groups"])
    dead = [n for n, i in enumerate(index) if i == null or not 0 <= i < SLOTS]
    for name in ("x", "g", "beta", "output_gate"):
        a[name][dead] = math.nan
    table = torch.tensor([index, index]).t()
    before = a["state_pool"].clone()
    out = kda_decode_fused(**a, state_indices=table[:, 1], null_index=null, implementation="portable")
    assert not out[dead].any() and torch.isfinite(out).all()
    alive = [index[n] for n in range(3) if n not in dead]
    rest = [i for i in range(SLOTS) if i not in alive]
    assert bits_equal(a["state_pool"][rest], before[rest]) and torch.isfinite(a["conv_pool"]).all()
    assert not any(bits_equal(a["state_pool"][i], before[i]) for i in alive)


def test_pools_and_inputs_of_any_strides() -> None:
    a, plain = arguments(SIZES["groups"]), arguments(SIZES["groups"])
    index = torch.tensor([4, 0, 2])
    expected = kda_decode_fused(**plain, state_indices=index, implementation="portable")
    wide = torch.full((SLOTS, 4, 20, 48), math.nan)
    turned = torch.full((SLOTS, 5, a["x"].shape[1]), math.nan)
    a["state_pool"] = wide[..., ::2].copy_(a["state_pool"])
    a["conv_pool"] = turned[:, 1:4].transpose(1, 2).copy_(a["conv_pool"])
    a["x"] = torch.cat([a["x"], a["x"] * math.nan], 1)[:, : a["x"].shape[1]]
    a["conv_weight"] = a["conv_weight"].t().contiguous().t()
    a["output_gate"] = a["output_gate"].transpose(0, 1).contiguous().transpose(0, 1)
    a["g"], a["beta"] = a["g"][None], a["beta"].repeat_interleave(2, 1)[:, ::2][None]
    out = torch.full((3, 6, 20), math.nan)[:, 1:5]
    assert kda_decode_fused(**a, state_indices=index, out=out, implementation="portable") is out
    assert bits_equal(out.contiguous(), expected)
    assert bits_equal(a["state_pool"].contiguous(), plain["state_pool"])
    assert bits_equal(a["conv_pool"].contiguous(), plain["conv_pool"])
    assert wide[..., 1::2].isnan().all() and turned[:, [0, 4]].isnan().all()


def test_a_second_call_goes_by_the_first_only_where_it_looks_the_same() -> None:
    index = torch.tensor([4, 0, 2])
    results = []
    for strided in (False, True, False):
        a = arguments(SIZES["groups"])
        a["x"] = torch.stack([a["x"]] * 2, 1)[:, 1] if strided else a["x"]
        out = kda_decode_fused(**a, state_indices=index, implementation="portable")
        results.append((out, a["state_pool"], a["conv_pool"]))
    for other in results[1:]:
        assert all(bits_equal(x, y) for x, y in zip(results[0], other))


def test_what_is_passed_by_position() -> None:
    from cula.ops.kda.decode.portable import serving_step

    names = list(serving_step.serving_kernel.arg_names)
    count = names.index("x_n")
    assert names[count : count + len(serving_step.INTEGERS)] == serving_step.INTEGERS
    seen = []
    real = serving_step.prepare
    try:
        serving_step.prepare = lambda *args: seen.append(real(*args)) or seen[-1]
        kda_decode_fused(
            **arguments(SIZES["one block"]), state_indices=torch.tensor([1, 2, 3]), norm_eps=0.25,
            implementation="portable",
        )  # fmt: skip
    finally:
        serving_step.prepare = real
    (made,) = seen
    assert len(made.integers) == len(serving_step.INTEGERS)
    assert list(made.constants) == names[count + len(made.integers) + len(made.scalars) :]
    assert [names[i] for i in made.aligned] == ["dt_bias", "pool"]
    assert set(names[:count]) - {"dt_bias", "pool"} == set(serving_step.SCALARS)
