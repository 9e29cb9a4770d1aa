"""Families of decoders: what a family file says, and how the families are found."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from detjax.models.json_object import JsonObject
from detjax.models.parts.delta_net import DeltaNetOptions
from detjax.models.parts.experts import ExpertsOptions
from detjax.models.parts.latent_attention import LatentOptions
from detjax.models.parts.vision import VisionOptions
from detjax.models.rope_config import read_rope
from detjax.ops.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from detjax.models.config import DecoderConfig

_TEXT: Final = "text_config"
_BESIDE_TEXT: Final = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
"""Keys that multimodal configurations have for the whole model. Those of the text model, if it has them, have
precedence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The options of layers that families differ in, as they read them from `config.json`.

    Attributes:
        windows: for each layer, how many tokens a query sees at most, its own included; None: all earlier ones.
        qk_norm: whether each head of queries and keys is normalized before the rotation.
        qkv_bias: whether the projections of queries, keys and values have biases.
        output_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the projections of the MLP have biases.
        window_rope: the frequencies of the rotary embedding in layers with a window; None: those of all other layers.
        query_pre_attn_scalar: the number whose inverse square root is the factor of scores; None: the width of a head.
        attention_soft_cap: the bound of scores, which become `cap * tanh(score / cap)`; None: no bound.
        logit_soft_cap: the bound of logits likewise.
        experts: the mixtures of experts; None: every layer has an MLP.
        wide_qk_norm: whether all heads of queries together are normalized, and all heads of keys.
        qkv_bound: the largest absolute value of queries, keys and values before the rotation; None: no bound.
        latent: the shape of latent attention; None: attention has keys and values of heads.
        delta: the shape of linear attention, and the layers that have it; None: no layer has.
        vision: the vision tower; None: prompts have no images.
        image_token: the token that stands for a part of an image; None: there is none.
    """

    windows: tuple[int | None, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multimodal:
    """How the checkpoints of a multimodal model hold a decoder, which is all that is read of them.

    Their `config.json` describes the decoder in `text_config`.

    Attributes:
        architecture: the name of the multimodal model's class.
        model_type: the `model_type` of its configurations.
        prefix: what the names of the decoder's tensors begin with in place of `model.`.
    """

    architecture: str
    model_type: str
    prefix: str = "model.language_model."

    def decoder_name(self, name: str) -> str:
        """Returns the name of a tensor in a checkpoint of the decoder alone."""
        return f"model.{name.removeprefix(self.prefix)}" if name.startswith(self.prefix) else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of decoders, as transformers' class of one name defines it.

    Attributes:
        architecture: the name of that class.
        model_type: the `model_type` of its configurations.
        other_model_types: further ones that published checkpoints have, and that say the same.
        multimodal: the multimodal model whose checkpoints hold such decoders too; None: there is none.
        layer: the class of its layers: made by `layer(config, index, rngs=rngs, dtype=dtype)`, called with the residual
            stream, the queries and the layer's state, and with a static method `state(config, index)` that declares the
            state.
        max_positions: `max_position_embeddings` if `config.json` leaves it out. This and the next six are the values
            that transformers takes then.
        norm_eps: `rms_norm_eps`.
        head_dim: the width of a head; None: hidden_size / heads.
        head_dim_key: the key of `config.json` that says this width.
        kv_heads: heads of keys and of values; None: as many as heads.
        bos: the token that begins a text; None: there is none.
        eos: the token that ends a text; None: there is none.
        tied_embeddings: whether the embedding is the head as well.
        activation: the key of `config.json` that names the MLP's activation, and the name if it is left out.
        intermediate_size: the key of `config.json` that says the MLP's inner width, and the width if it is left out;
            None: it may not be left out.
        norm_offset: what is added to the weight of the norm before the head: 1.0 if checkpoints store `weight - 1`.
        scales_embedding: whether the rows of the embedding are multiplied by the square root of their width.
        reads: keys of `config.json` that the family reads itself, and that are refused where no family does.
        skips: regular expressions of the names of tensors that published checkpoints hold and that this release does
            not need, such as those of layers that predict further tokens. Each matches a whole name; `{layers}` in it
            stands for the number of layers.
        decoder_of: returns the object of a `config.json` that describes the decoder: the file's own, or one in it.
        read_rope: reads the frequencies of the rotary embedding from a `config.json`, given the width of a head and
            `max_position_embeddings`.
        read_options: reads the layers' options from a `config.json`, given the number of layers.
        write_options: returns the keys of `config.json` that say these options, and those that it says otherwise than
            other families.
    """

    architecture: str
    model_type: str
    other_model_types: tuple[str, ...] = ()
    multimodal: Multimodal | None = None
    layer: Any
    max_positions: int
    norm_eps: float = 1e-6
    head_dim: int | None = None
    head_dim_key: str = "head_dim"
    kv_heads: int | None = None
    bos: int | None = None
    eos: int | None = None
    tied_embeddings: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    intermediate_size: tuple[str, int | None] = ("intermediate_size", None)
    norm_offset: float = 0.0
    scales_embedding: bool = False
    reads: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    decoder_of: Callable[[JsonObject], JsonObject] = lambda file: file
    read_rope: Callable[[JsonObject, int, int], RotaryEmbedding] = read_rope
    read_options: Callable[[JsonObject, int], LayerOptions]
    write_options: Callable[["DecoderConfig"], dict[str, Any]]


