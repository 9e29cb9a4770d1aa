"""Translates calls of the API to requests of the engine, and what the engine generates to responses."""

import abc
import dataclasses
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from detjax.engine import Completion, Engine, Generation, PromptLogprobs, Request, SamplingParams, Token
from detjax.models import Tokenizer
from detjax.server.schemas import ChatRequest, CompletionRequest, GenerationRequest

_DEFAULT_MAX_TOKENS: Final = 16
"""Tokens of a completion whose request does not say how many; OpenAI's default."""
_MINUS_INFINITY: Final = -9999.0
"""The logprob that stands for minus infinity, which JSON does not have."""

type Json = dict[str, Any]
type TopLogprobs = Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that a server offers.

    Attributes:
        name: what clients call it.
        engine: computes with it.
        tokenizer: the engine's.
        defaults: fields of `SamplingParams` for requests that do not give them.
        fingerprint: what answers depend on besides requests.
        created: when the server started, in seconds since 1970.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    defaults: Json
    fingerprint: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def token_text(self, token: int) -> str:
        """The text of one token. Bytes that are no whole character become U+FFFD."""
        return self.tokenizer.token_bytes(token).decode(errors="replace")


class ApiCall(abc.ABC):
    """A call of the API: its requests to the engine, and its response, whole or streamed.

    A choice is one sample of one prompt. Choices are numbered by prompt, then by sample.

    Attributes:
        requests: requests to the engine, one for each prompt.
    """

    _ID_PREFIX: str
    _OBJECT: str
    _CHUNK_OBJECT: str

    def __init__(self, body: GenerationRequest, model: ServedModel) -> None:
        self.model = model
        self.requests: list[Request] = []
        self._id = f"{self._ID_PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        options = body.stream_options
        self._includes_usage = options is not None and options.include_usage
        self._includes_batch = options is not None and options.include_batch
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n")}
        self._fields = model.defaults | {name: value for name, value in given.items() if value is not None}
        self._fields |= {"stop": body.stops, "ignore_eos": body.ignore_eos}
        self._fields |= {"stop_token_ids": tuple(body.stop_token_ids or ())}

    @property
    def num_samples(self) -> int:
        """The number of choices of the response."""
        return sum(request.sampling.n for request in self.requests)

    # --- whole responses ----------------------------------------------------------------------------------------------

    def full_response(self, generations: Sequence[Generation]) -> Json:
        """The response in one piece."""
        choices = []
        for prompt, generation in enumerate(generations):
            for completion in generation.completions:
                choices.append(self._choice(len(choices), prompt, completion, generation.prompt))
        generated = sum(len(c.tokens) for generation in generations for c in generation.completions)
        return self._envelope(self._OBJECT, choices) | {"usage": self._usage(generated)}

    @abc.abstractmethod
    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        """A choice of a whole response; `prompt` is its prompt's number, and `scores` are its prompt's logprobs."""

    # --- streams ------------------------------------------------------------------------------------------------------

    def first_chunks(self) -> Iterator[Json]:
        """The chunks before the first token."""
        for prompt, request in enumerate(self.requests):
            for sample in range(request.sampling.n):
                if (choice := self._first_chunk_choice(self._choice_index(prompt, sample), prompt)) is not None:
                    yield self._chunk([choice])

    def token_chunks(self, prompt: int, token: Token) -> Iterator[Json]:
        """The chunks of a token. There is none while its text may still begin a stop string or half a character."""
        choice = self._token_choice(self._choice_index(prompt, token.sample), token)
        if choice is not None:
            yield self._chunk([choice]) | ({"batch": token.batch} if self._includes_batch else {})

    def last_chunks(self, generated: int) -> Iterator[Json]:
        """The chunks after the last token; `generated` is the number of tokens."""
        if self._includes_usage:
            yield self._chunk([]) | {"usage": self._usage(generated)}

    @abc.abstractmethod
    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        """A choice as it begins, if there is anything to say before its first token."""

    @abc.abstractmethod
    def _token_choice(self, index: int, token: Token) -> Json | None:
        """What a token adds to its choice, if anything."""

    def _choice_index(self, prompt: int, sample: int) -> int:
        return prompt * self.requests[0].sampling.n + sample

    # --- what both kinds of responses share ---------------------------------------------------------------------------

    def _chunk(self, choices: list[Json]) -> Json:
        return self._envelope(self._CHUNK_OBJECT, choices) | ({"usage": None} if self._includes_usage else {})

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "choices": choices,
        }

    def _usage(self, generated: int) -> Json:
        prompts = sum(len(request.prompt) for request in self.requests)
        return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


