"""The scheduler and its pages: schedules change no result; and what they do to pages, slots and steps."""

import dataclasses
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from detjax import SamplingParams
from detjax.engine.batch import BatchShape, BatchShapes
from detjax.engine.constraint import Constraint
from detjax.engine.constraints import CompiledConstraint
from detjax.engine.page_pool import PagePool, digests, prefix_root
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep, Scheduler, StepLimits, pages_needed
from detjax.engine.sequence import RequestContext, Sequence, samples
from detjax.engine.slot_table import SlotTable
from detjax.engine.snapshots import MAX_PER_STEP, SlotCopies, SnapshotCache
from detjax.engine.step_loop import StepLoop
from tests.engine import schedules
from tests.engine.schedules import END, PAGE, RememberingCompiler, RememberingRunner, expected_tokens

ROOT = Path(__file__).parents[2]
FEW, MANY = range(400), [range(first, first + 2_400) for first in range(400, 10_000, 2_400)]
"""Seeds of random schedules."""


@pytest.fixture
def small_pages() -> Iterator[None]:
    with schedules.small_pages():
        yield


def test_random_schedules_change_no_token_and_leak_no_page() -> None:
    schedules.shrink(30)


@pytest.mark.parametrize("seeds", [FEW, *(pytest.param(part, marks=pytest.mark.nightly) for part in MANY)])
def test_ten_thousand_random_schedules_change_no_token_and_leak_no_page(seeds: range) -> None:
    # In a process of its own, which does not check the type of each argument of each call.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, "-m", schedules.__name__, str(seeds.start), str(seeds.stop)]
    run = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]
    assert int(run.stdout) > len(seeds) // 4, "hardly any decodes were in runs of steps"


def sequence(prompt: tuple[int, ...], **params: int) -> Sequence:
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    return Sequence(prompt, sampling, context=RequestContext(end_tokens=frozenset([END])))


def step_loop(shapes: BatchShapes, num_pages: int, keeps_prefixes: bool = True, run_steps: int = 1) -> StepLoop:
    slots = shapes.limits.slots
    scheduler = Scheduler(PagePool(num_pages, keeps_prefixes=keeps_prefixes), shapes.limits)
    return StepLoop(scheduler, shapes, SlotTable(slots, num_pages), RememberingRunner(slots, run_steps))


def serving_loop(slots: int, tokens: int, num_pages: int, keeps_prefixes: bool = True, run_steps: int = 1) -> StepLoop:
    return step_loop(BatchShapes.for_serving(slots, tokens), num_pages, keeps_prefixes, run_steps)


def never_ending(count: int, prompt: tuple[int, ...] = (1, 2, 3), **params: int) -> list[Sequence]:
    """Returns sequences that no token ends before `max_tokens`."""
    candidates = (sequence(prompt, seed=seed, **params) for seed in range(1000))
    whole = (one for one in candidates if len(expected_tokens(one)) == params["max_tokens"])
    return list(itertools.islice(whole, count))


def run(loop: StepLoop) -> list[ScheduledStep]:
    """Returns all steps until the loop is idle."""
    steps, mark_submitted = [], loop.scheduler.mark_submitted

    def note(step: ScheduledStep) -> SlotCopies:
        steps.append(step)
        return mark_submitted(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.scheduler, "mark_submitted", note)
        while not loop.is_idle:
            loop.step()
    return steps


def chunks(steps: list[ScheduledStep]) -> list[ScheduledChunk]:
    return [chunk for step in steps for chunk in step.chunks]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_a_known_prompt_is_computed_again_only_without_a_prefix_cache(keeps_prefixes: bool) -> None:
    loop, prompt = serving_loop(1, 8, 10, keeps_prefixes), tuple(range(3 * PAGE))
    again = PAGE if keeps_prefixes else 3 * PAGE  # the last page of a prompt is always computed
    for computed in (3 * PAGE, again):
        one = sequence(prompt, max_tokens=1)
        loop.submit(one)
        assert sum(chunk.count for chunk in chunks(run(loop))) == computed
        assert one.generated == expected_tokens(one)
    assert loop.scheduler.pool.in_use == 0
    assert len(loop.scheduler.pool._kept) == (3 if keeps_prefixes else 0)


@pytest.mark.usefixtures("small_pages")
def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole() -> None:
    loop, prompt = serving_loop(1, 8, 10), tuple(range(3 * PAGE))
    loop.submit(sequence(prompt, max_tokens=1))
    run(loop)
    scored = Sequence(prompt, SamplingParams(max_tokens=1, prompt_logprobs=True))
    loop.submit(scored)
    step = loop.scheduler.plan()
    assert (scored.computed, scored.named_pages) == (0, 0)
    assert [(chunk.start, chunk.is_decode) for chunk in step.chunks] == [(0, False)]


