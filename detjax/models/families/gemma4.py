"""Gemma 4 (Gemma Team 2026), its text model: Gemma 3's layer, with heads that differ by layer and layers without keys.

Layers without a window have wider heads, whose columns hardly rotate, and possibly values that are projected keys.
Scores have the factor 1. The last layers may read the keys and values of earlier ones. Depending on the size, layers
have a second input (per-layer embeddings), or experts next to the MLP. Every layer ends with a stored factor.
Norms store their weights, unlike Gemma 2's and 3's.

Published checkpoints also have towers for images and audio, which are not read.
"""

import dataclasses
from typing import Any, Final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.configuration import gemma4_config
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.keys import ATTENTION_BIAS
from detjax.models.families import llama
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.parameters import FixedWeight, Tensors
from detjax.models.parts.per_layer_embedding import PerLayerGate
from detjax.models.parts.scaled_experts import ScaledExperts, ScaledExpertsOptions
from detjax.models.parts.shared_keys_attention import SharedKeysAttention, SharedKeysAttentionOptions
from detjax.models.parts.state import StateDeclaration
from detjax.operands.kv_pages import KVPages, Queries

PREFIX: Final = "model.language_model."
"""The prefix of the text model's tensors in checkpoints with towers."""


class Layer(nnx.Module):
    """Attention and an MLP, each between two RMS norms and then added; experts and a second input in some models."""

    CHECKPOINT_NAMES: Final = {
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp": "mlp",
        "mlp_output_norm": "post_feedforward_layernorm",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts": "",
        "mlp_result_norm": "post_feedforward_layernorm_1",
        "experts_result_norm": "post_feedforward_layernorm_2",
        "per_layer": "",
    }

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width, eps, activation, options = config.hidden_size, config.norm_eps, config.activation, config.shared_keys
        assert options is not None

        def norm() -> RMSNorm:
            return RMSNorm(width, eps=eps, dtype=dtype)

        attention = _attention_options(config, index)
        is_wide = options.wide_mlp and attention.source is not None
        mlp = MLPOptions(inner_width=config.intermediate_size * (2 if is_wide else 1), activation=activation)
        self.attention_norm = norm()
        self.attention = SharedKeysAttention(width, attention, rngs=rngs, dtype=dtype)
        self.attention_output_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)
        self.mlp_output_norm = norm()
        if isinstance(config.experts, ScaledExpertsOptions):
            self.experts_norm, self.experts_result_norm, self.mlp_result_norm = norm(), norm(), norm()
            self.experts = ScaledExperts(width, config.experts, activation, rngs=rngs, dtype=dtype)
        else:
            self.experts = None
        inputs = config.per_layer
        make: dict[str, Any] = {"eps": eps, "rngs": rngs, "dtype": dtype}
        self.per_layer = None if inputs is None else PerLayerGate(width, inputs, activation, **make)
        self.factor = FixedWeight(jnp.ones(1, dtype))

    def __call__(
        self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages, inputs: Float[Array, "*N P"] | None = None
    ) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the residual stream after this layer, and the pages with the new keys and values in them.

        Args:
            x: the residual stream.
            queries: the positions of the new tokens in their requests.
            kv: the layer's pages, or the pages that it reads.
            inputs: the tokens' embeddings in this layer, if the model has such.
        """
        y, kv = self.attention(self.attention_norm(x), queries, kv)
        y, x = self.mlp_norm.after_adding(self.attention_output_norm(y), residual=x)
        y = self.mlp(y)
        if self.experts is not None:
            results = self.experts(self.experts_norm(x), queries, routed_by=x)
            y = ops.add(self.mlp_result_norm(y), self.experts_result_norm(results))
        x = ops.add(self.mlp_output_norm(y), x)
        if self.per_layer is not None and inputs is not None:
            x = self.per_layer(x, inputs)
        return ops.multiply(x, self.factor[...]), kv

    @staticmethod
    def state(config: DecoderConfig, index: int) -> StateDeclaration:
        """Returns the declaration of a layer's state, which is the attention's."""
        return _attention_options(config, index).state

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter of the layer itself."""
        return {"factor": Tensors(("layer_scalar",))}


def _attention_options(config: DecoderConfig, index: int) -> SharedKeysAttentionOptions:
    options, shared = llama.attention_options(config, index), config.shared_keys
    assert shared is not None
    fields: dict[str, Any] = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    fields |= {"scale": 1.0, "source": shared.source(config.windows, index)}
    if options.window is None:
        fields |= {"kv_heads": shared.full_kv_heads, "head_dim": shared.full_head_dim, "rope": config.rope}
        fields |= {"values_from_keys": shared.values_from_keys}
    elif config.window_rope is not None:
        fields |= {"rope": config.window_rope}
    return SharedKeysAttentionOptions(**fields)


def _unread_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Keys and values of layers without any: published files have them."""
    assert config.shared_keys is not None
    readers = "|".join(map(str, range(config.layers - config.shared_keys.readers, config.layers)))
    return (rf"model\.layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",) if readers else ()


FAMILY: Final = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    layer=Layer,
    max_positions=131072,
    head_dim=256,
    kv_heads=4,
    bos=2,
    eos=1,
    tied_embeddings=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    scales_embedding=True,
    reads=("num_experts", "per_layer_config"),
    skips=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",),
    unread_tensors=_unread_tensors,
    prefixes=(("model.", PREFIX),),
    read_rope=gemma4_config.read_rope,
    write_rope=lambda _: {},  # `write_options` has the keys of both rotations
    keys=ATTENTION_BIAS,
    read_options=gemma4_config.read_options,
    write_options=gemma4_config.write_options,
)
WITH_TOWERS: Final = dataclasses.replace(
    FAMILY,
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    text_family=FAMILY,
    reads_tower=False,
)
