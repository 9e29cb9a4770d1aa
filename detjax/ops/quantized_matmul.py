"""Matrix products with quantized weights that kernels read in codes, under contract."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands, RowCodes
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.ops.dispatch import Operation, backend_modules, one_by_one, with_vmap_rule
from detjax.runtime import fusions

_MODULES: Final = backend_modules("quantized_matmul", kernels=("hopper",))
_MATMUL: Final = Operation("quantized_matmul", _MODULES)
_GROUPED: Final = Operation("quantized_grouped_matmul", _MODULES)


def multiplies_codes(operands: MatmulOperands, out_dtype: jnp.dtype) -> bool:
    """Returns whether a product must, or can, be computed from the codes of its weight, not from a widened weight."""
    if operands.w.is_computed:
        return True
    module = _MATMUL.module()
    can = hasattr(module, "takes_codes") and not fusions.is_unfused("matmul_epilogue")
    return can and module.takes_codes(operands, out_dtype)


def takes_row_codes(w: Any) -> bool:
    """Returns whether products with a weight take the codes of rows that another kernel has quantized."""
    if not isinstance(w, QuantizedWeight):
        return False
    module = _MATMUL.module()
    return hasattr(module, "takes_row_codes") and module.takes_row_codes(w)


def quantized_matmul(
    operands: MatmulOperands,
    bias_sum: Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: jnp.dtype,
    codes: RowCodes | None = None,
) -> Float[Array, "*B N"]:
    """Returns the product for `ops.matmul`, which has checked its arguments, if `multiplies_codes` holds.

    `codes` are the rows', given only if `takes_row_codes` holds; None: the product computes them, with the same bits.
    """

    def under_contract(operands: MatmulOperands, **options: Any) -> Array:
        return _matmul(operands, codes, bias_sum, *options.values())

    return _MATMUL.call(under_contract, operands, epilogue=epilogue, out_dtype=out_dtype)


def quantized_grouped_matmul(
    operands: GroupedOperands, bias_sum: Array | None, *, epilogue: Epilogue, out_dtype: jnp.dtype, unit: int
) -> Float[Array, "M N"]:
    """Returns the product with a computed `QuantizedWeight` for `ops.grouped_matmul`, which has checked its arguments.

    A row has the same bits as from `ops.matmul` with its expert's weight.
    """

    def under_contract(operands: GroupedOperands, **options: Any) -> Array:
        return _grouped_matmul(operands, bias_sum, *options.values())

    return _GROUPED.call(under_contract, operands, epilogue=epilogue, out_dtype=out_dtype, unit=unit)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(
    operands: MatmulOperands,
    codes: RowCodes | None,
    bias_sum: Array | None,
    epilogue: Epilogue,
    out_dtype: jnp.dtype,
) -> Array:
    del bias_sum  # only the backward pass adds to it
    forward = functools.partial(_MATMUL.kernels().forward, epilogue=epilogue, out_dtype=out_dtype)
    if codes is not None:
        # The codes of a batch do not have the batch's leading axes.
        return one_by_one(lambda operands, codes: forward(operands, codes=codes), (operands, codes))
    by_array = with_vmap_rule(lambda *arrays: forward(MatmulOperands(*arrays)), rows=(True, False, False, True))
    return by_array(*operands)


def _forward(
    operands: MatmulOperands, codes: RowCodes | None, bias_sum: Array | None, *options: Any
) -> tuple[Array, Any]:
    # The backward pass needs only the residual's dtype, so an empty array stands for it.
    empty = None if operands.residual is None else jnp.zeros(0, operands.residual.dtype)
    saved = operands._replace(residual=None), bias_sum, empty
    return _matmul(operands, codes, bias_sum, *options), saved


def _backward(epilogue: Epilogue, out_dtype: jnp.dtype, saved: Any, dy: Array) -> tuple[Any, None, Any]:
    operands, bias_sum, residual = saved
    dx, dbias = one_by_one(functools.partial(_MATMUL.kernels().backward, epilogue=epilogue), (operands, dy, bias_sum))
    fresh, carried = (dbias, None) if bias_sum is None else (None, dbias)
    cotangents: Any = dx, None, fresh, None if residual is None else dy.astype(residual.dtype)
    return MatmulOperands(*cotangents), None, carried


_matmul.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _grouped_matmul(
    operands: GroupedOperands, bias_sum: Array | None, epilogue: Epilogue, out_dtype: jnp.dtype, unit: int
) -> Array:
    del bias_sum
    return _GROUPED.kernels().grouped_forward(operands, epilogue=epilogue, out_dtype=out_dtype, unit=unit)


def _grouped_forward(
    operands: GroupedOperands, bias_sum: Array | None, epilogue: Epilogue, out_dtype: jnp.dtype, unit: int
) -> tuple[Array, Any]:
    return _grouped_matmul(operands, bias_sum, epilogue, out_dtype, unit), (operands, bias_sum)


def _grouped_backward(epilogue: Epilogue, out_dtype: jnp.dtype, unit: int, saved: Any, dy: Array) -> tuple[Any, Any]:
    operands, bias_sum = saved
    dx, dbias = _GROUPED.kernels().grouped_backward(operands, dy, bias_sum, epilogue=epilogue, unit=unit)
    fresh, carried = (dbias, None) if bias_sum is None else (None, dbias)
    cotangents: Any = dx, None, fresh, None, None
    return GroupedOperands(*cotangents), carried


_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)
