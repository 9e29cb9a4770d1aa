"""The formats of quantized weights that `config.json` may name, each as a `BlockFormat`."""

from collections.abc import Callable, Mapping
from typing import Final

import ml_dtypes
import numpy as np

from detjax.models.checkpoint.quantization import BlockFormat
from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.configuration.json_object import CheckpointError, JsonObject

_KEY: Final = "quantization_config"
_FLOATS: Final = "F32", "BF16", "F16"
_BYTES: Final = np.arange(256, dtype=np.uint8)


def stored_format(file: JsonObject) -> BlockFormat | None:
    """Returns the storage format of weights in a `config.json`; None: all weights are plain.

    The checkpoint's tensors determine which weights are quantized.

    Raises:
        CheckpointError: the format is not supported.
    """
    described = file.object(_KEY)
    if described is None:
        return None
    method = described.get("quant_method")
    if method not in list(_READERS):
        raise described.error("quant_method", f"{', '.join(_READERS)}; other quantizations are not supported")
    return _READERS[method](described)


# --- MXFP4 ------------------------------------------------------------------------------------------------------------

_BIAS: Final = 127
"""Subtracted from stored exponents."""
_NAN: Final = 255
"""The exponent that stands for NaN."""


def _powers_of_two(scales: StoredTensor) -> np.ndarray:
    """Returns scales that are stored as exponents."""
    exponents = scales.read()
    if (exponents == _NAN).any():
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name!r} holds {_NAN}, which is NaN in MXFP4; accepted: exponents from 0 "
            f"to {_NAN - 1}"
        )
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)


def _nibbles(numbers: np.ndarray) -> np.ndarray:
    """Returns the two numbers of each byte, the low four bits first, given the numbers of four bits."""
    return np.stack([numbers[_BYTES & 15], numbers[_BYTES >> 4]], axis=-1)


_MAGNITUDES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_MXFP4: Final = BlockFormat(
    name="MXFP4",
    codes="_blocks",
    scales="_scales",
    code_format="U8",
    scale_formats=("U8",),
    numbers=_nibbles(np.concatenate([_MAGNITUDES, -_MAGNITUDES])),
    block=(1, 32),
    row_axes=2,
    transposed=True,
    read_scales=_powers_of_two,
)
"""Groups of 32 four-bit numbers that share a power of two (Open Compute Project 2023), outputs being rows.

The plain tensors have inputs as rows. bfloat16 and float32 hold the values exactly.
"""


# --- blocks of fp8 ----------------------------------------------------------------------------------------------------


def _read_fp8(described: JsonObject) -> BlockFormat:
    """Reads blocks of e4m3 numbers (DeepSeek-AI 2024, section 3.3). The scales are factors."""
    described.choice("fmt", "e4m3", ("e4m3",))
    described.choice("activation_scheme", "dynamic", ("dynamic",))
    block = described.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise described.error("weight_block_size", "a list of the rows and the columns of a block, such as [128, 128]")
    return BlockFormat(
        name="fp8",
        codes="",
        scales="_scale_inv",
        code_format="F8_E4M3",
        scale_formats=_FLOATS,
        numbers=_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None],
        block=(block[0], block[1]),
    )


# --- groups of int4 ---------------------------------------------------------------------------------------------------


def _read_compressed_tensors(described: JsonObject) -> BlockFormat:
    """Reads groups of four-bit integers along rows, eight in 32 bits, as compressed-tensors packs them."""
    described.choice("format", "pack-quantized", ("pack-quantized",))
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if described.get(key) not in (None, {}):
            raise described.error(key, "null; anything else is not supported")
    groups = described.object("config_groups")
    if groups is None:
        raise described.error("config_groups", "an object that describes the quantization of weights")
    sizes = {name: _read_group(groups, name) for name in groups.raw}
    for name, size in sizes.items():
        if size != next(iter(sizes.values())):
            raise groups.error(name, "groups of one size")
    return BlockFormat(
        name="pack-quantized",
        codes="_packed",
        scales="_scale",
        shape="_shape",
        code_format="I32",
        scale_formats=_FLOATS,
        numbers=_nibbles(np.arange(-8, 8, dtype=np.float32)),
        block=(1, next(iter(sizes.values()))),
    )


def _read_group(groups: JsonObject, name: str) -> int:
    """Returns the group size that an object of `config_groups` describes."""
    group = groups.object(name)
    weights = None if group is None else group.object("weights")
    if group is None or weights is None:
        raise groups.error(name, "an object whose weights describe a quantization")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise group.error(key, "null; quantized activations are not supported")
    group.choice("format", "pack-quantized", ("pack-quantized",))
    weights.choice("type", "int", ("int",))
    weights.choice("strategy", "group", ("group",))
    weights.choice("actorder", "static", ("static", "weight"))
    if weights.integer("num_bits") != 4:
        raise weights.error("num_bits", "4")
    if not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "true")
    return weights.integer("group_size")


_READERS: Final[Mapping[str, Callable[[JsonObject], BlockFormat]]] = {
    "mxfp4": lambda _: _MXFP4,
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
}
