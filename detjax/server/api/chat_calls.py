"""Calls of /v1/chat/completions."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from detjax.engine import Completion, Constraint, Generation, PromptLogprobs, SamplingParams, Token
from detjax.engine.reasoning_budget import ReasoningTokens
from detjax.server.api.api_calls import NOBODY, Caller, ServedModel
from detjax.server.api.choices import ChoicesCall
from detjax.server.api.conversation import Conversation, PromptForm
from detjax.server.api.messages import shown_in
from detjax.server.api.schemas import ChatRequest
from detjax.server.text.token_texts import Json, TopLogprobs
from detjax.server.tools.answers import Answer, AnswerReader
from detjax.server.tools.parts import Arguments, CallBegins, Content, Part, Reasoning


class ChatCall(ChoicesCall):
    """A call of /v1/chat/completions."""

    _ID_PREFIX, _OBJECT, _CHUNK_OBJECT = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        super().__init__(body, model, caller)
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        variables = effort | (body.chat_template_kwargs or {})
        shown = [part for message in body.messages for part in shown_in(message.content)]
        continues = bool(body.continue_final_message)
        most = self._most_prompt_tokens(body.max_completion_tokens or body.max_tokens)
        form = PromptForm(not continues and body.add_generation_prompt is not False, continues, most)
        self._conversation = Conversation(model, body.messages, variables, body.tool_use(), "messages", shown, form)
        self._echo = body.echoed
        self._body, self._logprobs = body, bool(body.logprobs)
        self._num_top_logprobs = body.top_logprobs or 0
        self._params = SamplingParams(
            max_tokens=body.max_completion_tokens or body.max_tokens or model.engine.max_length,
            top_logprobs=max(self._num_top_logprobs, body.prompt_logprobs or 0),
            prompt_logprobs=body.prompt_logprobs is not None,
            scored_answer=body.scored_answer or 0,
            **self._fields,
        )
        self._answers: list[Answer] | None = None
        """The answer of each choice of a whole response, unless it is all content."""
        self._readers: dict[int, AnswerReader | None] = {}
        """The reader of each choice of a stream."""
        self._thoughts: dict[int, ReasoningTokens | None] = {}
        """The counter of reasoning tokens of each choice."""

    @property
    def num_samples(self) -> int:
        return self._params.n

    def _constraint(self) -> Constraint | None:
        return self._conversation.constraint(self._body.constraint(self.model.tokenizer))

    async def _limits(self) -> Json:
        budget = self._conversation.reasoning_budget(self._body.thinking_token_budget)
        return await super()._limits() | {"reasoning_budget": budget}

    async def encode_prompts(self) -> None:
        body = self._body
        prompt, images = await self._conversation.encode()
        max_tokens = body.max_completion_tokens or body.max_tokens or self.model.engine.max_length - len(prompt)
        stops = self._params.stop_token_ids
        if not body.ignore_eos:
            stops += tuple(token for token in self._conversation.stop_tokens if token not in stops)
        self._params = dataclasses.replace(self._params, max_tokens=max_tokens, stop_token_ids=stops)
        self.requests = [self._request(prompt, self._params, images)]

    async def read(self, generations: Sequence[Generation]) -> None:
        await super().read(generations)
        if self._reader() is not None:
            self._answers = await self._conversation.read(generations, shows_special=self._shows_special)
        completions = [completion for generation in generations for completion in generation.completions]
        for index, completion in enumerate(completions):
            self._count_reasoning(index, completion.tokens)

    def _response_fields(self, generations: Sequence[Generation]) -> Json:
        return self._prompt_token_ids(0) | self._prompt_logprobs(0, generations[0].prompt)

    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        logprobs = None
        if self._logprobs:
            added = self._added_logprobs(completion.sampling_logprobs)
            entries = map(self._token_json, completion.tokens, completion.logprobs, completion.top_logprobs, added)
            logprobs = {"content": entries, "refusal": None}
        answer = Answer(completion.text or "", []) if self._answers is None else self._answers[index]
        content = self._echo + answer.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["content"] = content or None
            message |= {"reasoning": answer.reasoning} if self._shows_reasoning else {}
        if answer.calls:
            calls = (
                self._call_json(index, number, call.id) | {"function": {"name": call.name, "arguments": call.arguments}}
                for number, call in enumerate(answer.calls)
            )
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(completion.finish_reason, has_calls=bool(answer.calls)),
        } | self._token_ids(completion.tokens)

    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        delta = {"role": "assistant", "content": self._echo, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _first_chunk_fields(self, prompt: int) -> Json:
        return {"prompt_token_ids": self.requests[prompt].prompt} if self._returns_token_ids else {}

    def _token_choices(self, index: int, token: Token) -> Iterator[Json]:
        deltas = list(self._deltas(index, token))
        self._count_reasoning(index, [token.token])
        logprobs = None
        if self._logprobs:
            sampling = token.sampling_logprob if self._adds_sampling_logprobs else None
            entry = self._token_json(token.token, token.logprob, token.top_logprobs, sampling)
            logprobs = {"content": [entry], "refusal": None}
        elif not deltas and token.finish_reason is None and not self._returns_token_ids:
            return
        ids = {"token_ids": [token.token]} if self._returns_token_ids else {}
        reader = self._readers.get(index)
        reason = _finish_reason(token.finish_reason, has_calls=reader is not None and reader.calls > 0)
        *earlier, last = deltas or [{}]
        for delta in earlier:
            yield {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | ids
            logprobs, ids = None, {"token_ids": []} if ids else {}
        yield {"index": index, "delta": last, "logprobs": logprobs, "finish_reason": reason} | ids

    def _abort_choices(self, index: int, end: Token) -> Iterator[Json]:
        ids = {"token_ids": []} if self._returns_token_ids else {}
        *earlier, last = list(self._deltas(index, end)) or [{}]
        for delta in earlier:
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | ids
        yield {"index": index, "delta": last, "logprobs": None, "finish_reason": end.finish_reason} | ids

    def _deltas(self, index: int, token: Token) -> Iterator[Json]:
        """Yields a token's additions to its choice's message."""
        if index not in self._readers:
            self._readers[index] = self._reader()
        reader = self._readers[index]
        if reader is None:
            if token.text:
                yield {"content": token.text}
            return
        parts = reader.add(token.token, token.text or "")
        if token.finish_reason is not None:
            parts = itertools.chain(parts, reader.finish())
        for part in parts:
            if self._shows_reasoning or not isinstance(part, Reasoning):
                yield self._delta(index, part)

    def _delta(self, index: int, part: Part) -> Json:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text}
            case CallBegins(number, name, written):
                call = self._call_json(index, number, written) | {"function": {"name": name, "arguments": ""}}
                return {"tool_calls": [{"index": number} | call]}
            case Arguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _call_json(self, index: int, number: int, written: str | None) -> Json:
        """Returns the fields of a call that are known at its beginning; `written` is the id that the model wrote."""
        return {"id": self._conversation.call_id(self._id, index, number, written), "type": "function"}

    def _reader(self) -> AnswerReader | None:
        """Returns a reader for one choice, or None if choices are all content."""
        return self._conversation.reader(shows_special=self._shows_special)

    @property
    def _shows_reasoning(self) -> bool:
        return self._body.include_reasoning is not False

    @property
    def _shows_special(self) -> bool:
        """True if texts have special tokens."""
        return not self._params.skip_special_tokens

    def _count_reasoning(self, index: int, tokens: Sequence[int]) -> None:
        """Counts the reasoning in the next tokens of a choice."""
        if index not in self._thoughts:
            self._thoughts[index] = self._conversation.reasoning_tokens()
        if (counter := self._thoughts[index]) is not None:
            for token in tokens:
                counter.add(token)

    def _usage(self, generated: int, cached: int) -> Json:
        usage = super()._usage(generated, cached)
        if self._conversation.has_reasoning:
            count = sum(counter.count for counter in self._thoughts.values() if counter is not None)
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def _token_json(self, token: int, logprob: float, top: TopLogprobs, sampling: float | None) -> Json:
        """Returns a token's logprobs, with the most likely tokens at its position."""
        return self._chat_logprob(token, logprob, top[: self._num_top_logprobs], sampling)


def _finish_reason(reason: str | None, *, has_calls: bool) -> str | None:
    """Returns OpenAI's finish reason, "tool_calls" if the model stopped after calls."""
    return "tool_calls" if reason == "stop" and has_calls else reason
