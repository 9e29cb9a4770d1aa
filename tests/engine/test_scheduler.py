"""The scheduler and its pages: what schedules do to results (nothing), and what they do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from detjax import SamplingParams
from detjax.engine.core import Core
from detjax.engine.inputs import Shape, Shapes, Slots
from detjax.engine.pages import PagePool, digests
from detjax.engine.sample import Sample
from detjax.engine.scheduler import Piece, Scheduler, Step
from tests.engine import schedules
from tests.engine.schedules import END, PAGE, Remembering, alone

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_pages() -> Iterator[None]:
    with schedules.small_pages():
        yield


def test_random_schedules_change_no_token_and_leak_no_page() -> None:
    schedules.shrink(30)


def test_ten_thousand_random_schedules_change_no_token_and_leak_no_page() -> None:
    # In a process of its own, which does not check the type of each argument of each call.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, schedules.__file__, "10000"]
    run = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]


def sample(prompt: tuple[int, ...], index: int = 0, leader: Sample | None = None, **params: int) -> Sample:
    return Sample(prompt, index, SamplingParams(**params), frozenset([END]), None, leader)


def core(slots: int, tokens: int, pages: int, keeps: bool = True) -> Core:
    shapes = Shapes(slots, tokens)
    scheduler = Scheduler(PagePool(pages, keeps_prefixes=keeps), shapes.limits)
    return Core(scheduler, shapes, Slots(slots, pages), Remembering(slots))


def pieces(core: Core) -> list[Piece]:
    """Of all steps until nothing is left to do."""
    given, found = core.scheduler.given, []

    def noted(step: Step) -> None:
        found.extend(step.pieces)
        given(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.scheduler, "given", noted)
        while not core.is_idle:
            core.step()
    return found


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_prompt_that_was_there_is_computed_again_only_without_a_prefix_cache(keeps: bool) -> None:
    engine, prompt = core(1, 8, 10, keeps), tuple(range(3 * PAGE))
    again = PAGE if keeps else 3 * PAGE  # of a prompt of whole pages the last one is always computed
    for computed in (3 * PAGE, again):
        one = sample(prompt, max_tokens=1)
        engine.scheduler.submit(one)
        assert sum(piece.count for piece in pieces(engine)) == computed
        assert one.generated == alone(one)
    assert engine.scheduler.pool.in_use == 0
    assert len(engine.scheduler.pool._kept) == (3 if keeps else 0)


@pytest.mark.usefixtures("small_pages")
def test_samples_of_a_request_share_the_pages_of_their_prompt() -> None:
    engine, prompt = core(3, 16, 20), tuple(range(4 * PAGE + 1))
    samples = [sample(prompt, max_tokens=3)]
    samples += [sample(prompt, index, samples[0], max_tokens=3) for index in (1, 2)]
    for one in samples:
        engine.scheduler.submit(one)
    while not all(one.slot is not None for one in samples):
        engine.step()
    assert len({page for one in samples for page in one.pages[:4]}) == 4
    assert engine.scheduler.pool.in_use <= 4 + 3
    pieces(engine)
    assert [one.generated for one in samples] == [alone(one) for one in samples]


@pytest.mark.usefixtures("small_pages")
def test_where_pages_run_out_the_latest_sample_waits() -> None:
    engine = core(2, 8, 5)
    tries = (sample((1, 2, 3), max_tokens=12, seed=seed) for seed in range(100))
    first, second, *_ = (one for one in tries if len(alone(one)) == 12)
    for one in (first, second):
        engine.scheduler.submit(one)
    ended = []
    while not engine.is_idle:
        ended += [one for one, token in engine.step() if token.finish_reason is not None]
    assert engine.scheduler.preemptions > 0
    assert ended == [first, second]
    assert [one.generated for one in ended] == [alone(one) for one in ended]


def test_a_digest_names_a_page_and_all_before_it() -> None:
    one, other = [1] * 128 + [2] * 128, [3] * 128 + [2] * 128
    assert len(digests(one)) == 2
    assert digests(one[:255]) == digests(one)[:1]
    assert digests(one)[1] != digests(other)[1]
    assert digests(one, digests(one)[:1]) == digests(one)


def test_the_longest_unused_prefix_is_given_away_first_and_its_end_before_its_beginning() -> None:
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


def test_of_two_pages_of_one_digest_the_first_is_found() -> None:
    pool = PagePool(2)
    pages = [pool.take(), pool.take()]
    for page in pages:
        pool.name(page, b"same")
    assert pool.share([b"same"]) == pages[:1]
    pool.release(pages)
    assert pool.in_use == 1
    pool.release(pages[:1])
    assert (pool.in_use, pool.available) == (0, 2)


@pytest.mark.parametrize(("samples", "tokens"), [(1, 1), (3, 5), (8, 64), (64, 512), (1024, 2048), (5, 10_000)])
def test_every_step_within_the_limits_has_a_shape(samples: int, tokens: int) -> None:
    shapes = Shapes(samples, tokens)
    largest = max(shape.rows for shape in shapes)
    assert largest >= tokens
    assert max(shape.decodes for shape in shapes) == samples
    assert len(list(shapes)) == len(set(shapes)) <= 40
    assert Shape(samples, largest, shapes.limits.prefills) in set(shapes)


def test_a_pool_of_no_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="PagePool: pages is 0; accepted: at least 1"):
        PagePool(0)
