"""The messages of a conversation."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from detjax.server.field_marks import Ignored, Unserved
from detjax.server.field_types import MOST_CALLS, MOST_MESSAGES, MOST_PARTS, Body, text_or_list

_MOST_ITEMS: Final = 1 << 17
"""The most items of JSON in the arguments of all calls of a conversation together."""


class TextPart(Body):
    type: Literal["text"] = Field(description="Text is all that the model reads.")
    text: str = Field(description="The text.")
    annotations: Annotated[Any, Unserved([], why="the model reads text only")] = None
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None
    prompt_cache_breakpoint: Annotated[Any, Unserved(why="the server decides what it caches")] = None

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        if value != "text":
            raise ValueError("accepted: 'text' or 'image_url', because no model reads sound or files")
        return value


class ImageURL(Body):
    url: str = Field(
        description="A data URL with the bytes of the image, or file: and a path, where the server has a directory of "
        "images. Nothing is fetched."
    )
    detail: Annotated[Any, Unserved("auto", why="the checkpoint says to which size images are brought")] = None


class ImagePart(Body):
    type: Literal["image_url"] = Field(description="An image, for models with a vision tower.")
    image_url: ImageURL = Field(description="The image.")
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None


def _kind_of_part(value: Any) -> str:
    """The tag of the type that a part is checked as."""
    is_image = isinstance(value, dict) and value.get("type") == "image_url"
    return "<image>" if is_image else "<text>"


type Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")], Discriminator(_kind_of_part)
]


class CalledFunction(Body):
    name: str = Field(description="The tool's name.")
    arguments: str = Field(description="The arguments as JSON. The chat template gets an object, or else the text.")

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates expect it, with its arguments as an object if they are one."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):  # a model may have written no JSON, and its client sends it back
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class EarlierCall(Body):
    type: Literal["function"] = Field(default="function", description="Functions are all that is called.")
    id: str | None = Field(default=None, description="The call's id, for the chat template.")
    function: CalledFunction = Field(description="What was called.")
    index: Annotated[int | None, Ignored("calls are in the order of their list")] = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": "function", "function": self.function.for_template()}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Whose message it is.")
    content: (
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True), Tag("<list>")],
            Discriminator(
                text_or_list,
                custom_error_type="content_type",
                custom_error_message="accepted: a string, or a list of parts of type text or image_url",
            ),
        ]
        | None
    ) = Field(default=None, description="Text, or parts: texts and images. A message with tool_calls may do without.")
    name: str | None = Field(default=None, description="A name for the chat template.")
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MOST_CALLS, fail_fast=True)] | None = Field(
        default=None, description="What an earlier answer called."
    )
    tool_call_id: str | None = Field(default=None, description="The call whose result the message of a tool is.")
    # Clients send an answer's message back as they got it, and with their own fields, which are empty.
    type: Annotated[Any, Unserved("text", "message", why="the model reads text only")] = None
    refusal: Annotated[Any, Unserved("", why="chat templates have no place for it")] = None
    annotations: Annotated[Any, Unserved([], why="chat templates have no place for it")] = None
    audio: Annotated[Any, Unserved(why="the model reads text only")] = None
    images: Annotated[Any, Unserved([], why="the model reads text only")] = None
    function_call: Annotated[Any, Unserved(why="tool_calls has it")] = None
    reasoning: Annotated[Any, Unserved("", why="reasoning is part of the content")] = None
    reasoning_content: Annotated[Any, Unserved("", why="reasoning is part of the content")] = None
    thinking_blocks: Annotated[Any, Unserved([], why="reasoning is part of the content")] = None
    parsed: Annotated[Any, Ignored("the content has it")] = None
    prefix: Annotated[Any, Unserved(False, why="an answer is a message of its own")] = None
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None
    provider_specific_fields: Annotated[
        Any, Unserved({}, {"refusal": None}, why="chat templates have no place for it")
    ] = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls is given with role {self.role!r}; accepted: with role 'assistant'")
        if self.tool_call_id and self.role != "tool":
            raise ValueError(f"tool_call_id is given with role {self.role!r}; accepted: with role 'tool'")
        if self.content is None and not self.tool_calls:
            raise ValueError(
                "content is missing or null; accepted: a string, or a list of parts of type text or image_url"
            )
        return self

    @property
    def image_urls(self) -> list[str]:
        """The URLs of the images in the content."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def _content_for_template(self) -> str | list[dict[str, Any]]:
        """The content as chat templates expect it."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return parts_for_template([part.text if isinstance(part, TextPart) else None for part in self.content])

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        given = {"name": self.name, "tool_call_id": self.tool_call_id or None}
        calls = {"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {}
        return (
            {"role": self.role, "content": self._content_for_template()}
            | {name: value for name, value in given.items() if value is not None}
            | calls
        )


def parts_for_template(texts: Sequence[str | None]) -> str | list[dict[str, Any]]:
    """Returns parts of a message as chat templates expect them; None is an image.

    Texts are one text. With images, the parts stay apart: templates make the tokens that stand for images.
    """
    if None not in texts:
        return "\n".join(text for text in texts if text is not None)
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]


def _check_arguments(messages: list[Message]) -> list[Message]:
    """Refuses messages whose arguments of calls would become too many objects when the chat template gets them."""
    calls = (call for message in messages for call in message.tool_calls or ())
    check_items(call.function.arguments for call in calls)
    return messages


def check_items(arguments: Iterable[str]) -> None:
    """Refuses the arguments of calls that hold too many items of JSON together.

    Raises:
        ValueError: they do.
    """
    items = 0
    for text in arguments:
        items += sum(map(text.count, "[{:,"))
        if items > _MOST_ITEMS:
            raise ValueError(
                f"accepted: messages whose tool_calls have up to {_MOST_ITEMS} items in their arguments together. "
                "Leave out old messages."
            )


type Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    AfterValidator(_check_arguments),
]
