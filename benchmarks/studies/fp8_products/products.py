"""The bits of the kernels that quantize rows, and that scale the products of blocks."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import detjax
from benchmarks.studies.fp8_products.sums import BLOCK, COLUMNS, TILE, block_sums
from detjax.bench.failures import reason
from detjax.contract import FP8_LARGEST
from detjax.operands.numerics import round_up
from detjax.operands.options import Activation, Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedActivations, QuantizedFormat, QuantizedWeight
from detjax.pallas.hopper import matmul, quantized_matmul
from detjax.pallas.hopper.quantized.codes import codes_plan, codes_product
from detjax.pallas.hopper.quantized.rows import quantized_groups
from detjax.pallas.hopper.quantized.scaled import Form, scaled_plan, scaled_product
from detjax.portable.quantized_matmul import quantized_rows
from detjax.runtime import compilation
from detjax.runtime.threads import in_threads

ROWS: Final = (1, 17, 64, 300, 1000, 2500)
PRODUCTS: Final[tuple[tuple[Any, str, Activation | None, bool], ...]] = (
    ("group", "float32", None, False),
    ("group", "bfloat16", None, True),
    ("group", "float32", "silu", True),
    ("row", "float32", None, True),
    ("row", "bfloat16", "gelu_tanh", False),
    ("static", "float32", None, True),
)
"""Compared products: scales of activations, dtype of the weight's scales, activation of a gated product, and whether
there are a bias and a residual."""


type Kernel = Form | Literal["codes"]
"""A form of the kernel that scales, or the kernel that multiplies codes."""


class Case(NamedTuple):
    """A product: its name, operands or their shapes, epilogue, and its plan's form and dtype; see `scaled_plan`."""

    name: str
    operands: MatmulOperands
    epilogue: Epilogue
    form: Kernel
    dtype: str = "bfloat16"


def compared_rows() -> Iterator[tuple[str, list[str]]]:
    """Yields, by group and dtype, how NumPy, the kernel that quantizes rows and plain JAX differ."""
    for group, dtype in itertools.product((64, 128), ("bfloat16", "float16", "float32")):
        x = jnp.asarray(rows_to_quantize(257, 1104, group), dtype)
        numbers, scales = (np.asarray(a) for a in detjax.jit(lambda x, group=group: quantized_groups(x, group))(x))
        composed = [np.asarray(a) for a in detjax.jit(lambda x, group=group: quantized_rows(x, group))(x)]
        results = {
            "NumPy": restated_rows(np.asarray(x, np.float32), group),
            "the kernel": (numbers.astype(np.float32), scales.T[: len(x)]),
            "plain JAX": (composed[0].reshape(numbers.shape), composed[1]),
        }
        faults = []
        for one, other in itertools.combinations(results, 2):
            faults += difference_of_rows(
                np.asarray(x, np.float32), group, {name: results[name] for name in (one, other)}
            )
        yield f"rows of {dtype} in groups of {group}", faults


def rows_to_quantize(rows: int, columns: int, group: int) -> np.ndarray:
    """Returns numbers of many magnitudes, and rows with zeros, an infinity, a NaN and ties, if there are as many."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, columns)) * np.exp2(draw.integers(-12, 12, (rows, columns)))
    x[0], x[1, :group], x[2, 1], x[3, 2] = 0, -0.0, np.inf, np.nan
    ties = x[5:69]
    ties[:, 0], ties[:, 1:64] = 448, draw.integers(-900, 900, (len(ties), 63)) / 2
    ties[:, 64:group] /= 2**7  # so that 448 is the largest number of its group
    return x


def restated_rows(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of codes, `[rows, columns in whole groups]`, and scales, `[rows, groups]`, in NumPy."""
    blocks = np.pad(x, [(0, 0), (0, -x.shape[1] % group)]).reshape(len(x), -1, group)
    with np.errstate(invalid="ignore"):
        scales = np.abs(blocks).max(axis=2) / np.float32(FP8_LARGEST)
        scales[scales == 0] = 1
        quotients = np.where(blocks == 0, blocks, blocks / scales[..., None])
    codes = np.clip(quotients, -FP8_LARGEST, FP8_LARGEST).astype(jnp.float8_e4m3fn)
    return codes.astype(np.float32).reshape(len(x), -1), scales


