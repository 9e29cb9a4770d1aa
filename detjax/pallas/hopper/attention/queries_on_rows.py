"""What attention's kernels do to a tile of queries and one block of keys, on the registers of a warpgroup.

The contract's arithmetic, once for prefill, decode and merging. Prefill and the
gradients have queries on a tile's rows; decode has them on its columns (`attention_columns_hopper`). Every fused
multiply-add is written as one, and every product that is rounded stands where no compiler can fuse it: what a kernel's
surroundings make of `x * y + z` would otherwise be a matter of its schedule.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR, KEY_GROUPS, KV_BLOCK, LOWEST_MAXIMUM
from detjax.options import Masking
from detjax.rounding import log2_scale, soft_cap_exponent

ROWS: Final = 64
"""Query rows of a warpgroup's tile: those of the matrix unit."""

MATRIX: Final = plgpu.Layout.WGMMA
VECTOR: Final = plgpu.Layout.WGMMA.reduce(1)
"""One number for each row of a tile, held by the threads that hold the row."""


def line(width: int) -> int:
    """Elements of a swizzled line of shared memory, for rows of 2-byte elements."""
    return math.gcd(width, 64)


def swizzled(width: int) -> tuple[Any, ...]:
    """How rows of `width` 2-byte elements lie in shared memory for the matrix unit."""
    tiling = plgpu.TilingTransform((8, line(width)))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(2 * line(width))  # pyright: ignore[reportAbstractUsage]


def fma(x: Array, y: Array, z: Array, layout: Any = None) -> Array:
    """`x * y + z`, rounded once."""
    layout = layout or (MATRIX if x.ndim == 2 else VECTOR)

    def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
        return x._pointwise(math_dialect.fma, y, z)

    result = plgpu.ShapeDtypeStruct(x.shape, ACCUMULATOR, layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,) * 3, return_type=result)(fused)
    return inlined(x, y, z)


def issued_product(p: Array, v: Any) -> Array:
    """`p @ v` from a fresh accumulator, as the matrix unit begins with it: not to be touched before a `wgmma_wait`.

    `plgpu.wgmma` copies what it multiplies from registers, once for each product in flight, and fills its accumulators
    with zeros; a warpgroup with 64 x 256 sums has no registers for that.

    Args:
        p: `[ROWS, K]`, in registers.
        v: `[K, N]` in shared memory, swizzled in lines of 128 bytes.
    """

    def issued(_: Any, p: Any, v: Any) -> Any:
        rows, inner = p.shape
        width = v.type.shape[1] * v.type.shape[3]
        (first, (_, steps)), _, _ = mma_utils.create_descriptor(
            v, swizzle=128, group_size=(64, width), logical_k_major=True
        )
        int32, float32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        one = ir.VectorType.get((1,), int32)
        registers = [
            element(vector.bitcast(one, x)) for i in range(0, inner, 16) for x in p[:, i : i + 16].registers.flat
        ]
        count, each = width // 2, 4
        sums = ", ".join(f"${i}" for i in range(count))
        descriptor = f"${count + len(registers)}"
        text = "{ .reg .b64 v; .reg .pred more; setp.ne.b32 more, 0, 0; wgmma.fence.sync.aligned; "
        for i in range(inner // 16):
            own = ", ".join(f"${count + each * i + j}" for j in range(each))
            text += (
                f"add.s64 v, {descriptor}, {i * (steps[0] >> 4)}; "
                f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{p.mlir_dtype}.{p.mlir_dtype} "
                f"{{{sums}}}, {{{own}}}, v, more, 1, 1, 1; "
            )
            if i == 0:
                text += "setp.ne.b32 more, 1, 0; "
        text += "wgmma.commit_group.sync.aligned; }"
        constraints = ",".join(["=&f"] * count + ["r"] * len(registers) + ["l"])
        struct = llvm.StructType.get_literal([float32] * count)
        result = llvm.inline_asm(struct, [*registers, first], text, constraints, asm_dialect=0, has_side_effects=True)
        pairs = np.empty(MATRIX.to_mgpu().registers_shape((rows, width)), dtype=object)
        for i, place in enumerate(np.ndindex(pairs.shape)):
            elements = [llvm.extractvalue(float32, result, [2 * i + j]) for j in range(2)]
            pairs[place] = vector.from_elements(ir.VectorType.get((2,), float32), elements)
        return FragmentedArray(_registers=pairs, _layout=MATRIX.to_mgpu(), _is_signed=None)

    result = plgpu.ShapeDtypeStruct((p.shape[0], v.shape[1]), ACCUMULATOR, layout=MATRIX)
    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, plgpu.RefType(swizzled(64))), return_type=result)(issued)
    return inlined(p, v)


