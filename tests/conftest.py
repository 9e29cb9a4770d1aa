"""Settings for every test: typed arrays are checked, JAX converts and broadcasts nothing silently."""

import gc
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

pytest_plugins = ("tests.support.case_sampling", "tests.support.cpu_times", "tests.support.hardware")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_MOST_PROGRAMS = 500
"""Which a process keeps: each is mapped into some 45 pieces of memory, of which Linux allows a process 65,530, and XLA
crashes where there is none left."""
_kept = 0


def _count(event: str, *_: object, **__: object) -> None:
    global _kept
    if event == "/jax/core/compile/backend_compile_duration":
        _kept += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def pytest_collection_finish() -> None:
    # What is imported by now stays. Looking through it for garbage, again and again, was a twentieth of the time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def forgotten_programs() -> Iterator[None]:
    """What tests compiled is forgotten before it is too much."""
    global _kept
    yield
    if _kept > _MOST_PROGRAMS:
        jax.clear_caches()
        _kept = 0
