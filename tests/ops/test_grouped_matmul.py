"""Matmul of rows sorted by expert: each row has the bits of its expert's matmul, and gradients have an order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.options import Clamp
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked

K, N, EXPERTS = 72, 40, 5
SIZES = {
    "all rows of one expert": (0, 70, 0, 0, 0),
    "groups that end inside tiles": (16, 17, 0, 1, 30),
    "no rows of any expert": (0, 0, 0, 0, 0),
    "rows that belong to nobody": (3, 0, 20, 0, 1),
}
ROWS = 70


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def operands(layout: str, gated: bool, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    stacked = (2,) if gated else ()
    w = drawn(EXPERTS, *stacked, *((K, N) if layout == "kn" else (N, K)), dtype=dtype)
    return drawn(ROWS, K, dtype=dtype), w, drawn(EXPERTS, *stacked, N, dtype=dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("layout", "gated", "dtype"), [("nk", True, "bfloat16"), ("kn", False, "float32"), ("nk", False, "float16")]
)
def test_each_row_has_the_bits_of_its_experts_matmul(
    sizes: tuple[int, ...], layout: Any, gated: bool, dtype: str
) -> None:
    x, w, bias = operands(layout, gated, dtype)
    options: dict[str, Any] = {"layout": layout, "activation": "silu" if gated else None, "gated": gated}
    matmul = detjax.jit(functools.partial(ops.matmul, **options))
    by_expert = [np.asarray(matmul(x, w[expert], bias=bias[expert])) for expert in range(EXPERTS)]
    experts = np.repeat(np.arange(EXPERTS), sizes)
    expected = np.zeros((ROWS, N), jnp.dtype(dtype))
    for row, expert in enumerate(experts):
        expected[row] = by_expert[expert][row]
    grouped = detjax.jit(functools.partial(ops.grouped_matmul, **options))
    poisoned = x.at[len(experts) :].set(jnp.nan)
    actual = grouped(poisoned, w, jnp.asarray(sizes, jnp.int32), bias=bias)
    assert_same_bits(actual[: len(experts)], expected[: len(experts)])
    with detjax.use_backend("stock"):
        by_xla = detjax.jit(functools.partial(ops.grouped_matmul, **options))
        close = np.asarray(by_xla(x, w, jnp.asarray(sizes, jnp.int32), bias=bias), np.float32)
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    np.testing.assert_allclose(
        close[: len(experts)],
        expected[: len(experts)].astype(np.float32),
        atol=tolerance * max(1, np.abs(expected).max().astype(np.float32)),
    )


def test_a_neighbour_of_nan_does_not_show() -> None:
    x, w, _ = operands("nk", False)
    sizes = jnp.asarray((30, 0, 0, 40, 0), jnp.int32)
    grouped = detjax.jit(functools.partial(ops.grouped_matmul, layout="nk"))
    y = grouped(x.at[5].set(jnp.nan).at[33].set(jnp.inf), w, sizes)
    others = np.delete(np.arange(ROWS), [5, 33])
    assert_same_bits(y[others], grouped(x, w, sizes)[others])


def gradients(x: Any, w: Any, bias: Any, sizes: Any, dy: Any, sums: Any, sequences: Any, gated: bool) -> Any:
    def fn(x: jax.Array, sums: Any) -> jax.Array:
        weights = (AccumulatedWeight(w, sums[0]), AccumulatedWeight(bias, sums[1]))
        options: dict[str, Any] = {"layout": "nk", "activation": "silu" if gated else None, "gated": gated}
        return ops.grouped_matmul(x, weights[0], sizes, bias=weights[1], sequences=sequences, **options)

    return jax.vjp(fn, x, sums)[1](dy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_those_of_float64(gated: bool) -> None:
    x, w, bias = operands("nk", gated)
    sizes, dy = jnp.asarray((16, 17, 0, 1, 30), jnp.int32), drawn(ROWS, N, seed=1)
    sums = drawn(*w.shape, seed=2), drawn(*bias.shape, seed=2)
    sequences = jnp.zeros(ROWS, jnp.int32)
    dx, (dw, dbias) = detjax.jit(functools.partial(gradients, gated=gated))(x, w, bias, sizes, dy, sums, sequences)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in (x, w, bias)]
        experts = np.repeat(np.arange(EXPERTS), np.asarray(sizes))

        def exact(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
            x = x[: len(experts)]
            if not gated:
                return jnp.einsum("mk,mnk->mn", x, w[experts]) + bias[experts]
            z = jnp.einsum("mk,mpnk->mpn", x, w[experts]) + bias[experts]
            return jax.nn.silu(z[:, 0]) * z[:, 1]

        expected = jax.vjp(exact, *wide)[1](jnp.asarray(np.asarray(dy), jnp.float64)[: len(experts)])
    for one, other in zip((dx, dw, dbias), expected, strict=True):
        start = dict(zip(map(id, (dw, dbias)), sums, strict=True)).get(id(one), 0)
        want = np.asarray(other) + np.asarray(start, np.float64)
        np.testing.assert_allclose(one, want, atol=3e-5 * np.abs(want).max())


def test_the_sequences_of_a_microbatch_are_a_schedule() -> None:
    """Two sequences at once, and in sequence with carried sums, give the same bits."""
    x, w, bias = operands("nk", True, "bfloat16")
    dy, sums = drawn(ROWS, N, dtype="bfloat16", seed=1), (drawn(*w.shape, seed=2), drawn(*bias.shape, seed=2))
    random = np.random.default_rng(0)
    expert_of, sequence_of = random.integers(0, EXPERTS, ROWS), (np.arange(ROWS) >= 33).astype(np.int32)
    program = detjax.jit(functools.partial(gradients, gated=True))

    def sorted_rows(chosen: np.ndarray) -> tuple[np.ndarray, jax.Array, jax.Array]:
        """The chosen rows by expert and then in their order, filled up with rows that belong to nobody."""
        order = chosen[np.argsort(expert_of[chosen], kind="stable")]
        rows = np.append(order, np.setdiff1d(np.arange(ROWS), chosen))
        sizes = np.bincount(expert_of[chosen], minlength=EXPERTS).astype(np.int32)
        return rows, jnp.asarray(sizes), jnp.asarray(sequence_of[rows])

    def added(chosen: np.ndarray, sums: Any) -> tuple[dict[int, np.ndarray], Any]:
        rows, sizes, sequences = sorted_rows(chosen)
        dx, sums = program(x[rows], w, bias, sizes, dy[rows], sums, sequences)
        return {int(row): np.asarray(dx)[place] for place, row in enumerate(rows[: len(chosen)])}, sums

    together, expected = added(np.arange(ROWS), sums)
    first, partial = added(np.flatnonzero(sequence_of == 0), sums)
    second, actual = added(np.flatnonzero(sequence_of == 1), partial)
    assert_same_bits(actual, expected)
    assert_same_bits([(first | second)[row] for row in range(ROWS)], [together[row] for row in range(ROWS)])
    # The control: without the sequences, a step has rows of both.
    rows, sizes, _ = sorted_rows(np.arange(ROWS))
    mixed = program(x[rows], w, bias, sizes, dy[rows], sums, jnp.zeros(ROWS, jnp.int32))[1]
    assert not same_bits(mixed, expected)


def test_what_fills_up_a_group_adds_nothing() -> None:
    x, w, bias = operands("nk", False)
    dy, sums = drawn(ROWS, N, seed=1), (drawn(*w.shape, seed=2), drawn(*bias.shape, seed=2))
    program = detjax.jit(functools.partial(gradients, gated=False))
    sequences = jnp.zeros(ROWS, jnp.int32)
    expected = program(x, w, bias, jnp.asarray([0, 35, 0, 0, 0]), dy, sums, sequences)[1]
    filled = (array.at[35:].set(jnp.nan) for array in (x, dy))
    x, dy = filled
    sizes = jnp.asarray([0, 64, 0, 6, 0])
    assert_same_bits(program(x, w, bias, sizes, dy, sums, sequences.at[35:].set(-1))[1], expected)


CLAMP = Clamp(limit=4.0, slope=1.702)
"""Sums have a standard deviation of about 8.5, so that both bounds are met often."""


def clamped(gate: Any, up: Any) -> Any:
    """The formula as papers have it."""
    gate, up = jnp.minimum(gate, CLAMP.limit), jnp.clip(up, -CLAMP.limit, CLAMP.limit)
    return (up + 1) * gate * jax.nn.sigmoid(CLAMP.slope * gate)


CLAMPED_SIZES = jnp.asarray((16, 17, 0, 1, 30), jnp.int32)
CLAMPED_OPTIONS: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True, "clamp": CLAMP}


def clamped_operands() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x, w, bias = operands("nk", True)
    return x, w, bias, jnp.repeat(jnp.arange(EXPERTS), CLAMPED_SIZES, total_repeat_length=64)


@pytest.mark.parametrize("backend", ["portable", "stock"])
def test_clamped_sums_and_their_gradients_are_those_of_float64(backend: str) -> None:
    x, w, bias, experts = clamped_operands()
    dy = drawn(ROWS, N, seed=1).at[64:].set(0)

    def exact(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        z = jnp.einsum("mk,mpnk->mpn", x[:64], w[experts]) + bias[experts]
        return clamped(z[:, 0], z[:, 1])

    def actual(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return ops.grouped_matmul(x, w, CLAMPED_SIZES, bias=bias, **CLAMPED_OPTIONS)

    def with_gradients(*operands: jax.Array) -> tuple[Any, Any]:
        y, pullback = jax.vjp(actual, *operands)
        return y, pullback(dy)

    with detjax.use_backend(backend):
        y, gradients = detjax.jit(with_gradients)(x, w, bias)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in (x, w, bias)]
        z = jnp.einsum("mk,mpnk->mpn", wide[0][:64], wide[1][experts]) + wide[2][experts]
        reached = (z[:, 0] > CLAMP.limit).mean(), (z[:, 1] > CLAMP.limit).mean(), (z[:, 1] < -CLAMP.limit).mean()
        assert all(0.1 < share < 0.9 for share in reached)

        @jax.jit
        def exact_gradients(wide: Any, dy: jax.Array) -> tuple[Any, Any]:
            y, pullback = jax.vjp(exact, *wide)
            return y, pullback(dy)

        expected, expected_gradients = exact_gradients(wide, jnp.asarray(np.asarray(dy), jnp.float64)[:64])
    for one, other in zip((y[:64], *gradients), (expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5 * np.abs(other).max())


def test_a_clamped_row_has_the_bits_of_its_experts_matmul() -> None:
    x, w, bias, experts = clamped_operands()
    matmul = detjax.jit(functools.partial(ops.matmul, **CLAMPED_OPTIONS))
    y = detjax.jit(functools.partial(ops.grouped_matmul, **CLAMPED_OPTIONS))(x, w, CLAMPED_SIZES, bias=bias)
    for expert in range(EXPERTS):
        assert_same_bits(y[:64][experts == expert], matmul(x, w[expert], bias=bias[expert])[:64][experts == expert])


def test_at_a_bound_the_gradient_is_that_of_the_inside() -> None:
    w = jnp.ones((1, 2, 1, 1))

    def fn(x: jax.Array) -> jax.Array:
        return ops.grouped_matmul(x, w, jnp.asarray([1]), **CLAMPED_OPTIONS)[0, 0]

    at, inside, outside = (float(jax.grad(fn)(jnp.full((1, 1), z))[0, 0]) for z in (4.0, 3.9999, 4.0001))
    assert outside == 0
    assert at == pytest.approx(inside, rel=1e-3)


def test_nan_goes_through_a_clamp() -> None:
    x = jnp.full((1, 3), jnp.nan)
    assert jnp.isnan(ops.matmul(x, jnp.ones((2, 4, 3)), **CLAMPED_OPTIONS)).all()


def test_a_clamp_that_means_nothing_is_refused() -> None:
    x, w, _ = operands("nk", True)
    sizes = jnp.zeros(EXPERTS, jnp.int32)
    for op, arguments in ((ops.grouped_matmul, (x, w, sizes)), (ops.matmul, (x, w[0]))):
        for clamp in (Clamp(0.0, 1.0), Clamp(7.0, -1.0), Clamp(float("nan"), 1.0), Clamp(float("inf"), 1.0)):
            with pytest.raises(ValueError, match="accepted: finite, positive limit and slope"):
                op(*arguments, layout="nk", activation="silu", gated=True, clamp=clamp)
    with pytest.raises(ValueError, match=r"grouped_matmul: clamp is .*; accepted: a clamp only if gated is True"):
        ops.grouped_matmul(x, w[:, 0], sizes, layout="nk", activation="silu", clamp=CLAMP)


def test_bad_arguments_are_refused() -> None:
    x, w, bias = operands("nk", False)
    sizes, op = jnp.zeros(EXPERTS, jnp.int32), unchecked(ops.grouped_matmul)
    with pytest.raises(ValueError, match=r"grouped_matmul: w has shape .*; accepted: \(5, 72, 72\)"):
        op(x, w, sizes)
    with pytest.raises(TypeError, match="grouped_matmul: group_sizes has dtype float32; accepted: integers"):
        op(x, w, sizes.astype("float32"), layout="nk")
    with pytest.raises(ValueError, match="grouped_matmul: gated without an activation"):
        op(x, w, sizes, layout="nk", gated=True)
    with pytest.raises(ValueError, match=r"grouped_matmul: bias has shape \(5, 39\); accepted: \(5, 40\)"):
        op(x, w, sizes, layout="nk", bias=bias[:, 1:])
    with pytest.raises(ValueError, match=r"grouped_matmul: sequences has shape \(3,\); accepted: \(70,\)"):
        op(x, w, sizes, layout="nk", sequences=jnp.zeros(3, jnp.int32))
