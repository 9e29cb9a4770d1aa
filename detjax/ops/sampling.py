"""Sampling of next tokens, and logprobs of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from detjax.contract import ACCUMULATOR
from detjax.operands.noise import noise_of_tokens
from detjax.operands.numerics import ceil_div
from detjax.operands.sampling_arrays import LogitAdjustments, SamplingArrays, SeenTokens
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, with_vmap_rule
from detjax.ops.elements import map_elements
from detjax.ops.softmax import log_softmax
from detjax.portable.sampling import adjusted, constrained, likeliest, masked, reciprocal, sampling_exponents
from detjax.runtime import compilation, fusions

_MODULES = backend_modules("sampling", mma="hopper")
_SAMPLE = Operation("sample", _MODULES)
_FILTER_LOGITS = Operation("filter_logits", _MODULES)
_SAMPLING_LOGPROBS = Operation("sampling_logprobs", _MODULES)
_TOP_LOGPROBS = Operation("top_logprobs", _MODULES)


@compilation.jit(static_argnames="filtered")
def sample(
    logits: Float[Array, "B V"], arrays: SamplingArrays, *, filtered: bool = True
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Returns the sampled tokens and their logprobs under the model, before temperature and filters.

    Args:
        logits: bfloat16, float16 or float32.
        arrays: sampling parameters of each row.
        filtered: False if no row has a filter. This saves sorting and changes no bits.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> arrays = ops.SamplingArrays(
        ...     noise_key=jnp.array([ops.noise_key(7, ops.prompt_digest([3, 1, 4]))], jnp.uint32),
        ...     position=jnp.array([5]),
        ...     temperature=jnp.array([1.0]),
        ...     top_k=jnp.array([2]),
        ...     top_p=jnp.array([1.0]),
        ...     min_p=jnp.array([0.0]),
        ... )
        >>> token, logprob = ops.sample(logits, arrays)
        >>> token.shape, logprob.dtype
        ((1,), dtype('float32'))
    """
    _check("sample", logits, arrays)
    return _SAMPLE.call(_sample, logits, arrays, filtered=filtered)


def _check(operation: str, logits: Array, arrays: SamplingArrays) -> None:
    check_dtype(operation, logits=logits)
    check_not_empty(operation, logits=logits)
    check_integers(operation, position=arrays.position, top_k=arrays.top_k)
    rows = logits.shape[:1]
    for name, array in arrays._asdict().items():
        shape = (*rows, 4) if name == "noise_key" else rows
        check_shape(operation, name, array, shape, f"logits being {logits.shape}")


def _sample(logits: Array, arrays: SamplingArrays, *, filtered: bool) -> tuple[Array, Array]:
    kernels = _SAMPLE.kernels()

    def kernel(logits: Array, *arrays: Array) -> tuple[Array, Array]:
        return kernels.sample(logits, SamplingArrays(*arrays), filtered=filtered)

    return _for_each_example(kernel, logits, *arrays)


@compilation.jit(static_argnames="filtered")
def sampling_logprobs(
    logits: Float[Array, "B V"], tokens: Int32[Array, "B"], arrays: SamplingArrays, *, filtered: bool = True
) -> Float32[Array, "B"]:
    """Returns the logprobs of given tokens under the distribution that `sample` draws from.

    This is the distribution after temperature and filters, see `contract`; for logits from `adjust_logits` also after
    penalties, biases and masks. Keys of noise and positions in `arrays` are ignored.

    Args:
        logits: bfloat16, float16 or float32.
        tokens: a token id for each row. A token that cannot be drawn has logprob -inf, and an id outside the vocabulary
            NaN.
        arrays: sampling parameters of each row.
        filtered: False if no row has a filter. This saves sorting and changes no bits.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> from detjax.operands.options import Distribution
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> arrays = ops.SamplingArrays.uniform(1, Distribution(top_k=2))
        >>> ops.sampling_logprobs(logits, jnp.array([1]), arrays).shape
        (1,)
    """
    name = "sampling_logprobs"
    _check(name, logits, arrays)
    check_integers(name, tokens=tokens)
    check_shape(name, "tokens", tokens, logits.shape[:1], f"logits being {logits.shape}")
    return _SAMPLING_LOGPROBS.call(_sampling_logprobs, logits, tokens, arrays, filtered=filtered)


