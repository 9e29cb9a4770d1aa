"""Messages and items as the chat template gets them, and images and videos as they are read."""

import base64
import io
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import PIL.Image
import pytest

from detjax.models import ModelMetadata, Tokenizer
from detjax.models.text.written_json import WrittenObject, written_object
from detjax.server.api import images
from detjax.server.api.images import ShownImage, ShownVideo, read_images
from detjax.server.api.messages import content_for_template, shown_in
from detjax.server.api.response_calls import turns
from detjax.server.api.response_fields import ResponsesRequest
from detjax.server.api.schemas import ChatRequest
from detjax.server.http import bodies
from detjax.server.http.errors import ApiError
from detjax.server.text.worker import _with_written_arguments
from tests.server.running_server import MODEL
from tests.server.scripted import scripted
from tests.server.tool_models import HERMES

TEXT: Final = {"type": "text", "text": "a"}
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:1"}}
VIDEO: Final = {"type": "video_url", "video_url": {"url": "data:2"}, "fps": 1.5, "min_frames": 3, "max_frames": 5}


def chat(*messages: dict[str, Any]) -> ChatRequest:
    return bodies.parse(json.dumps({"model": MODEL, "messages": messages}).encode(), ChatRequest)


def template_form(*messages: dict[str, Any]) -> list[Any]:
    return [message.for_template() for message in chat(*messages).messages]


def test_messages_reach_the_template_with_what_they_have() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    got = template_form(
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [TEXT, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [call, call | {"id": None}]},
        {"role": "tool", "content": "t", "tool_call_id": "c"},
        {"role": "tool", "content": "t", "tool_call_id": ""},
        {"role": "developer", "content": ""},
    )
    function = {"name": "f", "arguments": '{"x": 1}'}
    assert got == [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": function},
                {"type": "function", "function": function},
            ],
        },
        {"role": "tool", "content": "t", "tool_call_id": "c"},
        {"role": "tool", "content": "t"},
        {"role": "developer", "content": ""},
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ("", {}),
        ("{}", {}),
        ("[1]", "[1]"),
        ("3", "3"),
        ('{"x"', '{"x"'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_that_are_no_object_stay_text(arguments: str, expected: Any) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    (message,) = template_form({"role": "assistant", "tool_calls": calls})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    given = _with_written_arguments(message)["tool_calls"][0]["function"]["arguments"]
    assert given == expected
    assert type(given) is (WrittenObject if isinstance(expected, dict) else str)


@pytest.mark.parametrize(
    "text",
    [
        '{"x":1}',
        ' { "b" : [1,  {"y":2}] ,\n"a":{} } ',
        "{}",
        '{"a": 1, "a": {"b":  2}}',
        '{"é\\n": "\\u00e9", "n": 1.50}',
    ],
)
def test_templates_write_the_arguments_of_earlier_calls_as_the_model_did(words: Tokenizer, text: str) -> None:
    arguments = written_object(text)
    assert arguments == json.loads(text)
    call = {"name": "f", "arguments": arguments}
    forms = (
        "{{ c.arguments }}",
        "{{ c.arguments | tojson }}",
        "{{ '' + c.arguments + '' }}",
        "{% if c.arguments is string %}{% else %}{{ c.arguments ~ '' }}{% endif %}",
        "{{ (c | tojson)[27:-1] }}",
    )
    for form in forms:
        template = words.with_chat_template(f"{{% set c = messages[0].c %}}{form}")
        assert template.apply_chat_template([{"role": "x", "c": call}]) == text, form
    values = words.with_chat_template("{% for k, v in messages[0].c|items %}{{ v | tojson }};{% endfor %}")
    written = values.apply_chat_template([{"role": "x", "c": written_object('{"a": [1,2], "b": {"c":3}, "d": "e"}')}])
    assert written == '[1,2];{"c":3};"e";'
    assert written_object("[1]") is written_object('{"a"') is written_object("[" * 100_000) is None
    sorted_ = words.with_chat_template("{{ messages[0].c | tojson(sort_keys=true) }}")
    assert sorted_.apply_chat_template([{"role": "x", "c": written_object('{"b":1,"a":2}')}]) == '{"a": 2, "b": 1}'


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            "role 'assistant'",
        ),
        ({"role": "assistant", "content": "x", "tool_call_id": "c"}, "with role 'tool'"),
        ({"role": "assistant"}, "content is missing or null"),
        ({"role": "assistant", "content": None}, "content is missing or null"),
        ({"role": "tool", "tool_call_id": "c"}, "content is missing or null"),
    ],
)
def test_messages_that_contradict_themselves_are_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        chat(message)


