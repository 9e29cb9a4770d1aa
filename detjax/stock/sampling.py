"""Sampling by XLA."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, PRNG
from detjax.sampling_arrays import SamplingArrays

DIFFERENTIATED_BY_JAX: Final = True


def sample(logits: Array, arrays: SamplingArrays, *, filtered: bool) -> tuple[Array, Array]:
    """See `detjax.ops.sample`."""
    seed, position, sample_index, temperature, top_k, top_p, min_p = arrays
    logits = logits.astype(ACCUMULATOR)
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    if filtered:
        order = jnp.argsort(-scaled, axis=-1, stable=True)
        ranked = jnp.take_along_axis(scaled, order, axis=-1)
        rank = jnp.arange(logits.shape[-1])[None, :]
        kept = rank < jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
        probability = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = kept & ((before < top_p[:, None]) | (rank == 0)) & (probability >= min_p[:, None] * probability[:, :1])
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
        scaled = jnp.where(kept, scaled, -jnp.inf)

    def gumbel(seed: Array, position: Array, sample_index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl=PRNG), position)
        return jax.random.gumbel(jax.random.fold_in(key, sample_index), logits.shape[-1:], ACCUMULATOR)

    noise = jax.vmap(gumbel)(seed, position, sample_index)
    token = jnp.argmax(jnp.where(greedy[:, None], logits, scaled + noise), axis=-1).astype(jnp.int32)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[:, None], axis=-1)[:, 0]
    return token, logprob


def top_logprobs(logits: Array, *, count: int) -> tuple[Array, Array]:
    """See `detjax.ops.top_logprobs`."""
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits.astype(ACCUMULATOR), axis=-1), count)
    return tokens.astype(jnp.int32), logprobs
