"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024), and the layer of most decoders since then."""

import dataclasses
from typing import ClassVar, Final

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.keys import ATTENTION_BIAS, Key
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.parts.attention import Attention, AttentionOptions
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.state import StateDeclaration
from detjax.operands.kv_pages import KVPages, Queries
from detjax.ops.rotary import RotaryEmbedding


class Layer(nnx.Module):
    """Grouped-query attention and a gated MLP, each after an RMS norm and added to the residual stream."""

    CHECKPOINT_NAMES: Final = {
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "mlp_norm": "post_attention_layernorm",
        "mlp": "mlp",
    }
    FUSED: ClassVar[bool] = False
    """True if checkpoints have queries, keys and values as one tensor, and gate and up as another."""

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width, eps = config.hidden_size, config.norm_eps
        attention = dataclasses.replace(attention_options(config, index), fused=self.FUSED)
        mlp = dataclasses.replace(mlp_options(config), fused=self.FUSED)
        self.attention_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.attention = Attention(width, attention, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the residual stream after this layer, and the layer's pages with the new keys and values in them."""
        x, kv = self.attention(self.attention_norm.for_product(x, self.attention.input_weight), queries, kv, residual=x)
        x = self.mlp(self.mlp_norm.for_product(x, self.mlp.input_weight), residual=x)
        return x, kv

    @staticmethod
    def state(config: DecoderConfig, index: int) -> StateDeclaration:
        """Returns the declaration of a layer's state, which is the attention's."""
        return attention_options(config, index).state


def mlp_options(config: DecoderConfig) -> MLPOptions:
    """Returns the options of a layer's MLP."""
    return MLPOptions(inner_width=config.intermediate_size, activation=config.activation, bias=config.mlp_bias)


def attention_options(config: DecoderConfig, index: int) -> AttentionOptions:
    """Returns the options of a layer's attention."""
    rotated = config.rotated is None or config.rotated[index]
    return AttentionOptions(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=config.rope if rotated else RotaryEmbedding(config.head_dim, config.rope.theta, rotary_dim=0),
        window=config.windows[index],
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm_eps=config.norm_eps if config.qk_norm or config.wide_qk_norm else None,
        wide_qk_norm=config.wide_qk_norm,
        qkv_bound=config.qkv_bound,
        scale=None if config.multipliers is None else config.multipliers.scores,
    )


FAMILY: Final = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    layer=Layer,
    max_positions=2048,
    bos=1,
    eos=2,
    keys=(*ATTENTION_BIAS, Key("mlp_bias", "mlp_bias", default=False)),
    read_options=lambda file, layers: {"windows": read_uniform_windows(file, layers, "llama")},
)
