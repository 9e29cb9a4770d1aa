"""What parts need for their parameters: initial values, and the checkpoint's tensors that a parameter is made of."""

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
    """Returns a weight of normal numbers that keep the variance of what is multiplied by them."""
    return nnx.Param(_normal(rngs.params(), shape, jnp.dtype(dtype)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return rounded(jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5, dtype)


def zero_bias(is_present: bool, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[Array] | None:
    """Returns a bias of zeros, or None."""
    return nnx.Param(jnp.zeros(shape, dtype)) if is_present else None


class FixedWeight(nnx.Variable[Array]):
    """A weight that gradients do not reach and that no optimizer changes, decay included.

    A part declares such a weight by this class in place of `nnx.Param`. Checkpoints and digests hold it as any other.
    """


def optional(parameter: nnx.Param[Array] | None) -> Weight | None:
    """Returns a parameter's array, or None if there is no such parameter."""
    return None if parameter is None else parameter[...]


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The checkpoint's tensors that a parameter is made of.

    Attributes:
        names: the tensors' names within their part, in order.
        rows: for tensors that are concatenated along the first axis, how many rows each has. None: the parameter is
            one tensor, or the tensors are stacked along new first axes.
        groups: into how many groups the one tensor's rows fall, each with its share of the parameter's first `rows`,
            then of the next ones, and so on; None: its rows are the parameter's.
        stacked: the sizes of these axes; None: there is one.
        transposed: whether the one tensor has the parameter's last two axes in the other order.
        pairs: how the one tensor has the parameter's second axis, of size 2, and its third as one: as "halves", such as
            the rows of gate and then those of up, or by "turns"; None: it has them apart.
        other_form: what checkpoints may hold instead, and what is never written; None: there is nothing.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    groups: int | None = None
    stacked: tuple[int, ...] | None = None
    transposed: bool = False
    pairs: Literal["halves", "turns"] | None = None
    other_form: "Tensors | None" = None

    @property
    def _axes(self) -> int:
        """How many axes of the parameter no tensor has."""
        return 1 if self.stacked is None else len(self.stacked)

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the tensors' shapes, given the parameter's."""
        if len(self.names) == 1:
            joined = (shape[0], shape[1] * shape[2], *shape[3:]) if self.pairs else shape
            return [(*joined[:-2], joined[-1], joined[-2]) if self.transposed else joined]
        if self.rows is None:
            return [shape[self._axes :]] * len(self.names)
        return [(rows, *shape[1:]) for rows in self.rows]

    @property
    def keeps_order(self) -> bool:
        """Whether the parameter has its tensors' numbers in their order, so that parts of them make a part of it."""
        return self.groups is None and not self.transposed and self.pairs is None

    def part(
        self, shape: tuple[int, ...], axis: int, outputs: slice
    ) -> tuple["Tensors", list[tuple[int, slice | None]]]:
        """Returns what joins a part of a parameter that `keeps_order`, and of which tensors' parts it is made.

        Args:
            shape: the parameter's shape.
            axis: the axis of outputs, counted from the end.
            outputs: which of them, from a start to a stop.

        Returns:
            The tensors, and for each of them its index in `names` and which of its outputs are needed; None: all.
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
        """Returns the parameter that the tensors make. Several are copied one by one: not all are held twice."""
        if len(self.names) == 1:
            (x,) = tensors
            x = np.swapaxes(x, -1, -2) if self.transposed else x
            if self.pairs == "turns":
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
        if len(self.names) == 1:
            x = parameter if self.groups is None else self._by_groups(parameter, self.groups)
            if self.pairs:
                x = (x.swapaxes(1, 2) if self.pairs == "turns" else x).reshape(len(x), -1, *x.shape[3:])
            return [np.swapaxes(x, -1, -2) if self.transposed else x]
        if self.rows is not None:
            return np.split(parameter, np.cumsum(self.rows)[:-1])
        return list(parameter.reshape(-1, *parameter.shape[self._axes :]))

    def _by_rows(self, x: np.ndarray, groups: int) -> np.ndarray:
        """The rows of a tensor in groups, in the parameter's order."""
        assert self.rows is not None
        ends = np.cumsum([count // groups for count in self.rows])[:-1]
        parts = np.split(x.reshape(groups, -1, *x.shape[1:]), ends, axis=1)
        return np.concatenate([part.reshape(-1, *x.shape[1:]) for part in parts])

    def _by_groups(self, x: np.ndarray, groups: int) -> np.ndarray:
        """The parameter's rows in groups: the inverse of `_by_rows`."""
        assert self.rows is not None
        parts = np.split(x, np.cumsum(self.rows)[:-1])
        return np.concatenate([part.reshape(groups, -1, *x.shape[1:]) for part in parts], axis=1).reshape(x.shape)
