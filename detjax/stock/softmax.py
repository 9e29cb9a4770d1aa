"""Softmax, log-softmax and logsumexp by XLA."""

from typing import Final

import jax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR

DIFFERENTIATED_BY_JAX: Final = True


def softmax(x: Array) -> Array:
    """See `detjax.ops.softmax`."""
    return jax.nn.softmax(x.astype(ACCUMULATOR), axis=-1)


def log_softmax(x: Array) -> Array:
    """See `detjax.ops.log_softmax`."""
    return jax.nn.log_softmax(x.astype(ACCUMULATOR), axis=-1)


def logsumexp(x: Array) -> Array:
    """See `detjax.ops.logsumexp`."""
    return jax.nn.logsumexp(x.astype(ACCUMULATOR), axis=-1)
