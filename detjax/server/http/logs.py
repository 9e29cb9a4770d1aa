"""The server's log on stderr, as text or JSON."""

import contextlib
import contextvars
import datetime
import json
import logging
from collections.abc import Iterator
from typing import Any, Final

from detjax.server.http.settings import LogSettings

REQUESTS: Final = "detjax.server.http.requests"
"""The logger that writes a line per request."""

request_id: Final = contextvars.ContextVar[str | None]("request_id", default=None)
"""The id of the current task's request."""

_LOGGERS: Final = ("detjax", "uvicorn", "asyncio")


@contextlib.contextmanager
def logging_to_stderr(settings: LogSettings) -> Iterator[None]:
    """Sends the server's log messages to stderr as configured."""
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
    """Drops reports of requests that a shutdown cancelled."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "CancelledError"


def _time(record: logging.LogRecord) -> str:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")


class _TextLines(logging.Formatter):
    """Lines with time, level, message and request id; a traceback follows on separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        identity = request_id.get()
        line = f"{_time(record)} {record.levelname} {record.getMessage()}" + (f" [{identity}]" if identity else "")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    """One JSON object per line, with the message's extra fields and the traceback."""

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
