"""No body costs memory or time out of proportion to its bytes, whatever is wrong with it."""

import contextlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Final

import pytest

from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.api.schemas import ChatRequest, CompletionRequest
from detjax.server.http import bodies
from detjax.server.http.errors import ApiError, quote

MEGABYTE: Final = 1 << 20


def filled(field: str, item: str, size: int, opening: str = "[", closing: str = "]") -> bytes:
    """Returns a body of about this many bytes, with a field that repeats an item."""
    rest = {"model": "m", "messages" if field == "prompt" else "prompt": None}
    given = json.dumps(rest)[:-1]
    return f'{given},"{field}":{opening}{",".join([item] * (size // (len(item) + 1)))}{closing}}}'.encode()


def distinct(field: str, value: str, size: int) -> bytes:
    """Returns a body with an object of about this many bytes, with unique names."""
    entries = ",".join(f'"{index:06x}":{value}' for index in range(size // (len(value) + 10)))
    return f'{{"model":"m","{field}":{{{entries}}}}}'.encode()


WRONG: Final[dict[str, Callable[[int], bytes]]] = {
    "token ids below 0": lambda size: filled("prompt", "-1", size),
    "one token id below 0 at the end": lambda size: filled("prompt", "77777", size, closing=",-1]"),
    "token ids in a second prompt": lambda size: filled("prompt", "-1", size, "[[1],[", "]]"),
    "fractions": lambda size: filled("prompt", "1.5", size),
    "empty objects as prompts": lambda size: filled("prompt", "{}", size),
    "empty prompts": lambda size: filled("prompt", "[]", size),
    "numbers among strings": lambda size: filled("prompt", "1", size, '["a",'),
    "empty messages": lambda size: filled("messages", "{}", size),
    "numbers as messages": lambda size: filled("messages", "1", size),
    "empty parts": lambda size: filled("messages", "{}", size, '[{"role":"user","content":[', "]}]"),
    "numbers as parts": lambda size: filled("messages", "1", size, '[{"role":"user","content":[', "]}]"),
    "stop strings": lambda size: filled("stop", '""', size),
    "numbers as stop strings": lambda size: filled("stop", "1", size),
    "stop tokens": lambda size: filled("stop_token_ids", "1", size),
    "stop tokens below 0": lambda size: filled("stop_token_ids", "-1", size),
    "tools": lambda size: filled("tools", "{}", size),
    "a long string as a number": lambda size: filled("seed", "a" * size, size + 2, '"', '"'),
    "biases": lambda size: distinct("logit_bias", "1", size),
    "metadata": lambda size: distinct("metadata", "1", size),
    "variables of the template": lambda size: distinct("chat_template_kwargs", "[]", size),
    "unknown fields": lambda size: b'{"model":"m",' + distinct("x", "1", size).split(b"{", 2)[2][:-1],
    "unknown field with a long name": lambda size: b'{"%s": 1}' % (b"a" * size),
    "not JSON at the end": lambda size: filled("prompt", "1", size, closing="]]"),
}


@pytest.mark.parametrize("size", [bodies.LONG // 2, MEGABYTE], ids=["short", "long"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_bodies_make_few_objects_and_short_messages(wrong: str, size: int) -> None:
    body = WRONG[wrong](size)
    schema = ChatRequest if b'"messages":[' in body or b"tools" in body else CompletionRequest
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            bodies.parse(body, schema)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Parsing alone takes 8 bytes for the two of an item such as "1,", and 24 more for a fraction.
    assert peak < (30 if size < bodies.LONG else 12) * len(body) + 100_000
    assert len(caught.value.body["error"]["message"]) < 1000
    assert caught.value.status == 400


def test_bodies_of_eight_megabytes_cost_a_small_multiple_of_it() -> None:
    """Pydantic's memory is not Python's, so this looks at the most memory that the process had."""
    report = subprocess.run([sys.executable, "-c", _PEAKS], check=True, capture_output=True, text=True).stdout
    peaks = {name: int(kilobytes) for name, kilobytes in json.loads(report).items()}
    assert peaks.keys() == WRONG.keys()
    assert {name: peak for name, peak in peaks.items() if peak > 150_000} == {}


_PEAKS: Final = """
import json, pathlib
from detjax.server.http import bodies
from detjax.server.http.errors import ApiError
from detjax.server.api.schemas import ChatRequest, CompletionRequest
from tests.server.test_bodies import WRONG

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Vm")}

peaks = {}
for name, make in WRONG.items():
    body = make(8 << 20)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = peak()["VmRSS"]
    try:
        bodies.parse(body, ChatRequest if b'"messages":[' in body or b"tools" in body else CompletionRequest)
    except ApiError:
        peaks[name] = peak()["VmHWM"] - before
print(json.dumps(peaks))
"""


def test_long_bodies_may_hold_anything_within_strings() -> None:
    code = 'x = {"a": [1, "\\\\"], \'b\': {}}\n' * 20_000
    for text in (code, "\\" * 500_001, '"' * 500_000, "{[:" * 300_000):
        body = json.dumps({"model": "m", "prompt": text}).encode()
        assert len(body) > bodies.LONG
        assert bodies.parse(body, CompletionRequest).prompt == text


def test_as_many_items_as_accepted_are_counted() -> None:
    def body(items: int) -> bytes:
        given = b'{"model":"m","prompt":"x","metadata":%s}'
        return given % (b"[" + b"[]," * (items - 11) + b" " * bodies.LONG + b"[]]")

    with pytest.raises(ApiError, match="metadata is"):
        bodies.parse(body(bodies.MAX_ITEMS), CompletionRequest)
    with pytest.raises(ApiError, match="accepted: up to 131072"):
        bodies.parse(body(bodies.MAX_ITEMS + 1), CompletionRequest)


def test_prompts_of_many_tokens_are_parsed() -> None:
    prompt = list(range(100_000))
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert bodies.parse(body, CompletionRequest).prompts == [prompt]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 100, "'" + "a" * 79 + "..."),
        ("it's", '"it\'s"'),
        ([1, 2, 3], "[1, 2, 3]"),
        ([1, 2, 3, 4], "[1, 2, 3, ...]"),
        ({"a": {"b": {"c": 1}}, "d": []}, "{'a': {'b': {...}}, 'd': []}"),
        ([[[1]]], "[[[...]]]"),
        (None, "None"),
    ],
)
def test_values_are_quoted_up_to_a_length(value: object, text: str) -> None:
    assert quote(value) == text


def test_null_is_as_good_as_no_value() -> None:
    for schema, given in ((CompletionRequest, {"prompt": "x"}), (ChatRequest, {"messages": [{"role": "user"}]})):
        required = {name for name, field in schema.model_fields.items() if field.is_required()}
        for message in given.get("messages", ()):
            message |= {"content": "x"} | dict.fromkeys(["name", "refusal", "tool_calls", "type", "audio"])
        nulls = dict.fromkeys(schema.model_fields.keys() - required)
        alone = bodies.parse(json.dumps({"model": "m"} | given).encode(), schema)
        assert bodies.parse(json.dumps({"model": "m"} | given | nulls).encode(), schema) == alone


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest])
def test_marked_fields_are_accepted_with_their_values_and_refused_with_others(schema: type) -> None:
    given = {"model": "m"} | ({"prompt": "x"} if schema is CompletionRequest else {"messages": [_MESSAGE]})
    marked = 0
    for name, field in schema.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Unserved):
                marked += 1
                for value in mark.values:
                    bodies.parse(json.dumps(given | {name: value}).encode(), schema)
                for value in ("another value", 7, True, False, ["x"], {"x": 1}):
                    accepted = json.dumps(value) in map(json.dumps, mark.values)
                    with contextlib.nullcontext() if accepted else pytest.raises(ApiError, match=f"^{name} is "):
                        bodies.parse(json.dumps(given | {name: value}).encode(), schema)
    assert marked > 20
    assert any(isinstance(mark, Ignored) for field in schema.model_fields.values() for mark in field.metadata)


_MESSAGE: Final = {"role": "user", "content": "x"}


def test_values_that_ask_for_defaults_are_read_as_none_given() -> None:
    body = {"model": "m", "prompt": "x", "seed": -1, "top_k": -1, "ignore_eos": None, "logit_bias": {"5": 0}}
    request = bodies.parse(json.dumps(body).encode(), CompletionRequest)
    assert (request.seed, request.top_k, request.ignore_eos, request.logit_bias) == (None, 0, False, {})
