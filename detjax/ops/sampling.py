"""The next token of each request, greedy or sampled, and the logprobs of tokens."""

import functools

import jax
from jaxtyping import Array, Float, Float32, Int, Int32, UInt32

from detjax import compilation
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, with_vmap_rule
from detjax.ops.softmax import log_softmax
from detjax.portable.sampling import likeliest

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
    logits: Float[Array, "B V"],
    seed: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    sample_index: Int[Array, "B"],
    temperature: Float32[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float32[Array, "B"],
    min_p: Float32[Array, "B"],
    *,
    filtered: bool = True,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Returns the sampled tokens, and their logprobs under the model itself (before temperature and filters).

    The noise of a row depends only on its seed, the absolute position of its token and its sample index.

    Args:
        logits: bfloat16, float16 or float32.
        seed: the two 32-bit words of a 64-bit seed, the high one first.
        position: absolute position of the token to be sampled.
        sample_index: the index of this sample among the request's samples.
        temperature: the divisor of the logits; at 0 the likeliest token is taken, the lowest id among equals.
        top_k: how many of the likeliest tokens are kept; 0: all.
        top_p: the probability at which the likeliest tokens together are enough, so that no further one is kept; 1: all
            are kept.
        min_p: the share of the likeliest token's probability that a token needs to be kept; 0: all are kept.
        filtered: False if no row has a filter. That saves sorting and changes no bits.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.
    """
    check_dtype("sample", logits=logits)
    check_not_empty("sample", logits=logits)
    check_integers("sample", position=position, sample_index=sample_index, top_k=top_k)
    rows = logits.shape[:1]
    check_shape("sample", "seed", seed, (*rows, 2), f"logits being {logits.shape}")
    per_row = {"position": position, "sample_index": sample_index, "temperature": temperature}
    per_row |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, array in per_row.items():
        check_shape("sample", name, array, rows, f"logits being {logits.shape}")
    return _SAMPLE.call(_sample, logits, seed, *per_row.values(), filtered=filtered)


def _sample(*operands: Array, filtered: bool) -> tuple[Array, Array]:
    kernel = functools.partial(_SAMPLE.kernels().sample, filtered=filtered)
    return with_vmap_rule(kernel, rows=(False,) * len(operands))(*jax.lax.stop_gradient(operands))


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
    choose = with_vmap_rule(functools.partial(likeliest, count=count), rows=(False,))
    return choose(log_softmax(jax.lax.stop_gradient(logits)))


def seed_words(seed: int) -> tuple[int, int]:
    """Returns the high and the low 32-bit word of a seed.

    Raises:
        ValueError: the seed is not within 0 to 2^64 - 1.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; accepted: 0 to 2^64 - 1")
    return seed >> 32, seed & 0xFFFFFFFF
