"""Command lines, environments, files and signals that a server once took badly."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from detjax.demo import CHECKPOINT
from tools.soak.attacks import Verdict, open_streams
from tools.soak.http_client import ask, written
from tools.soak.probes import CHAT, COMPLETIONS
from tools.soak.server_process import MAIN, MODEL, SMALL, ServerProcess

_LIMIT: Final = 600
_CLOCK: Final = "{{ strftime_now('%S') }}{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that wants to know the time."""


def operator_faults(folder: Path, cache: Path) -> Iterator[tuple[str, str, Verdict]]:
    """Yields the name of each fault, what is expected, and the verdict."""
    yield from _command_lines(folder)
    yield "a cache that others can write to", "refused", _open_cache(folder)
    yield "an option of JAX that changes bits", "refused", _disabled_optimizations()
    yield "XLA's flags in a file", "a fingerprint that depends on its contents", _flags_in_a_file(folder)
    yield "a lock of the cache behind a symbolic link", "the file behind it is unharmed", _linked_lock(folder)
    yield "weights of NaN", "an error in place of an answer", _weights_of_nan(folder)
    yield from _two_servers(folder, cache)


def _detjax(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT, check=False,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr
    return -1, "", f"no end after {_LIMIT} s"


def _is_plain(code: int, errors: str) -> bool:
    """Whether a command was refused in a few words."""
    return code == 2 and "Traceback" not in errors and len(errors.splitlines()) <= 12


def _command_lines(folder: Path) -> Iterator[tuple[str, str, Verdict]]:
    cache = ("--cache-dir", folder / "unused")
    cases: dict[str, tuple[Sequence[object], Mapping[str, str]]] = {
        "an endless grace": (("--grace", "inf", *cache), {}),
        "a grace that is no number": (("--grace", "nan", *cache), {}),
        "a home that cannot be written": ((), {"HOME": "/proc/nonexistent", "XDG_CACHE_HOME": ""}),
        "a guard against transfers": (cache, {"JAX_TRANSFER_GUARD": "disallow"}),
        "a backend of another device": (("--backend", "hopper", *cache), {}),
        "an empty key in the environment": (cache, {"DETJAX_API_KEY": ""}),
        "a key with a space": (cache, {"DETJAX_API_KEY": "one two"}),
    }
    for name, (options, environment) in cases.items():
        code, _, errors = _detjax("serve", CHECKPOINT, "--port", 0, *options, **environment)
        yield name, "exit code 2 and a few words", (_is_plain(code, errors), f"{code}: {errors[-300:]}")


def _open_cache(folder: Path) -> Verdict:
    cache = folder / "open"
    cache.mkdir()
    cache.chmod(0o777)
    code, _, errors = _detjax("serve", CHECKPOINT, "--port", 0, "--cache-dir", cache)
    return _is_plain(code, errors) and str(cache) in "".join(errors.split("\n")), f"{code}: {errors[-300:]}"


def _fingerprint(**environment: str) -> str:
    """The digest of the environment's fingerprint, or why there is none."""
    code, output, errors = _detjax("fingerprint", **environment)
    return json.loads(output)["digest"] if code == 0 else f"{code}: {errors[-200:]}"


def _disabled_optimizations() -> Verdict:
    """The option is refused where something is computed; the fingerprint alone computes nothing."""
    command = ("generate", "--model", CHECKPOINT, "--prompt", "x", "--max-tokens", 2)
    code, _, errors = _detjax(*command, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return _is_plain(code, errors), f"{code}: {errors[-300:]}"


def _flags_in_a_file(folder: Path) -> Verdict:
    file, seen = folder / "flags", list[str]()
    for level in (0, 1):
        file.write_text(f"--xla_backend_optimization_level={level}\n", encoding="utf-8")
        seen.append(_fingerprint(XLA_FLAGS=str(file)))
    return seen[0] != seen[1] or not seen[0].isalnum(), seen


def _linked_lock(folder: Path) -> Verdict:
    cache, treasure = folder / "linked", folder / "treasure"
    treasure.write_text("content", encoding="utf-8")
    place = cache / _fingerprint()
    place.mkdir(parents=True, mode=0o700)
    cache.chmod(stat.S_IRWXU)
    (place / ".lock").symlink_to(treasure)
    with ServerProcess(folder, SMALL, cache=cache) as server:
        try:
            seen = f"started: {server.ready().fingerprint}"
        except RuntimeError as error:
            seen = str(error)[-300:]
    return treasure.read_text(encoding="utf-8") == "content", seen


def _weights_of_nan(folder: Path) -> Verdict:
    checkpoint = folder / "nan"
    shutil.copytree(CHECKPOINT, checkpoint)
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    size = int.from_bytes(content[:8], "little")
    first, last = json.loads(content[8 : 8 + size])["model.norm.weight"]["data_offsets"]
    content[8 + size + first : 8 + size + last] = b"\xc0\x7f" * ((last - first) // 2)
    weights.write_bytes(content)
    with ServerProcess(folder, SMALL, checkpoint=checkpoint) as server:
        server.ready()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "logprobs": 1}
        answers = [asyncio.run(ask(server.port, written(COMPLETIONS, body))) for _ in range(2)]
    return all(answer.status >= 400 for answer in answers), [f"{one.status} {one.body[:200]!r}" for one in answers]


def _two_servers(folder: Path, cache: Path) -> Iterator[tuple[str, str, Verdict]]:
    """Faults of templates, limits and signals, shown with two servers that differ in the length of answers."""
    with (
        ServerProcess(folder, SMALL, cache=cache, template=_CLOCK) as long,
        ServerProcess(folder, (*SMALL[:-1], 64), cache=cache, template=_CLOCK) as short,
    ):
        long.ready()
        short.ready()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = asyncio.run(ask(long.port, written(CHAT, body)))
        seen = f"{answer.status} {answer.body[:200]!r}"
        yield "a chat template that asks for the time", "refused", (answer.status == 400, seen)
        prints = [long.fingerprint, short.fingerprint]
        yield "servers with answers of different lengths", "different fingerprints", (prints[0] != prints[1], prints)
        for server, kind, code in ((long, signal.SIGINT, 130), (short, signal.SIGTERM, 143)):
            name = f"a second {kind.name} while requests are in flight"
            yield name, f"exit code {code} at once, no traceback", asyncio.run(_two_signals(server, kind, code))


async def _two_signals(server: ServerProcess, kind: signal.Signals, expected: int) -> Verdict:
    async with contextlib.AsyncExitStack() as stack:
        await open_streams(server.port, stack, 100)
        server.process.send_signal(kind)
        await asyncio.sleep(1)
        is_waiting = server.process.poll() is None
        start = time.monotonic()
        server.process.send_signal(kind)
        code: Any = await asyncio.to_thread(_code, server.process.wait)
        seconds = time.monotonic() - start
    log = server.log()
    ok = is_waiting and code == expected and seconds < 15 and "Traceback" not in log
    return ok, f"code {code} after {seconds:.1f} s, waited before: {is_waiting}, log: {log[-300:]}"


def _code(wait: Callable[[float], int]) -> int | None:
    try:
        return wait(60)
    except subprocess.TimeoutExpired:
        return None
