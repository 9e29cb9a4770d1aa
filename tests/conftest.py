"""Settings for every test: typed arrays are checked, JAX converts and broadcasts nothing silently."""

import os
from collections.abc import Iterator

import jaxtyping

# The threads of Pallas' interpreter wait for one another inside XLA's pool, which has a worker for each processor:
# where there are two, waits at barriers take them all, and none is left to end them. XLA reads this when it starts.
os.environ.setdefault("PJRT_NPROC", "16")

with jaxtyping.install_import_hook("detjax", "beartype.beartype"):
    import detjax  # noqa: F401

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs() -> Iterator[None]:
    """What a file's tests compiled goes with them: a process may map 65,530 pieces of memory, and XLA crashes
    where programs have taken them all."""
    yield
    jax.clear_caches()
