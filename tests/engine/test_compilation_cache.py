"""The cache of compiled programs: whole files only, and only those of the same fingerprint."""

import errno
import fcntl
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax.engine.compilation_cache import compilation_cache, prepare_cache


@pytest.fixture(autouse=True)
def compiled_again() -> Iterator[None]:
    jax.clear_caches()
    yield
    assert jax.config.jax_compilation_cache_dir is None


def compile_something(number: int) -> None:
    assert detjax.jit(lambda x: x * 3 + number)(jnp.ones(4))[0] == 3 + number


def programs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*-cache"))


def test_a_compiled_program_is_found_again(tmp_path: Path) -> None:
    with compilation_cache(tmp_path):
        compile_something(1)
    paths = programs(tmp_path)
    assert paths
    before = [path.read_bytes() for path in paths]
    jax.clear_caches()
    seen: list[str] = []

    def listen(event: str, **_: object) -> None:
        seen.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        with compilation_cache(tmp_path):
            compile_something(1)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert "/jax/compilation_cache/cache_hits" in seen
    assert (programs(tmp_path), [path.read_bytes() for path in paths]) == (paths, before)
    assert [path.name for path in tmp_path.rglob(".*")] == [".lock"]


def test_an_interrupted_process_leaves_no_program(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), compilation_cache(tmp_path):
        compile_something(2)
        raise KeyboardInterrupt
    assert not programs(tmp_path)
    assert [path.name for path in tmp_path.rglob(".*")] == [".lock"]


def test_directories_of_ended_processes_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    with compilation_cache(tmp_path):
        compile_something(3)
    (published,) = tmp_path.iterdir()
    ended, empty, alive = (published / f".unpublished-{name}" for name in ("ended", "empty", "alive"))
    for directory in (ended, empty, alive):
        directory.mkdir()
    (ended / ".lock").touch()
    (ended / "half-cache").write_bytes(b"half")
    with open(alive / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with compilation_cache(tmp_path):
            compile_something(4)
        assert (ended.exists(), empty.exists(), alive.exists()) == (False, False, True)


def test_each_fingerprint_has_its_own_programs(tmp_path: Path) -> None:
    for backend in ("portable", "stock"):
        with detjax.use_backend(backend), compilation_cache(tmp_path):
            compile_something(5)
    assert len(list(tmp_path.iterdir())) == 2


def test_files_that_are_not_whole_are_neither_published_nor_kept(tmp_path: Path) -> None:
    with compilation_cache(tmp_path):
        compile_something(6)
        (private,) = tmp_path.glob("*/.unpublished-*")
        for half in private.glob("*-cache"):  # as a full disk leaves it
            half.write_bytes(half.read_bytes()[:-9])
        (private / "empty-cache").touch()
    assert not programs(tmp_path)

    jax.clear_caches()
    with compilation_cache(tmp_path):
        compile_something(6)
    whole = programs(tmp_path)
    assert whole
    for path in whole:  # as an older release published it
        os.truncate(path, path.stat().st_size // 2)
    halves = {path: path.stat().st_size for path in whole}
    jax.clear_caches()
    with compilation_cache(tmp_path):
        compile_something(6)
    assert programs(tmp_path) == whole
    assert all(path.stat().st_size > halves[path] for path in whole)


def test_a_full_disk_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jax._src.lru_cache.LRUCache.put", full)
    with compilation_cache(tmp_path):
        compile_something(8)
        compile_something(9)
        with pytest.warns(UserWarning, match="another one"):
            warnings.warn("another one", stacklevel=1)
    (message,) = caplog.messages
    assert message.endswith(
        f"could not be written to {str(tmp_path)!r} and are compiled again at the next start; the first one: OSError: "
        "[Errno 28] No space left on device"
    )
    assert int(message.split()[0]) >= 2


def test_a_file_of_another_compressor_stays(tmp_path: Path) -> None:
    with compilation_cache(tmp_path):
        compile_something(7)
    program, *_ = programs(tmp_path)
    other = program.with_name("other-cache")
    if program.read_bytes().startswith(b"\x28\xb5\x2f\xfd"):
        other.write_bytes(zlib.compress(b"a program"))
    else:
        other.write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with compilation_cache(tmp_path):
        pass
    assert other.exists()


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (0o770, 0o707, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(OSError, match=f"{tmp_path}.* can be written by other users .mode {mode:o}.*accepted:"):
            with compilation_cache(tmp_path):
                raise AssertionError("the cache was used")
    tmp_path.chmod(0o755)
    prepare_cache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(OSError, match=r"belongs to user .* this process to user 12345; accepted: "):
            prepare_cache(tmp_path)
    before = os.umask(0)
    try:
        prepare_cache(tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700


def test_a_lock_behind_a_symbolic_link_is_neither_opened_nor_emptied(tmp_path: Path) -> None:
    with compilation_cache(tmp_path):
        pass
    (published,) = tmp_path.iterdir()
    treasure = tmp_path / "treasure"
    treasure.write_text("content")
    (published / ".lock").unlink()
    (published / ".lock").symlink_to(treasure)
    with pytest.raises(OSError), compilation_cache(tmp_path):
        raise AssertionError("the cache was used")
    assert treasure.read_text() == "content"
    (published / ".lock").unlink()
    (published / ".lock").write_text("content")
    with compilation_cache(tmp_path):
        pass
    assert (published / ".lock").read_text() == "content"
