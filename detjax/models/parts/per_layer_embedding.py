"""Embeddings of a token for each layer: a second input of the layers, next to the residual stream."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from detjax import ops
from detjax.models.parts.embedding import Embedding
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.parameters import Tensors, random_weight
from detjax.models.parts.sharding import OutputSharding, devices, gathered_matmul, outputs
from detjax.operands.options import Activation

_MEAN_FACTOR = 2**-0.5
"""The factor of the sum of a token's two parts, which keeps their variance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerOptions:
    """The shape of per-layer embeddings.

    Attributes:
        width: columns of a token's embedding in a layer.
        vocab_size: rows of the table, at least the number of tokens.
    """

    width: int
    vocab_size: int


class PerLayerEmbedding(nnx.Module):
    """A table with a row for each token and layer, and a projection of the token's embedding, normalized.

    The sum of both, divided by the square root of 2, is the input of the layer.
    """

    CHECKPOINT_NAMES = {"embedding": "embed_tokens_per_layer", "norm": "per_layer_projection_norm"}  # noqa: RUF012

    def __init__(
        self, width: int, layers: int, options: PerLayerOptions, *, eps: float, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        """Makes random weights for embeddings of `width` columns, and for a number of layers."""
        columns, factor = layers * options.width, options.width**0.5
        self.options = options
        self.width = width
        self.columns = columns
        self.embedding = Embedding(options.vocab_size, columns, rngs=rngs, dtype=dtype, factor=factor)
        self.projection = random_weight(rngs, (columns, width), dtype)
        self.norm = RMSNorm(options.width, eps=eps, dtype=dtype)

    def __call__(self, tokens: Int[Array, "*N"], x: Float[Array, "*N D"]) -> Float[Array, "*N L P"]:
        """Returns the inputs of all layers, given the tokens and their embeddings.

        No factor but the table's is rounded to the model's dtype.
        """
        projected = gathered_matmul(x, self.projection[...], sharding=self.shardings(devices())["projection"])
        projected = ops.scale(projected, self.width**-0.5, factor_dtype=jnp.float32)
        by_layer = (*x.shape[:-1], -1, self.options.width)
        both = ops.add(self.norm(projected.reshape(by_layer)), self.embedding(tokens).reshape(by_layer))
        return ops.scale(both, _MEAN_FACTOR, factor_dtype=jnp.float32)

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter of this part itself."""
        return {"projection": outputs(self.columns, devices)}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"projection": Tensors(("per_layer_model_projection.weight",))}


class PerLayerGate(nnx.Module):
    """A layer's last step: its per-layer input, gated by the residual stream, projected, normalized, and added."""

    CHECKPOINT_NAMES = {"norm": "post_per_layer_input_norm"}  # noqa: RUF012

    def __init__(
        self,
        width: int,
        options: PerLayerOptions,
        activation: Activation,
        *,
        eps: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ) -> None:
        self.width = width
        self.options = options
        self.activation: Activation = activation
        self.gate = random_weight(rngs, (options.width, width), dtype)
        self.projection = random_weight(rngs, (width, options.width), dtype)
        self.norm = RMSNorm(width, eps=eps, dtype=dtype)

    def __call__(self, x: Float[Array, "*N D"], inputs: Float[Array, "*N P"]) -> Float[Array, "*N D"]:
        """Returns the residual stream after this step; `inputs` has the tokens' embeddings in this layer."""
        shardings = self.shardings(devices())
        options: dict[str, Any] = {"sharding": shardings["gate"], "activation": self.activation}
        y = ops.multiply(gathered_matmul(x, self.gate[...], **options), inputs)
        y = gathered_matmul(y, self.projection[...], sharding=shardings["projection"])
        return ops.add(self.norm(y), x)

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter of this part itself."""
        return {"gate": outputs(self.options.width, devices), "projection": outputs(self.width, devices)}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        names = {"gate": "per_layer_input_gate.weight", "projection": "per_layer_projection.weight"}
        return {parameter: Tensors((name,)) for parameter, name in names.items()}
