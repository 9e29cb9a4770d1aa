"""The state of a controlled server, and the operations that change it: pauses, sleep, aborts and new weights."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Literal

from detjax.engine.commands import (
    PARTS,
    Commanded,
    Commit,
    Discard,
    ForgetPrefixes,
    Pause,
    Prepare,
    Prepared,
    Resume,
    Sleep,
    WakeUp,
)
from detjax.engine.engine_thread import Part
from detjax.server.control.gate import Gate, Version
from detjax.server.http.errors import ApiError

Mode = Literal["abort", "wait", "keep"]
"""The treatment of calls in flight: they end with the tokens so far, or finish, or continue afterwards."""

_PAUSED, _ASLEEP, _UPDATING = "paused", "asleep", "updating"
_WAKE_UP: Final = "POST /wake_up first"
_log: Final = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Updated:
    """The result of an update.

    Attributes:
        version: the new version of the weights.
        in_flight: number of calls that were in flight when all weights had been read.
    """

    version: Version
    in_flight: int


class Control:
    """Pauses a server, puts it to sleep, and replaces its weights.

    One of sleep, wake-up and update runs at a time; another one is refused meanwhile.

    Attributes:
        is_paused: True if calls wait for `resume`.
        updates: number of updates so far.
    """

    def __init__(self, gate: Gate, commands: Commanded, fingerprint: Callable[[str], Version]) -> None:
        """Control of the engines that a gate leads to; `fingerprint` makes the version of a model's digest."""
        self.is_paused = False
        self.updates = 0
        self._gate, self._commands, self._version_of = gate, commands, fingerprint
        self._operation: str | None = None
        self._is_frozen = False
        """True if the engines are paused, with calls in flight."""
        self._asleep = frozenset[Part]()
        self._has_weights = True
        self._resumed = asyncio.Event()

    @property
    def is_sleeping(self) -> bool:
        """True if the devices' memory is released, or a part of it."""
        return bool(self._asleep)

    @property
    def status(self) -> str:
        """The status that /health tells."""
        if self.is_sleeping:
            return "sleeping"
        if not self._has_weights:
            return "without weights"
        return "paused" if self.is_paused else "ok"

    # --- pauses -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: Mode, *, clears_cache: bool = True) -> None:
        """Holds back new calls until `resume`, and returns when no step is computed any more.

        Raises:
            ApiError: the server was resumed meanwhile, or another operation is running.
        """
        self._check_operation("pause")
        if mode == "wait" and self.is_sleeping and self._gate.running:
            raise ApiError(409, f"the server is asleep, and calls in flight cannot finish. {_WAKE_UP}, or abort them")
        was_paused, self.is_paused = self.is_paused, True
        self._resumed.clear()
        self._gate.close(_PAUSED)
        try:
            if mode == "keep":
                await self._commands.command(Pause())
                self._is_frozen = True
                return
            await self._let_calls_end(mode)
        except BaseException:
            if not was_paused:
                await self.resume()
            raise
        emptied, resumed = asyncio.ensure_future(self._gate.empty()), asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({emptied, resumed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (emptied, resumed):
                task.cancel()
            await asyncio.gather(emptied, resumed, return_exceptions=True)
        if self._gate.running:
            raise ApiError(409, "the server was resumed before all calls in flight had finished")
        if clears_cache and not self.is_sleeping:
            await self._commands.command(ForgetPrefixes())

    async def resume(self) -> None:
        """Ends a pause: frozen calls continue, and calls that were held back begin."""
        self.is_paused = False
        self._resumed.set()
        await self._thaw()
        self._gate.open(_PAUSED)

    async def _thaw(self) -> None:
        if self._is_frozen:
            self._is_frozen = False
            await self._commands.command(Resume())

    async def _let_calls_end(self, mode: Mode) -> None:
        """Aborts running calls, or makes those start over that have not begun, or neither; the others can finish."""
        if mode == "abort":
            await self._gate.abort_running(self._commands)
        elif mode == "keep":
            self._gate.restart()
        await self._thaw()

    async def abort(self, names: Collection[str] | None) -> int:
        """Ends calls with these names (None: all), and returns their number; see `Gate.abort`."""
        return await self._gate.abort(self._commands, names)

    async def forget_prefixes(self) -> None:
        """Clears the prefix cache."""
        self._check_operation("reset_prefix_cache")
        if not self.is_sleeping:  # otherwise it is empty
            await self._commands.command(ForgetPrefixes())

    # --- sleep --------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int, mode: Mode) -> None:
        """Releases the devices' memory; new calls are refused until the server is awake.

        Args:
            level: 1 copies the weights to the host, 2 drops them.
            mode: the treatment of calls in flight; "keep" only at level 1.
        """
        if level == 2 and mode == "keep":
            raise ApiError(
                400,
                "level is 2 and mode is 'keep'; accepted: mode abort or wait, because calls in flight need the weights "
                "that level 2 drops; or level 1",
            )
        with self._operating("sleep"):
            if self.is_sleeping:
                self._check_sleep(level)
                return
            self._gate.close(_ASLEEP)
            self._gate.refusal = ApiError(
                503, f"the server is asleep. {_WAKE_UP}, with the control key", headers={"Retry-After": "1"}
            )
            try:
                if mode != "keep":
                    await self._let_calls_end(mode)
                    await self._gate.empty()
                await self._commands.command(Sleep(level == 1))
            except BaseException:
                self._note_awake()
                raise
            self._asleep, self._has_weights = frozenset(PARTS), self._has_weights and level == 1

    def _check_sleep(self, level: int) -> None:
        """Refuses to sleep at a level that would release more memory than the present sleep does."""
        awake = [part for part in PARTS if part not in self._asleep]
        if awake or (level == 2 and self._has_weights):
            kept = f"the devices hold {' and '.join(awake)}" if awake else "the host keeps the weights"
            raise ApiError(409, f"the server is asleep already, and {kept}. {_WAKE_UP}, then sleep")

    async def wake_up(self, parts: Collection[Part] = PARTS) -> None:
        """Takes parts of the devices' memory again. With all of them, calls pass again, if there are weights."""
        with self._operating("wake_up"):
            wanted: tuple[Any, ...] = tuple(part for part in PARTS if part in parts and part in self._asleep)
            if wanted:
                await self._commands.command(WakeUp(wanted))
                self._asleep -= set(wanted)
                self._note_awake()

    def _note_awake(self) -> None:
        """Lets calls pass if nothing is asleep any more and there are weights."""
        if self._asleep:
            return
        if self._has_weights:
            self._gate.refusal = None
            self._gate.open(_ASLEEP)
            return
        self._gate.refusal = ApiError(
            503,
            "the server has no weights since it slept at level 2. Give it all of them with POST "
            "/update_weights_from_disk or PUT /weights",
            headers={"Retry-After": "1"},
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update(self, source: AbstractAsyncContextManager[Path], mode: Mode) -> Updated:
        """Replaces weights by the tensors of a file or directory: in all engines, or in none.

        New calls wait while the weights are replaced. Calls in flight are treated as `mode` says; with "keep", streams
        that have begun finish with the old weights, and all other calls start over with the new ones.

        Raises:
            ApiError: another update is running, the weights are asleep, or calls in flight could not finish.
            ValueError: the weights do not fit the model.
        """
        with self._operating("update"):
            if "weights" in self._asleep:
                raise ApiError(409, "the weights are asleep. POST /wake_up?tags=weights first, then update them")
            async with source as path:
                prepared: Prepared = await self._commands.command(Prepare(path))
                in_flight = self._gate.in_flight
                self._gate.close(_UPDATING)
                try:
                    await self._make_way(mode)
                    await self._commands.command(Commit())
                    self._gate.version = self._version_of(prepared.digest)
                    self._has_weights = True
                except BaseException:
                    with contextlib.suppress(Exception):  # the engine may have ended
                        await self._commands.command(Discard())
                    raise
                finally:
                    self._gate.open(_UPDATING)
            self.updates += 1
            self._note_awake()
            _log.info("the weights were replaced; the model's digest is %s", prepared.digest)
            return Updated(self._gate.version, in_flight)

    async def _make_way(self, mode: Mode) -> None:
        """Ends all running calls as `mode` says, also while the server is paused."""
        left = self._gate.begun if mode == "keep" else self._gate.running
        if self.is_sleeping and mode != "abort" and left:
            raise ApiError(
                409,
                f"{left} calls in flight have to finish with the present weights first, and the cache is asleep. POST "
                "/wake_up, or update with mode abort",
            )
        await self._let_calls_end(mode)
        await self._gate.empty()

    # --- operations ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _operating(self, name: str) -> Iterator[None]:
        self._check_operation(name)
        self._operation = name
        try:
            yield
        finally:
            self._operation = None

    def _check_operation(self, name: str) -> None:
        if self._operation is not None:
            raise ApiError(409, f"{name}: an operation is running, {self._operation}; retry when it has ended")
