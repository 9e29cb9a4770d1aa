"""An engine that forwards requests to replicas: engines in other processes, which may die at any time.

All replicas give a request the same bits. If a replica dies, a stream therefore continues on another one from the last
received token, and its reader cannot tell. A call that is not streamed starts over. Its tokens arrive all at once,
because forwarding single tokens would take this process longer than several GPUs take to compute them.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from detjax.engine import (
    Aborted,
    Completion,
    Engine,
    EngineClosed,
    EngineConfig,
    Generation,
    NotFinite,
    Request,
    Token,
)
from detjax.engine.commands import Abort, Command
from detjax.engine.engine import REMEMBERED
from detjax.engine.job import ABORT
from detjax.engine.request_reader import RequestReader
from detjax.models import Adapter, ModelMetadata, Tokenizer

type Event = tuple[int, Token | Aborted | Generation]
"""The index of a request, with one of its tokens, the end of an aborted sample or, at its end, its generation."""
type Batch = list[Event] | Exception
"""Events that arrive together, or the error of a replica that does not answer."""

MAX_LOSSES: Final = 8
"""Replicas in a row that a request may lose without a new token, so that a request that crashes every process does not
kill replicas forever."""
_PAUSE: Final = 0.1
"""Seconds to wait before a retry, per replica that the request has lost without a new token."""


class ReplicaLost(RuntimeError):
    """A replica has died or become unreachable before it answered."""


class Replicas(Protocol):
    """The replicas of an engine."""

    @property
    def failure(self) -> BaseException | None:
        """The reason why no replica can start again; None while one is available or may become so."""
        ...

    def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        """Sends requests to one of the replicas, and yields its answer: only generations if `is_whole`.

        Raises:
            ReplicaLost: the replica is lost. A new call goes to another one.
        """
        ...

    async def command(self, command: Command) -> Any:
        """Runs a command in all replicas; see `Commanded`. Later replicas get the same state.

        Raises:
            ReplicaLost: no replica has run it.
        """
        ...

    @property
    def kept_files(self) -> Collection[Path]:
        """Files of updates that replicas need when they start again."""
        ...


async def batches(engine: Engine, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
    """Yields the answer of a replica's engine, with all pending events in each batch; see `Replicas.stream`.

    Errors for the client, and the end of the engine, are yielded: an exception raised in another process would have a
    traceback in its text.
    """
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    async def fill() -> None:
        try:
            for request in requests:
                if (constraint := request.sampling.constraint) is not None:
                    # In a thread: it may take a second, and must not block other streams.
                    await asyncio.to_thread(engine.compile_constraint, constraint)
            if is_whole:
                for event in enumerate(await engine.generate_async(requests)):
                    queue.put_nowait(event)
            else:
                async with contextlib.aclosing(engine.stream_events(requests)) as events:
                    async for event in events:
                        queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    filling = asyncio.create_task(fill())
    try:
        last: Event | Exception | None = None
        while isinstance(last, tuple) or last is None:
            waiting = [await queue.get()]
            while not queue.empty():
                waiting.append(queue.get_nowait())
            events = [one for one in waiting if isinstance(one, tuple)]
            if events:
                yield events
            last = waiting[-1]
            if last is None:
                return
        if not isinstance(last, ValueError | NotFinite | EngineClosed):
            raise last
        yield last
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


class ReplicatedEngine(RequestReader):
    """An `Engine` for callers, whose requests are computed by replicas.

    Attributes:
        losses: how many calls have lost their replica.
    """

    def __init__(
        self,
        replicas: Replicas,
        metadata: ModelMetadata,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
    ) -> None:
        """An engine that forwards requests to `replicas`.

        `config` has their engines' resolved settings, and `adapters` those that each of them has loaded.
        """
        super().__init__(metadata, tokenizer, config)
        self._adapters |= adapters
        self._adapter_names = {adapter.digest: name for name, adapter in adapters.items()}
        self._replicas = replicas
        self.losses = 0
        self._aborted: OrderedDict[str, None] = OrderedDict()
        """Ids of aborted requests, for calls that have lost their replica and go to one that does not know them."""

    @property
    def failure(self) -> BaseException | None:
        """The reason why no replica can start again; None while one is available or may become so."""
        return self._replicas.failure

    @property
    def is_open(self) -> bool:
        """True if the engine takes requests. They wait if no replica is available at the moment."""
        return self.failure is None

    async def generate_async(self, requests: Iterable[Request]) -> list[Generation]:
        """Generates completions, like `Engine.generate_async`; raises EngineClosed after losing too many replicas."""
        answers = [_Answer(self._sent(request)) for request in requests]
        async with contextlib.aclosing(self._tokens(answers, is_whole=True)) as tokens:
            async for _ in tokens:
                pass
        return [answer.generation() for answer in answers]

    def _sent(self, request: Request) -> Request:
        """Returns a request as replicas get it: with the name of its adapter, as its arrays are large."""
        adapter = request.adapter
        if adapter is None or isinstance(adapter, str):
            return request
        return dataclasses.replace(request, adapter=self._adapter_names[adapter.digest])

    @property
    def kept_files(self) -> Collection[Path]:
        """Files of updates that replicas need when they start again."""
        return self._replicas.kept_files

    async def command(self, command: Command) -> Any:
        """Runs a command in all replicas; see `Commanded`.

        Raises:
            ValueError: prepared weights do not fit the model.
            EngineClosed: no replica could run it.
        """
        if isinstance(command, Abort):
            self._aborted |= dict.fromkeys(command.ids)
            while len(self._aborted) > REMEMBERED:
                self._aborted.popitem(last=False)
        try:
            return await self._replicas.command(command)
        except ReplicaLost:
            if isinstance(command, Abort):
                return 0  # the calls end when they look for another replica
            raise EngineClosed("no replica of the engine is ready; retry later") from None

    async def stream_all(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token | Aborted]]:
        """Streams tokens, like `Engine.stream_all`; raises EngineClosed after losing too many replicas."""
        answers = [_Answer(self._sent(request)) for request in requests]
        async with contextlib.aclosing(self._tokens(answers, is_whole=False)) as tokens:
            async for token in tokens:
                yield token

    async def _tokens(self, answers: list["_Answer"], *, is_whole: bool) -> AsyncGenerator[tuple[int, Token | Aborted]]:
        """Yields every token once, regardless of lost replicas."""
        in_a_row = 0
        while unanswered := [number for number, answer in enumerate(answers) if answer.end is None]:
            if aborted := [number for number in unanswered if answers[number].id in self._aborted]:
                for number in aborted:
                    for end in answers[number].abort():
                        yield number, end
                continue
            rest = [answers[number].rest() for number in unanswered]
            try:
                async with contextlib.aclosing(self._replicas.stream(rest, is_whole=is_whole)) as batches:
                    async for batch in batches:
                        if isinstance(batch, EngineClosed):
                            raise ReplicaLost("its engine has ended") from batch
                        if isinstance(batch, Exception):
                            raise batch
                        for index, event in batch:
                            answer = answers[unanswered[index]]
                            if isinstance(event, Generation):
                                answer.end = event
                            elif isinstance(event, Aborted):
                                yield unanswered[index], event
                            elif (token := answer.take(event)) is not None:
                                in_a_row = 0
                                yield unanswered[index], token
                if any(answers[number].end is None for number in unanswered):
                    raise ReplicaLost("it ended its answer early")
            except ReplicaLost:
                self.losses += 1
                in_a_row += 1
                if in_a_row == MAX_LOSSES:
                    raise EngineClosed(
                        f"the request has lost {MAX_LOSSES} replicas in a row before it got a token; retry later"
                    ) from None
                await asyncio.sleep(_PAUSE * (in_a_row - 1))


class _Answer:
    """The answer to a request so far.

    Attributes:
        id: the request's id.
        end: the generation that arrived last; it has only the tokens of the last replica.
    """

    def __init__(self, request: Request) -> None:
        self.end: Generation | None = None
        self.id = request.id
        self._request = request
        self._tokens: list[list[Token]] = [[] for _ in range(request.sampling.n)]
        self._positions: list[int] = []
        """Number of tokens of each sample that the current replica has sent or was given."""

    def rest(self) -> Request:
        """Returns the request for the missing tokens."""
        if self._request.sampling.prompt_logprobs:  # a replica must compute them itself, so it starts over
            self._positions = [0] * len(self._tokens)
            return self._request
        self._positions = [len(sample) for sample in self._tokens]
        begun = itertools.zip_longest(self._request.generated, self._tokens, fillvalue=())
        generated = [(*before, *(token.token for token in sample)) for before, sample in begun]
        return dataclasses.replace(self._request, generated=generated) if any(generated) else self._request

    def take(self, token: Token) -> Token | None:
        """Records a token, and returns it for the client, or None if the client already has it."""
        sample, position = self._tokens[token.sample], self._positions[token.sample]
        self._positions[token.sample] += 1
        first = next((tokens[0] for tokens in self._tokens if tokens), token)
        # Clients see the cache hits of the first replica.
        if token.cached_tokens != first.cached_tokens:
            token = dataclasses.replace(token, cached_tokens=first.cached_tokens)
        if position < len(sample):
            if dataclasses.replace(sample[position], batch=token.batch) != token:
                raise RuntimeError(f"replicas give different bits: {sample[position]} and {token}")
            return None
        sample.append(token)
        return token

    def abort(self) -> Iterator[Aborted]:
        """Ends the answer with the tokens so far, and yields the ends of its unfinished samples."""
        assert not isinstance(self._request.prompt, str)
        completions = []
        for sample, tokens in enumerate(self._tokens):
            if tokens and tokens[-1].finish_reason is not None:
                completions.append(completion_of(tokens))
                continue
            end = Aborted(sample, "")
            completions.append(completion_of(tokens, end))
            yield end
        self.end = Generation(tuple(map(int, self._request.prompt)), tuple(completions))

    def generation(self) -> Generation:
        """Returns the complete generation."""
        assert self.end is not None
        cached = next((token.cached_tokens for tokens in self._tokens for token in tokens), self.end.cached_tokens)
        # Samples of calls that are not streamed arrive complete, without single tokens.
        pairs = zip(self._tokens, self.end.completions, strict=True)
        completions = tuple(completion_of(tokens) if tokens else last for tokens, last in pairs)
        return Generation(self.end.prompt_tokens, completions, self.end.prompt, cached, self.end.pooled)


def completion_of(tokens: Sequence[Token], aborted: Aborted | None = None) -> Completion:
    """Returns the completion that consists of these tokens of a stream, and of its end if it was aborted."""
    reason = tokens[-1].finish_reason if aborted is None else ABORT
    assert reason is not None
    texts = [one.text for one in (*tokens, aborted) if one is not None and one.text is not None]
    return Completion(
        tokens=tuple(token.token for token in tokens),
        logprobs=tuple(token.logprob for token in tokens),
        top_logprobs=tuple(token.top_logprobs for token in tokens),
        text="".join(texts) if texts else None,
        finish_reason=reason,
        sampling_logprobs=tuple(one for token in tokens if (one := token.sampling_logprob) is not None),
        sampling_top_logprobs=tuple(one for token in tokens if (one := token.sampling_top_logprobs)),
    )
