"""The quantization of rows on Hopper: the bits of the emitted code, and how XLA's code divides."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.studies.fp8_products.products import difference_of_rows, restated_rows, rows_to_quantize
from detjax.portable.quantized_matmul import quantized_rows
from tests.pallas.hopper import compiler, quantized_compiler
from tests.support.ptx import kernels

ROWS, COLUMNS = quantized_compiler.ROWS
WARPS = 4
UNWRITTEN = 0x7FC12345


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code that XLA emits."""
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """The PTX of each program's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"--xla_dump_to={folder} --xla_dump_emitter_re=.* --xla_gpu_dump_llvmir=true")
        names = [*quantized_compiler.row_programs()]
        return compiler.compiled(Path(quantized_compiler.__file__), names, dump="MOSAIC_GPU_DUMP_PTX")


def by_emitted_code(text: str, x: Any, group: int, dtype: Any = jnp.bfloat16) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, in a dtype, and scales that all CTAs of a kernel write."""
    (kernel,) = kernels(text)
    groups = -(-COLUMNS // group)
    words = np.full((ROWS, groups * group * jnp.dtype(dtype).itemsize // 4), UNWRITTEN, np.uint32)
    scales = np.full((groups, -(-ROWS // 8) * 8), UNWRITTEN, np.uint32)
    for row in range(ROWS):
        for part in range(-(-groups // WARPS)):
            kernel.run([x.view(np.uint32), words, scales], cta=(row, part))
    return words.view(dtype).astype(np.float32), scales.view(np.float32).T[:ROWS].copy()


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_emitted_code_and_plain_jax_have_the_bits_of_numpy(dtype: str, group: int, texts: dict[str, str]) -> None:
    """Zeros, infinities, NaN, ties and columns after the last one among them."""
    x = rows_to_quantize(ROWS, COLUMNS, group).astype(jnp.dtype(dtype))
    wide = x.astype(np.float32)
    expected = restated_rows(wide, group)
    actual = by_emitted_code(texts[f"{dtype} in groups of {group}"], x, group)
    assert not difference_of_rows(wide, group, {"NumPy": expected, "the kernel": actual})
    numbers, scales = (np.asarray(a) for a in quantized_rows(jnp.asarray(x), group))
    plain = numbers.reshape(ROWS, -1), scales
    assert not difference_of_rows(wide, group, {"NumPy": expected, "plain JAX": plain})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_emitted_code_of_codes_has_the_bits_of_numpy(dtype: str, texts: dict[str, str]) -> None:
    x = rows_to_quantize(ROWS, COLUMNS, 128).astype(jnp.dtype(dtype))
    wide = x.astype(np.float32)
    actual = by_emitted_code(texts[f"codes of {dtype}"], x, 128, jnp.float8_e4m3fn)
    assert not difference_of_rows(wide, 128, {"NumPy": restated_rows(wide, 128), "the kernel": actual})


def test_a_difference_is_named() -> None:
    x = rows_to_quantize(ROWS, COLUMNS, 64).astype(np.float32)
    numbers, scales = restated_rows(x, 64)
    changed = numbers.copy(), scales.copy()
    changed[0][4, 70], changed[1][5, 2] = 3, 0.5
    scale, number = difference_of_rows(x, 64, {"NumPy": (numbers, scales), "another": changed})
    assert scale.startswith("1 of 42 scales differ, first in row 5, column 128,")
    assert number.startswith("1 of 2688 numbers differ, first in row 4, column 70,") and "another 0x1.8" in number


def test_xla_divides_exactly_when_it_quantizes_rows(texts: dict[str, str], folder: Path) -> None:
    """The compiler turns a float64 quotient that is rounded to float32 into an approximate float32 quotient."""
    assert "composed rows" in texts
    code = "".join(file.read_text() for file in folder.glob("*composed_rows*.ptx"))
    assert {*re.findall(r"\b(?:div|rcp)\.\S+", code)} == {"div.rn.f64"}


@pytest.mark.parametrize("name", quantized_compiler.EXACT_ROWS)
def test_the_emitted_code_puts_each_code_in_its_place_of_the_operand(name: str, texts: dict[str, str]) -> None:
    """All codes, NaN among them. Places beyond the last row have the last eight rows, or zeros."""
    fill, parts = quantized_compiler.EXACT_ROWS[name]
    codes = np.random.default_rng(0).permuted(np.arange(parts * fill.rows * fill.columns) % 256).astype(np.uint8)
    codes = codes.reshape(parts, fill.rows, fill.columns)
    out = np.full((64, fill.columns // 2), UNWRITTEN, np.uint32)
    (kernel,) = kernels(texts[name])
    kernel.run([codes.view(np.uint32), out])
    numbers = codes.view(jnp.float8_e4m3fn).astype(fill.dtype)
    expected = np.zeros((64, fill.columns), fill.dtype)
    for row in range(64):
        warp, place, in_block = row // 16, row // 8 % 2, row % 8
        part, block = (place, warp) if fill.is_spread else (0, 2 * warp + place)
        if part < parts:
            expected[row] = numbers[part, 8 * min(block, fill.rows // 8 - 1) + in_block]
    actual, expected = (a.astype(np.float32) for a in (out.view(fill.dtype), expected))
    np.testing.assert_array_equal(actual, expected)
    assert (np.signbit(actual) == np.signbit(expected))[~np.isnan(expected)].all()


@pytest.mark.parametrize("name", quantized_compiler.PROMOTED)
def test_the_emitted_code_scales_each_product_with_the_scales_of_its_row(name: str, texts: dict[str, str]) -> None:
    (rows, is_spread, parts), draw = quantized_compiler.PROMOTED[name], np.random.default_rng(0)
    product, total = draw.integers(-99, 99, (2, 64, 16)).astype(np.float32)
    tokens, weights = (draw.integers(1, 99, shape).astype(np.float32) for shape in ((32,), (parts, rows, 4)))
    out = np.full((64, 16), UNWRITTEN, np.uint32)
    (kernel,) = kernels(texts[name])
    kernel.run([product, total, weights, tokens, out])  # in the order of their first use
    row = np.arange(64)
    source = row // 16 * 8 + row % 8 if is_spread else row
    part = row // 8 % 2 * (parts - 1) if is_spread else 0 * row
    scales = weights[part, np.minimum(source, rows - 1), quantized_compiler.PROMOTED_GROUP]
    np.testing.assert_array_equal(out.view(np.float32), product * (tokens[:16] * scales[:, None]) + total)
