"""What goes wrong, in the form that OpenAI's clients know."""

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MOST_FAULTS = 5
_LONGEST_QUOTE = 80
_OF_SEVERAL_TYPES = {
    "prompt": "a text, or a list of texts, of token ids, or of lists of token ids",
    "stop": "a text of 1 to 256 characters, or up to 16 of them",
    "content": "a text, or a list of parts of type text",
}


class ApiError(Exception):
    """An answer that is none.

    Attributes:
        status: HTTP's.
        body: what is sent.
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
        super().__init__(message)
        self.status = status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self._headers = headers

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self._headers)


def of_validation(error: ValidationError) -> ApiError:
    """Names each field, what was given and what is accepted."""
    faults = {_field(fault["loc"]): fault for fault in error.errors(include_url=False, include_context=False)}
    told = [_told(field, fault) for field, fault in faults.items()]
    if len(told) > _MOST_FAULTS:
        told[_MOST_FAULTS:] = [f"and {len(told) - _MOST_FAULTS} more"]
    # What was sent may hold halves of characters, which cannot be sent back.
    message = "; ".join(told).encode(errors="replace").decode()
    first, fault = next(iter(faults.items()))
    return ApiError(400, message, param=str(first[0]) if first else None, code=fault["type"])


def _field(where: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A fault's place, without what pydantic adds to it where a field takes several types, none of which fits."""
    return next((where[: index + 1] for index, part in enumerate(where) if part in _OF_SEVERAL_TYPES), where)


def _told(field: tuple[int | str, ...], fault: Any) -> str:
    name = ".".join(map(str, field))
    if not field:
        return fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"there is no field {name}"
    if fault["type"] == "missing":
        return f"{name} is missing"
    if field[-1] in _OF_SEVERAL_TYPES:
        return f"{name} is of no type that is accepted: {_OF_SEVERAL_TYPES[field[-1]]}"
    given = repr(fault["input"])
    given = given if len(given) <= _LONGEST_QUOTE else f"{given[:_LONGEST_QUOTE]}..."
    return f"{name} is {given}: {fault['msg'].removeprefix('Value error, ')}"
