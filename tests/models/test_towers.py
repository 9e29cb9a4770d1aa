"""Vision towers: patches, rows and logits of transformers, and rows that no pack and no chunk changes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import ops
from detjax.models.decoder import ImageRows
from detjax.models.vision.images import ImagePatches, image_rows, packed, window_counts
from detjax.models.vision.prompt_images import token_coordinates, token_grid
from detjax.operands.kv_pages import Queries
from tests.support.bits import assert_same_bits, same_bits
from tests.support.towers import NAMES, QWEN2_5_VL, QWEN3_5, model, random_patches, reference, reference_patches

TOLERANCE = 2e-4
PIECE = 41
"""Tokens at a time, which end within images."""
by_name = pytest.mark.parametrize("name", NAMES)
by_decoder = pytest.mark.parametrize("name", sorted(NAMES, key=lambda name: name != "qwen3-vl"))
"""First the one whose images have rows in several layers."""


def rows_of(name: str, *images: ImagePatches, dtype: str = "float32") -> list[np.ndarray]:
    tower = model(name, dtype).vision
    assert tower is not None
    return image_rows(tower, images)


@by_name
def test_patches_are_those_of_transformers(name: str) -> None:
    patches = reference_patches(name)
    assert [[image.rows, image.columns] for image in patches] == reference(name)["grids"].tolist()
    assert_same_bits(np.concatenate([image.pixels for image in patches]), reference(name)["patches"])


@functools.cache
def rows_of_prompt(name: str) -> np.ndarray:
    return np.concatenate(rows_of(name, *reference_patches(name)))


@by_name
def test_rows_are_those_of_transformers(name: str) -> None:
    rows = rows_of_prompt(name)
    np.testing.assert_allclose(rows, reference(name)["rows"], rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@by_name
def test_an_image_has_the_same_rows_in_every_pack(name: str, dtype: str) -> None:
    large, small = reference_patches(name)
    alone = {id(image): rows_of(name, image, dtype=dtype)[0] for image in (large, small)}
    for pack in ([large, small], [random_patches(name, 30, 80), small, large, small]):
        for image, rows in zip(pack, rows_of(name, *pack, dtype=dtype), strict=True):
            if id(image) in alone:
                assert_same_bits(rows, alone[id(image)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@by_name
def test_what_the_neighbours_hold_does_not_matter(name: str, poison: float) -> None:
    anchor, other = reference_patches(name)
    (alone,) = rows_of(name, anchor)
    poisoned = ImagePatches(np.full_like(other.pixels, poison), other.rows, other.columns)
    together = rows_of(name, poisoned, anchor)
    assert_same_bits(together[1], alone)
    assert not np.isfinite(together[0]).any()


@pytest.mark.sampled(1)
@by_name
def test_stock_xla_fails_the_test_of_packs(name: str) -> None:
    other, anchor = reference_patches(name)
    with detjax.use_backend("stock"):
        (alone,) = rows_of(name, anchor)
        together = [rows_of(name, anchor, anchor)[0], rows_of(name, other, anchor)[1]]
    assert not all(same_bits(rows, alone) for rows in together)


def test_corners_of_an_image_lie_on_those_of_the_learned_positions() -> None:
    vision = model("qwen3-5-vl").config.vision
    assert vision is not None
    image = random_patches("qwen3-5-vl", 48, 80)
    patches, _ = packed([image], vision, 1)
    assert patches.taps is not None
    index, weight = (x.reshape(-1, 4)[: len(image.pixels)] for x in patches.taps)
    likeliest = index[np.arange(len(index)), weight.argmax(1)]
    first, last = 0, len(index) - 1
    assert (likeliest[first], likeliest[last]) == (0, 48) and weight[[first, last]].max(1).tolist() == [1, 1]
    np.testing.assert_allclose(weight.sum(1), 1, atol=1e-6)


def test_numbers_of_windows_are_enough_for_every_image_of_so_many_tokens() -> None:
    for vision, side in ((QWEN2_5_VL, 4), (QWEN3_5, None)):
        for tokens in (1, 5, 33, 400):
            counts = window_counts(vision, tokens)
            assert counts == [1 << power for power in range(len(counts))]
            for rows in range(1, tokens + 1):
                for columns in range(1, min(tokens // rows, 300 * rows) + 1):
                    pieces = -(-rows * columns * 4 // 128)
                    needed = pieces if side is None else -(-rows // side) * -(-columns // side)
                    assert needed <= counts[-1]


# --- logits -----------------------------------------------------------------------------------------------------------


def prompt_arrays(name: str, tokens: np.ndarray) -> tuple[np.ndarray, ImageRows]:
    """The coordinates of the reference's tokens, and the rows of its images in their places."""
    config = model(name).config
    assert config.vision is not None
    grids = [token_grid(image, config.vision) for image in reference_patches(name)]
    coordinates, _ = token_coordinates(tokens.tolist(), config.placeholders, grids)
    present = tokens == config.image_token
    rows = np.zeros((len(tokens), config.vision.row_width), np.float32)
    rows[present] = rows_of_prompt(name)
    return coordinates, ImageRows(present, rows)


