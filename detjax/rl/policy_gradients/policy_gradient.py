"""Policy gradients: turn rollouts and rewards into the samples of a training step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np
from jaxtyping import Float64

from detjax.audit.comparison.logprobs import Logprobs
from detjax.rl.policy_gradients import advantages, corrections
from detjax.rl.policy_gradients.advantages import Normalization
from detjax.rl.rollouts import Rollout
from detjax.rl.trainer.gradients import Loss
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Sample

Estimator = Literal["grpo", "rloo", "reinforce"]
Correction = Literal["none", "token_truncated", "sequence_truncated", "sequence_masked"]

_ESTIMATORS: Final[Mapping[str, Callable[..., Float64[np.ndarray, "P G"]]]] = {
    "grpo": advantages.grpo,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """Settings of the policy gradient.

    Attributes:
        estimator: computes advantages from rewards; see `detjax.rl.policy_gradients.advantages`.
        normalization: weighs tokens against each other; see `advantages.normalization`.
        constant: the length that "constant" divides by.
        correction: corrects for a sampler whose logprobs differ from the trainer's; see `corrections`.
        cap: the largest weight of the truncated corrections. "sequence_masked" masks products outside of `1 / cap` to
            `cap`.
        loss: the loss; `ClippedRatio` where rollouts train more than one step.
    """

    estimator: Estimator = "grpo"
    normalization: Normalization = "token"
    constant: int | None = None
    correction: Correction = "none"
    cap: float = 2.0
    loss: Loss = dataclasses.field(default_factory=LogLikelihood)

    def advantages(self, rewards: Float64[np.ndarray, "P G"]) -> Float64[np.ndarray, "P G"]:
        """Returns the advantage of each of G rollouts of P prompts."""
        return _ESTIMATORS[self.estimator](rewards)

    def samples(
        self, groups: Sequence[Sequence[Rollout]], rewards: Float64[np.ndarray, "P G"], trainer: Logprobs
    ) -> list[Sample]:
        """Returns the samples of a training step, prompt by prompt.

        Args:
            groups: the rollouts of each prompt.
            trainer: the trainer's logprobs of each rollout's tokens before the step, under the distribution that the
                tokens were sampled from.

        Raises:
            ValueError: rollouts have no sampling logprobs, or logprobs are not accepted; see `corrections`.
        """
        flat = [rollout for group in groups for rollout in group]
        if missing := sum(not len(rollout.sampling_logprobs) for rollout in flat):
            raise ValueError(
                f"PolicyGradient: {missing} of {len(flat)} rollouts have no sampling logprobs; accepted: rollouts "
                "sampled with SamplingParams(sampling_logprobs=True)"
            )
        factors = self._corrections([rollout.sampling_logprobs for rollout in flat], trainer)
        shares = advantages.normalization(
            [len(rollout.completion) for rollout in flat], self.normalization, self.constant
        )
        terms = zip(flat, self.advantages(rewards).reshape(-1), factors, shares, trainer, strict=True)
        return [
            # The only rounding from float64.
            rollout.sample((advantage * factor * share).astype(np.float32), old)
            for rollout, advantage, factor, share, old in terms
        ]

    def _corrections(self, sampler: Logprobs, trainer: Logprobs) -> corrections.Weights:
        match self.correction:
            case "none":
                return corrections.none(sampler, trainer)
            case "token_truncated":
                return corrections.token_truncated(sampler, trainer, self.cap)
            case "sequence_truncated":
                return corrections.sequence_truncated(sampler, trainer, self.cap)
            case "sequence_masked":
                return corrections.sequence_masked(sampler, trainer, 1 / self.cap, self.cap)


def supervised_samples(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Sample]:
    """Returns samples whose loss is the mean cross entropy over all tokens of the completions.

    Args:
        pairs: prompts and completions, as tokens.
    """
    weight = np.float32(1 / sum(len(completion) for _, completion in pairs))
    return [
        Sample(
            np.asarray([*prompt, *completion], np.int32),
            np.full(len(completion), weight, np.float32),
        )
        for prompt, completion in pairs
    ]
