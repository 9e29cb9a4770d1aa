"""Lines of the server's log in full, and the work of a text worker that dies."""

import asyncio
import contextlib
import io
import json
import logging
import re
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from detjax.server import LogSettings, logging_to_stderr
from detjax.server.http import logs
from detjax.server.text import texts
from detjax.server.text.texts import TextRefused

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


@contextlib.contextmanager
def written(**settings: Any) -> Iterator[io.StringIO]:
    with mock.patch.object(sys, "stderr", io.StringIO()) as stream, logging_to_stderr(LogSettings(**settings)):
        yield stream


def say() -> None:
    log = logging.getLogger("detjax.server.something")
    log.info("%d words", 2, extra={"fields": {"status": 200, "message": "mine"}})
    token = logs.request_id.set("an id")
    try:
        raise RuntimeError("why")
    except RuntimeError:
        log.error("broken", exc_info=True)
    finally:
        logs.request_id.reset(token)


def test_a_line_of_text_has_time_level_message_and_id() -> None:
    with written() as stream:
        say()
    first, second, *traceback = stream.getvalue().splitlines()
    assert re.fullmatch(rf"{TIME} INFO 2 words", first)
    assert re.fullmatch(rf"{TIME} ERROR broken \[an id\]", second)
    assert (traceback[0], traceback[-1]) == ("Traceback (most recent call last):", "RuntimeError: why")


def test_a_line_of_json_has_every_field() -> None:
    with written(format="json") as stream:
        say()
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(TIME, first.pop("time"))
    assert first == {"level": "info", "logger": "detjax.server.something", "message": "mine", "status": 200}
    traceback = second.pop("traceback")
    assert traceback.endswith("RuntimeError: why")
    del second["time"]
    known = {"level": "error", "logger": "detjax.server.something", "message": "broken", "request_id": "an id"}
    assert second == known


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_messages_below_the_level_are_left_out_and_others_warn(level: Any) -> None:
    with written(level=level) as stream:
        for name in ("debug", "info", "warning", "error"):
            for logger in ("detjax.engine", "uvicorn.error", "asyncio"):
                getattr(logging.getLogger(logger), name)(f"{logger} {name}")
    got = [" ".join(line.split()[-2:]) for line in stream.getvalue().splitlines()]
    order = ["debug", "info", "warning", "error"]
    expected = [f"detjax.engine {name}" for name in order[order.index(level) :]]
    assert [line for line in got if line.startswith("detjax")] == expected
    for other in ("uvicorn.error", "asyncio"):
        assert [line for line in got if line.startswith(other)] == [f"{other} warning", f"{other} error"]


def test_cancelled_requests_are_not_reported_and_loggers_are_as_before_afterwards() -> None:
    loggers = [logging.getLogger(name) for name in ("detjax", "uvicorn", "asyncio", logs.REQUESTS)]
    before = [(one.handlers, one.level, one.propagate, one.disabled) for one in loggers]
    with written(access=False) as stream:
        assert logging.getLogger(logs.REQUESTS).disabled
        assert not logging.getLogger("detjax").propagate
        for error in (asyncio.CancelledError(), KeyError("told")):
            logging.getLogger("asyncio").error("a task", exc_info=error)
    assert "CancelledError" not in stream.getvalue()
    assert "KeyError: 'told'" in stream.getvalue()
    assert [(one.handlers, one.level, one.propagate, one.disabled) for one in loggers] == before


# --- text workers that die --------------------------------------------------------------------------------------------


class Dying:
    """Stands in for `subprocess`: each process ends with the next code before it answers; None: it answers."""

    PIPE = None

    def __init__(self, *codes: int | None) -> None:
        self.codes, self.started = [*codes], list[Any]()

    def Popen(self, command: list[str], **options: Any) -> Any:
        code = self.codes.pop(0)
        pipe = SimpleNamespace(code=code, close=lambda: None)
        self.started.append((command, options))
        return SimpleNamespace(stdin=pipe, stdout=pipe, wait=lambda: code, kill=lambda: None)


def worker(monkeypatch: pytest.MonkeyPatch, *codes: int | None) -> tuple[Any, Dying]:
    dying = Dying(*codes)

    def send(pipe: Any, frames: Any) -> None:
        pipe.sent = [*frames]

    def receive(pipe: Any) -> list[bytes]:
        if pipe.code is not None:
            raise EOFError
        return [b"answer", *pipe.sent]

    monkeypatch.setattr(texts, "subprocess", dying)
    monkeypatch.setattr(texts, "text_frames", SimpleNamespace(send=send, receive=receive))
    return texts._Worker([b"start"], 2.5), dying


def test_a_job_is_done_again_once_and_not_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, dying = worker(monkeypatch, -9, None)
    assert one.run(lambda: [b"job"]) == [b"answer", b"job"]
    assert one.run(lambda: [b"more"]) == [b"answer", b"more"]
    assert len(dying.started) == 2
    assert "a text worker ended with code -9; restarting it" in caplog.text
    command, options = dying.started[0]
    assert command[:2] == [sys.executable, "-P"] and options["process_group"] == 0
    one, dying = worker(monkeypatch, -9, 1, None)
    with pytest.raises(TextRefused, match="crashed its process twice; send a shorter text"):
        one.run(lambda: [b"job"])
    assert len(dying.started) == 2
    assert one.run(lambda: [b"job"]) == [b"answer", b"job"]


def test_a_job_that_takes_too_long_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, dying = worker(monkeypatch, -signal.SIGPROF, None)
    with pytest.raises(
        TextRefused, match=r"took more than 2\.5 s of CPU time, the server's limit; send a shorter text"
    ):
        one.run(lambda: [b"job"])
    assert len(dying.started) == 1


def test_a_closed_worker_starts_no_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    one, dying = worker(monkeypatch, 0, None)
    assert one.run(lambda: [b"job"]) == [b"answer", b"job"]
    assert caplog.text == "", "a worker that took too much memory ends with code 0"
    one.close()
    with pytest.raises(RuntimeError, match="the text workers are closed"):
        one.run(lambda: [b"job"])
    assert len(dying.started) == 2
