"""Calls of /v1/responses."""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from detjax.engine import Completion, Constraint, Generation, SamplingParams, Token
from detjax.server.api.api_calls import NOBODY, ApiCall, Caller, ServedModel
from detjax.server.api.conversation import Conversation
from detjax.server.api.messages import CalledFunction, EarlierCall, content_for_template
from detjax.server.api.response_fields import InputCall, InputItem, InputMessage, ResponsesRequest
from detjax.server.api.response_items import OutputItems
from detjax.server.http.errors import ApiError
from detjax.server.text.token_texts import Json, TopLogprobs
from detjax.server.tools.call_readers import Content, Part


@dataclasses.dataclass
class _Turn:
    """A message for the chat template, made from one or more items of the input."""

    role: str
    content: str | list[dict[str, Any]]
    calls: list[EarlierCall] = dataclasses.field(default_factory=list)
    call_id: str | None = None

    def for_template(self) -> Mapping[str, Any]:
        """Returns the message in the form that chat templates expect."""
        calls = {"tool_calls": [call.for_template() for call in self.calls]} if self.calls else {}
        result = {} if self.call_id is None else {"tool_call_id": self.call_id}
        return {"role": self.role, "content": self.content} | calls | result


def turns(instructions: str | None, items: str | Sequence[InputItem]) -> list[_Turn]:
    """Returns the messages of a conversation. Calls join the assistant's message before them."""
    messages = [] if instructions is None else [_Turn("system", instructions)]
    if isinstance(items, str):
        return [*messages, _Turn("user", items)]
    for item in items:
        if isinstance(item, InputMessage):
            messages.append(_Turn(item.role, content_for_template(item.content)))
        elif isinstance(item, InputCall):
            if not messages or messages[-1].role != "assistant":
                messages.append(_Turn("assistant", ""))
            function = CalledFunction(name=item.name, arguments=item.arguments)
            messages[-1].calls.append(EarlierCall(id=item.call_id, function=function))
        else:
            messages.append(_Turn("tool", item.text, call_id=item.call_id))
    return messages


