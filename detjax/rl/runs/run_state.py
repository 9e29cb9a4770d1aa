"""The state of a run on disk, saved in the background and restored only by the same run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np

from detjax.rl.trainer.train_state import TrainState
from detjax.runtime import fingerprints

_MAX_SAVED: Final = 2
"""Number of latest saved steps that stay on disk."""


class RunState:
    """Saves the state of a run after some steps, and restores the latest one that was saved completely.

    Batches and seeds are functions of the run's seed and the step, so masters, moments and the step suffice.
    """

    def __init__(self, directory: Path, configuration: Mapping[str, Any]) -> None:
        """Opens the folder of a run's states, and creates it if needed.

        Args:
            configuration: the settings that affect bits, as JSON values.

        Raises:
            ValueError: orbax-checkpoint is not installed, or the run has several processes.
        """
        if jax.process_count() > 1:
            raise ValueError(
                f"RunState: this is one of {jax.process_count()} processes; accepted: runs of one process. Loops over "
                "several processes save what `detjax.rl.trainer.placement.on_host` returns for each array."
            )
        try:
            import orbax.checkpoint as orbax
        except ModuleNotFoundError as error:
            raise ValueError(
                f"saving a run needs {error.name}, which is not installed: pip install 'detjax[rl]'"
            ) from error
        self._orbax: Any = orbax
        self._origin = {
            "configuration": dict(configuration),
            "fingerprint": dataclasses.asdict(fingerprints.fingerprint()),
        }
        options = orbax.CheckpointManagerOptions(max_to_keep=_MAX_SAVED, enable_async_checkpointing=True)
        self._manager = orbax.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits until all saves are complete."""
        self._manager.wait_until_finished()
        self._manager.close()

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving the state after `step` steps.

        The arrays are copied before this returns, so the next step may overwrite them.
        """
        host = jax.tree.map(lambda x: np.array(x), _named(state))
        arguments = self._orbax.args
        self._manager.save(
            step,
            args=arguments.Composite(
                state=arguments.StandardSave(host),
                origin=arguments.JsonSave(self._origin | {"state": _described(host)}),
            ),
        )

    def newest(self, like: TrainState) -> tuple[int, TrainState] | None:
        """Returns the latest saved step and its state; None if nothing was saved.

        Args:
            like: a state of the same structure, shapes and dtypes.

        Raises:
            ValueError: the saved configuration, environment, shapes or dtypes differ. The error names the difference.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        arguments, place = self._orbax.args, f"{self._manager.directory}/{step}"
        origin = self._manager.restore(step, args=arguments.Composite(origin=arguments.JsonRestore()))["origin"]
        for part, values in (self._origin | {"state": _described(_named(like))}).items():
            _check_equal(place, part, origin.get(part, {}), values)
        empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), _named(like))
        named = self._manager.restore(step, args=arguments.Composite(state=arguments.StandardRestore(empty)))["state"]
        leaves = [jnp.asarray(named[name]) for name in _named(like)]
        return step, jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named(state: TrainState) -> dict[str, Any]:
    """The arrays of a state, by names that sort in the state's order."""
    return {f"{index:05d}": leaf for index, leaf in enumerate(jax.tree.leaves(state))}


def _described(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{np.dtype(x.dtype)}{list(x.shape)}" for name, x in arrays.items()}


def _check_equal(place: str, part: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name in sorted({*saved, *expected}):
        if saved.get(name) != expected.get(name):
            raise ValueError(
                f"{place}: {part} has {name} {saved.get(name)!r}; accepted: {expected.get(name)!r}, as in this run. "
                "Resume the run with its original settings, or start a new run in another folder."
            )