def difference_of_rows(x: np.ndarray, group: int, results: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """Returns the counts of different numbers and scales of two results, and the first of each."""
    faults = []
    (one, (numbers, scales)), (other, (numbers_2, scales_2)) = results.items()
    for name, a, b in (("scales", scales, scales_2), ("numbers", numbers, numbers_2)):
        # The bits of NaN do not matter.
        differs = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
        if differs.any():
            row, column = np.argwhere(differs)[0]
            at = row, column * group if name == "scales" else column
            value = x[at] if at[1] < x.shape[1] else np.float32(0)
            pair, block = (row, column), (row, at[1] // group)
            faults.append(
                f"{differs.sum()} of {a.size} {name} differ, first in row {row}, column {at[1]}, "
                f"which is {float(value).hex()}: "
                f"{one} {float(a[pair]).hex()}, {other} {float(b[pair]).hex()}, "
                f"with scales {float(scales[block]).hex()} and {float(scales_2[block]).hex()}"
            )
    return faults


def compared_products(cases: Iterable[Case], composed: dict[str, np.ndarray]) -> Iterator[tuple[str, list[str]]]:
    """Yields, by form, format and rows, how the kernel differs from a product for each block.

    `composed` are the products for each block by name. They are computed unless they are there.
    """
    cases = list(cases)

    def programs(case: Case) -> list[Callable[[MatmulOperands], jax.Array]] | Exception:
        forms = (False,) if case.name in composed else (False, True)
        try:
            return [compiled_product(case, is_composed=is_composed) for is_composed in forms]
        except Exception as failure:  # the other products still have to be compared
            return failure

    for case, compiled in zip(cases, in_threads(programs, cases), strict=True):
        name = f"{case.form} product in {case.dtype} of {case.name}"
        if isinstance(compiled, Exception):
            yield name, [reason(compiled)]
            continue
        actual, *others = (np.asarray(program(case.operands)) for program in compiled)
        expected = composed.setdefault(case.name, *others) if others else composed[case.name]
        differs = actual.view(np.uint16) != expected.view(np.uint16)
        faults = []
        if differs.any():
            place = tuple(np.argwhere(differs)[0].tolist())
            sizes = [len(np.unique(axis)) for axis in np.nonzero(differs)]
            faults.append(
                f"{differs.sum()} of {differs.size} numbers differ, in {sizes[0]} rows and {sizes[1]} columns, "
                f"first at {place}: {actual[place]} by the kernel, {expected[place]} composed"
            )
        yield name, faults


def product_cases(numbers_of_rows: Sequence[int] = ROWS, *, form: Kernel, dtype: str = "bfloat16") -> Iterator[Case]:
    """Yields the compared products. The last block of K is not whole."""
    n, k = 1544, 1104
    for (activations, scale_dtype, activation, has_both), rows in itertools.product(PRODUCTS, numbers_of_rows):
        draw = np.random.default_rng(rows)
        parts = (2,) if activation else ()
        group = BLOCK if activations == "group" else k
        described = QuantizedFormat("e4m3", k, group, "bfloat16", activations)
        codes = draw.standard_normal((*parts, n, k)).astype(jnp.float8_e4m3fn).view(np.uint8)
        scales = draw.uniform(0.5, 2, (*parts, n, -(-k // group))).astype(jnp.dtype(scale_dtype))
        static = np.array([0.01], np.float32) if activations == "static" else None
        w = QuantizedWeight(codes, scales, input_scales=static, format=described)
        x = jnp.asarray(draw.standard_normal((rows, k)), "bfloat16")
        bias = jnp.asarray(draw.standard_normal((*parts, n)), "bfloat16") if has_both else None
        residual = jnp.asarray(draw.standard_normal((rows, n)), "bfloat16") if has_both else None
        name = f"{activations}, {scale_dtype} scales, {activation}, {'bias, residual, ' * has_both}{rows} rows"
        operands = MatmulOperands(x, jax.tree.map(jnp.asarray, w), bias, residual)
        yield Case(name, operands, Epilogue(activation, gated=bool(parts)), form, dtype)


def compiled_product(case: Case, *, is_composed: bool) -> Callable[[MatmulOperands], jax.Array]:
    """Returns the program of a product, by the kernel or composed of a product for each block."""

    def forward(operands: MatmulOperands) -> jax.Array:
        options: dict[str, Any] = {"epilogue": case.epilogue, "out_dtype": operands.x.dtype}
        if case.form == "codes":
            if is_composed:
                return composed_of_codes(operands, **options)
            if (codes := codes_plan(operands, out_dtype=operands.x.dtype)) is not None:
                return codes_product(operands, codes, epilogue=case.epilogue)
        elif is_composed:
            return quantized_matmul.forward(operands, is_composed=True, **options)
        elif plan := scaled_plan(operands, out_dtype=operands.x.dtype, form=case.form, dtype=case.dtype):
            return scaled_product(operands, plan, epilogue=case.epilogue)
        raise ValueError(f"fp8_products: no plan serves {case.name}; accepted: products that the kernel takes")

    return compilation.compiled(detjax.jit(forward), case.operands)


def composed_of_codes(operands: MatmulOperands, *, epilogue: Epilogue, out_dtype: DTypeLike) -> jax.Array:
    """Returns a product whose blocks `block_sums` multiplies in codes, with tokens on the matrix unit's rows."""
    x, w, bias, residual = operands

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        rows, outputs = round_up(len(x), TILE), round_up(len(w), COLUMNS)
        tokens = jnp.pad(x, ((0, rows - len(x)), (0, 0))).astype(jnp.float8_e4m3fn)
        weights = jnp.pad(w, ((0, outputs - len(w)), (0, 0))).astype(jnp.float8_e4m3fn)
        parts = [block_sums(tokens, weights[first : first + COLUMNS]) for first in range(0, outputs, COLUMNS)]
        return jnp.concatenate(parts, axis=1)[: len(x), : len(w)]

    matrices = [w] if w.ndim == 2 else [w.matrix(0), w.matrix(1)]
    sums = [quantized_matmul.sum_of_blocks(x, matrix, multiply, lambda numbers: numbers[None]) for matrix in matrices]
    biases = None if bias is None else list(bias.reshape(len(sums), -1))
    return matmul.apply_epilogue(sums, biases, residual, epilogue=epilogue, out_dtype=out_dtype)


def shapes(rows: int, *shape: int, activations: QuantizedActivations = "group") -> MatmulOperands:
    """Returns the shapes of operands: rows, and a weight of e4m3 codes with quantized activations."""
    x: Any = jax.ShapeDtypeStruct((rows, shape[-1]), jnp.bfloat16)
    *parts, n, k = shape
    codes = jax.ShapeDtypeStruct(shape, jnp.uint8)
    group = BLOCK if activations == "group" else k
    scales = jax.ShapeDtypeStruct((*parts, n, k // group), jnp.float32)
    w = QuantizedWeight(codes, scales, format=QuantizedFormat("e4m3", k, group, "bfloat16", activations))
    return MatmulOperands(x, w, None, None)


def epilogue_of(shape: tuple[int, ...]) -> Epilogue:
    """Returns the epilogue of a weight of such a shape: stacked ones are gate and up."""
    return Epilogue("silu", gated=True) if len(shape) == 3 else Epilogue()
