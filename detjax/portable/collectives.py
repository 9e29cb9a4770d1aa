"""Sums over the devices of a mesh in plain JAX: devices exchange terms, and each device adds them itself."""

from collections.abc import Sequence

from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.options import AxisName
from detjax.operands.rounding import rounded
from detjax.runtime.device_links import DeviceLinks


def psum(term: Array, axis_name: AxisName) -> Array:
    """Returns the sum of `term` over the devices of the axis, on every device."""
    return _sum_over_first_axis(lax.all_gather(term, axis_name, to="invarying"))


def psum_scatter(term: Array, axis_name: AxisName) -> Array:
    """Returns this device's shard of `psum` along the first axis, whose size the number of devices divides."""
    parts = term.reshape(lax.axis_size(axis_name), -1, *term.shape[1:])
    return _sum_over_first_axis(lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0))


def gather_columns(x: Array, axis_name: AxisName, links: DeviceLinks | None) -> Array:
    """Returns the columns of all devices of the axis, on every device; `links` is ignored."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)


def _sum_over_first_axis(terms: Array) -> Array:
    """Adds the terms in float32 as a balanced binary tree, and rounds once to their dtype."""
    # No addition can be fused with a product before the barrier.
    terms = lax.optimization_barrier(terms)
    return rounded(sum_as_tree([term.astype(ACCUMULATOR) for term in terms]), terms.dtype)


def sum_as_tree(terms: Sequence[Array]) -> Array:
    """Returns the sum of float32 terms: adjacent terms in pairs, then the results in pairs, until one is left."""
    while len(terms) > 1:
        pairs = [left + right for left, right in zip(terms[::2], terms[1::2], strict=False)]
        terms = [*pairs, *terms[len(pairs) * 2 :]]
    return terms[0]
