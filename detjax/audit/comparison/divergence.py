"""How much two sets of logprobs of the same tokens differ, in float64 on the host."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from detjax.audit.comparison.logprobs import Logprobs, check_pairs


@dataclasses.dataclass(frozen=True)
class Divergence:
    """What differs between two sets of logprobs of sampled tokens.

    With d = trainer - sampler and r = exp(d), k1 to k3 estimate the Kullback-Leibler divergence of the sampler's
    distribution from the trainer's (Schulman 2020, "Approximating KL Divergence"). All fields but `tokens` and
    `effective_sample_size` are exactly zero if all bits are equal.

    Attributes:
        tokens: the number of tokens.
        unequal_tokens: how many of them have logprobs of unequal bits; 0.0 and -0.0 are unequal.
        unequal_share: their share; 0.0 of no tokens.
        mean_difference: the mean of |d|, in nats.
        largest_difference: the largest |d|, in nats.
        k1: the mean of -d, in nats. It is unbiased, and its terms may cancel.
        k2: the mean of d^2 / 2.
        k3: the mean of r - 1 - d. It is unbiased, and no term is negative.
        effective_sample_size: (sum of r)^2 / (sum of r^2) over tokens (Kong 1992): the number of tokens if all bits are
            equal, at most this number otherwise.
        largest_ulps: the largest distance in units in the last place of float32: how many steps from one number to the
            next lie between two logprobs. 0.0 and -0.0 are a step apart, and whatever is NaN on one side counts as the
            distance of two infinities.
        first_unequal: sequence and token, counted from 0, of the first logprobs of unequal bits; None if all are equal.
    """

    tokens: int
    unequal_tokens: int
    unequal_share: float
    mean_difference: float
    largest_difference: float
    k1: float
    k2: float
    k3: float
    effective_sample_size: float
    largest_ulps: int = 0
    first_unequal: tuple[int, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields by name, as numbers of Python."""
        return dataclasses.asdict(self)


def divergence(sampler: Logprobs, trainer: Logprobs) -> Divergence:
    """Returns what differs between the logprobs of a sampler and of a trainer.

    No bit of the result depends on the order of the tokens or sequences: sums are exact and rounded once (`math.fsum`).
    Means are over all tokens of all sequences.

    Tokens of equal bits differ by exactly 0.0, also if both are -inf or the same NaN. Otherwise what is not finite
    shows. A difference that is NaN makes all fields NaN but the counts and the share of tokens. An infinite d makes k2,
    k3 and both differences infinite, and k1 infinite with the sign of -d, or NaN if there are both signs. The effective
    sample size is NaN if any d is +inf, and 0.0 if all are -inf. Of no tokens, all fields are zero.

    Args:
        sampler: logprobs of the sampled tokens, an array a sequence.
        trainer: logprobs of the same tokens.

    Raises:
        ValueError: the arrays are not float32 or not of the same lengths.

    Example:
        >>> detjax.divergence([np.float32([-1.0, -2.0])], [np.float32([-1.0, -2.0])]).k3
        0.0
    """
    check_pairs("divergence", sampler, trainer)
    sampled, trained = (np.concatenate([np.empty(0, np.float32), *logprobs]) for logprobs in (sampler, trainer))
    unequal = sampled.view(np.uint32) != trained.view(np.uint32)
    lengths = np.cumsum([0, *map(len, sampler)])
    # Only what differs is computed: in float64 the rest would be zeros, or NaN for two infinities.
    tokens, count = len(sampled), int(unequal.sum())
    sampled, trained = sampled[unequal], trained[unequal]
    largest_ulps = int(ulp_distances(sampled, trained).max(initial=0))
    first = int(unequal.argmax()) if count else None
    sampled, trained = (logprobs.astype(np.float64) for logprobs in (sampled, trained))
    with np.errstate(invalid="ignore"):
        differences = (trained - sampled).tolist()

    def mean(term: Callable[[float], float]) -> float:
        return _sum(map(term, differences)) / max(tokens, 1)

    return Divergence(
        tokens=tokens,
        unequal_tokens=count,
        unequal_share=count / max(tokens, 1),
        mean_difference=mean(abs),
        largest_difference=_largest(map(abs, differences)),
        k1=mean(lambda d: -d),
        k2=mean(lambda d: d * d / 2),
        k3=mean(_k3),
        effective_sample_size=_effective_sample_size(differences, tokens - count),
        largest_ulps=largest_ulps,
        first_unequal=None if first is None else _place(first, lengths),
    )


