"""Weights in the numbers of a checkpoint: codes of 4 or 8 bits, scales, and the widening to plain numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.pytrees import array_dataclass
from detjax.operands.rounding import rounded
from detjax.operands.whole_weight import WholeWeight

CodeNumbers = Literal["int4", "e2m1", "e4m3"]
"""The numbers of codes: an integer from 0 to 15 less its zero point, or a floating-point number of 4 or 8 bits."""

QuantizedActivations = Literal["group", "row", "static"]
"""The scales of quantized activations: one per row and group of columns, one per row, or one of the checkpoint."""

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of the 16 codes of two bits of exponent and one of fraction."""

INT4_ZERO: Final = 8
"""The zero point of symmetric four-bit integers."""


@dataclasses.dataclass(frozen=True)
class QuantizedFormat:
    """The meaning of a quantized weight's arrays.

    Attributes:
        numbers: the numbers of codes.
        columns: the inputs of the weight; the last codes of a row may hold fewer numbers than they could.
        group: consecutive columns that share a scale.
        dtype: the dtype of the widened weight, which the model's activations have.
        activations: how products quantize activations; None: activations are plain, so the weight's format is a
            schedule, which changes no bit.

    Example:
        >>> ops.QuantizedFormat("e4m3", columns=300, group=128, dtype="bfloat16", activations="group").group
        128
    """

    numbers: CodeNumbers
    columns: int
    group: int
    dtype: str
    activations: QuantizedActivations | None = None


@array_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight(WholeWeight):
    """A weight `[..., N, K]`, rows being outputs, as codes and scales; `...` are stacked matrices, such as experts.

    Several tensors of a checkpoint may make up the rows of a matrix. Arrays that a whole tensor shares have an entry
    for each of these *sources*.

    Operations accept it in place of a weight. It has no gradient.

    Attributes:
        codes: `[..., N, K]` bytes of e4m3 numbers, or `[..., N, ceil(K / 2)]` with two numbers each, the low four bits
            first.
        scales: `[..., N, G]`, one for each row and group: floating-point numbers, or bytes that index `tables`.
        zeros: zero points of four-bit integers, `[..., N, G]` bytes; None: all are `INT4_ZERO`.
        source: the source of each row, `[..., N]`; None: there is a single one.
        tables: the numbers of scales that are bytes, float32 `[..., S, 256]`.
        groups: the group of each column, `[..., S, K]`; None: groups are consecutive columns.
        input_scales: the scales of activations, float32 `[..., S]`, if they are static.
        format: the meaning of the arrays.

    Example:
        >>> described = ops.QuantizedFormat("int4", columns=4, group=4, dtype="float32")
        >>> w = ops.QuantizedWeight(jnp.uint8([[0x9A, 0x78]]), jnp.float32([[0.5]]), format=described)
        >>> ops.matmul(jnp.ones((1, 4)), w, layout="nk")
        Array([[1.]], dtype=float32)
    """

    codes: Any
    scales: Any
    zeros: Any = None
    source: Any = None
    tables: Any = None
    groups: Any = None
    input_scales: Any = None
    format: QuantizedFormat = dataclasses.field(default=None, metadata={"static": True})  # pyright: ignore[reportAssignmentType]

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return (*self.codes.shape[:-1], self.format.columns)

    @property
    def ndim(self) -> int:
        """The number of the weight's axes."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The number of the weight's elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the widened weight."""
        return jnp.dtype(self.format.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def is_computed(self) -> bool:
        """True if products quantize activations, which is a contract of its own."""
        return self.format.activations is not None

    def __len__(self) -> int:
        return self.codes.shape[0]

    def matrix(self, *index: Any) -> "QuantizedWeight":
        """Returns a stacked matrix, or several: indices of the first axes."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def map_rows(self, function: Callable[[Any, int], Any]) -> "QuantizedWeight":
        """Replaces every array that has rows by `function(array, axis of the rows, counted from the end)`."""
        return self.map_arrays(lambda x, axis: x if axis is None else function(x, axis))

    def map_arrays(self, function: Callable[[Any, int | None], Any]) -> "QuantizedWeight":
        """Replaces every array; `function` is also given the axis of rows, counted from the end, or None."""
        places = {"codes": -2, "scales": -2, "zeros": -2, "source": -1}
        names = [field.name for field in dataclasses.fields(self) if not field.metadata]
        arrays = {name: x for name in names if (x := getattr(self, name)) is not None}
        return dataclasses.replace(self, **{name: function(x, places.get(name)) for name, x in arrays.items()})


def is_quantized(weight: Any) -> bool:
    """Returns whether a weight has codes and scales."""
    return isinstance(weight, QuantizedWeight)


def numbers_of(weight: QuantizedWeight) -> Array:
    """Returns the float32 numbers of a weight's codes, `[..., N, K]`, less their zero points; all are exact."""
    kind, columns = weight.format.numbers, weight.format.columns
    if kind == "e4m3":
        return lax.bitcast_convert_type(weight.codes, jnp.float8_e4m3fn).astype(ACCUMULATOR)
    codes = jnp.stack([weight.codes & 15, weight.codes >> 4], axis=-1)
    codes = codes.reshape(*weight.codes.shape[:-1], -1)[..., :columns]
    if kind == "e2m1":
        return jnp.take(jnp.asarray(E2M1), codes.astype(jnp.int32), axis=0, mode="clip")
    zeros = INT4_ZERO if weight.zeros is None else by_column(weight, weight.zeros).astype(jnp.int32)
    return (codes.astype(jnp.int32) - zeros).astype(ACCUMULATOR)


def scales_of(weight: QuantizedWeight) -> Array:
    """Returns the float32 scales of a weight, `[..., N, G]`."""
    if weight.tables is None:
        return weight.scales.astype(ACCUMULATOR)
    tables = by_row(weight, weight.tables)
    return jnp.take_along_axis(tables, weight.scales.astype(jnp.int32), axis=-1, mode="clip")


def by_row(weight: QuantizedWeight, shared: Array) -> Array:
    """Returns for each row the entry of its source, `[..., N, W]`, of an array `[..., S, W]`."""
    if weight.source is None:
        return jnp.broadcast_to(shared, (*weight.codes.shape[:-1], shared.shape[-1]))
    return jnp.take_along_axis(shared, weight.source.astype(jnp.int32)[..., None], axis=-2, mode="clip")


def by_column(weight: QuantizedWeight, group_values: Array) -> Array:
    """Returns for each column the entry of its group, `[..., N, K]`, of an array `[..., N, G]`."""
    if weight.groups is None:
        return jnp.repeat(group_values, weight.format.group, axis=-1)[..., : weight.format.columns]
    return jnp.take_along_axis(group_values, by_row(weight, weight.groups).astype(jnp.int32), axis=-1, mode="clip")


def widened(weight: QuantizedWeight) -> Array:
    """Returns the plain weight `rnd(rn(number * scale))` of the format's dtype, with one rounding after the product.

    Example:
        >>> described = ops.QuantizedFormat("int4", columns=4, group=4, dtype="float32")
        >>> w = ops.QuantizedWeight(jnp.uint8([[0x9A, 0x78]]), jnp.float32([[0.5]]), format=described)
        >>> ops.widened(w)
        Array([[ 1. ,  0.5,  0. , -0.5]], dtype=float32)
    """
    products = lax.optimization_barrier(numbers_of(weight) * by_column(weight, scales_of(weight)))
    return lax.stop_gradient(rounded(products, weight.format.dtype))
