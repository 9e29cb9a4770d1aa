"""Replicas in processes of this machine, each with its own devices: `detjax serve --data-parallel N`.

A thread watches each process. A process that ends, or sends no heartbeat for too long, is lost: its requests continue
on another replica, see `replicated_engine`, and a new process replaces it.
"""

import asyncio
import contextlib
import ctypes
import itertools
import logging
import math
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

import jax
from starlette.applications import Starlette

from detjax.engine import EngineClosed, Request
from detjax.engine.commands import Abort, Command, Commit, Discard, History, Prepare, Prepared
from detjax.models import read_adapter
from detjax.server.app import app_of
from detjax.server.http.settings import LogSettings, Settings
from detjax.server.replicas.choice import EXCESS, ReplicaChoice, first_pages
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions
from detjax.server.replicas.messages import Answer, Call, CatchUp, End, Failed, Order, Outbox, Outcome, Ready, Start
from detjax.server.replicated_engine import Batch, ReplicaLost, ReplicatedEngine

SILENCE: Final = 30.0
"""Seconds without a heartbeat, or for one step of the engine, after which a replica counts as stuck."""
_SILENCE_AT_START: Final = 300.0
"""The same for a replica that is not ready: reading a checkpoint may hold Python's interpreter lock."""
_SECONDS_TO_END: Final = 10
"""Seconds for a process to end after `End` or a kill."""
_LONGEST_PAUSE: Final = 60
"""Maximum number of seconds between two attempts to start a process."""
_UNASKED: Final = -1
"""The number of orders whose outcome nobody waits for."""
_POLL: Final = 0.05
"""Seconds between two checks for a ready replica."""
_log: Final = logging.getLogger(__name__)


