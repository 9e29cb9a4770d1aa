"""Small functions and constants that all backends share."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from detjax.operands.options import Activation, Clamp, Epilogue

LOWEST: Final = float(np.finfo(np.float32).min)
"""The lowest finite float32."""

ACTIVATIONS: Final[Mapping[Activation, Callable[[Array], Array]]] = {
    "silu": jax.nn.silu,
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "relu": jax.nn.relu,
}
"""JAX's activation functions. Kernels have their own versions, made of their chip's instructions."""


def ceil_div(size: int, divisor: int) -> int:
    """Returns `size / divisor`, rounded up."""
    return -(-size // divisor)


def round_down(size: int, multiple: int) -> int:
    """Returns `size` rounded down to a multiple of `multiple`."""
    return size // multiple * multiple


def round_up(size: int, multiple: int) -> int:
    """Returns `size` rounded up to a multiple of `multiple`."""
    return ceil_div(size, multiple) * multiple


def unique_scatter_indices(is_kept: Array, place: Array, size: int) -> Array:
    """Returns indices of a scatter along an axis of length `size`; entries that are not kept get indices beyond it.

    All indices are unique, so XLA need not sort them.
    """
    beyond = size + jnp.arange(is_kept.size, dtype=jnp.int32).reshape(is_kept.shape)
    return jnp.where(is_kept, place, beyond)


def flat_rows(x: Array) -> Array:
    """Reshapes rows `[..., D]` to `[M, D]`."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def parts(z: Array) -> list[Array]:
    """Splits biased sums `[rows, parts, N]` into their parts `[rows, N]`: one, or gate and up."""
    return [z[:, part] for part in range(z.shape[1])]


def activated(
    sums: Sequence[Array], epilogue: Epilogue, activations: Mapping[Activation, Callable[[Array], Array]] = ACTIVATIONS
) -> Array:
    """Returns the result of a matmul's epilogue before the residual: activation, gate and soft cap of the biased sums.

    Args:
        sums: float32 `[rows, N]`, one array, or two (gate and up) if the epilogue is gated.
        epilogue: the steps to take.
        activations: this backend's activation functions.
    """
    z = sums[0]
    if epilogue.clamp is not None:
        assert epilogue.activation is not None and epilogue.gated
        z = _clamped(sums, epilogue.clamp, activations[epilogue.activation])
    elif epilogue.activation is not None:
        z = activations[epilogue.activation](z)
    if epilogue.gated and epilogue.clamp is None:
        z = z * sums[1]
    return z if epilogue.soft_cap is None else epilogue.soft_cap * jnp.tanh(z / epilogue.soft_cap)


def _clamped(sums: Sequence[Array], clamp: Clamp, activation: Callable[[Array], Array]) -> Array:
    """Returns the gated activation of two clamped sums; see `Clamp`. The gradient at a bound is the one inside."""
    gate, up = sums
    gate = jnp.where(gate > clamp.limit, clamp.limit, gate)
    up = jnp.where(up > clamp.limit, clamp.limit, jnp.where(up < -clamp.limit, -clamp.limit, up))
    return (up + 1.0) * (activation(gate * clamp.slope) * (1.0 / clamp.slope))
