"""The engine: a step loop in a thread that serves requests from any thread or task."""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import gc
import sys
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree
from rich.console import Console
from rich.progress import track

from detjax.engine.config import EngineConfig, EngineStats
from detjax.engine.drafts.loading import load_guesser
from detjax.engine.engine_thread import EngineClosed, EngineThread, Part
from detjax.engine.job import ABORT, Job
from detjax.engine.program import StepProgram
from detjax.engine.program_compiler import Compilers, ProgramCompiler
from detjax.engine.request import Aborted, Generation, Request, Token
from detjax.engine.watchdog import StepTimeout
from detjax.models import Adapter, Decoder, Tokenizer, sharded
from detjax.models.adapters.adapter_set import without_adapters

_POLL_SECONDS: Final = 0.01
"""Seconds between looks at whether the requests with an adapter have ended."""
_SWITCH_INTERVAL: Final = 0.0005
"""Python's switch interval after a warm-up, in seconds. Threads that launch steps need the GIL for moments; with the
default of 5 ms they would wait as long as a step takes."""
_OBJECTS: Final = 20_000
"""New objects after which Python searches for cycles after a warm-up: more than a step of 1000 samples makes.

Nearly all of them are freed when the next step's replace them. With Python's default, 1000 requests for 100 tokens each
took 580 searches, which lasted half a second on a CPU host; with 20,000 they take fewer than 10.
"""
REMEMBERED: Final = 1 << 16
"""Maximum number of ids of aborted requests that are remembered for requests that arrive later."""


