"""Messages between a front and a replica's process over a connection, and the thread that sends them."""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from detjax.engine import Request
from detjax.server.http.settings import LogSettings
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions
from detjax.server.replicated_engine import Batch


@dataclasses.dataclass(frozen=True)
class Start:
    """The first message of a front.

    Attributes:
        options: what the replica computes with.
        log: what it logs on stderr.
        silence: seconds that the engine's thread may be at one step, after which the replica says that it is stuck.
    """

    options: ReplicaOptions
    log: LogSettings
    silence: float


@dataclasses.dataclass(frozen=True)
class Call:
    """Requests of a front.

    Attributes:
        number: the call's.
        requests: what it asks for; None: nobody waits for its answer any more.
        is_whole: whether it asks for generations alone, without each token as it comes.
    """

    number: int
    requests: Sequence[Request] | None
    is_whole: bool = False


@dataclasses.dataclass(frozen=True)
class End:
    """The last message of a front."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """The message of a replica that takes calls."""

    facts: ReplicaFacts


@dataclasses.dataclass(frozen=True)
class Answer:
    """A part of the answer to a call.

    Attributes:
        number: the call's.
        batch: what `batches` yields; None: it has ended.
    """

    number: int
    batch: Batch | None


@dataclasses.dataclass(frozen=True)
class Failed:
    """The last message of a replica, which says why it cannot go on."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Alive:
    """The message of a replica that has nothing else to say."""


class Outbox:
    """Sends messages over a connection in a thread of its own, so that nobody waits for a reader who is slow.

    The other end receives lists: all messages that were waiting when the one before was on its way.
    """

    def __init__(self, connection: Connection) -> None:
        """An outbox for a connection that nobody else sends over."""
        self._connection = connection
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="detjax-outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Sends a message behind those before it. Where the other end is closed, it is dropped."""
        self._messages.put(message)

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread after the last message, and waits up to `timeout` seconds until it is sent."""
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
