"""Products of quantized activations on Hopper: numbers and bits in Pallas' interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.quantized_weight import QuantizedWeight
from tests.pallas.hopper.interpreter import interpreted
from tests.support.bits import assert_same_bits
from tests.support.quantized_weights import X, e4m3_weight

GATE: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True}


def on_hopper(x: np.ndarray, w: QuantizedWeight, **options: Any) -> np.ndarray:
    def product(x: Any, w: Any) -> Any:
        with detjax.use_backend("hopper"):
            if w.ndim == 3:
                return ops.matmul(x, w, bias=jnp.ones(w.shape[:-1], x.dtype), **GATE)
            return ops.matmul(x, w, layout="nk")

    return interpreted(product, jnp.asarray(x), w)


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("kind", ["group", "static of two"])
def test_products_are_the_contracts_and_rows_do_not_depend_on_each_other(kind: str) -> None:
    w, x = e4m3_weight(kind), X[:20]
    y = on_hopper(x, w)
    portable = np.asarray(ops.matmul(jnp.asarray(x), w, layout="nk"))
    assert np.abs(y - portable).max() <= 1e-6 * np.abs(portable).max()
    assert_same_bits(on_hopper(x[:1], w), y[:1])
    changed = np.concatenate([x[:10], np.full_like(x[:1], np.nan), 1e4 * x[11:]])
    assert_same_bits(on_hopper(changed, w)[:10], y[:10])


@pytest.mark.usefixtures("matrix_unit")
def test_a_row_of_an_expert_has_the_bits_of_its_own_product() -> None:
    w, x, sizes = e4m3_weight("group", 2, 2), X[:16], jnp.int32([8, 8])

    def product(x: Any, w: Any) -> Any:
        with detjax.use_backend("hopper"):
            return ops.grouped_matmul(x, w, sizes, bias=jnp.ones(w.shape[:-1], x.dtype), unit=8, **GATE)

    y = interpreted(product, jnp.asarray(x), w)
    for expert in (0, 1):
        rows = slice(8 * expert, 8 * expert + 8)
        assert_same_bits(y[rows], on_hopper(x[rows], jax.tree.map(lambda leaf, at=expert: leaf[at], w)))
