"""Log-softmax and sampling by blocks of the vocabulary, for devices that share a vocabulary.

Blocks begin at multiples of `contract.SOFTMAX_BLOCK`, and each device has the logits of its own blocks. For each block
it computes the statistics that log-softmax merges, and the best candidate for the sampled token. From these few numbers
of all blocks follow the logprobs and the token, with the same bits as from all logits, because the contract adds each
block separately.
"""

from typing import Final

from jaxtyping import Array, Float, Float32, Int32

from detjax.operands.sampling_arrays import SamplingArrays
from detjax.ops.dispatch import Operation
from detjax.portable.sampling import best_candidate as best_candidate
from detjax.runtime import compilation

_OPERATION: Final = Operation(
    "vocabulary_blocks",
    {"portable": "detjax.portable.vocabulary_blocks"}
    | dict.fromkeys(("hopper", "mma"), "detjax.pallas.hopper.vocabulary_blocks"),
    part_of=("sample", "log_softmax"),
)


def are_served() -> bool:
    """Returns whether the backend of `sample` and `log_softmax` also computes single blocks."""
    return _OPERATION.is_served()


@compilation.jit
def block_statistics(logits: Float[Array, "R v"]) -> tuple[Float32[Array, "R b"], Float32[Array, "R b"]]:
    """Returns maximum and sum of each block of rows: `m_b` and `l_b` of `contract.SOFTMAX_BLOCK`.

    Args:
        logits: logits of whole blocks, -inf where the vocabulary has no token.
    """
    return _OPERATION.kernels().block_statistics(logits)


@compilation.jit
def merged_statistics(
    maxima: Float32[Array, "R b"], sums: Float32[Array, "R b"]
) -> tuple[Float32[Array, "R"], Float32[Array, "R"]]:
    """Returns the two numbers that log-softmax subtracts in sequence from a row's elements, given all blocks."""
    return _OPERATION.kernels().merged_statistics(maxima, sums)


@compilation.jit(static_argnames="vocabulary")
def block_candidates(
    logits: Float[Array, "R v"], arrays: SamplingArrays, first: Int32[Array, ""], *, vocabulary: int
) -> tuple[Float32[Array, "R b"], Int32[Array, "R b"]]:
    """Returns each block's best candidate for the sampled token: its value, including noise, and its id.

    `best_candidate` of all blocks in order is the token of `sample` without filters.

    Args:
        logits: logits of whole blocks, -inf where the vocabulary has no token.
        arrays: sampling parameters of each row. Filters are ignored.
        first: id of the first token, a multiple of `contract.SOFTMAX_BLOCK`.
        vocabulary: number of tokens.
    """
    return _OPERATION.kernels().block_candidates(logits, arrays, first, vocabulary)
