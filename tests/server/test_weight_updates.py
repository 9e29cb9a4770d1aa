"""New weights for a running server: all or nothing, and every answer from one version of them."""

import asyncio
import errno
import http.client
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import safetensors.numpy

from detjax import models
from detjax.models import Decoder, Tokenizer
from detjax.server.control import uploads
from tests.server.controlled import HEADERS, Trainer, controlled, fingerprint, question, saved, verdicts
from tests.server.running_server import wait_until

NAMES = ["one", "two", "three"]
SHORT = {"max_tokens": 6, "seed": 3, "temperature": 0.9}
LONG = SHORT | {"max_tokens": 100}
EMBEDDING, QUERIES = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def versions(directory: Path) -> dict[str, tuple[Decoder, Tokenizer]]:
    return saved(directory, NAMES)


@pytest.fixture(scope="module")
def fingerprints(versions: dict[str, tuple[Decoder, Tokenizer]]) -> dict[str, str]:
    """The fingerprint of each version."""
    return {name: fingerprint(loaded) for name, loaded in versions.items()}


@pytest.fixture(scope="module")
def server(directory: Path, versions: Any) -> Iterator[Trainer]:
    with controlled(directory) as trainer:
        yield trainer


@pytest.fixture
def trainer(server: Trainer) -> Iterator[Trainer]:
    """A trainer of a server with the first version."""
    server.update(Path("one"))
    yield server
    assert server.running.engine.stats().pages_in_use == 0
    assert not list(uploaded(server))


def uploaded(trainer: Trainer) -> Iterator[Path]:
    """The uploads that the server keeps."""
    return trainer.running.app.state.weight_files.uploads()


@pytest.fixture(scope="module")
def answers(server: Trainer) -> dict[str, Any]:
    """The answer of each version to a short request."""
    return answers_of(server, SHORT)


@pytest.fixture(scope="module")
def long_answers(server: Trainer) -> dict[str, Any]:
    """The answer of each version to a long request."""
    return answers_of(server, LONG)


