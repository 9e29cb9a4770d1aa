"""Sums over the devices of a mesh in a fixed order.

The order of `jax.lax.psum` depends on the network, so another topology or release gives different bits. Here devices
only exchange terms, and each device adds them itself.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from detjax.operands.options import AxisName
from detjax.ops.checks import check_dtype
from detjax.ops.dispatch import Operation, backend_modules
from detjax.runtime.device_links import DeviceLinks

_MODULES = backend_modules("collectives", kernels=()) | {"hopper": "detjax.pallas.hopper.exchange"}
_PSUM = Operation("psum", _MODULES)
_PSUM_SCATTER = Operation("psum_scatter", _MODULES)
_GATHER_COLUMNS = Operation("gather_columns", _MODULES)


def gather_columns(x: Shaped[Array, "*N n"], axis_name: AxisName, links: DeviceLinks | None = None) -> Array:
    """Returns the columns `[*N, devices * n]` of all devices of an axis, in the order of the axis.

    Args:
        x: this device's columns, inside `jax.shard_map`.
        axis_name: an axis of the mesh, or several in row-major order.
        links: links to the other devices for kernels; None: XLA gathers. No bit depends on it.
    """
    return _GATHER_COLUMNS.module().gather_columns(x, axis_name, links)


def psum(x: PyTree[Array], axis_name: AxisName) -> Any:
    """Returns the sum of each leaf over the devices of an axis.

    Devices gather all terms. Each device then adds them in the order of the axis, in float32 and as a balanced binary
    tree (see `detjax.contract`), and rounds the sum once to the leaf's dtype. The gradient of a term is the gradient of
    the sum: the backward pass adds nothing.

    Args:
        x: arrays of bfloat16, float16 or float32, inside `jax.shard_map`.
        axis_name: an axis of the mesh, or several in row-major order.

    Raises:
        TypeError: a leaf has a different dtype.
        NameError: the mesh does not have the axis; raised by JAX.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("devices",))
        >>> rows, all_of_it = jax.P("devices"), jax.P()
        >>> add = jax.shard_map(lambda x: ops.psum(x, "devices"), mesh=mesh, in_specs=rows, out_specs=all_of_it)
        >>> add(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
    """

    def sum_of_leaf(term: Array) -> Array:
        check_dtype("psum", x=term)
        return _PSUM.module().psum(term, axis_name)

    return jax.tree.map(sum_of_leaf, x)


def psum_scatter(x: PyTree[Array], axis_name: AxisName) -> Any:
    """Returns this device's shard of `psum` along the first axis, with the same bits and less traffic.

    Devices exchange shards of their terms, and each device adds the terms of its own shard in the order of the axis.

    Args:
        x: arrays of bfloat16, float16 or float32, inside `jax.shard_map`.
        axis_name: see `psum`.

    Raises:
        TypeError: a leaf has a different dtype.
        ValueError: the number of devices does not divide a leaf's first axis.
        NameError: the mesh does not have the axis; raised by JAX.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("devices",))
        >>> rows = jax.P("devices")
        >>> add = jax.shard_map(lambda x: ops.psum_scatter(x, "devices"), mesh=mesh, in_specs=rows, out_specs=rows)
        >>> add(jnp.ones((3, 3))).shape
        (3, 3)
    """
    devices = lax.axis_size(axis_name)

    def part_of_leaf(term: Array) -> Array:
        check_dtype("psum_scatter", x=term)
        if term.ndim == 0 or term.shape[0] % devices:
            raise ValueError(
                f"psum_scatter: x has shape {term.shape}; accepted: a first axis that the {devices} devices of axis "
                f"{axis_name!r} divide. Pad it first, or use psum."
            )
        return _PSUM_SCATTER.module().psum_scatter(term, axis_name)

    return jax.tree.map(part_of_leaf, x)
