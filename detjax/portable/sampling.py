"""Sampling in plain JAX: filters, Gumbel noise and the argmax of each row of logits."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, SOFTMAX_BLOCK
from detjax.operands.noise import noise_of_range
from detjax.operands.numerics import LOWEST
from detjax.operands.sampling_arrays import LogitAdjustments, SamplingArrays, SeenTokens
from detjax.portable.softmax import log_softmax_tile, softmax_tile
from detjax.portable.tiles import map_rows


def sample(logits: Array, arrays: SamplingArrays, *, filtered: bool) -> tuple[Array, Array]:
    """Returns tokens, int32 `[B]`, and their logprobs, float32 `[B]`; see `detjax.ops.sample`."""

    def tile(rows: tuple[Array, SamplingArrays], _: None) -> tuple[Array, Array]:
        logits, (keys, positions, temperature, top_k, top_p, min_p) = rows
        logits = logits.astype(ACCUMULATOR)
        greedy = temperature == 0
        scaled = scaled_logits(logits, temperature)
        if filtered:
            scaled = jnp.where(_kept(scaled, top_k, top_p, min_p), scaled, -jnp.inf)
        values = jnp.where(greedy[:, None], logits, scaled)
        token = best_candidate(*best_of_blocks(values, keys, positions, greedy, jnp.int32(0), logits.shape[-1]))
        logprob = jnp.take_along_axis(log_softmax_tile(logits), token[:, None], axis=-1)[:, 0]
        return token, logprob

    return map_rows(tile, (logits, arrays), None)


def best_of_blocks(
    values: Array, keys: Array, positions: Array, greedy: Array, first: Array, vocabulary: int
) -> tuple[Array, Array]:
    """Returns the largest value, including noise, of each block of a tile, and its token, both `[rows, blocks]`.

    Args:
        values: consecutive tokens' logits after temperature and filters, or unchanged in greedy rows, float32
            `[rows, v]`.
        keys: the keys of the rows' noise, uint32 `[rows, 4]`.
        positions: the positions of the rows' tokens, `[rows]`.
        greedy: whether a row has no noise, `[rows]`.
        first: the first of the tokens, a multiple of the block's size.
        vocabulary: the size of the vocabulary. No token beyond it is chosen.
    """
    size = min(values.shape[-1], SOFTMAX_BLOCK)
    values = jnp.pad(values, ((0, 0), (0, -values.shape[-1] % size)), constant_values=-jnp.inf)
    starts = jnp.arange(0, values.shape[-1], size, dtype=jnp.int32)

    def best(start: Array) -> tuple[Array, Array]:
        block = lax.dynamic_slice_in_dim(values, start, size, axis=1)
        token = first + start + jnp.arange(size, dtype=jnp.int32)
        # The barrier rounds the product before the noise is added, whatever instructions the processor has.
        noisy = lax.optimization_barrier(block) + noise_of_range(keys, positions, first + start, size)
        value = jnp.where(greedy[:, None], block, noisy)
        value = jnp.where(token < vocabulary, value, -jnp.inf)
        index = jnp.argmax(value, axis=1).astype(jnp.int32)
        return jnp.take_along_axis(value, index[:, None], axis=1)[:, 0], first + start + index

    value, token = lax.map(best, starts)
    return value.T, token.T


def best_candidate(values: Array, tokens: Array) -> Array:
    """Returns the token of the largest value in each row `[rows, blocks]`; the first of equals; a NaN is largest."""
    return jnp.take_along_axis(tokens, jnp.argmax(values, axis=1)[:, None], axis=1)[:, 0]


def sampling_logprobs(logits: Array, tokens: Array, temperature: Array) -> Array:
    """Returns the logprobs, float32 `[B]`, of tokens under the softmax of the logits divided by the temperature."""

    def tile(rows: tuple[Array, Array, Array], _: None) -> Array:
        logits, token, temperature = rows
        exponents = sampling_exponents(logits.astype(ACCUMULATOR), reciprocal(temperature)[:, None])
        # With the barrier the tile has the arithmetic of log_softmax, whose operand comes from outside of it.
        logprobs = log_softmax_tile(lax.optimization_barrier(exponents))
        return jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]

    return map_rows(tile, (logits, tokens, temperature), None)


def sampling_exponents(logits: Array, reciprocal: Array) -> Array:
    """Returns the scaled logits that noise is added to, float32, with `-inf` for each excluded token."""
    return jnp.where(logits == -jnp.inf, -jnp.inf, jnp.maximum(logits * reciprocal, LOWEST))


def reciprocal(temperature: Array) -> Array:
    """Returns `1 / temperature`, and 1 for a temperature of 0."""
    return 1 / jnp.where(temperature == 0, 1.0, temperature)


def masked(logits: Array, arrays: SamplingArrays) -> Array:
    """Returns the logits, float32 `[B, V]`, with `-inf` for each entry that a filter removes."""

    def tile(rows: tuple[Array, ...], _: None) -> Array:
        logits, temperature, *filters = rows
        logits = logits.astype(ACCUMULATOR)
        return jnp.where(_kept(scaled_logits(logits, temperature), *filters), logits, -jnp.inf)

    return map_rows(tile, (logits, arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p), None)


def adjusted(logits: Array, seen: SeenTokens, adjustments: LogitAdjustments, allowed: Array | None = None) -> Array:
    """Returns the adjusted logits, float32 `[B, V]`; see `detjax.ops.adjust_logits`.

    Everything is elementwise, so no loop over tiles is needed. The barriers round each product before the subtraction
    that follows, and keep the surrounding program from folding constant operands.
    """
    logits, seen, adjustments, allowed = lax.optimization_barrier((logits, seen, adjustments, allowed))
    x = logits.astype(ACCUMULATOR)
    repetition, reciprocal, frequency, presence = (row[:, None] for row in adjustments[:4])
    is_generated = seen.generated > 0
    is_repeated = is_generated | seen.in_prompt
    x = lax.optimization_barrier(jnp.where(is_repeated, x * jnp.where(x > 0, reciprocal, repetition), x))
    penalized = x - lax.optimization_barrier(frequency * seen.generated.astype(ACCUMULATOR)) - presence
    x = jnp.where(is_generated, penalized, x)
    x = _biased(x, adjustments.biased, adjustments.bias)
    return x if allowed is None else constrained(x, allowed)


def constrained(logits: Array, allowed: Array) -> Array:
    """Returns the logits, float32 `[B, V]`, with `-inf` for each token that is not allowed."""
    return jnp.where(_bits(allowed, logits.shape[-1]), logits.astype(ACCUMULATOR), -jnp.inf)


def _biased(x: Array, tokens: Array, bias: Array) -> Array:
    """Adds biases to the entries `[B, V]` of the tokens `[B, n]`. Ids outside the vocabulary have no effect."""
    size = x.shape[-1]
    column, row = jnp.arange(tokens.shape[-1], dtype=jnp.int32), jnp.arange(len(x), dtype=jnp.int32)[:, None]
    # Padding gets separate ids, so that the indices of the scatter are unique.
    tokens = jnp.where((tokens >= 0) & (tokens < size), tokens, size + column[None])
    value = x.at[row, tokens].get(mode="fill", fill_value=0) + bias
    value = jnp.where(bias == -jnp.inf, -jnp.inf, value)
    return x.at[row, tokens].set(value, mode="drop", unique_indices=True)


def _bits(words: Array, size: int) -> Array:
    """The bits, bool `[B, size]`, of 32-bit words `[B, W]`, starting from the lowest bit of each."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & jnp.uint32(1)
    return bits.reshape(len(words), -1)[:, :size] == 1


def likeliest(logprobs: Array, *, count: int) -> tuple[Array, Array]:
    """Returns the ids, int32 `[B, count]`, of the largest logprobs of `[B, V]`, and these logprobs.

    Ties go to the lowest id.
    """

    def tile(logprobs: Array, _: None) -> tuple[Array, Array]:
        largest, tokens = lax.top_k(logprobs, count)
        return tokens.astype(jnp.int32), largest

    return map_rows(tile, logprobs, None)


def scaled_logits(logits: Array, temperature: Array) -> Array:
    """Returns logits `[rows, n]` over the rows' temperatures, which noise is added to; see `contract`."""
    return jnp.maximum(logits * reciprocal(temperature)[:, None], LOWEST)


def _kept(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns whether each entry `[B, V]` passes top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024).

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
    # The likeliest entry always stays, and top_p = 1 keeps all, however the sum is rounded.
    kept = kept & (nucleus | (rank == 0) | (top_p >= 1)[:, None])

    likely_enough = probability >= min_p[:, None] * jnp.max(probability, axis=-1, keepdims=True)
    return kept & likely_enough
