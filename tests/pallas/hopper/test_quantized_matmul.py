"""Products of quantized activations on Hopper: numbers and bits in Pallas' interpreter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.pallas.hopper import quantized_matmul
from tests.pallas.hopper.interpreter import interpreted
from tests.pallas.hopper.test_decoder import kernel_counts
from tests.support.bits import assert_same_bits
from tests.support.quantized_weights import X, added_in_blocks, e4m3_weight, exact_operands

GATE: dict[str, Any] = {"layout": "nk", "activation": "relu", "gated": True}


def on_hopper(x: Any, w: QuantizedWeight) -> np.ndarray:
    def product(x: Any, w: Any) -> Any:
        with detjax.use_backend("hopper"):
            if w.ndim == 3:
                return ops.matmul(x, w, bias=jnp.ones(w.shape[:-1], x.dtype), **GATE)
            return ops.matmul(x, w, layout="nk")

    return interpreted(product, jnp.asarray(x), w)


KINDS = {
    "group": ("group", 128),
    "row": ("row", 128),
    "static": ("static", 128),
    "static of two": ("static of two", 128),
    "groups of 64, composed": ("group", 64),
}
"""Scales of activations, and columns of a group."""


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("name", KINDS)
def test_products_are_the_contracts_and_rows_do_not_depend_on_each_other(name: str) -> None:
    """N and K are sizes that no kernel loads as they are."""
    kind, group = KINDS[name]
    x, w = exact_operands(20, 44, 180, kind, group=group)
    y = on_hopper(x, w)
    assert_same_bits(y, added_in_blocks(x, w))
    assert_same_bits(on_hopper(x[:1], w), y[:1])
    changed = np.concatenate([x[:10], np.full_like(x[:1], np.nan), 1e4 * x[11:]])
    assert_same_bits(on_hopper(changed, w)[:10], y[:10])


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_an_expert_has_the_bits_of_its_own_product(name: str) -> None:
    kind, group = KINDS[name]
    (x, w), sizes = exact_operands(16, 40, 192, kind, "float32", 2, 2, group=group), jnp.int32([8, 8])

    def product(x: Any, w: Any) -> Any:
        with detjax.use_backend("hopper"):
            return ops.grouped_matmul(x, w, sizes, bias=jnp.ones(w.shape[:-1], x.dtype), unit=8, **GATE)

    y = interpreted(product, jnp.asarray(x), w)
    for expert in (0, 1):
        rows = slice(8 * expert, 8 * expert + 8)
        assert_same_bits(y[rows], on_hopper(x[rows], w.matrix(expert)))


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("kind", ["group", "static of two"])
def test_a_gradient_takes_the_sums_of_codes_and_does_not_depend_on_other_rows(kind: str) -> None:
    x, w = exact_operands(9, 40, 192, kind, "float32", 2)

    def gradient(x: Any, w: Any) -> Any:
        with detjax.use_backend("hopper"):
            y, backward = jax.vjp(lambda x: ops.matmul(x, w, **GATE), x)
            return backward(y)[0]

    counts = kernel_counts(jax.make_jaxpr(gradient)(jnp.asarray(x), w).jaxpr)
    assert counts["codes_matmul"] == {"group": 1 + 2, "static of two": 4 + 4}[kind]
    dx = interpreted(gradient, jnp.asarray(x), w)
    assert_same_bits(interpreted(gradient, jnp.asarray(x[4:5]), w), dx[4:5])


@pytest.mark.parametrize("rows", [8, 40, 5000])
@pytest.mark.parametrize(
    ("kind", "dtype", "kernels"),
    [
        ("group", "bfloat16", {"quantized_groups": 1, "codes_matmul": 1}),
        ("row", "bfloat16", {"codes_matmul": 1}),
        ("row", "float32", {"codes_matmul": 1}),
        ("static", "float32", {"codes_matmul": 1}),
        ("static of two", "bfloat16", {"codes_matmul": 2, "map_elements": 1}),
    ],
)
def test_one_kernel_multiplies_codes_for_every_number_of_rows(
    kind: str, dtype: str, kernels: dict[str, int], rows: int
) -> None:
    """Outputs with two static scales take a product for each, in float32. Experts take the same kernels."""
    w, x = e4m3_weight(kind), jnp.zeros((rows, X.shape[1]), dtype)
    options: dict[str, Any] = {"epilogue": Epilogue(), "out_dtype": dtype}

    def product(x: Any, w: Any) -> jax.Array:
        return quantized_matmul.forward(MatmulOperands(x, w), **options)

    def grouped(x: Any, w: Any) -> jax.Array:
        operands = GroupedOperands(x, w, None, jnp.int32([rows, 0]))
        return quantized_matmul.grouped_forward(operands, **options, unit=8)

    with detjax.use_backend("hopper"):
        assert kernel_counts(jax.make_jaxpr(product)(x, w).jaxpr) == kernels
        assert kernel_counts(jax.make_jaxpr(grouped)(x, e4m3_weight(kind, 2)).jaxpr) == kernels


def test_other_groups_are_composed_of_blocks_for_every_number_of_rows() -> None:
    w = e4m3_weight("group")
    scales = jnp.repeat(w.scales, 2, axis=1)[:, :3]
    w = dataclasses.replace(w, scales=scales, format=dataclasses.replace(w.format, group=64))

    def product(x: Any, w: Any) -> jax.Array:
        return quantized_matmul.forward(MatmulOperands(x, w), epilogue=Epilogue(), out_dtype=x.dtype)

    with detjax.use_backend("hopper"):
        for rows in (1, 5000):
            counts = kernel_counts(jax.make_jaxpr(product)(jnp.zeros((rows, X.shape[1])), w).jaxpr)
            assert counts == {"matmul": 1, "map_elements": 1}
