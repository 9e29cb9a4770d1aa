"""Quantized keys and values on Hopper: codes and scales in shared memory become what the matrix unit reads.

Decode does so beside its products, and reads a page's codes from memory once. In prefill many tiles of queries read
each page, and the matrix unit is what is waited for: a kernel of its own turns the pages that will be read into numbers
before, once. It takes room for these numbers, of one layer, for as long as that runs.

A warpgroup takes 64 rows of a page: each thread loads eight codes at once, makes float32 numbers of them, multiplies by
the row's scale, rounds, and stores eight numbers at once, where no two threads meet in a bank.
"""

import functools
import math
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import fragmented_array as mgpu_layouts
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR, KV_BLOCK, Q4_GROUP
from detjax.options import KVQuantization
from detjax.pallas.hopper.attention.queries_on_rows import ROWS, line, swizzled
from detjax.portable.quantized_kv import QuantizedPages
from detjax.portable.quantized_kv import layout as pages_layout

_COLUMNS: Final = 128
"""Columns that are worked on at once: half as many numbers in each thread's registers."""


def page_buffers(kind: KVQuantization, slots: int, width: int) -> tuple[Any, Any]:
    """Codes and scales of `slots` pages of one head in shared memory."""
    codes, scales = pages_layout((slots, 1, KV_BLOCK, width), kind)
    row, transforms = _columns(width) // 2 if kind == "q4_0" else line(width), ()
    if row >= 32:  # else rows are an odd number of 16 bytes, of which no two threads meet in a bank as they lie
        tiling = plgpu.TilingTransform((8, row))  # pyright: ignore[reportAbstractUsage]
        transforms = tiling, plgpu.SwizzleTransform(row)  # pyright: ignore[reportAbstractUsage]
    return (
        plgpu.SMEM((slots, *codes.shape[2:]), codes.dtype, transforms=transforms),
        plgpu.SMEM((slots, *scales.shape[2:]), scales.dtype),
    )


def page_bytes(kind: KVQuantization, width: int) -> int:
    """Bytes of codes and scales of one head of a page."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in pages_layout((1, 1, KV_BLOCK, width), kind))


def dequantize(kind: KVQuantization, codes: Any, scales: Any, target: Any, first_row: Any) -> None:
    """Writes the numbers of `ROWS` rows of a page, for the matrix unit once shared memory is committed.

    Args:
        kind: of the page.
        codes: the page's, in shared memory as `page_buffers` lays it out.
        scales: the page's.
        target: the page's numbers, `[KV_BLOCK, width]` swizzled.
        first_row: of these.
    """
    width = target.shape[-1]
    rows, size, layout = pl.ds(first_row, ROWS), _columns(width), _layout(kind, width)
    for first in range(0, width, size):
        packed = size * codes.shape[-1] // width
        loaded = codes.at[rows, pl.ds(first * packed // size, packed)]
        if kind == "q4_0":
            groups = [scales.at[first // Q4_GROUP + group, rows] for group in range(size // Q4_GROUP)]
        else:
            groups = [scales.at[rows]]
        numbers = products(
            kind,
            plgpu.load(loaded, layout=layout, optimized=False),
            [plgpu.load(group, layout=layout.reduce(1), optimized=False).astype(ACCUMULATOR) for group in groups],
            layout,
        )
        target[rows, pl.ds(first, size)] = numbers.astype(target.dtype)


def read_pages(pages: QuantizedPages, page_table: Array, first: Array, end: Array, dtype: Any) -> tuple[Array, Array]:
    """Pages of numbers `[n, h, S, K]`, and the page table of the requests in them; pages that are not read are garbage.

    Args:
        pages: keys or values.
        page_table: `[B, p]`.
        first: of each request's pages the first that is read, int32 `[B]`.
        end: behind the last one.
        dtype: of the numbers.
    """
    (batch, blocks), (count, kv_heads, _, width), kind = page_table.shape, pages.shape, pages.kind
    # A pool that is no larger than what the requests may need keeps its page table.
    keeps_table = count <= batch * blocks
    count = count if keeps_table else batch * blocks

    def body(*refs: Any) -> None:
        codes_gmem, scales_gmem, table, first, end, out, codes, scales, numbers, loaded = refs
        request, block, head = (lax.axis_index(name) for name in ("request", "block", "head"))

        @pl.when((block >= first[request]) & (block < end[request]))
        def _() -> None:
            page = table[request, block]
            for source, target in ((codes_gmem, codes), (scales_gmem, scales)):
                plgpu.copy_gmem_to_smem(source.at[page, head], target.at[0], loaded)
            plgpu.barrier_wait(loaded)
            for row in range(0, KV_BLOCK, ROWS):
                dequantize(kind, codes.at[0], scales.at[0], numbers, row)
            plgpu.commit_smem()
            place = page if keeps_table else request * blocks + block
            plgpu.copy_smem_to_gmem(numbers, out.at[place, head])
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, kv_heads, KV_BLOCK, width), dtype),
        grid=(batch, blocks, kv_heads),
        grid_names=("request", "block", "head"),
        scratch_types=[
            *page_buffers(kind, 1, width),
            plgpu.SMEM((KV_BLOCK, width), dtype, transforms=swizzled(width)),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="attention_dequantize",
    )
    numbers = kernel(pages.codes, pages.scales, page_table, first, end)
    own = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    return numbers, page_table if keeps_table else own


def _columns(width: int) -> int:
    """What a row's columns are cut into, whole lines of the swizzle of 1 byte elements and of 2 byte elements."""
    return math.gcd(width, _COLUMNS)


