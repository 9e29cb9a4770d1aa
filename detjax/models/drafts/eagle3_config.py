"""The options of an EAGLE-3 head, read from its `config.json` and the shapes of its tensors.

The options of the layer are keys of the file itself, as in EAGLE's own heads, or of `transformer_layer_config`, as in
heads of vLLM's speculators, which leave out keys with transformers' defaults.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Description
from detjax.models.configuration.json_object import CheckpointError, JsonObject
from detjax.models.decoder import Decoder
from detjax.models.drafts.eagle3 import Eagle3Options
from detjax.models.families import llama, qwen3

_NESTED: Final = "transformer_layer_config"
_EAGLE: Final = "eagle_config"
_LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_FAMILIES: Final = {family.model_type: family for family in (llama.FAMILY, qwen3.FAMILY)}
_HEADS: Final = 32
"""Transformers' default of `num_attention_heads` in these families."""
_NEUTRAL: Final[Mapping[str, Any]] = {
    "speculators_model_type": "eagle3",
    "use_aux_hidden_state": True,
    "parallel_drafting": False,
    "norm_output": False,
    "fc_norm": False,
    "bias": False,
    "logit_scale": 1.0,
    "quantization_config": {},
}
"""Unsupported options of heads, each with the value (in addition to null) that has no effect."""


def read_eagle3(
    raw: Mapping[str, Any], source: str, stored: Mapping[str, StoredTensor], target: Decoder
) -> Eagle3Options:
    """Returns the options of a head.

    Args:
        raw: the contents of its `config.json`.
        source: what errors call this file.
        stored: its tensors by EAGLE's names, among them the projection and the last norm.
        target: the model that it drafts for.

    Raises:
        CheckpointError: an option is not supported, or the file, the tensors and the target disagree.
    """
    file = JsonObject(raw, source)
    places = [part for part in (file, file.object(_EAGLE)) if part is not None]
    for part in places:
        for key, neutral in _NEUTRAL.items():
            if part.get(key) not in (None, neutral):
                raise part.error(key, f"{json.dumps(neutral)}, null; anything else is not supported")
    config = _layer_config(file, stored, target)
    target_width = target.config.hidden_size
    if (stated := file.optional_integer("target_hidden_size", minimum=1)) not in (None, target_width):
        raise file.error("target_hidden_size", f"{target_width}, the width of the target; {stated} is another model's")
    if config.vocab_size != target.config.vocab_size:
        raise file.error("vocab_size", f"{target.config.vocab_size}, the vocabulary of the target")
    options = Eagle3Options(
        config=config,
        depths=_depths(places, target.config.layers),
        target_width=target_width,
        draft_vocab_size=file.integer("draft_vocab_size", config.vocab_size, maximum=config.vocab_size),
        has_embedding="embed_tokens.weight" in stored,
        has_lm_head="lm_head.weight" in stored,
        has_input_norm="input_norm.weight" in stored,
        adds_normalized=file.boolean("norm_before_residual", False),
    )
    _check_tables(file, options, stored)
    return options


def _layer_config(file: JsonObject, stored: Mapping[str, StoredTensor], target: Decoder) -> DecoderConfig:
    """Returns the configuration of the head's layer; the tensors provide the sizes that the file leaves out."""
    described = file.object(_NESTED) or file
    model_type = described.choice("model_type", llama.FAMILY.model_type, tuple(_FAMILIES))
    family = _FAMILIES[model_type]
    if described.integer("num_hidden_layers", 1) != 1:
        raise described.error("num_hidden_layers", "1; heads with more layers are not supported")
    heads = described.integer("num_attention_heads", _HEADS)
    sizes = {
        "vocab_size": target.config.vocab_size,
        "hidden_size": _rows(stored, "norm.weight"),
        "intermediate_size": _rows(stored, "midlayer.mlp.gate_proj.weight"),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
    }
    if described.get("head_dim") is None and described is file:
        sizes["head_dim"] = _rows(stored, "midlayer.self_attn.q_proj.weight") // heads
    missing = {key: value for key, value in sizes.items() if described.get(key) is None}
    layer = JsonObject({**described.raw, **missing}, described.source, described.prefix)
    config = DecoderConfig.from_description(Description(family, layer))
    norms = [name for name in ("q_norm", "k_norm") if f"midlayer.self_attn.{name}.weight" in stored]
    return dataclasses.replace(config, architecture=llama.FAMILY.architecture, qk_norm=bool(norms))


def _rows(stored: Mapping[str, StoredTensor], name: str) -> int:
    """Returns the size of a tensor's first axis; 1 if it is missing, which is reported when all tensors are checked."""
    return stored[name].shape[0] if name in stored and stored[name].shape else 1


def _depths(places: list[JsonObject], layers: int) -> tuple[int, ...]:
    """Returns the target's layers whose incoming residual streams the head sees, ascending."""
    for part in places:
        named = part.get(_LAYER_IDS)
        if named is None:
            continue
        accepted = f"a list of different integers from 0 to {layers - 1}, as the target has {layers} layers"
        if not isinstance(named, list) or not named or len(set(map(repr, named))) != len(named):
            raise part.error(_LAYER_IDS, accepted)
        if any(isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers for index in named):
            raise part.error(_LAYER_IDS, accepted)
        return tuple(sorted(named))
    depths = tuple(sorted((2, layers // 2, layers - 3)))
    if depths[0] < 0 or depths[-1] >= layers:
        raise places[0].error(_LAYER_IDS, f"a list of layers of the target, which has {layers}: too few for a default")
    return depths


def _check_tables(file: JsonObject, options: Eagle3Options, stored: Mapping[str, StoredTensor]) -> None:
    """Checks the options that stand for tensors, and the tables that the target would provide."""
    if file.get("norm_before_fc") is not None:
        if file.boolean("norm_before_fc", False) != options.has_input_norm:
            state = "present" if options.has_input_norm else "missing"
            raise file.error("norm_before_fc", f"{json.dumps(options.has_input_norm)}, as input_norm.weight is {state}")
    width, target_width = options.config.hidden_size, options.target_width
    for name, is_present in (("embed_tokens.weight", options.has_embedding), ("lm_head.weight", options.has_lm_head)):
        if not is_present and width != target_width:
            raise CheckpointError(
                f"{file.source}: tensor {name!r} is missing, and the target's cannot serve: it has {target_width} "
                f"columns, the head {width}"
            )
    if not options.has_lm_head and options.draft_vocab_size != options.config.vocab_size:
        raise CheckpointError(
            f"{file.source}: draft_vocab_size is {options.draft_vocab_size} and tensor 'lm_head.weight' is missing; "
            f"accepted: one of shape {(options.draft_vocab_size, width)}"
        )
    projection = stored["fc.weight"]
    expected = (width, target_width * len(options.depths))
    if projection.shape != expected:
        raise CheckpointError(
            f"{projection.file}: tensor {projection.name!r} has shape {projection.shape}; accepted: {expected}, for "
            f"hidden states of width {target_width} at the target's layers {list(options.depths)}"
        )