@pytest.mark.usefixtures("small_pages")
def test_a_prompt_of_one_token_is_no_decode_where_its_rows_are_needed() -> None:
    loop = serving_loop(1, 8, 10)
    for params, is_decode in ((SamplingParams(max_tokens=2), True), ({"prompt_logprobs": True}, False)):
        params = params if isinstance(params, SamplingParams) else SamplingParams(max_tokens=2, **params)
        one = Sequence((3,), params)
        loop.submit(one)
        assert [chunk.is_decode for chunk in chunks(run(loop))] == [is_decode, True]
        assert one.generated == expected_tokens(one)


# The last token of a sequence is not computed.
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages"),
    [
        (1, 1, 1),
        (1, 128, 1),
        (1, 129, 2),
        (100, 29, 1),
        (100, 30, 2),
        (128, 1, 1),
        (129, 1, 2),
        (200, 57, 2),
        (256, 2, 3),
    ],
)
def test_a_sequence_needs_the_pages_of_all_its_tokens_but_the_last(prompt: int, max_tokens: int, pages: int) -> None:
    assert pages_needed(Sequence((1,) * prompt, SamplingParams(max_tokens=max_tokens))) == pages


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("keeps_prefixes", [False, True])
@pytest.mark.parametrize("run_steps", [1, 4])
def test_a_pool_of_exactly_one_sequences_pages_serves_it(keeps_prefixes: bool, run_steps: int) -> None:
    for length, max_tokens in itertools.product(range(1, 2 * PAGE + 2), range(1, PAGE + 3)):
        (one,) = never_ending(1, tuple(range(length)), max_tokens=max_tokens)
        loop = serving_loop(2, 5, pages_needed(one), keeps_prefixes, run_steps)
        loop.submit(one)
        in_use = 0
        for _ in range(length + max_tokens + 2):
            loop.step()
            in_use = max(in_use, loop.scheduler.pool.in_use)
        assert one.generated == expected_tokens(one), (length, max_tokens)
        assert loop.is_idle and loop.scheduler.preemptions == 0
        assert in_use <= loop.scheduler.pool.num_pages == -(-(length + max_tokens - 1) // PAGE)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("prefills", "rows", "counts"), [(1, 40, [3]), (2, 40, [3, 3]), (3, 40, [3, 3, 3]), (3, 6, [3, 2])]
)
def test_a_step_has_no_more_prefills_and_rows_than_its_limits_say(prefills: int, rows: int, counts: list[int]) -> None:
    large = StepLimits(slots=4, tokens=40, prefills=4, rows=40, prefill_chunk=3)
    small = dataclasses.replace(large, prefills=prefills, rows=rows)
    for are_running in (False, True):
        scheduler = Scheduler(PagePool(20), large if are_running else small)
        for seed in range(4):
            scheduler.submit(sequence((seed, 1, 2, 3, 4, 5, 6), max_tokens=1))
        if are_running:
            scheduler.mark_submitted(scheduler.plan())
            assert len(scheduler.running) == 4
            scheduler.limits = small
        assert [chunk.count for chunk in scheduler.plan().prefills] == counts


@pytest.mark.usefixtures("small_pages")
def test_the_tokens_of_a_step_are_limited_over_all_its_chunks() -> None:
    limits = StepLimits(slots=4, tokens=7, prefills=4, rows=40, prefill_chunk=5)
    scheduler = Scheduler(PagePool(20), limits)
    for length in (9, 1, 3, 6):
        scheduler.submit(sequence(tuple(range(length)), max_tokens=1))
    step = scheduler.plan()
    planned = [
        [(len(one.sequence.prompt), one.count, one.completes) for one in some] for some in (step.prefills, step.decodes)
    ]
    # One token is left for the third sequence, which is computed like a decode, and none for the last one.
    assert planned == [[(9, 5, False)], [(1, 1, True), (3, 1, False)]]


@pytest.mark.usefixtures("small_pages")
def test_decodes_come_before_prefills_of_sequences_that_got_their_slot_earlier() -> None:
    limits = StepLimits(slots=2, tokens=3, prefills=2, rows=40, prefill_chunk=2)
    scheduler = Scheduler(PagePool(20), limits)
    long, short = sequence(tuple(range(20)), max_tokens=1), sequence((5,), max_tokens=6)
    for one in (long, short):
        scheduler.submit(one)
    scheduler.mark_submitted(scheduler.plan())
    assert (long.turn, short.turn, long.computed, short.is_held) == (0, 1, 2, True)
    scheduler.limits = dataclasses.replace(limits, prefill_chunk=3)
    step = scheduler.plan()
    assert [(chunk.sequence, chunk.count) for chunk in step.chunks] == [(short, 1), (long, 2)]


@pytest.mark.usefixtures("small_pages")
def test_tokens_that_a_sequence_has_already_are_not_counted_as_tokens_of_the_prompt_in_the_cache() -> None:
    loop, prompt, known = serving_loop(1, 64, 40), tuple(range(PAGE + 1)), tuple(range(20, 20 + 2 * PAGE))
    params, context = SamplingParams(max_tokens=3 * PAGE), RequestContext(end_tokens=frozenset([END]))
    cached = []
    for _ in range(2):
        (one,) = samples(prompt, params, context, [known])
        loop.submit(one)
        starts = [chunk.start for chunk in chunks(run(loop))]
        cached.append((starts[0], one.cached_tokens))
    assert cached == [(0, 0), (3 * PAGE, PAGE + 1)]


