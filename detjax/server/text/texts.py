"""Text work of requests in separate processes: chat templates, tokenizing and decoding.

A tokenizer takes seconds for a text of megabytes, with hundreds of bytes of memory per byte of text, and builds the
list of tokens under Python's lock. A chat template is a program from a checkpoint that may never end. In this process,
either would block every stream.
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
from detjax.models.text.video_texts import VideoTexts
from detjax.server.text import frames as text_frames

_log: Final = logging.getLogger(__name__)
_PROGRAM: Final = Path(__file__).with_name("process.py")
_BRIEF: Final = 1 << 12
"""Characters or tokens up to which a thread of this process does the work, in a millisecond or two."""
_LONG: Final = 1 << 17
"""Bytes from which a job goes to the worker for long jobs, so that it does not delay others."""
_WORKERS: Final = 2
"""Number of processes for the other jobs."""
_MESSAGES: Final = 500
"""Messages to encode as JSON before yielding to other threads."""


class Message(Protocol):
    """A message of a conversation."""

    def for_template(self) -> Mapping[str, Any]:
        """Returns the message in the form that chat templates expect."""
        ...


type Frames = Iterable[bytes]


class TextRefused(ValueError):
    """The chat template rejects the messages, or the work on a text takes too much time or memory."""


class TextTooLong(ValueError):
    """Text `number` of a request is too long; `size` describes its length, such as "1000 tokens"."""

    def __init__(self, number: int, size: str) -> None:
        super().__init__(f"text {number} has {size}")
        self.number, self.size = number, size


class Texts:
    """Does the text work of all requests.

    Texts of a few thousand characters are encoded in a thread. Everything else goes to worker processes, which start at
    the first job or at `start`. A worker that dies is replaced, and its job is retried once.
    """

    def __init__(self, tokenizer: Tokenizer, cpu_seconds: float = 30) -> None:
        """Creates workers for a tokenizer. A job is killed, and its request rejected, after `cpu_seconds`."""
        self._tokenizer = tokenizer
        settings = {"names": [*tokenizer.files], "source": "the checkpoint", "cpu_seconds": cpu_seconds}
        start = [json.dumps(settings).encode(), *tokenizer.files.values()]
        self._workers = [_Worker(start, cpu_seconds) for _ in range(_WORKERS + 1)]
        self._short, self._long = _WorkerQueue(self._workers[:-1]), _WorkerQueue(self._workers[-1:])
        # Ends the processes of a server that nobody closed.
        self._end = weakref.finalize(self, _end_workers, self._workers, [self._short, self._long])

    def start(self) -> None:
        """Starts all workers, without waiting for them to be ready."""
        for lane in (self._short, self._long):
            lane.start()

    def close(self) -> None:
        """Ends all workers. Unfinished jobs fail."""
        self._end()

    async def encode(self, texts: Sequence[str], *, limit: int, add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the token ids of each text of a request.

        Raises:
            TextTooLong: a text has more than `limit` tokens.
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
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        videos: VideoTexts | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation; `variables` are additional ones for the chat template.

        `videos` take the place of the template's texts for videos. For the other arguments see
        `Tokenizer.apply_chat_template`.

        Raises:
            TextTooLong: the conversation has more than `limit` tokens.
            TextRefused: the template rejects the messages, or the work took too much time or memory.
        """
        job = {
            "operation": "chat",
            "limit": limit,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "add_special_tokens": add_special_tokens,
            "variables": dict(variables),
        } | ({} if videos is None else {"videos": videos})
        frames = await run_in_threadpool(_message_frames, messages)
        (tokens,) = await self._run(sum(map(len, frames)), job, lambda: frames, _read_tokens(limit))
        return tokens

    async def decode(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns the text of each list of token ids; raises TextRefused if it takes too much time or memory."""
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
        """Runs a job on the worker for its `size`, and returns the result of `read` on the frames of its answer."""

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
    """Workers that do jobs in order of arrival, each with a thread that waits for its answers."""

    def __init__(self, workers: Sequence["_Worker"]) -> None:
        self._idle = queue.SimpleQueue[_Worker]()
        for worker in workers:
            self._idle.put(worker)
        self.threads = ThreadPoolExecutor(len(workers), "detjax-text")
        self._num_workers = len(workers)

    async def run[T](self, use: Callable[["_Worker"], T]) -> T:
        """Calls a function with an idle worker in a thread, which cancelling the caller does not stop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, self._with_worker, use)

    def start(self) -> None:
        for _ in range(self._num_workers):
            self.threads.submit(self._with_worker, _Worker.start)

    def _with_worker[T](self, use: Callable[["_Worker"], T]) -> T:
        worker = self._idle.get()
        try:
            return use(worker)
        finally:
            self._idle.put(worker)


class _Worker:
    """The server's end of a worker process, which starts on demand."""

    def __init__(self, start_message: Sequence[bytes], cpu_seconds: float) -> None:
        self._start_message, self._cpu_seconds = start_message, cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()
        self._is_closed = False

    def run(self, frames: Callable[[], Frames]) -> list[bytes]:
        """Returns a job's answer; raises TextRefused if the job takes too much CPU time, or crashes two processes."""
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
                    _log.warning("a text worker ended with code %d; restarting it", code)
        raise TextRefused("the work on the request's text crashed its process twice; send a shorter text")

    def start(self) -> "subprocess.Popen[bytes]":
        """Returns the process, and starts it if necessary; raises a RuntimeError if the worker is closed."""
        with self._changing:
            if self._is_closed:
                raise RuntimeError("the text workers are closed")
            if self._process is not None:
                return self._process
            # -P keeps the program's directory, whose files have common names, out of sys.path. Its own process group
            # shields it from the terminal's Ctrl-C, after which requests in flight may still need it.
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
        """Kills the process, and starts no new one."""
        with self._changing:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        self._reap()

    def _reap(self) -> int | None:
        """Ends the process, if any, and returns its exit code."""
        with self._changing:
            process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # buffered data cannot be written any more
                assert pipe is not None
                pipe.close()
        return process.wait()


def _end_workers(workers: Sequence[_Worker], lanes: Sequence[_WorkerQueue]) -> None:
    for worker in workers:
        worker.close()
    for lane in lanes:
        lane.threads.shutdown(wait=False, cancel_futures=True)


def _message_frames(messages: Sequence[Message]) -> list[bytes]:
    parts = [messages[first : first + _MESSAGES] for first in range(0, len(messages), _MESSAGES)]
    return [json.dumps([message.for_template() for message in part], ensure_ascii=False).encode() for part in parts]


def _read_tokens(limit: int) -> Callable[[Sequence[bytes]], list[list[int]]]:
    """Returns a reader of an answer's token ids, which raises `TextTooLong` if a text has more than `limit`."""

    def read(frames: Sequence[bytes]) -> list[list[int]]:
        for number, text in enumerate(json.loads(frames[0])["texts"]):
            if text["count"] is None:
                raise TextTooLong(number, f"{text['bytes']} bytes, more than {limit} tokens have")
            if text["count"] > limit:
                raise TextTooLong(number, f"{text['count']} tokens")
        return [memoryview(frame).cast("I").tolist() for frame in frames[1:]]

    return read
