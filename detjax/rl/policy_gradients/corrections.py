"""Importance weights that correct for a sampler whose logprobs differ from the trainer's, in float64 on the host.

A correction takes the logprobs of the sampled tokens from sampler and trainer, one float32 array per sequence. It
returns factors of the policy gradient's terms, one float64 array per sequence. The ratio r = exp(trainer - sampler) is
exactly 1.0 where the logprobs are equal, and 0.0 where the trainer's is -inf.

All corrections raise `ValueError` for bounds out of range, other dtypes or shapes, sampler logprobs that are not
finite, and trainer logprobs that are NaN or +inf.
"""

import math

import numpy as np
from jaxtyping import Float64

from detjax.audit.comparison.logprobs import Logprobs, check_pairs

type Weights = list[Float64[np.ndarray, "_"]]
"""Factors of the generated tokens' terms, one array per sequence."""


def none(sampler: Logprobs, trainer: Logprobs) -> Weights:
    """Returns weights of 1.0: no correction, which is correct if sampler and trainer compute the same bits."""
    return [np.ones(len(differences)) for differences in _log_ratios("none", sampler, trainer)]


def token_truncated(sampler: Logprobs, trainer: Logprobs, cap: float) -> Weights:
    """Returns `min(r, cap)` for every token: truncated importance sampling (TIS).

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the truncation is from
    Ionides 2008, "Truncated Importance Sampling". A cap of 2.0 is common.

    Args:
        cap: the largest weight, above 0.
    """
    _check_cap("token_truncated", cap)
    return [
        np.array([min(_ratio(difference), cap) for difference in differences], np.float64)
        for differences in _log_ratios("token_truncated", sampler, trainer)
    ]


def sequence_truncated(sampler: Logprobs, trainer: Logprobs, cap: float) -> Weights:
    """Returns `min(R, cap)` for all tokens of a sequence, where R is the product of its tokens' ratios.

    Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (sequence-level TIS).

    Args:
        cap: the largest weight, above 0.
    """
    _check_cap("sequence_truncated", cap)
    return [
        np.full(len(differences), min(_ratio(math.fsum(differences)), cap))
        for differences in _log_ratios("sequence_truncated", sampler, trainer)
    ]


def sequence_masked(sampler: Logprobs, trainer: Logprobs, low: float, high: float) -> Weights:
    """Returns R for all tokens of a sequence if `low <= R <= high`, and 0.0 for all of them otherwise.

    R is the product of the tokens' ratios. Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from
    the Training-Inference Mismatch" (sequence-level masked importance sampling). A masked sequence still counts in
    `advantages.normalization` unless its length is left out there.

    Args:
        low: the smallest R that is not masked, at least 0.
        high: the largest R that is not masked, finite.
    """
    if not 0 <= low <= high < math.inf:
        raise ValueError(f"sequence_masked: low is {low!r} and high {high!r}; accepted: 0 <= low <= high, finite")
    ratios = [
        (len(differences), _ratio(math.fsum(differences)))
        for differences in _log_ratios("sequence_masked", sampler, trainer)
    ]
    return [np.full(length, ratio if low <= ratio <= high else 0.0) for length, ratio in ratios]


def _check_cap(function: str, cap: float) -> None:
    if not 0 < cap < math.inf:
        raise ValueError(f"{function}: cap is {cap!r}; accepted: above 0, finite")


def _ratio(log_ratio: float) -> float:
    # NumPy's vectorized exp may round the last elements of an array differently; libm's does not.
    try:
        return math.exp(log_ratio)
    except OverflowError:
        return math.inf


def _log_ratios(function: str, sampler: Logprobs, trainer: Logprobs) -> list[list[float]]:
    check_pairs(function, sampler, trainer)
    differences = []
    for index, (sampled, trained) in enumerate(zip(sampler, trainer, strict=True)):
        refused = ~np.isfinite(sampled) | np.isnan(trained) | np.isposinf(trained)
        if refused.any():
            token = int(refused.argmax())
            raise ValueError(
                f"{function}: token {token} of sequence {index} has logprob {sampled[token]} from the sampler and "
                f"{trained[token]} from the trainer; accepted: finite logprobs, or -inf from the trainer"
            )
        differences.append((trained.astype(np.float64) - sampled.astype(np.float64)).tolist())
    return differences
