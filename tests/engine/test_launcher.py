"""Launchers, and step loops whose steps are given to the device by another thread."""

import dataclasses
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from detjax import SamplingParams
from detjax.engine import Constraint, EngineClosed, Request
from detjax.engine.batch import BatchShapes
from detjax.engine.constraints import CompiledConstraint, ConstraintCompiler
from detjax.engine.launcher import Launcher, LauncherThread
from detjax.engine.model_runner import ModelRunner
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.page_pool import PagePool
from detjax.engine.sampled_tokens import PackedTokens
from detjax.engine.scheduler import Scheduler
from detjax.engine.sequence import RequestContext, Sequence
from detjax.engine.slot_table import SlotTable
from detjax.engine.step_loop import StepLoop
from detjax.engine.token_masks import Masks, Matcher
from detjax.runtime import backends
from tests.engine import schedules
from tests.engine.schedules import END, RememberingCompiler, RememberingRunner, expected_tokens
from tests.support.small_loops import small_engine
from tests.support.waits import HANGS_AFTER


@pytest.fixture
def launcher() -> Iterator[LauncherThread]:
    launcher = LauncherThread()
    yield launcher
    launcher.close()


def test_functions_are_called_in_their_order_in_one_other_thread(launcher: LauncherThread) -> None:
    calls, may_begin = list[tuple[int, int]](), threading.Event()
    launcher.submit(lambda: may_begin.wait(HANGS_AFTER))
    futures = [
        launcher.submit(lambda number=number: calls.append((number, threading.get_ident()))) for number in range(50)
    ]
    assert calls == []
    may_begin.set()
    assert [future.result(HANGS_AFTER) for future in futures] == [None] * 50
    assert [number for number, _ in calls] == [*range(50)]
    assert len({thread for _, thread in calls} | {threading.get_ident()}) == 2


def test_nothing_is_called_after_a_failure(launcher: LauncherThread) -> None:
    failure, calls = MemoryError("no memory left"), list[int]()

    def fail() -> None:
        raise failure

    assert launcher.submit(lambda: 1).result(HANGS_AFTER) == 1
    futures = [
        launcher.submit(fail),
        launcher.submit(lambda: calls.append(1)),
        launcher.submit(lambda: calls.append(2)),
    ]
    assert [future.exception(HANGS_AFTER) for future in futures] == [failure] * 3
    assert calls == []


def test_close_waits_for_what_was_submitted_and_ends_the_thread() -> None:
    launcher, calls, may_go_on = LauncherThread(), list[int](), threading.Event()
    launcher.submit(lambda: may_go_on.wait(HANGS_AFTER))
    launcher.submit(lambda: calls.append(1))
    threading.Timer(0.1, may_go_on.set).start()
    launcher.close()
    assert calls == [1]
    assert not launcher._thread.is_alive()


def test_the_thread_has_the_backend_that_its_maker_chose() -> None:
    with backends.use_backend(backends.STOCK):
        launcher = LauncherThread()
    assert launcher.submit(backends.backend).result(HANGS_AFTER) == backends.STOCK
    assert backends.backend() != backends.STOCK
    launcher.close()


