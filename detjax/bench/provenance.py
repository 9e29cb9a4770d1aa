"""The provenance of a result: command, commit, versions and fingerprint, which every result file records."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform as host
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import detjax
from detjax.runtime.fingerprints import Fingerprint, fingerprint

COMMIT_VARIABLE: Final = "DETJAX_COMMIT"
"""The environment variable that names the commit if the code has no git history."""

_CODE: Final = ("detjax", "benchmarks", ":!benchmarks/results")
"""The paths whose changes may affect a result."""
_VERSIONS: Final = ("detjax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "numpy")


def commit(checkout: Path | None = None) -> str | None:
    """Returns the commit of the running code, ending in "+changes" if tracked code differs from that commit.

    Args:
        checkout: the folder that contains `detjax/`. Default: the imported package's.

    Returns:
        The commit from git, else from the environment variable DETJAX_COMMIT, else None.
    """
    name = _commit_by_git(checkout or Path(detjax.__file__).resolve().parent.parent)
    return os.environ.get(COMMIT_VARIABLE) or None if name is None else name


@functools.cache
def _commit_by_git(checkout: Path) -> str | None:
    """The commit at this process's first call; None without git history."""
    # An installed package may be inside another repository, which does not track it.
    tracked = _git(checkout, "ls-files", "--error-unmatch", "detjax/version.py")
    name = None if tracked is None else _git(checkout, "rev-parse", "HEAD")
    if name is None:
        return None
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return name + ("+changes" if changes else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails or git is missing."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed libraries that affect results."""
    installed = {"python": host.python_version()}
    for name in _VERSIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def heading(command: str, results_fingerprint: Fingerprint | None = None) -> dict[str, Any]:
    """Returns the first fields of a result file. Default: this process's fingerprint, under the current backend."""
    return {
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "fingerprint": dataclasses.asdict(results_fingerprint or fingerprint()),
    }


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a result as JSON, and creates its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
