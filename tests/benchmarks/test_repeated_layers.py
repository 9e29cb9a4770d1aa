"""Layers of fp8 products that are repeated: no bit may differ, and what differs is named."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from benchmarks.studies.fp8_products import repeats
from detjax.bench import random_codes
from detjax.operands.quantized_weight import widened
from tests.support.bits import assert_same_bits
from tests.support.unchecked import unchecked

SHAPES = {
    "queries, keys and values": (256, 128),
    "output": (128, 128),
    "gate and up": (2, 384, 128),
    "down": (128, 384),
}


def test_repetitions_have_the_same_bits() -> None:
    comparisons = list(repeats.repeated_layers(SHAPES, (3, 20), layers=2, repeats=2))
    assert comparisons == [("2 layers, 3 rows, 2 times", []), ("2 layers, 20 rows, 2 times", [])]


def test_the_first_product_with_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = 0, detjax.jit

    def jit(fn: Any) -> Any:
        compiled = real(fn)

        def run(x: Any, weights: Any) -> Any:
            nonlocal calls
            calls += 1
            products = compiled(x, weights)
            if calls == 3:  # the second repetition
                products[6] = products[6].at[4:6, 7].set(jnp.nan)  # gate and up of the second layer
                products[7] = products[7] + 1
            return products

        return run

    monkeypatch.setattr(repeats.detjax, "jit", jit)
    ((_, faults),) = repeats.repeated_layers(SHAPES, (20,), layers=2, repeats=3)
    assert faults == ["repetition 2: gate and up of layer 1, 2 numbers in rows 4 to 5 and columns 7 to 7"]


def test_layers_are_products_of_one_anothers_rows() -> None:
    weights = [random_codes.drawn_weight(shape, "fp8", "bfloat16", seed) for seed, shape in enumerate(SHAPES.values())]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 128)), jnp.bfloat16)
    y, h, z, out = unchecked(repeats.products_of_layers)(x, [weights])

    def norm(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True))

    qkv, output, gate_up, down = (np.asarray(widened(w), np.float64) for w in weights)
    expected_y = norm(x) @ qkv.T
    expected_h = np.asarray(y, np.float64)[:, :128] @ output.T + np.asarray(x, np.float64)
    gate, up = (norm(h) @ part.T for part in gate_up)
    expected_z = gate / (1 + np.exp(-gate)) * up
    expected_out = np.asarray(z, np.float64) @ down.T + np.asarray(h, np.float64)
    pairs = (y, expected_y), (h, expected_h), (z, expected_z), (out, expected_out)
    for product, expected in pairs:
        error = np.abs(np.asarray(product, np.float64) - expected).max() / np.abs(expected).max()
        assert error < 0.1  # rows are rounded to four bits
    assert_same_bits(unchecked(repeats.products_of_layers)(x, [weights])[3], out)
