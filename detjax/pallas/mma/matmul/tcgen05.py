"""A product on `tcgen05`, the matrix unit of compute capability 10, whose accumulator lies in a memory of its own.

Nothing calls it yet: it compiles, but no GPU has shown its bits. If they are not the bits of `mma.sync`, all products
must use it where one does, for any number of tokens, and experts, too.

A CTA is one warpgroup with a tile of 128 tokens x 128 outputs. One thread issues the instructions, which read both
operands from shared memory and take K in ascending steps of 16.
"""

import math
import os
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import round_up
from detjax.pallas import nvidia
from detjax.pallas.hopper.device import DTYPES
from detjax.pallas.hopper.matmul.kernel import padded
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS

SWITCH: Final = "DETJAX_TCGEN05"
"""The environment variable that lets `product` run, if it is 1."""

_TILE: Final = 128
_TILE_K: Final = 64
"""Elements of a swizzled line of 128 bytes."""
_STAGES: Final = 6
"""Stages of 32 KiB."""


def product(x: Array, w: Array, *, out_dtype: DTypeLike) -> Array:
    """Returns `x @ w.T`, `[M, N]` of `out_dtype`.

    Args:
        x: `[M, K]`, bfloat16 or float16.
        w: `[N, K]` of the same dtype.
        out_dtype: dtype of the result, rounded once.

    Raises:
        NotImplementedError: the switch is off, the GPU is not of compute capability 10, or the dtype is another.
    """
    major, minor = nvidia.architecture()
    if os.environ.get(SWITCH) != "1":
        raise NotImplementedError(
            f"tcgen05.product: no GPU has shown its bits; accepted: {SWITCH}=1 in the environment, to compare them "
            "with the backend 'mma', which serves this GPU otherwise"
        )
    if major != 10 or str(x.dtype) not in DTYPES or x.dtype != w.dtype:
        raise NotImplementedError(
            f"tcgen05.product: x has dtype {x.dtype} and w {w.dtype} on compute capability {major}.{minor}; accepted: "
            f"both {' or '.join(DTYPES)}, on 10.0 or 10.3. Cast them, or use the backend 'mma'"
        )
    (m, k), n = x.shape, w.shape[0]
    sizes = round_up(m, _TILE), round_up(n, _TILE), round_up(k, _TILE_K)
    kernel = _kernel(*sizes, x.dtype, jnp.dtype(out_dtype))
    return kernel(padded(x, (sizes[0], sizes[2])), padded(w, sizes[1:]))[:m, :n]


def _kernel(m: int, n: int, k: int, dtype: jnp.dtype, out_dtype: jnp.dtype) -> Any:
    """Returns the kernel of `x, w`, whose sizes are whole tiles."""
    grid, steps = (m // _TILE, n // _TILE), k // _TILE_K
    stages = max(2, min(_STAGES, steps))

    def body(x: Any, w: Any, y: Any, **scratch: Any) -> None:
        (tokens, weights), sums = scratch["stages"], scratch["sums"]
        loaded, consumed = scratch["loaded"], scratch["consumed"]
        tile = plgpu.planar_snake(lax.axis_index("tile"), grid, 0, 8)
        rows, columns = (pl.ds(index * _TILE, _TILE) for index in tile)

        def fill(step: Array | int) -> None:
            slot, part = step % stages, pl.ds(step * _TILE_K, _TILE_K)
            plgpu.copy_gmem_to_smem(x.at[rows, part], tokens.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(w.at[columns, part], weights.at[slot], loaded.at[slot])

        for step in range(min(stages, steps)):
            fill(step)

        @pl.loop(0, steps)
        def _(step: Array) -> None:
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(loaded.at[slot])
            plgpu.tcgen05_mma(sums, tokens.at[slot], weights.at[slot].T, consumed.at[slot], accumulate=step > 0)

            # The previous stage is filled again while the matrix unit works on this one.
            @pl.when((step > 0) & (step - 1 + stages < steps))
            def _() -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(jnp.maximum(step - 1, 0), jnp.int32(stages))])
                fill(step - 1 + stages)

        @pl.loop(max(0, steps - stages), steps)
        def _(step: Array) -> None:
            plgpu.barrier_wait(consumed.at[lax.rem(step, jnp.int32(stages))])

        y[rows, columns] = plgpu.async_load_tmem(sums).astype(out_dtype)

    staged = plgpu.SMEM((stages, _TILE, _TILE_K), dtype, transforms=swizzled_lines(_TILE_K, dtype.itemsize))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(math.prod(grid),),
        grid_names=("tile",),
        scratch_types={
            "stages": (staged, staged),
            "sums": plgpu.TMEM((_TILE, _TILE), ACCUMULATOR),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "consumed": plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
        },
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="tcgen05_matmul",
    )
