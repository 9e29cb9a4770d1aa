"""The shape and options of a decoder, and their conversion from and to Hugging Face's `config.json`.

Missing keys have transformers' defaults. An unsupported option that would change the result is an error; keys that the
architecture does not use in transformers either are ignored.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from detjax.contract import INPUT_DTYPES
from detjax.models.configuration.family import Description, Family, description, family_named
from detjax.models.configuration.json_object import MAX_LAYERS, JsonObject
from detjax.models.configuration.keys import read_keys, write_keys
from detjax.models.configuration.pooling_config import read_pooling, write_pooling
from detjax.models.configuration.rope_config import read_max_positions
from detjax.models.parts.delta_net import DeltaNetOptions
from detjax.models.parts.experts import ExpertsOptions
from detjax.models.parts.latent_attention import LatentOptions
from detjax.models.parts.per_layer_embedding import PerLayerOptions
from detjax.models.parts.pooling import PoolingOptions
from detjax.models.parts.shared_keys_attention import SharedKeysOptions
from detjax.models.parts.vision import VisionOptions
from detjax.operands.options import Activation
from detjax.ops.rotary import RotaryEmbedding

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}

_UNSUPPORTED: Final[Mapping[str, Any]] = {
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "per_layer_config": {},
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
"""Unsupported options, each with the value (in addition to null) that has no effect."""

_NO_OPTIONS: Final[Mapping[str, Any]] = {"qk_norm": False, "qkv_bias": False, "output_bias": False, "mlp_bias": False}
"""Options that every `DecoderConfig` sets, so that digests of models include them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constant factors in a decoder, as Granite has them (IBM 2024).

    Attributes:
        embedding: the factor of the embedding's rows.
        scores: the factor of attention scores.
        residual: the factor of what attention and MLP add to the residual stream.
        logits_divisor: the number that logits are divided by.
    """

    embedding: float
    scores: float
    residual: float
    logits_divisor: float


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a decoder-only transformer.

    Attributes:
        architecture: the name of transformers' class, which selects the family.
        vocab_size: the number of tokens.
        hidden_size: the width of hidden states.
        intermediate_size: the inner width of the MLP.
        layers: the number of layers.
        heads: heads of queries.
        kv_heads: heads of keys and of values.
        head_dim: the width of a head.
        activation: the activation function of the MLP's gate.
        norm_eps: epsilon of all norms.
        rope: the frequencies of the rotary embedding.
        windows: for each layer, the number of most recent keys that a query sees, including its own; None: all.
        qk_norm: whether each head of queries and keys is normalized before the rotation.
        qkv_bias: whether the projections of queries, keys and values have biases.
        output_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the projections of the MLP have biases.
        tied_embeddings: whether the embedding is also the head.
        max_positions: positions that the model was made for (`max_position_embeddings`).
        dtype: the dtype that the checkpoint declares.
        window_rope: the frequencies of the rotary embedding in layers with a window; None: as in all other layers.
        query_pre_attn_scalar: the number whose inverse square root is the factor of scores; None: the width of a head.
        attention_soft_cap: the bound of scores, which become `cap * tanh(score / cap)`; None: no bound.
        logit_soft_cap: the bound of logits, in the same way.
        experts: the mixtures of experts; None: every layer has an MLP.
        wide_qk_norm: whether one norm covers all query heads together, and another one all key heads.
        qkv_bound: the largest absolute value of queries, keys and values before the rotation; None: no bound.
        latent: the shape of latent attention; None: attention has keys and values of heads.
        delta: the shape of linear attention, and its layers; None: no layer has linear attention.
        vision: the vision tower; None: prompts have no images.
        image_token: the token that stands for a part of an image; None: prompts have no images.
        video_token: the token that stands for a part of a video; None: prompts have no videos.
        vision_start_token: the token before each video frame whose time is in the prompt; None: times are not.
        vision_end_token: the token after it.
        video_text: the text that stands for a whole video in conversations, before its clips and their times take its
            place; None: tokens stand for videos.
        pooling: the results of a model that pools; None: the model generates.
        rotated: for each layer, whether its heads are rotated; None: in all layers they are.
        multipliers: constant factors in the decoder; None: it has none.
        shared_keys: the heads of layers without a window, and the layers without keys; None: all layers have keys, and
            the same number and width of heads.
        per_layer: the embeddings of a token for each layer; None: layers have no second input.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: Activation
    norm_eps: float
    rope: RotaryEmbedding
    windows: tuple[int | None, ...]
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    max_positions: int
    dtype: str
    window_rope: RotaryEmbedding | None = None
    query_pre_attn_scalar: int | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    experts: ExpertsOptions | None = None
    wide_qk_norm: bool = False
    qkv_bound: float | None = None
    latent: LatentOptions | None = None
    delta: DeltaNetOptions | None = None
    vision: VisionOptions | None = None
    image_token: int | None = None
    video_token: int | None = None
    vision_start_token: int | None = None
    vision_end_token: int | None = None
    video_text: str | None = None
    pooling: PoolingOptions | None = None
    rotated: tuple[bool, ...] | None = None
    multipliers: Multipliers | None = None
    shared_keys: SharedKeysOptions | None = None
    per_layer: PerLayerOptions | None = None

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The tokens that stand for parts of images and of videos; one token may stand for both."""
        return tuple(dict.fromkeys(token for token in (self.image_token, self.video_token) if token is not None))

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], source: str) -> "DecoderConfig":
        """Returns the configuration that `config.json` with the contents `raw` describes.

        Reads the files of transformers 4 and 5; of a multimodal model without a vision tower, the text model. The dtype
        is float32 if the file has none. The storage format of weights is not read. Errors call the file `source`.

        Raises:
            CheckpointError: an unknown architecture, an unsupported option, a missing key, a value out of range.
        """
        return cls.from_description(description(raw, source))

    @classmethod
    def from_description(cls, described: Description) -> "DecoderConfig":
        """Returns the configuration from the description of the decoder in a `config.json`.

        Raises:
            CheckpointError: an unsupported option, a missing key, a value out of range.
        """
        family, file = described
        for key, neutral in _UNSUPPORTED.items():
            if key not in family.reads and file.get(key) not in (None, neutral):
                raise file.error(key, f"{json.dumps(neutral)}, null; anything else is not supported")
        layers = file.integer("num_hidden_layers", maximum=MAX_LAYERS)
        max_positions = read_max_positions(file, family.max_positions)
        heads = _read_heads(file, family)
        options = {**_NO_OPTIONS, **read_keys(file, family.keys), **family.read_options(file, layers)}
        activation_key, activation = family.activation
        inner_key, inner_width = family.intermediate_size
        return cls(
            architecture=family.architecture,
            vocab_size=file.integer("vocab_size"),
            hidden_size=file.integer("hidden_size"),
            intermediate_size=file.integer(inner_key, inner_width),
            layers=layers,
            **heads,
            activation=_ACTIVATIONS[file.choice(activation_key, activation, tuple(_ACTIVATIONS))],
            norm_eps=file.number("rms_norm_eps", family.norm_eps),
            rope=family.read_rope(file, heads["head_dim"], max_positions),
            **options,
            tied_embeddings=file.boolean("tie_word_embeddings", family.tied_embeddings),
            max_positions=max_positions,
            pooling=read_pooling(file, family.architecture),
            dtype=file.choice("dtype", file.choice("torch_dtype", "float32", INPUT_DTYPES), INPUT_DTYPES),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the contents of an equivalent `config.json`, for transformers 4 and 5.

        Raises:
            ValueError: transformers' class of this architecture does not support the configuration.
        """
        family = family_named("to_hugging_face", self.architecture)
        raw: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            family.intermediate_size[0]: self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            family.activation[0]: next(name for name, value in _ACTIVATIONS.items() if value == self.activation),
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
            **family.write_rope(self.rope),
            **write_keys(self, family.keys),
            **family.write_options(self),
        }
        if self.pooling is not None:
            raw |= write_pooling(self.pooling)
        if family.nested is not None:
            raw = family.nested(raw)
        understood = dataclasses.asdict(DecoderConfig.from_hugging_face(raw, "config.json"))
        if self.pooling is not None and self.pooling.is_in_sentence_files:
            understood["pooling"] = dataclasses.asdict(self.pooling)  # other files have the rest
        for name, value in dataclasses.asdict(self).items():
            if understood[name] != value:
                raise ValueError(
                    f"to_hugging_face: {name} is {value!r}; {self.architecture} in transformers would have "
                    f"{understood[name]!r}"
                )
        return raw


def _read_heads(file: JsonObject, family: Family) -> dict[str, int]:
    """Reads the numbers of heads, and a head's width."""
    hidden_size, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    # A missing key has transformers' default; null means as many as query heads.
    missing_kv_heads = heads if "num_key_value_heads" in file.raw else family.kv_heads
    kv_heads = file.integer("num_key_value_heads", missing_kv_heads or heads)
    if heads % kv_heads:
        raise file.error("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
    key = family.head_dim_key
    if hidden_size % heads and family.head_dim is None and file.raw.get(key) is None:
        raise file.error(key, f"an integer, as hidden_size {hidden_size} is not a multiple of {heads} heads")
    head_dim = file.integer(key, family.head_dim or hidden_size // heads)
    if head_dim % 2:
        raise file.error(key, f"an even number; hidden_size / num_attention_heads is {head_dim}")
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
