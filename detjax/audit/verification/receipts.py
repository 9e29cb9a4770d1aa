"""Reads files of transcripts, and of a server's responses, which hold transcripts as receipts."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from detjax.audit.json_values import json_values
from detjax.audit.verification.transcripts import Json, Transcript
from detjax.models import Tokenizer

_MINUS_INFINITY: Final = -9999.0
"""The logprob that stands for minus infinity in the server's responses."""
_ABORT: Final = "abort"
"""The finish reason of an answer that its server has aborted."""
_REASONING_ENDS: Final = "</think>", "[/THINK]"
"""Marks that end reasoning."""
_MESSAGE: Final = "<|message|>"
"""The mark before the text of a message in gpt-oss' format."""
_END: Final = re.compile(r"<[|｜][^<>]{1,40}[|｜]>$")
"""A special token at the end of an answer."""
_ACCEPTED: Final = (
    "transcripts, and responses of /v1/completions, /v1/chat/completions and /v1/responses to requests with "
    '"receipt": true'
)


def read_transcripts(path: Path, tokenizer: Tokenizer | None = None) -> dict[str, Transcript]:
    """Returns the transcripts of a file by position, such as "line 3" or "line 3, choice 1".

    If a response disagrees with its receipt, its transcript has a `contradiction`.

    Args:
        path: a file with one JSON value per line, or one in the whole file, which may be a list.
        tokenizer: encodes prompts given as text, and decodes prompts that a response echoes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or a value is neither a transcript nor a response with receipts; the message names the
            line.
    """
    transcripts = {
        name: transcript
        for place, content in json_values(path)
        for name, transcript in _transcripts(place, f"{path}: {place}", content, tokenizer)
    }
    if not transcripts:
        raise ValueError(f"{path} holds no answers; accepted: {_ACCEPTED}")
    return transcripts


def transcripts_in(response: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> list[Transcript]:
    """Returns the transcripts in a server's response, in the order of its choices; see `read_transcripts`.

    Args:
        response: the JSON of a whole response.
        tokenizer: decodes prompts that a response echoes.

    Raises:
        ValueError: an answer has no receipt. Aborted answers without tokens have none.
    """
    return [transcript for _, transcript in _transcripts("response", "the response", response, tokenizer)]


def _transcripts(
    place: str, described: str, content: Any, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, Transcript]]:
    """Yields the transcripts of one value of a file."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{described} is not an object; accepted: {_ACCEPTED}")
    try:
        if "choices" not in content and "output" not in content:
            yield place, Transcript.from_json(content, tokenizer)
            return
        answers = [content] if "output" in content else content["choices"]
        indices = set[Any]()
        for number, answer in enumerate(answers):
            if not isinstance(answer, Mapping) or not isinstance(answer.get("receipt"), Mapping):
                raise ValueError(f"a response has no receipt; accepted: {_ACCEPTED}")
            transcript = Transcript.from_json(answer["receipt"], tokenizer)
            contradiction = next(_contradictions(content, answer, transcript, tokenizer), None)
            index = answer.get("index", number)
            if index in indices:
                raise ValueError(f"a response has two choices of index {index}; accepted: each index once")
            indices.add(index)
            name = place if answer is content else f"{place}, choice {index}"
            yield name, dataclasses.replace(transcript, contradiction=contradiction)
    except ValueError as error:
        raise ValueError(f"{described}: {error}") from None


def _contradictions(
    response: Mapping[str, Any], answer: Mapping[str, Any], transcript: Transcript, tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yields the contradictions between a response and the receipt of one of its answers."""
    environment, fingerprint = transcript.origin.environment, str(response.get("system_fingerprint", ""))
    if fingerprint and environment is not None and environment not in fingerprint.split("-"):
        yield f"the response's system_fingerprint is {fingerprint!r}, but the receipt's environment is {environment!r}"
    fields = _fields(answer)
    reported = transcript.sampling_logprobs if _is_processed(answer) else transcript.logprobs
    expected: Json = {
        "token_ids": list(transcript.tokens),
        "prompt_token_ids": list(transcript.prompt),
        "finish_reason": transcript.finish_reason,
        "seed": transcript.sampling.seed,
        "text": transcript.text,
        "logprobs": _finite(reported),
        "sampling_logprobs": _finite(transcript.sampling_logprobs),
    }
    for name, value in fields.items():
        if name == "reasoning":
            if not _has_lines(transcript.text or "", value):
                yield f"the response's reasoning {value!r} is not in the receipt's text, {transcript.text!r}"
            continue
        if name == "text" and value != transcript.text:
            shown = [*_echoes(transcript, tokenizer), *_after_reasoning(transcript, tokenizer)]
            if value in shown or (value is None and "reasoning" in fields):
                continue
            if value is not None and _repeats_message(value, transcript, tokenizer):
                continue
        if value != expected[name]:
            yield f"the response's {name} is {value!r}, but the receipt's is {expected[name]!r}"


