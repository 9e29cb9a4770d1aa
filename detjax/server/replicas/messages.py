"""Messages between a front and a replica's process, and the thread that sends them."""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from detjax.engine import Request
from detjax.engine.commands import Command
from detjax.server.http.settings import LogSettings
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions
from detjax.server.replicated_engine import Batch


@dataclasses.dataclass(frozen=True)
class Start:
    """The first message of a front.

    Attributes:
        options: the replica's options.
        log: settings of its log on stderr.
        silence: seconds that a step of the engine may take before the replica reports that it is stuck.
    """

    options: ReplicaOptions
    log: LogSettings
    silence: float


@dataclasses.dataclass(frozen=True)
class Call:
    """Requests of a front.

    Attributes:
        number: the number of the call.
        requests: its requests; None cancels the call.
        is_whole: True for generations only, without a stream of tokens.
    """

    number: int
    requests: Sequence[Request] | None
    is_whole: bool = False


@dataclasses.dataclass(frozen=True)
class Order:
    """A command of a front to the replica's engine.

    Attributes:
        number: the number of the order.
        command: the command.
    """

    number: int
    command: Command


@dataclasses.dataclass(frozen=True)
class CatchUp:
    """An answer to `Ready`: commands that give the replica the weights of the others. It is then ready again."""

    commands: tuple[Command, ...]


@dataclasses.dataclass(frozen=True)
class End:
    """The last message of a front."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """The message of a replica that takes calls."""

    facts: ReplicaFacts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of an order.

    Attributes:
        number: the number of the order.
        result: the command's result, or the exception that ended it.
    """

    number: int
    result: Any


@dataclasses.dataclass(frozen=True)
class Answer:
    """A part of the answer to a call.

    Attributes:
        number: the number of the call.
        batch: a batch of events; None at the end.
    """

    number: int
    batch: Batch | None


@dataclasses.dataclass(frozen=True)
class Failed:
    """The last message of a replica, with the reason why it has failed."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Alive:
    """A replica's heartbeat."""


class Outbox:
    """Sends messages over a connection in a separate thread, so that a slow reader blocks nobody.

    The other end receives lists with all messages that were pending.
    """

    def __init__(self, connection: Connection) -> None:
        """An outbox for a connection that has no other sender."""
        self._connection = connection
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="detjax-outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Queues a message; drops it if the other end is closed."""
        self._messages.put(message)

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread after the last message, and waits up to `timeout` seconds for it."""
        self._messages.put(None)
        self._thread.join(timeout)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                waiting = [self._messages.get()]
                while not self._messages.empty():
                    waiting.append(self._messages.get())
                if messages := [message for message in waiting if message is not None]:
                    self._connection.send(messages)
                if len(messages) < len(waiting):
                    return
