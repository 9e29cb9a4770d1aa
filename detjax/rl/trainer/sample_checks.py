"""Checks that samples come from the trained distribution and have the old logprobs that the loss needs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float32

from detjax.engine import SamplingParams
from detjax.operands.options import Distribution
from detjax.rl.trainer.gradients import Loss
from detjax.rl.trainer.microbatches import Sample

_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Distribution))
_CERTAIN: Final = -0.5
"""Minimum sum of a batch's logprobs at which all of its tokens count as certain."""


def check_drawn(samples: Sequence[Sample], distribution: Distribution) -> None:
    """Checks that samples with known sampling parameters were drawn from the distribution.

    Raises:
        ValueError: a sample was drawn from another distribution; the message names both.
    """
    checked: dict[int, SamplingParams] = {}  # most samples of a batch share one object
    for number, sample in enumerate(samples):
        params = sample.sampling
        if params is not None and id(params) not in checked:
            _check_params(number, params, distribution)
            checked[id(params)] = params


def _check_params(number: int, params: SamplingParams, distribution: Distribution) -> None:
    sampled = Distribution(**{name: getattr(params, name) for name in _FIELDS})
    if _canonical(sampled) != _canonical(distribution):
        raise ValueError(
            f"sample {number} was drawn with {_described(sampled)}, and the trainer's distribution has "
            f"{_described(distribution)}; accepted: the same for both. Sample with the trainer's distribution, or "
            "construct the trainer with distribution=Distribution(...) of the samples"
        )
    changes = {
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty if params.repetition_penalty != 1 else 0,
        "logit_bias": params.logit_bias,
        "min_tokens": params.min_tokens,
        "constraint": params.constraint,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "reasoning_budget": params.reasoning_budget,
    }
    for name, value in changes.items():
        if value:
            raise ValueError(
                f"sample {number} was drawn with {name} {str(value)[:80]!s}, and the trainer's distribution has only "
                f"{_described(distribution)}; accepted: samples without penalties, biases, min_tokens and "
                "constraints, which trainers do not support"
            )


def _canonical(distribution: Distribution) -> Distribution:
    """Drops filters at temperature 0, where they have no effect."""
    return distribution if distribution.temperature else Distribution(0.0)


def _described(distribution: Distribution) -> str:
    """The temperature and the active filters as text."""
    default = Distribution()
    names = (name for name in _FIELDS if name == "temperature" or getattr(distribution, name) != getattr(default, name))
    return ", ".join(f"{name} {getattr(distribution, name):g}" for name in names)


def check_old_logprobs(samples: Sequence[Sample], loss: Loss) -> None:
    """Checks that samples have old logprobs if the loss needs them.

    Raises:
        ValueError: a sample has none.
    """
    if not getattr(loss, "needs_old_logprobs", True):
        return
    for number, sample in enumerate(samples):
        if sample.old_logprobs is None:
            raise ValueError(
                f"sample {number} has no old_logprobs, and {type(loss).__name__} compares with them; accepted: the "
                "sampler's, which SamplingParams(sampling_logprobs=True) reports, or the trainer's before the step"
            )


def check_certain(
    samples: Sequence[Sample],
    loss: Loss,
    distribution: Distribution,
    logprobs: Callable[[], Sequence[Float32[np.ndarray, "_"]]],
) -> None:
    """Refuses old logprobs that are all 0, as at temperature 0, if the trainer's logprobs are not near 0.

    Args:
        logprobs: returns the trainer's logprobs of each completion. Only called if needed, since it waits for devices.

    Raises:
        ValueError: the loss uses the old logprobs, and the tokens are not certain under the distribution.
    """
    if not (distribution.temperature and getattr(loss, "needs_old_logprobs", True)):
        return
    if any(sample.old_logprobs is not None and np.any(sample.old_logprobs) for sample in samples):
        return
    total = sum(float(one.astype(np.float64).sum()) for one in logprobs())
    if total < _CERTAIN:
        raise ValueError(
            f"old_logprobs of all {len(samples)} samples are 0, as for tokens drawn with temperature 0, and the "
            f"trainer's distribution has {_described(distribution)}, whose logprobs add up to {total:.3g}; accepted: "
            "logprobs under the trainer's distribution. Sample with its temperature (SamplingParams' default is 0) and "
            "with sampling_logprobs=True"
        )