@pytest.mark.usefixtures("small_pages")
def test_all_samples_say_what_the_first_one_found_in_the_cache() -> None:
    loop, prompt = serving_loop(3, 64, 40), tuple(range(3 * PAGE + 1))
    for cached in (0, 3 * PAGE):
        together = samples(prompt, SamplingParams(max_tokens=2, n=3), RequestContext())
        for one in together:
            loop.submit(one)
        run(loop)
        assert [one.cached_tokens for one in together] == [cached] * 3


@pytest.mark.usefixtures("small_pages")
def test_a_preempted_sequence_says_what_it_found_when_it_first_got_a_slot() -> None:
    loop = serving_loop(2, 8, 5)
    first, second = never_ending(2, max_tokens=12)
    for one in (first, second):
        loop.submit(one)
    run(loop)
    assert loop.scheduler.preemptions == 1
    # Its own pages were still in the cache when it came back.
    assert [one.cached_tokens for one in (first, second)] == [0, 0]


@pytest.mark.usefixtures("small_pages")
def test_samples_of_a_request_share_the_pages_of_their_prompt() -> None:
    loop, prompt = serving_loop(3, 64, 20), tuple(range(4 * PAGE + 1))
    together = samples(prompt, SamplingParams(max_tokens=3, n=3), RequestContext(end_tokens=frozenset([END])))
    for one in together:
        loop.submit(one)
    while not all(one.slot is not None for one in together):
        loop.step()
    assert len({page for one in together for page in one.page_ids[:4]}) == 4
    assert loop.scheduler.pool.in_use <= 4 + 3
    run(loop)
    assert [one.generated for one in together] == [expected_tokens(one) for one in together]


@pytest.mark.usefixtures("small_pages")
def test_without_free_pages_the_latest_sequence_waits() -> None:
    loop = serving_loop(2, 8, 5)
    candidates = (sequence((1, 2, 3), max_tokens=12, seed=seed) for seed in range(100))
    first, second, *_ = (one for one in candidates if len(expected_tokens(one)) == 12)
    for one in (first, second):
        loop.submit(one)
    ended = []
    while not loop.is_idle:
        ended += [one for one, token in loop.step() if token.finish_reason is not None]
    assert loop.scheduler.preemptions > 0
    assert ended == [first, second]
    assert [one.generated for one in ended] == [expected_tokens(one) for one in ended]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_one_request_of_another_client_is_answered_soon_behind_960_samples(keeps_prefixes: bool) -> None:
    loop, max_tokens = serving_loop(2, 8, 20, keeps_prefixes), 3
    crowd = samples((1, 2, 3), SamplingParams(max_tokens=max_tokens, n=960), RequestContext())
    for one in crowd:
        loop.submit(one)
    for _ in range(5):
        loop.step()
    (other,) = samples((4, 5), SamplingParams(max_tokens=2), RequestContext(client="other"))
    loop.submit(other)
    steps = 0
    while other.finish_reason is None:
        loop.step()
        steps += 1
    # It waits for a sample of the crowd to end, perhaps for one more, and then for its own prompt and tokens.
    assert steps <= 2 * (max_tokens + 2) + 4
    assert other.generated == expected_tokens(other)[:2]
    assert len(loop.scheduler.waiting) > 940


@pytest.mark.usefixtures("small_pages")
def test_a_preempted_sequence_comes_back_before_other_clients_get_a_turn() -> None:
    loop = serving_loop(2, 8, 5)
    candidates = (sequence((1, 2, 3), max_tokens=12, seed=seed) for seed in range(100))
    first, second, third, *_ = (one for one in candidates if len(expected_tokens(one)) == 12)
    for one in (first, second, third):
        loop.submit(one)
    while not loop.scheduler.preemptions:
        loop.step()
    assert (first.slot is None, second.slot is None, second.turn) == (False, True, 1)
    (other,) = samples((9,), SamplingParams(max_tokens=1), RequestContext(client="other"))
    loop.submit(other)
    while second.slot is None:
        assert other.slot is None
        loop.step()
    run(loop)
    assert [one.turn for one in (first, second, other, third)] in ([0, 1, 2, 3], [0, 1, 3, 2])
    assert [one.generated for one in (second, third)] == [expected_tokens(one) for one in (second, third)]


@pytest.mark.usefixtures("small_pages")
def test_requests_share_pages_with_those_of_the_same_salt_alone() -> None:
    loop, prompt = serving_loop(1, 64, 40), tuple(range(3 * PAGE))
    computed = []
    for salt in (None, None, "a", "", "a", "\ud800", "b", None, ""):
        (one,) = samples(prompt, SamplingParams(max_tokens=1), RequestContext(prefix_root=prefix_root(salt)))
        loop.submit(one)
        computed.append(sum(chunk.count for chunk in chunks(run(loop))))
        assert one.generated == expected_tokens(one)[:1]
    new, known = 3 * PAGE, PAGE
    assert computed == [new, known, new, new, known, new, new, known, known]


