"""Quantization and dequantization of KV cache pages."""

from typing import Final, get_args

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from detjax.contract import INPUT_DTYPES, KV_BLOCK, Q4_GROUP
from detjax.operands.options import KVQuantization
from detjax.operands.quantized_pages import QuantizedPages, quantized, quantized_layout
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.runtime import compilation

KINDS: Final = get_args(KVQuantization)


@compilation.jit(static_argnames=("kind",))
def quantize_kv(x: Float[Array, "P h S K"], kind: KVQuantization) -> QuantizedPages:
    """Returns pages of keys or values as codes and scales: `scale = max |x| / L`, `code = round(x / scale)`.

    A row's codes and scale depend only on that row. `detjax.contract` defines the rounding, and the result for NaN and
    infinities.

    Args:
        x: pages of `contract.KV_BLOCK` tokens each; bfloat16, float16 or float32.
        kind: "int8" or "fp8_e4m3", with a float32 scale per token and head, or "q4_0", with a float16 scale per 32
            numbers of a row.

    Raises:
        TypeError: x's dtype is not under contract.
        ValueError: the kind is unknown, a page has another number of tokens, or the kind is "q4_0" and K is not a
            multiple of 32.

    Example:
        >>> ops.quantize_kv(jnp.ones((1, 1, 128, 32)), "int8").codes.dtype
        dtype('int8')
    """
    check_dtype("quantize_kv", x=x)
    check_not_empty("quantize_kv", x=x)
    check_shape("quantize_kv", "x", x, (*x.shape[:2], KV_BLOCK, x.shape[3]), "pages")
    check_kind("quantize_kv", kind, x.shape[3])
    return quantized(x, kind)


@compilation.jit(static_argnames=("dtype",))
def dequantize_kv(pages: QuantizedPages, dtype: DTypeLike) -> Float[Array, "P h S K"]:
    """Returns the numbers that attention reads in quantized pages: `code * scale`, rounded to float32, then to `dtype`.

    Args:
        pages: keys or values.
        dtype: the dtype of attention's queries; bfloat16, float16 or float32.

    Raises:
        TypeError: the dtype is not under contract, or the pages' dtypes do not match their kind.
        ValueError: the pages' shapes do not fit together.

    Example:
        >>> ops.dequantize_kv(ops.quantize_kv(jnp.ones((1, 1, 128, 32)), "q4_0"), "bfloat16").shape
        (1, 1, 128, 32)
    """
    check_quantized("dequantize_kv", "pages", pages)
    dtype = jnp.dtype(dtype)
    if str(dtype) not in INPUT_DTYPES:
        raise TypeError(f"dequantize_kv: dtype is {dtype}; accepted: {', '.join(INPUT_DTYPES)}")
    return pages.numbers(dtype)


def check_kind(operation: str, kind: str, width: int) -> None:
    """Raises a ValueError unless rows of `width` numbers support this kind of quantization."""
    if kind not in KINDS:
        raise ValueError(f"{operation}: the quantization is {kind!r}; accepted: {', '.join(KINDS)}")
    if kind == "q4_0" and width % Q4_GROUP:
        raise ValueError(
            f"{operation}: q4_0 of {width} numbers; accepted: multiples of {Q4_GROUP}. Choose int8 or fp8_e4m3."
        )


def check_quantized(operation: str, name: str, pages: QuantizedPages) -> None:
    """Raises a TypeError or ValueError unless codes and scales have the dtypes and shapes of their kind."""
    check_kind(operation, pages.kind, pages.shape[-1])
    codes, scales = quantized_layout(pages.shape, pages.kind)
    for part, array, accepted in (("codes", pages.codes, codes), ("scales", pages.scales, scales)):
        if array.dtype != accepted.dtype:
            raise TypeError(
                f"{operation}: {name}.{part} has dtype {array.dtype}; accepted: {accepted.dtype}, the kind being "
                f"{pages.kind}"
            )
    check_shape(operation, f"{name}.scales", pages.scales, scales.shape, f"{name}.codes being {pages.codes.shape}")
