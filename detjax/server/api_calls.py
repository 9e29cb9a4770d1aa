"""Translates calls of the API to requests of the engine, and what the engine generates to responses.

What grows with an answer is made while it is sent: lists of a whole response that have an entry for each choice or
token are iterators, see `json_pieces`.
"""

import abc
import dataclasses
import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from starlette.concurrency import run_in_threadpool

from detjax.engine import Completion, Engine, Generation, PromptLogprobs, Request, SamplingParams, Token
from detjax.models import Tokenizer
from detjax.server.errors import ApiError
from detjax.server.schemas import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from detjax.server.texts import Texts, TextTooLong
from detjax.server.token_texts import Json, TextOffsets, TokenTexts, TopLogprobs, json_number

_DEFAULT_MAX_TOKENS: Final = 16
"""Tokens of a completion whose request does not say how many; OpenAI's default."""
_TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code for a prompt with more tokens than fit. Clients look for it."""
_SAMPLING_FIELDS: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of a body that are fields of `SamplingParams`."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that a server offers.

    Attributes:
        name: what clients call it.
        engine: computes with it.
        tokenizer: the engine's.
        texts: does the text work of requests with it.
        defaults: fields of `SamplingParams` for requests that do not give them.
        fingerprint: what answers depend on besides requests.
        token_texts: the texts of its tokens.
        created: when the server started, in seconds since 1970.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    texts: Texts
    defaults: Json
    fingerprint: str
    token_texts: TokenTexts
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        client: whose turn the request takes; see `Request.client`.
        has_own_prefixes: whether no other client's requests share pages of the prefix cache with it.
    """

    client: str | None = None
    has_own_prefixes: bool = False

    def cache_salt(self, salt: str | None) -> str | None:
        """The salt of the engine's request, given that of the body."""
        return f"{self.client or ''}/{salt or ''}" if self.has_own_prefixes else salt


NOBODY: Final = Caller()


