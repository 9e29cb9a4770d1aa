"""The bits and numbers of the kernels that quantize rows and multiply codes."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

import detjax
from benchmarks.studies.fp8_products.sums import BLOCK, COLUMNS, TILE, block_sums
from detjax.bench.bits import same_bits
from detjax.bench.failures import reason
from detjax.contract import ACCUMULATOR, FP8_LARGEST
from detjax.operands.numerics import round_up
from detjax.operands.options import Activation, Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedActivations, QuantizedFormat, QuantizedWeight, scales_of
from detjax.pallas.hopper import matmul, norm, quantized_matmul
from detjax.pallas.hopper.matmul.plan import Plan
from detjax.pallas.hopper.quantized.codes import codes_plan, codes_product
from detjax.pallas.hopper.quantized.codes.plan import CodesPlan
from detjax.pallas.hopper.quantized.codes.tuning import candidates, estimated_seconds
from detjax.pallas.hopper.quantized.rows import quantized_groups
from detjax.portable.quantized_matmul import quantized_rows
from detjax.portable.tiles import fused_multiply_add, sealed
from detjax.runtime import compilation
from detjax.runtime.threads import in_threads

ROWS: Final = (1, 17, 64, 300, 1000, 2500)
PRODUCTS: Final[tuple[tuple[Any, str, Activation | None, bool, int], ...]] = (
    ("group", "float32", None, False, 1),
    ("group", "bfloat16", None, True, BLOCK),
    ("group", "float32", None, False, BLOCK - 1),
    ("group", "float32", "silu", True, BLOCK),
    ("group", "bfloat16", "silu", False, 1),
    ("row", "float32", None, True, 1),
    ("row", "bfloat16", "gelu_tanh", False, 1),
    ("static", "float32", None, True, 1),
)
"""Compared products: scales of activations, dtype of the weight's scales, activation of a gated product, whether there
are a bias and a residual, and how many neighbouring rows of the weight share their scales. `BLOCK - 1` rows end within
blocks of `BLOCK`, so that tiles have both."""

NORMS: Final = ((1, 4096), (17, 1024), (64, 5120), (257, 4096), (8448, 4096), (100, 20480))
"""Rows and columns of norms whose codes are compared."""

OTHER_PLANS: Final = 3
"""Plans that a product's default plan is compared with."""

BOUND: Final = 2.0**-9
"""Largest error of float32 sums against float64, relative to the sum of magnitudes. The matrix unit's sums of 128
products of e4m3 numbers had errors up to half of it."""

SIZES: Final = (40, 0, 9, 1, 130)
"""Rows of the compared experts."""


class Case(NamedTuple):
    """A product: its name, operands or their shapes, and epilogue."""

    name: str
    operands: MatmulOperands
    epilogue: Epilogue


class Variant(NamedTuple):
    """Another way to compute some rows of a case."""

    name: str
    multiply: Callable[[MatmulOperands], jax.Array]
    rows: slice = slice(None)


def compared_rows() -> Iterator[tuple[str, list[str]]]:
    """Yields, by dtype, how NumPy, the kernel that quantizes rows and plain JAX differ."""
    for dtype in ("bfloat16", "float16", "float32"):
        x = jnp.asarray(rows_to_quantize(257, 1104), dtype)
        codes, scales = (np.asarray(a) for a in detjax.jit(quantized_groups)(x))
        composed = [np.asarray(a) for a in detjax.jit(lambda x: quantized_rows(x, BLOCK))(x)]
        results = {
            "NumPy": restated_rows(np.asarray(x, np.float32)),
            "the kernel": (codes.astype(np.float32), scales.T[: len(x)]),
            "plain JAX": (composed[0].reshape(codes.shape), composed[1]),
        }
        faults = []
        for one, other in itertools.combinations(results, 2):
            faults += difference_of_rows(np.asarray(x, np.float32), {name: results[name] for name in (one, other)})
        yield f"rows of {dtype}", faults


def compared_norms(shapes: Iterable[tuple[int, int]] = NORMS) -> Iterator[tuple[str, list[str]]]:
    """Yields, by dtype and shape, how a norm and its codes differ from the norm alone and the codes of its result."""
    for dtype, (rows, columns) in itertools.product(("bfloat16", "float16"), shapes):
        x = jnp.asarray(rows_to_quantize(max(rows, 69), columns)[:rows], dtype)
        weight, options = jnp.linspace(-1, 2, columns, dtype=dtype), {"eps": 1e-6, "weight_offset": 0.0}
        norm_and_codes = detjax.jit(functools.partial(norm.forward_with_codes, **options))
        y, by_norm = norm_and_codes(x, weight)
        alone, _ = detjax.jit(lambda x, w, options=options: norm.forward(x, w, None, **options))(x, weight)
        separate = detjax.jit(quantized_groups)(y)
        results = {
            name: (np.asarray(codes, np.float32), np.asarray(scales).T[:rows])
            for name, (codes, scales, *_) in (("the norm", by_norm), ("the kernel", separate))
        }
        faults = [] if same_bits(y, alone) else ["the norm alone has other bits"]
        yield f"norm of {rows} x {columns}, {dtype}", faults + difference_of_rows(np.asarray(y, np.float32), results)


