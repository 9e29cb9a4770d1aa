"""Logprobs of given tokens from hidden states, computed in chunks so that not all logits exist at once."""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from detjax.contract import ACCUMULATOR, WEIGHT_GRADIENT_TOKENS
from detjax.operands.accumulated_weight import AccumulatedWeight, Weight, value_and_sum, weight_cotangent
from detjax.operands.numerics import LOWEST, ceil_div, flat_rows, round_up
from detjax.operands.options import MODEL_DISTRIBUTION, Distribution
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.elements import scale
from detjax.ops.matmul import matmul
from detjax.ops.sampling import filter_logits, sampling_logprobs
from detjax.ops.softmax import log_softmax, log_softmax_statistics
from detjax.runtime import backends, compilation, fusions, varying

CHUNK: Final = 1024
"""Default maximum number of tokens whose logits exist at the same time."""

HOPPER_CHUNK: Final = 4096
"""The default on Hopper GPUs. With fewer hidden states, their gradients have fewer tiles than the GPU has
multiprocessors, and each chunk reads and writes the sum of the head's products once more."""


@compilation.jit(static_argnames=("distribution", "soft_cap", "logit_factor", "chunk"))
def token_logprobs(
    hidden: Float[Array, "*B D"],
    head: Weight,
    tokens: Int[Array, "*B"],
    *,
    distribution: Distribution = MODEL_DISTRIBUTION,
    soft_cap: float | None = None,
    logit_factor: float | None = None,
    chunk: int | None = None,
) -> Float32[Array, "*B"]:
    """Returns the logprob of a given token for each hidden state.

    The bits of results and gradients are the same as from `matmul`, `log_softmax` and a gather. With a distribution
    other than the model's own, they are the same as from `sampling_logprobs`, and gradients flow through the
    temperature to the tokens that the filters keep. Logits exist only for one chunk of tokens at a time; the backward
    pass recomputes them.

    Args:
        hidden: normalized last hidden states; bfloat16, float16 or float32.
        head: `[V, D]`, a row for each token of the vocabulary, of the same dtype. With an `AccumulatedWeight` the
            gradient continues a sum.
        tokens: ids in the vocabulary.
        distribution: the distribution of the logprobs.
        soft_cap: the bound of logits; see `matmul`.
        logit_factor: multiplies the logits; None: nothing does.
        chunk: maximum tokens of a chunk; default: `HOPPER_CHUNK` on Hopper GPUs, `CHUNK` elsewhere. No bit depends on
            it. The logits take a few times `chunk * V` float32 numbers of memory.

    Raises:
        TypeError: a dtype is not under contract, or tokens are not integers.
        ValueError: shapes do not fit together, or the chunk is not a positive multiple of
            `contract.WEIGHT_GRADIENT_TOKENS`.

    Example:
        >>> hidden, head = jnp.ones((2, 4)), jnp.ones((8, 4))
        >>> ops.token_logprobs(hidden, head, jnp.array([3, 5])).round(3)
        Array([-2.079, -2.079], dtype=float32)
    """
    outputs = _Outputs(distribution, soft_cap, logit_factor)
    _check("token_logprobs", hidden, head, tokens, outputs, chunk)
    flat, ids = flat_rows(hidden), tokens.reshape(-1)
    if fusions.is_unfused("token_logprobs"):
        return _logprobs(_logits(flat, head, outputs), ids, distribution).reshape(tokens.shape)
    size = _chunk_size(flat, chunk)
    flat, ids = _padded(size, flat, ids)
    logprobs: Array = _token_logprobs(flat, head, ids, size, outputs)
    return logprobs[: tokens.size].reshape(tokens.shape)


