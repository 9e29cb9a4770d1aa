"""The engine: a step loop in a thread that serves requests from any thread or task."""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import gc
import logging
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import jax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree
from rich.console import Console
from rich.progress import track

from detjax.engine import sequence as sequences
from detjax.engine.config import EngineConfig, EngineStats
from detjax.engine.launcher import LauncherThread
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.request import Generation, Request, Token
from detjax.engine.request_reader import RequestReader
from detjax.engine.step_loop import StepLoop
from detjax.engine.step_programs import StepProgram
from detjax.engine.watchdog import StepTimeout, Watchdog
from detjax.models import Decoder, Tokenizer, sharded
from detjax.models.mesh import spans_processes
from detjax.runtime.compilation import ExecutionChoices

_log: Final = logging.getLogger("detjax.engine")
_SWITCH_INTERVAL: Final = 0.0005
"""Python's switch interval after a warm-up, in seconds. Threads that launch steps need the GIL for moments; with the
default of 5 ms they would wait as long as a step takes."""


class EngineClosed(RuntimeError):
    """The engine was closed, or it failed, before the request was answered.

    The message is safe to show to clients. The cause of a failure is in `__cause__` and in the log.
    """


class _Job:
    """A request in flight."""

    def __init__(self, samples: list[sequences.Sequence], on_token: Callable[[Token], None] | None) -> None:
        self.samples = samples
        self.future: Future[Generation] = Future()
        self._on_token = on_token
        self._unfinished = sum(sample.finish_reason is None for sample in samples)

    def deliver(self, token: Token) -> None:
        """Passes a token to the listener. The last token of the request settles its future.

        Raises:
            BaseException: the sample or the listener has failed, and the request with it.
        """
        failure = self.samples[token.sample].failure
        # All tokens of a run are read before the first is delivered; a failure belongs to the last one.
        if failure is not None and token.finish_reason is not None:
            raise failure
        if self._on_token is not None:
            self._on_token(token)
        self._unfinished -= token.finish_reason is not None
        self.settle_if_done()

    def settle_if_done(self) -> None:
        """Sets the future's result if every sample has ended."""
        if not self._unfinished:
            first = self.samples[0]
            completions = tuple(sample.completion() for sample in self.samples)
            self.settle(Generation(first.prompt, completions, first.scored_prompt(), first.cached_tokens))

    def settle(self, outcome: Generation | BaseException) -> None:
        """Sets the future's result or exception, unless the request was cancelled."""
        if self.future.set_running_or_notify_cancel():
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


