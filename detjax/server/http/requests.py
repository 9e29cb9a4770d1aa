"""Request ids, and the access log."""

import dataclasses
import json
import logging
import re
import time
import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from detjax.server.http import logs

_log: Final = logging.getLogger(logs.REQUESTS)
_HEADER: Final = b"x-request-id"
_SANE_ID: Final = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_STATE: Final = "detjax.request"
_LONGEST_PATH: Final = 200
CLIENT_CLOSED_REQUEST: Final = 499
"""The status that nginx logs if the client disconnects before the response begins."""


@dataclasses.dataclass
class RequestRecord:
    """The access log's record of a request.

    Attributes:
        request_id: the client's id, or a new one.
        prompt_tokens: tokens of its prompts; None if it was not admitted.
        generated_tokens: tokens generated for it.
    """

    request_id: str
    prompt_tokens: int | None = None
    generated_tokens: int = 0


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record of a request, for its handler to complete."""
    return scope["state"][_STATE]


class RequestLog:
    """ASGI middleware that gives each request an id, returns it to the client, and logs a line when the request ends.

    A valid X-Request-Id header provides the id: up to 128 letters, digits and characters of `._:@/+=-`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        client_id = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        is_sane = _SANE_ID.fullmatch(client_id) is not None
        record = RequestRecord(client_id.decode() if is_sane else f"req-{uuid.uuid4().hex}")
        scope.setdefault("state", {})[_STATE] = record
        start, status, is_complete = time.monotonic(), CLIENT_CLOSED_REQUEST, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_HEADER, record.request_id.encode())]
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body")

        token = logs.request_id.set(record.request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            _write_line(scope, record, status, is_complete, time.monotonic() - start)
            logs.request_id.reset(token)


def _write_line(scope: Scope, record: RequestRecord, status: int, is_complete: bool, seconds: float) -> None:
    if not _log.isEnabledFor(logging.INFO):
        return
    client = scope.get("client")
    fields = {
        "client": f"{client[0]}:{client[1]}" if client else None,
        "method": scope["method"],
        "path": scope["path"][:_LONGEST_PATH],
        "status": status,
        "complete": is_complete,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens,
        "seconds": round(seconds, 4),
    }
    request = json.dumps(f"{fields['method']} {fields['path']}")  # a path may have line breaks
    tokens = "" if record.prompt_tokens is None else f" {record.prompt_tokens} + {record.generated_tokens} tokens"
    end = "" if is_complete else " cut off"
    _log.info("%s %s %d%s %.3f s%s", fields["client"], request, status, end, seconds, tokens, extra={"fields": fields})
