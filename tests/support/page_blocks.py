"""The code blocks of a Markdown page, and a program that runs them as a reader would.

    python -m tests.support.page_blocks README.md

Blocks of Python share one namespace, and blocks of bash run in the working directory, in the order of the page. A block
of `text` right after one is its output. Blocks without a language are output or forms to fill in, and are not run.

A block is not run if its first line ends in `test="skip: REASON"`, or if the comment `<!-- not run: REASON -->` stands
before it. `<!-- runs until: URL -->` is for a server: it runs while the following blocks run, which wait for it.
"""

import contextlib
import dataclasses
import io
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.support.waits import HANGS_AFTER

PORT: Final = "8000"
"""The port that pages name. Blocks get a free one in its place."""
_BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<mark>not run|runs until): (?P<value>.+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<options>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\n+^(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```$)?",
    re.DOTALL | re.MULTILINE,
)
_SKIP: Final = re.compile(r'test="skip: (?P<reason>[^"]+)"')


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        line: the line of its first line of code.
        language: the word after the fence.
        code: its text.
        skipped: why it is not run; None: it is.
        ready: the address that answers once the block, a server, is ready; None: it is not a server.
        output: what the page says that it prints; None: it does not say.
    """

    line: int
    language: str
    code: str
    skipped: str | None = None
    ready: str | None = None
    output: str | None = None


def blocks(page: str) -> Iterator[Block]:
    """Yields the blocks of a page in a language that is run, those that are skipped included."""
    for match in _BLOCK.finditer(page):
        if match["language"] not in ("bash", "python"):
            continue
        option = _SKIP.search(match["options"])
        skipped = match["value"] if match["mark"] == "not run" else option and option["reason"]
        ready = match["value"] if match["mark"] == "runs until" else None
        line = page.count("\n", 0, match.start("code")) + 1
        indent = len(match["indent"])
        code = "".join(text[indent:] or "\n" for text in match["code"].splitlines(keepends=True))
        yield Block(line, match["language"], code, skipped, ready, match["output"])


def run(name: str, page: str) -> int:
    """Runs the blocks of a page, and returns how many were run.

    Raises:
        AssertionError: a block prints something else than the page says.
        CalledProcessError: a command fails.
        Exception: whatever a block of Python raises.
    """
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = str(one.getsockname()[1])
    count, namespace = 0, {"__name__": "__main__"}
    with contextlib.ExitStack() as servers:
        for block in blocks(page):
            if block.skipped is None:
                text = block.code.replace(PORT, port)
                print(f"{name}:{block.line}", flush=True)
                if block.ready is not None:
                    servers.enter_context(_server(text, block.ready.replace(PORT, port)))
                    continue
                printed = _bash(text) if block.language == "bash" else _python(f"{name}:{block.line}", text, namespace)
                print(printed, end="", flush=True)
                assert block.output in (None, printed), f"{name}:{block.line} says that this prints {block.output!r}"
                count += 1
    return count


def _bash(code: str) -> str:
    command = ["bash", "-euo", "pipefail", "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _python(name: str, code: str, namespace: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), namespace)
    return printed.getvalue()


@contextlib.contextmanager
def _server(code: str, ready: str) -> Iterator[None]:
    process = subprocess.Popen(["bash", "-c", f"exec {code}"])
    try:
        end = time.monotonic() + HANGS_AFTER
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(ready):
                break
            assert process.poll() is None, f"the server ended with code {process.returncode}"
            assert time.monotonic() < end, f"waited for {HANGS_AFTER} s"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[1]).read_text())
