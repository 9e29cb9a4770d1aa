"""The ring of stages: each is read after its copies have arrived, and filled after it was read."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from detjax.pallas import nvidia
from detjax.pallas.mma import copies


class Group:
    """Copies by `cp.async` as threads see them: each is a group; groups end in order; a wait leaves some unfinished."""

    def __init__(self, stages: int) -> None:
        self.started: list[tuple[int, Any]] = []
        self.arrived = 0
        self.content: list[Any] = [None] * stages
        self.reading: int | None = None

    def copy(self, source: Any, slot: Any) -> None:
        assert int(slot) != self.reading, "a stage is overwritten while it is read"
        self.started.append((int(slot), int(source)))

    def wait(self, unfinished: int) -> None:
        self.reading = None  # all threads meet after their wait, so all have read
        while self.arrived < len(self.started) - unfinished:
            slot, self.content[slot] = self.started[self.arrived]
            self.arrived += 1


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 9])
def test_a_stage_is_read_with_its_own_contents(
    steps: int, stages: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(stages)
    monkeypatch.setattr(copies, "_copy", group.copy)
    monkeypatch.setattr(copies, "_await_copies", group.wait)
    monkeypatch.setattr(copies.pl, "when", lambda condition: lambda fn: fn() if condition else None)
    ring = copies.Ring(steps, stages, lambda step, slot: [(step, slot)] * number)
    ring.start()
    for step in range(steps):
        slot = int(ring.next(jnp.int32(step)))
        assert group.content[slot] == step
        assert sum(content == step for content in group.content) == 1
        group.reading = slot
    assert len(group.started) == steps * number


def test_stages_have_barriers_where_a_copy_engine_fills_them() -> None:
    for capability, has in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)):
        with nvidia.tracing_for(capability):
            assert bool(copies.barriers(3, 2)) is has is nvidia.has_copy_engine()


def test_a_device_is_traced_for_by_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvidia.architecture() == (9, 0)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="8.6")])
    assert nvidia.architecture() == (8, 6)
    assert nvidia.shared_memory_of_cta() == 99 * 1024
    with nvidia.tracing_for((10, 0)):
        assert nvidia.shared_memory_of_cta() == 227 * 1024
    with pytest.raises(ValueError, match=r"compute capability 'gfx942'; accepted: two numbers"):
        nvidia.parsed("gfx942")