def _sampling_logprobs(logits: Array, tokens: Array, arrays: SamplingArrays, *, filtered: bool) -> Array:
    kernels = _SAMPLING_LOGPROBS.kernels()

    def kernel(logits: Array, tokens: Array, temperature: Array) -> Array:
        is_token = (tokens >= 0) & (tokens < logits.shape[-1])
        by_steps = fusions.is_unfused("sampling_logprobs")
        logprobs_of = _logprobs_in_separate_steps if by_steps else kernels.sampling_logprobs
        logprobs = logprobs_of(logits, jnp.where(is_token, tokens, 0), temperature)
        # An argmax adds nothing, so all backends share it.
        likeliest = jnp.argmax(logits, axis=-1)
        logprobs = jnp.where(temperature == 0, jnp.where(tokens == likeliest, 0.0, -jnp.inf), logprobs)
        return jnp.where(is_token, logprobs, jnp.nan)

    kept = _filter_logits(logits, arrays) if filtered else logits
    return _for_each_example(kernel, kept, tokens, arrays.temperature)


def _logprobs_in_separate_steps(logits: Array, tokens: Array, temperature: Array) -> Array:
    factors = jnp.broadcast_to(reciprocal(temperature)[:, None], logits.shape)
    exponents = map_elements(sampling_exponents, logits.astype(ACCUMULATOR), factors)
    return jnp.take_along_axis(log_softmax(exponents), tokens[:, None], axis=1)[:, 0]


@compilation.jit
def filter_logits(logits: Float[Array, "B V"], arrays: SamplingArrays) -> Float32[Array, "B V"]:
    """Returns the logits with `-inf` for each token that top-k, top-p or min-p removes.

    `sample` and `sampling_logprobs` with `filtered=False` give the same results for them as with filters for the given
    logits, so a program that needs both sorts only once. Rows of temperature 0 do not change.

    Args:
        logits: bfloat16, float16 or float32.
        arrays: sampling parameters of each row.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> from detjax.operands.options import Distribution
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> arrays = ops.SamplingArrays.uniform(1, Distribution(top_k=2))
        >>> ops.filter_logits(logits, arrays)
        Array([[-inf,   2.,   1.]], dtype=float32)
    """
    _check("filter_logits", logits, arrays)
    return _FILTER_LOGITS.call(_filter_logits, logits, arrays)


def _filter_logits(logits: Array, arrays: SamplingArrays) -> Array:
    _FILTER_LOGITS.kernels()  # only for its checks: all backends under contract share the filter

    def keep(logits: Array, *arrays: Array) -> Array:
        rows = SamplingArrays(*arrays)
        return jnp.where((rows.temperature == 0)[:, None], logits.astype(ACCUMULATOR), masked(logits, rows))

    return _for_each_example(keep, logits, *arrays)


@compilation.jit
def adjust_logits(
    logits: Float[Array, "B V"],
    seen: SeenTokens,
    adjustments: LogitAdjustments,
    allowed: UInt32[Array, "B W"] | None = None,
) -> Float32[Array, "B V"]:
    """Returns the logits that tokens are chosen by: after penalties, biases and a mask, before temperature and filters.

    All backends have the same bits, because each step is an elementwise product or sum that is rounded once.

    Args:
        logits: bfloat16, float16 or float32.
        seen: the tokens to penalize.
        adjustments: penalties and biases. Ones and zeros change no logit.
        allowed: a bit per token that is 1 if the token may be chosen; token `t` is bit `t % 32`, counted from the
            lowest, of word `t // 32`. Default: all may be chosen.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> seen = ops.SeenTokens(  # the prompt has the tokens 0 and 1, and 0 was generated twice
        ...     generated=jnp.array([[2, 0, 0, 0]]), in_prompt=jnp.array([[True, True, False, False]])
        ... )
        >>> adjustments = ops.LogitAdjustments(
        ...     repetition=jnp.array([2.0]),
        ...     reciprocal=jnp.array([0.5]),
        ...     frequency=jnp.array([0.25]),
        ...     presence=jnp.array([0.5]),
        ...     biased=jnp.array([[3]]),
        ...     bias=jnp.array([[-jnp.inf]]),
        ... )
        >>> ops.adjust_logits(jnp.array([[4.0, 3.0, 2.0, 1.0]]), seen, adjustments)
        Array([[ 1. ,  1.5,  2. , -inf]], dtype=float32)
    """
    name = "adjust_logits"
    check_dtype(name, logits=logits)
    check_not_empty(name, logits=logits)
    check_integers(name, generated=seen.generated, biased=adjustments.biased)
    rows, size = logits.shape
    given = f"logits being {logits.shape}"
    for field, array in seen._asdict().items():
        check_shape(name, field, array, logits.shape, given)
    for field, array in adjustments._asdict().items():
        shape = (rows, *adjustments.biased.shape[1:2]) if field in ("biased", "bias") else (rows,)
        check_shape(name, field, array, shape, given)
    if allowed is not None:
        check_shape(name, "allowed", allowed, (rows, ceil_div(size, 32)), given)

    def adjust(logits: Array, *arrays: Array) -> Array:
        seen, adjustments, mask = SeenTokens(*arrays[:2]), LogitAdjustments(*arrays[2:8]), arrays[8:]
        return adjusted(logits, seen, adjustments, *mask)

    return _for_each_example(adjust, logits, *seen, *adjustments, *(() if allowed is None else (allowed,)))