def test_parts_stay_apart_where_something_is_shown() -> None:
    (message,) = chat({"role": "user", "content": [TEXT, IMAGE, VIDEO, TEXT]}).messages
    assert content_for_template(message.content) == [TEXT, {"type": "image"}, {"type": "video"}, TEXT]
    assert shown_in(message.content) == [ShownImage("data:1"), ShownVideo("data:2", 1.5, 3, 5)]
    assert (shown_in("x"), shown_in(None), content_for_template(None)) == ([], [], "")
    body = {
        "model": MODEL,
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": "data:1"},
                    {"type": "input_video", "video_url": "data:2", "fps": 1.5, "min_frames": 3, "max_frames": 5},
                    {"type": "output_text", "text": "a"},
                ],
            }
        ],
    }
    request = bodies.parse(json.dumps(body).encode(), ResponsesRequest)
    assert request.shown == shown_in(message.content)
    assert not isinstance(request.input, str)
    (turn,) = turns(None, request.input)
    assert turn.content == content_for_template(message.content)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"fps": 1e-9}, True),
        ({"fps": 0}, False),
        ({"min_frames": 1, "max_frames": 1}, True),
        ({"min_frames": 0}, False),
        ({"max_frames": 0}, False),
        ({"max_frames": 2**31 - 1}, True),
        ({"max_frames": 2**31}, False),
        ({"min_frames": 2**31}, False),
    ],
)
def test_options_of_a_video_are_accepted_up_to_their_limits(fields: dict[str, Any], accepted: bool) -> None:
    part = {"type": "video_url", "video_url": {"url": "x"}} | fields
    if accepted:
        chat({"role": "user", "content": [part]})
    else:
        with pytest.raises(ApiError, match=next(iter(fields))):
            chat({"role": "user", "content": [part]})


def test_items_become_messages_and_calls_join_the_answer_before_them() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": '{"x": 1}'}

    items: list[dict[str, Any]] = [
        call(0),
        {"role": "user", "content": "Hi"},
        call(1),
        call(2),
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "message", "role": "assistant", "content": "I look."},
        call(3),
    ]
    body = bodies.parse(json.dumps({"model": MODEL, "input": items}).encode(), ResponsesRequest)
    function = {"name": "f", "arguments": '{"x": 1}'}

    def made(*numbers: int) -> list[dict[str, Any]]:
        return [{"id": f"c{number}", "type": "function", "function": function} for number in numbers]

    assert [turn.for_template() for turn in turns("Be brief.", body.input)] == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": made(0)},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": made(1, 2)},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "a\nb", "tool_call_id": "c2"},
        {"role": "assistant", "content": "I look.", "tool_calls": made(3)},
    ]
    assert [turn.for_template() for turn in turns(None, "Hi")] == [{"role": "user", "content": "Hi"}]


def test_variables_and_tools_reach_the_template(metadata: ModelMetadata, words: Tokenizer) -> None:
    template = HERMES + "{{ x }}{{ tools | length if tools else 'none' }}"
    tools: Any = [{"type": "function", "function": {"name": "now"}}]
    with scripted(metadata, words.with_chat_template(template)) as api:

        def text(path: str, **body: Any) -> str:
            return words.decode(api.asked(path, **body, chat_template_kwargs={"x": "?"}).prompt, False)

        messages: Any = [{"role": "user", "content": "Hi"}]
        for path, given, named in (
            ("/v1/chat/completions", {"messages": messages}, tools),
            ("/v1/responses", {"input": "Hi"}, [{"type": "function", "name": "now"}]),
        ):
            assert text(path, **given) == "user: Hiassistant: ?none"
            assert text(path, **given, tools=named) == "now user: Hiassistant: ?1"
            assert text(path, **given, tools=named, tool_choice="none") == "user: Hiassistant: ?none"


# --- images and videos ------------------------------------------------------------------------------------------------


class Reader:
    """Stands in for an engine: an image has as many tokens as it has rows."""

    max_length = 10

    def image_patches(self, name: str, image: Any) -> list[Any]:
        return [image]

    def image_tokens(self, patches: Any) -> int:
        return sum(len(patch) for patch in patches)


