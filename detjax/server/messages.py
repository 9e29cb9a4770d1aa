"""The messages of a conversation."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from detjax.server.field_marks import Unserved
from detjax.server.field_types import MOST_PARTS, Body, text_or_list


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
            raise ValueError("accepted: 'text', because the model reads neither images, nor sound, nor files")
        return value


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Whose message it is.")
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True), Tag("<list>")],
        Discriminator(
            text_or_list,
            custom_error_type="content_type",
            custom_error_message="accepted: a string, or a list of parts of type text",
        ),
    ] = Field(description="Text, or parts of it.")
    name: str | None = Field(default=None, description="A name for the chat template.")
    # Clients send an answer's message back as they got it, and with their own fields, which are empty.
    type: Annotated[Any, Unserved("text", "message", why="the model reads text only")] = None
    refusal: Annotated[Any, Unserved("", why="chat templates have no place for it")] = None
    annotations: Annotated[Any, Unserved([], why="chat templates have no place for it")] = None
    audio: Annotated[Any, Unserved(why="the model reads text only")] = None
    images: Annotated[Any, Unserved([], why="the model reads text only")] = None
    function_call: Annotated[Any, Unserved(why="tools are not served")] = None
    tool_calls: Annotated[Any, Unserved([], why="tools are not served")] = None
    tool_call_id: Annotated[Any, Unserved("", why="tools are not served")] = None
    reasoning: Annotated[Any, Unserved("", why="reasoning is part of the content")] = None
    reasoning_content: Annotated[Any, Unserved("", why="reasoning is part of the content")] = None
    thinking_blocks: Annotated[Any, Unserved([], why="reasoning is part of the content")] = None
    parsed: Annotated[Any, Unserved(why="structured answers are not served")] = None
    prefix: Annotated[Any, Unserved(False, why="an answer is a message of its own")] = None
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None
    provider_specific_fields: Annotated[
        Any, Unserved({}, {"refusal": None}, why="chat templates have no place for it")
    ] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})
