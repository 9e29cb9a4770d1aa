"""Primitives that widen codes to the matrix unit's row operand, in the registers of the warpgroup that multiplies it.

Widened numbers never pass shared memory, and no warpgroup waits for another one's. A thread of the matrix unit's row
operand has two neighbouring columns of every eight, in two rows, the second eight below the first. So it needs a byte
of each word of eight codes. Four threads share a row and read the same words, which shared memory sends to all of them
at once.

The 64 rows of an operand have a *place* for eight blocks of eight rows: two for each warp. `Fill` says which rows of
codes take these places. A tile of few outputs fills the first place of all four warps, rather than both places of two
warps. Gate and up of few outputs fill the first and the second place, and one instruction multiplies both.
"""

import dataclasses
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.device import SWIZZLE_BYTES, WARPGROUP
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, ROWS, UNIT
from detjax.pallas.hopper.mosaic.registers import (
    array,
    element,
    empty_registers,
    i32,
    int32,
    packed,
    plus,
    shared_address,
    shared_pointer,
    times,
    warp_and_lane,
)
from detjax.pallas.hopper.quantized.widening import Arithmetic, Codes, plain_numbers

BLOCK: Final = 8
"""Rows of a block."""
PLACES: Final = 2
"""Blocks of a warp."""
WARPS: Final = ROWS // (BLOCK * PLACES)
_LOAD_BYTES: Final = 16
"""Most bytes that a thread loads at once."""

FEW_ROWS: Final = WARPS * BLOCK
"""Most rows of each part that fill one place of every warp."""


