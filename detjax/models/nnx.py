"""Drop-in layers for Flax NNX whose rows do not depend on the batch, and a function that puts them into a model.

A layer takes the same arguments as the layer of the same name in `flax.nnx` and has the same variables. The rows are
the first axis of its inputs. Computation between layers is left to the compiler; `detjax.batch_invariant` covers a
whole model.
"""

from typing import Any, Final

from flax import nnx
from jax import Array

from detjax.invariant import batch_invariant


@batch_invariant
class Linear(nnx.Linear):
    """`flax.nnx.Linear` with matrix products under contract."""


@batch_invariant
class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` with matrix products under contract."""


@batch_invariant
class Embed(nnx.Embed):
    """`flax.nnx.Embed`, whose gradient adds tokens in ascending order; `attend` gives logits."""

    attend = batch_invariant(nnx.Embed.attend, (None, 0))


@batch_invariant
class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, one row at a time."""


@batch_invariant
class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, one row at a time."""


@batch_invariant
class Conv(nnx.Conv):
    """`flax.nnx.Conv`, one row at a time."""


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention`; a row attends to itself, its own keys, and its own mask.

    Caches are refused, since a call would write to them.
    """

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        **options: Any,
    ) -> Array:
        """Returns the attended values; `mask` has rows, or one that all share."""
        mask_axis = None if mask is None or mask.shape[0] != inputs_q.shape[0] else 0
        return _ATTENTION[mask_axis](self, inputs_q, inputs_k, inputs_v, mask, **options)


def _attention(
    layer: Any, inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None, mask: Array | None, **options: Any
) -> Array:
    return nnx.MultiHeadAttention.__call__(layer, inputs_q, inputs_k, inputs_v, mask=mask, **options)


_ATTENTION: Final = {axis: batch_invariant(_attention, (None, 0, 0, 0, axis)) for axis in (0, None)}


_LAYERS: Final[dict[Any, Any]] = {
    getattr(nnx, layer.__name__): layer
    for layer in (Linear, LinearGeneral, Embed, LayerNorm, RMSNorm, Conv, MultiHeadAttention)
}


def replace_layers(module: nnx.Module) -> int:
    """Replaces, in place, every layer of a module that has a drop-in layer, and returns the number of replaced layers.

    Variables are unchanged, so checkpoints and optimizers see no difference. Subclasses of Flax' layers are not
    replaced, because they may compute something else.
    Args:
        module: the model.

    Raises:
        ValueError: no layer could be replaced.
    """
    layers = [layer for _, layer in nnx.iter_modules(module) if type(layer) in _LAYERS]
    if not layers:
        names = ", ".join(layer.__name__ for layer in _LAYERS.values())
        raise ValueError(
            f"replace_layers: {type(module).__name__} has no layer to replace; accepted: flax.nnx's {names}"
        )
    for layer in layers:
        object.__setattr__(layer, "__class__", _LAYERS[type(layer)])
    return len(layers)