def test_without_a_thread_the_caller_calls_and_gets_what_is_raised() -> None:
    launcher = Launcher()
    assert launcher.submit(threading.get_ident).result() == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        launcher.submit(lambda: 1 // 0)


class HeldBackCompiler(RememberingCompiler):
    """A compiler whose masks are computed in a thread of their own, and not before `may_begin` is set.

    Attributes:
        may_begin: whether masks may be computed.
        failing_from: the number of the first masks that report a failure of each row.
    """

    def __init__(self, failing_from: int = 1000) -> None:
        self.may_begin = threading.Event()
        self.failing_from = failing_from
        self._count = 0

    def start_masks(
        self, rows: int, matchers: Mapping[int, Matcher], accepted: Callable[[], Iterable[tuple[Matcher, int]]]
    ) -> Future[Masks]:
        future, late = Future[Masks](), super().start_masks(rows, matchers, accepted)
        fails, self._count = self._count >= self.failing_from, self._count + 1

        def compute() -> None:
            self.may_begin.wait(HANGS_AFTER)
            failures = dict.fromkeys(matchers, "it is too complex") if fails else {}
            future.set_result(Masks(late.result().allowed, failures))

        threading.Thread(target=compute, daemon=True).start()
        return future


class NotingRunner(RememberingRunner):
    """A runner that notes which threads give it steps."""

    def __init__(self, slots: int = 1) -> None:
        super().__init__(slots)
        self.threads: list[int] = []

    def forward(self, batch: PackedBatch) -> tuple[list[int], list[int]]:
        self.threads.append(threading.get_ident())
        return super().forward(batch)


def test_only_steps_that_wait_for_masks_change_threads(launcher: LauncherThread) -> None:
    compiler = HeldBackCompiler()
    compiler.may_begin.set()
    with schedules.small_pages():
        loop, constrained = loop_and_sequence(compiler, 6, launcher)
        runner = loop._runner = NotingRunner()
        while not loop.is_idle:
            loop.step()
        assert len(runner.threads) > 5 and threading.get_ident() not in runner.threads
        runner.threads.clear()
        free = Sequence((1, 2, 3), SamplingParams(max_tokens=6, ignore_eos=True))
        loop.submit(free)
        while not loop.is_idle:
            loop.step()
    assert {*runner.threads} == {threading.get_ident()}
    assert constrained.generated == expected_tokens(constrained)
    assert len(free.generated) == 6


def test_a_thread_launches_steps_of_many_samples(launcher: LauncherThread) -> None:
    shapes, here = BatchShapes.for_serving(4, 16), threading.get_ident()

    def run(samples_for_a_thread: int) -> tuple[list[list[int]], dict[int, set[int]]]:
        """Returns the tokens of four samples, and for each number of running ones the threads that launched steps."""
        table, runner = SlotTable(4, 10), NotingRunner(4)
        loop = StepLoop(Scheduler(PagePool(40), shapes.limits), shapes, table, runner, launcher)
        loop.samples_for_a_thread = samples_for_a_thread
        params = [SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True) for i in range(4)]
        sequences, threads = [Sequence((1, 2, 3 + i), one) for i, one in enumerate(params)], dict[int, set[int]]()
        for sequence in sequences:
            loop.submit(sequence)
        while not loop.is_idle:
            running = len(loop.scheduler.running)
            loop.step()
            if loop._newest is not None:
                loop._newest.launched.result(HANGS_AFTER)  # until then the runner has noted earlier steps only
            threads.setdefault(running, set()).update(runner.threads[-1:])
        return [sequence.generated for sequence in sequences], threads

    with schedules.small_pages():
        (tokens, threads), (in_callers_thread, callers) = run(3), run(5)
    assert tokens == in_callers_thread
    assert here not in threads[4] and threads[1] == {here}
    assert {*itertools.chain(*callers.values())} == {here}


def late_loop(
    launcher: Launcher, are_ready: Callable[[], bool], run_steps: int = 1, *, num_pages: int = 100
) -> StepLoop:
    """Returns a loop of up to four samples. Steps of three are large."""
    shapes, runner = BatchShapes.for_serving(4, 16), RememberingRunner(4, run_steps, are_ready)
    scheduler = Scheduler(PagePool(num_pages, keeps_prefixes=False), shapes.limits)
    loop = StepLoop(scheduler, shapes, SlotTable(4, num_pages), runner, launcher)
    loop.samples_for_a_thread = 3
    return loop


def whole_sample(prompt: tuple[int, ...], length: int) -> Sequence:
    """Returns a sample that has as many tokens as it may have."""
    params = (SamplingParams(max_tokens=length, temperature=1.0, seed=seed) for seed in itertools.count())
    sequences = (Sequence(prompt, one, context=RequestContext(end_tokens=frozenset([END]))) for one in params)
    return next(one for one in sequences if len(expected_tokens(one)) == length)


def left_unread(loop: StepLoop, lengths: Iterable[int]) -> tuple[list[int], list[int]]:
    """Computes samples of these lengths. Returns how many steps are left unread after each large and small step."""
    large, small = list[int](), list[int]()
    sequences = [whole_sample((1, 2, 3 + index), length) for index, length in enumerate(lengths)]
    for sequence in sequences:
        loop.submit(sequence)
    while not loop.is_idle:
        started = loop._newest
        loop.step()
        if loop._newest is not None and loop._newest is not started:
            assert len(loop._in_flight) <= 3
            (large if len(loop._newest.planned.samples) >= 3 else small).append(loop._left_unread)
    assert [sequence.generated for sequence in sequences] == [expected_tokens(sequence) for sequence in sequences]
    return large, small


