"""Copies of a chunk's rows between memory and the shared memory that the matrix unit reads (primitives).

A chunk's rows come from two sources: rows of earlier calls from the state's ring, the others from the call's tokens.
Either may start at any row, so the copy engine, which moves rows in groups of 8, cannot be used; threads copy 16 bytes
each by `cp.async`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from detjax.contract import ACCUMULATOR, DELTA_CHUNK, LOG2_E
from detjax.operands.numerics import LOWEST
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import NUMBER, swizzled
from detjax.pallas.hopper.mosaic.registers import as_index, index, int32, unhoisted_thread

_LINE = 64
"""Elements of a swizzled line: 128 bytes."""
_PIECE = 8
"""Elements that a thread moves at once: 16 bytes."""


def _plain_load_rows(
    kept: Any, new: Any, target: Any, place: Array, first: Array, begin: Array | int, end: Array | int
) -> None:
    row = jnp.arange(target.shape[0], dtype=jnp.int32)[:, None]
    old = kept[...][(place + row[:, 0]) % kept.shape[0]]
    # Row numbers beyond the requested rows are arbitrary.
    fresh = new[...][jnp.clip(first + row[:, 0], 0, new.shape[0] - 1)]
    zeros = jnp.zeros(target.shape, target.dtype)
    target[...] = jnp.where(row < begin, old, jnp.where(row < end, fresh, zeros))


@primitive(
    twin=_plain_load_rows,
    args=lambda kept, new, target, *_: (
        plgpu.RefType(),
        plgpu.RefType(),
        plgpu.RefType(swizzled(target.shape[1])),
        *(NUMBER,) * 4,
    ),
)
def load_rows(kept: Any, new: Any, target: Any, place: Any, first: Any, begin: Any, end: Any) -> None:
    """Starts to load rows, followed by zeros; `await_rows` waits for them.

    Args:
        kept: the ring `[n, W]` in memory, of 2-byte elements, whose rows from `place` on are loaded first.
        new: memory `[N, W]`, whose row `first + r` becomes row r; `first` may be negative.
        target: shared memory, `swizzled(W)`: `[DELTA_CHUNK, W]` for a chunk.
        place: the place of the chunk's first row in the ring.
        first: see `new`.
        begin: the first row from `new`.
        end: the end of the rows from `new`.
    """
    place, first, begin, end = (x.registers.item() for x in (place, first, begin, end))
    for row, column, address in _pieces(target):
        is_kept = arith.cmpi(arith.CmpIPredicate.slt, row, begin)
        ring_row = arith.remui(arith.addi(place, row), int32(kept.type.shape[0]))
        # Addresses stay within the arrays even where nothing is read.
        new_row = arith.maxsi(arith.addi(first, row), int32(0))
        new_row = arith.minsi(new_row, int32(new.type.shape[0] - 1))
        source = arith.select(is_kept, _address(kept, ring_row, column), _address(new, new_row, column))
        is_row = arith.cmpi(arith.CmpIPredicate.slt, row, arith.maxsi(begin, end))
        # `cp.async` of 0 bytes fills the 16 bytes with zeros, so padding rows need no branch.
        size = arith.select(is_row, int32(16), int32(0))
        mgpu.inline_ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", address, source, size, has_side_effects=True)


def _plain_await_rows() -> None:
    """Does nothing: the interpreter's loads are synchronous."""


@primitive(twin=_plain_await_rows)
def await_rows() -> None:
    """Waits for the loads that the thread started. Other threads' loads are complete after a barrier of all threads."""
    mgpu.inline_ptx("cp.async.wait_all;", has_side_effects=True)


def _copy_row(row: Array, _: Any, *, source: Any, target: Any, place: Array) -> Any:
    target[lax.rem(place + row, jnp.int32(target.shape[0]))] = source[row]
    return _


def _plain_store_rows(source: Any, target: Any, place: Array, begin: Array, end: Array) -> None:
    copy = functools.partial(_copy_row, source=source, target=target, place=jnp.asarray(place, jnp.int32))
    lax.fori_loop(jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32), copy, None)


@primitive(
    twin=_plain_store_rows,
    args=lambda source, *_: (plgpu.RefType(swizzled(source.shape[1])), plgpu.RefType(), *(NUMBER,) * 3),
)
def store_rows(source: Any, target: Any, place: Any, begin: Any, end: Any) -> None:
    """Stores rows `begin` to `end` (exclusive) of shared memory `[DELTA_CHUNK, W]` in a ring `[n, W]` in memory.

    Row r becomes row `(place + r) % n`; `place + r` is not negative for stored rows.
    """
    place, begin, end = (x.registers.item() for x in (place, begin, end))
    piece = ir.VectorType.get((_PIECE,), ir.MemRefType(source.type).element_type)
    for row, column, address in _pieces(source):
        is_stored = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, row, begin), arith.cmpi(arith.CmpIPredicate.slt, row, end)
        )
        with mgpu.when(is_stored):
            ring_row = arith.remui(arith.addi(place, row), int32(target.type.shape[0]))
            value = llvm.load(piece, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address))
            vector.store(value, target, [as_index(ring_row), as_index(column)])


