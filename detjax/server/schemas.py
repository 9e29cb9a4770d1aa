"""What may be asked, in OpenAI's terms. A field that would be ignored though it changes answers is no field here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_SAMPLES = 128
"""Of a prompt."""
_MOST_STOPS = 16
_LONGEST_STOP = 256
_LARGEST = 2**31 - 1

type Token = Annotated[int, Field(ge=0, le=_LARGEST)]
type Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
type Zero = Annotated[float, Field(ge=0, le=0)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = Field(default=False, description="Send the numbers of tokens in a chunk of their own.")
    include_batch: bool = Field(
        default=False, description="Say in each chunk how many samples the step had that computed it."
    )


class Text(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ResponseFormat(_Body):
    type: Literal["text"]


class Sampling(_Body):
    """What both kinds of requests have in common."""

    model: str = Field(description="A name that /v1/models lists.")
    temperature: float | None = Field(
        default=None, ge=0, le=1e30, description="0 takes the likeliest token. Default: the checkpoint's, else 1."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Default: the checkpoint's, else 1.")
    top_k: int | None = Field(
        default=None, ge=0, le=_LARGEST, description="Tokens kept; 0: all. Default: the checkpoint's, else 0."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Least share of the likeliest token's probability. Default: as above."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**64,
        description="Draws the samples. Requests without one have seed 0: the same request has the same answer.",
    )
    n: int | None = Field(default=None, ge=1, le=MOST_SAMPLES, description="Samples of each prompt; default: 1.")
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = Field(
        default=None, description="Ends a sample, and is cut off."
    )
    stop_token_ids: Annotated[list[Token], Field(max_length=_LARGEST)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted, as clients send them: what they say at these values changes nothing, or nothing about answers.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("temperature")
    @classmethod
    def _not_too_low(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 1e-30:
            raise ValueError("accepted: 0, or 1e-30 to 1e30")
        return value

    @model_validator(mode="after")
    def _streams(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, and stream is not true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[Token] | list[list[Token]] = Field(
        description="A text, several, the token ids of one, or of several."
    )
    max_tokens: int | None = Field(
        default=None, ge=0, le=_LARGEST, description="Default: 16. 0 with echo tells of the prompt alone."
    )
    logprobs: int | None = Field(default=None, ge=0, le=_LARGEST, description="How many of the likeliest tokens.")
    echo: bool | None = Field(default=None, description="Begin with the prompt.")
    best_of: int | None = Field(default=None, description="As n, if it is given.")
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "CompletionRequest":
        if not self.prompt:
            raise ValueError("prompt is empty; accepted: at least one")
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of is {self.best_of}; accepted: n, which is {self.n or 1}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; accepted: at least 1, or 0 with echo")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("stream, echo and logprobs are given; accepted: two of them")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(
        default=None, ge=1, le=_LARGEST, description="Default: as many as there is room for. The old name."
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_LARGEST, description="The same.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_LARGEST)
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = Field(
        default=None, description="Further variables of the chat template, such as enable_thinking."
    )

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given, and logprobs is not true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens are given; accepted: one of them")
        reserved = {"messages", "tools", "documents", "add_generation_prompt"} & set(self.chat_template_kwargs or {})
        if reserved:
            raise ValueError(f"chat_template_kwargs has {', '.join(sorted(reserved))}; accepted: other names")
        return self