def test_large_steps_are_planned_earlier_after_some_late_launches_until_steps_are_small(
    launcher: LauncherThread,
) -> None:
    with schedules.small_pages():
        loop = late_loop(launcher, lambda: True)
        assert loop.late_steps > 1
        for _ in range(2):
            large, small = left_unread(loop, (15, 15, 25, 25))
            # The first large step follows none, and a step is read after two more have been launched.
            before = loop.late_steps + 2
            assert large[:before] == [1] * before and {*large[before:]} == {2}
            assert len(large) > before + 5 and len(small) > 5 and {*small} == {1}


def test_large_steps_stay_planned_earlier_when_launches_are_in_time_because_of_it(launcher: LauncherThread) -> None:
    late = itertools.chain([True] * 8, itertools.repeat(False))
    with schedules.small_pages():
        large, _ = left_unread(late_loop(launcher, lambda: next(late)), (25, 25, 25, 25))
    assert large[-10:] == [2] * 10


@pytest.mark.parametrize("late", [[False], [True, True, True, False]])
def test_launches_that_are_in_time_now_and_then_plan_no_large_step_earlier(
    launcher: LauncherThread, late: list[bool]
) -> None:
    is_late = itertools.cycle(late)
    with schedules.small_pages():
        loop = late_loop(launcher, lambda: next(is_late))
        assert loop.late_steps > sum(late)
        large, small = left_unread(loop, (25, 25, 30, 30))
    assert len(large) > 20 and {*large, *small} == {1}


def test_no_more_than_two_runs_are_in_flight(launcher: LauncherThread) -> None:
    """A new request waits for them."""
    with schedules.small_pages():
        loop = late_loop(launcher, lambda: True, run_steps=4)
        loop.late_steps = 1
        large, _ = left_unread(loop, (25, 25, 25, 15, 60))  # steps are single while the last sample waits
    runner = loop._runner
    assert isinstance(runner, RememberingRunner) and runner.runs > 2
    assert 2 in large and large[-2:] == [1, 1]


def test_a_preempted_sample_waits_until_all_its_tokens_are_read(launcher: LauncherThread) -> None:
    with schedules.small_pages():
        loop = late_loop(launcher, lambda: True, num_pages=7)
        loop.samples_for_a_thread, loop.late_steps = 1, 0
        # The first one's third page is the last one's in step 8. Two tokens of the last one are unread then, and one of
        # them still when the pages of the second one are free, which ended with step 6.
        samples = [whole_sample((1, 2), 11), whole_sample((3, 4), 6), whole_sample((5, 6, 7, 8, 9), 11)]
        for sample in samples:
            loop.submit(sample)
        for _ in range(7):
            loop.step()
        assert (samples[2].unread, loop.scheduler.preemptions) == (3, 0)
        loop.step()
        assert (samples[2].unread, loop.scheduler.preemptions) == (2, 1)
        loop.step()
        assert samples[2].slot is not None
        while not loop.is_idle:
            loop.step()
    assert [sample.generated for sample in samples] == [expected_tokens(sample) for sample in samples]


def test_hosts_that_share_a_model_find_no_step_late() -> None:
    """They would find it out at different times, and plan different steps."""

    def tokens(*, is_shared: bool) -> PackedTokens:
        words: Any = types.SimpleNamespace(is_fully_addressable=not is_shared, is_ready=lambda: True)
        packed: Any = types.SimpleNamespace(words=words)
        return PackedTokens(None, packed)

    assert tokens(is_shared=False).is_ready
    assert not tokens(is_shared=True).is_ready


def loop_and_sequence(compiler: ConstraintCompiler, tokens: int, launcher: LauncherThread) -> tuple[StepLoop, Sequence]:
    """Returns a loop with a sequence whose last token ends it before `max_tokens`."""
    shapes = BatchShapes.for_serving(1, 8)
    loop = StepLoop(Scheduler(PagePool(10), shapes.limits), shapes, SlotTable(1, 10), RememberingRunner(1), launcher)
    start: Any = list
    context = RequestContext(end_tokens=frozenset([END]), constraint=CompiledConstraint(compiler, start))
    constrained = SamplingParams(max_tokens=20, temperature=1.0, constraint=Constraint.choice(["x"]))
    params = (dataclasses.replace(constrained, seed=seed) for seed in range(10_000))
    sequences = (Sequence((1, 2, 3), one, context=context) for one in params)
    sequence = next(one for one in sequences if len(expected_tokens(one)) == tokens)
    loop.submit(sequence)
    return loop, sequence


