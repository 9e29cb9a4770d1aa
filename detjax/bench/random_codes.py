"""Random codes and scales in place of a model's matrices: benchmarks of quantized weights need no checkpoint."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from detjax.contract import FP8_BLOCK
from detjax.models import Decoder
from detjax.models.network import parameters, part_with
from detjax.operands.numerics import ceil_div
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight, widened

FORMATS: Final[Mapping[str, dict[str, Any]]] = {
    "int4": {"numbers": "int4"},
    "fp8": {"numbers": "e4m3", "activations": "group"},
}
"""Formats by name: symmetric four-bit integers, and fp8 blocks whose products quantize activations too."""

_LARGEST_GROUP: Final = 128
_MEAN_SQUARES: Final = {"int4": 21.5, "e2m1": 8.5625, "e4m3": 1e4}
"""About the mean square of the numbers that have random codes, so that products have the magnitude of their rows."""


def drawn_weight(shape: tuple[int, ...], name: str, dtype: str, seed: int) -> QuantizedWeight:
    """Returns random codes and scales of a weight `[..., N, K]` in one of `FORMATS`, in groups of up to 128 columns."""
    *rows, columns = shape
    group = min(_LARGEST_GROUP, columns)
    described = QuantizedFormat(columns=columns, group=group, dtype=dtype, **FORMATS[name])
    is_fp8 = described.numbers == "e4m3"
    codes = jax.ShapeDtypeStruct((*rows, columns if is_fp8 else columns // 2), jnp.uint8)
    scales = jax.ShapeDtypeStruct((*rows, ceil_div(columns, group)), jnp.float32 if is_fp8 else jnp.bfloat16)
    return drawn(QuantizedWeight(codes, scales, format=described), seed)


def drawn(described: QuantizedWeight, seed: int) -> QuantizedWeight:
    """Returns random codes and scales of the shapes and dtypes of a weight without zero points.

    Where products quantize activations in groups, blocks of rows share their scales, as in checkpoints of such blocks.
    """
    shapes, dtype = (described.codes.shape, described.scales.shape), jnp.dtype(described.scales.dtype).name
    codes, scales = _drawn(jax.random.key(seed), described.format, *shapes, dtype)
    return QuantizedWeight(codes, scales, format=described.format)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _drawn(
    key: Array, described: QuantizedFormat, codes: tuple[int, ...], scales: tuple[int, ...], scale_dtype: str
) -> tuple[Array, Array]:
    """Returns codes and scales of these shapes. A program serves all weights that are alike: models have hundreds."""
    keys, (*stack, rows, groups) = jax.random.split(key), scales
    drawn_codes = jax.random.bits(keys[0], codes, jnp.uint8)
    if described.numbers == "e4m3":
        drawn_codes = drawn_codes & 128 | (drawn_codes & 127) % 127  # the last magnitude is NaN's
    rows_of_scale = FP8_BLOCK if described.activations == "group" else 1
    factors = jax.random.uniform(keys[1], (*stack, ceil_div(rows, rows_of_scale), groups), minval=0.5, maxval=1.5)
    factors = jnp.repeat(factors, rows_of_scale, axis=-2)[..., :rows, :]
    drawn_scales = factors / (_MEAN_SQUARES[described.numbers] * described.columns) ** 0.5
    return drawn_codes, drawn_scales.astype(scale_dtype)


def with_codes(model: Decoder, name: str, *, plain: bool = False) -> Decoder:
    """Replaces the matrices that products take in codes by random ones of a format, and returns the model.

    Args:
        model: the model. It stays the same object.
        name: one of `FORMATS`.
        plain: whether to widen the codes at once, as loading with `quantized="widened"` does.
    """
    widen = jax.jit(widened)
    drawn_later = []
    for seed, (path, weight) in enumerate(parameters(model).items()):
        part: Any = part_with(model, path)
        if path[0] == "layers" and path[-1] in getattr(part, "PRODUCTS", ()):
            parameter: nnx.Param[Any] = getattr(part, path[-1])
            drawn_later.append((parameter, seed, jax.ShapeDtypeStruct(weight.shape, weight.dtype)))
    # All matrices are freed before the first codes are drawn: one by one, they would leave gaps between the codes that
    # are too small for a cache.
    for parameter, _, described in drawn_later:
        parameter.set_value(described)
    for parameter, seed, described in drawn_later:
        codes = drawn_weight(described.shape, name, described.dtype.name, seed)
        parameter.set_value(widen(codes) if plain else codes)
    return model
