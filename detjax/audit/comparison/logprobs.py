"""Logprobs of sampled tokens, from the sampler and from the trainer."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

type Logprobs = Sequence[Float32[np.ndarray, "_"]]
"""Logprobs of the generated tokens, an array per sequence; sequences may differ in length."""


def check_pairs(function: str, sampler: Logprobs, trainer: Logprobs) -> None:
    """Validates that two sets of logprobs have the same shapes.

    Args:
        function: the function that errors name.
        sampler: logprobs of the sampler.
        trainer: logprobs of the trainer.

    Raises:
        ValueError: the arrays are not float32, not one-dimensional, or differ in length.
    """
    if len(sampler) != len(trainer):
        raise ValueError(
            f"{function}: sampler has {len(sampler)} sequences and trainer {len(trainer)}; accepted: equal numbers"
        )
    for index, (sampled, trained) in enumerate(zip(sampler, trainer, strict=True)):
        for name, logprobs in (("sampler", sampled), ("trainer", trained)):
            if logprobs.dtype != np.float32 or logprobs.shape != (sampled.size,):
                raise ValueError(
                    f"{function}: {name}[{index}] is {logprobs.dtype}{list(logprobs.shape)}; accepted: "
                    f"float32[{sampled.size}], the size of the sampler's"
                )