@pytest.mark.usefixtures("small_pages")
def test_no_salt_gives_the_digest_of_a_page() -> None:
    page, other = tuple(range(PAGE)), tuple(range(PAGE, 2 * PAGE))
    # A salt with the bytes of a page, before another page, is not the sequence of the two pages.
    salt = np.asarray(page, np.int64).tobytes().decode()
    assert digests(other, root=prefix_root(salt))[0] not in digests(page + other)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("run_steps", [1, 4])
def test_a_page_is_shared_only_when_its_tokens_are_known(run_steps: int) -> None:
    # The second page is full as soon as the step that samples its last token is submitted, before it is read.
    loop = serving_loop(1, 8, 10, run_steps=run_steps)
    (one,) = never_ending(1, max_tokens=10)
    loop.submit(one)
    while not loop.is_idle:
        loop.step()
        read = len(one.tokens)
        assert one.named_pages <= read // PAGE
        if one.slot is not None:
            assert one.named_pages == min(one.computed, read) // PAGE
    assert loop.scheduler.pool.share(digests(one.tokens)[: len(one.tokens) // PAGE]) != []


@pytest.mark.usefixtures("small_pages")
def test_chunks_of_one_token_are_computed_like_decodes() -> None:
    loop = step_loop(BatchShapes.for_chunks(2, 1), 10)
    prompts = (1, 2, 3, 4, 5), (6, 8)
    together = [sequence(prompt, max_tokens=4) for prompt in prompts]
    for one in together:
        loop.submit(one)
    steps = run(loop)
    assert not any(step.prefills for step in steps)
    assert max(chunk.count for chunk in chunks(steps)) == 1
    assert [one.generated for one in together] == [expected_tokens(one) for one in together]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("mixes", [True, False])
def test_prefill_chunks_have_the_size_asked_for_and_come_first_unless_steps_mix(mixes: bool) -> None:
    loop = step_loop(BatchShapes.for_chunks(2, 3, mixes=mixes), 20)
    short, long = sequence((1, 2), max_tokens=6, seed=1), sequence(tuple(range(17)), max_tokens=2)
    for one in (short, long):
        loop.submit(one)
    steps = run(loop)
    assert [chunk.count for chunk in chunks(steps) if chunk.sequence is long][:6] == [3, 3, 3, 3, 3, 2]
    assert any(step.prefills and step.decodes for step in steps) == mixes
    assert [one.generated for one in (short, long)] == [expected_tokens(one) for one in (short, long)]


@pytest.mark.usefixtures("small_pages")
def test_a_slot_of_an_ended_sequence_serves_the_next_one_with_its_own_parameters() -> None:
    shapes = BatchShapes.for_serving(1, 8)
    table = SlotTable(1, 4)
    scheduler = Scheduler(PagePool(4, keeps_prefixes=False), shapes.limits)
    for seed, temperature in ((3, 0.5), (5, 0.25)):
        one = Sequence((1, 2, 3), SamplingParams(max_tokens=1, seed=seed, temperature=temperature), index=seed)
        scheduler.submit(one)
        step = scheduler.plan()
        batch = table.batch(step, shapes.smallest(step))
        (row,) = np.flatnonzero(batch.slot == 0)
        assert (tuple(batch.sampling.noise_key[row]), batch.sampling.temperature[row]) == (one.noise_key, temperature)
        assert batch.queries.page_table[row, 0] == one.page_ids[0]
        scheduler.mark_submitted(step)
        one.finish_reason = "length"
        scheduler.accept_tokens(one)


def test_a_digest_names_a_page_and_all_pages_before_it() -> None:
    one, other = [1] * 128 + [2] * 128, [3] * 128 + [2] * 128
    assert len(digests(one)) == 2
    assert digests(one[:255]) == digests(one)[:1]
    assert digests(one)[1] != digests(other)[1]
    assert digests(one, digests(one)[:1]) == digests(one)


def test_the_prefix_unused_the_longest_is_given_away_first_and_its_end_before_its_beginning() -> None:
    pool = PagePool(4)
    names = [f"{i}".encode() for i in range(4)]
    pages = [pool.take() for _ in range(4)]
    for page, name in zip(pages, names, strict=True):
        pool.name(page, name)
    pool.release(pages[:2])
    pool.release(pages[2:])
    assert [pool.take() for _ in range(2)] == [pages[1], pages[0]]
    assert pool.share(names[:2]) == []
    assert pool.share(names[2:]) == pages[2:]
    assert pool.take() is None


def test_the_first_of_two_pages_with_one_digest_is_shared() -> None:
    pool = PagePool(2)
    pages = [pool.take(), pool.take()]
    for page in pages:
        pool.name(page, b"same")
    assert pool.share([b"same"]) == pages[:1]
    pool.release(pages)
    assert pool.in_use == 1
    pool.release(pages[:1])
    assert (pool.in_use, pool.available) == (0, 2)


@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (3, 5), (8, 64), (64, 512), (1024, 2048), (5, 10_000)])
def test_every_step_within_the_limits_has_a_shape(slots: int, tokens: int) -> None:
    shapes = BatchShapes.for_serving(slots, tokens)
    largest = max(shape.rows for shape in shapes)
    assert largest >= tokens
    assert max(shape.decodes for shape in shapes) == slots
    assert len(list(shapes)) == len(set(shapes)) <= 40
    assert BatchShape(slots, largest, shapes.limits.prefills, slots) in set(shapes)
    assert all(min(slots, shape.decodes + shape.prefills) <= shape.sampled <= slots for shape in shapes)
    assert len({shape.sampled for shape in shapes}) == len({shape.decodes for shape in shapes if not shape.rows})


