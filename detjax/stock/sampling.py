"""Sampling by XLA."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.noise import noise_of_range
from detjax.operands.sampling_arrays import SamplingArrays

DIFFERENTIATED_BY_JAX: Final = True


def sample(logits: Array, arrays: SamplingArrays, *, filtered: bool) -> tuple[Array, Array]:
    """See `detjax.ops.sample`."""
    keys, positions, temperature, top_k, top_p, min_p = arrays
    logits = logits.astype(ACCUMULATOR)
    greedy = temperature == 0
    scaled = _scaled(logits, temperature)
    if filtered:
        scaled = jnp.where(_kept(scaled, top_k, top_p, min_p), scaled, -jnp.inf)

    noise = noise_of_range(keys, positions, jnp.int32(0), logits.shape[-1])
    token = jnp.argmax(jnp.where(greedy[:, None], logits, scaled + noise), axis=-1).astype(jnp.int32)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[:, None], axis=-1)[:, 0]
    return token, logprob


def sampling_logprobs(logits: Array, tokens: Array, arrays: SamplingArrays, *, filtered: bool) -> Array:
    """See `detjax.ops.sampling_logprobs`."""
    kept = filter_logits(logits, arrays) if filtered else logits.astype(ACCUMULATOR)
    logprobs = jax.nn.log_softmax(_scaled(kept, arrays.temperature), axis=-1)
    likeliest = jnp.argmax(kept, axis=-1)[:, None] == jnp.arange(kept.shape[-1])[None]
    greedy = (arrays.temperature == 0)[:, None]
    logprobs = jnp.where(greedy, jnp.where(likeliest, 0.0, -jnp.inf), logprobs)
    row = jnp.arange(len(tokens))
    return logprobs.at[row, tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def filter_logits(logits: Array, arrays: SamplingArrays) -> Array:
    """See `detjax.ops.filter_logits`."""
    *_, temperature, top_k, top_p, min_p = arrays
    logits = logits.astype(ACCUMULATOR)
    kept = _kept(_scaled(logits, temperature), top_k, top_p, min_p) | (temperature == 0)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def _scaled(logits: Array, temperature: Array) -> Array:
    return logits / jnp.where(temperature == 0, 1.0, temperature)[:, None]


def _kept(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns whether each entry `[B, V]` passes the filters."""
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(scaled.shape[-1])[None, :]
    kept = rank < jnp.where(top_k > 0, top_k, scaled.shape[-1])[:, None]
    probability = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = kept & ((before < top_p[:, None]) | (rank == 0)) & (probability >= min_p[:, None] * probability[:, :1])
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)


def top_logprobs(logits: Array, *, count: int) -> tuple[Array, Array]:
    """See `detjax.ops.top_logprobs`."""
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits.astype(ACCUMULATOR), axis=-1), count)
    return tokens.astype(jnp.int32), logprobs
