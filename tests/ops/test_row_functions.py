"""Functions of single rows, and the causal convolution: numbers against float64, and bits that no schedule changes."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS
from tests.ops.cases import at
from tests.ops.delta_cases import queries
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked

DTYPES = ("float32", "bfloat16")
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
CHANNELS, TAPS = 24, 4


@pytest.fixture(autouse=True)
def portable_backend() -> Iterator[None]:
    with detjax.use_backend("portable"):
        yield


def silu(x: Any) -> Any:
    return x / (1 + jnp.exp(-x))


def decays(a: Any, b: Any, log_rate: Any, bias: Any) -> tuple[Any, Any]:
    return -jnp.exp(log_rate)[None] * jnp.log1p(jnp.exp(a + bias[None])), 1 / (1 + jnp.exp(-b))


def normalized(x: Any, gate: Any, weight: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight[None] * silu(gate)


def centered(x: Any, weight: Any, bias: Any) -> Any:
    difference = x - x.mean(-1, keepdims=True)
    return difference / jnp.sqrt((difference**2).mean(-1, keepdims=True) + 1e-6) * weight[None] + bias[None]


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "l2_norm": (
        functools.partial(ops.l2_norm, eps=1e-6),
        lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6),
        ((37, 80),),
        1,
    ),
    "gated_rms_norm": (functools.partial(ops.gated_rms_norm, eps=1e-5), normalized, ((37, 80), (37, 80), (80,)), 2),
    "sigmoid_gated": (ops.sigmoid_gated, lambda x, gate: x / (1 + jnp.exp(-gate)), ((37, 80), (37, 80)), 2),
    "sigmoid_gated by a column": (
        ops.sigmoid_gated,
        lambda x, gate: x / (1 + jnp.exp(-jnp.broadcast_to(gate, x.shape))),
        ((37, 80), (37, 1)),
        2,
    ),
    "decay_and_rate": (ops.decay_and_rate, decays, ((37, 8), (37, 8), (8,), (8,)), 2),
    "layer_norm": (functools.partial(ops.layer_norm, eps=1e-6), centered, ((37, 80), (80,), (80,)), 1),
    "weighted_sum": (
        lambda x, factors: ops.weighted_sum(x, factors.astype(jnp.float32)),
        lambda x, factors: (x * jax.lax.stop_gradient(factors)[..., None]).sum(1),
        ((37, 4, 24), (37, 4)),
        2,
    ),
}
"""Each with its reference, the shapes of its arguments, and how many of them are rows."""


def arguments(name: str, dtype: str) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in FUNCTIONS[name][2]]


def values_and_gradients(fn: Callable[..., Any], arrays: list[Any]) -> tuple[Any, Any]:
    results, pullback = jax.vjp(fn, *arrays)
    leaves, tree = jax.tree.flatten(results)
    random = np.random.default_rng(1)
    cotangents = [jnp.asarray(random.standard_normal(y.shape)).astype(y.dtype) for y in leaves]
    return results, pullback(jax.tree.unflatten(tree, cotangents))


IN_BFLOAT16 = ("gated_rms_norm", "sigmoid_gated by a column", "weighted_sum")


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *((name, "bfloat16" if name in IN_BFLOAT16 else "float32", "portable") for name in FUNCTIONS),
        ("decay_and_rate", "bfloat16", "portable"),
        ("layer_norm", "bfloat16", "stock"),
        *(
            pytest.param(name, dtype, backend, marks=pytest.mark.nightly)
            for name in FUNCTIONS
            for dtype in DTYPES
            for backend in ("portable", "stock")
        ),
    ],
)
def test_values_and_gradients_are_those_of_float64(name: str, dtype: str, backend: str) -> None:
    fn, reference, *_ = FUNCTIONS[name]
    arrays = arguments(name, dtype)
    with detjax.use_backend(backend):
        given = detjax.jit(functools.partial(values_and_gradients, fn))([jnp.asarray(x) for x in arrays])
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(values_and_gradients, reference))([x.astype(np.float64) for x in arrays])
        exact = jax.tree.map(np.asarray, exact)
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(exact), strict=True):
        x = np.asarray(x, np.float64)
        assert np.abs(x - y).max() <= TOLERANCE[dtype] * max(1, np.abs(y).max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_number_of_rows_and_their_neighbours_change_no_bit(name: str, dtype: str) -> None:
    fn, _, _, rows = FUNCTIONS[name]
    arrays = arguments(name, dtype)
    fn = detjax.jit(fn)
    whole = jax.tree.map(np.asarray, fn(*arrays))
    for first, count in ((0, 1), (36, 1), (3, 17)):
        part = fn(*(x[first : first + count] for x in arrays[:rows]), *arrays[rows:])
        assert_same_bits(jax.tree.map(np.asarray, part), at(whole, slice(first, first + count)))
    poisoned = [
        np.where(np.arange(37).reshape(-1, *[1] * (x.ndim - 1)) == 7, np.nan, x).astype(x.dtype) for x in arrays[:rows]
    ]
    kept = np.delete(np.arange(37), 7)
    assert_same_bits(at(fn(*poisoned, *arrays[rows:]), kept), at(whole, kept))


def test_gradients_of_weights_do_not_depend_on_microbatches() -> None:
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.standard_normal((48, 8)), jnp.float32) for _ in range(2))
    weights = [jnp.asarray(random.standard_normal(8), jnp.float32) for _ in range(2)]

    def sums(first: int, end: int, before: list[jax.Array]) -> list[jax.Array]:
        def loss(totals: list[jax.Array]) -> jax.Array:
            pairs = (ops.AccumulatedWeight(weight, total) for weight, total in zip(weights, totals, strict=True))
            g, beta = ops.decay_and_rate(a[first:end], b[first:end], *pairs)
            return g.sum() + beta.sum()

        return jax.grad(loss)(before)

    zeros = [jnp.zeros(8)] * 2
    whole = sums(0, 48, zeros)
    assert_same_bits(sums(16, 48, sums(0, 16, zeros)), whole)
    assert_same_bits(sums(32, 48, sums(0, 32, zeros)), whole)
    assert not same_bits(sums(24, 48, sums(0, 24, zeros)), whole)


# --- the causal convolution -------------------------------------------------------------------------------------------


def inputs(count: int, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, CHANNELS)).astype(jnp.dtype(dtype))
    return x, random.standard_normal((CHANNELS, 1, TAPS)).astype(jnp.dtype(dtype))


def in_calls(x: np.ndarray, weight: np.ndarray, ends: list[int]) -> np.ndarray:
    kept, outputs = ops.empty_inputs(1, TAPS, CHANNELS, x.dtype), []
    for start, end in itertools.pairwise((0, *ends)):
        some = jnp.asarray(x[None, start:end])
        y, kept = ops.causal_convolution(some, jnp.asarray(weight), kept, queries([start], [end - start]))
        outputs.append(np.asarray(y)[0])
    return np.concatenate(outputs)


def convolution(x: Any, weight: Any) -> Any:
    padded = jnp.concatenate([jnp.zeros((TAPS - 1, CHANNELS), x.dtype), x])
    return silu(sum(padded[tap : tap + len(x)] * weight[None, :, 0, tap] for tap in range(TAPS)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["portable", "stock"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_convolution_and_its_gradients_are_those_of_float64(dtype: str, backend: str) -> None:
    arrays = inputs(40, dtype)

    def fn(x: jax.Array, weight: jax.Array) -> jax.Array:
        kept = ops.empty_inputs(1, TAPS, CHANNELS, x.dtype)
        return ops.causal_convolution(x[None], weight, kept, queries([0], [40]))[0][0]

    with detjax.use_backend(backend):
        given = detjax.jit(functools.partial(values_and_gradients, fn))([jnp.asarray(x) for x in arrays])
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(values_and_gradients, convolution))([x.astype(np.float64) for x in arrays])
        exact = jax.tree.map(np.asarray, exact)
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(exact), strict=True):
        x = np.asarray(x, np.float64)
        assert np.abs(x - y).max() <= TOLERANCE[dtype] * max(1, np.abs(y).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_part_of_a_request_are_those_of_the_whole(dtype: str) -> None:
    """The loss sees the later tokens alone, so the earlier ones are a constant to them."""
    (x, weight), start = inputs(60, dtype), 32
    dy = np.random.default_rng(2).standard_normal(x.shape).astype(x.dtype)
    dy[:start] = 0

    def gradients(kept: jax.Array, first: int) -> list[np.ndarray]:
        def fn(x: jax.Array, weight: jax.Array) -> jax.Array:
            return ops.causal_convolution(x[None], weight, kept, queries([first], [len(x)]))[0][0]

        return [
            np.asarray(d) for d in jax.vjp(fn, jnp.asarray(x[first:]), jnp.asarray(weight))[1](jnp.asarray(dy[first:]))
        ]

    nothing = ops.empty_inputs(1, TAPS, CHANNELS, x.dtype)
    dx, dweight = gradients(nothing, 0)
    assert_same_bits(gradients(_call(x, weight, nothing, 0, start)[1], start), [dx[start:], dweight])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_of_any_length_give_the_bits_of_one(dtype: str) -> None:
    x, weight = inputs(60, dtype)
    whole = in_calls(x, weight, [60])
    for ends in ([2, 31, 60], list(range(1, 61))):
        assert_same_bits(in_calls(x, weight, ends), whole)


def test_dropped_inputs_leave_no_trace() -> None:
    x, weight = inputs(60, "bfloat16")
    other, _ = inputs(60, "bfloat16", seed=1)
    whole = in_calls(x, weight, [60])
    _, kept = _call(x, weight, ops.empty_inputs(1, TAPS, CHANNELS, x.dtype), 0, 25)
    _, kept = _call(other, weight, kept, 25, 25 + DROPPABLE_TOKENS)
    assert_same_bits(_call(x, weight, kept, 25, 60)[0], whole[25:])


def _call(x: np.ndarray, weight: np.ndarray, kept: jax.Array, start: int, end: int) -> tuple[np.ndarray, jax.Array]:
    some = jnp.asarray(x[None, start:end])
    y, kept = ops.causal_convolution(some, jnp.asarray(weight), kept, queries([start], [end - start]))
    return np.asarray(y)[0], kept


def test_packed_inputs_slots_and_neighbours_change_no_bit() -> None:
    """One request decodes, two prefill; every slot held NaN of others before, and NaN stands between the requests."""
    starts, counts, slots = [30, 0, 7], [1, 21, 10], [3, 0, 2]
    requests = [inputs(40, "bfloat16", seed)[0] for seed in range(3)]
    weight = inputs(1, "bfloat16")[1]
    kept = jnp.full((5, TAPS - 1 + DROPPABLE_TOKENS, CHANNELS), jnp.nan, jnp.bfloat16)
    expected = []
    for request, start, count, slot in zip(requests, starts, counts, slots, strict=True):
        expected.append(in_calls(request, weight, [40])[start : start + count])
        if start:
            before = jnp.asarray(request[None, :start])
            _, kept = ops.causal_convolution(before, jnp.asarray(weight), kept, queries([0], [start], [slot]))
    x = np.full((1 + 40, CHANNELS), np.nan, jnp.bfloat16)
    packed = ops.Queries.packed(
        np.zeros((3, 1), np.int32), np.array(starts, np.int32), np.array(counts, np.int32), decodes=1, rows=40
    )
    packed = ops.Queries(**{**vars(packed), "slots": np.array(slots, np.int32)})
    firsts = [0, 1, 1 + 24]
    for request, first, start, count in zip(requests, firsts, starts, counts, strict=True):
        x[first : first + count] = request[start : start + count]
    y, after = ops.causal_convolution(jnp.asarray(x), jnp.asarray(weight), kept, packed)
    assert_same_bits([np.asarray(y[f : f + c]) for f, c in zip(firsts, counts, strict=True)], expected)
    assert_same_bits(after[jnp.array([1, 4])], kept[jnp.array([1, 4])])


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, weight = (jnp.asarray(array) for array in inputs(4, "float32"))
    kept = ops.empty_inputs(1, TAPS, CHANNELS, jnp.float32)
    convolve, four = unchecked(ops.causal_convolution), queries([0], [4])
    with pytest.raises(ValueError, match=r"weight has shape \(23, 1, 4\); accepted: \(24, 1, taps\)"):
        convolve(x[None], weight[:23], kept, four)
    with pytest.raises(ValueError, match=r"inputs has shape \(1, 18, 24\); accepted: \(slots, at least 19, 24\)"):
        convolve(x[None], weight, kept[:, :18], four)
    with pytest.raises(TypeError, match="inputs has dtype bfloat16"):
        convolve(x[None], weight, kept.astype(jnp.bfloat16), four)
    with pytest.raises(ValueError, match=r"gate has shape \(3, 24\); accepted: \(4, 24\), x's shape, or one column"):
        unchecked(ops.sigmoid_gated)(x, x[:3])
