"""The keys of `config.json` for Gemma 4: heads of layers without a window, layers without keys, and their rotations."""

from typing import Any, Final

from detjax.models.configuration.json_object import MAX_EXPERTS, JsonObject
from detjax.models.configuration.proportional_rope import read_proportional_rope, write_proportional_rope
from detjax.models.configuration.windows import FULL, SLIDING, Windows, first_window, read_alternating_windows
from detjax.models.parts.per_layer_embedding import PerLayerOptions
from detjax.models.parts.scaled_experts import ScaledExpertsOptions
from detjax.models.parts.shared_keys_attention import SharedKeysOptions
from detjax.ops.rotary import RotaryEmbedding

_HEAD_DIM: Final = 256
_KV_HEADS: Final = 4
_FULL_HEAD_DIM: Final = 512
_WINDOW: Final = 512
_VOCABULARY: Final = 262144
_PER_LAYER_WIDTH: Final = 256
_ROPES: Final = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""The default rotations by type of layer."""


def read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    """Returns the embedding of layers without a window.

    Raises:
        CheckpointError: a value is out of range or not supported.
    """
    del head_dim, max_positions
    windows = _read_windows(file, file.integer("num_hidden_layers"))
    return _read_rope_of(file, FULL, _read_full_heads(file, windows)[1])


def read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    """Returns the options of layers.

    Raises:
        CheckpointError: a value is out of range or not supported.
    """
    windows = _read_windows(file, layers)
    if file.get("use_bidirectional_attention") not in (None, "vision"):
        raise file.error("use_bidirectional_attention", '"vision", null')
    soft_cap = "final_logit_softcapping"
    head_dim = file.integer("head_dim", _HEAD_DIM)
    return {
        "windows": windows,
        "qk_norm": True,
        "logit_soft_cap": None if file.get(soft_cap) is None else file.number(soft_cap),
        "window_rope": None if first_window(windows) is None else _read_rope_of(file, SLIDING, head_dim),
        "shared_keys": _read_shared_keys(file, windows),
        "per_layer": _read_per_layer(file),
        "experts": _read_experts(file, layers),
    }


def _read_windows(file: JsonObject, layers: int) -> Windows:
    """Reads the windows. The last layer has none, whatever the file says, as in transformers."""
    return (*read_alternating_windows(file, layers, 6, window=_WINDOW)[:-1], None)


def _read_rope_of(file: JsonObject, kind: str, head_dim: int) -> RotaryEmbedding:
    """Reads the rotation of a type of layers."""
    by_kind = file.object("rope_parameters") or JsonObject(_ROPES, file.source, "rope_parameters.")
    for key in by_kind.raw.keys() - _ROPES.keys():
        raise by_kind.error(key, f"{FULL} and {SLIDING}, each with an object")
    parameters = by_kind.object(kind)
    if parameters is None:
        raise by_kind.error(kind, 'an object with "rope_type" and "rope_theta"')
    return read_proportional_rope(parameters, head_dim, theta=file.number("rope_theta", 10_000.0))


def _read_shared_keys(file: JsonObject, windows: Windows) -> SharedKeysOptions:
    kv_heads, head_dim = _read_full_heads(file, windows)
    readers = file.integer("num_kv_shared_layers", 0, minimum=0)
    kinds, with_keys = ({window is None for window in some} for some in (windows, windows[: len(windows) - readers]))
    if readers >= len(windows) or kinds != with_keys:
        raise file.error("num_kv_shared_layers", "a number that leaves keys to a layer of each type in layer_types")
    return SharedKeysOptions(
        full_kv_heads=kv_heads,
        full_head_dim=head_dim,
        values_from_keys=file.boolean("attention_k_eq_v", False),
        readers=readers,
        wide_mlp=file.boolean("use_double_wide_mlp", False),
    )


def _read_full_heads(file: JsonObject, windows: Windows) -> tuple[int, int]:
    """Returns the heads of keys in layers without a window, and their width.

    Published files have them once; transformers 5.24 writes them for each layer.
    """
    heads, kv_heads = file.integer("num_attention_heads"), file.integer("num_key_value_heads", _KV_HEADS)
    if file.raw.get("per_layer_config") is not None:
        key = "per_layer_config"
        kv_heads, head_dim = _read_heads_by_layer(file, windows, (kv_heads, file.integer("head_dim", _HEAD_DIM)))
    else:
        key = "num_global_key_value_heads"
        stated = file.optional_integer(key, minimum=1) if file.boolean("attention_k_eq_v", False) else None
        kv_heads, head_dim = stated or kv_heads, file.integer("global_head_dim", _FULL_HEAD_DIM)
    if heads % kv_heads:
        raise file.error(key, f"divisors of num_attention_heads, which is {heads}, as heads of keys")
    if head_dim % 2:
        raise file.error(key if key == "per_layer_config" else "global_head_dim", "an even width of heads")
    return kv_heads, head_dim


def _read_heads_by_layer(file: JsonObject, windows: Windows, default: tuple[int, int]) -> tuple[int, int]:
    """Returns the heads of keys and their width, which all layers without a window must have in common."""
    by_layer = file.object("per_layer_config") or JsonObject({}, file.source, "per_layer_config.")
    full: tuple[int, int] | None = None
    for index, window in enumerate(windows):
        layer, heads = by_layer.object(str(index)), default
        if layer is not None:
            heads = layer.integer("num_key_value_heads", default[0]), layer.integer("head_dim", default[1])
            for unread in layer.unread():
                raise layer.error(unread, "head_dim and num_key_value_heads alone")
        expected = default if window is not None else full or heads
        if heads != expected:
            raise by_layer.error(
                str(index), f"{expected[0]} heads of keys of width {expected[1]}, as in all layers of its type"
            )
        full = full if window is not None else heads
    for unread in by_layer.unread():
        raise by_layer.error(unread, f"keys from 0 to {len(windows) - 1}, the layers")
    assert full is not None  # the last layer has no window
    return full


def _read_per_layer(file: JsonObject) -> PerLayerOptions | None:
    width = file.integer("hidden_size_per_layer_input", _PER_LAYER_WIDTH, minimum=0)
    vocabulary, rows = file.integer("vocab_size"), file.integer("vocab_size_per_layer_input", _VOCABULARY)
    if not width:
        return None
    if rows < vocabulary:
        raise file.error("vocab_size_per_layer_input", f"at least vocab_size, which is {vocabulary}")
    return PerLayerOptions(width=width, vocab_size=rows)


def _read_experts(file: JsonObject, layers: int) -> ScaledExpertsOptions | None:
    if not file.boolean("enable_moe_block", False):
        return None
    count = file.integer("num_experts", maximum=MAX_EXPERTS)
    return ScaledExpertsOptions(
        experts=count,
        chosen=file.integer("top_k_experts", maximum=count, why=", the number of experts"),
        inner_width=file.integer("moe_intermediate_size"),
        normalized=True,
        layers=(True,) * layers,
        norm_eps=file.number("rms_norm_eps", 1e-6),
    )


def write_options(config: Any) -> dict[str, Any]:
    """Returns the keys of `config.json` that are Gemma 4's own, given the `DecoderConfig`."""
    shared, per_layer, experts = config.shared_keys, config.per_layer, config.experts
    heads = {"head_dim": shared.full_head_dim, "num_key_value_heads": shared.full_kv_heads}
    ropes = {FULL: config.rope} | ({} if config.window_rope is None else {SLIDING: config.window_rope})
    return {
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
        "sliding_window": first_window(config.windows) or _WINDOW,
        "rope_parameters": {kind: write_proportional_rope(rope) for kind, rope in ropes.items()},
        "final_logit_softcapping": config.logit_soft_cap,
        "use_bidirectional_attention": None,
        # The heads in both forms, since releases of transformers read either.
        "global_head_dim": shared.full_head_dim,
        "num_global_key_value_heads": shared.full_kv_heads if shared.values_from_keys else None,
        "per_layer_config": {str(index): heads for index, window in enumerate(config.windows) if window is None},
        "attention_k_eq_v": shared.values_from_keys,
        "num_kv_shared_layers": shared.readers,
        "use_double_wide_mlp": shared.wide_mlp,
        "hidden_size_per_layer_input": 0 if per_layer is None else per_layer.width,
        "vocab_size_per_layer_input": config.vocab_size if per_layer is None else per_layer.vocab_size,
        "enable_moe_block": experts is not None,
        "num_experts": None if experts is None else experts.experts,
        "top_k_experts": None if experts is None else experts.chosen,
        "moe_intermediate_size": None if experts is None else experts.inner_width,
    }
