"""Writes `docs/serve/fields.md`, the reference of request fields.

Run it after a change to a field. A test compares the file with this tool's output.
"""

import json
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from detjax.server.api import answer_forms, messages, pooling_fields, request_fields, response_fields, schemas
from detjax.server.api.field_marks import Ignored, Unserved
from detjax.server.api.text_routes import DetokenizeRequest, TokenizeRequest
from detjax.server.http import bodies, field_types
from detjax.server.tools import definitions as tools

FILE: Final = Path(__file__).resolve().parents[1] / "docs" / "serve" / "fields.md"

_BODIES: Final[dict[str, type[BaseModel]]] = {
    "completions": schemas.CompletionRequest,
    "chat": schemas.ChatRequest,
    "responses": response_fields.ResponsesRequest,
    "stream_options": request_fields.StreamOptions,
    "response_format": answer_forms.ResponseFormat,
    "json_schema of response_format": answer_forms.JsonSchemaFormat,
    "structured_outputs": answer_forms.StructuredOutputs,
    "messages": messages.Message,
    "provider_specific_fields": messages.ProviderFields,
    "content parts": messages.TextPart,
    "image parts": messages.ImagePart,
    "image_url": messages.ImageURL,
    "video parts": messages.VideoPart,
    "video_url": messages.VideoURL,
    "tool_calls": messages.EarlierCall,
    "function of tool_calls": messages.CalledFunction,
    "tools": tools.ChatTool,
    "function of tools": tools.FunctionFields,
    "items of type message": response_fields.InputMessage,
    "items of type function_call": response_fields.InputCall,
    "items of type function_call_output": response_fields.InputResult,
    "parts of items": response_fields.InputPart,
    "image parts of items": response_fields.InputImage,
    "video parts of items": response_fields.InputVideo,
    "text": response_fields.TextSettings,
    "text.format": response_fields.TextFormat,
    "reasoning": response_fields.Reasoning,
    "tools of responses": response_fields.ResponseTool,
    "stream_options of responses": response_fields.ResponseStreamOptions,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/embeddings": pooling_fields.EmbeddingRequest,
    "/classify": pooling_fields.ClassifyRequest,
    "/pooling": pooling_fields.PoolingRequest,
    "/score": pooling_fields.ScoreRequest,
    "/rerank": pooling_fields.RerankRequest,
}

_LIMITS: Final = {
    "n": field_types.MAX_SAMPLES,
    "prompts of a request": field_types.MAX_PROMPTS,
    "token ids of a prompt": field_types.MAX_TOKENS,
    "messages or items": field_types.MAX_MESSAGES,
    "parts of a message's content": field_types.MAX_PARTS,
    "`stop`": field_types.MAX_STOPS,
    "characters of a stop string": field_types.LONGEST_STOP,
    "`stop_token_ids`": field_types.MAX_STOP_TOKENS,
    "`allowed_token_ids`": field_types.MAX_ALLOWED_TOKENS,
    "`bad_words`": field_types.MAX_BAD_WORDS,
    "`logit_bias`": field_types.MAX_BIASES,
    "`tools`": field_types.MAX_TOOLS,
    "`tool_calls` of a message": field_types.MAX_CALLS,
    "`metadata`": field_types.MAX_METADATA,
    "`chat_template_kwargs`": field_types.MAX_VARIABLES,
    "`choice` of `structured_outputs`, `guided_choice`": field_types.MAX_CHOICES,
}

_TEXT: Final = """<!-- tools/field_table.py writes this file. -->

# Fields of requests

Clients send many fields whose value asks for what the server does anyway; the server accepts these. A field that would
change the answer but is not supported is refused with status 400; the message names the field, its value and the
accepted values. A field is never silently ignored if its value would have made a difference. Every field that is not
required may be null, which means the same as leaving it out. A field that is in no table is refused.

"chat" is the body of `/v1/chat/completions`, "completions" the body of `/v1/completions`, and "responses" the body of
`/v1/responses`; the other names are objects within them.

## Served

| field | in | what it does |
|---|---|---|
{served}

## Accepted if they change nothing

| field | in | accepted | why |
|---|---|---|---|
{unserved}

## Accepted with any value

| field | in | why it makes no difference |
|---|---|---|
{ignored}

## Limits

| list | most entries |
|---|---|
{limits}

A body of more than {long} bytes may have {most_items} strings, lists, objects and fields together. Checking a body
takes memory and time in proportion to its bytes. Eight megabytes, the default limit of `detjax serve`, took from 0.01 s
(one long text) to 0.5 s (four million numbers) on one busy core, and up to 8 times their size during the check. A
thread checks long bodies in sequence, but the parser holds Python's lock: other requests wait meanwhile, at most 0.2 s
at a time.
"""


def text() -> str:
    """Returns the file's text."""
    places: dict[str, list[str]] = {}
    rows: dict[type, dict[str, str]] = {Unserved: {}, Ignored: {}, FieldInfo: {}}
    for place, body in _BODIES.items():
        for name, field in body.model_fields.items():
            mark = next((mark for mark in field.metadata if isinstance(mark, Unserved | Ignored)), field)
            name = field.alias or name
            row = f"| `{name}` | %s | {_columns(mark)} |"
            rows[type(mark)][row] = name
            places.setdefault(row, []).append(place)
    unserved, ignored, served = (
        "\n".join(row % ", ".join(places[row]) for row in sorted(kind, key=lambda row: kind[row]))
        for kind in rows.values()
    )
    limits = "\n".join(f"| {name} | {most} |" for name, most in _LIMITS.items())
    return _TEXT.format(
        served=served,
        unserved=unserved,
        ignored=ignored,
        limits=limits,
        most_items=bodies.MAX_ITEMS,
        long=bodies.LONG,
    )


def _columns(mark: Unserved | Ignored | FieldInfo) -> str:
    if isinstance(mark, Unserved):
        return f"{', '.join(f'`{json.dumps(value)}`' for value in [*mark.values, None])} | {mark.why}"
    return (mark.why if isinstance(mark, Ignored) else mark.description) or ""


if __name__ == "__main__":
    FILE.write_text(text())