@pytest.mark.parametrize(("slots", "chunk"), [(1, 1), (4, 7), (64, 128), (2048, 1), (8, 10_000)])
def test_chosen_chunks_have_two_shapes_that_share_their_sampling_program(slots: int, chunk: int) -> None:
    shapes = BatchShapes.for_chunks(slots, chunk)
    assert {shape.sampled for shape in shapes} == {slots}
    assert len(list(shapes)) == 2
    assert min(shape.rows for shape in shapes) == 0
    assert max(shape.rows for shape in shapes) >= chunk


def test_the_shapes_of_a_serving_engine_grow_by_four() -> None:
    # Capacities for decodes, rows of prefills, prefills, and samples.
    assert [dataclasses.astuple(shape)[:4] for shape in BatchShapes.for_serving(5, 300)] == [
        (1, 0, 0, 1),
        (4, 0, 0, 4),
        (5, 0, 0, 5),
        *[(decodes, rows, 5, 5) for rows in (64, 256, 304) for decodes in (0, 1, 5)],
    ]
    assert [dataclasses.astuple(shape)[:4] for shape in BatchShapes.for_serving(2, 3)] == [
        (1, 0, 0, 1),
        (2, 0, 0, 2),
        (0, 8, 1, 1),
        (2, 8, 1, 2),
    ]
    assert BatchShapes.for_serving(5, 300).limits == StepLimits(
        slots=5, tokens=300, prefills=5, rows=304, prefill_chunk=300
    )


def test_a_step_gets_the_cheapest_shape_that_holds_it() -> None:
    shapes = BatchShapes.for_serving(5, 300)

    def shape_of(decodes: int, *prefills: int) -> tuple[int, ...]:
        some = [ScheduledChunk(sequence((1,)), 0, count, True, False) for count in (*[1] * decodes, *prefills)]
        step = ScheduledStep(tuple(some[:decodes]), tuple(some[decodes:]))
        return dataclasses.astuple(shapes.smallest(step))[:2]

    assert [shape_of(decodes) for decodes in (1, 2, 4, 5)] == [(1, 0), (4, 0), (4, 0), (5, 0)]
    assert [shape_of(decodes, 3) for decodes in (0, 1, 2, 4)] == [(0, 64), (1, 64), (5, 64), (5, 64)]
    # Each prefill has rows of its own, whose number is a multiple of 8.
    assert [shape_of(0, *lengths) for lengths in ([64], [65], [57, 1], [56, 1], [256], [249, 1], [248, 1])] == [
        (0, 64),
        (0, 256),
        (0, 256),
        (0, 64),
        (0, 256),
        (0, 304),
        (0, 256),
    ]
    step = ScheduledStep((ScheduledChunk(sequence((1,)), 0, 1, True, True),))
    assert shapes.smallest(step, lambda shape: shape.decodes != 1) == BatchShape(4, 0, 0, 4)


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (0, 16)), (8, (0, 64)), (16, (0, 128)), (32, (0, 256)), (64, (0, 512))]
)
def test_guesses_of_many_sequences_have_a_shape_without_many_empty_rows(count: int, shape: tuple[int, int]) -> None:
    shapes = BatchShapes.for_serving(256, 2048, 7)
    assert len(list(shapes)) <= 40
    drafted = [ScheduledChunk(sequence((1,)), 0, 6, True, False, drafted=5) for _ in range(count)]
    smallest = shapes.smallest(ScheduledStep((), tuple(drafted)))
    assert (smallest.decodes, smallest.rows) == shape and 6 * count <= smallest.sampled <= max(16, 9 * count)
    assert shapes.limits.drafts >= 5 * count


@pytest.mark.parametrize(("drafted", "sampled"), [(0, 256), (6, 256), (7, 576)])
def test_steps_with_prompts_have_more_rows_of_logits_than_slots_only_if_guesses_need_them(
    drafted: int, sampled: int
) -> None:
    shapes = BatchShapes.for_serving(256, 2048, 7, decodes_guesses=True)
    decodes = [ScheduledChunk(sequence((1,)), 0, 1, True, True) for _ in range(220)]
    decodes += [ScheduledChunk(sequence((1,)), 0, 6, True, True, drafted=5) for _ in range(drafted - 1)]
    prefills = [ScheduledChunk(sequence((1,)), 0, 9, True, False) for _ in range(6)]
    shape = shapes.smallest(ScheduledStep(tuple(decodes), tuple(prefills)))
    assert (shape.sampled, shape.rows) == (sampled, 256)


