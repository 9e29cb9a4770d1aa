"""Calls of /v1/completions."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from detjax.engine import (
    Completion,
    Constraint,
    FieldError,
    Generation,
    PromptLogprobs,
    SamplingParams,
    Token,
)
from detjax.server.api.api_calls import NOBODY, TOO_LONG, Caller, ServedModel
from detjax.server.api.choices import ChoicesCall
from detjax.server.api.schemas import CompletionRequest
from detjax.server.http.errors import ApiError
from detjax.server.http.field_types import MAX_TOKENS
from detjax.server.text.texts import TextRefused, TextTooLong
from detjax.server.text.token_texts import Json, TextOffsets, TopLogprobs, json_number

_DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default of `max_tokens` for completions."""


class CompletionCall(ChoicesCall):
    """A call of /v1/completions."""

    _ID_PREFIX, _OBJECT, _CHUNK_OBJECT = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        super().__init__(body, model, caller)
        self._body = body
        self._prompts, self._echoes, self._logprobs = body.prompts, bool(body.echo), body.logprobs
        self._only_scores_prompt = body.max_tokens == 0
        self._draws_seeds &= not self._only_scores_prompt
        self._params = SamplingParams(
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens or _DEFAULT_MAX_TOKENS,
            top_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0),
            prompt_logprobs=(self._echoes and body.logprobs is not None) or body.prompt_logprobs is not None,
            scored_answer=body.scored_answer or 0,
            **self._fields,
        )
        self._prompt_texts: list[str] = []
        self._offsets: dict[int, TextOffsets] = {}
        """The text offsets of each choice of a stream."""

    @property
    def num_samples(self) -> int:
        return len(self._prompts) * self._params.n

    async def _limits(self) -> Json:
        if self._body.form_given() is None and self._body.response_format is None:
            return {}  # without a thread, which would take a sixth of the call's processor time
        return await super()._limits()

    def _constraint(self) -> Constraint | None:
        if (constraint := self._body.constraint(self.model.tokenizer)) is not None:
            self.model.engine.compile_constraint(constraint)
        return constraint

    async def encode_prompts(self) -> None:
        # Either all prompts of a request are texts, or all are lists of tokens.
        texts = [prompt for prompt in self._prompts if isinstance(prompt, str)]
        lists = [prompt for prompt in self._prompts if not isinstance(prompt, str)]
        try:
            most = self._most_prompt_tokens(None if self._only_scores_prompt else self._params.max_tokens)
            limit = self.model.engine.max_length if most is None else MAX_TOKENS
            tokens = await self.model.texts.encode(texts, limit=limit) if texts else lists
        except TextRefused as error:
            raise FieldError(str(error), "prompt") from None
        except TextTooLong as error:
            raise ApiError(
                400,
                f"prompt {error.number} has {error.size} and asks for {self._params.max_tokens} more tokens; accepted: "
                f"{self.model.engine.max_length} in total, the server's context length. Lower max_tokens or shorten "
                "the prompt.",
                param="prompt",
                code=TOO_LONG,
            ) from None
        whole, tokens = tokens, [prompt if most is None else prompt[-most:] for prompt in tokens]
        self.requests = [self._request(prompt, self._params) for prompt in tokens]
        if self._echoes and texts and tokens == whole:
            self._prompt_texts = texts
        elif self._echoes:
            self._prompt_texts = await self.model.texts.decode(tokens, skip_special_tokens=False)

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

    def _logprobs_json(self, prompt: int, completion: Completion, scores: PromptLogprobs | None, echoed: str) -> Json:
        """Returns the logprobs of a choice's tokens, preceded by the prompt's if `scores` are given."""
        model, length = self.model, len(echoed) + len(completion.text or "")
        offsets = self._text_offsets(start=len(echoed))
        begins: Iterator[int] = (min(offsets.add(token), length) for token in completion.tokens)
        tokens, values = list[Any](completion.tokens), list[float | None](completion.logprobs)
        top = list[TopLogprobs | None](completion.top_logprobs)
        sampling = list[float | None](completion.sampling_logprobs)
        if scores is not None:
            # The first token of a prompt has no logprob, because no token precedes it.
            prompt_tokens = list[Any](self.requests[prompt].prompt)
            tokens = [*prompt_tokens, *tokens]
            values, top = [None, *scores.logprobs, *values], [None, *scores.top_logprobs, *top]
            sampling = [None, *scores.sampling_logprobs, *sampling]
            begins = itertools.chain(map(TextOffsets(model.tokenizer, prompt=echoed).add, prompt_tokens), begins)
        added = {"sampling_logprobs": map(_number, sampling)} if self._adds_sampling_logprobs else {}
        return {
            "tokens": (model.token_texts.name(token, as_id=self._as_ids) for token in tokens),
            "token_logprobs": map(_number, values),
            "top_logprobs": map(self._by_text, tokens, values, top) if self._logprobs else None,
            "text_offset": begins,
        } | added

    def _text_offsets(self, start: int = 0) -> TextOffsets:
        """Returns the text offsets of an answer's tokens."""
        skips = self._params.skip_special_tokens
        return TextOffsets(self.model.tokenizer, start=start, skip_special_tokens=skips)

    def _by_text(self, token: int, logprob: float | None, top: TopLogprobs | None) -> Json | None:
        if logprob is None or top is None:
            return None
        return self.model.token_texts.by_text(top[: self._logprobs], token, logprob, as_ids=self._as_ids)

    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        if not self._echoes and not self._returns_token_ids:
            return None
        text = self._prompt_texts[prompt] if self._echoes else ""
        ids = {"token_ids": [], "prompt_token_ids": self.requests[prompt].prompt} if self._returns_token_ids else {}
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None} | ids

    def _token_choices(self, index: int, token: Token) -> Iterator[Json]:
        if self._only_scores_prompt:
            yield {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
            return
        logprobs = None
        if self._logprobs is not None:
            logprobs = {
                "tokens": [self.model.token_texts.name(token.token, as_id=self._as_ids)],
                "token_logprobs": [json_number(token.logprob)],
                "top_logprobs": [self._by_text(token.token, token.logprob, token.top_logprobs)]
                if self._logprobs
                else None,
                "text_offset": [self._offsets.setdefault(index, self._text_offsets()).add(token.token)],
            }
            if self._adds_sampling_logprobs:
                logprobs["sampling_logprobs"] = [_number(token.sampling_logprob)]
        elif not token.text and token.finish_reason is None and not self._returns_token_ids:
            return
        ids = {"token_ids": [token.token]} if self._returns_token_ids else {}
        yield {"index": index, "text": token.text, "logprobs": logprobs, "finish_reason": token.finish_reason} | ids

    def _abort_choices(self, index: int, end: Token) -> Iterator[Json]:
        ids = {"token_ids": []} if self._returns_token_ids else {}
        yield {"index": index, "text": end.text or "", "logprobs": None, "finish_reason": end.finish_reason} | ids

    def last_chunks(self, generated: int) -> Iterator[Json]:
        return super().last_chunks(0 if self._only_scores_prompt else generated)


def _number(logprob: float | None) -> float | None:
    """Returns a logprob for JSON; None: the first token of a prompt has none."""
    return None if logprob is None else json_number(logprob)
