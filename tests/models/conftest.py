"""Tokenizers of each kind."""

from pathlib import Path

import pytest

from detjax.demo import CHECKPOINT
from detjax.models import Tokenizer
from tests.support.tokenizers import with_byte_fallback

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The fixture's tokenizer."""
    loaded = Tokenizer.load(FIXTURE)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module", params=["byte-level", "byte-level with a normalizer", "byte fallback"])
def some_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of each kind in turn."""
    if request.param == "byte fallback":
        return with_byte_fallback(tmp_path_factory.mktemp("tokenizer"))
    loaded = Tokenizer.load(FIXTURE if "normalizer" in request.param else CHECKPOINT)
    assert loaded is not None
    return loaded