class ResponsesCall(ApiCall):
    """A call of /v1/responses, whose answer is a list of items."""

    ENDS_WITH_DONE = False
    _ID_PREFIX = "resp"

    def __init__(self, body: ResponsesRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        super().__init__(body, model, caller)
        variables = body.chat_template_kwargs or {}
        self._conversation = Conversation(
            model, turns(body.instructions, body.input), variables, body.tool_use(), "input", body.shown
        )
        self._body = body
        self._params = SamplingParams(
            max_tokens=body.max_output_tokens or model.engine.max_length,
            top_logprobs=body.top_logprobs or 0,
            **self._fields,
        )
        name = self._id.removeprefix(f"{self._ID_PREFIX}-")
        self._id = f"{self._ID_PREFIX}_{name}"
        self._output = OutputItems(name, lambda index: self._conversation.call_id(self._id, 0, index))
        self._reader = self._conversation.reader()
        self._sequence = 0
        self._echo = b""
        """The response fields that repeat the request, as JSON without its braces."""
        self._pending_logprobs: list[Json] = []
        """Logprobs of tokens whose text is held back."""
        self._cached = 0
        self._finish_reason: str | None = None

    @property
    def num_samples(self) -> int:
        return 1

    def _constraint(self) -> Constraint | None:
        return self._conversation.constraint(self._body.constraint())

    async def encode_prompts(self) -> None:
        prompt, images = await self._conversation.encode()
        max_tokens = self._body.max_output_tokens or self.model.engine.max_length - len(prompt)
        self.requests = [self._request(prompt, dataclasses.replace(self._params, max_tokens=max_tokens), images)]
        if self._body.stream:
            # Three events repeat the request, so it is encoded once, in a thread.
            self._echo = await run_in_threadpool(lambda: _json(self._repeated(self._tools())).encode()[1:-1])

    # --- whole responses ----------------------------------------------------------------------------------------------

    async def read(self, generations: Sequence[Generation]) -> None:
        await super().read(generations)
        (completion,) = generations[0].completions
        await run_in_threadpool(self._read, completion)

    def _read(self, completion: Completion) -> None:
        text = completion.text or ""
        parts = [Content(text)] if text else []
        if self._reader is not None:
            parts = self._reader.parts(completion.tokens, text)
        for part in parts:
            for _ in self._output.add(part):
                pass
        self._finish_reason = completion.finish_reason
        for _ in self._output.finish(self._status):
            pass

    def full_response(self, generations: Sequence[Generation]) -> Json:
        (completion,) = generations[0].completions
        items: list[Json] = self._output.items
        if self._body.has_logprobs:
            entries = map(self._token_json, completion.tokens, completion.logprobs, completion.top_logprobs)
            part = items[0]["content"][0] | {"logprobs": entries}
            items = [items[0] | {"content": iter([part])}, *items[1:]]
        usage = self._usage(len(completion.tokens), generations[0].cached_tokens)
        state = self._state(self._status, iter(items), usage)
        return state | self._receipt(0, 0, is_whole=True) | self._repeated(iter(self._tools()))

    # --- streams ------------------------------------------------------------------------------------------------------

    def first_chunks(self) -> Iterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": self._state("in_progress", [], None)})

    def token_chunks(self, prompt: int, token: Token) -> Iterator[Json]:
        self._cached = token.cached_tokens
        self._record_token(prompt, token)
        if self._body.has_logprobs:
            self._pending_logprobs.append(self._token_json(token.token, token.logprob, token.top_logprobs))
        text = token.text or ""
        is_last = token.finish_reason is not None
        parts: list[Part] = []
        if self._reader is not None:
            parts += self._reader.add(token.token, text)
            parts += self._reader.finish() if is_last else ()
        elif text or (self._pending_logprobs and is_last):
            parts.append(Content(text))
        for part in parts:
            for one in self._output.add(part, self._pending_logprobs):
                yield self._numbered(one)
            self._pending_logprobs = []
        self._finish_reason = token.finish_reason

    def last_chunks(self, generated: int) -> Iterator[Json]:
        for one in self._output.finish(self._status):
            yield self._numbered(one)
        state = self._state(self._status, self._output.items, self._usage(generated, self._cached))
        yield self._numbered({"type": f"response.{self._status}", "response": state | self._receipt(0, 0)})

    def event(self, chunk: Json) -> bytes:
        content = _json(chunk).encode()
        if "response" in chunk:
            content = b"%b,%b}}" % (content[:-2], self._echo)
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), content)

    def error_event(self, error: ApiError) -> bytes:
        content = error.body["error"]
        fields = {name: content[name] for name in ("code", "message", "param")}
        return self.event(self._numbered({"type": "error"} | fields))

    def _numbered(self, chunk: Json) -> Json:
        self._sequence += 1
        return {"type": chunk["type"], "sequence_number": self._sequence - 1} | chunk

    # --- both kinds of responses --------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _state(self, status: str, output: Sequence[Json] | Iterator[Json], usage: Json | None) -> Json:
        """Returns the fields of a response that change while it is generated."""
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "output": output,
            "usage": usage,
        }

    def _repeated(self, tools: Sequence[Json] | Iterator[Json]) -> Json:
        """Returns the fields of a response that repeat the request."""
        body, params = self._body, self._params
        form = None if body.text is None else body.text.format
        choice = body.tool_choice
        text = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        return {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            **self._seed(0),
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": text},
            "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            "tools": tools,
            "truncation": "disabled",
        }

    def _tools(self) -> list[Json]:
        fields = ("type", "name", "description", "parameters", "strict")
        return [{name: getattr(tool, name) for name in fields} for tool in self._body.tools or ()]

    def _usage(self, generated: int, cached: int) -> Json:
        prompt = len(self.requests[0].prompt)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        }

    def _token_json(self, token: int, logprob: float, top: TopLogprobs) -> Json:
        return self.model.token_texts.chat_json(token, logprob, top[: self._body.top_logprobs or 0])


def _json(content: Json) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
