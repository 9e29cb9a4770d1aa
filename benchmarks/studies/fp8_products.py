"""Products with quantized activations on Hopper: the bits of their kernels, and what e4m3 instructions would change.

    python -m benchmarks fp8_products --out benchmarks/results/fp8-products-h200.json

The kernel that quantizes rows must have the bits of plain JAX and of NumPy, and the kernel that scales each block's
products the bits of a product of bfloat16 for each block, in each form of its plans; exit code 1 if one differs.
Whether numbers in float16 give these bits, too, is only noted.

The matrix unit adds the products of 128 columns of e4m3 numbers, given to it as bfloat16, as float16 and as e4m3 codes.
The result says what share of the sums differs from bfloat16's, how large the errors are against float64, relative to
the sum of magnitudes, and how many operations a second each dtype reaches. The products of a layer of Qwen3-8B are
timed for 1 to 4096 rows, with quantized activations and plainly. `--small` compares the sums in Pallas' interpreter,
without times and without the kernels.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import detjax
from benchmarks.study import Result, Run
from detjax.bench import command_line
from detjax.bench.failures import reason
from detjax.bench.timing import device_time, rotations
from detjax.contract import FP8_LARGEST
from detjax.operands.options import Activation, Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight
from detjax.pallas.hopper import device, matmul, quantized_matmul
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines
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

QWEN3_8B: Final = {
    "queries, keys and values": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (2, 12288, 4096),
    "down": (4096, 12288),
}
"""Shapes of the weights whose products are timed."""
TIMED: Final = (1, 16, 64, 256, 4096)
"""Numbers of rows of the timed products."""
ARMS: Final[dict[str, tuple[Form, str]]] = {
    "plain": ("widened", "bfloat16"),
    "widened": ("widened", "bfloat16"),
    "own": ("own", "bfloat16"),
    "own in float16": ("own", "float16"),
    "sent": ("sent", "bfloat16"),
    "sent in float16": ("sent", "float16"),
}
"""The timed products: the form of the kernel's plan, and the dtype that the matrix unit multiplies. Form "sent" is for
few rows."""
FEW: Final = 32
"""Most rows of a plan that sends products."""

_BLOCK: Final = 128
_TILE: Final = 64
_COLUMNS: Final = 128
_REPEATS: Final = 2000


class Case(NamedTuple):
    """A product: its name, operands or their shapes, epilogue, and its plan's form and dtype; see `scaled_plan`."""

    name: str
    operands: MatmulOperands
    epilogue: Epilogue
    form: Form
    dtype: str = "bfloat16"


def study(run: Run) -> Result:
    same: dict[str, bool] = {}
    differences: dict[str, list[str]] = {}
    sums: dict[str, Any] = {}
    speeds: dict[str, float] = {}
    seconds: dict[str, Any] = {}
    composed: dict[str, np.ndarray] = {}
    content = {
        "same_bits": same,
        "differences": differences,
        "sums": sums,
        "operations_per_second": speeds,
        "seconds": seconds,
    }

    def note(comparisons: Iterator[tuple[str, list[str]]]) -> None:
        for name, faults in comparisons:
            same[name] = not faults
            command_line.print_line(f"{name}: {'; '.join(faults) if faults else 'same bits'}")
            if faults:
                differences[name] = faults
            run.save(content)

    if not run.small:
        note(compared_rows())
        note(compared_products(product_cases(form="widened"), composed))
    for name, numbers in drawn_numbers(2 if run.small else 132).items():
        sums[name] = compared(*numbers, small=run.small)
        command_line.print_line(f"{name}: {sums[name]}")
        run.save(content)
    for dtype in () if run.small else ("bfloat16", "float16", "float8_e4m3fn"):
        speeds[dtype] = speed(dtype)
        command_line.print_line(f"{dtype}: {speeds[dtype]:.3g} operations a second")
        run.save(content)
    if not run.small:
        few = [rows for rows in ROWS if rows <= FEW]
        note(compared_products(product_cases(few, form="sent"), composed))
        note(compared_products(product_cases((17, 300, 2500), form="own"), composed))
        note(compared_products(product_cases(few, form="sent", dtype="float16"), composed))
        note(compared_products(product_cases((300,), form="own", dtype="float16"), composed))
    for name, by_rows in () if run.small else times():
        seconds[name] = by_rows
        command_line.print_line(f"{name}: {by_rows}")
        run.save(content)
    different = [name for name, is_same in same.items() if not is_same and "product in float16" not in name]
    return Result(content, f"bits of products differ: {'; '.join(different)}" if different else "")