@dataclasses.dataclass(frozen=True)
class Fill:
    """The rows of codes that fill an operand.

    Attributes:
        packing: the meaning of the packed arrays.
        columns: columns of a stage: whole lines.
        batch: columns whose words a thread loads before it widens any of them: whole lines, which divide a stage.
        width: columns that are widened at once: whole lines, which divide a batch.
        rows: rows of each part, in eights. Places that they leave are filled with the last eight; nobody reads these.
        is_spread: whether the blocks of each part take one place in every warp, gate's the first and up's the second,
            rather than both places of one warp after the other.
        is_early: whether numbers are ready long before they are multiplied, so that empty places must be, too.
    """

    packing: Codes
    columns: int
    batch: int
    width: int
    rows: int
    is_spread: bool
    is_early: bool = False

    @property
    def groups(self) -> int:
        """Groups of a row's columns in a batch."""
        return self.packing.groups(self.batch)

    @property
    def words_of_row(self) -> int:
        """Words that a thread keeps of a row in a batch: its codes, then a scale and a zero point for each group."""
        return self.batch // UNIT + self.groups * (2 if self.packing.has_zeros else 1)

    def words(self, parts: int) -> int:
        """Returns the words that a thread keeps of a batch, from this many parts."""
        return self.words_of_row * (min(parts, PLACES) if self.is_spread else PLACES)

    def sources(self, refs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Returns the arrays of each place, given the arrays of each part; no arrays for a place that stays empty."""
        size = 3 if self.packing.has_zeros else 2
        parts = [refs[i : i + size] for i in range(0, len(refs), size)]
        if self.is_spread:
            return [*parts, *[()] * (PLACES - len(parts))]
        return [parts[0]] * PLACES

    def block(self, warp: Array, place: int) -> Array:
        """Returns the block of rows of a warp's place, which may be beyond the last one."""
        return warp if self.is_spread else warp * PLACES + place


def _types(first_row: Any, group: Any, *refs: Any, fill: Fill, **_: int) -> list[Any]:
    types = [plgpu.RefType(fill.packing.transforms(fill.columns)), plgpu.RefType(), plgpu.RefType()]
    size = 3 if fill.packing.has_zeros else 2
    return [NUMBER, NUMBER, *[types[i % size] for i in range(len(refs))]]


def _words_layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED(shape=(count * WARPGROUP,), vec_size=1)


def _plain_loaded_words(first_row: Any, group: Any, *refs: Any, fill: Fill, first: int) -> Array:
    del first_row, group, first
    parts = len(refs) // (3 if fill.packing.has_zeros else 2)
    return jnp.zeros(fill.words(parts) * WARPGROUP, jnp.int32)  # `widened_rows` reads the arrays again


def _shape_of_words(first_row: Any, group: Any, *refs: Any, fill: Fill, first: int) -> Any:
    del first_row, group, first
    count = fill.words(len(refs) // (3 if fill.packing.has_zeros else 2))
    return plgpu.ShapeDtypeStruct((count * WARPGROUP,), jnp.int32, layout=_words_layout(count))


@primitive(twin=_plain_loaded_words, args=_types, out=_shape_of_words)
def loaded_words(first_row: Any, group: Any, *refs: Any, fill: Fill, first: int) -> Any:
    """Returns the words of a batch that each thread needs for `widened_rows`, all loaded before any is used.

    Args:
        first_row: the warpgroup's first row in the arrays.
        group: the number of the stage's first group in the whole row.
        refs: of each part the codes `[rows, bytes]`, with the transforms of `Codes`, and the scales `[rows, groups]`
            and zero points, if the codes have any, in whole units of the copy engine; see `plain_numbers`.
        fill: the rows that fill the operand.
        first: the batch's first column in the stage.
    """
    warp, lane = warp_and_lane()
    row_of_block, thread = arith.divui(lane, int32(4)), arith.remui(lane, int32(4))
    words, arithmetic = [], Arithmetic(fill.packing)
    for place, source in enumerate(fill.sources(refs)):
        if source:
            block = warp if fill.is_spread else plus(times(warp, PLACES), int32(place))
            block = arith.minui(block, int32(fill.rows // BLOCK - 1))
            row = plus(first_row.registers.item(), times(block, BLOCK), row_of_block)
            words += _code_words(source[0], row, (row_of_block, thread), fill, first)
            scales = _by_group(source[1], row, group, fill, first)
            words += [arithmetic.scale_word(scale) for scale in scales]
            if fill.packing.has_zeros:
                words += [arithmetic.negative_powers(zero) for zero in _by_group(source[2], row, group, fill, first)]
    registers = np.array([packed([word]) for word in words], dtype=object)
    return array(registers, _words_layout(len(words)), is_signed=True)


def _code_words(codes: Any, row: Any, thread_of_block: tuple[Any, Any], fill: Fill, first: int) -> list[Any]:
    """Loads a word for every eight columns: eight codes of four bits, or four of the eight codes of a byte."""
    packing, (row_of_block, thread) = fill.packing, thread_of_block
    row_bytes, start = packing.row_bytes(fill.columns), packing.row_bytes(first)
    base, swizzle = plus(shared_address(codes), times(row, row_bytes)), times(row_of_block, _LOAD_BYTES)
    words = []
    for chunk in range(start, start + packing.row_bytes(fill.batch), _LOAD_BYTES):
        # The hardware's swizzle: chunk c of 16 bytes of row r is at chunk c ^ r.
        at = arith.xori(swizzle, int32(chunk)) if row_bytes == SWIZZLE_BYTES else int32(chunk)
        if packing.bits == 4:
            words += _load(i32(), plus(base, at), 4)
        else:
            # Of 16 columns, the thread has a half of one of the first two words, and of one of the others.
            place = plus(base, at, times(arith.divui(thread, int32(2)), 4))
            words += [*_load(i32(), place, 1), *_load(i32(), plus(place, int32(8)), 1)]
    return words


def _by_group(numbers: Any, row: Any, group: Any, fill: Fill, first: int) -> list[Any]:
    """Loads the numbers of a row's groups in a batch from an array `[rows, groups]`."""
    packing, dtype, (_, width) = fill.packing, numbers.type.element_type, numbers.type.shape
    size, before = mgpu.bytewidth(dtype), 0 if packing.group >= fill.columns else first // packing.group
    # Whole units of the copy engine begin with the stage.
    is_within = packing.groups(fill.columns) < width
    start = arith.remui(group.registers.item(), int32(packing.unit(size))) if is_within else int32(0)
    base = plus(shared_address(numbers), times(plus(times(row, width), start), size))
    count = min(fill.groups, _LOAD_BYTES // size)
    places = range(before, before + fill.groups, count)
    return [x for place in places for x in _load(dtype, plus(base, int32(place * size)), count)]


def _plain_widened_rows(words: Array, first_row: Any, group: Any, *refs: Any, fill: Fill, first: int) -> Array:
    blocks = []
    for place, source in enumerate(fill.sources(refs)):
        row = jnp.arange(WARPS * BLOCK, dtype=jnp.int32)
        block = jnp.minimum(fill.block(row // BLOCK, place), fill.rows // BLOCK - 1)
        rows = first_row + block * BLOCK + row % BLOCK
        if source:
            zeros = source[2] if fill.packing.has_zeros else None
            numbers = plain_numbers(source[0], source[1], group, zeros, packing=fill.packing, columns=fill.columns)
            blocks.append(numbers[rows, first : first + fill.width].reshape(WARPS, 1, BLOCK, -1))
        else:
            blocks.append(jnp.zeros((WARPS, 1, BLOCK, fill.width), ACCUMULATOR))
    tile = lax.optimization_barrier(jnp.concatenate(blocks, axis=1).reshape(ROWS, -1))
    return tile.astype(fill.packing.dtype)


@primitive(
    twin=_plain_widened_rows,
    args=lambda words, *refs, fill, first: [_words_layout(words.shape[0] // WARPGROUP), *_types(*refs, fill=fill)],
    out=lambda *_, fill, first: plgpu.ShapeDtypeStruct(
        (ROWS, fill.width), jnp.dtype(fill.packing.dtype), layout=MATRIX
    ),
)
def widened_rows(words: Any, first_row: Any, group: Any, *refs: Any, fill: Fill, first: int) -> Any:
    """Returns some columns of the row operand, `[ROWS, width]`, each number rounded once.

    Args:
        words: the words of the columns' batch, see `loaded_words`; `first_row`, `group` and `refs` are its operands.
        first_row: the warpgroup's first row.
        group: the stage's first group.
        refs: the arrays of each part. Only the twin reads them.
        fill: the rows that fill the operand.
        first: the first column in the stage.
    """
    del first_row, group
    packing, arithmetic = fill.packing, Arithmetic(fill.packing)
    _, lane = warp_and_lane()
    selector = arithmetic.selector(arith.remui(lane, int32(4)))
    flat = [element(register) for register in words.registers.flat]
    registers = empty_registers(MATRIX, (ROWS, fill.width))
    # A zero that the compiler does not know, since it would fill in constants when it multiplies.
    no_code = arith.ori(selector, int32(0x4444))
    columns, offset = registers.reshape(-1, PLACES), 0
    pair = ir.VectorType.get((2,), ir.Type.parse(arithmetic.constants.name))
    one = ir.VectorType.get((1,), i32())
    for place, source in enumerate(fill.sources(refs)):
        row_words, offset = flat[offset:], offset + (fill.words_of_row if source else 0)
        for unit in range(fill.width // UNIT):
            column = first % fill.batch + unit * UNIT
            word = int32(0)
            if not source and fill.is_early:
                word = arithmetic.bytes_of_word(flat[column // UNIT], no_code)
            if source:
                at = fill.batch // UNIT + (column // packing.group if packing.group < fill.batch else 0)
                negative = row_words[at + fill.groups] if packing.has_zeros else None
                word = arithmetic.pair_of_word(row_words[column // UNIT], selector, row_words[at], negative)
            columns[unit, place] = vector.bitcast(pair, vector.from_elements(one, [word]))
    return array(columns.reshape(registers.shape), MATRIX)


def _plain_gathered(sums: Array, buffer: Any, *, parts: int) -> tuple[Array, ...]:
    blocks = sums.reshape(WARPS, PLACES, BLOCK, -1)
    few = [blocks[:, part].reshape(FEW_ROWS, -1) for part in range(parts)]
    return tuple(jnp.concatenate([x, jnp.zeros_like(x)]) for x in few)


@primitive(
    twin=_plain_gathered,
    args=(MATRIX, plgpu.RefType()),
    out=lambda sums, _, *, parts: (plgpu.ShapeDtypeStruct(sums.shape, ACCUMULATOR, layout=MATRIX),) * parts,
)
def gathered(sums: Any, buffer: Any, *, parts: int) -> Any:
    """Returns each part's sums `[ROWS, columns]` of a spread operand, its rows in order; `FEW_ROWS` have a meaning.

    All threads of the warpgroup meet in it.

    Args:
        sums: the sums of the spread rows.
        buffer: float32 `[2, FEW_ROWS, columns]` in shared memory, of this warpgroup.
        parts: parts, 1 or 2.
    """
    _, width = sums.shape
    warp, lane = warp_and_lane()
    row_of_block, thread = arith.divui(lane, int32(4)), arith.remui(lane, int32(4))
    pair = ir.VectorType.get((2,), ir.F32Type.get())

    def pointer(part: int, row: Any, unit: int) -> Any:
        column = plus(times(thread, 2), int32(unit * UNIT + part * FEW_ROWS * width))
        return shared_pointer(plus(shared_address(buffer), times(plus(times(row, width), column), 4)))

    mgpu.warpgroup_barrier()  # the last tile's sums have been read
    stored_row = plus(times(warp, BLOCK), row_of_block)
    by_unit = sums.registers.reshape(width // UNIT, PLACES)
    for unit in range(width // UNIT):
        for part in range(parts):
            llvm.store(by_unit[unit, part], pointer(part, stored_row, unit))
    mgpu.warpgroup_barrier()
    results = []
    for part in range(parts):
        registers = np.empty((width // UNIT, PLACES), dtype=object)
        for unit in range(width // UNIT):
            for place in range(PLACES):
                row = plus(times(warp, BLOCK * PLACES), row_of_block, int32(place * BLOCK))
                row = arith.remui(row, int32(FEW_ROWS))  # the other rows have no meaning, but an address
                registers[unit, place] = llvm.load(pair, pointer(part, row, unit))
        results.append(array(registers.reshape(sums.registers.shape), MATRIX))
    return tuple(results)


def _load(dtype: Any, address: Any, count: int) -> list[Any]:
    """Loads neighbouring numbers at once."""
    numbers = llvm.load(ir.VectorType.get((count,), dtype), shared_pointer(address))
    return [element(numbers, i) for i in range(count)]
