"""The quantization of rows on Hopper, and scales of rows: the bits of the emitted code, and how XLA's code divides."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.studies.fp8_products.products import difference_of_rows, restated_rows, rows_to_quantize
from detjax.contract import FP8_BLOCK
from detjax.pallas.hopper import mosaic
from detjax.pallas.hopper.quantized.promotion import column_scales, rows_share_scales
from detjax.portable.quantized_matmul import quantized_rows
from tests.pallas.hopper import compiler, quantized_compiler
from tests.pallas.hopper.test_norm import operands_of_all_kinds
from tests.support.bits import assert_same_bits
from tests.support.ptx import POISON, kernels

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


def by_emitted_code(text: str, x: Any) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the codes, and the scales, that all CTAs of a kernel write."""
    (kernel,) = kernels(text)
    groups = -(-COLUMNS // FP8_BLOCK)
    words = np.full((ROWS, groups * FP8_BLOCK // 4), UNWRITTEN, np.uint32)
    scales = np.full((groups, -(-ROWS // 8) * 8), UNWRITTEN, np.uint32)
    for row in range(ROWS):
        for part in range(-(-groups // WARPS)):
            kernel.run([x.view(np.uint32), words, scales], cta=(row, part))
    return words.view(jnp.float8_e4m3fn).astype(np.float32), scales.view(np.float32).T[:ROWS].copy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_emitted_code_and_plain_jax_have_the_bits_of_numpy(dtype: str, texts: dict[str, str]) -> None:
    """Zeros, infinities, NaN, ties and columns after the last one among them."""
    x = rows_to_quantize(ROWS, COLUMNS).astype(jnp.dtype(dtype))
    wide = x.astype(np.float32)
    expected = restated_rows(wide)
    actual = by_emitted_code(texts[f"codes of {dtype}"], x)
    assert not difference_of_rows(wide, {"NumPy": expected, "the kernel": actual})
    numbers, scales = (np.asarray(a) for a in quantized_rows(jnp.asarray(x), FP8_BLOCK))
    plain = numbers.reshape(ROWS, -1), scales
    assert not difference_of_rows(wide, {"NumPy": expected, "plain JAX": plain})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", quantized_compiler.NORMALIZED_WIDTHS)
def test_the_emitted_norm_gives_the_codes_of_its_rounded_result(width: int, dtype: str, texts: dict[str, str]) -> None:
    """Also groups of zeros, subnormal numbers, infinities and NaN."""
    rows, groups = quantized_compiler.NORMALIZED_ROWS, width // FP8_BLOCK
    x, weight = operands_of_all_kinds(rows, width, dtype)
    y = np.full(x.size * x.itemsize // 4, UNWRITTEN, np.uint32)
    words = np.full((rows, width // 4), UNWRITTEN, np.uint32)
    scales = np.full((groups, -(-rows // 8) * 8), UNWRITTEN, np.uint32)
    (kernel,) = kernels(texts[f"norm of {width} columns of {dtype}"])
    for tile in range(rows):
        arrays = x.view(np.uint32), weight.view(np.uint32), y, words, scales
        kernel.run(arrays, cta=(tile, 0), approximate_divisor=width)  # the mean's
    norm = y.view(x.dtype).reshape(x.shape).astype(np.float32)
    actual = words.view(jnp.float8_e4m3fn).astype(np.float32), scales.view(np.float32).T[:rows].copy()
    assert not difference_of_rows(norm, {"NumPy": restated_rows(norm), "the kernel": actual})


def in_stages(shared: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a row's codes, `[1, columns]`, and its scales, `[1, groups]`, from the stages in shared memory.

    A line of 128 bytes has the codes of a group. The lines and scales of the stages' other rows are left alone.
    """
    begin, size = np.flatnonzero(shared != POISON)[0] // 32 * 32, groups * 8 * 32
    begin = next(at for at in range(begin % 256, len(shared), 256) if (shared[at : at + 32] != POISON).all())
    lines, scales = shared[begin : begin + size].reshape(groups, 8, 32), shared[begin + size :][: groups * 32]
    scales = scales.reshape(groups, 32)
    assert (lines[:, 1:] == POISON).all() and (scales[:, 1:] == POISON).all()
    numbers = lines[:, 0].copy().view(jnp.float8_e4m3fn).astype(np.float32)
    return numbers.reshape(1, -1), scales[:, 0].copy().view(np.float32)[None]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_emitted_code_leaves_a_row_in_the_stages_of_its_product(dtype: str, texts: dict[str, str]) -> None:
    columns, _ = quantized_compiler.ROW_IN_STAGES
    (kernel,) = kernels(texts[f"codes of a row of {dtype}"])
    for row in rows_to_quantize(ROWS, columns).astype(jnp.dtype(dtype)):
        shared = kernel.run([row.view(np.uint32), np.zeros(128, np.uint32)])
        wide = row[None].astype(np.float32)
        results = {"NumPy": restated_rows(wide), "the kernel": in_stages(shared, columns // FP8_BLOCK)}
        assert not difference_of_rows(wide, results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_emitted_norm_leaves_its_codes_in_the_stages_of_its_product(dtype: str, texts: dict[str, str]) -> None:
    _, columns = quantized_compiler.ROW_IN_STAGES
    groups = columns // FP8_BLOCK
    rows, weight = operands_of_all_kinds(3, columns, dtype)
    (separate,), (kernel,) = (
        kernels(texts[f"norm of {columns} columns of {dtype}"]),
        kernels(texts[f"norm of a row of {dtype}"]),
    )
    for row in rows:
        arrays = [np.resize(row, (quantized_compiler.NORMALIZED_ROWS, columns)).view(np.uint32), weight.view(np.uint32)]
        words = np.full((quantized_compiler.NORMALIZED_ROWS, columns // 4), UNWRITTEN, np.uint32)
        scales = np.full((groups, 8), UNWRITTEN, np.uint32)
        separate.run([*arrays, np.zeros_like(arrays[0]), words, scales], approximate_divisor=columns)
        arrays = [row.view(np.uint32), weight.view(np.uint32), np.zeros(128, np.uint32)]
        numbers, in_shared_memory = in_stages(kernel.run(arrays, approximate_divisor=columns), groups)
        assert_same_bits(numbers, words[:1].view(jnp.float8_e4m3fn).astype(np.float32))
        assert_same_bits(in_shared_memory, scales.view(np.float32).T[:1])


def test_a_difference_is_named() -> None:
    x = rows_to_quantize(ROWS, COLUMNS).astype(np.float32)
    numbers, scales = restated_rows(x)
    changed = numbers.copy(), scales.copy()
    changed[0][4, 70], changed[1][5, 2] = 3, 0.5
    scale, number = difference_of_rows(x, {"NumPy": (numbers, scales), "another": changed})
    assert scale.startswith("1 of 42 scales differ, first in row 5, column 256,")
    assert number.startswith("1 of 5376 numbers differ, first in row 4, column 70,") and "another 0x1.8" in number


def test_xla_divides_exactly_when_it_quantizes_rows(texts: dict[str, str], folder: Path) -> None:
    """The compiler turns a float64 quotient that is rounded to float32 into an approximate float32 quotient."""
    assert "composed rows" in texts
    code = "".join(file.read_text() for file in folder.glob("*composed_rows*.ptx"))
    assert {*re.findall(r"\b(?:div|rcp)\.\S+", code)} == {"div.rn.f64"}


@pytest.mark.parametrize("name", ["promoted products", "scaled sums"])
def test_the_emitted_code_scales_each_product_with_the_scales_of_its_row(name: str, texts: dict[str, str]) -> None:
    draw, columns, rows = np.random.default_rng(0), quantized_compiler.COLUMNS, quantized_compiler.SCALED_ROWS
    sums = draw.integers(-99, 99, (2 if name == "promoted products" else 1, 64, columns)).astype(np.float32)
    tokens, weights = (draw.integers(1, 99, shape).astype(np.float32) for shape in ((columns,), (rows, 4)))
    out = np.full((64, columns), UNWRITTEN, np.uint32)
    (kernel,) = kernels(texts[name])
    kernel.run([*sums, tokens, weights, out])  # in the order of their first use
    row_scales = weights[np.minimum(np.arange(64), rows - 1), quantized_compiler.SCALED_GROUP]
    total = sums[1] if len(sums) == 2 else 0
    np.testing.assert_array_equal(out.view(np.float32), sums[0] * (tokens * row_scales[:, None]) + total)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_emitted_code_loads_the_scales_of_columns(dtype: str, texts: dict[str, str]) -> None:
    """Columns that share scales take the first one's, though here the others have other scales."""
    columns, groups = quantized_compiler.COLUMN_SCALES
    scales = np.random.default_rng(0).uniform(0.1, 9, (columns, groups)).astype(jnp.dtype(dtype))
    outs = [np.full(columns, UNWRITTEN, np.uint32) for _ in quantized_compiler.COLUMN_UNITS]
    (kernel,) = kernels(texts[f"column scales of {dtype}"])
    kernel.run([scales.view(np.uint32), *outs])
    for unit, out in zip(quantized_compiler.COLUMN_UNITS, outs, strict=True):
        group = quantized_compiler.SCALED_GROUP
        np.testing.assert_array_equal(
            out.view(np.float32), scales[np.arange(columns) // unit * unit, group].astype(np.float32)
        )
        with mosaic.twins():
            assert_same_bits(out.view(np.float32), column_scales(group, jnp.asarray(scales), unit=unit))


def scales_of_units(rows: int, unit: int, dtype: str) -> np.ndarray:
    """Scales that are equal in each `unit` rows: zeros in one group, NaN in another."""
    count, groups = 2 * rows - quantized_compiler.MISSING_ROWS, quantized_compiler.GROUPS[dtype]
    scales = np.random.default_rng(0).uniform(0.1, 9, (-(-count // unit), groups)).astype(jnp.dtype(dtype))
    scales[:, 1], scales[:, 2] = 0, np.nan
    return np.repeat(scales, unit, axis=0)[:count]


def by_emitted_comparison(text: str, rows: int, scales: np.ndarray) -> list[list[int]]:
    """The answers for both tiles, for each unit; all threads of a tile have the same, and so has the twin."""
    units = quantized_compiler.SHARING_UNITS[rows]
    out = np.full((len(units), 2, 128), UNWRITTEN, np.uint32)
    (kernel,) = kernels(text)
    kernel.run([scales.view(np.uint32), out])
    assert (out == out[..., :1]).all()
    answers = out[..., 0].tolist()
    with mosaic.twins():
        for unit, tiles in zip(units, answers, strict=True):
            places = [np.int32(tile * rows) for tile in range(2)]
            assert tiles == [rows_share_scales(at, jnp.asarray(scales), rows=rows, unit=unit) for at in places]
    return answers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", quantized_compiler.SHARING_UNITS)
def test_the_emitted_code_sees_one_bit_by_which_a_row_has_another_scale(
    rows: int, dtype: str, texts: dict[str, str]
) -> None:
    """In each vector of groups, the bits of zeros and NaN among them. The second tile ends beyond the scales."""
    text, (few, many) = texts[f"{rows} rows with scales of {dtype}"], quantized_compiler.SHARING_UNITS[rows]
    assert by_emitted_comparison(text, rows, scales_of_units(rows, few, dtype)) == [[1, 1], [0, 0]]
    equal = scales_of_units(rows, many, dtype)
    assert by_emitted_comparison(text, rows, equal) == [[1, 1], [1, 1]]
    groups, sign = equal.shape[1], 8 * equal.itemsize - 1
    # The sign of a zero, and the last bits of a NaN and of numbers.
    bits = [(0, 0), (1, sign), (2, 0), (groups // 2, 0), (groups - 1, 0)]
    for (group, bit), row in zip(bits, (0, rows - 1, rows // 2 + 5, rows - 1, 0), strict=True):
        for first, expected in ((0, [0, 1]), (rows, [1, 0])):
            scales = equal.copy()
            scales.view(f"u{scales.itemsize}")[min(first + row, len(scales) - 1), group] ^= 1 << bit
            assert by_emitted_comparison(text, rows, scales) == [expected] * 2, (group, first + row)
