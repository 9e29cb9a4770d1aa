"""The routes, and what happens between a request and its answer."""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from detjax import fingerprints, models
from detjax.contract import CONTRACT_VERSION
from detjax.engine import Engine, EngineClosed, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.options import KVQuantization
from detjax.server import openapi
from detjax.server.answers import Answer, Chat, Completions, Served
from detjax.server.errors import ApiError, of_validation
from detjax.server.guard import ClientGone, Guard
from detjax.server.metrics import Metrics
from detjax.server.schemas import ChatRequest, CompletionRequest, Sampling

_log: Final = logging.getLogger(__name__)
_PAGE: Final = Path(__file__).parent / "page"
_PAGE_HEADERS: Final = {
    # It may be given a key.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a server deals with its clients; no answer depends on it.

    Attributes:
        name: the model's, for clients.
        api_keys: one of which clients have to send; none: nobody needs one.
        max_on_their_way: samples at most, those that wait included; more are answered 429.
        max_body: bytes of a request.
        body_seconds: that a client may take to send it.
        request_seconds: that an answer may take.
    """

    name: str
    api_keys: Sequence[str] = ()
    max_on_their_way: int = 1024
    max_body: int = 8 << 20
    body_seconds: float = 30
    request_seconds: float = 600

    def __post_init__(self) -> None:
        accepted = {
            "name": (bool(self.name), "a name"),
            "api_keys": (all(self.api_keys), "keys that are not empty"),
            "max_on_their_way": (self.max_on_their_way >= 1, "at least 1"),
            "max_body": (self.max_body >= 1, "at least 1"),
            "body_seconds": (self.body_seconds > 0, "more than 0"),
            "request_seconds": (self.request_seconds > 0, "more than 0"),
        }
        for name, (holds, what) in accepted.items():
            if not holds:
                given = "one that is empty" if name == "api_keys" else repr(getattr(self, name))
                raise ValueError(f"Settings: {name} is {given}; accepted: {what}")


def system_fingerprint(model: Decoder, tokenizer: Tokenizer, kv_cache_dtype: KVQuantization | None = None) -> str:
    """What answers depend on besides requests: contract, environment, and model. Equal ones promise equal bits."""
    own = hashlib.sha256(f"{models.digest(model, tokenizer)} {kv_cache_dtype}".encode()).hexdigest()
    return f"detjax-{CONTRACT_VERSION}-{fingerprints.fingerprint().digest}-{own[:16]}"


def create_app(engine: Engine, model: Decoder, tokenizer: Tokenizer, settings: Settings) -> Starlette:
    """The server as an ASGI application. All weights are read for its fingerprint: for large models that takes a while.

    Args:
        engine: answers; it is the caller's to close.
        model: the engine's.
        tokenizer: the engine's.
        settings: see there.
    """
    fingerprint = system_fingerprint(model, tokenizer, engine.kv_cache_dtype)
    served = Served(settings.name, engine, tokenizer, _defaults(model), fingerprint)
    api = _Api(served, settings)
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics_text),
        Route("/openapi.json", lambda _: JSONResponse(document)),
        Route("/", lambda _: FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)),
        Mount("/page", _Page(directory=_PAGE)),
    ]
    document = openapi.document(settings.name, needs_key=bool(settings.api_keys))
    handlers = {ApiError: _told, HTTPException: _http_error}
    app = Starlette(routes=routes, exception_handlers=handlers)  # pyright: ignore[reportArgumentType]
    app.add_middleware(_Counted, metrics=api.metrics, paths=[route.path for route in routes])
    app.state.guard, app.state.fingerprint = api.guard, fingerprint
    return app


def _defaults(model: Decoder) -> dict[str, Any]:
    """What a request is sampled with where it is silent: the checkpoint's settings, if it has any, else OpenAI's."""
    own = model.generation_defaults
    if own is None or not own.do_sample:
        return {"temperature": 1.0}
    params = SamplingParams.recommended(model)
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}


class _Api:
    def __init__(self, served: Served, settings: Settings) -> None:
        self.served, self.settings = served, settings
        self.guard = Guard(settings.max_on_their_way, settings.request_seconds)
        self.metrics = Metrics(served.engine)
        self._keys = [key.encode() for key in settings.api_keys]

    # --- generation ---------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, Completions)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, Chat)

    async def _answer(
        self, request: Request, schema: type[Sampling], kind: Callable[[Any, Served], Answer]
    ) -> Response:
        self._authorize(request)
        asked = await self._asked(request, schema)
        if asked.model != self.served.name:
            raise _no_model(asked.model, self.served.name)
        try:
            answer = await run_in_threadpool(kind, asked, self.served)  # encoding a long prompt takes a while
            with contextlib.ExitStack() as until_answered:
                until = until_answered.enter_context(self.guard.admitted(answer.samples))
                self.metrics.prompt_tokens.inc(sum(len(one.prompt) for one in answer.requests))
                if asked.stream:
                    events = self._events(answer)
                    # What is refused, is refused before the answer has begun.
                    first = await self.guard.watch(request.receive, anext(events), until)  # pyright: ignore
                    return _EventStream(self.guard, first, events, until, until_answered.pop_all())
                generations = self.served.engine.generate_async(answer.requests)
                found = await self.guard.watch(request.receive, generations, until)
        except ClientGone:
            return Response(status_code=499)  # to nobody
        except Exception as error:
            return _as_told(error).response()
        self.metrics.generated_tokens.inc(sum(len(c.tokens) for one in found for c in one.completions))
        return JSONResponse(answer.whole(found))

    async def _events(self, answer: Answer) -> AsyncGenerator[bytes]:
        """The answer's server-sent events."""
        clock = asyncio.get_running_loop().time
        begun, last = clock(), dict[tuple[int, int], float]()
        generated = 0
        async with contextlib.aclosing(self.served.engine.stream_all(answer.requests)) as tokens:
            async for prompt, token in tokens:
                now = clock()
                if not generated:
                    self.metrics.first_token.observe(now - begun)
                    for chunk in answer.opening():
                        yield _event(chunk)
                generated += 1
                self.metrics.generated_tokens.inc()
                if (before := last.get((prompt, token.sample))) is not None:
                    self.metrics.next_token.observe(now - before)
                last[prompt, token.sample] = now
                for chunk in answer.news(prompt, token):
                    yield _event(chunk)
        for chunk in answer.closing(generated):
            yield _event(chunk)
        yield b"data: [DONE]\n\n"

    # --- what is sent -------------------------------------------------------------------------------------------------

    def _authorize(self, request: Request) -> None:
        if not self._keys:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")
        if kind.lower() != "bearer" or not any([hmac.compare_digest(given, known) for known in self._keys]):
            what = "no API key is sent" if not key else "the API key is wrong"
            raise ApiError(
                401,
                f"{what}; accepted: the header Authorization: Bearer and a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _asked(self, request: Request, schema: type[Sampling]) -> Sampling:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the content type is {kind!r}; accepted: application/json")
        body = await self._body(request)
        try:
            # Lists of a million numbers take a while.
            return (
                await run_in_threadpool(schema.model_validate_json, body)
                if len(body) > 1 << 16
                else (schema.model_validate_json(body))
            )
        except ValidationError as error:
            raise of_validation(error) from None

    async def _body(self, request: Request) -> bytes:
        too_large = ApiError(413, f"the request is too large; accepted: up to {self.settings.max_body} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.settings.max_body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.settings.max_body:
                        raise too_large
        except TimeoutError:
            seconds = self.settings.body_seconds
            raise ApiError(408, f"the request did not arrive within {seconds:g} s", code="timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left before it had sent the request") from None
        return bytes(body)

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._authorize(request)
        name = request.path_params["name"]
        if name != self.served.name:
            raise _no_model(name, self.served.name)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        own = {"id": self.served.name, "object": "model", "created": self.served.created, "owned_by": "detjax"}
        own |= {"max_model_len": self.served.engine.max_tokens, "chat": self.served.tokenizer.has_chat_template}
        return own | {"system_fingerprint": self.served.fingerprint}

    async def health(self, _: Request) -> Response:
        if self.guard.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        if not self.served.engine.is_open:
            return JSONResponse({"status": "the engine has failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics_text(self, _: Request) -> Response:
        return Response(self.metrics.text(), headers={"Content-Type": _METRICS_TYPE})


class _EventStream(Response):
    """Server-sent events; what goes wrong after the first one is told as an event too."""

    media_type = "text/event-stream"

    def __init__(
        self,
        guard: Guard,
        first: bytes,
        events: AsyncGenerator[bytes],
        until: float,
        until_answered: contextlib.ExitStack,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self._guard, self._first, self._events, self._until = guard, first, events, until
        self._until_answered = until_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._until_answered:
            async with contextlib.aclosing(self._events):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    await self._guard.watch(receive, self._send(send), self._until)
                except ClientGone:
                    return
                except Exception as error:
                    await _send_part(send, _event(_as_told(error).body))
                await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send) -> None:
        await _send_part(send, self._first)
        async for event in self._events:
            await _send_part(send, event)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class _Page(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


class _Counted:
    """Counts requests, and times their answers."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"] if scope["path"] in self._paths else "other"
        clock = asyncio.get_running_loop().time
        begun, status = clock(), 499

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(clock() - begun)


def _no_model(given: str, name: str) -> ApiError:
    return ApiError(404, f"there is no model {given!r} here; accepted: {name!r}", param="model", code="model_not_found")


async def _told(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, error.detail, headers=dict(error.headers or {})).response()


def _as_told(error: Exception) -> ApiError:
    """What a client is told of what went wrong."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error))
    if isinstance(error, ValueError):  # of the engine, the tokenizer, the chat template: what is asked cannot be served
        return ApiError(400, str(error))
    _log.error("a request has failed", exc_info=error)
    return ApiError(500, "the server has a defect, which its log tells of")
