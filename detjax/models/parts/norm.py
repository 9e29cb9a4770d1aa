"""RMS norm and layer norm."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.parameters import Tensors
from detjax.operands.products import NormalizedRows
from detjax.ops.norm import gives_codes


class RMSNorm(nnx.Module):
    """Division by the root mean square, with a weight for each column (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, *, eps: float, dtype: DTypeLike, offset: float = 0.0) -> None:
        """Makes a norm that multiplies by 1; `offset` is added to the weight: 1.0 if checkpoints store `weight - 1`."""
        self.eps, self.offset = eps, offset
        self.weight = nnx.Param(jnp.full(width, 1 - offset, dtype))

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns `x / sqrt(mean(x^2) + eps) * (weight + offset)`."""
        return ops.rms_norm(x, self.weight[...], eps=self.eps, weight_offset=self.offset)

    def for_product(self, x: Float[Array, "*N D"], weight: Any) -> Float[Array, "*N D"] | NormalizedRows:
        """Returns the norm of `x` for a product with a weight, which computes it if that saves a kernel."""
        if not gives_codes(x, weight):
            return self(x)
        return NormalizedRows(x, self.weight[...], eps=self.eps, weight_offset=self.offset)

    def after_adding(
        self, x: Float[Array, "*N D"], *, residual: Float[Array, "*N D"]
    ) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"]]:
        """Returns the norm of `x + residual`, and the sum."""
        return ops.rms_norm(x, self.weight[...], eps=self.eps, weight_offset=self.offset, residual=residual)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}


class LayerNorm(nnx.Module):
    """Division by the standard deviation, with a weight and a bias for each column (Ba et al. 2016)."""

    def __init__(self, width: int, *, eps: float, dtype: DTypeLike) -> None:
        """Makes a norm with weights 1 and biases 0; `eps` is added to the variance."""
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(width, dtype))
        self.bias = nnx.Param(jnp.zeros(width, dtype))

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`."""
        return ops.layer_norm(x, self.weight[...], self.bias[...], eps=self.eps)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",)), "bias": Tensors(("bias",))}
