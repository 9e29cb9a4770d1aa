"""Processes that compile programs: the client side and the worker side.

The GIL serializes tracing in threads, so tracing many programs in parallel takes processes.
"""

import contextlib
import dataclasses
import io
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Hashable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

import jax

from detjax.engine.program import Programs
from detjax.runtime import compilation, fingerprints

_SHARED_MEMORY: Final = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""The environment variables that leave the device's memory to the process that computes."""


_START: Final = f"import gc; gc.disable(); from {__name__} import serve; serve()"
"""The program of a process. Tracing makes millions of objects that live as long as the process, and scanning them over
and over would take a seventh of its time."""


class CompilerFailed(RuntimeError):
    """A process could not compile a program."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The first message to a process.

    Attributes:
        programs: the programs.
        choices: the backend, and the fusions that are switched off.
        fingerprint: the digest of the fingerprint, which the process must have too.
    """

    programs: Programs
    choices: compilation.ExecutionChoices
    fingerprint: str


class CompilerProcess:
    """A process that compiles programs, one at a time, until it is closed."""

    def __init__(self, task: Task | None = None) -> None:
        """Starts a process; without a task it prepares itself, and waits for `begin`."""
        self._connection, other = Pipe()
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it would repeat this process's warnings
                pass_fds=[other.fileno()],
                env=os.environ | _SHARED_MEMORY | {"PYTHONPATH": paths},
            )
        self._environment = dict(os.environ)
        if task is not None:
            self.begin(task)

    @property
    def is_usable(self) -> bool:
        """True if a waiting process still runs, and a new one would have the same environment."""
        return self._process.poll() is None and self._environment == dict(os.environ)

    def begin(self, task: Task) -> None:
        """Gives a waiting process its task."""
        with contextlib.suppress(OSError):  # `compiled` reports that the process has ended
            content = io.BytesIO()
            _TaskPickler(content).dump(task)
            self._connection.send_bytes(content.getvalue())

    def compiled(self, key: Hashable) -> bytes:
        """Returns one of the task's programs in the form of `compilation.serialized`.

        Raises:
            CompilerFailed: the process has ended, or it cannot compile the program.
        """
        try:
            self._connection.send(key)
            answer = self._connection.recv()
        except (OSError, EOFError) as error:
            raise CompilerFailed(f"it has ended with code {self._process.wait()}") from error
        if isinstance(answer, str):
            raise CompilerFailed(answer)
        return answer

    def kill(self) -> None:
        """Kills the process without waiting for its end, which takes a second if it used a GPU."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process and waits for its end."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class _TaskPickler(pickle.Pickler):
    """Pickles devices, which are objects of one process, by their ids; other processes have the same devices."""

    def persistent_id(self, obj: Any) -> int | None:
        return obj.id if isinstance(obj, jax.Device) else None


class _TaskUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: int) -> Any:
        return next(device for device in jax.devices() if device.id == pid)


def serve() -> None:
    """Compiles requested programs until the client closes the connection, and answers failures with their tracebacks.

    The connection's file descriptor is the process's first argument.
    """
    connection: Connection = Connection(int(sys.argv[1]))
    backend = jax.default_backend()  # initializes the device, which takes seconds on a GPU
    try:
        content = connection.recv_bytes()
    except EOFError:  # it was not needed
        return
    task: Task = _TaskUnpickler(io.BytesIO(content)).load()
    if backend == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)  # see `compilation.NotSerializable`
    with task.choices.apply(), contextlib.suppress(EOFError):
        digest = fingerprints.fingerprint().digest
        by_key = task.programs.by_key()
        while True:
            key = connection.recv()
            try:
                if digest != task.fingerprint:
                    raise RuntimeError(f"its fingerprint is {digest}, and not {task.fingerprint}")
                program = by_key[key].compiled(task.programs.network, task.programs.parameters)
                connection.send(compilation.serialized(program))
            except Exception:
                connection.send(traceback.format_exc())
