"""Responses that consist of choices: completions and chats, whole or streamed."""

import abc
import itertools
from collections.abc import Iterable, Iterator, Sequence

from detjax.engine import Aborted, Completion, FieldError, Generation, PromptLogprobs, Token
from detjax.server.api.api_calls import NOBODY, ApiCall, Caller, ServedModel
from detjax.server.api.request_fields import GenerationRequest, StreamOptions
from detjax.server.text.token_texts import Json


class ChoicesCall(ApiCall):
    """A call whose response consists of choices: the samples of each prompt, ordered by prompt."""

    _OBJECT: str
    _CHUNK_OBJECT: str

    def __init__(self, body: GenerationRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        if body.stream and body.prompt_logprobs is not None:
            message = "stream and prompt_logprobs are given; accepted: one of them"
            raise FieldError(message, "prompt_logprobs")
        super().__init__(body, model, caller)
        self._options = body.stream_options or StreamOptions()
        self._returns_token_ids, self._num_prompt_logprobs = bool(body.return_token_ids), body.prompt_logprobs
        self._generated = 0
        self._cached: dict[int, int] = {}
        """Prompt tokens of a stream that came from the prefix cache, by prompt."""

    # --- whole responses ----------------------------------------------------------------------------------------------

    def full_response(self, generations: Sequence[Generation]) -> Json:
        generations = list(map(self._shown_generation, generations))
        choices = (
            self._choice(self._choice_index(prompt, sample), prompt, completion, generation.prompt)
            | self._mode()
            | self._seed(prompt)
            | self._receipt(prompt, sample, is_whole=True)
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
        """Returns additional fields of a whole response."""
        return {}

    @abc.abstractmethod
    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        """Returns a choice of a whole response; `scores` are the logprobs of prompt number `prompt`."""

    def _token_ids(self, tokens: Iterable[int]) -> Json:
        """Returns the field with a choice's tokens, if requested."""
        return {"token_ids": iter(tokens)} if self._returns_token_ids else {}

    def _prompt_token_ids(self, prompt: int) -> Json:
        """Returns the field with a prompt's tokens, if requested."""
        return {"prompt_token_ids": iter(self.requests[prompt].prompt)} if self._returns_token_ids else {}

    def _prompt_logprobs(self, prompt: int, scores: PromptLogprobs | None) -> Json:
        """Returns the field with a prompt's logprobs in vLLM's format, if requested."""
        if self._num_prompt_logprobs is None or scores is None:
            return {}
        tokens = itertools.islice(self.requests[prompt].prompt, 1, None)
        added = self._added_logprobs(scores.sampling_logprobs)
        entries = (
            self.model.token_texts.by_token(top[: self._num_prompt_logprobs], int(token), logprob, sampling)
            for token, logprob, top, sampling in zip(tokens, scores.logprobs, scores.top_logprobs, added, strict=False)
        )
        # The first token has no logprob, because no token precedes it.
        return {"prompt_logprobs": itertools.chain([None], entries)}

    # --- streams ------------------------------------------------------------------------------------------------------

    def first_chunks(self) -> Iterator[Json]:
        for prompt, request in enumerate(self.requests):
            for sample in range(request.sampling.n):
                if (choice := self._first_chunk_choice(self._choice_index(prompt, sample), prompt)) is not None:
                    yield self._chunk([choice]) | self._first_chunk_fields(prompt)

    def token_chunks(self, prompt: int, token: Token) -> Iterator[Json]:
        self._generated += 1
        self._cached[prompt] = token.cached_tokens
        self._record_token(prompt, token)
        for choice in self._token_choices(self._choice_index(prompt, token.sample), self._shown_token(token)):
            if choice["finish_reason"] is not None:
                choice |= self._mode() | self._seed(prompt) | self._receipt(prompt, token.sample)
            yield self._chunk([choice]) | ({"batch": token.batch} if self._options.include_batch else {})

    def abort_chunks(self, prompt: int, aborted: Aborted) -> Iterator[Json]:
        end = self._record_abort(prompt, aborted)
        for choice in self._abort_choices(self._choice_index(prompt, aborted.sample), end):
            if choice["finish_reason"] is not None:
                choice |= self._seed(prompt) | self._receipt(prompt, aborted.sample)
            yield self._chunk([choice])

    def last_chunks(self, generated: int) -> Iterator[Json]:
        if self._options.include_usage:
            yield self._chunk([]) | {"usage": self._usage(generated, sum(self._cached.values()))}

    @abc.abstractmethod
    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        """Returns a choice before its first token, if it has content to report."""

    def _first_chunk_fields(self, prompt: int) -> Json:
        """Returns additional fields of the chunk in which a choice begins."""
        return {}

    @abc.abstractmethod
    def _token_choices(self, index: int, token: Token) -> Iterator[Json]:
        """Yields a token's additions to its choice, if any."""

    @abc.abstractmethod
    def _abort_choices(self, index: int, end: Token) -> Iterator[Json]:
        """Yields the end of an aborted choice; see `_record_abort`."""

    def _choice_index(self, prompt: int, sample: int) -> int:
        return prompt * self.requests[0].sampling.n + sample

    # --- both kinds of responses --------------------------------------------------------------------------------------

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
