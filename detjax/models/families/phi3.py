"""Phi-3, Phi-3.5-mini and Phi-4 (Abdin et al. 2024): Llama's layer, with fused projections in checkpoints.

A sliding window, if any, applies to all layers. Heads may be partly rotated. With LongRoPE, the model's
`max_position_embeddings` selects the frequencies. Transformers selects them by the length of each call, so that the
numbers of earlier tokens depend on later ones; here they must not.
"""

from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.rope_config import ROTATED_SHARE, read_partial_rope, write_partial_rope
from detjax.models.configuration.windows import first_window, read_uniform_windows
from detjax.models.families import llama
from detjax.ops.rotary import LongRopeScaling, RotaryEmbedding

_ORIGINAL: Final = "original_max_position_embeddings"
_POSITIONS: Final = 4096
"""The default of both numbers of positions."""


class Layer(llama.Layer):
    """Llama's layer with fused tensors."""

    FUSED = True


def _read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    original = file.integer(_ORIGINAL, _POSITIONS, minimum=2)
    raw = {**file.raw, _ORIGINAL: original}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = file.object(key)
        if parameters is None:
            continue
        # Two older names of LongRoPE; in Phi-3's files "yarn" is one as well.
        types = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
        stated = parameters.choice("rope_type", parameters.choice("type", "default", tuple(types)), tuple(types))
        if parameters.integer(_ORIGINAL, original) != original:
            # Transformers ignores this one.
            raise parameters.error(_ORIGINAL, f"{original}, which is {_ORIGINAL} next to {key}, or its default")
        unused = ("type", "rope_type", *((_ORIGINAL,) if types[stated] == "default" else ()))
        raw[key] = {name: x for name, x in parameters.raw.items() if name not in unused} | {"rope_type": types[stated]}
    return read_partial_rope(JsonObject(raw, file.source, file.prefix), head_dim, max_positions, share=1.0)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    has_window = file.get("sliding_window") is not None
    return {"windows": read_uniform_windows(file, layers, "phi3", has_window=has_window)}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    written = {"sliding_window": first_window(config.windows), **write_partial_rope(config.rope)}
    scaling = config.rope.scaling
    if not isinstance(scaling, LongRopeScaling):
        return written
    # Transformers 4 reads the key "type", and the original positions next to the scaling.
    others = {name: x for name, x in written["rope_scaling"].items() if name not in ("rope_type", _ORIGINAL)}
    original = scaling.original_max_position_embeddings
    return written | {"rope_scaling": {"type": "longrope", **others}, _ORIGINAL: original}


FAMILY: Final = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    layer=Layer,
    max_positions=_POSITIONS,
    norm_eps=1e-5,
    bos=1,
    eos=32000,
    reads=(ROTATED_SHARE,),
    read_rope=_read_rope,
    read_options=_read_options,
    write_options=_write_options,
)
