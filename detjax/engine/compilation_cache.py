"""Compiled programs on disk, of which none is ever half-written."""

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
    # XLA's own files would be written in place, and none of our programs needs them.
    "jax_persistent_cache_enable_xla_caches": "none",
}


@contextlib.contextmanager
def compilation_cache(directory: Path | None) -> Iterator[None]:
    """A context whose programs are looked for in `directory` before they are compiled, and left there; None: compiled.

    JAX writes the files of its cache in place, so that a process which is killed may leave half of one, which is then
    read and complained of at every start. Here it writes into a directory of the process's own, in which the programs
    that there are can be found as well; at the end, files that are whole are moved. What a killed process leaves is
    removed by the next one.

    A fingerprint has programs of its own, so that equal fingerprints go on promising equal bits.

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
            for left in published.glob(f"{_UNPUBLISHED}*"):
                with contextlib.suppress(BlockingIOError), _locked(left, fcntl.LOCK_NB):
                    shutil.rmtree(left, ignore_errors=True)
            own = Path(tempfile.mkdtemp(prefix=_UNPUBLISHED, dir=published))
            until_the_end.callback(shutil.rmtree, own, ignore_errors=True)
            until_the_end.enter_context(_locked(own))
        for path in _programs(published):
            _link(path, own / path.name)
        with _used_by_jax(own):
            yield
        for path in _programs(own):
            if not (published / path.name).exists():
                path.replace(published / path.name)


@contextlib.contextmanager
def _locked(directory: Path, flags: int = 0) -> Iterator[None]:
    """A context that one process at a time is in, and that a process leaves when it ends, however it does."""
    with open(directory / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | flags)
        yield


def _programs(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file() and path.name != _LOCK]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
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
