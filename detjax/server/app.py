"""The ASGI application: its routes, and the way of a request from its body to its response."""

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable
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

from detjax import fingerprints, models
from detjax.contract import CONTRACT_VERSION
from detjax.engine import Engine, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.options import KVQuantization
from detjax.server import openapi
from detjax.server.api_calls import ApiCall, ChatCall, CompletionCall, ServedModel
from detjax.server.errors import ApiError, error_response, from_validation_error, to_api_error
from detjax.server.guard import ClientGone, Guard
from detjax.server.metrics import Metrics, RequestMetrics
from detjax.server.schemas import ChatRequest, CompletionRequest, GenerationRequest
from detjax.server.settings import Settings
from detjax.server.streaming import DONE, EventStream, event

_PAGE: Final = Path(__file__).parent / "page"
_PAGE_HEADERS: Final = {
    # Users may type an API key into the page.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LONG_BODY: Final = 1 << 16
"""Bytes of JSON from which on a thread parses it, because a list of a million numbers takes a while."""


def system_fingerprint(model: Decoder, tokenizer: Tokenizer, kv_cache_dtype: KVQuantization | None = None) -> str:
    """Returns a digest of all that answers depend on besides requests: contract, environment and model.

    Servers with equal fingerprints give the same request the same bits.
    """
    digest = hashlib.sha256(f"{models.digest(model, tokenizer)} {kv_cache_dtype}".encode()).hexdigest()
    return f"detjax-{CONTRACT_VERSION}-{fingerprints.fingerprint().digest}-{digest[:16]}"


def create_app(engine: Engine, model: Decoder, tokenizer: Tokenizer, settings: Settings) -> Starlette:
    """Returns the server as an ASGI application.

    It reads all weights for the fingerprint, which takes a while for large models.

    Args:
        engine: generates the answers. The caller closes it.
        model: the engine's model.
        tokenizer: the engine's tokenizer.
        settings: how it treats clients.
    """
    fingerprint = system_fingerprint(model, tokenizer, engine.config.kv_cache_dtype)
    served = ServedModel(settings.name, engine, tokenizer, _sampling_defaults(model), fingerprint)
    api = _Api(served, settings)
    document = openapi.document(settings.name, needs_key=bool(settings.api_keys))
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", api.retrieve_model),
        Route("/health", api.health),
        Route("/metrics", api.metrics_text),
        Route("/openapi.json", lambda _: JSONResponse(document)),
        Route("/", lambda _: FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)),
        Mount("/page", _PageFiles(directory=_PAGE)),
    ]
    app = Starlette(routes=routes, exception_handlers={ApiError: error_response, HTTPException: error_response})
    app.add_middleware(RequestMetrics, metrics=api.metrics, paths=[route.path for route in routes])
    app.state.guard, app.state.fingerprint = api.guard, fingerprint
    return app


def _sampling_defaults(model: Decoder) -> dict[str, Any]:
    """Sampling parameters of requests that give none: the checkpoint's recommendation, else OpenAI's default."""
    recommended = model.generation_defaults
    if recommended is None or not recommended.do_sample:
        return {"temperature": 1.0}
    params = SamplingParams.recommended(model)
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}