@functools.cache
def program(name: str, backend: str) -> Any:
    """A program of the model, of this backend alone: JAX would take it from its cache for another."""
    graphdef, state = nnx.split(model(name))

    @detjax.jit
    def logits(state: Any, tokens: Any, queries: Queries, kept: Any, images: ImageRows) -> Any:
        decoder = nnx.merge(graphdef, state)
        hidden, kept = decoder.hidden_states(tokens, queries, kept, images=images)
        return decoder.logits(hidden), kept

    return functools.partial(logits, state)


def logits_of(name: str, size: int, backend: str) -> np.ndarray:
    """Logits of the reference's tokens, a given number at a time; the last ones are padded."""
    tokens = reference(name)["tokens"]
    coordinates, images = prompt_arrays(name, tokens)
    slots = jnp.zeros(1, jnp.int32) if model(name).has_slots else None
    kept, logits = model(name).empty_state(2, slots=1), []
    for start in range(0, len(tokens), size):
        count = min(size, len(tokens) - start)

        def padded(x: np.ndarray, start: int = start, count: int = count) -> jax.Array:
            part = x[start : start + count]
            return jnp.asarray(np.pad(part, [(0, size - count), *[(0, 0)] * (x.ndim - 1)])[None])

        table, (first, length) = ops.contiguous_page_table(1, 256), (jnp.array([n]) for n in (start, start + count))
        queries = Queries(table, first, length, jnp.array([count]), slots=slots, coordinates=padded(coordinates))
        some = ImageRows(*map(padded, images))
        with detjax.use_backend(backend):  # pyright: ignore[reportArgumentType]
            out, kept = program(name, backend)(padded(tokens), queries, kept, some)
        logits.append(np.asarray(out)[0, :count])
    return np.concatenate(logits)


@pytest.mark.parametrize("backend", ["stock", pytest.param("portable", marks=pytest.mark.nightly)])
@by_name
def test_logits_are_those_of_transformers(name: str, backend: str) -> None:
    np.testing.assert_allclose(logits_of(name, 163, backend), reference(name)["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(1)
@by_decoder
def test_chunks_that_cut_images_give_the_bits_of_prefill(name: str) -> None:
    assert_same_bits(logits_of(name, PIECE, "portable"), logits_of(name, 163, "portable"))


@pytest.mark.sampled(1)
@by_decoder
def test_stock_xla_fails_the_test_of_chunks(name: str) -> None:
    assert not same_bits(logits_of(name, PIECE, "stock"), logits_of(name, 163, "stock"))


@pytest.mark.parametrize("sections", [(2, 1, 5), (3, 3, 2)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_texts_under_equal_coordinates_have_the_bits_of_plain_positions(
    sections: tuple[int, ...], interleaved: bool
) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 37, 3, 32)), jnp.bfloat16)
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 4000, (2, 37)), jnp.int32)
    rope = detjax.jit(ops.rope, static_argnums=2)
    plain = rope(x, positions, ops.RotaryEmbedding(32, 500.0, rotary_dim=16))
    embedding = ops.RotaryEmbedding(32, 500.0, rotary_dim=16, sections=sections, interleaved=interleaved)
    for given in (positions, jnp.repeat(positions[..., None], 3, axis=-1)):
        assert_same_bits(rope(x, given, embedding), plain)


@pytest.mark.parametrize(
    ("sections", "interleaved", "axes"),
    [
        ((3, 3, 2), False, [0, 0, 0, 1, 1, 1, 2, 2]),
        ((3, 3, 2), True, [0, 1, 2, 0, 1, 2, 0, 1]),
        ((5, 2, 1), True, [0, 1, 2, 0, 1, 0, 0, 0]),
    ],
)
def test_pairs_of_columns_turn_by_the_coordinates_of_their_sections(
    sections: tuple[int, ...], interleaved: bool, axes: list[int]
) -> None:
    embedding = ops.RotaryEmbedding(16, 500.0, sections=sections, interleaved=interleaved)
    assert embedding.pair_positions(jnp.array([[0, 1, 2]])).tolist() == [axes]
