"""Lazy checkpoint parameters: a host reads only the slices that it needs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.parts.parameters import Tensors


@dataclasses.dataclass(frozen=True)
class LazyParameter:
    """A placeholder for a parameter's array, which is read when it is indexed along one axis, or as a whole by NumPy.

    Attributes:
        tensors: how the parameter is made of the stored tensors.
        stored: these tensors, in order.
        shape: the parameter's shape.
        dtype: its dtype in the decoder.
    """

    tensors: Tensors
    stored: Sequence[StoredTensor]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        """Returns the outputs `index[1]`, a slice; `index` is an ellipsis, this slice, and full slices after it.

        Raises:
            CheckpointError: a file has become unreadable, or a finite value would overflow.
        """
        axis, outputs = 1 - len(index), index[1]
        if not self.tensors.keeps_order or not all(tensor.has_parts for tensor in self.stored):
            return self._whole[index]
        tensors, chosen = self.tensors.part(self.shape, axis, outputs)
        joined = tensors.join(
            self.stored[at].read(self.dtype) if part is None else self.stored[at].read_part(axis, part, self.dtype)
            for at, part in chosen
        )
        begin = self.ndim + axis
        return joined.reshape(*self.shape[:begin], outputs.stop - outputs.start, *self.shape[begin + 1 :])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the whole parameter.

        Raises:
            CheckpointError: a file has become unreadable, or a finite value would overflow.
        """
        return np.asarray(self._whole, dtype, copy=copy)

    @functools.cached_property
    def _whole(self) -> np.ndarray:
        return self.tensors.join(tensor.read(self.dtype) for tensor in self.stored)
