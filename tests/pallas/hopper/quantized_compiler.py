"""Products with quantized weights for CUDA's compiler; see `tests.pallas.hopper.compiler`.

PYTHONPATH=<folder of the compiler>:<repository> python tests/pallas/hopper/quantized_compiler.py [NAME ...]
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.contract import FP8_BLOCK
from detjax.operands.numerics import round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands, NormalizedRows
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight
from detjax.pallas.hopper import norm, quantized_matmul
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.grouped_matmul import group_unit
from detjax.pallas.hopper.mosaic.barriers import meet
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN, PER_THREAD, swizzled_lines
from detjax.pallas.hopper.mosaic.lines import load_line, store_line
from detjax.pallas.hopper.quantized.codes import codes_plan, codes_product, grouped_codes_product
from detjax.pallas.hopper.quantized.packed import packed_plan
from detjax.pallas.hopper.quantized.prologue import quantizing
from detjax.pallas.hopper.quantized.promotion import (
    column_scales,
    promoted_by,
    row_scales,
    rows_share_scales,
    scaled_by,
)
from detjax.pallas.hopper.quantized.rows import E4M3, quantized_groups
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.portable.quantized_matmul import quantized_rows
from detjax.runtime import backends
from tests.pallas.hopper.compiler import Program, array, compile_programs


def packed(
    m: int,
    n: int,
    k: int,
    numbers: Any = "int4",
    scales: str = "bfloat16",
    *,
    group: int = 128,
    zeros: bool = False,
    gated: bool = False,
    residual: bool = False,
    turns: int = 0,
) -> Program:
    """A product of plain rows with packed weights; `turns`: the warpgroups of the default plan that take turns."""
    parts = (2,) if gated else ()
    described = QuantizedFormat(numbers, k, group, "bfloat16")
    codes = array(*parts, n, k if numbers == "e4m3" else k // 2, dtype="uint8")
    w = QuantizedWeight(codes, array(*parts, n, -(-k // group), dtype=scales), format=described)
    shapes = [array(m, k), codes, w.scales]
    shapes += [array(*parts, n, -(-k // group), dtype="uint8")] if zeros else []
    shapes += [array(m, n)] if residual else []

    def fn(x: Any, codes: Any, scales: Any, *rest: Any) -> jax.Array:
        weight = QuantizedWeight(codes, scales, rest[0] if zeros else None, format=described)
        operands = MatmulOperands(x, weight, None, rest[-1] if residual else None)
        plan = packed_plan(operands, out_dtype=x.dtype)
        assert plan is not None and turns == (plan.schedule.warpgroups if plan.takes_turns else 0)
        epilogue = Epilogue("silu", True) if gated else Epilogue()
        return quantized_matmul.forward(operands, epilogue=epilogue, out_dtype=x.dtype)

    return fn, shapes


def codes_of_rows(
    m: int,
    n: int,
    k: int,
    activations: Any = "group",
    scales: str = "float32",
    *,
    gated: bool = False,
    **options: bool,
) -> Program:
    """A product of quantized rows, with a bias and a residual if asked for."""
    parts, group = (2,) if gated else (), 128 if activations == "group" else k
    described = QuantizedFormat("e4m3", k, group, "bfloat16", activations)
    codes, factors = array(*parts, n, k, dtype="uint8"), array(*parts, n, -(-k // group), dtype=scales)
    shapes = [array(m, k), codes, factors]
    shapes += [array(*parts, n)] if options.get("bias") else []
    shapes += [array(m, n)] if options.get("residual") else []

    def fn(x: Any, codes: Any, factors: Any, *rest: Any) -> jax.Array:
        weight = QuantizedWeight(codes, factors, format=described)
        bias, residual = rest[0] if options.get("bias") else None, rest[-1] if options.get("residual") else None
        operands = MatmulOperands(x, weight, bias, residual)
        epilogue = Epilogue("silu", True) if gated else Epilogue()
        plan = codes_plan(operands, out_dtype=x.dtype)
        return codes_product(operands, plan, epilogue=epilogue)

    return fn, shapes


def codes_of_a_norm(n: int, k: int) -> Program:
    """A product with gate and up of a single row's norm, which it computes itself."""
    described = QuantizedFormat("e4m3", k, 128, "bfloat16", "group")
    shapes = [array(1, k), array(k), array(2, n, k, dtype="uint8"), array(2, n, k // 128, dtype="float32")]

    def fn(x: Any, weight: Any, codes: Any, scales: Any) -> jax.Array:
        rows = NormalizedRows(x, weight, eps=1e-6)
        y, row_codes = norm.forward_with_codes(x, weight, eps=rows.eps, weight_offset=rows.weight_offset)
        operands = MatmulOperands(y, QuantizedWeight(codes, scales, format=described))
        epilogue, row_codes = Epilogue("silu", True), row_codes._replace(norm=rows)
        return quantized_matmul.forward(operands, epilogue=epilogue, out_dtype=x.dtype, codes=row_codes)

    return fn, shapes


def codes_of_experts(m: int, n: int, k: int, *, gated: bool = False) -> Program:
    """A product of quantized rows with 128 experts, of 8 rows for each token."""
    parts, rows = (2,) if gated else (), 8 * m
    unit = group_unit(rows, 128)
    rows = round_up(rows + 128 * (unit - 1), unit)
    described = QuantizedFormat("e4m3", k, 128, "bfloat16", "group")
    shapes = [array(rows, k), array(128, *parts, n, k, dtype="uint8"), array(128, *parts, n, k // 128, dtype="float32")]
    shapes.append(array(128, dtype="int32"))

    def fn(x: Any, codes: Any, scales: Any, sizes: Any) -> jax.Array:
        operands = GroupedOperands(x, QuantizedWeight(codes, scales, format=described), None, sizes)
        epilogue = Epilogue("silu", True) if gated else Epilogue()
        return grouped_codes_product(operands, epilogue=epilogue, out_dtype=x.dtype, unit=unit)

    return fn, shapes


def programs() -> dict[str, Program]:
    """The programs, by name; shapes of Qwen3-8B and Qwen3-30B-A3B."""
    return {
        "packed, 1 token": packed(1, 6144, 4096, zeros=True, turns=2),
        "packed, gated, 1 token": packed(1, 12288, 4096, gated=True, zeros=True),
        "packed, 1 token of a long K": packed(1, 4096, 12288, scales="float16", residual=True, turns=2),
        "packed, 16 tokens, three in turns": packed(16, 4096, 2304, residual=True, turns=3),
        "packed, 16 tokens, e2m1": packed(16, 6144, 4096, "e2m1", "float32", group=16, turns=2),
        "packed, 16 tokens, e4m3": packed(16, 6144, 4096, "e4m3", "float32", turns=2),
        "packed, 17 tokens": packed(17, 6144, 4096),
        "packed, 64 tokens": packed(64, 4096, 4096, "e2m1", "float32", group=16),
        "packed, gated, 1024 tokens": packed(1024, 12288, 4096, gated=True, scales="float16", zeros=True),
        "packed, 1024 tokens": packed(1024, 4096, 12288, "e4m3", "float32", residual=True),
        "codes, 1 token": codes_of_rows(1, 6144, 4096, bias=True),
        "codes, gated, 1 token": codes_of_rows(1, 12288, 4096, gated=True),
        "codes of a norm, gated, 1 token": codes_of_a_norm(12288, 4096),
        "codes, 1 token of a long K": codes_of_rows(1, 4096, 12288, residual=True),
        "codes, 64 tokens": codes_of_rows(64, 4096, 12288, scales="bfloat16", residual=True),
        "codes, gated, 1024 tokens": codes_of_rows(1024, 12288, 4096, gated=True, bias=True),
        "codes, 1024 tokens": codes_of_rows(1024, 4096, 12288, residual=True),
        "codes by rows, 300 tokens, K of 1104": codes_of_rows(300, 1544, 1104, "row", bias=True),
        "codes of experts, gated, 1 token": codes_of_experts(1, 768, 2048, gated=True),
        "codes of experts, 1024 tokens": codes_of_experts(1024, 2048, 768),
        "norm and codes, 1 token": normalized_rows(1, 4096),
        "norm and codes, 64 tokens": normalized_rows(64, 5120),
        "norm and codes, 4096 tokens": normalized_rows(4096, 4096),
        "norm and codes of float32, 17 tokens": normalized_rows(17, 7168, dtype="float32"),
        "norm and codes, 1024 tokens of 20480 columns": normalized_rows(1024, 20480),
    }


def composed_rows(x: Any) -> Any:
    """The quantization of rows as XLA computes it on GPUs."""
    with backends.tracing_for("gpu"):
        return quantized_rows(x, FP8_BLOCK)


def row_programs() -> dict[str, Program]:
    """The programs that quantize rows, the kernel's by dtype and XLA's, that read scales, and that scale products."""
    kernels = {
        f"codes of {dtype}": (quantized_groups, [array(*ROWS, dtype=dtype)])
        for dtype in ("bfloat16", "float16", "float32")
    }
    return {
        **kernels,
        **{f"column scales of {dtype}": loaded_column_scales(dtype) for dtype in ("bfloat16", "float16", "float32")},
        **{
            f"{rows} rows with scales of {dtype}": compared_scales(rows, dtype)
            for rows in SHARING_UNITS
            for dtype in ("bfloat16", "float32")
        },
        "promoted products": scaled_products(is_promoted=True),
        "scaled sums": scaled_products(is_promoted=False),
        "composed rows": (composed_rows, [array(*ROWS, dtype="float32")]),
        **{
            f"norm of {width} columns of {dtype}": normalized_rows(NORMALIZED_ROWS, width, dtype=dtype)
            for width in NORMALIZED_WIDTHS
            for dtype in ("bfloat16", "float16", "float32")
        },
        **{
            f"{'codes' if number == 0 else 'norm'} of a row of {dtype}": row_in_stages(columns, dtype, number == 1)
            for number, columns in enumerate(ROW_IN_STAGES)
            for dtype in ("bfloat16", "float16", "float32")
        },
    }


def row_in_stages(columns: int, dtype: str, is_normalized: bool) -> Program:
    """A kernel that leaves a row's codes and scales, or its norm's, in shared memory as a product's stages have them.

    The result is part of the scales: the compiler drops stores that nobody reads.
    """
    blocks = 2
    stages = columns // (blocks * FP8_BLOCK)
    shapes = [array(1, columns, dtype=dtype), *([array(columns, dtype=dtype)] if is_normalized else [])]

    def fn(*arrays: Any) -> Any:
        prologue = norm.prologue(NormalizedRows(*arrays, eps=1e-6)) if is_normalized else quantizing(*arrays)
        assert prologue is not None

        def body(*refs: Any, codes: Any, scales: Any) -> None:
            *inputs, out = refs
            prologue.compute(*inputs, codes, scales)
            meet()
            store_line(load_line(scales.at[0, 0]), out, 0, count=WARPGROUP)

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((WARPGROUP,), "float32"),
            scratch_types={
                "codes": plgpu.SMEM((stages, 1, 8, blocks * FP8_BLOCK), E4M3, transforms=swizzled_lines(FP8_BLOCK, 1)),
                "scales": plgpu.SMEM((stages, blocks, 32), "float32"),
            },
            compiler_params=NO_AUTO_BARRIERS,
            kernel_name="row_in_stages",
        )(*arrays)

    return fn, shapes


def normalized_rows(rows: int, width: int, *, dtype: str = "bfloat16") -> Program:
    """A norm with its codes."""
    fn = functools.partial(norm.forward_with_codes, eps=1e-6, weight_offset=0.0)
    return fn, [array(rows, width, dtype=dtype), array(width, dtype=dtype)]


def scaled_products(*, is_promoted: bool) -> Program:
    """A kernel that scales products and adds them to sums, or that only scales sums."""

    def body(*refs: Any) -> None:
        *arrays, tokens, weights, out = refs
        sums = [plgpu.load(array, layout=MATRIX, optimized=False) for array in arrays]
        columns = plgpu.load(tokens, layout=PER_COLUMN, optimized=False)
        rows = row_scales(SCALED_GROUP, 0, weights)
        if is_promoted:
            out[...] = promoted_by(sums[0], sums[1], columns, rows)
        else:
            out[...] = scaled_by(sums[0], columns, rows, by_columns_first=False)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, COLUMNS), "float32"),
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="scaled_products",
    )
    shapes = *[(64, COLUMNS)] * (2 if is_promoted else 1), (COLUMNS,), (SCALED_ROWS, 4)
    return kernel, [array(*shape, dtype="float32") for shape in shapes]


