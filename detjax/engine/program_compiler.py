"""Compiles the programs of a step loop in parallel: in separate processes if tracing is slow, otherwise in threads."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import jax

from detjax.engine.compiler_process import CompilerFailed, CompilerProcess, Task
from detjax.engine.program import Programs
from detjax.engine.program_cache import ProgramCache, has_programs
from detjax.models.mesh import spans_processes
from detjax.runtime import compilation, fingerprints
from detjax.runtime.device_memory import MAX_COMPILERS

_log: Final = logging.getLogger(__name__)

type Program = Callable[..., Any]


class Compilers:
    """Processes that compile programs, started before a model is loaded, so that they are ready for `Engine.warm_up`.

    A process needs seconds until it can compile, while one thread reads and copies most of the weights. Processes that
    are not needed end. On a CPU no process starts.

    Example:
        >>> import detjax.demo, detjax.engine
        >>> with detjax.engine.Compilers() as compilers:
        ...     model, tokenizer = detjax.models.load(detjax.demo.CHECKPOINT, progress=False)
        ...     with detjax.Engine(model, tokenizer, max_samples=1, token_budget=16, max_length=32) as engine:
        ...         engine.warm_up(compilers=compilers)
    """

    def __init__(self, cache: Path | None = None, *, processes: int | None = None) -> None:
        """Starts the processes.

        Args:
            cache: the directory of compiled programs that `warm_up` will have. If it has any, no process starts: most
                likely none is needed.
            processes: number of processes. Default: as many as `warm_up` would start.
        """
        if cache is not None and has_programs(cache):
            processes = 0
        count = default_processes() if processes is None else processes
        self._waiting = [CompilerProcess() for _ in range(count)]

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, task: Task) -> CompilerProcess:
        """Returns a process that compiles a task's programs: one that has waited, or else a new one."""
        while self._waiting:
            process = self._waiting.pop()
            if process.is_usable:
                process.begin(task)
                return process
            process.close()
        return CompilerProcess(task)

    def close(self) -> None:
        """Ends the processes that nobody has taken."""
        for process in self._waiting:
            process.kill()
        while self._waiting:
            self._waiting.pop().close()


def default_processes() -> int:
    """Returns the number of processes that compile programs by default.

    On a GPU one per processor, at most `MAX_COMPILERS`, because tracing kernels takes most of the time there and the
    GIL would serialize threads; elsewhere 0.
    """
    return _most_compilers() if jax.default_backend() == "gpu" else 0


def _most_compilers() -> int:
    return min(MAX_COMPILERS, os.cpu_count() or 1)


class ProgramCompiler:
    """Compiles all programs of a step loop or of a drafter, or loads them from a cache."""

    def __init__(
        self,
        cache: Path | None = None,
        *,
        compilers: Compilers | None = None,
        processes: int | None = None,
        in_background: bool = False,
        track: Callable[[Iterable[Any], int], Iterable[Any]] = lambda programs, _: programs,
    ) -> None:
        """A compiler.

        Args:
            cache: a directory of compiled programs. Programs found there are not compiled again, and new ones are
                added. Anyone who can write to it can run code in this process.
            compilers: processes that have been started before; those that are left over end.
            processes: number of processes that trace and compile; 0: threads of this process. On a GPU each process
                has its own context of about 0.5 GB. Default: `default_processes`.
            in_background: return when the essential programs are ready, and let the processes compile the others.
                Threads would delay steps, so without processes nothing is deferred.
            track: wraps the iterable of programs that are compiled before the return, as they finish; its second
                argument is their number.
        """
        self._threads = _most_compilers()
        self._processes = default_processes() if processes is None else processes
        self._compilers = Compilers(processes=0) if compilers is None else compilers
        self._cache, self._track = cache, track
        self._in_background = in_background and self._processes > 0

    def start(self, programs: Programs, add: Callable[[Hashable, Program], None]) -> "Compilation":
        """Compiles all programs, or the essential ones if `in_background`.

        Args:
            programs: the programs.
            add: called with the key and the compiled program; for deferred programs in another thread.

        Raises:
            OSError: the cache's directory cannot be made or written to, or it is not private.
        """
        cache = None if self._cache is None else ProgramCache(self._cache, programs)
        started = Compilation(programs, cache, add, max(self._threads, self._processes))
        try:
            started.load()
            # Another process cannot use the devices of a `jax.distributed` process.
            processes = 0 if spans_processes(programs.mesh) else self._processes
            first = started.compile(processes, self._compilers, in_background=self._in_background and processes > 0)
            self._compilers.close()
            for future in self._track(as_completed(first), len(first)):
                future.result()
        except BaseException:
            started.close()
            raise
        return started


