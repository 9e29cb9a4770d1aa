"""A fixed set of requests whose answers must not depend on a server's other load."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tools.soak.http_client import Answer, ask, written
from tools.soak.server_process import MODEL

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
_SPEECH: Final = "KING RICHARD III:\nNow is the winter of our discontent\nMade glorious summer by this sun of York;\n"
_PROMPTS: Final = ("KING RICHARD III:", "First Citizen:\nBefore we proceed", "é你\U0001f600", "x", _SPEECH, 3 * _SPEECH)
_QUESTION: Final = [{"role": "user", "content": "Who are you?"}]
_TURNS: Final = [
    {"role": "system", "content": "Be brief."},
    *_QUESTION,
    {"role": "assistant", "content": "A king."},
    {"role": "user", "content": _SPEECH},
]
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"enum": ["York", "Lancaster"]}, "age": {"type": "integer"}, "is_king": {"type": "boolean"}},
    "required": ["name", "age", "is_king"],
    "additionalProperties": False,
}
JSON_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
"""The `response_format` of answers that follow the schema."""
_TOOL: Final = {"type": "function", "function": {"name": "describe", "parameters": SCHEMA}}
_NOT_COMPARED: Final = ("id", "created", "prompt_tokens_details")
"""Fields without a promise: the prefix cache determines the number of cached tokens."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """A request with an answer that never changes.

    Attributes:
        name: its special feature.
        path: the path of the URL.
        body: its body.
    """

    name: str
    path: str
    body: Mapping[str, Any]

    async def ask(self, port: int) -> Answer:
        """Asks a server."""
        return await ask(port, written(self.path, self.body))

    def content(self, answer: Answer) -> Any:
        """Returns the invariant part of an answer: tokens, texts, and logprobs to the last bit.

        Raises:
            ValueError: the answer is incomplete.
        """
        if answer.status != 200 or not answer.is_whole:
            raise ValueError(f"status {answer.status}, whole: {answer.is_whole}: {answer.body[:300]!r}")
        return _compared(merged(answer.body) if self.body.get("stream") else answer.json())


def merged(stream: bytes) -> dict[str, Any]:
    """Merges a stream's events, independently of their boundaries and of the order of samples.

    Raises:
        ValueError: the stream has an error, or no end.
    """
    content: dict[str, Any] = {"choices": {}}
    events = [part.removeprefix(b"data: ") for part in stream.split(b"\n\n") if part.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise ValueError(f"the stream has no end: {stream[-300:]!r}")
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            raise ValueError(f"the stream has an error: {chunk}")
        for choice in chunk.pop("choices"):
            _merge(content["choices"].setdefault(str(choice["index"]), {}), choice)
        content |= {key: value for key, value in chunk.items() if value is not None}
    return content


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict):
            _merge(whole.setdefault(key, {}), value)
        elif isinstance(value, str | list) and whole.get(key) is not None:
            whole[key] = whole[key] + value
        elif value is not None:
            whole[key] = value


def _compared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _compared(inner) for key, inner in value.items() if key not in _NOT_COMPARED}
    return [_compared(inner) for inner in value] if isinstance(value, list) else value


def first_difference(expected: Any, seen: Any, place: str = "answer") -> str | None:
    """Describes the first difference between two contents; None if they are equal. Floats are compared by bits."""
    if isinstance(expected, dict) and isinstance(seen, dict):
        if expected.keys() != seen.keys():
            return f"{place} has {sorted(seen)}, expected {sorted(expected)}"
        pairs: Any = ((f"{place}.{key}", expected[key], seen[key]) for key in expected)
    elif isinstance(expected, list) and isinstance(seen, list):
        if len(expected) != len(seen):
            return f"{place} has {len(seen)} items, expected {len(expected)}"
        pairs = ((f"{place}[{index}]", *pair) for index, pair in enumerate(zip(expected, seen, strict=True)))
    else:
        return None if repr(expected) == repr(seen) else f"{place} is {seen!r}, expected {expected!r}"
    return next((text for name, a, b in pairs if (text := first_difference(a, b, name)) is not None), None)


async def alone(port: int, probes: list[Probe]) -> dict[str, Any]:
    """Returns the content of each probe's answer, asked in sequence."""
    return {probe.name: probe.content(await probe.ask(port)) for probe in probes}


async def differences(port: int, probes: list[Probe], expected: Mapping[str, Any], at_once: int = 1) -> list[str]:
    """Asks all probes, some concurrently, and returns the answers that are not as expected."""
    free, differing = asyncio.Semaphore(at_once), list[str]()

    async def check(probe: Probe) -> None:
        async with free:
            try:
                different = first_difference(expected[probe.name], probe.content(await probe.ask(port)))
            except (ValueError, OSError) as error:
                different = f"no answer: {error}"
        if different is not None:
            differing.append(f"{probe.name}: {different}")

    await asyncio.gather(*(check(probe) for probe in probes))
    return differing


