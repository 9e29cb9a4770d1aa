"""The fields that several kinds of generation requests share."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

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
    include_usage: bool | None = Field(default=None, description="Send the token counts in a final chunk.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="Send the token counts so far in every chunk. Requires include_usage."
    )
    include_batch: bool | None = Field(
        default=None, description="Report in each chunk the batch size of the step that computed it."
    )
    include_obfuscation: Annotated[Any, Unserved(False, why="chunks are not padded")] = None


class _ClientFields(Body):
    """Fields that clients send and that the server does not use."""

    user: Annotated[str | None, Ignored("it identifies the client's own user")] = None
    safety_identifier: Annotated[str | None, Ignored("it identifies the client's own user")] = None
    metadata: Annotated[Metadata | None, Ignored("it is for the client's own use")] = None
    request_id: Annotated[str | None, Ignored("answers have their own ids")] = None
    store: Annotated[bool | None, Ignored("the server stores no answers")] = None
    service_tier: Annotated[str | None, Ignored("all requests have the same priority")] = None
    priority: Annotated[int | None, Ignored("all requests have the same priority")] = None
    prompt_cache_key: Annotated[str | None, Ignored("the server decides what it caches, and no cache changes bits")] = (
        None
    )
    prompt_cache_retention: Annotated[str | None, Ignored("the server decides what it caches")] = None
    spaces_between_special_tokens: Annotated[bool | None, Ignored("the text has no special tokens")] = None
    prompt_cache_options: Annotated[Any, Unserved({}, why="the server decides what it caches")] = None

    skip_special_tokens: Annotated[Any, Unserved(True, why="the text has no special tokens")] = None
    include_stop_str_in_output: Annotated[Any, Unserved(False, why="the text ends before a stop string")] = None
    no_stop_trim: Annotated[Any, Unserved(False, why="the text ends before a stop string")] = None
    return_tokens_as_token_ids: Annotated[Any, Unserved(False, why="tokens are reported as text")] = None
    return_hidden_states: Annotated[Any, Unserved(False, why="hidden states are not reported")] = None
    truncate_prompt_tokens: Annotated[Any, Unserved(why="prompts are never truncated")] = None
    use_beam_search: Annotated[Any, Unserved(False, why="beam search is not supported")] = None
    length_penalty: Annotated[Any, Unserved(1, why="beam search is not supported")] = None
    early_stopping: Annotated[Any, Unserved(False, why="beam search is not supported")] = None
    allowed_token_ids: Annotated[Any, Unserved(why="the set of tokens cannot be restricted")] = None
    bad_words: Annotated[Any, Unserved([], why="the set of tokens cannot be restricted")] = None
    logits_processors: Annotated[Any, Unserved([], why="the server does not run clients' code")] = None
    custom_logit_processor: Annotated[Any, Unserved(why="the server does not run clients' code")] = None
    guided_json: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_regex: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_choice: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_grammar: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    guided_decoding_backend: Annotated[Any, Unserved(why="llguidance computes all masks")] = None
    guided_whitespace_pattern: Annotated[Any, Unserved(why="a schema's x-guidance has it")] = None
    structural_tag: Annotated[Any, Unserved(why="structural tags are not supported")] = None
    regex: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    ebnf: Annotated[Any, Unserved(why="structured_outputs has grammars")] = None
    json_schema: Annotated[Any, Unserved(why="structured_outputs has it")] = None
    lora_path: Annotated[Any, Unserved(why="the server has one model, without adapters")] = None
    kv_transfer_params: Annotated[Any, Unserved(why="keys and values stay on their server")] = None
    vllm_xargs: Annotated[Any, Unserved({}, why="the engine is not vLLM")] = None
    moderation: Annotated[Any, Unserved(why="the server does not moderate content")] = None


class SamplingRequest(_ClientFields):
    """The fields that all generation requests share."""

    model: str = Field(description="A model name from /v1/models.")
    temperature: float | None = Field(
        default=None, ge=0, le=1e30, description="0 picks the most likely token. Default: the checkpoint's, else 1."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Samples from the fewest tokens whose probabilities add up to this. Default: the checkpoint's, "
        "else 1.",
    )
    top_k: int | None = Field(
        default=None,
        ge=-1,
        le=LARGEST,
        description="Samples from this many most likely tokens; 0 or -1: all. Default: the checkpoint's, else 0.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Samples from tokens with at least this fraction of the maximum probability. Default: the "
        "checkpoint's, else 0.",
    )
    seed: int | None = Field(
        default=None,
        ge=-1,
        lt=2**64,
        description="Random seed. Default, and for -1: the server draws one per prompt. Each choice reports its seed.",
    )
    stop: Stops | None = Field(default=None, description="Strings that end a sample. The text ends before them.")
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = Field(
        default=None, description="Tokens that end a sample."
    )
    ignore_eos: bool | None = Field(default=False, description="Do not end a sample at the model's end tokens.")
    stream: bool | None = Field(default=None, description="Stream the answer while it is computed.")
    presence_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="Subtracted from the logits of tokens in the sample. Default: 0.",
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Subtracted once per occurrence of the token in the sample. Default: 0."
    )
    repetition_penalty: float | None = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="Divides the logits of tokens in the prompt or the sample, or multiplies negative ones. "
        "Default: the checkpoint's, else 1.",
    )
    logit_bias: Biases | None = Field(default=None, description="Added to the logits of tokens, by token id.")
    min_tokens: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Number of tokens before a token may end a sample. Default: 0."
    )
    receipt: bool | None = Field(
        default=None,
        description="Add a receipt with request, tokens and logprobs to each answer, for `detjax verify`.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = Field(
        default=None, description="Share the prefix cache only with requests that have the same salt."
    )

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 1e-30:
            raise ValueError("accepted: 0, or 1e-30 to 1e30")
        return value

    @field_validator("top_k", "seed", "ignore_eos")
    @classmethod
    def _read_default(cls, value: int | bool | None, info: ValidationInfo) -> int | bool | None:
        defaults = {("top_k", -1): 0, ("seed", -1): None, ("ignore_eos", None): False}
        return defaults.get((info.field_name, value), value)

    def param_of(self, field: str) -> str:
        """Returns the body's name for a field of `Request`, `SamplingParams` or the body itself."""
        return field

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerationRequest(SamplingRequest):
    """The fields that completions and chats share."""

    _TOP_LOGPROBS: ClassVar[str] = "top_logprobs"
    """The field with the number of most likely tokens to report."""

    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES, description="Samples per prompt. Default: 1.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream: true.")
    response_format: ResponseFormat | None = Field(
        default=None, description="Constrains the answer to JSON. It ends with the JSON, or at the token limit."
    )
    structured_outputs: StructuredOutputs | None = Field(default=None, description="Constrains the answer's form.")
    return_token_ids: bool | None = Field(default=None, description="Report token ids of prompts and answers.")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST,
        description="Report logprobs of the prompt's tokens, with this many of the most likely tokens per position.",
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
        """Returns the answer's constraint, or None for any text."""
        form = self.structured_outputs or self.response_format
        return None if form is None else form.constraint()
