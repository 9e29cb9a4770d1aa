"""Qwen2.5-VL: what its configurations say, its images' patches, rows and positions, and packs of images."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import ops
from detjax.kv_pages import Queries
from detjax.models import CheckpointError, Decoder, DecoderConfig, load, save
from detjax.models.decoder import ImageRows
from detjax.models.images import ImageOptions, ImagePatches, image_patches, image_rows, resized, token_coordinates
from detjax.models.parts.vision import VisionOptions
from detjax.ops.rotary import LinearScaling, RotaryEmbedding
from tests.models.hugging_face import changed_json, copied
from tests.support.bits import assert_same_bits, same_bits

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen2_5_vl-tiny"
TOLERANCE = 2e-4
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
    assert config.vision == VisionOptions(
        width=1280,
        inner_width=3420,
        blocks=32,
        heads=16,
        activation="silu",
        channels=3,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        window_size=112,
        full_blocks=(7, 15, 23, 31),
        output_width=3584,
        theta=10000.0,
        tokens_per_second=4,
    )
    assert config.rope == RotaryEmbedding(128, 1e6, sections=(16, 24, 24))
    assert (config.norm_eps, config.max_positions) == (1e-5, 32768)
    assert (config.image_token, config.qkv_bias, config.tied_embeddings) == (151655, True, False)
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


@functools.cache
def model(dtype: str = "float32") -> Decoder:
    return load(FIXTURE, dtype=dtype, progress=False)[0]


@functools.cache
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "reference.npz"))


def vision() -> VisionOptions:
    options = model().config.vision
    assert options is not None
    return options


def patches_of(image: np.ndarray) -> ImagePatches:
    options = model().image_options
    assert options is not None
    return image_patches(image, options, vision())


@functools.cache
def reference_patches() -> tuple[ImagePatches, ...]:
    return tuple(patches_of(reference()[f"image_{index}"]) for index in range(2))


def random_patches(height: int, width: int, seed: int = 0) -> ImagePatches:
    return patches_of(np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8))


def test_patches_are_those_of_transformers() -> None:
    patches = reference_patches()
    assert [[image.rows, image.columns] for image in patches] == reference()["grids"].tolist()
    assert_same_bits(np.concatenate([image.pixels for image in patches]), reference()["patches"])


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
    assert resized(height, width, 28, 56 * 56, 28 * 28 * 1280) == expected


def test_an_image_far_longer_than_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="the image has 3 rows and 700 columns; accepted: a side at most 200 times"):
        random_patches(3, 700)


@pytest.mark.parametrize("image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_what_is_no_image_is_refused(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"accepted: uint8 \(height, width, 3\), red, green and blue"):
        image_patches.__wrapped__(image, ImageOptions(), vision())  # pyright: ignore[reportFunctionMemberAccess]


# --- the tower --------------------------------------------------------------------------------------------------------


def rows_of(*images: ImagePatches, dtype: str = "float32") -> list[np.ndarray]:
    tower = model(dtype).vision
    assert tower is not None
    return image_rows(tower, images)


def test_rows_are_those_of_transformers() -> None:
    rows = np.concatenate(rows_of(*reference_patches()))
    np.testing.assert_allclose(rows, reference()["rows"], rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_image_has_the_same_rows_in_every_pack(dtype: str) -> None:
    large, small = reference_patches()
    alone = {id(image): rows_of(image, dtype=dtype)[0] for image in (large, small)}
    for pack in ([large, small], [random_patches(30, 80), small, large, small]):
        for image, rows in zip(pack, rows_of(*pack, dtype=dtype), strict=True):
            if id(image) in alone:
                assert_same_bits(rows, alone[id(image)])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_the_neighbours_hold_does_not_matter(poison: float) -> None:
    anchor, other = reference_patches()
    (alone,) = rows_of(anchor)
    poisoned = ImagePatches(np.full_like(other.pixels, poison), other.rows, other.columns)
    together = rows_of(poisoned, anchor)
    assert_same_bits(together[1], alone)
    assert not np.isfinite(together[0]).any()


def test_stock_xla_fails_the_test_of_packs() -> None:
    other, anchor = reference_patches()
    with detjax.use_backend("stock"):
        (alone,) = rows_of(anchor)
        together = [rows_of(anchor, anchor)[0], rows_of(other, anchor)[1]]
    assert not any(same_bits(rows, alone) for rows in together)


# --- positions and logits ---------------------------------------------------------------------------------------------


def test_an_image_has_one_time_and_the_text_goes_on_behind_it() -> None:
    coordinates, excess = token_coordinates([5, 9, 9, 9, 9, 9, 9, 5, 5, 9, 6], 9, [(2, 3), (1, 1)])
    image = [[1, 1 + row, 1 + column] for row in range(2) for column in range(3)]
    text = [[position] * 3 for position in (4, 5, 6, 7)]
    assert coordinates.tolist() == [[0, 0, 0], *image, *text]
    assert excess == 8 - 11


def test_tokens_that_are_not_those_of_the_images_are_refused() -> None:
    with pytest.raises(ValueError, match="2 image tokens from token 1 on; accepted: 6, as the image has 2 rows of 3"):
        token_coordinates([5, 9, 9, 5], 9, [(2, 3)])
    with pytest.raises(ValueError, match="0 runs of image tokens; accepted: 1"):
        token_coordinates([5, 5], 9, [(2, 3)])


def prompt_arrays(tokens: np.ndarray) -> tuple[np.ndarray, ImageRows]:
    """The coordinates of the reference's tokens, and the rows of its images in their places."""
    config = model().config
    assert config.image_token is not None
    grids = [(image.rows // 2, image.columns // 2) for image in reference_patches()]
    coordinates, _ = token_coordinates(tokens.tolist(), config.image_token, grids)
    present = tokens == config.image_token
    rows = np.zeros((len(tokens), config.hidden_size), np.float32)
    rows[present] = np.concatenate(rows_of(*reference_patches()))
    return coordinates, ImageRows(present, rows)


def logits_of(sizes: list[int], backend: str | None = None) -> np.ndarray:
    """Logits of the reference's tokens, so many at a time."""
    tokens = reference()["tokens"]
    coordinates, images = prompt_arrays(tokens)
    graphdef, state = nnx.split(model())

    @detjax.jit
    def program(state: Any, tokens: Any, queries: Queries, kept: Any, images: ImageRows) -> Any:
        decoder = nnx.merge(graphdef, state)
        hidden, kept = decoder.hidden_states(tokens, queries, kept, images=images)
        return decoder.logits(hidden), kept

    kept, logits, start = model().empty_state(2), [], 0
    for size in sizes:
        part = slice(start, start + size)
        table, (first, length) = ops.contiguous_page_table(1, 256), (jnp.array([n]) for n in (start, start + size))
        queries = Queries(table, first, length, jnp.array([size]), coordinates=jnp.asarray(coordinates[None, part]))
        some = ImageRows(*(jnp.asarray(x[None, part]) for x in images))
        out, kept = program(state, jnp.asarray(tokens[None, part]), queries, kept, some)
        logits.append(np.asarray(out)[0])
        start += size
    return np.concatenate(logits)


def test_logits_are_those_of_transformers() -> None:
    logits = logits_of([len(reference()["tokens"])])
    np.testing.assert_allclose(logits, reference()["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(0)
def test_chunks_that_cut_images_give_the_bits_of_prefill() -> None:
    whole = logits_of([163])
    assert_same_bits(logits_of([20] * 8 + [3]), whole)


def test_texts_under_equal_coordinates_have_the_bits_of_plain_positions() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 37, 3, 16)), jnp.bfloat16)
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 4000, (2, 37)), jnp.int32)
    plain = detjax.jit(ops.rope, static_argnums=2)(x, positions, RotaryEmbedding(16, 500.0))
    sections = RotaryEmbedding(16, 500.0, sections=(2, 1, 5))
    equal = jnp.repeat(positions[..., None], 3, axis=-1)
    for given in (positions, equal):
        assert_same_bits(detjax.jit(ops.rope, static_argnums=2)(x, given, sections), plain)


def test_coordinates_of_another_shape_are_refused() -> None:
    sections = RotaryEmbedding(16, 500.0, sections=(2, 1, 5))
    with pytest.raises(ValueError, match=r"rope: positions has shape \(4, 2\); accepted: \(4, 3\), x being"):
        ops.rope(jnp.zeros((4, 1, 16)), jnp.zeros((4, 2), jnp.int32), sections)


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_saved_directory_makes_the_same_patches_and_rows(tmp_path: Path) -> None:
    save(model(), tmp_path / "saved")
    again = load(tmp_path / "saved", progress=False)[0]
    assert (again.config, again.image_options) == (
        DecoderConfig(**{**vars(model().config), "dtype": "float32"}),
        model().image_options,
    )
    assert again.vision is not None
    (rows,) = image_rows(again.vision, reference_patches()[1:])
    assert_same_bits(rows, rows_of(*reference_patches())[1])
    assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(model()))
