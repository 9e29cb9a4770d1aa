"""Rounds of leaves: every leaf is in one of them, and layers of equal shapes share programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.models.network import abstract, split
from detjax.rl.runs.policy import small_policy
from detjax.rl.trainer.optimizers import adamw, global_norm
from detjax.rl.trainer.placement import Placement
from detjax.rl.trainer.train_state import initial_state, update
from detjax.rl.trainer.update_groups import update_groups
from tests.support.bits import assert_same_bits


def shapes(*sizes: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]


def test_a_round_has_a_leaf_of_each_shape_that_most_layers_have() -> None:
    # A table, three layers of two matrices and a norm each, and the last norm.
    leaves = shapes(9, 5, 1, 7, 5, 1, 7, 5, 1, 7, 1)
    assert update_groups(leaves) == [(1, 2, 3), (4, 5, 6), (0, 7, 8, 10, 9)]
    assert update_groups(shapes(3, 3, 3)) == [(0,), (1,), (2,)]
    assert update_groups(shapes(3, 4, 5)) == [(0, 1, 2)]
    assert update_groups([]) == []


def test_shapes_dtypes_and_structures_tell_leaves_apart() -> None:
    one, other = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    assert update_groups([one, other, (one, None), (None, one)]) == [(0, 1, 2, 3)]


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 28])
def test_every_leaf_is_in_one_round_and_two_programs_serve_any_number_of_layers(layers: int) -> None:
    _, weights = split(abstract(lambda: small_policy(layers, 64)[0]))
    rounds = update_groups(weights)
    assert sorted(index for indices in rounds for index in indices) == list(range(len(weights)))
    assert len(rounds) == layers
    assert len({tuple(str(weights[index].shape) for index in indices) for indices in rounds}) <= 2


def test_more_layers_take_no_more_compilation() -> None:
    compiled = []

    def listen(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    placement, optimizer = Placement(shards=2), adamw(1e-2)

    def step(layers: int) -> int:
        _, weights = split(small_policy(layers, 32)[0])
        state = initial_state(weights, optimizer, placement)
        gradients = [jnp.ones_like(master) for master in state.masters]
        compiled.clear()
        jax.block_until_ready(update(state, gradients, weights, optimizer, placement, max_norm=1.0))
        return len(compiled)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert step(3) > 3
        # The program that adds the squares of all leaves alone is another one.
        assert step(5) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_norm_adds_leaves_in_their_order_whatever_the_rounds_are() -> None:
    _, weights = split(small_policy(3, 32)[0])
    placement, optimizer, random = Placement(shards=2), adamw(1e-2), np.random.default_rng(0)
    norms, expected = [], []
    for _ in range(8):
        state = initial_state(weights, optimizer, placement)
        # All leaves have about the same part in the norm, so that their order shows.
        leaves = [random.standard_normal(x.size) * random.uniform(1, 2) / np.sqrt(x.size) for x in state.masters]
        leaves = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
        norms.append(np.asarray(update(state, leaves, weights, optimizer, placement)[-1]))
        expected.append(np.asarray(detjax.jit(global_norm, static_argnums=1)(leaves, 2)))
    assert_same_bits(norms, expected)
