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


def _rows_of_their_own(layer: Any, base: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a layer one row at a time; a mask has rows, or one that all share."""
    if layer.is_initializing():
        return base.__call__(layer, *inputs, **options)
    names = [field.name for field in dataclasses.fields(base) if field.init and field.name not in ("parent", "name")]
    plain = base(**{name: getattr(layer, name) for name in names}, parent=None)
    mask = options.pop("mask", None)
    axis = None if mask is None or mask.shape[0] != inputs[0].shape[0] else 0
    return _BY_ROW[axis](plain, layer.variables, mask, inputs, **options)


class Dense(nn.Dense):
    """`flax.linen.Dense` with matrix products under contract."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """See `flax.linen.Dense`."""
        return _rows_of_their_own(self, nn.Dense, inputs, options)


class DenseGeneral(nn.DenseGeneral):
    """`flax.linen.DenseGeneral` with matrix products under contract."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """See `flax.linen.DenseGeneral`."""
        return _rows_of_their_own(self, nn.DenseGeneral, inputs, options)


class Embed(nn.Embed):
    """`flax.linen.Embed`, whose gradient adds tokens in ascending order. `attend` is Flax' own."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """See `flax.linen.Embed`."""
        return _rows_of_their_own(self, nn.Embed, inputs, options)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm`, one row at a time."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """See `flax.linen.LayerNorm`."""
        return _rows_of_their_own(self, nn.LayerNorm, inputs, options)


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm`, one row at a time."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """See `flax.linen.RMSNorm`."""
        return _rows_of_their_own(self, nn.RMSNorm, inputs, options)


class Conv(nn.Conv):
    """`flax.linen.Conv`, one row at a time."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """See `flax.linen.Conv`."""
        return _rows_of_their_own(self, nn.Conv, inputs, options)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention`; a row attends to itself, its own keys, and its own mask.

    Caches are refused, since a call would write to them.
    """

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """See `flax.linen.MultiHeadDotProductAttention`."""
        return _rows_of_their_own(self, nn.MultiHeadDotProductAttention, inputs, options)
