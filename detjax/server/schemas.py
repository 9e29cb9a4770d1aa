"""The bodies of requests, in OpenAI's terms.

A field whose value asks for what the server does anyway is accepted. A field that would change answers, and which this
server would have to ignore, is refused by name. `docs/serve/fields.md` lists both.

Checking a body takes a small multiple of its bytes, whatever is wrong with it: a list is checked up to its first wrong
item, a dictionary's length is checked before its entries, and where a field takes several types, the value's own type
decides which of them it is checked as.
"""

from itertools import islice
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from detjax.engine import Constraint
from detjax.engine.sampling_params import MOST_BIASES
from detjax.server.field_marks import Ignored, Unserved

MOST_SAMPLES: Final = 128
"""The most samples of one prompt."""
MOST_PROMPTS: Final = 2048
"""The most prompts of one request."""
MOST_TOKENS: Final = 1 << 20
"""The most token ids of one prompt."""
MOST_MESSAGES: Final = 4096
"""The most messages of a conversation."""
MOST_PARTS: Final = 1024
"""The most parts of a message's content."""
MOST_STOPS: Final = 16
"""The most stop strings."""
LONGEST_STOP: Final = 256
"""The most characters of a stop string."""
MOST_STOP_TOKENS: Final = 1024
"""The most entries of `stop_token_ids`."""
MOST_METADATA: Final = 64
"""The most entries of `metadata`."""
MOST_VARIABLES: Final = 64
"""The most entries of `chat_template_kwargs`."""
MOST_CHOICES: Final = 1024
"""Texts that `structured_outputs` may offer as choice."""
LONGEST_SALT: Final = 256
"""The most characters of `cache_salt`."""
RESERVED_VARIABLES: Final = frozenset(
    {"add_generation_prompt", "documents", "messages", "raise_exception", "self", "strftime_now", "tools"}
)
"""Variables of chat templates that the server sets itself."""
_LARGEST: Final = 2**31 - 1


# --- types of fields --------------------------------------------------------------------------------------------------


def _kind_of_prompt(value: Any) -> str | None:
    """The tag of the type that a prompt is checked as: its own type and that of its first item decide."""
    match value:
        case str():
            return "<text>"
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<token lists>"
        case [_, *_]:
            return "<tokens>"
    return None


def _text_or_list(value: Any) -> str | None:
    """The tag of the type that a value is checked as which may be text or a list."""
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def is_tag(part: int | str) -> bool:
    """Whether a part of an error's location is such a tag, and not the name of a field."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def _at_most(most: int) -> BeforeValidator:
    """Refuses a dictionary by its length before its entries are checked, each of which might be an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_long", "accepted: up to {most} entries", {"most": most})
        return value

    return BeforeValidator(check)


def _drop_zeros(value: Any) -> Any:
    """Leaves out biases of 0, which change nothing."""
    if not isinstance(value, dict):
        return value
    return {token: bias for token, bias in value.items() if isinstance(bias, bool) or bias != 0}


def _check_variables(value: Any) -> Any:
    """Refuses variables that a chat template cannot take, or that the server sets itself."""
    if not isinstance(value, dict):
        return value
    reserved = sorted(RESERVED_VARIABLES & value.keys())
    if reserved:
        raise ValueError(f"accepted: variables other than {', '.join(reserved)}, which the server sets itself")
    if not all(name.isidentifier() for name in value):
        raise ValueError("accepted: names that a chat template can use: letters, digits and underscores")
    if not all(isinstance(variable, str | int | float | None) for variable in value.values()):
        raise ValueError("accepted: variables that are strings, numbers, booleans or null")
    return value


