"""Requests that are damaged in every way that a client's defects and an attacker's ideas have."""

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from tools.soak.http_client import written
from tools.soak.probes import CHAT, COMPLETIONS, JSON_FORMAT, SCHEMA
from tools.soak.server_process import MODEL

_WEATHER: Final = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BODIES: Final[dict[str, Sequence[dict[str, Any]]]] = {
    COMPLETIONS: (
        {"model": MODEL, "prompt": "x", "max_tokens": 2, "logprobs": 2, "stop": ["a", "b"], "seed": 1, "n": 2},
        {
            "model": MODEL,
            "prompt": [[1, 2, 3], [4]],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "model": MODEL,
            "prompt": "x",
            "max_tokens": 2,
            "logit_bias": {"5": 1.5},
            "stop_token_ids": [3],
            "min_tokens": 1,
        },
        {"model": MODEL, "prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": "[a-z]+"}, "echo": True},
        {"model": MODEL, "prompt": "x", "max_tokens": 2, "presence_penalty": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
        {
            "model": MODEL,
            "prompt": "x",
            "max_tokens": 2,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "cache_salt": "s",
        },
    ),
    CHAT: (
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2, "logprobs": True},
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": None, "refusal": None},
                {"role": "user", "content": "y", "name": "z"},
            ],
            "max_tokens": 2,
            "stream": True,
        },
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2,
            "response_format": JSON_FORMAT,
            "chat_template_kwargs": {"a": 1},
            "metadata": {"a": "b"},
        },
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "rain"},
            ],
            "max_tokens": 2,
            "tools": [_WEATHER],
            "tool_choice": "auto",
        },
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 20,
            "tools": [
                _WEATHER,
                {"type": "function", "function": {"name": "time", "strict": True, "parameters": SCHEMA}},
            ],
            "tool_choice": {"type": "function", "function": {"name": "time"}},
            "parallel_tool_calls": False,
        },
    ),
    "/tokenize": (
        {"prompt": "some text"},
        {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True, "add_generation_prompt": False},
    ),
    "/detokenize": ({"tokens": [1, 2, 3]},),
    "/v1/responses": (
        {"model": MODEL, "input": "x", "max_output_tokens": 16},
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "rain"},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
            "tool_choice": "required",
            "max_output_tokens": 20,
        },
        {
            "model": MODEL,
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "temperature": 0.5,
            "max_output_tokens": 16,
            "stream": True,
        },
        {"model": MODEL, "input": [{"role": "user", "content": "x"}], "instructions": "y", "stream": True},
        {
            "model": MODEL,
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        },
    ),
}
"""Valid bodies by path. Those of paths that a server does not have are left out."""

_NUMBERS: Final = (0, -1, 1, 2**31, 2**32, 2**63, 2**64, 2**64 - 1, -(2**63) - 1, 10**30, 1e308, -1e308, 5e-324, 0.1)
_TEXTS: Final = (
    "",
    " ",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "\ufeff",
    "\u202e",
    "e\u0301" * 50,
    "🦀",
    "a" * 5000,
    "{{ 1/0 }}",
)
_TEXTS_OF_TEMPLATES: Final = (
    "<|endoftext|>",
    "null",
    "NaN",
    "1e400",
    "../../etc/passwd",
    "\\u0000",
    "%s%n",
    "' OR 1=1",
)
_BYTES: Final = (
    b"\xff",
    b"\x00",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b'"',
    b"\\",
    b",,",
    b"NaN",
    b"-Infinity",
    b"1e999",
)
_TYPES: Final = (
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-16",
    "APPLICATION/JSON",
)
_METHODS: Final = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "FOO")
_PATHS: Final = (
    "/",
    "/v1",
    "/v1/completions/",
    "//v1/completions",
    "/v1/%00",
    "/v1/models/x",
    "/page/../x",
    "/\xff",
    "*",
    "/v1?a=b",
)


@dataclasses.dataclass(frozen=True)
class Mutated:
    """A damaged request.

    Attributes:
        content: its bytes.
        is_held: whether it never comes to its end, so that the client has to leave.
        description: what it is, for the report.
    """

    content: bytes
    is_held: bool
    description: str


