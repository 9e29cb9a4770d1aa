"""The control paths: keys, pauses, aborts and sleep."""

import gc
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from detjax import models
from detjax.engine import Engine
from detjax.models import Decoder, ModelMetadata, Tokenizer
from detjax.server import Settings, create_app
from tests.server.controlled import HEADERS, KEY, SIZES, Trainer, controlled, fingerprint, question, saved, verdicts
from tests.server.running_server import MODEL, wait_until
from tests.server.scripted import scripted
from tests.support.compiled_programs import compiled_programs

PATHS = {
    "/pause": "POST",
    "/resume": "POST",
    "/is_paused": "GET",
    "/sleep": "POST",
    "/wake_up": "POST",
    "/is_sleeping": "GET",
    "/reset_prefix_cache": "POST",
    "/abort_request": "POST",
    "/update_weights_from_disk": "POST",
    "/weights": "PUT",
}
LONG = {"max_tokens": 160, "seed": 3, "temperature": 0.9}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def versions(directory: Path) -> dict[str, tuple[Decoder, Tokenizer]]:
    return saved(directory, ["one", "two"])


@pytest.fixture(scope="module")
def server(directory: Path, versions: Any) -> Iterator[Trainer]:
    """A server whose steps take a while, so that long requests are still running when a test acts on them."""
    with controlled(directory) as trainer:
        loop = trainer.running.engine._loop
        step = loop.step

        def slow_step() -> Any:
            time.sleep(0.005)
            return step()

        loop.step = slow_step
        yield trainer


@pytest.fixture
def trainer(server: Trainer) -> Iterator[Trainer]:
    yield server
    assert server.done("GET", "/is_paused") == {"is_paused": False}
    assert server.done("GET", "/is_sleeping") == {"is_sleeping": False}
    assert server.running.engine.stats().pages_in_use == 0


@pytest.fixture(scope="module")
def long(server: Trainer) -> Any:
    """The answer to a long request that nothing interrupts."""
    return server.ask(**LONG)["choices"][0]


class Asked:
    """Requests that are answered in threads."""

    def __init__(self, trainer: Trainer, pool: ThreadPoolExecutor) -> None:
        self._trainer, self._pool = trainer, pool

    def __call__(self, **body: Any) -> "Future[Any]":
        return self._pool.submit(self._trainer.ask, **body)

    def stream(self, **body: Any) -> "tuple[threading.Event, Future[list[Any]]]":
        """An event that is set at the first chunk of a stream, and a future of all chunks."""
        begun = threading.Event()

        def read() -> list[Any]:
            chunks = []
            sent = {"stream": True} | body
            with self._trainer.http.stream("POST", "/v1/completions", json=question("A prompt", **sent)) as response:
                for line in response.iter_lines():
                    begun.set()
                    if line.startswith("data: {"):
                        chunks.append(json.loads(line[6:]))
            return chunks

        return begun, self._pool.submit(read)


@pytest.fixture
def asked(trainer: Trainer) -> Iterator[Asked]:
    with ThreadPoolExecutor(8) as pool:
        yield Asked(trainer, pool)
        # A test that failed may have left calls that would wait forever.
        for path in ("/wake_up", "/resume"):
            trainer.control("POST", path)
        trainer.control("POST", "/abort_request", json={"abort_all": True})


def until_running(trainer: Trainer, count: int = 1) -> None:
    wait_until(lambda: trainer.running.engine.stats().running >= count)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_without_a_control_key_the_paths_do_not_exist(metadata: ModelMetadata, words: Tokenizer) -> None:
    with scripted(metadata, words, api_keys=("client",)) as client:
        for path, method in PATHS.items():
            for key in ("client", KEY):
                assert client.request(method, path, headers={"Authorization": f"Bearer {key}"}).status_code == 404


def test_each_key_opens_its_own_paths(trainer: Trainer, directory: Path, versions: Any) -> None:
    for path, method in PATHS.items():
        for header in ({}, {"Authorization": "Bearer client"}, {"Authorization": f"Basic {KEY}"}):
            response = trainer.http.request(method, path, headers=header)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_control_key"
            assert KEY not in response.text
        other = "POST" if method == "GET" else "GET"
        assert trainer.control(other, path).status_code == 405


