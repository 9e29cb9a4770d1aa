"""Files of transcripts, and of a server's responses, which hold transcripts as receipts."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from detjax.audit.json_values import json_values
from detjax.audit.verification.transcripts import Json, Transcript
from detjax.models import Tokenizer

_MINUS_INFINITY: Final = -9999.0
"""The logprob that stands for minus infinity in the server's responses."""
_ACCEPTED: Final = (
    "transcripts, and responses of /v1/completions, /v1/chat/completions and /v1/responses to requests with "
    '"receipt": true'
)


def read_transcripts(path: Path, tokenizer: Tokenizer | None = None) -> dict[str, Transcript]:
    """Returns the transcripts of a file by their places in it, such as "line 3" or "line 3, choice 1".

    A response that says something else than its receipt does gives a transcript with a `contradiction`.

    Args:
        path: one JSON value in each line, or in the whole file, where it may be a list.
        tokenizer: makes tokens of prompts that are texts, and texts of prompts that a response repeats.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds nothing, or something else than transcripts and responses with receipts; the message says
            where.
    """
    transcripts = {
        name: transcript
        for place, content in json_values(path)
        for name, transcript in _transcripts(place, f"{path}: {place}", content, tokenizer)
    }
    if not transcripts:
        raise ValueError(f"{path} holds no answer; accepted: {_ACCEPTED}")
    return transcripts


def _transcripts(
    place: str, described: str, content: Any, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, Transcript]]:
    """Yields the transcripts of one value of a file."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{described} is no object; accepted: {_ACCEPTED}")
    try:
        if "choices" not in content and "output" not in content:
            yield place, Transcript.from_json(content, tokenizer)
            return
        answers = [content] if "output" in content else content["choices"]
        for answer in answers:
            if not isinstance(answer, Mapping) or not isinstance(answer.get("receipt"), Mapping):
                raise ValueError(f"a response has no receipt; accepted: {_ACCEPTED}")
            transcript = Transcript.from_json(answer["receipt"], tokenizer)
            contradiction = next(_contradictions(content, answer, transcript, tokenizer), None)
            name = place if answer is content else f"{place}, choice {answer.get('index', 0)}"
            yield name, dataclasses.replace(transcript, contradiction=contradiction)
    except ValueError as error:
        raise ValueError(f"{described}: {error}") from None


def _contradictions(
    response: Mapping[str, Any], answer: Mapping[str, Any], transcript: Transcript, tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yields what a response says against the receipt of one of its answers."""
    environment, given = transcript.origin.environment, str(response.get("system_fingerprint", ""))
    if given and environment is not None and environment not in given.split("-"):
        yield f"the response's system_fingerprint is {given!r}, and the receipt's environment {environment!r}"
    said = _said(answer)
    expected: Json = {
        "token_ids": list(transcript.tokens),
        "prompt_token_ids": list(transcript.prompt),
        "finish_reason": transcript.finish_reason,
        "seed": transcript.sampling.seed,
        "text": transcript.text,
        "logprobs": None if transcript.logprobs is None else [*map(_number, transcript.logprobs)],
    }
    for name, value in said.items():
        if name == "text" and value != transcript.text and value in _echoes(transcript, tokenizer):
            continue
        if value != expected[name]:
            yield f"the response's {name} is {value!r}, and the receipt's {expected[name]!r}"


def _said(answer: Mapping[str, Any]) -> Json:
    """Returns what an answer says of itself outside of its receipt, in the terms of completions."""
    names = "token_ids", "prompt_token_ids", "finish_reason", "seed", "text"
    said: Json = {name: answer[name] for name in names if name in answer}
    logprobs: Any = answer.get("logprobs")
    if "output" in answer:  # of /v1/responses, where `text` is a setting
        said = {name: answer[name] for name in ("seed",) if name in answer}
        said["finish_reason"] = "length" if answer.get("status") == "incomplete" else "stop"
        items = answer["output"]
        if len(items) == 1 and items[0].get("type") == "message":
            (part,) = items[0]["content"]
            said["text"], logprobs = part["text"], {"content": part.get("logprobs") or None}
    if "message" in answer and not answer["message"].get("tool_calls"):
        said["text"] = answer["message"]["content"]
    if said.get("finish_reason") == "tool_calls":
        said["finish_reason"] = "stop"
    if logprobs and "token_logprobs" in logprobs:
        count = len(answer["receipt"].get("tokens", ()))
        said["logprobs"] = list(logprobs["token_logprobs"][-count:])  # those of an echoed prompt come first
    elif logprobs and logprobs.get("content"):
        said["logprobs"] = [entry["logprob"] for entry in logprobs["content"]]
    return said


def _echoes(transcript: Transcript, tokenizer: Tokenizer | None) -> Sequence[str]:
    """Returns the texts of an answer to a request with `echo`."""
    if tokenizer is None:
        return ()
    return [tokenizer.decode(transcript.prompt, skips) + (transcript.text or "") for skips in (True, False)]


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MINUS_INFINITY