def ulps(first: np.generic, second: np.generic) -> int:
    """Returns how many steps from one number to the next lie between two of a dtype; see `Divergence.largest_ulps`."""
    return int(ulp_distances(np.atleast_1d(first), np.atleast_1d(second))[0])


def ulp_distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns `ulps` of every two numbers of two arrays `[...]` of one dtype, as uint64 `[...]`."""
    words = np.dtype(f"uint{8 * first.dtype.itemsize}")
    before, after = _ordinals(first), _ordinals(second)
    low, high = np.minimum(before, after), np.maximum(before, after)
    distances = high.astype(np.uint64) - low.astype(np.uint64)
    ends = _ordinals(np.array([-np.inf, np.inf]).astype(first.dtype)).astype(np.uint64)
    is_nan = np.isnan(first.astype(np.float64)) | np.isnan(second.astype(np.float64))
    return np.where(
        is_nan, np.where(first.view(words) == second.view(words), np.uint64(0), ends[1:] - ends[:1]), distances
    )


def _ordinals(numbers: np.ndarray) -> np.ndarray:
    """Places of numbers in the order of all numbers of their dtype, in which -0.0 comes before 0.0."""
    bits = numbers.view(np.dtype(f"int{8 * numbers.dtype.itemsize}")).astype(np.int64)
    return np.where(bits >= 0, bits, -1 - (bits & np.iinfo(f"int{8 * numbers.dtype.itemsize}").max))


def _place(index: int, ends: np.ndarray) -> tuple[int, int]:
    """The sequence of a token and its number there, given where sequences end."""
    sequence = int(np.searchsorted(ends, index, side="right")) - 1
    return sequence, index - int(ends[sequence])


def _k3(difference: float) -> float:
    if math.isinf(difference):
        return math.inf
    # NumPy's vectorized expm1 may have other bits for the last elements of an array; libm's has not.
    try:
        return math.expm1(difference) - difference
    except OverflowError:
        return math.inf


def _sum(terms: Iterable[float]) -> float:
    """Returns the exact sum, rounded once; infinities of both signs make it NaN, and so does a NaN."""
    terms = list(terms)
    if any(math.isnan(term) for term in terms) or {math.inf, -math.inf} <= set(terms):
        return math.nan
    try:
        return math.fsum(terms)
    except OverflowError:
        return math.inf


def _largest(terms: Iterable[float]) -> float:
    terms = list(terms)
    return math.nan if any(math.isnan(term) for term in terms) else max(terms, default=0.0)


def _effective_sample_size(differences: list[float], equal_tokens: int) -> float:
    """Returns the effective sample size of tokens that differ and of tokens whose ratio is 1."""
    if any(math.isnan(difference) or difference == math.inf for difference in differences):
        return math.nan
    # Ratios relative to the largest one cannot overflow, and the quotient does not change.
    largest = max(differences, default=0.0)
    if equal_tokens:
        largest = max(largest, 0.0)
    if largest == -math.inf or not (differences or equal_tokens):
        return 0.0
    ratios = [math.exp(difference - largest) for difference in differences]
    ratios += [math.exp(-largest)] * equal_tokens
    return math.fsum(ratios) ** 2 / math.fsum([ratio * ratio for ratio in ratios])
