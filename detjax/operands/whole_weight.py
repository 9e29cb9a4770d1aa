"""The interface of weights that operations take as a whole, in place of arrays."""

from types import EllipsisType
from typing import Any

import jax.numpy as jnp


class WholeWeight:
    """A weight that a module's parameter may hold: `parameter[...]` is the weight itself."""

    def __getitem__[W](self: W, index: EllipsisType) -> W:
        """Returns the weight itself for `...`, so that a module's parameter may hold one."""
        if index is not Ellipsis:
            name = type(self).__name__
            raise TypeError(f"{name}: index {index!r}; accepted: ..., because operations take it as a whole")
        return self


class WeightWithValue(WholeWeight):
    """A weight and what belongs to it."""

    value: Any
    """The weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.value.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The weight's dtype."""
        return self.value.dtype
