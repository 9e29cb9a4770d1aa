"""Commands to an engine as values, which can be sent to engines in other processes.

Weights change in two phases: all engines of a server `Prepare` an update, and only if every one of them has it in
memory do they `Commit` it. Each of the two may be repeated; a new `Prepare` discards the last one.
"""

import asyncio
import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Protocol, get_args

from detjax.engine.engine import Engine
from detjax.engine.engine_thread import Part
from detjax.models.adapters.adapter import read_adapter, read_weights
from detjax.models.checkpoint.weight_updates import UpdatableWeights, WeightUpdate

PARTS: Final[tuple[Part, ...]] = get_args(Part)


@dataclasses.dataclass(frozen=True)
class Pause:
    """Stops computing; see `Engine.pause`."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """Ends a pause."""


@dataclasses.dataclass(frozen=True)
class Abort:
    """Ends the requests with these ids; the result is their number. See `Engine.abort`."""

    ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sleep:
    """Releases the devices' memory; see `Engine.sleep`."""

    keeps_weights: bool


@dataclasses.dataclass(frozen=True)
class WakeUp:
    """Takes parts of the devices' memory again; see `Engine.wake_up`."""

    parts: tuple[Part, ...] = PARTS


@dataclasses.dataclass(frozen=True)
class ForgetPrefixes:
    """Clears the prefix cache."""


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Reads and checks new weights, and changes nothing; the result is `Prepared`.

    Attributes:
        path: see `UpdatableWeights.read`.
    """

    path: Path


@dataclasses.dataclass(frozen=True)
class Commit:
    """Replaces the weights by the prepared ones. No request may be in flight."""


@dataclasses.dataclass(frozen=True)
class Discard:
    """Drops the prepared weights, if any."""


@dataclasses.dataclass(frozen=True)
class LoadAdapter:
    """Loads an adapter; see `Engine.load_adapter`.

    Attributes:
        name: its name.
        path: a folder of peft's, or a safetensors file with other tensors for the adapter that has the name.
        replaces: whether another adapter may have the name.
    """

    name: str
    path: Path
    replaces: bool = False


@dataclasses.dataclass(frozen=True)
class UnloadAdapter:
    """Unloads an adapter when its requests have ended; see `Engine.unload_adapter`."""

    name: str


type Command = (
    Pause | Resume | Abort | Sleep | WakeUp | ForgetPrefixes | Prepare | Commit | Discard | LoadAdapter | UnloadAdapter
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The facts about prepared weights.

    Attributes:
        digest: the digest of the model with them; see `detjax.models.digest`.
        is_whole: True if they replace all weights.
    """

    digest: str
    is_whole: bool


class Commanded(Protocol):
    """One or several engines that run commands."""

    async def command(self, command: Command) -> Any:
        """Runs a command in every engine, and returns its result; numbers are added.

        Raises:
            ValueError: prepared weights do not fit the model. No engine keeps them.
        """
        ...

    @property
    def kept_files(self) -> Collection[Path]:
        """Files of updates that are still needed."""
        ...


class EngineCommands:
    """Runs commands in an engine of this process."""

    def __init__(self, engine: Engine, weights: UpdatableWeights) -> None:
        """Commands for an engine, whose model's weights `weights` describes."""
        self._engine, self._weights = engine, weights
        self._prepared: WeightUpdate | None = None
        self._has_weights = True

    @property
    def digest(self) -> str:
        """The digest of the model."""
        return self._weights.digest.value

    @property
    def kept_files(self) -> Collection[Path]:
        """Always empty: committed weights are in memory."""
        return ()

    async def command(self, command: Command) -> Any:
        """Calls `run` in a thread."""
        return await asyncio.to_thread(self.run, command)

    def run(self, command: Command) -> Any:
        """Runs a command and waits for its end.

        Raises:
            ValueError: prepared weights do not fit the model.
            RuntimeError: the engine is not in a state to run it.
            EngineClosed: the engine was closed, or it failed.
        """
        engine = self._engine
        match command:
            case Pause():
                engine.pause()
            case Resume():
                engine.resume()
            case Abort(ids):
                return engine.abort(ids)
            case Sleep(keeps_weights):
                engine.sleep(keeps_weights=keeps_weights)
                self._has_weights &= keeps_weights
            case WakeUp(parts):
                engine.wake_up(parts)
            case ForgetPrefixes():
                engine.forget_prefixes()
            case Prepare(path):
                self._prepared = None  # its memory is free before the new weights are read
                self._prepared = self._weights.read(path, engine.weight, needs_all=not self._has_weights)
                return Prepared(self._prepared.digest.value, self._prepared.is_whole)
            case Commit():
                if self._prepared is None:
                    raise RuntimeError("no weights are prepared; accepted: Commit after Prepare")
                engine.replace_weights(self._prepared.weights)
                self._weights.digest, self._prepared, self._has_weights = self._prepared.digest, None, True
            case Discard():
                self._prepared = None
            case LoadAdapter(name, path, replaces):
                adapter = read_adapter(path) if path.is_dir() else read_weights(path, engine.adapters[name].config)
                engine.load_adapter(name, adapter, replaces=replaces)
            case UnloadAdapter(name):
                engine.unload_adapter(name)
        return None


class History:
    """The commands that bring a new engine into the state of the engines that have run all commands so far.

    Attributes:
        updates: the paths of committed updates that the weights depend on, in order.
    """

    def __init__(self) -> None:
        self.updates: tuple[Path, ...] = ()
        self._is_paused = False
        self._asleep = frozenset[Part]()
        self._has_weights = True
        self._prepared: tuple[Path, Prepared] | None = None

    def note_prepared(self, path: Path, prepared: Prepared) -> None:
        """Records an update that the next `Commit` commits."""
        self._prepared = path, prepared

    def note(self, command: Command) -> None:
        """Records a command when it is sent."""
        match command:
            case Pause() | Resume():
                self._is_paused = isinstance(command, Pause)
            case Sleep(keeps_weights):
                self._asleep = frozenset(PARTS)
                self._has_weights &= keeps_weights
            case WakeUp(parts):
                self._asleep -= set(parts)
            case Commit():
                assert self._prepared is not None
                path, prepared = self._prepared
                self.updates = (path,) if prepared.is_whole else (*self.updates, path)
                self._has_weights, self._prepared = True, None
            case Discard():
                self._prepared = None

    def update_commands(self) -> tuple[Command, ...]:
        """Returns the commands that give a model of any earlier update, or of none, the present weights."""
        return tuple(command for path in self.updates for command in (Prepare(path), Commit()))

    def state_commands(self) -> tuple[Command, ...]:
        """Returns the commands that pause an engine with the present weights, or make it sleep, like the others."""
        commands: list[Command] = []
        if self._asleep or not self._has_weights:
            commands.append(Sleep(self._has_weights))
            awake: tuple[Any, ...] = tuple(part for part in PARTS if part not in self._asleep)
            if awake:
                commands.append(WakeUp(awake))
        return (*commands, *([Pause()] if self._is_paused else []))
