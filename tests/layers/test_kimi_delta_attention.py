"""KimiDeltaAttention: every way in agrees, sequences stay apart, parameters learn, wrong input is refused."""

from __future__ import annotations

import pytest
import torch

import cula
from cula.layers import KDACache, KimiDeltaAttention

VARIANTS = {
    "plain": {"num_heads": 2, "head_dim": 16},
    "gva-bound": {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "head_v_dim": 24, "lower_bound": -5.0},
    "bias-neg": {"num_heads": 1, "head_dim": 32, "conv_size": 3, "conv_bias": True, "allow_neg_eigval": True},
}
WIDTH = 40


def make(variant: str = "plain", **extra) -> KimiDeltaAttention:
    torch.manual_seed(7)
    layer = KimiDeltaAttention(WIDTH, **VARIANTS[variant], **extra)
    if layer.q_conv1d.bias is not None:
        torch.nn.init.normal_(layer.v_conv1d.bias)
    return layer


def close(a: torch.Tensor, b: torch.Tensor, bound: float = 2e-5) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= bound * b.abs().max().clamp(min=1e-3)


def same(a: KDACache, b: KDACache) -> None:
    close(a.state_pool, b.state_pool)
    close(a.conv_pool, b.conv_pool)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_equals_forward(variant: str) -> None:
    layer, x = make(variant), torch.randn(3, 70, WIDTH)
    cache = layer.allocate_cache(5)
    close(layer.prefill(x, cache, [4, 0, 2]), layer(x).detach())
    assert cache.state_pool[[1, 3]].abs().max() == 0
    assert cache.conv_pool[[1, 3]].abs().max() == 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(1, 69), (2, 1, 67), (64, 6), (17, 30, 23)], ids=str)
