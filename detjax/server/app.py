"""The ASGI application: its routes, and the path of a request from its body to its response."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from detjax.audit import Origin
from detjax.contract import CONTRACT_VERSION
from detjax.engine import Aborted, Engine, EngineConfig, SamplingParams
from detjax.engine.commands import Commanded, EngineCommands
from detjax.engine.pooling import tasks_of
from detjax.models import Decoder, ModelMetadata, Tokenizer
from detjax.models.checkpoint.weight_updates import UpdatableWeights, most_update_bytes
from detjax.runtime import fingerprints
from detjax.server.api import openapi
from detjax.server.api.api_calls import ApiCall, Caller, ServedModel
from detjax.server.api.chat_calls import ChatCall
from detjax.server.api.completion_calls import CompletionCall
from detjax.server.api.pooling_routes import POOLING_ROUTES, PoolingRoute, not_served
from detjax.server.api.request_fields import SamplingRequest
from detjax.server.api.response_calls import ResponsesCall
from detjax.server.api.response_fields import ResponsesRequest
from detjax.server.api.schemas import ChatRequest, CompletionRequest
from detjax.server.api.text_routes import DetokenizeRequest, TokenizeRequest, detokenized, tokenized
from detjax.server.control.adapters import AdapterFiles
from detjax.server.control.control import Control
from detjax.server.control.gate import Gate, Version
from detjax.server.control.routes import ControlRoutes
from detjax.server.control.uploads import WeightFiles
from detjax.server.http import bodies
from detjax.server.http.errors import ApiError, error_response, quote, to_api_error
from detjax.server.http.guard import Admission, ClientGone, Guard
from detjax.server.http.hosts import HostCheck
from detjax.server.http.json_pieces import TURN_BYTES, JsonPieces
from detjax.server.http.keys import check_key, key_of
from detjax.server.http.metrics import Metrics, RequestMetrics
from detjax.server.http.requests import CLIENT_CLOSED_REQUEST, RequestLog, RequestRecord, record_of
from detjax.server.http.settings import RAW, LogprobsMode, Settings
from detjax.server.http.streaming import DONE, EventStream
from detjax.server.replicated_engine import ReplicatedEngine
from detjax.server.text.texts import Texts
from detjax.server.text.token_texts import TokenTexts
from detjax.server.tools.formats import reasoning_format, tool_format
from detjax.version import __version__

_PAGE: Final = Path(__file__).parent / "page"
_PAGE_HEADERS: Final = {
    # Users may type an API key into the page.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def system_fingerprint(model: Decoder, tokenizer: Tokenizer, config: EngineConfig | None = None) -> str:
    """Returns a digest of everything that answers depend on, except requests: contract, environment, model, settings.

    Servers with equal fingerprints give the same request the same bits. Answers depend on two of the engine's settings:
    the quantization of keys and values, and the maximum length, since a chat without `max_tokens` fills the remaining
    room. Sampling parameters that a request omits come from the checkpoint, which the model's digest covers, or from
    OpenAI's defaults; the answer reports the seed.
    """
    config = config or EngineConfig()
    return fingerprint_of(Origin.here(model, tokenizer, config.kv_cache_dtype), config, ModelMetadata.from_model(model))


def fingerprint_of(
    origin: Origin, config: EngineConfig, metadata: ModelMetadata, logprobs_mode: LogprobsMode = RAW
) -> str:
    """Returns the `system_fingerprint` of a model whose digest is known."""
    settings = f"{origin.kv_cache_dtype} {config.max_length or metadata.config.max_positions}"
    settings += "" if logprobs_mode == RAW else f" {logprobs_mode}"
    digest = hashlib.sha256(f"{origin.model} {settings}".encode()).hexdigest()
    return f"detjax-{CONTRACT_VERSION}-{origin.environment}-{digest[:16]}"


def create_app(engine: Engine, model: Decoder, tokenizer: Tokenizer, settings: Settings) -> Starlette:
    """Returns the server as an ASGI application.

    The fingerprint requires reading all weights, which takes a while for large models. The caller closes
    `app.state.texts`, which ends the text workers. The application does not keep the model, and neither should the
    caller, if the server has a control key: sleep would not free the memory of its weights.

    Args:
        engine: generates the answers. The caller closes it.
        model: the engine's model.
        tokenizer: the engine's tokenizer.
        settings: settings for clients.
    """
    metadata, quantization = ModelMetadata.from_model(model), engine.config.kv_cache_dtype
    if settings.control_key is None:
        return app_of(engine, metadata, tokenizer, settings, Origin.here(model, tokenizer, quantization))
    weights = UpdatableWeights(model, tokenizer)
    origin = Origin(fingerprints.fingerprint().digest, weights.digest.value, quantization)
    return app_of(engine, metadata, tokenizer, settings, origin, EngineCommands(engine, weights))


def app_of(
    engine: Engine | ReplicatedEngine,
    metadata: ModelMetadata,
    tokenizer: Tokenizer,
    settings: Settings,
    origin: Origin,
    commands: Commanded | None = None,
) -> Starlette:
    """Returns the server of `create_app` for a model that may be in other processes.

    `commands` runs commands in the engines, if the settings have a control key.
    """
    fingerprint = fingerprint_of(origin, engine.config, metadata, settings.logprobs_mode)
    texts = Texts(tokenizer, settings.text_seconds)
    served = ServedModel(
        settings.name,
        engine,
        tokenizer,
        texts,
        _sampling_defaults(metadata),
        fingerprint,
        TokenTexts(tokenizer),
        calls := tool_format(tokenizer, settings.tool_format),
        settings.image_directory,
        origin,
        draws_seeds=settings.unseeded == "random",
        logprobs_mode=settings.logprobs_mode,
        reasoning_format=reasoning_format(tokenizer, calls),
    )
    api = _Api(served, settings)
    if settings.control_key is not None:
        assert commands is not None

        def version_of(digest: str) -> Version:
            new = dataclasses.replace(origin, model=digest)
            return Version(new, fingerprint_of(new, engine.config, metadata, settings.logprobs_mode))

        api.control = Control(api.gate, commands, version_of)
        files = WeightFiles(settings.weights_directory, most_update_bytes(metadata.config), settings.body_seconds)
        adapters = AdapterFiles(engine, commands, files, settings.names)
        control = ControlRoutes(api.control, commands, files, settings.control_key, api.parse_body, adapters).routes()
    else:
        files, control = None, []
    # Few servers are asked for it, and it takes a while.
    document = functools.cache(partial(openapi.document, settings.name, needs_key=bool(settings.api_keys)))
    routes = [
        Route("/v1/completions", partial(api.generate, CompletionRequest, CompletionCall), methods=["POST"]),
        Route("/v1/chat/completions", partial(api.generate, ChatRequest, ChatCall), methods=["POST"]),
        Route("/v1/responses", partial(api.generate, ResponsesRequest, ResponsesCall), methods=["POST"]),
        Route("/v1/responses/{id:path}", api.stored_response, methods=["GET", "POST", "DELETE"]),
        *(Route(path, partial(api.pool, route), methods=["POST"]) for path, route in POOLING_ROUTES.items()),
        Route("/tokenize", partial(api.answer_text, TokenizeRequest, tokenized), methods=["POST"]),
        Route("/detokenize", partial(api.answer_text, DetokenizeRequest, detokenized), methods=["POST"]),
        Route("/version", api.version),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", api.retrieve_model),
        Route("/health", api.health),
        Route("/metrics", api.metrics_text),
        *control,
        Route("/openapi.json", lambda _: JSONResponse(document())),
        Route("/", lambda _: FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)),
        Mount("/page", _PageFiles(directory=_PAGE)),
    ]
    app = Starlette(routes=routes, exception_handlers={ApiError: error_response, HTTPException: error_response})
    if settings.allowed_hosts is not None:
        app.add_middleware(HostCheck, hosts=settings.allowed_hosts)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id",),
        )
    app.add_middleware(RequestMetrics, metrics=api.metrics, paths=[route.path for route in routes])
    app.add_middleware(RequestLog)
    app.state.engine, app.state.guard, app.state.fingerprint = engine, api.guard, fingerprint
    app.state.texts = texts
    app.state.weight_files, app.state.control, app.state.gate = files, api.control, api.gate
    return app


def _sampling_defaults(metadata: ModelMetadata) -> dict[str, Any]:
    """Returns default sampling parameters: the checkpoint's recommendation, else OpenAI's defaults."""
    recommended, params = metadata.generation_defaults, SamplingParams.recommended(metadata)
    if recommended is None or not recommended.do_sample:
        return {"temperature": 1.0, "repetition_penalty": params.repetition_penalty}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: getattr(params, name) for name in names}


class _Api:
    """The handlers of the routes."""

    def __init__(self, served: ServedModel, settings: Settings) -> None:
        self.served, self.settings = served, settings
        self.guard = Guard(settings.max_in_flight, settings.request_seconds, settings.max_pending_bytes)
        self.gate = Gate(served.engine, Version(served.origin, served.fingerprint))
        self.control: Control | None = None
        self.metrics = Metrics(served.engine, self._control_numbers)
        self._keys = [key.encode() for key in settings.api_keys]
        self._long_bodies = asyncio.Lock()
        """Serializes the parsing of long bodies, to bound its memory."""

    # --- generation ---------------------------------------------------------------------------------------------------

    async def stored_response(self, request: Request) -> Response:
        """Any request for an earlier response."""
        self._authorize(request)
        raise ApiError(404, f"response {quote(request.path_params['id'])} does not exist: the server stores none")

    async def generate(
        self, schema: type[SamplingRequest], call_type: Callable[[Any, ServedModel, Caller], ApiCall], request: Request
    ) -> Response:
        """POST /v1/completions, /v1/chat/completions and /v1/responses."""
        record = record_of(request.scope)
        self._authorize(request)
        self._check_kind(pools=False)
        body = await self.parse_body(request, schema)
        self._check_model_name(body.model)
        try:
            # Responses have the name that the client asked for.
            call = call_type(body, self._named(body.model), self._caller(request))
            with contextlib.ExitStack() as admission:
                admitted = admission.enter_context(self.guard.admitted(call.num_samples))
                deadline = admitted.deadline
                await self.guard.watch(request.receive, call.prepare(), deadline)
                record.prompt_tokens = sum(len(one.prompt) for one in call.requests)
                names = [name for name in (call.id, record.request_id, body.request_id, body.rid) if name]
                self.metrics.prompt_tokens.inc(record.prompt_tokens)
                if body.stream:
                    events = self._events(call, names, admitted, record)
                    # Waits for the first event, because an error before it can still set the HTTP status.
                    first = await self.guard.watch(request.receive, anext(events), deadline)  # pyright: ignore
                    held = admission.pop_all()
                    return EventStream(self.guard, first, events, deadline, held, call.error_event, body)
                generating = self.gate.generate(call, names)
                generations = await self.guard.watch(request.receive, generating, deadline)
                await call.read(generations)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return to_api_error(error, body).response()
        record.generated_tokens = sum(len(c.tokens) for one in generations for c in one.completions)
        self.metrics.generated_tokens.inc(record.generated_tokens)
        return JsonPieces(self.guard, call.full_response(generations), self.settings.request_seconds)

    async def _events(
        self, call: ApiCall, names: Collection[str], admission: Admission, record: RequestRecord
    ) -> AsyncGenerator[bytes]:
        """Yields the server-sent events of a streamed response, and lets other requests run while many tokens come."""
        size = 0
        async with contextlib.aclosing(self._chunks(call, names, admission, record)) as chunks:
            async for chunk in chunks:
                part = call.event(chunk)
                yield part
                size += len(part)
                if size >= TURN_BYTES:
                    size = 0
                    await asyncio.sleep(0)
        if call.ENDS_WITH_DONE:
            yield DONE

    async def _chunks(
        self, call: ApiCall, names: Collection[str], admission: Admission, record: RequestRecord
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yields the chunks of a streamed response, counts its tokens, and releases samples that end."""
        clock = asyncio.get_running_loop().time
        start, last_times = clock(), dict[tuple[int, int], float]()
        generated = 0
        has_begun = False
        async with contextlib.aclosing(self.gate.stream(call, names)) as tokens:
            async for prompt, token in tokens:
                now = clock()
                if not has_begun:
                    has_begun = True
                    self.metrics.first_token.observe(now - start)
                    for chunk in call.first_chunks():
                        yield chunk
                if isinstance(token, Aborted):
                    admission.give_back()
                    for chunk in call.abort_chunks(prompt, token):
                        yield chunk
                    continue
                generated += 1
                record.generated_tokens = generated
                self.metrics.generated_tokens.inc()
                if token.finish_reason is not None:
                    admission.give_back()
                if (last := last_times.get((prompt, token.sample))) is not None:
                    self.metrics.next_token.observe(now - last)
                last_times[prompt, token.sample] = now
                for chunk in call.token_chunks(prompt, token):
                    yield chunk
        for chunk in call.last_chunks(generated):
            yield chunk

    # --- pooling ------------------------------------------------------------------------------------------------------

    async def pool(self, route: PoolingRoute, request: Request) -> Response:
        """POST to a path of a model that pools."""
        record = record_of(request.scope)
        self._authorize(request)
        self._check_kind(pools=True)
        body: Any = await self.parse_body(request, route.schema)
        if body.model is not None:
            self._check_model_name(body.model)
        name = self.settings.name if body.model is None else body.model
        try:
            call = route.call(body, dataclasses.replace(self.served, name=name), self._caller(request))
            with self.guard.admitted(call.num_samples) as admission:
                await self.guard.watch(request.receive, call.prepare(), admission.deadline)
                record.prompt_tokens = sum(len(one.prompt) for one in call.requests)
                self.metrics.prompt_tokens.inc(record.prompt_tokens)
                names = [name for name in (call.id, record.request_id, body.request_id) if name]
                generating = self.gate.generate(call, names)
                generations = await self.guard.watch(request.receive, generating, admission.deadline)
                content = call.response(generations)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return to_api_error(error, body).response()
        return JsonPieces(self.guard, content, self.settings.request_seconds)

    def _check_kind(self, *, pools: bool) -> None:
        """Rejects a request to a path that a model of this kind does not serve."""
        options = self.served.engine.pooling
        if (options is not None) != pools:
            raise not_served(options)

    # --- texts --------------------------------------------------------------------------------------------------------

    async def answer_text[Body: TokenizeRequest | DetokenizeRequest](
        self,
        schema: type[Body],
        answer: Callable[[Body, ServedModel], Coroutine[Any, Any, dict[str, Any]]],
        request: Request,
    ) -> Response:
        """POST /tokenize and /detokenize."""
        self._authorize(request)
        body = await self.parse_body(request, schema)
        if body.model is not None:
            self._check_model_name(body.model)
        try:
            # Counts as a sample, so that a full server rejects texts too.
            with self.guard.admitted(1) as admission:
                content = await self.guard.watch(request.receive, answer(body, self.served), admission.deadline)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return to_api_error(error, body).response()
        return JsonPieces(self.guard, content, self.settings.request_seconds)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        self._authorize(request)
        return JSONResponse({"version": __version__})

    # --- requests -----------------------------------------------------------------------------------------------------

    def _caller(self, request: Request) -> Caller:
        """Returns the sender of an authorized request: a digest of the key, or nobody if no key is required."""
        client = hashlib.sha256(key_of(request)[1]).hexdigest() if self._keys else None
        return Caller(client, has_own_prefixes=self.settings.separate_prefixes)

    def _authorize(self, request: Request) -> None:
        """Rejects requests without one of the server's keys, if it has any."""
        if not self._keys:
            return
        check_key(request, self._keys, name="API key", expected="a key of this server", code="invalid_api_key")

    def _named(self, name: str) -> ServedModel:
        """Returns the model that a name stands for, which has an adapter or not."""
        return dataclasses.replace(self.served, name=name, adapter=self.served.engine.adapters.get(name))

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return *self.settings.names, *self.served.engine.adapters

    def _check_model_name(self, name: str) -> None:
        if name not in self._names:
            accepted = ", ".join(map(repr, self._names))
            raise ApiError(404, f"model is {quote(name)}; accepted: {accepted}", param="model", code="model_not_found")

    async def parse_body[Body: BaseModel](self, request: Request, schema: type[Body]) -> Body:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, f"the content type is {content_type!r}; accepted: application/json")
        body = await self._read_body(request)
        if len(body) <= bodies.LONG:
            return bodies.parse(body, schema)
        async with self._long_bodies:
            return await run_in_threadpool(bodies.parse, body, schema)

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
            raise ApiError(400, "the client disconnected before it sent the whole request") from None
        return bytes(body)

    # --- other routes -------------------------------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._model_json(name) for name in self._names]})

    async def retrieve_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._authorize(request)
        self._check_model_name(request.path_params["name"])
        return JSONResponse(self._model_json(request.path_params["name"]))

    def _model_json(self, name: str) -> dict[str, Any]:
        adapter, version = self.served.engine.adapters.get(name), self.gate.version
        parent = {}
        if adapter is not None:
            version, parent = version.adapted(adapter.digest), {"parent": self.settings.name}
        return {
            "id": name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "detjax",
            "max_model_len": self.served.engine.max_length,
            "chat": self.served.tokenizer.has_chat_template and self.served.engine.pooling is None,
            "system_fingerprint": version.fingerprint,
        } | (parent | self._tasks())

    def _tasks(self) -> dict[str, Any]:
        """Returns the field with the tasks of a model that pools."""
        options = self.served.engine.pooling
        return {} if options is None else {"tasks": list(tasks_of(options))}

    async def health(self, _: Request) -> Response:
        """GET /health."""
        if not self.served.engine.is_open:
            return JSONResponse({"status": "the engine has failed"}, 503)
        if self.guard.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        # A supervisor must not restart a server that its trainer has put to sleep.
        return JSONResponse({"status": "ok" if self.control is None else self.control.status})

    def _control_numbers(self) -> dict[str, int]:
        """Returns the numbers that the metrics show about the server's control, if it has any."""
        if (control := self.control) is None:
            return {}
        return {"paused": control.is_paused, "sleeping": control.is_sleeping, "weight_updates": control.updates}

    async def metrics_text(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), headers={"Content-Type": _METRICS_TYPE})


class _PageFiles(StaticFiles):
    """The page's files, with the page's headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response
