"""Statistics and candidates of a vocabulary's blocks on Hopper GPUs, by the kernels of softmax and the sampler."""

import jax.numpy as jnp
from jax import Array

from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.hopper import sampling, softmax
from detjax.pallas.hopper.row_stream import padded


def block_statistics(logits: Array) -> tuple[Array, Array]:
    """Returns maximum and sum of each block of rows `[R, v]`; see `detjax.ops.vocabulary_blocks`."""
    rows = padded(logits)
    schedule = softmax.default_schedule(softmax.Problem.for_rows(rows, rewritten=False))
    statistics = softmax.blocks_statistics(rows, schedule)
    return statistics[..., 0], statistics[..., 1]


def merged_statistics(maxima: Array, sums: Array) -> tuple[Array, Array]:
    """Returns the two numbers that log-softmax subtracts from rows; see `detjax.ops.vocabulary_blocks`."""
    maximum, _, log, _ = softmax.merged_rows(jnp.stack([maxima, sums], axis=-1))
    return maximum, log


def block_candidates(logits: Array, arrays: SamplingArrays, first: Array, vocabulary: int) -> tuple[Array, Array]:
    """Returns value and token of each block's best candidate; see `detjax.ops.vocabulary_blocks`."""
    del vocabulary  # padding logits are -inf and never larger than an earlier one, so no token beyond the end is chosen
    return sampling.block_candidates(logits, arrays, first)
