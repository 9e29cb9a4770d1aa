"""Sampling in plain JAX: filters, Gumbel noise and the argmax of each row of logits."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.numerics import LOWEST, sample_key
from detjax.portable.softmax import log_softmax_tile, softmax_tile
from detjax.portable.tiles import map_rows


def sample(
    logits: Array,
    seed: Array,
    position: Array,
    sample_index: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    *,
    filtered: bool,
) -> tuple[Array, Array]:
    """Returns tokens, int32 `[B]`, and their logprobs, float32 `[B]`; see `detjax.ops.sample`."""

    def tile(rows: tuple[Array, ...], _: None) -> tuple[Array, Array]:
        logits, seed, position, sample_index, temperature, top_k, top_p, min_p = rows
        logits = logits.astype(ACCUMULATOR)
        greedy = temperature == 0
        scaled = _scaled(logits, temperature)
        if filtered:
            scaled = jnp.where(_kept(scaled, top_k, top_p, min_p), scaled, -jnp.inf)
        noise = jax.vmap(_gumbel, in_axes=(0, 0, 0, None))(seed, position, sample_index, logits.shape[-1])
        # The barrier has the product rounded before the noise is added, whatever instructions the processor has.
        noisy = lax.optimization_barrier(scaled) + noise
        token = jnp.argmax(jnp.where(greedy[:, None], logits, noisy), axis=-1).astype(jnp.int32)
        logprob = jnp.take_along_axis(log_softmax_tile(logits), token[:, None], axis=-1)[:, 0]
        return token, logprob

    return map_rows(tile, (logits, seed, position, sample_index, temperature, top_k, top_p, min_p), None)


def masked(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns the logits, float32 `[B, V]`, with `-inf` for each entry that a filter removes."""

    def tile(rows: tuple[Array, ...], _: None) -> Array:
        logits, temperature, *filters = rows
        logits = logits.astype(ACCUMULATOR)
        return jnp.where(_kept(_scaled(logits, temperature), *filters), logits, -jnp.inf)

    return map_rows(tile, (logits, temperature, top_k, top_p, min_p), None)


def likeliest(logprobs: Array, *, count: int) -> tuple[Array, Array]:
    """Returns the ids, int32 `[B, count]`, of the largest of the logprobs `[B, V]`, and these logprobs themselves.

    Ties go to the lowest id.
    """

    def tile(logprobs: Array, _: None) -> tuple[Array, Array]:
        largest, tokens = lax.top_k(logprobs, count)
        return tokens.astype(jnp.int32), largest

    return map_rows(tile, logprobs, None)


def _gumbel(seed: Array, position: Array, sample_index: Array, size: int) -> Array:
    return jax.random.gumbel(sample_key(seed, position, sample_index), (size,), ACCUMULATOR, mode="low")


def _scaled(logits: Array, temperature: Array) -> Array:
    scaled = logits * (1 / jnp.where(temperature == 0, 1.0, temperature))[:, None]
    return jnp.maximum(scaled, LOWEST)


def _kept(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Whether each entry `[B, V]` passes top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024).

    Top-p and min-p see the probabilities renormalized over the entries that top-k keeps.
    """
    size = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    kept = rank < jnp.where(top_k > 0, top_k, size)[:, None]

    probability = softmax_tile(jnp.where(kept, scaled, -jnp.inf))
    by_rank = jnp.take_along_axis(probability, order, axis=-1)
    before = jnp.cumsum(by_rank, axis=-1) - by_rank
    nucleus = jnp.take_along_axis(before < top_p[:, None], rank, axis=-1)
    # The likeliest entry always stays, and top_p = 1 keeps all, whatever rounding did to the sum.
    kept = kept & (nucleus | (rank == 0) | (top_p >= 1)[:, None])

    likely_enough = probability >= min_p[:, None] * jnp.max(probability, axis=-1, keepdims=True)
    return kept & likely_enough