def loaded_column_scales(dtype: str) -> Program:
    """A kernel that loads the scales of columns, for each of `COLUMN_UNITS`."""

    def body(scales: Any, *outs: Any) -> None:
        for unit, out in zip(COLUMN_UNITS, outs, strict=True):
            out[...] = column_scales(SCALED_GROUP, scales, unit=unit)

    columns, groups = COLUMN_SCALES
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((columns,), "float32")] * len(COLUMN_UNITS),
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="column_scales",
    )
    return kernel, [array(columns, groups, dtype=dtype)]


def compared_scales(rows: int, dtype: str) -> Program:
    """A kernel whose two warpgroups compare the scales of a tile each, for each of its `SHARING_UNITS`.

    The result `[units, warpgroups, threads]` has the answer in each thread. The second tile ends beyond the scales.
    """

    def body(scales: Any, out: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        for i, unit in enumerate(SHARING_UNITS[rows]):
            shared = rows_share_scales(warpgroup * rows, scales, rows=rows, unit=unit)
            out[i, warpgroup] = plgpu.layout_cast(jnp.broadcast_to(shared, (WARPGROUP,)), PER_THREAD)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(SHARING_UNITS[rows]), 2, WARPGROUP), "int32"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="rows_share_scales",
    )
    return kernel, [array(2 * rows - MISSING_ROWS, GROUPS[dtype], dtype=dtype)]


