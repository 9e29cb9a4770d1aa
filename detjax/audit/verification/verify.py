"""Whether answers are those that a model gives: every token and every logprob bit, checked at the speed of prefill."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

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
from detjax.operands.options import KVQuantization
from detjax.runtime import fingerprints

# fmt: off
Reason = Literal[
    "response", "digest", "environment", "model", "request",
    "token", "logprob", "sampling_logprob", "top_logprobs", "end", "text",
]
# fmt: on
"""Why a transcript is refused. The response that held it says something else; its digest is that of another one;
another environment or another model answered; the model could not be asked this; a token, a logprob or the likeliest
tokens are others; the answer does not end where it must; its text is another one."""

_AT_A_TOKEN: Final = ("token", "logprob", "sampling_logprob", "top_logprobs", "end")
"""Reasons that belong to a token, in the order in which they are told of the same one."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a transcript is what the model answers, and if not, where it first is not.

    Attributes:
        reason: why it is refused; None: it is verified.
        position: the first token of the completion, counted from 0, that the model could not have produced like this;
            None: the reason belongs to no token.
        detail: what was given and what was expected, in words.
        expected: the token or the logprob that the model gives there.
        given: the one that the transcript has.
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
        """Whether the transcript is what the model answers."""
        return self.reason is None

    def __str__(self) -> str:
        """Returns the verdict in words."""
        if self.reason is None:
            return "verified"
        place = "" if self.position is None else f" at token {self.position}"
        return f"refused{place} ({self.reason}): {self.detail}"


def verify(
    model: Decoder, transcripts: Sequence[Transcript], tokenizer: Tokenizer | None = None, *, progress: bool = False
) -> list[Verdict]:
    """Returns a verdict on each transcript: whether it is, bit for bit, what the model answers.

    One forward pass over prompt and completion says of every token what the engine would have sampled there, with which
    logprobs, because prefill gives the bits of decode. A transcript without logprobs is checked for its tokens, and one
    without a finish reason may go on after its last token. Where it names an environment or a model, they have to be
    this process's and this model: then all weights are read for their digest, once. No verdict depends on the other
    transcripts or on their order.

    Args:
        model: the decoder.
        transcripts: in any order, of any caches and parameters.
        tokenizer: the model's tokenizer, which is part of its digest; needed for texts, stop strings and constraints.
        progress: show a bar on stderr.

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
    """Verifies transcripts of one model, whose weights are read for their digest once at most."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None = None) -> None:
        """A verifier; see `verify`."""
        self._model, self._tokenizer = model, tokenizer
        self._caches = set[KVQuantization | None]()
        self._constraints = ModelConstraints(model.config, model.generation_defaults, tokenizer)

    @functools.cached_property
    def _model_digest(self) -> str:
        return models.digest(self._model, self._tokenizer)

    def verify(self, transcripts: Sequence[Transcript], *, progress: bool = False) -> list[Verdict]:
        """Returns a verdict on each transcript; see the function."""
        checks, environment = [_Check(transcript) for transcript in transcripts], fingerprints.fingerprint().digest
        by_cache: dict[KVQuantization | None, list[_Check]] = {}
        for check in checks:
            self._prepare(check, environment)
            if check.answer is not None:
                by_cache.setdefault(check.transcript.origin.kv_cache_dtype, []).append(check)
        total = sum(len(check.tokens) for group in by_cache.values() for check in group)
        with Progress(console=Console(stderr=True), disable=not progress) as bars:
            bar = bars.add_task(f"verifying {len(checks)} transcripts", total=total)
            for cache, group in by_cache.items():
                answers = [check.answer for check in group if check.answer is not None]
                batch = _Batch(group)
                for some in replayed(self._model, answers, cache):
                    batch.compare(some)
                    bars.advance(bar, len(some.answer))
                assert batch.is_compared.all(), "a token was not computed again"
        return [check.verdict for check in checks]

    def _prepare(self, check: "_Check", environment: str) -> None:
        """Checks what needs no forward pass, and says what has to be computed."""
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
        """Returns after how many of its tokens an answer ends, why it does (None: it goes on), and its text."""
        params, tokens = transcript.sampling, answer.tokens
        if params.stop:
            # The engine's own sequence knows where a stop string ends a text.
            context = sequences.RequestContext(end_tokens=answer.end_tokens, tokenizer=self._tokenizer)
            sequence = sequences.Sequence(answer.prompt, params, index=transcript.index, context=context)
            for token in tokens:
                sequence.add(token, 0.0, (), batch=1)
                if sequence.finish_reason is not None:
                    break
            return len(sequence.generated), sequence.finish_reason, sequence.text
        count = min(len(tokens), params.max_tokens)
        reason = "length" if count == params.max_tokens else None
        ends = (place for place, token in enumerate(tokens[:count], start=1) if token in answer.end_tokens)
        if (end := next(ends, None)) is not None:
            count, reason = end, "stop"
        text = None
        if self._tokenizer is not None and transcript.text is not None:
            text = self._tokenizer.decode(tokens[:count])
        return count, reason, text

    def _origin_verdict(self, transcript: Transcript, environment: str) -> Verdict | None:
        """Returns why the transcript is not one of this model in this environment, if it is not."""
        if transcript.contradiction is not None:
            return Verdict("response", detail=transcript.contradiction)
        if transcript.digest is not None and transcript.digest != (computed := transcript.computed_digest()):
            return Verdict("digest", detail=f"the digest is {transcript.digest}, and the content's is {computed}")
        origin = transcript.origin
        if origin.environment not in (None, environment):
            return Verdict("environment", detail=f"answered in {origin.environment}; here is {environment}")
        if origin.model is not None and origin.model != self._model_digest:
            return Verdict("model", detail=f"answered by {origin.model}; this model is {self._model_digest}")
        return None

    def _answer(self, transcript: Transcript) -> Answer:
        """Returns what has to be computed again.

        Raises:
            ValueError: the engine would have refused the request.
        """
        params, model = transcript.sampling, self._model
        prompt = encode_prompt("the transcript's prompt", model.config, transcript.prompt, params, self._tokenizer)
        ends = end_tokens(model.generation_defaults, params)
        check_arrays("the transcript", params, ends)
        unknown = [token for token in transcript.tokens if not 0 <= token < model.config.vocab_size]
        if unknown:
            raise ValueError(f"token {unknown[0]} was answered; accepted: ids 0 to {model.config.vocab_size - 1}")
        quantization = transcript.origin.kv_cache_dtype
        if quantization not in self._caches:
            bytes_of_page(self._model, quantization)  # raises ValueError if keys and values cannot be quantized so
            self._caches.add(quantization)
        top = max(map(len, transcript.top_logprobs or ()), default=0)
        if top > model.config.vocab_size:
            raise ValueError(f"there are {top} top_logprobs of a token; accepted: up to {model.config.vocab_size}")
        return Answer(
            prompt=prompt,
            tokens=transcript.tokens,
            params=dataclasses.replace(
                params, top_logprobs=top, sampling_logprobs=transcript.sampling_logprobs is not None
            ),
            index=transcript.index,
            end_tokens=ends,
            constraint=self._constraints.compile(params.constraint),
        )


