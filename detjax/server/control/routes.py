"""The control paths. Their names, parameters and answers are vLLM's and SGLang's, where these have them."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, cast, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from detjax.engine.commands import PARTS, Commanded
from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.control.adapters import AdapterFiles
from detjax.server.control.control import Control, Mode
from detjax.server.control.uploads import WeightFiles
from detjax.server.http.errors import ApiError, quote, to_api_error
from detjax.server.http.field_types import Body, RequestNames
from detjax.server.http.keys import check_key

_MODES: Final = get_args(Mode)
_BOOLS: Final = {"true": True, "1": True, "false": False, "0": False}


class AbortBody(Body):
    """SGLang's body of /abort_request."""

    rid: RequestNames | None = None
    abort_all: bool = False


class AbortRequestsBody(Body):
    """vLLM's body of /abort_requests."""

    request_ids: RequestNames | None = None


class UpdateBody(Body):
    """SGLang's body of /update_weights_from_disk, with `mode`."""

    model_path: str
    mode: Mode | None = None
    abort_all_requests: bool = False
    load_format: Annotated[Any, Unserved("auto", "safetensors", why="weights are read from safetensors")] = None
    flush_cache: Annotated[Any, Unserved(True, why="an update always clears the prefix cache")] = None
    is_async: Annotated[Any, Unserved(False, why="the answer comes when the weights are in use")] = None
    keep_pause: Annotated[Any, Unserved(False, why="an update neither pauses nor resumes the server")] = None
    weight_version: Annotated[Any, Unserved(why="the digest of the weights names their version")] = None
    manifest: Annotated[Any, Unserved(why="safetensors describe themselves")] = None
    token_step: Annotated[int | None, Ignored("the digest of the weights names their version")] = None
    torch_empty_cache: Annotated[bool | None, Ignored("it is for PyTorch")] = None
    recapture_cuda_graph: Annotated[bool | None, Ignored("compiled programs take new weights")] = None


class LoadAdapterBody(Body):
    """vLLM's body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: Annotated[str | None, Ignored("the server has one base model")] = None


class UnloadAdapterBody(Body):
    """vLLM's body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Annotated[int | None, Ignored("the name identifies the adapter")] = None


