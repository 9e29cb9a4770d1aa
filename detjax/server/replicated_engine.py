"""An engine whose requests replicas answer: engines in other processes, any of which may die at any time.

All replicas give a request the same bits. So a stream whose replica is lost goes on at another one, from the tokens
that have come, and nobody who reads them can tell. A call that is not streamed begins again there. Its tokens come all
at once, because it takes this process longer to pass on every token by itself than several GPUs take to compute it.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Final, Protocol

from detjax.engine import (
    Completion,
    Engine,
    EngineClosed,
    EngineConfig,
    Generation,
    NotFinite,
    Request,
    Token,
)
from detjax.engine.request_reader import RequestReader
from detjax.models import ModelMetadata, Tokenizer

type Event = tuple[int, Token | Generation]
"""The number of a request, and a token of it or, behind its last token, its generation."""
type Batch = list[Event] | Exception
"""Events that come at the same time, or why a replica does not answer."""

MAX_LOSSES: Final = 8
"""Replicas that a request may lose without a single new token. A request that ends every process which computes it must
not go through all of them again and again."""
_PAUSE: Final = 0.1
"""Seconds before a request that got no token is sent to a further replica, for each one it has lost."""


class ReplicaLost(RuntimeError):
    """A replica has died, or cannot be reached, before it had answered."""


class Replicas(Protocol):
    """The replicas of an engine."""

    @property
    def failure(self) -> BaseException | None:
        """Why there will be no replica any more; None while there is one, or one may come."""
        ...

    def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        """Yields what one of the replicas answers, which a router chooses.

        Args:
            requests: the requests.
            is_whole: whether their generations alone are asked for, without each token as it comes.

        Raises:
            ReplicaLost: the replica is gone. Another call gets another one.
        """
        ...


async def batches(engine: Engine, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
    """Yields what a replica's engine answers, as many events at a time as there are; see `Replicas.stream`.

    What a client must be told of, and the end of the engine, come as exceptions that are yielded: where they were
    raised in another process, their text would have a traceback.
    """
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    async def fill() -> None:
        try:
            for request in requests:
                if (constraint := request.sampling.constraint) is not None:
                    # That may take a second, in which other streams go on.
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
    """An `Engine` to those who send requests, of which replicas compute every one."""

    def __init__(
        self, replicas: Replicas, outline: ModelMetadata, tokenizer: Tokenizer | None, config: EngineConfig
    ) -> None:
        """An engine.

        Args:
            replicas: they compute the answers.
            outline: that of their model.
            tokenizer: theirs.
            config: the settings of their engines, resolved.
        """
        super().__init__(outline, tokenizer, config)
        self._replicas = replicas
        self.losses = 0
        """How often a call has lost its replica."""

    @property
    def failure(self) -> BaseException | None:
        """Why there will be no replica any more; None while there is one, or one may come."""
        return self._replicas.failure

    @property
    def is_open(self) -> bool:
        """True if it takes requests. With no replica left, they wait for a new one."""
        return self.failure is None

    async def generate_async(self, requests: Iterable[Request]) -> list[Generation]:
        """Returns what `Engine.generate_async` returns.

        Raises:
            ValueError: a request cannot be served.
            EngineClosed: the requests have lost too many replicas.
        """
        answers = [_Answer(request) for request in requests]
        async with contextlib.aclosing(self._tokens(answers, is_whole=True)) as tokens:
            async for _ in tokens:
                pass
        return [answer.generation() for answer in answers]

    async def stream_all(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token]]:
        """Yields what `Engine.stream_all` yields.

        Raises:
            ValueError: a request cannot be served.
            EngineClosed: the requests have lost too many replicas.
        """
        async with contextlib.aclosing(
            self._tokens([_Answer(request) for request in requests], is_whole=False)
        ) as tokens:
            async for token in tokens:
                yield token

    async def _tokens(self, answers: list["_Answer"], *, is_whole: bool) -> AsyncGenerator[tuple[int, Token]]:
        """Yields every token once, however many replicas are lost meanwhile."""
        in_a_row = 0
        while unanswered := [number for number, answer in enumerate(answers) if answer.end is None]:
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
                        f"the request has lost {MAX_LOSSES} replicas one after the other before they gave it a token; "
                        "send it again later"
                    ) from None
                await asyncio.sleep(_PAUSE * (in_a_row - 1))


class _Answer:
    """What has come of a request so far.

    Attributes:
        end: the generation that came behind the last token; it holds what the last replica has generated.
    """

    def __init__(self, request: Request) -> None:
        self.end: Generation | None = None
        self._request = request
        self._tokens: list[list[Token]] = [[] for _ in range(request.sampling.n)]
        self._heard: list[int] = []
        """How many tokens of each sample have come, those that replicas repeat counted once."""

    def rest(self) -> Request:
        """Returns the request as a replica is asked for what is missing."""
        if self._request.sampling.prompt_logprobs:  # no replica has those of another one, so the next begins again
            self._heard = [0] * len(self._tokens)
            return self._request
        self._heard = [len(sample) for sample in self._tokens]
        begun = itertools.zip_longest(self._request.generated, self._tokens, fillvalue=())
        given = [(*before, *(token.token for token in sample)) for before, sample in begun]
        return dataclasses.replace(self._request, generated=given) if any(given) else self._request

    def take(self, token: Token) -> Token | None:
        """Notes a token, and returns it as the client gets it; None if the client has it already.

        Raises:
            RuntimeError: a replica repeats a token with other bits.
        """
        sample = self._tokens[token.sample]
        place, self._heard[token.sample] = self._heard[token.sample], self._heard[token.sample] + 1
        first = next((tokens[0] for tokens in self._tokens if tokens), token)
        # What the first replica found in its cache is what the client was told.
        if token.cached_tokens != first.cached_tokens:
            token = dataclasses.replace(token, cached_tokens=first.cached_tokens)
        if place < len(sample):
            if dataclasses.replace(sample[place], batch=token.batch) != token:
                raise RuntimeError(f"replicas give different bits: {sample[place]} and {token}")
            return None
        sample.append(token)
        return token

    def generation(self) -> Generation:
        """Returns the whole generation, all of whose tokens have come."""
        assert self.end is not None
        cached = next((token.cached_tokens for tokens in self._tokens for token in tokens), self.end.cached_tokens)
        # A sample that came with all of its tokens has none here.
        pairs = zip(self._tokens, self.end.completions, strict=True)
        completions = tuple(_completion(tokens) if tokens else last for tokens, last in pairs)
        return Generation(self.end.prompt_tokens, completions, self.end.prompt, cached)


def _completion(tokens: Sequence[Token]) -> Completion:
    reason = tokens[-1].finish_reason
    assert reason is not None
    texts = [token.text for token in tokens if token.text is not None]
    return Completion(
        tokens=tuple(token.token for token in tokens),
        logprobs=tuple(token.logprob for token in tokens),
        top_logprobs=tuple(token.top_logprobs for token in tokens),
        text="".join(texts) if texts else None,
        finish_reason=reason,
        sampling_logprobs=tuple(one for token in tokens if (one := token.sampling_logprob) is not None),
    )
