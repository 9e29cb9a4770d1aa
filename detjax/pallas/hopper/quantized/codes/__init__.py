"""Matmul of e4m3 codes on Hopper: the matrix unit multiplies the codes as they are, and warpgroups scale each block.

This is the plain matmul's pipeline with half of its bytes: nothing is widened. After each block of 128 columns a
warpgroup adds the block's products to its sums, in the order and with the roundings of `detjax.contract`. For e4m3
operands the matrix unit keeps fewer bits of the sums within a block than for 16-bit ones, as in the kernels of other
libraries. No other kernel has these bits. So whether this one multiplies depends on the format of the weight alone: see
`serves`.

A stage has one or more blocks, with the scales of its tokens and weights. A warpgroup has up to `at_once` products in
flight. While the matrix unit multiplies one of them, or for the other warpgroup, it adds an earlier one to its sums.

- For few tokens, weights are on the matrix unit's rows. Threads load scales before the products are there, and then
  multiply only.
- For more than `_FEW_TOKENS`, tokens are on the rows, since in a checkpoint with blocks of 128 x 128 numbers many
  neighbouring weights share their scales. Then a thread loads few scales and multiplies few factors. Whether neighbours
  share scales is read from the scales themselves, for each tile: a warpgroup compares them while its first stages
  arrive. Both cases have the same bits.

Other kernels quantize the rows: the norm before the product, or one of its own. A single row is quantized within this
kernel if that is faster; see `quantized.prologue`.

The kernel is in `kernel.py`, its plans in `plan.py`, the choice of a plan in `tuning.py`.
"""

import math
from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike

from detjax.contract import FP8_BLOCK
from detjax.operands.numerics import round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands, RowCodes
from detjax.operands.quantized_weight import QuantizedWeight, scales_of
from detjax.pallas.hopper import grouped_matmul as grouped
from detjax.pallas.hopper import norm
from detjax.pallas.hopper.matmul.kernel import Operands, padded
from detjax.pallas.hopper.matmul.plan import Problem
from detjax.pallas.hopper.quantized.codes.kernel import codes_kernel
from detjax.pallas.hopper.quantized.codes.plan import CodesPlan
from detjax.pallas.hopper.quantized.codes.tuning import default_plan
from detjax.pallas.hopper.quantized.prologue import Prologue, quantizing
from detjax.pallas.hopper.quantized.rows import E4M3, quantized_tokens

_EXPERT_TILES: Final = (128, 64, 32, 16, 8)
"""Sizes of tiles of an expert's rows."""


def serves(w: QuantizedWeight) -> bool:
    """Returns whether this kernel computes all products of a weight with quantized activations.

    Scales belong to groups of 128 columns, or to rows. No number of rows, epilogue or dtype of a result may matter:
    products of other kernels have other bits.
    """
    return w.format.activations != "group" or w.format.group == FP8_BLOCK


def codes_plan(operands: MatmulOperands, *, out_dtype: DTypeLike) -> CodesPlan:
    """Returns the plan of a product `[M, K] x [..., N, K]` with a weight that the kernel `serves`."""
    x, w, bias, residual = operands
    return _plan_of_rows(len(x), w, bias, residual, out_dtype=out_dtype)


def _plan_of_rows(
    rows: int,
    w: QuantizedWeight,
    bias: Array | None,
    residual: Array | None = None,
    *,
    out_dtype: DTypeLike,
    experts: int = 0,
    tile: int | None = None,
) -> CodesPlan:
    """Returns the plan of a number of rows.

    Raises:
        RuntimeError: none fits, which is an error in `candidates`.
    """
    assert serves(w)
    n, k = w.shape[-2:]
    problem = Problem(
        rows,
        n,
        round_up(k, FP8_BLOCK),
        math.prod(w.shape[:-2]) // max(1, experts),
        E4M3,
        jnp.dtype(out_dtype),
        None if residual is None else jnp.dtype(residual.dtype),
        None if bias is None else jnp.dtype(bias.dtype),
        experts=experts,
    ).addressable
    plan = default_plan(problem, stored_scales(w).dtype, w.format.activations != "group", tile)
    if plan is None:
        tiles = "" if tile is None else f" in tiles of {tile} tokens"
        raise RuntimeError(f"quantized_matmul: no plan multiplies the codes of {problem}{tiles}, which is an error")
    return plan