def test_the_control_key_does_not_open_the_paths_of_clients(metadata: ModelMetadata, words: Tokenizer) -> None:
    with scripted(metadata, words, api_keys=("client",)) as client:
        sent = {"model": MODEL, "prompt": "x"}
        assert client.post("/v1/completions", json=sent, headers=HEADERS).status_code == 401
        assert client.post("/v1/completions", json=sent, headers={"Authorization": "Bearer client"}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"control_key": ""}, "control_key .* is empty or has white space"),
        ({"control_key": "a b"}, "control_key .* is empty or has white space"),
        ({"control_key": "secret", "api_keys": ("secret",)}, "control_key .* is one of api_keys"),
        ({"weights_directory": Path("/")}, "weights_directory is given without control_key"),
        ({"control_key": "a", "weights_directory": Path("/missing")}, "weights_directory is .*a directory that exists"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        Settings("m", **settings)
    assert "secret" not in str(raised.value)


# --- pauses -----------------------------------------------------------------------------------------------------------


def test_a_pause_that_keeps_requests_freezes_them_and_changes_no_bit(trainer: Trainer, asked: Asked, long: Any) -> None:
    begun, stream = asked.stream(**LONG)
    whole = asked(**LONG)
    begun.wait()
    until_running(trainer, 2)
    assert trainer.done("POST", "/pause?mode=keep") == {"status": "paused"}
    held = asked(**LONG)
    assert trainer.done("GET", "/is_paused") == {"is_paused": True}
    assert trainer.http.get("/health").json() == {"status": "paused"}
    assert "detjax_paused 1.0" in trainer.http.get("/metrics").text
    steps = trainer.running.engine.stats()
    wait_until(lambda: trainer.running.engine.busy_seconds == 0)  # no step is computed
    assert trainer.running.engine.stats() == steps
    assert not any(future.done() for future in (stream, whole, held))
    assert trainer.done("POST", "/resume") == {"status": "resumed"}
    for answer in (whole, held):
        assert answer.result()["choices"][0] == long
    assert text_of(stream.result()) == long["text"]
    assert stream.result()[-1]["choices"][0]["receipt"] == long["receipt"]


def test_a_pause_that_waits_lets_requests_finish_and_holds_new_ones(trainer: Trainer, asked: Asked, long: Any) -> None:
    first = asked(**LONG)
    until_running(trainer)
    assert trainer.done("POST", "/pause?wait_for_inflight_requests=true") == {"status": "paused"}
    assert trainer.running.engine.stats().running == 0
    held = asked(**LONG)
    assert first.result()["choices"][0] == long
    assert trainer.done("POST", "/abort_request", json={"rid": "unknown"}) == {"success": True, "aborted": 0}
    assert not held.done()
    trainer.done("POST", "/resume")
    assert held.result()["choices"][0] == long


def test_a_pause_that_aborts_gives_requests_the_tokens_so_far(
    trainer: Trainer, asked: Asked, long: Any, versions: Any, tmp_path: Path
) -> None:
    begun, stream = asked.stream(**LONG, stop=["never occurs"])
    whole = asked(**LONG, n=2)
    begun.wait()
    until_running(trainer, 3)
    trainer.done("POST", "/pause")
    chunks, answer = stream.result(), whole.result()
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == "abort"
    assert "finish_reason" not in last["receipt"]
    # The last token may be the first bytes of a character.
    assert long["text"].startswith(text_of(chunks).rstrip("\ufffd"))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
    assert long["text"].startswith(answer["choices"][0]["text"].rstrip("\ufffd"))
    trainer.done("POST", "/resume")
    known = {fingerprint(versions["one"]): versions["one"]}
    tokens = [choice for choice in answer["choices"] if "receipt" in choice]
    streamed = chunks[-1] | {"choices": [last | {"text": text_of(chunks)}]}
    assert verdicts([answer | {"choices": tokens}, streamed], known, tmp_path) == {"verified"}
    forged = streamed | {"choices": [streamed["choices"][0] | {"finish_reason": "stop"}]}
    assert "verified" not in verdicts([forged], known, tmp_path)


def test_a_resumed_server_ends_a_pause_that_waits(trainer: Trainer, asked: Asked) -> None:
    trainer.done("POST", "/pause?mode=keep")
    trainer.done("POST", "/resume")
    first = asked(**LONG)
    until_running(trainer)
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(trainer.refusal, "POST", "/pause?mode=wait")
        wait_until(lambda: trainer.done("GET", "/is_paused")["is_paused"])
        trainer.done("POST", "/resume")
        assert pausing.result() == (409, "the server was resumed before all calls in flight had finished")
    assert first.result()["choices"][0]["finish_reason"] == "length"


def test_requests_are_aborted_by_either_of_their_names_also_while_they_wait(
    trainer: Trainer, asked: Asked, long: Any
) -> None:
    begun, stream = asked.stream(**LONG)
    named, other = asked(request_id="mine", **LONG), asked(**LONG)
    begun.wait()
    until_running(trainer, 3)
    trainer.done("POST", "/pause?mode=keep")
    held = asked(request_id="held", **LONG, n=2)
    wait_until(lambda: trainer.running.app.state.gate.in_flight == 4)
    assert trainer.done("POST", "/abort_request", json={"rid": ["mine", "held"]})["aborted"] == 2
    assert named.result()["choices"][0]["finish_reason"] == "abort"
    waited = held.result()
    assert [choice["finish_reason"] for choice in waited["choices"]] == ["abort", "abort"]
    assert waited["usage"]["completion_tokens"] == 0
    assert "receipt" not in waited["choices"][0]
    assert not stream.done() and not other.done()
    trainer.done("POST", "/resume")
    assert other.result()["choices"][0] == long
    assert text_of(stream.result()) == long["text"]


def test_requests_are_aborted_by_the_names_in_their_bodies_at_vllms_path_and_at_sglangs(
    trainer: Trainer, asked: Asked, long: Any
) -> None:
    begun, stream = asked.stream(**LONG, rid="streamed")
    named, other, last = asked(**LONG, request_id="mine"), asked(**LONG, rid="other"), asked(**LONG)
    begun.wait()
    until_running(trainer, 4)
    trainer.done("POST", "/pause?mode=keep")
    try:
        assert trainer.done("POST", "/abort_requests", json={"request_ids": ["mine"]}) == {
            "status": "aborted",
            "aborted": 1,
        }
        assert trainer.done("POST", "/abort_request", json={"rid": "streamed"})["aborted"] == 1
        assert named.result()["choices"][0]["finish_reason"] == "abort"
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "abort"
        assert not other.done() and not last.done()
        assert trainer.done("POST", "/abort_requests", json={})["aborted"] == 2
        assert {one.result()["choices"][0]["finish_reason"] for one in (other, last)} == {"abort"}
    finally:  # otherwise a failure would wait for frozen requests
        trainer.done("POST", "/resume")
    assert asked(**LONG).result()["choices"][0] == long


def test_all_requests_are_aborted_or_the_one_with_the_id_of_its_answer(trainer: Trainer, asked: Asked) -> None:
    with trainer.http.stream("POST", "/v1/completions", json=question("A prompt", stream=True, **LONG)) as response:
        lines = response.iter_lines()
        name = json.loads(next(lines)[6:])["id"]
        others = [asked(**LONG), asked(**LONG)]
        until_running(trainer, 3)
        trainer.done("POST", "/pause?mode=keep")
        assert trainer.done("POST", "/abort_request", json={"rid": name})["aborted"] == 1
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert trainer.done("POST", "/abort_request", json={"abort_all": True})["aborted"] == 2
    assert {one.result()["choices"][0]["finish_reason"] for one in others} == {"abort"}
    trainer.done("POST", "/resume")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("streams", [True, False])
def test_chats_and_responses_say_that_they_were_aborted(
    trainer: Trainer, path: str, streams: bool, versions: Any, tmp_path: Path
) -> None:
    body: dict[str, Any] = {"model": MODEL, "stream": streams, "receipt": True, "ignore_eos": True}
    if path == "/v1/responses":
        body |= {"input": "Who?", "max_output_tokens": 200}
    else:
        body |= {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(trainer.http.post, path, json=body)
        until_running(trainer)
        trainer.done("POST", "/abort_request", json={"abort_all": True})
        answer = asking.result()
    assert answer.status_code == 200
    if streams:
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        last = events[-1]["response"] if path == "/v1/responses" else events[-1]
        assert events[-1].get("type", "response.incomplete") == "response.incomplete"
    else:
        last = answer.json()
    if path == "/v1/responses":
        assert (last["status"], last["output"][-1]["status"]) == ("cancelled", "incomplete")
        if "receipt" in last:
            assert verdicts([last], {fingerprint(versions["one"]): versions["one"]}, tmp_path) == {"verified"}
    else:
        assert last["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("POST", "/pause?mode=freeze", None, "mode is 'freeze'; accepted: abort, wait, keep"),
        ("POST", "/pause?clear_cache=maybe", None, "clear_cache is 'maybe'; accepted: true, false"),
        ("POST", "/pause?moed=keep", None, "there is no parameter 'moed'; accepted: mode, clear_cache"),
        ("POST", "/resume?mode=keep", None, "there is no parameter 'mode'; accepted: none"),
        ("POST", "/sleep?level=3", None, "level is '3'; accepted: 1, 2"),
        ("POST", "/sleep?level=2&mode=keep", None, "level is 2 and mode is 'keep'; accepted: mode abort or wait"),
        ("POST", "/wake_up?tags=weights&tags=disk", None, "tags has 'disk'; accepted: weights, kv_cache"),
        ("POST", "/abort_request", {}, "rid is missing; accepted: the id of an answer"),
        ("POST", "/abort_request", {"rid": ""}, "rid is missing"),
        ("POST", "/abort_request", {"rids": ["a"]}, "there is no field rids"),
        ("POST", "/abort_request", {"rid": 1}, "rid is 1; accepted: a string of up to 256 characters, or a list of"),
        ("POST", "/abort_request", {"rid": ["a", 1]}, "rid.1 is 1: Input should be a valid string"),
        ("POST", "/abort_requests", {"request_ids": 1}, "request_ids is 1; accepted: a string of up to 256 characters"),
        ("GET", "/is_paused?mode=keep", None, "there is no parameter 'mode'; accepted: none"),
        ("GET", "/is_sleeping?level=1", None, "there is no parameter 'level'; accepted: none"),
    ],
)
def test_bad_control_requests_say_what_is_accepted(
    trainer: Trainer, method: str, path: str, body: Any, says: str
) -> None:
    status, message = trainer.refusal(method, path, json=body)
    assert status == 400
    assert says in message


# --- sleep ------------------------------------------------------------------------------------------------------------


def test_sleep_refuses_requests_and_wakes_with_the_same_bits_and_programs(
    trainer: Trainer, asked: Asked, long: Any
) -> None:
    whole = asked(**LONG)
    begun, stream = asked.stream(**LONG)
    begun.wait()
    until_running(trainer, 2)
    assert trainer.done("POST", "/sleep?level=1&mode=keep") == {"status": "sleeping", "level": 1}
    assert trainer.done("GET", "/is_sleeping") == {"is_sleeping": True}
    assert trainer.http.get("/health").json() == {"status": "sleeping"}
    assert "detjax_sleeping 1.0" in trainer.http.get("/metrics").text
    refused = trainer.http.post("/v1/completions", json=question("x"))
    assert refused.status_code == 503
    assert "the server is asleep. POST /wake_up first" in refused.json()["error"]["message"]
    assert trainer.done("POST", "/sleep") == {"status": "sleeping", "level": 1}
    trainer.done("POST", "/reset_prefix_cache")
    assert not whole.done() and not stream.done()
    assert trainer.done("POST", "/wake_up?tags=kv_cache") == {"is_sleeping": True}
    with compiled_programs() as compiled:
        assert trainer.done("POST", "/wake_up?tags=weights") == {"is_sleeping": False}
        assert whole.result()["choices"][0] == long
        assert text_of(stream.result()) == long["text"]
    assert not [name for name in compiled if name.startswith(("jit(_forward", "jit(_sample"))]
    assert trainer.done("POST", "/wake_up") == {"is_sleeping": False}


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_sleep_ends_requests_in_flight_as_its_mode_says(trainer: Trainer, asked: Asked, long: Any, mode: str) -> None:
    whole = asked(**LONG)
    until_running(trainer)
    trainer.done("POST", f"/sleep?mode={mode}")
    choice = whole.result()["choices"][0]
    assert choice == long if mode == "wait" else choice["finish_reason"] == "abort"
    trainer.done("POST", "/wake_up")


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind != "pinned_host")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_back_the_memory_of_weights_and_cache(directory: Path, versions: Any, level: int) -> None:
    before = live_bytes()
    model, tokenizer = models.load(directory / "one", progress=False)
    assert tokenizer is not None
    with Engine(model, tokenizer, **SIZES) as engine:
        app = create_app(engine, model, tokenizer, Settings(MODEL, control_key=KEY, weights_directory=directory))
        del model
        from starlette.testclient import TestClient

        with TestClient(app, headers=HEADERS) as client:
            answer = client.post("/v1/completions", json=question("x", seed=1))
            awake = live_bytes() - before
            assert client.post(f"/sleep?level={level}").status_code == 200
            assert live_bytes() - before < awake / 100
            client.post("/wake_up")
            if level == 2:
                client.post("/update_weights_from_disk", json={"model_path": "one"})
            assert (
                client.post("/v1/completions", json=question("x", seed=1)).json()["choices"] == answer.json()["choices"]
            )
            assert live_bytes() - before <= awake * 1.01
        app.state.texts.close()


