"""Families of decoders: what a family file says, and the registry of families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import Key
from detjax.models.configuration.rope_config import read_rope
from detjax.ops.rotary import RotaryEmbedding

_TEXT: Final = "text_config"
_MODEL_LEVEL_KEYS: Final = ("architectures", "model_type", "dtype", "torch_dtype")
"""Keys of which those of the whole model have precedence over those of its decoder."""
_TOWER: Final = "vision_config"
_TIED: Final = "tie_word_embeddings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of decoders, as transformers' class of one name defines it.

    Attributes:
        architecture: the name of that class.
        model_type: the `model_type` of its configurations.
        other_model_types: further ones that published checkpoints have, and that say the same.
        text_family: for models with a vision tower, the family of their text model, which is read of a checkpoint whose
            `config.json` describes no tower; None: there is none.
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
        prefixes: what the names of tensors begin with in the decoder, and what they may begin with in checkpoints.
        nested: returns a `config.json` with the decoder's keys in `text_config`, given one in which they stand beside
            the others. Checkpoints then have the names of `prefixes`. None: neither is so in what is written.
        read_rope: reads the frequencies of the rotary embedding from a `config.json`, given the width of a head and
            `max_position_embeddings`.
        keys: keys of `config.json` that say options of layers, which are fields of `DecoderConfig`.
        read_options: returns the other options of layers that a `config.json` says, given the number of layers.
        write_options: returns the keys of `config.json` that say the latter, and those that the family writes otherwise
            than others, given the `DecoderConfig`.
    """

    architecture: str
    model_type: str
    other_model_types: tuple[str, ...] = ()
    text_family: "Family | None" = None
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
    prefixes: tuple[tuple[str, str], ...] = ()
    nested: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    read_rope: Callable[[JsonObject, int, int], RotaryEmbedding] = read_rope
    keys: tuple[Key, ...] = ()
    read_options: Callable[[JsonObject, int], Mapping[str, Any]]
    write_options: Callable[[Any], Mapping[str, Any]] = lambda _: {}

    def decoder_name(self, name: str) -> str:
        """Returns the name that a checkpoint's tensor has in the decoder."""
        for inner, outer in self.prefixes:
            if name.startswith(outer):
                return inner + name.removeprefix(outer)
        return name

    def written_name(self, name: str) -> str:
        """Returns the name under which a decoder's tensor is written."""
        for inner, outer in self.prefixes if self.nested is not None else ():
            if name.startswith(inner):
                return outer + name.removeprefix(inner)
        return name


class Description(NamedTuple):
    """What a `config.json` says of a decoder.

    Attributes:
        family: the decoder's family.
        file: the keys that describe the decoder: all of the file, or the `text_config` in it and what stands beside it.
    """

    family: Family
    file: JsonObject


_FAMILIES: Final[dict[str, Family]] = {}


def register(*families: Family) -> None:
    """Makes families known, so that checkpoints of their architectures can be read.

    Raises:
        ValueError: another family has the architecture.
    """
    for family in families:
        if _FAMILIES.setdefault(family.architecture, family) is not family:
            raise ValueError(f"register: {family.architecture} is registered already; accepted: another architecture")


def families() -> dict[str, Family]:
    """Returns the registered families by architecture."""
    return _FAMILIES


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


def description(raw: Mapping[str, Any], source: str) -> Description:
    """Returns what a `config.json` with the contents `raw` says of its decoder.

    Where the decoder's keys are in `text_config`, a key that is missing there may stand beside it.

    Args:
        raw: the contents.
        source: the name of the file in errors.

    Raises:
        CheckpointError: it names no family of this release, or several; or `text_config` is no object.
    """
    file = JsonObject(raw, source)
    family = _family_of(file)
    if family.text_family is not None and file.get(_TOWER) is None:
        family = family.text_family
    text = file.object(_TEXT)
    if text is None:
        return Description(family, file)
    beside = {key: value for key, value in raw.items() if key != _TEXT}
    within = {key: value for key, value in text.raw.items() if key not in _MODEL_LEVEL_KEYS or beside.get(key) is None}
    # transformers 4 wrote for some models that the embeddings are tied in one of the two places alone.
    tied = {_TIED: True} if True in (beside.get(_TIED), within.get(_TIED)) else {}
    return Description(family, JsonObject(within | tied, source, text.prefix, beside))


def _family_of(file: JsonObject) -> Family:
    """The family that a file names.

    Raises:
        CheckpointError: it names no family of this release, or several.
    """
    by_architecture = families()
    accepted = ", ".join(by_architecture)
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
