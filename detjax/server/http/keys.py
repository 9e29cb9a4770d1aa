"""Keys that requests send as bearer tokens."""

import hmac
from collections.abc import Collection

from starlette.requests import Request

from detjax.server.http.errors import ApiError


def key_of(request: Request) -> tuple[str, bytes]:
    """Returns the kind and the key in a request's Authorization header."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return kind.lower(), key.strip().encode("latin-1")


def check_key(request: Request, accepted: Collection[bytes], *, name: str, expected: str, code: str) -> None:
    """Rejects a request without one of the accepted keys, in a time that does not depend on the key.

    Args:
        request: the request.
        accepted: the keys.
        name: the kind of key, for the error.
        expected: a description of the accepted keys, for the error.
        code: the error's code.
    """
    kind, key = key_of(request)
    if kind == "bearer" and any([hmac.compare_digest(key, known) for known in accepted]):
        return
    problem = f"the {name} is wrong" if key else f"no {name} was sent"
    raise ApiError(
        401,
        f"{problem}; expected: the header 'Authorization: Bearer KEY' with {expected}",
        code=code,
        headers={"WWW-Authenticate": "Bearer"},
    )
