"""Products with weights in codes: plain activations, and activations that are quantized row by row."""

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax import ops
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight, widened
from detjax.portable.quantized_matmul import quantized_rows, to_e4m3
from detjax.portable.tiles import fused_multiply_add
from detjax.runtime import backends
from tests.support.bits import assert_same_bits, same_bits
from tests.support.quantized_weights import RANDOM, ROWS, K, N, X, e4m3_weight

COMPUTED = ("group", "row", "static", "static of two")


def plain_weights() -> dict[str, QuantizedWeight]:
    """Weights of every kind of numbers whose products have plain activations."""
    random = np.random.default_rng(2)
    codes = random.integers(0, 256, (N, K // 2), dtype=np.uint8)
    scales, table = (
        random.uniform(0.1, 1, (N, 3)).astype(np.float16),
        random.uniform(0.1, 1, (2, 256)).astype(np.float32),
    )
    fp4 = random.integers(0, 256, (N, K // 16), dtype=np.uint8)
    zeros, source = random.integers(0, 16, (N, 3), dtype=np.uint8), random.integers(0, 2, N, dtype=np.uint8)
    groups = np.stack([random.permutation(np.arange(K, dtype=np.int32) // 64) for _ in range(2)])
    described = QuantizedFormat("int4", K, 64, "float32")
    e2m1 = dataclasses.replace(described, numbers="e2m1", group=16)
    return {
        "int4": QuantizedWeight(codes, scales, format=described),
        "int4 with zeros in order": QuantizedWeight(codes, scales, zeros, source, groups=groups, format=described),
        "e2m1 with tables": QuantizedWeight(codes, fp4, source=source, tables=table, format=e2m1),
    }


def in_float64(x: np.ndarray, w: QuantizedWeight) -> np.ndarray:
    """The contract of quantized activations a second time, without roundings of sums."""
    numbers = np.asarray(w.codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    group = 128 if w.format.activations == "group" else K
    result = np.zeros((len(x), N))
    for row, output in np.ndindex(result.shape):
        source = 0 if w.source is None else int(w.source[output])
        for begin in range(0, K, group):
            part = x[row, begin : begin + group]
            scale = np.float32(np.abs(part).max() / np.float32(448)) or np.float32(1)
            scale = scale if w.input_scales is None else w.input_scales[source]
            codes = np.clip(part / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            products = codes @ numbers[output, begin : begin + group]
            result[row, output] += products * np.float64(scale) * np.float64(w.scales[output, begin // group])
    return result


def test_numbers_are_rounded_to_the_nearest_code_with_ties_to_even() -> None:
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (-1e9, 1e9)]
    x = np.concatenate([codes, middles, *near, np.array([1e-30, 449, 1e30], np.float32)])
    x = np.concatenate([x, -x, [np.float32(np.nan)]])
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(to_e4m3)(x), expected)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_scales_and_codes_are_true_quotients(target: str) -> None:
    codes = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = np.append((codes[1:] + codes[:-1]) / 2, np.float32(448))
    # Next to the border between two codes, a rounded reciprocal gives the other one.
    x = (np.random.default_rng(3).uniform(1, 2, (64, 1)).astype(np.float32) * middles).astype(np.float32)
    scales = np.abs(x).max(1, keepdims=True) / np.float32(448)
    expected = (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with backends.tracing_for(target):
        numbers, computed = jax.jit(lambda x: quantized_rows(x, x.shape[-1]))(x)
    assert_same_bits(np.asarray(computed), scales)
    np.testing.assert_array_equal(numbers[:, 0], expected)
    assert ((x * (np.float32(1) / scales)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) != expected).any()


@pytest.mark.parametrize("kind", COMPUTED)
def test_activations_are_quantized_as_the_contract_says(kind: str) -> None:
    w, some = e4m3_weight(kind), X[:8]
    expected = in_float64(some, jax.tree.map(np.asarray, w))
    y = np.asarray(ops.matmul(jnp.asarray(some), w, layout="nk"))
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()
    dense = np.asarray(ops.matmul(jnp.asarray(some), widened(w), layout="nk"))
    assert np.abs(dense - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    w, x = e4m3_weight(kind), jnp.asarray(X)
    y = ops.matmul(x, w, layout="nk")
    for rows in (1, 16, 17):
        assert_same_bits(ops.matmul(x[:rows], w, layout="nk"), y[:rows])
    for neighbour in (1e4 * X[0], np.full(K, np.nan, np.float32), np.zeros(K, np.float32)):
        changed = jnp.asarray(np.concatenate([X[:20], neighbour[None], X[21:]]))
        others = np.arange(ROWS) != 20
        assert_same_bits(ops.matmul(changed, w, layout="nk")[others], y[others])


def test_a_product_on_gpus_is_fused_with_the_addition() -> None:
    draw, size = np.random.default_rng(0), 2000
    x, y, z = draw.standard_normal((3, size)).astype(np.float32)
    z *= np.exp2(draw.integers(-40, 40, size)).astype(np.float32)
    near = 1 + draw.integers(-2, 3, (2, size // 2)).astype(np.float32) * np.float32(2**-23)
    x[::2], y[::2], z[::2] = near[0] * np.float32(2**-24), near[1], 1 + np.float32(2**-23)  # next to ties

    def fused(x: Any, y: Any, z: Any) -> Any:
        with backends.tracing_for("gpu"):
            return fused_multiply_add(x, y, z)

    actual = np.asarray(jax.jit(fused)(x, y, z))

    def error(number: np.float32, place: int) -> Fraction:
        exact = Fraction(float(x[place])) * Fraction(float(y[place])) + Fraction(float(z[place]))
        return abs(Fraction(float(number)) - exact)

    for place, number in enumerate(actual):
        for neighbour in (np.nextafter(number, np.float32(-np.inf)), np.nextafter(number, np.float32(np.inf))):
            errors = error(number, place), error(neighbour, place)
            is_even = int(number.view(np.uint32)) % 2 == 0
            assert errors[0] < errors[1] or (errors[0] == errors[1] and is_even)
    assert np.mean(actual != x * y + z) > 0.02
    special = np.float32([np.nan, np.inf, -0.0, 1, np.inf])
    factor, addend = np.float32([1, 1, 1, 2, 1]), np.float32([1, 1, -0.0, -2, -np.inf])
    assert_same_bits(
        np.nan_to_num(jax.jit(fused)(special, factor, addend), nan=7),
        np.nan_to_num(np.float32([7, np.inf, -0.0, 0, 7])),
    )


@pytest.mark.parametrize("rows", [1, 8, 257])
def test_a_nan_reaches_its_whole_group_and_no_other(rows: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, 208)).astype(np.float32)
    x[rows // 2, 66] = np.nan
    numbers, scales = (np.isnan(a) for a in jax.jit(lambda x: quantized_rows(x, 64))(x))
    expected = np.zeros_like(scales)
    expected[rows // 2, 1] = True
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_array_equal(numbers.all(axis=2), expected)
    np.testing.assert_array_equal(numbers.any(axis=2), expected)


def test_one_scale_for_a_batch_depends_on_neighbours() -> None:
    w, x = e4m3_weight("row"), jnp.asarray(X)
    with backends.use_backend("stock"):
        assert not same_bits(ops.matmul(x, w, layout="nk")[:1], ops.matmul(x[:1], w, layout="nk"))


@pytest.mark.parametrize("name", plain_weights())
def test_the_format_of_a_weight_with_plain_activations_changes_no_bit(name: str) -> None:
    w, x = jax.tree.map(jnp.asarray, plain_weights()[name]), jnp.asarray(X)
    for rows in (1, ROWS):
        assert_same_bits(ops.matmul(x[:rows], w, layout="nk"), ops.matmul(x[:rows], widened(w), layout="nk"))
    with pytest.raises(ValueError, match="layout is 'kn' and w has codes of "):
        ops.matmul(x, w, layout="kn")


@pytest.mark.parametrize("kind", ["group", "static of two"])
def test_a_row_of_an_expert_has_the_bits_of_its_own_product(kind: str) -> None:
    w, bias = e4m3_weight(kind, 3, 2), jnp.asarray(RANDOM.standard_normal((3, 2, N)), jnp.float32)
    sizes, x = jnp.int32([5, 0, 20]), jnp.asarray(X)
    gate: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True}
    y = ops.grouped_matmul(x, w, sizes, bias=bias, **gate)
    for expert, rows in ((0, slice(5)), (2, slice(5, 25))):
        assert_same_bits(y[rows], ops.matmul(x[rows], w.matrix(expert), bias=bias[expert], **gate))


def test_the_gradient_is_that_of_the_widened_weight() -> None:
    w, x, dy = e4m3_weight("row"), jnp.asarray(X), jnp.asarray(RANDOM.standard_normal((ROWS, N)), jnp.float32)
    bias = jnp.zeros(N)

    def gradients(weight: Any) -> Any:
        return jax.vjp(lambda x, bias: ops.matmul(x, weight, layout="nk", bias=bias), x, bias)[1](dy)

    assert_same_bits(gradients(w), gradients(widened(w)))
    stacked, sizes = e4m3_weight("row", 2), jnp.int32([17, 20])
    dx = jax.grad(lambda x: jnp.sum(ops.grouped_matmul(x, stacked, sizes, layout="nk") * dy))(x)
    dense = jax.grad(lambda x: jnp.sum(ops.grouped_matmul(x, widened(stacked), sizes, layout="nk") * dy))(x)
    assert_same_bits(dx, dense)