def png(rows: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(np.full((rows, 3, 3), rows, np.uint8)).save(file, "PNG")
    return file.getvalue()


def url(contents: bytes) -> ShownImage:
    return ShownImage(f"data:image/png;base64,{base64.b64encode(contents).decode()}")


def read(*parts: Any, directory: Path | None = None) -> list[int]:
    """The rows of the images."""
    read_unchecked: Any = images._read
    return [len(one) for one in read_unchecked(parts, Reader(), directory, "messages")]


def refused(*parts: Any, directory: Path | None = None) -> str:
    with pytest.raises((images._Refused, ValueError)) as raised:
        read(*parts, directory=directory)
    return str(raised.value)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the reader stand in for an engine, whose type is checked in tests."""
    for name in ("_read", "_video"):
        function: Any = getattr(images, name)
        monkeypatch.setattr(images, name, getattr(function, "__wrapped__", function))


def test_images_are_read_until_they_have_no_room() -> None:
    assert read(url(png(4)), url(png(5))) == [4, 5]
    message = "the first 2 images of the messages have 10 tokens; accepted: fewer than 10 in total. "
    assert refused(url(png(4)), url(png(6)), url(b"not read")) == f"{message}Send fewer or smaller images."


def test_no_more_images_than_the_limit_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert images.MAX_IMAGES == 256
    monkeypatch.setattr(images, "MAX_IMAGES", 2)
    assert read(url(png(1)), url(png(1))) == [1, 1]
    assert refused(*[url(png(1))] * 3) == "messages: 3 images; accepted: up to 2"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("DATA:image/png;BASE64,", "cannot be read as an image"),
        (
            "data:image/png,AAAA",
            "is 'data:image/png,AAAA'; accepted: a data URL with base64, such as data:image/png;base64,...",
        ),
        ("data:image/png;base64", "is 'data:image/png;base64'; accepted: a data URL"),
        ("data:;base64,AA", "its base64 is not valid"),
        ("data:;base64,A A A", "its base64 is not valid"),
        (
            "http://a",
            "accepted: a data URL with base64, such as data:image/png;base64,.... The server fetches nothing.",
        ),
        ("x" * 60, f"is '{'x' * 60}'; accepted"),
        ("x" * 61, f"is '{'x' * 60}...'; accepted"),
        ("file:a.png", "is 'file:a.png'; accepted: a data URL"),
    ],
)
def test_urls_are_refused_for_a_reason(given: str, says: str) -> None:
    assert refused(ShownImage(given)).startswith("image 0 of the messages")
    assert says in refused(ShownImage(given))
    encoded = ShownImage(url(png(2)).url.replace("=", "%3D").replace("/", "%2F").replace("image%2Fpng", "image/png"))
    assert read(encoded) == [2]


def test_files_are_read_from_the_directory_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "images"
    (directory / "a b").mkdir(parents=True)
    (directory / "a b" / "c.png").write_bytes(png(3))
    (tmp_path / "out.png").write_bytes(png(3))
    (tmp_path / "images2").mkdir()
    (tmp_path / "images2" / "c.png").write_bytes(png(3))
    for name in ("file:a%20b/c.png", f"file://{directory}/a%20b/c.png", "FILE:a b/../a b/c.png"):
        assert read(ShownImage(name), directory=directory) == [3]
    for name in ("../out.png", "../images2/c.png", "a b", "missing.png", "%00", f"{tmp_path}/out.png"):
        expected = f"image 0 of the messages is 'file:{name}'; accepted: a file in the server's image directory"
        if len(name) < 50:
            assert refused(ShownImage(f"file:{name}"), directory=directory) == expected
    assert "or file: and the path of a file in the server's" in refused(ShownImage("x"), directory=directory)
    size = (directory / "a b" / "c.png").stat().st_size
    monkeypatch.setattr(images, "_MAX_BYTES", size)
    assert read(ShownImage("file:a b/c.png"), directory=directory) == [3]
    monkeypatch.setattr(images, "_MAX_BYTES", size - 1)
    message = f"image 0 of the messages has {size} bytes; accepted: up to {size - 1}"
    assert refused(ShownImage("file:a b/c.png"), directory=directory) == message
    monkeypatch.undo()
    assert images._MAX_BYTES == 64 << 20


def test_an_image_that_is_refused_names_its_place_among_its_kind() -> None:
    assert refused(url(png(1)), ShownImage("x")).startswith("image 1 of the messages is 'x'")
    with pytest.raises(ApiError) as raised:
        real: Any = read_images
        getattr(real, "__wrapped__", real)([ShownImage("x")], Reader(), None, "input")
    assert raised.value.status == 400
    assert raised.value.body["error"]["param"] == "input"
