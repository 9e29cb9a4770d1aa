"""`detjax serve` as a process: start, memory and exit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from detjax.demo import CHECKPOINT

MODEL: Final = "chatty"
"""The model's name for clients: detjax's demo checkpoint, with a chat template."""
TEMPLATE: Final = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one so: <tool_call>{"name": "x", "arguments": {}}</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
SMALL: Final = ("--max-samples", 4, "--token-budget", 64, "--max-length", 384)
"""Options of a fast-starting server."""
MAIN: Final = "from detjax.cli import main; main()"
_STARTS_WITHIN: Final = 1800
"""Time limit for a start, in seconds."""


class ServerProcess:
    """A server's process, killed at the end of its context if still running.

    Attributes:
        process: the process.
        port: its port, once ready.
        fingerprint: the fingerprint that it prints when ready.
        seconds: the duration of the start.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[object] = (),
        *,
        cache: Path | None = None,
        checkpoint: Path = CHECKPOINT,
        template: str = TEMPLATE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts a server without waiting until it is ready.

        Args:
            folder: the folder of the server's log.
            options: options of `detjax serve` other than the model.
            cache: the directory of compiled programs; None: no cache.
            checkpoint: the model.
            template: its chat template.
            environment: additional environment variables.
        """
        self.port, self.fingerprint, self.seconds = 0, "", 0.0
        self._start = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"server-{time.monotonic_ns()}.log"
        (folder / "template.jinja").write_text(template, encoding="utf-8")
        command = [sys.executable, "-c", MAIN, "serve", checkpoint, "--name", MODEL, "--port", 0]
        command += ["--backend", "portable", "--chat-template", folder / "template.jinja", "--log-level", "warning"]
        command += ["--no-compilation-cache"] if cache is None else ["--cache-dir", cache]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in (*command, *options)],
                stdout=log,
                stderr=log,
                env=os.environ | {"JAX_PLATFORMS": "cpu"} | dict(environment or {}),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def ready(self) -> Self:
        """Waits until the server is ready.

        Raises:
            RuntimeError: it exited, or takes too long; the message has the log's end.
        """
        beginning = f"{MODEL} on http://127.0.0.1:"
        while (line := next((one for one in self.log().splitlines() if one.startswith(beginning)), None)) is None:
            if self.process.poll() is not None or time.monotonic() - self._start > _STARTS_WITHIN:
                raise RuntimeError(f"the server did not start (exit code {self.process.poll()}): {self.log()[-3000:]}")
            time.sleep(0.05)
        self.seconds = time.monotonic() - self._start
        self.port = int(line.removeprefix(beginning).partition(",")[0])
        self.fingerprint = line.rpartition(" ")[2]
        return self

    def log(self) -> str:
        """Returns the log so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stops the server, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def workers(self) -> list[int]:
        """Returns the process ids of its text workers."""
        children: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                children += map(int, task.read_text().split())
            except OSError:  # the thread has ended
                continue
        return children

    def memory(self) -> tuple[int, int]:
        """Returns the resident bytes of the server, and of all its text workers."""
        return resident(self.process.pid), sum(map(resident, self.workers()))


def resident(pid: int) -> int:
    """Returns the resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def is_running(pid: int) -> bool:
    """Returns whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
