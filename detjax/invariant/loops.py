"""Runs a program for one example in a loop over the examples, so that the compiler treats every example alike.

XLA chooses fusions, vector widths and algorithms by shape. The loop's body has the shapes of one example, so XLA
generates the same code for every number of examples. As in `detjax.portable.tiles`, operands and the trip count pass
through a barrier.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax

from detjax.runtime import varying

_MIN_EXAMPLES: Final = 2
"""Minimum number of examples in an array. XLA's CPU compiler removes a slice that covers the whole array and fuses the
rest differently, so a single example would have other bits than one of two."""


def run(
    program: Callable[..., Sequence[Array]], rows: Sequence[Array], shared: Sequence[Array], sums: int = 0
) -> list[Array]:
    """Returns the results `[B, ...]` of a program, the last `sums` of them summed over the examples.

    Args:
        program: a function of one example's values and of shared ones, in this order.
        rows: arrays `[B, ...]`.
        shared: arrays that all examples share.
        sums: the number of trailing results that are added over the examples in ascending order, at least in float32.
    """
    count = rows[0].shape[0]
    keys = [_key_kind(x) for x in rows]
    data = list(map(_data, rows))
    data = [x if count >= _MIN_EXAMPLES else jnp.concatenate([x] * _MIN_EXAMPLES) for x in data]
    trips, data, shared = lax.optimization_barrier((jnp.int32(count), data, list(shared)))

    def example(index: Array | int) -> tuple[list[Array], list[Array], list[str | None]]:
        values = [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in data]
        values = map(_wrapped, values, keys)
        results = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in program(*values, *shared)]
        kinds = list(map(_key_kind, results))
        results = lax.optimization_barrier(list(map(_data, results)))
        last = len(results) - sums
        return results[:last], results[last:], kinds[:last]

    result_keys: list[str | None] = []

    def shapes() -> tuple[list[Array], list[Array]]:
        mapped, added, kinds = example(0)
        result_keys[:] = kinds
        return mapped, added

    mapped, added = jax.eval_shape(shapes)
    room = max(count, _MIN_EXAMPLES)
    start = (
        [jnp.zeros((room, *x.shape), x.dtype) for x in mapped],
        [jnp.zeros(x.shape, at_least_float32(x.dtype)) for x in added],
    )

    def step(index: Array, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        mapped, added, _ = example(index)
        out = [lax.dynamic_update_index_in_dim(o, x, index, 0) for o, x in zip(carry[0], mapped, strict=True)]
        return out, [total + x.astype(total.dtype) for total, x in zip(carry[1], added, strict=True)]

    out, totals = varying.fori_loop(0, trips, step, start)
    out = [x[:count] for x in out]
    return [*map(_wrapped, out, result_keys), *totals]


def at_least_float32(dtype: Any) -> Any:
    """Returns the dtype in which numbers of a floating-point dtype are added."""
    return jnp.float32 if jnp.dtype(dtype).itemsize < 4 else dtype


def _data(x: Array) -> Array:
    """Returns the data of a typed random key; any other array unchanged."""
    return x if _key_kind(x) is None else jax.random.key_data(x)


def _wrapped(data: Array, kind: str | None) -> Array:
    return data if kind is None else jax.random.wrap_key_data(data, impl=kind)


def _key_kind(x: Any) -> str | None:
    """Returns the implementation of a typed random key; None for any other array."""
    return str(jax.random.key_impl(x)) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None
