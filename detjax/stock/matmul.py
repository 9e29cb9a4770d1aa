"""Matrix products by XLA, with the linear layer's epilogues."""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.options import Activation, Epilogue, WeightLayout
from detjax.operands.products import MatmulOperands
from detjax.stock.dot import dot_operands

DIFFERENTIATED_BY_JAX: Final = True


def matmul(operands: MatmulOperands, *, layout: WeightLayout, epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """See `detjax.ops.matmul`."""
    x, w, bias, residual = operands
    transposed = w if layout == "kn" else jnp.swapaxes(w, -1, -2)

    def linear(index: int | None) -> Array:
        part = transposed if index is None else transposed[index]
        z = jnp.matmul(*dot_operands(x, part), precision="highest", preferred_element_type=ACCUMULATOR)
        if bias is None:
            return z
        return z + jnp.broadcast_to((bias if index is None else bias[index]).astype(ACCUMULATOR), z.shape)

    if epilogue.gated:
        y = gated(linear(0), linear(1), epilogue)
    else:
        y = linear(None)
        if epilogue.activation is not None:
            y = activation(epilogue.activation)(y)
    if epilogue.soft_cap is not None:
        y = epilogue.soft_cap * jnp.tanh(y / epilogue.soft_cap)
    if residual is not None:
        y = y + residual.astype(ACCUMULATOR)
    return y.astype(out_dtype)


def gated(gate: Array, up: Array, epilogue: Epilogue) -> Array:
    """Returns the gated activation of two sums."""
    assert epilogue.activation is not None
    function, clamp = activation(epilogue.activation), epilogue.clamp
    if clamp is None:
        return function(gate) * up
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * function(clamp.slope * gate) / clamp.slope


def activation(name: Activation) -> Callable[[Array], Array]:
    """Returns JAX's activation function of this name."""
    if name.startswith("gelu"):
        return lambda z: jax.nn.gelu(z, approximate=name == "gelu_tanh")
    return getattr(jax.nn, name)
