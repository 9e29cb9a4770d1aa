"""The gate between requests and the engine, so that every answer is computed with one version of the weights."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Collection
from typing import Final, Protocol

from detjax.audit import Origin
from detjax.engine import Aborted, Completion, Engine, Generation, Request, Token
from detjax.engine.commands import Abort, Commanded
from detjax.engine.job import ABORT
from detjax.models.adapters.adapter import adapted_digest
from detjax.server.api.api_calls import ServedModel
from detjax.server.http.errors import ApiError
from detjax.server.replicated_engine import ReplicatedEngine

_END: Final = object()
"""The end of a stream without tokens."""


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of the weights: the origin of answers, and their `system_fingerprint`."""

    origin: Origin
    fingerprint: str

    def adapted(self, adapter: bytes) -> "Version":
        """Returns the version of answers with an adapter, given the digest of its content."""
        model = adapted_digest(str(self.origin.model), adapter)
        rest, _, digest = self.fingerprint.rpartition("-")
        fingerprint = f"{rest}-{adapted_digest(digest, adapter)[: len(digest)]}"
        return Version(dataclasses.replace(self.origin, model=model), fingerprint)


class GatedCall(Protocol):
    """A call that passes the gate.

    Attributes:
        model: the model, with the version of the weights that the call passed with.
        requests: its requests to the engine.
    """

    model: ServedModel
    requests: list[Request]

    @property
    def id(self) -> str:
        """The id of the response."""
        ...


@dataclasses.dataclass(eq=False)
class _Run:
    """A call while the engine computes it.

    Attributes:
        call: the call.
        names: names of the call for `Gate.abort`.
        restart: set to make the call leave the engine and start over; ignored once it has begun.
        has_begun: True if its reader has a token.
    """

    call: GatedCall
    names: Collection[str]
    restart: asyncio.Future[None]
    has_begun: bool = False


@dataclasses.dataclass(eq=False)
class _Held:
    """A call that waits for the gate to open; the result of the future says whether it was aborted."""

    names: Collection[str]
    future: asyncio.Future[bool]


