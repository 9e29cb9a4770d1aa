"""Rows and weights of products with quantized activations, for tests of all backends."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight, numbers_of
from detjax.portable.quantized_matmul import quantized_rows

ROWS, K, N = 37, 192, 48
RANDOM = np.random.default_rng(0)
X = (RANDOM.standard_normal((ROWS, K)) * np.exp2(RANDOM.integers(-4, 5, (ROWS, 1)))).astype(np.float32)
X[3], X[5, 128:] = 0, 0


def e4m3_weight(kind: str, *stack: int, dtype: str = "float32") -> QuantizedWeight:
    """A random weight whose products quantize activations."""
    random = np.random.default_rng(1)
    codes = random.standard_normal((*stack, N, K)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    group = 128 if kind == "group" else K
    scales = random.uniform(0.5, 2, (*stack, N, -(-K // group))).astype(np.float32)
    activations: Any = kind.split()[0]
    described = QuantizedFormat("e4m3", K, group, dtype, activations)
    inputs = {"static": [0.01], "static of two": [0.01, 0.02]}.get(kind)
    shared = None if inputs is None else np.broadcast_to(np.array(inputs, np.float32), (*stack, len(inputs)))
    source = np.broadcast_to(np.arange(N, dtype=np.uint8) % 2, (*stack, N)) if kind == "static of two" else None
    weight = QuantizedWeight(codes, scales, source=source, input_scales=shared, format=described)
    return jax.tree.map(jnp.asarray, weight)


def exact_operands(
    m: int, n: int, k: int, kind: str, scale_dtype: str = "float32", *stack: int, group: int = 128
) -> tuple[np.ndarray, QuantizedWeight]:
    """Rows and a weight whose codes are small integers, so that the products of a block are exact in any order."""
    draw = np.random.default_rng(m)
    x = draw.integers(-7, 8, (m, k)).astype(np.float32)
    x[:, ::64] = 7  # the largest of each group, for scales that are powers of two
    group = group if kind == "group" else k
    x *= np.exp2(draw.integers(-3, 4, (m, -(-k // group)))).repeat(group, axis=1)[:, :k]
    numbers = draw.integers(-4, 5, (*stack, n, k)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    scales = draw.uniform(0.5, 2, (*stack, n, -(-k // group))).astype(jnp.dtype(scale_dtype))
    activations: Any = kind.split()[0]
    described = QuantizedFormat("e4m3", k, group, "float32", activations)
    static = {"static": 1, "static of two": 2}.get(kind)
    inputs = None
    if static is not None:
        # Only the largest scale clips no number.
        shape = (*stack, static)
        inputs = np.exp2(-3 - 2 * (np.arange(math.prod(shape)) % 3)).reshape(shape).astype(np.float32)
    source = draw.integers(0, 2, (*stack, n)).astype(np.uint8) if static == 2 else None
    weight = QuantizedWeight(numbers, scales, source=source, input_scales=inputs, format=described)
    return x, jax.tree.map(jnp.asarray, weight)


def added_in_blocks(x: np.ndarray, w: QuantizedWeight) -> np.ndarray:
    """The contract's sums in NumPy, each fma rounded twice like `fma`'s twin."""
    if w.source is not None:
        assert w.input_scales is not None
        by_source = [
            added_in_blocks(x, dataclasses.replace(w, source=None, input_scales=one)) for one in w.input_scales[:, None]
        ]
        return np.choose(np.asarray(w.source), by_source)
    in_groups = w.format.activations == "group"
    size = w.format.group if in_groups else 128
    static = None if w.input_scales is None else w.input_scales[0]
    numbers, scales = (np.asarray(a) for a in quantized_rows(jnp.asarray(x), size if in_groups else x.shape[1], static))
    weights, weight_scales = np.asarray(numbers_of(w)), np.asarray(w.scales, np.float32)
    numbers, acc = numbers.reshape(len(x), -1)[:, : w.shape[1]], np.zeros((len(x), len(weights)), np.float32)
    for block, first in enumerate(range(0, w.shape[1], size)):
        product = np.zeros_like(acc)
        for k in range(first, min(first + size, w.shape[1])):
            product += numbers[:, k : k + 1] * weights[:, k]
        if in_groups:
            product *= scales[:, block : block + 1] * weight_scales[:, block]
        acc = acc + product
    return acc if in_groups else scales * (weight_scales[:, 0] * acc)
