"""Requests that once took a server's memory, its event loop or its queue, or got a wrong answer."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from tools.soak.http_client import Answer, ask, connected, read_head, written
from tools.soak.probes import CHAT, COMPLETIONS, JSON_FORMAT, RESPONSES
from tools.soak.server_process import MODEL

type Verdict = tuple[bool, Any]
"""Whether a server did what is expected of it, and what it did."""


@dataclasses.dataclass(frozen=True)
class Attack:
    """A way to attack a server.

    Attributes:
        name: what it is.
        accepted: what is expected of the server.
        run: attacks the server at a port; it is told whether to do so on a small scale.
        more_memory: MiB that the server may take beside the usual margin.
    """

    name: str
    accepted: str
    run: Callable[[int, bool], Coroutine[Any, Any, Verdict]]
    more_memory: float = 0


_BODY: Final = 8_000_000
"""Bytes of the largest bodies, just below what a server takes."""
_USER: Final = {"role": "user", "content": "x"}
_TOOL: Final = {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}


def attacks() -> list[Attack]:
    """All attacks by requests."""
    refused, answered = "status 400", "status 200 or 400"
    return [
        Attack("20,000 stop tokens for 1,024 samples", answered, lambda port, _: _stop_tokens(port, 20_000)),
        Attack("100,000 stop tokens for 1,024 samples", answered, lambda port, _: _stop_tokens(port, 100_000)),
        Attack("1,000,000 stop tokens for 1,024 samples", answered, lambda port, _: _stop_tokens(port, 1_000_000)),
        Attack("8 MB of wrong prompts", refused, _wrong("prompt", "-1", COMPLETIONS)),
        Attack("8 MB of prompts of the wrong type", refused, _wrong("prompt", "[{}]", COMPLETIONS)),
        Attack("8 MB of token ids", refused, _wrong("prompt", "1", COMPLETIONS)),
        Attack("8 MB of empty messages", refused, _wrong("messages", "{}", CHAT)),
        Attack("8 MB of messages", refused, _wrong("messages", json.dumps(_USER), CHAT)),
        Attack("8 MB of wrong parts of a message", refused, _wrong_parts),
        Attack("8 MB of wrong tools", refused, _wrong("tools", "{}", CHAT, {"messages": [_USER]})),
        Attack("8 MB of tools", refused, _wrong("tools", json.dumps(_TOOL), CHAT, {"messages": [_USER]})),
        Attack("8 MB of wrong items of /v1/responses", refused, _wrong("input", "{}", RESPONSES)),
        Attack("an input of 8 MB of /v1/responses", refused, _long_text(RESPONSES, lambda text: {"input": text})),
        Attack("a tool whose schema is deep", "no status 500", _deep_tool),
        Attack("8 MB of stop strings", refused, _wrong("stop", '"x"', COMPLETIONS, {"prompt": "x"})),
        Attack("8 MB of nested lists", refused, _nested),
        Attack("a prompt of 8 MB", refused, _long_text(COMPLETIONS, lambda text: {"prompt": text})),
        Attack("a message of 8 MB", refused, _long_text(CHAT, lambda text: {"messages": [_USER | {"content": text}]})),
        Attack("/tokenize of 8 MB", answered, _long_text("/tokenize", lambda text: {"prompt": text})),
        Attack(
            "/tokenize of 8 MB of words",
            answered,
            _long_text("/tokenize", lambda text: {"prompt": text}, "some words "),
        ),
        Attack("/detokenize of 8 MB", answered, _wrong("tokens", "1", "/detokenize", accepts=(200, 400))),
        Attack("payloads of ordinary clients", "status 200 for all", _ordinary_payloads),
        Attack("a client that never reads 1,024 samples", "others are served", _never_reads),
        Attack("variables of the template named like Python's own", "no status 500", _template_variables),
        Attack("16 stop strings of 256 characters", "less than twice the time without", _long_stop_strings),
        Attack("an answer of 69 MB", "status 200", _large_answer, more_memory=200),
        Attack(
            "1,000 idle connections and 1,000 half requests", "others are served; all end within 90 s", _connections
        ),
        Attack("a web page whose host name resolves to this machine", "status 403", _other_host),
        Attack("logprobs of the sampled token", "it is among the reported ones", _sampled_logprobs),
        Attack("offsets of characters that are cut into tokens", "within the text", _offsets),
        Attack("an image, and too many biases", "messages that say what is wrong", _messages),
    ]


async def _refused(port: int, path: str, body: Any, accepted: Sequence[int]) -> Verdict:
    answer = await ask(port, written(path, body))
    return answer.status in accepted, f"{answer.status} after {answer.seconds:.1f} s: {answer.body[:150]!r}"


async def _stop_tokens(port: int, count: int) -> Verdict:
    body = {"model": MODEL, "prompt": ["hi"] * 8, "n": 128, "max_tokens": 1, "stop_token_ids": [*range(count)]}
    return await _refused(port, COMPLETIONS, body, (200, 400))


def _wrong(
    field: str, item: str, path: str, more: dict[str, Any] | None = None, accepts: Sequence[int] = (400,)
) -> Callable[[int, bool], Coroutine[Any, Any, Verdict]]:
    async def run(port: int, is_small: bool) -> Verdict:
        count = (_BODY // (50 if is_small else 1)) // (len(item) + 1)
        rest = json.dumps({"model": MODEL} | (more or {}))[1:]
        return await _refused(port, path, f'{{"{field}": [{",".join([item] * count)}], {rest}'.encode(), accepts)

    return run


async def _wrong_parts(port: int, is_small: bool) -> Verdict:
    parts = ",".join(["{}"] * (_BODY // (150 if is_small else 3)))
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": [{parts}]}}]}}'
    return await _refused(port, CHAT, body.encode(), (400,))


async def _deep_tool(port: int, is_small: bool) -> Verdict:
    """Schemas as deep as JSON's parser takes, as tools and as forms of answers."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema, "b": {"anyOf": [schema, {"type": "null"}]}}}
        if len(json.dumps(schema)) > 200_000:
            break
    tool = {"type": "function", "function": {"name": "x", "strict": True, "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies = ({"tools": [tool], "tool_choice": "required"}, {"tools": [tool]}, {"response_format": form})
    answers = [
        await ask(port, written(CHAT, {"model": MODEL, "messages": [_USER], "max_tokens": 5} | body)) for body in bodies
    ]
    seen = [f"{answer.status} after {answer.seconds:.1f} s: {answer.body[:100]!r}" for answer in answers]
    return all(200 <= answer.status < 500 for answer in answers), seen


async def _nested(port: int, is_small: bool) -> Verdict:
    depth = _BODY // (100 if is_small else 2) - 50
    body = f'{{"model": "{MODEL}", "prompt": {"[" * depth}{"]" * depth}}}'
    return await _refused(port, COMPLETIONS, body.encode(), (400,))


def _long_text(
    path: str, body: Callable[[str], dict[str, Any]], word: str = "a"
) -> Callable[[int, bool], Coroutine[Any, Any, Verdict]]:
    async def run(port: int, is_small: bool) -> Verdict:
        text = word * (_BODY // len(word) // (50 if is_small else 1))
        return await _refused(port, path, {"model": MODEL} | body(text), (200, 400) if path == "/tokenize" else (400,))

    return run


_TURNS: Final = [_USER, {"role": "assistant", "content": "y", "refusal": None, "annotations": None}, _USER]
_PAYLOADS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "the second turn of openai's client": (
        CHAT,
        {"messages": [_USER, _TURNS[1] | {"audio": None, "function_call": None, "tool_calls": None}, _USER]},
    ),
    "litellm's fields": (CHAT, {"messages": [_USER, _TURNS[1] | {"provider_specific_fields": None}, _USER]}),
    "vllm bench serve": (COMPLETIONS, {"prompt": "x", "repetition_penalty": 1.0}),
    "guidellm": (CHAT, {"messages": [_USER], "stream": True, "stream_options": {"continuous_usage_stats": True}}),
    "lm-eval": (CHAT, {"messages": [_USER | {"type": "text"}]}),
    "genai-perf": (COMPLETIONS, {"prompt": "x", "min_tokens": 2, "ignore_eos": None}),
    "users of vLLM": (
        COMPLETIONS,
        {"prompt": "x", "top_k": -1, "skip_special_tokens": True, "include_stop_str_in_output": False},
    ),
    "agents without tools": (
        CHAT,
        {"messages": [_USER], "tools": [], "tool_choice": "none", "store": False, "parallel_tool_calls": True},
    ),
    "nulls of SDKs": (CHAT, {"messages": [_USER], "reasoning_effort": None, "modalities": ["text"], "tools": None}),
    "obfuscation": (CHAT, {"messages": [_USER], "stream": True, "stream_options": {"include_obfuscation": False}}),
    "a negative seed": (COMPLETIONS, {"prompt": "x", "seed": -1}),
    "a bias of 0": (CHAT, {"messages": [_USER], "logit_bias": {"5": 0}}),
    "top_logprobs: 0": (CHAT, {"messages": [_USER], "top_logprobs": 0}),
    "a schema of langchain": (CHAT, {"messages": [_USER], "response_format": JSON_FORMAT}),
}


async def _ordinary_payloads(port: int, is_small: bool) -> Verdict:
    answers = {
        name: await ask(port, written(path, {"model": MODEL, "max_tokens": 3} | body))
        for name, (path, body) in _PAYLOADS.items()
    }
    failed = {name: f"{one.status} {one.body[:200]!r}" for name, one in answers.items() if one.status != 200}
    return not failed, failed or f"{len(answers)} served"


async def _never_reads(port: int, is_small: bool) -> Verdict:
    body = {"model": MODEL, "prompt": ["x"] * 8, "n": 4 if is_small else 128, "max_tokens": 20, "logprobs": 20}
    request = written(COMPLETIONS, body | {"stream": True, "ignore_eos": True})
    start = time.monotonic()
    async with connected(port, receive_buffer=4096) as (_, writer):
        writer.write(request)
        await asyncio.sleep(1)
        end, statuses = time.monotonic() + 300, list[int]()
        while time.monotonic() < end and 200 not in statuses:
            other = {"model": MODEL, "prompt": ["x"] * 65, "max_tokens": 1}  # does not fit beside those samples
            statuses.append((await ask(port, written(COMPLETIONS, other))).status)
            await asyncio.sleep(0.5)
    return 200 in statuses, f"served after {time.monotonic() - start:.1f} s, {len(statuses) - 1} times refused before"


async def _template_variables(port: int, is_small: bool) -> Verdict:
    names = ("self", "kwargs", "messages", "context", "cls", "environment", "__class__", "loop", "tools", "varargs")
    statuses = {}
    for name in names:
        body = {"model": MODEL, "messages": [_USER], "max_tokens": 1, "chat_template_kwargs": {name: 1}}
        statuses[name] = (await ask(port, written(CHAT, body))).status
    return not any(status >= 500 for status in statuses.values()), statuses


async def _long_stop_strings(port: int, is_small: bool) -> Verdict:
    async def seconds(stop: list[str]) -> float:
        sizes = {"n": 4, "max_tokens": 20} if is_small else {"n": 64, "max_tokens": 200}
        body = {"model": MODEL, "prompt": "x", "ignore_eos": True, "seed": 1, "stream": True, **sizes, "stop": stop}
        return (await ask(port, written(COMPLETIONS, body))).seconds

    stops = [256 * " ", *(f"{'the ' * 63}{number:04}" for number in range(15))]
    without = min([await seconds([]) for _ in range(3)])
    with_ = min([await seconds(stops) for _ in range(3)])
    return is_small or with_ < 2 * without, f"{without:.2f} s without, {with_:.2f} s with"


async def _large_answer(port: int, is_small: bool) -> Verdict:
    sizes = {"n": 4, "max_tokens": 20} if is_small else {"n": 128, "max_tokens": 400}
    body = {"model": MODEL, "messages": [_USER], **sizes, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    answer = await ask(port, written(CHAT, body))
    return answer.status == 200 and answer.is_whole, f"{answer.status}, {len(answer.body) / 1e6:.1f} MB"


async def _connections(port: int, is_small: bool) -> Verdict:
    count, half = (20 if is_small else 1000), written(COMPLETIONS, {"model": MODEL, "prompt": "x"})[:60]
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for number in range(2 * count):
            reader, writer = await stack.enter_async_context(connected(port))
            if number % 2:
                writer.write(half)
            readers.append(reader)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        served = [await ask(port, written(COMPLETIONS, body)) for _ in range(5)]
        start = time.monotonic()
        _, waiting = await asyncio.wait([asyncio.create_task(_ended(reader)) for reader in readers], timeout=90)
        for task in waiting:
            task.cancel()
    ok = all(answer.status == 200 for answer in served) and not waiting
    slowest = max(answer.seconds for answer in served)
    return ok, f"served in {slowest:.2f} s; {len(waiting)} open after {time.monotonic() - start:.0f} s"


async def _ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1000):
            pass


async def _other_host(port: int, is_small: bool) -> Verdict:
    answer = await ask(port, written("/v1/models", headers={"Host": "attacker.example"}))
    return answer.status == 403, answer.status


async def _sampled_logprobs(port: int, is_small: bool) -> Verdict:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "logprobs": 1, "ignore_eos": True, "seed": 3}
    logprobs = (await ask(port, written(COMPLETIONS, body))).json()["choices"][0]["logprobs"]
    missing = [
        token for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True) if token not in top
    ]
    return not missing, f"{len(missing)} of {len(logprobs['tokens'])} missing"


