"""Verifies that answers come from a given model: every token and every bit of logprobs, at the speed of prefill."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64
from rich.console import Console
from rich.progress import Progress

from detjax import models
from detjax.audit.comparison.divergence import ulps
from detjax.audit.verification.replay import Answer, Replayed, replayed
from detjax.audit.verification.transcripts import Transcript
from detjax.engine import sequence as sequences
from detjax.engine.constraints import ModelConstraints
from detjax.engine.model_runner import bytes_of_page
from detjax.engine.validation import check_arrays, encode_prompt, end_tokens
from detjax.models import Decoder, Tokenizer
from detjax.models.adapters.adapter import adapted_digest
from detjax.models.adapters.adapter_set import without_adapters
from detjax.operands.options import KVQuantization
from detjax.runtime import fingerprints

# fmt: off
Reason = Literal[
    "response", "digest", "environment", "model", "request",
    "token", "logprob", "sampling_logprob", "top_logprobs", "end", "text",
]
# fmt: on
"""The reason why a transcript is refused. "response": the response around it disagrees. "digest": its digest does not
match. "environment", "model": it was answered elsewhere. "request": the engine would refuse the request. "token" to
"top_logprobs": the model gives other values. "end": the answer ends too early or too late. "text": its tokens decode to
another text."""

_AT_A_TOKEN: Final = ("token", "logprob", "sampling_logprob", "top_logprobs", "end")
"""Reasons that belong to a token, in the order in which they are reported for one token."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of verifying a transcript, with the first difference from the model's answer.

    Attributes:
        reason: the reason for refusing it; None: it is verified.
        position: the position of the first wrong token of the completion, counted from 0; None: the reason belongs to
            no token.
        detail: a description of the given and the expected value.
        expected: the token or logprob that the model gives at this position.
        given: the token or logprob in the transcript.
        ulps: the distance of two logprobs in units in the last place of float32.
    """

    reason: Reason | None = None
    position: int | None = None
    detail: str = ""
    expected: float | int | None = None
    given: float | int | None = None
    ulps: int | None = None

    @property
    def is_verified(self) -> bool:
        """True if the transcript is the model's answer."""
        return self.reason is None

    def __str__(self) -> str:
        if self.reason is None:
            return "verified"
        position = "" if self.position is None else f" at token {self.position}"
        return f"refused{position} ({self.reason}): {self.detail}"


def verify(
    model: Decoder, transcripts: Sequence[Transcript], tokenizer: Tokenizer | None = None, *, progress: bool = False
) -> list[Verdict]:
    """Returns a verdict on each transcript: whether the model gives this answer, bit for bit.

    Prefill gives the bits of decode, so one forward pass over prompt and completion gives every token that the engine
    would have sampled, with its logprobs. Only the tokens of a transcript without logprobs are checked, and an answer
    without a finish reason may continue after its last token. If a transcript names an environment or a model, they
    must be this process's and this model, or this model with one of the adapters that `load` was given; all weights are
    then read once, for their digest. No verdict depends on the other transcripts or on their order.

    Args:
        model: the decoder, perhaps with adapters.
        transcripts: transcripts in any order, with any cache dtypes and parameters.
        tokenizer: the model's tokenizer, which is part of its digest; needed for texts, stop strings and constraints.
        progress: whether to show a progress bar on stderr.

    Example:
        >>> import dataclasses
        >>> import detjax, detjax.demo
        >>> model, tokenizer = detjax.models.load(detjax.demo.CHECKPOINT, progress=False)
        >>> params = detjax.SamplingParams(max_tokens=8, temperature=0.8, seed=7)
        >>> (generation,) = detjax.generate(model, ["ROMEO:"], params, tokenizer=tokenizer)
        >>> (honest,) = detjax.audit.transcripts_of(generation, params)
        >>> altered = dataclasses.replace(honest, sampling=dataclasses.replace(params, seed=8))
        >>> [verdict.is_verified for verdict in detjax.verify(model, [honest, altered], tokenizer)]
        [True, False]
    """
    return Verifier(model, tokenizer).verify(transcripts, progress=progress)


