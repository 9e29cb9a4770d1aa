"""Invariant functions on the devices of a mesh, inside `jax.shard_map`: rows have the bits of one device."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import detjax
from detjax.runtime import varying
from examples import train_wrapped_model
from tests.invariant import functions
from tests.invariant.functions import W, inputs
from tests.support.bits import assert_same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

ROWS = 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fn", functions.ALL, ids=lambda fn: fn.__name__)
def test_rows_on_several_devices_have_the_bits_of_one(fn: Callable[..., Array]) -> None:
    run_on_devices(__name__, fn.__name__, devices=4)


def test_rows_that_devices_exchange_are_refused() -> None:
    run_on_devices(__name__, "exchanges", devices=4)


def test_types_that_name_no_axes_leave_it_open_who_has_other_rows() -> None:
    mesh = _mesh(1)
    invariant = detjax.batch_invariant(lambda x: x - lax.psum(x, "d"))
    with pytest.raises(detjax.UnsafeFunction, match=r"psum of .*along 'd', at .*test_meshes\.py.*check_vma=True"):
        jax.shard_map(invariant, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)(inputs(2))


def test_weights_do_not_depend_on_how_many_devices_train_them() -> None:
    run_on_devices(__name__, "trains", devices=4)


def test_a_mesh_within_the_function_is_its_own() -> None:
    def fn(x: Array) -> Array:
        return jax.shard_map(lambda x: lax.psum(x, "d"), mesh=_mesh(1), in_specs=P(), out_specs=P())(x)

    assert_same_bits(detjax.batch_invariant(fn)(inputs(2)), inputs(2))


def test_where_types_name_no_axes_nothing_is_traced_twice() -> None:
    traced = []

    def step(x: Array) -> Array:
        traced.append(x)
        return x + 1

    lax.fori_loop(0, 3, lambda _, x: step(x), jnp.zeros(3))
    once = len(traced)
    varying.fori_loop(0, 3, lambda _, x: step(x), jnp.ones(3))
    assert len(traced) == 2 * once


# What the simulated devices do.


def _mesh(devices: int, columns: int = 1) -> Any:
    shape, names = ((devices,), ("d",)) if columns == 1 else ((devices, columns), ("d", "m"))
    count = devices * columns
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[:count])


def _compare(fn: Callable[..., Array]) -> None:
    x, invariant = inputs(ROWS), detjax.batch_invariant(fn, (None, 0))
    expected = invariant(W, x)
    cotangents = jax.random.normal(jax.random.key(0), expected.shape)

    def gradients(fn: Callable[..., Array]) -> list[Array]:
        return jax.jit(jax.grad(lambda w, x: jnp.sum(fn(w, x) * cotangents), argnums=(0, 1)))(W, x)

    made = []
    for devices in (2, 4):
        mesh = _mesh(devices)
        shared = jax.shard_map(invariant, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
        assert_same_bits(jax.jit(shared)(W, x), expected)
        closed = jax.shard_map(lambda x: invariant(W, x), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        assert_same_bits(closed(x), expected)
        if fn in functions.DIFFERENTIABLE and fn is not functions.own_gradient_of_a_product:
            made.append(gradients(shared))
    for weights, rows in made:
        # Gradients of weights are added over devices. XLA may simplify a program of several devices otherwise.
        alone = gradients(invariant)
        np.testing.assert_allclose(weights, alone[0], rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(alone[0]).max())))
        np.testing.assert_allclose(rows, alone[1], rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(alone[1]).max())))
        assert_same_bits(np.asarray(rows), np.asarray(made[0][1]))


def _refused() -> None:
    x, mesh = inputs(ROWS), _mesh(2, 2)
    exchanges: list[Callable[[Array], Array]] = [
        lambda x: x - lax.psum(x, "d"),
        lambda x: x - lax.pmean(x, "d"),
        lambda x: x - lax.pmax(x, "d"),
        lambda x: x + jnp.sum(lax.all_gather(x, "d"), 0),
        lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]),
        lambda x: lax.psum_scatter(x, "d", scatter_dimension=2, tiled=True),
        lambda x: lax.all_to_all(x, "d", 2, 2, tiled=True),
    ]
    for fn in exchanges:
        with pytest.raises(detjax.UnsafeFunction, match=r"rows of different devices along 'd', at .*test_meshes\.py"):
            jax.shard_map(detjax.batch_invariant(fn), mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    def halves(w: Array, x: Array) -> Array:
        """A product whose weight is divided among devices that have the same rows."""
        index = lax.axis_index("m")
        part = lax.dynamic_slice_in_dim(x, index * 12, 12, 2)
        return lax.psum(part @ w, "m") * lax.psum(jnp.sum(w), "m")

    given = (P("m"), P("d"))
    shared = jax.shard_map(detjax.batch_invariant(halves, (None, 0)), mesh=mesh, in_specs=given, out_specs=P("d"))
    expected = jax.shard_map(halves, mesh=mesh, in_specs=given, out_specs=P("d"))(W, x)
    np.testing.assert_allclose(shared(W, x), expected, rtol=0, atol=1e-4)


def _trains() -> None:
    digests = [train_wrapped_model.train(devices) for devices in (1, 4)]
    assert len(set(digests)) == 1
    # Where each device adds its part of the batch by itself, they do.
    train_wrapped_model.SHARDS = 2
    assert train_wrapped_model.train(2) not in digests


if __name__ == "__main__":
    if sys.argv[1] == "exchanges":
        _refused()
    elif sys.argv[1] == "trains":
        _trains()
    else:
        _compare(getattr(functions, sys.argv[1]))
    print(ALL_HOLD)
