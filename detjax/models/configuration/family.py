"""Families of decoders: the description of a family, and the registry of families."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import Key
from detjax.models.configuration.pooling_config import POOLING_ARCHITECTURES, generative_architectures
from detjax.models.configuration.rope_config import read_rope, write_rope
from detjax.ops.rotary import RotaryEmbedding

_TEXT: Final = "text_config"
_MODEL_LEVEL_KEYS: Final = ("architectures", "model_type", "dtype", "torch_dtype")
"""Keys for which the whole model's value takes precedence over its decoder's."""
_TOWER: Final = "vision_config"
_TIED: Final = "tie_word_embeddings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of decoders, as defined by a class of transformers.

    Attributes:
        architecture: the name of that class.
        model_type: the `model_type` of its configurations.
        other_architectures: equivalent names.
        other_model_types: equivalent types in published checkpoints.
        text_types: for models whose `text_config` alone describes the decoder, the `model_type`s that it may have. It
            alone says whether the embeddings are tied. Empty: the keys around it count too.
        text_family: for models with a vision tower, the family of checkpoints whose `config.json` describes no tower;
            None: checkpoints without a tower belong to this family.
        reads_tower: False if `text_family` also reads the checkpoints with a tower, without it.
        layer: the class of its layers: made by `layer(config, index, rngs=rngs, dtype=dtype)`, called with the residual
            stream, the queries and the layer's state, and with a static method `state(config, index)` that declares the
            state.
        max_positions: the default of `max_position_embeddings` in transformers, as for the next six.
        norm_eps: `rms_norm_eps`.
        head_dim: the width of a head; None: hidden_size / heads.
        head_dim_key: the key of `config.json` for this width.
        kv_heads: heads of keys and of values; None: as many as heads.
        bos: the token that begins a text; None: no such token.
        eos: the token that ends a text, or several; None: no such token.
        tied_embeddings: whether the embedding is also the head.
        ties_at_top: whether the whole model's key for this takes precedence over its decoder's.
        activation: the key of `config.json` for the MLP's activation, and its default.
        intermediate_size: the key of `config.json` for the MLP's inner width, and its default; None: required.
        norm_offset: added to the weight of the norm before the head: 1.0 if checkpoints store `weight - 1`.
        scales_embedding: whether the rows of the embedding are multiplied by the square root of their width.
        reads: keys of `config.json` that the family reads itself; families that do not are refused such keys.
        skips: regular expressions for the names of tensors in published checkpoints that this release does not need,
            such as layers that predict further tokens. Each matches a whole name; `{layers}` in it stands for the
            number of layers.
        unread_tensors: returns further such expressions, given the `DecoderConfig`.
        prefixes: pairs of prefixes of tensor names: in the decoder, and possibly in checkpoints.
        renames: regular expressions for the beginnings of tensor names in another form of checkpoints, each with what
            published checkpoints have in its place. The first one that matches counts.
        nested: moves the decoder's keys of a flat `config.json` into `text_config`; written checkpoints then use the
            names of `prefixes`. None: written checkpoints are flat.
        read_rope: reads the frequencies of the rotary embedding from a `config.json`, given the width of a head and
            `max_position_embeddings`.
        write_rope: returns the keys of `config.json` for these frequencies.
        keys: keys of `config.json` for options of layers that are fields of `DecoderConfig`.
        read_options: reads the other options of layers from a `config.json`, given the number of layers.
        write_options: returns the keys of `config.json` for these options, and keys that the family writes differently
            from others, given the `DecoderConfig`.
    """

    architecture: str
    model_type: str
    other_architectures: tuple[str, ...] = ()
    other_model_types: tuple[str, ...] = ()
    text_types: tuple[str, ...] = ()
    text_family: "Family | None" = None
    reads_tower: bool = True
    layer: Any
    max_positions: int
    norm_eps: float = 1e-6
    head_dim: int | None = None
    head_dim_key: str = "head_dim"
    kv_heads: int | None = None
    bos: int | None = None
    eos: int | list[int] | None = None
    tied_embeddings: bool = False
    ties_at_top: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    intermediate_size: tuple[str, int | None] = ("intermediate_size", None)
    norm_offset: float = 0.0
    scales_embedding: bool = False
    reads: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    unread_tensors: Callable[[Any], tuple[str, ...]] = lambda _: ()
    prefixes: tuple[tuple[str, str], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    nested: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    read_rope: Callable[[JsonObject, int, int], RotaryEmbedding] = read_rope
    write_rope: Callable[[RotaryEmbedding], Mapping[str, Any]] = write_rope
    keys: tuple[Key, ...] = ()
    read_options: Callable[[JsonObject, int], Mapping[str, Any]]
    write_options: Callable[[Any], Mapping[str, Any]] = lambda _: {}

    def decoder_name(self, name: str) -> str:
        """Returns the decoder's name of a checkpoint's tensor."""
        for pattern, published in self.renames:
            if start := re.match(pattern, name):
                name = start.expand(published) + name[start.end() :]
                break
        for inner, outer in self.prefixes:
            if name.startswith(outer):
                return inner + name.removeprefix(outer)
        return name

    def written_name(self, name: str) -> str:
        """Returns the name under which a decoder's tensor is saved."""
        for inner, outer in self.prefixes if self.nested is not None else ():
            if name.startswith(inner):
                return outer + name.removeprefix(inner)
        return name


class Description(NamedTuple):
    """A decoder's family, and its keys in `config.json`: the whole file, or `text_config` with the keys next to it."""

    family: Family
    file: JsonObject


_FAMILIES: Final[dict[str, Family]] = {}


def register(*families: Family) -> None:
    """Adds families to the registry, so that checkpoints of their architectures can be read.

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
    """Returns the family of an architecture; errors begin with `operation`.

    Raises:
        ValueError: no such family.
    """
    if architecture not in families():
        raise ValueError(f"{operation}: architecture is {architecture!r}; accepted: {', '.join(families())}")
    return families()[architecture]


def description(raw: Mapping[str, Any], source: str) -> Description:
    """Returns the description of the decoder in a `config.json` with the contents `raw`, which errors call `source`.

    If the decoder's keys are in `text_config`, keys that are missing there are read from the object around it.

    Raises:
        CheckpointError: it names no supported family, or several; or `text_config` is not an object.
    """
    file = JsonObject(raw, source)
    family = _family_of(file)
    if family.text_family is not None and not (family.reads_tower and file.get(_TOWER) is not None):
        family = family.text_family
    text = file.object(_TEXT)
    if text is None:
        return Description(family, file)
    siblings = {key: value for key, value in raw.items() if key != _TEXT}
    if family.text_types:
        text.choice("model_type", family.text_types[0], family.text_types)
        siblings.pop(_TIED, None)
    inner = {key: value for key, value in text.raw.items() if key not in _MODEL_LEVEL_KEYS or siblings.get(key) is None}
    # For some models, transformers 4 wrote that the embeddings are tied in only one of the two objects.
    tied = {_TIED: True} if True in (siblings.get(_TIED), inner.get(_TIED)) else {}
    if family.ties_at_top and siblings.get(_TIED) is not None:
        tied = {_TIED: siblings[_TIED]}
    return Description(family, JsonObject(inner | tied, source, text.prefix, siblings))


def _family_of(file: JsonObject) -> Family:
    """Returns the family that a file names."""
    by_architecture = families()
    accepted = ", ".join(by_architecture)
    model_type, names = file.get("model_type"), file.get("architectures")
    if names is None:
        types = {name: (family.model_type, *family.other_model_types) for name, family in by_architecture.items()}
        names = [name for name in types if model_type in types[name]]
        if not names:
            raise file.error("architectures", accepted)
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    similar = (names[0], *generative_architectures(names[0])) if is_one else ()
    known = by_architecture | {
        other: family for family in by_architecture.values() for other in family.other_architectures
    }
    family = next((known[name] for name in similar if name in known), None)
    if family is None:
        raise file.error("architectures", f"a list of one of {accepted}; {POOLING_ARCHITECTURES}")
    if model_type not in (None, family.model_type, *family.other_model_types):
        raise file.error("model_type", f"{family.model_type!r}, as architectures is {names[0]}")
    return family
