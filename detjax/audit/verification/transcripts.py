"""Transcripts: a prompt, its sampling parameters, and the answer's tokens and logprobs, as lines of JSON."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, get_args

from detjax import models
from detjax.engine import Completion, Constraint, Generation, ReasoningBudget, ReasoningMarks, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.operands.options import KVQuantization
from detjax.runtime import fingerprints

type Json = dict[str, Any]
type TopLogprobs = tuple[tuple[int, float], ...]

_INFINITY: Final = "-inf"
"""The logprob minus infinity in JSON, which has no infinities."""
_REPORTS: Final = ("top_logprobs", "prompt_logprobs", "sampling_logprobs", "scored_answer")
"""Sampling parameters of reports, which a transcript leaves out: it shows them by its fields."""
_DEFAULTS: Final = SamplingParams()
_SAMPLING: Final = tuple(one.name for one in dataclasses.fields(SamplingParams) if one.name not in _REPORTS)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The environment and the model of an answer.

    Attributes:
        environment: the digest of `detjax.fingerprint()`; None: unknown.
        model: the digest of weights, configuration and tokenizer, `detjax.models.digest`; None: unknown.
        kv_cache_dtype: the dtype that keys and values are quantized to in the cache; None: not quantized.
    """

    environment: str | None = None
    model: str | None = None
    kv_cache_dtype: KVQuantization | None = None

    @classmethod
    def here(
        cls, model: Decoder, tokenizer: Tokenizer | None, kv_cache_dtype: KVQuantization | None = None
    ) -> "Origin":
        """Returns the origin of answers that a model gives in this process. Reads all of its weights."""
        return cls(fingerprints.fingerprint().digest, models.digest(model, tokenizer), kv_cache_dtype)


