"""The OpenAPI document, generated from the schemas that validate request bodies."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from detjax.server.api.response_fields import ResponsesRequest
from detjax.server.api.schemas import ChatRequest, CompletionRequest
from detjax.server.api.text_routes import DETOKENIZED, TOKENIZED, DetokenizeRequest, TokenizeRequest
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
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    | {"prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}}},
}
_SEED = {"type": "integer", "description": "The answer's seed, which reproduces the answer."}
_RESPONSE = {
    "type": "object",
    "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string", "enum": ["text_completion", "chat.completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {
            "type": "string",
            "description": "A digest of contract, environment and model. Equal fingerprints promise equal bits.",
        },
        "choices": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "finish_reason", "seed"],
                "properties": {"index": {"type": "integer"}, "seed": _SEED},
            },
        },
        "usage": _USAGE,
    },
}
_RESPONSE_OBJECT = {
    "type": "object",
    "required": [
        "id",
        "object",
        "created_at",
        "status",
        "model",
        "system_fingerprint",
        "output",
        "usage",
        "seed",
        "store",
    ],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "status": {"enum": ["completed", "incomplete"]},
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "output": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "id", "status"],
                "properties": {"type": {"enum": ["message", "function_call"]}},
            },
        },
        "usage": {
            "type": "object",
            "required": ["input_tokens", "output_tokens", "total_tokens"],
            "properties": {name: {"type": "integer"} for name in ("input_tokens", "output_tokens", "total_tokens")},
        },
        "seed": _SEED,
        "store": {"const": False, "description": "The server keeps no answers."},
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len", "chat", "system_fingerprint"],
    "properties": {name: {"type": "string"} for name in ("id", "object", "owned_by", "system_fingerprint")}
    | {name: {"type": "integer"} for name in ("created", "max_model_len")}
    | {"chat": {"type": "boolean"}},
}
_VERSION = {"type": "object", "required": ["version"], "properties": {"version": {"type": "string"}}}
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
    _, schemas = models_json_schema(
        [(schema, "validation") for schema in (*_GENERATION_BODIES, TokenizeRequest, DetokenizeRequest)],
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
            "/tokenize": {"post": _text("Tokenize a text.", TokenizeRequest, TOKENIZED)},
            "/detokenize": {"post": _text("Decode tokens.", DetokenizeRequest, DETOKENIZED)},
            "/version": {"get": _operation("Report the server's version.", _VERSION, 401)},
            "/v1/models": {
                "get": _operation(
                    "List the served models.",
                    {
                        "type": "object",
                        "required": ["object", "data"],
                        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
                    },
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
