"""Timing: inputs that come from memory, and a median."""

import time

import jax
import jax.numpy as jnp
import pytest

from detjax.bench.timing import CACHE_BYTES, MOST_ROTATIONS, device_time, rotations, step_time, turns


@pytest.mark.parametrize("size", [1, 1 << 20, 32 << 20, 300 << 20, 4 << 30])
def test_argument_sets_do_not_fit_into_the_cache_together(size: int) -> None:
    count = rotations(size)
    assert 2 <= count <= MOST_ROTATIONS
    # Between two turns of a set, the others have gone through the cache.
    assert count == MOST_ROTATIONS or (count - 1) * size > CACHE_BYTES


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU only kernels are timed, and this calls Python")
def test_each_argument_set_takes_its_turn() -> None:
    seen = []

    def fn(x: jax.Array) -> jax.Array:
        seen.append(int(x))
        return x

    sets = [(jnp.int32(i),) for i in range(3)]
    assert device_time(fn, sets, calls=5) >= 0
    assert seen == [0, 1, 0, 1, 2, 0, 1]


def test_a_step_is_a_share_of_all_calls_of_a_repetition() -> None:
    seen = []

    def program(x: jax.Array) -> jax.Array:
        seen.append(int(x))
        time.sleep(1e-3)
        return x

    sets = [(jnp.int32(i),) for i in range(3)]
    seconds = step_time(program, sets, steps=4, repetitions=3)
    assert seen == [0, 1] + 3 * [0, 1, 2, 0]
    assert seconds >= 1e-3


def test_every_other_round_goes_backwards() -> None:
    assert list(turns("abc", 3)) == [*"abc", *"cba", *"abc"]
    assert list(turns([], 2)) == []
