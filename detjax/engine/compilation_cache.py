"""A cache of compiled programs on disk, in which every file is whole and written by this user."""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
from jax._src.compilation_cache import decompress_executable
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from detjax import fingerprints

_log: Final = logging.getLogger("detjax.engine")
_UNPUBLISHED: Final = ".unpublished-"
_LOCK: Final = ".lock"
_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"
"""The first bytes of a file that JAX compressed with Zstandard, where it is installed; zlib has others."""
_FAILED_WRITE: Final = "Error writing persistent compilation cache entry"
"""The beginning of JAX's warning of a program that it could not write."""
_OPTIONS: Final = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # XLA would write its own files in place, and none of our programs needs them.
    "jax_persistent_cache_enable_xla_caches": "none",
}


def prepare_cache(directory: Path) -> None:
    """Makes the directory of a cache, private to this user, unless it is there.

    Whoever can write to the directory can run programs in the processes that use it. So it has to belong to this user,
    and nobody else may be able to write to it.

    Raises:
        OSError: the directory cannot be made or written to, or it is not private. The message names it.
    """
    name = f"the directory of compiled programs, {str(directory)!r},"
    accepted = "accepted: a directory that belongs to this user and that nobody else can write to"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise OSError(f"{name} cannot be made ({error.strerror}); {accepted}") from error
    if status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, and this process to user {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o}, which chmod go-w changes)"
    elif not os.access(directory, os.W_OK | os.X_OK):
        problem = "cannot be written"
    else:
        return
    raise PermissionError(f"{name} {problem}; {accepted}")


@contextlib.contextmanager
def compilation_cache(directory: Path | None) -> Iterator[None]:
    """A context that looks for programs in `directory` before it compiles them, and adds new ones to it.

    JAX writes the files of its cache in place. A process that is killed, or a full disk, may so leave half a file, of
    which JAX then complains at every start. In this context JAX writes to a private directory, which begins with links
    to the programs in the cache. At the end, the context moves the new files that are whole to the cache. The next
    process removes the private directory of a killed one, and files of the cache that are not whole.

    Each fingerprint has its own directory, so that equal fingerprints promise equal bits.

    Args:
        directory: the cache; None: compile every program, and keep none.

    Raises:
        OSError: the directory cannot be made or written to, or it is not private; see `prepare_cache`.
    """
    if directory is None:
        yield
        return
    published = directory / fingerprints.fingerprint().digest
    prepare_cache(directory)
    prepare_cache(published)
    with contextlib.ExitStack() as until_the_end:
        with _locked(published):
            for abandoned in published.glob(f"{_UNPUBLISHED}*"):
                with contextlib.suppress(BlockingIOError), _locked(abandoned, fcntl.LOCK_NB):
                    shutil.rmtree(abandoned, ignore_errors=True)
            private = Path(tempfile.mkdtemp(prefix=_UNPUBLISHED, dir=published))
            until_the_end.callback(shutil.rmtree, private, ignore_errors=True)
            until_the_end.enter_context(_locked(private))
        for path in _programs(published):
            if _is_whole(path):
                _link(path, private / path.name)
            else:
                path.unlink(missing_ok=True)
        with _failed_writes_told_once(directory), _used_by_jax(private):
            yield
        for path in _programs(private):
            if not (published / path.name).exists() and _is_whole(path):
                path.replace(published / path.name)


@contextlib.contextmanager
def _locked(directory: Path, flags: int = 0) -> Iterator[None]:
    """A context for one process at a time. A process leaves it when it ends, even if it is killed."""
    # The file is neither emptied nor looked for behind a symbolic link: it may be somebody's trap.
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(lock)


def _programs(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file() and path.name != _LOCK]


def _is_whole(path: Path) -> bool:
    """Whether a file of JAX's cache can be decompressed, which half a file cannot."""
    content = path.read_bytes()
    try:
        if content.startswith(_ZSTANDARD):
            decompress_executable(content)
        else:
            zlib.decompress(content)
    except Exception as error:  # each compressor has its own
        # JAX uses zlib where Zstandard is not installed. Then it does not look for the file, but another process may.
        return isinstance(error, zlib.error) and content.startswith(_ZSTANDARD)
    return True


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links
        try:
            shutil.copyfile(source, target)
        except OSError:  # the disk is full: the program is compiled again
            target.unlink(missing_ok=True)


@contextlib.contextmanager
def _failed_writes_told_once(directory: Path) -> Iterator[None]:
    """A context at whose end the log has one line about all programs that JAX could not write, for which JAX warns."""
    failures: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_others(message: Warning | str, *details: Any, **more: Any) -> None:
            if str(message).startswith(_FAILED_WRITE):
                failures.append(str(message))
            else:
                show(message, *details, **more)

        warnings.filterwarnings("always", re.escape(_FAILED_WRITE))
        warnings.showwarning = show_others
        try:
            yield
        finally:
            if failures:
                reason = " ".join(failures[0].partition("': ")[2].split())
                _log.warning(
                    "%d of the compiled programs could not be written to %r and are compiled again at the next start; "
                    "the first one: %s",
                    len(failures),
                    str(directory),
                    reason,
                )


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
