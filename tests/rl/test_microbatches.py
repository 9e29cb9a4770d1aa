"""Layouts of sequences: nothing is lost, every microbatch has one shape, and what fills up weighs nothing."""

from typing import Any

import jax
import numpy as np
import pytest

from detjax.contract import KV_BLOCK, WEIGHT_GRADIENT_TOKENS
from detjax.rl.trainer.microbatches import Layout, Microbatch, Packed, PlacedMicrobatch, Rows, Sample, by_sequence

# A prompt of one token; a row that is filled to its end; one token more than a step of a gradient; two tokens.
LENGTHS = ((1, 9), (30, 34), (16, 1), (1, 1), (2, 61), (20, 12), (33, 15))
LAYOUTS: dict[str, Layout] = {
    "rows of 1": Rows(1, 64),
    "rows of 3": Rows(3, 64),
    "rows of 7": Rows(7, 80),
    "rows of 9": Rows(9, 192),
    "packed in 64": Packed(64),
    "packed in 96": Packed(96),
    "packed in 256": Packed(256),
    "packed in 1024": Packed(1024),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def sample(prompt: int, completion: int, seed: int = 0) -> Sample:
    """A sample without zeros, so that these are what fills up."""
    random = np.random.default_rng([prompt, completion, seed])
    weights, old = 1 + random.random((2, completion)).astype(np.float32)
    return Sample(random.integers(1, 99, prompt + completion).astype(np.int32), weights, -old)


SAMPLES = [sample(*lengths) for lengths in LENGTHS]


def shapes(microbatch: Microbatch) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), microbatch)


def pieces(placed: PlacedMicrobatch, sample: Sample, place: int) -> tuple[slice, slice]:
    """The flat indices of a sequence's tokens, and of its targets."""
    first = placed.targets[place] - (sample.prompt_tokens - 1)
    return slice(first, first + len(sample.tokens)), slice(
        placed.targets[place], placed.targets[place] + len(sample.weights)
    )


@every_layout
def test_every_sequence_is_placed_once_and_what_fills_up_is_zeros(layout: Layout) -> None:
    number = 0
    for placed in layout.microbatches(SAMPLES):
        assert placed.first == number
        tokens, targets, weights, old = (x.reshape(-1).copy() for x in placed.arrays[:4])
        for place, count in enumerate(placed.counts):
            one = SAMPLES[number]
            row, completion = pieces(placed, one, place)
            assert count == len(one.weights)
            np.testing.assert_array_equal(tokens[row], one.tokens)
            np.testing.assert_array_equal(targets[completion], one.tokens[one.prompt_tokens :])
            np.testing.assert_array_equal(weights[completion], one.weights)
            np.testing.assert_array_equal(old[completion], one.old_logprobs)
            tokens[row] = targets[completion] = weights[completion] = old[completion] = 0
            number += 1
        assert not any(x.any() for x in (tokens, targets, weights, old))
    assert number == len(SAMPLES)


@every_layout
def test_every_sequence_begins_a_step_of_the_weights_gradients(layout: Layout) -> None:
    for placed in layout.microbatches(SAMPLES):
        for place in range(len(placed.counts)):
            row, _ = pieces(placed, SAMPLES[placed.first + place], place)
            assert row.start % WEIGHT_GRADIENT_TOKENS == 0


@every_layout
def test_all_microbatches_have_one_shape(layout: Layout) -> None:
    expected = shapes(next(layout.microbatches(SAMPLES[3:4])).arrays)
    for samples in (SAMPLES, SAMPLES[2:], SAMPLES * 3):
        assert all(shapes(placed.arrays) == expected for placed in layout.microbatches(samples))
    assert list(layout.microbatches([])) == []


@every_layout
def test_sequences_are_numbered_from_the_first_ones_number_in_the_batch(layout: Layout) -> None:
    placed, counted = list(layout.microbatches(SAMPLES)), list(layout.microbatches(SAMPLES, 40))
    assert [one.first for one in counted] == [one.first + 40 for one in placed]


@every_layout
def test_values_come_back_by_sequence(layout: Layout) -> None:
    placed = list(layout.microbatches(SAMPLES))
    # The value of a target is what the token before it predicts: here, the token itself.
    values = [one.arrays.targets.astype(np.float32) for one in placed]
    result = by_sequence(placed, values)
    for one, sequence in zip(SAMPLES, result, strict=True):
        np.testing.assert_array_equal(sequence, one.tokens[one.prompt_tokens :])
    old = by_sequence(placed, [one.arrays.old_logprobs for one in placed])
    assert [x.tobytes() for x in old] == [one.old_logprobs.tobytes() for one in SAMPLES]
    with pytest.raises(ValueError, match="zip"):
        by_sequence(placed, values[1:])