@dataclasses.dataclass(frozen=True)
class Transcript:
    """One sample of a request.

    Attributes:
        prompt: the prompt's tokens.
        sampling: the sampling parameters; the requested reports (`top_logprobs` and similar) do not matter.
        tokens: the generated tokens, including the one that ended the sample.
        logprobs: each token's logprob under the model, exact float32 numbers; None: unknown.
        index: the index of the sample in its request.
        finish_reason: "stop" or "length"; None: the sample may continue.
        text: the text, cut before a stop string; None: unknown.
        sampling_logprobs: each token's logprob under the distribution that it was drawn from; None: unknown.
        top_logprobs: the most likely tokens at each position, with their logprobs; None: unknown.
        origin: the environment and the model.
        digest: the digest that came with the transcript; see `sealed`.
        contradiction: a disagreement with the response that held the transcript.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    index: int = 0
    finish_reason: str | None = None
    text: str | None = None
    sampling_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    origin: Origin = dataclasses.field(default_factory=Origin)
    digest: str | None = None
    contradiction: str | None = None

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
            ValueError: logprobs and tokens differ in number, there are no tokens, or the index is out of range.
        """
        for name in ("logprobs", "sampling_logprobs", "top_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(
                    f"Transcript: {len(values)} {name}, {len(self.tokens)} tokens; accepted: one per token"
                )
        if not self.prompt or not self.tokens:
            missing = "tokens" if self.prompt else "prompt"
            raise ValueError(f"Transcript: {missing} is empty; accepted: at least one token")
        if not 0 <= self.index < self.sampling.n:
            raise ValueError(f"Transcript: index is {self.index}; accepted: 0 to {self.sampling.n - 1}, less than n")
        if self.finish_reason not in (None, "stop", "length"):
            raise ValueError(f"Transcript: finish_reason is {self.finish_reason!r}; accepted: stop, length, or None")

    def sealed(self) -> "Transcript":
        """Returns the transcript with its digest, which covers all other fields: a receipt."""
        return dataclasses.replace(self, digest=self.computed_digest())

    def computed_digest(self) -> str:
        """Returns the SHA-256 of `as_json` without the digest, in hexadecimal digits."""
        content = self.as_json()
        content.pop("digest", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def as_json(self) -> Json:
        """Returns the transcript as a JSON object. A double holds a float32 number exactly."""
        content: Json = {
            "prompt": list(self.prompt),
            "sampling": _sampling_json(self.sampling),
            "index": self.index,
            "tokens": list(self.tokens),
            "logprobs": _numbers(self.logprobs),
            "sampling_logprobs": _numbers(self.sampling_logprobs),
            "top_logprobs": self.top_logprobs and [[[t, _number(x)] for t, x in top] for top in self.top_logprobs],
            "finish_reason": self.finish_reason,
            "text": self.text,
            "environment": self.origin.environment,
            "model": self.origin.model,
            "kv_cache_dtype": self.origin.kv_cache_dtype,
            "digest": self.digest,
        }
        return {name: value for name, value in content.items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> "Transcript":
        """Returns the transcript of a JSON object.

        Args:
            content: an object as `as_json` returns it.
            tokenizer: encodes a prompt given as text.

        Raises:
            ValueError: a field is unknown, missing or invalid.
        """
        fields = dict(content)
        try:
            prompt = fields.pop("prompt")
            if isinstance(prompt, str):
                if tokenizer is None:
                    raise ValueError("prompt is text but there is no tokenizer; accepted: token ids")
                prompt = tokenizer.encode(prompt)
            origin = Origin(fields.pop("environment", None), fields.pop("model", None), _cache(fields))
            transcript = cls(
                prompt=_tokens("prompt", prompt),
                sampling=_sampling(fields.pop("sampling", {})),
                tokens=_tokens("tokens", fields.pop("tokens")),
                logprobs=_logprobs(fields.pop("logprobs", None)),
                index=_integer("index", fields.pop("index", 0)),
                finish_reason=_text("finish_reason", fields.pop("finish_reason", None)),
                text=_text("text", fields.pop("text", None)),
                sampling_logprobs=_logprobs(fields.pop("sampling_logprobs", None)),
                top_logprobs=_top_logprobs(fields.pop("top_logprobs", None)),
                origin=origin,
                digest=_text("digest", fields.pop("digest", None)),
            )
        except KeyError as error:
            raise ValueError(f"a transcript has no {error}; accepted: {_FIELDS}") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a transcript has a field that cannot be read: {error}; accepted: {_FIELDS}") from None
        if fields:
            raise ValueError(f"a transcript has {', '.join(fields)}; accepted: {_FIELDS}")
        return transcript


_FIELDS: Final = (
    "prompt, sampling, index, tokens, logprobs, sampling_logprobs, top_logprobs, finish_reason, text, environment, "
    "model, kv_cache_dtype, digest"
)


def transcripts_of(generation: Generation, sampling: SamplingParams, origin: Origin | None = None) -> list[Transcript]:
    """Returns the transcript of each sample of a request.

    Args:
        generation: the engine's answer.
        sampling: the request's parameters.
        origin: the environment and the model. Default: unknown.
    """
    return [
        transcript_of(generation.prompt_tokens, completion, sampling, index, origin)
        for index, completion in enumerate(generation.completions)
    ]


def transcript_of(
    prompt: Sequence[int],
    completion: Completion,
    sampling: SamplingParams,
    index: int = 0,
    origin: Origin | None = None,
) -> Transcript:
    """Returns the transcript of one sample of a request; see `transcripts_of`."""
    return Transcript(
        prompt=tuple(map(int, prompt)),
        sampling=dataclasses.replace(sampling, **{name: getattr(_DEFAULTS, name) for name in _REPORTS}),
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        index=index,
        finish_reason=None if completion.finish_reason == "abort" else completion.finish_reason,
        text=completion.text,
        sampling_logprobs=completion.sampling_logprobs or None,
        top_logprobs=completion.top_logprobs if sampling.top_logprobs else None,
        origin=origin or Origin(),
    )


def _sampling_json(params: SamplingParams) -> Json:
    """Returns the parameters that differ from their defaults."""
    content: Json = {}
    for name in _SAMPLING:
        value, default = getattr(params, name), getattr(_DEFAULTS, name)
        if value == default:
            continue
        if isinstance(value, Constraint | ReasoningBudget):
            value = dataclasses.asdict(value)
        elif name == "logit_bias":
            value = [[token, float(bias)] for token, bias in value]
        elif isinstance(default, tuple):
            value = list(value)
        elif isinstance(default, float):
            value = float(value)
        content[name] = value
    return content


def _sampling(content: Any) -> SamplingParams:
    if not isinstance(content, Mapping):
        raise ValueError(f"sampling is {content!r}; accepted: an object of sampling parameters")
    fields: Json = {}
    for name, value in content.items():
        if name not in _SAMPLING:
            raise ValueError(f"sampling has {name!r}; accepted: {', '.join(_SAMPLING)}")
        default: Any = getattr(_DEFAULTS, name)
        if name == "constraint":
            value = Constraint(**value)
        elif name == "reasoning_budget":
            value = _reasoning_budget(value)
        elif name == "logit_bias":
            value = tuple((_integer(name, token), _real(name, bias)) for token, bias in value)
        elif name in ("stop", "bad_words"):
            value = (value,) if isinstance(value, str) else tuple(value)
        elif name in ("stop_token_ids", "allowed_token_ids"):
            value = _tokens(name, value)
        elif isinstance(default, bool):
            value = bool(value)
        else:
            value = _integer(name, value) if isinstance(default, int) else _real(name, value)
        fields[name] = value
    return SamplingParams(**fields)


def _reasoning_budget(value: Any) -> ReasoningBudget:
    marks = value["marks"]
    end, begin, spaces = (_tokens(f"reasoning_budget.marks.{name}", marks[name]) for name in ("end", "begin", "spaces"))
    tokens = _integer("reasoning_budget.tokens", value["tokens"])
    return ReasoningBudget(tokens, ReasoningMarks(end, begin, bool(marks["is_open"]), spaces, bool(marks["repeats"])))


def _cache(fields: Json) -> KVQuantization | None:
    name = fields.pop("kv_cache_dtype", None)
    if name not in (None, *get_args(KVQuantization)):
        raise ValueError(f"kv_cache_dtype is {name!r}; accepted: {', '.join(get_args(KVQuantization))}, or none")
    return cast(KVQuantization | None, name)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; accepted: an integer")
    return value


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; accepted: a number")
    return float(value)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; accepted: a string")
    return value


def _tokens(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{name} is {values!r}; accepted: token ids")
    return tuple(_integer(name, value) for value in values)


def _logprobs(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(_logprob, values))


def _top_logprobs(values: Any) -> tuple[TopLogprobs, ...] | None:
    if values is None:
        return None
    return tuple(tuple((_integer("a token", token), _logprob(value)) for token, value in one) for one in values)


def _logprob(value: Any) -> float:
    return -math.inf if value == _INFINITY else _real("a logprob", value)


def _numbers(values: Sequence[float] | None) -> list[float | str] | None:
    return None if values is None else [_number(value) for value in values]


def _number(value: float) -> float | str:
    return _INFINITY if value == -math.inf else value