@compilation.jit(static_argnames=("derivative", "distribution", "soft_cap", "logit_factor", "chunk"))
def token_logprobs_and_gradients(  # noqa: PLR0913
    hidden: Float[Array, "*B D"],
    head: Weight,
    tokens: Int[Array, "*B"],
    derivative: Callable[..., Array],
    *rows: Array,
    distribution: Distribution = MODEL_DISTRIBUTION,
    soft_cap: float | None = None,
    logit_factor: float | None = None,
    chunk: int | None = None,
) -> tuple[Float32[Array, "*B"], Float[Array, "*B D"], Float32[Array, "V D"] | None]:
    """Returns `token_logprobs` and the gradients of a loss of them in one pass, which computes logits once.

    The bits are the same as from `jax.vjp` of `token_logprobs` at the cotangents that the derivative returns.

    Args:
        hidden: see `token_logprobs`.
        head: the head with the sum of its products; a plain weight if the head is not trained.
        tokens: see `token_logprobs`.
        derivative: the loss' derivative with respect to logprobs: a function of some logprobs and of the same elements
            of each of `rows`. Its result for a token must depend only on this token, and it must be zero for padding,
            where all of `rows` are zero.
        rows: arrays `[*B]` that the derivative takes.
        distribution: see `token_logprobs`.
        soft_cap: see `token_logprobs`.
        logit_factor: see `token_logprobs`.
        chunk: see `token_logprobs`.

    Returns:
        The logprobs, the gradient of the hidden states, and the next sum of the head's products; None for a plain head.

    Raises:
        TypeError: see `token_logprobs`.
        ValueError: see `token_logprobs`.

    Example:
        >>> hidden = jnp.ones((2, 4))
        >>> head = ops.AccumulatedWeight(jnp.ones((8, 4)), jnp.zeros((8, 4)))
        >>> def derivative(logprobs, weights):  # of the loss -sum(weights * logprobs)
        ...     return -weights
        ...
        >>> logprobs, dhidden, products = ops.token_logprobs_and_gradients(
        ...     hidden, head, jnp.array([3, 5]), derivative, jnp.array([1.0, 0.5])
        ... )
        >>> logprobs.round(3)
        Array([-2.079, -2.079], dtype=float32)
        >>> dhidden.shape
        (2, 4)
        >>> products[:, 0].round(4)  # descent raises the logits of tokens 3 and 5
        Array([ 0.1875,  0.1875,  0.1875, -0.8125,  0.1875, -0.3125,  0.1875,
                0.1875], dtype=float32)
    """
    name = "token_logprobs_and_gradients"
    outputs = _Outputs(distribution, soft_cap, logit_factor)
    _check(name, hidden, head, tokens, outputs, chunk)
    for number, row in enumerate(rows):
        check_shape(name, f"rows[{number}]", row, tokens.shape, f"tokens being {tokens.shape}")
    if fusions.is_unfused("token_logprobs"):
        return _and_gradients_in_separate_steps(hidden, head, tokens, derivative, rows, outputs)
    flat = flat_rows(hidden)
    size = _chunk_size(flat, chunk)
    arrays = _padded(size, flat, tokens.reshape(-1), *(row.reshape(-1) for row in rows))

    value, start = value_and_sum(head)

    def add(total: Array | None, arrays: tuple[Array, ...]) -> tuple[Array | None, tuple[Array, Array]]:
        hidden, tokens, *rows = arrays
        sums = AccumulatedWeight(value, total)
        return _added(hidden, sums, tokens, lambda logprobs: derivative(logprobs, *rows), outputs)

    total, (logprobs, dhidden) = varying.scan(add, start, _chunks(size, *arrays))
    count = tokens.size
    dhidden = dhidden.reshape(-1, hidden.shape[-1])[:count].reshape(hidden.shape)
    return logprobs.reshape(-1)[:count].reshape(tokens.shape), dhidden, total


def _and_gradients_in_separate_steps(
    hidden: Array,
    head: Weight,
    tokens: Array,
    derivative: Callable[..., Array],
    rows: tuple[Array, ...],
    outputs: "_Outputs",
) -> tuple[Array, Array, Array | None]:
    options: Any = outputs._asdict()
    value, start = value_and_sum(head)

    def logprobs_of(hidden: Array, products: Array | None) -> Array:
        return token_logprobs(hidden, AccumulatedWeight(value, products), tokens, **options)

    logprobs, pullback = jax.vjp(logprobs_of, hidden, start)
    flat = derivative(logprobs.reshape(-1), *(row.reshape(-1) for row in rows))
    return logprobs, *pullback(flat.reshape(tokens.shape))


class _Outputs(NamedTuple):
    """The options after the head: the distribution of tokens, and the bound and the factor of logits."""

    distribution: Distribution
    soft_cap: float | None
    logit_factor: float | None


