"""Losses, given by their derivative with respect to the logprob of each token.

A loss is a sum of terms, one per token of a completion, so its derivative at a token depends on this token only. The
host computes weights (advantages, corrections and normalization) in float64 before the step. Hence nothing is summed
over tokens on the device, and the value of a loss, which no gradient needs, is computed on the host from the logprobs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from detjax.ops.elements import map_elements
from detjax.rl.trainer.microbatches import Microbatch, Sample


@dataclasses.dataclass(frozen=True)
class LogLikelihood:
    """The loss `-sum(weight * logprob)`.

    With weights of one over the number of tokens it is the cross entropy of supervised training; with advantages, the
    loss of REINFORCE (Williams 1992), and of GRPO (Shao et al. 2024) and RLOO (Ahmadian et al. 2024) if each rollout
    trains a single step of the policy that sampled it.
    """

    needs_old_logprobs: ClassVar[bool] = False

    def __call__(self, logprobs: Float32[Array, "*N"], microbatch: Microbatch) -> Float32[Array, "*N"]:
        """Returns the derivatives with respect to the logprobs: the negated weights."""
        del logprobs
        return -jnp.asarray(microbatch.weights)

    def value(self, samples: Sequence[Sample], logprobs: Sequence[Float32[np.ndarray, "_"]]) -> float:
        """Returns the value of the loss for the logprobs of each sample's completion, summed exactly."""
        pairs = zip(samples, logprobs, strict=True)
        return -_sum(sample.weights.astype(np.float64) * logprob for sample, logprob in pairs)


@dataclasses.dataclass(frozen=True)
class ClippedRatio:
    """The clipped surrogate of PPO (Schulman et al. 2017).

    The loss is `-sum(min(r * weight, clip(r, 1 - low, 1 + high) * weight))`, with `r = exp(logprob - old_logprob)`.

    Attributes:
        low: the clipping range below 1.
        high: the clipping range above 1; larger than `low` in DAPO (Yu et al. 2025).
    """

    needs_old_logprobs: ClassVar[bool] = True
    low: float = 0.2
    high: float = 0.2

    def __call__(self, logprobs: Float32[Array, "*N"], microbatch: Microbatch) -> Float32[Array, "*N"]:
        """Returns the derivatives with respect to the logprobs: `-r * weight`, and zero where the ratio is clipped."""

        def derivative(logprob: Array, old: Array, weight: Array) -> Array:
            ratio = jnp.exp(logprob - old)
            is_clipped = jnp.where(weight > 0, ratio > 1 + self.high, ratio < 1 - self.low)
            return jnp.where(is_clipped | (weight == 0), 0.0, -(ratio * weight))

        old, weights = jnp.asarray(microbatch.old_logprobs), jnp.asarray(microbatch.weights)
        return map_elements(derivative, logprobs, old, weights)

    def value(self, samples: Sequence[Sample], logprobs: Sequence[Float32[np.ndarray, "_"]]) -> float:
        """Returns the value of the loss for the logprobs of each sample's completion, summed exactly."""

        def terms(sample: Sample, logprob: np.ndarray) -> np.ndarray:
            assert sample.old_logprobs is not None
            ratio = np.exp(logprob.astype(np.float64) - sample.old_logprobs)
            return np.minimum(ratio * sample.weights, np.clip(ratio, 1 - self.low, 1 + self.high) * sample.weights)

        return -_sum(terms(*pair) for pair in zip(samples, logprobs, strict=True))


def _sum(arrays: Iterable[np.ndarray]) -> float:
    return math.fsum(itertools.chain.from_iterable(array.tolist() for array in arrays))
