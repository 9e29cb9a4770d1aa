"""The Hopper kernels of gradients: numbers and bits in Pallas' interpreter, and order where there is a Hopper GPU."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.options import Epilogue
from detjax.ops import AccumulatedWeight, RotaryEmbedding
from detjax.pallas.hopper import elements, embedding, norm_gradient, ordered_sums, rope_gradient, token_sums
from detjax.pallas.hopper.matmul.kernel import Operands, product, product_keeping_sums
from detjax.pallas.hopper.matmul.plan import Schedule
from detjax.pallas.hopper.token_sums import CHAIN_SLOTS, CHAIN_STEPS
from detjax.portable import elements as portable_elements
from detjax.portable import embedding as portable_embedding
from detjax.rl.trainer.losses import ClippedRatio
from detjax.rl.trainer.microbatches import Microbatch
from detjax.rl.trainer.optimizers import adamw
from tests.pallas.hopper.interpreter import interpreted, lowered, normal
from tests.support.bits import assert_same_bits

CONTINUING = (
    Schedule(64, 64, "tokens"),
    Schedule(64, 64, "tokens", lines=2, cluster_n=2),
    Schedule(128, 64, "tokens", warpgroups=2),
    Schedule(64, 128, "tokens", cluster_m=2),
)


def added_in_order(start: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """The sum of rows in the contract's order: 16 rows left to right, then the steps one after the other."""
    terms = np.pad(terms, ((0, -len(terms) % 16), (0, 0)))
    for first in range(0, len(terms), 16):
        step = terms[first]
        for row in terms[first + 1 : first + 16]:
            step = step + row
        start = start + step
    return start