def _plain_load_gates(kept: Any, g: Any, beta: Any, decays: Any, rates: Any, *rows: Array) -> None:
    place, first, begin, end = rows
    row = jnp.arange(DELTA_CHUNK, dtype=jnp.int32)
    source = jnp.clip(first + row, 0, g.shape[0] - 1)
    is_new = (row >= begin) & (row < end)
    # The maximum keeps the product from being fused with the addition.
    steps = jnp.where(is_new, jnp.maximum(g[...][source] * LOG2_E, LOWEST), 0.0)
    before = kept[...][(place + row) % kept.shape[0]]

    def add(total: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        step, old, is_kept = token
        total = jnp.where(is_kept, old, total + step)
        return total, total

    decays[...] = lax.scan(add, jnp.zeros((), ACCUMULATOR), (steps, before, row < begin))[1]
    rates[...] = jnp.where(is_new, beta[...][source], 0.0)


@primitive(twin=_plain_load_gates, args=(*(plgpu.RefType(),) * 5, *(NUMBER,) * 4))
def load_gates(kept: Any, g: Any, beta: Any, decays: Any, rates: Any, *rows: Any) -> None:
    """Loads a chunk's sums of decays and its rates into shared memory.

    It has a barrier of all threads, and a second one must follow before the results are read.

    Args:
        kept: the ring `[n]` of sums in memory.
        g: logarithms of decays, `[N]` in memory.
        beta: rates, `[N]` in memory.
        decays: shared memory `[DELTA_CHUNK]`; after the last row the sum stays constant.
        rates: shared memory `[DELTA_CHUNK]`; zeros except for new rows.
        rows: `place`, `first`, `begin` and `end` of `load_rows`.
    """
    place, first, begin, end = (x.registers.item() for x in rows)
    float32 = ir.F32Type.get()
    zero = mgpu.c(0.0, float32)
    thread = unhoisted_thread()
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, int32(DELTA_CHUNK))):
        is_kept = arith.cmpi(arith.CmpIPredicate.slt, thread, begin)
        is_new = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, thread, begin), arith.cmpi(arith.CmpIPredicate.slt, thread, end)
        )
        ring_row = as_index(arith.remui(arith.addi(place, thread), int32(kept.type.shape[0])))
        new_row = arith.maxsi(arith.addi(first, thread), int32(0))
        new_row = as_index(arith.minsi(new_row, int32(g.type.shape[0] - 1)))
        step = _product(memref.load(g, [new_row]), mgpu.c(float(LOG2_E), float32))
        step = arith.select(is_new, step, zero)
        value = arith.select(is_kept, memref.load(kept, [ring_row]), step)
        memref.store(value, decays, [as_index(thread)])
        memref.store(arith.select(is_new, memref.load(beta, [new_row]), zero), rates, [as_index(thread)])
    # The contract adds decays left to right: one thread walks the 64 numbers, which are already in shared memory, four
    # per load.
    mgpu.warpgroup_barrier()
    four = ir.VectorType.get((4,), float32)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, int32(0))):
        total = zero
        for row in range(0, DELTA_CHUNK, 4):
            values, sums = vector.load(four, decays, [index(row)]), []
            for i in range(4):
                value = vector.extract(values, [], ir.DenseI64ArrayAttr.get([i]))
                is_kept = arith.cmpi(arith.CmpIPredicate.slt, int32(row + i), begin)
                total = arith.select(is_kept, value, arith.addf(total, value))
                sums.append(total)
            vector.store(vector.from_elements(four, sums), decays, [index(row)])


def _plain_load_token_gates(kept: Any, step: Array, decays: Any, place: Array, begin: Array) -> None:
    row = jnp.arange(DELTA_CHUNK, dtype=jnp.int32)
    before = kept[...][(place + row) % kept.shape[0]]
    total = jnp.where(begin > 0, before[jnp.clip(begin - 1, 0)], 0.0) + step
    decays[...] = jnp.where(row < begin, before, jnp.where(row == begin, total, 0.0))


