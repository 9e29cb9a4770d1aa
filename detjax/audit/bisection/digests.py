"""Digests of arrays on the device: 32 bits per block, the same in every order of computation.

    digest(block) = sum of mix(bits[i] + i * GOLDEN) over its elements i, modulo 2^32

Sums of integers that wrap are exact in every order, so a digest does not depend on the device, on fusion or on tiling.
`mix` is a bijection of 32 bits: changing one element of a block always changes its digest, and changing several does
with probability 1 - 2^-32. Digests find defects; they do not protect against deliberate collisions.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.invariant.places import Place, Rows

_GOLDEN: Final = np.uint32(0x9E3779B9)
_FACTOR: Final = np.uint32(0x7FEB352D)
_MAX_BLOCKS: Final = 64
_SMALLEST_BLOCK: Final = 256
_LANES: Final = 128
_MAX_TOGETHER: Final = 8
"""Maximum number of arrays that one kernel reads; all are kept until the last one is computed."""
_LARGE: Final = 1 << 22
"""Number of words from which an array gets its own kernel: keeping it would cost more than a launch."""


def block_size(elements: int) -> int:
    """Returns the block size for rows of `elements` elements: a power of two that gives at most 64 blocks."""
    return max(_SMALLEST_BLOCK, 1 << max(0, math.ceil(elements / _MAX_BLOCKS) - 1).bit_length())


def in_rows(x: Array, place: Place, batch: int | None) -> Array:
    """Returns an array as `[B, ...]`; an array without rows gets B = 1.

    A row's elements have the order of a batch of one.
    """
    if not isinstance(place, Rows) or batch is None:
        return x[None]
    before, after = x.shape[: place.axis], x.shape[place.axis + 1 :]
    x = jnp.moveaxis(x.reshape(*before, place.outer, batch, place.inner, *after), place.axis + 1, 0)
    parts = [size for size in (place.outer, place.inner) if size > 1]
    return x.reshape(batch, *before, *parts, *after)


def with_row(x: Array, place: Rows, batch: int, row: int, value: Array) -> Array:
    """Returns an array with one row replaced by `value`, in the element order of `in_rows`."""
    shape = x.shape
    split = (*shape[: place.axis], place.outer, batch, place.inner, *shape[place.axis + 1 :])
    rows = jnp.moveaxis(x.reshape(split), place.axis + 1, 0)
    rows = rows.at[row].set(value.reshape(rows.shape[1:]))
    return jnp.moveaxis(rows, 0, place.axis + 1).reshape(shape)


def digest(rows: Array) -> Array:
    """Returns the digests, uint32 `[B, blocks]`, of the blocks of each row of an array `[B, ...]` of any dtype."""
    return digests([rows])[0]


def digests(arrays: Sequence[Array]) -> list[Array]:
    """Returns the digests of each array. Arrays whose rows have blocks of one size share kernels on an accelerator."""
    words = [_words(rows) for rows in arrays]
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, x in enumerate(words):
        alike.setdefault(x.shape, []).append(number)
    by_number: dict[int, Array] = {}
    for shape, numbers in alike.items():
        for group in itertools.batched(numbers, _MAX_TOGETHER if math.prod(shape) < _LARGE else 1):
            sums = lax.platform_dependent([words[k] for k in group], cpu=_one_by_one, default=_together)
            by_number.update(zip(group, sums, strict=True))
    return [by_number[number] for number in range(len(arrays))]


def _together(words: list[Array]) -> list[Array]:
    """Returns the digests of arrays of one shape: XLA's GPU compiler fuses the concatenation and the sum."""
    mixed = _mixed(jnp.stack(words, axis=1))
    return [*jnp.moveaxis(jnp.sum(mixed, axis=(3, 4), dtype=jnp.uint32), 1, 0)]


def _one_by_one(words: list[Array]) -> list[Array]:
    """Returns the same digests: XLA's CPU compiler vectorizes sums of integers along all axes except the last."""
    # Without the barrier the compiler merges the two sums, which takes three times as long.
    lanes = [lax.optimization_barrier(jnp.sum(_mixed(x), axis=2, dtype=jnp.uint32)) for x in words]
    return [jnp.sum(x, axis=2, dtype=jnp.uint32) for x in lanes]


def _mixed(words: Array) -> Array:
    """Returns the mixed words of `[..., elements, words]` as `[..., blocks, rows, lanes]`, padded with zeros."""
    *others, elements, parts = words.shape
    size = block_size(elements)
    blocks = max(1, math.ceil(elements / size))
    words = jnp.pad(words, [*[(0, 0)] * len(others), (0, blocks * size - elements), (0, 0)])
    words = words.reshape(*others, blocks, size * parts // _LANES, _LANES)
    first = lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 2) * np.uint32(_LANES)
    mixed = words + (first + lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint32(16))) * _FACTOR
    return mixed ^ (mixed >> np.uint32(15))


def plain(x: Any) -> Array:
    """Returns the data of a typed random key; any other array unchanged."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jnp.asarray(x)


def _words(x: Array) -> Array:
    """Returns the bits of each element, uint32 `[B, elements, words]`."""
    batch, elements = x.shape[0], math.prod(x.shape[1:])
    x = x.reshape(batch, elements)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=2)
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint32)
    elif x.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
    else:
        width = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).bits
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    return bits.reshape(batch, elements, -1) if elements else jnp.zeros((batch, 0, 1), jnp.uint32)
