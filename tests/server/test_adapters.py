"""Adapters of a running server: each is a model of its own for clients, and they come and go."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detjax import audit, models
from detjax.engine import Engine, EngineConfig, Request, SamplingParams
from detjax.server import LogSettings, ProcessReplicas
from detjax.server.control.adapters import AdapterFiles
from detjax.server.http.errors import ApiError
from detjax.server.replicas.engine import ReplicaOptions
from detjax.server.replicated_engine import ReplicatedEngine
from tests.server.controlled import KEY, SIZES, Trainer, question, saved
from tests.server.running_server import MODEL, serving
from tests.server.threads_as_processes import Answering, Machine, Process, idle
from tests.support.adapters import LINEAR, make_adapter
from tests.support.waits import HANGS_AFTER

SHORT = {"max_tokens": 4, "seed": 3, "temperature": 0.9}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A server with one adapter, `first`, and folders of others in its directory of weights."""
    directory = tmp_path_factory.mktemp("weights")
    saved(directory, ["one"])
    for seed, name in enumerate(("first", "second")):
        make_adapter(directory / name, LINEAR, 4, base=directory / "one", seed=seed)
    loaded: Any = models.load(directory / "one", progress=False, adapters={"first": directory / "first"})
    given = {"control_key": KEY, "weights_directory": directory}
    with Engine(*loaded, **SIZES, max_loras=1) as engine, serving(engine, loaded, **given) as running:
        trainer = Trainer(running)
        with trainer.http:
            yield trainer


def answer(server: Trainer, model: str) -> tuple[str, str, str]:
    """The text, the fingerprint and the model of the receipt of a model's answer."""
    body = server.ask("A prompt", model=model, **SHORT)
    choice = body["choices"][0]
    return choice["text"], body["system_fingerprint"], choice["receipt"]["model"]


def load(server: Trainer, name: str, path: str, **body: Any) -> Any:
    return server.done("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **body})


def test_an_adapter_is_a_model_with_its_own_answers_fingerprint_and_receipts(server: Trainer) -> None:
    base, first = answer(server, MODEL), answer(server, "first")
    assert all(one != other for one, other in zip(base, first, strict=True))
    listed = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
    assert listed["first"]["parent"] == MODEL and "parent" not in listed[MODEL]
    assert [listed[MODEL]["system_fingerprint"], listed["first"]["system_fingerprint"]] == [base[1], first[1]]
    assert server.http.get("/v1/models/first").json() == listed["first"]
    response = server.http.post("/v1/completions", json=question("A prompt", model="nobody"))
    assert response.status_code == 404 and "'first'" in response.json()["error"]["message"]


def test_receipts_of_adapters_are_verified_with_the_adapter_that_answered(server: Trainer) -> None:
    folder: Path = server.running.app.state.weight_files.below(".")
    (base,), (first,) = (
        audit.transcripts_in(server.ask("A prompt", model=name, logprobs=2, **SHORT)) for name in (MODEL, "first")
    )
    altered = dataclasses.replace(base, origin=first.origin).sealed()
    transcripts, refused = [base, first, altered], {}
    for names in ((), ("first", "second"), ("second",)):
        model, tokenizer = models.load(folder / "one", progress=False, adapters={name: folder / name for name in names})
        refused[names] = [verdict.reason for verdict in audit.verify(model, transcripts, tokenizer)]
    # The model with an adapter does not give the true answer of the model alone.
    assert refused.pop(("first", "second")) in ([None, None, "token"], [None, None, "logprob"])
    assert [*refused.values()] == [[None, "model", "model"]] * 2


def test_adapters_are_loaded_replaced_and_unloaded_while_the_server_runs(server: Trainer) -> None:
    first = answer(server, "first")
    load(server, "other", "second")
    second = answer(server, "other")
    assert second != first
    status, message = server.refusal("POST", "/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": "first"})
    assert (status, "loaded already" in message) == (400, True)
    load(server, "other", "first", load_inplace=True)
    assert answer(server, "other") == first  # what counts is the content, not the name
    content = (server.running.app.state.weight_files.below("second") / "adapter_model.safetensors").read_bytes()
    server.done("PUT", "/weights?adapter=other", content=content)
    assert answer(server, "other") == second
    server.done("POST", "/v1/unload_lora_adapter", json={"lora_name": "other"})
    assert server.http.post("/v1/completions", json=question("A prompt", model="other")).status_code == 404
    for path, body in (("unload", {}), ("load", {"lora_path": "../one"}), ("load", {"lora_path": "missing"})):
        name = "other" if path == "load" else "nobody"
        status, _ = server.refusal("POST", f"/v1/{path}_lora_adapter", json={"lora_name": name, **body})
        assert status == (404 if path == "unload" else 400)
    taken = {"lora_name": MODEL, "lora_path": "first"}
    assert server.refusal("POST", "/v1/load_lora_adapter", json=taken)[0] == 400
    assert server.http.post("/v1/load_lora_adapter", json=taken).status_code == 401


def test_each_of_several_engines_has_the_adapters(
    server: Trainer, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = server.running.app.state.weight_files.below(".")
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=5, ignore_eos=True)
    requests = [Request([5, 6, 7], params, adapter=name) for name in ("first", None)]
    expected = server.running.engine.generate(requests)
    monkeypatch.setattr(Engine, "warm_up", lambda self, **options: None)

    def program(process: Process) -> int:
        replica = Answering(process.connection, process.connection.recv()[0])

        async def serve() -> None:
            serving = asyncio.create_task(replica.serve())
            await asyncio.to_thread(process.killed.wait)
            serving.cancel()
            await asyncio.gather(serving, *replica._answering.values(), return_exceptions=True)

        asyncio.run(serve())
        assert replica._engine is not None
        replica._engine.close()
        return 0

    config = EngineConfig(**SIZES, max_loras=1)
    options = ReplicaOptions(folder / "one", config=config, adapters={"first": folder / "first"})
    given: dict[str, Any] = {"log": LogSettings(level="error"), "silence": HANGS_AFTER}
    machine.programs = [program]
    with contextlib.closing(ProcessReplicas(options, 1, **given)) as replicas:
        facts = replicas.facts
        front = ReplicatedEngine(replicas, facts.metadata, facts.tokenizer(), facts.config, replicas.adapters)
        by_object = [dataclasses.replace(requests[0], adapter=front.adapters["first"]), requests[1]]
        for some in (requests, by_object):
            assert asyncio.run(front.generate_async(some)) == expected
        files = AdapterFiles(front, front, server.running.app.state.weight_files, ["one"])
        for call in (files.unload("first"), files.load("second", "second", replaces=False)):
            with pytest.raises(ApiError, match="several engines, whose adapters do not change; accepted: --lora"):
                asyncio.run(call)
        for process in machine.started:
            process.end()
    machine.programs = [idle]  # a replica without adapters
    with pytest.raises(ChildProcessError, match="its adapters have other contents than when the server began"):
        ProcessReplicas(options, 1, **given)


def test_an_adapter_that_does_not_fit_changes_nothing(server: Trainer) -> None:
    folder: Path = server.running.app.state.weight_files.below(".") / "wide"
    make_adapter(folder, ["q_proj"], 17, base=folder.parent / "one")
    status, message = server.refusal("POST", "/v1/load_lora_adapter", json={"lora_name": "w", "lora_path": "wide"})
    assert status == 400 and "rank 17; accepted: up to 16" in message
    assert "w" not in server.running.engine.adapters
