"""The updates of a chunk's tokens by forward substitution: each depends on all earlier ones (a primitive).

The matrix unit cannot be used: the contract adds the terms of earlier tokens one at a time, in float32. Columns are
independent, so a thread has one column, and of each block of `_BLOCK` rows the first or the second half. It advances
the sums of the half's `_HALF` rows together, which gives independent fmas to hide the latency of each chain.
"""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import NUMBER
from detjax.pallas.hopper.mosaic.registers import as_index, index, int32, unhoisted_thread

COLUMNS: Final = 64
"""Value columns of a warpgroup."""
_HALVES = WARPGROUP // COLUMNS
_HALF = 8
_BLOCK = _HALVES * _HALF
_STEP = 4
"""Earlier tokens whose weights a thread loads at once."""


def _plain_substitute(rest: Any, weights: Any, begin: Array, end: Array, *, dtype: Any) -> None:
    a, kept = weights[...], rest[...]
    row = jnp.arange(DELTA_CHUNK, dtype=jnp.int32)[:, None]

    def step(j: Array, u: Array) -> Array:
        here = u[j].astype(dtype).astype(ACCUMULATOR)
        here = jnp.where(j < begin, kept[j], jnp.where(j < end, here, 0.0))
        # Rounds twice, like `fma`'s twin.
        product = lax.optimization_barrier(a[:, j][:, None] * here[None])
        return jnp.where(row == j, here, jnp.where((row > j) & (row >= begin), u - product, u))

    rest[...] = lax.fori_loop(0, DELTA_CHUNK, step, kept)


@primitive(twin=_plain_substitute, args=(plgpu.RefType(), plgpu.RefType(), NUMBER, NUMBER))
def substitute(rest: Any, weights: Any, begin: Any, end: Any, *, dtype: Any) -> None:
    """Computes updates from residuals, in place, and ends with a barrier of all threads.

    Args:
        rest: shared memory `[DELTA_CHUNK, COLUMNS]`, float32: updates up to row `begin`, then residuals. Rows from
            `end` on become zeros.
        weights: shared memory `[DELTA_CHUNK, DELTA_CHUNK]`, float32; only numbers below the diagonal are used.
        begin: the first computed row.
        end: the end of the computed rows.
        dtype: the dtype that updates are rounded to.
    """
    # Constants are added to index values, so that they become offsets of the instructions instead of separate
    # addresses.
    begin, end = (as_index(x.registers.item()) for x in (begin, end))
    thread = unhoisted_thread()
    column = as_index(arith.remui(thread, int32(COLUMNS)))
    half = as_index(arith.divui(thread, int32(COLUMNS)))
    float32 = ir.F32Type.get()
    narrow = ir.BF16Type.get() if jnp.dtype(dtype) == jnp.bfloat16 else ir.F16Type.get()
    several = ir.VectorType.get((_STEP,), float32)

    def load_weights(row: Any, first: Any) -> list[Any]:
        """Returns the weights of `_STEP` earlier tokens for a row. All threads of a half read the same: a broadcast."""
        values = vector.load(several, weights, [row, first])
        return [vector.extract(values, [], ir.DenseI64ArrayAttr.get([i])) for i in range(_STEP)]

    def subtract(sums: list[Any], rows: list[Any], first: Any, updates: list[Any]) -> list[Any]:
        """Returns the sums minus the terms of `_STEP` earlier tokens."""
        weights_by_row = [load_weights(row, first) for row in rows]
        for i, u in enumerate(updates):
            sums = [math_dialect.fma(arith.negf(a[i]), u, total) for a, total in zip(weights_by_row, sums, strict=True)]
        return sums

    def load_updates(first: Any) -> list[Any]:
        return [memref.load(rest, [arith.addi(first, index(i)), column]) for i in range(_STEP)]

    def finish(sums: list[Any], kept: list[Any], rows: list[Any], first: Any) -> None:
        """Stores the updates of a half, whose rows start at `first`."""
        weights_by_row = [
            [a for i in range(0, _HALF, _STEP) for a in load_weights(row, arith.addi(first, index(i)))] for row in rows
        ]
        for i, row in enumerate(rows):
            u = arith.extf(float32, arith.truncf(narrow, sums[i]))
            is_kept = arith.cmpi(arith.CmpIPredicate.slt, row, begin)
            is_row = arith.cmpi(arith.CmpIPredicate.slt, row, end)
            u = arith.select(is_kept, kept[i], arith.select(is_row, u, mgpu.c(0.0, float32)))
            memref.store(u, rest, [row, column])
            for other in range(i + 1, _HALF):
                sums[other] = math_dialect.fma(arith.negf(weights_by_row[other][i]), u, sums[other])

    first_block = arith.muli(arith.divui(begin, index(_BLOCK)), index(_BLOCK))
    last = arith.muli(arith.ceildivui(end, index(_BLOCK)), index(_BLOCK))
    blocks = scf.ForOp(first_block, last, index(_BLOCK))
    with ir.InsertionPoint(blocks.body):
        first = blocks.induction_variable
        first_of_half = arith.addi(first, arith.muli(half, index(_HALF)))
        rows = [arith.addi(first_of_half, index(i)) for i in range(_HALF)]
        kept = [memref.load(rest, [row, column]) for row in rows]
        earlier = scf.ForOp(index(0), first, index(_STEP), kept)
        with ir.InsertionPoint(earlier.body):
            j = earlier.induction_variable
            scf.yield_(subtract(list(earlier.inner_iter_args), rows, j, load_updates(j)))
        sums = list(earlier.results)
        # Both halves have subtracted the terms of earlier blocks. The first finishes its rows; after the barrier the
        # second reads them and finishes its own; after the second barrier the next block may read both.
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, half, index(0))):
            finish(list(sums), kept, rows, first)
        mgpu.warpgroup_barrier()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, half, index(0))):
            for i in range(0, _HALF, _STEP):
                place = arith.addi(first, index(i))
                sums = subtract(sums, rows, place, load_updates(place))
            finish(list(sums), kept, rows, first_of_half)
        mgpu.warpgroup_barrier()
        scf.yield_([])
    # Rows of other blocks are updates of an earlier call, or already zeros.
