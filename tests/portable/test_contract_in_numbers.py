"""Numbers that show the orders and roundings of the contracts: different ones would give different results here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KEY_GROUPS, KEY_LANES, KV_BLOCK, LANE_GROUP, LANES, WEIGHT_GRADIENT_TOKENS
from detjax.operands.attention import AttentionOperands
from detjax.operands.options import Masking
from detjax.operands.rounding import rounded
from detjax.portable import attention as portable_attention
from detjax.portable.tiles import fold_rows, map_rows, row_sum
from tests.support.bits import assert_same_bits, same_bits


def summed_by_lanes(x: np.ndarray) -> np.ndarray:
    """Row sums in the order of `contract.LANES`, one NumPy addition after another."""
    lanes = np.zeros((len(x), LANES), np.float32)
    for start in range(0, x.shape[1], LANES):
        part = x[:, start : start + LANES]
        lanes[:, : part.shape[1]] += part
    first, second, third, fourth = (lanes[:, lane::LANE_GROUP] for lane in range(LANE_GROUP))
    sums = ((first + second) + third) + fourth
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums


@pytest.mark.parametrize("width", [1, 3, 80, 128, 129, 515, 4096, 4097])
def test_rows_are_summed_lane_by_lane(width: int) -> None:
    x = np.random.default_rng(0).standard_normal((16, width)).astype(np.float32)
    expected = summed_by_lanes(x)
    assert_same_bits(jax.jit(row_sum)(x), expected)
    assert_same_bits(map_rows(lambda x, _: row_sum(x), jnp.asarray(x), None), expected)
    # Squares are rounded before they are added, whatever instructions the processor has.
    squares = detjax.jit(lambda x: map_rows(lambda x, _: row_sum(x * x), x, None))(x)
    assert_same_bits(squares, summed_by_lanes(x * x))


def test_xlas_own_sum_has_a_different_order() -> None:
    x = np.random.default_rng(0).standard_normal((16, 4097)).astype(np.float32)
    assert not same_bits(jax.jit(lambda x: jnp.sum(x, axis=-1, keepdims=True))(x), summed_by_lanes(x))


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_one_tile_runs_in_the_same_loop_as_many(rows: int) -> None:
    compiled = jax.jit(lambda x: map_rows(lambda x, _: x * 2, x, None)).lower(jnp.ones((rows, 3))).compile()
    assert "while" in compiled.as_text()


def test_tiles_see_zeros_after_the_last_row_and_the_order_of_rows_is_kept() -> None:
    x = jnp.arange(1.0, 20.0)[:, None]
    seen = map_rows(lambda x, _: jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape), x, None)
    assert_same_bits(seen[:, 0], np.float32([136.0] * 16 + [54.0] * 3))
    last = fold_rows(lambda carry, x, _: carry * 10 + x[0], jnp.zeros(1), x[:5], None, size=1)
    assert_same_bits(last, np.float32([12345.0]))


def test_a_matmul_rounds_once_after_bias_and_residual() -> None:
    x, w = jnp.ones((1, 256), jnp.bfloat16), jnp.ones((256, 1), jnp.bfloat16)
    one = jnp.ones((1, 1), jnp.bfloat16)
    y = ops.matmul(x, w, bias=one[0], residual=one)
    # In bfloat16 256 + 1 is 256, and 256 + 1 again.
    assert_same_bits(y, jnp.full((1, 1), 258, jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_matmul_rounds_the_accumulator_it_would_give_in_float32(dtype: str) -> None:
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape), dtype) for shape in ((17, 300), (300, 40)))
    assert_same_bits(ops.matmul(x, w), rounded(ops.matmul(x, w, out_dtype="float32"), dtype))


@pytest.mark.parametrize(("token_of_the_one", "expected"), [(17, 0.0), (32, 1.0)])
def test_weight_gradients_add_tokens_in_ascending_steps(token_of_the_one: int, expected: float) -> None:
    dy = np.zeros((33, 1), np.float32)
    dy[0], dy[WEIGHT_GRADIENT_TOKENS], dy[token_of_the_one] = 1e8, -1e8, 1.0
    x = jnp.ones((33, 1))
    dw, db = jax.grad(lambda w, b: (ops.matmul(x, w, bias=b) * dy).sum(), argnums=(0, 1))(jnp.ones((1, 1)), jnp.ones(1))
    # The second step's sum loses a 1 next to -1e8; the third step's sum keeps it.
    assert (dw[0, 0], db[0]) == (expected, expected)


def test_embedding_gradients_add_tokens_one_by_one() -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 70).astype(np.int32)
    dy = np.random.default_rng(1).standard_normal((70, 5)).astype(np.float32)
    table = jnp.zeros((3, 5))
    gradient = jax.grad(lambda table: (ops.embed(jnp.asarray(tokens), table) * dy).sum())(table)
    expected = np.zeros((3, 5), np.float32)
    for token, row in zip(tokens, dy, strict=True):
        expected[token] += row
    assert_same_bits(gradient, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_norm_with_a_residual_has_the_bits_of_its_two_steps(dtype: str) -> None:
    random = np.random.default_rng(0)
    x, residual, weight = (jnp.asarray(random.standard_normal(shape), dtype) for shape in ((9, 80), (9, 80), (80,)))
    h = x + residual
    assert_same_bits(ops.rms_norm(x, weight, eps=1e-6, residual=residual), (ops.rms_norm(h, weight, eps=1e-6), h))


def summed_by_threads(p: np.ndarray) -> np.ndarray:
    """Row sums `[..., 1]` of a block as Hopper's threads add them: in the matrix unit's accumulators thread t of four
    holds columns 8 j + 2 t and 8 j + 2 t + 1 of a row."""
    columns = p.reshape(*p.shape[:-1], KV_BLOCK // 8, 4, 2)
    total = None
    for first in range(0, KV_BLOCK // 16, 2):
        group = columns[..., first, :, :]
        for j in (first + 1, first + 8, first + 9):
            group = group + columns[..., j, :, :]
        total = group if total is None else total + group
    threads = total[..., 0] + total[..., 1]
    return ((threads[..., 0] + threads[..., 1]) + (threads[..., 2] + threads[..., 3]))[..., None]


def test_a_blocks_weights_are_summed_as_hoppers_threads_add_them() -> None:
    p = np.random.default_rng(0).random((2, 16, KV_BLOCK), np.float32)
    expected = summed_by_threads(p)
    assert (KEY_LANES, KEY_GROUPS) == (8, 4)
    assert_same_bits(jax.jit(portable_attention.block_sum)(p), expected)
    assert_same_bits(map_rows(lambda p, _: portable_attention.block_sum(p), jnp.asarray(p), None, size=1), expected)
    # A product is rounded before it is added, whatever instructions the processor has.
    squares = detjax.jit(lambda p: map_rows(lambda p, _: portable_attention.block_sum(p * p), p, None, size=1))(p)
    assert_same_bits(squares, summed_by_threads(p * p))
    for other in (row_sum(jnp.asarray(p)), p.sum(axis=-1, keepdims=True)):
        assert not same_bits(other, expected)


@pytest.mark.parametrize(
    ("keys", "meet_before_the_one"),
    [
        ((1, 17), True),
        ((9, 1), True),
        ((16, 24), True),
        ((2, 3), True),
        ((8, 24), False),
        ((16, 1), False),
        ((1, 3), False),
    ],
)
def test_attention_sums_weights_in_that_order(keys: tuple[int, int], meet_before_the_one: bool) -> None:
    # Next to 1 a weight of 0.6 * 2^-24 is lost, and twice that is not.
    scores = np.full(KV_BLOCK, -1e9, np.float32)
    scores[0], scores[list(keys)] = 0, np.log(0.6 * 2.0**-24)
    k_pages = jnp.asarray(scores).reshape(1, 1, KV_BLOCK, 1)
    queries = ops.Queries(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, KV_BLOCK, jnp.int32))
    masking = Masking(scale=1.0, causal=False)
    forward = portable_attention.forward
    kv = ops.KVPages(k_pages, k_pages)
    _, log2_normalizer = forward(AttentionOperands(jnp.ones((1, 1, 1, 1)), kv, queries), masking=masking)
    assert (log2_normalizer.item() > 0) == meet_before_the_one


def _attention_of_nothing(values: np.ndarray) -> jax.Array:
    """Queries of zeros: every key weighs the same, and weights are exactly 1."""
    q = jnp.zeros((1, 1, 1, 8), values.dtype)
    k = jnp.ones((1, len(values), 1, 8), values.dtype)
    return ops.dot_product_attention(q, k, jnp.asarray(values)[None, :, None, :])[0, 0, 0]


@pytest.mark.parametrize("keys", [3, KV_BLOCK + 41, 3 * KV_BLOCK - 1])
def test_attention_ends_with_a_product_by_the_reciprocal(keys: int) -> None:
    values = np.random.default_rng(0).integers(-9, 10, (keys, 16)).astype(np.float32)
    total = values.sum(axis=0)
    expected = total * (np.float32(1) / np.float32(keys))
    assert_same_bits(_attention_of_nothing(values), expected + np.float32(0))
    assert not same_bits(expected, total / np.float32(keys))


def test_attention_writes_zeros_without_a_sign() -> None:
    values = np.zeros((40, 4), np.float16)
    values[0] = -6e-8  # a 40th of this is below what float16 has
    assert_same_bits(_attention_of_nothing(values), np.zeros(4, np.float16))


def test_attention_rounds_weights_to_the_dtype_of_the_values() -> None:
    # The weights are 1 and 1 - 2^-10, which bfloat16 makes 1: only then do the two values cancel.
    score = np.log(1 - 2.0**-10)
    q, v = (jnp.asarray(x, jnp.bfloat16).reshape(1, -1, 1, 1) for x in ([1.0], [1.0, -1.0]))
    k = jnp.asarray([0.0, score], jnp.bfloat16).reshape(1, 2, 1, 1)
    assert ops.dot_product_attention(q, k, v, scale=1.0).item() == 0
    in_float32 = (x.astype(jnp.float32) for x in (q, k, v))
    assert ops.dot_product_attention(*in_float32, scale=1.0).item() == pytest.approx(2.0**-11, rel=0.01)
