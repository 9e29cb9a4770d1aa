"""The bodies of requests, in OpenAI's terms.

A field whose value asks for what the server does anyway is accepted. A field that would change answers, and which this
server would have to ignore, is refused by name. `docs/serve/fields.md` lists both.
"""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from detjax.engine import Constraint
from detjax.server.answer_forms import ResponseFormat, StructuredOutputs
from detjax.server.field_marks import Ignored, Unserved
from detjax.server.field_types import (
    LARGEST,
    LONGEST_SALT,
    MOST_MESSAGES,
    MOST_SAMPLES,
    MOST_STOP_TOKENS,
    Biases,
    Body,
    Metadata,
    Prompt,
    Stops,
    Token,
    Variables,
)
from detjax.server.messages import Message


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


class GenerationRequest(_ClientFields):
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
        description="Seed of the random choices. Default, and for -1: 0, so that the same request has the same answer.",
    )
    n: int | None = Field(default=None, ge=1, le=MOST_SAMPLES, description="Samples of each prompt. Default: 1.")
    stop: Stops | None = Field(default=None, description="Strings that end a sample; they are cut off.")
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)] | None = Field(
        default=None, description="Tokens that end a sample."
    )
    ignore_eos: bool | None = Field(default=False, description="Go on where the model would end the text.")
    stream: bool | None = Field(default=None, description="Send the answer as it is computed.")
    stream_options: StreamOptions | None = Field(default=None, description="Accepted with stream: true.")
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
    response_format: ResponseFormat | None = Field(
        default=None, description="The answer is JSON of this form. It ends where the JSON does, or at its last token."
    )
    structured_outputs: StructuredOutputs | None = Field(default=None, description="The answer has this form.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = Field(
        default=None, description="Share the prefix cache with requests of the same salt alone."
    )
    return_token_ids: bool | None = Field(default=None, description="Report token ids of prompts and answers.")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST,
        description="Report logprobs of the prompt's tokens, and so many of the likeliest tokens in their places.",
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

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError(
                "stream_options is given and stream is not true; accepted: stream_options with stream: true"
            )
        return self

    @model_validator(mode="after")
    def _check_one_constraint(self) -> "GenerationRequest":
        if self.response_format is not None and self.response_format.type != "text" and self.structured_outputs:
            raise ValueError("response_format and structured_outputs are given; accepted: one of them")
        return self

    def constraint(self) -> Constraint | None:
        """What the answer must be; None: any text."""
        form = self.structured_outputs or self.response_format
        return None if form is None else form.constraint()

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions."""

    prompt: Prompt = Field(description="One prompt or several, as strings or as token ids.")
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST,
        description="Tokens to generate at most. Default: 16. 0 with echo: the prompt alone.",
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Report logprobs, and so many of the likeliest tokens."
    )
    echo: bool | None = Field(default=None, description="Begin the text with the prompt.")
    best_of: int | None = Field(default=None, description="Accepted if it equals n.")
    suffix: Annotated[Any, Unserved("", why="text is only continued")] = None
    add_special_tokens: Annotated[Any, Unserved(True, why="a text prompt gets the tokenizer's special tokens")] = None
    prompt_embeds: Annotated[Any, Unserved(why="a prompt is text or token ids")] = None

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

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)] = Field(
        description="The conversation so far."
    )
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST, description="The old name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=LARGEST, description="Tokens to generate at most. Default: as many as fit."
    )
    logprobs: bool | None = Field(default=None, description="Report logprobs.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Report so many of the likeliest tokens, with logprobs: true."
    )
    chat_template_kwargs: Variables | None = Field(
        default=None, description="Further variables of the chat template, such as enable_thinking."
    )
    parallel_tool_calls: Annotated[bool | None, Ignored("tools are not served")] = None
    stream_reasoning: Annotated[bool | None, Ignored("reasoning is part of the content")] = None
    tools: Annotated[Any, Unserved([], why="tools are not served")] = None
    tool_choice: Annotated[Any, Unserved("none", "auto", why="tools are not served")] = None
    functions: Annotated[Any, Unserved([], why="tools are not served")] = None
    function_call: Annotated[Any, Unserved("none", "auto", why="tools are not served")] = None
    modalities: Annotated[Any, Unserved(["text"], why="the model writes text only")] = None
    audio: Annotated[Any, Unserved(why="the model writes text only")] = None
    prediction: Annotated[Any, Unserved(why="predicted answers are not served")] = None
    web_search_options: Annotated[Any, Unserved(why="the server does not search the web")] = None
    reasoning_effort: Annotated[
        Any, Unserved(why="the chat template decides; give its variables as chat_template_kwargs")
    ] = None
    thinking_token_budget: Annotated[Any, Unserved(why="reasoning is part of the answer and of its length")] = None
    include_reasoning: Annotated[Any, Unserved(True, why="reasoning is part of the content")] = None
    separate_reasoning: Annotated[Any, Unserved(False, why="reasoning is part of the content")] = None
    verbosity: Annotated[Any, Unserved("medium", why="the model decides how much it writes")] = None
    echo: Annotated[Any, Unserved(False, why="a chat's answer does not repeat its messages")] = None
    add_generation_prompt: Annotated[Any, Unserved(True, why="an answer is a message of its own")] = None
    continue_final_message: Annotated[Any, Unserved(False, why="an answer is a message of its own")] = None
    add_special_tokens: Annotated[Any, Unserved(False, why="the chat template writes all special tokens")] = None
    chat_template: Annotated[Any, Unserved(why="the chat template is the checkpoint's")] = None
    documents: Annotated[Any, Unserved([], why="messages are all that the chat template is given")] = None
    mm_processor_kwargs: Annotated[Any, Unserved({}, why="the model reads text only")] = None
    media_io_kwargs: Annotated[Any, Unserved({}, why="the model reads text only")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                "top_logprobs is given and logprobs is not true; accepted: top_logprobs with logprobs: true"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; accepted: one of them")
        return self
