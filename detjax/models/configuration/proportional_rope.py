"""The keys of `config.json` for a rotation of few columns that have the frequencies of a whole head (p-RoPE)."""

import math
from typing import Any, Final

from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.rope_config import ROTATED_SHARE
from detjax.ops.rotary import LinearScaling, RotaryEmbedding

_PROPORTIONAL: Final = "proportional"
_TYPES: Final = ("default", _PROPORTIONAL)


def read_proportional_rope(parameters: JsonObject, head_dim: int, *, theta: float) -> RotaryEmbedding:
    """Returns the embedding that an object of the type "proportional" or "default" describes.

    `theta` is the default base of the frequencies.

    Raises:
        CheckpointError: a value is out of range, or a key or a type is unknown.
    """
    rope_type = parameters.choice("rope_type", parameters.choice("type", _TYPES[0], _TYPES), _TYPES)
    theta = parameters.number("rope_theta", theta)
    rope = RotaryEmbedding(head_dim, theta)
    if rope_type == _PROPORTIONAL:
        accepted = f"a number up to 1 whose share of {head_dim} columns, the head's, is at least a pair"
        share = parameters.optional_number(ROTATED_SHARE, minimum=0.0, maximum=1.0, accepted=accepted)
        factor, pairs = parameters.number("factor", 1.0), _pairs(1.0 if share is None else share, head_dim)
        if not pairs:
            raise parameters.error(ROTATED_SHARE, accepted)
        scaling = None if factor == 1 else LinearScaling(factor)
        partly: dict[str, Any] = {"rotary_dim": 2 * pairs, "proportional": True} if 2 * pairs < head_dim else {}
        rope = RotaryEmbedding(head_dim, theta, scaling, **partly)
    for unread in parameters.unread():
        raise parameters.error(unread, "no such key with this rope_type; remove it if it has no effect")
    return rope


def write_proportional_rope(rope: RotaryEmbedding) -> dict[str, Any]:
    """Returns the object that `read_proportional_rope` reads.

    An embedding of another kind is written as the most similar one of these.
    """
    if rope.scaling is None and rope.rotary_dim is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    share = rope.turning / rope.head_dim
    if 2 * _pairs(share, rope.head_dim) < rope.turning:
        share = math.nextafter(share, 1.0)
    factor = {"factor": rope.scaling.factor} if isinstance(rope.scaling, LinearScaling) else {}
    return {"rope_type": _PROPORTIONAL, "rope_theta": rope.theta, ROTATED_SHARE: share, **factor}


def _pairs(share: float, head_dim: int) -> int:
    """The pairs of columns that rotate, as transformers counts them."""
    return int(share * head_dim // 2)
