"""From what is asked over HTTP to requests of the engine, and from what it generates to what is answered."""

import abc
import dataclasses
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from detjax.engine import Completion, Engine, Generation, PromptLogprobs, Request, SamplingParams, Token
from detjax.models import Tokenizer
from detjax.server.schemas import ChatRequest, CompletionRequest, Sampling

_DEFAULT_MAX_TOKENS: Final = 16
"""Of a completion, as OpenAI has it."""

type Json = dict[str, Any]
type Top = Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Served:
    """The model as clients know it."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    defaults: Json
    """Fields of `SamplingParams` where a request is silent."""
    fingerprint: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def text(self, token: int) -> str:
        """Of a token by itself; what is no whole character is U+FFFD."""
        return self.tokenizer.token_bytes(token).decode(errors="replace")


class Answer(abc.ABC):
    """One request over HTTP: what the engine is asked, and how its tokens are told.

    Attributes:
        requests: to the engine, one for each prompt.
    """

    _PREFIX: str
    _OBJECT: str
    _CHUNK: str

    def __init__(self, asked: Sampling, served: Served) -> None:
        self.served = served
        self.requests: list[Request] = []
        self._id = f"{self._PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        options = asked.stream_options
        self._includes_usage = options is not None and options.include_usage
        self._includes_batch = options is not None and options.include_batch
        given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n")}
        self._fields = served.defaults | {name: value for name, value in given.items() if value is not None}
        self._fields |= {"stop": asked.stops, "ignore_eos": asked.ignore_eos}
        self._fields |= {"stop_token_ids": tuple(asked.stop_token_ids or ())}

    @property
    def samples(self) -> int:
        return sum(request.sampling.n for request in self.requests)

    # --- whole ones ---------------------------------------------------------------------------------------------------

    def whole(self, generations: Sequence[Generation]) -> Json:
        """The answer in one piece."""
        choices = []
        for prompt, generation in enumerate(generations):
            for completion in generation.completions:
                choices.append(self._choice(len(choices), prompt, completion, generation.prompt))
        generated = sum(len(c.tokens) for generation in generations for c in generation.completions)
        return self._envelope(self._OBJECT, choices) | {"usage": self._usage(generated)}

    @abc.abstractmethod
    def _choice(self, index: int, prompt: int, completion: Completion, scored: PromptLogprobs | None) -> Json: ...

    # --- streams ------------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[Json]:
        """Chunks before the first token."""
        for prompt, request in enumerate(self.requests):
            for sample in range(request.sampling.n):
                if (choice := self._opening_choice(self._index(prompt, sample), prompt)) is not None:
                    yield self._chunk([choice])

    def news(self, prompt: int, token: Token) -> Iterator[Json]:
        """What is told of a token: nothing yet, where its text may still become another."""
        choice = self._delta(self._index(prompt, token.sample), token)
        if choice is not None:
            yield self._chunk([choice]) | ({"batch": token.batch} if self._includes_batch else {})

    def closing(self, generated: int) -> Iterator[Json]:
        """Chunks behind the last token, of so many."""
        if self._includes_usage:
            yield self._chunk([]) | {"usage": self._usage(generated)}

    @abc.abstractmethod
    def _opening_choice(self, index: int, prompt: int) -> Json | None: ...

    @abc.abstractmethod
    def _delta(self, index: int, token: Token) -> Json | None: ...

    def _index(self, prompt: int, sample: int) -> int:
        return prompt * self.requests[0].sampling.n + sample

    # --- what they share ----------------------------------------------------------------------------------------------

    def _chunk(self, choices: list[Json]) -> Json:
        return self._envelope(self._CHUNK, choices) | ({"usage": None} if self._includes_usage else {})

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
        }

    def _usage(self, generated: int) -> Json:
        prompts = sum(len(request.prompt) for request in self.requests)
        return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


class Completions(Answer):
    _PREFIX, _OBJECT, _CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: CompletionRequest, served: Served) -> None:
        """Raises:
        ValueError: the prompts cannot be encoded, or the parameters contradict each other.
        """
        super().__init__(asked, served)
        tokenizer, self._echoes, self._logprobs = served.tokenizer, bool(asked.echo), asked.logprobs
        self._is_of_prompt_alone = asked.max_tokens == 0
        params = SamplingParams(
            max_tokens=1 if asked.max_tokens == 0 else asked.max_tokens or _DEFAULT_MAX_TOKENS,
            top_logprobs=asked.logprobs or 0,
            prompt_logprobs=self._echoes and asked.logprobs is not None,
            **self._fields,
        )
        self._texts: list[str] = []
        for prompt in asked.prompts:
            tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self.requests.append(Request(tokens, params))
            if self._echoes:
                self._texts.append(prompt if isinstance(prompt, str) else tokenizer.decode(prompt, False))
        self._offsets = [len(text) for text in self._texts for _ in range(params.n)] if self._echoes else []
        self._offsets += [0] * (self.samples - len(self._offsets))
        """Of each choice, where its next token's text begins."""

    def whole(self, generations: Sequence[Generation]) -> Json:
        if self._is_of_prompt_alone:
            generations = [
                dataclasses.replace(
                    generation,
                    completions=tuple(
                        Completion(tokens=(), logprobs=(), top_logprobs=(), text="", finish_reason="length")
                        for _ in generation.completions
                    ),
                )
                for generation in generations
            ]
        return super().whole(generations)

    def _choice(self, index: int, prompt: int, completion: Completion, scored: PromptLogprobs | None) -> Json:
        text = (self._texts[prompt] if self._echoes else "") + (completion.text or "")
        logprobs = None
        if self._logprobs is not None:
            tokens, values = list(completion.tokens), list[float | None](completion.logprobs)
            top = list[Top | None](completion.top_logprobs)
            if scored is not None:
                # Nothing comes before the first token that it could be likely behind.
                tokens = [*self.requests[prompt].prompt, *tokens]
                values = [None, *scored.logprobs, *values]
                top = [None, *scored.top_logprobs, *top]
                self._offsets[index] = 0
            logprobs = self._logprobs_of(index, tokens, values, top)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _opening_choice(self, index: int, prompt: int) -> Json | None:
        if not self._echoes:
            return None
        return {"index": index, "text": self._texts[prompt], "logprobs": None, "finish_reason": None}

    def _delta(self, index: int, token: Token) -> Json | None:
        if self._is_of_prompt_alone:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs_of(index, [token.token], [token.logprob], [token.top_logprobs])
        elif not token.text and token.finish_reason is None:
            return None
        return {"index": index, "text": token.text, "logprobs": logprobs, "finish_reason": token.finish_reason}

    def closing(self, generated: int) -> Iterator[Json]:
        return super().closing(0 if self._is_of_prompt_alone else generated)

    def _logprobs_of(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Top | None]
    ) -> Json:
        texts = [self.served.text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else _number(value) for value in logprobs],
            "top_logprobs": [one and self._by_text(one) for one in top] if self._logprobs else None,
            "text_offset": offsets,
        }

    def _by_text(self, top: Top) -> dict[str, float]:
        """The likeliest tokens; of those with the same text, which may be half a character each, the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self.served.text(token), _number(logprob))
        return found


class Chat(Answer):
    _PREFIX, _OBJECT, _CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, served: Served) -> None:
        """Raises:
        ValueError: the chat template refuses the messages, they leave no room, or the parameters contradict each other.
        """
        super().__init__(asked, served)
        self._logprobs = bool(asked.logprobs)
        messages = [message.for_template() for message in asked.messages]
        variables: Json = dict(asked.chat_template_kwargs or {})
        if not served.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; accepted: /v1/completions")
        try:
            text = served.tokenizer.apply_chat_template(messages, **variables)
        except ValueError as error:  # which names the directory, and that is nothing for clients
            raise ValueError(f"the chat template refuses these messages: {error.__cause__}") from error
        prompt = served.tokenizer.encode(text, add_special_tokens=False)
        room = served.engine.max_tokens - len(prompt)
        if room < 1:
            raise ValueError(
                f"messages have {len(prompt)} tokens; accepted: up to {served.engine.max_tokens - 1}, so that there is "
                "room for another one"
            )
        params = SamplingParams(
            max_tokens=asked.max_completion_tokens or asked.max_tokens or room,
            top_logprobs=asked.top_logprobs or 0,
            **self._fields,
        )
        self.requests.append(Request(prompt, params))

    def _choice(self, index: int, prompt: int, completion: Completion, scored: PromptLogprobs | None) -> Json:
        logprobs = None
        if self._logprobs:
            found = zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True)
            logprobs = {"content": [self._scored(*one) for one in found], "refusal": None}
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _opening_choice(self, index: int, prompt: int) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, index: int, token: Token) -> Json | None:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._scored(token.token, token.logprob, token.top_logprobs)], "refusal": None}
        elif not token.text and token.finish_reason is None:
            return None
        delta = {"content": token.text} if token.text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": token.finish_reason}

    def _scored(self, token: int, logprob: float, top: Top) -> Json:
        return self._named(token, logprob) | {"top_logprobs": [self._named(*one) for one in top]}

    def _named(self, token: int, logprob: float) -> Json:
        own = self.served.tokenizer.token_bytes(token)
        return {"token": self.served.text(token), "logprob": _number(logprob), "bytes": list(own)}


def _number(logprob: float) -> float:
    """A logprob as JSON can have it; a double holds the float32 number exactly."""
    return logprob if math.isfinite(logprob) else -9999.0
