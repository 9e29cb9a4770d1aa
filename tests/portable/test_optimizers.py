"""AdamW and the norm of gradients: numbers of Optax, and bits that no shape, program or slice changes.

These tests stand among those that run at the full optimization of XLA, without which no program changes these bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import detjax
from detjax.contract import LANES
from detjax.ops.elements import row_squares, sums_in_order
from detjax.rl.trainer.optimizers import AdamState, adamw, global_norm
from tests.support.bits import assert_same_bits, same_bits

SIZES = (1, 7, 511, 512, 513, 3 * 512, 16 * 512 + 5)


def drawn(size: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """Numbers of many magnitudes."""
    random = np.random.default_rng([seed, size])
    return (random.standard_normal(size) * 2.0 ** random.integers(-12, 4, size) * scale).astype(np.float32)


def tree(seed: int) -> dict[str, jax.Array]:
    return {"a": jnp.asarray(drawn(600, seed)).reshape(3, 200), "b": jnp.asarray(drawn(5, seed))}


def schedule(count: jax.Array) -> jax.Array:
    past = count.astype(jnp.float32)
    return 0.01 * (1 + past) / (3 + past)


OPTIONS = {"b1": 0.8, "b2": 0.95, "eps": 1e-5, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("rate", "options"), [(schedule, OPTIONS), (3e-2, {}), (optax.linear_schedule(1e-2, 1e-3, 4), OPTIONS)]
)
def test_several_steps_are_those_of_optax(rate: Any, options: dict[str, float]) -> None:
    theirs = optax.adamw(rate, **{"weight_decay": 0.0, **options})
    ours, params = adamw(rate, **options), tree(0)
    state, their_state, expected = ours.init(params), theirs.init(params), params
    our_update, their_update = detjax.jit(ours.update), jax.jit(theirs.update)
    for step in range(6):
        gradients = tree(1 + step)
        updates, state = our_update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        with jax.numpy_dtype_promotion("standard"):
            updates, their_state = their_update(gradients, their_state, expected)
            expected = optax.apply_updates(expected, updates)
    assert int(state.updates) == 6  # pyright: ignore[reportAttributeAccessIssue]
    for name, leaf in params.items():  # pyright: ignore[reportAttributeAccessIssue]
        np.testing.assert_allclose(leaf, expected[name], rtol=3e-6, atol=1e-6)  # pyright: ignore[reportCallIssue]
    assert not same_bits(params, tree(0))


def one_step(optimizer: Any) -> Callable[..., Any]:
    """The parameter and the moments after a step from the third update."""

    def step(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> Any:
        updates, state = optimizer.update((g,), AdamState(jnp.int32(3), (m,), (v,)), (p,))
        return p + updates[0], state.mean[0], state.square[0]

    return step


ADAMW = adamw(1e-2, weight_decay=0.1)
STEP = detjax.jit(one_step(ADAMW))


def operands(size: int) -> tuple[jax.Array, ...]:
    p, g, m, v = (jnp.asarray(drawn(size, seed)) for seed in range(4))
    return p, g, m, jnp.abs(v)


def test_the_step_of_an_element_does_not_depend_on_the_array_around_it() -> None:
    whole = operands(SIZES[-1])
    expected = STEP(*whole)
    for size in SIZES[:-1]:
        assert_same_bits(STEP(*(x[:size] for x in whole)), tuple(x[:size] for x in expected))
        assert_same_bits(STEP(*(x[-size:] for x in whole)), tuple(x[-size:] for x in expected))
    rows = tuple(x[: 16 * 512].reshape(8, 32, 32) for x in whole)
    assert_same_bits(STEP(*rows), tuple(x[: 16 * 512].reshape(8, 32, 32) for x in expected))


@pytest.mark.parametrize("parts", [2, 4, 32])
def test_slices_of_an_array_have_its_bits(parts: int) -> None:
    whole = operands(32 * LANES)
    by_slice = [STEP(*(x.reshape(parts, -1)[index] for x in whole)) for index in range(parts)]
    assert_same_bits(tuple(np.concatenate(x) for x in zip(*by_slice, strict=True)), STEP(*whole))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rate", [3e-2, schedule], ids=["constant", "schedule"])
def test_no_program_around_a_step_changes_its_bits(rate: Any) -> None:
    optimizer, params, steps = adamw(rate, weight_decay=0.1), tree(0), 3

    def step(carry: Any, gradients: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    start = params, optimizer.init(params)
    gradients = [tree(1 + index) for index in range(steps)]
    eager = functools.reduce(step, gradients, start)
    alone = functools.reduce(detjax.jit(step), gradients, start)
    # The first state, and with it the number of updates and what depends on it, is a constant of this program.
    folded = detjax.jit(lambda gradients: functools.reduce(step, gradients, start))(gradients)

    def computed(start: Any, gradients: Any) -> Any:
        # Gradients are products of the same program, which a compiler could fuse with what follows.
        for gradient in gradients:
            start = step(start, jax.tree.map(lambda x: jax.lax.optimization_barrier(x) * 1.0, gradient))
        return jax.tree.map(lambda x: x * 1, start)

    for result in (alone, folded, detjax.jit(computed)(start, gradients)):
        assert_same_bits(result, eager)


def test_every_operation_of_a_step_is_rounded_by_itself() -> None:
    p, g, m, v = (np.asarray(x) for x in operands(SIZES[-1]))
    one, b1, b2, rate, decay, eps = map(np.float32, (1, 0.9, 0.999, 1e-2, 0.1, 1e-8))
    mean = b1 * m + np.float32(1 - 0.9) * g
    square = b2 * v + np.float32(1 - 0.999) * (g * g)
    # Powers are the device's own; everything else is correctly rounded everywhere.
    powers = [np.asarray(jax.jit(lambda b, n: b**n)(b, np.float32(4))) for b in (b1, b2)]
    mean_factor, square_factor = (one / (one - power) for power in powers)
    change = mean * mean_factor / (np.sqrt(square * square_factor) + eps)
    _, state_mean, state_square = STEP(p, g, m, v)
    assert_same_bits((state_mean, state_square), (mean, square))
    updates, _ = ADAMW.update(
        (jnp.asarray(g),), AdamState(jnp.int32(3), (jnp.asarray(m),), (jnp.asarray(v),)), (jnp.asarray(p),)
    )
    assert_same_bits(updates[0], -rate * (change + decay * p))  # pyright: ignore[reportCallIssue]


def test_parameters_of_other_dtypes_and_missing_ones_are_refused() -> None:
    with pytest.raises(TypeError, match=r"adamw: \['a'\] has dtype bfloat16; accepted: float32. Train float32 masters"):
        adamw(0.1).init({"a": jnp.ones(3, "bfloat16")})
    state = adamw(0.1).init({"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="adamw: params is None; accepted: the parameters"):
        adamw(0.1).update({"a": jnp.ones(3)}, state)


def slice_squares(leaf: Any, slices: int = 1) -> jax.Array:
    """Returns the sum of squares of each slice."""
    return sums_in_order([row_squares(leaf, slices)])[0]


@pytest.mark.parametrize("slices", [1, 4, 8])
def test_the_norm_is_that_of_float64_and_of_its_slices(slices: int) -> None:
    leaves = [jnp.asarray(drawn(size, 5)) for size in (5, 513, 20 * 512)]
    expected = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in leaves))
    norm = detjax.jit(global_norm, static_argnums=1)(leaves, slices)
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    total = None
    for leaf in leaves:
        # Each slice by a program of its own, as a device that has no other slice adds it.
        size = slices * LANES
        rows = np.pad(np.asarray(leaf), (0, -len(leaf) % size)).reshape(slices, -1)
        by_slice = [np.asarray(detjax.jit(slice_squares)(row))[0] for row in rows]
        leaf_sum = functools.reduce(np.add, by_slice)
        total = leaf_sum if total is None else total + leaf_sum
    assert total is not None
    assert_same_bits(norm, np.sqrt(total))


def test_the_norm_does_not_depend_on_the_shapes_of_leaves_or_on_zeros_behind_them() -> None:
    x = jnp.asarray(drawn(24 * LANES, 6))
    norm = detjax.jit(global_norm, static_argnums=1)
    expected = norm([x], 8)
    assert_same_bits(norm([x.reshape(24, 16, 32)], 8), expected)
    assert_same_bits(norm([jnp.pad(x[: 24 * LANES - 3], (0, 3))], 8), norm([x[: 24 * LANES - 3]], 8))
    assert_same_bits(norm([jnp.zeros(3), x], 8), expected)


# The negative controls.


def test_the_norm_depends_on_the_number_of_slices() -> None:
    x = [jnp.asarray(drawn(24 * LANES, 7))]
    norms = [np.asarray(detjax.jit(global_norm, static_argnums=1)(x, slices)) ** 2 for slices in (1, 2, 4, 8)]
    sums = [functools.reduce(np.add, map(np.asarray, slice_squares(x[0], n))) for n in (1, 2, 4, 8)]
    np.testing.assert_allclose(norms, sums, rtol=1e-6)
    assert len({one.tobytes() for one in sums}) > 1