class _Check:
    """A transcript on its way to a verdict."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.answer: Answer | None = None
        self.text_of_tokens: str | None = None
        self._first: Verdict | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that are computed again."""
        return () if self.answer is None else self.answer.tokens

    @property
    def verdict(self) -> Verdict:
        """The verdict, once everything is compared."""
        text, made = self.transcript.text, self.text_of_tokens
        if self._first is not None:
            return self._first
        if text is not None and made is not None and text != made:
            return Verdict("text", detail=f"the text is {text!r}; its tokens make {made!r}")
        return Verdict()

    def refuse(self, verdict: Verdict) -> None:
        """Refuses the transcript without a look at its tokens."""
        self._first = verdict

    def add(self, verdict: Verdict | None) -> None:
        """Notes what is wrong with a token. What is wrong first counts."""
        if verdict is not None and (self._first is None or _order(verdict) < _order(self._first)):
            self._first = verdict


def _order(verdict: Verdict) -> tuple[int, int]:
    assert verdict.position is not None
    return verdict.position, _AT_A_TOKEN.index(verdict.reason)


def _end_verdict(transcript: Transcript, ended_after: int, reason: str | None) -> Verdict | None:
    """Returns what is wrong with an answer's end, given after how many tokens it must have ended, and why."""
    given, count = transcript.finish_reason, len(transcript.tokens)
    if ended_after < count:
        detail = f"the answer goes on for {count - ended_after} tokens; it must end with {reason!r} before"
        return Verdict("end", ended_after, detail)
    if given != reason and given is not None:
        must = "it must go on" if reason is None else f"it must end with {reason!r}"
        return Verdict("end", count - 1, f"the answer ends with {given!r}; {must}")
    return None


class _Numbers(NamedTuple):
    """A number of each token, and whether it is known."""

    values: Float64[np.ndarray, "n"]
    is_known: Bool[np.ndarray, "n"]


class _Batch:
    """The transcripts of one cache, and what they say in arrays.

    Attributes:
        is_compared: for each token of them, whether it was compared with what the model samples.
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
        """Compares some tokens with what the model samples."""
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
        # No number that is not a float32 one passes for the one that is next to it.
        differs = (computed.astype(np.float64).view(np.uint64) != given.view(np.uint64)) | np.isnan(computed)
        for row in np.flatnonzero(differs & numbers.is_known[place]).tolist():
            expected, answered = float(computed[row]), float(given[row])
            distance = ulps(np.float32(expected), np.float32(answered))
            apart = f"{distance} ulps away" if distance else "which is no float32 number"
            detail = f"it is {answered!r}, {apart}; the model gives {expected!r}"
            self._add(replayed, row, reason, detail, expected, answered, distance)

    def _add(
        self,
        replayed: Replayed,
        row: int,
        reason: Reason,
        detail: str,
        expected: float | int | None = None,
        given: float | int | None = None,
        distance: int | None = None,
    ) -> None:
        verdict = Verdict(reason, int(replayed.position[row]), detail, expected, given, distance)
        self._checks[replayed.answer[row]].add(verdict)

    def _compare_top(self, replayed: Replayed, row: int) -> None:
        check, position = self._checks[replayed.answer[row]], int(replayed.position[row])
        assert check.transcript.top_logprobs is not None
        given = check.transcript.top_logprobs[position]
        tokens, logprobs = replayed.sampled.top_tokens[row], replayed.sampled.top_logprobs[row]
        expected = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))[: len(given)]
        if given != expected:
            self._add(replayed, row, "top_logprobs", f"they are {given}; the model gives {expected}")
