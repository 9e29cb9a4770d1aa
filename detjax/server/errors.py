"""Errors in the form that OpenAI's clients expect."""

import logging
from typing import Any, Final

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from detjax.engine import EngineClosed

_log: Final = logging.getLogger(__name__)
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MOST_FAULTS: Final = 5
_LONGEST_QUOTE: Final = 80
_FIELDS_OF_SEVERAL_TYPES: Final = {
    "prompt": "a string, or a list of strings, of token ids, or of lists of token ids",
    "stop": "a string of 1 to 256 characters, or a list of up to 16 of them",
    "content": "a string, or a list of parts of type text",
}
"""Fields that take values of several types, and their description for error messages."""


class ApiError(Exception):
    """An error that a client is told of.

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
        """An error; `param` names the field of the request that caused it, and `code` is for programs to read."""
        super().__init__(message)
        self.status = status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self._headers = headers

    def response(self) -> JSONResponse:
        """The HTTP response that tells of the error."""
        return JSONResponse(self.body, self.status, self._headers)


async def error_response(_: Request, error: Exception) -> Response:
    """Starlette's handler of `ApiError` and of its own `HTTPException`."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    assert isinstance(error, ApiError)
    return error.response()


def to_api_error(error: Exception) -> ApiError:
    """Returns what a client is told of an exception. A defect's details go to the log and not to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error))
    if isinstance(error, ValueError):  # the engine, the tokenizer or the chat template refused the request
        return ApiError(400, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error: the server has a defect; its log holds the details")


def from_validation_error(error: ValidationError) -> ApiError:
    """Returns an error that names each faulty field, what was given and what is accepted."""
    faults = {_field(fault["loc"]): fault for fault in error.errors(include_url=False, include_context=False)}
    messages = [_describe(field, fault) for field, fault in faults.items()]
    if len(messages) > _MOST_FAULTS:
        messages[_MOST_FAULTS:] = [f"and {len(messages) - _MOST_FAULTS} more"]
    # The request may contain lone surrogates, which UTF-8 cannot encode.
    message = "; ".join(messages).encode(errors="replace").decode()
    first, fault = next(iter(faults.items()))
    return ApiError(400, message, param=str(first[0]) if first else None, code=fault["type"])


def _field(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The path of a faulty field, without what pydantic appends for each type of a field that takes several."""
    ends = (location[: index + 1] for index, part in enumerate(location) if part in _FIELDS_OF_SEVERAL_TYPES)
    return next(ends, location)


def _describe(field: tuple[int | str, ...], fault: Any) -> str:
    name = ".".join(map(str, field))
    if not field:
        return fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"there is no field {name}"
    if fault["type"] == "missing":
        return f"{name} is missing"
    if field[-1] in _FIELDS_OF_SEVERAL_TYPES:
        return f"{name} is not valid; accepted: {_FIELDS_OF_SEVERAL_TYPES[field[-1]]}"
    given = repr(fault["input"])
    given = given if len(given) <= _LONGEST_QUOTE else f"{given[:_LONGEST_QUOTE]}..."
    return f"{name} is {given}: {fault['msg'].removeprefix('Value error, ')}"
