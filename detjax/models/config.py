"""What a decoder is made of, and how Hugging Face's `config.json` and `generation_config.json` say it.

Keys that a file leaves out have the values that transformers gives them. An option that would change the result and is
not supported is an error; keys that the architecture does not read in transformers either are passed over.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from detjax.contract import INPUT_DTYPES
from detjax.models.json_object import JsonObject
from detjax.ops.rotary import LinearScaling, Llama3Scaling, RotaryEmbedding, YarnScaling
from detjax.options import Activation


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """What transformers' class of one name fixes, and what it takes where `config.json` leaves a key out."""

    model_type: str
    head_dim: int | None
    """None: hidden_size / heads."""
    kv_heads: int | None
    """None: as many as heads."""
    max_positions: int
    qk_norm: bool
    attention_bias: Literal["option", "qkv", "none"]
    mlp_bias: Literal["option", "none"]
    windows: Literal["some layers", "every layer", "none"]
    bos: int | None
    eos: int | None


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "Qwen3ForCausalLM": _Architecture("qwen3", 128, 32, 32768, True, "option", "none", "some layers", None, None),
    "Qwen2ForCausalLM": _Architecture("qwen2", None, 32, 32768, False, "qkv", "none", "some layers", None, None),
    "LlamaForCausalLM": _Architecture("llama", None, None, 2048, False, "option", "option", "none", 1, 2),
    "MistralForCausalLM": _Architecture("mistral", None, 8, 131072, False, "none", "none", "every layer", 1, 2),
}

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}

