"""A cache of compiled programs on disk. All files are complete and written by this user.

A file's name is a digest of everything that the program depends on, which is known without tracing it: tracing a
model's programs takes minutes, and loading them takes a second or two.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import logging
import os
import stat
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Final

import jax
from flax import nnx

from detjax.engine.program import Programs
from detjax.runtime import fingerprints, fusions

_UNPUBLISHED: Final = ".unpublished-"
_SUFFIX: Final = ".program"
_LIBRARIES: Final = ("flax", "jaxtyping")
"""Libraries that tracing uses and that are not in the fingerprint, because no bit depends on them."""
_OWN_PACKAGES: Final = {"detjax", "flax"}
"""Packages whose sources are part of the names."""
_log: Final = logging.getLogger(__name__)


def prepare_cache(directory: Path) -> None:
    """Makes the directory of a cache, private to this user, unless it exists.

    Anyone who can write to the directory can run programs in the processes that use it. So it must belong to this user,
    and no other user may have write access.

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


def has_programs(directory: Path) -> bool:
    """Returns whether the directory of a cache has any programs of this fingerprint."""
    return any(_subdirectory(directory).glob(f"*{_SUFFIX}"))


def _subdirectory(directory: Path) -> Path:
    return directory / fingerprints.fingerprint().digest


class ProgramCache:
    """The programs of one step loop in a directory.

    Each fingerprint has its own subdirectory, so that equal fingerprints promise equal bits.

    A file gets its name when it is complete, so a killed process or a full disk leaves no partial file. A file that was
    corrupted later is detected by its digest, removed, and written again.
    """

    def __init__(self, directory: Path, programs: Programs) -> None:
        """A cache in a directory, which is made if it does not exist.

        Args:
            directory: the directory.
            programs: the programs to look up. If their networks have a class from another package, whose source is
                unknown, nothing is loaded or stored.

        Raises:
            OSError: the directory cannot be made or written to, or it is not private; see `prepare_cache`.
        """
        self._directory = _subdirectory(directory)
        prepare_cache(directory)
        prepare_cache(self._directory)
        self._names = _names(programs)
        self._failures: list[OSError] = []
        for path in self._directory.glob(f"{_UNPUBLISHED}*"):
            if path.is_file() and not _is_locked(path):
                path.unlink(missing_ok=True)

    def load(self, key: Hashable) -> bytes | None:
        """Returns the content of a program's file, or None if it does not exist."""
        try:
            content = self._path(key).read_bytes()
        except (OSError, KeyError):
            return None
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() == content[:size]:
            return content[size:]
        self.remove(key)
        return None

    def store(self, key: Hashable, content: bytes) -> None:
        """Writes a program's file. On failure, such as a full disk, no file is left; see `report_failures`."""
        if key not in self._names:
            return
        try:
            with tempfile.NamedTemporaryFile(prefix=_UNPUBLISHED, dir=self._directory, delete=False) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # marks the file as being written for other processes
                try:
                    file.write(hashlib.sha256(content).digest())
                    file.write(content)
                    file.flush()
                    os.replace(file.name, self._path(key))
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            self._failures.append(error)

    def remove(self, key: Hashable) -> None:
        """Removes a program's file."""
        with contextlib.suppress(OSError, KeyError):
            self._path(key).unlink(missing_ok=True)

    def report_failures(self) -> None:
        """Logs one line about all programs that could not be written, if any."""
        if self._failures:
            _log.warning(
                "%d of the compiled programs could not be written to %r and are compiled again at the next start; the "
                "first one: %s",
                len(self._failures),
                str(self._directory),
                self._failures[0].strerror,
            )

    def _path(self, key: Hashable) -> Path:
        return self._directory / f"{self._names[key]}{_SUFFIX}"


def _names(programs: Programs) -> dict[Hashable, str]:
    """Returns the name of each program: a digest of everything it depends on except the fingerprint.

    This includes the content of this package's files, for developers.
    """
    nodes = [node for network in programs.networks for node in network.graph.nodes]
    classes = {node.type for node in nodes if isinstance(node, nnx.graphlib.NodeDef)}
    modules = {one.__module__.partition(".")[0] for one in classes if isinstance(one, type)}
    if not modules <= _OWN_PACKAGES:
        return {}
    networks = [(one.graph, one.tree, one.paths, one.order) for one in programs.networks]
    # The fingerprint leaves out fusions that change no bit.
    common = repr((_sources(), fusions.unfused(), networks, jax.tree.leaves(programs.parameters)))
    names = {}
    for key, program in programs.by_key().items():
        leaves, tree = jax.tree.flatten(program.args)
        names[key] = hashlib.sha256(repr((common, key, leaves, str(tree))).encode()).hexdigest()
    return names


@functools.cache
def _sources() -> str:
    """Returns a digest of this package's files and of the versions of the libraries used in tracing."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode())
        digest.update(content)
    for library in _LIBRARIES:
        digest.update(f"{library} {importlib.metadata.version(library)}\n".encode())
    return digest.hexdigest()


def _is_locked(path: Path) -> bool:
    """Returns whether another process is writing the file."""
    try:
        # Symbolic links are not followed, because they may be an attack.
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
