"""The next token of each request, greedy or sampled, and the logprobs of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from detjax import compilation
from detjax.numerics import ceil_div
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, with_vmap_rule
from detjax.ops.softmax import log_softmax
from detjax.portable.sampling import adjusted, constrained, likeliest
from detjax.sampling_arrays import LogitAdjustments, SamplingArrays, SeenTokens

_MODULES = {
    "portable": "detjax.portable.sampling",
    "hopper": "detjax.pallas.hopper.sampling",
    "tpu": "detjax.pallas.tpu.sampling",
    "stock": "detjax.stock.sampling",
}
_SAMPLE = Operation("sample", _MODULES)
_TOP_LOGPROBS = Operation("top_logprobs", _MODULES)


@compilation.jit(static_argnames="filtered")
def sample(
    logits: Float[Array, "B V"], arrays: SamplingArrays, *, filtered: bool = True
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Returns the sampled tokens, and their logprobs under the model itself (before temperature and filters).

    Args:
        logits: bfloat16, float16 or float32.
        arrays: how each row is sampled.
        filtered: False if no row has a filter. That saves sorting and changes no bits.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.
    """
    check_dtype("sample", logits=logits)
    check_not_empty("sample", logits=logits)
    check_integers("sample", position=arrays.position, sample_index=arrays.sample_index, top_k=arrays.top_k)
    rows = logits.shape[:1]
    for name, array in arrays._asdict().items():
        shape = (*rows, 2) if name == "seed" else rows
        check_shape("sample", name, array, shape, f"logits being {logits.shape}")
    return _SAMPLE.call(_sample, logits, arrays, filtered=filtered)


def _sample(logits: Array, arrays: SamplingArrays, *, filtered: bool) -> tuple[Array, Array]:
    kernels = _SAMPLE.kernels()

    def kernel(logits: Array, *arrays: Array) -> tuple[Array, Array]:
        return kernels.sample(logits, SamplingArrays(*arrays), filtered=filtered)

    return _for_each_example(kernel, logits, *arrays)


@compilation.jit
def adjust_logits(
    logits: Float[Array, "B V"],
    seen: SeenTokens,
    adjustments: LogitAdjustments,
    allowed: UInt32[Array, "B W"] | None = None,
) -> Float32[Array, "B V"]:
    """Returns the logits that tokens are chosen by: after penalties, biases and a mask, before temperature and filters.

    Every backend has the same bits, because each step is an elementwise product or sum that is rounded once.

    Args:
        logits: bfloat16, float16 or float32.
        seen: the tokens that the penalties are for.
        adjustments: penalties and biases. Ones and zeros leave every logit as it is.
        allowed: a bit per token, 1: it may be chosen. Token `t` is bit `t % 32`, from the lowest one on, of word
            `t // 32`. Default: all may be chosen.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.
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
    """Returns the logits of the tokens that may be chosen, and `-inf` for the others; see `adjust_logits`.

    Its bits are those of `adjust_logits` with penalties and biases that leave every logit as it is.

    Args:
        logits: bfloat16, float16 or float32.
        allowed: a bit per token, as in `adjust_logits`.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.
    """
    name = "constrain_logits"
    check_dtype(name, logits=logits)
    check_not_empty(name, logits=logits)
    rows, size = logits.shape
    check_shape(name, "allowed", allowed, (rows, ceil_div(size, 32)), f"logits being {logits.shape}")
    return _for_each_example(constrained, logits, allowed)


def _for_each_example(fn: Callable[..., Any], *operands: Array) -> Any:
    """Returns what `fn` makes of its operands, which have no gradient; under `vmap` one example after another."""
    return with_vmap_rule(fn, rows=(False,) * len(operands))(*jax.lax.stop_gradient(operands))


@compilation.jit(static_argnames="count")
def top_logprobs(logits: Float[Array, "B V"], count: int) -> tuple[Int32[Array, "B count"], Float32[Array, "B count"]]:
    """Returns the `count` likeliest tokens of each row, ties by lowest id, and their logprobs.

    Raises:
        TypeError: logits' dtype is not bfloat16, float16 or float32.
        ValueError: logits are empty, or count is not within the vocabulary.
    """
    check_dtype("top_logprobs", logits=logits)
    check_not_empty("top_logprobs", logits=logits)
    if not 1 <= count <= logits.shape[-1]:
        raise ValueError(f"top_logprobs: count is {count}; accepted: 1 to {logits.shape[-1]}, the vocabulary's size")
    return _TOP_LOGPROBS.call(_top_logprobs, logits, count=count)


def _top_logprobs(logits: Array, *, count: int) -> tuple[Array, Array]:
    # A choice adds nothing: the bits are those of log_softmax, and every backend can share one way to choose.
    return _for_each_example(functools.partial(likeliest, count=count), log_softmax(jax.lax.stop_gradient(logits)))


def seed_words(seed: int) -> tuple[int, int]:
    """Returns the high and the low 32-bit word of a seed.

    Raises:
        ValueError: the seed is not within 0 to 2^64 - 1.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; accepted: 0 to 2^64 - 1")
    return seed >> 32, seed & 0xFFFFFFFF