class ApiCall(abc.ABC):
    """A call of the API: its requests to the engine, and its response, whole or streamed.

    A choice is one sample of one prompt. Choices are numbered by prompt, then by sample.

    Attributes:
        requests: requests to the engine, one for each prompt, once `encode_prompts` has made them.
    """

    _ID_PREFIX: str
    _OBJECT: str
    _CHUNK_OBJECT: str

    def __init__(self, body: GenerationRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        """Checks the parameters.

        Args:
            body: the request's body.
            model: answers it.
            caller: who sent the request.

        Raises:
            ValueError: the parameters contradict each other.
        """
        if body.stream and body.prompt_logprobs is not None:
            raise ValueError("stream and prompt_logprobs are given; accepted: one of them")
        self.model = model
        self.requests: list[Request] = []
        self._id = f"{self._ID_PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._caller, self._cache_salt = caller, caller.cache_salt(body.cache_salt)
        self._options = body.stream_options or StreamOptions()
        self._returns_token_ids, self._num_prompt_logprobs = bool(body.return_token_ids), body.prompt_logprobs
        given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        self._fields = model.defaults | {name: value for name, value in given.items() if value is not None}
        self._fields |= {"stop": body.stops, "ignore_eos": body.ignore_eos}
        self._fields |= {"stop_token_ids": tuple(body.stop_token_ids or ())}
        if (constraint := body.constraint()) is not None:
            self._fields |= {"constraint": constraint}
        if body.logit_bias:
            self._fields |= {"logit_bias": tuple((int(token), bias) for token, bias in body.logit_bias.items())}
        self._generated = 0
        self._cached: dict[int, int] = {}
        """Prompt tokens that a stream's requests found in the prefix cache, by prompt."""

    @property
    @abc.abstractmethod
    def num_samples(self) -> int:
        """The number of choices of the response."""

    async def prepare(self) -> None:
        """Makes the requests to the engine, and does for them what takes long.

        Raises:
            ApiError: see `encode_prompts`.
            ValueError: the constraint is not valid.
        """
        if (constraint := self._fields.get("constraint")) is not None:
            await run_in_threadpool(self.model.engine.compile_constraint, constraint)
        await self.encode_prompts()

    @abc.abstractmethod
    async def encode_prompts(self) -> None:
        """Makes the requests to the engine.

        Raises:
            ValueError: a prompt cannot be encoded, or it has more tokens than fit.
        """

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        return Request(prompt, params, cache_salt=self._cache_salt, client=self._caller.client)

    # --- whole responses ----------------------------------------------------------------------------------------------

    def full_response(self, generations: Sequence[Generation]) -> Json:
        """The response in one piece. Its long lists are iterators."""
        choices = (
            self._choice(self._choice_index(prompt, sample), prompt, completion, generation.prompt)
            for prompt, generation in enumerate(generations)
            for sample, completion in enumerate(generation.completions)
        )
        generated = sum(len(c.tokens) for generation in generations for c in generation.completions)
        cached = sum(generation.cached_tokens for generation in generations)
        return (
            self._envelope(self._OBJECT, choices)
            | {"usage": self._usage(generated, cached)}
            | self._response_fields(generations)
        )

    def _response_fields(self, generations: Sequence[Generation]) -> Json:
        """Further fields of a whole response."""
        return {}

    @abc.abstractmethod
    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        """A choice of a whole response; `prompt` is its prompt's number, and `scores` are its prompt's logprobs."""

    def _token_ids(self, tokens: Iterable[int]) -> Json:
        """The field that reports a choice's tokens, if the request asks for it."""
        return {"token_ids": iter(tokens)} if self._returns_token_ids else {}

    def _prompt_token_ids(self, prompt: int) -> Json:
        """The field that reports a prompt's tokens, if the request asks for it."""
        return {"prompt_token_ids": iter(self.requests[prompt].prompt)} if self._returns_token_ids else {}

    def _prompt_logprobs(self, prompt: int, scores: PromptLogprobs | None) -> Json:
        """The field that reports a prompt's logprobs as vLLM does, if the request asks for it."""
        if self._num_prompt_logprobs is None or scores is None:
            return {}
        tokens = itertools.islice(self.requests[prompt].prompt, 1, None)
        entries = (
            self.model.token_texts.by_token(top[: self._num_prompt_logprobs], int(token), logprob)
            for token, logprob, top in zip(tokens, scores.logprobs, scores.top_logprobs, strict=True)
        )
        # The first token has no logprob, because no token precedes it.
        return {"prompt_logprobs": itertools.chain([None], entries)}

    # --- streams ------------------------------------------------------------------------------------------------------

    def first_chunks(self) -> Iterator[Json]:
        """The chunks before the first token."""
        for prompt, request in enumerate(self.requests):
            for sample in range(request.sampling.n):
                if (choice := self._first_chunk_choice(self._choice_index(prompt, sample), prompt)) is not None:
                    yield self._chunk([choice]) | self._first_chunk_fields(prompt)

    def token_chunks(self, prompt: int, token: Token) -> Iterator[Json]:
        """The chunks of a token. There is none while its text may still begin a stop string or half a character."""
        self._generated += 1
        self._cached[prompt] = token.cached_tokens
        choice = self._token_choice(self._choice_index(prompt, token.sample), token)
        if choice is not None:
            yield self._chunk([choice]) | ({"batch": token.batch} if self._options.include_batch else {})

    def last_chunks(self, generated: int) -> Iterator[Json]:
        """The chunks after the last token; `generated` is the number of tokens."""
        if self._options.include_usage:
            yield self._chunk([]) | {"usage": self._usage(generated, sum(self._cached.values()))}

    @abc.abstractmethod
    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        """A choice as it begins, if there is anything to say before its first token."""

    def _first_chunk_fields(self, prompt: int) -> Json:
        """Further fields of the chunk in which a choice begins."""
        return {}

    @abc.abstractmethod
    def _token_choice(self, index: int, token: Token) -> Json | None:
        """What a token adds to its choice, if anything."""

    def _choice_index(self, prompt: int, sample: int) -> int:
        return prompt * self.requests[0].sampling.n + sample

    # --- what both kinds of responses share ---------------------------------------------------------------------------

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {}
        if self._options.include_usage:
            so_far = self._usage(self._generated, sum(self._cached.values()))
            usage = {"usage": so_far if self._options.continuous_usage_stats else None}
        return self._envelope(self._CHUNK_OBJECT, choices) | usage

    def _envelope(self, kind: str, choices: Iterable[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "choices": choices,
        }

    def _usage(self, generated: int, cached: int) -> Json:
        prompts = sum(len(request.prompt) for request in self.requests)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": generated,
            "total_tokens": prompts + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class CompletionCall(ApiCall):
    """A call of /v1/completions."""

    _ID_PREFIX, _OBJECT, _CHUNK_OBJECT = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        super().__init__(body, model, caller)
        self._prompts, self._echoes, self._logprobs = body.prompts, bool(body.echo), body.logprobs
        self._only_scores_prompt = body.max_tokens == 0
        self._params = SamplingParams(
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens or _DEFAULT_MAX_TOKENS,
            top_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0),
            prompt_logprobs=(self._echoes and body.logprobs is not None) or body.prompt_logprobs is not None,
            **self._fields,
        )
        self._prompt_texts: list[str] = []
        self._offsets: dict[int, TextOffsets] = {}
        """For each choice of a stream, where its tokens begin in its text."""

    @property
    def num_samples(self) -> int:
        return len(self._prompts) * self._params.n

    async def encode_prompts(self) -> None:
        # The prompts of a request are all texts, or all lists of tokens.
        texts = [prompt for prompt in self._prompts if isinstance(prompt, str)]
        lists = [prompt for prompt in self._prompts if not isinstance(prompt, str)]
        try:
            tokens = await self.model.texts.encode(texts, limit=self.model.engine.max_length) if texts else lists
        except TextTooLong as error:
            raise ApiError(
                400,
                f"prompt {error.number} has {error.size} and asks for {self._params.max_tokens} tokens more; accepted: "
                f"{self.model.engine.max_length} in all, the server's context length. Lower max_tokens or cut the "
                "prompt.",
                param="prompt",
                code=_TOO_LONG,
            ) from None
        self.requests = [self._request(prompt, self._params) for prompt in tokens]
        if self._echoes:
            self._prompt_texts = texts or await self.model.texts.decode(lists, skip_special_tokens=False)

    def full_response(self, generations: Sequence[Generation]) -> Json:
        if self._only_scores_prompt:
            nothing = Completion(tokens=(), logprobs=(), top_logprobs=(), text="", finish_reason="length")
            generations = [
                dataclasses.replace(generation, completions=(nothing,) * len(generation.completions))
                for generation in generations
            ]
        return super().full_response(generations)

    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        echoed = self._prompt_texts[prompt] if self._echoes else ""
        text = echoed + (completion.text or "")
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs_json(prompt, completion, scores if self._echoes else None, echoed)
        return (
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}
            | self._token_ids(completion.tokens)
            | self._prompt_token_ids(prompt)
            | self._prompt_logprobs(prompt, scores)
        )

    def _logprobs_json(
        self, prompt: int, completion: Completion, scores: PromptLogprobs | None, echoed: str
    ) -> dict[str, Iterator[Any] | None]:
        """The logprobs of a choice's tokens and, with `scores`, of its prompt's."""
        model, length = self.model, len(echoed) + len(completion.text or "")
        offsets = TextOffsets(model.tokenizer, start=len(echoed))
        begins: Iterator[int] = (min(offsets.add(token), length) for token in completion.tokens)
        tokens, values = list[Any](completion.tokens), list[float | None](completion.logprobs)
        top = list[TopLogprobs | None](completion.top_logprobs)
        if scores is not None:
            # The first token of a prompt has no logprob, because no token precedes it.
            prompt_tokens = list[Any](self.requests[prompt].prompt)
            tokens = [*prompt_tokens, *tokens]
            values, top = [None, *scores.logprobs, *values], [None, *scores.top_logprobs, *top]
            begins = itertools.chain(map(TextOffsets(model.tokenizer, prompt=echoed).add, prompt_tokens), begins)
        return {
            "tokens": map(model.token_texts.text, tokens),
            "token_logprobs": (None if value is None else json_number(value) for value in values),
            "top_logprobs": map(self._by_text, tokens, values, top) if self._logprobs else None,
            "text_offset": begins,
        }

    def _by_text(self, token: int, logprob: float | None, top: TopLogprobs | None) -> Json | None:
        if logprob is None or top is None:
            return None
        return self.model.token_texts.by_text(top[: self._logprobs], token, logprob)

    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        if not self._echoes and not self._returns_token_ids:
            return None
        text = self._prompt_texts[prompt] if self._echoes else ""
        ids = {"token_ids": [], "prompt_token_ids": self.requests[prompt].prompt} if self._returns_token_ids else {}
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None} | ids

    def _token_choice(self, index: int, token: Token) -> Json | None:
        if self._only_scores_prompt:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
        logprobs = None
        if self._logprobs is not None:
            logprobs = {
                "tokens": [self.model.token_texts.text(token.token)],
                "token_logprobs": [json_number(token.logprob)],
                "top_logprobs": [self._by_text(token.token, token.logprob, token.top_logprobs)]
                if self._logprobs
                else None,
                "text_offset": [self._offsets.setdefault(index, TextOffsets(self.model.tokenizer)).add(token.token)],
            }
        elif not token.text and token.finish_reason is None and not self._returns_token_ids:
            return None
        ids = {"token_ids": [token.token]} if self._returns_token_ids else {}
        return {"index": index, "text": token.text, "logprobs": logprobs, "finish_reason": token.finish_reason} | ids

    def last_chunks(self, generated: int) -> Iterator[Json]:
        return super().last_chunks(0 if self._only_scores_prompt else generated)


