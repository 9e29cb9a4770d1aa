"""Matmul of rows sorted by expert in plain JAX: tiles of one expert's rows against its weight."""

import jax
from jax import lax
from jaxtyping import Array, DTypeLike, PyTree

from detjax.contract import ACCUMULATOR, PORTABLE_ROWS, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import activated, parts
from detjax.operands.options import Epilogue, WeightLayout
from detjax.operands.products import NO_SUMS, Gradients, GroupedOperands, WeightSums
from detjax.operands.rounding import rounded
from detjax.portable.adapters import adapter_sums as adapter_sums
from detjax.portable.matmul import accumulated, halves, pre_activation
from detjax.portable.matmul import apply_epilogue as apply_epilogue
from detjax.portable.tiles import dot, final_sum, fold_groups, group_tiles, initial_sum, map_groups, sum_of_rows


def group_unit(rows: int, experts: int) -> int:
    """Returns 1: groups may begin at any row."""
    del rows, experts
    return 1


def forward(
    operands: GroupedOperands, *, layout: WeightLayout, epilogue: Epilogue, out_dtype: DTypeLike, unit: int
) -> Array:
    """Returns rows `[M, N]` for rows `[M, K]`; see `detjax.ops.grouped_matmul` for the operands and options."""
    del unit
    x, w, bias, group_sizes, _ = operands

    def tile(x: Array, expert: Array, shared: tuple[Array, Array | None]) -> Array:
        w, bias = _expert_arrays(shared, expert)
        y = activated(parts(pre_activation(x, w, bias, layout)), epilogue)
        return rounded(y, out_dtype)

    return map_groups(tile, x, (w, bias), group_tiles(group_sizes, len(x), PORTABLE_ROWS))


def backward(
    operands: GroupedOperands,
    dy: Array,
    sums: WeightSums = NO_SUMS,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    unit: int = 1,
) -> Gradients:
    """Returns the gradients of x, w and bias, or the next sums of the last two; see `detjax.portable.matmul.backward`.

    An expert's rows are added in ascending order, `WEIGHT_GRADIENT_TOKENS` of one sequence in one step.
    """
    del unit
    (x, w, bias, group_sizes, sequences), (w_sum, bias_sum) = operands, sums

    def accumulator_gradient(rows: tuple[Array, Array], expert: Array, shared: tuple[Array, Array | None]) -> Array:
        x, dy = rows
        w, bias = _expert_arrays(shared, expert)
        z = rounded(pre_activation(x, w, bias, layout), x.dtype).astype(ACCUMULATOR)
        (dz,) = jax.vjp(lambda z: activated(parts(z), epilogue), z)[1](dy.astype(ACCUMULATOR))
        return rounded(dz, x.dtype)

    def input_gradient(dz: Array, expert: Array, w: Array) -> Array:
        kept_axis = 1 if layout == "kn" else 0
        dx = [dot(dz[:, part], half, (1, kept_axis)) for part, half in enumerate(halves(_expert_arrays(w, expert)))]
        return rounded(sum(dx[1:], dx[0]), dz.dtype)

    def weight_gradient(carry: tuple[Array, Array], rows: tuple[Array, Array]) -> tuple[Array, Array]:
        x, dz = rows
        return accumulated(carry[0], x, dz, layout), carry[1] + sum_of_rows(dz.astype(ACCUMULATOR))

    tiles = group_tiles(group_sizes, len(x), PORTABLE_ROWS)
    dz = map_groups(accumulator_gradient, (x, dy), (w, bias), tiles)
    dx = map_groups(input_gradient, dz, w, tiles)
    start = initial_sum(w_sum, w.shape), initial_sum(bias_sum, (len(w), *dz.shape[1:]))
    steps = group_tiles(group_sizes, len(x), WEIGHT_GRADIENT_TOKENS, sequences)
    dw, dbias = fold_groups(weight_gradient, start, (x, dz), steps, WEIGHT_GRADIENT_TOKENS)
    return dx, final_sum(dw, w_sum, w), None if bias is None else final_sum(dbias, bias_sum, bias)


def _expert_arrays(shared: PyTree[Array], expert: Array) -> PyTree[Array]:
    """Returns one expert's arrays."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, expert, 0, keepdims=False), shared)
