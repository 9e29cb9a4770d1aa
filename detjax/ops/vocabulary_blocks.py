"""What follows from some blocks of a vocabulary, so that devices which share it exchange a few numbers of each block.

A vocabulary is cut at multiples of `contract.SOFTMAX_BLOCK`. A device has the logits of its own blocks. It computes for
each of them the statistics that log-softmax merges, and the best candidate for the sampled token. Those of all blocks
give the logprobs and the token that all logits give, in the same bits: the contract adds up each block by itself.
"""

from typing import Final

from jaxtyping import Array, Float, Float32, Int32

from detjax.operands.sampling_arrays import SamplingArrays
from detjax.ops.dispatch import Operation
from detjax.portable.sampling import best_candidate as best_candidate
from detjax.runtime import compilation

_OPERATION: Final = Operation(
    "vocabulary_blocks",
    {"portable": "detjax.portable.vocabulary_blocks", "hopper": "detjax.pallas.hopper.vocabulary_blocks"},
    part_of=("sample", "log_softmax"),
)


def are_served() -> bool:
    """Returns whether the backend that serves `sample` and `log_softmax` computes single blocks as well."""
    return _OPERATION.is_served()


@compilation.jit
def block_statistics(logits: Float[Array, "R v"]) -> tuple[Float32[Array, "R b"], Float32[Array, "R b"]]:
    """Returns maximum and sum of each block of rows: `m_b` and `l_b` of `contract.SOFTMAX_BLOCK`.

    Args:
        logits: those of whole blocks, with -inf where the vocabulary has no token.
    """
    return _OPERATION.kernels().block_statistics(logits)


@compilation.jit
def merged_statistics(
    maxima: Float32[Array, "R b"], sums: Float32[Array, "R b"]
) -> tuple[Float32[Array, "R"], Float32[Array, "R"]]:
    """Returns what log-softmax subtracts from a row's elements, one after the other, from all blocks in their order."""
    return _OPERATION.kernels().merged_statistics(maxima, sums)


@compilation.jit(static_argnames="vocabulary")
def block_candidates(
    logits: Float[Array, "R v"], arrays: SamplingArrays, first: Int32[Array, ""], *, vocabulary: int
) -> tuple[Float32[Array, "R b"], Int32[Array, "R b"]]:
    """Returns the best candidate of each block for the sampled token: its value, noise included, and its token.

    `best_candidate` of all blocks in their order gives the token of `sample` without filters.

    Args:
        logits: those of whole blocks, with -inf where the vocabulary has no token.
        arrays: how each row is sampled. Filters are not looked at.
        first: the first token, a multiple of `contract.SOFTMAX_BLOCK`.
        vocabulary: how many tokens there are.
    """
    return _OPERATION.kernels().block_candidates(logits, arrays, first, vocabulary)
