"""Compares two engines' logprobs of the same prompts with thresholds from the literature."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from detjax.audit.comparison.divergence import Divergence, divergence
from detjax.audit.comparison.logprob_files import ScoredTokens


@dataclasses.dataclass(frozen=True)
class Threshold:
    """A bound from the literature.

    Attributes:
        measure: a description of the bounded measure.
        bound: the bound.
        is_least: whether it is a lower bound; otherwise an upper bound.
        source: the source.
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
"""Bounds for measures of `Comparison`. Equal bits satisfy all of them; the reverse is far from true."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The differences between two sets of logprobs.

    Tokens of a sample count up to the first that differs: later tokens have different contexts.

    Attributes:
        samples: the number of samples.
        samples_of_equal_tokens: the number of samples with the same tokens throughout.
        first_other_token: sample and token, counted from 0, of the first token that differs; None: all agree, or the
            tokens are unknown.
        top1_agreement: the share of positions with equal contexts where the most likely token is the same; None: a set
            does not have it.
        divergence: the divergence of the logprobs of equal tokens, from the first set to the second.
        largest_ratio: the largest ratio of a token's probability in the second set to the first set's.
        smallest_ratio: the smallest such ratio.
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
        """The effective sample size as a share of the tokens; 1.0 without tokens."""
        tokens = self.divergence.tokens
        return self.divergence.effective_sample_size / tokens if tokens else 1.0

    def measured(self) -> dict[str, float]:
        """Returns the measures that have thresholds, by the names in `THRESHOLDS`."""
        between = self.divergence
        return {
            "k1": abs(between.k1),
            "k2": between.k2,
            "k3": between.k3,
            "effective_share": self.effective_share,
            "smallest_ratio": self.smallest_ratio,
        }

    def beyond(self) -> list[str]:
        """Returns the names of the exceeded thresholds."""
        return [name for name, value in self.measured().items() if not THRESHOLDS[name].holds(value)]

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as a JSON object, including the exceeded thresholds."""
        return dataclasses.asdict(self) | {"effective_share": self.effective_share, "beyond": self.beyond()}


def compare(first: Sequence[ScoredTokens], second: Sequence[ScoredTokens]) -> Comparison:
    """Returns the differences between two sets of logprobs of the same requests.

    Args:
        first: the samples of one engine; see `read_logprobs`.
        second: the same samples of another engine, in the same order.

    Raises:
        ValueError: the numbers of samples differ; or one side has token ids and the other texts; or one side has no
            tokens and the numbers of logprobs differ.
    """
    if len(first) != len(second):
        raise ValueError(f"compare: {len(first)} and {len(second)} samples; accepted: equal numbers")
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
        agrees for pair, count in zip(pairs, counts, strict=True) for agrees in _agreements(*pair, count=count + 1)
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
    """Returns the length of the common prefix of two samples' tokens."""
    lengths = len(first.logprobs), len(second.logprobs)
    sides = (first.ids, second.ids), (first.texts, second.texts)
    known = [(one, other) for one, other in sides if one is not None and other is not None]
    if known:
        one, other = known[0]
        differing = (position for position, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        return next(differing, min(lengths))
    if None not in (first.ids or first.texts, second.ids or second.texts):
        raise ValueError(
            f"compare: sample {number} has token ids on one side and texts on the other; accepted: the same on both. "
            "Ask the server for token ids, as with return_token_ids."
        )
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"compare: sample {number} has {lengths[0]} and {lengths[1]} logprobs, and the tokens of one side are "
            "unknown; accepted: equal numbers of logprobs, or tokens"
        )
    return lengths[0]


def _agreements(first: ScoredTokens, second: ScoredTokens, count: int) -> list[bool]:
    """Returns, for each of the first `count` positions where both are known, whether the most likely tokens agree."""
    sides = (first.likeliest_ids, second.likeliest_ids), (first.likeliest_texts, second.likeliest_texts)
    for one, other in sides:
        if one is not None and other is not None:
            pairs = zip(one[:count], other[:count], strict=False)
            return [a == b for a, b in pairs if a is not None and b is not None]
    return []


def _ratio(first: float, second: float) -> float:
    """Returns the ratio of two probabilities, 1.0 for equal logprobs."""
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
    """Returns a table of the measures of a comparison and their thresholds."""
    between, measured, beyond = comparison.divergence, comparison.measured(), comparison.beyond()
    lines = Table("measure", "value", "threshold", "", title=f"{between.tokens} tokens of {comparison.samples} samples")
    position = comparison.first_other_token
    lines.add_row("samples with equal tokens", f"{comparison.samples_of_equal_tokens} of {comparison.samples}")
    first = "none" if position is None else f"token {position[1]} of sample {position[0]}"
    lines.add_row("first token that differs", first)
    agreement = comparison.top1_agreement
    lines.add_row("same most likely token", "unknown" if agreement is None else f"{agreement:.4%}")
    lines.add_row("logprobs with unequal bits", f"{between.unequal_tokens} ({between.unequal_share:.4%})")
    lines.add_row("largest distance", f"{between.largest_ulps} ulps, {between.largest_difference:.3g} nats")
    lines.add_row("largest ratio of two probabilities", f"{comparison.largest_ratio:.3g}")
    for name, threshold in THRESHOLDS.items():
        bound = f"{'at least' if threshold.is_least else 'at most'} {threshold.bound:g}"
        value = between.k1 if name == "k1" else measured[name]
        lines.add_row(threshold.measure, f"{value:.3g}", bound, "beyond" if name in beyond else "within")
    return lines
