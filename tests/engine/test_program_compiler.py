"""Programs are compiled in threads or processes, before the first step or in the background; no bit depends on it."""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from detjax.engine import BatchShapes, Completion, StepLoop, program_compiler
from detjax.engine.batch import essential_shapes
from detjax.engine.compiler_process import CompilerFailed, CompilerProcess, Task
from detjax.engine.program_compiler import Compilation, Compilers, ProgramCompiler
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.step_programs import StepPrograms
from detjax.runtime import compilation
from detjax.runtime.fingerprints import fingerprint
from tests.support.compiled_programs import compiled_programs
from tests.support.kept_programs import no_kept_programs
from tests.support.small_loops import VARIANTS, answers, small_loop
from tests.support.waits import HANGS_AFTER


@pytest.fixture(autouse=True)
def serializable_programs() -> Iterator[None]:
    with no_kept_programs():
        yield


PLAIN = VARIANTS[:1]
_NUM_PAGES = itertools.count(3)


def new_loop(variants: tuple[SamplingVariant, ...] = PLAIN, runs_of: int = 0) -> StepLoop:
    """Returns a loop whose programs nothing has compiled. One for a CPU that has run cannot be serialized any more."""
    return small_loop(variants, runs_of, num_pages=next(_NUM_PAGES))


@functools.cache
def expected(variants: tuple[SamplingVariant, ...] = PLAIN) -> list[Completion]:
    return answers(small_loop(variants))


def compilation_of(loop: StepLoop) -> Compilation:
    compilation_ = loop._runner._compilation  # pyright: ignore[reportAttributeAccessIssue]
    assert compilation_ is not None
    return compilation_


class CompilerHere(CompilerProcess):
    """Stands for a process. It compiles in this one, and may wait or fail before it does."""

    before: Callable[[Hashable], None] = staticmethod(lambda key: None)

    is_usable = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, task: Task | None = None) -> None:
        self.is_killed = False
        if task is not None:
            self.begin(task)

    def begin(self, task: Task) -> None:
        self._programs = task.programs

    def compiled(self, key: Hashable) -> bytes:
        type(self).before(key)
        if self.is_killed:
            raise CompilerFailed("it was killed")
        made = self._programs.by_key()[key].compiled(self._programs.network, self._programs.parameters)
        return compilation.serialized(made)

    def kill(self) -> None:
        self.is_killed = True

    close = kill


@pytest.fixture
def compilers_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CompilerHere]]:
    for variants in (PLAIN, VARIANTS):
        expected(variants)
    # Loops of other pages share programs of sampling, and a program for a CPU that has run cannot be serialized.
    jax.clear_caches()
    monkeypatch.setattr(program_compiler, "CompilerProcess", CompilerHere)
    with no_kept_programs():
        yield CompilerHere
    CompilerHere.before = staticmethod(lambda key: None)


def test_programs_of_a_process_have_the_same_bits_and_the_next_start_compiles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_loop(runs_of=1)
    first.warm_up(ProgramCompiler(tmp_path, processes=1))
    assert not compilation_of(first).pending
    assert sum("_decode_run" in key for key in first._runner._compiled) == 1
    assert answers(first) == expected()
    second = small_loop(PLAIN, 1, num_pages=first.scheduler.pool.num_pages)
    with monkeypatch.context() as patch, compiled_programs() as compiled:
        patch.setattr(program_compiler, "CompilerProcess", None)
        second.warm_up(ProgramCompiler(tmp_path, processes=2))
        assert answers(second) == expected()
        steps = "_forward", "_sample", "_score", "_decode_run"
        assert not [name for name in compiled if any(step in name for step in steps)]


def test_programs_of_threads_are_kept_too(tmp_path: Path) -> None:
    first = new_loop()
    second = small_loop(PLAIN, num_pages=first.scheduler.pool.num_pages)
    with no_kept_programs():
        jax.clear_caches()  # another test of this process may have run programs that do not depend on the pages
        first.warm_up(ProgramCompiler(tmp_path, processes=0))
    seen: list[int] = []

    def track(programs: Any, count: int) -> Any:
        seen.append(count)
        return programs

    second.warm_up(ProgramCompiler(tmp_path, processes=0, track=track))
    assert seen == [0]