@primitive(twin=_plain_load_token_gates, args=(plgpu.RefType(), NUMBER, plgpu.RefType(), NUMBER, NUMBER))
def load_token_gates(kept: Any, step: Any, decays: Any, place: Any, begin: Any) -> None:
    """Loads the sums of decays for a single new token, at row `begin` if that is in the chunk; see `load_gates`.

    `step` is the token's term of the sum. Sums after the token are zeros.
    """
    step, place, begin = (x.registers.item() for x in (step, place, begin))
    zero = mgpu.c(0.0, ir.F32Type.get())
    thread = unhoisted_thread()
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, int32(DELTA_CHUNK))):
        # The token's own thread loads the sum before the token.
        row = arith.minsi(thread, arith.maxsi(arith.subi(begin, int32(1)), int32(0)))
        value = memref.load(kept, [as_index(arith.remui(arith.addi(place, row), int32(kept.type.shape[0])))])
        before = arith.select(arith.cmpi(arith.CmpIPredicate.sgt, begin, int32(0)), value, zero)
        is_token = arith.cmpi(arith.CmpIPredicate.eq, thread, begin)
        total = arith.select(is_token, arith.addf(before, step), zero)
        is_kept = arith.cmpi(arith.CmpIPredicate.slt, thread, begin)
        memref.store(arith.select(is_kept, value, total), decays, [as_index(thread)])


def _plain_store_gates(source: Any, target: Any, first: Array, begin: Array, end: Array) -> None:
    def copy(row: Array, _: Any) -> Any:
        target[first + row] = source[row]
        return _

    lax.fori_loop(jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32), copy, None)


@primitive(twin=_plain_store_gates, args=(plgpu.RefType(), plgpu.RefType(), *(NUMBER,) * 3))
def store_gates(source: Any, target: Any, first: Any, begin: Any, end: Any) -> None:
    """Stores numbers `begin` to `end` (exclusive) of shared memory `[DELTA_CHUNK]` in memory `[N]`, from `first` on."""
    first, begin, end = (x.registers.item() for x in (first, begin, end))
    thread = unhoisted_thread()
    is_stored = arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, thread, begin), arith.cmpi(arith.CmpIPredicate.slt, thread, end)
    )
    with mgpu.when(is_stored):
        value = memref.load(source, [as_index(thread)])
        memref.store(value, target, [as_index(arith.addi(first, thread))])


def _pieces(ref: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields row, first column and address of each piece of `[rows, W]` that the thread moves."""
    eighths, lines, _, _ = ref.type.shape
    (down, across, _, _), _ = ref.type.get_strides_and_offset()
    pieces = lines * _LINE // _PIECE
    thread = unhoisted_thread()
    # The 128 threads cover a multiple of 8 rows at a time. The swizzle repeats every 8 rows, so a thread's place within
    # its line is computed once. Neighbouring threads move neighbouring pieces: memory accesses coalesce, and the 8
    # threads of a line write to all 32 banks.
    row, piece = arith.divui(thread, int32(pieces)), arith.remui(thread, int32(pieces))
    # With more threads than pieces, some threads move the same piece.
    row = arith.remui(row, int32(8 * eighths))
    in_line = arith.remui(piece, int32(_LINE // _PIECE))
    in_tile = arith.remui(row, int32(8))
    address = llvm.ptrtoint(int32(0).type, mgpu.memref_ptr(ref))
    address = arith.addi(address, arith.muli(arith.divui(row, int32(8)), int32(2 * down)))
    address = arith.addi(address, arith.muli(arith.divui(piece, int32(_LINE // _PIECE)), int32(2 * across)))
    address = arith.addi(address, arith.muli(in_tile, int32(128)))
    address = arith.addi(address, arith.muli(arith.xori(in_line, in_tile), int32(16)))
    column = arith.muli(piece, int32(_PIECE))
    rows = WARPGROUP // pieces
    assert rows % 8 == 0
    for start in range(0, 8 * eighths, rows):
        yield arith.addi(row, int32(start)), column, arith.addi(address, int32(start // 8 * 2 * down))


def _address(ref: Any, row: Any, column: Any) -> Any:
    """Returns the address of an element of memory `[N, W]`, as an integer."""
    i64 = ir.IntegerType.get_signless(64)
    (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    offset = arith.addi(arith.muli(arith.extsi(i64, row), mgpu.c(stride, i64)), arith.extsi(i64, column))
    return arith.addi(llvm.ptrtoint(i64, mgpu.memref_ptr(ref)), arith.muli(offset, mgpu.c(2, i64)))


def _product(x: Any, y: Any) -> Any:
    """Returns the rounded product. As an instruction of its own it cannot be fused with a subsequent addition."""
    return mgpu.inline_ptx("mul.rn.f32 $0, $1, $2;", x, y, result_types=x.type)