class ControlRoutes:
    """The handlers of the control paths."""

    def __init__(
        self,
        control: Control,
        commands: Commanded,
        files: WeightFiles,
        key: str,
        parse: Callable[[Request, type[Any]], Awaitable[Any]],
        adapters: AdapterFiles,
    ) -> None:
        """Handlers that require a key; `parse` reads a JSON body."""
        self._adapters = adapters
        self._control, self._commands, self._files = control, commands, files
        self._key, self._parse = key.encode(), parse

    def routes(self) -> list[Route]:
        """Returns the routes."""
        handlers = {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("GET", "/is_sleeping"): self._is_sleeping,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/abort_request"): self._abort_request,
            ("POST", "/abort_requests"): self._abort_requests,
            ("POST", "/update_weights_from_disk"): self._update_weights_from_disk,
            ("PUT", "/weights"): self._put_weights,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
        }
        return [Route(path, self._guarded(handler), methods=[method]) for (method, path), handler in handlers.items()]

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            expected, code = "this server's control key", "invalid_control_key"
            check_key(request, (self._key,), name="control key", expected=expected, code=code)
            try:
                return await handler(request)
            except Exception as error:
                raise to_api_error(error) from error

        return guarded

    # --- pauses, sleep, cache -----------------------------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        given = _query(request, "mode", "clear_cache", "wait_for_inflight_requests")
        waits = _flag(given, "wait_for_inflight_requests", default=False)
        mode = _mode(given.get("mode", "wait" if waits else "abort"))
        await self._control.pause(mode, clears_cache=_flag(given, "clear_cache", default=True))
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        _query(request)
        await self._control.resume()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        _query(request)
        return JSONResponse({"is_paused": self._control.is_paused})

    async def _sleep(self, request: Request) -> Response:
        given = _query(request, "level", "mode")
        level = given.get("level", "1")
        if level not in ("1", "2"):
            raise ApiError(400, f"level is {quote(level)}; accepted: 1, 2", param="level")
        await self._control.sleep(int(level), _mode(given.get("mode", "abort")))
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: Request) -> Response:
        _query(request, "tags")
        tags = [tag for given in request.query_params.getlist("tags") for tag in given.split(",")]
        if unknown := [tag for tag in tags if tag not in PARTS]:
            raise ApiError(400, f"tags has {quote(unknown[0])}; accepted: {', '.join(PARTS)}", param="tags")
        await self._control.wake_up(cast(Any, tags or PARTS))
        return JSONResponse({"is_sleeping": self._control.is_sleeping})

    async def _is_sleeping(self, request: Request) -> Response:
        _query(request)
        return JSONResponse({"is_sleeping": self._control.is_sleeping})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        _query(request, "reset_running_requests", "reset_external")
        await self._control.forget_prefixes()
        return JSONResponse({"success": True})

    async def _abort_request(self, request: Request) -> Response:
        body: AbortBody = await self._parse(request, AbortBody)
        if not body.rid and not body.abort_all:
            raise ApiError(
                400, "rid is missing; accepted: the id of an answer or of a request, or abort_all", param="rid"
            )
        names = [body.rid] if isinstance(body.rid, str) else body.rid
        count = await self._control.abort(None if body.abort_all else names)
        return JSONResponse({"success": True, "aborted": count})

    async def _abort_requests(self, request: Request) -> Response:
        body: AbortRequestsBody = await self._parse(request, AbortRequestsBody)
        names = [body.request_ids] if isinstance(body.request_ids, str) else body.request_ids
        return JSONResponse({"status": "aborted", "aborted": await self._control.abort(names or None)})

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _load_adapter(self, request: Request) -> Response:
        body: LoadAdapterBody = await self._parse(request, LoadAdapterBody)
        await self._adapters.load(body.lora_name, body.lora_path, replaces=body.load_inplace)
        return JSONResponse({"success": True, "message": f"LoRA adapter {body.lora_name!r} is loaded"})

    async def _unload_adapter(self, request: Request) -> Response:
        body: UnloadAdapterBody = await self._parse(request, UnloadAdapterBody)
        await self._adapters.unload(body.lora_name)
        return JSONResponse({"success": True, "message": f"LoRA adapter {body.lora_name!r} is unloaded"})

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _update_weights_from_disk(self, request: Request) -> Response:
        body: UpdateBody = await self._parse(request, UpdateBody)
        if body.abort_all_requests and body.mode not in (None, "abort"):
            raise ApiError(
                400, f"mode is {body.mode!r} and abort_all_requests is true; accepted: one of them", param="mode"
            )
        mode: Mode = body.mode or ("abort" if body.abort_all_requests else "wait")
        return await self._update(self._files.named(body.model_path), mode)

    async def _put_weights(self, request: Request) -> Response:
        given = _query(request, "mode", "adapter")
        if "adapter" in given:
            if "mode" in given:
                raise ApiError(400, "mode is given with adapter; accepted: none, as no call has to end", param="mode")
            async with self._files.received(request, lambda: self._commands.kept_files) as file:
                await self._adapters.replace(given["adapter"], file)
            return JSONResponse({"success": True, "message": "the adapter is in use"})
        mode = _mode(given.get("mode", "wait"))
        return await self._update(self._files.received(request, lambda: self._commands.kept_files), mode)

    async def _update(self, source: Any, mode: Mode) -> Response:
        """Updates the weights. Errors have SGLang's fields, too."""
        try:
            updated = await self._control.update(source, mode)
        except Exception as error:
            refused = to_api_error(error)
            refused.body |= {"success": False, "message": refused.body["error"]["message"]}
            raise refused from error
        return JSONResponse(
            {
                "success": True,
                "message": "the weights are in use",
                "num_paused_requests": updated.in_flight,
                "digest": updated.version.origin.model,
                "system_fingerprint": updated.version.fingerprint,
            }
        )


def _query(request: Request, *accepted: str) -> dict[str, str]:
    """Returns the query's parameters. Raises an ApiError if one of them is unknown."""
    for name in request.query_params:
        if name not in accepted:
            names = ", ".join(accepted) or "none"
            raise ApiError(400, f"there is no parameter {quote(name)}; accepted: {names}", param=name[:80])
    return dict(request.query_params)


def _mode(given: str) -> Mode:
    if given not in _MODES:
        raise ApiError(400, f"mode is {quote(given)}; accepted: {', '.join(_MODES)}", param="mode")
    return cast(Mode, given)


def _flag(given: dict[str, str], name: str, *, default: bool) -> bool:
    if name not in given:
        return default
    if (value := given[name].lower()) not in _BOOLS:
        raise ApiError(400, f"{name} is {quote(given[name])}; accepted: true, false", param=name)
    return _BOOLS[value]