class Verifier:
    """Verifies transcripts of one model. Its weights are read at most once, for their digest."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None = None) -> None:
        self._model, self._tokenizer = without_adapters(model), tokenizer
        self._adapters = {} if model.adapters is None else model.adapters.by_name
        self._caches = set[KVQuantization | None]()
        self._constraints = ModelConstraints(model.config, model.generation_defaults, tokenizer)

    @functools.cached_property
    def _model_digest(self) -> str:
        return models.digest(self._model, self._tokenizer)

    @functools.cached_property
    def _adapter_names(self) -> dict[str, str]:
        """The name of each adapter, by the digest of the model with it."""
        return {adapted_digest(self._model_digest, one.digest): name for name, one in self._adapters.items()}

    def _adapter_of(self, transcript: Transcript) -> str | None:
        """Returns the name of the adapter that gave an answer; None: the model alone did."""
        model = transcript.origin.model
        return None if model is None or not self._adapters else self._adapter_names.get(model)

    def _decoder(self, adapter: str | None) -> Decoder:
        return self._model if adapter is None else models.with_adapter(self._model, self._adapters[adapter])

    def verify(self, transcripts: Sequence[Transcript], *, progress: bool = False) -> list[Verdict]:
        """Returns a verdict on each transcript; see `detjax.verify`."""
        checks, environment = [_Check(transcript) for transcript in transcripts], fingerprints.fingerprint().digest
        groups: dict[tuple[str | None, KVQuantization | None], list[_Check]] = {}
        for check in checks:
            self._prepare(check, environment)
            if check.answer is not None:
                key = self._adapter_of(check.transcript), check.transcript.origin.kv_cache_dtype
                groups.setdefault(key, []).append(check)
        total = sum(len(check.tokens) for group in groups.values() for check in group)
        with Progress(console=Console(stderr=True), disable=not progress) as bars:
            bar = bars.add_task(f"verifying {len(checks)} transcripts", total=total)
            for (adapter, cache), group in groups.items():
                answers = [check.answer for check in group if check.answer is not None]
                batch = _Batch(group)
                for result in replayed(self._decoder(adapter), answers, cache):
                    batch.compare(result)
                    bars.advance(bar, len(result.answer))
                assert batch.is_compared.all(), "a token was not computed again"
        return [check.verdict for check in checks]

    def _prepare(self, check: "_Check", environment: str) -> None:
        """Runs the checks that need no forward pass, and sets the answer to recompute."""
        transcript = check.transcript
        if (verdict := self._origin_verdict(transcript, environment)) is not None:
            check.refuse(verdict)
            return
        try:
            answer = self._answer(transcript)
        except ValueError as error:
            check.refuse(Verdict("request", detail=str(error)))
            return
        ended_after, reason, check.text_of_tokens = self._end(transcript, answer)
        check.add(_end_verdict(transcript, ended_after, reason))
        check.answer = dataclasses.replace(answer, tokens=answer.tokens[:ended_after])

    def _end(self, transcript: Transcript, answer: Answer) -> tuple[int, str | None, str | None]:
        """Returns the number of tokens after which an answer ends, the reason (None: it continues), and its text."""
        params, tokens = transcript.sampling, answer.tokens
        if params.stop:
            # The engine's own sequence finds the stop string that ends a text.
            context = sequences.RequestContext(end_tokens=answer.end_tokens, tokenizer=self._tokenizer)
            sequence = sequences.Sequence(answer.prompt, params, index=transcript.index, context=context)
            sequence.accept((token, 0.0) for token in tokens)
            return len(sequence.generated), sequence.finish_reason, sequence.text
        count = min(len(tokens), params.max_tokens)
        reason = "length" if count == params.max_tokens else None
        ends = (length for length, token in enumerate(tokens[:count], start=1) if token in answer.end_tokens)
        if (end := next(ends, None)) is not None:
            count, reason = end, "stop"
        text = None
        if self._tokenizer is not None and transcript.text is not None:
            shown = sequences.shown_tokens(tokens[:count], params, is_stopped=reason == "stop")
            text = self._tokenizer.decode(shown, params.skip_special_tokens)
        return count, reason, text

    def _origin_verdict(self, transcript: Transcript, environment: str) -> Verdict | None:
        """Returns a refusal if the transcript is not from this model in this environment."""
        if transcript.contradiction is not None:
            return Verdict("response", detail=transcript.contradiction)
        if transcript.digest is not None and transcript.digest != (computed := transcript.computed_digest()):
            return Verdict("digest", detail=f"the digest is {transcript.digest}, but the content's is {computed}")
        origin = transcript.origin
        if origin.environment not in (None, environment):
            return Verdict("environment", detail=f"answered in {origin.environment}; this environment is {environment}")
        if origin.model is None:
            return None
        if origin.model != self._model_digest and self._adapter_of(transcript) is None:
            others = "".join(f", and with {name!r} {digest}" for digest, name in self._adapter_names.items())
            return Verdict("model", detail=f"answered by {origin.model}; this model is {self._model_digest}{others}")
        return None

    def _answer(self, transcript: Transcript) -> Answer:
        """Returns the answer to recompute.

        Raises:
            ValueError: the engine would have refused the request.
        """
        params, model = transcript.sampling, self._model
        prompt = encode_prompt("the transcript's prompt", model.config, transcript.prompt, params, self._tokenizer)
        ends = end_tokens(model.generation_defaults, params)
        check_arrays("the transcript", params, ends)
        unknown = [token for token in transcript.tokens if not 0 <= token < model.config.vocab_size]
        if unknown:
            raise ValueError(f"the answer has token {unknown[0]}; accepted: ids 0 to {model.config.vocab_size - 1}")
        quantization = transcript.origin.kv_cache_dtype
        if quantization not in self._caches:
            bytes_of_page(self._model, quantization)  # raises ValueError if unsupported
            self._caches.add(quantization)
        top = max(map(len, transcript.top_logprobs or ()), default=0)
        if top > model.config.vocab_size:
            raise ValueError(f"a token has {top} top_logprobs; accepted: up to {model.config.vocab_size}")
        return Answer(
            prompt=prompt,
            tokens=transcript.tokens,
            params=dataclasses.replace(
                params, top_logprobs=top, sampling_logprobs=transcript.sampling_logprobs is not None
            ),
            index=transcript.index,
            end_tokens=ends,
            constraint=self._constraints.compile(params.constraint),
            rules=self._constraints.rules(params, ends),
        )


class _Check:
    """The state of one transcript's verification."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.answer: Answer | None = None
        self.text_of_tokens: str | None = None
        self._first: Verdict | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that are recomputed."""
        return () if self.answer is None else self.answer.tokens

    @property
    def verdict(self) -> Verdict:
        """The verdict after all comparisons."""
        text, decoded = self.transcript.text, self.text_of_tokens
        if self._first is not None:
            return self._first
        if text is not None and decoded is not None and text != decoded:
            return Verdict("text", detail=f"the text is {text!r}; its tokens decode to {decoded!r}")
        return Verdict()

    def refuse(self, verdict: Verdict) -> None:
        """Refuses the transcript without checking its tokens."""
        self._first = verdict

    def add(self, verdict: Verdict | None) -> None:
        """Records a refusal at a token; the first one in the answer counts."""
        if verdict is not None and (self._first is None or _order(verdict) < _order(self._first)):
            self._first = verdict


def _order(verdict: Verdict) -> tuple[int, int]:
    assert verdict.position is not None
    return verdict.position, _AT_A_TOKEN.index(verdict.reason)


def _end_verdict(transcript: Transcript, ended_after: int, reason: str | None) -> Verdict | None:
    """Returns a refusal of an answer's end, given the number of tokens and the reason that it must end with."""
    given, count = transcript.finish_reason, len(transcript.tokens)
    if ended_after < count:
        detail = f"the answer has {count - ended_after} more tokens; it must end with {reason!r} before them"
        return Verdict("end", ended_after, detail)
    if given != reason and given is not None:
        must = "it must continue" if reason is None else f"it must end with {reason!r}"
        return Verdict("end", count - 1, f"the answer ends with {given!r}; {must}")
    return None