def _check(name: str, hidden: Array, head: Weight, tokens: Array, outputs: _Outputs, chunk: int | None) -> None:
    soft_cap = outputs.soft_cap
    value: Array = value_and_sum(head)[0]
    check_dtype(name, hidden=hidden)
    check_dtype(name, like=hidden, head=value)
    check_integers(name, tokens=tokens)
    check_not_empty(name, hidden=hidden, head=value)
    check_shape(name, "tokens", tokens, hidden.shape[:-1], f"hidden being {hidden.shape}")
    check_shape(name, "head", value, (*value.shape[:1], hidden.shape[-1]), f"hidden being {hidden.shape}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{name}: soft_cap is {soft_cap}; accepted: positive numbers, or None for no cap")
    if chunk is not None and (chunk < 1 or chunk % WEIGHT_GRADIENT_TOKENS):
        raise ValueError(f"{name}: chunk is {chunk}; accepted: positive multiples of {WEIGHT_GRADIENT_TOKENS}")


def _chunk_size(rows: Array, most: int | None) -> int:
    """Returns the tokens of a chunk for chunks of about equal size."""
    most = most or (HOPPER_CHUNK if backends.backend() == "hopper" else CHUNK)
    return round_up(ceil_div(len(rows), ceil_div(len(rows), most)), WEIGHT_GRADIENT_TOKENS)