def all_probes() -> list[Probe]:
    """Returns about sixty probes of all kinds."""
    return [
        *(Probe(f"completion, {name}", COMPLETIONS, {"model": MODEL, **body}) for name, body in _completions()),
        *(Probe(f"chat, {name}", CHAT, {"model": MODEL, **body}) for name, body in _chats()),
    ]


def few_probes() -> list[Probe]:
    """Returns every sixth probe, for short runs."""
    return all_probes()[::6]


def _completions() -> Iterator[tuple[str, dict[str, Any]]]:
    for number, prompt in enumerate(_PROMPTS):
        yield (
            f"greedy {number}",
            {"prompt": prompt, "temperature": 0, "max_tokens": 24, "logprobs": 5, "ignore_eos": True},
        )
    for seed in range(6):
        sampled = {"prompt": _PROMPTS[seed], "seed": seed, "max_tokens": 24, "logprobs": 0, "ignore_eos": True}
        yield f"sampled {seed}", sampled
        yield f"sampled {seed}, streamed", sampled | {"stream": True}
    base = {"prompt": _SPEECH, "seed": 2**63 + 5, "max_tokens": 20, "logprobs": 2}
    for name, more in {
        "top_k": {"top_k": 5},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.1},
        "all filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
        "tiny top_p": {"top_p": 5e-324},
        "n 2": {"ignore_eos": True, "n": 2},
        "n 3, streamed": {"ignore_eos": True, "n": 3, "stream": True},
        "n 4": {"ignore_eos": True, "n": 4, "temperature": 0.7},
        "20 logprobs": {"logprobs": 20},
        "echo": {"echo": True},
        "echo, streamed": {"echo": True, "stream": True, "logprobs": None},
        "echo alone": {"echo": True, "max_tokens": 0},
        "prompt logprobs": {"prompt_logprobs": 3},
        "token ids": {"return_token_ids": True},
        "stop": {"stop": ["the", "\n"], "max_tokens": 60},
        "stop, streamed": {"stop": ["the", "\n"], "max_tokens": 60, "stream": True},
        "stop token": {"stop_token_ids": [*range(100, 140)], "max_tokens": 60},
        "ignore_eos": {"ignore_eos": True, "max_tokens": 60},
        "min_tokens": {"min_tokens": 15, "stop_token_ids": [*range(150)]},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": -1.0, "presence_penalty": 0.3},
        "repetition": {"repetition_penalty": 1.3},
        "biases": {"logit_bias": {"88": 5, "99": -100, "300": 2.5}},
        "ids as a prompt": {"prompt": [*range(1, 60)]},
        "several prompts": {"prompt": ["x", _SPEECH, "To be"], "n": 2},
        "lists of ids, streamed": {"prompt": [[5, 6, 7], [*range(200, 330)]], "stream": True},
        "salt": {"cache_salt": "salt"},
        "choice": {"structured_outputs": {"choice": ["York", "Lancaster"]}},
        "regex": {"structured_outputs": {"regex": "[a-f]{3,9} [0-9]+\\."}},
        "schema": {"response_format": JSON_FORMAT, "max_tokens": 60},
    }.items():
        yield name, base | more


def _chats() -> Iterator[tuple[str, dict[str, Any]]]:
    base = {"messages": _QUESTION, "seed": 7, "max_completion_tokens": 20, "logprobs": True, "top_logprobs": 3}
    for name, more in {
        "greedy": {"temperature": 0},
        "sampled": {},
        "sampled, streamed": {"stream": True},
        "20 logprobs": {"top_logprobs": 20, "seed": 8},
        "n 4": {"n": 4},
        "n 4, streamed": {"n": 4, "stream": True, "stream_options": {"include_usage": True}},
        "turns": {"messages": _TURNS},
        "turns, filters": {"messages": _TURNS, "top_p": 0.7, "temperature": 1.2},
        "stop": {"stop": "\n", "messages": _TURNS},
        "schema": {"response_format": JSON_FORMAT, "max_completion_tokens": 60},
        "schema, n 2": {"response_format": JSON_FORMAT, "max_completion_tokens": 60, "n": 2, "seed": 9},
        "schema, streamed": {"response_format": JSON_FORMAT, "max_completion_tokens": 60, "stream": True},
        "any object": {"response_format": {"type": "json_object"}, "max_completion_tokens": 30},
        "a tool": {"tools": [_TOOL], "tool_choice": "required", "max_completion_tokens": 60},
        "a tool, streamed": {"tools": [_TOOL], "tool_choice": "required", "max_completion_tokens": 60, "stream": True},
    }.items():
        yield name, base | more
