"""The arrays of matrix products, as operations pass them to the backends."""

from typing import Any, NamedTuple

from jaxtyping import Array


class MatmulOperands(NamedTuple):
    """Arrays that `ops.matmul` takes.

    Attributes:
        x: rows `[*B, K]`.
        w: a weight, or gate's and up's, stacked.
        bias: `[N]`, or `[2, N]` where w is stacked.
        residual: rows `[*B, N]`.
    """

    x: Array
    w: Array
    bias: Array | None = None
    residual: Array | None = None


class GroupedOperands(NamedTuple):
    """Arrays that `ops.grouped_matmul` takes.

    Attributes:
        x: rows `[M, K]`, sorted by expert.
        w: the experts' weights, `[E, ...]`.
        bias: `[E, N]`, or `[E, 2, N]` where the weights are stacked.
        group_sizes: the rows of each expert, `[E]`.
        sequences: the sequence that each row belongs to, which gradients of weights add apart.
    """

    x: Array
    w: Array
    bias: Array | None
    group_sizes: Array
    sequences: Array | None = None


type WeightSums = tuple[Array | None, Array | None]
"""The sums that the gradients of weight and bias continue, in float32; None: the gradient is rounded and returned
alone."""

type Gradients = tuple[Array, Array, Array | None]
"""The gradients of x, w and bias; in place of the last two their next sums where they have sums."""

NO_SUMS: Any = None, None
