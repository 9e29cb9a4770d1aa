"""An engine that the tests of training share, since it compiles for longer than they run."""

from collections.abc import Iterator

import pytest

from detjax.engine import Engine
from tests.rl import policies


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine for models like `policies.policy()`. A test replaces its weights before it samples."""
    with Engine(policies.policy(), policies.tokenizer(), **policies.ENGINE) as one:
        yield one