def row_sums(p: Array) -> Array:
    """Sums of the rows of `[ROWS, n]`, for a block's keys in the contract's order."""

    def reduced(_: Any, p: Any) -> Any:
        groups = p.registers.reshape(-1, 2)  # of 8 columns; the thread's first row, and the one 8 below
        registers = np.empty(VECTOR.to_mgpu().registers_shape((ROWS,)), dtype=object)
        for half, place in enumerate(np.ndindex(registers.shape)):
            lanes = added([added(list(groups[of_group(group, len(groups)), half])) for group in range(KEY_GROUPS)])
            total = added([element(lanes, index) for index in range(2)])
            for distance in (1, 2):
                total = arith.addf(total, mgpu.shfl_bfly(total, distance))
            registers[place] = vector.from_elements(ir.VectorType.get((1,), total.type), [total])
        return FragmentedArray(_registers=registers, _layout=VECTOR.to_mgpu(), _is_signed=None)

    result = plgpu.ShapeDtypeStruct(p.shape[:1], ACCUMULATOR, layout=VECTOR)
    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX,), return_type=result)(reduced)
    return inlined(p)


def of_group(group: int, count: int) -> list[int]:
    """Of `count` registers of 8 keys each, in ascending order, those of a group of the contract."""
    return [index for index in range(count) if index // 2 % KEY_GROUPS == group]


def added(values: list[Any]) -> Any:
    """The sum from left to right, without what is None; None if nothing is left."""
    there = [value for value in values if value is not None]
    return functools.reduce(arith.addf, there) if there else None


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """A number per row at every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def splat(value: Any, shape: tuple[int, ...], layout: Any = None) -> Array:
    """The same number everywhere, in the layout that a tile or its rows have, or in the one given."""
    filled = jnp.full(shape, value, ACCUMULATOR)
    return plgpu.layout_cast(filled, layout or (MATRIX if len(shape) == 2 else VECTOR))


def indices(axis: int, shape: tuple[int, ...] = (ROWS, KV_BLOCK)) -> Array:
    """Row or column of each element of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def exponent_scale(masking: Masking) -> float:
    """`c` of the contract: what shaped scores are multiplied by to become exponents of 2."""
    is_shaped = masking.soft_cap is not None or masking.alibi_slopes is not None
    return float(log2_scale(1.0 if is_shaped else masking.scale))


def shaped_scores(s: Array, masking: Masking, slopes: Array | None, distances: Callable[[], Array]) -> Array:
    """Scores with soft cap and ALiBi.

    Args:
        s: products of queries and keys.
        slopes: of each element's head, or of all.
        distances: of each element's key from its query, as float32.
    """
    if masking.soft_cap is None and slopes is None:
        return s
    s = s * np.float32(masking.scale)
    if masking.soft_cap is not None:
        s = np.float32(masking.soft_cap) * bent_scores(s, masking.soft_cap)
    if slopes is not None:
        s = fma(slopes, distances(), s)
    return s


def bent_scores(s: Array, soft_cap: float) -> Array:
    """`tanh(s / soft_cap)` as the contract has it; the hardware's own is good to three digits only."""
    e = jnp.exp2(s * soft_cap_exponent(soft_cap))
    # The maximum with 0 changes nothing, and keeps the quotient from being fused with the subtraction.
    return 1.0 - jnp.maximum(2.0 / (1.0 + e), 0.0)


def visible_keys(
    masking: Masking, keys: Array, positions: Array, kv_length: Array, layout: Any = VECTOR
) -> tuple[Array, ...]:
    """Behind the last key of a block that each query sees and, if there is a window, the first one.

    Args:
        keys: position of the block's first key.
        positions: of the queries, int32.
        kv_length: keys of the request.
    """
    end = plgpu.layout_cast(jnp.full(positions.shape, kv_length, jnp.int32), layout) - keys
    if masking.causal:
        end = jnp.minimum(end, positions + 1 - keys)
    if masking.window is None:
        return (end,)
    # A window of 2^31 tokens would leave int32.
    return end, positions - (min(masking.window, 1 << 30) - 1) - keys


def scores_seen(s: Any, is_seen: Callable[[int, int, int], Any]) -> Any:
    """A tile with -inf where a score is not seen, in the compiler's terms.

    Args:
        s: the tile.
        is_seen: of a group of 8 columns, a half of its rows (the thread's own, and the one 8 below), and one of the
            thread's two columns there.
    """
    lowest = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), -np.inf))
    registers = np.empty_like(s.registers)
    for index, place in enumerate(np.ndindex(s.registers.shape)):
        group, half = divmod(index, 2)
        register = s.registers[place]
        for offset in range(2):
            score = arith.select(is_seen(group, half, offset), element(register, offset), lowest)
            position = ir.DenseI64ArrayAttr.get([offset])
            register = vector.insert(score, register, dynamic_position=[], static_position=position)
        registers[place] = register
    return FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=s.is_signed)