def _fields(answer: Mapping[str, Any]) -> Json:
    """Returns the fields of an answer outside its receipt, by their names in completions."""
    names = "token_ids", "prompt_token_ids", "finish_reason", "seed", "text"
    fields: Json = {name: answer[name] for name in names if name in answer}
    logprobs: Any = answer.get("logprobs")
    if "output" in answer:  # /v1/responses, where `text` is a setting
        fields = {name: answer[name] for name in ("seed",) if name in answer}
        reasons = {"incomplete": "length", "cancelled": _ABORT}
        fields["finish_reason"] = reasons.get(answer.get("status", ""), "stop")
        thoughts = [item for item in answer["output"] if item.get("type") == "reasoning"]
        items = [item for item in answer["output"] if item.get("type") != "reasoning"]
        if thoughts:
            fields["reasoning"] = "\n".join(part["text"] for item in thoughts for part in item["content"])
        if len(items) == 1 and items[0].get("type") == "message":
            (part,) = items[0]["content"]
            fields["text"] = part["text"]
            logprobs = None if thoughts else {"content": part.get("logprobs") or None}
    if "message" in answer:
        message = answer["message"]
        fields |= {"reasoning": message["reasoning"]} if message.get("reasoning") else {}
        fields |= {} if message.get("tool_calls") else {"text": message["content"]}
    if fields.get("finish_reason") == _ABORT:
        fields["finish_reason"] = None  # the answer may continue
    if fields.get("finish_reason") == "tool_calls":
        fields["finish_reason"] = "stop"
    if logprobs and "token_logprobs" in logprobs:
        count = len(answer["receipt"].get("tokens", ()))
        fields["logprobs"] = list(logprobs["token_logprobs"][-count:])  # an echoed prompt's logprobs come first
        if "sampling_logprobs" in logprobs:
            fields["sampling_logprobs"] = list(logprobs["sampling_logprobs"][-count:])
    elif logprobs and logprobs.get("content"):
        fields["logprobs"] = [entry["logprob"] for entry in logprobs["content"]]
        if "sampling_logprob" in logprobs["content"][0]:
            fields["sampling_logprobs"] = [entry["sampling_logprob"] for entry in logprobs["content"]]
    return fields


def _is_processed(answer: Mapping[str, Any]) -> bool:
    """Returns whether an answer's logprobs are logprobs under the distribution that its tokens were drawn from."""
    return answer.get("logprobs_mode") == "processed_logprobs"


def _finite(logprobs: Sequence[float] | None) -> list[float] | None:
    """Returns logprobs as the server writes them."""
    return logprobs and [x if math.isfinite(x) else _MINUS_INFINITY for x in logprobs]  # pyright: ignore[reportReturnType]


def _has_lines(text: str, lines: str) -> bool:
    """Returns whether a text has lines in their order."""
    position = 0
    for line in lines.split("\n"):
        if (position := text.find(line, position)) < 0:
            return False
        position += len(line)
    return True


def _repeats_message(text: str, transcript: Transcript, tokenizer: Tokenizer | None) -> bool:
    """Returns whether a text is a part of the prompt and the answer, as in an answer to a chat with `echo`."""
    if tokenizer is None or not text.endswith(transcript.text or ""):
        return False
    echoed = text.removesuffix(transcript.text or "")
    return bool(echoed) and echoed in tokenizer.decode(transcript.prompt, skip_special_tokens=False)


def _after_reasoning(transcript: Transcript, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yields the possible contents of a message whose answer has reasoning, or a header, before its content."""
    texts = [transcript.text or ""]
    if tokenizer is not None:
        texts.append(tokenizer.decode(transcript.tokens, skip_special_tokens=False))
    for text in texts:
        for mark in _REASONING_ENDS:
            if mark in text:
                content = _END.sub("", text.partition(mark)[2]).lstrip("\n")
                yield from (content, content.rstrip())
        if _MESSAGE in text:
            yield _END.sub("", text.rpartition(_MESSAGE)[2])


def _echoes(transcript: Transcript, tokenizer: Tokenizer | None) -> Sequence[str]:
    """Returns the possible texts of an answer to a request with `echo`."""
    if tokenizer is None:
        return ()
    return [tokenizer.decode(transcript.prompt, skips) + (transcript.text or "") for skips in (True, False)]
