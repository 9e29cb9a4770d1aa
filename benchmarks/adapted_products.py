"""Products with adapters at the widths of Qwen3-8B, for `repeated_products`: each kernel against sorted rows.

What is expected has its rows sorted by adapter, and separate kernels for the weight, both factors, and their sum.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.repeated_products import ROWS, WIDTHS, Group, Product
from detjax import ops
from detjax.operands.adapted_weight import NO_ADAPTER, AdaptedWeight
from detjax.operands.options import Epilogue
from detjax.operands.products import AdapterOperands, MatmulOperands
from detjax.ops.adapter_places import BlocksOfRows, SortedRows
from detjax.ops.single_adapter import padded_factors
from detjax.pallas.hopper import grouped_matmul, matmul

RANKS: Final = {"queries, keys and values": 48, "output": 16, "gate and up": 32, "down": 16}
"""Ranks of weights if adapters have 16 on each tensor of a checkpoint."""
SLOTS: Final = 8
"""Adapters."""


def wide_groups(
    widths: Mapping[str, tuple[int, ...]] = WIDTHS, rows: Sequence[int] = ROWS, slots: int = SLOTS
) -> Iterator[Group]:
    """Yields the products of rows with different adapters, and of rows that have the same one."""
    for (name, shape), is_one in itertools.product(widths.items(), (False, True)):
        if name not in RANKS:
            continue
        *parts, outputs, inputs = shape
        count = 1 if is_one else slots
        draw = functools.partial(_drawn, tuple(parts), outputs, inputs, RANKS[name], count, max(rows))
        epilogue = Epilogue("silu", gated=True) if parts else Epilogue()
        expected = functools.partial(_by_sorted_rows, epilogue=epilogue)
        multiply = functools.partial(_by_one_kernel if is_one else _by_blocks, epilogue=epilogue)
        full_name = f"{name}, {'one adapter' if is_one else f'{count} adapters'}"
        products = [
            Product(f"{full_name}, {number} rows", number, multiply)
            for number in rows
            if is_one or number <= grouped_matmul.MOST_ROWS_OF_BLOCKS
        ]
        yield Group(full_name, inputs, outputs, jax.eval_shape(draw), draw, expected, products)


def _drawn(parts: tuple[int, ...], outputs: int, inputs: int, ranks: int, slots: int, rows: int) -> AdaptedWeight:
    """Returns a random weight with adapters. Neighbouring rows often have the same one, and some have none."""
    shapes = (*parts, outputs, inputs), (slots, ranks, inputs), (slots, *parts, outputs, ranks)

    @jax.jit
    def drawn() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        pairs = zip(keys, shapes, strict=True)
        return [jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5 for key, shape in pairs]

    random = np.random.default_rng(0)
    slot = np.repeat(random.integers(NO_ADAPTER if slots > 1 else 0, slots, rows), random.integers(1, 12, rows))[:rows]
    value, a, b = drawn()
    scales = jax.random.normal(jax.random.key(1), (slots, *parts, outputs))
    return AdaptedWeight(value, a, b, scales, jnp.asarray(slot, jnp.int32))


def _with_rows(weight: AdaptedWeight, count: int, places: Callable[[jax.Array], Any]) -> AdaptedWeight:
    """Returns the weight for the first rows, in places."""
    assert weight.rows is not None
    rows = weight.rows[:count]
    return dataclasses.replace(weight, rows=rows, places=places(rows))


def _multiply(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    return ops.matmul(x, weight, layout="nk", activation=epilogue.activation, gated=epilogue.gated)


def _by_sorted_rows(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    """Computes sorted rows."""
    places = functools.partial(SortedRows.for_rows, slots=len(weight.scales))
    return _multiply(x, _with_rows(weight, len(x), places), epilogue)


def _by_blocks(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    """Computes blocks of rows where they lie."""
    places = functools.partial(BlocksOfRows.for_rows, size=grouped_matmul.BLOCK)
    return _multiply(x, _with_rows(weight, len(x), places), epilogue)


def _by_one_kernel(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    """Adds the adapter in the kernel of the weight's sums."""
    a, b, scales = padded_factors(weight)
    operands, adapter = MatmulOperands(x, weight.value), AdapterOperands(ops.matmul(x, a, layout="nk"), b, scales)
    options: dict[str, Any] = {"layout": "nk", "epilogue": epilogue, "out_dtype": x.dtype, "keeps": False}
    return matmul.forward_with_adapter(operands, adapter, **options)[0]