@every_layout
def test_queries_tell_the_tokens_of_each_sequence_and_no_two_share_a_page(layout: Layout) -> None:
    for placed in layout.microbatches(SAMPLES):
        queries, some = placed.arrays.queries, SAMPLES[placed.first : placed.first + len(placed.counts)]
        assert queries.count is not None
        counts = queries.count[: len(some)]
        assert not queries.count[len(some) :].any() and not queries.start.any()
        np.testing.assert_array_equal(queries.length, queries.count)
        if queries.first_row is None:
            np.testing.assert_array_equal(counts, [len(one.tokens) for one in some])
        else:
            # What fills up a step belongs to the sequence, so that no step has tokens of two.
            units = [-(-len(one.tokens) // WEIGHT_GRADIENT_TOKENS) * WEIGHT_GRADIENT_TOKENS for one in some]
            np.testing.assert_array_equal(counts, units)
            rows = [pieces(placed, one, place)[0].start for place, one in enumerate(some)]
            np.testing.assert_array_equal(queries.first_row[: len(some)], rows)
        needed = -(-counts // KV_BLOCK)
        pages = [int(page) for row, count in zip(queries.page_table, needed, strict=False) for page in row[:count]]
        assert len(set(pages)) == len(pages) and max(pages) < placed.arrays.num_pages


def test_packed_rows_take_as_many_sequences_as_fit() -> None:
    exact = [sample(10, 6), sample(20, 12), sample(1, 15)]
    assert [one.counts for one in Packed(64).microbatches(exact)] == [(6, 12, 15)]
    assert [one.counts for one in Packed(48).microbatches(exact)] == [(6, 12), (15,)]
    assert [one.counts for one in Packed(32).microbatches(exact)] == [(6,), (12,), (15,)]
    assert [one.counts for one in Packed(64).microbatches([sample(1, 63)] * 2)] == [(63,), (63,)]
    smallest = Packed(64).microbatches([sample(1, 1)] * 9)
    assert [len(one.counts) for one in smallest] == [4, 4, 1]


@every_layout
def test_a_sequence_that_is_too_long_is_refused_by_its_number(layout: Layout) -> None:
    length = layout.length if isinstance(layout, Rows) else layout.tokens  # pyright: ignore[reportAttributeAccessIssue]
    assert len(list(layout.microbatches([sample(1, length - 1)]))) == 1
    with pytest.raises(
        ValueError, match=rf"sequence 2 has {length + 1} tokens; accepted: at most {length}, the length"
    ):
        list(layout.microbatches([SAMPLES[0], SAMPLES[3], sample(1, length)]))
    with pytest.raises(ValueError, match=rf"sequence 11 has {length + 1} tokens"):
        list(layout.microbatches([SAMPLES[0], sample(1, length)], 10))


def test_numbers_that_make_no_layout_are_refused() -> None:
    for length in (0, -16, 8, 72, 100):
        with pytest.raises(ValueError, match=rf"Rows: length is {length}; accepted: positive multiples of 16"):
            Rows(1, length)
        with pytest.raises(ValueError, match=rf"Packed: tokens is {length}; accepted: positive multiples of 16"):
            Packed(length)
    with pytest.raises(ValueError, match="Rows: sequences is 0; accepted: at least 1"):
        Rows(0, 64)


@pytest.mark.parametrize(
    ("tokens", "weights", "old"), [(5, 5, 5), (5, 0, 0), (5, 2, 3), (5, 6, 6), (1, 1, 1), (0, 0, 0)]
)
def test_a_sample_has_a_prompt_and_a_completion(tokens: int, weights: int, old: int) -> None:
    message = rf"Sample: {tokens} tokens, {weights} weights and {old} old logprobs; accepted: one weight and one old"
    with pytest.raises((ValueError, TypeError), match=message if weights == old else None):
        Sample(np.zeros(tokens, np.int32), np.zeros(weights, np.float32), np.zeros(old, np.float32))


def test_a_sample_knows_its_prompt() -> None:
    assert sample(7, 3).prompt_tokens == 7