class ChatCall(ApiCall):
    """A call of /v1/chat/completions."""

    _ID_PREFIX, _OBJECT, _CHUNK_OBJECT = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        super().__init__(body, model, caller)
        if not model.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; accepted: /v1/completions")
        self._body, self._logprobs = body, bool(body.logprobs)
        self._num_top_logprobs = body.top_logprobs or 0
        self._params = SamplingParams(
            max_tokens=body.max_completion_tokens or body.max_tokens or model.engine.max_length,
            top_logprobs=max(self._num_top_logprobs, body.prompt_logprobs or 0),
            prompt_logprobs=body.prompt_logprobs is not None,
            **self._fields,
        )

    @property
    def num_samples(self) -> int:
        return self._params.n

    async def encode_prompts(self) -> None:
        body, most = self._body, self.model.engine.max_length - 1
        try:
            prompt = await self.model.texts.encode_chat(body.messages, body.chat_template_kwargs or {}, limit=most)
        except TextTooLong as error:
            raise ApiError(
                400,
                f"messages have {error.size}; accepted: up to {most} tokens, which leaves room for one more. Shorten "
                "the messages.",
                param="messages",
                code=_TOO_LONG,
            ) from None
        max_tokens = body.max_completion_tokens or body.max_tokens or self.model.engine.max_length - len(prompt)
        self.requests = [self._request(prompt, dataclasses.replace(self._params, max_tokens=max_tokens))]

    def _response_fields(self, generations: Sequence[Generation]) -> Json:
        return self._prompt_token_ids(0) | self._prompt_logprobs(0, generations[0].prompt)

    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        logprobs = None
        if self._logprobs:
            content = map(self._token_json, completion.tokens, completion.logprobs, completion.top_logprobs)
            logprobs = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        } | self._token_ids(completion.tokens)

    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _first_chunk_fields(self, prompt: int) -> Json:
        return {"prompt_token_ids": self.requests[prompt].prompt} if self._returns_token_ids else {}

    def _token_choice(self, index: int, token: Token) -> Json | None:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._token_json(token.token, token.logprob, token.top_logprobs)], "refusal": None}
        elif not token.text and token.finish_reason is None and not self._returns_token_ids:
            return None
        delta = {"content": token.text} if token.text else {}
        ids = {"token_ids": [token.token]} if self._returns_token_ids else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": token.finish_reason} | ids

    def _token_json(self, token: int, logprob: float, top: TopLogprobs) -> Json:
        """A token's logprob with the likeliest tokens in its place."""
        texts = self.model.token_texts
        return texts.chat_json(token, logprob) | {
            "top_logprobs": [texts.chat_json(*pair) for pair in top[: self._num_top_logprobs]]
        }