NORMALIZED_ROWS, NORMALIZED_WIDTHS = 7, (640, 1024)
"""The shapes of normalized rows: a warp or four have a row."""
ROW_IN_STAGES = 1280, 1024
"""Columns of the row that is quantized, and of the one that is normalized first."""

COLUMNS = 16
"""Columns of scaled products."""
SCALED_ROWS = 48
"""Rows of weights with scales; products have 64."""
SCALED_GROUP = 2
"""The group of their scales, and of the scales of columns."""

COLUMN_SCALES = 256, 4
"""The shape of the scales of columns."""
COLUMN_UNITS = 1, 32, 128
"""Numbers of columns that share scales."""

SHARING_UNITS = {96: (16, 32), 128: (64, 128), 192: (16, 64)}
"""Numbers of rows that may share scales, by the rows of a tile."""
MISSING_ROWS = 24
"""Rows of the second tile that are beyond the end of the scales."""
GROUPS = {"bfloat16": 24, "float32": 12}
"""Groups of these scales: a thread loads a row's by three instructions."""

ROWS = 7, 656
"""The shape of quantized rows: the last group has 16 columns, and a row takes two CTAs."""


if __name__ == "__main__":
    known = programs() | row_programs()
    compile_programs({name: known[name] for name in sys.argv[1:] or programs()})