@pytest.mark.parametrize(
    ("count", "guesses", "expected"),
    [
        (1, 7, (8, 16, 8)),
        (1, 1, (4, 4, 1)),
        (4, 5, (32, 64, 8)),
        (5, 5, (64, 64, 8)),
        (16, 7, (128, 128, 8)),
        (17, 5, (128, 128, 1)),  # sequences with as many guesses would take 32 x 8 rows
        (32, 3, (128, 128, 4)),
        (33, 3, (256, 256, 4)),
        (64, 3, (256, 256, 4)),
        (32, 5, (256, 256, 8)),
        (64, 5, (576, 576, 1)),
    ],
)
def test_guesses_that_are_decodes_have_a_shape_without_many_empty_rows(
    count: int, guesses: int, expected: tuple[int, int, int]
) -> None:
    shapes = BatchShapes.for_serving(256, 2048, 7, decodes_guesses=True)
    assert len(list(shapes)) <= 35 and {shape.sampled for shape in shapes} == {1, 4, 16, 64, 128, 256, 576}
    drafted = [ScheduledChunk(sequence((1,)), 0, 1 + guesses, True, True, drafted=guesses) for _ in range(count)]
    decodes, sampled, queries = expected
    assert shapes.smallest(ScheduledStep(tuple(drafted))) == BatchShape(decodes, 0, 0, sampled, queries)
    # One sequence without guesses takes as many rows; without any guesses, each takes one.
    one = ScheduledChunk(sequence((1,)), 0, 1, True, True)
    assert shapes.smallest(ScheduledStep((*drafted[1:], one))).decodes <= decodes
    assert shapes.smallest(ScheduledStep((one,) * count)).queries == 1


def test_all_guesses_and_prefills_that_the_limits_allow_have_a_shape() -> None:
    shapes = BatchShapes.for_serving(256, 2048, 7, decodes_guesses=True)
    limits, one = shapes.limits, ScheduledChunk(sequence((1,)), 0, 1, True, True)
    rest = [one] * (limits.slots - 46)
    full = [dataclasses.replace(one, count=8, drafted=7)] * 45 + [dataclasses.replace(one, count=6, drafted=5)]
    prefill = ScheduledChunk(sequence((1,) * 1000), 0, 1000, True, False)
    assert sum(chunk.drafted for chunk in full) == limits.drafts
    assert shapes.smallest(ScheduledStep((*full, *rest[1:]), (prefill,))).decodes == limits.slots + limits.drafts


def test_a_pool_of_no_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="PagePool: num_pages is 0; accepted: at least 1"):
        PagePool(0)


# --- runs of decodes --------------------------------------------------------------------------------------------------


def run_lengths(steps: list[ScheduledStep], one: Sequence) -> list[int]:
    """Returns how many tokens of a sequence each step samples, or each run of steps."""
    return [1 + chunk.later for chunk in chunks(steps) if chunk.sequence is one and chunk.completes]


@pytest.mark.usefixtures("small_pages")
def test_each_sequence_takes_part_in_a_run_for_as_many_tokens_as_it_may_have() -> None:
    loop = serving_loop(4, 32, 20, run_steps=4)
    together = [never_ending(1, max_tokens=count)[0] for count in (1, 2, 7, 10)]
    for one in together:
        loop.submit(one)
    steps = run(loop)
    assert [run_lengths(steps, one) for one in together] == [[1], [1, 1], [1, 4, 2], [1, 4, 4, 1]]
    assert [one.generated for one in together] == [expected_tokens(one) for one in together]
    assert [step.is_run for step in steps] == [False, True, True, False]
    assert loop.scheduler.pool.in_use == 0


@pytest.mark.usefixtures("small_pages")
def test_a_sequence_that_ends_within_a_run_gets_none_of_the_tokens_behind_its_end() -> None:
    loop = serving_loop(2, 32, 20, run_steps=4)
    candidates = (sequence((1, 2, 3), max_tokens=20, seed=seed) for seed in range(1000))
    ended = next(one for one in candidates if len(expected_tokens(one)) == 7)
    (other,) = never_ending(1, max_tokens=20)
    for one in (ended, other):
        loop.submit(one)
    steps = run(loop)
    assert sum(run_lengths(steps, ended)) > 7
    assert (ended.finish_reason, ended.generated) == ("stop", expected_tokens(ended))
    assert other.generated == expected_tokens(other)


@pytest.mark.usefixtures("small_pages")
def test_nobody_waits_for_a_run_that_begins_later() -> None:
    loop = serving_loop(1, 32, 20, run_steps=4)
    first, second = never_ending(2, max_tokens=12)
    loop.submit(first)
    for _ in range(2):
        loop.step()
    assert first.unread == 4
    loop.submit(second)
    steps = run(loop)
    # The only slot is taken, so that the second one waits until the first one has ended.
    assert run_lengths(steps, first) == [1] * 7
    assert run_lengths(steps, second) == [1, 4, 4, 3]
    assert [one.generated for one in (first, second)] == [expected_tokens(one) for one in (first, second)]


