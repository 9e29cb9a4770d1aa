"""States in slots: the rows of a call's requests, and how far back a next call may begin."""

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.contract import DELTA_CHUNK
from detjax.operands.kv_pages import Queries
from detjax.operands.linear_attention_state import (
    DROPPABLE_TOKENS,
    RequestRows,
    TokenLimits,
    empty_inputs,
    oldest_start,
    with_last_inputs,
)


@pytest.mark.parametrize(
    ("oldest", "start", "end", "expected"),
    [
        (0, 0, 10, 0),
        (0, 0, 16, 0),
        (0, 0, 17, 1),
        (0, 0, 70, 54),
        (0, 0, 79, 63),
        (0, 0, 81, 65),
        (50, 60, 61, 50),  # older tokens are gone since the last call
        (40, 60, 61, 45),
        (54, 63, 80, 64),  # the chunk that begins with the first of the tokens that may be dropped
        (54, 64, 65, 64),  # the state has advanced to this chunk
        (54, 70, 71, 64),
        (20, 70, 200, 184),
        (84, 0, 10, 0),  # another request, which begins
        (84, 100, 100, 84),  # no tokens
        (84, 0, 0, 84),
    ],
)
def test_a_next_call_begins_in_the_chunk_of_the_state_and_drops_so_many_tokens_at_most(
    oldest: int, start: int, end: int, expected: int
) -> None:
    assert (DROPPABLE_TOKENS, DELTA_CHUNK) == (16, 64)
    result = oldest_start(*(jnp.asarray([x], jnp.int32) for x in (oldest, start, end)))
    assert result.tolist() == [expected]


def queries(**fields: list[int]) -> Queries:
    given = {name: np.asarray(x, np.int32) for name, x in fields.items()}
    return Queries(np.zeros((len(fields["start"]), 1), np.int32), **given)  # pyright: ignore[reportArgumentType]


def test_rectangular_requests_begin_one_after_another_and_end_with_their_length() -> None:
    rows = RequestRows.from_queries((3, 5), queries(start=[0, 7, 9], length=[5, 9, 9]))
    assert [x.tolist() for x in rows[:4]] == [[0, 5, 10], [0, 7, 9], [5, 2, 0], [0, 1, 2]]
    assert rows.most == TokenLimits(0, 5)
    rows = RequestRows.from_queries(
        (3, 5), queries(start=[0, 7, 9], length=[5, 12, 8], count=[4, 3, 2], slots=[4, 0, 1])
    )
    assert [x.tolist() for x in rows[2:4]] == [[4, 3, 0], [4, 0, 1]]
    assert RequestRows.from_queries((3, 1), queries(start=[0, 7, 9], length=[1, 8, 10])).most == TokenLimits(3, 1)


def test_packed_requests_begin_at_their_first_rows() -> None:
    start, count = np.array([4, 0, 7], np.int32), np.array([1, 9, 2], np.int32)
    packed = Queries.packed(np.zeros((3, 1), np.int32), start, count, decodes=1, rows=18)
    rows = RequestRows.from_queries((19,), packed)
    assert [x.tolist() for x in rows[:4]] == [[0, 1, 17], [4, 0, 7], [1, 9, 2], [0, 1, 2]]
    assert rows.most == TokenLimits(1, 18)
    request, offset, present = (np.asarray(x) for x in rows.by_row(19))
    assert present.tolist() == [1] * 10 + [0] * 7 + [1] * 2
    assert request[present > 0].tolist() == [0] + [1] * 9 + [2] * 2
    assert offset[present > 0].tolist() == [0, *range(9), 0, 1]
    some = rows.part(slice(1, 3))
    assert [x.tolist() for x in some[:4]] == [[1, 17], [0, 7], [9, 2], [1, 2]]


def test_the_last_inputs_of_a_long_call_are_kept_and_other_slots_are_not_touched() -> None:
    kept = empty_inputs(3, 4, 1, jnp.float32)
    room = kept.shape[1]
    assert room == 3 + DROPPABLE_TOKENS
    rows = RequestRows.from_queries((2, 30), queries(start=[5, 0], length=[35, 2], slots=[2, 0]))
    x = np.arange(60, dtype=np.float32)[:, None]
    result = np.asarray(with_last_inputs(kept + 100, jnp.asarray(x), rows))[..., 0]
    positions = np.arange(35 - room, 35)
    assert result[2, positions % room].tolist() == (positions - 5).tolist()
    assert result[0, :2].tolist() == [30, 31]
    assert (result[0, 2:] == 100).all() and (result[1] == 100).all()
