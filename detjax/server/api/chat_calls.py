"""Calls of /v1/chat/completions."""

import dataclasses
from collections.abc import Iterator, Sequence

from detjax.engine import Completion, Constraint, Generation, PromptLogprobs, SamplingParams, Token
from detjax.server.api.api_calls import NOBODY, Caller, ServedModel
from detjax.server.api.choices import ChoicesCall
from detjax.server.api.conversation import Conversation
from detjax.server.api.messages import shown_in
from detjax.server.api.schemas import ChatRequest
from detjax.server.text.token_texts import Json, TopLogprobs
from detjax.server.tools.answers import Answer, AnswerReader
from detjax.server.tools.call_readers import Arguments, CallBegins, Content, Part


class ChatCall(ChoicesCall):
    """A call of /v1/chat/completions."""

    _ID_PREFIX, _OBJECT, _CHUNK_OBJECT = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        super().__init__(body, model, caller)
        variables = body.chat_template_kwargs or {}
        shown = [part for message in body.messages for part in shown_in(message.content)]
        self._conversation = Conversation(model, body.messages, variables, body.tool_use(), "messages", shown)
        self._body, self._logprobs = body, bool(body.logprobs)
        self._num_top_logprobs = body.top_logprobs or 0
        self._params = SamplingParams(
            max_tokens=body.max_completion_tokens or body.max_tokens or model.engine.max_length,
            top_logprobs=max(self._num_top_logprobs, body.prompt_logprobs or 0),
            prompt_logprobs=body.prompt_logprobs is not None,
            **self._fields,
        )
        self._answers: list[Answer] | None = None
        """The answer of each choice of a whole response, if it may call tools."""
        self._readers: dict[int, AnswerReader | None] = {}
        """The reader of each choice of a stream."""

    @property
    def num_samples(self) -> int:
        return self._params.n

    def _constraint(self) -> Constraint | None:
        return self._conversation.constraint(self._body.constraint())

    async def encode_prompts(self) -> None:
        body = self._body
        prompt, images = await self._conversation.encode()
        max_tokens = body.max_completion_tokens or body.max_tokens or self.model.engine.max_length - len(prompt)
        self.requests = [self._request(prompt, dataclasses.replace(self._params, max_tokens=max_tokens), images)]

    async def read(self, generations: Sequence[Generation]) -> None:
        await super().read(generations)
        if self._conversation.tools is not None:
            self._answers = await self._conversation.read(generations)

    def _response_fields(self, generations: Sequence[Generation]) -> Json:
        return self._prompt_token_ids(0) | self._prompt_logprobs(0, generations[0].prompt)

    def _choice(self, index: int, prompt: int, completion: Completion, scores: PromptLogprobs | None) -> Json:
        logprobs = None
        if self._logprobs:
            content = map(self._token_json, completion.tokens, completion.logprobs, completion.top_logprobs)
            logprobs = {"content": content, "refusal": None}
        answer = Answer(completion.text or "", []) if self._answers is None else self._answers[index]
        message: Json = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            calls = (
                self._call_json(index, number) | {"function": dataclasses.asdict(call)}
                for number, call in enumerate(answer.calls)
            )
            message |= {"content": answer.content or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(completion.finish_reason, has_calls=bool(answer.calls)),
        } | self._token_ids(completion.tokens)

    def _first_chunk_choice(self, index: int, prompt: int) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _first_chunk_fields(self, prompt: int) -> Json:
        return {"prompt_token_ids": self.requests[prompt].prompt} if self._returns_token_ids else {}

    def _token_choices(self, index: int, token: Token) -> Iterator[Json]:
        deltas = list(self._deltas(index, token))
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._token_json(token.token, token.logprob, token.top_logprobs)], "refusal": None}
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

    def _deltas(self, index: int, token: Token) -> Iterator[Json]:
        """Yields a token's additions to its choice's message."""
        if index not in self._readers:
            self._readers[index] = self._conversation.reader()
        reader = self._readers[index]
        if reader is None:
            if token.text:
                yield {"content": token.text}
            return
        for part in reader.add(token.token, token.text or ""):
            yield self._delta(index, part)
        if token.finish_reason is not None:
            for part in reader.finish():
                yield self._delta(index, part)

    def _delta(self, index: int, part: Part) -> Json:
        match part:
            case Content(text):
                return {"content": text}
            case CallBegins(number, name):
                call = self._call_json(index, number) | {"function": {"name": name, "arguments": ""}}
                return {"tool_calls": [{"index": number} | call]}
            case Arguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _call_json(self, index: int, number: int) -> Json:
        """Returns the fields of a call that are known at its beginning."""
        return {"id": self._conversation.call_id(self._id, index, number), "type": "function"}

    def _token_json(self, token: int, logprob: float, top: TopLogprobs) -> Json:
        """Returns a token's logprob, with the most likely tokens at its position."""
        return self.model.token_texts.chat_json(token, logprob, top[: self._num_top_logprobs])


def _finish_reason(reason: str | None, *, has_calls: bool) -> str | None:
    """Returns OpenAI's finish reason, "tool_calls" if the model stopped after calls."""
    return "tool_calls" if reason == "stop" and has_calls else reason
