"""The fields that several kinds of requests for answers have in common."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from detjax.engine import Constraint, FieldError
from detjax.server.api.answer_forms import ResponseFormat, StructuredOutputs
from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.http.field_types import (
    LARGEST,
    LONGEST_SALT,
    MAX_SAMPLES,
    MAX_STOP_TOKENS,
    Biases,
    Body,
    Metadata,
    Stops,
    Token,
)


class StreamOptions(Body):
    include_usage: bool | None = Field(default=None, description="Send the token counts in a last chunk.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="Send the token counts so far in every chunk. It needs include_usage."
    )
    include_batch: bool | None = Field(
        default=None, description="Add to each chunk how many samples the step had that computed it."
    )
    include_obfuscation: Annotated[Any, Unserved(False, why="chunks are not padded")] = None


class _ClientFields(Body):
    """Fields that clients send to either endpoint and that this server does not act on."""

    user: Annotated[str | None, Ignored("it names whom the client answers")] = None
    safety_identifier: Annotated[str | None, Ignored("it names whom the client answers")] = None
    metadata: Annotated[Metadata | None, Ignored("it describes the request to the client")] = None
    request_id: Annotated[str | None, Ignored("answers have ids of their own")] = None
    store: Annotated[bool | None, Ignored("the server stores no answers")] = None
    service_tier: Annotated[str | None, Ignored("all requests are served alike")] = None
    priority: Annotated[int | None, Ignored("all requests are served alike")] = None
    prompt_cache_key: Annotated[str | None, Ignored("the server decides what it caches, and no cache changes bits")] = (
        None
    )
    prompt_cache_retention: Annotated[str | None, Ignored("the server decides what it caches")] = None
    spaces_between_special_tokens: Annotated[bool | None, Ignored("special tokens are left out of the text")] = None
    prompt_cache_options: Annotated[Any, Unserved({}, why="the server decides what it caches")] = None

    skip_special_tokens: Annotated[Any, Unserved(True, why="special tokens are left out of the text")] = None
    include_stop_str_in_output: Annotated[Any, Unserved(False, why="a stop string is cut off the text")] = None
    no_stop_trim: Annotated[Any, Unserved(False, why="a stop string is cut off the text")] = None
    return_tokens_as_token_ids: Annotated[Any, Unserved(False, why="tokens are reported as text")] = None
    return_hidden_states: Annotated[Any, Unserved(False, why="hidden states are not reported")] = None
    truncate_prompt_tokens: Annotated[Any, Unserved(why="a prompt is never cut")] = None
    use_beam_search: Annotated[Any, Unserved(False, why="beam search is not served")] = None
    length_penalty: Annotated[Any, Unserved(1, why="beam search is not served")] = None
    early_stopping: Annotated[Any, Unserved(False, why="beam search is not served")] = None
    allowed_token_ids: Annotated[Any, Unserved(why="the choice of tokens cannot be restricted")] = None
    bad_words: Annotated[Any, Unserved([], why="the choice of tokens cannot be restricted")] = None
    logits_processors: Annotated[Any, Unserved([], why="the server runs no code of clients")] = None
    custom_logit_processor: Annotated[Any, Unserved(why="the server runs no code of clients")] = None
    guided_json: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_regex: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_choice: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_grammar: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_decoding_backend: Annotated[Any, Unserved(why="llguidance computes all masks")] = None
    guided_whitespace_pattern: Annotated[Any, Unserved(why="a schema's x-guidance has it")] = None
    structural_tag: Annotated[Any, Unserved(why="structural tags are not served")] = None
    regex: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    ebnf: Annotated[Any, Unserved(why="structured_outputs has grammars")] = None
    json_schema: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    lora_path: Annotated[Any, Unserved(why="the server has one model, without adapters")] = None
    kv_transfer_params: Annotated[Any, Unserved(why="keys and values stay in their server")] = None
    vllm_xargs: Annotated[Any, Unserved({}, why="the engine is detjax's own")] = None
    moderation: Annotated[Any, Unserved(why="the server does not judge content")] = None


class SamplingRequest(_ClientFields):
    """The fields that all requests for answers have in common."""

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
        ge=-1,
        le=LARGEST,
        description="Keeps so many of the likeliest tokens; 0 or -1: all. Default: the checkpoint's, else 0.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Keeps tokens of at least this share of the likeliest one's probability. Default: as top_k.",
    )
    seed: int | None = Field(
        default=None,
        ge=-1,
        lt=2**64,
        description="Seed of the random choices. Default, and for -1: one that the server draws for each prompt. Each "
        "choice says its seed.",
    )
    stop: Stops | None = Field(default=None, description="Strings that end a sample; they are cut off.")
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = Field(
        default=None, description="Tokens that end a sample."
    )
    ignore_eos: bool | None = Field(default=False, description="Go on where the model would end the text.")
    stream: bool | None = Field(default=None, description="Send the answer as it is computed.")
    presence_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="Is subtracted from the logits of tokens that the sample has. Default: 0.",
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Is subtracted as often as the sample has the token. Default: 0."
    )
    repetition_penalty: float | None = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="Divides the logits, or multiplies negative ones, of tokens that the prompt or the sample has. "
        "Default: the checkpoint's, else 1.",
    )
    logit_bias: Biases | None = Field(default=None, description="What is added to the logits of tokens, by token id.")
    min_tokens: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Tokens before which no token ends a sample. Default: 0."
    )
    receipt: bool | None = Field(
        default=None,
        description="Add to each answer a receipt, which `detjax verify` checks: request, tokens and logprobs.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = Field(
        default=None, description="Share the prefix cache with requests of the same salt alone."
    )

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 1e-30:
            raise ValueError("accepted: 0, or 1e-30 to 1e30")
        return value

    @field_validator("ignore_eos")
    @classmethod
    def _read_ignore_eos(cls, value: bool | None) -> bool:
        return bool(value)

    @field_validator("top_k")
    @classmethod
    def _read_top_k(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value

    @field_validator("seed")
    @classmethod
    def _read_seed(cls, value: int | None) -> int | None:
        return None if value == -1 else value

    def param_of(self, field: str) -> str:
        """Returns what the body calls a field of `Request` or `SamplingParams`, or of itself."""
        return field

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerationRequest(SamplingRequest):
    """The fields that completions and chats have in common."""

    _TOP_LOGPROBS: ClassVar[str] = "top_logprobs"
    """The field that says how many of the likeliest tokens are reported."""

    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES, description="Samples of each prompt. Default: 1.")
    stream_options: StreamOptions | None = Field(default=None, description="Accepted with stream: true.")
    response_format: ResponseFormat | None = Field(
        default=None, description="The answer is JSON of this form. It ends where the JSON does, or at its last token."
    )
    structured_outputs: StructuredOutputs | None = Field(default=None, description="The answer has this form.")
    return_token_ids: bool | None = Field(default=None, description="Report token ids of prompts and answers.")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST,
        description="Report logprobs of the prompt's tokens, and so many of the likeliest tokens in their places.",
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options is given and stream is not true; accepted: stream_options with stream: true",
                "stream_options",
            )
        return self

    @model_validator(mode="after")
    def _check_one_constraint(self) -> "GenerationRequest":
        if self.response_format is not None and self.response_format.type != "text" and self.structured_outputs:
            raise ValueError("response_format and structured_outputs are given; accepted: one of them")
        return self

    def param_of(self, field: str) -> str:
        if field == "constraint":
            return "response_format" if self.structured_outputs is None else "structured_outputs"
        if field == "top_logprobs" and (self.prompt_logprobs or 0) > (getattr(self, self._TOP_LOGPROBS) or 0):
            return "prompt_logprobs"
        return self._TOP_LOGPROBS if field == "top_logprobs" else field

    def constraint(self) -> Constraint | None:
        """What the answer must be; None: any text."""
        form = self.structured_outputs or self.response_format
        return None if form is None else form.constraint()
