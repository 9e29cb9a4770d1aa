"""Data that Hopper attention reads and writes: tiles of packed requests, mask words, dequantized pages."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.options import Masking
from detjax.pallas.hopper import attention, mosaic
from detjax.pallas.hopper.attention import backward_schedule, decode, decode_schedule, pieces, prefill_schedule
from detjax.pallas.hopper.attention.dequantize import PageRange, dequantize_pages
from detjax.pallas.hopper.attention.mask import pack_words
from detjax.pallas.hopper.attention.online_softmax import visible_keys
from detjax.pallas.hopper.mosaic.tiles import mask_bits
from tests.support.attention_requests import INTERPRETER, Requests, in_the_interpreter
from tests.support.bits import assert_same_bits


@in_the_interpreter
@pytest.mark.parametrize("width", [16, pytest.param(192, marks=pytest.mark.nightly)])
def test_rows_between_packed_requests_are_not_written(width: int) -> None:
    """A request's last tile may write up to a multiple of 8 rows. Rows after these, here a gap, are not its own."""
    requests, counts, first_row, rows = Requests.random((20, 30), 2, 1, width), (10, 5), (0, 32), 64
    start = np.array(requests.lengths) - counts
    q = np.zeros((rows, 2, width), requests.q.dtype)
    for request, (row, count) in enumerate(zip(first_row, counts, strict=True)):
        q[row : row + count] = requests.q[request, start[request] :][:count]
    numbers = (jnp.asarray(x, jnp.int32) for x in (start, requests.lengths, counts, first_row))
    forward = detjax.jit(functools.partial(attention.ragged, masking=requests.masking))
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        operands = AttentionOperands(jnp.asarray(q), requests.kv, Queries(requests.page_table, *numbers))
        o = np.asarray(forward(operands))
        whole = requests.whole()
    for request, (row, count) in enumerate(zip(first_row, counts, strict=True)):
        assert_same_bits(o[row : row + count], whole[request][-count:])
    is_written = ~np.isnan(o.astype(np.float32)).all(axis=(1, 2))  # the interpreter's memory begins as NaN
    assert np.flatnonzero(is_written).tolist() == [*range(16), *range(32, 40)]


def test_a_tile_has_no_rows_of_the_next_request() -> None:
    tiles = pieces.ragged_tiles(320, jnp.array([0, 160, 168]), jnp.array([150, 3, 129]))
    places = sorted(tuple(map(int, tile)) for tile in zip(*tiles, strict=True) if tile[3])
    assert places == [(0, 0, 0, 128), (0, 128, 128, 22), (1, 160, 0, 3), (2, 168, 0, 128), (2, 296, 128, 1)]


def test_keys_after_a_masks_end_are_hidden() -> None:
    words = pack_words(jnp.ones((1, 1, 10, 40), bool), 128, KV_BLOCK)
    scores = jnp.zeros((64, KV_BLOCK))
    with mosaic.twins():
        visible = np.isfinite(mask_bits(scores, *(words[0, 0, 0, part] for part in range(2))))
        hidden = np.isneginf(mask_bits(scores, *(words[0, 0, 1, part] for part in range(2))))
    assert visible[:10, :40].all() and not visible[10:].any() and not visible[:, 40:].any()
    assert hidden.all()


def test_every_score_has_its_own_bit_of_a_mask() -> None:
    mask = np.random.default_rng(0).random((1, 1, 64, KV_BLOCK)) > 0.5
    words = pack_words(jnp.asarray(mask), 64, KV_BLOCK)
    with mosaic.twins():
        visible = np.isfinite(mask_bits(jnp.zeros((64, KV_BLOCK)), *(words[0, 0, 0, part] for part in range(2))))
    np.testing.assert_array_equal(visible, mask[0, 0])


@in_the_interpreter
def test_a_mask_that_is_shorter_than_the_cache_hides_the_rest() -> None:
    requests = Requests.random((140,), 2, 1, 16, causal=False)
    mask = np.ones((1, 1, 140, 100), bool)
    longer = np.pad(mask, ((0, 0), (0, 0), (0, 0), (0, 40)))
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        assert_same_bits(requests.with_mask(mask), requests.with_mask(longer))


@in_the_interpreter
@pytest.mark.parametrize(("kind", "width"), [("int8", 80), ("fp8_e4m3", 192), ("q4_0", 96)])
def test_every_column_of_a_page_has_its_own_code_and_scale(kind: str, width: int) -> None:
    numbers = np.random.default_rng(1).standard_normal((3, 2, KV_BLOCK, width), np.float32).astype("float16")
    pages = ops.quantize_kv(jnp.asarray(numbers), kind)  # pyright: ignore[reportArgumentType]
    read = PageRange(jnp.array([[2, 0]]), jnp.array([0]), jnp.array([2]))
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        read_numbers, table = dequantize_pages(pages, read, jnp.dtype("float16"))
    expected = ops.dequantize_kv(pages, "float16")
    for block, page in enumerate((2, 0)):
        assert_same_bits(np.asarray(read_numbers)[int(table[0, block])], np.asarray(expected)[page])