class ProcessReplicas:
    """Replicas in processes of this machine.

    Attributes:
        adapters: the adapters of each replica, by name.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        count: int,
        *,
        log: LogSettings | None = None,
        silence: float = SILENCE,
        excess: int = EXCESS,
    ) -> None:
        """Starts the processes, and waits until all of them take requests. The caller must close the object.

        Args:
            options: the options of each replica.
            count: the number of replicas.
            log: settings of their log on stderr.
            silence: seconds without a heartbeat, or for one step of the engine, after which a replica counts as stuck.
            excess: see `EXCESS`.

        Raises:
            ValueError: the machine has too few devices, or an argument is out of range.
            CheckpointError: an adapter cannot be read.
            ChildProcessError: a replica cannot start. The message has the reason.
        """
        if not (math.isfinite(silence) and silence > 0):
            raise ValueError(f"ProcessReplicas: silence is {silence} (--replica-seconds); accepted: more than 0")
        shares = device_shares(count, options.tensor_parallel * options.expert_parallel)
        start = Start(options, log or LogSettings(), silence)
        self.adapters = {name: read_adapter(folder) for name, folder in options.adapters.items()}
        self._facts: ReplicaFacts | None = None
        self._history = History()
        self._prepared = dict[_Replica, Prepared]()
        """Replicas that have the same weights prepared."""
        self._changed = threading.Condition()
        self._choice = ReplicaChoice(count, excess)
        self._numbers = itertools.count()
        self._replicas = [
            _Replica(number, start, share, self._accept, self._changed) for number, share in enumerate(shares)
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
        """The id of each replica's process; None while it is restarting."""
        return [replica.process_id for replica in self._replicas]

    @property
    def failure(self) -> BaseException | None:
        """The reason why no replica can start again; None while one is available or may become so."""
        if all(replica.start_failure is not None for replica in self._replicas):
            return ChildProcessError(self._first_failure())
        return None

    def close(self) -> None:
        """Ends all processes. Pending calls lose their replica."""
        for replica in self._replicas:
            replica.tell_to_end()
        for replica in self._replicas:
            replica.close()

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        """Sends requests to one of the replicas, and yields its answer; see `Replicas.stream`.

        Also raises EngineClosed if no replica can start again.
        """
        pages = first_pages(requests[0], self.facts.metadata.config) if requests else []
        samples = sum(request.sampling.n for request in requests)
        while not (ready := [number for number, replica in enumerate(self._replicas) if replica.is_ready]):
            if self.failure is not None:
                raise EngineClosed("no replica of the engine can start; the server's log has the reason")
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

    # --- commands -----------------------------------------------------------------------------------------------------

    @property
    def kept_files(self) -> Collection[Path]:
        """Files of updates that replicas need when they start again."""
        return self._history.updates

    async def command(self, command: Command) -> Any:
        """Runs a command in all replicas; see `Replicas.command`.

        A replica that is lost meanwhile, or fails, is started again with the state that the others then have.
        """
        if isinstance(command, Prepare):
            return await self._prepare(command)
        with self._changed:
            ready = [replica for replica in self._replicas if replica.is_ready]
            if isinstance(command, Commit):
                # From here on, replicas that start get the new weights, and none serves with the old ones.
                ready, others = [one for one in ready if one in self._prepared], ready
                assert self._prepared and self._facts is not None
                self._facts = self._facts.with_digest(next(iter(self._prepared.values())).digest)
                for replica in set(others) - set(ready):
                    replica.kill()
            if isinstance(command, Commit | Discard):
                self._prepared = {}
            self._history.note(command)
            orders = [replica.order(next(self._numbers), command) for replica in ready]
        outcomes = await asyncio.gather(*map(asyncio.wrap_future, orders), return_exceptions=True)
        for replica, outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, ReplicaLost):
                _log.error("replica %d could not run %s: %s", replica.number, type(command).__name__, outcome)
                replica.kill()
        results = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        if not results and not isinstance(command, Commit):  # a commit counts, and all replicas start with it
            raise ReplicaLost("no replica is ready")
        return sum(results) if isinstance(command, Abort) else None

    async def _prepare(self, command: Prepare) -> Prepared:
        """Prepares weights in all replicas, or discards them in all.

        Raises:
            ValueError: they do not fit the model.
            ReplicaLost: no replica is ready.
        """
        ready = [replica for replica in self._replicas if replica.is_ready]
        orders = [asyncio.wrap_future(replica.order(next(self._numbers), command)) for replica in ready]
        outcomes = dict(zip(ready, await asyncio.gather(*orders, return_exceptions=True), strict=True))
        self._prepared = {one: outcome for one, outcome in outcomes.items() if isinstance(outcome, Prepared)}
        failures = [one for one in outcomes.values() if isinstance(one, Exception) and not isinstance(one, ReplicaLost)]
        if len({*self._prepared.values()}) > 1:
            failures.append(ValueError(f"{command.path} was changed while it was read; accepted: complete files"))
        if failures or not self._prepared:
            with contextlib.suppress(ReplicaLost):
                await self.command(Discard())
            raise failures[0] if failures else ReplicaLost("no replica is ready")
        prepared = next(iter(self._prepared.values()))
        self._history.note_prepared(command.path, prepared)
        return prepared

    def _accept(self, facts: ReplicaFacts) -> "str | CatchUp | tuple[Command, ...]":
        """Returns the reason to reject a replica that has started, what it must do before it is ready again, or the
        commands that give an accepted one the state of the others.

        The caller holds `_changed`.
        """
        self._facts = known = self._facts or facts
        if facts.adapters != {name: adapter.digest.hex() for name, adapter in self.adapters.items()}:
            return "its adapters have other contents than when the server began; restart the server"
        if facts.fingerprint == known.fingerprint:
            return self._history.state_commands()
        if self._history.updates and facts.with_digest(str(known.origin.model)).fingerprint == known.fingerprint:
            return CatchUp(self._history.update_commands())
        return f"its fingerprint is {facts.fingerprint}, but the other replicas have {known.fingerprint}"

    def _first_failure(self) -> str | None:
        failures = ((replica.number, replica.start_failure) for replica in self._replicas)
        return next((f"replica {number} cannot start: {why}" for number, why in failures if why is not None), None)


def app_of_replicas(replicas: ProcessReplicas, settings: Settings) -> Starlette:
    """Returns the server of `create_app` with replicas instead of an engine. The caller closes both."""
    facts = replicas.facts
    tokenizer = facts.tokenizer()
    engine = ReplicatedEngine(replicas, facts.metadata, tokenizer, facts.config, replicas.adapters)
    return app_of(engine, facts.metadata, tokenizer, settings, facts.origin, engine)


type _Batches = asyncio.Queue[Batch | ReplicaLost | None]


