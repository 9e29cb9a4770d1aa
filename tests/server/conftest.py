"""One server for the tests that leave it as it was."""

from collections.abc import Iterator

import openai
import pytest
from running_server import CHECKPOINT, Running, serving

from detjax import models
from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer


@pytest.fixture(scope="session")
def loaded() -> tuple[Decoder, Tokenizer]:
    model, tokenizer = models.load(CHECKPOINT, dtype="bfloat16", progress=False)
    assert tokenizer is not None
    return model, tokenizer


@pytest.fixture(scope="session")
def engine(loaded: tuple[Decoder, Tokenizer]) -> Iterator[Engine]:
    with Engine(*loaded, max_samples=16, token_budget=64, max_tokens=400) as one:
        yield one


@pytest.fixture(scope="session")
def server(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> Iterator[Running]:
    with serving(engine, loaded) as running:
        yield running
    assert engine.pages_in_use == 0


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as one:
        yield one
