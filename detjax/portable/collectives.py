"""Sums over the devices of a mesh in plain JAX: devices exchange terms, and each device adds them itself."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.options import AxisName
from detjax.rounding import rounded


def psum(term: Array, axis_name: AxisName) -> Array:
    """The sum of `term` over the devices of the axis, which every device has afterwards."""
    return _sum_over_first_axis(lax.all_gather(term, axis_name, to="invarying"))


def psum_scatter(term: Array, axis_name: AxisName) -> Array:
    """This device's part of `psum`, cut along the first axis, whose size the number of devices divides."""
    parts = term.reshape(lax.axis_size(axis_name), -1, *term.shape[1:])
    return _sum_over_first_axis(lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0))


def _sum_over_first_axis(terms: Array) -> Array:
    """The terms added left to right in float32, rounded once to their dtype."""
    # No addition can be fused with a product before the barrier.
    terms = lax.optimization_barrier(terms)
    return rounded(functools.reduce(jnp.add, [term.astype(ACCUMULATOR) for term in terms]), terms.dtype)
