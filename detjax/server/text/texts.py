"""Text work of requests: chat templates, tokens of texts and texts of tokens, by processes of their own.

A text of megabytes takes a tokenizer seconds and hundreds of bytes of memory for each of its own, and its list of
tokens is made under Python's lock; a chat template is a program that comes with a checkpoint and may never end. In this
process either would stop every stream.
"""

import array
import asyncio
import contextlib
import itertools
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

from starlette.concurrency import run_in_threadpool

from detjax.models import Tokenizer
from detjax.server.text import frames as text_frames

_log: Final = logging.getLogger(__name__)
_PROGRAM: Final = Path(__file__).with_name("process.py")
_BRIEF: Final = 1 << 12
"""Characters or tokens up to which a thread of this process does the work: a millisecond or two."""
_LONG: Final = 1 << 17
"""Bytes from which on a job goes to the worker of long jobs, where no others wait behind it."""
_WORKERS: Final = 2
"""Processes for the other jobs."""
_MESSAGES: Final = 500
"""Messages that become JSON at once, before other threads have a turn."""


class Message(Protocol):
    """A message of a conversation."""

    def for_template(self) -> Mapping[str, Any]:
        """The message as chat templates expect it."""
        ...


type Frames = Iterable[bytes]


class TextRefused(ValueError):
    """The chat template refuses the messages, or the work on a text takes too much time or memory."""


class TextTooLong(ValueError):
    """A text has more tokens than fit.

    Attributes:
        number: which of the request's texts it is.
        size: a description of its length, such as "1000 tokens".
    """

    def __init__(self, number: int, size: str) -> None:
        """An error; see the attributes."""
        super().__init__(f"text {number} has {size}")
        self.number, self.size = number, size


