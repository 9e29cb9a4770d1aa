"""Rows and weights of products with quantized activations, for tests of all backends."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight

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
