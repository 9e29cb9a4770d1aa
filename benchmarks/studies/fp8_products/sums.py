"""The sums of the matrix unit: what e4m3 instructions would change."""

import contextlib
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.bench.timing import device_time
from detjax.pallas.hopper import device
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines

BLOCK: Final = 128
"""Columns of a group."""
TILE: Final = 64
"""Rows of a product of the matrix unit."""
COLUMNS: Final = 128
"""Columns of a product."""
_REPEATS: Final = 2000


def drawn_numbers(tiles: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns pairs of e4m3 matrices, `[64 * tiles, 128]` and `[128, 128]`, by what is hard about them."""
    draw = np.random.default_rng(0)
    shapes = (TILE * tiles, BLOCK), (COLUMNS, BLOCK)
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


def different_with_codes(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Returns the share of sums of codes that differ with exchanged operands, and with fewer columns at a time."""
    codes = jnp.asarray(a), jnp.asarray(b[:COLUMNS])
    expected = np.asarray(block_sums(*codes)).view(np.uint32)
    changes = {"exchanged": np.asarray(block_sums(codes[1], codes[0][:COLUMNS])).T, "first": expected[:COLUMNS]}
    different = {"exchanged operands": float(np.mean(changes["exchanged"].view(np.uint32) != changes["first"]))}
    for columns in (8, 16, 64):
        few = [np.asarray(block_sums(codes[0], codes[1][i : i + columns])) for i in range(0, COLUMNS, columns)]
        different[f"{columns} columns"] = float(np.mean(np.concatenate(few, axis=1).view(np.uint32) != expected))
    return different


def speed(dtype: str) -> float:
    """Returns the operations a second of products whose sums restart and are added up after each 128 columns."""
    tiles = 3 * device.multiprocessors()  # while one waits for its sums, others multiply
    a, b = jnp.ones((TILE * tiles, BLOCK), dtype), jnp.ones((COLUMNS, BLOCK), dtype)
    program = jax.jit(lambda a, b: block_sums(a, b, repeats=_REPEATS))
    return 2 * a.size * COLUMNS * _REPEATS / device_time(program, [(a, b)], calls=10)


def block_sums(a: jax.Array, b: jax.Array, *, repeats: int = 1) -> jax.Array:
    """Returns `a @ b.T`, float32 `[M, N]`, by one warpgroup for each 64 rows; `repeats` times this, if more.

    Args:
        a: `[M, 128]`, M in 64s.
        b: `[N, 128]`, N in eights up to 256.
        repeats: how often the products are added up.
    """
    columns = len(b)
    line = device.SWIZZLE_BYTES // a.dtype.itemsize
    transforms = swizzled_lines(line, a.dtype.itemsize)

    def body(a: Any, b: Any, out: Any, a_tile: Any, b_tile: Any, loaded: Any) -> None:
        rows = pl.ds(jax.lax.axis_index("tile") * TILE, TILE)
        plgpu.copy_gmem_to_smem(a.at[rows], a_tile, loaded)
        plgpu.copy_gmem_to_smem(b, b_tile, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, a_tile, b_tile.T)
            return accumulator[...]

        def add(_: Any, total: jax.Array) -> jax.Array:
            accumulator = plgpu.ACC((TILE, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            return total + pl.run_scoped(multiply, accumulator)

        zeros = plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), plgpu.Layout.WGMMA)
        out[rows] = jax.lax.fori_loop(0, repeats, add, zeros)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(a), columns), jnp.float32),
        grid=(len(a) // TILE,),
        grid_names=("tile",),
        scratch_types=[
            plgpu.SMEM((TILE, BLOCK), a.dtype, transforms=transforms),
            plgpu.SMEM((columns, BLOCK), a.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="block_sums",
    )(a, b)