class Engine(EngineThread):
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
            config: the engine's settings. With `max_loras`, requests may name the adapters that `load` or
                `load_adapter` was given.
            mesh: devices that share the model, with the axes "tensor", "expert" or both; see `detjax.models.sharded`.
                No bit depends on it. Default: the model's mesh.
            options: fields of `EngineConfig` that override `config`.

        Raises:
            TypeError: an option is not a field of `EngineConfig`.
            ValueError: a setting is out of range, see `EngineConfig.resolved`; the mesh has another axis; or the model
                is already sharded.
        """
        model = model if mesh is None else sharded(model, mesh)
        given = dataclasses.replace(config or EngineConfig(), **options)
        resolved, guesser = given.resolved(model), None
        if given.speculative is not None:  # its pages and weights leave less memory
            guesser = load_guesser(given.speculative, model, tokenizer)
            resolved = given.resolved(model, guesser)
        adapters = {} if model.adapters is None or not resolved.max_loras else model.adapters.by_name
        super().__init__(without_adapters(model), tokenizer, resolved, adapters, guesser)
        self._is_frozen = False
        atexit.register(self.close)  # exiting while the device computes may crash

    def warm_up(
        self,
        *,
        progress: bool = False,
        cache: Path | None = None,
        in_background: bool = False,
        compilers: Compilers | None = None,
    ) -> None:
        """Compiles all programs that steps may need. The engine must be idle.

        Afterwards Python's garbage collector ignores the existing objects (`gc.freeze`): tracing leaves many, and
        scanning them would delay steps. For the same reason it searches for cycles only after 20,000 new objects
        (`gc.set_threshold`), not after 700. The switch interval of this process is set to 0.5 ms
        (`sys.setswitchinterval`), because the engine's threads wait for each other.

        Args:
            progress: show a progress bar on stderr.
            cache: a directory of compiled programs. Programs found there are not compiled again, and new ones are
                added. Anyone who can write to it can run code in this process.
            in_background: return as soon as the engine can serve any request. Other processes then compile the
                programs that only make some steps faster; no request waits for them. On a CPU everything is compiled
                before the return.
            compilers: processes that were started before the model was loaded. Default: processes start now.

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
                cache,
                compilers=compilers,
                in_background=in_background,
                track=lambda programs, count: bar(programs, total=count),
            )
            self._loop.warm_up(compiler)
            gc.collect()
            gc.freeze()
            self._is_frozen = True
            first, *others = gc.get_threshold()
            if 0 < first < _OBJECTS:
                gc.set_threshold(_OBJECTS, *others)
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
                if isinstance(token, Token):
                    yield token

    async def stream_all(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token | Aborted]]:
        """Yields the tokens of several requests as they arrive, each with the index of its request; see `stream`.

        A sample that `abort` ends has an `Aborted` instead of its last token.
        """
        async with contextlib.aclosing(self.stream_events(requests)) as events:
            async for number, event in events:
                if not isinstance(event, Generation):
                    yield number, event

    async def stream_events(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[tuple[int, Token | Aborted | Generation]]:
        """Yields what `stream_all` does, and at the end of each request its generation."""
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
                generation = jobs[number].future.result()
                for sample in jobs[number].samples:
                    if sample.finish_reason == ABORT:
                        yield number, Aborted(sample.index, sample.held_back())
                yield number, generation
                unanswered -= 1

    @contextlib.contextmanager
    def _started(
        self, requests: Iterable[Request], on_token: Callable[[int, Token], None] | None = None
    ) -> Iterator[list[Job]]:
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

    def _job(self, name: str, request: Request, on_token: Callable[[Token], None] | None = None) -> Job:
        return Job(self.samples_of(name, request, is_streamed=on_token is not None), on_token, request.id)

    def _start(self, jobs: list[Job]) -> None:
        def submit() -> None:
            self._admit([job for job in jobs if not job.future.cancelled()])

        def settle(submitted: Future[Any]) -> None:
            if (error := submitted.exception()) is not None:  # the engine ended before it took the requests
                for job in jobs:
                    job.settle(error)

        self._call(submit).add_done_callback(settle)
        for job in jobs:
            job.future.add_done_callback(functools.partial(self._cancel, job))

    def _cancel(self, job: Job, future: "Future[Generation]") -> None:
        if future.cancelled():
            with contextlib.suppress(EngineClosed):
                self._call(functools.partial(self._remove, job))

    # --- pauses, aborts and sleep -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stops computing until `resume`. Requests in flight keep their pages, and later ones wait."""
        self._refuse_in_lockstep("pause")
        self._call(functools.partial(setattr, self, "_is_paused", True)).result()

    def resume(self) -> None:
        """Ends a `pause`."""
        self._refuse_in_lockstep("resume")
        self._call(functools.partial(setattr, self, "_is_paused", False)).result()

    def abort(self, ids: Collection[str]) -> int:
        """Ends the requests with these ids, and returns their number.

        Their answers have the tokens so far, and the finish reason "abort" for samples that had not ended. A request
        that arrives later with one of these ids ends at once: it may have been on its way.
        """
        self._refuse_in_lockstep("abort")
        wanted = frozenset(ids)

        def abort() -> int:
            jobs = [job for job in dict.fromkeys([*self._jobs.values(), *self._held]) if job.id in wanted]
            for job in jobs:
                self._abort(job)
            self._aborted |= dict.fromkeys(wanted)
            while len(self._aborted) > REMEMBERED:
                self._aborted.popitem(last=False)
            return len(jobs)

        return self._call(abort).result()

    def sleep(self, *, keeps_weights: bool = True) -> None:
        """Releases the devices' memory until `wake_up`, except for compiled programs.

        The cache is dropped. Requests in flight wait, and are then computed again from their tokens, with the same
        bits. Memory is free if nothing else refers to the weights: the caller must not keep the model.

        Args:
            keeps_weights: copy the weights to the host. Otherwise they are lost, and all of them must be replaced after
                `wake_up`.

        Raises:
            RuntimeError: the engine is asleep.
        """
        self._refuse_in_lockstep("sleep")

        def sleep() -> None:
            if self._asleep:
                raise RuntimeError("Engine.sleep: it is asleep; accepted: an engine that is awake. Call wake_up first.")
            self._busy_since = None  # copying takes long, so it does not count as a step that is stuck
            self._deliver(self._loop.drain())
            self._asleep = set(get_args(Part))
            self._loop.sleep(keeps_weights=keeps_weights)

        self._call(sleep).result()

    def wake_up(self, parts: Collection[Part] = get_args(Part)) -> None:
        """Takes parts of the devices' memory again. The engine computes when it has all of them, and its weights."""
        if unknown := set(parts) - set(get_args(Part)):
            raise ValueError(f"Engine.wake_up: {', '.join(map(repr, sorted(unknown)))}; accepted: {get_args(Part)}")

        def wake_up() -> None:
            self._busy_since = None
            with self._fatal_errors():
                woken: set[Part] = self._asleep.intersection(parts)
                for part in woken:
                    self._loop.wake_weights() if part == "weights" else self._loop.wake_state()
                    self._asleep.remove(part)
            self._admit_held()

        self._call(wake_up).result()

    # --- weights, and the end -----------------------------------------------------------------------------------------

    def weight(self, number: int) -> np.ndarray | None:
        """Returns a whole weight on the host, by its number in the model's `Network.paths`; None: it was dropped."""
        return self._call(functools.partial(self._loop.weight, number)).result()

    def replace_weights(self, new: Mapping[int, np.ndarray]) -> None:
        """Replaces some weights, by their numbers in the model's `Network.paths`, and clears the prefix cache.

        The devices hold the old or the new version of a weight, never both. If a device fails, the engine ends.

        Raises:
            RuntimeError: requests are in flight, or the weights are asleep.
        """
        self._refuse_listeners()

        def replace() -> None:
            self._check_idle("replace_weights")
            self._check_weights_are_awake("replace_weights")
            self._busy_since = None
            with self._fatal_errors():
                self._loop.replace_weights(new)
            self._admit_held()

        self._call(replace).result()

    def update_weights(self, params: PyTree[Array]) -> None:
        """Replaces the weights, for example during training, and clears the prefix cache.

        Args:
            params: the result of `nnx.split(model)[1]` or `nnx.state(model)`, with the same shapes and dtypes.

        Raises:
            RuntimeError: requests are in flight: it would be unclear which weights answered them. Or the weights are
                asleep.
            ValueError: the weights do not fit the model.
        """
        self._refuse_listeners()

        def update() -> None:
            self._check_idle("update_weights")
            self._check_weights_are_awake("update_weights")
            self._loop.update_weights(params)
            self._admit_held()

        self._call(update).result()

    def load_adapter(self, name: str, adapter: Adapter, *, replaces: bool = False) -> None:
        """Makes requests with this adapter name compute with an adapter. No program is compiled.

        Requests that were submitted before keep the adapter that had the name then. The prefix cache knows adapters by
        their contents, so nothing has to be cleared.

        Args:
            name: the name.
            adapter: from `detjax.models.read_adapter`, or a trainer's.
            replaces: whether another adapter may have the name.

        Raises:
            CheckpointError: the adapter does not fit the model or the engine's `max_lora_rank`.
            ValueError: the name is taken, or the engine's `max_loras` is 0.
        """
        self._loop.check_adapter(adapter)
        if name in self._adapters and not replaces:
            raise ValueError(f"Engine.load_adapter: {name!r} is loaded already; accepted: another name, or replaces")
        self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Refuses new requests with this adapter name, and returns when the last request with it has ended.

        Raises:
            KeyError: no adapter has the name.
        """
        self._refuse_listeners()
        if name not in self._adapters:
            raise KeyError(f"Engine.unload_adapter: {name!r} is not loaded")
        adapter = self._adapters.pop(name)

        def running() -> bool:
            samples = [*self._jobs, *(sample for job in self._held for sample in job.samples)]
            return any(sample.context.adapter is adapter for sample in samples)

        while self.is_open and self._call(running).result():
            time.sleep(_POLL_SECONDS)

    def forget_prefixes(self) -> None:
        """Clears the prefix cache. No bit depends on it.

        Raises:
            EngineClosed: the engine was closed, or it failed.
        """
        self._refuse_listeners()
        self._call(self._loop.scheduler.pool.forget_prefixes).result()

    def close(self) -> None:
        """Ends the engine. Requests in flight fail with `EngineClosed`.

        Python's garbage collector no longer ignores the objects that existed after `warm_up`.
        """
        atexit.unregister(self.close)
        self._inbox.put(None)
        # A thread that waits for lost devices never ends.
        if threading.current_thread() is not self._thread and not isinstance(self.failure, StepTimeout):
            self._thread.join()
        if self._is_frozen:
            gc.unfreeze()  # so that the memory of this engine, which is part of cycles, can be freed

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
        drafting = self._loop.drafting
        accepted_at = () if drafting is None else tuple(drafting.accepted_at)
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            num_pages=scheduler.pool.num_pages,
            pages_in_use=scheduler.pool.in_use,
            preemptions=scheduler.preemptions,
            snapshots=count,
            snapshot_bytes=0 if snapshots is None else count * snapshots.bytes_of_snapshot,
            snapshot_hits=0 if snapshots is None else snapshots.hits,
            drafts_proposed=0 if drafting is None else drafting.proposed,
            drafts_accepted=sum(accepted_at),
            drafts_accepted_at=accepted_at,
        )
