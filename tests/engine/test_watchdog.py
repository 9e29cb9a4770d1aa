"""An engine whose devices never finish a step ends with a message, and so does its process."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import detjax
from detjax import Request, SamplingParams
from detjax.engine import EngineClosed
from detjax.engine.sampled_tokens import PackedTokens
from detjax.engine.watchdog import EXIT_CODE_OF_A_FAILED_ENGINE, StepTimeout, Watchdog
from tests.support.small_loops import small_model

GENEROUS = 300.0
"""Seconds that anything may take here."""

REQUEST = Request((1, 2, 3), SamplingParams(max_tokens=4))


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Devices that finish no more steps after the first event is set, until the second one is."""
    is_lost, released, read = threading.Event(), threading.Event(), PackedTokens.read

    def stuck(tokens: PackedTokens) -> Any:
        if is_lost.is_set():
            assert released.wait(GENEROUS)
        return read(tokens)

    monkeypatch.setattr(PackedTokens, "read", stuck)
    monkeypatch.setattr("atexit.register", lambda _: None)  # this process has to end as usual
    yield is_lost, released
    released.set()


def test_a_lost_device_ends_the_engine_with_a_message(
    lost: tuple[threading.Event, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    engine = detjax.Engine(small_model(), None, max_samples=2, token_budget=8, max_length=32, step_seconds=0.5)
    engine.generate([REQUEST])
    lost[0].set()
    flying = [engine.submit(REQUEST), engine.submit(REQUEST)]
    for future in flying:
        with pytest.raises(EngineClosed, match="it has failed; its log says why"):
            future.result(GENEROUS)
    message = r"have not finished a step for \d+ s; accepted: 0\.5 s \(step_seconds\).* Devices: .*cpu.*Restart all"
    assert isinstance(engine.failure, StepTimeout)
    with pytest.raises(StepTimeout, match=message):
        engine.closed.result(GENEROUS)
    with pytest.raises(EngineClosed):
        engine.submit(REQUEST)
    engine.close()  # does not wait for the devices
    assert "samples were in flight: the devices have not finished" in caplog.text
    assert not engine.is_open


def test_a_thread_that_returns_after_all_delivers_nothing(lost: tuple[threading.Event, threading.Event]) -> None:
    is_lost, released = lost
    tokens: list[Any] = []
    engine = detjax.Engine(small_model(), None, max_samples=1, token_budget=8, max_length=32, step_seconds=0.5)
    is_lost.set()
    with pytest.raises(EngineClosed):
        engine.submit(REQUEST, tokens.append).result(GENEROUS)
    released.set()
    engine._thread.join(GENEROUS)
    assert not engine._thread.is_alive() and not tokens


def test_steps_that_finish_are_left_alone() -> None:
    """The control: the same engine with the same limit answers, however long it is idle."""
    ended: list[StepTimeout] = []
    started = time.monotonic()
    watchdog = Watchdog(0.05, lambda: None, "cpu", ended.append)
    with detjax.Engine(
        small_model(), None, max_samples=2, token_budget=8, max_length=32, step_seconds=GENEROUS
    ) as engine:
        first = engine.generate([REQUEST])
        while time.monotonic() - started < 0.5:
            time.sleep(0.05)
        assert engine.generate([REQUEST]) == first and engine.failure is None
    assert not ended
    watchdog.stop()


_LOST = """
import threading
import detjax
from detjax.engine import EngineClosed
from detjax.engine.sampled_tokens import PackedTokens
from tests.support.small_loops import small_model

PackedTokens.read = lambda tokens: threading.Event().wait()
engine = detjax.Engine(small_model(), None, max_samples=1, token_budget=8, max_length=32, step_seconds=0.5)
try:
    engine.generate([detjax.Request((1, 2, 3), detjax.SamplingParams(max_tokens=4))])
except EngineClosed as error:
    print("refused:", error)
engine.close()
"""


def test_its_process_ends_without_waiting_for_the_devices() -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, "-c", _LOST], env=environment, capture_output=True, text=True, timeout=GENEROUS, check=False
    )
    assert run.returncode == EXIT_CODE_OF_A_FAILED_ENGINE, run.stderr
    assert "refused: Engine: it has failed" in run.stdout
    assert "the devices have not finished a step" in run.stderr
