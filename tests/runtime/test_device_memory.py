"""The share of a GPU's memory that commands let JAX allocate."""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest

from detjax import cli
from detjax.bench import __main__ as bench
from detjax.runtime import device_memory
from detjax.runtime.device_memory import VARIABLES, share_of, smallest_memory, use_most

GIB = 1 << 30


class Library:
    """Answers like NVIDIA's library on a host with GPUs of 80 and 48 GiB, and a third one that does not answer.

    Attributes:
        opened: how often it was opened, less how often it was closed.
        error: what opening it returns.
    """

    def __init__(self, error: int = 0) -> None:
        self.opened, self.error = 0, error

    def nvmlInit_v2(self) -> int:
        self.opened += not self.error
        return self.error

    def nvmlShutdown(self) -> int:
        self.opened -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return int(index == 2)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj[0] = {1: 80, 2: 48}[handle.value] * GIB
        return 0


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


def test_the_share_leaves_the_compilers_their_contexts() -> None:
    for total, processors in ((141 * GIB, 16), (80 * GIB, 16), (80 * GIB, 4), (48 * GIB, 64)):
        left = total * (1 - share_of(total, processors))
        assert left >= (1 + min(16, processors) / 2) * GIB - 1
    assert share_of(80 * GIB, 16) == pytest.approx(1 - 9 / 80)
    assert share_of(80 * GIB, 64) == share_of(80 * GIB, 16)


def test_the_share_is_no_less_than_jax_would_take_and_never_nearly_all() -> None:
    assert share_of(24 * GIB, 16) == 0.75
    assert share_of(192 * GIB, 1) == 0.92


def test_the_smallest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert smallest_memory() == 48 * GIB
    assert library.opened == 0


def test_a_driver_that_does_not_answer_leaves_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert smallest_memory("libno-such-driver.so") is None
    library = Library(error=9)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert smallest_memory() is None
    assert library.opened == 0


@pytest.mark.usefixtures("unset")
def test_the_environment_gets_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "smallest_memory", lambda: 80 * GIB)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    use_most()
    assert os.environ[VARIABLES[0]] == "0.887"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", VARIABLES)
def test_a_given_share_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "smallest_memory", lambda: 80 * GIB)
    monkeypatch.setenv(name, "0.5")
    use_most()
    assert {key: os.environ[key] for key in VARIABLES if key in os.environ} == {name: "0.5"}


@pytest.mark.usefixtures("unset")
def test_nothing_is_set_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "smallest_memory", lambda: None)
    use_most()
    assert not any(name in os.environ for name in VARIABLES)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("main", [cli.main, bench.main], ids=["detjax", "detjax.bench"])
def test_commands_set_it_before_they_run(main: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "smallest_memory", lambda: 80 * GIB)
    with pytest.raises(SystemExit):
        main(["no such command"])
    assert VARIABLES[0] in os.environ