# --- the kernel -------------------------------------------------------------------------------------------------------


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
            return [_compiled(case, is_composed=is_composed) for is_composed in forms]
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


def product_cases(numbers_of_rows: Sequence[int] = ROWS, *, form: Form, dtype: str = "bfloat16") -> Iterator[Case]:
    """Yields the compared products. The last block of K is not whole."""
    n, k = 1544, 1104
    for (activations, scale_dtype, activation, has_both), rows in itertools.product(PRODUCTS, numbers_of_rows):
        draw = np.random.default_rng(rows)
        parts = (2,) if activation else ()
        group = _BLOCK if activations == "group" else k
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


def _compiled(case: Case, *, is_composed: bool) -> Callable[[MatmulOperands], jax.Array]:
    def forward(operands: MatmulOperands) -> jax.Array:
        if is_composed:
            options: dict[str, Any] = {"epilogue": case.epilogue, "out_dtype": operands.x.dtype}
            return quantized_matmul.forward(operands, is_composed=True, **options)
        plan = scaled_plan(operands, out_dtype=operands.x.dtype, form=case.form, dtype=case.dtype)
        if plan is None:
            raise ValueError(f"fp8_products: no plan serves {case.name}; accepted: products that the kernel takes")
        return scaled_product(operands, plan, epilogue=case.epilogue)

    return compilation.compiled(detjax.jit(forward), case.operands)


# --- times ------------------------------------------------------------------------------------------------------------


def times() -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Yields, by product and number of rows, the seconds of the kernel's forms and of the plain product of bfloat16.

    Rows are quantized by the kernel that does only this; its time counts. Weights come from memory.
    """
    jobs = [
        (arm, Case(name, _shapes(rows, *shape), _epilogue(shape), *ARMS[arm]))
        for name, shape in QWEN3_8B.items()
        for rows in TIMED
        for arm in ARMS
        if rows <= FEW or ARMS[arm][0] != "sent"
    ]
    compiled = zip(jobs, in_threads(_timed, jobs), strict=True)
    for name, group in itertools.groupby(compiled, lambda job: job[0][1].name):
        by_rows: dict[str, dict[str, float]] = {}
        quantized, plain = _weights(QWEN3_8B[name])
        for (arm, case), program in group:
            shape = case.operands.x.shape
            seconds = by_rows.setdefault(str(shape[0]), {})
            if isinstance(program, str):
                continue
            x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
            sets: list[Any] = [(MatmulOperands(x, w),) for w in (plain if arm == "plain" else quantized)]
            seconds[arm] = device_time(program, sets, calls=2 * len(sets))
        for seconds in by_rows.values():
            arms = [arm for arm in seconds if arm != "plain" and "plain" in seconds]
            seconds.update({f"{arm} / plain": seconds[arm] / seconds["plain"] for arm in arms})
        yield name, by_rows


def _shapes(rows: int, *shape: int) -> MatmulOperands:
    x: Any = jax.ShapeDtypeStruct((rows, shape[-1]), jnp.bfloat16)
    *parts, n, k = shape
    codes = jax.ShapeDtypeStruct(shape, jnp.uint8)
    scales = jax.ShapeDtypeStruct((*parts, n, k // _BLOCK), jnp.float32)
    w = QuantizedWeight(codes, scales, format=QuantizedFormat("e4m3", k, _BLOCK, "bfloat16", "group"))
    return MatmulOperands(x, w, None, None)


def _epilogue(shape: tuple[int, ...]) -> Epilogue:
    return Epilogue("silu", gated=True) if len(shape) == 3 else Epilogue()


def _timed(job: tuple[str, Case]) -> Callable[[MatmulOperands], jax.Array] | str:
    """Returns the program of a timed product, or why it cannot be compiled."""
    arm, case = job

    def multiply(operands: MatmulOperands) -> jax.Array:
        options: dict[str, Any] = {"epilogue": case.epilogue, "out_dtype": jnp.bfloat16}
        return matmul.forward(operands, layout="nk", **options)

    try:
        if arm != "plain":
            return _compiled(case, is_composed=False)
        dense: Any = jax.ShapeDtypeStruct(case.operands.w.shape, jnp.bfloat16)
        return compilation.compiled(detjax.jit(multiply), case.operands._replace(w=dense))
    except Exception as failure:
        command_line.print_line(f"{case.name}, {arm}: {reason(failure)}")
        return reason(failure)


def _weights(shape: tuple[int, ...]) -> tuple[list[QuantizedWeight], list[jax.Array]]:
    """Returns quantized and plain weights of a shape, more than a cache holds."""
    size = math.prod(shape)
    described = _shapes(1, *shape).w

    @jax.jit
    def drawn(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint8) & 0xF7  # no NaN
        return bits, 1e-3 * jnp.ones(described.scales.shape, jnp.float32)

    pairs = [drawn(jnp.int32(seed)) for seed in range(rotations(size))]
    quantized = [dataclasses.replace(described, codes=codes, scales=scales) for codes, scales in pairs]
    plain = [
        lax.bitcast_convert_type(w.codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
        for w in quantized[: rotations(2 * size)]
    ]
    return quantized, plain


# --- the instructions -------------------------------------------------------------------------------------------------


def drawn_numbers(tiles: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns pairs of e4m3 matrices, `[64 * tiles, 128]` and `[128, 128]`, by what is hard about them."""
    draw = np.random.default_rng(0)
    shapes = (_TILE * tiles, _BLOCK), (_COLUMNS, _BLOCK)
    normal = [draw.standard_normal(shape) for shape in shapes]
    exponents = [draw.choice([-1, 1], shape) * np.exp2(draw.uniform(-9, 8.8, shape)) for shape in shapes]
    cancelling = [np.abs(x) * 2.0**-5 for x in normal]
    cancelling[0][:, [0, -1]], cancelling[1][:, [0, -1]] = 448, [448, -448]
    cases = {"normal": normal, "of all exponents": exponents, "cancelling": cancelling}
    return {name: (a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)) for name, (a, b) in cases.items()}


