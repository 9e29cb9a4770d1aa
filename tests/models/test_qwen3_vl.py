"""Qwen3-VL: what its configurations say, forms of its experts, and images whose rows join several layers."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import detjax
from detjax import audit, models, ops
from detjax.bench import presets
from detjax.models import CheckpointError, Decoder, DecoderConfig, digest, load, save
from detjax.models.checkpoint.loading import parameters_of_checkpoint, tensor_shapes, without_weights
from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.models.decoder import ImageRows
from detjax.models.mesh import shardings_of
from detjax.models.network import parameters, split
from detjax.operands.kv_pages import Queries
from tests.models.hugging_face import FIXTURES, LANGUAGE, SINGLE, TOWER, changed_tensors, copied, tensors
from tests.models.shallow_models import shallow
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices
from tests.support.towers import QWEN3_VL

DENSE, EXPERTS = "qwen3-vl", "qwen3-vl-moe"
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 3584,
        "intermediate_size": 48,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 100,
    },
    "tie_word_embeddings": False,
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "model_type": "qwen3_vl", "out_hidden_size": 3584},
}
"""The keys of published files, with few tokens and another width."""


def read(raw: dict[str, Any] = PUBLISHED, text: dict[str, Any] | None = None, **vision: Any) -> DecoderConfig:
    inner = {"text_config": raw["text_config"] | (text or {}), "vision_config": raw["vision_config"] | vision}
    return DecoderConfig.from_hugging_face(raw | inner, "some/config.json")


# --- configurations ---------------------------------------------------------------------------------------------------


def test_a_published_file_describes_a_model_of_images() -> None:
    config = read()
    assert (config.vision, config.placeholders) == (QWEN3_VL, (151655, 151656))
    assert config.rope == ops.RotaryEmbedding(128, 5e6, sections=(24, 20, 20), interleaved=True)
    assert (config.vision_start_token, config.vision_end_token) == (151652, 151653)
    assert (config.dtype, config.tied_embeddings, config.qk_norm) == ("bfloat16", False, True)


def test_embeddings_are_tied_if_the_whole_models_file_says_so() -> None:
    """transformers writes another default of its text configuration next to it."""
    for top, text, tied in ((False, True, False), (True, False, True), (None, True, True), (None, None, False)):
        raw = PUBLISHED | {"tie_word_embeddings": top}
        assert read(raw, text={"tie_word_embeddings": text}).tied_embeddings == tied


def test_what_is_written_says_the_same_to_both_versions_of_transformers() -> None:
    yarn = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 262144}
    for text in ({}, {"rope_scaling": PUBLISHED["text_config"]["rope_scaling"] | yarn}):
        config = read(text=text)
        written = config.to_hugging_face()
        assert DecoderConfig.from_hugging_face(written, "config.json") == config
        inner = written["text_config"]
        assert (inner["model_type"], written["vision_config"]["model_type"]) == ("qwen3_vl_text", "qwen3_vl_vision")
        for places in (inner["rope_parameters"], inner["rope_scaling"]):
            assert (places["mrope_section"], places["mrope_interleaved"]) == ([24, 20, 20], True)
            assert places["rope_type"] == ("yarn" if text else "default")


@pytest.mark.parametrize(
    ("text", "vision", "words"),
    [
        ({}, {"deepstack_visual_indexes": [16, 8, 24]}, "[16, 8, 24]; accepted: a list of blocks from 0 to 26 in asc"),
        ({}, {"deepstack_visual_indexes": [8, 8]}, "[8, 8]; accepted: a list of blocks from 0 to 26 in ascending"),
        ({}, {"deepstack_visual_indexes": [27]}, "[27]; accepted: a list of blocks from 0 to 26"),
        ({}, {"deepstack_visual_indexes": [-1]}, "[-1]; accepted: a list of blocks from 0 to 26"),
        ({}, {"deepstack_visual_indexes": ["8"]}, "['8']; accepted: a list of blocks"),
        ({}, {"deepstack_visual_indexes": 8}, "8; accepted: a list of blocks"),
        ({}, {"deepstack_visual_indexes": [True]}, "[True]; accepted: a list of blocks"),
        ({"num_hidden_layers": 2}, {}, "[8, 16, 24]; accepted: at most 2 blocks, because the rows of each join"),
    ],
)
def test_blocks_whose_rows_have_no_layer_are_refused(text: dict[str, Any], vision: dict[str, Any], words: str) -> None:
    place = f"some/config.json: vision_config.deepstack_visual_indexes is {words}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(place)}"):
        read(text=text, **vision)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"rope_scaling": {"mrope_interleaved": False}}, "rope_scaling.mrope_interleaved is False; accepted: true"),
        (
            {"rope_scaling": {"mrope_section": [24, 20, 21]}},
            "rope_scaling.mrope_section is [24, 20, 21]; accepted: 3 numbers that add up to 64",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is 'dynamic'; accepted: "),
        ({"layer_types": ["sliding_attention"] * 36}, "layer_types is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_is_not_served_is_refused_by_its_place_in_the_file(text: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'some/config.json: text_config.{words}')}"):
        read(text=text)


def test_presets_are_of_the_sizes_that_they_are_named_for() -> None:
    for name, layers, billions in (("Qwen3-VL-8B", 36, (8.6, 9.0)), ("Qwen3-VL-30B-A3B", 48, (30.5, 31.5))):
        config = presets.config(name)
        assert config.layers == layers and config.vision is not None
        assert config.vision.deepstack_blocks == (8, 16, 24)
        weights = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
        assert billions[0] < weights / 1e9 < billions[1]
        assert presets.config(name, 4).layers == 4


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_tensors_are_saved_under_their_published_names(tmp_path: Path) -> None:
    model, _ = load(FIXTURES / EXPERTS, progress=False)
    save(model, tmp_path / "saved")
    saved, stored = tensors(tmp_path / "saved"), tensors(FIXTURES / EXPERTS)
    assert_same_bits(saved, stored)
    assert saved[f"{LANGUAGE}layers.0.mlp.experts.gate_up_proj"].shape == (5, 36, 32)
    assert saved[f"{LANGUAGE}layers.0.mlp.experts.down_proj"].shape == (5, 16, 36)
    assert saved[f"{TOWER}deepstack_merger_list.0.norm.weight"].shape == (64,)


@pytest.mark.parametrize("form", ["outputs first", "by expert"])
def test_experts_are_read_in_every_form_that_they_have(tmp_path: Path, form: str) -> None:
    """The form that transformers writes, and the form of quantized checkpoints."""
    directory = copied(EXPERTS, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        for name in [name for name in stored if ".experts." in name]:
            x = np.ascontiguousarray(stored.pop(name).swapaxes(1, 2))
            if form == "outputs first":
                stored[name] = x
                continue
            prefix, tensor = name.rsplit(".", 1)
            for expert, y in enumerate(x):
                parts = dict(zip(("gate_proj", "up_proj"), np.split(y, 2), strict=True))
                parts = parts if tensor == "gate_up_proj" else {tensor: y}
                stored |= {f"{prefix}.{expert}.{part}.weight": z.copy() for part, z in parts.items()}
    expected = load(FIXTURES / EXPERTS, progress=False)[0]
    assert digest(load(directory, progress=False)[0]) == digest(expected)


def test_new_experts_may_have_another_form_than_the_checkpoint(tmp_path: Path) -> None:
    model, name = load(FIXTURES / EXPERTS, progress=False)[0], f"{LANGUAGE}layers.2.mlp.experts.down_proj"
    down = tensors(FIXTURES / EXPERTS)[name]
    for number, x in enumerate((down + down, np.ascontiguousarray((down + down).swapaxes(1, 2)))):
        file = tmp_path / f"{number}.safetensors"
        safetensors.numpy.save_file({name: x}, file)
        (new,) = UpdatableWeights(model).read(file, lambda _: None).weights.values()
        assert_same_bits(new, np.ascontiguousarray((down + down).swapaxes(1, 2)))


def test_experts_of_both_shapes_have_the_published_form() -> None:
    """With twice as many inputs as inner columns, a square tensor may be either."""
    raw = json.loads((FIXTURES / EXPERTS / "config.json").read_text())
    config = read(raw, text={"moe_intermediate_size": 18})
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (5, 36, 36)
    stored = {name: StoredTensor(name, Path("file"), shape, "BF16", 0, None, 0)}
    (form,) = (one for one in parameters_of_checkpoint(_empty(config), stored) if name in one.shapes)
    assert form.tensors.transposed and form.shapes == {name: shape}


def _empty(config: DecoderConfig) -> Decoder:
    return without_weights(config, np.dtype("float32"))


def test_experts_that_do_not_fit_are_refused_by_the_published_shape(tmp_path: Path) -> None:
    directory = copied(EXPERTS, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored[f"{LANGUAGE}layers.0.mlp.experts.down_proj"] = np.zeros((5, 36, 17), np.float32)
    with pytest.raises(CheckpointError, match=re.escape("has shape (5, 36, 17); accepted: (5, 16, 36)")):
        load(directory, progress=False)


# --- rows that join layers --------------------------------------------------------------------------------------------


def images_of(model: Decoder, present: np.ndarray, seed: int = 0) -> ImageRows:
    """Rows of noise where images are, and numbers that would spread elsewhere."""
    assert model.config.vision is not None
    rows = np.random.default_rng(seed).normal(size=(*present.shape, model.config.vision.row_width))
    return ImageRows(jnp.asarray(present), jnp.asarray(np.where(present[..., None], rows, np.nan), model.dtype))


def hidden_states(model: Decoder, tokens: np.ndarray, images: ImageRows | None, coordinates: np.ndarray) -> np.ndarray:
    """The hidden states of whole requests."""
    batch, length = tokens.shape
    lengths = jnp.full(batch, length, jnp.int32)
    table = ops.contiguous_page_table(batch, length)
    queries = Queries(table, jnp.zeros(batch, jnp.int32), lengths, lengths, coordinates=jnp.asarray(coordinates))
    state = model.empty_state(table.size, slots=batch)
    program = detjax.jit(lambda tokens, queries, state, images: model.hidden_states(tokens, queries, state, images)[0])
    return np.asarray(program(jnp.asarray(tokens), queries, state, images))


def prompt(model: Decoder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A text, and a prompt with an image after the same beginning: tokens, places of images, coordinates."""
    tokens = np.tile(np.random.default_rng(0).integers(0, 99, 11).astype(np.int32), (2, 1))
    present = np.zeros(tokens.shape, bool)
    present[1, 4:8] = True
    coordinates = np.repeat(np.arange(11, dtype=np.int32)[None, :, None], 2, axis=0).repeat(3, axis=-1)
    coordinates[1, 4:8, 1:] += np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.int32)
    return tokens, present, coordinates