type Token = Annotated[int, Field(ge=0, le=_LARGEST)]
type Tokens = Annotated[list[Token], Field(min_length=1, max_length=MOST_TOKENS, fail_fast=True)]
type Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True), Tag("<token lists>")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="accepted: a string, or a list of strings, of token ids, or of lists of token ids",
    ),
]
type Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
type Stops = Annotated[
    Annotated[Stop, Tag("<text>")] | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_type",
        custom_error_message=f"accepted: a string of 1 to {LONGEST_STOP} characters, or a list of up to {MOST_STOPS}",
    ),
]
type Metadata = Annotated[dict[str, str], Field(max_length=MOST_METADATA), _at_most(MOST_METADATA)]
type Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MOST_BIASES),
    BeforeValidator(_drop_zeros),
    _at_most(MOST_BIASES),
]
type Variables = Annotated[
    dict[str, bool | int | float | str | None],
    Field(max_length=MOST_VARIABLES),
    BeforeValidator(_check_variables),
    _at_most(MOST_VARIABLES),
]


# --- bodies -----------------------------------------------------------------------------------------------------------


class Body(BaseModel):
    """JSON of exactly these fields and types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: Any) -> Any:
        """Refuses a body with more fields than there are at once, because each unknown field would be an error."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            unknown = islice((name for name in value if name not in cls.model_fields), 3)
            names = ", ".join(name[:80] for name in unknown)
            raise PydanticCustomError("extra_forbidden", "there are no fields {names}, ...", {"names": names})
        return value


class StreamOptions(Body):
    include_usage: bool | None = Field(default=None, description="Send the token counts in a last chunk.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="Send the token counts so far in every chunk. It needs include_usage."
    )
    include_batch: bool | None = Field(
        default=None, description="Add to each chunk how many samples the step had that computed it."
    )
    include_obfuscation: Annotated[Any, Unserved(False, why="chunks are not padded")] = None


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
            _text_or_list,
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


class JsonSchemaFormat(Body):
    name: str | None = Field(default=None, description="A name for the client's own use.")
    description: str | None = Field(default=None, description="A description for the client's own use.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the answer follows.")
    strict: bool | None = Field(default=None, description="Makes no difference: every answer follows the schema.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="What the answer is.")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="Given with type json_schema alone.")

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") is (self.json_schema is None):
            raise ValueError("accepted: json_schema with type 'json_schema', and with no other type")
        return self

    def constraint(self) -> Constraint | None:
        """What the answer must be; None: any text."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Constraint.json_schema(schema)


class StructuredOutputs(Body):
    json_: dict[str, Any] | None = Field(default=None, alias="json", description="A JSON schema.")
    regex: str | None = Field(default=None, description="An expression that the whole answer matches.")
    choice: Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)] | None = Field(
        default=None, description="Texts, one of which the answer is."
    )
    grammar: str | None = Field(default=None, description="A grammar in llguidance's variant of Lark's syntax.")

    @model_validator(mode="after")
    def _check_number(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1 or self.constraint() is None:
            raise ValueError("accepted: one of json, regex, choice and grammar")
        return self

    def constraint(self) -> Constraint | None:
        """What the answer must be."""
        if self.json_ is not None:
            return Constraint.json_schema(self.json_)
        if self.choice is not None:
            return Constraint.choice(self.choice)
        if self.regex is not None:
            return Constraint("regex", self.regex)
        return None if self.grammar is None else Constraint("grammar", self.grammar)


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
        le=_LARGEST,
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
        default=None, ge=0, le=_LARGEST, description="Tokens before which no token ends a sample. Default: 0."
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
        le=_LARGEST,
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
        le=_LARGEST,
        description="Tokens to generate at most. Default: 16. 0 with echo: the prompt alone.",
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=_LARGEST, description="Report logprobs, and so many of the likeliest tokens."
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
    max_tokens: int | None = Field(
        default=None, ge=1, le=_LARGEST, description="The old name of max_completion_tokens."
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=_LARGEST, description="Tokens to generate at most. Default: as many as fit."
    )
    logprobs: bool | None = Field(default=None, description="Report logprobs.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=_LARGEST, description="Report so many of the likeliest tokens, with logprobs: true."
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
