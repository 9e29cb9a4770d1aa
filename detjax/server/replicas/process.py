"""The program of a replica: `python -m detjax.server.replicas.process DESCRIPTOR`.

It loads a model and answers calls over a connection, until it gets `End` or the connection closes, so a killed front
leaves no processes running.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import jax

from detjax.engine import Engine
from detjax.engine.commands import Commit, EngineCommands
from detjax.server.http.logs import logging_to_stderr
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions, started_engine
from detjax.server.replicas.messages import (
    Alive,
    Answer,
    Call,
    CatchUp,
    End,
    Failed,
    Order,
    Outbox,
    Outcome,
    Ready,
    Start,
)
from detjax.server.replicated_engine import batches

_BEATS: Final = 4
"""Minimum number of heartbeats within the timeout after which a silent replica counts as stuck."""
_SECONDS_TO_END: Final = 5
"""Seconds for the engine to close before the process exits anyway."""
_log: Final = logging.getLogger(__name__)


class _Watched(Protocol):
    @property
    def busy_seconds(self) -> float: ...


class Replica:
    """Answers calls over a connection.

    Heartbeats come from the event loop, which takes part in every answer, so they stop if it is stuck.
    """

    def __init__(self, connection: Connection, start: Start) -> None:
        """A replica that is not started; `start` was the connection's first message."""
        self._connection, self._start = connection, start
        self._outbox = Outbox(connection)
        self._engine: Engine | None = None
        self._commands: EngineCommands | None = None
        self._facts: ReplicaFacts | None = None
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._ordered: asyncio.Queue[Order | CatchUp] = asyncio.Queue()

    async def serve(
        self, start: Callable[[ReplicaOptions], tuple[Engine, ReplicaFacts, EngineCommands]] = started_engine
    ) -> None:
        """Starts the engine, and answers calls. Returns if the engine cannot start or fails.

        The process ends when the front sends `End` or is gone.
        """
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="detjax-inbox", daemon=True).start()
        tasks = [asyncio.create_task(self.beat())]
        try:
            self._engine, self._facts, self._commands = await asyncio.to_thread(start, self._start.options)
            self._outbox.put(Ready(self._facts))
            ended = asyncio.wrap_future(self._engine.closed)
            tasks.append(asyncio.create_task(self._obey()))
            await asyncio.wait({ended, tasks[-1]}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                tasks[-1].result()
            await ended
        except Exception as error:
            if self._engine is not None:
                reason = "its engine has failed"  # the engine has logged why
            else:
                reason = " ".join(str(error).split()) or type(error).__name__
                if not isinstance(error, ValueError | NotImplementedError | OSError):
                    _log.error("a replica could not start", exc_info=error)
            self._outbox.put(Failed(reason))
        finally:
            for task in tasks:
                task.cancel()
            self._outbox.close(_SECONDS_TO_END)

    async def beat(self) -> None:
        """Sends heartbeats until the engine is stuck."""
        limit = self._start.silence
        while True:
            engine: _Watched | None = self._engine
            if engine is not None and (seconds := engine.busy_seconds) > limit:
                _log.critical("the engine is stuck: one step has taken %.0f s so far; its threads follow", seconds)
                with contextlib.suppress(OSError, ValueError):  # stderr may have no descriptor
                    faulthandler.dump_traceback()
                self._outbox.put(Failed(f"one step of its engine has taken {seconds:.0f} s so far"))
                return
            self._outbox.put(Alive())
            await asyncio.sleep(min(1, limit / _BEATS))

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forwards calls to the event loop until the front sends `End` or is gone, then ends the process."""
        with contextlib.suppress(EOFError, OSError):
            while End() not in (messages := self._connection.recv()):
                loop.call_soon_threadsafe(self._take, messages)
        if self._engine is not None:
            closing = threading.Thread(target=self._engine.close, daemon=True)
            closing.start()
            closing.join(_SECONDS_TO_END)
        os._exit(0)

    async def _obey(self) -> None:
        """Runs commands in their order. Raises an exception if the replica cannot get the weights of the others."""
        while True:
            ordered = await self._ordered.get()
            assert self._commands is not None and self._facts is not None
            if isinstance(ordered, CatchUp):
                for command in ordered.commands:
                    await self._commands.command(command)
                self._outbox.put(Ready(self._facts.with_digest(self._commands.digest)))
                continue
            try:
                if isinstance(ordered.command, Commit):
                    # Calls that were cancelled just before may not have left the engine.
                    await asyncio.gather(*self._answering.values(), return_exceptions=True)
                result = await self._commands.command(ordered.command)
            except Exception as error:
                if not isinstance(error, ValueError):
                    _log.error("a replica could not run %s", type(ordered.command).__name__, exc_info=error)
                # The type is kept, because the front's answer depends on it; a traceback cannot be sent.
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                result = kind(str(error))
            self._outbox.put(Outcome(ordered.number, result))

    def _take(self, messages: list[Call | Order | CatchUp]) -> None:
        for call in messages:
            if not isinstance(call, Call):
                self._ordered.put_nowait(call)
            elif call.requests is not None:
                self._answering[call.number] = asyncio.create_task(self._answer(call))
            elif (task := self._answering.get(call.number)) is not None:
                task.cancel()

    async def _answer(self, call: Call) -> None:
        assert self._engine is not None and call.requests is not None
        try:
            async with contextlib.aclosing(batches(self._engine, call.requests, is_whole=call.is_whole)) as answered:
                async for batch in answered:
                    self._outbox.put(Answer(call.number, batch))
            self._outbox.put(Answer(call.number, None))
        except Exception as error:
            _log.error("a replica could not answer a call", exc_info=error)
            self._outbox.put(Answer(call.number, RuntimeError("a bug in a replica; its log has the details")))
        finally:
            del self._answering[call.number]


def _started_here(options: ReplicaOptions) -> tuple[Engine, ReplicaFacts, EngineCommands]:
    """Calls `started_engine`; raises a ValueError on a TPU, which processes cannot share."""
    if jax.default_backend() == "tpu":
        raise ValueError(
            "the device is a TPU, which processes cannot share; accepted with --data-parallel: NVIDIA GPUs, CPUs"
        )
    return started_engine(options)


def main(descriptor: int) -> None:
    """Serves over a connection, and ends the process."""
    # A supervisor's signal reaches all processes, but requests in flight need their replicas during the grace period.
    # The front sends `End` after it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection: Any = Connection(descriptor)
    start: Start = connection.recv()[0]
    with logging_to_stderr(start.log):
        asyncio.run(Replica(connection, start).serve(_started_here))
    # Not sys.exit: the engine's threads may be stuck.
    os._exit(1)


if __name__ == "__main__":
    # Imported for its logger's name, which would be __main__ here.
    from detjax.server.replicas import process as replica_process

    replica_process.main(int(sys.argv[1]))