def test_two_steps_are_planned_while_masks_are_computed(launcher: LauncherThread) -> None:
    compiler = HeldBackCompiler()
    with schedules.small_pages():
        loop, sequence = loop_and_sequence(compiler, 6, launcher)
        rescue = threading.Timer(HANGS_AFTER / 4, compiler.may_begin.set)
        rescue.start()
        assert loop.step() == loop.step() == []
        assert not compiler.may_begin.is_set()
        assert sequence.unread == 2
        rescue.cancel()
        compiler.may_begin.set()
        while not loop.is_idle:
            loop.step()
    assert sequence.generated == expected_tokens(sequence)


@pytest.mark.parametrize(("failing_from", "reason"), [(6, "stop"), (5, "failed"), (2, "failed")])
def test_a_constraint_that_fails_after_the_end_of_its_sample_is_no_failure(
    launcher: LauncherThread, failing_from: int, reason: str
) -> None:
    compiler = HeldBackCompiler(failing_from)
    compiler.may_begin.set()
    with schedules.small_pages():
        loop, sequence = loop_and_sequence(compiler, 6, launcher)
        while not loop.is_idle:
            loop.step()
    assert sequence.finish_reason == reason
    assert sequence.generated == expected_tokens(sequence)[: failing_from + 1]
    assert (sequence.failure is None) == (reason == "stop")


@pytest.mark.parametrize("constraint", [None, Constraint("regex", "[a-z]{15}")])
def test_an_exception_while_a_step_is_launched_ends_the_engine_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, constraint: Constraint | None
) -> None:
    failure, samples = MemoryError("no memory left"), 0

    def broken_sample(runner: ModelRunner, *args: Any) -> Any:
        nonlocal samples
        samples += 1
        if samples == 3:
            raise failure
        return sample(runner, *args)

    sample = ModelRunner.sample
    monkeypatch.setattr(ModelRunner, "sample", broken_sample)
    with small_engine() as engine:
        params = SamplingParams(max_tokens=20, constraint=constraint)
        error = engine.submit(Request("ROMEO:", params)).exception(HANGS_AFTER)
        assert isinstance(error, EngineClosed)
        assert engine.failure is failure
        assert engine.closed.exception(HANGS_AFTER) is failure
        assert samples == 3
    (record,) = (record for record in caplog.records if record.name == "detjax.engine")
    assert record.exc_info and record.exc_info[1] is failure
    assert "broken_sample" in _functions(failure)


def test_masks_that_cannot_be_computed_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    start_masks, failure, count = ConstraintCompiler.start_masks, MemoryError("no memory left"), 0

    def fail_later(compiler: ConstraintCompiler, *args: Any) -> Future[Masks]:
        nonlocal count
        count += 1
        if count < 4:
            return start_masks(compiler, *args)
        future = Future[Masks]()
        future.set_exception(failure)
        return future

    monkeypatch.setattr(ConstraintCompiler, "start_masks", fail_later)
    params = SamplingParams(max_tokens=20, constraint=Constraint("regex", "[a-z]{15}"))
    with small_engine() as engine:
        assert isinstance(engine.submit(Request("ROMEO:", params)).exception(HANGS_AFTER), EngineClosed)
        assert engine.closed.exception(HANGS_AFTER) is failure


def test_closing_an_engine_ends_its_threads() -> None:
    before = {*threading.enumerate()}
    with small_engine() as engine:
        future = engine.submit(Request("ROMEO:", SamplingParams(max_tokens=50)))
        names = {thread.name for thread in {*threading.enumerate()} - before}
        assert {"detjax-engine", "detjax-launcher"} <= names
    assert isinstance(future.exception(HANGS_AFTER), EngineClosed | None)
    assert not any(thread.name.startswith("detjax-") for thread in {*threading.enumerate()} - before)


def _functions(error: BaseException) -> list[str]:
    """Returns the functions in which an exception was on its way."""
    names, traceback = [], error.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return names