def answers_of(server: Trainer, body: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for name in NAMES:
        server.update(Path(name))
        result[name] = server.ask(**body)["choices"][0]
    assert len({str(answer["text"]) for answer in result.values()}) == len(NAMES)
    return result


def tensors_of(checkpoint: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(checkpoint / "model.safetensors")


def until_waiting(trainer: Trainer, count: int) -> None:
    wait_until(lambda: trainer.running.engine.stats().waiting == count)


def begun_update(trainer: Trainer, pool: ThreadPoolExecutor, name: str, mode: str = "wait") -> "Future[Any]":
    """An update that has read its weights, and waits for requests or is done."""
    state = trainer.running.app.state
    updates = state.control.updates
    updating = pool.submit(trainer.update, Path(name), mode)
    wait_until(lambda: state.gate.is_closed("updating") or state.control.updates > updates)
    return updating


# --- all weights, or some ---------------------------------------------------------------------------------------------


def test_new_weights_answer_as_a_server_that_began_with_them(
    trainer: Trainer, answers: dict[str, Any], fingerprints: dict[str, str], versions: Any, tmp_path: Path
) -> None:
    before = trainer.ask(**SHORT)
    updated = trainer.update(Path("two"))
    after = trainer.ask(**SHORT)
    assert updated == {
        "success": True,
        "message": "the weights are in use",
        "num_paused_requests": 0,
        "digest": models.digest(*versions["two"]),
        "system_fingerprint": fingerprints["two"],
    }
    assert (before["choices"][0], after["choices"][0]) == (answers["one"], answers["two"])
    assert (before["system_fingerprint"], after["system_fingerprint"]) == (fingerprints["one"], fingerprints["two"])
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (model,) = trainer.http.get("/v1/models").json()["data"]
    assert model["system_fingerprint"] == fingerprints["two"]
    known = {fingerprints[name]: versions[name] for name in NAMES}
    assert verdicts([before, after], known, tmp_path) == {"verified"}
    assert "detjax_weight_updates_total" in trainer.http.get("/metrics").text


def test_new_weights_do_not_see_pages_of_old_ones(
    trainer: Trainer, fingerprints: dict[str, str], versions: Any, tmp_path: Path
) -> None:
    prompt = "A prompt of several pages. " * 20
    answers = [trainer.ask(prompt), trainer.ask(prompt)]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    trainer.update(Path("two"))
    answers.append(trainer.ask(prompt))
    assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    known = {fingerprints[name]: versions[name] for name in NAMES}
    assert verdicts(answers, known, tmp_path) == {"verified"}


@pytest.mark.parametrize("chunked", [False, True])
def test_uploaded_weights_are_those_of_the_file(
    trainer: Trainer, directory: Path, answers: dict[str, Any], fingerprints: dict[str, str], chunked: bool
) -> None:
    content = (directory / "two" / "model.safetensors").read_bytes()
    parts = (content[start : start + 1000] for start in range(0, len(content), 1000)) if chunked else content
    updated = trainer.done("PUT", "/weights", content=parts)
    assert updated["system_fingerprint"] == fingerprints["two"]
    assert trainer.ask(**SHORT)["choices"][0] == answers["two"]


@pytest.mark.parametrize("names", [[EMBEDDING], [QUERIES], [QUERIES, EMBEDDING]])
def test_some_tensors_replace_themselves_alone_also_within_a_joined_weight(
    trainer: Trainer, directory: Path, versions: Any, tmp_path: Path, names: list[str]
) -> None:
    new, mixed = tensors_of(directory / "two"), tensors_of(directory / "one")
    mixed |= {name: new[name] for name in names}
    models.save(versions["one"][0], tmp_path / "mixed", tokenizer=versions["one"][1])
    safetensors.numpy.save_file(mixed, tmp_path / "mixed" / "model.safetensors", {"format": "pt"})
    expected = models.load(tmp_path / "mixed", progress=False)
    updated = trainer.done("PUT", "/weights", content=safetensors.numpy.save({name: new[name] for name in names}))
    assert updated["digest"] == models.digest(*expected)
    answer = trainer.ask(**SHORT)
    assert verdicts([answer], {updated["system_fingerprint"]: expected}, tmp_path) == {"verified"}


def test_tensors_are_rounded_as_at_the_start(trainer: Trainer, directory: Path, fingerprints: dict[str, str]) -> None:
    wide = {name: x.astype(np.float32) for name, x in tensors_of(directory / "two").items()}
    updated = trainer.done("PUT", "/weights", content=safetensors.numpy.save(wide))
    assert updated["system_fingerprint"] == fingerprints["two"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> bytes:
    tensors = tensors_of(directory / "two")
    change(tensors)
    return safetensors.numpy.save(tensors)


REFUSED: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "a wrong name": (lambda t: t.update(other=t.pop(QUERIES)), "tensor 'other' is surplus; accepted: tensors of the"),
    "a wrong shape": (lambda t: t.update({QUERIES: t[QUERIES].T.copy()}), f"tensor '{QUERIES}' has shape"),
    "a wrong dtype": (
        lambda t: t.update({QUERIES: t[QUERIES].astype(np.int32)}),
        f"tensor '{QUERIES}' is stored as I32; accepted: BF16, F16, F32",
    ),
    "a value beyond the dtype": (
        lambda t: t.update({QUERIES: np.full(t[QUERIES].shape, 3.4e38, np.float32)}),
        f"tensor '{QUERIES}' holds values beyond the range of bfloat16",
    ),
    "a head that is not the embedding": (
        lambda t: t.update({"lm_head.weight": t[EMBEDDING] + t[EMBEDDING]}),
        "tensor 'lm_head.weight' differs from the embedding",
    ),
    "no tensor": (lambda t: t.clear(), "has no tensors of the model; accepted: at least one"),
}


def assert_nothing_has_changed(trainer: Trainer, answers: dict[str, Any], fingerprints: dict[str, str]) -> None:
    answer = trainer.ask(**SHORT)
    assert answer["system_fingerprint"] == fingerprints["one"]
    assert answer["choices"][0] == answers["one"]


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_do_not_fit_change_nothing(
    trainer: Trainer, directory: Path, answers: dict[str, Any], fingerprints: dict[str, str], name: str
) -> None:
    change, says = REFUSED[name]
    response = trainer.control("PUT", "/weights", content=changed(directory, change))
    assert response.status_code == 400
    body = response.json()
    assert says in body["error"]["message"]
    assert (body["success"], body["message"]) == (False, body["error"]["message"])
    assert_nothing_has_changed(trainer, answers, fingerprints)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_cut_file_changes_nothing(
    trainer: Trainer, directory: Path, answers: dict[str, Any], fingerprints: dict[str, str], cut: int
) -> None:
    content = (directory / "two" / "model.safetensors").read_bytes()[:cut]
    status, message = trainer.refusal("PUT", "/weights", content=content)
    assert (status, "truncated or damaged" in message) == (400, True)
    assert_nothing_has_changed(trainer, answers, fingerprints)


def test_a_torn_upload_changes_nothing(
    trainer: Trainer, directory: Path, answers: dict[str, Any], fingerprints: dict[str, str]
) -> None:
    content = (directory / "two" / "model.safetensors").read_bytes()
    connection = http.client.HTTPConnection(trainer.running.url.removeprefix("http://"))
    connection.putrequest("PUT", "/weights")
    for name, value in (HEADERS | {"Content-Length": str(len(content))}).items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(content[:-1])
    wait_until(lambda: list(uploaded(trainer)))
    connection.close()
    wait_until(lambda: not list(uploaded(trainer)))
    assert_nothing_has_changed(trainer, answers, fingerprints)


def announced(trainer: Trainer, headers: dict[str, str]) -> tuple[int, str]:
    """The answer to the headers of an upload, before any of its body."""
    connection = http.client.HTTPConnection(trainer.running.url.removeprefix("http://"))
    connection.putrequest("PUT", "/weights")
    for name, value in (HEADERS | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    message = json.loads(response.read())["error"]["message"]
    connection.close()
    return response.status, message


def test_uploads_without_room_are_refused_before_they_begin(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], fingerprints: dict[str, str]
) -> None:
    status, message = announced(trainer, {"Content-Length": str(100 << 30)})
    assert status == 413
    assert "the size of all of the model's tensors in float32" in message
    monkeypatch.setattr(uploads.shutil, "disk_usage", lambda _: SimpleNamespace(free=999))
    status, message = announced(trainer, {"Content-Length": "1000"})
    assert (status, "accepted: up to 999, the free space" in message) == (507, True)
    assert announced(trainer, {"Content-Length": "10", "Content-Encoding": "gzip"})[0] == 415
    assert_nothing_has_changed(trainer, answers, fingerprints)


def test_uploads_of_unknown_size_end_at_the_limits(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], fingerprints: dict[str, str]
) -> None:
    def zeros(count: int) -> Iterator[bytes]:
        yield from itertools.repeat(bytes(1 << 16), count)

    status, message = trainer.refusal("PUT", "/weights", content=zeros(100))
    assert (status, "the upload has at least" in message) == (413, True)

    class Full:
        def __init__(self, path: Path, *_: Any) -> None:
            self.path = path

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: Any) -> None: ...

        def write(self, _: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(uploads.Path, "open", Full)
    status, message = trainer.refusal("PUT", "/weights", content=zeros(2))
    assert (status, message) == (507, "the server's disk is full (No space left on device); nothing has changed")
    monkeypatch.undo()
    assert_nothing_has_changed(trainer, answers, fingerprints)


def test_paths_outside_the_directory_are_refused(
    trainer: Trainer, directory: Path, tmp_path: Path, versions: Any
) -> None:
    model, tokenizer = versions["two"]
    models.save(model, tmp_path / "secret", tokenizer=tokenizer)
    (directory / "link").symlink_to(tmp_path / "secret")
    (directory / "loop").symlink_to(directory / "loop")
    (directory / "files").mkdir()
    (directory / "files" / "model.safetensors").symlink_to(tmp_path / "secret" / "model.safetensors")
    (directory / "indexed").mkdir()
    names = safetensors.numpy.load_file(tmp_path / "secret" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "shard.bin")}
    (directory / "indexed" / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "indexed" / "shard.bin").symlink_to(tmp_path / "secret" / "model.safetensors")
    (directory / "inside").symlink_to(directory / "two")
    outside = [str(tmp_path / "secret"), "../secret", "link", "files", "files/model.safetensors", "/etc/passwd", "\0"]
    outside.append("indexed")
    for path in outside:
        status, message = trainer.refusal("POST", "/update_weights_from_disk", json={"model_path": path})
        assert status == 400
        assert "accepted: a path below the server's directory of weights, and no links to other places" in message, path
    for path in ("missing", "loop"):
        status, message = trainer.refusal("POST", "/update_weights_from_disk", json={"model_path": path})
        assert (status, "model_path is" in message) == (400, True)
    for path in ("inside", str(directory / "two"), "two/model.safetensors"):
        assert trainer.update(Path(path))["success"]