class Texts:
    """Does the text work of all requests. It is closed at the server's end.

    Texts of a few thousand characters are encoded in a thread. Everything else goes to worker processes, which start at
    the first job, or at `start`. A worker that dies is replaced, and its job is tried once more.
    """

    def __init__(self, tokenizer: Tokenizer, cpu_seconds: float = 30) -> None:
        """Makes workers for a tokenizer.

        Args:
            tokenizer: is made again, of the same files, in each worker.
            cpu_seconds: CPU time after which a job is ended and its request refused.
        """
        self._tokenizer = tokenizer
        start = _start_message(tokenizer, cpu_seconds)
        self._workers = [_Worker(start, cpu_seconds) for _ in range(_WORKERS + 1)]
        self._short, self._long = _WorkerQueue(self._workers[:-1]), _WorkerQueue(self._workers[-1:])
        # A server that nobody closed must not leave processes behind.
        self._end = weakref.finalize(self, _end_workers, self._workers, [self._short, self._long])

    def start(self) -> None:
        """Starts all workers, and returns before they are ready."""
        for lane in (self._short, self._long):
            lane.start()

    def close(self) -> None:
        """Ends all workers. Jobs that they had not finished fail."""
        self._end()

    async def encode(self, texts: Sequence[str], *, limit: int, add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the token ids of each text.

        Args:
            texts: the texts of one request.
            limit: tokens that a text may have.
            add_special_tokens: as in `Tokenizer.encode`.

        Raises:
            TextTooLong: a text has more tokens.
            TextRefused: the work took too much time or memory.
        """
        size = sum(map(len, texts))
        if size + len(texts) <= _BRIEF:
            return await run_in_threadpool(self._encode_here, texts, limit, add_special_tokens)
        job = {"operation": "encode", "limit": limit, "add_special_tokens": add_special_tokens}
        return await self._run(size, job, lambda: (text.encode() for text in texts), _read_tokens(limit))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        limit: int,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Returns the token ids of a conversation.

        Args:
            messages: the conversation.
            variables: further variables of the template.
            limit: tokens that the conversation may have.
            add_generation_prompt: whether the text ends with what opens an answer.
            add_special_tokens: whether to add what the tokenizer puts around every text; templates write it themselves.

        Raises:
            TextTooLong: the conversation has more tokens.
            TextRefused: the template refuses the messages, or the work took too much time or memory.
        """
        job = {
            "operation": "chat",
            "limit": limit,
            "add_generation_prompt": add_generation_prompt,
            "add_special_tokens": add_special_tokens,
            "variables": dict(variables),
        }
        frames = await run_in_threadpool(_message_frames, messages)
        (tokens,) = await self._run(sum(map(len, frames)), job, lambda: frames, _read_tokens(limit))
        return tokens

    async def decode(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns the text of each list of token ids.

        Raises:
            TextRefused: the work took too much time or memory.
        """
        size = sum(map(len, lists))
        if size + len(lists) <= _BRIEF:
            return await run_in_threadpool(
                lambda: [self._tokenizer.decode(tokens, skip_special_tokens) for tokens in lists]
            )
        job = {"operation": "decode", "skip_special_tokens": skip_special_tokens}
        return await self._run(
            4 * size,
            job,
            lambda: (array.array("I", tokens).tobytes() for tokens in lists),
            lambda frames: [frame.decode() for frame in frames[1:]],
        )

    def _encode_here(self, texts: Sequence[str], limit: int, add_special_tokens: bool) -> list[list[int]]:
        lists = [self._tokenizer.encode(text, add_special_tokens) for text in texts]
        for number, tokens in enumerate(lists):
            if len(tokens) > limit:
                raise TextTooLong(number, f"{len(tokens)} tokens")
        return lists

    async def _run[T](
        self, size: int, job: Mapping[str, Any], parts: Callable[[], Frames], read: Callable[[Sequence[bytes]], T]
    ) -> T:
        """Returns what `read` makes of the frames of a job's answer. `size` decides which worker does the job."""

        def run(worker: _Worker) -> T:
            answer = worker.run(lambda: itertools.chain([json.dumps(job).encode()], parts()))
            outcome = json.loads(answer[0])
            if "refused" in outcome:
                raise TextRefused(outcome["refused"])
            if "failed" in outcome:
                raise RuntimeError(f"a text worker failed: {outcome['failed']}")
            return read(answer)

        return await (self._long if size >= _LONG else self._short).run(run)


class _WorkerQueue:
    """Workers that do jobs in the order in which they come, with a thread for each that waits for its answers."""

    def __init__(self, workers: Sequence["_Worker"]) -> None:
        self._idle = queue.SimpleQueue[_Worker]()
        for worker in workers:
            self._idle.put(worker)
        self.threads = ThreadPoolExecutor(len(workers), "detjax-text")
        self._num_workers = len(workers)

    async def run[T](self, use: Callable[["_Worker"], T]) -> T:
        """Calls a function with an idle worker, in a thread, and returns what it returns.

        If the caller is cancelled meanwhile, the worker finishes its job.
        """
        return await asyncio.get_running_loop().run_in_executor(self.threads, self._with_worker, use)

    def start(self) -> None:
        """Starts the workers."""
        for _ in range(self._num_workers):
            self.threads.submit(self._with_worker, _Worker.start)

    def _with_worker[T](self, use: Callable[["_Worker"], T]) -> T:
        worker = self._idle.get()
        try:
            return use(worker)
        finally:
            self._idle.put(worker)


class _Worker:
    """The server's end of a worker process, which is started when it is needed."""

    def __init__(self, start_message: Sequence[bytes], cpu_seconds: float) -> None:
        self._start_message, self._cpu_seconds = start_message, cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()
        self._is_closed = False

    def run(self, frames: Callable[[], Frames]) -> list[bytes]:
        """Returns a job's answer.

        Raises:
            TextRefused: the job took too much CPU time, or ended two processes.
        """
        for _ in range(2):
            try:
                process = self.start()
                assert process.stdin is not None
                assert process.stdout is not None
                text_frames.send(process.stdin, frames())
                return text_frames.receive(process.stdout)
            except (OSError, EOFError):
                code = self._reap()
                if code == -signal.SIGPROF:
                    raise TextRefused(
                        f"the work on the request's text took more than {self._cpu_seconds:g} s of CPU time, the "
                        "server's limit; send a shorter text"
                    ) from None
                if code:
                    _log.warning("a text worker ended with code %d; another one is started", code)
        raise TextRefused("the work on the request's text ended its process twice; send a shorter text")

    def start(self) -> "subprocess.Popen[bytes]":
        """Returns the process, which is started if there is none.

        Raises:
            RuntimeError: the worker was closed.
            OSError: the process could not be started, or ended at once.
        """
        with self._changing:
            if self._is_closed:
                raise RuntimeError("the text workers were closed")
            if self._process is not None:
                return self._process
            # -P keeps the program's own folder, whose files have common names, out of the places of imports. A group of
            # its own keeps the terminal's Ctrl-C away, after which requests in flight may still need it.
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
            )
        assert process.stdin is not None
        text_frames.send(process.stdin, self._start_message)
        return process

    def close(self) -> None:
        """Ends the process for good."""
        with self._changing:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        self._reap()

    def _reap(self) -> int | None:
        """Ends the process, if there is one, and returns its exit code."""
        with self._changing:
            process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not written yet cannot be written any more
                assert pipe is not None
                pipe.close()
        return process.wait()


def _end_workers(workers: Sequence[_Worker], lanes: Sequence[_WorkerQueue]) -> None:
    for worker in workers:
        worker.close()
    for lane in lanes:
        lane.threads.shutdown(wait=False, cancel_futures=True)


def _start_message(tokenizer: Tokenizer, cpu_seconds: float) -> list[bytes]:
    settings = {"names": [*tokenizer.files], "source": "the checkpoint", "cpu_seconds": cpu_seconds}
    return [json.dumps(settings).encode(), *tokenizer.files.values()]


def _message_frames(messages: Sequence[Message]) -> list[bytes]:
    parts = [messages[first : first + _MESSAGES] for first in range(0, len(messages), _MESSAGES)]
    return [json.dumps([message.for_template() for message in part], ensure_ascii=False).encode() for part in parts]


def _read_tokens(limit: int) -> Callable[[Sequence[bytes]], list[list[int]]]:
    """Returns a function of an answer's frames that returns the token ids of each text.

    It raises `TextTooLong` if a text has more than `limit`.
    """

    def read(frames: Sequence[bytes]) -> list[list[int]]:
        for number, text in enumerate(json.loads(frames[0])["texts"]):
            if text["count"] is None:
                raise TextTooLong(number, f"{text['bytes']} bytes, more than {limit} tokens have")
            if text["count"] > limit:
                raise TextTooLong(number, f"{text['count']} tokens")
        return [memoryview(frame).cast("I").tolist() for frame in frames[1:]]

    return read