def _padded(size: int, *arrays: Array) -> tuple[Array, ...]:
    """Pads arrays `[N, ...]` with zeros to a multiple of the size."""
    return tuple(jnp.pad(x, ((0, -len(x) % size), *[(0, 0)] * (x.ndim - 1))) for x in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_logprobs(hidden: Array, head: Weight, tokens: Array, size: int, outputs: _Outputs) -> Array:
    return _forward(hidden, head, tokens, size, outputs)[0]


def _logits(hidden: Array, head: Weight, outputs: _Outputs) -> Array:
    logits = matmul(hidden, head, layout="nk", soft_cap=outputs.soft_cap, out_dtype=ACCUMULATOR)
    return logits if outputs.logit_factor is None else scale(logits, outputs.logit_factor)


def _logprobs(logits: Array, tokens: Array, distribution: Distribution) -> Array:
    if distribution.is_model:
        return _at(tokens, log_softmax(logits))
    return _drawn_logprobs(logits, tokens, distribution)


class _Statistics(NamedTuple):
    """The two numbers that log-softmax subtracts from a row of logits. With them, gradients need no row sums."""

    first: Float32[Array, "N"]
    second: Float32[Array, "N"]

    def log_softmax(self, logits: Array) -> Array:
        """Returns log-softmax of logits `[N, n]`, a part of each row, with its exact bits."""
        return (logits - self.first[:, None]) - self.second[:, None]

    def logprobs(self, logits: Array, tokens: Array) -> Array:
        """Returns the logprobs of tokens, given all logits `[N, V]`."""
        return self.log_softmax(_at(tokens, logits)[:, None])[:, 0]

    def gradient(self, logits: Array, tokens: Array, gradients: Array) -> Array:
        """Returns the gradient of logits `[N, V]` from the gradients of the tokens' logprobs."""
        is_token = jnp.arange(logits.shape[1], dtype=tokens.dtype)[None] == tokens[:, None]
        # The maximum with the lowest number prevents fusing the product with the subtraction.
        share = jnp.maximum(jnp.exp(self.log_softmax(logits)) * gradients[:, None], LOWEST)
        return jnp.where(is_token, gradients[:, None], 0.0) - share


def _at(tokens: Array, rows: Array) -> Array:
    return jnp.take_along_axis(rows, tokens[:, None], axis=1)[:, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _drawn_logprobs(logits: Array, tokens: Array, distribution: Distribution) -> Array:
    arrays = SamplingArrays.uniform(len(logits), distribution)
    return sampling_logprobs(logits, tokens, arrays, filtered=distribution.filtered)


def _drawn_forward(logits: Array, tokens: Array, distribution: Distribution) -> tuple[Array, tuple[Array, Array]]:
    return _drawn_logprobs(logits, tokens, distribution), (logits, tokens)


def _drawn_backward(distribution: Distribution, saved: tuple[Array, Array], gradients: Array) -> tuple[Array, None]:
    logits, tokens = saved
    if distribution.temperature == 0:
        return jnp.zeros_like(logits), None
    scaled, factor = drawn_logits(logits, distribution), 1 / jnp.float32(distribution.temperature)
    is_kept = scaled > -jnp.inf
    # A token that cannot be drawn has no gradient, because no change of the logits makes it possible.
    gradients = jnp.where(_at(tokens, is_kept), gradients, 0.0)
    (dscaled,) = jax.vjp(lambda scaled: _at(tokens, log_softmax(scaled)), scaled)[1](gradients)
    return jnp.where(is_kept, dscaled * factor, 0.0), None


def drawn_logits(logits: Float32[Array, "N V"], distribution: Distribution) -> Float32[Array, "N V"]:
    """Returns logits divided by a distribution's temperature, which must not be 0; -inf for tokens it cannot draw.

    Example:
        >>> from detjax.operands.options import Distribution
        >>> ops.drawn_logits(jnp.array([[0.0, 2.0, 1.0]]), Distribution(temperature=0.5))
        Array([[0., 4., 2.]], dtype=float32)
    """
    kept = logits
    if distribution.filtered:
        kept = filter_logits(logits, SamplingArrays.uniform(len(logits), distribution))
    scaled = jnp.maximum(logits * (1 / jnp.float32(distribution.temperature)), LOWEST)
    return jnp.where(kept > -jnp.inf, scaled, -jnp.inf)


_drawn_logprobs.defvjp(_drawn_forward, _drawn_backward)


def _forward(
    hidden: Array, head: Weight, tokens: Array, size: int, outputs: _Outputs
) -> tuple[Array, tuple[Array, Weight, Array, _Statistics | None]]:
    value, _ = value_and_sum(head)

    def logprobs(rows: tuple[Array, ...]) -> tuple[Array, _Statistics | None]:
        hidden, tokens = rows
        logits = _logits(hidden, value, outputs)
        pair = log_softmax_statistics(logits) if outputs.distribution.is_model else None
        if pair is None:
            return _logprobs(logits, tokens, outputs.distribution), None
        statistics = _Statistics(*pair)
        return statistics.logprobs(logits, tokens), statistics

    chunks = lax.map(logprobs, _chunks(size, hidden, tokens))
    result, statistics = jax.tree.map(lambda x: x.reshape(-1), chunks)
    return result, (hidden, head, tokens, statistics)


def _backward(
    size: int, outputs: _Outputs, saved: tuple[Array, Weight, Array, _Statistics | None], gradients: Array
) -> tuple[Array, Weight, None]:
    hidden, head, tokens, statistics = saved
    value, start = value_and_sum(head)
    total = jnp.zeros(value.shape, ACCUMULATOR) if start is None else start

    def add(total: Array, arrays: tuple[Any, ...]) -> tuple[Array, Array]:
        hidden, tokens, gradients, *numbers = arrays
        known = _Statistics(*numbers) if numbers else None
        sums = AccumulatedWeight(value, total)
        following, (_, dhidden) = _added(hidden, sums, tokens, lambda _: gradients, outputs, known)
        assert following is not None
        return following, dhidden

    total, dhidden = varying.scan(add, total, _chunks(size, hidden, tokens, gradients, *(statistics or ())))
    return dhidden.reshape(hidden.shape), weight_cotangent(head, total), None


def _added(
    hidden: Array,
    head: AccumulatedWeight,
    tokens: Array,
    derivative: Callable[[Array], Array],
    outputs: _Outputs,
    statistics: _Statistics | None = None,
) -> tuple[Array | None, tuple[Array, Array]]:
    """Returns the next sum of the head's products after a chunk, and the chunk's logprobs and hidden gradients.

    A head without a sum has no next one.
    """
    distribution = outputs.distribution

    def products(hidden: Array, total: Array | None) -> Array:
        return _logits(hidden, AccumulatedWeight(head.value, total), outputs)

    logits, pullback = jax.vjp(products, hidden, head.products)
    if distribution.is_model and statistics is None:
        pair = log_softmax_statistics(logits)
        statistics = None if pair is None else _Statistics(*pair)
    if statistics is None:
        logprobs, logits_pullback = jax.vjp(lambda logits: _logprobs(logits, tokens, distribution), logits)
        (dlogits,) = logits_pullback(derivative(logprobs))
    else:
        logprobs = statistics.logprobs(logits, tokens)
        dlogits = statistics.gradient(logits, tokens, derivative(logprobs))
    dhidden, total = pullback(dlogits)
    return total, (logprobs, dhidden)


_token_logprobs.defvjp(_forward, _backward)


def _chunks(size: int, *arrays: Array) -> tuple[Array, ...]:
    """Reshapes arrays `[N, ...]` to `[N / size, size, ...]`."""
    return tuple(x.reshape(ceil_div(len(x), size), size, *x.shape[1:]) for x in arrays)
