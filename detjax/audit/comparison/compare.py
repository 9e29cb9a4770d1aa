"""How far two engines' logprobs of the same prompts are apart, and what practitioners make of it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from detjax.audit.comparison.divergence import Divergence, divergence
from detjax.audit.comparison.logprob_files import ScoredTokens


@dataclasses.dataclass(frozen=True)
class Threshold:
    """A bound that practitioners use.

    Attributes:
        measure: what is bounded, in words.
        bound: the bound.
        is_least: whether the measure has to be at least the bound; otherwise at most.
        source: who uses it.
    """

    measure: str
    bound: float
    is_least: bool
    source: str

    def holds(self, value: float) -> bool:
        """Returns whether a value is within the bound; NaN is not."""
        return value >= self.bound if self.is_least else value <= self.bound


_TINKER: Final = (
    "Tinker's documentation, 'Monitoring and run health': training is stable with a KL divergence below 0.01"
)
_VERL: Final = "verl's documentation, 'Rollout Correction'"
THRESHOLDS: Final[Mapping[str, Threshold]] = {
    "k1": Threshold("size of k1", 0.01, False, _TINKER),
    "k2": Threshold("k2", 0.01, False, _TINKER),
    "k3": Threshold("k3", 0.01, False, _TINKER + "; for its two estimators, k1 and k2"),
    "effective_share": Threshold("effective sample size, share of tokens", 0.3, True, f"{_VERL}: a warning below"),
    "smallest_ratio": Threshold(
        "smallest ratio of two probabilities", 1e-4, True, f"{_VERL}: the typical bound of its veto"
    ),
}
"""Bounds for measures of `Comparison`. Equal bits are within all of them, and within is far from equal."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What differs between two sets of logprobs.

    Tokens of a sample count up to the first that differs: behind it they have other contexts.

    Attributes:
        samples: the number of samples.
        samples_of_equal_tokens: how many of them have the same tokens throughout.
        first_other_token: sample and token, counted from 0, of the first token that differs; None: none does, or the
            tokens are not known.
        top1_agreement: the share of places with equal contexts where the likeliest token is the same; None: neither
            set, or one alone, says what it is.
        divergence: of the logprobs of equal tokens, from the first set to the second.
        largest_ratio: the largest quotient of a token's probabilities, those of the second set by those of the first.
        smallest_ratio: the smallest one.
    """

    samples: int
    samples_of_equal_tokens: int
    first_other_token: tuple[int, int] | None
    top1_agreement: float | None
    divergence: Divergence
    largest_ratio: float
    smallest_ratio: float

    @property
    def effective_share(self) -> float:
        """The effective sample size as a share of the tokens; 1.0 of none."""
        tokens = self.divergence.tokens
        return self.divergence.effective_sample_size / tokens if tokens else 1.0

    def measured(self) -> dict[str, float]:
        """Returns what there are thresholds for, by the names in `THRESHOLDS`."""
        between = self.divergence
        return {
            "k1": abs(between.k1),
            "k2": between.k2,
            "k3": between.k3,
            "effective_share": self.effective_share,
            "smallest_ratio": self.smallest_ratio,
        }

    def beyond(self) -> list[str]:
        """Returns the names of the thresholds that are not kept."""
        return [name for name, value in self.measured().items() if not THRESHOLDS[name].holds(value)]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON holds it, the thresholds that are not kept among it."""
        return dataclasses.asdict(self) | {"effective_share": self.effective_share, "beyond": self.beyond()}