def test_chunked_prefill_equals_one_shot(variant: str, sizes: tuple[int, ...]) -> None:
    layer, x = make(variant), torch.randn(2, 70, WIDTH)
    whole, pieces = layer.allocate_cache(3), layer.allocate_cache(3)
    slots = torch.tensor([2, 1], dtype=torch.int32)
    once = layer.prefill(x, whole, slots)
    close(torch.cat([layer.prefill(part, pieces, slots) for part in x.split(sizes, 1)], 1), once)
    same(pieces, whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_equal_prefill(variant: str) -> None:
    layer, x = make(variant), torch.randn(3, 21, WIDTH)
    whole, stepped = layer.allocate_cache(4), layer.allocate_cache(4)
    slots = torch.tensor([3, 0, 1])
    once = layer.prefill(x, whole, slots)
    close(torch.stack([layer.step(token, stepped, slots) for token in x.unbind(1)], 1), once)
    same(stepped, whole)


def test_step_keeps_the_form_of_x() -> None:
    layer, cache = make(), make().allocate_cache(2)
    assert layer.step(torch.randn(2, WIDTH), cache, [0, 1]).shape == (2, WIDTH)
    assert layer.step(torch.randn(2, 1, WIDTH), cache, [0, 1]).shape == (2, 1, WIDTH)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_verify_commits_what_was_accepted(variant: str, as_tensor: bool) -> None:
    layer, x = make(variant), torch.randn(3, 18, WIDTH)
    cache = layer.allocate_cache(4)
    slots, accepted = [2, 3, 0], [0, 3, 8]
    layer.prefill(x[:, :10], cache, slots)
    before = cache.clone()
    y, draft = layer.verify(x[:, 10:], cache, slots)
    close(y, layer(x)[:, 10:].detach())
    assert torch.equal(before.state_pool, cache.state_pool)
    assert torch.equal(before.conv_pool, cache.conv_pool)
    draft.commit(cache, torch.tensor(accepted) if as_tensor else accepted)
    expected = layer.allocate_cache(4)
    for row, (slot, count) in enumerate(zip(slots, accepted)):
        layer.prefill(x[row : row + 1, : 10 + count], expected, [slot])
    same(cache, expected)


def test_packed_sequences_are_isolated() -> None:
    layer = make("gva-bound")
    lengths = [37, 0, 2, 1, 25]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    cu_seqlens = torch.tensor([0, *ends])
    x = torch.randn(1, ends[-1] + 3, WIDTH)
    alone = torch.cat([layer(x[:, b - n : b]) for n, b in zip(lengths, ends) if n], 1)
    packed = layer(x, cu_seqlens)
    close(packed[:, : ends[-1]].detach(), alone.detach())
    assert packed[:, ends[-1] :].abs().max() == 0
    changed = x.clone()
    changed[:, :37] += 1.0
    assert torch.equal(layer(changed, cu_seqlens)[:, 37:], packed[:, 37:])


def test_packed_gradients_are_those_of_separate_sequences() -> None:
    layer = make()
    x = torch.randn(1, 30, WIDTH)
    cu_seqlens = torch.tensor([0, 2, 19, 30], dtype=torch.int32)
    weight = torch.randn(1, 30, WIDTH)
    found = torch.autograd.grad((layer(x, cu_seqlens) * weight).sum(), list(layer.parameters()))
    loss = sum((layer(x[:, a:b]) * weight[:, a:b]).sum() for a, b in [(0, 2), (2, 19), (19, 30)])
    expected = torch.autograd.grad(loss, list(layer.parameters()))
    for one, other in zip(found, expected):
        close(one, other, 1e-4)


def test_packed_prefill_continues_each_sequence() -> None:
    layer = make("bias-neg")
    cache, expected = layer.allocate_cache(4), layer.allocate_cache(4)
    first, second = torch.randn(1, 12, WIDTH), torch.randn(1, 20, WIDTH)
    layer.prefill(first, cache, [3, 1], torch.tensor([0, 1, 12]))
    y = layer.prefill(second, cache, [0, 1, 3], torch.tensor([0, 5, 5, 20]))
    layer.prefill(first[:, 1:], expected, [1])
    layer.prefill(second[:, :5], expected, [0])
    long = layer.prefill(torch.cat([first[:, :1], second[:, 5:]], 1), expected, [3])
    close(y[:, 5:], long[:, 1:])
    same(cache, expected)


def test_has_initial_state_false_ignores_what_the_slot_holds() -> None:
    layer, x = make(), torch.randn(2, 9, WIDTH)
    cache = layer.allocate_cache(2)
    layer.prefill(x, cache, [0, 1])
    cache.state_pool[0] = float("nan")
    cache.conv_pool[0] = float("nan")
    y = layer.prefill(x, cache, [0, 1], has_initial_state=torch.tensor([False, True]))
    close(y[:1], layer(x[:1]).detach())
    close(y[1:], layer(torch.cat([x[1:], x[1:]], 1))[:, 9:].detach())


def test_padding_rows_touch_no_slot() -> None:
    layer, x = make(), torch.randn(3, 5, WIDTH)
    cache, expected = layer.allocate_cache(2), layer.allocate_cache(2)
    slots = torch.tensor([-1, 1, 99])
    layer.prefill(x, cache, slots)
    layer.prefill(x[1:2], expected, [1])
    same(cache, expected)
    y = layer.step(x[:, 0], cache, slots)
    layer.step(x[1:2, 0], expected, [1])
    assert y[[0, 2]].abs().max() == 0
    same(cache, expected)
    _, draft = layer.verify(x, cache, slots)
    draft.commit(cache, [5, 5, 5])
    layer.prefill(x[1:2], expected, [1])
    same(cache, expected)


def test_reset_copy_and_clone() -> None:
    layer, x = make(), torch.randn(2, 8, WIDTH)
    cache = layer.allocate_cache(4)
    layer.prefill(x, cache, [0, 1])
    kept = cache.clone()
    cache.copy([0, 1, 0], [2, 3, 1])
    for target, source in ((2, 0), (3, 1), (1, 0)):
        assert torch.equal(cache.state_pool[target], kept.state_pool[source])
        assert torch.equal(cache.conv_pool[target], kept.conv_pool[source])
    cache.reset([2])
    assert cache.state_pool[2].abs().max() == 0
    assert torch.equal(cache.state_pool[3], kept.state_pool[1])
    close(layer.prefill(x[:1], cache, [2]), layer(x[:1]).detach())
    cache.reset()
    assert cache.state_pool.abs().max() == 0
    assert cache.conv_pool.abs().max() == 0
    assert kept.state_pool.abs().max() > 0
    assert cache.nbytes == 4 * (2 * 16 * 16 + 96 * 3) * 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_reach_every_parameter(variant: str) -> None:
    layer = make(variant)
    x = torch.randn(2, 33, WIDTH, requires_grad=True)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert x.grad.abs().min(-1).values.min() >= 0
    assert x.grad.abs().sum(-1).min() > 0


def test_initial_values() -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(64, num_heads=4, head_dim=32)
    assert layer.A_log.min() >= 0.0
    assert layer.A_log.max() <= 2.7726
    dt = torch.nn.functional.softplus(layer.dt_bias)
    assert dt.min() >= 9.9e-4
    assert dt.max() <= 0.1001
    assert layer.A_log.shape == (4,)
    assert layer.dt_bias.shape == (128,)


def test_the_state_dict_restores_the_layer() -> None:
    layer, other = make("gva-bound"), KimiDeltaAttention(WIDTH, **VARIANTS["gva-bound"])
    x = torch.randn(1, 6, WIDTH)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


def test_bf16_layer_keeps_fp32_state() -> None:
    layer = make(dtype=torch.bfloat16)
    assert layer.A_log.dtype == torch.float32
    x = torch.randn(2, 20, WIDTH, dtype=torch.bfloat16)
    cache = layer.allocate_cache(2)
    y = layer.prefill(x, cache, [0, 1])
    assert y.dtype == torch.bfloat16
    assert cache.state_pool.dtype == torch.float32
    assert cache.conv_pool.dtype == torch.bfloat16
    stepped = layer.allocate_cache(2)
    z = torch.stack([layer.step(token, stepped, [0, 1]) for token in x.unbind(1)], 1)
    close(z.float(), y.float(), 5e-2)


BAD_SIZES = [
    ({"num_heads": 3, "num_v_heads": 4}, cula.ShapeError, "num_v_heads must be a multiple of num_heads=3, got 4"),
    ({"num_heads": 0}, cula.RangeError, "num_heads must be at least 1, got 0"),
    ({"num_heads": 1, "conv_size": 1}, cula.RangeError, "conv_size must be at least 2, got 1"),
    ({"num_heads": 1, "lower_bound": 1.0}, cula.RangeError, "lower_bound must be None or a finite number below 0"),
]


@pytest.mark.parametrize("sizes, error, sentence", BAD_SIZES)
def test_bad_sizes(sizes: dict, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        KimiDeltaAttention(WIDTH, **sizes)


def _other_cache(layer: KimiDeltaAttention) -> None:
    layer.step(torch.randn(1, WIDTH), make("gva-bound").allocate_cache(1), [0])


BAD_CALLS = [
    (lambda m, c: m(torch.randn(2, 3, 7)), cula.ShapeError, r"x must be \[B,T,40\], got \(2, 3, 7\)"),
    (lambda m, c: m(torch.randn(1, 3, WIDTH).double()), cula.DtypeError, "x must have the dtype of the parameters"),
    (lambda m, c: m(torch.randn(2, 3, WIDTH), torch.tensor([0, 3])), cula.ShapeError, "with cu_seqlens"),
    (lambda m, c: m(torch.randn(1, 3, WIDTH), torch.tensor([0.0, 3])), cula.DtypeError, "cu_seqlens must be int32"),
    (lambda m, c: m(torch.randn(1, 3, WIDTH), torch.tensor([1, 3])), cula.CulaError, "cu_seqlens"),
    (lambda m, c: m(torch.randn(1, 3, WIDTH), torch.tensor([0, 4])), cula.CulaError, "cu_seqlens"),
    (
        lambda m, c: m.prefill(torch.randn(2, 3, WIDTH), c, [0]),
        cula.ShapeError,
        r"one element per sequence \(2\), got 1",
    ),
    (lambda m, c: m.prefill(torch.randn(1, 3, WIDTH), c, [4]), cula.RangeError, r"slots must lie in 0\.\.1"),
    (lambda m, c: m.step(torch.randn(1, 3, WIDTH), c, [0]), cula.ShapeError, "verify takes more tokens"),
    (
        lambda m, c: m.step(torch.randn(1, WIDTH), c, torch.tensor([0.0])),
        cula.DtypeError,
        "slots must be int32 or int64",
    ),
    (lambda m, c: m.verify(torch.randn(1, 17, WIDTH), c, [0]), cula.ShapeError, "1 to 16 draft tokens, got 17"),
    (lambda m, c: _other_cache(m), cula.ShapeError, "cache was allocated for another layer"),
    (lambda m, c: m.allocate_cache(0), cula.RangeError, "slots must be at least 1, got 0"),
    (lambda m, c: m.allocate_cache(1, state_dtype=torch.float16), cula.DtypeError, "state_dtype must be"),
    (lambda m, c: c.copy([0], [0, 1]), cula.ShapeError, "equally long, got 1 and 2"),
    (
        lambda m, c: m.verify(torch.randn(1, 2, WIDTH), c, [0])[1].commit(c, [3]),
        cula.RangeError,
        r"accepted must lie in 0\.\.2, got 3",
    ),
]


@pytest.mark.parametrize("call, error, sentence", BAD_CALLS, ids=[case[2][:30] for case in BAD_CALLS])
def test_bad_calls_say_what_is_needed(call, error: type[Exception], sentence: str) -> None:
    layer = make()
    cache = layer.allocate_cache(2)
    with pytest.raises(error, match=sentence):
        call(layer, cache)
    assert cache.state_pool.abs().max() == 0
    assert cache.conv_pool.abs().max() == 0


def test_lightning_is_absent_with_a_sentence() -> None:
    import cula.layers

    with pytest.raises(AttributeError, match="not in this version"):
        cula.layers.LightningAttention  # noqa: B018