def test_rows_join_the_outputs_of_the_first_layers_at_their_tokens_alone() -> None:
    """Each layer's rows change the image's tokens, and no bit of texts around them, whatever their rows hold."""
    model = shallow(DENSE, 0, 2, "bfloat16")
    tokens, present, coordinates = prompt(model)
    images = images_of(model, present)
    states = hidden_states(model, tokens, images, coordinates)
    alone = hidden_states(model, tokens[:1], None, coordinates[:1])
    assert_same_bits(states[0], alone[0])
    assert_same_bits(states[1, :4], alone[0, :4])
    assert not same_bits(states[1, 8:], alone[0, 8:])  # later text sees the image
    width = model.config.hidden_size
    for part in range(3):
        columns = slice(part * width, (part + 1) * width)
        without = images._replace(rows=images.rows.at[..., columns].set(0))
        changed = hidden_states(model, tokens, without, coordinates)
        assert (changed[1, 4:8] != states[1, 4:8]).any(axis=-1).all()
        assert_same_bits(changed[0], states[0])


def test_devices_that_share_a_model_give_the_bits_of_one() -> None:
    run_on_devices(__name__, devices=2)


def main() -> None:
    """Compares a model on one device and on two."""
    model = shallow(DENSE, 0, 2)
    mesh = models.mesh_of(2)
    assert mesh is not None
    shared = models.sharded(model, mesh)
    places = dict(zip(parameters(shared), shardings_of(shared, mesh), strict=True))
    assert places["layers", 0, "mlp", "down"] is not None  # each device has some columns of the residual stream
    tokens, present, coordinates = prompt(model)
    images = images_of(model, present)
    expected = hidden_states(model, tokens, images, coordinates)
    assert_same_bits(hidden_states(shared, tokens, images, coordinates), expected)
    assert not same_bits(hidden_states(model, tokens, None, coordinates), expected)
    # Products of the portable backend take all columns of the residual stream, and not the device's own as kernels do.
    with detjax.use_backend("stock"):
        np.testing.assert_allclose(hidden_states(shared, tokens, images, coordinates), expected, rtol=0, atol=1e-4)
    print(ALL_HOLD)


