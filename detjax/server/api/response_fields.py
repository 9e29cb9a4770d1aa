"""The body of a request to /v1/responses, without OpenAI's stateful fields: the server stores no answers.

Input items are messages, earlier calls and their results, and items of earlier answers.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from detjax.engine import Constraint, FieldError
from detjax.models import Tokenizer
from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.api.images import ShownPart
from detjax.server.api.messages import VideoFields, check_items, part_discriminator, shown_in
from detjax.server.api.request_fields import ReasoningTokens, SamplingRequest
from detjax.server.http.field_types import LARGEST, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body, Variables, text_or_list
from detjax.server.tools.definitions import (
    CHOICE,
    Choice,
    ChoiceFields,
    FunctionFields,
    FunctionType,
    Mode,
    ToolName,
    ToolUse,
    check_names,
    tool_use,
)

LOGPROBS: Final = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs."""
_ABOUT_ITEMS: Final = "items have no state except their text"


# --- items of the input -----------------------------------------------------------------------------------------------


class InputPart(Body):
    type: Literal["input_text", "output_text", "text"] = Field(description="A text.")
    text: str = Field(description="The text.")
    annotations: Annotated[Any, Unserved([], why="the model reads text only")] = None
    logprobs: Annotated[Any, Ignored("the model reads text only")] = None
    prompt_cache_breakpoint: Annotated[Any, Unserved(why="the server decides what it caches")] = None

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        if value not in ("input_text", "output_text", "text"):
            raise ValueError(
                "accepted: 'input_text' or 'output_text', or 'input_image' and 'input_video' in messages, because no "
                "model reads sound or files"
            )
        return value


class InputImage(Body):
    type: Literal["input_image"] = Field(description="An image, for models with a vision tower.")
    image_url: str = Field(
        description="A data URL with the bytes of the image, or file: and a path, if the server has an image "
        "directory. Nothing is fetched."
    )
    detail: Annotated[Any, Unserved("auto", why="the checkpoint sets the size of images")] = None
    file_id: Annotated[Any, Unserved(why="the server keeps no files")] = None
    prompt_cache_breakpoint: Annotated[Any, Unserved(why="the server decides what it caches")] = None


class InputVideo(VideoFields):
    type: Literal["input_video"] = Field(description="A video, for models with a vision tower.")
    video_url: str = Field(description="As video_url.url of chats.")
    prompt_cache_breakpoint: Annotated[Any, Unserved(why="the server decides what it caches")] = None


type MessagePart = Annotated[
    Annotated[InputPart, Tag("<text>")] | Annotated[InputImage, Tag("<image>")] | Annotated[InputVideo, Tag("<video>")],
    part_discriminator("input_image", "input_video"),
]

type MessageContent = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="content_type",
        custom_error_message="accepted: a string, or a list of parts of type input_text, output_text, input_image or "
        "input_video",
    ),
]

type ResultContent = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="content_type",
        custom_error_message="accepted: a string, or a list of parts of type input_text or output_text",
    ),
]


class InputMessage(Body):
    type: Literal["message"] = Field(default="message", description="A message. The default type of items.")
    role: Literal["system", "developer", "user", "assistant"] = Field(description="The sender.")
    content: MessageContent = Field(description="Text, or parts: texts, images and videos.")
    id: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None
    status: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None
    phase: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None


class InputCall(Body):
    type: Literal["function_call"] = Field(description="A call in an earlier answer.")
    call_id: str = Field(description="The call's id, for the chat template.")
    name: str = Field(description="The tool's name.")
    arguments: str = Field(description="The arguments as JSON. The chat template gets an object, if they are one.")
    id: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None
    status: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None
    namespace: Annotated[Any, Unserved(why="tools have no namespaces")] = None
    caller: Annotated[Any, Unserved({"type": "direct"}, why="answers call tools themselves")] = None


class InputResult(Body):
    type: Literal["function_call_output"] = Field(description="The result of a call.")
    call_id: str = Field(description="The call's id.")
    output: ResultContent = Field(description="The result, as text.")
    id: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None
    status: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None
    caller: Annotated[Any, Unserved({"type": "direct"}, why="answers call tools themselves")] = None

    @property
    def text(self) -> str:
        """The result as one text."""
        return self.output if isinstance(self.output, str) else "\n".join(part.text for part in self.output)