def test_schedules_that_do_not_fit_are_refused() -> None:
    bfloat16 = jnp.dtype("bfloat16")
    wide = prefill_schedule.Problem(1, 128, 1, 8, 2, 256, 256, bfloat16)
    with pytest.raises(ValueError, match="stages is 9 for rows of 256 and 256 columns; accepted: at most"):
        prefill_schedule.Schedule(9).check(wide)
    with pytest.raises(ValueError, match="stages is 0; accepted: at least 1"):
        prefill_schedule.Schedule(0)
    gradients = backward_schedule.Problem(1, 1, 128, 8, 2, 1, 256, 256, bfloat16)
    with pytest.raises(ValueError, match="stages is 9 for rows of 256 and 256 columns; accepted: at most"):
        backward_schedule.Schedule(9).check(gradients)
    with pytest.raises(ValueError, match="stages is 0; accepted: at least 1"):
        backward_schedule.Schedule(0)
    with pytest.raises(ValueError, match="ctas is 0; accepted: at least 1"):
        decode_schedule.Schedule(0)
    with pytest.raises(ValueError, match=r"slack is 0.5; accepted: from 0 to less than 0.5"):
        decode_schedule.Schedule(4, slack=0.5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [16, 80, 128, 192, 256])
def test_gradients_lower(width: int) -> None:
    """The backward kernels are lowered for a GPU, both in one kernel and in two."""
    masking = Masking(width**-0.5, window=150, soft_cap=5.0, alibi_slopes=(0.5, 0.25))

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    q, pages, sinks = array(2, 200, 2, width), array(8, 1, KV_BLOCK, width), array(2)
    integers = array(2, 3, dtype="int32"), array(2, dtype="int32"), array(2, dtype="int32")
    normalizers = array(2, 400, dtype="float32")

    def gradients(q, k, v, table, start, length, sinks, o, normalizers, do):
        operands = AttentionOperands(q, KVPages(k, v), Queries(table, start, length), sinks)
        return attention.backward(operands, (o, normalizers), do, masking=masking)

    operands = q, pages, pages, *integers, sinks, q, normalizers, q
    jax.jit(gradients).trace(*operands).lower(lowering_platforms=("cuda",))


def test_the_pages_that_tiles_visit_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the borders of blocks, and at least one block for each request, of those in its table."""
    read: list[PageRange] = []

    def dequantize(pages: ops.QuantizedPages, page_range: PageRange, dtype: object) -> tuple[jax.Array, jax.Array]:
        read.append(page_range)
        return jnp.zeros(pages.shape, "bfloat16"), page_range.table

    def ranges(start: list[int], length: list[int], count: int, **options: Any) -> list[tuple[int, int]]:
        queries = Queries(jnp.zeros((len(start), 3), jnp.int32), jnp.array(start), jnp.array(length))
        attention._dequantized(kv, queries, count, Masking(1.0, **options), jnp.dtype("bfloat16"))
        return [*zip(np.asarray(read[-1].first).tolist(), np.asarray(read[-1].end).tolist(), strict=True)]

    monkeypatch.setattr(attention, "dequantize_pages", dequantize)
    pages = ops.quantize_kv(jnp.zeros((2, 1, KV_BLOCK, 32)), "int8")
    kv = KVPages(pages, pages)
    starts, lengths = [0, 127, 127, 255, 300], [300, 128, 129, 256, 384]
    assert ranges(starts, lengths, 1) == [(0, 1), (0, 1), (0, 1), (0, 2), (0, 3)]
    assert ranges(starts, lengths, 2) == [(0, 1), (0, 1), (0, 2), (0, 2), (0, 3)]
    assert ranges(starts, lengths, 1, causal=False) == [(0, 3), (0, 1), (0, 2), (0, 2), (0, 3)]
    assert ranges([127, 128, 129, 256, 257], [300] * 5, 1, window=2) == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    # Padding queries after a request's end see no key.
    assert ranges([300, 500], [128, 128], 1, causal=False, window=2) == [(2, 3), (2, 3)]


def test_a_window_may_be_longer_than_positions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)  # outside a kernel there are no layouts
    positions = jnp.arange(3, dtype=jnp.int32)
    end, first = visible_keys(Masking(1.0, window=2**31 + 5), jnp.int32(0), positions, jnp.int32(2))
    assert end.tolist() == [1, 2, 2]
    assert (first <= 0).all()


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "is_served"),
    [
        (16, 1, 64, True),
        (17, 1, 64, False),
        (1, 64, 128, True),
        (1, 65, 128, False),
        (1, 32, 192, True),
        (1, 33, 192, False),
        (1, 1, 48, False),
    ],
)
def test_decode_serves_few_tokens_of_heads_that_fit_a_tile(
    tokens: int, heads: int, width: int, is_served: bool
) -> None:
    pages = jnp.zeros((1, 2, KV_BLOCK, width), "bfloat16")
    assert decode.serves(jnp.zeros((1, tokens, 2 * heads, width), "bfloat16"), KVPages(pages, pages)) == is_served
