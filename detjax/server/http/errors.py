"""Errors in the format that OpenAI's clients expect."""

import logging
from itertools import islice
from typing import Any, Final, Protocol

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from detjax.engine import EngineClosed, FieldError, NotFinite
from detjax.server.http.field_types import is_tag

_log: Final = logging.getLogger(__name__)
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_FAULTS: Final = 5
_LONGEST_QUOTE: Final = 80
_MAX_QUOTED: Final = 3


class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
        status: the HTTP status.
        body: the JSON body of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """An error; `param` names the request field that caused it, and `code` is machine-readable."""
        super().__init__(message)
        self.status = status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self._headers = headers

    def response(self) -> JSONResponse:
        """Returns the error as an HTTP response."""
        return JSONResponse(self.body, self.status, self._headers)


class NamesFields(Protocol):
    """A body that maps the engine's field names to its own."""

    def param_of(self, field: str) -> str:
        """Returns the body's name for a field of `Request`, `SamplingParams` or the body itself."""
        ...


async def error_response(_: Request, error: Exception) -> Response:
    """Handles `ApiError` and Starlette's `HTTPException`."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    assert isinstance(error, ApiError)
    return error.response()


def to_api_error(error: Exception, body: NamesFields | None = None) -> ApiError:
    """Converts an exception to an error for the client, which names the field of `body`. Bugs only go to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error))
    if isinstance(error, FieldError) and body is not None:
        return ApiError(400, str(error), param=body.param_of(error.field))
    if isinstance(error, ValueError):  # the engine, the tokenizer or the chat template rejected the request
        return ApiError(400, str(error))
    _log.error("a request failed", exc_info=error)
    if isinstance(error, NotFinite):  # the checkpoint's fault, not the server's
        return ApiError(500, str(error))
    return ApiError(500, "internal error: this is a bug in the server; its log has the details")


def from_validation_error(error: ValidationError) -> ApiError:
    """Returns an error that names each faulty field with the given and the accepted values."""
    faults = {_field(fault["loc"]): fault for fault in error.errors(include_url=False)}
    messages = [_describe(field, fault) for field, fault in islice(faults.items(), _MAX_FAULTS)]
    if len(faults) > _MAX_FAULTS:
        messages.append(f"and {len(faults) - _MAX_FAULTS} more")
    # The request may contain lone surrogates, which UTF-8 cannot encode.
    message = "; ".join(messages).encode(errors="replace").decode()
    first, fault = next(iter(faults.items()))
    context = fault.get("ctx", {})
    param = str(first[0]) if first else context.get("field") or getattr(context.get("error"), "field", None)
    return ApiError(400, message, param=param and _shortened(param), code=fault["type"])


def _field(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns the path of a faulty field, without the tags of union types."""
    return tuple(part for part in location if not is_tag(part))


def _describe(field: tuple[int | str, ...], fault: Any) -> str:
    name = ".".join(_shortened(str(part)) for part in field)
    if fault["type"] == "extra_forbidden" and not fault["msg"].startswith("there "):
        return f"there is no field {name}"
    if fault["type"] == "missing":
        return f"{name} is missing"
    problem = fault["msg"].removeprefix("Value error, ")
    if not field:
        return problem
    return f"{name} is {quote(fault['input'])}{'; ' if problem.startswith('accepted: ') else ': '}{problem}"


def quote(value: Any, depth: int = 2) -> str:
    """Quotes the beginning of a JSON value for an error message, in constant time."""
    match value:
        case str():
            return _shortened(repr(value[: _LONGEST_QUOTE + 1]))
        case list() | dict() if value and not depth:
            return "[...]" if isinstance(value, list) else "{...}"
        case list():
            items = [quote(item, depth - 1) for item in value[:_MAX_QUOTED]]
        case dict():
            pairs = islice(value.items(), _MAX_QUOTED)
            items = [f"{quote(name)}: {quote(item, depth - 1)}" for name, item in pairs]
        case _:
            return _shortened(repr(value))
    text = ", ".join(items) + (", ..." if len(value) > _MAX_QUOTED else "")
    return f"[{text}]" if isinstance(value, list) else f"{{{text}}}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."