async def _offsets(port: int, is_small: bool) -> Verdict:
    body = {"model": MODEL, "prompt": "é你", "max_tokens": 3, "logprobs": 0, "echo": True, "seed": 1}
    choice = (await ask(port, written(COMPLETIONS, body))).json()["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    return offsets == sorted(offsets) and offsets[-1] <= len(choice["text"]), f"{offsets} in {choice['text']!r}"


async def _messages(port: int, is_small: bool) -> Verdict:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    bodies = [
        {"model": MODEL, "messages": [{"role": "user", "content": [image]}]},
        {"model": MODEL, "messages": [_USER], "logit_bias": {str(token): 1 for token in range(5000)}},
    ]
    answers: list[Answer] = [await ask(port, written(CHAT, body)) for body in bodies]
    texts = [answer.json()["error"]["message"] for answer in answers]
    ok = all(answer.status == 400 for answer in answers) and "image" in texts[0]
    return ok and not texts[0].startswith("there is no field") and "at most 0" not in texts[1], texts


async def open_streams(port: int, stack: contextlib.AsyncExitStack, count: int) -> None:
    """Asks for streams, waits until the first one has begun, and leaves them open, so that requests are in flight."""
    body = {"model": MODEL, "prompt": "x", "n": 4, "max_tokens": 50, "stream": True, "ignore_eos": True}
    readers = []
    for _ in range(count):
        reader, writer = await stack.enter_async_context(connected(port))
        writer.write(written(COMPLETIONS, body))
        readers.append(reader)
    await read_head(readers[0])