class _Api:
    """The handlers of the routes."""

    def __init__(self, served: ServedModel, settings: Settings) -> None:
        self.served, self.settings = served, settings
        self.guard = Guard(settings.max_in_flight, settings.request_seconds)
        self.metrics = Metrics(served.engine)
        self._keys = [key.encode() for key in settings.api_keys]

    # --- generation ---------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, CompletionRequest, CompletionCall)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, ChatRequest, ChatCall)

    async def _generate(
        self,
        request: Request,
        schema: type[GenerationRequest],
        call_type: Callable[[Any, ServedModel], ApiCall],
    ) -> Response:
        self._authorize(request)
        body = await self._parse_body(request, schema)
        self._check_model_name(body.model)
        try:
            call = await run_in_threadpool(call_type, body, self.served)  # tokenizing a long prompt takes a while
            with contextlib.ExitStack() as admission:
                deadline = admission.enter_context(self.guard.admitted(call.num_samples))
                self.metrics.prompt_tokens.inc(sum(len(one.prompt) for one in call.requests))
                if body.stream:
                    events = self._events(call)
                    # The first event tells whether the engine refuses the request, in time for the status to say so.
                    first = await self.guard.watch(request.receive, anext(events), deadline)  # pyright: ignore
                    return EventStream(self.guard, first, events, deadline, admission.pop_all())
                generating = self.served.engine.generate_async(call.requests)
                generations = await self.guard.watch(request.receive, generating, deadline)
        except ClientGone:
            return Response(status_code=499)  # nobody receives it
        except Exception as error:
            return to_api_error(error).response()
        self.metrics.generated_tokens.inc(sum(len(c.tokens) for one in generations for c in one.completions))
        return JSONResponse(call.full_response(generations))

    async def _events(self, call: ApiCall) -> AsyncGenerator[bytes]:
        """Yields the server-sent events of a streamed response, and counts its tokens."""
        clock = asyncio.get_running_loop().time
        start, last_times = clock(), dict[tuple[int, int], float]()
        generated = 0
        async with contextlib.aclosing(self.served.engine.stream_all(call.requests)) as tokens:
            async for prompt, token in tokens:
                now = clock()
                if not generated:
                    self.metrics.first_token.observe(now - start)
                    for chunk in call.first_chunks():
                        yield event(chunk)
                generated += 1
                self.metrics.generated_tokens.inc()
                if (last := last_times.get((prompt, token.sample))) is not None:
                    self.metrics.next_token.observe(now - last)
                last_times[prompt, token.sample] = now
                for chunk in call.token_chunks(prompt, token):
                    yield event(chunk)
        for chunk in call.last_chunks(generated):
            yield event(chunk)
        yield DONE

    # --- requests -----------------------------------------------------------------------------------------------------

    def _authorize(self, request: Request) -> None:
        """Refuses requests without one of the server's keys, if it has any."""
        if not self._keys:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")
        if kind.lower() != "bearer" or not any([hmac.compare_digest(given, known) for known in self._keys]):
            problem = "no API key was sent" if not key else "the API key is wrong"
            raise ApiError(
                401,
                f"{problem}; expected: the header 'Authorization: Bearer KEY' with a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_model_name(self, name: str) -> None:
        if name != self.served.name:
            raise ApiError(
                404, f"model is {name!r}; accepted: {self.served.name!r}", param="model", code="model_not_found"
            )

    async def _parse_body(self, request: Request, schema: type[GenerationRequest]) -> GenerationRequest:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, f"the content type is {content_type!r}; accepted: application/json")
        body = await self._read_body(request)
        try:
            if len(body) > _LONG_BODY:
                return await run_in_threadpool(schema.model_validate_json, body)
            return schema.model_validate_json(body)
        except ValidationError as error:
            raise from_validation_error(error) from None

    async def _read_body(self, request: Request) -> bytes:
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
            message = f"the request did not arrive within {self.settings.body_seconds:g} s, the server's limit"
            raise ApiError(408, message, code="timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the client disconnected before it had sent the whole request") from None
        return bytes(body)

    # --- other routes -------------------------------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def retrieve_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._authorize(request)
        self._check_model_name(request.path_params["name"])
        return JSONResponse(self._model_json())

    def _model_json(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "detjax",
            "max_model_len": self.served.engine.max_length,
            "chat": self.served.tokenizer.has_chat_template,
            "system_fingerprint": self.served.fingerprint,
        }

    async def health(self, _: Request) -> Response:
        """GET /health."""
        if self.guard.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        if not self.served.engine.is_open:
            return JSONResponse({"status": "the engine has failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics_text(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), headers={"Content-Type": _METRICS_TYPE})


class _PageFiles(StaticFiles):
    """The page's files, with the page's headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response
