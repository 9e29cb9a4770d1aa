"""Weights with adapters: low-rank products that are added to the product of the weight."""

import dataclasses
from typing import Any, Final

from jaxtyping import Array, Bool, Float32, Int, Int32

from detjax.contract import RANK_STEP
from detjax.operands.accumulated_weight import AccumulatedWeight, Weight
from detjax.operands.numerics import round_up
from detjax.operands.pytrees import array_dataclass
from detjax.operands.whole_weight import WeightWithValue

NO_ADAPTER: Final = -1
"""Stands for the slot of a row without an adapter."""


@array_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedWeight(WeightWithValue):
    """A weight `W`, and the factors `A` and `B` of adapters (LoRA; Hu et al. 2021): `W + scale B A`, never merged.

    `ops.matmul` and `ops.grouped_matmul` accept it in place of a weight with the layout "nk". A row with an adapter
    depends on that adapter alone; a row without one has the bits of the plain weight. See "Adapters" in
    `detjax.contract`.

    A checkpoint may store the outputs of one weight as several tensors, such as the projections of queries, keys and
    values. Each has its own `A`: these are stacked, and a row of `B` has zeros in the columns of the others.

    Attributes:
        value: the weight, `[N, K]`, or `[2, N, K]` for gate and up; with a first axis for experts.
        a: the first factors, `[slots, R, K]`, with a first axis for experts. R is a multiple of `contract.RANK_STEP`;
            unused ranks are zeros. Only a single one may be an `AccumulatedWeight`.
        b: the second factors, in the shape of `value` with `slots` before the axes of a matrix or of gate and up, and R
            in place of K.
        scales: the factors of the products, in the shape of `b` without R.
        rows: the slot of each row of x, or `NO_ADAPTER`; None: all rows have the one adapter.
        b_mask: True where the numbers of `b` are trained: in the ranks of the row's own tensor. None: everywhere.
        places: `ops.adapter_places.places_of_rows` of the rows, which the weights of a program share; None: each
            product computes it.

    Example:
        >>> from detjax import ops
        >>> a, b = jnp.zeros((1, 16, 2)).at[0, 0].set(1.0), jnp.zeros((1, 3, 16)).at[0, :, 0].set(1.0)
        >>> w = ops.AdaptedWeight(jnp.ones((3, 2)), a, b, jnp.full((1, 3), 0.5), rows=jnp.array([0, -1]))
        >>> ops.matmul(jnp.ones((2, 2)), w, layout="nk")[:, 0]
        Array([3., 2.], dtype=float32)
    """

    value: Any
    a: Weight
    b: Weight
    scales: Float32[Array, "..."]
    rows: Int[Array, "..."] | None = None
    b_mask: Bool[Array, "..."] | None = None
    places: Any = None


def padded_rank(rank: int) -> int:
    """Returns the ranks that the factors of an adapter have with padding."""
    return round_up(rank, RANK_STEP)


def at_rows[W](weight: W, tokens: Int32[Array, "M"]) -> W:
    """Returns a weight for the rows of given tokens, such as the rows of experts; other tokens have no adapter."""
    if not isinstance(weight, AdaptedWeight) or weight.rows is None:
        return weight
    rows: Any = weight.rows.reshape(-1).at[tokens].get(mode="fill", fill_value=NO_ADAPTER)
    return dataclasses.replace(weight, rows=rows, places=None)


def only_adapter(weight: Weight, axis: int) -> Weight:
    """Returns the factor of the only adapter of a weight; `axis` is the axis of slots."""

    def one(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(*x.shape[:axis], *x.shape[axis + 1 :])

    if isinstance(weight, AccumulatedWeight):
        value = one(weight.value)
        assert value is not None
        return AccumulatedWeight(value, one(weight.products))
    plain: Any = one(weight)  # pyright: ignore[reportArgumentType]
    return plain
