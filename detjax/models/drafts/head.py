"""The interface of heads that draft, and the parts that they share."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32

from detjax import ops
from detjax.models.configuration.config import DecoderConfig
from detjax.models.parts.embedding import Embedding
from detjax.models.parts.parameters import Tensors, random_weight
from detjax.operands.kv_pages import Queries


class Projection(nnx.Module):
    """A linear map without a bias. Its weight is `[N, K]`, rows being outputs, as in checkpoints."""

    def __init__(self, width: int, outputs: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.weight = random_weight(rngs, (outputs, width), dtype)

    def __call__(self, x: Float[Array, "*N K"]) -> Float[Array, "*N D"]:
        """Returns the outputs for each row."""
        return ops.matmul(x, self.weight[...], layout="nk")

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}


class DraftHead(nnx.Module):
    """One layer that guesses the token after the next one, from the next token and the target's hidden states.

    Row `j` sees the target's features at token `j` and the embedding of token `j + 1`, and guesses token `j + 2`. The
    head has keys and values of its own, at position `j`.

    To guess further tokens, a row takes the previous row's `chained` hidden states in place of `mapped` features, and
    the token that was guessed. Keys and values of such rows come from guesses; rows with the target's features replace
    them once the tokens are known.

    Attributes:
        config: the shape and options of the layer, as a decoder with one layer.
        depths: the layers of the target whose incoming residual streams are the features, side by side. None: the
            features are the target's normalized last hidden states.
        embedding: the head's own embedding; None: the target's serves.
        lm_head: the head's own table of logits; None: the target's serves.
        projection: maps features, or features and an embedding, to the layer's width.
    """

    METHOD: ClassVar[str]
    """The name of this kind of head, as in vLLM's options."""

    config: DecoderConfig
    depths: tuple[int, ...] | None
    embedding: Embedding | None
    lm_head: Embedding | None
    projection: Projection

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights, activations and state."""
        return self.projection.weight[...].dtype

    def mapped(self, features: Float[Array, "*N F"]) -> Float[Array, "*N D"]:
        """Returns features in the form in which rows take them."""
        return features

    def __call__(
        self, embedded: Float[Array, "*N D"], hidden: Float[Array, "*N D"], queries: Queries, state: Any
    ) -> tuple[Float[Array, "*N D"], Any]:
        """Returns the hidden states of rows, and the layer's state with their keys and values in it.

        Args:
            embedded: the embedding of each row's next token.
            hidden: the mapped features of each row, or the previous row's chained hidden states.
            queries: the positions of the rows in their requests.
            state: the layer's state.
        """
        raise NotImplementedError

    def chained(self, hidden: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns what the row after a guess takes, given the hidden states of the row that guessed."""
        return hidden

    def normalized(self, hidden: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns the hidden states that the table of logits multiplies."""
        raise NotImplementedError

    def own_logits(self, hidden: Float[Array, "*N D"]) -> Float32[Array, "*N v"]:
        """Returns the logits of rows from the head's own table."""
        assert self.lm_head is not None
        return self.lm_head.logits(self.normalized(hidden))


def side_by_side(*parts: Float[Array, "*N _"]) -> Float[Array, "*N K"]:
    """Returns the columns of arrays side by side."""
    return jnp.concatenate(parts, axis=-1)