def mutated(draw: random.Random, paths: Sequence[str]) -> Mutated:
    """A request to one of some paths, damaged in one to three ways."""
    path = draw.choice(paths)
    body: Any = copy.deepcopy(draw.choice(BODIES[path]))
    for _ in range(draw.choice((1, 1, 2, 3))):
        body = _damaged(body, draw)
    content = _serialized(body, draw)
    names = [f"{path} {content[:400]!r}"]
    if draw.random() < 0.15:
        content = _damaged_bytes(content, draw)
        names = [f"{path} {content[:400]!r}"]
    headers, method, is_held = dict[str, str](), "POST", False
    if draw.random() < 0.12:
        kind = draw.choice(("type", "long", "short", "bad length", "method", "path", "header", "both", "key"))
        names.append(kind)
        match kind:
            case "type":
                headers["Content-Type"] = draw.choice(_TYPES)
            case "long":
                headers["Content-Length"], is_held = str(len(content) + draw.choice((1, 10**6))), True
            case "short":
                headers["Content-Length"] = str(draw.randrange(len(content) + 1))
            case "bad length":
                headers["Content-Length"] = draw.choice(("-1", "x", "1e3", "9" * 40, "0x10", " ", "1, 2"))
                is_held = True
            case "method":
                method = draw.choice(_METHODS)
            case "path":
                path = draw.choice(_PATHS)
            case "header":
                headers |= {f"X-{number}": "y" * draw.choice((1, 3000)) for number in range(draw.choice((5, 90)))}
            case "both":
                headers["Transfer-Encoding"], is_held = draw.choice(("chunked", "xchunked", "gzip")), True
            case _:
                headers["Authorization"] = draw.choice(("Bearer", "Bearer \xff", "Basic eA==", "Bearer " + "k" * 9000))
    return Mutated(written(path, content, method, headers), is_held, ", ".join(names))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All containers in a body with their keys."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in list(items) for place in ((value, key), *_places(inner))]


def _damaged(body: Any, draw: random.Random) -> Any:
    places = _places(body)
    if not places or draw.random() < 0.01:
        return _odd_value(draw)
    container, key = draw.choice(places)
    old = container[key]
    changes: tuple[Callable[[], Any], ...] = (
        lambda: _odd_value(draw),
        lambda: draw.choice(_NUMBERS),
        lambda: draw.choice(_TEXTS + _TEXTS_OF_TEMPLATES),
        lambda: [old],
        lambda: {"a": old},
        lambda: [copy.deepcopy(old) for _ in range(draw.choice((0, 2, 50)))],
        lambda: str(old),
        lambda: copy.deepcopy(draw.choice(places)[0]),
        lambda: {**old, draw.choice(_TEXTS): 1} if isinstance(old, dict) else None,
    )
    chance = draw.random()
    if chance < 0.5:
        container[key] = _same_kind(old, draw)
    elif chance < 0.6:
        if isinstance(container, dict):
            del container[key]
        else:
            container.pop(key)
    else:
        container[key] = draw.choice(changes)()
    if isinstance(body, dict) and draw.random() < 0.15:
        body[draw.choice(_FIELDS)] = _odd_value(draw)
    return body


def _same_kind(value: Any, draw: random.Random) -> Any:
    """Another value of the type that a field has, so that requests get past the first checks."""
    match value:
        case bool():
            return not value
        case int() | float():
            return draw.choice((0, 1, 2, 3, 20, 0.5, -0.5, 100, *_NUMBERS))
        case str():
            return draw.choice((*_TEXTS, *_TEXTS_OF_TEMPLATES, value * 3, value + draw.choice(_TEXTS)))
        case list() if value:
            return draw.choices(value, k=draw.choice((1, 2, 5, 40)))
        case dict() if value:
            return dict(draw.sample([*value.items()], draw.randrange(len(value) + 1)))
        case _:
            return value


def _odd_value(draw: random.Random) -> Any:
    depth = draw.choice((2, 30, 90))
    return draw.choice(
        (
            None,
            True,
            False,
            [],
            {},
            float("nan"),
            float("inf"),
            draw.choice(_NUMBERS),
            draw.choice(_TEXTS + _TEXTS_OF_TEMPLATES),
            [draw.choice(_NUMBERS) for _ in range(draw.choice((1, 300)))],
            _nested(depth, draw.choice(([], {}))),
        )
    )


def _nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value] if isinstance(value, list) else {"a": value}
    return value


def _serialized(body: Any, draw: random.Random) -> bytes:
    text = json.dumps(body, ensure_ascii=draw.random() < 0.5)
    if draw.random() < 0.05 and text.startswith("{"):  # a field twice
        text = '{"model": 1, "n": [], ' + text[1:]
    if draw.random() < 0.02:  # far deeper than `json` writes
        text = text.replace("1", "[" * 20000 + "]" * 20000, 1)
    return text.encode("utf-8", "surrogatepass")


def _damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    return draw.choice(
        (
            content[:place],
            content[:place] + draw.choice(_BYTES) + content[place:],
            content[:place] + content[place + 1 :],
            content + content,
            content.decode("utf-8", "replace").encode("utf-16"),
            content.replace(b"1", b"1" * 5000, 1),
            content[:place] + bytes(draw.randrange(256) for _ in range(8)) + content[place:],
        )
    )


_FIELDS: Final = sorted(
    {field for bodies in BODIES.values() for body in bodies for field in body}
    | {"tools", "tool_choice", "functions", "suffix", "best_of", "user", "ignore_eos", "top_logprobs", "temperature"}
    | {"frequency_penalty", "repetition_penalty", "response_format", "chat_template", "priority", "reasoning", "text"}
    | {"guided_json", "logits_processors", "store", "previous_response_id", "parallel_tool_calls", "", "__class__"}
)
"""Names of fields that are added where they may not belong."""