def test_pipes_are_refused_because_they_may_never_end(trainer: Trainer, directory: Path) -> None:
    (directory / "piped").mkdir()
    for pipe in ("pipe.safetensors", "piped/model.safetensors"):
        os.mkfifo(directory / pipe)
    for path in ("pipe.safetensors", "piped"):
        status, message = trainer.refusal("POST", "/update_weights_from_disk", json={"model_path": path})
        assert status == 400
        assert f"model_path is {path!r}; accepted: a file, or a directory of files, and no pipes or devices" in message


def test_another_model_is_refused(trainer: Trainer, directory: Path, versions: Any) -> None:
    config = json.loads((directory / "two" / "config.json").read_text())
    other = directory / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    (other / "model.safetensors").write_bytes((directory / "two" / "model.safetensors").read_bytes())
    status, message = trainer.refusal("POST", "/update_weights_from_disk", json={"model_path": "other"})
    assert status == 400
    assert "norm_eps is 0.001; accepted: 1e-06, as the model has it" in message


def test_without_a_directory_only_uploads_are_accepted(directory: Path, versions: Any) -> None:
    with controlled(directory, weights_directory=None) as trainer:
        status, message = trainer.refusal("POST", "/update_weights_from_disk", json={"model_path": "two"})
        assert (status, "the server has no directory of weights; accepted: PUT /weights" in message) == (400, True)
        content = (directory / "two" / "model.safetensors").read_bytes()
        assert trainer.done("PUT", "/weights", content=content)["success"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "model_path is missing"),
        ({"model_path": "two", "load_format": "dummy"}, "load_format is 'dummy'; accepted: \"auto\" or"),
        ({"model_path": "two", "weight_version": "7"}, "the digest of the weights names their version"),
        ({"model_path": "two", "mode": "now"}, "mode is 'now'"),
        ({"model_path": "two", "mode": "wait", "abort_all_requests": True}, "accepted: one of them"),
    ],
)
def test_fields_that_cannot_be_kept_are_refused(trainer: Trainer, body: dict[str, Any], says: str) -> None:
    status, message = trainer.refusal("POST", "/update_weights_from_disk", json=body)
    assert (status, says in message) == (400, True), message


