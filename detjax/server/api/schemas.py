"""The bodies of requests for completions and chats, in OpenAI's format.

The server accepts unsupported fields if their value matches its behaviour, and rejects values that would change
answers. `docs/serve/fields.md` lists both.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from detjax.engine import FieldError
from detjax.server.api.field_marks import Unserved
from detjax.server.api.messages import Messages, content_for_template
from detjax.server.api.request_fields import GenerationRequest, ReasoningTokens
from detjax.server.http.field_types import LARGEST, Prompt, Variables
from detjax.server.tools.definitions import ChatToolChoice, ChatTools, ToolUse, tool_use


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions."""

    _TOP_LOGPROBS: ClassVar[str] = "logprobs"

    prompt: Prompt = Field(description="One or more prompts, as strings or token ids.")
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST,
        description="Maximum number of tokens to generate. Default: 16. 0 with echo: only the prompt.",
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Report logprobs, with this many of the most likely tokens."
    )
    echo: bool | None = Field(default=None, description="Begin the text with the prompt.")
    best_of: int | None = Field(default=None, description="Accepted if it equals n.")
    suffix: Annotated[Any, Unserved("", why="text is only continued")] = None
    add_special_tokens: Annotated[Any, Unserved(True, why="a text prompt gets the tokenizer's special tokens")] = None
    prompt_embeds: Annotated[Any, Unserved(why="a prompt is text or token ids")] = None
    thinking_token_budget: Annotated[Any, Unserved(-1, why="chats have reasoning")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise FieldError(f"best_of is {self.best_of}; accepted: n, which is {self.n or 1}", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens is 0; accepted: at least 1, or 0 with echo", "max_tokens")
        if self.max_tokens == 0 and self.receipt:
            message = "receipt is true and max_tokens is 0; accepted: at least 1, as receipts are for answers"
            raise FieldError(message, "receipt")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("stream, echo and logprobs are given; accepted: any two of them")
        return self

    @property
    def reports_logprobs(self) -> bool:
        return self.logprobs is not None or super().reports_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as a string or as token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class ChatRequest(GenerationRequest):
    """The body of a request to /v1/chat/completions."""

    messages: Messages = Field(description="The conversation so far.")
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST, description="The old name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=LARGEST, description="Maximum number of tokens to generate. Default: as many as fit."
    )
    logprobs: bool | None = Field(default=None, description="Report logprobs.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Report this many of the most likely tokens, with logprobs: true."
    )
    chat_template_kwargs: Variables | None = Field(
        default=None, description="Additional variables of the chat template, such as enable_thinking."
    )
    tools: ChatTools | None = Field(default=None, description="Functions that the answer may call.")
    tool_choice: ChatToolChoice | None = Field(
        default=None, description="Whether the answer calls a tool, and which one. Default: auto, the model decides."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: drop calls after the first one. Default: true."
    )
    reasoning_effort: str | None = Field(
        default=None, description="A variable of the chat template, which decides what it means: none, low, high, ..."
    )
    thinking_token_budget: ReasoningTokens = None
    include_reasoning: bool | None = Field(default=None, description="false: leave out the reasoning. Default: true.")
    functions: Annotated[Any, Unserved([], why="tools has it")] = None
    function_call: Annotated[Any, Unserved("none", "auto", why="tool_choice has it")] = None
    modalities: Annotated[Any, Unserved(["text"], why="the model writes text only")] = None
    audio: Annotated[Any, Unserved(why="the model writes text only")] = None
    prediction: Annotated[Any, Unserved(why="predicted answers are not supported")] = None
    web_search_options: Annotated[Any, Unserved(why="the server does not search the web")] = None
    separate_reasoning: Annotated[Any, Unserved(True, why="reasoning is separate from the content")] = None
    stream_reasoning: Annotated[Any, Unserved(True, why="reasoning is streamed as the content is")] = None
    verbosity: Annotated[Any, Unserved("medium", why="the model decides how much it writes")] = None
    echo: bool | None = Field(
        default=None, description="Begin the answer with the text of the last message, if the assistant wrote it."
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="End the prompt with the beginning of a new message. Default: true, unless continue_final_message.",
    )
    continue_final_message: bool | None = Field(
        default=None, description="The answer continues the text of the last message."
    )
    add_special_tokens: Annotated[Any, Unserved(False, why="the chat template writes all special tokens")] = None
    chat_template: Annotated[Any, Unserved(why="the chat template is the checkpoint's")] = None
    documents: Annotated[Any, Unserved([], why="the chat template gets only messages")] = None
    mm_processor_kwargs: Annotated[Any, Unserved({}, why="video parts have fps, min_frames and max_frames")] = None
    media_io_kwargs: Annotated[Any, Unserved({}, why="video parts have fps, min_frames and max_frames")] = None
    max_dynamic_patch: Annotated[Any, Unserved(why="the checkpoint says how large images are")] = None
    min_dynamic_patch: Annotated[Any, Unserved(why="the checkpoint says how large images are")] = None
    use_audio_in_video: Annotated[Any, Unserved(False, why="the model reads no sound")] = None
    input_ids: Annotated[Any, Unserved(why="the chat template makes the prompt; completions take tokens")] = None
    task: Annotated[Any, Unserved(why="the chat template makes the prompt")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs is given and logprobs is not true; accepted: top_logprobs with logprobs: true"
            raise FieldError(message, "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; accepted: one of them")
        form = self.form_given()
        if form is None and self.response_format is not None and self.response_format.type == "structural_tag":
            form = "response_format"
        if form is not None and self.tool_use() is not None:
            raise FieldError(
                f"{form} and tools are given; accepted: tools with a response_format of JSON, or with tool_choice "
                "'none'",
                form,
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError(
                "continue_final_message and add_generation_prompt are true; accepted: one of them, because an answer "
                "continues the last message or is a new one",
                "continue_final_message",
            )
        return self

    @property
    def reports_logprobs(self) -> bool:
        return bool(self.logprobs) or super().reports_logprobs

    def param_of(self, field: str) -> str:
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"prompt": "messages", "reasoning_budget": "thinking_token_budget"}.get(field) or super().param_of(field)

    @property
    def echoed(self) -> str:
        """The text that the answer begins with."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant":
            return ""
        content = content_for_template(last.content)
        return content if isinstance(content, str) else ""

    def tool_use(self) -> ToolUse | None:
        """Returns the tools that the answer may call, or None."""
        tools = [tool.function for tool in self.tools or ()]
        return tool_use(tools, self.tool_choice, parallel=self.parallel_tool_calls)
