"""Gemma 2 (Gemma Team 2024): four norms a layer, bounded scores and logits, and a window in every other layer.

Attention and MLP each have a norm for the input, and one for the output before it is added to the residual stream.
Checkpoints store the norms' weights minus 1.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key
from detjax.models.configuration.windows import read_alternating_windows, write_alternating_windows
from detjax.models.families import llama
from detjax.models.parts.attention import Attention, AttentionOptions
from detjax.models.parts.mlp import GatedMLP
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.state import StateDeclaration
from detjax.operands.kv_pages import KVPages, Queries

NORM_OFFSET: Final = 1.0
"""Added to the weights of all norms."""


def _attention_options(config: DecoderConfig, index: int) -> AttentionOptions:
    options, scalar = llama.attention_options(config, index), config.query_pre_attn_scalar
    return dataclasses.replace(
        options,
        rope=config.rope if options.window is None or config.window_rope is None else config.window_rope,
        qk_norm_offset=NORM_OFFSET if config.qk_norm else 0.0,
        scale=None if scalar is None else scalar**-0.5,
        soft_cap=config.attention_soft_cap,
    )


KEYS: Final = (*ATTENTION_BIAS, Key("query_pre_attn_scalar", "query_pre_attn_scalar", 256))
"""Keys of both Gemma 2 and 3."""

_SCORES: Final = "attn_logit_softcapping"
_LOGITS: Final = "final_logit_softcapping"


class Layer(nnx.Module):
    """Grouped-query attention and a gated MLP, each between two RMS norms and then added to the residual stream."""

    CHECKPOINT_NAMES: Mapping[str, str] = {
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp": "mlp",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
    NORM_OFFSET: ClassVar[float] = NORM_OFFSET
    attention_options = staticmethod(_attention_options)
    """Returns the options of a layer's attention, given the configuration and the layer's index."""
    mlp_options = staticmethod(llama.mlp_options)
    """Returns the options of a layer's MLP, given the configuration."""

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, offset=self.NORM_OFFSET)

        width = config.hidden_size
        self.attention_norm = norm()
        self.attention = Attention(width, self.attention_options(config, index), rngs=rngs, dtype=dtype)
        self.attention_output_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(width, self.mlp_options(config), rngs=rngs, dtype=dtype)
        self.mlp_output_norm = norm()

    def __call__(self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the residual stream after this layer, and the layer's pages with the new keys and values in them."""
        y, kv = self.attention(self.attention_norm.for_product(x, self.attention.input_weight), queries, kv)
        y, x = self.mlp_norm.after_adding(self.attention_output_norm(y), residual=x)
        return ops.add(self.mlp_output_norm(self.mlp(y)), x), kv

    @classmethod
    def state(cls, config: DecoderConfig, index: int) -> StateDeclaration:
        """Returns the declaration of a layer's state, which is the attention's."""
        return cls.attention_options(config, index).state


def read_common_options(file: JsonObject, layers: int, pattern: int, logit_soft_cap: float | None) -> dict[str, Any]:
    """Returns the options that Gemma 2 and 3 read in the same way.

    By default every `pattern`-th layer has no window, and logits have the bound `logit_soft_cap`.

    Raises:
        CheckpointError: a value is out of range, or an option is not supported.
    """
    heads, width = file.integer("num_attention_heads"), file.integer("hidden_size")
    if width % heads:
        raise file.error("num_attention_heads", f"a divisor of hidden_size, which is {width}")
    if file.boolean("use_bidirectional_attention", False):
        raise file.error("use_bidirectional_attention", "false, null")
    return {
        "windows": read_alternating_windows(file, layers, pattern),
        "logit_soft_cap": _read_soft_cap(file, _LOGITS, logit_soft_cap),
    }


def write_common_options(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `config.json` that `read_common_options` reads, and the bound of scores."""
    soft_caps = {_LOGITS: config.logit_soft_cap, _SCORES: config.attention_soft_cap}
    return soft_caps | write_alternating_windows(config.windows)


def _read_soft_cap(file: JsonObject, key: str, default: float | None) -> float | None:
    # null means no bound; a missing key has transformers' default.
    if file.get(key) is None:
        return None if key in file.raw else default
    return file.number(key)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    common = read_common_options(file, layers, pattern=2, logit_soft_cap=30.0)
    return common | {"attention_soft_cap": _read_soft_cap(file, _SCORES, 50.0)}


FAMILY: Final = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    layer=Layer,
    max_positions=8192,
    head_dim=256,
    kv_heads=4,
    bos=2,
    eos=1,
    tied_embeddings=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    norm_offset=NORM_OFFSET,
    scales_embedding=True,
    keys=KEYS,
    read_options=_read_options,
    write_options=write_common_options,
)