def test_a_server_does_not_claim_a_deeper_sleep_than_it_has(trainer: Trainer) -> None:
    trainer.done("POST", "/sleep?level=1")
    assert trainer.done("POST", "/sleep?level=1") == {"status": "sleeping", "level": 1}
    status, message = trainer.refusal("POST", "/sleep?level=2")
    kept = "the server is asleep already, and the host keeps the weights. POST /wake_up first, then sleep"
    assert (status, message) == (409, kept)
    trainer.done("POST", "/wake_up?tags=weights")
    status, message = trainer.refusal("POST", "/sleep?level=1")
    assert (status, "the devices hold weights." in message) == (409, True)
    trainer.done("POST", "/wake_up")


def test_after_deep_sleep_the_server_needs_all_weights(trainer: Trainer, directory: Path, long: Any) -> None:
    trainer.done("POST", "/sleep?level=2")
    update = {"json": {"model_path": "one"}}
    status, message = trainer.refusal("POST", "/update_weights_from_disk", **update)
    assert (status, message) == (
        409,
        "the weights are asleep. POST /wake_up?tags=weights first, then update them",
    )
    trainer.done("POST", "/wake_up?tags=weights")
    part = directory / "part.safetensors"
    write_part(directory / "one", part, ["model.embed_tokens.weight"])
    status, message = trainer.refusal("POST", "/update_weights_from_disk", json={"model_path": part.name})
    assert status == 400
    assert "is missing; accepted: all tensors of the model, because its weights were dropped" in message
    trainer.done("POST", "/wake_up")
    refused = trainer.http.post("/v1/completions", json=question("x"))
    assert (refused.status_code, "has no weights" in refused.text) == (503, True)
    assert trainer.http.get("/health").json() == {"status": "without weights"}
    trainer.done("POST", "/update_weights_from_disk", **update)
    assert trainer.ask(**LONG)["choices"][0] == long


def write_part(checkpoint: Path, file: Path, names: list[str]) -> None:
    """Writes some tensors of a checkpoint to a file."""
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(checkpoint / "model.safetensors")
    safetensors.numpy.save_file({name: tensors[name] for name in names}, file)


def test_a_full_server_refuses_requests_while_it_is_paused(directory: Path, versions: Any) -> None:
    with controlled(directory, max_in_flight=1) as trainer, ThreadPoolExecutor(1) as pool:
        trainer.done("POST", "/pause?mode=keep")
        held = pool.submit(trainer.ask)
        wait_until(lambda: trainer.running.app.state.guard.in_flight == 1)
        assert trainer.http.post("/v1/completions", json=question("x")).status_code == 429
        trainer.done("POST", "/resume")
        assert held.result()["choices"][0]["finish_reason"] == "length"
