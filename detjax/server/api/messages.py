"""The messages of a conversation."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.api.images import ShownImage, ShownPart, ShownVideo
from detjax.server.http.field_types import LARGEST, MAX_CALLS, MAX_MESSAGES, MAX_PARTS, Body, text_or_list

_MAX_ITEMS: Final = 1 << 17
"""Maximum number of JSON items in the arguments of all calls of a conversation."""


class TextPart(Body):
    type: Literal["text"] = Field(description="A text.")
    text: str = Field(description="The text.")
    annotations: Annotated[Any, Unserved([], why="the model reads text only")] = None
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None
    prompt_cache_breakpoint: Annotated[Any, Unserved(why="the server decides what it caches")] = None

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        if value != "text":
            raise ValueError("accepted: 'text', 'image_url' or 'video_url', because no model reads sound or files")
        return value


class ImageURL(Body):
    url: str = Field(
        description="A data URL with the bytes of the image, or file: and a path, if the server has an image "
        "directory. Nothing is fetched."
    )
    detail: Annotated[Any, Unserved("auto", why="the checkpoint sets the size of images")] = None


class ImagePart(Body):
    type: Literal["image_url"] = Field(description="An image, for models with a vision tower.")
    image_url: ImageURL = Field(description="The image.")
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None


class VideoURL(Body):
    url: str = Field(
        description="A data URL with an animation (WEBP, PNG or GIF), or data:video/jpeg;base64, and frames separated "
        "by commas; or file: and a path, if the server has an image directory. Nothing is fetched."
    )


class VideoFields(Body):
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Frames per second to sample; for a list of frames, its frame rate. Default: the checkpoint's, "
        "else 2.",
    )
    min_frames: Annotated[int, Field(ge=1, le=LARGEST)] | None = Field(
        default=None, description="Minimum number of frames to sample. Default: the checkpoint's, else 4."
    )
    max_frames: Annotated[int, Field(ge=1, le=LARGEST)] | None = Field(
        default=None, description="Maximum number of frames. Default: the checkpoint's, else 768."
    )


class VideoPart(VideoFields):
    type: Literal["video_url"] = Field(description="A video, for models with a vision tower.")
    video_url: VideoURL = Field(description="The video.")
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None


def part_discriminator(image: str, video: str) -> Discriminator:
    """Returns the choice of the type to validate a part as, by the names of the image and video types."""
    tags = {image: "<image>", video: "<video>"}
    return Discriminator(
        lambda value: tags.get(str(value.get("type")), "<text>") if isinstance(value, dict) else "<text>"
    )


type Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")] | Annotated[VideoPart, Tag("<video>")],
    part_discriminator("image_url", "video_url"),
]


class CalledFunction(Body):
    name: str = Field(description="The tool's name.")
    arguments: str = Field(description="The arguments as JSON. The chat template gets an object, if they are one.")

    def for_template(self) -> dict[str, Any]:
        """Returns the function as text workers expect it; they give the chat template an object, if it is one."""
        return {"name": self.name, "arguments": self.arguments}


class EarlierCall(Body):
    type: Literal["function"] = Field(default="function", description="A call of a function.")
    id: str | None = Field(default=None, description="The call's id, for the chat template.")
    function: CalledFunction = Field(description="The called function.")
    index: Annotated[int | None, Ignored("calls are in the order of their list")] = None

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": "function", "function": self.function.for_template()}


class ProviderFields(Body):
    refusal: Annotated[Any, Unserved("", why="chat templates ignore it")] = None
    reasoning: str | None = Field(default=None, description="The message's reasoning.")
    reasoning_content: str | None = Field(default=None, description="The message's reasoning.")


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="The sender.")
    content: (
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
            Discriminator(
                text_or_list,
                custom_error_type="content_type",
                custom_error_message="accepted: a string, or a list of parts of type text, image_url or video_url",
            ),
        ]
        | None
    ) = Field(
        default=None, description="Text, or parts: texts, images and videos. Optional in a message with tool_calls."
    )
    name: str | None = Field(default=None, description="A name for the chat template.")
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        default=None, description="The calls of an earlier answer."
    )
    reasoning: str | None = Field(
        default=None, description="The reasoning of an earlier answer, which the chat template may leave out."
    )
    reasoning_content: str | None = Field(default=None, description="Another name of reasoning.")
    tool_call_id: str | None = Field(default=None, description="The id of the call whose result the message has.")
    # Clients send an answer's message back unmodified, plus empty fields of their own.
    type: Annotated[Any, Unserved("text", "message", why="the model reads text only")] = None
    refusal: Annotated[Any, Unserved("", why="chat templates ignore it")] = None
    annotations: Annotated[Any, Unserved([], why="chat templates ignore it")] = None
    audio: Annotated[Any, Unserved(why="the model reads text only")] = None
    images: Annotated[Any, Unserved([], why="the model reads text only")] = None
    function_call: Annotated[Any, Unserved(why="tool_calls has it")] = None
    thinking_blocks: Annotated[Any, Unserved([], why="reasoning has it")] = None
    parsed: Annotated[Any, Ignored("the content has it")] = None
    prefix: Annotated[Any, Unserved(False, why="an answer is a new message")] = None
    cache_control: Annotated[Any, Unserved({"type": "ephemeral"}, why="the server decides what it caches")] = None
    provider_specific_fields: ProviderFields | None = Field(
        default=None, description="Fields of an earlier answer that LiteLLM repeats here."
    )

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls is given with role {self.role!r}; accepted: with role 'assistant'")
        if self.tool_call_id and self.role != "tool":
            raise ValueError(f"tool_call_id is given with role {self.role!r}; accepted: with role 'tool'")
        given = {text for text in self._reasonings if text}
        if given and self.role != "assistant":
            raise ValueError(f"reasoning is given with role {self.role!r}; accepted: with role 'assistant'")
        if len(given) > 1:
            raise ValueError(
                "reasoning, reasoning_content and provider_specific_fields have different texts; accepted: one of them"
            )
        if self.content is None and not self.tool_calls and not given:
            raise ValueError(
                "content is missing or null; accepted: a string, or a list of parts of type text, image_url or "
                "video_url"
            )
        return self

    @property
    def _reasonings(self) -> tuple[str | None, ...]:
        """The message's reasoning under each of its names."""
        copy = self.provider_specific_fields or ProviderFields()
        return self.reasoning, self.reasoning_content, copy.reasoning, copy.reasoning_content

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        fields = {"name": self.name, "tool_call_id": self.tool_call_id or None}
        calls = {"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {}
        return (
            {"role": self.role, "content": content_for_template(self.content)}
            | {name: value for name, value in fields.items() if value is not None}
            | reasoning_for_template(next(filter(None, self._reasonings), None))
            | calls
        )


def reasoning_for_template(reasoning: str | None) -> dict[str, str]:
    """Returns the fields of a message with reasoning, under the names that chat templates have for it."""
    return dict.fromkeys(("reasoning", "reasoning_content", "thinking"), reasoning) if reasoning else {}


def shown_part(part: Any) -> ShownPart | None:
    """Returns the image or video of a content part of a chat or of /v1/responses; None for a text."""
    if part.type in ("image_url", "input_image"):
        return ShownImage(part.image_url if isinstance(part.image_url, str) else part.image_url.url)
    if part.type in ("video_url", "input_video"):
        url = part.video_url if isinstance(part.video_url, str) else part.video_url.url
        return ShownVideo(url, part.fps, part.min_frames, part.max_frames)
    return None


def shown_in(content: str | Sequence[Any] | None) -> list[ShownPart]:
    """Returns the images and videos in the content of a message."""
    parts = () if content is None or isinstance(content, str) else content
    return [shown for part in parts if (shown := shown_part(part)) is not None]


def content_for_template(content: str | Sequence[Any] | None) -> str | list[dict[str, str]]:
    """Returns the content of a message in the form that chat templates expect.

    Texts are joined. With images, the parts stay separate, because templates write the tokens of images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not shown_in(content):
        return "\n".join(part.text for part in content)
    kinds = {ShownImage: "image", ShownVideo: "video"}
    shown = map(shown_part, content)
    return [
        {"type": "text", "text": part.text} if one is None else {"type": kinds[type(one)]}
        for part, one in zip(content, shown, strict=True)
    ]


def _check_arguments(messages: list[Message]) -> list[Message]:
    calls = (call for message in messages for call in message.tool_calls or ())
    check_items(call.function.arguments for call in calls)
    return messages


def check_items(arguments: Iterable[str]) -> None:
    """Raises a ValueError if the arguments of calls have too many JSON items, each an object for the chat template."""
    items = 0
    for text in arguments:
        items += sum(map(text.count, "[{:,"))
        if items > _MAX_ITEMS:
            raise ValueError(
                f"accepted: up to {_MAX_ITEMS} items in the arguments of all tool_calls. Leave out old messages."
            )


type Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_check_arguments),
]