class Compilation:
    """A running compilation of a step loop's programs.

    No bit depends on where a program is compiled. A process that fails, for example because the device is out of
    memory, is not used again. This process then compiles its essential programs; deferred ones stay pending.

    Attributes:
        pending: keys of the programs that are not ready. A program with an `until` may stay one of them.
    """

    def __init__(
        self,
        programs: Programs,
        cache: ProgramCache | None,
        add: Callable[[Hashable, Program], None],
        threads: int,
    ) -> None:
        """A compilation that has not started; arguments as in `ProgramCompiler.start`."""
        self._programs, self._by_key, self._cache, self._add = programs, programs.by_key(), cache, add
        self.pending = set(self._by_key)
        self._choices = compilation.ExecutionChoices.here()
        # In the mesh's order, because a program takes its first shard from the first device.
        self._devices = None if programs.mesh is None else list(programs.mesh.devices.flat)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="detjax-compiler")
        self._processes: list[CompilerProcess] = []
        self._idle: queue.SimpleQueue[CompilerProcess | None] = queue.SimpleQueue()
        """Processes that wait for a program, and None for each one that failed."""
        self._deferred: set[Hashable] = set()
        """Keys of programs that are compiled in the background, or not at all."""
        self._unfinished, self._lock = 0, threading.Lock()
        self._is_closed = False

    def load(self) -> None:
        """Adds the programs that are in the cache."""
        if self._cache is not None:
            for future in [self._pool.submit(self._load, key) for key in self._by_key]:
                future.result()

    def compile(self, processes: int, compilers: Compilers, *, in_background: bool) -> list[Future[None]]:
        """Starts compiling the missing programs. Returns futures of those that steps have to wait for."""
        missing = [key for key in self._by_key if key in self.pending]
        self._deferred = {key for key in missing if in_background and not self._by_key[key].is_essential}
        # A program that only bridges the time until another is compiled has no use if steps have to wait for that one.
        useful = {None, *self._deferred}
        missing = [key for key in missing if self._by_key[key].until in useful]
        if processes and missing:
            task = Task(self._programs, self._choices, fingerprints.fingerprint().digest)
            for _ in range(min(processes, len(missing))):
                self._processes.append(compilers.take(task))
                self._idle.put(self._processes[-1])
        futures = {key: self._pool.submit(self._compile, key) for key in missing}
        self._unfinished = len(futures)
        for future in futures.values():
            future.add_done_callback(self._count_finished)
        self._pool.shutdown(wait=False)  # its threads finish their work first
        return [future for key, future in futures.items() if key not in self._deferred]

    def wait(self) -> None:
        """Waits until all programs are compiled."""
        self._pool.shutdown(wait=True)

    def close(self) -> None:
        """Ends the processes. Pending programs stay pending."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end_processes()
        self._pool.shutdown(wait=True)

    def _end_processes(self) -> None:
        for process in self._processes:
            process.kill()
        # The last program may finish while the engine ends: a process is closed by one thread at a time.
        with self._lock:
            for process in self._processes:
                process.close()

    def _count_finished(self, _: Future[None]) -> None:
        with self._lock:
            self._unfinished -= 1
            is_last = not self._unfinished
        if is_last and not self._is_closed:
            self._end_processes()
            if self._cache is not None:
                self._cache.report_failures()
            _log.info("%d programs were compiled", len(self._by_key) - len(self.pending))

    def _finish(self, key: Hashable, program: Program) -> None:
        self._add(key, program)
        self.pending.discard(key)

    def _load(self, key: Hashable) -> None:
        assert self._cache is not None
        content = self._cache.load(key)
        if content is None:
            return
        try:
            program = compilation.loaded(content, self._devices)
        except Exception as error:  # JAX has no exception of its own for this
            _log.warning("a compiled program in the cache cannot be loaded, and is compiled again: %s", error)
            self._cache.remove(key)
        else:
            self._finish(key, program)

    def _compile(self, key: Hashable) -> None:
        program, content = self._by_key[key], self._compiled_elsewhere(key)
        if self._is_closed:
            return
        if content is not None:
            compiled = compilation.loaded(content, self._devices)
        elif key in self._deferred:
            return
        else:
            with self._choices.apply():  # choices are per thread
                compiled = program.compiled(self._programs.network, self._programs.parameters)
        self._keep(key, compiled, content)
        self._finish(key, compiled)

    def _keep(self, key: Hashable, compiled: Program, content: bytes | None) -> None:
        """Adds a program to the cache; `content` is its serialized form if there is one already."""
        if self._cache is None:
            return
        if content is None:
            try:
                content = compilation.serialized(compiled)
            except compilation.NotSerializable as error:
                _log.info("a compiled program cannot be kept, and is compiled again at the next start: %s", error)
                return
        self._cache.store(key, content)

    def _compiled_elsewhere(self, key: Hashable) -> bytes | None:
        """Returns a program compiled by a process, in the form of `compilation.serialized`; None if none could."""
        if not self._processes:
            return None
        process = self._idle.get()
        try:
            return None if process is None else process.compiled(key)
        except CompilerFailed as error:
            if not self._is_closed:
                _log.warning("a process that compiles programs has failed: %s", error)
            process = None
            return None
        finally:
            self._idle.put(process)
