"""A compilation cache for the tests, kept between runs and shared by the processes of a run.

The key of a program has its HLO and all options of the compiler, so changed code is compiled again.

To run a module of tests in a process of its own that keeps its programs, too:
python -m tests.support.kept_programs MODULE [ARGUMENTS]
"""

import contextlib
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import jax
import pytest
from jax._src import compilation_cache, compiler, lru_cache

FOLDER: Final = Path(__file__).resolve().parents[2] / ".jax_cache" / "tests"
VARIABLES: Final = {
    "JAX_COMPILATION_CACHE_DIR": str(FOLDER),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""The environment of a command whose processes keep their programs. Such a process cannot serialize a kept program, so
the command's own cache has to be off."""
_MAX_AGE: Final = 14 * 24 * 3600
"""Seconds after which a program that no test has used is deleted."""


def pytest_configure() -> None:
    """Makes JAX keep the programs of this process. Those that it starts keep none, except by this module's `main`."""
    if find_spec("libtpu") is None:  # JAX cannot load programs for TPUs that are not there
        _keep()


def main() -> None:
    """Runs a module as a program, which is given the arguments after its name."""
    _keep()
    compiler._cache_write = _write
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


# Of several processes that have joined one another, JAX lets the first one alone write.
def _write(key: str, seconds: float, name: str, backend: Any, executable: Any) -> None:
    compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))


def _keep() -> None:
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


if __name__ == "__main__":
    main()
