"""Qwen3.5: what its configurations say, and checkpoints of the text model and of the multimodal one."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detjax.bench import cases, presets
from detjax.models import CheckpointError, DecoderConfig, GenerationDefaults, digest, load, save
from detjax.models.checkpoint.stored_formats import stored_formats
from detjax.models.configuration.family import description
from detjax.models.parts.delta_net import DeltaNetOptions
from detjax.models.parts.gated_experts import GatedExpertsOptions
from detjax.models.parts.parameters import Tensors
from detjax.ops.rotary import RotaryEmbedding
from tests.models.hugging_face import FIXTURES, LANGUAGE, SINGLE, changed_json, changed_tensors, copied, tensors
from tests.support.bits import assert_same_bits
from tests.support.towers import QWEN3_5

TEXT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
MOE = {key: value for key, value in TEXT.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"]
}
PUBLISHED = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}
DENSE, EXPERTS = "qwen3-5", "qwen3-5-moe"


def read(raw: dict[str, Any], **changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(raw | changes, "some/config.json")


def multimodal(raw: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """The configuration of a multimodal model with such a text model, which describes no tower."""
    kind = "qwen3_5_moe" if "Moe" in raw["architectures"][0] else "qwen3_5"
    text = {key: value for key, value in raw.items() if key != "architectures"} | {"model_type": f"{kind}_text"}
    name = raw["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    return {"architectures": [name], "model_type": kind, "text_config": text} | beside


# --- configurations ---------------------------------------------------------------------------------------------------


def test_keys_that_are_left_out_have_the_values_of_transformers() -> None:
    linear = (True, True, True, False, True, True)
    delta = DeltaNetOptions(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4, layers=linear)
    for raw, kv_heads, inner in ((TEXT, 4, 48), (MOE, 2, 512)):
        config = read(raw)
        assert (config.delta, config.kv_heads, config.intermediate_size) == (delta, kv_heads, inner)
        assert (config.head_dim, config.max_positions, config.qkv_bias) == (256, 32768, False)
        assert config.rope == RotaryEmbedding(256, 10_000.0, rotary_dim=64)
        assert (config.qk_norm, config.tied_embeddings) == (True, False)
    assert read(TEXT).experts is None
    assert read(MOE).experts == GatedExpertsOptions(
        experts=256, chosen=8, inner_width=512, normalized=True, layers=(True,) * 6, shared_width=512
    )


def test_experts_are_in_every_layer_and_their_number_has_two_names() -> None:
    unread = {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False}
    experts = read(MOE, num_local_experts=7, **unread).experts
    assert experts is not None and (experts.experts, experts.normalized, experts.layers) == (7, True, (True,) * 6)


@pytest.mark.parametrize("raw", [TEXT, MOE])
def test_a_multimodal_model_has_the_text_model_that_its_file_describes(raw: dict[str, Any]) -> None:
    raw = raw | PUBLISHED
    expected = read(raw, tie_word_embeddings=True, dtype="bfloat16")
    assert expected.rope == RotaryEmbedding(256, 1e7, rotary_dim=64)
    whole = multimodal(raw | {"tie_word_embeddings": True, "dtype": "bfloat16"})
    assert read(whole) == read(whole, architectures=None) == expected
    # What the whole model's configuration says holds where the text model's says nothing.
    assert read(multimodal(raw, tie_word_embeddings=True, torch_dtype="bfloat16")) == expected
    # The whole model's dtype is the dtype of its weights, however.
    assert read(multimodal(raw | {"dtype": "float16"}, dtype="bfloat16")).dtype == "bfloat16"
    # A text model's file that names the multimodal model's class.
    assert read(raw, architectures=whole["architectures"], tie_word_embeddings=True, dtype="bfloat16") == expected


def test_token_ids_of_a_multimodal_model_are_those_of_its_text_model() -> None:
    whole = multimodal(TEXT | {"eos_token_id": 7}, eos_token_id=8, bos_token_id=9)
    described = description(whole, "config.json")
    defaults = GenerationDefaults.from_hugging_face({}, "generation_config.json", described)
    assert defaults == GenerationDefaults(eos_token_ids=(7,), bos_token_id=9)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (TEXT | {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; accepted: float32"),
        (TEXT | {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; accepted: swish, silu"),
        (MOE | {"attn_output_gate": False}, "attn_output_gate is False; accepted: true"),
        (TEXT | {"num_experts": 8}, "num_experts is 8; accepted: 0, null"),
        (TEXT | {"model_type": "qwen3_5"}, "model_type is 'qwen3_5'; accepted: 'qwen3_5_text'"),
        (TEXT | {"rope_parameters": {"mrope": 1}}, "rope_parameters.mrope is 1; accepted: no such key"),
        (multimodal(MOE | {"hidden_size": 0}), "text_config.hidden_size is 0; accepted: an integer >= 1"),
        (multimodal(TEXT | {"rope_theta": 0}), "text_config.rope_theta is 0; accepted: a finite number > 0"),
        (multimodal(TEXT, dtype="int8"), "dtype is 'int8'; accepted: bfloat16, float16, float32"),
        (multimodal(TEXT, text_config=3), "text_config is 3; accepted: an object"),
        (
            TEXT | {"architectures": ["Qwen3_5Encoder"]},
            "architectures is ['Qwen3_5Encoder']; accepted: a list of one of Deep",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_place_in_the_file(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'some/config.json: {words}')}"):
        read(raw)


def test_a_storage_format_of_the_whole_model_is_found() -> None:
    described = description(multimodal(TEXT, quantization_config={"quant_method": "exl2"}), "some/config.json")
    with pytest.raises(
        CheckpointError, match=r"^some/config.json: quantization_config.quant_method is 'exl2'; accepted: "
    ):
        stored_formats(described.file)


@pytest.mark.parametrize("raw", [TEXT, MOE])
def test_what_is_written_is_a_text_model_that_says_the_same(raw: dict[str, Any]) -> None:
    config = read(multimodal(raw | PUBLISHED))
    written = config.to_hugging_face()
    assert read(written) == config
    assert (written["architectures"], written["model_type"][-5:]) == (raw["architectures"], "_text")
    assert ("intermediate_size" in written) == (raw is TEXT)
    assert not {"mlp_only_layers", "norm_topk_prob"} & written.keys()
    with pytest.raises(ValueError, match="experts is"):
        dataclasses.replace(
            config, experts=read(TEXT | {"architectures": ["Qwen3NextForCausalLM"]}).experts if raw is TEXT else None
        ).to_hugging_face()


# --- the tower --------------------------------------------------------------------------------------------------------


def with_tower(raw: dict[str, Any], **vision: Any) -> dict[str, Any]:
    """The configuration of a multimodal model with a tower."""
    return multimodal(raw | PUBLISHED | {"hidden_size": 3584}, vision_config={"out_hidden_size": 3584} | vision)


@pytest.mark.parametrize("raw", [TEXT, MOE])
def test_a_description_of_a_tower_makes_a_model_of_images(raw: dict[str, Any]) -> None:
    whole = with_tower(raw)
    config, text = read(whole), read(raw | PUBLISHED | {"hidden_size": 3584})
    assert (config.vision, config.placeholders) == (QWEN3_5, (248056, 248057))
    assert config.rope == RotaryEmbedding(256, 1e7, rotary_dim=64, sections=(11, 11, 10), interleaved=True)
    assert (config.vision_start_token, config.vision_end_token) == (248053, 248054)
    plain = {"rope": text.rope, "vision": None, "image_token": None, "video_token": None}
    plain |= {"vision_start_token": None, "vision_end_token": None}
    assert dataclasses.replace(config, **plain, architecture=text.architecture) == text
    written = config.to_hugging_face()
    assert read(written) == config and written["architectures"] == whole["architectures"]
    assert written["text_config"]["model_type"].endswith("_text") and "image_token_id" not in written["text_config"]


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"out_hidden_size": 7}, "vision_config.out_hidden_size is 7; accepted: 3584"),
        ({"hidden_size": 1153}, "vision_config.hidden_size is 1153; accepted: a multiple of 64"),
        ({"hidden_act": "silu"}, "vision_config.hidden_act is 'silu'; accepted: gelu_pytorch_tanh"),
        ({"num_position_embeddings": 24}, "vision_config.num_position_embeddings is 24; accepted: a square number"),
        ({"deepstack_visual_indexes": [8]}, "vision_config.deepstack_visual_indexes is [8]; accepted: an empty list"),
        ({"in_channels": 1}, "vision_config.in_channels is 1; accepted: 3"),
    ],
)
def test_towers_that_are_not_served_are_refused(vision: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"some/config.json: {words}")):
        read(with_tower(TEXT, **vision))


def test_sections_of_images_that_are_not_served_are_refused() -> None:
    for change, words in (
        ({"mrope_section": [11, 11, 11]}, "mrope_section is [11, 11, 11]; accepted: 3 numbers that add up to 32"),
        ({"mrope_interleaved": False}, "mrope_interleaved is False; accepted: true"),
    ):
        whole = with_tower(TEXT)
        whole["text_config"]["rope_parameters"] = whole["text_config"]["rope_parameters"] | change
        with pytest.raises(CheckpointError, match=re.escape(f"text_config.rope_parameters.{words}")):
            read(whole)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def as_multimodal(directory: Path) -> None:
    """Gives the text model's checkpoint the form of a multimodal one."""
    with changed_json(directory / "config.json") as raw:
        whole = multimodal(dict(raw))
        raw.clear()
        raw |= whole
    with changed_tensors(directory / SINGLE) as stored:
        held = {name.replace("model.", LANGUAGE, 1): stored.pop(name) for name in list(stored)}
        stored |= held | {"model.visual.pos_embed.weight": np.zeros((2, 3), np.float32)}