def close(actual: Any, expected: Any, tolerance: float) -> None:
    """Asserts that the largest error is small against the largest number."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a / np.abs(b).max(), b / np.abs(b).max(), atol=tolerance, rtol=0)


# --- sums over tokens -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 16), (37, 80), (200, 128), (16 * CHAIN_STEPS * (CHAIN_SLOTS + 1) + 5, 16), (65, 256)]
)
def test_tokens_are_added_in_the_contracts_order(rows: int, width: int) -> None:
    # Sums of few bfloat16 numbers are exact in float32, in any order.
    start, x = normal(width), normal(rows, width, seed=1)
    assert_same_bits(interpreted(token_sums.token_sums, start, x), added_in_order(start, x))


def test_a_chain_uses_its_slots_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("CHAIN_STEPS", 4), ("CHAIN_LOADS", 2)):
        monkeypatch.setattr(token_sums, name, number)
    start, x = normal(16), normal(16 * 4 * (CHAIN_SLOTS + 1) + 5, 16, seed=1)
    assert_same_bits(interpreted(lambda *arrays: token_sums.token_sums(*arrays), start, x), added_in_order(start, x))


@pytest.mark.hopper
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (1000, 80), (8192, 1024), (131072, 128)])
def test_the_device_adds_tokens_in_the_contracts_order(rows: int, width: int) -> None:
    start, x = normal(width), normal(rows, width, seed=1)
    assert_same_bits(np.asarray(detjax.jit(token_sums.token_sums)(start, x)), added_in_order(start, x))


# --- matmul -----------------------------------------------------------------------------------------------------------


def next_sums(dz: Any, x: Any, sums: Any, schedule: Schedule | None = None) -> np.ndarray:
    def fn(dz: jax.Array, x: jax.Array, sums: jax.Array) -> jax.Array:
        return product(
            Operands(dz, x, start=sums),
            token_layout="km",
            layout="kn",
            epilogue=Epilogue(),
            out_dtype="float32",
            schedule=schedule,
        )

    lowered(fn, dz, x, sums)
    return interpreted(fn, dz, x, sums)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("schedule", [None, *CONTINUING], ids=str)
def test_sums_of_products_continue(schedule: Schedule | None) -> None:
    dz, x, sums = normal(96, 256, dtype="bfloat16"), normal(96, 128, dtype="bfloat16", seed=1), normal(256, 128)
    expected = sums
    for token in range(len(x)):
        expected = expected + dz[token, :, None].astype(np.float32) * x[token].astype(np.float32)
    assert_same_bits(next_sums(dz, x, sums, schedule), expected)
    assert_same_bits(next_sums(dz[32:], x[32:], next_sums(dz[:32], x[:32], sums, schedule), schedule), expected)


@pytest.mark.parametrize("schedule", [Schedule(64, 64, "tokens", cluster_m=2), Schedule(64, 64)], ids=str)
def test_schedules_that_would_read_beyond_the_sums_are_refused(schedule: Schedule) -> None:
    dz, x, sums = normal(64, 192, dtype="bfloat16"), normal(64, 128, dtype="bfloat16"), normal(192, 128)
    with pytest.raises(ValueError, match="that divide the sums"):
        next_sums(dz, x, sums, schedule)


@pytest.mark.parametrize(
    ("schedule", "gated"),
    [
        (Schedule(16, 24), True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in itertools.product((None, Schedule(16, 24), Schedule(64, 24, "tokens")), (True, False))
        ),
    ],
    ids=str,
)
def test_the_sums_of_an_epilogue_are_kept(schedule: Schedule | None, gated: bool) -> None:
    parts = 2 if gated else 1
    x, w = normal(18, 64, dtype="bfloat16"), normal(parts, 40, 64, dtype="bfloat16")
    bias, epilogue = normal(parts, 40, dtype="bfloat16"), Epilogue("silu", gated)

    def fn(x: jax.Array, w: jax.Array, bias: jax.Array) -> Any:
        return product_keeping_sums(Operands(x, w, bias), layout="nk", epilogue=epilogue, schedule=schedule)

    y, z = interpreted(fn, x, w, bias)
    lowered(fn, x, w, bias)

    def alone(x: jax.Array, w: jax.Array, bias: jax.Array, epilogue: Epilogue = epilogue) -> jax.Array:
        return product(Operands(x, w, bias), layout="nk", epilogue=epilogue, out_dtype="bfloat16", schedule=schedule)

    assert_same_bits(y, interpreted(alone, x, w, bias))
    for part in range(parts):
        plain = interpreted(lambda *operands: alone(*operands, epilogue=Epilogue()), x, w[part], bias[part])
        assert_same_bits(z[part], plain)


# --- norms, heads and embeddings --------------------------------------------------------------------------------------


def norm_gradients(h: Any, weight: Any, dy: Any, dh: Any, total: Any) -> Any:
    return norm_gradient.backward(h, weight, dy, dh, total, eps=1e-5, weight_offset=0.5)


def exact_norm_gradients(h: Any, weight: Any, dy: Any, dh: Any, total: Any) -> Any:
    with jax.enable_x64(True):
        h, weight, dy, dh, total = (
            None if x is None else jnp.asarray(x, jnp.float64) for x in (h, weight, dy, dh, total)
        )

        def norm(h: jax.Array, weight: jax.Array) -> jax.Array:
            return h / jnp.sqrt((h**2).mean(axis=-1, keepdims=True) + 1e-5) * (weight[None] + 0.5)

        dx, dweight = jax.vjp(norm, h, weight)[1](dy)
        return np.asarray(dx if dh is None else dx + dh), np.asarray(total + dweight)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(7, 80, "float16"), (40, 128, "bfloat16"), (33, 1024, "bfloat16"), (5, 1152, "float32"), (3, 4096, "bfloat16")],
)
@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_norms_are_those_of_float64(rows: int, width: int, dtype: str, residual: bool) -> None:
    h, dy, dh = (normal(rows, width, dtype=dtype, seed=seed) for seed in range(3))
    operands = h, normal(width, dtype=dtype), dy, dh if residual else None, normal(width)
    lowered(norm_gradients, *operands)
    tolerance = {"bfloat16": 1e-2, "float16": 1.2e-3, "float32": 3e-6}[dtype]
    close(interpreted(norm_gradients, *operands), exact_norm_gradients(*operands), tolerance)


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (7, 80),
        (33, 896),
        (20, 1536),
        pytest.param(40, 128, marks=pytest.mark.nightly),
        pytest.param(33, 1024, marks=pytest.mark.nightly),
    ],
)
def test_weights_of_norms_add_tokens_in_the_contracts_order(rows: int, width: int) -> None:
    # The mean of the squares is 1 in whatever order it is added, so the factor is known.
    h = np.sign(normal(rows, width)).astype(jnp.bfloat16)
    dy, total = normal(rows, width, dtype="bfloat16", seed=1), normal(width)
    _, dweight = interpreted(norm_gradients, h, normal(width, dtype="bfloat16"), dy, None, total)
    scale = np.asarray(jax.lax.rsqrt(jnp.float32(1) + jnp.float32(1e-5)))
    terms = dy.astype(np.float32) * (h.astype(np.float32) * scale)
    assert_same_bits(dweight, added_in_order(total, terms))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [80, 1024, 1536])
def test_gradients_of_norms_depend_on_neither_neighbours_nor_microbatches(width: int) -> None:
    h, dy = normal(48, width, dtype="bfloat16"), normal(48, width, dtype="bfloat16", seed=1)
    weight, total = normal(width, dtype="bfloat16"), normal(width)
    dx, dweight = interpreted(norm_gradients, h, weight, dy, None, total)
    parts = []
    for first, end in ((0, 16), (16, 48)):
        part, total = interpreted(norm_gradients, h[first:end], weight, dy[first:end], None, total)
        parts.append(part)
    assert_same_bits(np.concatenate(parts), dx)
    assert_same_bits(total, dweight)


def heads_gradients(
    qkv: Any, gradients: Any, positions: Any, weights: Any, sums: Any, *, norm_offset: float = 0.0
) -> Any:
    heads, kv_heads = (gradient.shape[-2] for gradient in gradients)

    def fn(qkv: jax.Array, sums: Any) -> Any:
        q_norm, k_norm = map(AccumulatedWeight, weights, sums)
        sizes = {"heads": heads, "kv_heads": kv_heads, "norm_eps": 1e-6, "norm_offset": norm_offset}
        embedding = RotaryEmbedding(qkv.shape[-1], 1e4)
        return ops.qk_rope(qkv, positions, embedding, **sizes, q_norm=q_norm, k_norm=k_norm)

    return jax.vjp(fn, qkv, sums)[1](gradients)


def heads_case(tokens: int, heads: int, kv_heads: int, width: int, dtype: str) -> tuple[Any, ...]:
    qkv = normal(1, tokens, heads + 2 * kv_heads, width, dtype=dtype)
    gradients = tuple(normal(1, tokens, count, width, dtype=dtype, seed=count) for count in (heads, kv_heads))
    weights = tuple(normal(width, dtype=dtype, seed=seed) for seed in (7, 8))
    return qkv, gradients, np.arange(tokens)[None], weights, (normal(width), normal(width, seed=9))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "offset"),
    [
        (3, 1, 32, "float16", 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (4, 2, 64, "bfloat16", 0.0),
                (16, 8, 128, "bfloat16", 0.0),
                (2, 2, 64, "float32", 1.0),
                (2, 2, 256, "float32", 0.0),
                (4, 1, 256, "bfloat16", 1.0),
            )
        ),
    ],
)
def test_gradients_of_heads_are_those_of_the_separate_steps(
    heads: int, kv_heads: int, width: int, dtype: str, offset: float
) -> None:
    case = heads_case(16, heads, kv_heads, width, dtype)
    gradients = functools.partial(heads_gradients, norm_offset=offset)
    with detjax.use_backend("hopper"):
        lowered(gradients, *case)
        in_one_step = interpreted(gradients, *case)
    with detjax.use_backend("portable"):
        in_steps = jax.jit(lambda *case: gradients(*case))(*case)
    # Rows are added in orders of their own, so last places may differ.
    close(in_one_step, in_steps, {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-6}[dtype])


@pytest.mark.hopper
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 8, 128), (4, 2, 64)])
def test_the_device_gives_heads_the_bits_of_the_separate_steps(
    heads: int, kv_heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = heads_case(512, heads, kv_heads, width, "bfloat16")
    in_one_step = jax.tree.map(np.asarray, detjax.jit(heads_gradients)(*case))
    monkeypatch.setattr("detjax.pallas.hopper.rope.serves_gradients", lambda *_: False)
    in_steps = jax.tree.map(np.asarray, detjax.jit(lambda *case: heads_gradients(*case))(*case))  # pyright: ignore[reportCallIssue]
    for a, b in zip(jax.tree.leaves(in_one_step), jax.tree.leaves(in_steps), strict=True):
        assert_same_bits(a, b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "dtype"),
    [(20, 128, 7, "bfloat16"), (37, 512, 5, "bfloat16"), (9, 256, 40, "float32"), (30, 1024, 3, "bfloat16")],
)
@pytest.mark.parametrize("continues", [False, True])
def test_rows_of_an_embedding_add_their_tokens_in_order(
    tokens: int, width: int, vocabulary: int, dtype: str, continues: bool
) -> None:
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens)
    table, dy = normal(vocabulary, width, dtype=dtype), normal(tokens, width, dtype=dtype, seed=1)
    total = normal(vocabulary, width) if continues else None
    lowered(embedding.backward, ids, table, dy, total)
    expected = np.asarray(jax.jit(portable_embedding.backward)(ids, table, dy, total))
    assert_same_bits(interpreted(embedding.backward, ids, table, dy, total), expected)


# --- elements and heads -----------------------------------------------------------------------------------------------


def updated(master: Any, gradient: Any, scale: Any) -> Any:
    optimizer = adamw(1e-3, weight_decay=0.1)
    state, weights = optimizer.init(master), []
    for factor in (None, scale):
        master, state, weight = optimizer.next_leaf(gradient, factor, state, master, jnp.bfloat16)
        weights.append(weight)
    return master, state, weights


@pytest.mark.parametrize("size", [4096, pytest.param(5000, marks=pytest.mark.nightly)])
def test_adamw_in_a_kernel_has_the_bits_of_the_portable_one(size: int) -> None:
    operands = normal(size), normal(size, seed=1), jnp.float32(0.3)
    expected = jax.jit(updated)(*operands)
    with detjax.use_backend("hopper"):
        lowered(updated, *operands)
        actual = interpreted(lambda *leaves: updated(*leaves), *operands)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, np.asarray(b))


@pytest.mark.parametrize(
    ("size", "slices"),
    [
        (100, 1),
        (512 * 9, 2),
        pytest.param(4096, 8, marks=pytest.mark.nightly),
        pytest.param(512 * 16 * 37, 8, marks=pytest.mark.nightly),
    ],
)
def test_squares_of_slices(size: int, slices: int) -> None:
    # Sums of whole numbers are exact, so the interpreter's own order within a row does not matter.
    leaf = np.random.default_rng(0).integers(-9, 10, size).astype(np.float32)

    def by(module: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda leaf: module.sums_in_order([module.row_squares(leaf, slices)])[0]

    lowered(by(elements), leaf)
    assert_same_bits(interpreted(by(elements), leaf), np.asarray(jax.jit(by(portable_elements))(leaf)))


@pytest.mark.parametrize("copies", [True, False], ids=["copy engine", "threads"])
def test_runs_of_different_lengths_are_added_in_order(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_sums, "has_copy_engine", lambda: copies)
    monkeypatch.setattr(ordered_sums, "LINES", 2)
    monkeypatch.setattr(ordered_sums, "SLOTS", 2)
    random = np.random.default_rng(0)
    numbers = [random.standard_normal(shape).astype(np.float32) for shape in ((1, 1), (2, 1300), (1, 256), (3, 257))]

    def by(module: Any) -> Callable[..., Any]:
        return lambda *numbers: module.sums_in_order(numbers)

    lowered(by(elements), *numbers)
    expected = [np.add.accumulate(x, axis=1)[:, -1] for x in numbers]
    assert_same_bits(interpreted(by(elements), *numbers), expected)
    assert_same_bits([np.asarray(x) for x in jax.jit(by(portable_elements))(*numbers)], expected)


def test_heads_that_the_kernel_does_not_serve_are_told_apart() -> None:
    def serves(tokens: int, heads: tuple[int, ...], width: int) -> bool:
        return rope_gradient.serves(jax.ShapeDtypeStruct((1, tokens, 24, width), jnp.bfloat16), heads)  # pyright: ignore

    assert serves(16, (16, 8), 128)
    assert not serves(15, (16, 8), 128)  # a step of 16 rows would not end with the tokens
    assert not serves(16, (16, 8), 96)  # threads hold powers of two


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("backend", ["portable", pytest.param("hopper", marks=pytest.mark.nightly)])
def test_one_pass_has_the_bits_of_logprobs_and_their_gradients(backend: str) -> None:
    hidden, head = normal(18, 64, dtype="bfloat16"), normal(66, 64, dtype="bfloat16") * jnp.bfloat16(0.25)
    ids, total, weights = np.random.default_rng(0).integers(0, 66, 18), normal(66, 64), normal(18)

    def in_one_pass(hidden: jax.Array, total: jax.Array) -> Any:
        derivative = _scaled
        return ops.token_logprobs_and_gradients(
            hidden, AccumulatedWeight(head, total), ids, derivative, weights, chunk=16
        )

    def in_two_passes(hidden: jax.Array, total: jax.Array) -> Any:
        def logprobs(hidden: jax.Array, total: jax.Array) -> jax.Array:
            return ops.token_logprobs(hidden, AccumulatedWeight(head, total), ids, chunk=32)

        values, pullback = jax.vjp(logprobs, hidden, total)
        return values, *pullback(_scaled(values, jnp.asarray(weights)))

    with detjax.use_backend(backend):
        results = interpreted(in_one_pass, hidden, total), interpreted(in_two_passes, hidden, total)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert_same_bits(a, b)


def _scaled(logprobs: jax.Array, weights: jax.Array) -> jax.Array:
    return logprobs * weights


def test_losses_in_a_kernel_have_the_bits_of_the_portable_ones() -> None:
    logprobs, old, weights = (normal(1024, seed=seed) for seed in range(3))
    weights[:100] = 0.0

    def derivative(logprobs: jax.Array, old: jax.Array, weights: jax.Array) -> jax.Array:
        rows: Any = Microbatch(None, None, weights, old, None)  # pyright: ignore[reportArgumentType]
        return ClippedRatio()(logprobs, rows)

    expected = np.asarray(jax.jit(derivative)(logprobs, old, weights))
    with detjax.use_backend("hopper"):
        lowered(lambda *rows: derivative(*rows), logprobs, old, weights)
        assert_same_bits(interpreted(lambda *rows: derivative(*rows), logprobs, old, weights), expected)
