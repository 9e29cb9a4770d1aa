"""Kernels that store the row operand of codes, for CUDA's compiler; see `tests.pallas.hopper.compiler`.

PYTHONPATH=<folder of the compiler>:<repository> python tests/pallas/hopper/fragments_compiler.py [NAME ...]
"""

import sys
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import no_twin, primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER
from detjax.pallas.hopper.mosaic.registers import as_index, i32, int32, thread_of_warpgroup
from detjax.pallas.hopper.quantized.fragments import FEW_ROWS, Fill, gathered, loaded_words, widened_rows
from detjax.pallas.hopper.quantized.widening import Codes
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from tests.pallas.hopper.compiler import Program, array, compile_programs

ROWS, SUMS = 64, 16
GROUP = 4
"""The number of a stage's first group in the whole row."""


def codes(numbers: Any, group: int, scales: str, *, zeros: bool = False, dtype: str = "bfloat16") -> Codes:
    """The meaning of packed arrays."""
    return Codes(numbers, group, jnp.dtype(scales), zeros, dtype)


FILLS = {
    "int4, spread": (Fill(codes("int4", 64, "bfloat16"), 256, 256, 64, 24, True, is_early=True), 1),
    "int4 of zeros": (Fill(codes("int4", 32, "float16", zeros=True), 128, 64, 64, 48, False), 1),
    "e2m1 of gate and up": (Fill(codes("e2m1", 16, "float32"), 128, 128, 128, 32, True), 2),
    "e2m1": (Fill(codes("e2m1", 32, "float16", dtype="float16"), 128, 128, 64, 64, False), 1),
    "e4m3 of gate and up": (Fill(codes("e4m3", 64, "float32"), 128, 128, 64, 16, True), 2),
}
"""Row operands, with their number of parts: in CI one of each kind of instructions and of each way to fill rows."""


def sizes(fill: Fill) -> tuple[int, int, int]:
    """The bytes of a row's codes, scales and zero points in a stage."""
    scales = fill.packing.scale_dtype.itemsize
    return fill.packing.row_bytes(fill.columns), fill.packing.box(fill.columns, scales) * scales, 16


def stored_operand(fill: Fill, parts: int) -> Program:
    """A kernel that stores a stage's row operand, and sums of spread rows in order."""

    @primitive(
        twin=no_twin("place"),
        args=lambda words, target, part, *, transforms: (plgpu.RefType(), plgpu.RefType(transforms), NUMBER),
    )
    def place(words: Any, target: Any, part: Any, *, transforms: Any) -> None:
        """Copies a part's words to shared memory as they are."""
        del transforms
        base, thread = llvm.ptrtoint(i32(), mgpu.memref_ptr(target)), thread_of_warpgroup()
        count = words.type.shape[1]
        for first in range(0, count, WARPGROUP):
            number = arith.addi(thread, int32(first))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, number, int32(count))):
                word = memref.load(words, [as_index(part.registers.item()), as_index(number)])
                address = arith.addi(base, arith.muli(number, int32(4)))
                llvm.store(word, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address))

    transforms = fill.packing.transforms(fill.columns)

    def body(*refs: Any) -> None:
        *sources, sums, out, in_order, code_stage, scale_stage, zero_stage, buffer = refs
        stages = [(code_stage, transforms), (scale_stage, ()), (zero_stage, ())][: 3 if fill.packing.has_zeros else 2]
        for part in range(parts):
            for source, (stage, its) in zip(sources, stages, strict=False):
                place(source, stage.at[part], part, transforms=its)
        plgpu.commit_smem()
        arrays = [stage.at[part] for part in range(parts) for stage, _ in stages]
        words: Any = None
        for first in range(0, fill.columns, fill.width):
            if first % fill.batch == 0:
                words = loaded_words(0, GROUP, *arrays, fill=fill, first=first)
            tile = widened_rows(words, 0, GROUP, *arrays, fill=fill, first=first)
            out[:, first : first + fill.width] = tile
        total = plgpu.load(sums, layout=MATRIX, optimized=False)
        for part, ordered in enumerate(gathered(total, buffer, parts=parts)):
            in_order[part] = ordered

    packing, (_, scale_bytes, zero_bytes) = fill.packing, sizes(fill)
    rows = parts, fill.rows
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((ROWS, fill.columns), packing.dtype),
            jax.ShapeDtypeStruct((parts, ROWS, SUMS), "float32"),
        ],
        scratch_types=[
            plgpu.SMEM((*rows, packing.row_bytes(fill.columns)), "uint8", transforms=transforms),
            plgpu.SMEM((*rows, scale_bytes // packing.scale_dtype.itemsize), packing.scale_dtype),
            plgpu.SMEM((*rows, zero_bytes), "uint8"),
            plgpu.SMEM((2, FEW_ROWS, SUMS), "float32"),
        ],
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="fragments",
    )
    words = [array(parts, fill.rows * size // 4, dtype="int32") for size in sizes(fill)]
    return kernel, [*words, array(ROWS, SUMS, dtype="float32")]


if __name__ == "__main__":
    compile_programs({name: stored_operand(*FILLS[name]) for name in sys.argv[1:] or FILLS})
