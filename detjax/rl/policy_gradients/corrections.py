"""Importance weights that correct for a sampler whose logprobs differ from the trainer's, in float64 on the host.

A correction takes the sampler's and the trainer's logprobs of the sampled tokens, a float32 array a sequence. It
returns what the policy gradient's terms are multiplied by, a float64 array a sequence. The ratio r = exp(trainer -
sampler) is exactly 1.0 where the logprobs are equal, and 0.0 where the trainer's is -inf.

All corrections raise a `ValueError` for arrays of other dtypes or shapes, for a sampler's logprob that is not finite,
and for a trainer's that is NaN or +inf: no weight is right for them.
"""

import math

import numpy as np
from jaxtyping import Float64

from detjax.audit.comparison.logprobs import Logprobs, check_pairs

type Weights = list[Float64[np.ndarray, "_"]]
"""Factors of the generated tokens' terms, an array a sequence."""


def none(sampler: Logprobs, trainer: Logprobs) -> Weights:
    """Returns weights of 1.0: no correction, which is right if the bits of sampler and trainer are equal."""
    return [np.ones(len(differences)) for differences in _log_ratios("none", sampler, trainer)]


def token_truncated(sampler: Logprobs, trainer: Logprobs, cap: float) -> Weights:
    """Returns `min(r, cap)` for every token: truncated importance sampling, TIS.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the truncation is from
    Ionides 2008, "Truncated Importance Sampling". A cap of 2.0 is common.

    Args:
        sampler: logprobs of the sampler.
        trainer: logprobs of the trainer.
        cap: the largest weight, above 0.

    Raises:
        ValueError: the cap or a logprob is not accepted.
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
        sampler: logprobs of the sampler.
        trainer: logprobs of the trainer.
        cap: the largest weight, above 0.

    Raises:
        ValueError: the cap or a logprob is not accepted.
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
        sampler: logprobs of the sampler.
        trainer: logprobs of the trainer.
        low: the least product that is kept, at least 0.
        high: the largest product that is kept, finite.

    Raises:
        ValueError: the bounds or a logprob are not accepted.
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
    # NumPy's vectorized exp may have other bits for the last elements of an array; libm's has not.
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
                f"{function}: token {token} of sequence {index} has the logprobs {sampled[token]} of the sampler and "
                f"{trained[token]} of the trainer; accepted: finite ones, or -inf of the trainer"
            )
        differences.append((trained.astype(np.float64) - sampled.astype(np.float64)).tolist())
    return differences
