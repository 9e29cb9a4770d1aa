"""Reads logprobs of generated tokens from files of detjax, vLLM, SGLang, and OpenAI's API.

Each value of a file may be

- a transcript of detjax, or a response of any server with OpenAI's API (completions, chats, responses);
- an object of vLLM, `{"token_ids": [...], "logprobs": [{"ID": {"logprob": x, "rank": n, ...}}, ...]}`, or one with
  such objects as `outputs`;
- a response of SGLang's `/generate`, with `meta_info.output_token_logprobs`;
- the output of `detjax generate --json`;
- `{"tokens": [...], "logprobs": [...]}`, ids or texts and numbers; tokens are optional.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from detjax.audit.json_values import json_values

_MINUS_INFINITY: Final = -9999.0
"""Servers write this logprob or a lower one for minus infinity, which JSON does not have."""

type Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredTokens:
    """Generated tokens and their logprobs.

    Attributes:
        logprobs: a number for each token; numbers of files are rounded to float32.
        ids: the tokens' ids; None: unknown.
        texts: the tokens' texts; None: unknown.
        likeliest_ids: the id of the most likely token at each position, None where unknown.
        likeliest_texts: the text of the most likely token at each position, None where unknown.
    """

    logprobs: Float32[np.ndarray, "n"]
    ids: Sequence[int] | None = None
    texts: Sequence[str] | None = None
    likeliest_ids: Sequence[int | None] | None = None
    likeliest_texts: Sequence[str | None] | None = None


def read_logprobs(path: Path) -> list[ScoredTokens]:
    """Returns the logprobs of a file in the order of its samples; the module lists the formats.

    Args:
        path: a file with one JSON value per line, or one in the whole file, which may be a list.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or a value has an unknown format; the message names the line.
    """
    samples = []
    for position, content in json_values(path):
        try:
            samples_of_value = list(_samples(content))
            if not samples_of_value:
                raise ValueError("it has no logprobs of generated tokens; request them from the engine")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            problem = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
            raise ValueError(f"{path}: {position} {problem}; accepted: {_ACCEPTED}") from None
        samples += samples_of_value
    return samples


_ACCEPTED: Final = (
    "transcripts, responses of OpenAI's API with logprobs, vLLM's outputs, SGLang's meta_info.output_token_logprobs, "
    'or {"tokens": [...], "logprobs": [...]}'
)


def _samples(content: Any) -> Iterator[ScoredTokens]:
    """Yields the samples of one value of a file."""
    if not isinstance(content, Mapping):
        raise ValueError("it is not an object")
    if "generations" in content:  # detjax generate --json
        for generation in content["generations"]:
            yield from map(_plain, generation["completions"])
    elif "choices" in content:
        yield from (_choice(choice) for choice in content["choices"] if choice.get("logprobs"))
    elif "output" in content:
        parts = [part for item in content["output"] for part in item.get("content") or ()]
        yield from (_chat(part["logprobs"]) for part in parts if part.get("logprobs"))
    elif "outputs" in content:
        yield from map(_vllm, content["outputs"])
    elif "meta_info" in content:
        yield _sglang(content["meta_info"])
    elif any(isinstance(entry, Mapping) for entry in content["logprobs"]):
        yield _vllm(content)
    else:
        yield _plain(content)


def _choice(choice: Json) -> ScoredTokens:
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        scored = _chat(logprobs["content"])
    else:
        top = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
        scored = ScoredTokens(
            _numbers(logprobs["token_logprobs"]),
            texts=list(logprobs["tokens"]),
            likeliest_texts=[None if entry is None else _largest(entry) for entry in top],
        )
    ids = choice.get("token_ids")
    if ids is None or len(ids) > len(scored.logprobs):
        return scored
    skipped = len(scored.logprobs) - len(ids)  # an echoed prompt has logprobs and no ids here
    assert scored.texts is not None and scored.likeliest_texts is not None
    return ScoredTokens(
        scored.logprobs[skipped:],
        ids=list(ids),
        texts=scored.texts[skipped:],
        likeliest_texts=scored.likeliest_texts[skipped:],
    )


def _chat(entries: Sequence[Json]) -> ScoredTokens:
    top = [{one["token"]: one["logprob"] for one in entry.get("top_logprobs") or ()} for entry in entries]
    return ScoredTokens(
        _numbers([entry["logprob"] for entry in entries]),
        texts=[entry["token"] for entry in entries],
        likeliest_texts=[_largest(one) for one in top],
    )


def _vllm(output: Json) -> ScoredTokens:
    ids, logprobs = [int(token) for token in output["token_ids"]], output["logprobs"]
    if not any(isinstance(entry, Mapping) for entry in logprobs):
        return ScoredTokens(_numbers(logprobs), ids=ids)
    entries = [
        {int(token): one if isinstance(one, Mapping) else {"logprob": one} for token, one in entry.items()}
        for entry in logprobs
    ]
    chosen = [entry[token] for token, entry in zip(ids, entries, strict=True)]
    texts = [one.get("decoded_token") for one in chosen]
    return ScoredTokens(
        _numbers([one["logprob"] for one in chosen]),
        ids=ids,
        texts=_known(texts),
        likeliest_ids=[_first_of_ranks(entry) for entry in entries],
    )


def _known(texts: Sequence[Any]) -> list[str] | None:
    return None if any(text is None for text in texts) else list(texts)


def _first_of_ranks(entry: Mapping[int, Json]) -> int | None:
    """Returns the most likely token of an entry; None if the entry may hold only the sampled one."""
    ranked = [token for token, one in entry.items() if one.get("rank") == 1]
    if ranked or any("rank" in one for one in entry.values()):
        return ranked[0] if ranked else None
    return max(entry, key=lambda token: entry[token]["logprob"]) if len(entry) > 1 else None


def _sglang(meta: Json) -> ScoredTokens:
    entries = meta["output_token_logprobs"]
    texts = [entry[2] if len(entry) > 2 else None for entry in entries]
    top = meta.get("output_top_logprobs") or [None] * len(entries)
    return ScoredTokens(
        _numbers([entry[0] for entry in entries]),
        ids=[int(entry[1]) for entry in entries],
        texts=_known(texts),
        likeliest_ids=[int(max(one, key=lambda pair: pair[0])[1]) if one else None for one in top],
    )


def _plain(content: Json) -> ScoredTokens:
    tokens, top = content.get("tokens"), content.get("top_logprobs")
    is_text = tokens is not None and any(isinstance(token, str) for token in tokens)
    likeliest = None if top is None else [_token_of(one[0]) if one else None for one in top]
    return ScoredTokens(
        _numbers(content["logprobs"]),
        ids=None if tokens is None or is_text else [int(token) for token in tokens],
        texts=list(tokens) if tokens is not None and is_text else None,
        likeliest_ids=likeliest,
    )


def _token_of(pair: Any) -> int:
    return int(pair["token"] if isinstance(pair, Mapping) else pair[0])


def _largest[T](logprobs: Mapping[T, float]) -> T | None:
    """Returns the most likely token; None without tokens."""
    return max(logprobs, key=lambda token: logprobs[token]) if logprobs else None


def _numbers(values: Sequence[Any]) -> Float32[np.ndarray, "n"]:
    # In responses that echo the prompt, its first token has no logprob.
    numbers = [math.nan if value is None else -math.inf if value == "-inf" else float(value) for value in values]
    return np.array([-math.inf if number <= _MINUS_INFINITY else number for number in numbers], np.float32)
