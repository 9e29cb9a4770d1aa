"""Products with quantized weights for CUDA's compiler; see `tests.pallas.hopper.compiler`.

PYTHONPATH=<folder of the compiler>:<repository> python tests/pallas/hopper/quantized_compiler.py [NAME ...]
"""

import functools
import itertools
import sys
from typing import Any, Literal

import jax
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from detjax.operands.numerics import round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight
from detjax.pallas.hopper import quantized_matmul
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.grouped_matmul import group_unit
from detjax.pallas.hopper.mosaic import no_twin, primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER
from detjax.pallas.hopper.mosaic.registers import as_index, i32, int32, thread_of_warpgroup
from detjax.pallas.hopper.quantized.codes import codes_plan, codes_product, grouped_codes_product
from detjax.pallas.hopper.quantized.exact_rows import ExactFill, exact_rows
from detjax.pallas.hopper.quantized.packed import packed_plan
from detjax.pallas.hopper.quantized.promotion import promoted
from detjax.pallas.hopper.quantized.rows import quantized_groups
from detjax.pallas.hopper.quantized.scaled import Form, scaled_plan, scaled_product
from detjax.pallas.hopper.quantized.widening import E4M3
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


def scaled(
    m: int,
    n: int,
    k: int,
    activations: Any = "group",
    scales: str = "float32",
    *,
    gated: bool = False,
    form: Form | Literal["codes"] | None = None,
    **options: bool,
) -> Program:
    """A product of quantized rows; the options say whether it has a bias and a residual."""
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
        if form == "codes":
            chosen = codes_plan(operands, out_dtype=x.dtype)
            assert chosen is not None
            return codes_product(operands, chosen, epilogue=epilogue)
        plan = scaled_plan(operands, out_dtype=x.dtype, form=form)
        assert plan is not None
        return scaled_product(operands, plan, epilogue=epilogue)

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
        y = grouped_codes_product(operands, epilogue=epilogue, out_dtype=x.dtype, unit=unit)
        assert y is not None
        return y

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
        "scaled, 1 token": scaled(1, 6144, 4096, bias=True),
        "scaled, gated, 1 token": scaled(1, 12288, 4096, gated=True),
        "scaled, 64 tokens": scaled(64, 4096, 12288, scales="bfloat16", residual=True),
        "scaled, gated, 1024 tokens": scaled(1024, 12288, 4096, gated=True, bias=True),
        "scaled, 1024 tokens": scaled(1024, 4096, 12288, residual=True),
        "scaled, widened in shared memory, K of 1104": scaled(300, 1544, 1104, form="widened", bias=True),
        "codes, 1 token": scaled(1, 6144, 4096, form="codes", bias=True),
        "codes, gated, 1 token": scaled(1, 12288, 4096, gated=True, form="codes"),
        "codes, 1 token of a long K": scaled(1, 4096, 12288, form="codes", residual=True),
        "codes, 64 tokens": scaled(64, 4096, 12288, scales="bfloat16", form="codes", residual=True),
        "codes, gated, 1024 tokens": scaled(1024, 12288, 4096, gated=True, form="codes", bias=True),
        "codes, 1024 tokens": scaled(1024, 4096, 12288, form="codes", residual=True),
        "codes by rows, 300 tokens, K of 1104": scaled(300, 1544, 1104, "row", form="codes", bias=True),
        "codes of experts, gated, 1 token": codes_of_experts(1, 768, 2048, gated=True),
        "codes of experts, 1024 tokens": codes_of_experts(1024, 2048, 768),
        "scaled by rows, 1024 tokens": scaled(1024, 4096, 12288, "row", bias=True, residual=True),
    }


def composed_rows(x: Any) -> Any:
    """The quantization of rows as XLA computes it on GPUs."""
    with backends.tracing_for("gpu"):
        return quantized_rows(x, 64)


