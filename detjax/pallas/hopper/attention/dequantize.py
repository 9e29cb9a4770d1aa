"""Dequantization of keys and values on Hopper, from codes and scales in shared memory to the matrix unit's operands.

Decode dequantizes while it multiplies, and reads a page's codes from memory once. In prefill many query tiles read each
page, and the matrix unit is the bottleneck. So a separate kernel dequantizes the pages that prefill will read, each
once, into memory for one layer's numbers, which is free again after the layer.

A warpgroup takes 64 rows of a page: each thread loads eight codes at once, converts them to float32, multiplies by the
row's scale, rounds, and stores eight numbers at once, without bank conflicts.
"""

import dataclasses
import math
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import fragmented_array as mgpu_layouts

from detjax.contract import ACCUMULATOR, KV_BLOCK, Q4_GROUP
from detjax.operands.options import KVQuantization
from detjax.operands.quantized_pages import QuantizedPages, quantized_layout
from detjax.pallas.hopper.mosaic.layouts import ROWS, line, swizzled
from detjax.pallas.hopper.mosaic.quantized import products

_COLUMNS: Final = 128
"""Columns that are dequantized at once. A thread has half as many numbers in registers."""


def page_buffers(kind: KVQuantization, slots: int, width: int) -> tuple[Any, Any]:
    """Returns shared memory for codes and scales of `slots` pages of one head."""
    codes, scales = quantized_layout((slots, 1, KV_BLOCK, width), kind)
    row, transforms = _columns(width) // 2 if kind == "q4_0" else line(width), ()
    if row >= 32:  # shorter rows are an odd number of 16 bytes, which are free of bank conflicts without a swizzle
        tiling = plgpu.TilingTransform((8, row))  # pyright: ignore[reportAbstractUsage]
        transforms = tiling, plgpu.SwizzleTransform(row)  # pyright: ignore[reportAbstractUsage]
    return (
        plgpu.SMEM((slots, *codes.shape[2:]), codes.dtype, transforms=transforms),
        plgpu.SMEM((slots, *scales.shape[2:]), scales.dtype),
    )


def page_bytes(kind: KVQuantization, width: int) -> int:
    """Returns the bytes of codes and scales of one head of a page."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in quantized_layout((1, 1, KV_BLOCK, width), kind))


def dequantize(kind: KVQuantization, codes: Any, scales: Any, target: Any, first_row: Any) -> None:
    """Dequantizes `ROWS` rows of a page; the matrix unit sees the numbers once shared memory is committed.

    Args:
        kind: kind of the page.
        codes: codes of the page, in shared memory as `page_buffers` lays it out.
        scales: scales of the page.
        target: numbers of the page, `[KV_BLOCK, width]`, swizzled.
        first_row: the first of the rows.
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
            plgpu.load(loaded, layout=layout, optimized=False),
            *(plgpu.load(group, layout=layout.reduce(1), optimized=False).astype(ACCUMULATOR) for group in groups),
            kind=kind,
            layout=layout,
        )
        target[rows, pl.ds(first, size)] = numbers.astype(target.dtype)


@dataclasses.dataclass(frozen=True)
class PageRange:
    """The pages of each request that are read.

    Attributes:
        table: page ids of each request's blocks, `[B, p]`.
        first: first block that is read, int32 `[B]`.
        end: end of the blocks that are read, int32 `[B]`.
    """

    table: Array
    first: Array
    end: Array


def dequantize_pages(pages: QuantizedPages, read: PageRange, dtype: Any) -> tuple[Array, Array]:
    """Returns pages of numbers `[n, h, S, K]` and their page table; pages that are not read are undefined."""
    (batch, blocks), (count, kv_heads, _, width), kind = read.table.shape, pages.shape, pages.kind
    # Pages of a small pool keep their ids. A large one would need memory for pages that no request has.
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
    numbers = kernel(pages.codes, pages.scales, read.table, read.first, read.end)
    new_table = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    return numbers, read.table if keeps_table else new_table


def _columns(width: int) -> int:
    """Returns the columns that are dequantized at once: whole lines of the swizzles of 1-byte and 2-byte elements."""
    return math.gcd(width, _COLUMNS)


def _layout(kind: KVQuantization, width: int) -> Any:
    """Returns the layout of the codes of `ROWS` rows in registers, and of the numbers."""
    if kind == "q4_0":
        return plgpu.Layout.WGMMA_8BIT  # a thread has four consecutive bytes of a group's 16
    # Eight codes at once: the numbers that eight threads store are whole lines of the swizzle and fill all banks.
    columns = line(width)
    rows = 256 // columns  # of a warp, at once
    tiles = [(ROWS, columns), (16, columns), (rows, columns), (8,)]
    if rows == 16:
        del tiles[2]
    tiling = mgpu_layouts.Tiling(tuple(tiles))
    return plgpu.Layout.TILED(tiling, warp_dims=(1 - 2 * len(tiles),), lane_dims=(-3, -2), vector_dim=-1)
