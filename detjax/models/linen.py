"""Drop-in layers for Flax Linen whose rows do not depend on the batch.

A layer takes the same arguments as the layer of the same name in `flax.linen` and has the same variables. The rows are
the first axis of its inputs. Computation between layers is left to the compiler; `detjax.batch_invariant` covers a
whole model.
"""

import dataclasses
from typing import Any, Final

from flax import linen as nn
from jax import Array

from detjax.invariant import batch_invariant


def _call(layer: Any, variables: Any, mask: Array | None, inputs: tuple[Array | None, ...], **options: Any) -> Array:
    if mask is not None:
        options["mask"] = mask
    return layer.apply(variables, *inputs, **options)


_BY_ROW: Final = {axis: batch_invariant(_call, (None, None, axis, 0)) for axis in (0, None)}
"""Calls a layer one row at a time, by the axis of the rows in its mask."""


def _by_row(base: Any) -> Any:
    """Returns the `__call__` of a layer that calls its base class one row at a time."""
    names = [field.name for field in dataclasses.fields(base) if field.init and field.name not in ("parent", "name")]

    def __call__(self: Any, *inputs: Any, **options: Any) -> Any:
        if self.is_initializing():
            return base.__call__(self, *inputs, **options)
        plain = base(**{name: getattr(self, name) for name in names}, parent=None)
        mask = options.pop("mask", None)  # it has rows, or one that all share
        axis = None if mask is None or mask.shape[0] != inputs[0].shape[0] else 0
        return _BY_ROW[axis](plain, self.variables, mask, inputs, **options)

    return __call__


class Dense(nn.Dense):
    """`flax.linen.Dense` with matrix products under contract."""

    __call__ = _by_row(nn.Dense)


class DenseGeneral(nn.DenseGeneral):
    """`flax.linen.DenseGeneral` with matrix products under contract."""

    __call__ = _by_row(nn.DenseGeneral)


class Embed(nn.Embed):
    """`flax.linen.Embed`, whose gradient adds tokens in ascending order. `attend` is Flax' own."""

    __call__ = _by_row(nn.Embed)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm`, one row at a time."""

    __call__ = _by_row(nn.LayerNorm)


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm`, one row at a time."""

    __call__ = _by_row(nn.RMSNorm)


class Conv(nn.Conv):
    """`flax.linen.Conv`, one row at a time."""

    __call__ = _by_row(nn.Conv)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention`; a row attends to itself, its own keys, and its own mask.

    Caches are refused, since a call would write to them.
    """

    __call__ = _by_row(nn.MultiHeadDotProductAttention)
