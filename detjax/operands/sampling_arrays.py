"""Sampling parameters as arrays with one row for each token to sample."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

from detjax.operands.options import Distribution

if TYPE_CHECKING:
    Arrays = Any
else:
    # NumPy on the host, JAX in programs. Type checkers accept either use.
    Arrays = np.ndarray | Array


class SamplingArrays(NamedTuple):
    """Sampling parameters of each row of logits. The noise depends only on key and position.

    Attributes:
        noise_key: key of the sample's noise; see `ops.noise_key`.
        position: absolute position of the token to sample.
        temperature: divides the logits; 0 takes the likeliest token, the lowest id among equals.
        top_k: number of likeliest tokens to keep; 0: all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach this sum; 1: all.
        min_p: keep tokens with at least this share of the likeliest token's probability; 0: all.

    Example:
        >>> arrays = ops.SamplingArrays(
        ...     noise_key=jnp.array([ops.noise_key(7, ops.prompt_digest([3, 1, 4]))], jnp.uint32),
        ...     position=jnp.array([5]),
        ...     temperature=jnp.array([1.0]),
        ...     top_k=jnp.array([2]),
        ...     top_p=jnp.array([1.0]),
        ...     min_p=jnp.array([0.0]),
        ... )
        >>> arrays.noise_key.shape
        (1, 4)
    """

    noise_key: UInt32[Arrays, "B 4"]
    position: Int32[Arrays, "B"]
    temperature: Float32[Arrays, "B"]
    top_k: Int32[Arrays, "B"]
    top_p: Float32[Arrays, "B"]
    min_p: Float32[Arrays, "B"]

    @classmethod
    def uniform(cls, rows: int, distribution: Distribution) -> "SamplingArrays":
        """Returns rows that all sample from a distribution; keys of noise and positions are zeros."""
        temperature, top_p, min_p = (
            jnp.full(rows, value, jnp.float32)
            for value in (distribution.temperature, distribution.top_p, distribution.min_p)
        )
        top_k = jnp.full(rows, distribution.top_k, jnp.int32)
        keys, position = jnp.zeros((rows, 4), jnp.uint32), jnp.zeros(rows, jnp.int32)
        return cls(keys, position, temperature, top_k, top_p, min_p)


class SeenTokens(NamedTuple):
    """The tokens of each row's sequence so far.

    Attributes:
        generated: number of times each token was generated.
        in_prompt: True for tokens of the prompt.

    Example:
        >>> prompt, generated = jnp.array([[0, 1]]), jnp.array([[0, 0, 2]])
        >>> seen = ops.SeenTokens(
        ...     generated=jax.nn.one_hot(generated, 4, dtype=jnp.int32).sum(axis=1),
        ...     in_prompt=jax.nn.one_hot(prompt, 4, dtype=jnp.bool_).any(axis=1),
        ... )
        >>> seen.generated.tolist(), seen.in_prompt.tolist()
        ([[2, 0, 1, 0]], [[True, True, False, False]])
    """

    generated: Int[Arrays, "B V"]
    in_prompt: Bool[Arrays, "B V"]


class LogitAdjustments(NamedTuple):
    """Adjustments of each row's logits before a token is chosen; `contract` has the formulas.

    Attributes:
        repetition: penalty of tokens in the prompt or the generated text; 1: none.
        reciprocal: `1 / repetition`, computed by the host because division differs between devices.
        frequency: penalty for each time that a token was generated; 0: none.
        presence: penalty of generated tokens; 0: none.
        biased: ids of tokens with a bias, unique in a row. Ids outside the vocabulary are padding.
        bias: added to their logits; -inf: the token is not chosen.

    Example:
        >>> repetition = np.array([1.3, 1.0], np.float32)
        >>> adjustments = ops.LogitAdjustments(
        ...     repetition=repetition,
        ...     reciprocal=1 / repetition,
        ...     frequency=np.zeros(2, np.float32),
        ...     presence=np.zeros(2, np.float32),
        ...     biased=np.array([[3], [32000]], np.int32),  # the second row has no bias: 32000 is no token
        ...     bias=np.array([[-np.inf], [0]], np.float32),
        ... )
        >>> adjustments.biased.shape
        (2, 1)
    """

    repetition: Float32[Arrays, "B"]
    reciprocal: Float32[Arrays, "B"]
    frequency: Float32[Arrays, "B"]
    presence: Float32[Arrays, "B"]
    biased: Int32[Arrays, "B n"]
    bias: Float32[Arrays, "B n"]
