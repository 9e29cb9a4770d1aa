"""Problem and schedule of the gated delta rule's kernel."""

import dataclasses
from typing import Final

import jax.numpy as jnp
import numpy as np

MAX_HEADS: Final = 8
"""Most heads whose updates are computed together. Their sums stay in registers: one of 8 x 128 for each head and each
128 value columns."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes of a call, without the numbers of tokens and requests, on which the kernel does not depend.

    Attributes:
        key_heads: key heads.
        heads: value heads, a multiple of `key_heads`.
        key_width: key columns, padded to a multiple of 128.
        value_width: value columns, padded to a multiple of 128.
        scale: `K^(-1/2)`, rounded, for the K key columns without padding.
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
        """Value heads that share a key head."""
        return self.heads // self.key_heads


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The number of heads whose updates are computed together, a divisor of all value heads. No bit depends on it."""

    heads: int

    def check(self, problem: Problem) -> None:
        """Raises ValueError if the heads are not whole steps."""
        if self.heads < 1 or problem.heads % self.heads:
            raise ValueError(
                f"gated_delta_rule: the schedule has {self.heads} heads side by side, with {problem.heads} heads of "
                f"values; accepted: a divisor of {problem.heads}. Take the default schedule."
            )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem."""
    return Schedule(max(heads for heads in range(1, MAX_HEADS + 1) if problem.heads % heads == 0))
