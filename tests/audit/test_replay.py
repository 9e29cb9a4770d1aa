"""Parts of a replay: which rows of a step are sampled, in which batches, with which penalties."""

import numpy as np
import pytest

from detjax.audit.verification import replay
from detjax.audit.verification.replay import (
    Answer,
    _adjustments,
    _batches,
    _Known,
    _Rows,
    _seen_entries,
    _seen_of,
    _size,
)
from detjax.engine import SamplingParams


def rows(first: int, count: int, row: int, tokens: tuple[int, ...] = (4, 5, 4, 6, 4), **params: object) -> _Rows:
    answer = Answer(
        prompt=(5, 7, 5),
        tokens=tokens,
        params=SamplingParams(**params),  # pyright: ignore[reportArgumentType]
        end_tokens=frozenset((9,)),
    )
    return _Rows(_Known(0, answer, None), first, count, row)


@pytest.mark.parametrize(
    ("least", "needed", "most", "size"),
    [
        (64, 0, None, 64),
        (64, 64, None, 64),
        (64, 65, None, 256),
        (64, 256, None, 256),
        (64, 257, None, 1024),
        (64, 257, 300, 300),
        (64, 10, 32, 32),
    ],
)
def test_sizes_grow_by_four_up_to_the_most(least: int, needed: int, most: int | None, size: int) -> None:
    assert _size(least, needed, most) == size


def test_rows_are_cut_into_batches_without_losing_one() -> None:
    given = [rows(1, 3, 10), rows(0, 7, 20), rows(2, 2, 40)]
    made = [[(one.first, one.count, one.row) for one in batch] for batch in _batches(given, 5)]
    assert made == [[(1, 3, 10), (0, 2, 20)], [(2, 5, 22)], [(2, 2, 40)]]
    assert [len(batch) for batch in _batches(given, 12)] == [3]


def test_tokens_seen_before_each_row_are_counted() -> None:
    tokens, counts, in_prompt = _seen_of(rows(0, 5, 0))
    assert tokens.tolist() == [4, 5, 6, 7] and in_prompt.tolist() == [False, True, False, True]
    assert counts.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0], [2, 1, 1, 0]]
    tokens, counts, _ = _seen_of(rows(2, 2, 0))
    assert tokens.tolist() == [4, 5, 7] and counts.tolist() == [[1, 1, 0], [2, 1, 0]]
    _, counts, _ = _seen_of(rows(0, 1, 0))
    assert counts.tolist() == [[0, 0]]


def test_only_penalized_rows_have_entries_and_padding_is_beyond_the_vocabulary() -> None:
    given = [rows(0, 1, 0), rows(1, 2, 0, presence_penalty=0.5)]
    token, generated, in_prompt = _seen_entries(given, 5, 50)
    assert token.shape == (5, 64) and (token[[0, 3, 4]] >= 50).all()
    assert all(len(set(row)) == 64 for row in token.tolist())
    assert token[1:3, :3].tolist() == [[4, 5, 7]] * 2
    assert generated[1:3, :3].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert in_prompt[1:3, :3].tolist() == [[False, True, True]] * 2
    assert not generated[[0, 3, 4]].any() and not in_prompt[[0, 3, 4]].any()


@pytest.mark.parametrize(("least", "first", "barred"), [(0, 0, 0), (2, 0, 2), (2, 1, 1), (2, 2, 0), (9, 1, 3)])
def test_end_tokens_are_barred_before_the_least_number_of_tokens(least: int, first: int, barred: int) -> None:
    made = _adjustments([rows(first, 3, 0, min_tokens=least, max_tokens=20, logit_bias=((3, 2.0),))], 4)
    fields = [np.asarray(x) for x in made]
    assert all(len(x) == 4 for x in fields)
    alike = [all(np.array_equal(x[0], x[row]) for x in fields) for row in range(3)]
    assert alike == [row < barred if barred else True for row in range(3)]
    assert not all(np.array_equal(x[0], x[3]) for x in fields), "padding has no bias"


def test_a_request_with_more_than_a_temperature_and_filters_is_rare() -> None:
    common = SamplingParams(), SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)
    rare = (
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(logit_bias=((1, 1.0),)),
        SamplingParams(min_tokens=1),
        SamplingParams(top_logprobs=1),
        SamplingParams(sampling_logprobs=True, temperature=1.0),
    )
    assert [replay._is_rare(one) for one in (*common, *rare)] == [False] * 2 + [True] * len(rare)
