"""Parsing of request bodies, at a cost in proportion to their bytes.

Eight megabytes of JSON, the default limit, may hold millions of empty lists, strings or fields. Each of them would
become a Python object of ten to twenty times its bytes, although no request that could be served has so many. So a long
body is counted through before it is parsed. Only numbers are not counted, because prompts of token ids have many.
"""

import re
from typing import Final

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from detjax.server.http.errors import ApiError, from_validation_error, quote

LONG: Final = 1 << 16
"""Bytes from which on a body is counted through before it is parsed, and a thread parses it."""
MAX_ITEMS: Final = 1 << 17
"""The most strings, lists, objects and fields together that a body may have."""

_ITEM: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{:]', re.DOTALL)
"""A string, or what begins a list, an object or a field's value. Nothing within a string is an item."""


def parse[Body: BaseModel](body: bytes, schema: type[Body]) -> Body:
    """Returns the request that a body of JSON holds.

    Raises:
        ApiError: the body is not JSON, holds too many items, or is not as the schema describes it. The error names
            the faulty fields.
    """
    if len(body) > LONG:
        _check_number_of_items(body)
    try:
        value = from_json(body, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="json_invalid") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {quote(value)}; accepted: a JSON object", code="json_type")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise from_validation_error(error) from None


def _check_number_of_items(body: bytes) -> None:
    """Refuses a body with too many items. It looks at no more of them than are accepted."""
    if sum(map(body.count, (b'"', b"[", b"{", b":"))) <= MAX_ITEMS:
        return  # even if none of them stands within a string
    for number, _ in enumerate(_ITEM.finditer(body)):
        if number == MAX_ITEMS:
            raise ApiError(
                400,
                f"the body has more than {MAX_ITEMS} strings, lists, objects and fields; accepted: up to so many. "
                "Send several requests.",
                code="too_many_items",
            )
