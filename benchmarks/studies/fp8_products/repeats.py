"""Layers of products of codes, back to back as in an engine's step, again and again with the same operands.

A kernel that reads what another one has not yet written, or what it is about to overwrite, has other bits seldom, and
perhaps only right after another kernel. So the layers run in one program.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import detjax
from benchmarks.studies.fp8_products.speeds import QWEN3_8B
from detjax import ops
from detjax.bench import random_codes
from detjax.bench.bits import words
from detjax.operands.products import NormalizedRows
from detjax.operands.quantized_weight import QuantizedWeight

ROWS: Final = (64, 256, 1024, 1088, 5120, 8192, 9216)
"""Numbers of rows: of steps of an engine that computes up to 1024 decodes and 8192 tokens of prompts."""

LAYERS: Final = 6
REPEATS: Final = 100


def repeated_layers(
    shapes: Mapping[str, tuple[int, ...]] = QWEN3_8B,
    rows: Sequence[int] = ROWS,
    *,
    layers: int = LAYERS,
    repeats: int = REPEATS,
) -> Iterator[tuple[str, list[str]]]:
    """Yields, by number of rows, where the first products lie whose bits differ from the first run's.

    Args:
        shapes: the weights of a layer, in the order of their products.
        rows: numbers of rows.
        layers: number of layers.
        repeats: number of runs after the first one.
    """
    products, seeds = list(shapes), itertools.count()
    width = shapes[products[0]][-1]
    weights = [
        [random_codes.drawn_weight(shape, "fp8", "bfloat16", next(seeds)) for shape in shapes.values()]
        for _ in range(layers)
    ]
    run, compare = detjax.jit(products_of_layers), jax.jit(_differences)
    for count in rows:
        x = jax.random.normal(jax.random.key(count), (count, width)).astype(jnp.bfloat16)
        first, faults = run(x, weights), list[str]()
        for repeat in range(repeats):
            again = run(x, weights)
            different = np.asarray(compare(first, again))
            if different.any():
                faults.append(f"repetition {repeat + 1}: {_described(products, first, again, different)}")
        yield f"{layers} layers, {count} rows, {repeats} times", faults


def products_of_layers(x: Array, weights: Sequence[Sequence[QuantizedWeight]]) -> list[Array]:
    """Returns the products of layers without attention: for each, four that take one another's rows."""
    products = []
    norm_weight = jnp.ones(x.shape[-1], x.dtype)
    for qkv, output, gate_up, down in weights:
        y = ops.matmul(NormalizedRows(x, norm_weight), qkv, layout="nk")
        x = ops.matmul(y[:, : x.shape[-1]], output, layout="nk", residual=x)
        z = ops.matmul(NormalizedRows(x, norm_weight), gate_up, layout="nk", activation="silu", gated=True)
        products += [y, x, z]
        x = ops.matmul(z, down, layout="nk", residual=x)
        products.append(x)
    return products


def _differences(first: list[Array], again: list[Array]) -> Array:
    """Returns how many numbers of each product have other bits."""
    return jnp.stack([(words(a) != words(b)).sum(dtype=jnp.int32) for a, b in zip(first, again, strict=True)])


def _described(products: Sequence[str], first: list[Array], again: list[Array], different: np.ndarray) -> str:
    """Describes the first product with other bits: its place, and the rows and columns of these."""
    number = int(np.flatnonzero(different)[0])
    layer, place = divmod(number, len(products))
    rows, columns = np.nonzero(np.asarray(words(first[number]) != words(again[number])))
    return (
        f"{products[place]} of layer {layer}, {len(rows)} numbers in rows {rows.min()} to {rows.max()} and columns "
        f"{columns.min()} to {columns.max()}"
    )
