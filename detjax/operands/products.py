"""The arrays of matrix products, as passed to the backends."""

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array

from detjax.operands.pytrees import array_dataclass


@array_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NormalizedRows:
    """The RMS norm of rows, which a product computes itself, together with the codes that it multiplies.

    Attributes:
        rows: `[*B, K]`, before the norm.
        weight: the norm's weight, `[K]`.
        eps: the number added to the mean square.
        weight_offset: the number added to the weight.
    """

    rows: Any
    weight: Any
    eps: float = dataclasses.field(default=0.0, metadata={"static": True})
    weight_offset: float = dataclasses.field(default=0.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return self.rows.shape


class RowCodes(NamedTuple):
    """The codes of M rows `[*B, K]`, as products with quantized activations take them.

    Attributes:
        codes: e4m3 `[M, K]`.
        scales: one for each group of columns, float32 `[groups, M]`, with M padded to eights.
        norm: the norm that has these codes; a product may compute it itself, and then takes no codes. None: the rows
            are not known to be a norm.
    """

    codes: Array
    scales: Array
    norm: NormalizedRows | None = None


class MatmulOperands(NamedTuple):
    """The arrays of `ops.matmul`.

    Attributes:
        x: rows `[*B, K]`.
        w: a weight, or the stacked weights of gate and up; for products in codes, a `QuantizedWeight`.
        bias: `[N]`, or `[2, N]` if w is stacked.
        residual: rows `[*B, N]`.
    """

    x: Array
    w: Any
    bias: Array | None = None
    residual: Array | None = None


class AdapterOperands(NamedTuple):
    """The arrays of an adapter that all rows of a product have; see `contract.RANK_STEP`.

    Attributes:
        u: the rows times the first factor, `[M, R]`, in x's dtype.
        b: the second factor, `[N, R]`, or `[2, N, R]` if w is stacked; with the layout "kn", R is the first of the two.
        scales: `[N]`, or `[2, N]`, float32; None: the adapter's product is added as it is.
    """

    u: Array
    b: Array
    scales: Array | None


class GroupedOperands(NamedTuple):
    """The arrays of `ops.grouped_matmul`.

    Attributes:
        x: rows `[M, K]`, sorted by expert.
        w: the experts' weights, `[E, ...]`.
        bias: `[E, N]`, or `[E, 2, N]` if the weights are stacked.
        group_sizes: number of rows of each expert, `[E]`.
        sequences: the sequence of each row; gradients of weights add sequences separately.
    """

    x: Array
    w: Any
    bias: Array | None
    group_sizes: Array
    sequences: Array | None = None


type WeightSums = tuple[Array | None, Array | None]
"""The float32 sums that the gradients of weight and bias continue; None: the gradient is rounded and returned."""

type Gradients = tuple[Array, Array, Array | None]
"""The gradients of x, w and bias; for w and bias with sums, their next sums."""

NO_SUMS: Any = None, None
