"""Gradients of packed queries on Hopper have the bits of rectangular ones, in Pallas' interpreter and on a GPU."""

import itertools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.contract import KV_BLOCK
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.options import Masking
from detjax.pallas.hopper import attention
from detjax.pallas.hopper.attention.backward import _sink_gradient
from detjax.pallas.hopper.attention.backward_rows import RectangularRows, SpreadRows
from detjax.pallas.hopper.attention.pieces import most_pieces
from detjax.pallas.hopper.attention.warpgroups import TILE
from detjax.pallas.hopper.mosaic.layouts import ROWS
from tests.pallas.hopper.attention.gradients import packed_gradients, rectangular_gradients
from tests.support.attention_requests import INTERPRETER, OPTIONS, WIDTHS, Requests, in_the_interpreter
from tests.support.bits import assert_same_bits, same_bits


@in_the_interpreter
@pytest.mark.parametrize(
    ("name", "heads", "group", "lengths", "counts"),
    [
        ("sinks", 1, 1, (66, 3), (65, 3)),
        *(
            pytest.param(name, 4, group, (150, 20, 9, 150, 129), (128, 9, 0, 150, 1), marks=pytest.mark.nightly)
            for name, group in (("causal", 4), ("window", 2), ("sinks", 1), ("everything", 2), ("not causal", 1))
        ),
    ],
)
def test_no_packing_changes_a_gradient(
    name: str, heads: int, group: int, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    requests = Requests.random(lengths, heads, heads // group, 16, dtype="bfloat16", **OPTIONS[name])
    gaps = [8 * (i % 2) for i in range(len(counts))]
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        # The sinks' gradients are added in the order of the requests.
        expected = rectangular_gradients(requests, counts)
        assert_same_bits(packed_gradients(requests, counts, range(len(counts)), gaps, 13), expected)


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("width", "options"),
    [(width, {}) for width in WIDTHS] + [(128, options) for options in OPTIONS.values()],
    ids=[*map(str, WIDTHS), *OPTIONS],
)
def test_no_packing_changes_a_gradient_on_the_device(width: int, options: dict[str, Any]) -> None:
    counts = 1100, 129, 0, 1, 128, 63, 700
    requests = Requests.random((1100, 300, 9, 129, 128, 63, 1000), 8, 2, width, dtype="bfloat16", **options)
    dq, (dkv, dsinks) = rectangular_gradients(requests, counts)
    assert_same_bits(packed_gradients(requests, counts, range(7), (0,) * 7), (dq, [dkv, dsinks]))
    for spare in (0, 100, 5000):
        packed, (dkv_packed, _) = packed_gradients(
            requests, counts, (6, 5, 4, 3, 2, 1, 0), (8, 0, 64, 16, 0, 0, 8), spare
        )
        assert_same_bits((packed, dkv_packed), (dq, dkv))


@pytest.mark.parametrize("width", [256, pytest.param(16, marks=pytest.mark.nightly)])
def test_gradients_of_packed_queries_lower(width: int) -> None:
    """Gradients of narrow keys and values come from one kernel, of wide ones from two."""
    masking = Masking(width**-0.5, window=150)

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def gradients(q, k, v, table, start, length, count, first_row, sinks, do):
        operands = AttentionOperands(q, KVPages(k, v), Queries(table, start, length, count, first_row), sinks)
        output = attention.ragged_with_normalizers(operands, masking=masking)
        return attention.ragged_backward(operands, output, do, masking=masking)

    q, pages, integers = array(200, 2, width), array(8, 1, KV_BLOCK, width), array(5, dtype="int32")
    operands = q, pages, pages, array(5, 3, dtype="int32"), *[integers] * 4, array(2), q
    jax.jit(gradients).trace(*operands).lower(lowering_platforms=("cuda",))


# --- layout of rows, and division of work -----------------------------------------------------------------------------


def packed_rows(random: np.random.Generator, counts: np.ndarray, spare: int) -> tuple[SpreadRows, np.ndarray, int]:
    """Returns the layout of requests in order, their first rows in packed queries, and the number of packed rows."""
    taken = -(-counts // 8) * 8
    gaps = 8 * random.integers(0, 2, len(counts)) * (spare > 0)
    first = (np.cumsum(taken + gaps) - taken).astype(np.int32)
    rows = int(first[-1] + counts[-1]) + spare
    return SpreadRows(jnp.asarray(first), jnp.asarray(counts), max(rows, 1)), first, max(rows, 1)


COUNTS = {
    "short": [1] * 9,
    "a long one after short ones": [8, 16, 3, 200],
    "just over a tile": [129, 129, 0, 65],
    "nothing": [0, 0],
    "one": [1],
    "first and last empty": [0, 64, 128, 0],
}


FEW_COUNTS = ("a long one after short ones", 21), ("just over a tile", 0), ("nothing", 0)


@pytest.mark.parametrize(
    ("name", "spare"),
    [
        case if case in FEW_COUNTS else pytest.param(*case, marks=pytest.mark.nightly)
        for case in itertools.product(COUNTS, (0, 21))
    ],
)
def test_every_row_and_page_is_somebodys_work_once(name: str, spare: int) -> None:
    random, counts = np.random.default_rng(spare), np.array(COUNTS[name], np.int32)
    layout, first, rows = packed_rows(random, counts, spare)
    x = random.standard_normal((rows, 2)).astype(np.float32)
    filled = np.asarray(layout.padded(jnp.asarray(x), value=7.0))
    tiles = np.stack([np.asarray(field) for field in layout.tiles()], axis=1)
    table = random.permutation(3 * len(counts)).astype(np.int32).reshape(-1, 3)
    length = counts + random.integers(0, 100, len(counts)).astype(np.int32)
    pool = int(sum(-(-length[counts > 0] // KV_BLOCK))) or 1
    pages = np.stack([np.asarray(x) for x in layout.key_pages(jnp.asarray(table), jnp.asarray(length), pool)], axis=1)
    for request, count in enumerate(counts):
        start, filled_rows = int(layout.first_row[request]), -(-count // ROWS) * ROWS
        assert start % ROWS == 0 and int(layout.rows[request]) == filled_rows
        assert_same_bits(filled[start : start + count], x[first[request] :][:count])
        assert (filled[start + count : start + filled_rows] == 7.0).all()
        listed = sorted((row, offset, size) for owner, row, offset, size in tiles.tolist() if size and owner == request)
        expected = range(0, filled_rows, TILE)
        assert listed == [(start + offset, offset, min(TILE, filled_rows - offset)) for offset in expected]
        listed = [place for owner, *place in pages.tolist() if place[-1] and owner == request]
        blocks = range(-(-length[request] // KV_BLOCK) if count else 0)
        assert listed == [[block, table[request, block], start, filled_rows] for block in blocks]
    back, is_given = np.asarray(layout.unpadded(jnp.asarray(filled))), np.zeros(rows, bool)
    for row, count in zip(first, counts, strict=True):
        is_given[row : row + count] = True
    assert_same_bits(back, np.where(is_given[:, None], x, 0).astype(np.float32))


def test_a_page_is_listed_for_each_block_of_the_table_at_most() -> None:
    layout = SpreadRows(jnp.array([0, 8]), jnp.array([5, 3]), 16)
    pages = layout.key_pages(jnp.array([[4, 1], [0, 2]]), jnp.array([1000, 129]), 99)
    assert np.asarray(pages.page).tolist() == [4, 1, 0, 2]


@pytest.mark.parametrize("requests", [1, 2, 5, 30])
@pytest.mark.parametrize("size", [ROWS, TILE])
def test_no_more_pieces_are_listed_than_requests_can_need(requests: int, size: int) -> None:
    for rows in (1, 8, 17, 64, 136, 1000):
        units = -(-rows // 8)
        others = min(requests, units) - 1
        counts = [1] * others + [rows - 8 * others]
        # One request takes all remaining rows. It wastes most if it has one unit more than whole pieces.
        assert most_pieces(rows, requests, size) == sum(-(-count // size) for count in counts)


def test_sinks_of_packed_queries_are_added_as_those_of_rectangular_ones() -> None:
    random, counts = np.random.default_rng(5), np.array([700, 0, 3, 64, 321, 65, 1], np.int32)
    layout, first, rows = packed_rows(random, counts, 30)
    values = random.standard_normal((2, 3, rows)).astype(np.float32)
    rectangular = RectangularRows(len(counts), 704)
    values_alone = np.zeros((2, 3, len(counts), 704), np.float32)
    for request, (row, count) in enumerate(zip(first, counts, strict=True)):
        values_alone[:, :, request, :count] = values[:, :, row : row + count]
    sinks = jnp.asarray(random.standard_normal(3), jnp.float32)
    normalizers, delta = (layout.padded(jnp.asarray(values[i]), 1, fill) for i, fill in enumerate((np.inf, np.nan)))
    is_own = np.isfinite(np.asarray(normalizers))
    # Padding rows of a request's block have delta 0; padding blocks have NaN.
    end = int(layout.first_row[-1] + layout.rows[-1])
    delta = jnp.where(is_own | (np.arange(delta.shape[1]) >= end)[None], delta, 0)
    alone = (jnp.asarray(x.reshape(3, -1)) for x in values_alone)
    gradient = jax.jit(_sink_gradient, static_argnums=0)
    alone = [*alone]
    assert_same_bits(gradient(layout, sinks, normalizers, delta), gradient(rectangular, sinks, *alone))
    # A sum continues from request to request, however calls divide them.
    first_ones, others = ([x[:, part] for x in alone] for part in (slice(3 * 704), slice(3 * 704, None)))
    start = jnp.asarray(random.standard_normal(3), jnp.float32)
    partial = gradient(RectangularRows(3, 704), sinks, *first_ones, start)
    expected = gradient(layout, sinks, normalizers, delta, start)
    assert_same_bits(gradient(RectangularRows(4, 704), sinks, *others, partial), expected)
    assert not same_bits(gradient(layout, sinks, normalizers, delta) + start, expected)