def stored_scales(w: QuantizedWeight) -> Array:
    """Returns the scales as they are stored, if they are numbers."""
    return w.scales if w.tables is None and w.scales.dtype.itemsize in (2, 4) else scales_of(w)


def codes_product(
    operands: MatmulOperands,
    plan: CodesPlan,
    *,
    epilogue: Epilogue,
    source: int = 0,
    codes: RowCodes | None = None,
) -> Array:
    """Returns `[M, N]` for rows `[M, K]`, computed by a plan of `codes_plan`.

    `source` chooses the static scale, if the checkpoint has any. `codes` are the rows'; None: they are computed first.

    Raises:
        ValueError: the plan cannot be built.
    """
    if unmet := plan.unmet_requirements():
        raise ValueError(f"quantized_matmul: {plan}; accepted: {'; '.join(unmet)}")
    x, w, bias, residual = operands
    return _product(Operands(x, w, bias, residual), plan, epilogue, source, codes)


def grouped_codes_product(
    operands: GroupedOperands, *, epilogue: Epilogue, out_dtype: DTypeLike, unit: int, source: int = 0
) -> Array:
    """Returns rows `[M, N]` for rows `[M, K]` that are sorted by expert, of a weight that the kernel `serves`.

    See `detjax.ops.grouped_matmul` for the operands, and `codes_product` for `source`.
    """

    def multiply(tiles: Operands, *, schedule: int, **_: Any) -> Array:
        options: dict[str, Any] = {"tile": schedule, "out_dtype": out_dtype, "experts": len(tiles.w)}
        return _product(tiles, _plan_of_rows(len(tiles.x), tiles.w, tiles.bias, **options), epilogue, source)

    kernels = grouped.Kernels(product=multiply, schedule=lambda tile, *_: tile, tiles=_EXPERT_TILES)
    options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype, "unit": unit}
    return grouped.forward(operands, layout="nk", kernels=kernels, **options)


def _product(
    operands: Operands, plan: CodesPlan, epilogue: Epilogue, source: int, row_codes: RowCodes | None = None
) -> Array:
    """Returns the product of rows, quantized first unless they are, with a weight or with the experts' weights."""
    x, w, bias, residual = operands[:4]
    problem, weights, n = plan.problem, plan.problem.parts * max(1, plan.problem.experts), w.shape[-2]
    weight_codes = lax.bitcast_convert_type(w.codes, E4M3).reshape(weights, n, -1)
    scales = stored_scales(w).reshape(weights, n, -1)
    groups = round_up(scales.shape[-1], plan.scale_unit)
    static = None if w.input_scales is None else w.input_scales[..., source]
    if static is not None and operands.experts is not None:
        static = jnp.repeat(static[operands.experts[:-1]], plan.schedule.tile_m)[:, None]
    plan, prologue = _with_prologue(plan, x, row_codes)
    if prologue is not None:
        arrays = [*prologue.arrays]
    else:
        codes, token_scales = quantized_tokens(x, w, static) if row_codes is None else row_codes[:2]
        arrays = [padded(codes, (problem.m, problem.k)), token_scales]
    arrays += [padded(weight_codes, (weights, problem.n, problem.k)), padded(scales, (weights, problem.n, groups))]
    arrays += [] if bias is None else [padded(bias.reshape(weights, n), (weights, problem.n))]
    arrays += [] if residual is None else [padded(residual, (problem.m, problem.n))]
    arrays += [] if operands.experts is None else [operands.experts]
    (y,) = codes_kernel(plan, epilogue, prologue)(*arrays)
    return y[: len(x), :n]


def _with_prologue(plan: CodesPlan, x: Array, codes: RowCodes | None) -> tuple[CodesPlan, Prologue | None]:
    """Returns a plan with the prologue that computes the codes of rows, or without one if they are computed before."""
    if codes is None:
        prologue = quantizing(x)
    else:
        prologue = None if codes.norm is None else norm.prologue(codes.norm)
    joined = None if prologue is None else plan.with_prologue()
    return (plan, None) if joined is None else (joined, prologue)
