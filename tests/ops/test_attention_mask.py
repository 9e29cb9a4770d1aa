"""A mask of booleans gives the bits that the same masking has by other options, in any call and on any axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK
from tests.ops.attention_cases import HEADS, OPTIONS, Pool, Request, attend, pool, sinks, whole
from tests.support.bits import assert_same_bits, same_bits

every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def seen(queries: int, keys: int, first: int = 0, **options: Any) -> np.ndarray:
    """`[T, s]`: what options of `ops.attention` leave the queries from position `first` on."""
    distance = np.arange(keys) - (first + np.arange(queries))[:, None]
    mask = distance <= 0 if options.get("causal", True) else np.ones(distance.shape, bool)
    return mask & (distance > -options["window"]) if "window" in options else mask


def drawn(*shape: int) -> np.ndarray:
    """A mask in which half is seen, and of some queries all, nothing, and single keys."""
    mask = np.random.default_rng(shape).random(shape) < 0.5
    mask[..., 0, :], mask[..., 1, :], mask[..., 2, :] = True, False, np.arange(shape[-1]) == shape[-1] // 2
    return mask


def given(mask: np.ndarray) -> jax.Array:
    """A mask of two axes for all requests and heads, or one of four, as `ops.attention` takes it."""
    return jnp.asarray(mask if mask.ndim == 4 else mask[None, None])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in OPTIONS if name not in ("window of one", "scale", "sinks")]
    + [("everything", "bfloat16"), ("causal", "float16")],
)
def test_a_mask_has_the_bits_of_the_options_that_mask_alike(name: str, dtype: str) -> None:
    request, options = Request.random(270, dtype), OPTIONS[name]
    expected = whole(request, **options)
    mask = given(seen(270, 270, **options))
    assert_same_bits(whole(request, mask=mask, **options), expected)
    rest = {key: value for key, value in options.items() if key != "window"}
    assert_same_bits(whole(request, mask=mask, **rest), expected)
    assert_same_bits(whole(request, mask=mask, **rest | {"causal": False}), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_keys_that_a_mask_leaves_out_are_like_keys_behind_the_length(dtype: str) -> None:
    request = Request.random(270, dtype)
    q, cached = request.q[None, :9], pool([request])
    for length in (1, 127, 128, 200):
        for keys in (129, 3 * KV_BLOCK):
            expected = attend(q, cached, [261], [min(length, keys)], causal=False)
            mask = np.broadcast_to(np.arange(keys) < length, (9, keys))
            assert_same_bits(attend(q, cached, [261], [270], causal=False, mask=given(mask)), expected)


def test_another_mask_gives_other_bits() -> None:
    request, mask = Request.random(140), drawn(140, 140)
    changed = mask.copy()
    changed[139, 7] ^= True
    some, other = (whole(request, mask=given(x)) for x in (mask, changed))
    assert_same_bits(other[:139], some[:139])
    assert not same_bits(other[139], some[139])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dtype", "heads"),
    [("everything", "float32", HEADS), ("causal", "float32", 1), ("not causal", "bfloat16", HEADS)],
)
def test_chunks_with_their_rows_of_the_mask_have_the_bits_of_the_whole(name: str, dtype: str, heads: int) -> None:
    request, mask, options = Request.random(160, dtype), drawn(1, heads, 160, 160), OPTIONS[name]
    expected = whole(request, mask=given(mask), **options)
    cached = pool([request]).on_device()
    for size in (1, 80):
        for start in range(0, 160, size):
            rows = slice(start, start + size)
            # Also where the mask ends with the keys that there are by then: each a program of its own, so not all.
            end = 160 if options.get("causal") is False else start + size
            for keys in {end if size > 1 or start in (KV_BLOCK - 1, KV_BLOCK) else 160, 160}:
                part = given(mask[:, :, rows, :keys])
                o = attend(request.q[None, rows], cached, [start], [end], mask=part, **options)[0]
                assert_same_bits(o, expected[rows])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["everything", "causal", "not causal"])
def test_each_request_and_head_has_the_bits_of_its_own_mask_alone(name: str) -> None:
    options, lengths = OPTIONS[name], (160, 17, 160)
    requests = [Request.random(length, seed=seed) for seed, length in enumerate(lengths)]
    q = np.stack([np.pad(r.q, ((0, 160 - len(r)), (0, 0), (0, 0))) for r in requests])
    cached = pool(requests, shuffled=True, rest=np.nan)
    masks = drawn(3, HEADS, 160, 160)
    for per_request, per_head in ((True, True), (False, True), (True, False), (False, False)):
        mask = masks[: None if per_request else 1, : None if per_head else 1]
        together = attend(q, cached, [0] * 3, lengths, mask=given(mask), **options)
        in_full = np.broadcast_to(mask, masks.shape)
        assert_same_bits(attend(q, cached, [0] * 3, lengths, mask=given(in_full), **options), together)
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            for head in range(HEADS):
                part = given(in_full[row, head, :length, :length])
                alone = attend(request.q[None], cached.alone(row), [0], [length], mask=part, **options)
                assert_same_bits(together[row, :length, head], alone[0, :, head])


@pytest.mark.sampled(1)
@every_dtype
def test_queries_that_a_mask_leaves_nothing_give_zeros(dtype: str) -> None:
    request, mask = Request.random(140, dtype), drawn(140, 140)
    mask[130:] = False
    for options in ({}, {"sinks": True}, {"causal": False, "soft_cap": 2.0}):
        o = whole(request, mask=given(mask), **options)
        nothing = [1, *range(130, 140), *([] if options.get("causal") is False else [2])]
        assert_same_bits(o[nothing], np.zeros_like(o[nothing]))
        assert np.all(np.any(o[3:130] != 0, axis=(1, 2)))


def test_a_mask_shows_nothing_of_what_is_behind_the_length() -> None:
    request = Request.random(140)
    cached = pool([request], columns=3, rest=np.nan, beyond=10**6)
    everything = np.ones((140, 3 * KV_BLOCK), bool)
    o = attend(request.q[None], cached, [0], [140], causal=False, mask=given(everything))[0]
    assert_same_bits(o, whole(request, causal=False))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mapped", ["q mask", "mask", "q k v"])
def test_vmap_gives_the_bits_of_each(mapped: str) -> None:
    requests = [Request.random(140, seed=seed) for seed in range(3)]
    stacks = {name: np.stack([getattr(r, name)[None] for r in requests]) for name in "qkv"}
    stacks["mask"] = drawn(3, 1, HEADS, 140, 140)
    operands = {name: x if name in mapped.split() else x[0] for name, x in stacks.items()}
    axes = {name: 0 if name in mapped.split() else None for name in stacks}

    @detjax.jit
    def with_gradients(operands: dict[str, jax.Array]) -> Any:
        mask = operands["mask"]
        arrays = {name: operands[name] for name in "qkv"}
        o, pullback = jax.vjp(lambda arrays: ops.dot_product_attention(**arrays, mask=mask), arrays)
        return o, pullback(2 * o)

    results = detjax.jit(jax.vmap(with_gradients, in_axes=(axes,)))(operands)
    for i in range(3):
        alone = with_gradients({name: x[i] if axes[name] == 0 else x for name, x in operands.items()})
        assert_same_bits(jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], results), alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["everything", "causal", "window"])
def test_gradients_have_the_bits_of_the_options_that_mask_alike(name: str) -> None:
    request, options = Request.random(160), OPTIONS[name]
    logits = {"sinks": sinks(HEADS, "float32")} if options.get("sinks") else {}
    rest = {key: value for key, value in options.items() if key not in ("window", "sinks")}
    arrays = {name: jnp.asarray(getattr(request, name))[None] for name in "qkv"} | logits

    def gradients(**options: Any) -> Any:
        def fn(arrays: dict[str, jax.Array]) -> Any:
            o, pullback = jax.vjp(lambda arrays: ops.dot_product_attention(**arrays, **options), arrays)
            return pullback(2 * o)

        return detjax.jit(fn)(arrays)

    expected = gradients(**{key: value for key, value in options.items() if key != "sinks"})
    mask = given(seen(160, 160, **options))
    assert_same_bits(gradients(mask=mask, **rest | {"causal": False}), expected)


def test_a_mask_as_a_constant_of_the_program_gives_the_same_bits() -> None:
    request, mask = Request.random(140), given(drawn(140, 140))
    q, k, v = (jnp.asarray(x)[None] for x in (request.q, request.k, request.v))
    expected = whole(request, mask=mask)
    assert_same_bits(jax.jit(lambda q: ops.dot_product_attention(q, k, v, mask=mask))(q)[0], expected)
    assert_same_bits(jax.jit(lambda m: ops.dot_product_attention(q, k, v, mask=m))(mask)[0], expected)


def test_a_mask_over_quantized_pages_has_the_bits_of_what_they_are_read_as() -> None:
    request, mask = Request.random(140, width=32), given(drawn(140, 140))
    cached = pool([request])
    pages = [ops.quantize_kv(jnp.asarray(x), "int8") for x in (cached.k_pages, cached.v_pages)]
    dense = Pool(*(ops.dequantize_kv(x, "float32") for x in pages), cached.page_table)  # pyright: ignore[reportCallIssue]
    o = ops.attention(jnp.asarray(request.q)[None], ops.KVPages(*pages), cached.queries([0], [140]), mask=mask)
    assert_same_bits(o, attend(request.q[None], dense, [0], [140], mask=mask))