def compared(a: np.ndarray, b: np.ndarray, *, small: bool) -> dict[str, dict[str, float]]:
    """Returns for each dtype the share of sums that differ from bfloat16's, and the largest relative error."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    exact, magnitudes = a64 @ b64.T, np.abs(a64) @ np.abs(b64).T
    # The interpreter multiplies no e4m3 numbers.
    dtypes = ("bfloat16", "float16") if small else ("bfloat16", "float16", "float8_e4m3fn")
    interpreted: Any = plgpu.force_gpu_interpret_mode() if jax.default_backend() == "cpu" else contextlib.nullcontext()
    with interpreted:
        sums = {dtype: np.asarray(block_sums(jnp.asarray(a, dtype), jnp.asarray(b, dtype))) for dtype in dtypes}
    return {
        dtype: {
            "different": float(np.mean(y.view(np.uint32) != sums["bfloat16"].view(np.uint32))),
            "error": float(np.max(np.abs(y - exact) / magnitudes)),
        }
        for dtype, y in sums.items()
    }


def speed(dtype: str) -> float:
    """Returns the operations a second of products whose sums restart and are added up after each 128 columns."""
    tiles = 3 * device.multiprocessors()  # while one waits for its sums, others multiply
    a, b = jnp.ones((_TILE * tiles, _BLOCK), dtype), jnp.ones((_COLUMNS, _BLOCK), dtype)
    program = jax.jit(lambda a, b: block_sums(a, b, repeats=_REPEATS))
    return 2 * a.size * _COLUMNS * _REPEATS / device_time(program, [(a, b)], calls=10)


def block_sums(a: jax.Array, b: jax.Array, *, repeats: int = 1) -> jax.Array:
    """Returns `a @ b.T`, float32 `[M, 128]`, by one warpgroup for each 64 rows; `repeats` times this, if more."""
    line = device.SWIZZLE_BYTES // a.dtype.itemsize
    transforms = swizzled_lines(line, a.dtype.itemsize)

    def body(a: Any, b: Any, out: Any, a_tile: Any, b_tile: Any, loaded: Any) -> None:
        rows = pl.ds(jax.lax.axis_index("tile") * _TILE, _TILE)
        plgpu.copy_gmem_to_smem(a.at[rows], a_tile, loaded)
        plgpu.copy_gmem_to_smem(b, b_tile, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, a_tile, b_tile.T)
            return accumulator[...]

        def add(_: Any, total: jax.Array) -> jax.Array:
            accumulator = plgpu.ACC((_TILE, _COLUMNS), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            return total + pl.run_scoped(multiply, accumulator)

        zeros = plgpu.layout_cast(jnp.zeros((_TILE, _COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
        out[rows] = jax.lax.fori_loop(0, repeats, add, zeros)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(a), _COLUMNS), jnp.float32),
        grid=(len(a) // _TILE,),
        grid_names=("tile",),
        scratch_types=[
            plgpu.SMEM((_TILE, _BLOCK), a.dtype, transforms=transforms),
            plgpu.SMEM((_COLUMNS, _BLOCK), a.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="block_sums",
    )(a, b)
