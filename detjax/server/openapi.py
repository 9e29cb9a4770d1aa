"""The OpenAPI document, of the schemas that requests are checked with."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from detjax.server.schemas import ChatRequest, CompletionRequest
from detjax.version import __version__

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE = {"type": "object", "additionalProperties": {"type": "integer"}}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string", "enum": ["text_completion", "chat.completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {
            "type": "string",
            "description": "Contract, environment and model: the same request has the same bits where it is the same.",
        },
        "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
        "usage": _USAGE,
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len", "chat", "system_fingerprint"],
    "properties": {name: {"type": "string"} for name in ("id", "object", "owned_by", "system_fingerprint")}
    | {name: {"type": "integer"} for name in ("created", "max_model_len")}
    | {"chat": {"type": "boolean"}},
}
_OF_REQUESTS = {
    400: "What is asked cannot be served; the message says why.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The content type is not application/json.",
    429: "The queue is full.",
    503: "The server is shutting down, or its engine has failed.",
    504: "The answer took too long.",
}


def document(model: str, *, needs_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1's description of a server of one model."""
    _, schemas = models_json_schema(
        [(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template="#/components/schemas/{model}"
    )
    for schema in (CompletionRequest, ChatRequest):
        schemas["$defs"][schema.__name__]["properties"]["model"]["enum"] = [model]
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "detjax", "version": __version__},
        "paths": {
            "/v1/completions": {"post": _generation("Go on with a text.", CompletionRequest)},
            "/v1/chat/completions": {"post": _generation("Answer in a conversation.", ChatRequest)},
            "/v1/models": {
                "get": _operation(
                    "The models that are served.",
                    {
                        "type": "object",
                        "required": ["object", "data"],
                        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
                    },
                    401,
                )
            },
            "/v1/models/{name}": {
                "get": _operation("One of them.", _MODEL, 401, 404)
                | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
            },
            "/health": {
                "get": _operation("Whether requests are answered.", {"type": "object"}, 503) | {"security": []}
            },
            "/metrics": {
                "get": {
                    "summary": "Counters for Prometheus.",
                    "security": [],
                    "responses": {"200": {"description": "Text.", "content": {"text/plain": {}}}},
                }
            },
        },
        "components": {"schemas": schemas["$defs"] | {"Error": _ERROR}},
    }
    if needs_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _generation(summary: str, schema: type[BaseModel]) -> dict[str, Any]:
    own = _operation(summary, _ANSWER, *_OF_REQUESTS)
    own["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}
    return own | {"requestBody": {"required": True, "content": {"application/json": body}}}


def _operation(summary: str, answer: dict[str, Any], *errors: int) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "OK", "content": {"application/json": {"schema": answer}}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in errors:
        responses[str(status)] = {"description": _OF_REQUESTS[status], "content": error}
    return {"summary": summary, "responses": responses}
