"""Replicas in processes of this machine, each with devices of its own: `detjax serve --data-parallel N`.

A thread watches over each process. A process that ends, or gives no sign of life for too long, is lost: its requests go
on at another one, see `replicas`, and a new process takes its place.
"""

import asyncio
import contextlib
import ctypes
import functools
import itertools
import logging
import math
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

import jax
from starlette.applications import Starlette

from detjax.engine import EngineClosed, Request
from detjax.server.app import app_of
from detjax.server.http.settings import LogSettings, Settings
from detjax.server.replicas.choice import EXCESS, ReplicaChoice, first_pages
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions
from detjax.server.replicas.messages import Answer, Call, End, Failed, Outbox, Ready, Start
from detjax.server.replicated_engine import Batch, ReplicaLost, ReplicatedEngine

SILENCE: Final = 30.0
"""Seconds without a sign of life, or of the engine's thread in one step, after which a replica is taken to be stuck."""
_SILENCE_AT_START: Final = 300.0
"""Seconds without a sign of life of a replica that is not ready: reading a checkpoint may hold Python's interpreter."""
_SECONDS_TO_END: Final = 10
"""Seconds that a process has to end when it is told to, or is killed."""
_LONGEST_PAUSE: Final = 60
"""Seconds from one attempt to start a process to the next at most."""
_POLL: Final = 0.05
"""Seconds after which a call that waits for a replica looks for one again."""
_log: Final = logging.getLogger(__name__)


class ProcessReplicas:
    """Replicas in processes of this machine."""

    def __init__(
        self,
        options: ReplicaOptions,
        count: int,
        *,
        log: LogSettings | None = None,
        silence: float = SILENCE,
        excess: int = EXCESS,
    ) -> None:
        """Starts the processes, and returns when all of them take requests. The caller closes it.

        Args:
            options: what each replica computes with.
            count: the number of replicas.
            log: what they log on stderr.
            silence: seconds after which a replica that says nothing, or whose engine is at one step, is taken to be
                stuck.
            excess: samples by which the load of a replica may exceed the least one and yet be preferred for a prompt
                whose first pages it knows.

        Raises:
            ValueError: there are fewer devices, or an argument is out of range.
            ChildProcessError: a replica cannot start. The message says why.
        """
        if not (math.isfinite(silence) and silence > 0):
            raise ValueError(f"ProcessReplicas: silence is {silence} (--replica-seconds); accepted: more than 0")
        shares = device_shares(count, options.tensor_parallel * options.expert_parallel)
        start = Start(options, log or LogSettings(), silence)
        self._facts: ReplicaFacts | None = None
        self._changed = threading.Condition()
        self._choice = ReplicaChoice(count, excess)
        self._numbers = itertools.count()
        self._replicas = [
            _Replica(number, start, share, functools.partial(self._accept, number), self._changed)
            for number, share in enumerate(shares)
        ]
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._first_failure() or all(one.is_ready for one in self._replicas))
            if (failure := self._first_failure()) is not None:
                raise ChildProcessError(failure)
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> ReplicaFacts:
        """Facts about the replicas that the front needs."""
        assert self._facts is not None
        return self._facts

    @property
    def processes(self) -> list[int | None]:
        """The id of each replica's process; None while the process is being started again."""
        return [replica.process_id for replica in self._replicas]

    @property
    def failure(self) -> BaseException | None:
        """An error that says why no replica can start again; None while there is one, or one may come."""
        if all(replica.start_failure is not None for replica in self._replicas):
            return ChildProcessError(self._first_failure())
        return None

    def close(self) -> None:
        """Ends all processes. Calls that are not answered lose their replica."""
        for replica in self._replicas:
            replica.tell_to_end()
        for replica in self._replicas:
            replica.close()

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        """Yields what one of the replicas answers; see `Replicas.stream`.

        Raises:
            ReplicaLost: the replica is gone. Another call gets another one.
            EngineClosed: no replica can be started any more.
        """
        pages = first_pages(requests[0], self.facts.outline.config) if requests else []
        samples = sum(request.sampling.n for request in requests)
        while not (ready := [number for number, replica in enumerate(self._replicas) if replica.is_ready]):
            if self.failure is not None:
                raise EngineClosed("no replica of the engine can be started; the server's log says why")
            await asyncio.sleep(_POLL)
        chosen = self._choice.choose(ready, pages)
        self._choice.in_flight[chosen] += samples
        try:
            with self._replicas[chosen].called(Call(next(self._numbers), requests, is_whole)) as batches:
                while (batch := await batches.get()) is not None:
                    if isinstance(batch, ReplicaLost):
                        self._choice.forget(chosen)
                        raise batch
                    yield batch
        finally:
            self._choice.in_flight[chosen] -= samples

    def _accept(self, number: int, facts: ReplicaFacts) -> str | None:
        """Returns why a replica that has started is not used; None: it is."""
        with self._changed:
            self._facts = known = self._facts or facts
        if facts.fingerprint == known.fingerprint:
            return None
        return f"its fingerprint is {facts.fingerprint}, and that of the others is {known.fingerprint}"

    def _first_failure(self) -> str | None:
        failures = ((replica.number, replica.start_failure) for replica in self._replicas)
        return next((f"replica {number} cannot start: {why}" for number, why in failures if why is not None), None)