def test_steps_take_larger_programs_until_theirs_are_there(compilers_here: type[CompilerHere]) -> None:
    bits, go_on = expected(VARIANTS), threading.Event()
    loop = new_loop(VARIANTS)
    keys = programs_of(loop).by_key()
    rare = {key for key, program in keys.items() if not program.is_essential}

    def wait_if_rare(key: Hashable) -> None:
        assert key not in rare or go_on.wait(HANGS_AFTER)

    compilers_here.before = staticmethod(wait_if_rare)
    with compiled_programs() as compiled:
        loop.warm_up(ProgramCompiler(processes=len(keys), in_background=True))
        assert compilation_of(loop).pending == rare
        assert len(rare) == 2
        assert answers(loop) == bits
    names = [name for name in compiled if "_forward" in name or "_sample" in name or "_score" in name]
    assert len(names) == len(keys) - len(rare) - 1  # and the one that notes tokens of penalties
    go_on.set()
    loop.wait_for_programs()
    assert not compilation_of(loop).pending
    assert answers(loop) == bits
    loop.close()


def test_where_a_process_fails_this_one_compiles_what_is_essential_and_nothing_else(
    compilers_here: type[CompilerHere], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(key: Hashable) -> None:
        raise CompilerFailed("out of memory")

    compilers_here.before = staticmethod(fail)
    loop = new_loop()
    rare = {key for key, program in programs_of(loop).by_key().items() if not program.is_essential}
    loop.warm_up(ProgramCompiler(processes=2, in_background=True))
    loop.wait_for_programs()
    assert compilation_of(loop).pending == rare
    assert caplog.messages == ["a process that compiles programs has failed: out of memory"] * 2
    assert answers(loop) == expected()
    other = small_loop(PLAIN, num_pages=loop.scheduler.pool.num_pages)
    other.warm_up(ProgramCompiler(processes=1))
    assert not compilation_of(other).pending


def test_closing_a_loop_ends_what_is_still_compiled(compilers_here: type[CompilerHere]) -> None:
    loop = new_loop()
    closing, programs = threading.Event(), programs_of(loop).by_key()

    def wait(key: Hashable) -> None:
        assert programs[key].is_essential or closing.wait(HANGS_AFTER)

    compilers_here.before = staticmethod(wait)
    loop.warm_up(ProgramCompiler(processes=2, in_background=True))
    thread = threading.Thread(target=loop.close)
    thread.start()
    closing.set()
    thread.join(HANGS_AFTER)
    assert not thread.is_alive()
    assert compilation_of(loop).pending


def test_processes_that_wait_compile_and_those_left_over_end(compilers_here: type[CompilerHere]) -> None:
    made: list[CompilerHere] = []

    class Waiting(compilers_here):
        def __init__(self, task: Task | None = None) -> None:
            super().__init__(task)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_compiler, "CompilerProcess", Waiting)
        count = len(programs_of(loop := new_loop()).by_key())
        with Compilers(processes=count + 1) as compilers:
            assert [hasattr(process, "_programs") for process in made] == [False] * (count + 1)
            made[-1].is_usable = False  # pyright: ignore[reportAttributeAccessIssue]
            loop.warm_up(ProgramCompiler(compilers=compilers, processes=count))
            assert len(made) == count + 1
            loop = new_loop()
            loop.warm_up(ProgramCompiler(compilers=compilers, processes=1))  # none has waited
            assert len(made) == count + 2
    assert not hasattr(made[count], "_programs")
    assert all(process.is_killed for process in made)
    assert answers(loop) == expected()


def test_where_no_program_is_missing_the_processes_end_and_with_a_cache_none_start(
    compilers_here: type[CompilerHere], tmp_path: Path
) -> None:
    with Compilers(tmp_path, processes=1) as compilers:
        (process,) = compilers._waiting
        first = new_loop()
        first.warm_up(ProgramCompiler(tmp_path, processes=1))
        second = small_loop(PLAIN, num_pages=first.scheduler.pool.num_pages)
        second.warm_up(ProgramCompiler(tmp_path, compilers=compilers, processes=1))
        assert process.is_killed  # pyright: ignore[reportAttributeAccessIssue]
    assert not Compilers(tmp_path, processes=1)._waiting


