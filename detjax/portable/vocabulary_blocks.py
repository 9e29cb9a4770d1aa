"""Statistics and sampling candidates of vocabulary blocks, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.portable.sampling import best_of_blocks, scaled_logits
from detjax.portable.softmax import merged, normalizers_of_blocks
from detjax.portable.tiles import map_rows


def block_statistics(logits: Array) -> tuple[Array, Array]:
    """Returns maximum and sum of each block of rows `[R, v]`; see `detjax.ops.vocabulary_blocks`."""

    def tile(logits: Array, _: None) -> tuple[Array, Array]:
        m, total = normalizers_of_blocks(logits)
        return m[..., 0].T, total[..., 0].T

    return map_rows(tile, logits, None)


def merged_statistics(maxima: Array, sums: Array) -> tuple[Array, Array]:
    """Returns the numbers that log-softmax subtracts from rows; see `detjax.ops.vocabulary_blocks`."""

    def tile(rows: tuple[Array, Array], _: None) -> tuple[Array, Array]:
        m, total = merged(*(x.T[..., None] for x in rows))
        return m[:, 0], lax.optimization_barrier(jnp.log(total))[:, 0]

    return map_rows(tile, (maxima, sums), None)


def block_candidates(logits: Array, arrays: SamplingArrays, first: Array, vocabulary: int) -> tuple[Array, Array]:
    """Returns value and token of each block's best candidate; see `detjax.ops.vocabulary_blocks`."""

    def tile(rows: tuple[Array, SamplingArrays], first: Array) -> tuple[Array, Array]:
        logits, (keys, positions, temperature, *_) = rows
        greedy = temperature == 0
        values = jnp.where(greedy[:, None], logits, scaled_logits(logits, temperature))
        return best_of_blocks(values, keys, positions, greedy, first, vocabulary)

    return map_rows(tile, (logits.astype(ACCUMULATOR), arrays), first)
