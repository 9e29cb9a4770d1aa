"""One engine and one server for all tests that leave them as they were."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from detjax import models
from detjax.engine import Engine
from detjax.models import Decoder, DecoderConfig, GenerationDefaults, ModelMetadata, Tokenizer
from tests.server.running_server import FIXTURE, MODEL, Running, serving
from tests.server.scripted import Client, scripted
from tests.server.threads_as_processes import Machine, installed
from tests.support.one_layer import one_layer


@pytest.fixture(scope="session")
def loaded() -> tuple[Decoder, Tokenizer]:
    """A model of one layer. Its checkpoint recommends no filters, which saves compiling programs that filter."""
    small, tokenizer = one_layer(FIXTURE, seed=1)
    assert small.generation_defaults is not None
    small.generation_defaults = dataclasses.replace(small.generation_defaults, do_sample=False)
    return small, tokenizer


@pytest.fixture(scope="session")
def checkpoint(loaded: tuple[Decoder, Tokenizer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model's checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint") / MODEL
    models.save(loaded[0], path, tokenizer=loaded[1])
    return path


@pytest.fixture(scope="session")
def engine(loaded: tuple[Decoder, Tokenizer]) -> Iterator[Engine]:
    with Engine(*loaded, max_samples=16, token_budget=64, max_length=400) as one:
        yield one


@pytest.fixture(scope="session")
def server(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> Iterator[Running]:
    with serving(engine, loaded) as running:
        yield running
    assert engine.stats().pages_in_use == 0


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as one:
        yield one


@pytest.fixture(scope="session")
def metadata() -> ModelMetadata:
    """The model's configuration. Its checkpoint ends samples at token 509, and recommends nothing else."""
    raw = json.loads((FIXTURE / "config.json").read_text())
    return ModelMetadata(DecoderConfig.from_hugging_face(raw, "config.json"), GenerationDefaults(eos_token_ids=(509,)))


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """The model's tokenizer, without the model."""
    tokenizer = Tokenizer.load(FIXTURE)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def api(metadata: ModelMetadata, words: Tokenizer) -> Iterator[Client]:
    """A client of a server whose engine's answers are written."""
    with scripted(metadata, words) as client:
        yield client


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose processes are threads. They are ready, wait for calls, and answer none."""
    return installed(monkeypatch)