def test_a_second_update_is_refused_during_the_first(
    trainer: Trainer, answers: dict[str, Any], fingerprints: dict[str, str]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        trainer.running.engine.pause()  # so that the update has to wait
        asked = pool.submit(trainer.ask, **SHORT)
        until_waiting(trainer, 1)
        updating = begun_update(trainer, pool, "two")
        for path in ("/pause", "/sleep", "/wake_up", "/reset_prefix_cache"):
            status, message = trainer.refusal("POST", path)
            assert (status, "an operation is running, update; retry" in message) == (409, True)
        status, message = trainer.refusal("POST", "/update_weights_from_disk", json={"model_path": "three"})
        assert (status, "an operation is running, update" in message) == (409, True)
        assert trainer.refusal("PUT", "/weights", content=b"x")[0] == 409
        trainer.running.engine.resume()
        assert asked.result()["choices"][0] == answers["one"]
        assert updating.result()["system_fingerprint"] == fingerprints["two"]


# --- requests in flight -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_in_flight_have_one_version_of_the_weights(
    trainer: Trainer, long_answers: dict[str, Any], fingerprints: dict[str, str], mode: str, is_paused: bool
) -> None:
    begun = threading.Event()

    def stream() -> list[Any]:
        chunks = []
        sent = question("A prompt", stream=True, **LONG)
        with trainer.http.stream("POST", "/v1/completions", json=sent) as response:
            for line in response.iter_lines():
                begun.set()
                if line.startswith("data: {"):
                    chunks.append(json.loads(line[6:]))
        return chunks

    with ThreadPoolExecutor(4) as pool:
        streaming = pool.submit(stream)
        begun.wait()
        trainer.running.engine.pause()
        whole = pool.submit(trainer.ask, **LONG)
        until_waiting(trainer, 1)
        held = None
        if is_paused:
            trainer.done("POST", "/pause?mode=keep")
            held = pool.submit(trainer.ask, **LONG)
            wait_until(lambda: trainer.running.app.state.guard.in_flight == 3)
        updating = begun_update(trainer, pool, "two", mode)
        trainer.running.engine.resume()
        updated = updating.result()
        assert updated["num_paused_requests"] == 2 + is_paused
        assert trainer.done("GET", "/is_paused")["is_paused"] is is_paused
        if held is not None:
            assert not held.done()
            trainer.done("POST", "/resume")
            assert held.result()["choices"][0] == long_answers["two"]
        chunks, answer = streaming.result(), whole.result()
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprints["one"]}
    if mode == "abort":
        assert long_answers["one"]["text"].startswith(text)
        assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"] == "abort"
        assert answer["system_fingerprint"] == fingerprints["one"]
        return
    assert text == long_answers["one"]["text"]
    version = "two" if mode == "keep" else "one"
    assert answer["system_fingerprint"] == fingerprints[version]
    assert answer["choices"][0] == long_answers[version]