@compilation.jit
def constrain_logits(logits: Float[Array, "B V"], allowed: UInt32[Array, "B W"]) -> Float32[Array, "B V"]:
    """Returns the logits with `-inf` for tokens that may not be chosen.

    The bits are the same as from `adjust_logits` with penalties and biases that change no logit.

    Args:
        logits: bfloat16, float16 or float32.
        allowed: a bit per token, as in `adjust_logits`.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> ops.constrain_logits(jnp.zeros((1, 3)), jnp.array([[0b101]], jnp.uint32))
        Array([[  0., -inf,   0.]], dtype=float32)
    """
    name = "constrain_logits"
    check_dtype(name, logits=logits)
    check_not_empty(name, logits=logits)
    rows, size = logits.shape
    check_shape(name, "allowed", allowed, (rows, ceil_div(size, 32)), f"logits being {logits.shape}")
    return _for_each_example(constrained, logits, allowed)


def _for_each_example(fn: Callable[..., Any], *operands: Array) -> Any:
    """Calls `fn` on operands without gradients; under `vmap`, sequentially for each example."""
    return with_vmap_rule(fn, rows=(False,) * len(operands))(*jax.lax.stop_gradient(operands))


@compilation.jit(static_argnames="count")
def top_logprobs(logits: Float[Array, "B V"], count: int) -> tuple[Int32[Array, "B count"], Float32[Array, "B count"]]:
    """Returns the `count` likeliest tokens of each row, ties by lowest id, with their logprobs.

    Raises:
        TypeError: logits' dtype is not bfloat16, float16 or float32.
        ValueError: logits are empty, or count is not within the vocabulary.

    Example:
        >>> ids, logprobs = ops.top_logprobs(jnp.array([[0.0, 2.0, 1.0]]), 2)
        >>> ids
        Array([[1, 2]], dtype=int32)
    """
    check_dtype("top_logprobs", logits=logits)
    check_not_empty("top_logprobs", logits=logits)
    if not 1 <= count <= logits.shape[-1]:
        raise ValueError(f"top_logprobs: count is {count}; accepted: 1 to {logits.shape[-1]}, the vocabulary's size")
    return _TOP_LOGPROBS.call(_top_logprobs, logits, count=count)


def _top_logprobs(logits: Array, *, count: int) -> tuple[Array, Array]:
    # The choice adds nothing, so all backends share it, and the bits are log_softmax's.
    return _for_each_example(functools.partial(likeliest, count=count), log_softmax(jax.lax.stop_gradient(logits)))


@compilation.jit
def sampling_noise(
    noise_keys: UInt32[Array, "B 4"], positions: Int32[Array, "B"], tokens: Int32[Array, "n"]
) -> Float32[Array, "B n"]:
    """Returns the noise that `sample` adds to the scaled logits of token ids.

    A model that drafts tokens for another one samples with the other's noise, so that both choose the same token more
    often; its vocabulary may consist of some of the other's ids.

    Args:
        noise_keys: the key of each row's noise; see `noise_key`.
        positions: the absolute position of the token to sample in each row.
        tokens: token ids, in any order.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: shapes do not fit together.

    Example:
        >>> keys = jnp.array([ops.noise_key(7, ops.prompt_digest([3, 1, 4]))], jnp.uint32)
        >>> ops.sampling_noise(keys, jnp.array([3]), jnp.array([0, 5, 900])).shape
        (1, 3)
    """
    name = "sampling_noise"
    check_integers(name, noise_keys=noise_keys, positions=positions, tokens=tokens)
    check_shape(name, "noise_keys", noise_keys, (len(positions), 4), f"positions being {positions.shape}")
    check_shape(name, "tokens", tokens, (tokens.size,), "a row of token ids")
    return _for_each_example(noise_of_tokens, noise_keys, positions, tokens)