class _Numbers(NamedTuple):
    """A number for each token, and whether it is known."""

    values: Float64[np.ndarray, "n"]
    is_known: Bool[np.ndarray, "n"]


class _Batch:
    """Transcripts with one cache dtype, as arrays.

    Attributes:
        is_compared: for each token, whether it was compared with the model's.
    """

    def __init__(self, checks: Sequence[_Check]) -> None:
        self._checks = checks
        self._starts = np.cumsum([0, *(len(check.tokens) for check in checks)])
        self._tokens = np.concatenate([np.asarray(check.tokens, np.int32) for check in checks])
        self._logprobs = self._joined([check.transcript.logprobs for check in checks])
        self._sampling_logprobs = self._joined([check.transcript.sampling_logprobs for check in checks])
        self._has_top = np.array([check.transcript.top_logprobs is not None for check in checks])
        self.is_compared = np.zeros(len(self._tokens), bool)

    def _joined(self, by_transcript: Sequence[Sequence[float] | None]) -> "_Numbers":
        values, known = np.zeros(len(self._tokens)), np.zeros(len(self._tokens), bool)
        for given, start, end in zip(by_transcript, self._starts, self._starts[1:], strict=False):
            if given is not None:
                values[start:end], known[start:end] = given[: end - start], True
        return _Numbers(values, known)

    def compare(self, replayed: Replayed) -> None:
        """Compares recomputed tokens with the transcripts."""
        place, sampled = self._starts[replayed.answer] + replayed.position, replayed.sampled
        self.is_compared[place] = True
        for row in np.flatnonzero(sampled.token != self._tokens[place]).tolist():
            expected, given = int(sampled.token[row]), int(self._tokens[place[row]])
            detail = f"the token is {given}; these parameters sample {expected}"
            self._add(replayed, row, "token", detail, expected, given)
        self._compare_numbers(replayed, place, "logprob", sampled.logprob, self._logprobs)
        if sampled.sampling_logprob is not None:
            numbers = sampled.sampling_logprob, self._sampling_logprobs
            self._compare_numbers(replayed, place, "sampling_logprob", *numbers)
        for row in np.flatnonzero(self._has_top[replayed.answer]).tolist():
            self._compare_top(replayed, row)

    def _compare_numbers(
        self, replayed: Replayed, place: np.ndarray, reason: Reason, computed: np.ndarray, numbers: "_Numbers"
    ) -> None:
        given = numbers.values[place]
        # A number that is not a float32 number must not match the nearest one.
        differs = (computed.astype(np.float64).view(np.uint64) != given.view(np.uint64)) | np.isnan(computed)
        for row in np.flatnonzero(differs & numbers.is_known[place]).tolist():
            expected, answered = float(computed[row]), float(given[row])
            distance = ulps(np.float32(expected), np.float32(answered))
            difference = f"{distance} ulps away" if distance else "which is not a float32 number"
            detail = f"it is {answered!r}, {difference}; the model gives {expected!r}"
            self._add(replayed, row, reason, detail, expected, answered, distance)

    def _add(self, replayed: Replayed, row: int, reason: Reason, detail: str, *numbers: Any) -> None:
        """Records a refusal at a row, with the expected and the given number and their distance."""
        verdict = Verdict(reason, int(replayed.position[row]), detail, *numbers)
        self._checks[replayed.answer[row]].add(verdict)

    def _compare_top(self, replayed: Replayed, row: int) -> None:
        check, position = self._checks[replayed.answer[row]], int(replayed.position[row])
        assert check.transcript.top_logprobs is not None
        given = check.transcript.top_logprobs[position]
        tokens, logprobs = replayed.sampled.top_tokens[row], replayed.sampled.top_logprobs[row]
        expected = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))[: len(given)]
        if given != expected:
            self._add(replayed, row, "top_logprobs", f"they are {given}; the model gives {expected}")
