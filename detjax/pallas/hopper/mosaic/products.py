"""Primitives that start products of the matrix unit in fresh accumulators, and leave the waiting to their callers."""

from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.device import SWIZZLE_BYTES
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, ROWS, swizzled, swizzled_lines
from detjax.pallas.hopper.mosaic.registers import array, element, empty_registers, i32, packed

_K_STEP: Final = 16
"""Elements of K that one instruction multiplies."""
_LINE: Final = 64
"""2-byte elements of a swizzled line."""
_CODES: Final = SWIZZLE_BYTES
"""Codes of a swizzled line."""
_CODES_STEP: Final = 32
"""Codes of K that one instruction multiplies."""


def _plain_start_product(p: Array, v: Any) -> Array:
    def multiply(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, p, v)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((p.shape[0], v.shape[1]), ACCUMULATOR))  # pyright: ignore


@primitive(
    twin=_plain_start_product,
    args=(MATRIX, plgpu.RefType(swizzled(64))),
    out=lambda p, v: plgpu.ShapeDtypeStruct((p.shape[0], v.shape[1]), ACCUMULATOR, layout=MATRIX),
)
def start_product(p: Any, v: Any) -> Any:
    """Starts `p @ v` from a fresh accumulator. The result must not be touched before a `wgmma_wait`.

    `plgpu.wgmma` copies its operand in registers for each product in flight, and fills its accumulators with zeros; a
    warpgroup with 64 x 256 sums has no registers for that.

    Args:
        p: `[ROWS, K]`, in registers.
        v: `[K, N]` in shared memory, swizzled in lines of 128 bytes.
    """
    width = v.type.shape[1] * v.type.shape[3]
    (first, (_, steps)), _, _ = mma_utils.create_descriptor(
        v, swizzle=128, group_size=(_LINE, width), logical_k_major=True
    )
    return started(
        p, first, [i * (steps[0] >> 4) for i in range(p.shape[1] // _K_STEP)], is_transposed=True, width=width
    )


def _plain_start_product_of_codes(rows: Any, columns: Any) -> Array:
    # The interpreter multiplies no e4m3 numbers. These sums round otherwise than the matrix unit's.
    return jnp.dot(rows[...].astype(ACCUMULATOR), columns[...].astype(ACCUMULATOR).T, precision="highest")


@primitive(
    twin=_plain_start_product_of_codes,
    args=(plgpu.RefType(swizzled_lines(_CODES, 1)), plgpu.RefType(swizzled_lines(_CODES, 1))),
    out=lambda rows, columns: plgpu.ShapeDtypeStruct((ROWS, columns.shape[0]), ACCUMULATOR, layout=MATRIX),
)
def start_product_of_codes(rows: Any, columns: Any) -> Any:
    """Starts `rows @ columns.T` of e4m3 codes in shared memory; see `start_product`.

    Args:
        rows: `[ROWS, 128]`, swizzled in lines of 128 bytes.
        columns: `[columns, 128]`, swizzled in the same way.
    """
    width = columns.type.shape[0] * columns.type.shape[2]
    options = {"swizzle": _CODES, "large_tile": (ROWS, _CODES), "group_size": (ROWS, _CODES)}
    (first, (_, steps)), _, _ = mma_utils.create_descriptor(rows, **options, logical_k_major=False)
    options = {"swizzle": _CODES, "large_tile": (_CODES, _CODES), "group_size": (_CODES, width)}
    columns = mgpu.memref_transpose(columns, (1, 0, 3, 2))
    (second, (_, column_steps)), _, _ = mma_utils.create_descriptor(columns, **options, logical_k_major=True)
    count = width // 2
    sums = ", ".join(f"${i}" for i in range(count))
    # `more` is false for the first instruction, which overwrites the sums.
    text = "{ .reg .b64 u, v; .reg .pred more; setp.ne.b32 more, 0, 0; wgmma.fence.sync.aligned; "
    for i in range(_CODES // _CODES_STEP):
        text += (
            f"add.s64 u, ${count}, {i * (steps[0] >> 4)}; add.s64 v, ${count + 1}, {i * (column_steps[0] >> 4)}; "
            f"wgmma.mma_async.sync.aligned.m64n{width}k{_CODES_STEP}.f32.e4m3.e4m3 {{{sums}}}, u, v, more, 1, 1; "
        )
        text += "setp.ne.b32 more, 1, 0; " if i == 0 else ""
    text += "wgmma.commit_group.sync.aligned; }"
    return _sums_of(text, [first, second], ",".join(["=&f"] * count + ["l", "l"]), (ROWS, width))


def descriptor_of_rows(rows: Any, inner: int) -> tuple[Any, list[int], int]:
    """Returns the matrix unit's descriptor of rows `[N, K]` in shared memory, the offset of each 16 of K, and N."""
    width = rows.type.shape[0] * rows.type.shape[2]
    (first, (_, steps)), (_, group), _ = mma_utils.create_descriptor(
        mgpu.memref_transpose(rows, (1, 0, 3, 2)),
        swizzle=128,
        large_tile=(_LINE, _LINE),
        group_size=(_LINE, width),
        logical_k_major=True,
    )
    places = [divmod(i, _LINE // _K_STEP) for i in range(inner // _K_STEP)]
    return first, [mma_utils.encode_addr(line * group) + step * (steps[0] >> 4) for line, step in places], width


def started(p: Any, descriptor: Any, offsets: list[int], *, width: int, is_transposed: bool, before: Any = None) -> Any:
    """Starts a product, whose second operand has its 16 of K number i at an offset from a descriptor.

    Args:
        p: `[ROWS, K]`, in registers.
        descriptor: the second operand's descriptor.
        offsets: what to add to it for each 16 of K.
        width: columns of the product.
        is_transposed: whether the second operand is `[K, N]` in memory rather than `[N, K]`.
        before: the sums to which the product is added; None: a fresh accumulator.
    """
    rows, inner = p.shape
    one = ir.VectorType.get((1,), i32())
    steps = [p[:, i : i + _K_STEP].registers.flat for i in range(0, inner, _K_STEP)]
    registers = [element(vector.bitcast(one, x)) for step in steps for x in step]
    count = width // 2
    sums = [] if before is None else [element(x, i) for x in before.registers.flat for i in range(2)]
    text = _product_text(p.mlir_dtype, width, count, len(sums), offsets, is_transposed)
    # `&`: the first of the text's products writes sums before the last one reads p, so they must not share registers.
    tied = [str(i) for i in range(len(sums))]
    constraints = ",".join(["=&f"] * count + tied + ["r"] * len(registers) + ["l"])
    return _sums_of(text, [*sums, *registers, descriptor], constraints, (rows, width))


def _sums_of(text: str, operands: list[Any], constraints: str, shape: tuple[int, int]) -> Any:
    """Emits the PTX of a product, and returns its sums."""
    float32 = ir.F32Type.get()
    struct = llvm.StructType.get_literal([float32] * (shape[1] // 2))
    result = llvm.inline_asm(struct, operands, text, constraints, asm_dialect=0, has_side_effects=True)
    pairs = empty_registers(MATRIX, shape)
    for i, place in enumerate(np.ndindex(pairs.shape)):
        pairs[place] = packed([llvm.extractvalue(float32, result, [2 * i + j]) for j in range(2)])
    return array(pairs, MATRIX)


def _product_text(dtype: Any, width: int, count: int, tied: int, offsets: list[int], is_transposed: bool) -> str:
    """Returns the PTX of a product of `count` sums, with 4 registers of p for each 16 of K.

    The descriptor of the second operand advances by an offset for each of them. The predicate `more` is false for the
    first of them if no sums are `tied`: the matrix unit then overwrites the sums instead of adding to them, so nobody
    has to clear them.
    """
    registers_of_step, first = 4, count + tied
    sums = ", ".join(f"${i}" for i in range(count))
    descriptor = f"${first + registers_of_step * len(offsets)}"
    text = "{ .reg .b64 v; .reg .pred more; setp.ne.b32 more, " + f"{int(tied > 0)}, 0; wgmma.fence.sync.aligned; "
    for i, offset in enumerate(offsets):
        p_registers = ", ".join(f"${first + registers_of_step * i + j}" for j in range(registers_of_step))
        text += (
            f"add.s64 v, {descriptor}, {offset}; "
            f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{dtype}.{dtype} "
            f"{{{sums}}}, {{{p_registers}}}, v, more, 1, 1, {int(is_transposed)}; "
        )
        if i == 0 and not tied:
            text += "setp.ne.b32 more, 1, 0; "
    return text + "wgmma.commit_group.sync.aligned; }"
