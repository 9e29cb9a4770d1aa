"""Sums over the devices of a mesh in one order, which no network and no compiler chooses.

`jax.lax.psum` adds in the order that suits the network: another topology, or another release, has other bits. Here
devices only exchange terms, and each adds them itself.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, PyTree

from detjax.ops.checks import check_dtype
from detjax.ops.dispatch import Operation
from detjax.options import AxisName

_MODULES = {
    "portable": "detjax.portable.collectives",
    "hopper": "detjax.portable.collectives",
    "tpu": "detjax.portable.collectives",
    "stock": "detjax.stock.collectives",
}
_PSUM = Operation("psum", _MODULES)
_PSUM_SCATTER = Operation("psum_scatter", _MODULES)


def psum(x: PyTree[Array], axis_name: AxisName) -> Any:
    """Returns the sum of every leaf over devices: by all-gather, then added by each device in the order of the axis.

    Terms are added left to right in float32, and rounded to the leaf's dtype once. The gradient of a term is the
    gradient of the sum: nothing is added on the way back.

    Args:
        x: arrays of bfloat16, float16 or float32, inside `jax.shard_map`.
        axis_name: of the mesh; of several, the first varies slowest.

    Raises:
        TypeError: a leaf has another dtype.
        NameError: there is no such axis here; from JAX.
    """

    def sum_of_leaf(term: Array) -> Array:
        check_dtype("psum", x=term)
        return _PSUM.module().psum(term, axis_name)

    return jax.tree.map(sum_of_leaf, x)


def psum_scatter(x: PyTree[Array], axis_name: AxisName) -> Any:
    """Returns each device's part of `psum`, cut along the first axis, in the same bits and with less traffic.

    Devices exchange parts of their terms, and each adds those of its own part in the order of the axis.

    Args:
        x: arrays of bfloat16, float16 or float32, inside `jax.shard_map`.
        axis_name: see `psum`.

    Raises:
        TypeError: a leaf has another dtype.
        ValueError: the devices do not divide a leaf's first axis.
        NameError: there is no such axis here; from JAX.
    """
    devices = lax.axis_size(axis_name)

    def part_of_leaf(term: Array) -> Array:
        check_dtype("psum_scatter", x=term)
        if term.ndim == 0 or term.shape[0] % devices:
            raise ValueError(
                f"psum_scatter: x has shape {term.shape}; accepted: a first axis that {devices} devices of the axis "
                f"{axis_name!r} divide"
            )
        return _PSUM_SCATTER.module().psum_scatter(term, axis_name)

    return jax.tree.map(part_of_leaf, x)
