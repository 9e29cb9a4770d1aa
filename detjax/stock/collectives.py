"""Sums over the devices of a mesh by XLA, in an order that the network chooses."""

from jax import lax
from jaxtyping import Array

from detjax.operands.options import AxisName
from detjax.runtime.device_links import DeviceLinks


def gather_columns(x: Array, axis_name: AxisName, links: DeviceLinks | None) -> Array:
    """See `detjax.ops.collectives.gather_columns`."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)


def psum(term: Array, axis_name: AxisName) -> Array:
    """See `detjax.ops.psum`."""
    return lax.psum(term, axis_name)


def psum_scatter(term: Array, axis_name: AxisName) -> Array:
    """See `detjax.ops.psum_scatter`."""
    return lax.psum_scatter(term, axis_name, tiled=True)
