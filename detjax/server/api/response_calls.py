"""Calls of /v1/responses."""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from detjax.engine import Aborted, Completion, Constraint, Generation, SamplingParams, Token
from detjax.engine.job import ABORT
from detjax.engine.reasoning_budget import ReasoningTokens
from detjax.server.api.api_calls import NOBODY, ApiCall, Caller, ServedModel
from detjax.server.api.conversation import Conversation, PromptForm
from detjax.server.api.messages import CalledFunction, EarlierCall, content_for_template, reasoning_for_template
from detjax.server.api.response_fields import InputCall, InputItem, InputMessage, InputReasoning, ResponsesRequest
from detjax.server.api.response_items import OutputItems
from detjax.server.http.errors import ApiError
from detjax.server.text.token_texts import Json, TopLogprobs
from detjax.server.tools.answers import AnswerReader
from detjax.server.tools.parts import Content, Part


@dataclasses.dataclass
class _Turn:
    """A message for the chat template, made from one or more items of the input."""

    role: str
    content: str | list[dict[str, Any]]
    calls: list[EarlierCall] = dataclasses.field(default_factory=list)
    call_id: str | None = None
    reasoning: str | None = None

    def for_template(self) -> Mapping[str, Any]:
        """Returns the message in the form that chat templates expect."""
        calls = {"tool_calls": [call.for_template() for call in self.calls]} if self.calls else {}
        result = {} if self.call_id is None else {"tool_call_id": self.call_id}
        fields = {"role": self.role, "content": self.content} | reasoning_for_template(self.reasoning)
        return fields | calls | result


