"""States on disk: the newest complete one is found again, by the same run in the same environment only."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.rl.runs import run_state
from detjax.rl.runs.run_state import RunState
from detjax.rl.trainer.optimizers import AdamState
from detjax.rl.trainer.train_state import TrainState
from detjax.runtime.fingerprints import Fingerprint, fingerprint
from tests.support.bits import assert_same_bits

CONFIGURATION = {"kind": "supervised", "seed": 3, "distribution": {"temperature": 1.0}, "kv_cache_dtype": None}


def state(number: float = 1, size: int = 7, dtype: Any = jnp.float32) -> TrainState:
    """A state with more than ten leaves, and a master without optimizer state."""
    masters = tuple(jnp.arange(size, dtype=dtype) + number * index for index in range(5))
    moments = tuple(AdamState(jnp.int32(number + index), x * 2, x * 3) for index, x in enumerate(masters[:4]))
    return TrainState(masters, (*moments, None))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a state after step 4."""
    folder = tmp_path_factory.mktemp("states")
    with RunState(folder, CONFIGURATION) as one:
        one.save(4, state())
    return folder


@pytest.fixture
def environment() -> Iterator[mock.Mock]:
    """The function that says the environment's fingerprint."""
    with mock.patch.object(run_state.fingerprints, "fingerprint", return_value=fingerprint()) as made:
        yield made


def test_a_run_without_states_has_none(tmp_path: Path) -> None:
    with RunState(tmp_path / "new", CONFIGURATION) as one:
        assert one.newest(state()) is None
    assert (tmp_path / "new").is_dir()


def test_a_state_is_found_again_in_another_process_with_each_leaf_in_its_place(saved: Path) -> None:
    with RunState(saved, CONFIGURATION) as one:
        newest = one.newest(state(9))
    assert newest is not None and newest[0] == 4
    assert jax.tree.structure(newest[1]) == jax.tree.structure(state())
    assert_same_bits(newest[1], state())


def test_the_newest_two_states_are_kept_and_the_newest_is_restored(tmp_path: Path) -> None:
    with RunState(tmp_path, CONFIGURATION) as one:
        for step in (1, 2, 10):
            one.save(step, state(step))
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()) == [2, 10]
    with RunState(tmp_path, CONFIGURATION) as one:
        newest = one.newest(state())
    assert newest is not None and newest[0] == 10
    assert_same_bits(newest[1], state(10))


def test_a_state_is_copied_before_the_next_step_overwrites_it(tmp_path: Path) -> None:
    given = jax.tree.map(np.array, state())
    with RunState(tmp_path, CONFIGURATION) as one:
        one.save(1, given)
        for leaf in jax.tree.leaves(given):
            leaf[...] = 0
        one.close()
        newest = one._manager.directory / "1"
        assert newest.exists()
    with RunState(tmp_path, CONFIGURATION) as one:
        restored = one.newest(state())
    assert restored is not None
    assert_same_bits(restored[1], state())


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Fingerprint)])
def test_a_state_of_another_environment_is_refused_by_the_field_that_differs(
    saved: Path, environment: mock.Mock, field: str
) -> None:
    here = fingerprint()
    before = getattr(here, field)
    after = before + 1 if isinstance(before, int) else f"{before} "
    environment.return_value = dataclasses.replace(here, **{field: after})
    with RunState(saved, CONFIGURATION) as one, pytest.raises(ValueError) as raised:
        one.newest(state())
    assert f"/4: fingerprint has {field} {before!r}; accepted: {after!r}, as in this run." in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kind": "reinforcement"}, "kind 'supervised'; accepted: 'reinforcement'"),
        ({"seed": 4}, "seed 3; accepted: 4"),
        ({"distribution": {"temperature": 0.5}}, "distribution {'temperature': 1.0}; accepted: {'temperature': 0.5}"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype None; accepted: 'int8'"),
        ({"model": "digest"}, "model None; accepted: 'digest'"),
    ],
)
def test_a_state_of_another_configuration_is_refused_by_what_differs(
    saved: Path, changed: dict[str, Any], says: str
) -> None:
    with RunState(saved, CONFIGURATION | changed) as one, pytest.raises(ValueError) as raised:
        one.newest(state())
    assert f"/4: configuration has {says}, as in this run." in str(raised.value)


def test_a_setting_that_this_run_lacks_is_refused(saved: Path) -> None:
    fewer = {name: value for name, value in CONFIGURATION.items() if name != "seed"}
    with (
        RunState(saved, fewer) as one,
        pytest.raises(ValueError, match="configuration has seed 3; accepted: None"),
    ):
        one.newest(state())


@pytest.mark.parametrize(
    ("like", "says"),
    [
        (state(size=8), r"state has 00000 'float32\[7\]'; accepted: 'float32\[8\]'"),
        (state(dtype=jnp.bfloat16), r"state has 00000 'float32\[7\]'; accepted: 'bfloat16\[7\]'"),
        (state()._replace(masters=state().masters[:4]), r"state has 00004 'float32\[7\]'; accepted: 'int32\[\]'"),
        (state()._replace(optimizer=(*state().optimizer[:4], state().masters[0])), "state has 00017 None; accepted"),
    ],
)
def test_a_state_of_other_shapes_or_dtypes_is_refused(saved: Path, like: TrainState, says: str) -> None:
    with RunState(saved, CONFIGURATION) as one, pytest.raises(ValueError, match=says):
        one.newest(like)


def test_runs_of_several_processes_and_without_orbax_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(ValueError, match="RunState: this is one of 2 processes; accepted: runs of one process"):
            RunState(tmp_path, {})
    monkeypatch.setitem(__import__("sys").modules, "orbax.checkpoint", None)
    with pytest.raises(ValueError, match=r"saving a run needs orbax.checkpoint, which is not installed: pip install"):
        RunState(tmp_path, {})
