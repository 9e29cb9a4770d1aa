"""EAGLE-3 (Li et al. 2025): one layer over three residual streams of the target and the embedding of the next token."""

import dataclasses
from typing import Any, ClassVar, Final

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax.models.configuration.config import DecoderConfig
from detjax.models.drafts.head import DraftHead, Projection, side_by_side
from detjax.models.families.llama import attention_options, mlp_options
from detjax.models.parts.attention import Attention, AttentionOptions
from detjax.models.parts.embedding import Embedding
from detjax.models.parts.mlp import GatedMLP
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.parameters import random_weight
from detjax.operands.kv_pages import KVPages, Queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """The shape and options of an EAGLE-3 head.

    Attributes:
        config: its layer, as a Llama with one layer.
        depths: the target's layers whose incoming residual streams it sees, ascending.
        target_width: the width of the target's hidden states.
        draft_vocab_size: the tokens that it can guess.
        has_embedding: whether it has its own embedding.
        has_lm_head: whether it has its own table of logits.
        has_input_norm: whether the residual streams, side by side, are normalized before they are mapped.
        adds_normalized: whether attention is added to the normalized mapped features (`norm_before_residual`), and not
            to the features themselves.
    """

    config: DecoderConfig
    depths: tuple[int, ...]
    target_width: int
    draft_vocab_size: int
    has_embedding: bool
    has_lm_head: bool
    has_input_norm: bool
    adds_normalized: bool


class _Attention(Attention):
    """Attention whose queries, keys and values are made from rows of twice the width."""

    def __init__(self, width: int, options: AttentionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        super().__init__(width, options, rngs=rngs, dtype=dtype)
        self.qkv = random_weight(rngs, (sum(self._rows), 2 * width), dtype)


class _Layer(nnx.Module):
    """Llama's layer, whose attention sees the normalized embedding and the normalized features side by side."""

    CHECKPOINT_NAMES: Final = {
        "embedding_norm": "input_layernorm",
        "hidden_norm": "hidden_norm",
        "attention": "self_attn",
        "mlp_norm": "post_attention_layernorm",
        "mlp": "mlp",
    }

    def __init__(self, options: Eagle3Options, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        config = options.config
        width, eps = config.hidden_size, config.norm_eps
        self.adds_normalized = options.adds_normalized
        self.embedding_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.attention = _Attention(width, attention_options(config, 0), rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(width, mlp_options(config), rngs=rngs, dtype=dtype)

    def __call__(
        self, embedded: Float[Array, "*N D"], hidden: Float[Array, "*N D"], queries: Queries, kv: KVPages
    ) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the residual stream after this layer, and its pages with the new keys and values."""
        normalized = self.hidden_norm(hidden)
        residual = normalized if self.adds_normalized else hidden
        x, kv = self.attention(side_by_side(self.embedding_norm(embedded), normalized), queries, kv, residual=residual)
        return self.mlp(self.mlp_norm(x), residual=x), kv


class Eagle3Head(DraftHead):
    """An EAGLE-3 head; see `DraftHead`. Rows chain their hidden states before the last norm."""

    METHOD: ClassVar[str] = "eagle3"
    CHECKPOINT_NAMES: Final = {
        "input_norm": "input_norm",
        "projection": "fc",
        "layer": "midlayer",
        "final_norm": "norm",
        "lm_head": "lm_head",
        "embedding": "embed_tokens",
    }

    def __init__(self, options: Eagle3Options, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        config = options.config
        width = config.hidden_size
        self.config = config
        self.depths = options.depths
        columns = options.target_width * len(options.depths)
        self.input_norm = RMSNorm(columns, eps=config.norm_eps, dtype=dtype) if options.has_input_norm else None
        self.projection = Projection(columns, width, rngs=rngs, dtype=dtype)
        self.layer = _Layer(options, rngs=rngs, dtype=dtype)
        self.final_norm = RMSNorm(width, eps=config.norm_eps, dtype=dtype)
        tables = (options.has_lm_head, options.draft_vocab_size), (options.has_embedding, config.vocab_size)
        self.lm_head, self.embedding = (
            Embedding(tokens, width, rngs=rngs, dtype=dtype) if is_present else None for is_present, tokens in tables
        )

    def mapped(self, features: Float[Array, "*N F"]) -> Float[Array, "*N D"]:
        """Returns features as one residual stream."""
        return self.projection(features if self.input_norm is None else self.input_norm(features))

    def __call__(
        self, embedded: Float[Array, "*N D"], hidden: Float[Array, "*N D"], queries: Queries, state: Any
    ) -> tuple[Float[Array, "*N D"], Any]:
        """Returns the hidden states of rows, and the layer's pages; see `DraftHead`."""
        return self.layer(embedded, hidden, queries, state)

    def normalized(self, hidden: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns the hidden states that the table of logits multiplies."""
        return self.final_norm(hidden)
