"""Measures the divergence of two sets of logprobs of the same tokens, in float64 on the host."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from detjax.audit.comparison.logprobs import Logprobs, check_pairs


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The divergence of two sets of logprobs of sampled tokens.

    With d = trainer - sampler and r = exp(d), k1 to k3 estimate the Kullback-Leibler divergence of the sampler's
    distribution from the trainer's (Schulman 2020, "Approximating KL Divergence"). All fields except `tokens`
    and `effective_sample_size` are exactly zero if all bits are equal.

    Attributes:
        tokens: the number of tokens.
        unequal_tokens: the number of tokens whose logprobs have unequal bits; 0.0 and -0.0 are unequal.
        unequal_share: their share; 0.0 without tokens.
        mean_difference: the mean of |d|, in nats.
        largest_difference: the largest |d|, in nats.
        k1: the mean of -d, in nats. It is unbiased, and its terms may cancel.
        k2: the mean of d^2 / 2.
        k3: the mean of r - 1 - d. It is unbiased, and no term is negative.
        effective_sample_size: (sum of r)^2 / (sum of r^2) over tokens (Kong 1992): the number of tokens if all bits are
            equal, at most that number otherwise.
        largest_ulps: the largest distance in units in the last place of float32: the number of steps to the next
            float32 number between two logprobs. 0.0 and -0.0 differ by one step, and NaN on one side counts as the
            distance between the infinities.
        first_unequal: sequence and token, counted from 0, of the first logprobs with unequal bits; None: all are equal.
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
        """Returns the fields by name."""
        return dataclasses.asdict(self)


def divergence(sampler: Logprobs, trainer: Logprobs) -> Divergence:
    """Returns the divergence of a trainer's logprobs from a sampler's.

    No bit of the result depends on the order of the tokens or sequences: sums are exact and rounded once (`math.fsum`).
    Means are over all tokens of all sequences.

    Equal bits differ by exactly 0.0, also if both are -inf or the same NaN. Other values that are not finite
    propagate: a NaN difference makes all fields NaN except the counts and the share of tokens. An infinite d makes k2,
    k3 and both differences infinite, and k1 infinite with the sign of -d, or NaN for both signs. The effective sample
    size is NaN if any d is +inf, and 0.0 if all are -inf. Without tokens, all fields are zero.

    Args:
        sampler: logprobs of the sampled tokens, an array per sequence.
        trainer: logprobs of the same tokens.

    Raises:
        ValueError: the arrays are not float32 or differ in length.

    Example:
        >>> detjax.divergence([np.float32([-1.0, -2.0])], [np.float32([-1.0, -2.0])]).k3
        0.0
    """
    check_pairs("divergence", sampler, trainer)
    sampled, trained = (np.concatenate([np.empty(0, np.float32), *logprobs]) for logprobs in (sampler, trainer))
    unequal = sampled.view(np.uint32) != trained.view(np.uint32)
    ends = np.cumsum([0, *map(len, sampler)])
    # Only unequal tokens are computed: the others would give zeros, or NaN for two infinities.
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
        first_unequal=None if first is None else _sequence_and_token(first, ends),
    )


def ulps(first: np.generic, second: np.generic) -> int:
    """Returns the number of steps between two numbers of a dtype; see `Divergence.largest_ulps`."""
    return int(ulp_distances(np.atleast_1d(first), np.atleast_1d(second))[0])


def ulp_distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns `ulps` for each pair of elements of two arrays `[...]` of one dtype, as uint64 `[...]`."""
    words = np.dtype(f"uint{8 * first.dtype.itemsize}")
    before, after = _ordinals(first), _ordinals(second)
    low, high = np.minimum(before, after), np.maximum(before, after)
    distances = high.astype(np.uint64) - low.astype(np.uint64)
    ends = _ordinals(np.array([-np.inf, np.inf]).astype(first.dtype)).astype(np.uint64)
    is_nan = np.isnan(first.astype(np.float64)) | np.isnan(second.astype(np.float64))
    return np.where(
        is_nan, np.where(first.view(words) == second.view(words), np.uint64(0), ends[1:] - ends[:1]), distances
    )


def unequal_bits(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns which elements of two arrays `[...]` of one dtype have different bits."""
    one, other = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (first, second))
    return (one != other).reshape(*first.shape, first.dtype.itemsize).any(axis=-1)


def _ordinals(numbers: np.ndarray) -> np.ndarray:
    """Returns the ranks of numbers in the order of all numbers of their dtype, with -0.0 before 0.0."""
    bits = numbers.view(np.dtype(f"int{8 * numbers.dtype.itemsize}")).astype(np.int64)
    return np.where(bits >= 0, bits, -1 - (bits & np.iinfo(f"int{8 * numbers.dtype.itemsize}").max))


def _sequence_and_token(index: int, ends: np.ndarray) -> tuple[int, int]:
    """Returns the sequence of a token and its index there, given the ends of the sequences."""
    sequence = int(np.searchsorted(ends, index, side="right")) - 1
    return sequence, index - int(ends[sequence])


def _k3(difference: float) -> float:
    if math.isinf(difference):
        return math.inf
    # NumPy's vectorized expm1 may give different bits for the last elements of an array; libm's does not.
    try:
        return math.expm1(difference) - difference
    except OverflowError:
        return math.inf


def _sum(terms: Iterable[float]) -> float:
    """Returns the exact sum, rounded once; NaN for a NaN or infinities of both signs."""
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
    """Returns the effective sample size, given the differences of unequal tokens and the number of equal ones."""
    if any(math.isnan(difference) or difference == math.inf for difference in differences):
        return math.nan
    # Ratios relative to the largest one cannot overflow; the quotient stays the same.
    largest = max(differences, default=0.0)
    if equal_tokens:
        largest = max(largest, 0.0)
    if largest == -math.inf or not (differences or equal_tokens):
        return 0.0
    ratios = [math.exp(difference - largest) for difference in differences]
    ratios += [math.exp(-largest)] * equal_tokens
    return math.fsum(ratios) ** 2 / math.fsum([ratio * ratio for ratio in ratios])
