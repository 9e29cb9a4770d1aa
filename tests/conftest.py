"""Settings for every test: typed arrays are checked, JAX converts and broadcasts nothing silently."""

import gc
import os
from collections.abc import Iterator

# The threads of Pallas' interpreter wait for one another inside XLA's pool, which has a worker for each processor:
# where there are two, waits at barriers take them all, and none is left to end them. XLA reads this when it starts.
os.environ.setdefault("PJRT_NPROC", "16")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # see `tests.support.tiers`

from tests.support.type_checks import checked

with checked(["detjax", "benchmarks"]):
    import detjax  # noqa: F401

import jax
import pytest

pytest_plugins = tuple(
    f"tests.support.{name}"
    for name in ("case_sampling", "cpu_times", "deadlines", "hardware", "kept_programs", "tiers")
)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_MAX_PROGRAMS = 500
"""Maximum number of compiled programs that a process keeps. Each takes about 45 memory mappings, Linux allows a process
65,530, and XLA crashes without a free one."""
_kept = 0


def _count(event: str, *_: object, **__: object) -> None:
    global _kept
    if event == "/jax/core/compile/backend_compile_duration":
        _kept += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def pytest_collection_finish() -> None:
    # Imported objects stay. Scanning them for garbage over and over took a twentieth of the time.
    gc.collect()
    gc.freeze()
    # Scanning new ones less often saves another fortieth.
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture(autouse=True)
def forgotten_programs() -> Iterator[None]:
    """Drops compiled programs before they are too many."""
    global _kept
    yield
    if _kept > _MAX_PROGRAMS:
        jax.clear_caches()
        _kept = 0