class ReasoningText(Body):
    type: Literal["reasoning_text", "text"] = Field(description="A text of reasoning.")
    text: str = Field(description="The text.")


class InputReasoning(Body):
    type: Literal["reasoning"] = Field(description="The reasoning of an earlier answer, for the message after it.")
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = Field(
        default=None, description="The reasoning, which the chat template may leave out."
    )
    summary: Annotated[Any, Ignored("content has the reasoning")] = None
    encrypted_content: Annotated[Any, Unserved("", why="the server encrypts nothing; content has the reasoning")] = None
    id: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None
    status: Annotated[str | None, Ignored(_ABOUT_ITEMS)] = None

    @property
    def text(self) -> str:
        """The reasoning as one text."""
        return "\n".join(part.text for part in self.content or ())


type InputItem = InputMessage | InputReasoning | InputCall | InputResult


def _kind_of_item(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    tags = {"message": "<message>", "reasoning": "<reasoning>"}
    tags |= {"function_call": "<call>", "function_call_output": "<result>"}
    return tags.get(str(value.get("type", "message")))


type InputItems = Annotated[
    list[
        Annotated[
            Annotated[InputMessage, Tag("<message>")]
            | Annotated[InputReasoning, Tag("<reasoning>")]
            | Annotated[InputCall, Tag("<call>")]
            | Annotated[InputResult, Tag("<result>")],
            Discriminator(
                _kind_of_item,
                custom_error_type="item_type",
                custom_error_message="accepted: items of type message, reasoning, function_call or "
                "function_call_output",
            ),
        ]
    ],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]


# --- other fields -----------------------------------------------------------------------------------------------------


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="The form of the answer.")
    name: str | None = Field(default=None, description="A name for the client's own use.")
    description: str | None = Field(default=None, description="A description for the client's own use.")
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="The JSON schema that the answer follows, with type json_schema."
    )
    strict: bool | None = Field(default=None, description="Makes no difference: every answer follows the schema.")

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") is (self.schema_ is None):
            raise ValueError("accepted: schema with type 'json_schema', and with no other type")
        return self

    def constraint(self) -> Constraint | None:
        """Returns the answer's constraint, or None for any text."""
        if self.type == "text":
            return None
        return Constraint.json_schema({"type": "object"} if self.schema_ is None else self.schema_)


class TextSettings(Body):
    format: TextFormat | None = Field(default=None, description="The form of the answer. Default: text.")
    verbosity: Annotated[Any, Unserved("medium", why="the model decides how much it writes")] = None


class Reasoning(Body):
    effort: str | None = Field(
        default=None, description="The chat template's variable reasoning_effort: none, low, medium, high, ..."
    )
    summary: Annotated[Any, Unserved("auto", "none", why="the answer has the reasoning itself")] = None
    generate_summary: Annotated[Any, Unserved(why="the answer has the reasoning itself")] = None


class ResponseTool(FunctionFields):
    type: FunctionType = Field(description="A function of the client.")
    defer_loading: Annotated[Any, Unserved(False, why="the chat template gets all tools")] = None


class ChosenTool(ChoiceFields):
    type: Literal["function"] = Field(description="The answer calls this function.")
    name: ToolName = Field(description="The tool's name.")

    def choice(self) -> Choice:
        return Choice("required", [self.name], is_one=True)


class AllowedResponseTools(ChoiceFields):
    type: Literal["allowed_tools"] = Field(description="Some of the tools may be called.")
    mode: Literal["auto", "required"] = Field(description="Whether one of the tools must be called.")
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] = Field(
        description="The tools that may be called."
    )

    def choice(self) -> Choice:
        return Choice(self.mode, [tool.name for tool in self.tools], is_one=False)


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[Any, Unserved(False, why="events are not padded")] = None


