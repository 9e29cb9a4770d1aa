"""A process that is a replica: `python -m detjax.server.replicas.process DESCRIPTOR`.

It loads a model and answers the calls that come over a connection, until it is told to end or the connection does: a
front that is killed leaves no process behind.
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
from detjax.server.http.logs import logging_to_stderr
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions, started_engine
from detjax.server.replicas.messages import Alive, Answer, Call, End, Failed, Outbox, Ready, Start
from detjax.server.replicated_engine import batches

_BEATS: Final = 4
"""Signs of life in the seconds after which a replica without one is taken to be stuck, at least."""
_SECONDS_TO_END: Final = 5
"""Seconds that the engine has to end before the process does anyway."""
_log: Final = logging.getLogger(__name__)


class _Watched(Protocol):
    @property
    def busy_seconds(self) -> float: ...


class Replica:
    """Answers the calls that come over a connection.

    Its event loop sends the signs of life. They stop if the loop, which has a part in every answer, is stuck.
    """

    def __init__(self, connection: Connection, start: Start) -> None:
        """A replica that has not been started.

        Args:
            connection: whose first message was `start`.
            start: what it says.
        """
        self._connection, self._start = connection, start
        self._outbox = Outbox(connection)
        self._engine: Engine | None = None
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def serve(self, start: Callable[[ReplicaOptions], tuple[Engine, ReplicaFacts]] = started_engine) -> None:
        """Starts the engine with a function, and answers until the front tells it to end or is gone. Then the process
        ends.

        It returns if the engine cannot be started, or has failed.
        """
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="detjax-inbox", daemon=True).start()
        beating = asyncio.create_task(self.beat())
        try:
            self._engine, facts = await asyncio.to_thread(start, self._start.options)
            self._outbox.put(Ready(facts))
            await asyncio.wrap_future(self._engine.closed)
        except Exception as error:
            if self._engine is not None:
                reason = "its engine has failed"  # the engine has logged why
            else:
                reason = " ".join(str(error).split()) or type(error).__name__
                if not isinstance(error, ValueError | NotImplementedError | OSError):
                    _log.error("a replica could not start", exc_info=error)
            self._outbox.put(Failed(reason))
        finally:
            beating.cancel()
            self._outbox.close(_SECONDS_TO_END)

    async def beat(self) -> None:
        """Sends signs of life, until the engine is stuck."""
        limit = self._start.silence
        while True:
            engine: _Watched | None = self._engine
            if engine is not None and (seconds := engine.busy_seconds) > limit:
                _log.critical("the engine is stuck: it has been at one step for %.0f s; its threads follow", seconds)
                with contextlib.suppress(OSError, ValueError):  # stderr may be none that has a descriptor
                    faulthandler.dump_traceback()
                self._outbox.put(Failed(f"its engine has been at one step for {seconds:.0f} s"))
                return
            self._outbox.put(Alive())
            await asyncio.sleep(min(1, limit / _BEATS))

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Passes calls on to the event loop until the front wants no more or is gone. Then it ends the process."""
        with contextlib.suppress(EOFError, OSError):
            while End() not in (messages := self._connection.recv()):
                loop.call_soon_threadsafe(self._take, messages)
        if self._engine is not None:
            closing = threading.Thread(target=self._engine.close, daemon=True)
            closing.start()
            closing.join(_SECONDS_TO_END)
        os._exit(0)

    def _take(self, calls: list[Call]) -> None:
        for call in calls:
            if call.requests is not None:
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
            defect = RuntimeError("a replica has a defect; its log holds the details")
            self._outbox.put(Answer(call.number, defect))
        finally:
            del self._answering[call.number]


def _started_here(options: ReplicaOptions) -> tuple[Engine, ReplicaFacts]:
    """Returns what `started_engine` returns, on a device that several processes may be given a share of.

    Raises:
        ValueError: the device is a TPU.
    """
    if jax.default_backend() == "tpu":
        raise ValueError(
            "the device is a TPU, whose chips belong to one process; accepted with --data-parallel: NVIDIA GPUs, CPUs"
        )
    return started_engine(options)


def main(descriptor: int) -> None:
    """Serves over a connection, and ends the process."""
    # The front says when it is time. A supervisor's signal reaches all processes, and requests in flight have a grace
    # period in which they need their replicas.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection: Any = Connection(descriptor)
    start: Start = connection.recv()[0]
    with logging_to_stderr(start.log):
        asyncio.run(Replica(connection, start).serve(_started_here))
    # The engine's threads may be stuck.
    os._exit(1)


if __name__ == "__main__":
    # The logger has the module's own name.
    from detjax.server.replicas import process as replica_process

    replica_process.main(int(sys.argv[1]))
