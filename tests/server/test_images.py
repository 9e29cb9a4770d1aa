"""Images in chats and responses: data URLs, files of a directory, and what is refused."""

import base64
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from detjax.engine import Engine, Request, SamplingParams
from detjax.models import Decoder, ModelMetadata, Tokenizer, Video, load
from tests.server.running_server import MODEL, Running, serving
from tests.server.scripted import scripted
from tests.support import towers
from tests.support.towers import character_tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen2_5_vl-tiny"


@pytest.fixture(scope="module")
def loaded() -> tuple[Decoder, Tokenizer]:
    return load(FIXTURE, dtype="float32", progress=False)[0], character_tokenizer()


@pytest.fixture(scope="module")
def engine(loaded: tuple[Decoder, Tokenizer]) -> Iterator[Engine]:
    with Engine(*loaded, max_samples=4, token_budget=64, max_length=200) as one:
        yield one


@pytest.fixture(scope="module")
def server(engine: Engine, loaded: tuple[Decoder, Tokenizer], directory: Path) -> Iterator[Running]:
    with serving(engine, loaded, image_directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    (path / "inside").mkdir()
    (path / "inside" / "a picture.png").write_bytes(png())
    (path / "text.txt").write_text("no image")
    (path.parent / "outside.png").write_bytes(png())
    (path / "link.png").symlink_to(path.parent / "outside.png")
    return path


def pixels(index: int = 0) -> np.ndarray:
    return np.load(FIXTURE / "reference.npz")[f"image_{index}"]


def png(index: int = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels(index)).save(file, "PNG", **options)
    return file.getvalue()


def data_url(contents: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(contents).decode()}"


def chat(server: Running, content: Any, path: str = "v1/chat/completions") -> tuple[int, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    if "chat" in path:
        body |= {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return post(server, path, body)


def respond(server: Running, content: Any, **fields: Any) -> tuple[int, Any]:
    sampling = {"max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
    return post(server, "v1/responses", {"input": [{"role": "user", "content": content}]} | sampling | fields)


def post(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    body = {"model": MODEL} | body
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def input_part(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def test_an_image_in_a_chat_has_the_answer_that_the_engine_gives(server: Running, engine: Engine) -> None:
    text = {"type": "text", "text": "What is it?"}
    status, response = chat(server, [text, part(data_url(png())), part(data_url(png(1))), text])
    assert status == 200
    tokens = character_tokenizer().encode("user:What is it?<vs><img><ve><vs><img><ve>What is it?;")
    request = Request(tokens, SamplingParams(max_tokens=4, ignore_eos=True), images=[pixels(), pixels(1)])
    expected = engine.generate([request])[0]
    assert tuple(response["choices"][0]["token_ids"]) == expected.completions[0].tokens
    assert tuple(response["prompt_token_ids"]) == expected.prompt_tokens
    assert response["usage"]["prompt_tokens"] == len(tokens) - 2 + 35 + 6


def test_a_file_of_the_directory_is_the_same_image(server: Running, directory: Path) -> None:
    urls = ["file:inside/a%20picture.png", f"file://{directory}/inside/a%20picture.png", data_url(png())]
    answers = [chat(server, [part(url)]) for url in urls]
    assert [status for status, _ in answers] == [200] * 3
    assert len({json.dumps(response["choices"]) for _, response in answers}) == 1


def test_a_response_to_images_is_the_answer_of_the_chat(server: Running) -> None:
    text, urls = {"type": "input_text", "text": "What is it?"}, [data_url(png()), "file:inside/a%20picture.png"]
    status, response = respond(server, [text, *map(input_part, urls), text])
    assert status == 200
    chatted = chat(server, [text | {"type": "text"}, *map(part, urls), text | {"type": "text"}])[1]
    assert response["output"][0]["content"][0]["text"] == chatted["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chatted["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([input_part("https://a.b/c.png")], "image 0 of the input is 'https://a.b/c.png'; accepted: a data URL"),
        ([input_part("file:../outside.png")], "accepted: a file in the server's image directory"),
        ([{"type": "input_image"}], "image_url is missing"),
        ([input_part("data:,") | {"detail": "low"}], "detail is 'low'; accepted: \"auto\" or null"),
        ([input_part(data_url(png()))] * 7, "the first 6 images of the input have 210 tokens"),
    ],
)
def test_images_that_a_response_cannot_have_are_refused(content: Any, words: str, server: Running) -> None:
    status, response = respond(server, content)
    assert status == 400 and words in response["error"]["message"]


def test_an_image_is_turned_as_its_file_says(server: Running) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # its rows are to be columns
    turned = chat(server, [part(data_url(png(exif=exif)))])[1]
    file = io.BytesIO()
    PIL.Image.fromarray(np.rot90(pixels(), -1)).save(file, "PNG")
    upright = chat(server, [part(data_url(file.getvalue()))])[1]
    assert turned["choices"] == upright["choices"]


def bomb() -> str:
    file = io.BytesIO()
    PIL.Image.new("1", (9000, 9000)).save(file, "PNG")
    return data_url(file.getvalue())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "image 0 of the messages is 'https://example.com/a.png'; accepted: a data URL"),
        ("https://example.com/a.png", "or file: and the path of a file.* The server fetches nothing."),
        ("data:image/png,abc", "is 'data:image/png,abc'; accepted: a data URL with base64"),
        ("data:image/png;base64,***", "its base64 is not valid"),
        (data_url(b"no image"), "cannot be read as an image; accepted: PNG, JPEG, WEBP, GIF, BMP"),
        (data_url(png()[:200]), "cannot be read as an image"),
        ("file:text.txt", "cannot be read as an image"),
        ("file:missing.png", "is 'file:missing.png'; accepted: a file in the server's image directory"),
        ("file:../outside.png", "is 'file:../outside.png'; accepted: a file in the server's image directory"),
        ("file:link.png", "is 'file:link.png'; accepted: a file in the server's image directory"),
        ("file:%00", "accepted: a file in the server's image directory"),
        ("file:inside", "accepted: a file in the server's image directory"),
        (bomb(), "has 9000 x 9000 pixels; accepted: up to 67108864"),
        ("x" * 5000, "is 'x{60}...'; accepted"),
    ],
)
def test_what_is_no_image_is_refused(url: str, words: str, server: Running) -> None:
    status, response = chat(server, [part(url)])
    assert (status, response["error"]["param"]) == (400, "messages")

    assert re.search(words, response["error"]["message"])


# --- videos -----------------------------------------------------------------------------------------------------------


def animation(frames: np.ndarray, duration: int) -> bytes:
    images = [PIL.Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    images[0].save(file, "WEBP", save_all=True, append_images=images[1:], duration=duration, lossless=True)
    return file.getvalue()


def frame_list(frames: np.ndarray) -> str:
    files = []
    for frame in frames:
        file = io.BytesIO()
        PIL.Image.fromarray(frame).save(file, "PNG")
        files.append(base64.b64encode(file.getvalue()).decode())
    return f"data:video/jpeg;base64,{','.join(files)}"


def clip() -> np.ndarray:
    """Frames of less pixels than the checkpoint asks for."""
    return towers.reference("qwen3-5-vl")["clip"]


def video_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}} | fields


def test_a_video_in_a_chat_has_the_answer_that_the_engine_gives(server: Running, engine: Engine) -> None:
    text = {"type": "text", "text": "What is it?"}
    file = data_url(animation(clip(), 250))
    status, response = chat(server, [part(data_url(png(1))), text, video_part(file), text])
    assert status == 200, response
    tokens = character_tokenizer().encode("user:<vs><img><ve>What is it?<vs><video><ve>What is it?;")
    # Four of eight frames, at two in a second.
    video = Video(clip()[::2], 2.0)
    request = Request(tokens, SamplingParams(max_tokens=4, ignore_eos=True), images=[pixels(1), video])
    expected = engine.generate([request])[0]
    assert tuple(response["prompt_token_ids"]) == expected.prompt_tokens
    assert tuple(response["choices"][0]["token_ids"]) == expected.completions[0].tokens


def test_forms_of_a_video_have_the_same_answer(server: Running, directory: Path) -> None:
    (directory / "inside" / "video.webp").write_bytes(animation(clip(), 500))
    urls = [data_url(animation(clip(), 500)), "file:inside/video.webp", frame_list(clip())]
    answers = [chat(server, [video_part(url)]) for url in urls]
    assert [status for status, _ in answers] == [200] * 3, answers
    assert len({json.dumps(response["choices"]) for _, response in answers}) == 1
    video = {"type": "input_video", "video_url": urls[0], "fps": 2.0}
    status, response = respond(server, [video])
    assert status == 200, response
    assert response["output"][0]["content"][0]["text"] == answers[0][1]["choices"][0]["message"]["content"]
    slower = chat(server, [video_part(urls[2], fps=0.25)])[1]
    assert slower["usage"] == answers[0][1]["usage"] and slower["choices"] != answers[0][1]["choices"]
    fewer = chat(server, [video_part(urls[0], fps=1, min_frames=2, max_frames=2)])[1]
    assert fewer["usage"]["prompt_tokens"] < slower["usage"]["prompt_tokens"]


def test_a_chat_has_the_times_that_the_prompt_says() -> None:
    """The prompts of this model say them. All frames of the list are taken."""
    given = towers.reference("qwen3-5-vl")
    loaded = towers.model("qwen3-5-vl"), character_tokenizer()
    file = io.BytesIO()
    PIL.Image.fromarray(given["image_1"]).save(file, "PNG")
    texts = [{"type": "text", "text": text} for text in ("See this. ", "And ", "?")]
    parts = [texts[0], video_part(frame_list(clip()), fps=3), texts[1], part(data_url(file.getvalue())), texts[2]]
    with scripted(ModelMetadata.from_model(loaded[0]), loaded[1], is_strict=True) as client:
        messages = [{"role": "user", "content": parts}]
        response = client.ask("/v1/chat/completions", messages=messages, max_tokens=4, return_token_ids=True)
    prompt = "".join(towers.CHARACTERS[token] for token in response["prompt_token_ids"] if token < 100)
    written = "<0.2 seconds><0.8 seconds><1.5 seconds><2.2 seconds>"
    assert prompt == f"user:See this. {written}And ?;"


@pytest.mark.parametrize(
    ("url", "fields", "words"),
    [
        ("https://a.b/c.mp4", {}, "video 0 of the messages is 'https://a.b/c.mp4'; accepted: a data URL"),
        ("data:video/mp4;base64,AAAAGGZ0eXBtcDQy", {}, "is an MP4, QuickTime or AVIF file, which is not decoded"),
        ("data:video/jpeg;base64,AAAA", {}, "frame 0 of video 0 of the messages cannot be read as an image"),
        ("data:video/jpeg;base64,*,*", {}, "frame 0 of video 0 of the messages: its base64 is not valid"),
        ("file:missing.webp", {}, "accepted: a file in the server's image directory"),
        ("data:video/jpeg;base64,A,A,A", {"max_frames": 2}, "has 3 frames; accepted: up to 2, which is max_frames"),
        ("file:text.txt", {"max_frames": 4000}, "video 0 of the messages: max_frames is 4000; accepted: 2 to 768"),
    ],
)
def test_what_is_no_video_is_refused(url: str, fields: dict[str, Any], words: str, server: Running) -> None:
    status, response = chat(server, [video_part(url, **fields)])
    assert (status, response["error"]["param"]) == (400, "messages")
    assert words in response["error"]["message"]


@pytest.mark.parametrize("fields", [{"fps": 0}, {"fps": "2"}, {"min_frames": 0}, {"total_pixels": 3}])
def test_fields_of_videos_out_of_range_are_refused(fields: dict[str, Any], server: Running) -> None:
    status, response = chat(server, [video_part("file:text.txt", **fields)])
    assert status == 400 and next(iter(fields)) in str(response["error"])


def test_more_frames_than_fit_are_refused(server: Running) -> None:
    status, response = chat(server, [video_part(frame_list(np.repeat(clip(), 8, axis=0)))])
    assert status == 400
    assert "the first 1 images and videos of the messages have" in response["error"]["message"]
    assert response["error"]["message"].endswith("Send fewer or smaller images, or fewer frames.")


def test_files_are_refused_without_a_directory(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded) as running:
        status, response = chat(running, [part("file:inside/a%20picture.png")])
    assert status == 400
    assert "accepted: a data URL with base64, such as data:image/png;base64,.... The server" in str(response["error"])


def test_more_images_than_fit_are_refused(server: Running) -> None:
    status, response = chat(server, [part(data_url(png()))] * 7)
    assert status == 400
    assert "the first 6 images of the messages have 210 tokens; accepted: fewer than 200" in str(response["error"])
    status, response = chat(server, [part(data_url(png()))] * 5 + [{"type": "text", "text": "x" * 30}])
    assert (status, response["error"]["code"]) == (400, "context_length_exceeded")
    assert "including 5 images; accepted: up to 199" in response["error"]["message"]


def test_texts_with_the_token_of_images_are_refused(server: Running) -> None:
    for content in ("Look: <img>", [{"type": "text", "text": "<img>"}, part(data_url(png()))]):
        status, response = chat(server, content)
        assert status == 400
        assert "accepted: one place for each image" in response["error"]["message"]


def test_the_tokens_of_messages_with_images_are_not_counted(server: Running) -> None:
    status, response = chat(server, [part(data_url(png()))], "tokenize")
    assert status == 400
    assert "messages have images; accepted: parts of type text" in response["error"]["message"]