def rows_to_quantize(rows: int, columns: int) -> np.ndarray:
    """Returns numbers of many magnitudes, and rows with zeros, an infinity, a NaN and ties, if there are as many."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, columns)) * np.exp2(draw.integers(-12, 12, (rows, columns)))
    x[0], x[1, :BLOCK], x[2, 1], x[3, 2] = 0, -0.0, np.inf, np.nan
    ties = x[5:69]
    ties[:, 0], ties[:, 1:64] = 448, draw.integers(-900, 900, (len(ties), 63)) / 2
    ties[:, 64:BLOCK] /= 2**7  # so that 448 is the largest number of its group
    return x


def restated_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of codes, `[rows, columns in whole groups]`, and scales, `[rows, groups]`, in NumPy."""
    blocks = np.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK)]).reshape(len(x), -1, BLOCK)
    with np.errstate(invalid="ignore"):
        scales = np.abs(blocks).max(axis=2) / np.float32(FP8_LARGEST)
        scales[scales == 0] = 1
        quotients = np.where(blocks == 0, blocks, blocks / scales[..., None])
    codes = np.clip(quotients, -FP8_LARGEST, FP8_LARGEST).astype(jnp.float8_e4m3fn)
    return codes.astype(np.float32).reshape(len(x), -1), scales


