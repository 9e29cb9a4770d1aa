"""Norms, gates, decays, rates and sums of rows by XLA."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR

DIFFERENTIATED_BY_JAX: Final = True


def l2_norm(rows: tuple[Array], weights: tuple[()], *, eps: float) -> Array:
    """See `detjax.ops.l2_norm`."""
    (x,) = rows
    wide = x.astype(ACCUMULATOR)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def gated_rms_norm(rows: tuple[Array, Array], weights: tuple[Array], *, eps: float) -> Array:
    """See `detjax.ops.gated_rms_norm`."""
    (x, gate), (weight,) = rows, weights
    wide = x.astype(ACCUMULATOR)
    normalized = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normalized * weight.astype(ACCUMULATOR)[None] * jax.nn.silu(gate.astype(ACCUMULATOR))).astype(x.dtype)


def sigmoid_gated(rows: tuple[Array, Array], weights: tuple[()]) -> Array:
    """See `detjax.ops.sigmoid_gated`."""
    x, gate = rows
    return (x.astype(ACCUMULATOR) * jax.nn.sigmoid(gate.astype(ACCUMULATOR))).astype(x.dtype)


def decay_and_rate(rows: tuple[Array, Array], weights: tuple[Array, Array]) -> tuple[Array, Array]:
    """See `detjax.ops.decay_and_rate`."""
    (a, b), (log_rate, bias) = (tuple(x.astype(ACCUMULATOR) for x in arrays) for arrays in (rows, weights))
    return -jnp.exp(log_rate)[None] * jax.nn.softplus(a + bias[None]), jax.nn.sigmoid(b)


def layer_norm(rows: tuple[Array], weights: tuple[Array, Array], *, eps: float) -> Array:
    """See `detjax.ops.layer_norm`."""
    (x,), (weight, bias) = rows, (weight.astype(ACCUMULATOR)[None] for weight in weights)
    wide = x.astype(ACCUMULATOR)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    return (centered * jax.lax.rsqrt(variance + eps) * weight + bias).astype(x.dtype)


def weighted_sum(rows: tuple[Array, Array], weights: tuple[()]) -> Array:
    """See `detjax.ops.weighted_sum`."""
    x, factors = rows
    return jnp.sum(x.astype(ACCUMULATOR) * jax.lax.stop_gradient(factors)[..., None], axis=-2).astype(x.dtype)