def test_an_engines_programs_are_under_contract() -> None:
    model = shallow(EXPERTS, 0, 2)
    with detjax.Engine(model, config=detjax.EngineConfig(max_samples=2, token_budget=16)) as engine:
        programs = engine.programs()
        assert any(program.purpose.startswith("images") for program in programs)
        assert audit.engine_risks(model, programs) == {}


def test_gradients_of_texts_keep_the_signs_of_zeros() -> None:
    """A row without an image has the gradient that it has in a batch without images."""
    x, y = jnp.ones((2, 3)), jnp.ones((2, 3))
    mask, gradient = jnp.array([True, False]), jnp.array([[1.0, -0.0, 0.0]] * 2)
    _, pullback = jax.vjp(lambda x, y: ops.add(x, y, mask=mask), x, y)
    dx, dy = pullback(gradient)
    assert_same_bits(dx, gradient)
    assert_same_bits(dy[0], gradient[0])
    assert not np.asarray(dy[1]).any()


def test_weights_of_inner_blocks_are_part_of_the_tower() -> None:
    network, _ = split(shallow(DENSE, 0, 2))
    inner = [trained for path, trained in zip(network.paths, network.trained, strict=True) if "deepstack" in path]
    assert len(inner) == 12 and not any(inner)


if __name__ == "__main__":
    assert len(sys.argv) == 1
    main()
