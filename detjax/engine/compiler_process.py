"""A process that compiles programs: the side that asks, and the side that compiles.

Python traces programs one after the other, whatever the number of threads. So many programs take many processes.
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

from detjax.engine.step_programs import StepPrograms
from detjax.runtime import compilation, fingerprints

_SHARED_MEMORY: Final = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""The environment variables that leave the device's memory to the process that computes."""


class CompilerFailed(RuntimeError):
    """A process could not compile a program."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a process needs to know before it can compile.

    Attributes:
        programs: the programs.
        choices: the backend that serves, and the fusions that are switched off.
        fingerprint: the digest of the fingerprint that the process must have too.
    """

    programs: StepPrograms
    choices: compilation.Choices
    fingerprint: str

    @classmethod
    def for_programs(cls, programs: StepPrograms) -> "Task":
        """Returns the task of compiling programs as this thread would."""
        return cls(programs, compilation.Choices.here(), fingerprints.fingerprint().digest)


class CompilerProcess:
    """A process that compiles programs, one at a time, until it is closed."""

    def __init__(self, task: Task) -> None:
        """Starts a process."""
        self._connection, other = Pipe()
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it would repeat the warnings of this process
                pass_fds=[other.fileno()],
                env=os.environ | _SHARED_MEMORY | {"PYTHONPATH": paths},
            )
        with contextlib.suppress(OSError):  # `compiled` notices that it has ended
            self._connection.send_bytes(_pickled(task))

    def compiled(self, key: Hashable) -> bytes:
        """Returns one of the task's programs in the form of `compilation.serialized`.

        Raises:
            CompilerFailed: the process has ended, or it cannot compile the program. The message says why.
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
        """Ends the process without waiting for its end, which takes a second where it has used a GPU."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, and waits for its end."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class _TaskPickler(pickle.Pickler):
    """Writes a device, which belongs to its process, as its number. Another process has the same devices."""

    def persistent_id(self, obj: Any) -> int | None:
        return obj.id if isinstance(obj, jax.Device) else None


class _TaskUnpickler(pickle.Unpickler):
    """Reads what `_TaskPickler` has written."""

    def persistent_load(self, pid: int) -> Any:
        return next(device for device in jax.devices() if device.id == pid)


def _pickled(task: Task) -> bytes:
    content = io.BytesIO()
    _TaskPickler(content).dump(task)
    return content.getvalue()


def _serve(connection: Connection) -> None:
    """Compiles what is asked for until the other side closes the connection. Answers failures with their texts."""
    task: Task = _TaskUnpickler(io.BytesIO(connection.recv_bytes())).load()
    with task.choices.held(), contextlib.suppress(EOFError):
        digest = fingerprints.fingerprint().digest
        by_key = task.programs.by_key()
        while True:
            key = connection.recv()
            try:
                if digest != task.fingerprint:
                    raise RuntimeError(f"its fingerprint is {digest}, and not {task.fingerprint}")
                one, network, parameters = by_key[key], task.programs.network, task.programs.parameters
                program = compilation.compiled(one.fn, network, parameters, *one.args, **one.static)
                connection.send(compilation.serialized(program))
            except Exception:
                connection.send(traceback.format_exc())


if __name__ == "__main__":
    # The classes of what is received are those of the module's own name.
    from detjax.engine import compiler_process

    compiler_process._serve(Connection(int(sys.argv[1])))
