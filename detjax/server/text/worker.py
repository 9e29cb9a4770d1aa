"""A text worker: a process that applies chat templates, tokenizes and decodes, one job at a time.

Jobs cost the server no time. A kernel timer kills the process of a job that takes too much CPU time, even if a template
computes something that Python code cannot interrupt.
"""

import array
import contextlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from detjax.models.text.tokenizer import Tokenizer
from detjax.models.text.video_texts import VideoTexts
from detjax.models.text.written_json import written_object
from detjax.server.text import frames as text_frames
from detjax.server.text.bounds import bytes_per_token

MEMORY: Final = 4 << 30
"""Maximum address space of a job, in bytes."""
_KEPT: Final = 128 << 20
"""Memory growth after which the process ends and is replaced, in bytes."""

type Job = dict[str, Any]


class Refusal(Exception):
    """A text is rejected; the message has the reason."""


class Worker:
    """Does jobs with a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_per_token = bytes_per_token(json.loads(tokenizer.files["tokenizer.json"]))

    def answer(self, job: Job, parts: list[bytes]) -> list[bytes]:
        """Returns the frames of a job's answer; `parts` are the job's texts, messages or tokens."""
        operations: dict[str, Callable[[Job, list[bytes]], list[bytes]]] = {
            "encode": self._encode,
            "chat": self._encode_chat,
            "decode": self._decode,
        }
        try:
            return operations[job["operation"]](job, parts)
        except Refusal as refusal:
            return [_json({"refused": str(refusal)})]
        except MemoryError:
            return [_json({"refused": "the work on the request's text needs too much memory; send a shorter text"})]
        except Exception:
            return [_json({"failed": traceback.format_exc()})]

    def _encode(self, job: Job, parts: list[bytes]) -> list[bytes]:
        answer, tokens = [], []
        for part in parts:
            answer.append(self._tokens(part.decode(), job, tokens))
        return [_json({"texts": answer}), *tokens]

    def _encode_chat(self, job: Job, parts: list[bytes]) -> list[bytes]:
        messages = [_with_written_arguments(message) for part in parts for message in json.loads(part)]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                job["add_generation_prompt"],
                continue_final_message=job.get("continue_final_message", False),
                **job["variables"],
            )
        except ValueError as error:  # its message has the checkpoint's directory, which clients must not see
            cause = "it needs too much memory" if isinstance(error.__cause__, MemoryError) else error.__cause__
            raise Refusal(f"the chat template refuses these messages: {cause or error}") from error
        if job.get("videos") is not None:
            try:
                text = VideoTexts(*job["videos"]).put_into(text)
            except ValueError as error:
                raise Refusal(str(error)) from error
        tokens: list[bytes] = []
        return [_json({"texts": [self._tokens(text, job, tokens)]}), *tokens]

    def _tokens(self, text: str, job: Job, tokens: list[bytes]) -> Job:
        """Appends the tokens of a text to `tokens`, unless they exceed the job's limit, and returns its lengths."""
        limit, size = job["limit"], len(text.encode())
        if self._bytes_per_token is not None and size > limit * self._bytes_per_token:
            return {"bytes": size, "count": None}
        ids = self._tokenizer.encode(text, add_special_tokens=job["add_special_tokens"])
        if len(ids) <= limit:
            tokens.append(array.array("I", ids).tobytes())
        return {"bytes": size, "count": len(ids)}

    def _decode(self, job: Job, parts: list[bytes]) -> list[bytes]:
        texts = (self._tokenizer.decode(array.array("I", part), job["skip_special_tokens"]) for part in parts)
        return [_json({}), *(text.encode() for text in texts)]


def _with_written_arguments(message: Job) -> Job:
    """Returns a message whose calls have objects as arguments if they are objects, which templates write as given."""
    for call in message.get("tool_calls") or ():
        given = call["function"]["arguments"]
        if isinstance(given, str) and (arguments := written_object(given or "{}")) is not None:
            call["function"]["arguments"] = arguments
    return message


def serve() -> None:
    """Reads the tokenizer's files, then jobs, from standard input, and answers them until the server closes it."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # everything else that writes to standard output must not get into the answers
    try:
        header, *contents = text_frames.receive(jobs)
        settings = json.loads(header)
        worker = Worker(Tokenizer(dict(zip(settings["names"], contents, strict=True)), settings["source"]))
        address_space, resident = _memory()
        with contextlib.suppress(OSError, ValueError):  # the system may not let a process limit itself
            resource.setrlimit(resource.RLIMIT_AS, (address_space + MEMORY, resource.RLIM_INFINITY))
        while _memory()[1] < resident + _KEPT:
            header, *parts = text_frames.receive(jobs)
            # The timer's signal ends the process. It counts CPU time, so that a busy machine does not kill jobs.
            signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
            answer = worker.answer(json.loads(header), parts)
            signal.setitimer(signal.ITIMER_PROF, 0)
            text_frames.send(answers, answer)
    except (EOFError, BrokenPipeError):
        pass  # the server has ended


def _memory() -> tuple[int, int]:
    """Returns the bytes of the process's address space and of its resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size, resident = file.read().split()[:2]
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _json(content: Job) -> bytes:
    return json.dumps(content).encode()
