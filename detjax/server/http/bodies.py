"""Parsing of request bodies, at a cost proportional to their size.

Eight megabytes of JSON, the default limit, can hold millions of empty lists, strings or fields, and each would become a
Python object of ten to twenty times its size. No valid request has that many, so the items of a long body are counted
before it is parsed. Numbers are not counted, because prompts of token ids have many.
"""

import re
from typing import Final

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from detjax.server.http.errors import ApiError, from_validation_error, quote

LONG: Final = 1 << 16
"""Bytes above which a body's items are counted before it is parsed, in a thread."""
MAX_ITEMS: Final = 1 << 17
"""Maximum number of strings, lists, objects and fields in a body."""

_ITEM: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{:]', re.DOTALL)
"""A string, or the first character of a list, an object or a field's value. Nothing inside a string is an item."""


def parse[Body: BaseModel](body: bytes, schema: type[Body]) -> Body:
    """Parses a JSON body. Raises an ApiError if it is not JSON, has too many items, or does not match the schema."""
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
    """Rejects a body with too many items, and stops counting at the limit."""
    if sum(map(body.count, (b'"', b"[", b"{", b":"))) <= MAX_ITEMS:
        return  # an upper bound: it also counts characters inside strings
    for number, _ in enumerate(_ITEM.finditer(body)):
        if number == MAX_ITEMS:
            raise ApiError(
                400,
                f"the body has more than {MAX_ITEMS} strings, lists, objects and fields; accepted: up to {MAX_ITEMS}. "
                "Send several requests.",
                code="too_many_items",
            )
