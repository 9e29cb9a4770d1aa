"""Types of request fields, with limits on their sizes.

Validation time is proportional to a body's size, whatever is wrong with it: a list is checked up to its first invalid
item, a dictionary's length is checked before its entries, and a field that accepts several types is validated only
against the one that the value's own type selects.
"""

from itertools import islice
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from detjax.engine.sampling_params import MAX_BIASES

MAX_SAMPLES: Final = 128
"""Samples per prompt."""
MAX_PROMPTS: Final = 2048
"""Prompts per request."""
MAX_TOKENS: Final = 1 << 20
"""Token ids per prompt."""
MAX_MESSAGES: Final = 4096
"""Messages per conversation."""
MAX_PARTS: Final = 1024
"""Content parts per message."""
MAX_STOPS: Final = 16
"""Stop strings per request."""
LONGEST_STOP: Final = 256
"""Characters per stop string."""
MAX_STOP_TOKENS: Final = 1024
"""Entries of `stop_token_ids`."""
MAX_ALLOWED_TOKENS: Final = 1 << 18
"""Entries of `allowed_token_ids`."""
MAX_BAD_WORDS: Final = 256
"""Entries of `bad_words`. Each has up to `LONGEST_STOP` characters."""
MAX_METADATA: Final = 64
"""Entries of `metadata`."""
MAX_VARIABLES: Final = 64
"""Entries of `chat_template_kwargs`."""
MAX_CHOICES: Final = 1024
"""Texts in the `choice` of `structured_outputs`."""
MAX_TOOLS: Final = 128
"""Tools per request."""
MAX_CALLS: Final = 128
"""Tool calls per message."""
LONGEST_SALT: Final = 256
"""Characters of `cache_salt`."""
LONGEST_NAME: Final = 256
"""Characters of a request's name."""
MAX_NAMES: Final = 4096
"""Requests to abort at once."""
RESERVED_VARIABLES: Final = frozenset(
    {"add_generation_prompt", "continue_final_message", "documents", "messages", "raise_exception", "self"}
    | {"strftime_now", "tools"}
)
"""Chat template variables that only the server sets."""
LARGEST: Final = 2**31 - 1
"""The largest token id, also the limit of other numbers."""


class Body(BaseModel):
    """A JSON object with exactly these fields and types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: Any) -> Any:
        """Rejects a body with more fields than the schema in one error, instead of one per unknown field."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            unknown = [*islice((name for name in value if name not in cls.model_fields), 3)]
            names = ", ".join(name[:80] for name in unknown)
            context = {"names": names, "field": unknown[0]}
            raise PydanticCustomError("extra_forbidden", "there are no fields {names}, ...", context)
        return value


def _kind_of_prompt(value: Any) -> str | None:
    """Returns the type tag to validate a prompt as, by the type of the value and of its first item."""
    match value:
        case str():
            return "<text>"
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<token lists>"
        case [_, *_]:
            return "<tokens>"
    return None


def text_or_list(value: Any) -> str | None:
    """Returns the type tag to validate a value as, which may be text or a list."""
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def is_tag(part: int | str) -> bool:
    """Returns whether a part of an error's location is a type tag rather than a field."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def at_most(most: int) -> BeforeValidator:
    """Rejects a dictionary by its length before its entries are checked, since each might be an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_long", "accepted: up to {most} entries", {"most": most})
        return value

    return BeforeValidator(check)


def _drop_zeros(value: Any) -> Any:
    """Drops biases of 0."""
    if not isinstance(value, dict):
        return value
    return {token: bias for token, bias in value.items() if isinstance(bias, bool) or bias != 0}


def _check_variables(value: Any) -> Any:
    """Rejects variables that a chat template cannot use or that only the server sets."""
    if not isinstance(value, dict):
        return value
    reserved = sorted(RESERVED_VARIABLES & value.keys())
    if reserved:
        raise ValueError(f"accepted: variables other than {', '.join(reserved)}, which the server sets itself")
    if not all(name.isidentifier() for name in value):
        raise ValueError("accepted: names that a chat template can use: letters, digits and underscores")
    if not all(isinstance(variable, str | int | float | None) for variable in value.values()):
        raise ValueError("accepted: variables that are strings, numbers, booleans or null")
    return value


type RequestName = Annotated[str, Field(max_length=LONGEST_NAME)]
type RequestNames = Annotated[
    Annotated[RequestName, Tag("<text>")]
    | Annotated[list[RequestName], Field(max_length=MAX_NAMES, fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="names_type",
        custom_error_message=f"accepted: a string of up to {LONGEST_NAME} characters, or a list of up to {MAX_NAMES}",
    ),
]
type Token = Annotated[int, Field(ge=0, le=LARGEST)]
type Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
type Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<token lists>")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="accepted: a string, or a list of strings, of token ids, or of lists of token ids",
    ),
]
type Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
type Stops = Annotated[
    Annotated[Stop, Tag("<text>")] | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="stop_type",
        custom_error_message=f"accepted: a string of 1 to {LONGEST_STOP} characters, or a list of up to {MAX_STOPS}",
    ),
]
type Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), at_most(MAX_METADATA)]
type Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(_drop_zeros),
    at_most(MAX_BIASES),
]
type Variables = Annotated[
    dict[str, bool | int | float | str | None],
    Field(max_length=MAX_VARIABLES),
    BeforeValidator(_check_variables),
    at_most(MAX_VARIABLES),
]