_UNSUPPORTED: Final[Mapping[str, Any]] = {
    "quantization_config": {},
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
"""Options that are not supported, each with the value, besides null, under which it changes nothing."""

_ROPE_SCALINGS: Final = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a decoder-only transformer."""

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
    """Sliding window of each layer, in tokens; None: all earlier tokens."""
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    max_positions: int
    """Positions that the model was made for (`max_position_embeddings`)."""
    dtype: str
    """The dtype that the checkpoint names for itself."""

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], source: str) -> "DecoderConfig":
        """The configuration that `config.json` with the contents `raw` describes; `source` names the file in errors.

        Reads the files of transformers 4 and 5. The dtype is float32 where the file names none.

        Raises:
            CheckpointError: an unknown architecture, an unsupported option, a missing key, a value out of range.
        """
        file = JsonObject(raw, source)
        name, architecture = _architecture(file)
        for key, neutral in _UNSUPPORTED.items():
            if file.get(key) not in (None, neutral):
                raise file.error(key, f"{json.dumps(neutral)}, null; anything else is not supported")

        hidden_size, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
        # Left out and null are two things here: transformers' default, and as many as heads.
        missing_kv_heads = heads if "num_key_value_heads" in raw else architecture.kv_heads
        kv_heads = file.integer("num_key_value_heads", missing_kv_heads or heads)
        if heads % kv_heads:
            raise file.error("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
        if hidden_size % heads and architecture.head_dim is None and raw.get("head_dim") is None:
            raise file.error("head_dim", f"an integer, as hidden_size {hidden_size} is not a multiple of {heads} heads")
        head_dim = file.integer("head_dim", architecture.head_dim or hidden_size // heads)
        if head_dim % 2:
            raise file.error("head_dim", f"an even number; hidden_size / num_attention_heads is {head_dim}")
        layers = file.integer("num_hidden_layers")
        max_positions = file.integer("max_position_embeddings", architecture.max_positions)
        attention_bias = architecture.attention_bias == "option" and file.boolean("attention_bias", False)
        return cls(
            architecture=name,
            vocab_size=file.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=file.integer("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            activation=_ACTIVATIONS[file.choice("hidden_act", "silu", tuple(_ACTIVATIONS))],
            norm_eps=file.number("rms_norm_eps", 1e-6),
            rope=_rope(file, head_dim, max_positions),
            windows=_windows(file, architecture, layers),
            qk_norm=architecture.qk_norm,
            qkv_bias=attention_bias or architecture.attention_bias == "qkv",
            output_bias=attention_bias,
            mlp_bias=architecture.mlp_bias == "option" and file.boolean("mlp_bias", False),
            tied_embeddings=file.boolean("tie_word_embeddings", False),
            max_positions=max_positions,
            dtype=file.choice("dtype", file.choice("torch_dtype", "float32", INPUT_DTYPES), INPUT_DTYPES),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """The contents of a `config.json` that says this, for transformers 4 and 5.

        Raises:
            ValueError: transformers' class of this architecture cannot be configured like this.
        """
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"to_hugging_face: architecture is {self.architecture!r}; accepted: {', '.join(_ARCHITECTURES)}"
            )
        architecture = _ARCHITECTURES[self.architecture]
        sizes = [window for window in self.windows if window is not None]
        raw: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": architecture.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": next(name for name, activation in _ACTIVATIONS.items() if activation == self.activation),
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
            **_rope_to_hugging_face(self.rope),
        }
        if architecture.attention_bias == "option":
            raw["attention_bias"] = self.qkv_bias
        if architecture.mlp_bias == "option":
            raw["mlp_bias"] = self.mlp_bias
        if architecture.windows != "none":
            raw["sliding_window"] = sizes[0] if sizes else None
        if architecture.windows == "some layers":
            raw["use_sliding_window"] = bool(sizes)
            raw["max_window_layers"] = next((i for i, w in enumerate(self.windows) if w is not None), self.layers)
            raw["layer_types"] = [_FULL if window is None else _SLIDING for window in self.windows]

        understood = dataclasses.asdict(DecoderConfig.from_hugging_face(raw, "config.json"))
        for name, value in dataclasses.asdict(self).items():
            if understood[name] != value:
                raise ValueError(
                    f"to_hugging_face: {name} is {value!r}; {self.architecture} in transformers would have "
                    f"{understood[name]!r}"
                )
        return raw


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """How a checkpoint is to be sampled where a request does not say; None: the checkpoint does not say either."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    """False: the most likely token is taken, and the numbers below have no effect."""
    temperature: float | None = None
    top_k: int | None = None
    """0: all tokens."""
    top_p: float | None = None
    min_p: float | None = None
    unread: str = "{}"
    """The file's other options as a JSON object: none has an effect here, all are saved again."""

    @classmethod
    def from_hugging_face(
        cls, raw: Mapping[str, Any], source: str, config: Mapping[str, Any], config_source: str
    ) -> "GenerationDefaults":
        """The defaults that `generation_config.json` with the contents `raw` states; empty, if there is no such file.

        Token ids that it leaves out are those of `config`, the contents of `config.json`. The sources name the files in
        errors.

        Raises:
            CheckpointError: a value of the wrong type or out of range.
        """
        _, architecture = _architecture(JsonObject(config, config_source))
        file = JsonObject(raw, source)
        fallback = JsonObject(
            {"bos_token_id": architecture.bos, "eos_token_id": architecture.eos} | dict(config), config_source
        )
        bos, eos, pad = (
            file if file.get(key) is not None else fallback for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        )
        ends = eos.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ends):
            raise eos.error("eos_token_id", "an integer >= 0, a list of such, null")
        return cls(
            eos_token_ids=tuple(dict.fromkeys(ends)),
            bos_token_id=bos.optional_integer("bos_token_id", minimum=0),
            pad_token_id=pad.optional_integer("pad_token_id", minimum=0),
            do_sample=file.boolean("do_sample", False),
            temperature=file.optional_number("temperature", minimum=0.0, accepted="a finite number >= 0"),
            top_k=file.optional_integer("top_k", minimum=0),
            top_p=file.optional_number("top_p", minimum=0.0, maximum=1.0, accepted="a number from 0 to 1"),
            min_p=file.optional_number("min_p", minimum=0.0, maximum=1.0, accepted="a number from 0 to 1"),
            unread=json.dumps(file.unread(), sort_keys=True),
        )

    def token_ids_to_hugging_face(self) -> dict[str, Any]:
        """The token ids, as both files hold them."""
        eos = list(self.eos_token_ids)
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
            "pad_token_id": self.pad_token_id,
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The contents of a `generation_config.json` that says this."""
        numbers = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        raw = json.loads(self.unread) | self.token_ids_to_hugging_face() | {"do_sample": self.do_sample} | numbers
        return {key: value for key, value in raw.items() if value is not None}


def _architecture(file: JsonObject) -> tuple[str, _Architecture]:
    accepted = ", ".join(_ARCHITECTURES)
    model_type = file.get("model_type")
    names = file.get("architectures")
    if names is None:
        names = [name for name, architecture in _ARCHITECTURES.items() if architecture.model_type == model_type]
        if not names:
            raise file.error("architectures", accepted)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_ARCHITECTURES):
        raise file.error("architectures", f"a list of one of {accepted}")
    architecture = _ARCHITECTURES[names[0]]
    if model_type not in (None, architecture.model_type):
        raise file.error("model_type", f"{architecture.model_type!r}, as architectures is {names[0]}")
    return names[0], architecture


def _rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    """Transformers 5 writes `rope_parameters`, transformers 4 `rope_scaling`; a file may hold both."""
    theta = file.number("rope_theta", 10000.0)
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        parameters = file.object(key)
        if parameters is not None:
            own_theta = parameters.number("rope_theta", theta)
            found.append(RotaryEmbedding(head_dim, own_theta, _rope_scaling(file, parameters, max_positions)))
            for unread in parameters.unread():
                raise parameters.error(unread, "no such key with this rope_type; remove it if it has no effect")
    if len(set(found)) == 2:
        raise file.error("rope_scaling", "what rope_parameters says; remove the one that is wrong")
    return found[0] if found else RotaryEmbedding(head_dim, theta)


def _rope_scaling(
    file: JsonObject, parameters: JsonObject, max_positions: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    accepted = ("default", "linear", "llama3", "yarn")
    rope_type = parameters.choice("rope_type", parameters.choice("type", "default", accepted), accepted)
    if parameters.optional_number("partial_rotary_factor", minimum=0.0, accepted="1.0") not in (None, 1.0):
        raise parameters.error("partial_rotary_factor", "1.0")
    if rope_type == "default":
        return None
    factor = parameters.number("factor")
    if rope_type == "linear":
        return LinearScaling(factor)

    # In transformers 5 the one beside the parameters has precedence.
    original = parameters.integer("original_max_position_embeddings", max_positions)
    original = file.integer("original_max_position_embeddings", original)
    if rope_type == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if high <= low:
            raise parameters.error("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
        return Llama3Scaling(factor, low, high, original)
    beta_fast, beta_slow = parameters.number("beta_fast", 32.0), parameters.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise parameters.error("beta_fast", f"at least beta_slow, which is {beta_slow:g}")
    optional = {
        key: parameters.optional_number(key, minimum=0.0, accepted="a finite number >= 0")
        for key in ("attention_factor", "mscale", "mscale_all_dim")
    }
    truncate = parameters.boolean("truncate", True)
    return YarnScaling(factor, original, beta_fast, beta_slow, truncate=truncate, **optional)


def _rope_to_hugging_face(rope: RotaryEmbedding) -> dict[str, Any]:
    rope_type = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}.get(
        type(rope.scaling), "default"
    )
    fields = dataclasses.fields(rope.scaling) if rope.scaling is not None else ()
    stated = {field.name: getattr(rope.scaling, field.name) for field in fields}
    stated = {field.name: stated[field.name] for field in fields if stated[field.name] != field.default}
    return {
        "rope_parameters": {"rope_type": rope_type, "rope_theta": rope.theta, **stated},
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope_type, **stated} if stated else None,
    }


def _windows(file: JsonObject, architecture: _Architecture, layers: int) -> tuple[int | None, ...]:
    window, first = None, 0
    if architecture.windows == "every layer" or (
        architecture.windows == "some layers" and file.boolean("use_sliding_window", False)
    ):
        window = file.optional_integer("sliding_window", minimum=1) if "sliding_window" in file.raw else 4096
    if architecture.windows == "some layers":
        first = file.integer("max_window_layers", 28, minimum=0)
    types = [_SLIDING if window is not None and i >= first else _FULL for i in range(layers)]

    named = file.get("layer_types")
    if named is not None and named != types:
        if not isinstance(named, list) or len(named) != layers or any(name not in (_FULL, _SLIDING) for name in named):
            raise file.error("layer_types", f"a list with {_FULL} or {_SLIDING} for each of {layers} layers")
        if architecture.windows != "some layers":
            raise file.error("layer_types", f"{types[0]} for every layer, as {architecture.model_type} has it here")
        if window is None:
            raise file.error("layer_types", f"{_FULL} for every layer, as there is no sliding window")
        types = named
    return tuple(window if name == _SLIDING else None for name in types)