def _layout(kind: KVQuantization, width: int) -> Any:
    """Which threads have which codes of `ROWS` rows, and then the numbers."""
    if kind == "q4_0":
        return plgpu.Layout.WGMMA_8BIT  # four bytes at once, of a group's 16
    # Eight at once: what eight threads store fills all banks, whole lines of the swizzle.
    columns = line(width)
    rows = 256 // columns  # of a warp, at once
    tiles = [(ROWS, columns), (16, columns), (rows, columns), (8,)]
    if rows == 16:
        del tiles[2]
    tiling = mgpu_layouts.Tiling(tuple(tiles))
    return plgpu.Layout.TILED(tiling, warp_dims=(1 - 2 * len(tiles),), lane_dims=(-3, -2), vector_dim=-1)


def products(kind: KVQuantization, codes: Array, scales: list[Array], layout: Any) -> Array:
    """Codes times scales, float32 `[ROWS, n]`, rounded once.

    Args:
        kind: of the codes.
        codes: `[ROWS, n]`, of "q4_0" two to a byte, `[ROWS, n / 2]`.
        scales: float32 `[ROWS]`, of "q4_0" one for each group of columns.
        layout: of codes and products; that of the scales is its rows'.
    """
    width = codes.shape[1] * (2 if kind == "q4_0" else 1)

    def multiplied(_: Any, codes: Any, *scales: Any) -> Any:
        matrix = layout.to_mgpu()
        columns = width // len(scales)

        def by_column(of_rows: Any) -> Any:
            # A group's columns are neighbours, as registers are.
            spread = [x.broadcast_in_dim((ROWS, columns), (0,), matrix) for x in of_rows]
            return np.concatenate([x.registers for x in spread], axis=1)

        factors = by_column(scales)
        if kind == "q4_0":
            # Exact: code and scale have 4 and 11 bits, and `_NIBBLE` times the scale, 16.
            offsets = by_column([scale * -_NIBBLE for scale in scales])
            registers = _map(math_dialect.fma, _nibbles(codes), factors, offsets)
        else:
            registers = _map(arith.mulf, _bytes(kind, codes), factors)
        return FragmentedArray(_registers=registers, _layout=matrix, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((ROWS, width), ACCUMULATOR, layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout, *(layout.reduce(1),) * len(scales)), return_type=result)(
        multiplied
    )
    return inlined(codes, *scales)


# --- registers, each a few numbers ------------------------------------------------------------------------------------
# The hardware's own conversion of an integer has a quarter of the speed of other instructions. A code that is put into
# the bits of a power of two, where these count in steps of 1, is a number that is larger by this power.


def _bytes(kind: KVQuantization, codes: Any) -> Any:
    """int8 or float8_e4m3fn as float32."""
    if kind == "fp8_e4m3":
        return codes.astype(ir.F16Type.get()).astype(ir.F32Type.get()).registers
    float32 = ir.F32Type.get()
    offset = arith.constant(float32, ir.FloatAttr.get(float32, float(2**23 + 128)))

    def numbers(register: Any) -> Any:
        found = []
        for word in _words(register):
            word = arith.xori(word, _constant(0x80808080))  # each byte 128 more
            found += [arith.subf(x, offset) for x in _each_byte(word, 0x4B000000, "754{}")]
        return _vector(found)

    return _map(numbers, codes.registers)


_NIBBLE: Final = 128.0 + 8.0
"""What `_nibbles` adds to a code."""


def _nibbles(codes: Any) -> Any:
    """Two codes to a byte as float32, each `_NIBBLE` more."""

    def numbers(shift: int, register: Any) -> Any:
        (word,) = _words(register)
        word = arith.andi(arith.shrui(word, _constant(shift)) if shift else word, _constant(0x0F0F0F0F))
        return _vector(_each_byte(word, 0x43000000, "7{}54"))

    # A group's 16 bytes are one column of registers: first all of their low halves, then the high ones.
    halves = [_map(functools.partial(numbers, shift), codes.registers) for shift in (0, 4)]
    both = np.stack(halves, axis=2)
    return both.reshape(both.shape[0], -1, *both.shape[3:])


def _each_byte(word: Any, power: int, places: str) -> list[Any]:
    """Float32 numbers of the bits of `power`, each with one of the word's bytes in the place of "{}"."""

    def number(byte: int) -> Any:
        selector = _constant(int(places.format(byte), 16))
        bits = mgpu.inline_ptx("prmt.b32 $0, $1, $2, $3;", word, _constant(power), selector, result_types=_i32())
        return arith.bitcast(ir.F32Type.get(), bits)

    return [number(byte) for byte in range(4)]


def _words(register: Any) -> list[Any]:
    """The bytes of a vector, four to a word."""
    count = ir.VectorType(register.type).shape[0] // 4
    words = mgpu.bitcast(register, ir.VectorType.get((count,), _i32()))
    return [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(count)]


def _vector(numbers: list[Any]) -> Any:
    return vector.from_elements(ir.VectorType.get((len(numbers),), ir.F32Type.get()), numbers)


def _map(fn: Any, *registers: Any) -> Any:
    out = np.empty_like(registers[0])
    for place in np.ndindex(out.shape):
        out[place] = fn(*(x[place] for x in registers))
    return out


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> Any:
    return mgpu.c(value, _i32())
