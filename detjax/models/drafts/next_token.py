"""Layers that predict further tokens, stored with their model (multi-token prediction, DeepSeek-AI 2024).

The layer is one of the model's own kind, over the embedding of the next token and the model's normalized hidden states.
Embedding and table of logits are the model's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import family_named
from detjax.models.drafts.head import DraftHead, Projection, side_by_side
from detjax.models.parts.norm import RMSNorm
from detjax.operands.kv_pages import Queries


class NextTokenHead(DraftHead):
    """A layer that predicts a further token, with the names of DeepSeek-V3's and GLM-4.5's checkpoints.

    Rows chain their hidden states before the last norm.
    """

    METHOD: ClassVar[str] = "mtp"
    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "layer": "",
        "final_norm": "shared_head.norm",
    }

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        family, width = family_named("load_draft", config.architecture), config.hidden_size
        norm: dict[str, Any] = {"eps": config.norm_eps, "dtype": dtype, "offset": family.norm_offset}
        self.config = config
        self.depths = self.embedding = self.lm_head = None
        self.embedding_norm = RMSNorm(width, **norm)
        self.hidden_norm = RMSNorm(width, **norm)
        self.projection = Projection(2 * width, width, rngs=rngs, dtype=dtype)
        self.layer = family.layer(config, 0, rngs=rngs, dtype=dtype)
        self.final_norm = RMSNorm(width, **norm)

    def __call__(
        self, embedded: Float[Array, "*N D"], hidden: Float[Array, "*N D"], queries: Queries, state: Any
    ) -> tuple[Float[Array, "*N D"], Any]:
        """Returns the hidden states of rows, and the layer's state; see `DraftHead`."""
        x = self.projection(side_by_side(self.embedding_norm(embedded), self.hidden_norm(hidden)))
        return self.layer(x, queries, state)

    def normalized(self, hidden: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns the hidden states that the model's table of logits multiplies."""
        return self.final_norm(hidden)


class QwenNextTokenHead(NextTokenHead):
    """A layer that predicts a further token, with the names of Qwen3-Next's and Qwen3.5's checkpoints.

    Rows chain their hidden states after the last norm.
    """

    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "projection": "fc",
        "layer": "layers.0",
        "final_norm": "norm",
    }

    def chained(self, hidden: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Returns the normalized hidden states."""
        return self.normalized(hidden)


def layer_config(config: DecoderConfig, *, is_sparse: bool) -> DecoderConfig:
    """Returns the configuration of the layer, as a decoder with this layer alone.

    Args:
        config: the model's.
        is_sparse: whether the layer has experts.
    """
    experts, delta = config.experts, config.delta
    return dataclasses.replace(
        config,
        layers=1,
        windows=config.windows[-1:],
        experts=dataclasses.replace(experts, layers=(True,)) if is_sparse and experts is not None else None,
        delta=None if delta is None else dataclasses.replace(delta, layers=(False,)),
        vision=None,
        pooling=None,
    )
