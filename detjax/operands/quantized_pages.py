"""Quantized pages of keys and values, with quantization and dequantization in plain JAX."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Num

from detjax.contract import ACCUMULATOR, KV_LARGEST_CODE, KV_SMALLEST, Q4_GROUP
from detjax.operands.options import KVQuantization
from detjax.operands.rounding import rounded

CODE_DTYPES: Final = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn", "q4_0": "uint8"}
SCALE_DTYPES: Final = {"int8": "float32", "fp8_e4m3": "float32", "q4_0": "float16"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedPages:
    """Pages of keys or values as codes and scales, in place of an array `[P, h, S, K]` of numbers.

    Attributes:
        codes: int8 or float8_e4m3fn `[P, h, S, K]`; for "q4_0", uint8 `[P, h, S, K / 2]`, two codes per byte.
        scales: float32 `[P, h, S]`, one per token and head; for "q4_0", float16 `[P, h, K / 32, S]`.
        kind: "int8", "fp8_e4m3" or "q4_0"; see `detjax.contract`.

    Example:
        >>> pages = ops.quantize_kv(jnp.ones((1, 1, 128, 32)), "q4_0")
        >>> pages.codes.shape, pages.scales.dtype
        ((1, 1, 128, 16), dtype('float16'))
    """

    codes: Num[Array, "P h S c"]
    scales: Float[Array, "P h *s"]
    kind: KVQuantization = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], kind: KVQuantization) -> "QuantizedPages":
        """Returns pages `[P, h, S, K]` of zeros."""
        codes, scales = quantized_layout(shape, kind)
        code = 0x88 if kind == "q4_0" else 0
        return cls(jnp.full(codes.shape, code, codes.dtype), jnp.zeros(scales.shape, scales.dtype), kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape `(P, h, S, K)` of the represented numbers."""
        *rest, width = self.codes.shape
        return (*rest, 2 * width if self.kind == "q4_0" else width)

    def with_tokens(
        self, x: Float[Array, "B T h K"], page: Int[Array, "B T"], slot: Int[Array, "B T"]
    ) -> "QuantizedPages":
        """Quantizes `x[b, t]` and writes it to slot `slot[b, t]` of page `page[b, t]`.

        Tokens whose page does not exist are dropped.
        """
        codes, scales = quantized_rows(x, self.kind)
        place = (page, slice(None), slot) if scales.ndim == 3 else (page, slice(None), slice(None), slot)
        return dataclasses.replace(
            self,
            codes=self.codes.at[page, :, slot].set(codes, mode="drop"),
            scales=self.scales.at[place].set(scales, mode="drop"),
        )

    def numbers(self, dtype: DTypeLike) -> Float[Array, "P h S K"]:
        """Returns the represented numbers; see `detjax.ops.dequantize_kv`."""
        return dequantized(self.codes, self.scales, self.kind, dtype)

    def page(self, index: Array, dtype: DTypeLike) -> Float[Array, "h S K"]:
        """Returns the numbers of one page."""
        return dequantized(self.codes[index], self.scales[index], self.kind, dtype)


def quantized_layout(shape: tuple[int, ...], kind: KVQuantization) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of the codes and of the scales of pages `[P, h, S, K]`."""
    *rest, tokens, width = shape
    if kind == "q4_0":
        codes, scales = (*rest, tokens, width // 2), (*rest, width // Q4_GROUP, tokens)
    else:
        codes, scales = shape, (*rest, tokens)
    return jax.ShapeDtypeStruct(codes, CODE_DTYPES[kind]), jax.ShapeDtypeStruct(scales, SCALE_DTYPES[kind])


def quantized(x: Float[Array, "P h S K"], kind: KVQuantization) -> QuantizedPages:
    """Returns pages as codes and scales; see `detjax.ops.quantize_kv`."""
    codes, scales = quantized_rows(x, kind)
    return QuantizedPages(codes, scales.swapaxes(-1, -2) if kind == "q4_0" else scales, kind)


def quantized_rows(x: Float[Array, "*rows K"], kind: KVQuantization) -> tuple[Array, Array]:
    """Returns codes `[*rows, K]` and scales `[*rows]`; for "q4_0" `[*rows, K / 2]` and `[*rows, K / 32]`."""
    x = x.astype(ACCUMULATOR)
    return _quantized_groups(x) if kind == "q4_0" else _quantized_tokens(x, kind)


def _quantized_tokens(x: Array, kind: KVQuantization) -> tuple[Array, Array]:
    largest_code = KV_LARGEST_CODE[kind]
    largest = jnp.max(jnp.abs(x), axis=-1)
    is_finite, is_zero = jnp.all(jnp.isfinite(x), axis=-1), largest < KV_SMALLEST
    scale = jnp.where(is_finite & ~is_zero, largest, 1.0) * ACCUMULATOR(1 / largest_code)
    t = jnp.clip(x * _reciprocal(scale)[..., None], -largest_code, largest_code)
    t = jnp.where((is_finite & ~is_zero)[..., None], t, 0.0)
    codes = lax.round(t, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8) if kind == "int8" else None
    codes = rounded(t, CODE_DTYPES[kind]) if codes is None else codes
    return codes, jnp.where(is_finite, jnp.where(is_zero, 0.0, scale), jnp.nan)


def _quantized_groups(x: Array) -> tuple[Array, Array]:
    x = x.reshape(*x.shape[:-1], -1, Q4_GROUP)
    extreme = jnp.take_along_axis(x, jnp.argmax(jnp.abs(x), axis=-1, keepdims=True), axis=-1)[..., 0]
    scale = rounded(extreme * -0.125, jnp.float16)
    is_finite, is_zero = jnp.all(jnp.isfinite(x), axis=-1) & jnp.isfinite(scale), scale == 0
    divisor = jnp.where(is_finite & ~is_zero, scale.astype(ACCUMULATOR), 1.0)
    # Clamping between product and sum prevents compilers from fusing them.
    t = jnp.clip(x * _reciprocal(divisor)[..., None], -8.0, 8.0)
    code = jnp.minimum(jnp.floor(t + 8.5), 15.0)
    code = jnp.where((is_finite & ~is_zero)[..., None], code, 8.0).astype(jnp.uint8)
    low, high = code[..., : Q4_GROUP // 2], code[..., Q4_GROUP // 2 :]
    packed = (low | (high << 4)).reshape(*x.shape[:-2], -1)
    return packed, jnp.where(is_finite, scale, jnp.full_like(scale, jnp.nan))


def _reciprocal(x: Array) -> Array:
    """Returns `1 / x` with a barrier, so that no compiler turns a product with it into a division."""
    return lax.optimization_barrier(1.0 / x)


def dequantized(codes: Array, scales: Array, kind: KVQuantization, dtype: DTypeLike) -> Array:
    """Returns the numbers `[..., S, K]` of codes and scales."""
    if kind == "q4_0":
        groups = codes.reshape(*codes.shape[:-1], -1, Q4_GROUP // 2)
        codes = jnp.concatenate([groups & 15, groups >> 4], axis=-1)
        numbers = codes.astype(ACCUMULATOR) - 8.0
        products = numbers * scales.astype(ACCUMULATOR).swapaxes(-1, -2)[..., None]
        products = products.reshape(*products.shape[:-2], -1)
    else:
        products = codes.astype(ACCUMULATOR) * scales[..., None]
    return rounded(lax.optimization_barrier(products), dtype)
