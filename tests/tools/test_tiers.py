"""The tiers of the tests, and XLA's optimizations in each."""

import os

import jax
import jax.numpy as jnp
import pytest

from tests.support import tiers
from tests.support.kept_programs import no_kept_programs


@pytest.mark.parametrize(
    ("path", "tier"),
    [("ops", "numerics"), ("pallas/tpu/test_rows.py", "tpu"), ("test_bits.py", "service"), (".", None)],
)
def test_the_path_sets_the_tier(path: str, tier: str | None) -> None:
    assert tiers.tier_of(tiers.TESTS / path) == tier


@pytest.mark.parametrize("name", tiers.LONG)
def test_every_long_test_exists(name: str) -> None:
    file, _, test = name.partition("::")
    assert f"def {test}(" in (tiers.TESTS / file).read_text() if test else (tiers.TESTS / file).is_file()
    assert tiers.is_long(f"tests/{name}::test_one" if not test else f"tests/{name}")
    assert tiers.is_long(f"tests/{name}[a case]") and not tiers.is_long(f"tests/another_{name}")


def test_only_numerics_are_optimized() -> None:
    def code() -> bytes:
        return jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((64, 64))).compile().runtime_executable().serialize()

    with no_kept_programs():
        is_optimized, unoptimized = tiers._is_optimized, code()
        try:
            tiers._optimize(True)
            assert os.environ["XLA_FLAGS"] == ""
            assert len(code()) < len(unoptimized)
        finally:
            tiers._optimize(is_optimized)
    assert os.environ["XLA_FLAGS"] == tiers.UNOPTIMIZED
