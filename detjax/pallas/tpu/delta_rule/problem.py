"""What the kernel of the gated delta rule is asked for, and how it divides its work."""

import dataclasses
from typing import Final

import jax.numpy as jnp
import numpy as np

MAX_HEADS: Final = 8
"""Most heads whose updates are computed side by side: their sums stay in registers."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a call asks for, except the number of tokens and of requests, on which the kernel does not depend.

    Attributes:
        key_heads: heads of keys.
        heads: heads of values, a multiple of `key_heads`.
        key_width: columns of keys, a multiple of 128.
        value_width: columns of values, a multiple of 128.
        scale: `K^(-1/2)`, rounded, of the columns that keys have without zeros.
        dtype: the dtype of tokens.
    """

    key_heads: int
    heads: int
    key_width: int
    value_width: int
    scale: np.float32
    dtype: jnp.dtype

    @property
    def group(self) -> int:
        """Heads of values that share a head of keys."""
        return self.heads // self.key_heads


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the kernel divides its work. No bit depends on it.

    Attributes:
        heads: heads whose updates are computed side by side, a divisor of all heads of values.
    """

    heads: int

    def check(self, problem: Problem) -> None:
        """Returns if the schedule serves the problem.

        Raises:
            ValueError: the heads are not whole steps.
        """
        if self.heads < 1 or problem.heads % self.heads:
            raise ValueError(
                f"gated_delta_rule: the schedule has {self.heads} heads side by side, with {problem.heads} heads of "
                f"values; accepted: a divisor of {problem.heads}. Take the default schedule."
            )


def default_schedule(problem: Problem) -> Schedule:
    """The schedule for so many heads."""
    return Schedule(max(heads for heads in range(1, MAX_HEADS + 1) if problem.heads % heads == 0))
