"""The keys of `config.json` for the frequencies of the rotary embedding."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Final

from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.windows import FULL, SLIDING
from detjax.ops.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryEmbedding,
    Scaling,
    YarnScaling,
)

MAX_POSITIONS: Final = 2**24
"""Rotations take positions as float32 numbers, which represent all integers below this one."""
ROTATED_SHARE: Final = "partial_rotary_factor"
"""The key for the share of a head's columns that are rotated."""
_PLACES: Final = "rope_parameters", "rope_scaling"
_TYPES: Final = {
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    LongRopeScaling: "longrope",
}


def read_max_positions(file: JsonObject, default: int) -> int:
    """Returns the positions that a model was made for; see `DecoderConfig.max_positions`.

    Raises:
        CheckpointError: the number is not positive, or float32 does not represent all positions.
    """
    why = ", as positions are float32 numbers in rotations"
    return file.integer("max_position_embeddings", default, maximum=MAX_POSITIONS, why=why)


def read_rope(file: JsonObject, head_dim: int, max_positions: int, *, theta: float = 10000.0) -> RotaryEmbedding:
    """Returns the embedding that a `config.json` describes.

    Transformers 5 writes `rope_parameters`, transformers 4 `rope_scaling`; a file may have both. `theta` is the default
    base of the frequencies.

    Raises:
        CheckpointError: a value is out of range, the two disagree, or a key is unknown.
    """
    theta = file.number("rope_theta", theta)
    described = []
    for key in _PLACES:
        parameters = file.object(key)
        if parameters is not None:
            described.append(_read_parameters(file, parameters, head_dim, max_positions, theta))
    return _one_of(file, described) if described else RotaryEmbedding(head_dim, theta)


def read_partial_rope(
    file: JsonObject,
    head_dim: int,
    max_positions: int,
    *,
    share: float,
    theta: float = 10000.0,
    ignored: Collection[str] = (),
) -> RotaryEmbedding:
    """Returns the embedding of partly rotated heads, whose rotated share the file has in one of three places.

    `share` is the default share. Keys of the rotary embedding in `ignored` do not matter to text.

    Raises:
        CheckpointError: see `read_rope`.
    """
    options: dict[str, Any] = {"minimum": 0.0, "maximum": 1.0, "accepted": "a number above 0 and at most 1"}
    stated = file.optional_number(ROTATED_SHARE, **options)
    raw = dict(file.raw)
    for key in _PLACES:
        parameters = file.object(key)
        if parameters is not None:
            inner = parameters.optional_number(ROTATED_SHARE, **options)
            stated = stated if inner is None else inner
            raw[key] = {name: x for name, x in parameters.raw.items() if name not in (ROTATED_SHARE, *ignored)}
    rotated = int(head_dim * (share if stated is None else stated))
    if rotated < 2 or rotated % 2:
        raise file.error(ROTATED_SHARE, f"a share of head_dim, which is {head_dim}, that is an even number of columns")
    rope = read_rope(JsonObject(raw, file.source, file.prefix), rotated, max_positions, theta=theta)
    return dataclasses.replace(rope, head_dim=head_dim, rotary_dim=rotated if rotated < head_dim else None)


def read_rope_of_layer_types(
    file: JsonObject, head_dim: int, max_positions: int, *, theta: float, window_theta: float
) -> tuple[RotaryEmbedding, RotaryEmbedding]:
    """Returns the embeddings of layers without and with a window, whose default bases are `theta` and `window_theta`.

    Transformers 5 writes `rope_parameters` with an object for each type of layer. Transformers 4 writes `rope_theta`
    and `rope_scaling` for layers without a window, and `rope_local_base_freq` for the others.

    Raises:
        CheckpointError: see `read_rope`.
    """
    thetas = {FULL: file.number("rope_theta", theta), SLIDING: file.number("rope_local_base_freq", window_theta)}
    by_type, scaling = file.object("rope_parameters"), file.object("rope_scaling")
    described: dict[str, list[RotaryEmbedding]] = {FULL: [], SLIDING: []}
    if by_type is not None:
        for name in thetas:
            parameters = by_type.object(name)
            if parameters is not None:
                described[name].append(_read_parameters(file, parameters, head_dim, max_positions, thetas[name]))
        for unread in by_type.unread():
            raise by_type.error(unread, f"{FULL} and {SLIDING}, each with an object")
    if scaling is not None:
        described[FULL].append(_read_parameters(file, scaling, head_dim, max_positions, thetas[FULL]))
    full, sliding = (_one_of(file, described[name] or [RotaryEmbedding(head_dim, thetas[name])]) for name in thetas)
    return full, sliding


def read_sections(file: JsonObject, default: tuple[int, ...], pairs: int) -> tuple[int, ...]:
    """Returns the numbers of column pairs that are rotated by a token's time, row and column, `pairs` in all.

    The file may have them as `mrope_section` in `rope_parameters` or `rope_scaling`.

    Raises:
        CheckpointError: the sections are not three numbers that add up to the pairs, or the two places disagree.
    """
    sections: dict[str, tuple[int, ...]] = {}
    for key in _PLACES:
        parameters = file.object(key)
        if parameters is not None and parameters.get("mrope_section") is not None:
            sections[key] = _sections(parameters, pairs)
    if len(set(sections.values())) == 2:
        raise file.error("rope_scaling", "the mrope_section that rope_parameters has; remove the wrong one")
    if not sections:
        sections["default"] = _sections(JsonObject({"mrope_section": default}, file.source, "rope_scaling."), pairs)
    return next(iter(sections.values()))