def row_programs() -> dict[str, Program]:
    """The programs that quantize rows: the kernel's, by group and dtype, and XLA's."""
    kernels = {
        f"{dtype} in groups of {group}": (functools.partial(quantized_groups, group=group), [array(*ROWS, dtype=dtype)])
        for group, dtype in itertools.product((64, 128), ("bfloat16", "float16", "float32"))
    } | {
        f"codes of {dtype}": (
            functools.partial(quantized_groups, group=128, dtype="float8_e4m3fn"),
            [array(*ROWS, dtype=dtype)],
        )
        for dtype in ("bfloat16", "float32")
    }
    exact = {name: exact_operand(*options) for name, options in EXACT_ROWS.items()}
    sums = {name: promoted_products(*options) for name, options in PROMOTED.items()}
    return {**kernels, **exact, **sums, "composed rows": (composed_rows, [array(*ROWS, dtype="float32")])}


def exact_operand(fill: ExactFill, parts: int) -> Program:
    """A kernel that stores the row operand of codes, which it places in shared memory as the copy engine does."""

    @primitive(twin=no_twin("place"), args=(plgpu.RefType(), plgpu.RefType(E4M3.transforms(fill.columns)), NUMBER))
    def place(words: Any, codes: Any, part: Any) -> None:
        base, thread = llvm.ptrtoint(i32(), mgpu.memref_ptr(codes)), thread_of_warpgroup()
        for first in range(0, fill.rows * fill.columns // 4, WARPGROUP):
            number = arith.addi(thread, int32(first))
            row, column = arith.divui(number, int32(32)), arith.remui(number, int32(32))
            chunk = arith.xori(arith.divui(column, int32(4)), arith.remui(row, int32(8)))
            parts_of_address = [(row, 128), (chunk, 16), (arith.remui(column, int32(4)), 4)]
            address = functools.reduce(arith.addi, [arith.muli(x, int32(size)) for x, size in parts_of_address], base)
            word = memref.load(words, [as_index(part.registers.item()), as_index(number)])
            llvm.store(word, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address))

    def body(words: Any, out: Any, codes: Any) -> None:
        for part in range(parts):
            place(words, codes.at[part], part)
        plgpu.commit_smem()
        out[...] = exact_rows(*[codes.at[part] for part in range(parts)], fill=fill)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, fill.columns), fill.dtype),
        scratch_types=[plgpu.SMEM((parts, fill.rows, fill.columns), "uint8", transforms=E4M3.transforms(fill.columns))],
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="exact_rows",
    )
    return kernel, [array(parts, fill.rows * fill.columns // 4, dtype="int32")]


EXACT_ROWS = {
    "exact rows of gate and up": (ExactFill(24, 128, "bfloat16", is_spread=True), 2),
    "exact rows, spread": (ExactFill(32, 128, "float16", is_spread=True), 1),
    "exact rows": (ExactFill(48, 128, "bfloat16", is_spread=False), 1),
}
"""Row operands, with their number of parts."""


def promoted_products(rows: int, is_spread: bool, parts: int) -> Program:
    """A kernel that scales products and adds them to sums."""

    def body(product: Any, total: Any, tokens: Any, weights: Any, out: Any) -> None:
        sums = [plgpu.load(array, layout=MATRIX, optimized=False) for array in (product, total)]
        by_part = [weights.at[part] for part in range(parts)]
        out[...] = promoted(*sums, tokens, PROMOTED_GROUP, 0, *by_part, is_spread=is_spread)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 16), "float32"),
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="promoted",
    )
    shapes = (64, 16), (64, 16), (32,), (parts, rows, 4)
    return kernel, [array(*shape, dtype="float32") for shape in shapes]


PROMOTED = {
    "promoted rows of gate and up": (24, True, 2),
    "promoted rows, spread": (32, True, 1),
    "promoted rows": (48, False, 1),
}
"""Sums of products: rows of weights, whether they are spread, and parts."""
PROMOTED_GROUP = 2

ROWS = 7, 336
"""The shape of quantized rows: the last group has 16 columns, and groups of 64 take two CTAs for each row."""


if __name__ == "__main__":
    known = programs() | row_programs()
    compile_programs({name: known[name] for name in sys.argv[1:] or programs()})