class _Replica:
    """A replica's process, which is restarted whenever it is lost, and its pending calls.

    Attributes:
        number: the number of the replica.
        start_failure: the reason why the last attempt to start the process failed; None if it succeeded.
        is_ready: True if the process takes calls.
    """

    def __init__(
        self,
        number: int,
        start: Start,
        share: Mapping[str, str],
        accept: Callable[[ReplicaFacts], str | CatchUp | tuple[Command, ...]],
        changed: threading.Condition,
    ) -> None:
        """Starts the process in the background, with environment variables `share` that assign it its devices.

        When it is ready, `accept` returns a reason to reject it, or what it has to do first. `changed` is notified of
        its state, and guards it.
        """
        self.number = number
        self.start_failure: str | None = None
        self._start, self._share, self._accept, self._changed = start, share, accept, changed
        self._lock = threading.Lock()
        """Guards the fields below, which the thread shares with callers."""
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self.is_ready = False
        self._calls: dict[int, tuple[asyncio.AbstractEventLoop, _Batches]] = {}
        self._orders: dict[int, Future[Any]] = {}
        self._is_killed = False
        self._caught_up: CatchUp | None = None
        """The commands that the process had to run before it was ready, if any."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"detjax-replica-{number}", daemon=True)
        self._thread.start()

    @property
    def process_id(self) -> int | None:
        """The id of the process, if any."""
        process = self._process
        return None if process is None else process.pid

    @contextlib.contextmanager
    def called(self, call: Call) -> Iterator[_Batches]:
        """Sends a call, and yields a queue of its batches, which ends with None or `ReplicaLost`.

        At the end of the context, a call without a complete answer is cancelled.
        """
        batches: _Batches = asyncio.Queue()
        with self._lock:
            outbox = self._outbox
            if outbox is None or not self.is_ready:
                raise ReplicaLost("its process has ended")
            self._calls[call.number] = asyncio.get_running_loop(), batches
            outbox.put(call)
        try:
            yield batches
        finally:
            with self._lock:
                if self._calls.pop(call.number, None) is not None:
                    outbox.put(Call(call.number, None))

    def order(self, number: int, command: Command) -> Future[Any]:
        """Sends a command, and returns a future of its result; its exception is ReplicaLost if the replica is lost."""
        future: Future[Any] = Future()
        with self._lock:
            if self._outbox is None:
                future.set_exception(ReplicaLost("its process has ended"))
            else:
                self._orders[number] = future
                self._outbox.put(Order(number, command))
        return future

    def kill(self) -> None:
        """Lets the process take no more calls, and kills it in the background. A new one replaces it."""
        with self._lock:
            self.is_ready, self._is_killed = False, True
            process = self._process
        if process is not None:
            threading.Thread(target=_kill, args=(process,), daemon=True).start()

    def tell_to_end(self) -> None:
        """Sends `End` to the process, and starts no new one."""
        self._ending.set()
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(End())

    def close(self) -> None:
        """Waits for the process to end after `End`, and kills it after a timeout."""
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive() and (process := self._process) is not None:
            _kill(process)
            self._thread.join(_SECONDS_TO_END)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Starts the process, and restarts it whenever it is lost."""
        has_served, failures = False, 0
        while not self._ending.is_set():
            try:
                reason = self._live()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                _log.error("a message of replica %d is invalid", self.number, exc_info=error)
            was_ready = self._lose()
            if self._ending.is_set():
                return
            has_served |= was_ready
            if was_ready:
                failures = 0
                _log.warning("replica %d is lost: %s; restarting it", self.number, reason)
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
        """Runs a process, and returns the reason of its end."""
        connection, other = Pipe()
        package = str(Path(__file__).parents[3])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with connection:
            with other:
                # Its own process group shields it from the terminal's Ctrl-C, and contains its compiler processes.
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
        """Forwards answers until the process is lost, and returns the reason, or None if the connection has closed."""
        while True:
            limit = self._start.silence if self.is_ready else max(self._start.silence, _SILENCE_AT_START)
            try:
                if not connection.poll(limit):
                    return f"it has sent nothing for {limit:g} s"
                messages: list[object] = connection.recv()
            except (EOFError, OSError):
                return None
            self._pass_on([message for message in messages if isinstance(message, Answer)])
            for message in messages:
                if isinstance(message, Failed):
                    return message.reason
                if isinstance(message, Ready) and (reason := self._welcome(message.facts)) is not None:
                    return reason
                if isinstance(message, Outcome):
                    self._note(message)

    def _note(self, outcome: Outcome) -> None:
        with self._lock:
            order = self._orders.pop(outcome.number, None)
        if order is None or not order.set_running_or_notify_cancel():
            return
        if isinstance(outcome.result, Exception):
            order.set_exception(outcome.result)
        else:
            order.set_result(outcome.result)

    def _welcome(self, facts: ReplicaFacts) -> str | None:
        """Lets a replica take calls or catch up, or returns the reason to reject it."""
        with self._changed:
            answer = self._accept(facts)
            if isinstance(answer, str):
                return answer
            if isinstance(answer, CatchUp) and answer == self._caught_up:
                return "it has the updates of the other replicas, but not their weights; were the files changed?"
            with self._lock:
                assert self._outbox is not None
                if isinstance(answer, CatchUp):
                    self._caught_up = answer
                    self._outbox.put(answer)
                    return None
                for command in answer:
                    self._outbox.put(Order(_UNASKED, command))
                self.is_ready, self.start_failure = True, None
            _log.info("replica %d is ready, process %d", self.number, self.process_id)
            self._changed.notify_all()
        return None

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
        """Reports the loss to all pending calls, and returns whether the process was ready."""
        with self._lock:
            was_ready, self.is_ready = self.is_ready or self._is_killed, False
            self._process = self._outbox = self._caught_up = None
            self._is_killed = False
            calls, self._calls = self._calls, {}
            orders, self._orders = self._orders, {}
        for order in orders.values():
            if order.set_running_or_notify_cancel():
                order.set_exception(ReplicaLost(f"the process of replica {self.number} is lost"))
        for loop, batches in calls.values():
            _call_in(loop, batches.put_nowait, ReplicaLost(f"the process of replica {self.number} is lost"))
        return was_ready