def app_of_replicas(replicas: ProcessReplicas, settings: Settings) -> Starlette:
    """Returns the server that `create_app` returns, whose requests replicas answer. The caller closes both."""
    facts = replicas.facts
    tokenizer = facts.tokenizer()
    engine = ReplicatedEngine(replicas, facts.outline, tokenizer, facts.config)
    return app_of(engine, facts.outline, tokenizer, settings, facts.origin)


type _Batches = asyncio.Queue[Batch | ReplicaLost | None]


class _Replica:
    """A replica's process, which is started again whenever it is lost, and the calls that it has not answered.

    Attributes:
        number: the number of the replica.
        start_failure: why the last attempt to start the process has failed; None: none has since it was ready.
    """

    def __init__(
        self,
        number: int,
        start: Start,
        share: Mapping[str, str],
        accept: Callable[[ReplicaFacts], str | None],
        changed: threading.Condition,
    ) -> None:
        """Starts the process, and returns at once.

        Args:
            number: the number of the replica.
            start: the process's first message.
            share: the environment variables that give it its devices.
            accept: is called when the process is ready, and returns why it is not used.
            changed: is notified when the process has become ready, or has failed to.
        """
        self.number = number
        self.start_failure: str | None = None
        self._start, self._share, self._accept, self._changed = start, share, accept, changed
        self._lock = threading.Lock()
        """Guards the fields below, which the thread and the callers share."""
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self._is_ready = False
        self._calls: dict[int, tuple[asyncio.AbstractEventLoop, _Batches]] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"detjax-replica-{number}", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """True if it takes calls."""
        return self._is_ready

    @property
    def process_id(self) -> int | None:
        """The id of its process, if there is one."""
        process = self._process
        return None if process is None else process.pid

    @contextlib.contextmanager
    def called(self, call: Call) -> Iterator[_Batches]:
        """A context with what comes of a call: batches, and behind the last one None, or the loss of the process.

        When it is left, the process is told that nobody waits any more, unless it has answered.

        Raises:
            ReplicaLost: no process takes calls.
        """
        batches: _Batches = asyncio.Queue()
        with self._lock:
            outbox = self._outbox
            if outbox is None or not self._is_ready:
                raise ReplicaLost("its process has ended")
            self._calls[call.number] = asyncio.get_running_loop(), batches
            outbox.put(call)
        try:
            yield batches
        finally:
            with self._lock:
                if self._calls.pop(call.number, None) is not None:
                    outbox.put(Call(call.number, None))

    def tell_to_end(self) -> None:
        """Tells the process to end, and starts no other one."""
        self._ending.set()
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(End())

    def close(self) -> None:
        """Waits for the end of a process that was told to end. One that does not is killed."""
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive() and (process := self._process) is not None:
            _kill(process)
            self._thread.join(_SECONDS_TO_END)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Starts the process, and starts it again whenever it is lost, until the end."""
        has_served, failures = False, 0
        while not self._ending.is_set():
            try:
                reason = self._live()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                _log.error("what replica %d says cannot be understood", self.number, exc_info=error)
            was_ready = self._lose()
            if self._ending.is_set():
                return
            has_served |= was_ready
            if was_ready:
                failures = 0
                _log.warning("replica %d is lost: %s; it is started again", self.number, reason)
            else:
                failures += 1
                with self._changed:
                    self.start_failure = reason
                    self._changed.notify_all()
            pause = min(2.0**failures - 1, _LONGEST_PAUSE)
            if not was_ready and has_served:
                _log.error("replica %d cannot start again: %s; the next attempt is in %g s", self.number, reason, pause)
            self._ending.wait(pause)

    def _live(self) -> str:
        """Starts a process, and returns at its end why it has ended."""
        connection, other = Pipe()
        package = str(Path(__file__).parents[3])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with connection:
            with other:
                # A group of its own keeps the terminal's Ctrl-C away, and holds the processes that compile for it.
                process = subprocess.Popen(
                    [sys.executable, "-m", "detjax.server.replicas.process", str(other.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    process_group=0,
                    env={**os.environ, **self._share, "PYTHONPATH": paths},
                )
            outbox = Outbox(connection)
            outbox.put(self._start)
            with self._lock:
                self._process, self._outbox = process, outbox
                if self._ending.is_set():
                    outbox.put(End())
            try:
                return self._listen(connection) or f"its process has ended with {_ending_of(process)}"
            finally:
                _kill(process)
                outbox.close(_SECONDS_TO_END)

    def _listen(self, connection: Connection) -> str | None:
        """Passes answers on until the process is lost, and returns why; None: the connection has ended."""
        while True:
            limit = self._start.silence if self._is_ready else max(self._start.silence, _SILENCE_AT_START)
            try:
                if not connection.poll(limit):
                    return f"it has said nothing for {limit:g} s"
                messages: list[object] = connection.recv()
            except (EOFError, OSError):
                return None
            self._pass_on([message for message in messages if isinstance(message, Answer)])
            for message in messages:
                if isinstance(message, Failed):
                    return message.reason
                if isinstance(message, Ready):
                    if (reason := self._accept(message.facts)) is not None:
                        return reason
                    _log.info("replica %d is ready, process %d", self.number, self.process_id)
                    with self._changed, self._lock:
                        self._is_ready, self.start_failure = True, None
                        self._changed.notify_all()

    def _pass_on(self, answers: Sequence[Answer]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Batches, Batch | None]]] = {}
        with self._lock:
            for answer in answers:
                if (waiting := self._calls.get(answer.number)) is not None:
                    loop, batches = waiting
                    by_loop.setdefault(loop, []).append((batches, answer.batch))
                    if answer.batch is None:
                        del self._calls[answer.number]
        for loop, parts in by_loop.items():
            _call_in(loop, _put_all, parts)

    def _lose(self) -> bool:
        """Tells all who wait for the process that it is lost. Returns whether it was ready."""
        with self._lock:
            was_ready, self._is_ready = self._is_ready, False
            self._process = self._outbox = None
            calls, self._calls = self._calls, {}
        for loop, batches in calls.values():
            _call_in(loop, batches.put_nowait, ReplicaLost(f"the process of replica {self.number} is lost"))
        return was_ready


def _put_all(parts: Sequence[tuple[_Batches, Batch | None]]) -> None:
    for batches, batch in parts:
        batches.put_nowait(batch)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits any more
        loop.call_soon_threadsafe(function, *args)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and those that it has started, and waits for its end, which takes a moment on a GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)


def _ending_of(process: "subprocess.Popen[bytes]") -> str:
    """A description of how a process has ended whose connection has."""
    try:
        code = process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "its connection"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"code {code}"


# --- devices ----------------------------------------------------------------------------------------------------------


def device_shares(count: int, devices: int) -> list[dict[str, str]]:
    """Returns the environment variables that give each replica its devices, without starting JAX on one.

    Args:
        count: the number of replicas.
        devices: how many devices each replica needs.

    Raises:
        ValueError: there are fewer GPUs, or no replica is asked for.
    """
    if count < 1 or devices < 1:
        raise ValueError(
            f"--data-parallel is {count}, with {devices} devices for each replica; accepted: positive numbers"
        )
    gpus = visible_gpus()
    if gpus is None:
        return [{} for _ in range(count)]
    if count * devices > len(gpus):
        raise ValueError(
            f"--data-parallel is {count}, and each replica takes {devices} GPUs (--tensor-parallel times "
            f"--expert-parallel); accepted: up to {len(gpus)} GPUs in all, which are those that CUDA shows "
            f"(CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    shares = [gpus[first : first + devices] for first in range(0, count * devices, devices)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def visible_gpus() -> list[str] | None:
    """Returns the GPUs that JAX would use, as CUDA_VISIBLE_DEVICES names them; None where it uses no NVIDIA GPU."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and not {"cuda", "gpu"} & {*platforms.split(",")}:
        return None
    if not _has_cuda_plugin() or (count := _count_gpus()) is None:
        return None
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if given is None else (name.strip() for name in given.split(","))
    return list(itertools.islice(names, count))


def _has_cuda_plugin() -> bool:
    """Returns whether the package is installed with which JAX uses NVIDIA GPUs."""
    try:
        import jax_plugins  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return False
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(jax_plugins.__path__))


def _count_gpus() -> int | None:
    """Returns how many GPUs CUDA shows to this process, without creating a context; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    return count.value


@contextlib.contextmanager
def no_accelerator() -> Iterator[None]:
    """A context in which JAX, unless it has started already, uses this process's CPU alone: a front computes nothing.

    The memory of its GPUs is the replicas'.
    """
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)
