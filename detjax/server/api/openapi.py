"""The OpenAPI document, generated from the schemas that validate request bodies."""

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from detjax.server.api.pooling_routes import POOLING_ROUTES
from detjax.server.api.response_fields import ResponsesRequest
from detjax.server.api.schemas import ChatRequest, CompletionRequest
from detjax.server.api.text_routes import DetokenizeRequest, TokenizeRequest
from detjax.server.http.settings import PROCESSED
from detjax.version import __version__

_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}


def _object(**properties: Any) -> dict[str, Any]:
    """Returns the JSON schema of an object with these required properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


_ERROR = _object(
    error=_object(
        message=_STRING,
        type=_STRING,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    )
)
_USAGE = _object(
    prompt_tokens=_INTEGER,
    completion_tokens=_INTEGER,
    total_tokens=_INTEGER,
    prompt_tokens_details={"type": "object", "properties": {"cached_tokens": _INTEGER}},
)
_SEED = _INTEGER | {"description": "The answer's seed, which reproduces the answer."}
_MODE = {
    "const": PROCESSED,
    "description": "The logprobs are of the distribution that tokens were drawn from. Without this field they are the "
    "model's.",
}
_CHOICE = {
    "type": "object",
    "required": ["index", "finish_reason", "seed"],
    "properties": {"index": _INTEGER, "seed": _SEED, "logprobs_mode": _MODE},
}
_RESPONSE = _object(
    id=_STRING,
    object={"type": "string", "enum": ["text_completion", "chat.completion"]},
    created=_INTEGER,
    model=_STRING,
    system_fingerprint=_STRING
    | {"description": "A digest of contract, environment and model. Equal fingerprints promise equal bits."},
    choices={"type": "array", "items": _CHOICE},
    usage=_USAGE,
)
_ITEM = {
    "type": "object",
    "required": ["type", "id", "status"],
    "properties": {"type": {"enum": ["message", "function_call"]}},
}
_RESPONSE_OBJECT = _object(
    id=_STRING,
    object={"const": "response"},
    created_at=_INTEGER,
    status={"enum": ["completed", "incomplete"]},
    model=_STRING,
    system_fingerprint=_STRING,
    output={"type": "array", "items": _ITEM},
    usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER),
    seed=_SEED,
    store={"const": False, "description": "The server keeps no answers."},
)
_MODEL = _object(
    id=_STRING,
    object=_STRING,
    created=_INTEGER,
    owned_by=_STRING,
    max_model_len=_INTEGER,
    chat={"type": "boolean"},
    system_fingerprint=_STRING,
)
_TOKENIZED = _object(
    count=_INTEGER,
    max_model_len=_INTEGER,
    tokens={"type": "array", "items": _INTEGER},
    token_strs={"type": ["array", "null"], "items": _STRING},
)
_VECTOR = {"oneOf": [{"type": "array", "items": {"type": "number"}}, _STRING | {"description": "base64"}]}
_POOLED_USAGE = _object(prompt_tokens=_INTEGER, total_tokens=_INTEGER)


def _pooled(**item: Any) -> dict[str, Any]:
    """Returns the JSON schema of the answer of a model that pools."""
    data = {"type": "array", "items": _object(index=_INTEGER, **item)}
    return _object(
        id=_STRING, object={"const": "list"}, model=_STRING, system_fingerprint=_STRING, data=data, usage=_POOLED_USAGE
    )


_NUMBER = {"type": "number"}
_SCORED = "Score pairs of texts.", _pooled(object={"const": "score"}, score=_NUMBER)
_RERANKED = (
    "Sort documents by how well they answer a query.",
    _object(
        id=_STRING,
        model=_STRING,
        system_fingerprint=_STRING,
        results={
            "type": "array",
            "items": _object(index=_INTEGER, document=_object(text=_STRING), relevance_score=_NUMBER),
        },
        usage=_POOLED_USAGE,
    ),
)
_POOLED: Final = {
    "/v1/embeddings": ("Embed texts.", _pooled(object={"const": "embedding"}, embedding=_VECTOR)),
    "/classify": (
        "Classify texts.",
        _pooled(label=_STRING, probs={"type": "array", "items": _NUMBER}, num_classes=_INTEGER),
    ),
    "/score": _SCORED,
    "/v1/score": _SCORED,
    "/rerank": _RERANKED,
    "/v1/rerank": _RERANKED,
    "/v2/rerank": _RERANKED,
    "/pooling": ("Pool texts, or report a vector for each token.", _pooled(object={"const": "pooling"}, data={})),
}
"""Paths that only models which pool serve: a summary, and the schema of the answer."""
_GENERATION_BODIES = (CompletionRequest, ChatRequest, ResponsesRequest)
_GENERATION_ERRORS = {
    400: "The request is not valid; the message has the reason.",
    401: "The API key is missing or wrong.",
    404: "The model or response does not exist.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The content type is not application/json.",
    429: "The queue is full.",
    503: "The server is shutting down, or its engine has failed.",
    504: "The answer took too long.",
}


def document(model: str, *, needs_key: bool) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 description of a server with one model."""
    pooling = dict.fromkeys(route.schema for route in POOLING_ROUTES.values())
    _, schemas = models_json_schema(
        [(schema, "validation") for schema in (*_GENERATION_BODIES, TokenizeRequest, DetokenizeRequest, *pooling)],
        ref_template="#/components/schemas/{model}",
    )
    for schema in _GENERATION_BODIES:
        schemas["$defs"][schema.__name__]["properties"]["model"]["enum"] = [model]
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "detjax", "version": __version__},
        "paths": {
            "/v1/completions": {"post": _generation("Complete a text.", CompletionRequest)},
            "/v1/chat/completions": {"post": _generation("Continue a conversation.", ChatRequest)},
            "/v1/responses": {
                "post": _generation("Continue a conversation of items.", ResponsesRequest, _RESPONSE_OBJECT)
            },
            "/v1/responses/{id}": {
                method: _missing("Responses are not stored.", 401, 404) for method in ("get", "delete")
            }
            | {"parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]},
            **{
                path: {"post": _text(summary, POOLING_ROUTES[path].schema, answer)}
                for path, (summary, answer) in _POOLED.items()
            },
            "/tokenize": {"post": _text("Tokenize a text.", TokenizeRequest, _TOKENIZED)},
            "/detokenize": {"post": _text("Decode tokens.", DetokenizeRequest, _object(prompt=_STRING))},
            "/version": {"get": _operation("Report the server's version.", _object(version=_STRING), 401)},
            "/v1/models": {
                "get": _operation(
                    "List the served models.",
                    _object(object={"const": "list"}, data={"type": "array", "items": _MODEL}),
                    401,
                )
            },
            "/v1/models/{name}": {
                "get": _operation("Describe a served model.", _MODEL, 401, 404)
                | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
            },
            "/health": {"get": _operation("Report the server's health.", {"type": "object"}, 503) | {"security": []}},
            "/metrics": {
                "get": {
                    "summary": "Report metrics for Prometheus.",
                    "security": [],
                    "responses": {"200": {"description": "Metrics as text.", "content": {"text/plain": {}}}},
                }
            },
        },
        "components": {"schemas": schemas["$defs"] | {"Error": _ERROR}},
    }
    if needs_key:
        description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"key": []}]
    return description


def _missing(summary: str, *errors: int) -> dict[str, Any]:
    """Returns an operation that always fails."""
    operation = _operation(summary, {}, *errors)
    del operation["responses"]["200"]
    return operation


def _generation(summary: str, schema: type[BaseModel], answer: dict[str, Any] = _RESPONSE) -> dict[str, Any]:
    operation = _operation(summary, answer, *_GENERATION_ERRORS)
    # OpenAPI 3.1 has no schema for streams: any schema here would describe a single event.
    operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return _with_body(operation, schema)


def _text(summary: str, schema: type[BaseModel], answer: dict[str, Any]) -> dict[str, Any]:
    return _with_body(_operation(summary, answer, *_GENERATION_ERRORS), schema)


def _with_body(operation: dict[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    body = {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}
    return operation | {"requestBody": {"required": True, "content": {"application/json": body}}}


def _operation(summary: str, schema: dict[str, Any], *errors: int) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "OK", "content": {"application/json": {"schema": schema}}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in errors:
        responses[str(status)] = {"description": _GENERATION_ERRORS[status], "content": error}
    return {"summary": summary, "responses": responses}