def _put_all(parts: Sequence[tuple[_Batches, Batch | None]]) -> None:
    for batches, batch in parts:
        batches.put_nowait(batch)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *args)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and its children, and waits for it to end, which takes a moment on a GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)


def _ending_of(process: "subprocess.Popen[bytes]") -> str:
    """Describes the end of a process whose connection has closed."""
    try:
        code = process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "its connection"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"code {code}"


# --- devices ----------------------------------------------------------------------------------------------------------


def device_shares(count: int, devices: int) -> list[dict[str, str]]:
    """Returns environment variables that assign each replica its devices, without starting JAX on one.

    Args:
        count: the number of replicas.
        devices: devices per replica.

    Raises:
        ValueError: a number is not positive, or the machine has too few GPUs.
    """
    if count < 1 or devices < 1:
        raise ValueError(f"--data-parallel is {count}, with {devices} devices per replica; accepted: positive numbers")
    gpus = visible_gpus()
    if gpus is None:
        return [{} for _ in range(count)]
    if count * devices > len(gpus):
        raise ValueError(
            f"--data-parallel is {count}, and each replica takes {devices} GPUs (--tensor-parallel times "
            f"--expert-parallel); accepted: up to {len(gpus)} GPUs in total, all that CUDA can see "
            f"(CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    shares = [gpus[first : first + devices] for first in range(0, count * devices, devices)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def visible_gpus() -> list[str] | None:
    """Returns the GPUs that JAX would use, by their names in CUDA_VISIBLE_DEVICES; None if it uses no NVIDIA GPU."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and not {"cuda", "gpu"} & {*platforms.split(",")}:
        return None
    if not _has_cuda_plugin() or (count := _count_gpus()) is None:
        return None
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if given is None else (name.strip() for name in given.split(","))
    return list(itertools.islice(names, count))


def _has_cuda_plugin() -> bool:
    """Returns whether JAX's plugin for NVIDIA GPUs is installed."""
    try:
        import jax_plugins  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return False
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(jax_plugins.__path__))


def _count_gpus() -> int | None:
    """Returns the number of GPUs that this process can use, without creating a context; None without a driver."""
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
    """Restricts JAX to the CPU, if it has not started yet: a front computes nothing and leaves GPUs to its replicas."""
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)