@functools.cache
def families() -> dict[str, Family]:
    """Returns the families by architecture: `FAMILY` of every module of `detjax.models` that has one."""
    package = importlib.import_module("detjax.models")
    modules = (importlib.import_module(f"detjax.models.{info.name}") for info in pkgutil.iter_modules(package.__path__))
    return {module.FAMILY.architecture: module.FAMILY for module in modules if hasattr(module, "FAMILY")}


def family_named(operation: str, architecture: str) -> Family:
    """Returns the family of an architecture.

    Args:
        operation: what the error begins with.
        architecture: the name of transformers' class.

    Raises:
        ValueError: there is no such family.
    """
    if architecture not in families():
        raise ValueError(f"{operation}: architecture is {architecture!r}; accepted: {', '.join(families())}")
    return families()[architecture]


def text_configuration(raw: Mapping[str, Any], source: str) -> JsonObject:
    """Returns what a `config.json` with the contents `raw` says of its decoder.

    That is all of it, or the `text_config` of a multimodal model, with the name of the decoder's own class.

    Args:
        raw: the contents.
        source: the name of the file in errors.

    Raises:
        CheckpointError: `text_config` is no object.
    """
    file, names = JsonObject(raw, source), raw.get("architectures")
    for family in families().values():
        kind = family.multimodal
        if kind is None or (names != [kind.architecture] and (names or raw.get("model_type") != kind.model_type)):
            continue
        text, own_class = file.object(_TEXT), {"architectures": [family.architecture]}
        if text is None:
            return JsonObject({**raw, **own_class}, source)
        beside = {key: raw[key] for key in _BESIDE_TEXT if key in raw}
        return JsonObject({**text.raw, **own_class}, source, text.prefix, beside)
    return file


def family_of(file: JsonObject) -> Family:
    """Returns the family that a decoder's configuration names; see `text_configuration`.

    Raises:
        CheckpointError: it names no family of this release, or several.
    """
    by_architecture = families()
    multimodal = [family.multimodal.architecture for family in by_architecture.values() if family.multimodal]
    accepted = ", ".join([*by_architecture, *multimodal])
    model_type, names = file.get("model_type"), file.get("architectures")
    if names is None:
        types = {name: (family.model_type, *family.other_model_types) for name, family in by_architecture.items()}
        names = [name for name in types if model_type in types[name]]
        if not names:
            raise file.error("architectures", accepted)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(by_architecture):
        raise file.error("architectures", f"a list of one of {accepted}")
    family = by_architecture[names[0]]
    if model_type not in (None, family.model_type, *family.other_model_types):
        raise file.error("model_type", f"{family.model_type!r}, as architectures is {names[0]}")
    return family
