"""What blocks of a vocabulary tell of softmax and of the sampled token, on Hopper GPUs (Mosaic GPU).

The kernels are those that softmax and the sampler have for whole rows.
"""

import jax.numpy as jnp
from jax import Array

from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.hopper import sampling, softmax
from detjax.pallas.hopper.row_stream import padded


def block_statistics(logits: Array) -> tuple[Array, Array]:
    """Maximum and sum of each block of rows `[R, v]`; see `detjax.ops.vocabulary_blocks`."""
    rows = padded(logits)
    schedule = softmax.default_schedule(softmax.Problem.for_rows(rows, rewritten=False))
    statistics = softmax.blocks_statistics(rows, schedule)
    return statistics[..., 0], statistics[..., 1]


def merged_statistics(maxima: Array, sums: Array) -> tuple[Array, Array]:
    """What log-softmax subtracts from rows; see `detjax.ops.vocabulary_blocks`."""
    maximum, _, log, _ = softmax.merged_rows(jnp.stack([maxima, sums], axis=-1))
    return maximum, log


def block_candidates(logits: Array, arrays: SamplingArrays, first: Array, vocabulary: int) -> tuple[Array, Array]:
    """Value and token of each block's best candidate; see `detjax.ops.vocabulary_blocks`."""
    del vocabulary  # a logit of -inf is no larger than any before it, so no token behind the last is chosen
    return sampling.block_candidates(logits, arrays, first)
