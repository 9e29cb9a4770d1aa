"""The cache of compiled programs: whole files only, and only those of the same fingerprint."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax.engine.compilation_cache import compilation_cache


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
