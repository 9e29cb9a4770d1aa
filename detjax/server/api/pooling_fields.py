"""The bodies of requests to a model that pools, in vLLM's format, which is OpenAI's for embeddings."""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from detjax.engine import FieldError
from detjax.engine.pooling import Task
from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.api.messages import Messages
from detjax.server.http.field_types import (
    LARGEST,
    LONGEST_SALT,
    MAX_PROMPTS,
    Body,
    Prompt,
    RequestName,
    Variables,
    text_or_list,
)

type TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="texts_type",
        custom_error_message=f"accepted: a string, or a list of up to {MAX_PROMPTS} strings",
    ),
]
_PAIRS: Final = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""The names under which a request may give queries and documents."""
_Side = Annotated[Any, Unserved("left", why="truncate_prompt_tokens keeps the last tokens")]


class _PoolingFields(Body):
    """The fields that all requests share."""

    model: str | None = Field(default=None, description="A model name from /v1/models.")
    use_activation: bool | None = Field(
        default=None,
        description="Divide embeddings by their length, or turn logits into scores. Default: as the checkpoint says.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST)] | None = Field(
        default=None, description="Use only the last tokens: up to this many, with -1 as many as the model takes."
    )
    request_id: RequestName | None = Field(default=None, description="A name of the request for /abort_request.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = Field(
        default=None, description="Share the prefix cache only with requests that have the same salt."
    )
    user: Annotated[str | None, Ignored("it identifies the client's own user")] = None
    priority: Annotated[int | None, Ignored("all requests have the same priority")] = None
    truncation_side: _Side = None
    padding: Annotated[Any, Unserved("do_not_pad", why="no result depends on padding")] = None
    mm_processor_kwargs: Annotated[Any, Unserved({}, why="inputs are text")] = None

    def param_of(self, field: str) -> str:
        """Returns the body's name for a field of `Request`, `Pooling` or the body itself."""
        return field

    @model_validator(mode="after")
    def _check_truncation(self) -> "_PoolingFields":
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens is 0; accepted: at least 1, or -1 for as many tokens as fit"
            raise FieldError(message, "truncate_prompt_tokens")
        return self


class _InputFields(_PoolingFields):
    """The fields of requests with an input."""

    input: Prompt | None = Field(default=None, description="One or more inputs, as strings or token ids.")
    messages: Messages | None = Field(default=None, description="A conversation in place of an input.")
    add_special_tokens: bool | None = Field(
        default=None, description="Add the tokenizer's special tokens. Default: true for an input, false for messages."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="End a conversation with the beginning of an answer. Default: false."
    )
    continue_final_message: bool | None = Field(
        default=None, description="End a conversation with the text of its last message."
    )
    chat_template_kwargs: Variables | None = Field(
        default=None, description="Additional variables of the chat template."
    )
    chat_template: Annotated[Any, Unserved(why="the chat template is the checkpoint's")] = None
    media_io_kwargs: Annotated[Any, Unserved({}, why="inputs are text")] = None

    @model_validator(mode="after")
    def _check_input(self) -> "_InputFields":
        if (self.input is None) == (self.messages is None):
            given = "neither input nor messages is" if self.input is None else "input and messages are"
            raise ValueError(f"{given} given; accepted: one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError(
                "continue_final_message and add_generation_prompt are true; accepted: one of them",
                "continue_final_message",
            )
        for_chats = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        if self.messages is None and (name := next((name for name in for_chats if getattr(self, name)), None)):
            raise FieldError(f"input is given with {name}; accepted: {name} with messages", name)
        return self

    def param_of(self, field: str) -> str:
        return ("input" if self.messages is None else "messages") if field == "prompt" else super().param_of(field)

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs, each as a string or as token ids."""
        match self.input:
            case str():
                return [self.input]
            case [int(), *_]:
                return [self.input]  # pyright: ignore[reportReturnType]
        return list(self.input or ())  # pyright: ignore[reportReturnType]


class _EncodedFields(_InputFields):
    """The fields about the form of vectors."""

    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="float: lists of numbers; base64: little-endian float32. Default: float."
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST,
        description="Cut embeddings to this length before they are normalized, if the checkpoint allows it.",
    )
    embed_dtype: Annotated[Any, Unserved("float32", why="embeddings are float32")] = None
    endianness: Annotated[Any, Unserved("native", "little", why="base64 is little-endian")] = None


class EmbeddingRequest(_EncodedFields):
    """The body of a request to /v1/embeddings."""

    prompt_name: str | None = Field(
        default=None,
        max_length=LONGEST_SALT,
        description="The name of the text of the checkpoint to put before each text, such as query.",
    )


class ClassifyRequest(_InputFields):
    """The body of a request to /classify."""


class PoolingRequest(_EncodedFields):
    """The body of a request to /pooling."""

    task: Task | None = Field(
        default=None,
        description="The result: of each input or, with token_, of each of its tokens. Default: of each input.",
    )


class ScoreRequest(_PoolingFields):
    """The body of a request to /score: pairs of texts under one of four pairs of names."""

    queries: TextOrTexts | None = Field(default=None, description="A query for all documents, or one for each.")
    documents: TextOrTexts | None = Field(default=None, description="One or more documents.")
    items: TextOrTexts | None = Field(default=None, description="Another name of documents.")
    text_1: TextOrTexts | None = Field(default=None, description="Another name of queries.")
    text_2: TextOrTexts | None = Field(default=None, description="Another name of documents.")
    data_1: TextOrTexts | None = Field(default=None, description="Another name of queries.")
    data_2: TextOrTexts | None = Field(default=None, description="Another name of documents.")
    encoding_format: Annotated[Any, Unserved("float", why="scores are numbers")] = None

    @model_validator(mode="after")
    def _check_pair(self) -> "ScoreRequest":
        names = ("queries", "documents", "items", "text_1", "text_2", "data_1", "data_2")
        given = {name for name in names if getattr(self, name) is not None}
        if given not in map(set, _PAIRS):
            pairs = " or ".join(" and ".join(pair) for pair in _PAIRS)
            raise ValueError(f"{' and '.join(sorted(given)) or 'nothing'} is given; accepted: {pairs}")
        return self

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two fields with texts."""
        return next(pair for pair in _PAIRS if all(getattr(self, name) is not None for name in pair))

    def param_of(self, field: str) -> str:
        if field in ("queries", "prompt"):
            return self.names[field == "prompt"]
        return super().param_of(field)


class RerankRequest(_PoolingFields):
    """The body of a request to /rerank, in the format of Jina and Cohere."""

    query: str = Field(description="The query.")
    documents: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] = Field(
        description="The documents to sort."
    )
    top_n: int | None = Field(
        default=None, ge=0, le=LARGEST, description="Return this many of the best documents. Default, and for 0: all."
    )
    return_documents: Annotated[Any, Unserved(True, why="results have their documents")] = None
    max_tokens_per_doc: Annotated[Any, Unserved(0, why="documents are not cut")] = None
    max_tokens_per_query: Annotated[Any, Unserved(0, why="queries are not cut")] = None

    def param_of(self, field: str) -> str:
        return "documents" if field == "prompt" else super().param_of(field)