def difference_of_rows(x: np.ndarray, results: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """Returns the counts of different numbers and scales of two results, and the first of each."""
    faults = []
    (one, (numbers, scales)), (other, (numbers_2, scales_2)) = results.items()
    for name, a, b in (("scales", scales, scales_2), ("numbers", numbers, numbers_2)):
        # The bits of NaN do not matter.
        differs = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
        if differs.any():
            row, column = np.argwhere(differs)[0]
            at = row, column * BLOCK if name == "scales" else column
            value = x[at] if at[1] < x.shape[1] else np.float32(0)
            pair, block = (row, column), (row, at[1] // BLOCK)
            faults.append(
                f"{differs.sum()} of {a.size} {name} differ, first in row {row}, column {at[1]}, "
                f"which is {float(value).hex()}: "
                f"{one} {float(a[pair]).hex()}, {other} {float(b[pair]).hex()}, "
                f"with scales {float(scales[block]).hex()} and {float(scales_2[block]).hex()}"
            )
    return faults


def compared_products(cases: Iterable[Case]) -> Iterator[tuple[str, list[str]]]:
    """Yields, by format and rows, how a product's default plan, its other variants and float64 differ."""
    cases = list(cases)

    def programs(case: Case) -> list[tuple[Variant, MatmulOperands, Callable[..., jax.Array]]] | str:
        try:
            jobs = [(variant, some_rows(case.operands, variant.rows)) for variant in variants(case)]
            return [(*job, compilation.compiled(detjax.jit(job[0].multiply), job[1])) for job in jobs]
        except Exception as failure:  # the other products still have to be compared
            return reason(failure)

    for case, compiled in zip(cases, in_threads(programs, cases), strict=True):
        if isinstance(compiled, str):
            yield case.name, [compiled]
            continue
        results = [(variant, np.asarray(program(operands))) for variant, operands, program in compiled]
        (_, default), (_, sums), *others = results
        faults = [] if case.operands.w.ndim > 2 else too_inexact(sums, case.operands)
        for variant, y in others:
            faults += difference(default[variant.rows], y, variant.name)
        yield f"product of {case.name}", faults


def difference(default: np.ndarray, other: np.ndarray, name: str) -> list[str]:
    """Returns the count of different numbers of two results, and the first of them."""
    differs = default.view(np.uint16) != other.view(np.uint16)
    if not differs.any():
        return []
    place = tuple(np.argwhere(differs)[0].tolist())
    sizes = [len(np.unique(axis)) for axis in np.nonzero(differs)]
    return [
        f"{differs.sum()} of {differs.size} numbers differ, in {sizes[0]} rows and {sizes[1]} columns, "
        f"first at {place}: {default[place]} by the default plan, {other[place]} {name}"
    ]


def too_inexact(sums: np.ndarray, operands: MatmulOperands) -> list[str]:
    """Returns whether float32 sums differ from float64's by more than `BOUND`."""
    x, w = np.asarray(operands.x, np.float32), operands.w
    group = w.format.group if w.format.activations == "group" else x.shape[1]
    static = None if w.input_scales is None else w.input_scales[0]
    numbers, scales = (np.asarray(a, np.float64) for a in quantized_rows(jnp.asarray(x), group, static))
    rows = (numbers * scales[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
    codes, by_group = np.asarray(w.codes).view(jnp.float8_e4m3fn), np.asarray(scales_of(w), np.float64)
    weights = codes.astype(np.float64) * by_group.repeat(w.format.group, axis=1)[:, : x.shape[1]]
    errors = np.abs(sums - rows @ weights.T) / (np.abs(rows) @ np.abs(weights).T)
    largest = float(errors.max())
    return [] if largest <= BOUND else [f"the largest error is {largest:.3g} of the sum of magnitudes"]


def variants(case: Case) -> Iterator[Variant]:
    """Yields the product by its default plan, the float32 sums of the first matrix, and other ways to the same bits.

    Such ways are a product for each block, a row alone, and other plans.
    """
    x, epilogue = case.operands.x, case.epilogue
    options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": x.dtype}

    def multiply(operands: MatmulOperands) -> jax.Array:
        return quantized_matmul.forward(operands, **options)

    def sums(operands: MatmulOperands) -> jax.Array:
        matrix = operands.w if operands.w.ndim == 2 else operands.w.matrix(0)
        alone = MatmulOperands(operands.x, matrix)
        return quantized_matmul.forward(alone, epilogue=Epilogue(), out_dtype=ACCUMULATOR)

    yield Variant("by its default plan", multiply)
    yield Variant("in float32", sums)
    yield Variant("by a product for each block", lambda operands: composed(operands, **options))
    yield Variant("by a row alone", multiply, slice(len(x) // 2, len(x) // 2 + 1))
    for plan in other_plans(codes_plan(case.operands, out_dtype=x.dtype)):

        def by_plan(operands: MatmulOperands, plan: CodesPlan = plan) -> jax.Array:
            return codes_product(operands, plan, epilogue=epilogue)

        yield Variant(f"by a plan of {described(plan)}", by_plan)


def described(plan: Plan) -> str:
    """Returns a name for a plan, different from the names of its product's other plans."""
    s = plan.schedule
    words = [f"tiles of {s.tile_m} x {s.tile_n}", f"{s.warpgroups} warpgroups", f"{s.lines} lines"]
    return ", ".join([*words, *["takes turns"] * getattr(plan, "takes_turns", False)])


def plans_by_time(default: CodesPlan) -> list[CodesPlan]:
    """Returns the plans of a product from the fastest to the slowest, by their estimated times."""
    return sorted(candidates(default.problem, default.scale_dtype, default.by_rows), key=estimated_seconds)


def other_plans(default: CodesPlan) -> list[CodesPlan]:
    """Returns some plans of the same product, fast and slow ones."""
    plans = [plan for plan in plans_by_time(default) if plan != default]
    return plans[:: max(1, -(-len(plans) // OTHER_PLANS))]


def some_rows(operands: MatmulOperands, rows: slice) -> MatmulOperands:
    """Returns the operands of a product of some rows."""
    x, w, bias, residual = operands
    return MatmulOperands(x[rows], w, bias, None if residual is None else residual[rows])


def compared_experts() -> Iterator[tuple[str, list[str]]]:
    """Yields, by format, how the rows of experts differ from products with the weights of single ones."""
    ends = np.cumsum(SIZES)
    for activations, scale_dtype, activation, has_bias, sharing in PRODUCTS:
        weights = [drawn_weight(seed, activations, scale_dtype, activation, sharing) for seed in range(len(SIZES))]
        draw = np.random.default_rng(0)
        x = jnp.asarray(draw.standard_normal((ends[-1], weights[0].shape[-1])), "bfloat16")
        biases = jnp.asarray(draw.standard_normal((len(SIZES), *weights[0].shape[:-1])), "bfloat16")
        epilogue = Epilogue(activation, gated=activation is not None)
        options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": x.dtype}
        w, bias = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights), biases if has_bias else None

        def grouped(x: jax.Array, w: Any, bias: Any, options: dict[str, Any] = options) -> jax.Array:
            operands = GroupedOperands(x, w, bias, jnp.int32(SIZES))
            return quantized_matmul.grouped_forward(operands, **options, unit=1)

        y, faults = np.asarray(detjax.jit(grouped)(x, w, bias)), list[str]()
        single = detjax.jit(lambda operands, options=options: quantized_matmul.forward(operands, **options))
        for expert, (size, end) in enumerate(zip(SIZES, ends, strict=True)):
            if size:
                rows = slice(end - size, end)
                operands = MatmulOperands(x[rows], weights[expert], biases[expert] if has_bias else None)
                faults += difference(np.asarray(single(operands)), y[rows], f"as rows of expert {expert}")
        yield f"experts of {activations}, {scale_dtype} scales of {sharing} rows, {activation}", faults


def drawn_weight(
    seed: int, activations: Any, scale_dtype: str, activation: Activation | None, sharing: int
) -> QuantizedWeight:
    """Returns a weight of random codes, or gate and up if there is an activation; the last block of K is not whole.

    `sharing` neighbouring rows have the same scales.
    """
    (n, k), draw, parts = (1544, 1104), np.random.default_rng(seed), (2,) if activation else ()
    group = BLOCK if activations == "group" else k
    codes = draw.standard_normal((*parts, n, k)).astype(jnp.float8_e4m3fn).view(np.uint8)
    scales = draw.uniform(0.5, 2, (*parts, -(-n // sharing), -(-k // group))).astype(jnp.dtype(scale_dtype))
    scales = scales.repeat(sharing, axis=-2)[..., :n, :]
    static = np.array([0.01 * (1 + seed)], np.float32) if activations == "static" else None
    described = QuantizedFormat("e4m3", k, group, "bfloat16", activations)
    return jax.tree.map(jnp.asarray, QuantizedWeight(codes, scales, input_scales=static, format=described))


def product_cases(numbers_of_rows: Sequence[int] = ROWS) -> Iterator[Case]:
    """Yields the compared products."""
    for (activations, scale_dtype, activation, has_both, sharing), rows in itertools.product(PRODUCTS, numbers_of_rows):
        w, draw = drawn_weight(rows, activations, scale_dtype, activation, sharing), np.random.default_rng(rows)
        x = jnp.asarray(draw.standard_normal((rows, w.shape[-1])), "bfloat16")
        bias = jnp.asarray(draw.standard_normal(w.shape[:-1]), "bfloat16") if has_both else None
        residual = jnp.asarray(draw.standard_normal((rows, w.shape[-2])), "bfloat16") if has_both else None
        described = f"{activations}, {scale_dtype} scales of {sharing} rows, {activation}"
        name = f"{described}, {'bias, residual, ' * has_both}{rows} rows"
        yield Case(name, MatmulOperands(x, w, bias, residual), Epilogue(activation, gated=activation is not None))


def composed(operands: MatmulOperands, *, epilogue: Epilogue, out_dtype: DTypeLike) -> jax.Array:
    """Returns a product whose blocks `block_sums` multiplies in codes, with tokens on the matrix unit's rows."""
    x, w, bias, residual = operands
    matrices = [w] if w.ndim == 2 else [w.matrix(0), w.matrix(1)]
    sums = [_sum_of_blocks(x, matrix) for matrix in matrices]
    biases = None if bias is None else list(bias.reshape(len(sums), -1))
    return matmul.apply_epilogue(sums, biases, residual, epilogue=epilogue, out_dtype=out_dtype)


def _sum_of_blocks(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Returns the float32 sums of a product for each block, added and scaled by the contract."""
    in_groups, static = w.format.activations == "group", None if w.input_scales is None else w.input_scales[0]
    numbers, scales = quantized_rows(x, BLOCK if in_groups else x.shape[1], static)
    weight_scales = scales_of(w).T[:, None]
    shape = round_up(len(x), TILE), round_up(len(w), COLUMNS)

    def in_blocks(codes: jax.Array, rows: int) -> jax.Array:
        codes = jnp.pad(codes, ((0, rows - len(codes)), (0, -codes.shape[1] % BLOCK))).astype(jnp.float8_e4m3fn)
        return codes.reshape(rows, -1, BLOCK).swapaxes(0, 1)

    tokens = in_blocks(numbers.reshape(len(x), -1), shape[0])
    weights = in_blocks(lax.bitcast_convert_type(w.codes, jnp.float8_e4m3fn).astype(ACCUMULATOR), shape[1])

    def add(block: jax.Array, acc: jax.Array) -> jax.Array:
        columns = range(0, shape[1], COLUMNS)
        parts = [block_sums(tokens[block], weights[block, first : first + COLUMNS]) for first in columns]
        product = jnp.concatenate(parts, axis=1)[: len(x), : len(w)]
        if not in_groups:
            return acc + product
        scale = lax.dynamic_slice_in_dim(scales, block, 1, axis=1) * weight_scales[block]
        return fused_multiply_add(product, sealed(scale), acc)

    acc = lax.fori_loop(0, len(tokens), add, jnp.zeros((len(x), len(w)), ACCUMULATOR))
    return acc if in_groups else sealed(scales * sealed(weight_scales[0] * acc))


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
