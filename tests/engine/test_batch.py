"""The arrays of a step: each chunk's tokens, places and parameters are in its own rows."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
from detjax.engine.batch import (
    BatchShape,
    logit_adjustments,
    no_adjustments,
    sampling_arrays,
)
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep
from detjax.engine.sequence import RequestContext, Sequence
from detjax.engine.slot_table import SlotTable
from detjax.runtime import transfers
from tests.support.bits import assert_same_bits
from tests.support.small_loops import VARIANTS, small_loop

PARAMS = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    presence_penalty=1.5,
    frequency_penalty=-0.75,
    repetition_penalty=1.25,
    logit_bias=((3, 2.0), (90, -4.0)),
    min_tokens=3,
    seed=(5 << 32) | 6,
)


def test_each_parameter_has_its_own_array() -> None:
    arrays = sampling_arrays([SamplingParams(), PARAMS], [(0, 0, 0, 0), (5, 6, 2**32 - 1, 8)])
    assert {name: values.tolist() for name, values in arrays._asdict().items()} == {
        "noise_key": [[0, 0, 0, 0], [5, 6, 2**32 - 1, 8]],
        "position": [0, 0],
        "temperature": [0.0, 0.5],
        "top_k": [0, 7],
        "top_p": [1.0, 0.25],
        "min_p": [0.0, 0.125],
    }
    assert [str(values.dtype) for values in arrays] == [
        "uint32",
        "int32",
        "float32",
        "int32",
        *["float32"] * 2,
    ]


def test_each_adjustment_has_its_own_array_and_tokens_that_are_held_back_have_no_other_bias() -> None:
    row = logit_adjustments(PARAMS, [90, 11])
    assert [float(values[0]) for values in (row.repetition, row.reciprocal, row.frequency, row.presence)] == [
        1.25,
        np.float32(1) / np.float32(1.25),
        -0.75,
        1.5,
    ]
    assert row.biased.shape == row.bias.shape == (1, 512)
    biases = {int(token): float(bias) for token, bias in zip(row.biased[0], row.bias[0], strict=True)}
    assert biases == {3: 2.0, 90: -np.inf, 11: -np.inf, -1: 0.0}
    none = no_adjustments(3)
    assert [values.tolist() for values in none[:4]] == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert {*none.biased.ravel().tolist()} == {-1} and none.biased.shape == (3, 512)


def chunk(prompt: tuple[int, ...], slot: int, start: int, count: int, **fields: Any) -> ScheduledChunk:
    context = RequestContext(end_tokens=frozenset([8, 9]))
    one = Sequence(prompt, dataclasses.replace(PARAMS, seed=slot), index=10 + slot, context=context)
    one.slot, one.page_ids = slot, [20 + slot, 30 + slot][: 1 + (start + count > 128)]
    one.is_held = fields.pop("is_held", False)
    is_decode = fields.pop("is_decode", False)
    return ScheduledChunk(one, start, count, start + count >= len(prompt), is_decode, **fields)


def batch_of(step: ScheduledStep, shape: BatchShape, **options: Any) -> Any:
    return SlotTable(6, 3, **options.pop("table", {})).batch(step, shape, **options)


PROMPT = tuple(range(100, 300))
STEP = ScheduledStep(
    decodes=(
        chunk((1, 2, 3), 4, 3, 1, is_held=True, is_decode=True),
        chunk(PROMPT, 1, 199, 1, is_decode=True),
        chunk(PROMPT, 0, 150, 1, is_decode=True),
    ),
    prefills=(chunk(PROMPT, 5, 120, 11), chunk((7, 6), 2, 0, 2)),
)
SHAPE = BatchShape(decodes=4, rows=32, prefills=3, sampled=6)


def test_tokens_and_positions_of_each_chunk_are_in_its_rows() -> None:
    batch = batch_of(STEP, SHAPE)
    assert batch.shape == SHAPE
    # The first decode's token is in its slot. The second prefill begins at a multiple of 8 rows.
    assert batch.token.tolist() == [0, 299, 250, 0, *range(220, 231), *[0] * 5, 7, 6, *[0] * 14]
    assert batch.held.tolist() == [4, 6, 6, 0]
    assert batch.last_row.tolist() == [0, 1, 2, 4 + 10, 4 + 16 + 1, 0]
    # Prefills that do not end the prompt sample nothing, and neither do unused rows.
    assert batch.slot.tolist() == [4, 1, 6, 6, 2, 6]
    assert batch.queries.start.tolist() == [3, 199, 150, 0, 120, 0, 0]
    assert batch.queries.count.tolist() == [1, 1, 1, 0, 11, 2, 0]
    assert batch.queries.page_table.tolist() == [
        [24, 0, 0],
        [21, 31, 0],
        [20, 30, 0],
        [0, 0, 0],
        [25, 35, 0],
        [22, 0, 0],
        [0, 0, 0],
    ]
    assert (batch.queries.slots, batch.queries.coordinates, batch.images, batch.steps) == (None, None, None, None)


def test_guesses_of_a_decode_are_decodes_of_the_same_pages() -> None:
    first, second, last = STEP.decodes
    guessing = dataclasses.replace(first, count=3, drafted=2, drafts=(50, 60))
    crossing = dataclasses.replace(
        chunk(PROMPT, 3, 199, 1, is_held=True, is_decode=True), count=2, drafted=1, drafts=(70,)
    )
    step = ScheduledStep((guessing, second, crossing, last), STEP.prefills)
    shape = BatchShape(decodes=8, rows=32, prefills=3, sampled=10)
    batch = batch_of(step, shape, table={"drafts": 3, "coordinates": 2})
    assert BatchShape.needed_by(step) == BatchShape(7, 24, 2, 9)
    assert batch.token.tolist()[:8] == [0, 50, 60, 299, 0, 70, 250, 0]
    assert batch.held.tolist() == [4, 6, 6, 6, 3, 6, 6, 0]
    assert batch.queries.start.tolist() == [3, 4, 5, 199, 199, 200, 150, 0, 120, 0, 0]
    assert batch.queries.length.tolist() == [4, 5, 6, 200, 200, 201, 151, 0, 131, 2, 0]
    assert batch.queries.count.tolist() == [1] * 7 + [0, 11, 2, 0]
    assert [table[:2] for table in batch.queries.page_table.tolist()[:7]] == [
        *[[24, 0]] * 3,
        [21, 31],
        *[[23, 33]] * 2,
        [20, 30],
    ]
    assert batch.queries.coordinates[:7, 1].tolist() == [3, 4, 5, 199, 199, 200, 150]
    assert batch.last_row.tolist() == [0, 1, 2, 3, 4, 5, 6, 8 + 10, 8 + 16 + 1, 0]
    assert batch.slot.tolist() == [4, 4, 4, 1, 3, 3, 6, 6, 2, 6]
    assert batch.sampling.position.tolist() == [4, 5, 6, 200, 200, 201, 151, 131, 2, 0]
    assert batch.drafted.offset.tolist() == [0, 1, 2, 0, 0, 1, 0, 0, 0, 0]
    assert batch.drafted.guesses[2].tolist()[:2] == [50, 60] and batch.drafted.guesses[5, 0] == 70


def test_a_sequence_with_its_guesses_may_be_one_request() -> None:
    first, second, _ = STEP.decodes
    guessing = dataclasses.replace(first, count=3, drafted=2, drafts=(50, 60))
    crossing = dataclasses.replace(
        chunk(PROMPT, 3, 199, 1, is_held=True, is_decode=True), count=2, drafted=1, drafts=(70,)
    )
    step = ScheduledStep((guessing, second, crossing))
    shape = BatchShape(decodes=16, rows=0, prefills=0, sampled=8, queries=4)
    batch = batch_of(step, shape, table={"drafts": 3, "coordinates": 2})
    assert batch.shape == PackedBatch.on_host(batch).shape == shape
    assert BatchShape.needed_by(step, 4) == BatchShape(12, 0, 0, 6, 4)
    assert BatchShape.needed_by(step, 2) is None and BatchShape.needed_by(ScheduledStep((second,)), 4) is None
    assert batch.token.tolist() == [0, 50, 60, 0, 299, 0, 0, 0, 0, 70, 0, 0, 0, 0, 0, 0]
    assert batch.held.tolist() == [4, 6, 6, 6, 6, 6, 6, 6, 3, 6, 6, 6, 0, 0, 0, 0]
    assert batch.queries.start.tolist() == [3, 199, 199, 0]
    assert batch.queries.length.tolist() == [6, 200, 201, 0]
    assert batch.queries.count.tolist() == [3, 1, 2, 0]
    assert batch.queries.rows.present.tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 1, 1, *[0] * 6]
    assert batch.queries.rows.position.tolist() == [3, 4, 5, 0, 199, 0, 0, 0, 199, 200, *[0] * 6]
    assert [table[:2] for table in batch.queries.page_table.tolist()[:3]] == [[24, 0], [21, 31], [23, 33]]
    assert batch.queries.coordinates[[0, 1, 2, 4, 8, 9], 1].tolist() == [3, 4, 5, 199, 199, 200]
    # Rows to sample from are side by side.
    assert batch.last_row.tolist() == [0, 1, 2, 4, 8, 9, 0, 0]
    assert batch.slot.tolist() == [4, 4, 4, 1, 3, 3, 6, 6]
    assert batch.sampling.position.tolist() == [4, 5, 6, 200, 200, 201, 0, 0]
    assert batch.drafted.offset.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]


def test_each_row_is_sampled_for_its_position_with_the_parameters_of_its_sequence() -> None:
    batch = batch_of(STEP, SHAPE)
    assert batch.sampling.position.tolist() == [4, 200, 151, 131, 2, 0]
    slots = [((1, 2, 3), 4), (PROMPT, 1), (PROMPT, 0), (PROMPT, 5), ((7, 6), 2)]
    keys = [ops.noise_key(slot, ops.prompt_digest(prompt), 10 + slot) for prompt, slot in slots]
    assert batch.sampling.noise_key.tolist() == [[*key] for key in keys] + [[0] * 4]
    assert batch.sampling.top_p.tolist() == [0.25] * 5 + [0.0]
    assert batch.adjustments is None
    adjusted = batch_of(STEP, SHAPE, adjusted=True).adjustments
    assert adjusted.frequency.tolist() == [-0.75] * 5 + [0.0]
    assert [{8, 9} <= {*row[np.isneginf(bias)]} for row, bias in zip(adjusted.biased, adjusted.bias, strict=True)] == [
        True,
        *[True] * 4,
        False,
    ]


def test_states_in_slots_and_coordinates_are_named_where_a_model_has_them() -> None:
    batch = batch_of(STEP, SHAPE, table={"named_in_queries": True, "coordinates": 3})
    assert batch.queries.slots.tolist() == [4, 1, 0, 0, 5, 2, 0]
    expected = [3, 199, 150, 0, *range(120, 131), *[0] * 5, 0, 1, *[0] * 14]
    assert batch.queries.coordinates.tolist() == [[position] * 3 for position in expected]


@pytest.mark.parametrize(
    ("generated", "unread", "is_barred"), [(0, 0, True), (2, 0, True), (1, 1, True), (2, 1, False)]
)
def test_ends_are_held_back_until_a_sample_has_its_least_tokens(generated: int, unread: int, is_barred: bool) -> None:
    table, shape = SlotTable(1, 1), BatchShape(1, 0, 0, 1)
    one = chunk((1, 2), 0, 1, 1, is_decode=True)
    step = ScheduledStep((one,))
    for count, is_held_back in ((0, True), (generated, is_barred)):  # also after a step in which they were
        one.sequence.generated[:] = [5] * count
        one.sequence.unread = unread if count == generated else 0
        adjustments = table.batch(step, shape, adjusted=True).adjustments
        assert adjustments is not None
        assert int(np.isneginf(np.asarray(adjustments.bias)).sum()) == 2 * is_held_back


def test_pages_that_a_sequence_gets_later_are_in_its_table_and_those_of_an_earlier_one_are_not() -> None:
    table, shape = SlotTable(1, 3), BatchShape(1, 0, 0, 1)
    one = chunk((1, 2), 0, 1, 1, is_decode=True)
    tables = []
    for pages in ([4, 5], [4, 5, 6]):
        one.sequence.page_ids[:] = pages
        tables.append(table.batch(ScheduledStep((one,)), shape).queries.page_table.tolist())
    tables.append(
        table.batch(ScheduledStep((chunk((1, 2), 0, 1, 1, is_decode=True),)), shape).queries.page_table.tolist()
    )
    one.sequence.page_ids = [9, 8]  # after a preemption
    tables.append(table.batch(ScheduledStep((one,)), shape).queries.page_table.tolist())
    assert tables == [[[4, 5, 0]], [[4, 5, 6]], [[20, 0, 0]], [[9, 8, 0]]]


def test_each_decode_takes_part_in_as_many_steps_of_a_run_as_it_has_tokens() -> None:
    decodes = (chunk((1,), 3, 0, 1, is_decode=True, later=2), chunk((1,), 1, 0, 1, is_decode=True))
    batch = batch_of(ScheduledStep(decodes), BatchShape(4, 0, 0, 4))
    assert batch.steps.tolist() == [3, 1, 0, 0]
    assert batch.as_empty_run().steps.tolist() == [0] * 4
    sampled = [batch.at_step_of_run(jnp.int32(number), 6) for number in range(4)]
    assert [np.asarray(step.slot).tolist() for step in sampled] == [[3, 1, 6, 6], [3, 6, 6, 6], [3, 6, 6, 6], [6] * 4]
    assert [np.asarray(step.sampling.position)[0] for step in sampled[:3]] == [1, 2, 3]
    assert all(step.steps is None for step in sampled)


def moved(chunk: ScheduledChunk, tokens: int, drafts: tuple[int, ...] = ()) -> ScheduledChunk:
    """The next chunk of a sequence, of as many tokens."""
    return dataclasses.replace(chunk, start=chunk.start + tokens, drafts=drafts, drafted=len(drafts))


def test_a_batch_is_what_a_table_without_earlier_steps_makes() -> None:
    options = {"named_in_queries": True, "coordinates": 2, "drafts": 3}
    table, shape = SlotTable(6, 3, **options), dataclasses.replace(SHAPE, sampled=10)
    decodes, first, last = STEP.decodes, STEP.prefills[0], chunk(PROMPT, 2, 30, 5)
    other = chunk(PROMPT, 2, 30, 5)
    other.sequence.params = dataclasses.replace(other.sequence.params, top_k=3)
    several = [
        STEP,
        ScheduledStep((*(moved(one, -2) for one in decodes[:2]), decodes[2]), (moved(first, 0), last)),
        ScheduledStep(decodes, (moved(first, 3, (5, 6)), moved(last, 1, (7,)))),
        ScheduledStep(decodes, (moved(first, 5, (9, 5)), moved(last, 2, (3,)))),
        ScheduledStep(decodes, (moved(first, 5, (9,)), moved(last, 2, (3, 4)))),
        ScheduledStep(decodes, (moved(first, 5, (9,)), moved(other, 2, (3, 4)))),
        ScheduledStep(decodes[::-1], (moved(first, 5, (9,)), moved(other, 2, (3, 4)))),
        ScheduledStep(),
        STEP,
    ]
    for adjusted in (False, True):
        for step in several:
            expected = SlotTable(6, 3, **options).batch(step, shape, adjusted=adjusted)
            assert_same_bits(jax.tree.leaves(table.batch(step, shape, adjusted=adjusted)), jax.tree.leaves(expected))


def changed_in_last_row(step: ScheduledStep) -> ScheduledStep:
    """The step with another bias of its last sequence."""
    *others, last = step.prefills
    one = copy.copy(last.sequence)
    one.params, one.page_ids = dataclasses.replace(one.params, logit_bias=((4, 1.0),)), [*one.page_ids]
    return ScheduledStep(step.decodes, (*others, dataclasses.replace(last, sequence=one)))


def test_copies_on_the_device_are_what_is_copied() -> None:
    """Adjustments and adapters that equal the last ones are not copied again: equal in all rows."""
    runner, other = small_loop(VARIANTS[:1])._runner, changed_in_last_row(STEP)
    unpacked, small = jax.jit(PackedBatch.unpacked), (ScheduledStep(), BatchShape(1, 0, 0, 1))
    for step, shape in [(ScheduledStep(), SHAPE), (STEP, SHAPE), (other, SHAPE), (STEP, SHAPE), small] * 2:
        batch = batch_of(step, shape, adjusted=True)
        batch = batch._replace(adapters=np.arange(shape.decodes + shape.prefills, dtype=np.int32) - len(step.prefills))
        copied = runner.copy(batch)
        assert copied.shape == batch.shape
        expected = batch._replace(steps=np.zeros(shape.decodes, np.int32))
        assert_same_bits(jax.tree.leaves(expected), jax.tree.leaves(copied.read()))
        assert_same_bits(jax.tree.leaves(expected), jax.tree.leaves(unpacked(copied)))


def test_a_step_is_copied_to_the_device_in_two_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = small_loop(VARIANTS[2:])
    copied, copies = [], transfers.copies

    def counted(arrays: Any, sharding: Any) -> Any:
        copied.append(len(arrays))
        return copies(arrays, sharding)

    monkeypatch.setattr(transfers, "copies", counted)
    loop.submit(Sequence((5, 6, 7), SamplingParams(max_tokens=5, repetition_penalty=1.2, top_logprobs=2)))
    while not loop.is_idle:
        loop.step()
    # The first step has the adjustments in addition.
    assert copied == [3, 2, 2, 2, 2], copied