def compare(first: Sequence[ScoredTokens], second: Sequence[ScoredTokens]) -> Comparison:
    """Returns what differs between two sets of logprobs of the same requests.

    Args:
        first: the samples of one engine; see `read_logprobs`.
        second: the same samples of another one, in the same order.

    Raises:
        ValueError: the numbers of samples differ; or tokens are ids on one side and texts on the other; or one side
            does not know its tokens and has another number of logprobs.
    """
    if len(first) != len(second):
        raise ValueError(f"compare: {len(first)} and {len(second)} samples; accepted: as many of both")
    pairs = list(zip(first, second, strict=True))
    counts = [_equal_tokens(number, one, other) for number, (one, other) in enumerate(pairs)]
    before = [one.logprobs[:count] for one, count in zip(first, counts, strict=True)]
    after = [other.logprobs[:count] for other, count in zip(second, counts, strict=True)]
    ends = [
        (number, count)
        for number, (count, (one, other)) in enumerate(zip(counts, pairs, strict=True))
        if count < max(len(one.logprobs), len(other.logprobs))
    ]
    agreements = [
        agrees for pair, count in zip(pairs, counts, strict=True) for agrees in _agreements(*pair, places=count + 1)
    ]
    logprobs = zip(before, after, strict=True)
    ratios = [ratio for one, other in logprobs for ratio in map(_ratio, one.tolist(), other.tolist())]
    return Comparison(
        samples=len(pairs),
        samples_of_equal_tokens=len(pairs) - len(ends),
        first_other_token=ends[0] if ends else None,
        top1_agreement=sum(agreements) / len(agreements) if agreements else None,
        divergence=divergence(before, after),
        largest_ratio=_extreme(ratios, max),
        smallest_ratio=_extreme(ratios, min),
    )


def _equal_tokens(number: int, first: ScoredTokens, second: ScoredTokens) -> int:
    """Returns how many tokens two samples begin with alike."""
    lengths = len(first.logprobs), len(second.logprobs)
    sides = (first.ids, second.ids), (first.texts, second.texts)
    known = [(one, other) for one, other in sides if one is not None and other is not None]
    if known:
        one, other = known[0]
        differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        return next(differing, min(lengths))
    if None not in (first.ids or first.texts, second.ids or second.texts):
        raise ValueError(
            f"compare: sample {number} has token ids on one side and texts on the other; accepted: the same on both. "
            "Ask the server for token ids, as with return_token_ids."
        )
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"compare: sample {number} has {lengths[0]} and {lengths[1]} logprobs, and the tokens of one side are not "
            "known; accepted: as many of both, or tokens"
        )
    return lengths[0]


def _agreements(first: ScoredTokens, second: ScoredTokens, places: int) -> list[bool]:
    """Returns whether the likeliest tokens are the same in the first places where both are known."""
    sides = (first.likeliest_ids, second.likeliest_ids), (first.likeliest_texts, second.likeliest_texts)
    for one, other in sides:
        if one is not None and other is not None:
            pairs = zip(one[:places], other[:places], strict=False)
            return [a == b for a, b in pairs if a is not None and b is not None]
    return []


def _ratio(first: float, second: float) -> float:
    """The quotient of two probabilities, 1.0 for equal logprobs."""
    if first == second:
        return 1.0
    try:
        return math.exp(second - first)
    except OverflowError:
        return math.inf


def _extreme(ratios: Sequence[float], choose: Callable[[Sequence[float]], float]) -> float:
    if not ratios:
        return 1.0
    return math.nan if any(map(math.isnan, ratios)) else choose(ratios)


def table(comparison: Comparison) -> Table:
    """Returns a line for each measure of a comparison, with the threshold that there is for it."""
    between, measured, beyond = comparison.divergence, comparison.measured(), comparison.beyond()
    lines = Table("measure", "value", "threshold", "", title=f"{between.tokens} tokens of {comparison.samples} samples")
    place = comparison.first_other_token
    lines.add_row("samples of equal tokens", f"{comparison.samples_of_equal_tokens} of {comparison.samples}")
    lines.add_row("first token that differs", "none" if place is None else f"token {place[1]} of sample {place[0]}")
    agreement = comparison.top1_agreement
    lines.add_row("same likeliest token", "not known" if agreement is None else f"{agreement:.4%}")
    lines.add_row("logprobs of unequal bits", f"{between.unequal_tokens} ({between.unequal_share:.4%})")
    lines.add_row("largest distance", f"{between.largest_ulps} ulps, {between.largest_difference:.3g} nats")
    lines.add_row("largest ratio of two probabilities", f"{comparison.largest_ratio:.3g}")
    for name, threshold in THRESHOLDS.items():
        bound = f"{'at least' if threshold.is_least else 'at most'} {threshold.bound:g}"
        value = between.k1 if name == "k1" else measured[name]
        lines.add_row(threshold.measure, f"{value:.3g}", bound, "beyond" if name in beyond else "within")
    return lines