class Gate:
    """Lets calls pass to the engine, and holds them back while it is closed.

    A call takes the version of the weights when it passes. It passes again, and takes the new version, if `restart`
    makes it start over. Weights are replaced only while the gate is closed and empty, so no answer mixes two versions.

    Attributes:
        version: the present version of the weights.
        refusal: the error for new calls; None: they pass or wait.
    """

    def __init__(self, engine: Engine | ReplicatedEngine, version: Version) -> None:
        """An open gate."""
        self.version = version
        self.refusal: ApiError | None = None
        self._engine = engine
        self._reasons = set[str]()
        self._held: dict[_Held, None] = {}
        self._running: dict[_Run, None] = {}
        self._left: set[asyncio.Future[None]] = set()
        """Futures of `empty`, notified when a call leaves."""

    # --- calls --------------------------------------------------------------------------------------------------------

    async def generate(self, call: GatedCall, names: Collection[str] = ()) -> list[Generation]:
        """Returns the generations of a call's requests. `names` name the call for `abort`.

        Raises:
            ApiError: new calls are refused.
        """
        self._refuse()
        while True:
            async with self._passed(call, names) as run:
                if run is None:
                    return [_nothing(request) for request in call.requests]
                answer = await _unless(run.restart, self._engine.generate_async(call.requests))
                if answer is not None:
                    return answer

    async def stream(self, call: GatedCall, names: Collection[str] = ()) -> AsyncGenerator[tuple[int, Token | Aborted]]:
        """Yields the tokens of a call's requests; see `generate` and `Engine.stream_all`."""
        self._refuse()
        while True:
            async with self._passed(call, names) as run:
                if run is None:
                    for number, request in enumerate(call.requests):
                        for sample in range(request.sampling.n):
                            yield number, Aborted(sample, "")
                    return
                async with contextlib.aclosing(self._engine.stream_all(call.requests)) as tokens:
                    # A default, because a task must not end with StopAsyncIteration.
                    first = await _unless(run.restart, anext(tokens, _END))
                    if isinstance(first, tuple):
                        run.has_begun = True
                        yield first
                        async for token in tokens:
                            yield token
                    if first is not None:
                        return

    @contextlib.asynccontextmanager
    async def _passed(self, call: GatedCall, names: Collection[str]) -> AsyncGenerator[_Run | None]:
        """Waits until the gate is open, and counts the call as running in the context; yields None if it is aborted."""
        while self._reasons:
            held = _Held(names, asyncio.get_running_loop().create_future())
            self._held[held] = None
            try:
                is_aborted = await held.future
            finally:
                del self._held[held]
            if is_aborted:
                yield None
                return
        version, adapter = self.version, call.model.adapter
        version = version if adapter is None else version.adapted(adapter.digest)
        call.model = dataclasses.replace(call.model, origin=version.origin, fingerprint=version.fingerprint)
        run = _Run(call, names, asyncio.get_running_loop().create_future())
        self._running[run] = None
        try:
            yield run
        finally:
            del self._running[run]
            for future in self._left:
                if not future.done():
                    future.set_result(None)

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    # --- control ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Number of calls that run or wait."""
        return len(self._running) + len(self._held)

    @property
    def running(self) -> int:
        """Number of calls that the engine computes."""
        return len(self._running)

    @property
    def begun(self) -> int:
        """Number of streams whose readers have tokens."""
        return sum(run.has_begun for run in self._running)

    def is_closed(self, reason: str) -> bool:
        """Returns whether calls wait for a reason."""
        return reason in self._reasons

    def close(self, reason: str) -> None:
        """Holds back all calls until the gate was opened for every reason for which it was closed."""
        self._reasons.add(reason)

    def open(self, reason: str) -> None:
        """Removes a reason, and lets calls pass if no other one is left."""
        self._reasons.discard(reason)
        if not self._reasons:
            for held in self._held:
                if not held.future.done():
                    held.future.set_result(False)

    async def empty(self) -> None:
        """Waits until no call is running."""
        while self._running:
            future = asyncio.get_running_loop().create_future()
            self._left.add(future)
            try:
                await future
            finally:
                self._left.discard(future)

    def restart(self) -> None:
        """Makes all calls start over that have not begun: whole answers, and streams before their first token."""
        for run in self._running:
            if not run.restart.done():
                run.restart.set_result(None)

    async def abort(self, commands: Commanded, names: Collection[str] | None = None) -> int:
        """Ends the calls with one of these names (None: all), and returns their number. They get the tokens so far."""
        held = [one for one in self._held if _is_named(one.names, names)]
        for one in held:
            if not one.future.done():
                one.future.set_result(True)
        return len(held) + await self.abort_running(commands, names)

    async def abort_running(self, commands: Commanded, names: Collection[str] | None = None) -> int:
        """Ends the calls of `abort` that have passed the gate."""
        runs = [run for run in self._running if _is_named(run.names, names)]
        if runs:
            await commands.command(Abort(tuple(run.call.id for run in runs)))
        return len(runs)


def _is_named(given: Collection[str], wanted: Collection[str] | None) -> bool:
    return wanted is None or any(name in wanted for name in given)


def _nothing(request: Request) -> Generation:
    """Returns the generation of a request that was aborted before it began."""
    assert not isinstance(request.prompt, str)
    completion = Completion(tokens=(), logprobs=(), top_logprobs=(), text="", finish_reason=ABORT)
    return Generation(tuple(map(int, request.prompt)), (completion,) * request.sampling.n)


async def _unless[T](stop: asyncio.Future[None], work: Awaitable[T]) -> T | None:
    """Returns the result of `work`, or cancels it and returns None when `stop` is done first."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
