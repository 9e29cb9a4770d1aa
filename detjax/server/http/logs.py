"""The server's log on stderr: lines for people, or JSON."""

import contextlib
import contextvars
import datetime
import json
import logging
from collections.abc import Iterator
from typing import Any, Final

from detjax.server.http.settings import LogSettings

REQUESTS: Final = "detjax.server.http.requests"
"""The logger that has a line for each request."""

request_id: Final = contextvars.ContextVar[str | None]("request_id", default=None)
"""The id of the request that the current task serves."""

_LOGGERS: Final = ("detjax", "uvicorn", "asyncio")


@contextlib.contextmanager
def logging_to_stderr(settings: LogSettings) -> Iterator[None]:
    """A context in which the server's messages go to stderr as the settings say."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if settings.format == "json" else _TextLines())
    handler.addFilter(_is_no_cancellation)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    requests = logging.getLogger(REQUESTS)
    was_disabled, requests.disabled = requests.disabled, not settings.access
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(settings.level.upper() if logger.name == "detjax" else logging.WARNING)
    try:
        yield
    finally:
        for logger, (handlers, level, propagates) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagates
            logger.setLevel(level)
        requests.disabled = was_disabled


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a message is no report of a request that was cancelled, which is no defect, at the end of the server."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "CancelledError"


def _time(record: logging.LogRecord) -> str:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")


class _TextLines(logging.Formatter):
    """A line with the time, the level, the request's id and the message; a traceback follows on further lines."""

    def format(self, record: logging.LogRecord) -> str:
        identity = request_id.get()
        line = f"{_time(record)} {record.levelname} {record.getMessage()}" + (f" [{identity}]" if identity else "")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    """One JSON object a line, with the fields that a message was given beside its text, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (identity := request_id.get()) is not None:
            content["request_id"] = identity
        content |= getattr(record, "fields", {})
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)