class CompletionCall(ApiCall):
    """A call of /v1/completions."""

    _ID_PREFIX, _OBJECT, _CHUNK_OBJECT = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, model: ServedModel) -> None:
        """Tokenizes the prompts.

        Raises:
            ValueError: the prompts cannot be encoded, or the parameters contradict each other.
        """
        super().__init__(body, model)
        tokenizer, self._echoes, self._logprobs = model.tokenizer, bool(body.echo), body.logprobs
        self._only_scores_prompt = body.max_tokens == 0
        params = SamplingParams(
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens or _DEFAULT_MAX_TOKENS,
            top_logprobs=body.logprobs or 0,
            prompt_logprobs=self._echoes and body.logprobs is not None,
            **self._fields,
        )
        self._prompt_texts: list[str] = []
        for prompt in body.prompts:
            tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self.requests.append(Request(tokens, params))
            if self._echoes:
                self._prompt_texts.append(prompt if isinstance(prompt, str) else tokenizer.decode(prompt, False))
        self._offsets = [len(text) for text in self._prompt_texts for _ in range(params.n)]
        self._offsets += [0] * (self.num_samples - len(self._offsets))
        """For each choice, the offset in its text at which its next token begins."""

    def full_response(self, generations: Sequence[Generation]) -> Json:
        if self._only_scores_prompt:
            nothing = Completion(tokens=(), logprobs=(), top_logprobs=(), text="", finish_reason="length")
            generations = [
                dataclasses.replace(generation, completions=(nothing,) * len(generation.completions))
                for generation in generations
            ]
        return super().full_response(generations)

    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        text = (self._prompt_texts[prompt] if self._echoes else "") + (completion.text or "")
        logprobs = None
        if self._logprobs is not None:
            tokens, values = list(completion.tokens), list[float | None](completion.logprobs)
            top = list[TopLogprobs | None](completion.top_logprobs)
            if scores is not None:
                # The first token of a prompt has no logprob, because no token precedes it.
                tokens = [*self.requests[prompt].prompt, *tokens]
                values = [None, *scores.logprobs, *values]
                top = [None, *scores.top_logprobs, *top]
                self._offsets[index] = 0
            logprobs = self._logprobs_json(index, tokens, values, top)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        if not self._echoes:
            return None
        return {"index": index, "text": self._prompt_texts[prompt], "logprobs": None, "finish_reason": None}

    def _token_choice(self, index: int, token: Token) -> Json | None:
        if self._only_scores_prompt:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs_json(index, [token.token], [token.logprob], [token.top_logprobs])
        elif not token.text and token.finish_reason is None:
            return None
        return {"index": index, "text": token.text, "logprobs": logprobs, "finish_reason": token.finish_reason}

    def last_chunks(self, generated: int) -> Iterator[Json]:
        return super().last_chunks(0 if self._only_scores_prompt else generated)

    def _logprobs_json(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float | None], top: Sequence[TopLogprobs | None]
    ) -> Json:
        """The logprobs of consecutive tokens of a choice, and their offsets in its text."""
        texts = [self.model.token_text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else _json_number(value) for value in logprobs],
            "top_logprobs": [pairs and self._by_text(pairs) for pairs in top] if self._logprobs else None,
            "text_offset": offsets,
        }

    def _by_text(self, top: TopLogprobs) -> dict[str, float]:
        """The likeliest tokens by text. Several tokens may have the same text, such as half characters: the first wins.

        `top` is sorted by falling logprob.
        """
        logprobs: dict[str, float] = {}
        for token, logprob in top:
            logprobs.setdefault(self.model.token_text(token), _json_number(logprob))
        return logprobs


class ChatCall(ApiCall):
    """A call of /v1/chat/completions."""

    _ID_PREFIX, _OBJECT, _CHUNK_OBJECT = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, model: ServedModel) -> None:
        """Applies the chat template and tokenizes what it gives.

        Raises:
            ValueError: the chat template refuses the messages, they leave no room for an answer, or the parameters
                contradict each other.
        """
        super().__init__(body, model)
        self._logprobs = bool(body.logprobs)
        messages = [message.for_template() for message in body.messages]
        variables: Json = dict(body.chat_template_kwargs or {})
        if not model.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; accepted: /v1/completions")
        try:
            text = model.tokenizer.apply_chat_template(messages, **variables)
        except ValueError as error:  # its own text names the checkpoint's directory, which is not for clients
            raise ValueError(f"the chat template refuses these messages: {error.__cause__}") from error
        prompt = model.tokenizer.encode(text, add_special_tokens=False)
        room = model.engine.max_length - len(prompt)
        if room < 1:
            raise ValueError(
                f"messages have {len(prompt)} tokens; accepted: up to {model.engine.max_length - 1}, which leaves room "
                "for one more. Shorten the messages."
            )
        params = SamplingParams(
            max_tokens=body.max_completion_tokens or body.max_tokens or room,
            top_logprobs=body.top_logprobs or 0,
            **self._fields,
        )
        self.requests.append(Request(prompt, params))

    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        logprobs = None
        if self._logprobs:
            tokens = zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True)
            logprobs = {"content": [self._token_json(*token) for token in tokens], "refusal": None}
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _token_choice(self, index: int, token: Token) -> Json | None:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._token_json(token.token, token.logprob, token.top_logprobs)], "refusal": None}
        elif not token.text and token.finish_reason is None:
            return None
        delta = {"content": token.text} if token.text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": token.finish_reason}

    def _token_json(self, token: int, logprob: float, top: TopLogprobs) -> Json:
        """A token's logprob with the likeliest tokens in its place."""
        return self._logprob_json(token, logprob) | {"top_logprobs": [self._logprob_json(*pair) for pair in top]}

    def _logprob_json(self, token: int, logprob: float) -> Json:
        token_bytes = list(self.model.tokenizer.token_bytes(token))
        return {"token": self.model.token_text(token), "logprob": _json_number(logprob), "bytes": token_bytes}


def _json_number(logprob: float) -> float:
    """A logprob as JSON can hold it. A double holds the float32 number exactly."""
    return logprob if math.isfinite(logprob) else _MINUS_INFINITY
