"""Checks that samples were drawn from the distribution that is trained, and have what the loss compares with."""

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float32

from detjax.engine import SamplingParams
from detjax.operands.options import Distribution
from detjax.rl.trainer.gradients import Loss
from detjax.rl.trainer.microbatches import Sample

_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Distribution))
_CERTAIN: Final = -0.5
"""What logprobs of a whole batch add up to at least if all of its tokens are as good as certain."""


def check_drawn(samples: Sequence[Sample], distribution: Distribution) -> None:
    """Checks that samples that say how they were drawn were drawn from a distribution.

    Raises:
        ValueError: a sample was drawn from another one; the message names both.
    """
    checked: dict[int, SamplingParams] = {}  # the samples of a batch share few parameters
    for number, sample in enumerate(samples):
        params = sample.sampling
        if params is not None and id(params) not in checked:
            _check_params(number, params, distribution)
            checked[id(params)] = params


def _check_params(number: int, params: SamplingParams, distribution: Distribution) -> None:
    drawn = Distribution(**{name: getattr(params, name) for name in _FIELDS})
    if _canonical(drawn) != _canonical(distribution):
        raise ValueError(
            f"sample {number} was drawn with {_described(drawn)}, and the trainer's distribution has "
            f"{_described(distribution)}; accepted: the same for both. Give SamplingParams what the trainer's "
            "distribution has, or the trainer distribution=Distribution(...) of the samples"
        )
    changes = {
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty if params.repetition_penalty != 1 else 0,
        "logit_bias": params.logit_bias,
        "min_tokens": params.min_tokens,
        "constraint": params.constraint,
    }
    if given := {name: value for name, value in changes.items() if value}:
        name, value = next(iter(given.items()))
        raise ValueError(
            f"sample {number} was drawn with {name} {str(value)[:80]!s}, and the trainer's distribution has "
            f"{_described(distribution)} alone; accepted: samples without penalties, biases, min_tokens and "
            "constraints, which no trainer computes"
        )


def _canonical(distribution: Distribution) -> Distribution:
    """A distribution without filters where they change nothing."""
    return distribution if distribution.temperature else Distribution(0.0)


def _described(distribution: Distribution) -> str:
    """A distribution as its temperature and the filters that it has."""
    default = Distribution()
    names = (name for name in _FIELDS if name == "temperature" or getattr(distribution, name) != getattr(default, name))
    return ", ".join(f"{name} {getattr(distribution, name):g}" for name in names)


def check_old_logprobs(samples: Sequence[Sample], loss: Loss) -> None:
    """Checks that samples have the logprobs that a loss compares with.

    Raises:
        ValueError: one has none, and the loss does not say that it needs none.
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
    samples: Sequence[Sample], loss: Loss, distribution: Distribution, logprobs: Sequence[Float32[np.ndarray, "_"]]
) -> None:
    """Checks that old logprobs which are all 0, as those of tokens drawn at temperature 0 are, fit to the trainer's.

    Args:
        samples: the samples of a batch.
        loss: what compares.
        distribution: the trainer's.
        logprobs: what the trainer computed.

    Raises:
        ValueError: the loss compares with them, and the tokens are not certain under the distribution.
    """
    total = sum(float(one.astype(np.float64).sum()) for one in logprobs)
    if distribution.temperature and are_all_certain(samples, loss) and total < _CERTAIN:
        raise ValueError(
            f"old_logprobs of all {len(samples)} samples are 0, as those of tokens drawn with temperature 0, and the "
            f"trainer's distribution has {_described(distribution)}, whose logprobs add up to {total:.3g}; accepted: "
            "logprobs under the trainer's distribution. Draw samples with its temperature (SamplingParams has 0 by "
            "default), and ask for sampling_logprobs"
        )


def are_all_certain(samples: Sequence[Sample], loss: Loss) -> bool:
    """Whether a loss compares with old logprobs that are all 0, the logprob of a certain token."""
    if not getattr(loss, "needs_old_logprobs", True):
        return False
    return not any(sample.old_logprobs is not None and np.any(sample.old_logprobs) for sample in samples)