class ResponsesRequest(SamplingRequest):
    """The body of a request to /v1/responses."""

    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[InputItems, Tag("<list>")],
        Discriminator(
            text_or_list, custom_error_type="input_type", custom_error_message="accepted: a string, or a list of items"
        ),
    ] = Field(description="The conversation so far, or a user's message.")
    instructions: str | None = Field(default=None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        default=None, ge=1, le=LARGEST, description="Maximum number of tokens to generate. Default: as many as fit."
    )
    text: TextSettings | None = Field(default=None, description="The form of the answer.")
    tools: (
        Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_names)] | None
    ) = Field(default=None, description="Functions that the answer may call.")
    tool_choice: (
        Annotated[
            Mode | Annotated[ChosenTool, Tag("<function>")] | Annotated[AllowedResponseTools, Tag("<allowed>")], CHOICE
        ]
        | None
    ) = Field(
        default=None, description="Whether the answer calls a tool, and which one. Default: auto, the model decides."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: drop calls after the first one. Default: true."
    )
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=2, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description=f"{LOGPROBS} reports logprobs. The answer has no encrypted content.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Report this many of the most likely tokens, with include."
    )
    chat_template_kwargs: Variables | None = Field(
        default=None, description="Additional variables of the chat template, such as enable_thinking."
    )
    stream_options: ResponseStreamOptions | None = Field(default=None, description="Options of the stream.")
    reasoning: Reasoning | None = Field(default=None, description="Options of the reasoning.")
    thinking_token_budget: ReasoningTokens = None
    max_tool_calls: Annotated[int | None, Ignored("the server calls no tools itself")] = None
    previous_response_id: Annotated[Any, Unserved(why="the server keeps no answers; send all items as input")] = None
    conversation: Annotated[Any, Unserved(why="the server keeps no conversations; send all items as input")] = None
    background: Annotated[Any, Unserved(False, why="the server keeps no answers")] = None
    prompt: Annotated[Any, Unserved(why="the server keeps no prompts")] = None
    truncation: Annotated[Any, Unserved("disabled", why="prompts are never truncated")] = None
    context_management: Annotated[Any, Unserved([], why="prompts are never truncated")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "ResponsesRequest":
        tools = self.tool_use()
        if self.top_logprobs and not self.has_logprobs:
            raise FieldError(
                f"top_logprobs is given and include has no {LOGPROBS}; accepted: top_logprobs with include: "
                f'["{LOGPROBS}"]',
                "top_logprobs",
            )
        if self.has_logprobs and tools is not None:
            raise FieldError(f"include has {LOGPROBS} and tools are given; accepted: one of them", "include")
        name = self.form_given()
        if name is not None and tools is not None:
            raise FieldError(f"{name} and tools are given; accepted: tools with tool_choice 'none'", name)
        form = None if self.text is None else self.text.format
        if name is not None and form is not None and form.type != "text":
            raise FieldError(f"text.format and {name} are given; accepted: one of them", name)
        calls = () if isinstance(self.input, str) else self.input
        try:
            check_items(item.arguments for item in calls if isinstance(item, InputCall))
        except ValueError as error:
            raise FieldError(str(error), "input") from None
        return self

    def param_of(self, field: str) -> str:
        names = {"prompt": "input", "max_tokens": "max_output_tokens", "constraint": self.form_given() or "text"}
        names |= {"reasoning_budget": "thinking_token_budget"}
        return names.get(field, field)

    @property
    def shown(self) -> list[ShownPart]:
        """The images and videos in the input."""
        items = () if isinstance(self.input, str) else self.input
        return [part for item in items if isinstance(item, InputMessage) for part in shown_in(item.content)]

    @property
    def reports_logprobs(self) -> bool:
        return self.has_logprobs

    @property
    def has_logprobs(self) -> bool:
        """True if the answer reports logprobs."""
        return LOGPROBS in (self.include or ())

    def constraint(self, tokenizer: Tokenizer) -> Constraint | None:
        """Returns the constraint of an answer without calls, or None for any text."""
        form = None if self.text is None else self.text.format
        return self.form_constraint(tokenizer) if form is None or form.type == "text" else form.constraint()

    def tool_use(self) -> ToolUse | None:
        """Returns the tools that the answer may call, or None."""
        return tool_use(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls)
