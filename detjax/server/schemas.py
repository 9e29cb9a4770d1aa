"""The bodies of requests, in OpenAI's terms.

A field of OpenAI's API that would change answers, and which this server would have to ignore, is not accepted.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_SAMPLES: Final = 128
"""The most samples of one prompt."""
_MOST_STOPS: Final = 16
_LONGEST_STOP: Final = 256
_LARGEST: Final = 2**31 - 1

type Token = Annotated[int, Field(ge=0, le=_LARGEST)]
type Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
type Zero = Annotated[float, Field(ge=0, le=0)]


class _Body(BaseModel):
    """JSON of exactly these fields and types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = Field(default=False, description="Send the token counts in a last chunk.")
    include_batch: bool = Field(
        default=False, description="Add to each chunk how many samples the step had that computed it."
    )


class Text(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ResponseFormat(_Body):
    type: Literal["text"]


class GenerationRequest(_Body):
    """The fields that completions and chats have in common."""

    model: str = Field(description="A model's name, as /v1/models lists it.")
    temperature: float | None = Field(
        default=None, ge=0, le=1e30, description="0 takes the likeliest token. Default: the checkpoint's value, else 1."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Keeps the likeliest tokens whose probability reaches this. Default: the checkpoint's, else 1.",
    )
    top_k: int | None = Field(
        default=None,
        ge=0,
        le=_LARGEST,
        description="Keeps so many of the likeliest tokens; 0: all. Default: the checkpoint's, else 0.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Keeps tokens of at least this share of the likeliest one's probability. Default: as top_k.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**64,
        description="Seed of the random choices. Default: 0, so that the same request has the same answer.",
    )
    n: int | None = Field(default=None, ge=1, le=MOST_SAMPLES, description="Samples of each prompt. Default: 1.")
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = Field(
        default=None, description="Strings that end a sample; they are cut off."
    )
    stop_token_ids: Annotated[list[Token], Field(max_length=_LARGEST)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Clients send these. With the values accepted here they do not change answers.
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
    def _check_temperature(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 1e-30:
            raise ValueError("accepted: 0, or 1e-30 to 1e30")
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError(
                "stream_options is given and stream is not true; accepted: stream_options with stream: true"
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions."""

    prompt: str | list[str] | list[Token] | list[list[Token]] = Field(
        description="One prompt or several, as strings or as token ids."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=_LARGEST,
        description="Tokens to generate at most. Default: 16. 0 with echo: the prompt alone.",
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=_LARGEST, description="Report logprobs, and so many of the likeliest tokens."
    )
    echo: bool | None = Field(default=None, description="Begin the text with the prompt.")
    best_of: int | None = Field(default=None, description="Accepted if it equals n.")
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionRequest":
        if not self.prompt:
            raise ValueError("prompt is empty; accepted: at least one prompt")
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of is {self.best_of}; accepted: n, which is {self.n or 1}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; accepted: at least 1, or 0 with echo")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("stream, echo and logprobs are given; accepted: any two of them")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as a string or as token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class ChatRequest(GenerationRequest):
    """The body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(
        default=None, ge=1, le=_LARGEST, description="The old name of max_completion_tokens."
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=_LARGEST, description="Tokens to generate at most. Default: as many as fit."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_LARGEST)
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = Field(
        default=None, description="Further variables of the chat template, such as enable_thinking."
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(
                "top_logprobs is given and logprobs is not true; accepted: top_logprobs with logprobs: true"
            )
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens are given; accepted: one of them")
        reserved = {"messages", "tools", "documents", "add_generation_prompt"} & set(self.chat_template_kwargs or {})
        if reserved:
            raise ValueError(f"chat_template_kwargs has {', '.join(sorted(reserved))}; accepted: other names")
        return self
