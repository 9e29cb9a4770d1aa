"""The thread of an engine: it calls functions that other threads send, computes steps, and settles requests."""

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Final, Literal

import jax

from detjax.engine import sequence as sequences
from detjax.engine.config import EngineConfig
from detjax.engine.drafts.loading import Guesser
from detjax.engine.job import ABORT, Job
from detjax.engine.launcher import LauncherThread
from detjax.engine.request import Token
from detjax.engine.request_reader import RequestReader
from detjax.engine.step_loop import StepLoop
from detjax.engine.watchdog import StepTimeout, Watchdog
from detjax.models import Adapter, Decoder, Tokenizer
from detjax.models.mesh import spans_processes
from detjax.runtime.compilation import ExecutionChoices

_log: Final = logging.getLogger("detjax.engine")

Part = Literal["weights", "kv_cache"]
"""A part of the devices' memory that `Engine.sleep` releases."""


class EngineClosed(RuntimeError):
    """The engine was closed, or it failed, before the request was answered.

    The message is safe to show to clients. The cause of a failure is in `__cause__` and in the log.
    """


class EngineThread(RequestReader):
    """An engine's step loop in its own thread, the requests in flight, and the end of both.

    Attributes:
        closed: a future that ends with the engine. Its result is None after `close`; its exception is the engine's
            failure. Callbacks run in a thread of the engine's, after all requests in flight have ended. It cannot be
            cancelled.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        guesser: Guesser = None,
    ) -> None:
        """Starts the thread for an engine with resolved settings, and with adapters by name.

        `guesser` is the smaller model or head of `config.speculative`, if it names one.
        """
        super().__init__(model, tokenizer, config)
        self._in_lockstep = spans_processes(model.mesh)
        pools = model.config.pooling is not None
        sizes = config.pooling_loop() if pools else config.step_loop(decodes_guesses=not model.has_slots)
        sizes = dataclasses.replace(sizes, adapters=tuple(adapters.values()))
        self._loop = StepLoop.for_model(model, sizes, LauncherThread(), guesser)

        for adapter in adapters.values():
            self._loop.check_adapter(adapter)
        self._adapters |= adapters

        # Only the engine's thread uses the fields below; other threads send it functions through the inbox.
        self._jobs: dict[sequences.Sequence, Job] = {}
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._end_reason: EngineClosed | None = None
        self._is_paused = False
        self._asleep = set[Part]()
        self._held: dict[Job, None] = {}
        """Requests that wait for the engine to wake up."""
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._fatal: BaseException | None = None
        """An exception that leaves the devices in an undefined state."""
        self._busy_since: float | None = None
        self._open = threading.Lock()
        self.closed: Future[None] = Future()
        self.closed.set_running_or_notify_cancel()
        self._choices = ExecutionChoices.here()
        assert config.step_seconds is not None
        devices = ", ".join(map(str, jax.local_devices() if model.mesh is None else model.mesh.devices.flat))
        self._watchdog = Watchdog(config.step_seconds, lambda: self._loop.reading_since, devices, self._end)
        self._thread = threading.Thread(target=self._work, name="detjax-engine", daemon=True)
        self._thread.start()

    # --- calls from other threads -------------------------------------------------------------------------------------

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

    def _refuse_in_lockstep(self, name: str) -> None:
        """Raises if devices of several processes share the model: their engines could not stop at the same step."""
        self._refuse_listeners()
        if self._in_lockstep:
            raise RuntimeError(
                f"Engine.{name}: devices of several processes share the model; accepted: devices of one process"
            )

    def _check_weights_are_awake(self, name: str) -> None:
        if "weights" in self._asleep:
            raise RuntimeError(f"Engine.{name}: the weights are asleep. Wake them up with wake_up(['weights']) first.")

    def _check_idle(self, name: str) -> None:
        in_flight = len(self._jobs) + sum(len(job.samples) for job in self._held)
        if in_flight:
            raise RuntimeError(
                f"Engine.{name}: {in_flight} samples are in flight; accepted: none. Wait for them, or cancel them."
            )
        while not self._loop.is_idle:  # a step started before a sample ended may still be in flight
            self._loop.step()

    def _work(self) -> None:
        try:
            with self._choices.apply():  # choices are per thread
                while self._empty_inbox():
                    self._busy_since = time.monotonic()
                    tokens = self._loop.drain() if self._rests else self._loop.step()
                    if self._end_reason is not None:  # the watchdog has given up this thread
                        return
                    self._deliver(tokens)
                    self._loop.wait()
                    if self._end_reason is not None:
                        return
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    @property
    def _is_usable(self) -> bool:
        """True if the devices have everything that a step needs."""
        return not self._asleep and self._loop.has_weights

    @property
    def _rests(self) -> bool:
        """True if no step may be launched."""
        return self._is_paused or not self._is_usable

    @property
    def _has_nothing_to_do(self) -> bool:
        return not self._loop.has_unread if self._rests else self._loop.is_idle

    @contextlib.contextmanager
    def _fatal_errors(self) -> Iterator[None]:
        """Ends the engine after an error in the context, which leaves the devices in an undefined state."""
        try:
            yield
        except BaseException as error:
            self._fatal = error
            raise

    def _deliver(self, tokens: Iterable[tuple[sequences.Sequence, Token]]) -> None:
        for sample, token in tokens:
            job = self._jobs.get(sample)
            if token.finish_reason is not None:
                self._jobs.pop(sample, None)
            if job is not None:
                try:
                    job.deliver(token)
                except BaseException as error:  # of the sample or of the request's listener
                    self._fail(job, error)

    def _admit(self, jobs: Sequence[Job]) -> None:
        """Submits requests, or holds them while the engine cannot compute their images."""
        if not self._is_usable:
            self._held |= dict.fromkeys(jobs)
            return
        self._loop.compute_images(job.samples[0] for job in jobs)
        for job in jobs:
            self._submit(job)

    def _admit_held(self) -> None:
        held, self._held = list(self._held), {}
        self._admit(held)

    def _abort(self, job: Job) -> None:
        """Ends one request with the tokens that it has."""
        self._remove(job, ABORT)
        job.abort()

    def _submit(self, job: Job) -> None:
        if job.id in self._aborted:
            self._abort(job)
            return
        try:
            for sample in job.samples:
                if sample.finish_reason is None:
                    self._loop.submit(sample)
                    self._jobs[sample] = job
            job.settle_if_done()
        except BaseException as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Ends one request with an exception."""
        self._remove(job)
        job.settle(error)

    def _remove(self, job: Job, reason: str = "cancelled") -> None:
        self._held.pop(job, None)
        for sample in job.samples:
            if self._jobs.pop(sample, None) is not None:
                self._loop.scheduler.cancel(sample, reason)

    def _empty_inbox(self) -> bool:
        """Calls all functions in the inbox, and waits for one if there is nothing to do. Returns False at the end."""
        while not self._in_lockstep or self._loop.is_idle:
            is_waiting = self._has_nothing_to_do
            if is_waiting:
                self._busy_since = None
            try:
                item = self._inbox.get(block=is_waiting)
            except queue.Empty:
                return True
            self._busy_since = time.monotonic()
            if item is None:
                return False
            _run(*item)
            if self._fatal is not None:
                raise self._fatal
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
        for job in dict.fromkeys([*self._jobs.values(), *self._held]):
            job.settle(self._end_reason)
        self._jobs.clear()
        self._held.clear()
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
