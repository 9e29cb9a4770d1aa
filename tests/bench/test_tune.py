"""The search for schedules: what it tries, and what it accepts on a device."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.bench import timing, tune
from detjax.bench.__main__ import main
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import candidates, key
from detjax.runtime import backends
from tests.support import commands

PROBLEM = Problem(16, 1288, 1088)


def test_the_pool_fits_is_varied_and_holds_what_the_table_names(monkeypatch: pytest.MonkeyPatch) -> None:
    near = dataclasses.replace(PROBLEM, m=24)
    named = Schedule(24, 24)
    monkeypatch.setattr(tune, "table", lambda kind: {key(near): named})
    pool = tune._pool(PROBLEM, tune.Search(tries=5))
    assert named in pool and candidates(PROBLEM)[0] in pool
    assert len(pool) == len(set(pool)) and len(pool) >= 5
    assert all(schedule.fits(PROBLEM) for schedule in pool)


def test_the_pool_of_products_that_devices_share_has_tiles_that_end_where_columns_do() -> None:
    problem = Problem(8448, 6144, 4096, parts=2)
    shared = tune._pool(problem, tune.Search(tries=5, shared=True))
    assert len(shared) >= 5 and all(Plan(problem, schedule).can_be_shared for schedule in shared)
    assert not all(Plan(problem, schedule).can_be_shared for schedule in tune._pool(problem, tune.Search(tries=40)))


def test_only_the_bits_of_the_reference_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    # A device of plain Python: one schedule has other bits, one does not build, tile_n is the time of the others.
    wrong, refused, slow, fast = Schedule(8, 16), Schedule(8, 24), Schedule(8, 64), Schedule(8, 32)

    class Program:
        def __init__(self, problem: Problem, schedule: Schedule) -> None:
            self.schedule = schedule

        def lower(self, *arguments: object) -> "Program":
            if self.schedule == refused:
                raise ValueError("no room")
            return self

        def compile(self) -> "Program":
            return self

        def __call__(self, *arguments: object) -> object:
            # Of the wrong schedule one bit of one element is different.
            return jnp.asarray(np.array([1.0, 1.0, 1.0, 1.0078125 if self.schedule == wrong else 1.0]), jnp.bfloat16)

    monkeypatch.setattr(tune, "_program", Program)
    monkeypatch.setattr(tune, "_operands", lambda problem: [(0, 0)])
    monkeypatch.setattr(tune, "_pool", lambda problem, limits: [wrong, refused, slow, fast])
    monkeypatch.setattr(timing, "device_time", lambda program, sets, calls: float(program.schedule.tile_n))
    trials = {trial.schedule: trial for trial in tune.search(PROBLEM, tune.Search(), contextlib.nullcontext())}
    assert "differ from the reference" in (trials[wrong].refused or "") and trials[wrong].seconds is None
    assert trials[refused].refused == "no room"
    assert (trials[slow].seconds, trials[fast].seconds) == (64.0, 32.0)


@pytest.mark.skipif(backends.runs_here("hopper"), reason="what happens without a Hopper GPU")
def test_tuning_without_the_gpu_says_what_is_accepted() -> None:
    result = commands.run(main, "tune", env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is not a Hopper GPU; accepted: an H100 or H200" in " ".join(result.output.split())
