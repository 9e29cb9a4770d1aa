"""A compilation cache for the tests, kept between runs and shared by the processes of a run.

The key of a program has its HLO and all options of the compiler, so changed code is compiled again.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import jax
import pytest
from jax._src import lru_cache
from jax.experimental.compilation_cache import compilation_cache

FOLDER: Final = Path(__file__).resolve().parents[2] / ".jax_cache" / "tests"
_MAX_AGE: Final = 14 * 24 * 3600
"""Seconds after which a program that no test has used is deleted."""


def pytest_configure() -> None:
    """Makes JAX keep the programs of this process. The processes that it starts keep none."""
    if find_spec("libtpu") is not None:
        return  # JAX cannot load programs for TPUs that are not there
    lru_cache.LRUCache.put = _put
    lru_cache.LRUCache.get = _get
    jax.config.update("jax_compilation_cache_dir", str(FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# JAX writes files in place, so that another process could read half of one.
def _put(self: lru_cache.LRUCache, key: str, value: bytes) -> None:
    if not (FOLDER / key).exists():
        with tempfile.NamedTemporaryFile(dir=FOLDER, delete=False) as file:
            file.write(value)
        os.replace(file.name, FOLDER / key)


def _get(self: lru_cache.LRUCache, key: str) -> bytes | None:
    try:
        content = (FOLDER / key).read_bytes()
    except FileNotFoundError:
        return None
    os.utime(FOLDER / key)
    return content


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and FOLDER.exists():
        for file in FOLDER.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another run has renamed or deleted it
                if time.time() - file.stat().st_mtime > _MAX_AGE:
                    file.unlink()


@contextlib.contextmanager
def no_kept_programs() -> Iterator[None]:
    """Compiles all programs: XLA cannot serialize a CPU program that was loaded from the cache."""
    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is a cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()
