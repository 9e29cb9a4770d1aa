"""Advantages and per-token loss weights, computed in float64 on the host.

Sums are exact and rounded once (`math.fsum`), so no bit depends on the order of the samples. The baseline of equal
rewards is exactly that reward, so their advantages are exactly 0.0.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64

Baseline = Literal["none", "mean", "group"]
Normalization = Literal["token", "sequence", "constant"]


def grpo(rewards: Float64[np.ndarray, "P G"], epsilon: float = 1e-6) -> Float64[np.ndarray, "P G"]:
    """Returns the advantages of GRPO: `(r - mean) / (std + epsilon)`, with mean and std over a prompt's samples.

    `std` divides by G, not by G - 1. Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), section 4.1.2.

    Args:
        rewards: finite rewards of G samples for each of P prompts.
        epsilon: keeps the quotient finite, above 0.

    Raises:
        ValueError: a reward is not finite, a prompt has fewer than two samples, or epsilon is not above 0.
    """
    _check("grpo", rewards, min_samples=2)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"grpo: epsilon is {epsilon!r}; accepted: above 0, finite")
    advantages = _centred(rewards)
    for row in advantages:
        deviation = math.sqrt(math.fsum((row * row).tolist()) / len(row))
        row /= deviation + epsilon
    return advantages


def rloo(rewards: Float64[np.ndarray, "P G"]) -> Float64[np.ndarray, "P G"]:
    """Returns the advantages of RLOO: a reward minus the mean reward of the prompt's other samples.

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, "Back to Basics"
    (arXiv:2402.14740), section 3.2.

    Args:
        rewards: finite rewards of G samples for each of P prompts.

    Raises:
        ValueError: a reward is not finite, or a prompt has fewer than two samples.
    """
    _check("rloo", rewards, min_samples=2)
    groups = [
        [reward - _mean(group[:sample] + group[sample + 1 :]) for sample, reward in enumerate(group)]
        for group in rewards.tolist()
    ]
    return np.array(groups, np.float64)


def reinforce(rewards: Float64[np.ndarray, "P G"], baseline: Baseline = "none") -> Float64[np.ndarray, "P G"]:
    """Returns the advantages of REINFORCE: rewards minus a baseline (Williams 1992).

    Args:
        rewards: finite rewards of G samples for each of P prompts.
        baseline: "none"; "mean": the mean reward of the whole batch; "group": the mean reward of the prompt's samples,
            as in Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783).

    Raises:
        ValueError: a reward is not finite, rewards are empty, a prompt has fewer than two samples under "group", or the
            baseline is unknown.
    """
    _check("reinforce", rewards, min_samples=2 if baseline == "group" else 1)
    match baseline:
        case "none":
            return rewards.copy()
        case "mean":
            return rewards - _mean(rewards.ravel().tolist())
        case "group":
            return _centred(rewards)
    raise ValueError(f"reinforce: baseline is {baseline!r}; accepted: 'none', 'mean', 'group'")


def normalization(
    lengths: Sequence[int], kind: Normalization = "token", constant: int | None = None
) -> list[Float64[np.ndarray, "_"]]:
    """Returns each token's weight in the loss `-sum(weight * advantage * logprob)`, one array per sequence.

    With B sequences of n_1 to n_B generated tokens, a token of sequence i has the weight

    - "token": `1 / (n_1 + ... + n_B)`, the mean over tokens (Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.3);
    - "sequence": `1 / (B * n_i)`, the mean over sequences of their means over tokens (GRPO, arXiv:2402.03300);
    - "constant": `1 / (B * constant)`, so that no length changes a weight (Dr. GRPO, arXiv:2503.20783, section 3.1).

    Sequences without tokens count in B and have empty arrays.

    Args:
        lengths: the number of generated tokens of every sequence of the batch, not of a microbatch.
        kind: one of the three.
        constant: a number of tokens, such as `max_tokens`; only with "constant".

    Raises:
        ValueError: a length is negative, the kind is unknown, or the constant is missing, superfluous or less than 1.
    """
    if any(length < 0 for length in lengths):
        raise ValueError(f"normalization: a length is {min(lengths)}; accepted: at least 0")
    if (kind == "constant") != (constant is not None):
        raise ValueError(
            f"normalization: constant is {constant} with kind {kind!r}; accepted: a number with 'constant'"
        )
    if constant is not None and constant < 1:
        raise ValueError(f"normalization: constant is {constant}; accepted: at least 1")
    match kind:
        case "token":
            divisors = [sum(lengths)] * len(lengths)
        case "sequence":
            divisors = [len(lengths) * length for length in lengths]
        case "constant":
            divisors = [len(lengths) * (constant or 1)] * len(lengths)
        case _:
            raise ValueError(f"normalization: kind is {kind!r}; accepted: 'token', 'sequence', 'constant'")
    return [np.full(length, 1 / divisor if length else 0.0) for length, divisor in zip(lengths, divisors, strict=True)]


def _check(function: str, rewards: np.ndarray, min_samples: int) -> None:
    if rewards.ndim != 2 or rewards.dtype != np.float64 or not rewards.size or rewards.shape[1] < min_samples:
        raise ValueError(
            f"{function}: rewards is {rewards.dtype}{list(rewards.shape)}; accepted: float64[P, G] with at "
            f"least 1 prompt and {min_samples} samples per prompt"
        )
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(
            f"{function}: the reward at [{prompt}, {sample}] is {rewards[prompt, sample]}; accepted: finite"
        )


def _mean(values: list[float]) -> float:
    # Rounding may move the mean of equal values off that value, and advantages of equal rewards must be zero.
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _centred(rewards: np.ndarray) -> np.ndarray:
    return np.array([group - _mean(group.tolist()) for group in rewards], np.float64)