def columns_kept(s: Array, end: Array, first: Array | None = None) -> Array:
    """A tile with -inf in the columns from each row's `end` on and, if given, below its `first`; int32 `[ROWS]`."""
    bounds = (end,) if first is None else (end, first)

    def kept(_: Any, s: Any, *bounds: Any) -> Any:
        # A thread's columns are constants but for the lane, which goes to the side of the bounds: compared with an iota
        # they would live in a register each.
        _, lane = first_row_and_lane()
        shift = arith.muli(lane, mgpu.c(2, lane.type))
        limits = [[arith.subi(element(bound), shift) for bound in array.registers.flatten()] for array in bounds]

        def is_seen(group: int, half: int, offset: int) -> Any:
            column = mgpu.c(8 * group + offset, lane.type)
            seen = arith.cmpi(arith.CmpIPredicate.slt, column, limits[0][half])
            if len(limits) > 1:
                behind = arith.cmpi(arith.CmpIPredicate.sge, column, limits[1][half])
                seen = arith.andi(seen, behind)
            return seen

        return scores_seen(s, is_seen)

    result = plgpu.ShapeDtypeStruct(s.shape, ACCUMULATOR, layout=MATRIX)
    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, *(VECTOR,) * len(bounds)), return_type=result)(kept)
    return inlined(s, *bounds)


def distances(first: Array) -> Array:
    """`first + column` as float32 `[ROWS, KV_BLOCK]`, of int32 `[ROWS]`."""

    def added(_: Any, first: Any) -> Any:
        _, lane = first_row_and_lane()
        shift = arith.muli(lane, mgpu.c(2, lane.type))
        float32 = ir.F32Type.get()
        bases = [arith.sitofp(float32, arith.addi(element(x), shift)) for x in first.registers.flatten()]
        registers = np.empty(MATRIX.to_mgpu().registers_shape((ROWS, KV_BLOCK)), dtype=object)
        for index, place in enumerate(np.ndindex(registers.shape)):
            group, half = divmod(index, 2)
            columns = [arith.constant(float32, ir.FloatAttr.get(float32, 8.0 * group + i)) for i in range(2)]
            elements = [arith.addf(bases[half], column) for column in columns]
            registers[place] = vector.from_elements(ir.VectorType.get((2,), float32), elements)
        return FragmentedArray(_registers=registers, _layout=MATRIX.to_mgpu(), _is_signed=None)

    result = plgpu.ShapeDtypeStruct((ROWS, KV_BLOCK), ACCUMULATOR, layout=MATRIX)
    inlined: Any = plgpu.inline_mgpu(arg_types=(VECTOR,), return_type=result)(added)
    return inlined(first)