def turns(instructions: str | None, items: str | Sequence[InputItem]) -> list[_Turn]:
    """Returns the messages of a conversation.

    Calls join the assistant's message before them, and reasoning the message or the calls after it.
    """
    messages = [] if instructions is None else [_Turn("system", instructions)]
    if isinstance(items, str):
        return [*messages, _Turn("user", items)]
    begun: _Turn | None = None
    """The assistant's message that has only reasoning so far."""
    for item in items:
        before, begun = begun, None
        if isinstance(item, InputReasoning):
            begun = before or _Turn("assistant", "")
            begun.reasoning = "\n".join(filter(None, [begun.reasoning, item.text])) or None
            messages += [] if begun is before else [begun]
        elif isinstance(item, InputMessage):
            if before is not None and item.role == "assistant":
                before.content = content_for_template(item.content)
            else:
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
        effort = None if body.reasoning is None else body.reasoning.effort
        variables = ({} if effort is None else {"reasoning_effort": effort}) | (body.chat_template_kwargs or {})
        self._conversation = Conversation(
            model,
            turns(body.instructions, body.input),
            variables,
            body.tool_use(),
            "input",
            body.shown,
            PromptForm(most_tokens=self._most_prompt_tokens(body.max_output_tokens)),
        )
        self._body = body
        self._params = SamplingParams(
            max_tokens=body.max_output_tokens or model.engine.max_length,
            top_logprobs=body.top_logprobs or 0,
            **self._fields,
        )
        name = self._id.removeprefix(f"{self._ID_PREFIX}-")
        self._id = f"{self._ID_PREFIX}_{name}"
        self._output = OutputItems(name, lambda index, id_: self._conversation.call_id(self._id, 0, index, id_))
        self._reader: AnswerReader | None = None
        self._thoughts: ReasoningTokens | None = None
        """The counter of reasoning tokens."""
        self._answered: list[bool] = []
        """For each token of a whole response, whether it is outside of the reasoning."""
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
        return self._conversation.constraint(self._body.constraint(self.model.tokenizer))

    async def _limits(self) -> Json:
        budget = self._conversation.reasoning_budget(self._body.thinking_token_budget)
        return await super()._limits() | {"reasoning_budget": budget}

    async def encode_prompts(self) -> None:
        prompt, images = await self._conversation.encode()
        max_tokens = self._body.max_output_tokens or self.model.engine.max_length - len(prompt)
        stops = self._params.stop_token_ids
        if not self._body.ignore_eos:
            stops += tuple(token for token in self._conversation.stop_tokens if token not in stops)
        self._params = dataclasses.replace(self._params, max_tokens=max_tokens, stop_token_ids=stops)
        self.requests = [self._request(prompt, self._params, images)]
        self._reader = self._conversation.reader(shows_special=not self._params.skip_special_tokens)
        self._thoughts = self._conversation.reasoning_tokens()
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
        self._answered = [not self._is_reasoning(token) for token in completion.tokens]
        self._finish_reason = completion.finish_reason
        for _ in self._output.finish(self._item_status):
            pass

    def _is_reasoning(self, token: int) -> bool:
        """Takes note of the next token. Returns whether it belongs to the reasoning or its marks."""
        if self._thoughts is None:
            return False
        before = self._thoughts.is_open
        self._thoughts.add(token)
        return before or self._thoughts.is_open

    def full_response(self, generations: Sequence[Generation]) -> Json:
        (completion,) = generations[0].completions
        items: list[Json] = self._output.items
        place = next((place for place, item in enumerate(items) if item["type"] == "message"), None)
        if self._body.has_logprobs and place is not None:
            shown, added = self._shown(completion), self._added_logprobs(completion.sampling_logprobs)
            columns = zip(shown.tokens, shown.logprobs, shown.top_logprobs, added, strict=False)
            entries = itertools.starmap(self._token_json, itertools.compress(columns, self._answered))
            part = items[place]["content"][0] | {"logprobs": entries}
            items = [*items[:place], items[place] | {"content": iter([part])}, *items[place + 1 :]]
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
        if not self._is_reasoning(token.token) and self._body.has_logprobs:
            shown = self._shown_token(token)
            sampling = token.sampling_logprob if self._adds_sampling_logprobs else None
            entry = self._token_json(shown.token, shown.logprob, shown.top_logprobs, sampling)
            self._pending_logprobs.append(entry)
        text = token.text or ""
        is_last = token.finish_reason is not None
        parts: list[Part] = []
        if self._reader is not None:
            parts += self._reader.add(token.token, text)
            parts += self._reader.finish() if is_last else ()
            if is_last and self._pending_logprobs and not parts and self._output.in_message:
                parts.append(Content(""))
        elif text or (self._pending_logprobs and is_last):
            parts.append(Content(text))
        yield from self._events(parts)
        self._finish_reason = token.finish_reason

    def _events(self, parts: Sequence[Part]) -> Iterator[Json]:
        """Yields the events of parts. The first part has the pending logprobs."""
        for part in parts:
            for one in self._output.add(part, self._pending_logprobs):
                yield self._numbered(one)
            self._pending_logprobs = []

    def abort_chunks(self, prompt: int, aborted: Aborted) -> Iterator[Json]:
        end = self._record_abort(prompt, aborted)
        text = end.text or ""
        parts: list[Part] = [Content(text)] if text else []
        if self._reader is not None:
            parts = [*self._reader.add(end.token, text), *self._reader.finish()]
        yield from self._events(parts)
        self._finish_reason = end.finish_reason

    def last_chunks(self, generated: int) -> Iterator[Json]:
        for one in self._output.finish(self._item_status):
            yield self._numbered(one)
        state = self._state(self._status, self._output.items, self._usage(generated, self._cached))
        # OpenAI has no event for a response that someone else has cancelled.
        kind = "incomplete" if self._status == "cancelled" else self._status
        yield self._numbered({"type": f"response.{kind}", "response": state | self._receipt(0, 0)})

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
        return {"length": "incomplete", ABORT: "cancelled"}.get(self._finish_reason or "", "completed")

    @property
    def _item_status(self) -> str:
        return "completed" if self._status == "completed" else "incomplete"

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
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            **self._mode(),
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
            "output_tokens_details": {"reasoning_tokens": 0 if self._thoughts is None else self._thoughts.count},
            "total_tokens": prompt + generated,
        }

    def _token_json(self, token: int, logprob: float, top: TopLogprobs, sampling: float | None) -> Json:
        return self._chat_logprob(token, logprob, top[: self._body.top_logprobs or 0], sampling)


def _json(content: Json) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