class Engine(RequestReader):
    """Serves any number of concurrent requests in its own thread, until it is closed.

    No bit of a request's tokens and logprobs depends on other requests, on the order of arrival, on how requests are
    divided into steps, on the prefix cache, or on preemption.

    A failure of one request, such as an exception of its listener, ends only that request. Any other exception in the
    engine's thread ends the engine: it is logged with its traceback (logger "detjax.engine"), requests in flight and
    later ones get `EngineClosed`, `failure` is the exception, and `closed` ends with it. The same happens if the
    devices do not finish a step within `EngineConfig.step_seconds`; `failure` is then a `StepTimeout`.

    If devices of several processes share the model, each process has an engine, and all of them must get the same
    calls in the same order, from one thread, because their devices compute every step together. Such an engine starts
    a call when all earlier calls are answered, so no step depends on the timing of calls.

    Attributes:
        closed: a future that ends with the engine. Its result is None after `close`; its exception is the engine's
            failure. Callbacks run in a thread of the engine's, after all requests in flight have ended. It cannot be
            cancelled.

    Example:
        >>> import detjax, detjax.demo
        >>> model, tokenizer = detjax.models.load(detjax.demo.CHECKPOINT, progress=False)
        >>> params = detjax.SamplingParams(max_tokens=4, temperature=0.8, seed=7)
        >>> with detjax.Engine(model, tokenizer, max_samples=4, token_budget=64, max_length=64) as engine:
        ...     one, two = engine.generate([detjax.Request(name, params) for name in ("ROMEO:", "JULIET:")])
        ...     future = engine.submit(detjax.Request("ROMEO:", params))
        ...     future.result() == one
        True
        >>> (one,) == tuple(detjax.generate(model, ["ROMEO:"], params, tokenizer=tokenizer))
        True
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> None:
        """Starts an engine.

        `warm_up` compiles its programs in advance; otherwise the first requests wait for compilation.

        Args:
            model: the decoder.
            tokenizer: needed for texts and stop strings.
            config: the engine's settings.
            mesh: devices that share the model, with the axes "tensor", "expert" or both; see `detjax.models.sharded`.
                No bit depends on it. Default: the model's mesh.
            options: fields of `EngineConfig` that override `config`.

        Raises:
            TypeError: an option is not a field of `EngineConfig`.
            ValueError: a setting is out of range, see `EngineConfig.resolved`; the mesh has another axis; or the model
                is already sharded.
        """
        model = model if mesh is None else sharded(model, mesh)
        resolved = dataclasses.replace(config or EngineConfig(), **options).resolved(model)
        super().__init__(model, tokenizer, resolved)
        self._in_lockstep = spans_processes(model.mesh)
        self._loop = StepLoop.for_model(model, self._config.step_loop(), LauncherThread())

        # Only the engine's thread uses the fields below; other threads send it functions through the inbox.
        self._jobs: dict[sequences.Sequence, _Job] = {}
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._end_reason: EngineClosed | None = None
        self._busy_since: float | None = None
        self._open = threading.Lock()
        self.closed: Future[None] = Future()
        self.closed.set_running_or_notify_cancel()
        self._choices = ExecutionChoices.here()
        assert resolved.step_seconds is not None
        devices = ", ".join(map(str, jax.local_devices() if model.mesh is None else model.mesh.devices.flat))
        self._watchdog = Watchdog(resolved.step_seconds, lambda: self._loop.reading_since, devices, self._end)
        self._thread = threading.Thread(target=self._work, name="detjax-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # exiting while the device computes may crash

    def warm_up(self, *, progress: bool = False, cache: Path | None = None, in_background: bool = False) -> None:
        """Compiles all programs that steps may need. The engine must be idle.

        Afterwards Python's garbage collector ignores the existing objects (`gc.freeze`): tracing leaves many, and
        scanning them would delay steps. The switch interval of this process is set to 0.5 ms
        (`sys.setswitchinterval`), because the engine's threads wait for each other.

        Args:
            progress: show a progress bar on stderr.
            cache: a directory of compiled programs. Programs found there are not compiled again, and new ones are
                added. Anyone who can write to it can run code in this process.
            in_background: return as soon as the engine can serve any request. Other processes then compile the
                programs that only make some steps faster; no request waits for them. On a CPU everything is compiled
                before the return.

        Raises:
            OSError: the directory cannot be made or written to.
            RuntimeError: the engine is busy.
        """
        self._refuse_listeners()

        def compile_all() -> None:
            self._check_idle("warm_up")
            console = Console(stderr=True)
            bar = functools.partial(track, description="compiling", console=console, disable=not progress)
            compiler = ProgramCompiler(
                cache, in_background=in_background, track=lambda programs, count: bar(programs, total=count)
            )
            self._loop.warm_up(compiler)
            gc.collect()
            gc.freeze()
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))

        self._call(compile_all).result()

    def wait_for_programs(self) -> None:
        """Waits until all programs are compiled, including those compiled in the background."""
        self._loop.wait_for_programs()

    def programs(self) -> list[StepProgram]:
        """Returns all programs that steps may need, the essential ones first."""
        return list(self._loop.programs().by_key().values())

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> list[Generation]:
        """Returns a generation per request, in their order, with the bits of each request on its own.

        Raises:
            ValueError: a request cannot be served. Then no request is started.
            EngineClosed: the engine was closed meanwhile, or it failed.
        """
        self._refuse_listeners()
        with self._started(requests) as jobs:
            return [job.future.result() for job in jobs]

    async def generate_async(self, requests: Iterable[Request]) -> list[Generation]:
        """Asynchronous version of `generate`, with the same errors. Cancelling the task cancels its requests."""
        with self._started(requests) as jobs:
            return [await asyncio.wrap_future(job.future) for job in jobs]

    def submit(self, request: Request, on_token: Callable[[Token], None] | None = None) -> "Future[Generation]":
        """Returns a future of the request's generation without waiting. Cancelling the future cancels the request.

        Args:
            request: the request.
            on_token: called with each token in the engine's thread, which waits for it. An exception ends the request
                and becomes the future's exception.

        Raises:
            ValueError: the request cannot be served.
            EngineClosed: the engine was closed, or it failed. The future may also raise it.
        """
        job = self._job("the request", request, on_token)
        self._start([job])
        return job.future

    async def stream(self, request: Request) -> AsyncIterator[Token]:
        """Yields the tokens of a request's samples as they arrive. Leaving the loop cancels the request.

        Raises:
            ValueError: the request cannot be served.
            EngineClosed: the engine was closed meanwhile, or it failed.
        """
        async with contextlib.aclosing(self.stream_all([request])) as tokens:
            async for _, token in tokens:
                yield token

    async def stream_all(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token]]:
        """Yields the tokens of several requests as they arrive, each with the index of its request; see `stream`."""
        async with contextlib.aclosing(self.stream_events(requests)) as events:
            async for number, event in events:
                if isinstance(event, Token):
                    yield number, event

    async def stream_events(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token | Generation]]:
        """Yields the tokens of `stream_all`, and after the last token of each request its generation."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Token | None]] = asyncio.Queue()

        def notify(number: int, token: Token | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody listens
                loop.call_soon_threadsafe(events.put_nowait, (number, token))

        with self._started(requests, notify) as jobs:
            for number, job in enumerate(jobs):
                job.future.add_done_callback(functools.partial(lambda number, _: notify(number, None), number))
            unanswered = len(jobs)
            while unanswered:
                number, token = await events.get()
                if token is not None:
                    yield number, token
                    continue
                yield number, jobs[number].future.result()
                unanswered -= 1

    @contextlib.contextmanager
    def _started(
        self, requests: Iterable[Request], on_token: Callable[[int, Token], None] | None = None
    ) -> Iterator[list[_Job]]:
        """Starts the requests. Leaving the context cancels unfinished ones."""
        jobs = [
            self._job(f"request {number}", request, on_token and functools.partial(on_token, number))
            for number, request in enumerate(requests)
        ]
        self._start(jobs)
        try:
            yield jobs
        finally:
            for job in jobs:
                job.future.cancel()

    def _job(self, name: str, request: Request, on_token: Callable[[Token], None] | None = None) -> _Job:
        return _Job(self.samples_of(name, request, is_streamed=on_token is not None), on_token)

    def _start(self, jobs: list[_Job]) -> None:
        def submit() -> None:
            wanted = [job for job in jobs if not job.future.cancelled()]
            self._loop.compute_images(job.samples[0] for job in wanted)
            for job in wanted:
                self._submit(job)

        def settle(submitted: Future[Any]) -> None:
            if (error := submitted.exception()) is not None:  # the engine ended before it took the requests
                for job in jobs:
                    job.settle(error)

        self._call(submit).add_done_callback(settle)
        for job in jobs:
            job.future.add_done_callback(functools.partial(self._cancel, job))

    def _cancel(self, job: _Job, future: "Future[Generation]") -> None:
        if future.cancelled():
            with contextlib.suppress(EngineClosed):
                self._call(functools.partial(self._remove, job))

    # --- weights, and the end -----------------------------------------------------------------------------------------

    def update_weights(self, params: PyTree[Array]) -> None:
        """Replaces the weights, for example during training, and clears the prefix cache.

        Args:
            params: the result of `nnx.split(model)[1]` or `nnx.state(model)`, with the same shapes and dtypes.

        Raises:
            RuntimeError: requests are in flight: it would be unclear which weights answered them.
            ValueError: the weights do not fit the model.
        """
        self._refuse_listeners()

        def update() -> None:
            self._check_idle("update_weights")
            self._loop.update_weights(params)

        self._call(update).result()

    def forget_prefixes(self) -> None:
        """Clears the prefix cache. No bit depends on it.

        Raises:
            EngineClosed: the engine was closed, or it failed.
        """
        self._refuse_listeners()
        self._call(self._loop.scheduler.pool.forget_prefixes).result()

    def close(self) -> None:
        """Ends the engine. Requests in flight fail with `EngineClosed`."""
        atexit.unregister(self.close)
        self._inbox.put(None)
        # A thread that waits for lost devices never ends.
        if threading.current_thread() is not self._thread and not isinstance(self.failure, StepTimeout):
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """True if the engine accepts requests: it was not closed and has not failed."""
        return self._end_reason is None

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine; None while it is open, and after it was closed."""
        return None if self._end_reason is None else self._end_reason.__cause__

    @property
    def busy_seconds(self) -> float:
        """Seconds that the thread has spent on its current work, such as a step; 0 while it waits for requests.

        If it keeps growing, the engine is stuck. A `warm_up` takes long, too.
        """
        since = self._busy_since
        return 0.0 if since is None or not self.is_open else time.monotonic() - since

    def stats(self) -> EngineStats:
        """Returns the engine's current load. It may be called from any thread at any time."""
        scheduler = self._loop.scheduler
        snapshots = scheduler.pool.snapshots
        count = 0 if snapshots is None else len(snapshots)
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            num_pages=scheduler.pool.num_pages,
            pages_in_use=scheduler.pool.in_use,
            preemptions=scheduler.preemptions,
            snapshots=count,
            snapshot_bytes=0 if snapshots is None else count * snapshots.bytes_of_snapshot,
            snapshot_hits=0 if snapshots is None else snapshots.hits,
        )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _call(self, fn: Callable[[], Any]) -> "Future[Any]":
        """Makes the engine's thread call `fn` between two steps, and returns a future of its result."""
        future: Future[Any] = Future()
        with self._open:
            if self._end_reason is not None:
                raise EngineClosed(*self._end_reason.args) from self._end_reason.__cause__
            self._inbox.put((fn, future))
        return future

    def _refuse_listeners(self) -> None:
        """Raises if the caller runs in the engine's thread, because it would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "Engine: a listener waits for the engine, which waits for the listener; accepted in on_token: submit"
            )

    def _check_idle(self, name: str) -> None:
        if self._jobs:
            raise RuntimeError(
                f"Engine.{name}: {len(self._jobs)} samples are in flight; accepted: none. Wait for them, or cancel "
                "them."
            )
        while not self._loop.is_idle:  # a step started before a sample ended may still be in flight
            self._loop.step()

    def _work(self) -> None:
        try:
            with self._choices.apply():  # choices are per thread
                while self._empty_inbox():
                    self._busy_since = time.monotonic()
                    tokens = self._loop.step()
                    if self._end_reason is not None:  # the watchdog has given up this thread
                        return
                    for sample, token in tokens:
                        job = self._jobs.get(sample)
                        if token.finish_reason is not None:
                            self._jobs.pop(sample, None)
                        if job is not None:
                            try:
                                job.deliver(token)
                            except BaseException as error:  # of the sample or of the request's listener
                                self._fail(job, error)
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _submit(self, job: _Job) -> None:
        try:
            for sample in job.samples:
                if sample.finish_reason is None:
                    self._loop.submit(sample)
                    self._jobs[sample] = job
            job.settle_if_done()
        except BaseException as error:
            self._fail(job, error)

    def _fail(self, job: _Job, error: BaseException) -> None:
        """Ends one request with an exception."""
        self._remove(job)
        job.settle(error)

    def _remove(self, job: _Job) -> None:
        for sample in job.samples:
            if self._jobs.pop(sample, None) is not None:
                self._loop.scheduler.cancel(sample)

    def _empty_inbox(self) -> bool:
        """Calls all functions in the inbox, and waits for one if the loop is idle. Returns False at the end."""
        while not self._in_lockstep or self._loop.is_idle:
            if self._loop.is_idle:
                self._busy_since = None
            try:
                item = self._inbox.get(block=self._loop.is_idle)
            except queue.Empty:
                return True
            self._busy_since = time.monotonic()
            if item is None:
                return False
            _run(*item)
        return True

    def _end(self, failure: BaseException | None) -> None:
        """Ends the engine, unless it has ended. The watchdog calls it while the engine's thread waits for devices."""
        state = "it was closed" if failure is None else "it has failed; its log says why"
        with self._open:
            if self._end_reason is not None:
                return
            self._end_reason = EngineClosed(f"Engine: {state}")
            self._end_reason.__cause__ = failure
        self._watchdog.stop()
        if isinstance(failure, StepTimeout):
            _log.critical("the engine failed; %d samples were in flight: %s", len(self._jobs), failure)
        else:
            if failure is not None:
                _log.critical("the engine failed; %d samples were in flight", len(self._jobs), exc_info=failure)
            self._loop.close()  # waits for the devices, so not if they are lost
        for job in dict.fromkeys(self._jobs.values()):
            job.settle(self._end_reason)
        self._jobs.clear()
        while not self._inbox.empty():
            if (item := self._inbox.get()) is not None:
                item[1].set_exception(self._end_reason)
        if failure is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(failure)


def _run(fn: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(fn())
    except BaseException as error:
        future.set_exception(error)