def rows_of_tile() -> Array:
    """Row indices of a tile, int32 `[ROWS]`."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=VECTOR)


def scrub(rows: Any, length: Array) -> None:
    """Zeros behind the first `length` of `ROWS` rows of keys or values in shared memory, for the matrix unit to see.

    What a page holds behind its request's last token may be NaN, and 0 * NaN is not 0.
    """
    width = rows.shape[-1]
    for first in range(0, width, line(width)):
        part = rows.at[:, pl.ds(first, line(width))]
        keep = indices(0, (ROWS, line(width))) < length
        values = plgpu.load(part, layout=MATRIX, optimized=False)
        part[...] = jnp.where(keep, values.astype(ACCUMULATOR), 0.0).astype(values.dtype)
    plgpu.commit_smem()


def clear_rows(rows: Any, length: Array) -> None:
    """Zeros behind the first `length` of `ROWS` rows of 2-byte elements that are swizzled in lines of 128 bytes.

    What `scrub` does with more registers: swizzling moves nothing from row to row, so that whole rows need no loading.
    """

    def clear(_: Any, rows: Any, length: Any) -> None:
        thread, address, down, across, lines = _place_in_lines(rows)
        # Each thread has half of a row of each line.
        row, half = arith.divui(thread, _int32(2)), arith.remui(thread, _int32(2))
        address = arith.addi(address, arith.muli(arith.divui(row, _int32(8)), _int32(down)))
        address = arith.addi(address, arith.muli(arith.remui(row, _int32(8)), _int32(128)))
        address = arith.addi(address, arith.muli(half, _int32(64)))
        zeros = vector.broadcast(ir.VectorType.get((4,), _int32(0).type), _int32(0))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, row, length.registers.item())):
            for line_index in range(lines):
                for byte in range(0, 64, 16):
                    _store(zeros, arith.addi(address, _int32(line_index * across + byte)))

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(64)), plgpu.Layout.WG_SPLAT))(clear)
    inlined(rows, length)


def store_lines(x: Array, ref: Any) -> None:
    """Stores `[ROWS, n]` of 2-byte elements to shared memory that is swizzled in lines of 128 bytes.

    As `ref[...] = x`, but that no addresses stay in registers from one tile to the next.
    """

    def store(_: Any, x: Any, ref: Any) -> None:
        thread, address, down, across, _ = _place_in_lines(ref)
        warp, lane = arith.divui(thread, _int32(32)), arith.remui(thread, _int32(32))
        row = arith.divui(lane, _int32(4))  # of 8
        address = arith.addi(address, arith.muli(warp, _int32(2 * down)))
        address = arith.addi(address, arith.muli(row, _int32(128)))
        address = arith.addi(address, arith.muli(arith.remui(lane, _int32(4)), _int32(4)))
        swizzle = arith.muli(row, _int32(16))
        registers = x.registers.flatten()  # of 8 columns two: the thread's first row, and the one 8 below
        for group, pair in enumerate(zip(registers[::2], registers[1::2], strict=True)):
            line_index, chunk = divmod(group, 8)
            own = arith.addi(address, arith.xori(swizzle, _int32(16 * chunk)))
            for half, register in enumerate(pair):
                _store(register, arith.addi(own, _int32(half * down + line_index * across)))

    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, plgpu.RefType(swizzled(64))))(store)
    inlined(x, ref)


def _place_in_lines(ref: Any) -> tuple[Any, Any, int, int, int]:
    """A thread's number in its warpgroup, the address of a ref in lines, bytes from 8 rows to the next 8 and from line
    to line of a row, and the number of these. The compiler takes the thread for another one each time."""
    _, lines, _, _ = ref.type.shape
    (down, across, _, _), _ = ref.type.get_strides_and_offset()
    int32 = _int32(0).type
    thread = llvm.inline_asm(int32, [], "mov.u32 $0, %tid.x;", "=r", asm_dialect=0, has_side_effects=True)
    address = llvm.ptrtoint(int32, mgpu.memref_ptr(ref))
    return arith.remui(thread, _int32(128)), address, 2 * down, 2 * across, lines


def _store(value: Any, address: Any) -> None:
    llvm.store(value, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address))


def _int32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def exponentials(
    s: Array, c: float, maxima: Array, spread: Callable[[Array, tuple[int, ...]], Array] = along_rows
) -> tuple[Array, Array]:
    """`p` and `m_b` of the contract, from a block's scores, masked ones being -inf, and each query's largest."""
    m = jnp.maximum(lax.optimization_barrier(maxima * c), LOWEST_MAXIMUM)
    return jnp.exp2(fma(s, splat(c, s.shape), spread(-m, s.shape))), m


def initial_statistics(sinks: Array | None, queries: int = ROWS, layout: Any = VECTOR) -> tuple[Array, Array]:
    """`m` and `l` before the first block: a sink is a key without a value that comes before all others."""
    if sinks is None:
        return splat(LOWEST_MAXIMUM, (queries,), layout), splat(0.0, (queries,), layout)
    m = jnp.maximum(lax.optimization_barrier(sinks * float(log2_scale(1.0))), LOWEST_MAXIMUM)
    return m, splat(1.0, (queries,), layout)


def rescaling(m: Array, m_b: Array) -> tuple[Array, Array, Array]:
    """The maximum of both, and the factors that bring the running sums and the block's to it."""
    m_new = jnp.maximum(m, m_b)
    return m_new, jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)