def test_a_text_model_has_one_digest_in_every_form(tmp_path: Path) -> None:
    for name in (DENSE, EXPERTS):
        expected = load(FIXTURES / name, progress=False)[0]
        save(expected, tmp_path / name)
        assert not any(key.startswith(LANGUAGE) for key in tensors(tmp_path / name))
        assert digest(load(tmp_path / name, progress=False)[0], None) == digest(expected, None)
        as_multimodal(tmp_path / name)
        assert digest(load(tmp_path / name, progress=False)[0], None) == digest(expected, None)


def test_the_published_form_has_one_tensor_for_all_experts_and_others_that_are_passed_over() -> None:
    names = tensors(FIXTURES / EXPERTS).keys()
    assert f"{LANGUAGE}layers.1.mlp.experts.gate_up_proj" in names
    assert any(name.startswith("model.visual.") for name in names) and any(name.startswith("mtp.") for name in names)
    assert "text_config" in json.loads((FIXTURES / EXPERTS / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.visuals.x": (2,)}, "tensor 'model.visuals.x' is surplus"),
        ({f"{LANGUAGE}layers.2.mlp.gate.weight": (5, 36)}, f"tensor '{LANGUAGE}layers.2.mlp.gate.weight' is surplus"),
        (
            {f"{LANGUAGE}layers.0.mlp.experts.gate_up_proj": (5, 30, 36)},
            f"tensor '{LANGUAGE}layers.0.mlp.experts.gate_up_proj' has shape (5, 30, 36); accepted: (5, 32, 36)",
        ),
        ({"model.norm.weight": (36,)}, f"'model.norm.weight' is the same parameter as '{LANGUAGE}norm.weight'"),
        ({f"{LANGUAGE}layers.0.mlp.experts.down_proj": None}, "experts.0.down_proj.weight' is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_the_names_they_have(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    directory = copied(EXPERTS, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        for name, shape in change.items():
            stored.pop(name, None)
            if shape is not None:
                stored[name] = np.zeros(shape, np.float32)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(directory, progress=False)


@pytest.mark.parametrize(
    "form",
    [
        Tensors(("x",), rows=(2, 4, 6), groups=2),
        Tensors(("x",), pairs="halves"),
        Tensors(("x",), pairs="interleaved"),
        Tensors(("x",), pairs="interleaved", transposed=True),
        Tensors(("x",), joined=True),
        Tensors(("x",), head_order=(0, 2, 1), ordered=9),
    ],
)
def test_what_is_joined_is_cut_into_the_same(form: Tensors) -> None:
    shape = (2, 4, 5) if form.joined else (12, 5) if form.pairs is None else (3, 2, 4, 5)
    parameter = np.arange(np.prod(shape)).reshape(shape)
    (tensor,) = form.split(parameter)
    assert [tensor.shape] == form.shapes(shape)
    assert_same_bits(form.join([tensor]), parameter)
    keeps_order = form.joined or form == Tensors(("x",), pairs="halves")
    assert np.array_equal(tensor.reshape(shape), parameter) == keeps_order


def test_presets_are_of_the_sizes_that_they_are_named_for() -> None:
    for name, layers, billions in (("Qwen3.5-35B-A3B", 40, (33, 36)), ("Qwen3-Next-80B-A3B", 48, (78, 82))):
        config = presets.config(name)
        experts = config.experts
        assert isinstance(experts, GatedExpertsOptions) and config.delta is not None
        assert (config.layers, sum(config.delta.layers)) == (layers, layers * 3 // 4)
        weights = layers * experts.experts * 3 * config.hidden_size * experts.inner_width
        assert billions[0] - 3 < weights / 1e9 < billions[1]


def test_a_step_of_a_model_with_slots_is_not_measured_as_one_of_pages() -> None:
    with pytest.raises(
        ValueError, match=r"decode_step: Qwen3.5-35B-A3B keeps a state of each request in slots; accepted"
    ):
        cases.step_case("decode_step", "Qwen3.5-35B-A3B", 1, 128, layers=1)
