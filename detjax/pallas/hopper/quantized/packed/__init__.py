"""Matmul of plain activations and packed weights on Hopper: the matmul kernel, with weights that it widens on the chip.

The bits are the bits of `matmul` with the widened weights: the same products are added in the same order. Only how the
weights come to the matrix unit differs. Codes and scales are a quarter to a half of the bytes, which is what small
numbers of tokens wait for. The kernel is in `kernel.py`, its plans in `plan.py`, the choice of a plan in `tuning.py`.
"""

import math
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from detjax.operands.numerics import flat_rows, round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.pallas.hopper.device import DTYPES
from detjax.pallas.hopper.matmul.kernel import padded
from detjax.pallas.hopper.matmul.plan import Problem
from detjax.pallas.hopper.quantized.packed.kernel import packed_kernel
from detjax.pallas.hopper.quantized.packed.plan import PackedPlan
from detjax.pallas.hopper.quantized.packed.tuning import default_plan
from detjax.pallas.hopper.quantized.widening import SCALE_BYTES, Codes

MAX_TOKENS: Final = 2048
"""Most tokens for which weights are widened tile by tile. Beyond, each weight is widened once, ahead of a plain product
that reads it: this takes less than reading codes once for every tile of tokens."""


def codes_of(w: QuantizedWeight) -> Codes | None:
    """Returns the meaning of a weight's packed arrays, or None if the kernel does not read them."""
    if w.groups is not None or w.tables is not None or w.is_computed or w.scales.dtype.itemsize not in (2, 4):
        return None
    return Codes(w.format.numbers, w.format.group, jnp.dtype(w.scales.dtype), w.zeros is not None, w.format.dtype)


def packed_plan(operands: MatmulOperands, *, out_dtype: DTypeLike) -> PackedPlan | None:
    """Returns the plan of a product with a packed weight, or None if a plain product of widened weights serves it."""
    x, w, bias, residual = operands
    codes, m = codes_of(w), x.size // x.shape[-1]
    if codes is None or str(x.dtype) not in DTYPES or not 0 < m <= MAX_TOKENS:
        return None
    n, k = w.shape[-2:]
    problem = Problem(
        m,
        n,
        k,
        math.prod(w.shape[:-2]),
        jnp.dtype(x.dtype),
        jnp.dtype(out_dtype),
        None if residual is None else jnp.dtype(residual.dtype),
        None if bias is None else jnp.dtype(bias.dtype),
    ).addressable
    if (problem.n, problem.k) != (n, k):
        return None
    return default_plan(problem, codes)


def packed_product(operands: MatmulOperands, plan: PackedPlan, *, epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """Returns `[*B, N]` for rows `[*B, K]`, computed by a plan of `packed_plan`.

    Raises:
        ValueError: the plan cannot be built.
    """
    plan.check()
    problem, (x, w, bias, residual) = plan.problem, operands
    flat, weights = flat_rows(x), problem.parts

    def stacked(array: Array, itemsize: int) -> Array:
        # The copy engine addresses rows of whole units of 16 bytes.
        array = array.reshape(weights, problem.n, -1)
        groups = round_up(array.shape[-1], SCALE_BYTES // itemsize)
        return padded(array, (weights, problem.n, groups))

    arrays = [
        padded(flat, (problem.m, problem.k)),
        w.codes.reshape(weights, problem.n, -1),
        stacked(w.scales, w.scales.dtype.itemsize),
    ]
    arrays += [] if w.zeros is None else [stacked(w.zeros, 1)]
    arrays += [] if bias is None else [bias.reshape(weights, problem.n)]
    arrays += [] if residual is None else [padded(flat_rows(residual), (problem.m, problem.n))]
    (y,) = packed_kernel(plan, epilogue)(*arrays)
    return y[: len(flat)].reshape(*x.shape[:-1], problem.n).astype(out_dtype)