@pytest.mark.usefixtures("small_pages")
def test_steps_that_prefill_or_take_a_token_from_the_host_are_no_runs() -> None:
    loop = serving_loop(2, 32, 20, run_steps=4)
    (one,) = never_ending(1, (5,), max_tokens=6)  # its prompt is a decode
    loop.submit(one)
    assert run_lengths(run(loop), one) == [1, 4, 1]
    assert one.generated == expected_tokens(one)
    loop = step_loop(BatchShapes.for_chunks(2, 1), 20, run_steps=4)  # and all of these prompts' tokens are
    (first,), (second,) = never_ending(1, max_tokens=12), never_ending(1, tuple(range(9)), max_tokens=6)
    for one in (first, second):
        loop.submit(one)
    steps = run(loop)
    assert not any(step.is_run and not all(chunk.completes for chunk in step.chunks) for step in steps)
    assert run_lengths(steps, second) == [1, 4, 1]
    assert [one.generated for one in (first, second)] == [expected_tokens(one) for one in (first, second)]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(("num_pages", "preemptions"), [(8, 0), (7, 1), (6, 1), (5, 1)])
def test_runs_make_nobody_give_back_pages_who_would_not_without_them(num_pages: int, preemptions: int) -> None:
    for run_steps in (1, 4):
        loop = serving_loop(2, 32, num_pages, run_steps=run_steps)
        first, second = never_ending(2, max_tokens=12)
        for one in (first, second):
            loop.submit(one)
        steps = run(loop)
        assert any(step.is_run for step in steps) == (run_steps > 1)
        assert loop.scheduler.preemptions == preemptions
        assert [one.generated for one in (first, second)] == [expected_tokens(one) for one in (first, second)]


