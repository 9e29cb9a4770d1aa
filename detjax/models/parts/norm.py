"""RMS norm."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.parameters import Tensors


class RMSNorm(nnx.Module):
    """Division by the root mean square, and a weight for each column (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, *, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(width, dtype))

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns `x / sqrt(mean(x^2) + eps) * weight`."""
        return ops.rms_norm(x, self.weight[...], eps=self.eps)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}
