"""A cache of compiled programs on disk, in which no file is ever half-written."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from detjax import fingerprints

_UNPUBLISHED: Final = ".unpublished-"
_LOCK: Final = ".lock"
_OPTIONS: Final = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # XLA would write its own files in place, and none of our programs needs them.
    "jax_persistent_cache_enable_xla_caches": "none",
}


@contextlib.contextmanager
def compilation_cache(directory: Path | None) -> Iterator[None]:
    """A context that looks for programs in `directory` before it compiles them, and adds new ones to it.

    JAX writes the files of its cache in place. A process that is killed may so leave half a file, of which JAX then
    complains at every start. In this context JAX writes to a private directory, which begins with links to the programs
    in the cache. At the end, the context moves the new files, which are whole, to the cache. The next process removes
    the private directory of a killed one.

    Each fingerprint has its own directory, so that equal fingerprints promise equal bits.

    Args:
        directory: the cache; None: compile every program, and keep none.

    Raises:
        OSError: the directory cannot be made or written to.
    """
    if directory is None:
        yield
        return
    published = directory / fingerprints.fingerprint().digest
    published.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as until_the_end:
        with _locked(published):
            for abandoned in published.glob(f"{_UNPUBLISHED}*"):
                with contextlib.suppress(BlockingIOError), _locked(abandoned, fcntl.LOCK_NB):
                    shutil.rmtree(abandoned, ignore_errors=True)
            private = Path(tempfile.mkdtemp(prefix=_UNPUBLISHED, dir=published))
            until_the_end.callback(shutil.rmtree, private, ignore_errors=True)
            until_the_end.enter_context(_locked(private))
        for path in _programs(published):
            _link(path, private / path.name)
        with _used_by_jax(private):
            yield
        for path in _programs(private):
            if not (published / path.name).exists():
                path.replace(published / path.name)


@contextlib.contextmanager
def _locked(directory: Path, flags: int = 0) -> Iterator[None]:
    """A context for one process at a time. A process leaves it when it ends, even if it is killed."""
    with open(directory / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | flags)
        yield


def _programs(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file() and path.name != _LOCK]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links
        shutil.copyfile(source, target)


@contextlib.contextmanager
def _used_by_jax(directory: Path) -> Iterator[None]:
    options = {"jax_compilation_cache_dir": str(directory)} | _OPTIONS
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()