def held_sequences(loop: StepLoop, count: int, **params: int) -> list[Sequence]:
    """Returns sequences of one step loop whose prompts have been computed."""
    together = never_ending(count, **params)
    for one in together:
        loop.submit(one)
    loop.step()
    assert all(one.is_held for one in together)
    return together


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("most", [2, 4, 9])
def test_a_step_is_made_a_run_with_the_pages_of_all_its_tokens(most: int) -> None:
    loop = serving_loop(2, 32, 20)
    together = held_sequences(loop, 2, max_tokens=6)
    step = loop.scheduler.plan()
    loop.scheduler.extend_to_run(step, most)
    count = min(most, 5)  # the first of six tokens is sampled by the step that prefills
    assert [(chunk.start, chunk.count, chunk.later, chunk.end) for chunk in step.chunks] == [
        (3, 1, count - 1, 3 + count)
    ] * 2
    assert [len(one.page_ids) for one in together] == [-(-(3 + count) // PAGE)] * 2
    assert len({page for one in together for page in one.page_ids}) == loop.scheduler.pool.in_use
    loop.scheduler.mark_submitted(step)
    assert [(one.computed, one.missing, one.has_all) for one in together] == [(3 + count, 5 - count, count == 5)] * 2


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(("num_pages", "is_run"), [(4, True), (3, False)])
def test_a_step_stays_one_where_a_page_of_the_run_is_missing(num_pages: int, is_run: bool) -> None:
    loop = serving_loop(2, 32, num_pages)
    together = held_sequences(loop, 2, max_tokens=4)
    step = loop.scheduler.plan()
    assert loop.scheduler.pool.in_use == 2
    loop.scheduler.extend_to_run(step, 4)
    assert (step.is_run, [chunk.later for chunk in step.chunks]) == (is_run, [2 * is_run] * 2)
    assert loop.scheduler.pool.in_use == (4 if is_run else 2)
    assert [len(one.page_ids) for one in together] == [2 if is_run else 1] * 2


@pytest.mark.usefixtures("small_pages")
def test_a_constrained_sequence_may_end_while_others_go_on_in_runs() -> None:
    with_constraint = RequestContext(constraint=CompiledConstraint(RememberingCompiler(), list))
    params = SamplingParams(max_tokens=3, constraint=Constraint.choice(["x"]))
    loop, constrained = serving_loop(2, 32, 20, run_steps=4), Sequence((1, 2), params, context=with_constraint)
    (other,) = never_ending(1, max_tokens=12)
    for one in (constrained, other):
        loop.submit(one)
    steps = run(loop)
    assert run_lengths(steps, other) == [1, 1, 1, 4, 4, 1]
    assert [one.generated for one in (constrained, other)] == [expected_tokens(one) for one in (constrained, other)]


# --- snapshots of models with state in slots --------------------------------------------------------------------------


def loop_with_snapshots(
    slots: int = 1, tokens: int = 64, num_pages: int = 40, capacity: int = 10, fewest_tokens: int = 1
) -> StepLoop:
    shapes = BatchShapes.for_serving(slots, tokens)
    snapshots = SnapshotCache(capacity, fewest_tokens=fewest_tokens)
    scheduler = Scheduler(PagePool(num_pages, snapshots=snapshots), shapes.limits)
    table = SlotTable(slots, num_pages, named_in_queries=True)
    return StepLoop(scheduler, shapes, table, RememberingRunner(slots))


def computed_by(loop: StepLoop, prompt: tuple[int, ...], **params: int) -> list[tuple[int, int]]:
    """Returns the first token and the number of tokens of each chunk that a request needs."""
    one = sequence(prompt, max_tokens=1, **params)
    loop.submit(one)
    steps = run(loop)
    assert one.generated == expected_tokens(one)
    return [(chunk.start, chunk.count) for chunk in chunks(steps)]


@pytest.mark.usefixtures("small_pages")
def test_a_prompt_goes_on_from_the_snapshot_at_the_end_of_an_earlier_one() -> None:
    loop, turn = loop_with_snapshots(), tuple(range(3 * PAGE + 2))
    assert computed_by(loop, turn) == [(0, 3 * PAGE), (3 * PAGE, 2)]
    assert computed_by(loop, turn) == [(3 * PAGE, 2)]
    assert computed_by(loop, (*turn, *range(2 * PAGE))) == [(3 * PAGE, 2 * PAGE), (5 * PAGE, 2)]
    snapshots = loop.scheduler.pool.snapshots
    assert snapshots is not None
    assert (len(snapshots), snapshots.hits) == (2, 2)


@pytest.mark.usefixtures("small_pages")
def test_a_snapshot_is_taken_where_a_prompt_leaves_the_pages_of_another() -> None:
    loop, beginning = loop_with_snapshots(), tuple(range(3 * PAGE))
    first, second, third = ((*beginning, *[token] * (2 * PAGE)) for token in (40, 41, 42))
    assert computed_by(loop, first) == [(0, 5 * PAGE)]
    assert computed_by(loop, second) == [(0, 3 * PAGE), (3 * PAGE, 2 * PAGE)]
    assert computed_by(loop, third) == [(3 * PAGE, 2 * PAGE)]


@pytest.mark.usefixtures("small_pages")
def test_no_snapshot_is_taken_that_saves_few_tokens() -> None:
    loop, prompt = loop_with_snapshots(fewest_tokens=2 * PAGE), tuple(range(5 * PAGE + 1))
    for pages in (1, 1, 2):
        assert computed_by(loop, prompt[: pages * PAGE + 1])[0] == (0, pages * PAGE + (pages == 1))
    # The second page has a snapshot; the third would save one page more, and the fourth two.
    assert computed_by(loop, prompt[: 3 * PAGE + 1]) == [(2 * PAGE, PAGE + 1)]
    assert computed_by(loop, prompt[: 4 * PAGE + 1]) == [(2 * PAGE, 2 * PAGE), (4 * PAGE, 1)]
    assert computed_by(loop, prompt) == [(4 * PAGE, PAGE + 1)]


@pytest.mark.usefixtures("small_pages")
def test_the_snapshot_unused_the_longest_is_dropped_first() -> None:
    loop = loop_with_snapshots(capacity=2)
    one, two, three = ((token, *range(PAGE)) for token in (1, 2, 3))
    whole, rest = [(0, PAGE), (PAGE, 1)], [(PAGE, 1)]
    given = [computed_by(loop, prompt) for prompt in (one, two, one, three, one, two)]
    assert given == [whole, whole, rest, whole, rest, whole]


@pytest.mark.usefixtures("small_pages")
def test_without_pages_or_after_a_change_of_weights_a_snapshot_serves_nobody() -> None:
    loop, prompt = loop_with_snapshots(num_pages=6), tuple(range(3 * PAGE + 1))
    whole = [(0, 3 * PAGE), (3 * PAGE, 1)]
    assert computed_by(loop, prompt) == whole
    computed_by(loop, tuple(range(30, 30 + 6 * PAGE)))
    # The snapshot is still there, and no other one is taken. With the pages it serves again.
    assert computed_by(loop, prompt) == [(0, 3 * PAGE + 1)]
    assert computed_by(loop, prompt) == [(3 * PAGE, 1)]
    loop.scheduler.pool.forget_prefixes()
    assert computed_by(loop, prompt) == whole


@pytest.mark.usefixtures("small_pages")
def test_a_step_takes_and_restores_few_snapshots() -> None:
    loop = loop_with_snapshots(slots=8, tokens=100)
    snapshots = loop.scheduler.pool.snapshots
    assert snapshots is not None
    prompts = [(token, *range(PAGE)) for token in range(8)]
    for count in (MAX_PER_STEP, 2 * MAX_PER_STEP):
        together = [sequence(prompt, max_tokens=1) for prompt in prompts]
        for one in together:
            loop.submit(one)
        steps = run(loop)
        assert [one.generated for one in together] == [expected_tokens(one) for one in together]
        assert len(snapshots) == count
        starts = [Counter(chunk.start for chunk in step.chunks if chunk.sequence.cached_tokens) for step in steps]
        assert all(count[PAGE] <= MAX_PER_STEP for count in starts)


def test_a_cache_of_no_snapshots_is_refused() -> None:
    with pytest.raises(ValueError, match="SnapshotCache: capacity is 0; accepted: at least 1"):
        SnapshotCache(0)
