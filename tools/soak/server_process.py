"""`detjax serve` as a process: its start, its memory and its ends."""

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
"""What clients call the model: the checkpoint that comes with detjax, and a chat template."""
TEMPLATE: Final = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one so: <tool_call>{"name": "x", "arguments": {}}</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
SMALL: Final = ("--max-samples", 4, "--token-budget", 64, "--max-length", 384)
"""Options of a server that starts quickly."""
MAIN: Final = "from detjax.cli import main; main()"
_STARTS_WITHIN: Final = 1800
"""Seconds after which a start is taken to hang."""


class ServerProcess:
    """A server's process. At the end of its context it is killed, if it still runs.

    Attributes:
        process: the process.
        port: where it listens, once it is ready.
        fingerprint: what it prints of itself when it is ready.
        seconds: how long the start took.
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
        """Starts a server, which is not ready yet.

        Args:
            folder: gets the server's log.
            options: options of `detjax serve` beside those of the model.
            cache: the directory of compiled programs; None keeps none.
            checkpoint: the model.
            template: its chat template.
            environment: further environment variables.
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
        """Waits until it serves.

        Raises:
            RuntimeError: it ended, or takes too long; the message has the log's end.
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
        """What it has written so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Kills it as the kernel would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Tells it to end, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def workers(self) -> list[int]:
        """The ids of its text workers."""
        children: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                children += map(int, task.read_text().split())
            except OSError:  # a thread that has ended meanwhile
                continue
        return children

    def memory(self) -> tuple[int, int]:
        """Bytes that the server has in memory, and those of all its text workers together."""
        return resident(self.process.pid), sum(map(resident, self.workers()))


def resident(pid: int) -> int:
    """Bytes that a process has in memory; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def is_running(pid: int) -> bool:
    """Whether a process runs, and is more than an entry that nobody has read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
