"""The code that is emitted to widen codes in registers, which an emulator of PTX runs."""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.pallas.hopper.quantized.fragments import Fill
from detjax.pallas.hopper.quantized.widening import plain_numbers
from tests.pallas.hopper import compiler, fragments_compiler
from tests.pallas.hopper.fragments_compiler import FILLS, GROUP, ROWS, SUMS, sizes
from tests.support.bits import assert_same_bits
from tests.support.ptx import kernels

_WARPS, _BLOCK, _PLACES, _FEW_ROWS = 4, 8, 2, 32


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The PTX of each kernel."""
    return compiler.compiled(Path(fragments_compiler.__file__), dump="MOSAIC_GPU_DUMP_PTX")


def drawn_arrays(fill: Fill, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random codes, scales and zero points of a stage, as the copy engine leaves them."""
    random, packing, shape = np.random.default_rng(fill.rows), fill.packing, (parts, fill.rows)
    code_bytes, scale_bytes, zero_bytes = sizes(fill)
    codes = random.integers(0, 256, (*shape, code_bytes), np.uint8)
    if packing.numbers == "e4m3":
        codes = random.standard_normal(codes.shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    scales = random.uniform(0.1, 2, (*shape, scale_bytes // packing.scale_dtype.itemsize)).astype(packing.scale_dtype)
    return codes, scales, random.integers(0, 17, (*shape, zero_bytes), np.uint8)


def swizzled(codes: np.ndarray) -> np.ndarray:
    """Rows of 128 bytes, in which chunk c of 16 bytes of row r is at chunk c ^ r; other rows stay as they are."""
    if codes.shape[-1] != 128:
        return codes
    rows, chunks = np.arange(codes.shape[1])[:, None], np.arange(8)
    by_chunk = codes.reshape(*codes.shape[:2], 8, 16)
    return by_chunk[:, rows, chunks ^ rows % 8].reshape(codes.shape)


def operand(fill: Fill, by_part: list[np.ndarray]) -> np.ndarray:
    """The row operand that is filled with the rows of each part, place by place."""
    tile = np.zeros((_WARPS, _PLACES, _BLOCK, fill.columns), by_part[0].dtype)
    for warp, place in np.ndindex(_WARPS, _PLACES):
        part, block = (place, warp) if fill.is_spread else (0, 2 * warp + place)
        if part < len(by_part):
            first = min(block, fill.rows // _BLOCK - 1) * _BLOCK
            tile[warp, place] = by_part[part][first : first + _BLOCK]
    return tile.reshape(ROWS, -1)


@pytest.mark.parametrize("name", FILLS)
def test_emitted_code_widens_every_code_at_its_place(name: str, texts: dict[str, str]) -> None:
    fill, parts = FILLS[name]
    codes, scales, zeros = drawn_arrays(fill, parts)
    sums = np.arange(ROWS * SUMS, dtype=np.float32).reshape(ROWS, SUMS)
    out = np.full((ROWS, fill.columns // 2), 7, np.uint32)
    in_order = np.full((parts, ROWS, SUMS), 7, np.float32)
    (kernel,) = kernels(texts[name])
    sources = [swizzled(codes), scales, *([zeros] if fill.packing.has_zeros else [])]
    # Parameters come in the order of their first use.
    kernel.run([*(array.view(np.uint32).copy() for array in sources), out, sums, in_order])

    def numbers(part: int) -> np.ndarray:
        points = jnp.asarray(zeros[part]) if fill.packing.has_zeros else None
        options = {"packing": fill.packing, "columns": fill.columns}
        products = plain_numbers(
            jnp.asarray(codes[part]), jnp.asarray(scales[part]), jnp.int32(GROUP), points, **options
        )
        return np.asarray(products.astype(fill.packing.dtype))

    expected = operand(fill, [numbers(part) for part in range(parts)])
    assert_same_bits(out.view(expected.dtype), expected)
    blocks = sums.reshape(_WARPS, _PLACES, _BLOCK, SUMS)
    for part in range(parts):
        assert_same_bits(in_order[part, :_FEW_ROWS], blocks[:, part].reshape(_FEW_ROWS, SUMS))