def merged(x: Array, a: Array, x_b: Array, b: Array, layout: Any = None) -> Array:
    """`fma(x, a, rn(x_b * b))`."""
    return fma(x, a, x_b * b, layout)


def finished(
    o: Array, total: Array, dtype: Any, spread: Callable[[Array, tuple[int, ...]], Array] = along_rows
) -> Array:
    """Rows of the result; zeros for a row that saw no key."""
    reciprocal = 1.0 / jnp.where(total == 0.0, 1.0, total)
    y = (o * spread(reciprocal, o.shape)).astype(dtype)
    # A zero is +0, whatever was rounded to it.
    return jnp.where(y.astype(ACCUMULATOR) == 0.0, 0.0, y.astype(ACCUMULATOR)).astype(dtype)


def log2_normalizers(m: Array, total: Array) -> Array:
    """`m + log2(l)` of each row; 0 for a row that saw no key."""
    empty = total == 0.0
    return jnp.where(empty, 0.0, m + jnp.log2(jnp.where(empty, 1.0, total)))


# --- registers and threads --------------------------------------------------------------------------------------------


def first_row_and_lane() -> tuple[Any, Any]:
    """The first of the thread's two rows, and which of the four threads of these it is."""
    thread = mgpu.thread_idx()

    def constant(value: int) -> Any:
        return mgpu.c(value, thread.type)

    thread = arith.remui(thread, constant(128))
    warp, lane = arith.divui(thread, constant(32)), arith.remui(thread, constant(32))
    row = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
    return row, arith.remui(lane, constant(4))


def element(register: Any, index: int = 0) -> Any:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def index_of(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def address_behind(pointer: Any, offset: Any, dtype: Any) -> Any:
    """So many elements behind a pointer."""
    dynamic = [-(1 << 31)]  # LLVM's mark of an index that is not a constant
    return llvm.getelementptr(pointer.type, pointer, [offset], dynamic, dtype, llvm.GEPNoWrapFlags.none)
