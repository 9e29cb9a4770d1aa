"""Settings for every test: typed arrays are checked, JAX converts and broadcasts nothing silently."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import jaxtyping

# The threads of Pallas' interpreter wait for one another inside XLA's pool, which has a worker for each processor:
# where there are two, waits at barriers take them all, and none is left to end them. XLA reads this when it starts.
os.environ.setdefault("PJRT_NPROC", "16")

with jaxtyping.install_import_hook(["detjax", "benchmarks"], "beartype.beartype"):
    import detjax  # noqa: F401

import jax
import pytest

pytest_plugins = ("tests.support.case_sampling", "tests.support.cpu_times", "tests.support.hardware")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_cache = None
if "--xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", "") and find_spec("libtpu") is None:
    # These tests are not about what XLA makes of a program, so a program that many of them need is compiled once. The
    # folder is this process's alone: JAX writes its files in place, so that others could read half of one. JAX cannot
    # load programs for TPUs that are not there.
    _cache = tempfile.mkdtemp(prefix="detjax-tests-")
    jax.config.update("jax_compilation_cache_dir", _cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

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


def pytest_unconfigure() -> None:
    if _cache is not None:
        shutil.rmtree(_cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def forgotten_programs() -> Iterator[None]:
    """Drops compiled programs before they are too many."""
    global _kept
    yield
    if _kept > _MAX_PROGRAMS:
        jax.clear_caches()
        _kept = 0
