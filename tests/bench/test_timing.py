"""Timing: inputs that come from memory, and a median."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.timing import LONG_ROUNDS, ROUNDS, calls_for, rounds_for
from detjax.bench import timing
from detjax.bench.timing import CACHE_BYTES, MAX_ROTATIONS, rotations, turns


@pytest.mark.parametrize("size", [1, 1 << 20, 32 << 20, 300 << 20, 4 << 30])
def test_argument_sets_do_not_fit_into_the_cache_together(size: int) -> None:
    count = rotations(size)
    assert 2 <= count <= MAX_ROTATIONS
    # Between two turns of a set, the others have gone through the cache.
    assert count == MAX_ROTATIONS or (count - 1) * size > CACHE_BYTES


class Queue:
    """A device with a clock: calls return at once, and each takes the device a second after the calls before it."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.seen: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def call(self, x: jax.Array) -> "Pending":
        self.seen.append(int(x))
        self.free_at = max(self.now, self.free_at) + 1
        return Pending(self, self.free_at)


@dataclasses.dataclass
class Pending:
    """A result that is there from some time on."""

    queue: Queue
    ready_at: float

    def block_until_ready(self) -> None:
        self.queue.now = max(self.queue.now, self.ready_at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(timing, "time", queue)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    return queue


SETS = [(jnp.int32(i),) for i in range(3)]


def test_a_call_lasts_until_its_result_is_there(device: Queue) -> None:
    assert timing.device_time(device.call, SETS, calls=5) == 1.0
    assert device.seen == [0, 1, 0, 1, 2, 0, 1]  # each argument set takes its turn


def test_a_step_is_its_share_of_all_calls_of_a_repetition_the_last_one_included(device: Queue) -> None:
    # In one repetition, since what one leaves undone delays the next, and the median would not show it.
    assert timing.step_time(device.call, SETS, steps=4, repetitions=1) == 1.0
    assert device.now == device.free_at
    device.seen.clear()
    assert timing.step_time(device.call, SETS, steps=4, repetitions=3) == 1.0
    assert device.seen == [0, 1] + 3 * [0, 1, 2, 0]


def test_every_other_round_goes_backwards() -> None:
    assert list(turns("abc", 3)) == [*"abc", *"cba", *"abc"]
    assert list(turns([], 2)) == []


def test_measurements_take_turns_and_one_that_fails_is_left_out() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        if name == "bad":
            raise RuntimeError("no room\nat all")
        return float(len(order))

    runs = {name: functools.partial(run, name) for name in ("a", "bad", "b")}
    rounds = timing.in_turns(runs, 3, required=("a", "b"))
    assert order == ["a", "bad", "b", "b", "a", "a", "b"]
    assert rounds.seconds == {"a": [1.0, 5.0, 6.0], "b": [3.0, 4.0, 7.0]}
    assert rounds.medians == {"a": 5.0, "b": 4.0}
    assert rounds.missing == {"bad": "RuntimeError: no room"}


def test_the_failure_of_a_required_measurement_is_raised() -> None:
    def fails() -> float:
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        timing.in_turns({"ours": fails}, 2, required=("ours",))


def test_long_calls_are_measured_in_more_rounds_of_fewer_calls() -> None:
    assert (rounds_for(1e-5), rounds_for(1e-3)) == (ROUNDS, LONG_ROUNDS)
    assert [calls_for(seconds) for seconds in (1e-6, 4e-3, 1.0)] == [25, 15, 7]
