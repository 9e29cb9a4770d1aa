"""A server in this process whose engine gives written answers: no model computes, and no program is compiled."""

import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final

from starlette.applications import Starlette
from starlette.testclient import TestClient

from detjax.audit import Origin
from detjax.engine import EngineConfig, Generation, PromptLogprobs, Request, Token
from detjax.engine.request_reader import RequestReader
from detjax.models import ModelMetadata, Tokenizer
from detjax.server import Settings
from detjax.server.app import app_of
from detjax.server.replicated_engine import Batch, ReplicatedEngine, completion_of
from tests.server.running_server import MODEL

LENGTH: Final = 400
"""The engine's maximum length, in tokens."""
TOP: Final = 20
"""The engine's `top_logprobs`."""
SCORES: Final = (-0.5, -1.25, -2.0)
"""Logprobs of the likeliest tokens at every position. A request gets as many as it asks for."""
LIKELIEST: Final = (40, 41, 42)
"""Their tokens."""
ORIGIN: Final = Origin("0123456789abcdef", "5" * 64)
"""The origin that receipts tell."""


class Script:
    """Replicas whose answers are written.

    Attributes:
        asked: the requests so far.
        tokens: the tokens of each sample; sample number s has the logprobs -1 - s, and after each token 1/8 less.
            Logprobs of the sampling distribution are all 1/2 more, also in prompts.
        texts: the text that each token adds.
        reason: why the samples end.
        error: what they answer instead.
        cached: tokens of the prompt that came from the prefix cache.
        reader: refuses requests as an engine does; None: they are all accepted.
    """

    failure: BaseException | None = None

    def __init__(self, tokens: Sequence[int] = (5, 6), texts: Sequence[str | None] = ("x", "y")) -> None:
        self.asked: list[Request] = []
        self.tokens, self.texts = tokens, texts
        self.reason = "length"
        self.error: Exception | None = None
        self.cached = 0
        self.reader: RequestReader | None = None

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        self.asked += requests
        error = self.error or (self.reader and _refusal(self.reader, requests, is_streamed=not is_whole))
        if error is not None:
            yield error
            return
        for index, request in enumerate(requests):
            samples = [self._sample(request, sample) for sample in range(request.sampling.n)]
            if not is_whole:
                for tokens in samples:
                    yield [(index, token) for token in tokens]
            scores = None
            if request.sampling.prompt_logprobs:
                rest = len(request.prompt) - 1
                scores = PromptLogprobs(tuple(-4 - i / 8 for i in range(rest)), (self._top(request),) * rest)
                if request.sampling.sampling_logprobs:
                    sampling = tuple(logprob + 0.5 for logprob in scores.logprobs)
                    top = (self._sampling_top(request),) * rest
                    scores = dataclasses.replace(scores, sampling_logprobs=sampling, sampling_top_logprobs=top)
            completions = tuple(map(completion_of, samples))
            yield [(index, Generation(tuple(request.prompt), completions, scores, self.cached))]  # pyright: ignore

    def _sample(self, request: Request, sample: int) -> list[Token]:
        top, last = self._top(request), len(self.tokens) - 1
        tokens = [
            Token(sample, token, -1.0 - sample - i / 8, top, text, self.reason if i == last else None, 3, self.cached)
            for i, (token, text) in enumerate(zip(self.tokens, self.texts, strict=True))
        ]
        if not request.sampling.sampling_logprobs:
            return tokens
        fields = {"sampling_top_logprobs": self._sampling_top(request)}
        return [dataclasses.replace(one, sampling_logprob=one.logprob + 0.5, **fields) for one in tokens]

    def _top(self, request: Request) -> tuple[tuple[int, float], ...]:
        return tuple(zip(LIKELIEST, SCORES, strict=True))[: request.sampling.top_logprobs]

    def _sampling_top(self, request: Request) -> tuple[tuple[int, float], ...]:
        return tuple((token, logprob + 0.5) for token, logprob in self._top(request))


def _refusal(reader: RequestReader, requests: Sequence[Request], *, is_streamed: bool) -> ValueError | None:
    """Returns the error of the first request that an engine refuses, if any."""
    for number, request in enumerate(requests):
        try:
            reader.samples_of(f"request {number}", request, is_streamed=is_streamed)
        except ValueError as error:
            return error
    return None


class Client(TestClient):
    """A client of a scripted server.

    Attributes:
        script: what its engine answers.
    """

    def __init__(self, app: Starlette, script: Script, **options: Any) -> None:
        super().__init__(app, raise_server_exceptions=False, **options)
        self.script = script

    def ask(self, path: str, **body: Any) -> Any:
        """The JSON of an answer; for a stream, its events without the last one, [DONE]."""
        response = self.post(path, json={"model": MODEL} | body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return response.json()
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        assert path == "/v1/responses" or lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def refusal(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the error of an answer."""
        response = self.post(path, json={"model": MODEL} | body)
        return response.status_code, response.json()["error"]

    def asked(self, path: str, **body: Any) -> Request:
        """The request that reaches the engine."""
        before = len(self.script.asked)
        self.ask(path, **body)
        (request,) = self.script.asked[before:]
        return request


@contextlib.contextmanager
def scripted(
    metadata: ModelMetadata,
    tokenizer: Tokenizer,
    script: Script | None = None,
    options: dict[str, Any] | None = None,
    is_strict: bool = False,
    **settings: Any,
) -> Iterator[Client]:
    """A client of a server. `options` are the client's, and `settings` the server's.

    A strict server refuses requests that an engine cannot serve.
    """
    script = script or Script()
    config = EngineConfig(max_length=LENGTH, top_logprobs=TOP)
    if is_strict:
        script.reader = RequestReader(metadata, tokenizer, config)
    engine = ReplicatedEngine(script, metadata, tokenizer, config)
    app = app_of(engine, metadata, tokenizer, Settings(MODEL, **{"unseeded": "fixed"} | settings), ORIGIN)
    with contextlib.closing(app.state.texts), Client(app, script, **options or {}) as client:
        yield client
