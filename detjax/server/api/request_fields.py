"""The fields that several kinds of generation requests share."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from detjax.engine import Constraint, FieldError
from detjax.models import Tokenizer
from detjax.server.api.answer_forms import FormFields, ResponseFormat
from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.http.field_types import (
    LARGEST,
    LONGEST_SALT,
    LONGEST_STOP,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_SAMPLES,
    MAX_STOP_TOKENS,
    Biases,
    Body,
    Metadata,
    RequestName,
    Stops,
    Token,
)

ReasoningTokens = Annotated[
    int | None,
    Field(
        ge=-1,
        le=LARGEST,
        description="Maximum number of tokens of reasoning; then the mark that ends it is forced. Default, and for -1: "
        "no limit.",
    ),
]
"""The type of the budget of reasoning in chats and responses. Not a `type` statement, which would be a schema of its
own in the OpenAPI document."""


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
    session_id: Annotated[str | None, Ignored("the server keeps no state of sessions")] = None
    extra_key: Annotated[str | list[str] | None, Ignored("it is for the client's own use")] = None
    custom_labels: Annotated[dict[str, str] | None, Ignored("it is for the client's own use")] = None
    store: Annotated[bool | None, Ignored("the server stores no answers")] = None
    service_tier: Annotated[str | None, Ignored("all requests have the same priority")] = None
    priority: Annotated[int | None, Ignored("all requests have the same priority")] = None
    prompt_cache_key: Annotated[str | None, Ignored("the server decides what it caches, and no cache changes bits")] = (
        None
    )
    prompt_cache_retention: Annotated[str | None, Ignored("the server decides what it caches")] = None
    spaces_between_special_tokens: Annotated[
        bool | None, Ignored("the tokenizer writes no spaces between special tokens")
    ] = None
    prompt_cache_options: Annotated[Any, Unserved({}, why="the server decides what it caches")] = None

    return_hidden_states: Annotated[Any, Unserved(False, why="hidden states are not reported")] = None
    use_beam_search: Annotated[Any, Unserved(False, why="beam search is not supported")] = None
    length_penalty: Annotated[Any, Unserved(1, why="beam search is not supported")] = None
    early_stopping: Annotated[Any, Unserved(False, why="beam search is not supported")] = None
    logits_processors: Annotated[Any, Unserved([], why="the server does not run clients' code")] = None
    custom_logit_processor: Annotated[Any, Unserved(why="the server does not run clients' code")] = None
    lora_path: Annotated[Any, Unserved(why="model names an adapter, which /v1/load_lora_adapter loads")] = None
    kv_transfer_params: Annotated[Any, Unserved(why="keys and values stay on their server")] = None
    vllm_xargs: Annotated[Any, Unserved({}, why="the engine is not vLLM")] = None
    moderation: Annotated[Any, Unserved(why="the server does not moderate content")] = None
    truncation_side: Annotated[Any, Unserved("left", why="truncate_prompt_tokens keeps the last tokens")] = None
    watermarking: Annotated[Any, Unserved(False, why="the server does not mark its texts")] = None
    repetition_detection: Annotated[Any, Unserved(why="an answer that repeats itself does not end early")] = None
    logprob_token_ids: Annotated[Any, Unserved(why="logprobs are for the likeliest tokens")] = None
    stream_interval: Annotated[Any, Unserved(1, why="each token is sent at once")] = None
    stop_regex: Annotated[Any, Unserved([], why="stop has strings, not patterns")] = None
    return_routed_experts: Annotated[Any, Unserved(False, why="routed experts are not reported")] = None
    routed_experts_prompt_start: Annotated[Any, Unserved(0, why="routed experts are not reported")] = None
    routed_experts_start_len: Annotated[Any, Unserved(0, why="routed experts are not reported")] = None
    return_meta_info: Annotated[Any, Unserved(False, why="the answer has its fields at their places")] = None
    return_prompt_text: Annotated[Any, Unserved(False, why="return_token_ids reports the prompt")] = None
    return_prompt_token_ids: Annotated[Any, Unserved(False, why="return_token_ids reports the prompt")] = None
    return_cached_tokens_details: Annotated[Any, Unserved(False, why="usage has the number of cached tokens")] = None
    return_token_offsets: Annotated[Any, Unserved(False, why="logprobs have the offsets")] = None
    return_mm_kwargs: Annotated[Any, Unserved(True, why="it concerns requests that only render")] = None
    ec_transfer_params: Annotated[Any, Unserved(why="images are computed where they are used")] = None
    session_params: Annotated[Any, Unserved({}, why="the server keeps no state of sessions")] = None
    custom_params: Annotated[Any, Unserved({}, why="the server does not run clients' code")] = None
    images_config: Annotated[Any, Unserved({}, why="the checkpoint says how large images are")] = None
    ngram_corpus_id: Annotated[Any, Unserved(why="no tokens are guessed in advance")] = None
    bootstrap_host: Annotated[Any, Unserved(why="keys and values stay on their server")] = None
    bootstrap_port: Annotated[Any, Unserved(why="keys and values stay on their server")] = None
    bootstrap_room: Annotated[Any, Unserved(why="keys and values stay on their server")] = None
    routed_dp_rank: Annotated[Any, Unserved(why="the server chooses the engine")] = None
    disagg_prefill_dp_rank: Annotated[Any, Unserved(why="the server chooses the engine")] = None
    data_parallel_rank: Annotated[Any, Unserved(why="the server chooses the engine")] = None


class SamplingRequest(_ClientFields, FormFields):
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
    request_id: RequestName | None = Field(default=None, description="A name of the request for /abort_request.")
    rid: RequestName | None = Field(default=None, description="SGLang's name of request_id.")
    seed: int | None = Field(
        default=None,
        ge=-1,
        lt=2**64,
        description="Random seed. Default, and for -1: the server draws one per prompt. Each choice reports its seed.",
    )
    stop: Stops | None = Field(default=None, description="Strings that end a sample. The text ends before them.")
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = Field(
        default=None, description="Tokens that end a sample. The text ends before them."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="The text includes the stop string, or the text of the token, that ended the sample."
    )
    no_stop_trim: bool | None = Field(default=None, description="SGLang's name of include_stop_str_in_output.")
    skip_special_tokens: bool | None = Field(
        default=None, description="false: the text includes special tokens. Default: true."
    )
    allowed_token_ids: (
        Annotated[list[Token], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None
    ) = Field(default=None, description="Choose only these tokens. To end a sample, an end token must be among them.")
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = Field(
        default=None,
        description="Words that the sample does not contain, at the beginning of a text or after a space: the last "
        "token of a word is not chosen after its other tokens.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST)] | None = Field(
        default=None,
        description="Use only the last tokens of a prompt without images: up to this many, with -1 as many as fit.",
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description='Report tokens of logprobs as "token_id:123" instead of their text.'
    )
    sampling_logprobs: bool | None = Field(
        default=None,
        description="Report next to each logprob the logprob under the distribution that tokens are drawn from: after "
        "penalties, biases, masks, temperature and filters. Requires logprobs, prompt_logprobs or receipt.",
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
        default=None,
        ge=0,
        le=LARGEST,
        description="Number of tokens before a token or a stop string may end a sample. Default: 0.",
    )
    receipt: bool | None = Field(
        default=None,
        description="Add a receipt with request, tokens and logprobs to each answer, for `detjax verify`.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = Field(
        default=None, description="Share the prefix cache only with requests that have the same salt."
    )
    speculative: bool | None = Field(
        default=None,
        description="False: do not guess tokens of this request. No answer depends on it. Default: as the server does.",
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

    @model_validator(mode="after")
    def _check_stop_text(self) -> "SamplingRequest":
        given = {self.include_stop_str_in_output, self.no_stop_trim} - {None}
        if len(given) > 1:
            raise FieldError(
                "include_stop_str_in_output and no_stop_trim differ; accepted: one of them", "no_stop_trim"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling_logprobs(self) -> "SamplingRequest":
        if self.sampling_logprobs and not self.reports_logprobs and not self.receipt:
            raise FieldError(
                "sampling_logprobs is true and the request asks for no logprobs; accepted: sampling_logprobs with "
                "logprobs, prompt_logprobs or receipt",
                "sampling_logprobs",
            )
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens is 0; accepted: at least 1, or -1 for as many tokens as fit"
            raise FieldError(message, "truncate_prompt_tokens")
        return self

    @property
    def reports_logprobs(self) -> bool:
        """True if the answer reports logprobs."""
        return False

    @property
    def text_fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` about the answer's text and its tokens that differ from their defaults."""
        fields = {
            "include_stop_str_in_output": self.include_stop_str_in_output or self.no_stop_trim,
            "allowed_token_ids": tuple(dict.fromkeys(self.allowed_token_ids or ())),
            "bad_words": tuple(dict.fromkeys(self.bad_words or ())),
        }
        special = {"skip_special_tokens": False} if self.skip_special_tokens is False else {}
        return {name: value for name, value in fields.items() if value} | special

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
    return_token_ids: bool | None = Field(default=None, description="Report token ids of prompts and answers.")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST,
        description="Report logprobs of the prompt's tokens, with this many of the most likely tokens per position.",
    )
    scored_answer: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST,
        description="Number of tokens at the prompt's end that penalties, min_tokens and bad_words regard as an answer "
        "in their sampling logprobs. Default: 0, each token of the prompt is scored as the first one of an answer. "
        "Requires prompt_logprobs with sampling_logprobs.",
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
        name = self.form_given()
        if self.response_format is not None and self.response_format.type != "text" and name is not None:
            raise ValueError(f"response_format and {name} are given; accepted: one of them")
        return self

    @property
    def reports_logprobs(self) -> bool:
        return self.prompt_logprobs is not None

    def param_of(self, field: str) -> str:
        if field == "constraint":
            return self.form_given() or "response_format"
        if field == "top_logprobs" and (self.prompt_logprobs or 0) > (getattr(self, self._TOP_LOGPROBS) or 0):
            return "prompt_logprobs"
        return self._TOP_LOGPROBS if field == "top_logprobs" else field

    def constraint(self, tokenizer: Tokenizer) -> Constraint | None:
        """Returns the answer's constraint, or None for any text. Raises a ValueError if it is not valid."""
        constraint = self.form_constraint(tokenizer)
        if constraint is not None or self.response_format is None:
            return constraint
        try:
            return self.response_format.constraint(tokenizer)
        except ValueError as error:
            raise FieldError(f"response_format: {error}", "constraint") from None
