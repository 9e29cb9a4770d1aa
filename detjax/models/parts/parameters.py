"""Initial values of parameters, and the checkpoint tensors that a parameter is made of."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike

from detjax.operands.accumulated_weight import Weight
from detjax.operands.rounding import rounded


def random_weight(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[Array]:
    """Returns a weight of normal numbers whose products keep the variance of the input."""
    return nnx.Param(_normal(rngs.params(), shape, jnp.dtype(dtype)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return rounded(jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5, dtype)


def zero_bias(is_present: bool, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[Array] | None:
    """Returns a bias of zeros, or None."""
    return nnx.Param(jnp.zeros(shape, dtype)) if is_present else None


class FixedWeight(nnx.Variable[Array]):
    """A weight without gradient that no optimizer changes, not even by decay.

    A part declares such a weight by this class in place of `nnx.Param`. Checkpoints and digests include it.
    """


def optional(parameter: nnx.Param[Array] | None) -> Weight | None:
    """Returns a parameter's array, or None for a parameter that does not exist."""
    return None if parameter is None else parameter[...]


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The checkpoint tensors that a parameter is made of.

    Attributes:
        names: the tensors' names within their part, in order.
        rows: the number of rows of each tensor if they are concatenated along the first axis. None: the parameter is
            one tensor, or the tensors are stacked along new first axes.
        groups: the number of groups of rows in a single tensor; each group has its share of the parameter's first
            `rows`, then of the next ones, and so on. None: the tensor's rows are in the parameter's order.
        stacked: the sizes of the new axes; None: one axis.
        transposed: whether the last two axes of a single tensor are swapped.
        pairs: the layout of the parameter's second axis, of size 2, and its third, which a single tensor joins:
            "halves", such as all gate rows and then all up rows, or "interleaved". None: they are not joined.
        joined: whether a single tensor joins the parameter's first two axes, the first one of size 2.
        head_order: the order in which the parameter has the rows of a head, as their indices in the tensors'. None: as
            in the tensors.
        ordered: the number of the parameter's first rows, whole heads, that `head_order` applies to; None: all.
        other_form: another form that checkpoints may hold, and that is never written; None: there is just one form.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    groups: int | None = None
    stacked: tuple[int, ...] | None = None
    transposed: bool = False
    pairs: Literal["halves", "interleaved"] | None = None
    joined: bool = False
    head_order: tuple[int, ...] | None = None
    ordered: int | None = None
    other_form: "Tensors | None" = None

    @property
    def _axes(self) -> int:
        """The number of leading axes that the parameter has and its tensors do not."""
        return 1 if self.stacked is None else len(self.stacked)

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the tensors' shapes, given the parameter's."""
        if len(self.names) == 1:
            if self.joined:
                return [(shape[0] * shape[1], *shape[2:])]
            joined = (shape[0], shape[1] * shape[2], *shape[3:]) if self.pairs else shape
            return [(*joined[:-2], joined[-1], joined[-2]) if self.transposed else joined]
        if self.rows is None:
            return [shape[self._axes :]] * len(self.names)
        return [(rows, *shape[1:]) for rows in self.rows]

    @property
    def keeps_order(self) -> bool:
        """True if tensors hold the parameter's numbers in order, so that slices of them make a slice of it."""
        reordered = self.groups, self.pairs, self.head_order
        return reordered == (None, None, None) and not self.transposed and not self.joined

    def part(
        self, shape: tuple[int, ...], axis: int, outputs: slice
    ) -> tuple["Tensors", list[tuple[int, slice | None]]]:
        """Returns how to join a slice of a parameter that `keeps_order`, and the tensor slices that it is made of.

        Args:
            shape: the parameter's shape.
            axis: the axis of outputs, counted from the end.
            outputs: the slice, with a start and a stop.

        Returns:
            The tensors, and for each its index in `names` and the outputs needed of it; None: all.
        """
        position = len(shape) + axis
        if len(self.names) == 1 or position >= (1 if self.rows is not None else self._axes):
            return self, [(index, outputs) for index in range(len(self.names))]
        if self.rows is None:
            grid = np.arange(len(self.names)).reshape(shape[: self._axes])[(slice(None),) * position + (outputs,)]
            chosen = [int(index) for index in grid.flat]
            names = tuple(self.names[index] for index in chosen)
            return dataclasses.replace(self, names=names, stacked=grid.shape), [(index, None) for index in chosen]
        parts, begin = dict[int, slice](), 0
        for index, rows in enumerate(self.rows):
            first, last = max(outputs.start - begin, 0), min(outputs.stop - begin, rows)
            if first < last:
                parts[index] = slice(first, last)
            begin += rows
        names = tuple(self.names[index] for index in parts)
        counts = tuple(part.stop - part.start for part in parts.values())
        return dataclasses.replace(self, names=names, rows=counts), list(parts.items())

    def join(self, tensors: Iterable[np.ndarray]) -> np.ndarray:
        """Returns the parameter that the tensors make. Tensors are copied in one at a time, to save memory."""
        joined = self._in_tensor_order(tensors)
        return joined if self.head_order is None else self._by_head(joined, np.array(self.head_order))

    def _in_tensor_order(self, tensors: Iterable[np.ndarray]) -> np.ndarray:
        """Returns the parameter that the tensors make, with the rows of heads in the tensors' order."""
        if len(self.names) == 1:
            (x,) = tensors
            if self.joined:
                return x.reshape(2, -1, *x.shape[1:])
            x = np.swapaxes(x, -1, -2) if self.transposed else x
            if self.pairs == "interleaved":
                return x.reshape(len(x), -1, 2, *x.shape[2:]).swapaxes(1, 2)
            if self.pairs == "halves":
                return x.reshape(len(x), 2, -1, *x.shape[2:])
            return x if self.groups is None else self._by_rows(x, self.groups)
        joined, begin = np.empty(0), 0
        for index, tensor in enumerate(tensors):
            rows = tensor if self.rows is not None else tensor[None]
            if index == 0:
                count = len(self.names) if self.rows is None else sum(self.rows)
                joined = np.empty((count, *rows.shape[1:]), rows.dtype)
            joined[begin : begin + len(rows)] = rows
            begin += len(rows)
        return joined if self.stacked is None else joined.reshape(*self.stacked, *joined.shape[1:])

    def split(self, parameter: np.ndarray) -> list[np.ndarray]:
        """Returns the tensors of a parameter: the inverse of `join`."""
        if self.head_order is not None:
            parameter = self._by_head(parameter, np.argsort(self.head_order))
        if self.joined:
            return [parameter.reshape(-1, *parameter.shape[2:])]
        if len(self.names) == 1:
            x = parameter if self.groups is None else self._by_groups(parameter, self.groups)
            if self.pairs:
                x = (x.swapaxes(1, 2) if self.pairs == "interleaved" else x).reshape(len(x), -1, *x.shape[3:])
            return [np.swapaxes(x, -1, -2) if self.transposed else x]
        if self.rows is not None:
            return np.split(parameter, np.cumsum(self.rows)[:-1])
        return list(parameter.reshape(-1, *parameter.shape[self._axes :]))

    def _by_head(self, x: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Reorders the rows of each head."""
        first = np.arange(len(x) if self.ordered is None else self.ordered).reshape(-1, len(order))
        return np.concatenate([x[first[:, order].reshape(-1)], x[first.size :]])

    def _by_rows(self, x: np.ndarray, groups: int) -> np.ndarray:
        """Reorders the rows of a grouped tensor into the parameter's order."""
        assert self.rows is not None
        ends = np.cumsum([count // groups for count in self.rows])[:-1]
        parts = np.split(x.reshape(groups, -1, *x.shape[1:]), ends, axis=1)
        return np.concatenate([part.reshape(-1, *x.shape[1:]) for part in parts])

    def _by_groups(self, x: np.ndarray, groups: int) -> np.ndarray:
        """Reorders the parameter's rows into groups: the inverse of `_by_rows`."""
        assert self.rows is not None
        parts = np.split(x, np.cumsum(self.rows)[:-1])
        return np.concatenate([part.reshape(groups, -1, *x.shape[1:]) for part in parts], axis=1).reshape(x.shape)
