"""How requests choose their tokens, as arrays with one row for each token to be sampled."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

if TYPE_CHECKING:
    Arrays = Any
else:
    # The host makes them in NumPy, and programs see arrays of JAX. A type checker takes each for what it is used as.
    Arrays = np.ndarray | Array


class SamplingArrays(NamedTuple):
    """How each row of logits is sampled. The noise depends only on seed, position and sample index.

    Attributes:
        seed: the two 32-bit words of a 64-bit seed, the high one first.
        position: absolute position of the token to be sampled.
        sample_index: the index of this sample among the request's samples.
        temperature: the divisor of the logits; at 0 the likeliest token is taken, the lowest id among equals.
        top_k: how many of the likeliest tokens are kept; 0: all.
        top_p: the probability at which the likeliest tokens together are enough, so that no further one is kept; 1: all
            are kept.
        min_p: the share of the likeliest token's probability that a token needs to be kept; 0: all are kept.

    Example:
        >>> arrays = ops.SamplingArrays(
        ...     seed=jnp.array([ops.seed_words(7)], jnp.uint32),
        ...     position=jnp.array([5]),
        ...     sample_index=jnp.array([0]),
        ...     temperature=jnp.array([1.0]),
        ...     top_k=jnp.array([2]),
        ...     top_p=jnp.array([1.0]),
        ...     min_p=jnp.array([0.0]),
        ... )
        >>> arrays.seed.shape
        (1, 2)
    """

    seed: UInt32[Arrays, "B 2"]
    position: Int32[Arrays, "B"]
    sample_index: Int32[Arrays, "B"]
    temperature: Float32[Arrays, "B"]
    top_k: Int32[Arrays, "B"]
    top_p: Float32[Arrays, "B"]
    min_p: Float32[Arrays, "B"]


class SeenTokens(NamedTuple):
    """Which tokens each row's sequence has so far.

    Attributes:
        generated: how often each token was generated.
        in_prompt: whether each token is in the prompt.

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
    """What changes each row's logits before a token is chosen; `contract` has the formulas.

    Attributes:
        repetition: the penalty of tokens that the prompt or the generated text has; 1: none.
        reciprocal: `1 / repetition`. The host rounds it, because devices divide in ways of their own.
        frequency: the penalty for each time that a token was generated; 0: none.
        presence: the penalty of tokens that were generated; 0: none.
        biased: ids of tokens that have a bias, each at most once in a row. An id outside of the vocabulary is padding.
        bias: what is added to their logits; -inf: the token is not chosen.

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
