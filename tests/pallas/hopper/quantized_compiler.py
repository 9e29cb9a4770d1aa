"""Products with quantized weights for CUDA's compiler; see `tests.pallas.hopper.compiler`.

PYTHONPATH=<folder of the compiler>:<repository> python tests/pallas/hopper/quantized_compiler.py [NAME ...]
"""

import sys
from typing import Any

import jax

from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight
from detjax.pallas.hopper import quantized_matmul
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
) -> Program:
    """A product of plain rows with packed weights."""
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
        assert quantized_matmul.takes_codes(operands, x.dtype)
        epilogue = Epilogue("silu", True) if gated else Epilogue()
        return quantized_matmul.forward(operands, epilogue=epilogue, out_dtype=x.dtype)

    return fn, shapes


def programs() -> dict[str, Program]:
    """The programs, by name; shapes of Qwen3-8B."""
    return {
        "packed, 1 token": packed(1, 6144, 4096),
        "packed, gated, 1 token": packed(1, 12288, 4096, gated=True, zeros=True),
        "packed, 1 token of a long K": packed(1, 4096, 12288, scales="float16", residual=True),
        "packed, 64 tokens": packed(64, 4096, 4096, "e2m1", "float32", group=16),
        "packed, gated, 1024 tokens": packed(1024, 12288, 4096, gated=True, scales="float16", zeros=True),
        "packed, 1024 tokens": packed(1024, 4096, 12288, "e4m3", "float32", residual=True),
    }


if __name__ == "__main__":
    compile_programs({name: program for name, program in programs().items() if name in (sys.argv[1:] or programs())})
