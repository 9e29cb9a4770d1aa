"""Chats with Kimi K2.5: the clips of a video in the template's text, its reasoning and its calls of tools."""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import pytest

from detjax.models import ModelMetadata, Tokenizer
from detjax.server.tools.formats import format_name, reasoning_format, tool_format
from tests.models.test_kimi_k25 import NAME, tokenizer
from tests.server.scripted import Client, scripted
from tests.support import towers

VIDEO = "<|kimi_k25_video_placeholder|>"
PARTS = (
    "{% macro said(m) %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>{{ '\n' }}"
    "{% elif part.type == 'video' %}<|kimi_k25_video_placeholder|>{{ '\n' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
PLAIN = PARTS + "{% for m in messages %}{{ m.role }}:{{ said(m) }};{% endfor %}"
WHOLE = (
    PARTS + "{% if tools %}<|im_system|>tool_declare<|im_middle|>{% if tools_ts_str %}{{ tools_ts_str }}{% else %}"
    "{{ tools | tojson(separators=(',', ':')) }}{% endif %}<|im_end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|><think>{{ m.get('reasoning_content', '') }}"
    "</think>{{ said(m) }}{% if m.get('tool_calls') %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% else %}<|im_user|>{{ m.role }}<|im_middle|>"
    "{{ said(m) }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "{% if thinking is defined and thinking is false %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)
"""A template with the published one's variables and marks."""


def with_template(template: str) -> Tokenizer:
    return tokenizer().with_chat_template(template)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with scripted(ModelMetadata.from_model(towers.model(NAME)), with_template(PLAIN), is_strict=True) as one:
        yield one


def png(image: np.ndarray) -> str:
    file = io.BytesIO()
    PIL.Image.fromarray(image).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def content(text: str = "See this. ", videos: int = 1) -> list[dict[str, Any]]:
    given = towers.reference(NAME)
    frames = ",".join(map(png, given["clip"][[0, 2, 4, 5, 7]]))
    # At 1.8 frames in a second, the second clip begins as in the reference.
    video = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}, "fps": 1.8}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(given['image_1'])}"}}
    texts = [{"type": "text", "text": text} for text in (text, "And ", "?")]
    return [texts[0], *[video] * videos, texts[1], image, texts[2]]


def test_a_video_in_a_chat_has_the_clips_and_times_of_the_processor(client: Client) -> None:
    messages = [{"role": "user", "content": content()}]
    response = client.ask("/v1/chat/completions", messages=messages, max_tokens=4, return_token_ids=True)
    assert response["prompt_token_ids"] == towers.reference(NAME)["clip_prompt"].tolist()


def test_a_text_that_stands_for_a_video_without_one_is_refused(client: Client) -> None:
    messages = [{"role": "user", "content": content(f"See {VIDEO}. ")}]
    status, error = client.refusal("/v1/chat/completions", messages=messages, max_tokens=4)
    assert status == 400
    assert f"the prompt has 2 times the text '{VIDEO}'; accepted: 1, once for each video" in error["message"]


@pytest.mark.parametrize(("thinking", "is_open"), [(None, True), (True, True), (False, False)])
def test_its_template_is_recognized(thinking: bool | None, is_open: bool) -> None:
    made = with_template(WHOLE)
    assert format_name(WHOLE) == "kimi_k2"
    reasoning = reasoning_format(made, tool_format(made))
    assert reasoning is not None
    variables = {} if thinking is None else {"thinking": thinking}
    prompt = made.apply_chat_template([{"role": "user", "content": "Hello"}], **variables)
    assert (reasoning.may_reason(prompt), reasoning.is_open(prompt)) == (is_open, is_open)


@pytest.mark.parametrize(
    ("schema", "given", "declared"),
    [
        ({"type": "object"}, {}, "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {}) => any;\n}\n"),
        # References to other files have no declaration, so the template writes JSON.
        ({"properties": {"x": {"$ref": "a.json"}}}, {}, None),
        ({"type": "object"}, {"tools_ts_str": "written by the client"}, "written by the client"),
    ],
)
def test_tools_are_declared_in_typescript(schema: dict[str, Any], given: dict[str, str], declared: str | None) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    prompt = with_template(WHOLE).apply_chat_template([{"role": "user", "content": "Hello"}], tools=tools, **given)
    declared = declared or json.dumps(tools, separators=(",", ":"), sort_keys=True)
    assert prompt.startswith(f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|><|im_user|>user")
