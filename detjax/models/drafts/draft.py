"""A head that drafts, together with its target."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int64

from detjax.models.cache import KVCache
from detjax.models.decoder import Decoder, ImageRows
from detjax.models.drafts.head import DraftHead, side_by_side
from detjax.models.mesh import everywhere
from detjax.models.network import Network, Weights, split
from detjax.operands.kv_pages import Queries
from detjax.operands.rounding import rounded
from detjax.runtime import compilation


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A head that drafts tokens for a model, its target.

    Attributes:
        target: the model that tokens are drafted for.
        head: the head.
        target_ids: the target's token of each token that the head can guess; None: they are the same tokens.
    """

    target: Decoder
    head: DraftHead
    target_ids: Int64[np.ndarray, "v"] | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the head's weights and state."""
        return self.head.dtype

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the head can guess."""
        return self.target.config.vocab_size if self.target_ids is None else len(self.target_ids)

    def logits(self, ids: Any) -> Float32[Array, "B t v"]:
        """Returns logits `[B, T - 1, v]`; row `j` guesses the token after `ids[j + 1]`.

        Args:
            ids: `[B, T]`, whole texts of equal length, at least 2 tokens within the target's vocabulary.

        Raises:
            ValueError: `ids` has another number of axes, another dtype, fewer tokens, or a token beyond the vocabulary.
        """
        tokens, vocabulary = np.asarray(ids), self.target.config.vocab_size
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or tokens.shape[1] < 2 or not tokens.size:
            raise ValueError(
                f"Draft.logits: ids has shape {tokens.shape} and dtype {tokens.dtype}; accepted: integers of shape "
                "[B, T] with T >= 2"
            )
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(
                f"Draft.logits: ids holds tokens from {tokens.min()} to {tokens.max()}; accepted: 0 to {vocabulary - 1}"
            )
        batch, length = tokens.shape
        tokens = jnp.asarray(tokens, jnp.int32)
        cache = self.target.empty_cache(batch, length)
        queries = cache.next_queries(jnp.full(batch, length, jnp.int32))
        _, features, _ = target_states(self.target, self.head.depths, tokens, queries, cache.state)
        cache = KVCache.empty(self.head.config, batch, length - 1, self.dtype)
        queries = cache.next_queries(jnp.full(batch, length - 1, jnp.int32))
        state = jax.device_put(cache.state[0], everywhere(self.target.mesh))
        hidden, _ = self.rows(tokens[:, 1:], self.mapped(features[:, :-1]), queries, state)
        return self.row_logits(hidden)

    def mapped(self, features: Float[Array, "*N F"]) -> Float[Array, "*N D"]:
        """Returns the target's features in the form in which `rows` takes them."""
        return _mapped(*split(self.head), rounded(features, self.dtype))

    def rows(
        self, tokens: Int[Array, "*N"], hidden: Float[Array, "*N D"], queries: Queries, state: Any
    ) -> tuple[Float[Array, "*N D"], Any]:
        """Returns the hidden states of the head's rows, and its state with their keys and values in it.

        Args:
            tokens: the token after each row's.
            hidden: mapped features, or the chained hidden states of rows that guessed these tokens.
            queries: the positions of the rows.
            state: the head's state.
        """
        embedding = self.head.embedding
        embedded = embedding.rows(tokens) if embedding is not None else embedding_rows(self.target, tokens)
        return _rows(*split(self.head), rounded(embedded, self.dtype), hidden, queries, state)

    def row_logits(self, hidden: Float[Array, "*N D"]) -> Float32[Array, "*N v"]:
        """Returns the logits of rows over the tokens that the head can guess."""
        if self.head.lm_head is not None:
            return _own_logits(*split(self.head), hidden)
        normalized = rounded(_normalized(*split(self.head), hidden), self.target.dtype)
        return self.target.on_each_device(_head_logits, normalized)


def target_states(
    target: Decoder,
    depths: tuple[int, ...] | None,
    tokens: Int[Array, "*N"],
    queries: Queries,
    state: Any,
    images: ImageRows | None = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N F"], Any]:
    """Returns the target's normalized last hidden states, a head's features, and the target's state.

    See `DraftHead` for `depths`, and `Decoder.hidden_states` for the other arguments.
    """
    if depths is None:
        hidden, state = target.hidden_states(tokens, queries, state, images)
        return hidden, hidden, state
    hidden, streams, state = target.hidden_and_residual_states(tokens, queries, state, images, depths=depths)
    return hidden, side_by_side(*streams), state


def embedding_rows(target: Decoder, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
    """Returns the rows of the target's embedding, without its factor."""
    return target.on_each_device(_embedding_rows, tokens)


def _embedding_rows(target: Decoder, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
    return target.embedding.rows(tokens)


def _head_logits(target: Decoder, normalized: Float[Array, "*N D"]) -> Float32[Array, "*N V"]:
    return target.head.logits(normalized)


type _Head = Network[DraftHead]


@compilation.jit(static_argnums=0)
def _mapped(head: _Head, weights: Weights, features: Float[Array, "*N F"]) -> Float[Array, "*N D"]:
    return head.with_weights(weights).mapped(features)


@compilation.jit(static_argnums=0)
def _rows(
    head: _Head,
    weights: Weights,
    embedded: Float[Array, "*N D"],
    hidden: Float[Array, "*N D"],
    queries: Any,
    state: Any,
) -> tuple[Float[Array, "*N D"], Any]:
    return head.with_weights(weights)(embedded, hidden, queries, state)


@compilation.jit(static_argnums=0)
def _own_logits(head: _Head, weights: Weights, hidden: Float[Array, "*N D"]) -> Float32[Array, "*N v"]:
    return head.with_weights(weights).own_logits(hidden)


@compilation.jit(static_argnums=0)
def _normalized(head: _Head, weights: Weights, hidden: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    return head.with_weights(weights).normalized(hidden)