def _sections(parameters: JsonObject, pairs: int) -> tuple[int, ...]:
    sections = parameters.get("mrope_section")
    is_list = isinstance(sections, list | tuple) and all(type(size) is int and size > 0 for size in sections)
    if not is_list or len(sections) != 3 or sum(sections) != pairs:
        raise parameters.error("mrope_section", f"3 numbers that add up to {pairs}, the rotated pairs of columns")
    return tuple(sections)


def _one_of(file: JsonObject, described: list[RotaryEmbedding]) -> RotaryEmbedding:
    """Returns the embedding that a file describes once or twice."""
    if len(set(described)) == 2:
        raise file.error("rope_scaling", "what rope_parameters says; remove the one that is wrong")
    return described[0]


def _read_parameters(
    file: JsonObject, parameters: JsonObject, head_dim: int, max_positions: int, theta: float
) -> RotaryEmbedding:
    theta = parameters.number("rope_theta", theta)
    rope = RotaryEmbedding(head_dim, theta, _read_scaling(file, parameters, head_dim, max_positions))
    for unread in parameters.unread():
        raise parameters.error(unread, "no such key with this rope_type; remove it if it has no effect")
    return rope


def _read_scaling(file: JsonObject, parameters: JsonObject, head_dim: int, max_positions: int) -> Scaling | None:
    accepted = ("default", *_TYPES.values())
    rope_type = parameters.choice("rope_type", parameters.choice("type", "default", accepted), accepted)
    if parameters.optional_number(ROTATED_SHARE, minimum=0.0, accepted="1.0") not in (None, 1.0):
        raise parameters.error(ROTATED_SHARE, "1.0")
    if rope_type == "default":
        return None
    if rope_type == "longrope":
        return _read_long_rope(file, parameters, head_dim, max_positions)
    factor = parameters.number("factor")
    if rope_type == "linear":
        return LinearScaling(factor)

    # In transformers 5 the key next to the parameters takes precedence.
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


def _read_long_rope(file: JsonObject, parameters: JsonObject, head_dim: int, max_positions: int) -> LongRopeScaling:
    original = parameters.integer("original_max_position_embeddings", max_positions, minimum=2)
    original = file.integer("original_max_position_embeddings", original, minimum=2)
    short, long = (_read_factors(parameters, key, head_dim // 2) for key in ("short_factor", "long_factor"))
    optional = {
        key: parameters.optional_number(key, minimum=math.nextafter(0, 1), accepted="a finite number > 0")
        for key in ("factor", "attention_factor")
    }
    return LongRopeScaling(short, long, original, max_positions, **optional)


def _read_factors(parameters: JsonObject, key: str, pairs: int) -> tuple[float, ...]:
    factors = parameters.get(key)
    is_list = isinstance(factors, list | tuple) and len(factors) == pairs
    # A number that is not positive as a float32 is not accepted either.
    if not is_list or not all(type(x) in (int, float) and 2**-126 < x < 2**127 for x in factors):
        raise parameters.error(key, f"a list of {pairs} positive numbers, one for each pair of rotated columns")
    return tuple(map(float, factors))


def write_rope(rope: RotaryEmbedding) -> dict[str, Any]:
    """Returns the keys of `config.json` that describe the embedding, for transformers 4 and 5."""
    rope_type = "default" if rope.scaling is None else _TYPES[type(rope.scaling)]
    fields = dataclasses.fields(rope.scaling) if rope.scaling is not None else ()
    # The model's positions have a key of their own.
    fields = [field for field in fields if field.name != "max_position_embeddings"]
    stated = {field.name: getattr(rope.scaling, field.name) for field in fields}
    stated = {field.name: stated[field.name] for field in fields if stated[field.name] != field.default}
    return {
        "rope_parameters": {"rope_type": rope_type, "rope_theta": rope.theta, **stated},
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope_type, **stated} if stated else None,
    }


def write_partial_rope(rope: RotaryEmbedding) -> dict[str, Any]:
    """Returns the keys of `config.json` that `read_partial_rope` reads, for transformers 4 and 5."""
    share = rope.turning / rope.head_dim
    if int(rope.head_dim * share) < rope.turning:
        share = math.nextafter(share, 1.0)
    written = write_rope(rope)
    written["rope_parameters"] |= {ROTATED_SHARE: share}
    return written | {ROTATED_SHARE: share}


def write_rope_of_layer_types(rope: RotaryEmbedding, window_rope: RotaryEmbedding) -> dict[str, Any]:
    """Returns the keys of `config.json` that `read_rope_of_layer_types` reads, for transformers 4 and 5."""
    full, sliding = write_rope(rope), write_rope(window_rope)
    by_type = {FULL: full["rope_parameters"], SLIDING: sliding["rope_parameters"]}
    return full | {"rope_parameters": by_type, "rope_local_base_freq": window_rope.theta}
