"""Queries and pages: borders of packing, parts of packed queries, and the places of new tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import KeyColumns, KVPages, Queries, places, requests_of_tokens, rows_as_requests

TABLE = np.arange(8, dtype=np.int32).reshape(4, 2)
START, COUNT = np.array([7, 30, 0, 5], np.int32), np.array([1, 0, 9, 3], np.int32)


def packed(rows: int = 24) -> Queries:
    """Two requests that decode, one of them absent, and two that prefill."""
    queries = Queries.packed(TABLE, START, COUNT, decodes=2, rows=rows)
    slots, coordinates = np.array([3, 1, 0, 2], np.int32), np.arange(2 * (2 + rows), dtype=np.int32).reshape(-1, 2)
    return dataclasses.replace(queries, slots=slots, coordinates=coordinates)


def test_the_last_request_needs_its_own_rows_alone() -> None:
    assert packed(19).first_row.tolist() == [0, 16]  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ValueError, match=r"18 rows for prefills of \[9, 3\] queries; accepted: at least 19, because"):
        packed(18)
    alone = Queries.packed(TABLE[:2], START[:2], COUNT[:2], decodes=2, rows=0)
    assert (alone.num_decodes, alone.first_row.tolist()) == (2, [])  # pyright: ignore[reportOptionalMemberAccess]


def test_parts_of_packed_queries_have_their_own_requests_and_slots() -> None:
    queries = packed()
    decoding, prefilling = queries.decoding(), queries.prefilling()
    for part, requests in ((decoding, slice(0, 2)), (prefilling, slice(2, 4))):
        np.testing.assert_array_equal(part.page_table, TABLE[requests])
        np.testing.assert_array_equal(part.start, START[requests])
        np.testing.assert_array_equal(part.length, (START + COUNT)[requests])
        np.testing.assert_array_equal(part.slots, np.array([3, 1, 0, 2])[requests])
        assert part.rows is None and part.coordinates is None
    assert decoding.first_row is None and decoding.count is None
    np.testing.assert_array_equal(prefilling.first_row, [0, 16])
    np.testing.assert_array_equal(prefilling.count, [9, 3])


def test_a_decoding_request_may_have_several_rows() -> None:
    start, count = np.array([7, 0, 130], np.int32), np.array([3, 0, 4], np.int32)
    queries = Queries.packed(TABLE[:3], start, count, decodes=3, rows=0, decode_queries=4)
    rows: Any = queries.rows
    assert queries.num_decodes == 3 and queries.decode_queries == 4
    assert rows.present.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    present = rows.present > 0
    assert rows.request[present].tolist() == [0] * 3 + [2] * 4
    assert rows.position[present].tolist() == [7, 8, 9, 130, 131, 132, 133]
    decoding = queries.decoding()
    assert decoding.decode_queries == 1 and decoding.first_row is None
    np.testing.assert_array_equal(decoding.length, start + count)
    single = queries.row_by_row()
    assert single.decode_queries == 1
    np.testing.assert_array_equal(np.asarray(single.start)[present], rows.position[present])


def test_each_packed_row_is_a_request_of_one_query() -> None:
    queries = packed()
    single = queries.row_by_row()
    assert queries.rows is not None and single.first_row is None and single.rows is None and single.slots is None
    present = np.asarray(single.count) > 0
    assert np.flatnonzero(present).tolist() == [0, *range(2, 11), 18, 19, 20]
    np.testing.assert_array_equal(single.page_table[present], TABLE[np.array([0, *[2] * 9, 3, 3, 3])])
    np.testing.assert_array_equal(single.start[present], [7, *range(9), 5, 6, 7])
    np.testing.assert_array_equal(single.length, np.asarray(single.start) + 1)
    np.testing.assert_array_equal(single.coordinates, np.asarray(queries.coordinates)[:, None])
    by_row = rows_as_requests(24, jax.tree.map(jnp.asarray, queries.prefilling()))
    np.testing.assert_array_equal(np.asarray(by_row.length) > 0, present[2:])
    np.testing.assert_array_equal(np.asarray(by_row.start)[present[2:]], single.start[2:][present[2:]])


def test_tokens_know_their_request() -> None:
    request, present = requests_of_tokens(packed(), (26,))
    assert np.asarray(request)[np.asarray(present)].tolist() == [0, *[2] * 9, 3, 3, 3]
    whole = Queries(TABLE, START, START + 3)
    for queries, counts in ((whole, [3] * 4), (dataclasses.replace(whole, count=COUNT), [1, 0, 3, 3])):
        request, present = (np.asarray(x) for x in requests_of_tokens(queries, (4, 3)))
        assert request.tolist() == np.repeat(range(4), 3).tolist()
        np.testing.assert_array_equal(present.reshape(4, 3), np.arange(3) < np.array(counts)[:, None])


def test_tokens_without_a_place_have_pages_of_their_own_that_do_not_exist() -> None:
    table = jnp.asarray([[3, 0], [1, 9], [2, -1]], jnp.int32)
    start, count = jnp.asarray([126, 127, 254], jnp.int32), jnp.asarray([4, 3, 4], jnp.int32)
    page, slot = (np.asarray(x) for x in places(4, 4, Queries(table, start, start + count, count)))
    np.testing.assert_array_equal(slot, (np.asarray(start)[:, None] + np.arange(4)) % KV_BLOCK)
    assert page[0].tolist() == [3, 3, 0, 0] and page[1, 0] == 1
    dropped = [*page[1, 1:], *page[2]]  # of pages 9 and -1, and after the table's last entry
    assert min(dropped) >= 4 and len(set(dropped)) == len(dropped)
    page, _ = places(4, 1, Queries(table, jnp.asarray([-1, 0, 255], jnp.int32), start, count * 0 + 1))
    assert (np.asarray(page)[:, 0] < 4).tolist() == [False, True, False]


def test_pages_tell_their_sizes() -> None:
    pages = KVPages.empty(3, 2, 8, "bfloat16")
    assert (pages.num_pages, pages.kv_heads, pages.value_width, pages.values_are_keys) == (3, 2, 8, False)
    assert (
        pages.k.shape == (3, 2, KV_BLOCK, 8) and pages.quantized is None and np.asarray(pages.k).dtype == jnp.bfloat16
    )
    latent = KVPages(jnp.ones((3, 1, KV_BLOCK, 8)), KeyColumns(5))
    assert (latent.value_width, latent.values_are_keys) == (5, True)
    assert latent.numbers[1].shape == (3, 1, KV_BLOCK, 5)
    assert latent.page(jnp.int32(0), "float32")[1].shape == (1, KV_BLOCK, 5)
    quantized = KVPages.empty(3, 2, 32, "bfloat16", "q4_0")
    assert quantized.quantized is not None and quantized.value_width == 32