def test_a_process_waits_for_its_task_in_the_environment_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of(new_loop())
    task = Task(programs, compilation.ExecutionChoices.here(), fingerprint().digest)
    key = next(iter(programs.by_key()))
    with Compilers(processes=2) as compilers:
        other, waiting = compilers._waiting
        process = compilers.take(task)
        assert process is waiting
        assert process.compiled(key)
        process.close()
        assert not process.is_usable
        monkeypatch.setitem(os.environ, "DETJAX_A_VARIABLE", "1")
        assert not other.is_usable
        process = compilers.take(task)
        assert process is not other
        process.close()
    with pytest.raises(CompilerFailed, match="it has ended"):
        other.compiled(key)


def test_a_process_that_is_not_needed_ends_without_a_task() -> None:
    process = CompilerProcess()
    process._connection.close()
    assert process._process.wait(HANGS_AFTER) == 0


def test_without_processes_nothing_is_left_for_later() -> None:
    loop = new_loop()
    loop.warm_up(ProgramCompiler(processes=0, in_background=True))
    assert not compilation_of(loop).pending


def test_a_process_of_another_fingerprint_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of(small_loop())
    task = Task(programs, compilation.ExecutionChoices.here(), fingerprint().digest)
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_backend_optimization_level=1")
    process = CompilerProcess(task)
    try:
        with pytest.raises(CompilerFailed, match=f"its fingerprint is [0-9a-f]*, and not {task.fingerprint}"):
            process.compiled(next(iter(task.programs.by_key())))
    finally:
        process.close()
    with pytest.raises(CompilerFailed, match="it has ended with code -9"):
        process.compiled(0)


@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (3, 5), (8, 64), (64, 512), (1024, 8192)])
@pytest.mark.parametrize(("drafts", "decodes_guesses"), [(0, False), (4, False), (4, True)])
def test_some_essential_program_serves_each_step(slots: int, tokens: int, drafts: int, decodes_guesses: bool) -> None:
    shapes = [*BatchShapes.for_serving(slots, tokens, drafts, decodes_guesses=decodes_guesses)]
    essential = essential_shapes(shapes)
    assert len(essential) < len(shapes) or slots == 1
    for shape in shapes:
        # A step with guesses takes as many decodes for each request.
        assert any(one.fits(shape) and (one.queries == shape.queries or shape.queries == 1) for one in essential)


def test_steps_wait_for_programs_of_every_second_size_and_the_smallest() -> None:
    essential = sorted(essential_shapes(BatchShapes.for_serving(1024, 8192)))
    sizes = [(shape.decodes, shape.rows) for shape in essential]
    assert sizes == [(1, 0), (4, 0), (64, 0), (1024, 0), (1024, 64), (1024, 1024), (1024, 8192)]


def test_programs_say_what_they_are_for_and_the_essential_ones_come_first() -> None:
    programs = [*programs_of(small_loop()).by_key().values()]
    assert [program.is_essential for program in programs] == sorted(
        (program.is_essential for program in programs), reverse=True
    )
    purposes = [program.purpose for program in programs]
    assert len(set(purposes)) == len(purposes)
    assert "layers: up to 1 decodes" in purposes
    assert "sampling: up to 1 samples with top-k, top-p and min-p, 2 likeliest tokens, penalties and biases" in purposes


def programs_of(loop: StepLoop) -> StepPrograms:
    return loop.programs()


def test_a_process_is_closed_by_one_thread_at_a_time() -> None:
    ended = Compilation(programs_of(new_loop()), None, lambda key, program: None, threads=1)
    seen: list[int] = []
    others: list[threading.Thread] = []

    class Closing:
        inside = 0

        def kill(self) -> None:
            pass

        def close(self) -> None:
            self.inside += 1
            seen.append(self.inside)
            if not others:
                others.append(threading.Thread(target=ended._end_processes))
                others[0].start()
                others[0].join(0.2)  # long enough to come in if it may
            self.inside -= 1

    ended._processes = [Closing()]  # pyright: ignore[reportAttributeAccessIssue]
    ended.close()
    others[0].join(HANGS_AFTER)
    assert seen == [1, 1]
