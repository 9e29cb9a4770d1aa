"""Calls to a model that pools: embeddings, classes, and scores of pairs."""

import abc
import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from detjax.engine import FieldError, Generation, Pooling, Request
from detjax.engine.pooled_texts import (
    DOCUMENT,
    QUERY,
    check_single_score,
    cosine,
    has_pair_template,
    pairs_of,
    prompt_named,
)
from detjax.engine.pooling import Vectors
from detjax.server.api.api_calls import NOBODY, TOO_LONG, Caller, ServedModel
from detjax.server.api.messages import shown_in
from detjax.server.api.pooling_fields import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from detjax.server.http.errors import ApiError
from detjax.server.http.field_types import MAX_TOKENS
from detjax.server.text.texts import TextRefused, TextTooLong
from detjax.server.text.token_texts import Json


class PairMessage:
    """A message of a conversation that consists of a query and a document."""

    def __init__(self, role: str, content: str) -> None:
        self._message = {"role": role, "content": content}

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        return self._message


class PoolingCall(abc.ABC):
    """A call to a model that pools: its requests to the engine, and its response.

    Attributes:
        model: the model.
        requests: requests to the engine, set by `prepare`.
    """

    ID_PREFIX: ClassVar[str]

    def __init__(self, body: Any, model: ServedModel, caller: Caller = NOBODY) -> None:
        """A call of a body."""
        assert model.engine.pooling is not None
        self.model, self.body, self.options = model, body, model.engine.pooling
        self.requests: list[Request] = []
        self.id = f"{self.ID_PREFIX}-{uuid.uuid4().hex}"
        self._created, self._caller = int(time.time()), caller
        self._salt = caller.cache_salt(body.cache_salt)

    @property
    @abc.abstractmethod
    def num_samples(self) -> int:
        """The number of requests to the engine."""

    @abc.abstractmethod
    async def prepare(self) -> None:
        """Sets the requests. Raises a ValueError or an ApiError if one is not valid."""

    @abc.abstractmethod
    def response(self, generations: Sequence[Generation]) -> Json:
        """Returns the response, with iterators for long lists."""

    async def _encoded(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the token ids of texts."""
        try:
            return await self.model.texts.encode(texts, limit=self._limit, add_special_tokens=add_special_tokens)
        except TextRefused as error:
            raise FieldError(str(error), "prompt") from None
        except TextTooLong as error:
            raise self._too_long(error) from None

    @property
    def _limit(self) -> int:
        return self.model.engine.max_length if self.body.truncate_prompt_tokens is None else MAX_TOKENS

    def _too_long(self, error: TextTooLong) -> ApiError:
        return ApiError(
            400,
            f"input {error.number} has {error.size}; accepted: up to {self.model.engine.max_length}, the server's "
            "context length. Shorten it, or give truncate_prompt_tokens.",
            param=self.body.param_of("prompt"),
            code=TOO_LONG,
        )

    def _request(self, prompt: Sequence[int], pooling: Pooling) -> Request:
        most = self.body.truncate_prompt_tokens
        if most is not None:
            prompt = prompt[-(self.model.engine.max_length if most < 0 else most) :]
        return Request(prompt, cache_salt=self._salt, client=self._caller.client, id=self.id, pooling=pooling)

    def _listed(self, data: Iterator[Json], generations: Sequence[Generation]) -> Json:
        """Returns a response that is a list."""
        return {
            "id": self.id,
            "object": "list",
            "created": self._created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "data": data,
            "usage": usage(generations),
        }


def vector_of(generation: Generation) -> Vectors:
    """Returns the result of a request.

    Raises:
        ApiError: it was aborted.
    """
    if generation.pooled is None:
        raise ApiError(503, "the request was aborted")
    return generation.pooled


def usage(generations: Sequence[Generation]) -> Json:
    """Returns the numbers of tokens of a call."""
    tokens = sum(len(one.prompt_tokens) for one in generations)
    cached = sum(one.cached_tokens for one in generations)
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": details,
    }


def in_base64(vectors: Vectors) -> str:
    """Returns little-endian float32 numbers in base64."""
    return base64.b64encode(vectors.astype("<f4").tobytes()).decode()


class _InputCall(PoolingCall):
    """A call with inputs or a conversation, each with one result."""

    @property
    def num_samples(self) -> int:
        return max(len(self.body.inputs), 1)

    @property
    @abc.abstractmethod
    def _pooling(self) -> Pooling:
        """The options of the requests."""

    @property
    def _before(self) -> str:
        """The text before each text."""
        return ""

    async def prepare(self) -> None:
        if self.body.messages is not None:
            prompts = [await self._conversation()]
        else:
            texts = [self._before + one for one in self.body.inputs if isinstance(one, str)]
            lists = [one for one in self.body.inputs if not isinstance(one, str)]
            adds = self.body.add_special_tokens is not False
            prompts = await self._encoded(texts, add_special_tokens=adds) if texts else lists
        self.requests = [self._request(prompt, self._pooling) for prompt in prompts]

    async def _conversation(self) -> list[int]:
        body = self.body
        if not self.model.tokenizer.has_chat_template:
            raise FieldError("the model has no chat template; accepted: an input", "messages")
        if any(shown_in(message.content) for message in body.messages):
            raise FieldError("messages have images; accepted: parts of type text", "messages")
        try:
            return await self.model.texts.encode_chat(
                body.messages,
                body.chat_template_kwargs or {},
                limit=self._limit,
                add_generation_prompt=bool(body.add_generation_prompt),
                continue_final_message=bool(body.continue_final_message),
                add_special_tokens=bool(body.add_special_tokens),
            )
        except TextRefused as error:
            raise FieldError(str(error), "prompt") from None
        except TextTooLong as error:
            raise self._too_long(error) from None


class EmbeddingCall(_InputCall):
    """A call of /v1/embeddings."""

    ID_PREFIX = "embd"
    body: EmbeddingRequest

    @property
    def _pooling(self) -> Pooling:
        return Pooling("embed", self.body.use_activation, self.body.dimensions)

    @property
    def _before(self) -> str:
        return prompt_named("the request", self.options, self.body.prompt_name)

    def response(self, generations: Sequence[Generation]) -> Json:
        encode = in_base64 if self.body.encoding_format == "base64" else np.ndarray.tolist
        vectors = [vector_of(one) for one in generations]
        data = (
            {"index": index, "object": "embedding", "embedding": encode(vector)} for index, vector in enumerate(vectors)
        )
        return self._listed(data, generations)


class ClassifyCall(_InputCall):
    """A call of /classify."""

    ID_PREFIX = "classify"
    body: ClassifyRequest

    @property
    def _pooling(self) -> Pooling:
        return Pooling("classify", self.body.use_activation)

    def response(self, generations: Sequence[Generation]) -> Json:
        labels, vectors = self.options.labels, [vector_of(one) for one in generations]
        data = (
            {
                "index": index,
                "label": labels[int(vector.argmax())],
                "probs": vector.tolist(),
                "num_classes": len(labels),
            }
            for index, vector in enumerate(vectors)
        )
        return self._listed(data, generations)


class EncodeCall(_InputCall):
    """A call of /pooling."""

    ID_PREFIX = "pool"
    body: PoolingRequest

    @property
    def _pooling(self) -> Pooling:
        return Pooling(self.body.task, self.body.use_activation, self.body.dimensions)

    def response(self, generations: Sequence[Generation]) -> Json:
        encode = in_base64 if self.body.encoding_format == "base64" else np.ndarray.tolist
        vectors = [vector_of(one) for one in generations]
        data = ({"index": index, "object": "pooling", "data": encode(one)} for index, one in enumerate(vectors))
        return self._listed(data, generations)


class _PairsCall(PoolingCall):
    """A call with pairs of a query and a document, each with a score."""

    def __init__(self, body: Any, model: ServedModel, caller: Caller = NOBODY) -> None:
        super().__init__(body, model, caller)
        self._pairs = self._read_pairs()
        self._distinct = list(dict.fromkeys(text for pair in self._pairs for text in pair))
        """The texts to embed, if the model gives embeddings."""
        if not self.options.gives_embeddings:
            check_single_score("the request", self.options)
        elif body.use_activation is False:
            message = "use_activation is false; accepted: true, as the score of two embeddings is their cosine"
            raise FieldError(message, "use_activation")

    @abc.abstractmethod
    def _read_pairs(self) -> list[tuple[str, str]]:
        """Returns each document with its query."""

    @property
    def num_samples(self) -> int:
        return len(self._distinct if self.options.gives_embeddings else self._pairs)

    async def prepare(self) -> None:
        pooling = Pooling("embed" if self.options.gives_embeddings else "classify", self.body.use_activation)
        if self.options.gives_embeddings:
            before = prompt_named("the request", self.options, None)
            prompts = await self._encoded([before + text for text in self._distinct])
        elif has_pair_template(self.model.tokenizer):
            prompts = [await self._by_template(*pair) for pair in self._pairs]
        else:
            prompts = await self._encoded(["".join(pair) for pair in self._pairs])
        self.requests = [self._request(prompt, pooling) for prompt in prompts]

    async def _by_template(self, query: str, document: str) -> list[int]:
        messages = [PairMessage(QUERY, query), PairMessage(DOCUMENT, document)]
        options: Any = {"limit": self._limit, "add_generation_prompt": False, "add_special_tokens": True}
        try:
            return await self.model.texts.encode_chat(messages, {}, **options)
        except TextRefused as error:
            raise FieldError(str(error), "prompt") from None
        except TextTooLong as error:
            raise self._too_long(error) from None

    def _scores(self, generations: Sequence[Generation]) -> list[float]:
        vectors = [vector_of(one) for one in generations]
        if not self.options.gives_embeddings:
            return [float(vector[0]) for vector in vectors]
        by_text = dict(zip(self._distinct, vectors, strict=True))
        return [float(np.float32(cosine(by_text[query], by_text[document]))) for query, document in self._pairs]


class ScoreCall(_PairsCall):
    """A call of /score."""

    ID_PREFIX = "score"
    body: ScoreRequest

    def _read_pairs(self) -> list[tuple[str, str]]:
        queries, documents = (getattr(self.body, name) for name in self.body.names)
        return pairs_of("the request", queries, [documents] if isinstance(documents, str) else documents)

    def response(self, generations: Sequence[Generation]) -> Json:
        scores = self._scores(generations)
        data = ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))
        return self._listed(data, generations)


class RerankCall(_PairsCall):
    """A call of /rerank."""

    ID_PREFIX = "rerank"
    body: RerankRequest

    def _read_pairs(self) -> list[tuple[str, str]]:
        return [(self.body.query, document) for document in self.body.documents]

    def response(self, generations: Sequence[Generation]) -> Json:
        scores, documents = self._scores(generations), self.body.documents
        # Sorting is stable, so among equal scores the first document comes first.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.body.top_n or None]
        results = (
            {"index": index, "document": {"text": documents[index]}, "relevance_score": scores[index]}
            for index in order
        )
        numbers = usage(generations)
        return {
            "id": self.id,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "usage": {name: numbers[name] for name in ("prompt_tokens", "total_tokens")},
            "results": results,
        }
