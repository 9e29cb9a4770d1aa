"""Answers of a given form, as OpenAI's client asks for them."""

import json
from typing import Any

import openai
import pytest

from detjax.engine import Constraint, Engine, Request, SamplingParams
from tests.server.running_server import MODEL

SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["Romeo", "Juliet"]}},
    "required": ["number", "name"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "role", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "Who?"}]


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_follows_its_json_schema(client: openai.OpenAI, temperature: float) -> None:
    response = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=FORMAT, temperature=temperature, max_tokens=200, seed=4
    )
    (choice,) = response.choices
    value = json.loads(choice.message.content or "")
    assert set(value) == {"number", "name"}
    assert 0 <= value["number"] <= 99
    assert choice.finish_reason == "stop"


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200, "seed": 4}
    whole = client.chat.completions.create(**fields)
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **fields)]
    assert "".join(pieces) == whole.choices[0].message.content


def test_an_answer_is_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    response = client.completions.create(
        model=MODEL, prompt="A", max_tokens=20, extra_body={"structured_outputs": {"regex": "[a-f]{4}"}}
    )
    params = SamplingParams(max_tokens=20, temperature=1.0, constraint=Constraint("regex", "[a-f]{4}"))
    (completion,) = engine.generate([Request("A", params)])[0].completions
    assert response.choices[0].text == completion.text
    assert len(completion.text or "") == 4


@pytest.mark.parametrize(
    ("outputs", "accepted"),
    [
        ({"choice": ["to be", "not to be"]}, {"to be", "not to be"}),
        ({"grammar": 'start: "a" "b"'}, {"ab"}),
        ({"json": {"const": 7}}, {"7"}),
    ],
)
def test_vllms_forms(client: openai.OpenAI, outputs: dict[str, Any], accepted: set[str]) -> None:
    response = client.completions.create(
        model=MODEL, prompt="A", max_tokens=40, extra_body={"structured_outputs": outputs}
    )
    assert response.choices[0].text.strip() in accepted


def test_any_object(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=30
    )
    assert (response.choices[0].message.content or "").lstrip().startswith("{")
