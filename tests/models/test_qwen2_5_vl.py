"""Qwen2.5-VL: what its configurations say, the patches of its images, and positions."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax import ops
from detjax.models import CheckpointError, DecoderConfig, load, save
from detjax.models.vision.images import ImageOptions, image_patches, image_rows, resized
from detjax.models.vision.prompt_images import TokenGrid, token_coordinates
from detjax.ops.rotary import LinearScaling, RotaryEmbedding
from tests.models.hugging_face import changed_json, copied
from tests.support.bits import assert_same_bits
from tests.support.towers import QWEN2_5_VL, model, random_patches, reference_patches

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen2_5_vl-tiny"
ROWS = TokenGrid((0,), 2, 3)
RAW: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vocab_size": 100,
    "hidden_size": 3584,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"hidden_size": 1280, "in_chans": 3, "spatial_patch_size": 14},
}


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(RAW | changes, "some/config.json")


def refusal(**changes: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    return str(error.value)


def vision_refusal(**changes: Any) -> str:
    return refusal(vision_config=RAW["vision_config"] | changes)


# --- configurations ---------------------------------------------------------------------------------------------------


def test_keys_that_are_left_out_have_the_values_of_transformers() -> None:
    config = read()
    assert config.vision == QWEN2_5_VL
    assert config.rope == RotaryEmbedding(128, 1e6, sections=(16, 24, 24))
    assert (config.norm_eps, config.max_positions) == (1e-5, 32768)
    assert (config.placeholders, config.qkv_bias, config.tied_embeddings) == ((151655, 151656), True, False)
    assert config.windows == (None, None)


def test_published_files_and_those_of_transformers_5_say_the_same() -> None:
    decoder = {key: RAW[key] for key in RAW if key not in ("architectures", "model_type", "vision_config")}
    nested = {key: RAW[key] for key in ("architectures", "model_type", "vision_config")}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {**decoder, "model_type": "qwen2_5_vl_text", "dtype": "float32", "rope_scaling": None}
    raw = nested | {"dtype": "bfloat16", "text_config": text | {"rope_parameters": rope}}
    assert DecoderConfig.from_hugging_face(raw, "config.json") == read(dtype="bfloat16")
    raw["text_config"]["tie_word_embeddings"] = True
    assert DecoderConfig.from_hugging_face(raw, "config.json").tied_embeddings


def test_positions_may_be_scaled() -> None:
    scaling = {"type": "linear", "factor": 2.0, "mrope_section": [16, 24, 24]}
    config = read(rope_scaling=scaling)
    assert config.rope == RotaryEmbedding(128, 1e6, LinearScaling(2.0), sections=(16, 24, 24))
    assert DecoderConfig.from_hugging_face(config.to_hugging_face(), "config.json") == config


def test_what_is_not_served_is_refused() -> None:
    assert "rope_scaling.mrope_section is [16, 24]; accepted: 3 numbers that add up to 64" in refusal(
        rope_scaling={"type": "mrope", "mrope_section": [16, 24]}
    )
    assert "rope_scaling is" in refusal(rope_parameters={"mrope_section": [24, 20, 20]})
    assert "head_dim is 64; accepted: 128, as hidden_size is 3584 with 28 heads" in refusal(head_dim=64)
    assert "vision_config.out_hidden_size is 7; accepted: 3584" in vision_refusal(out_hidden_size=7)
    assert "vision_config.hidden_size is 1281; accepted: a multiple of 64" in vision_refusal(hidden_size=1281)
    assert "vision_config.in_channels is missing; accepted: 3" in vision_refusal(in_chans=4)
    assert "vision_config.hidden_act is 'relu'; accepted: silu" in vision_refusal(hidden_act="relu")
    assert "vision_config.window_size is 20; accepted: at least 28" in vision_refusal(window_size=20)
    assert "vision_config.fullatt_block_indexes is 7" in vision_refusal(fullatt_block_indexes=7)


def test_sections_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sections is \(2, 3\); accepted: numbers >= 1 that add up to 8"):
        RotaryEmbedding(16, 100.0, sections=(2, 3))
    with pytest.raises(ValueError, match="axial is True with sections None"):
        RotaryEmbedding(16, 100.0, axial=True)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("patch_size", 14, "patch_size is 14; accepted: 4; anything else is not supported"),
        ("do_resize", False, "do_resize is False; accepted: true"),
        ("resample", 2, "resample is 2; accepted: 3"),
        ("image_std", [1.0, 0.0, 1.0], "image_std is [1.0, 0.0, 1.0]; accepted: numbers other than 0"),
        ("image_mean", [0.5], "image_mean is [0.5]; accepted: a list of 3 numbers"),
        ("max_pixels", 100, "max_pixels is 100; accepted: at least min_pixels, which is 256"),
    ],
)
def test_other_ways_to_make_patches_are_refused(key: str, value: Any, words: str, tmp_path: Path) -> None:
    directory = copied(FIXTURE.name, tmp_path)
    with changed_json(directory / "preprocessor_config.json") as raw:
        raw[key] = value
    with pytest.raises(CheckpointError) as error:
        load(directory, progress=False)
    assert "preprocessor_config.json: " in str(error.value) and words in str(error.value)


def test_a_model_without_a_file_for_images_has_the_usual_options(tmp_path: Path) -> None:
    directory = copied(FIXTURE.name, tmp_path)
    (directory / "preprocessor_config.json").unlink()
    assert load(directory, progress=False)[0].image_options == ImageOptions()


# --- patches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (900, 900, (896, 896)),
        (1000, 1000, (980, 980)),  # 1008 by 1008 would be too many
        (14, 100, (28, 168)),  # 0.5 is rounded to 0, and the image is then too small
        (42, 100, (56, 112)),  # 1.5 is rounded to 2
        (70, 100, (56, 112)),  # and so is 2.5
        (5000, 3000, (1288, 756)),
        (10, 10, (56, 56)),
    ],
)
def test_sizes_are_multiples_of_a_token_within_the_bounds(height: int, width: int, expected: tuple[int, int]) -> None:
    assert resized(height, width, 28, ImageOptions(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)) == expected


def test_an_image_far_longer_than_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="the image has 3 rows and 700 columns; accepted: a side at most 200 times"):
        random_patches(FIXTURE.name, 3, 700)


@pytest.mark.parametrize("image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_what_is_no_image_is_refused(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"accepted: uint8 \(height, width, 3\), red, green and blue"):
        image_patches.__wrapped__(image, ImageOptions(), QWEN2_5_VL)  # pyright: ignore[reportFunctionMemberAccess]


# --- positions --------------------------------------------------------------------------------------------------------


def test_an_image_has_one_time_and_the_text_goes_on_behind_it() -> None:
    coordinates, excess = token_coordinates([5, 9, 9, 9, 9, 9, 9, 5, 5, 9, 6], [9], [ROWS, TokenGrid((0,), 1, 1)])
    image = [[1, 1 + row, 1 + column] for row in range(2) for column in range(3)]
    text = [[position] * 3 for position in (4, 5, 6, 7)]
    assert coordinates.tolist() == [[0, 0, 0], *image, *text]
    assert excess == 8 - 11


def test_tokens_that_are_not_those_of_the_images_are_refused() -> None:
    with pytest.raises(ValueError, match="2 image tokens from token 1 on; accepted: 6, as the image has 1 frames of 2"):
        token_coordinates([5, 9, 9, 5], [9], [ROWS])
    with pytest.raises(ValueError, match="0 runs of image tokens; accepted: 1"):
        token_coordinates([5, 5], [9], [ROWS])


def test_coordinates_of_another_shape_are_refused() -> None:
    sections = RotaryEmbedding(16, 500.0, sections=(2, 1, 5))
    with pytest.raises(ValueError, match=r"rope: positions has shape \(4, 2\); accepted: \(4, 3\), x being"):
        ops.rope(jnp.zeros((4, 1, 16)), jnp.zeros((4, 2), jnp.int32), sections)


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_saved_directory_makes_the_same_patches_and_rows(tmp_path: Path) -> None:
    original = model(FIXTURE.name)
    save(original, tmp_path / "saved")
    again = load(tmp_path / "saved", progress=False)[0]
    assert (again.config, again.image_options) == (
        DecoderConfig(**{**vars(original.config), "dtype": "float32"}),
        original.image_options,
    )
    assert again.vision is not None and original.vision is not None
    images = reference_patches(FIXTURE.name)[1:]
    assert_same_bits(image_rows(again.vision, images), image_rows(original.vision, images))
    assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(original))