def test_weights_change_in_a_sleeping_server_that_keeps_requests(
    trainer: Trainer, answers: dict[str, Any], fingerprints: dict[str, str]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        trainer.running.engine.pause()
        whole = pool.submit(trainer.ask, **SHORT)
        until_waiting(trainer, 1)
        trainer.done("POST", "/sleep?mode=keep")
        trainer.running.engine.resume()
        trainer.done("POST", "/wake_up?tags=weights")
        update = {"json": {"model_path": "two", "mode": "wait"}}
        status, message = trainer.refusal("POST", "/update_weights_from_disk", **update)
        assert (status, "1 calls in flight have to finish with the present weights first" in message) == (409, True)
        trainer.update(Path("two"), "keep")
        assert not whole.done()
        trainer.done("POST", "/wake_up")
        assert whole.result()["choices"][0] == answers["two"]
        assert whole.result()["system_fingerprint"] == fingerprints["two"]


@pytest.mark.parametrize(("requests", "updates"), [(40, 3), pytest.param(500, 20, marks=pytest.mark.nightly)])
def test_every_answer_in_a_crowd_is_verified_with_the_weights_that_it_names(
    trainer: Trainer, fingerprints: dict[str, str], versions: Any, tmp_path: Path, requests: int, updates: int
) -> None:
    """Clients ask until the updates are done, each at least once, whole and streamed.

    An update waits for an answer of the present weights, since the mode `keep` may leave none.
    """

    async def crowd() -> list[Any]:
        done, answers = False, list[Any]()

        async def client(http: httpx2.AsyncClient, number: int) -> None:
            for turn in itertools.count():
                sent: dict[str, Any] = {"seed": number, "temperature": 0.8, "max_tokens": 2 + (number + turn) % 7}
                sent |= {"n": 1 + number % 2, "stream": number % 3 == 0}
                response = await http.post("/v1/completions", json=question(f"Prompt {number} {turn}", **sent))
                assert response.status_code == 200, response.text
                answers.append(whole_of(response.text) if sent["stream"] else response.json())
                if done:
                    return

        async with httpx2.AsyncClient(
            base_url=trainer.running.url, timeout=None, limits=httpx2.Limits(max_connections=None)
        ) as http:
            clients = [asyncio.create_task(client(http, number)) for number in range(requests)]
            for number in range(updates):
                present = fingerprints[NAMES[number % len(NAMES)]]
                while present not in {answer["system_fingerprint"] for answer in answers}:
                    await asyncio.sleep(0.01)
                while trainer.running.app.state.gate.in_flight < requests // 2:
                    await asyncio.sleep(0.01)
                name, mode = NAMES[(number + 1) % len(NAMES)], ("wait", "keep")[number % 2]
                response = await http.post(
                    "/update_weights_from_disk", json={"model_path": name, "mode": mode}, headers=HEADERS
                )
                assert response.status_code == 200, response.text
                assert response.json()["num_paused_requests"] > 0
            done = True
            await asyncio.gather(*clients)
        return answers

    answers = asyncio.run(crowd())
    assert len(answers) >= requests
    assert len({answer["system_fingerprint"] for answer in answers}) == len(NAMES)
    known = {fingerprints[name]: versions[name] for name in NAMES}
    assert verdicts(answers, known, tmp_path) == {"verified"}


def whole_of(events: str) -> dict[str, Any]:
    """The whole response of a stream; all its chunks name the same weights."""
    chunks = [json.loads(line[6:]) for line in events.split("\n") if line.startswith("data: {")]
    (name,) = {chunk["system_fingerprint"] for chunk in chunks}
    choices: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        before = choices.setdefault(choice["index"], {"text": ""})
        choices[choice["index"]] = choice | {"text": before["text"] + choice["text"]}
    return {"system_fingerprint": name, "choices": [choice | {"logprobs": None} for choice in choices.values()]}
