"""Matmul on `mma.sync`: one kernel for a decode step's 16 tokens up to a training batch's tiles of 128.

Every output element has one float32 accumulator that takes K in ascending steps of 16, `fragments.STEP`: tokens are
the instruction's rows and weights its columns in every schedule. So no field of a schedule can change a bit.

A CTA is one warpgroup with one tile of the result. Its ring of stages (see `mma.copies`) is filled ahead by the copies
that the architecture has. Bias, residual and running sums are read by the threads that add them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import activated
from detjax.operands.options import Epilogue, WeightLayout
from detjax.pallas.hopper.matmul.activations import ACTIVATIONS
from detjax.pallas.hopper.matmul.kernel import Operands, padded, padded_operands, problem_of
from detjax.pallas.hopper.matmul.plan import TokenLayout
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.pallas.mma import copies, fragments
from detjax.pallas.mma.matmul.plan import Plan, Schedule, default_schedule


def product(
    operands: Operands,
    *,
    token_layout: TokenLayout = "mk",
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    schedule: Schedule | None = None,
) -> Array:
    """Returns the epilogue of `x @ w`, `[M, N]`, computed by the given or the default schedule.

    With `operands.start`, the result is the next value of these running sums, without an epilogue. Donated sums are
    updated in place.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
        ValueError: the schedule does not fit.
    """
    plan, arrays, (m, n) = _prepared(operands, token_layout, layout, jnp.dtype(out_dtype), schedule)
    kernel = _kernel(plan, epilogue)
    if operands.start is None:
        return kernel(*arrays)[0][:m, :n]
    assert epilogue == Epilogue() and len(arrays) == 2 and plan.problem.out_dtype == ACCUMULATOR
    sums = jax.new_ref(padded(operands.start, plan.padded[:2]))
    kernel(*arrays, sums)
    return jax.freeze(sums)[:m, :n]


def product_keeping_sums(
    operands: Operands, *, layout: WeightLayout, epilogue: Epilogue, schedule: Schedule | None = None
) -> tuple[Array, tuple[Array, ...]]:
    """Returns `product` in x's dtype, and for each part the biased sums `[M, N]` that its epilogue consumed.

    Raises the errors of `product`.
    """
    plan, arrays, (m, n) = _prepared(operands, "mk", layout, operands.x.dtype, schedule, keeps=True)
    y, *z = (result[:m, :n] for result in _kernel(plan, epilogue)(*arrays))
    return y, tuple(z)


def _prepared(
    operands: Operands,
    token_layout: TokenLayout,
    layout: WeightLayout,
    out_dtype: jnp.dtype,
    schedule: Schedule | None,
    *,
    keeps: bool = False,
) -> tuple[Plan, list[Array], tuple[int, int]]:
    """Returns the plan, the operands padded to whole tiles, and the result's unpadded shape."""
    problem = problem_of(operands, token_layout, layout, out_dtype, keeps=keeps, backend="mma")
    schedule = schedule or default_schedule(problem)
    plan = Plan(problem, schedule)
    schedule.check(problem)
    return plan, padded_operands(operands, problem, plan.padded), (problem.m, problem.n)


def _kernel(plan: Plan, epilogue: Epilogue) -> Callable[..., list[Array]]:
    """Returns the kernel `x, w, bias?, residual?, experts? -> y, *z`, or `x, w, y`, which updates the sums y in place.

    z are the kept biased sums of each part.
    """
    problem = plan.problem

    def body(*refs: Any, tokens: Any, weights: Any, **barriers: Any) -> None:
        x, w, *rest = refs
        z = [rest.pop() for _ in range(problem.kept_sums)][::-1]
        y = rest.pop()
        experts = rest.pop() if problem.experts else None
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        cta = _Cta(plan, epilogue, Operands(x, w, bias, residual, experts=experts), (y, z))
        if experts is None:
            cta.run(tokens, weights, barriers)
        else:
            # Only the device knows how many tiles of tokens have rows: the grid is sized for the worst case.
            pl.when(cta.tile[0] < experts[plan.grid[0]])(lambda: cta.run(tokens, weights, barriers))

    def staged(shape: tuple[int, ...], line: int) -> Any:
        # The matrix unit's loads read 8 lines at once, 16 bytes of each. The swizzle spreads them over all banks.
        transforms = swizzled_lines(line, problem.dtype.itemsize)
        return plgpu.SMEM((plan.stages, *shape), problem.dtype, transforms=transforms)

    results = 0 if problem.continues else 1 + problem.kept_sums
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(plan.padded[:2], problem.out_dtype)] * results,
        grid=(math.prod(plan.grid),),
        grid_names=("tile",),
        scratch_types={
            "tokens": staged(plan.tokens_shape, plan.tokens_line),
            "weights": staged((problem.parts, *plan.weights_shape), plan.weights_line),
            **copies.barriers(plan.stages, plan.copies),
        },
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="mma_matmul",
    )


class _Cta:
    """One CTA: a warpgroup that computes one tile of the result."""

    def __init__(self, plan: Plan, epilogue: Epilogue, operands: Operands, results: tuple[Any, list[Any]]) -> None:
        self.plan, self.epilogue, self.operands = plan, epilogue, operands
        self.y, self.z = results
        index, schedule = lax.axis_index("tile"), plan.schedule
        if operands.experts is None:
            # CTAs that run at the same time work on `panel` rows of tiles, so that both operands are still in L2.
            self.tile = plgpu.planar_snake(index, plan.grid, 0, schedule.panel)
        else:
            # Neighbouring tiles of tokens often have the same expert, whose weights are then still in L2.
            outputs = jnp.int32(plan.grid[1])
            self.tile = lax.div(index, outputs), lax.rem(index, outputs)
        self.m, self.n = self.tile[0] * schedule.tile_m, self.tile[1] * schedule.tile_n

    def run(self, tokens: Any, weights: Any, barriers: dict[str, Any]) -> None:
        """Computes the tile."""
        plan = self.plan

        def fill(step: Array | int, slot: Array | int) -> copies.Copies:
            return self.sources(step, tokens.at[slot], [weights.at[slot, part] for part in range(plan.problem.parts)])

        ring = copies.Ring(plan.k_steps, plan.stages, fill, barriers.get("loaded"))
        ring.start()

        def add(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            slot = ring.next(step)
            for k in range(0, plan.tile_k, plan.fragment):
                sums = self.multiply(sums, pl.ds(k, plan.fragment), tokens.at[slot], weights.at[slot])
            return sums

        self.store(lax.fori_loop(0, plan.k_steps, add, self.start()))

    def weight(self, part: int) -> Array | int:
        """Returns the index of a part of the tile's weight."""
        if self.operands.experts is None:
            return part
        return self.operands.experts[self.tile[0]] * self.plan.problem.parts + part

    def sources(self, step: Array | int, tokens: Any, weights: Sequence[Any]) -> copies.Copies:
        """Returns the copies that fill a stage: the tokens, and the weights of each part."""
        plan, schedule = self.plan, self.plan.schedule
        m, n, k = pl.ds(self.m, schedule.tile_m), pl.ds(self.n, schedule.tile_n), pl.ds(step * plan.tile_k, plan.tile_k)
        x, w = self.operands.x, self.operands.w
        pairs = [(x.at[m, k] if plan.tokens_contiguous_in_k else x.at[k, m], tokens)]
        for part, target in enumerate(weights):
            index = self.weight(part)
            pairs.append((w.at[index, n, k] if plan.weights_contiguous_in_k else w.at[index, k, n], target))
        return pairs

    def start(self) -> tuple[Array, ...]:
        """Returns the initial sums of each part: zeros, or running sums."""
        plan, schedule, dtype = self.plan, self.plan.schedule, self.plan.problem.dtype
        if plan.problem.continues:
            tile = self.y.at[pl.ds(self.m, schedule.tile_m), pl.ds(self.n, schedule.tile_n)]
            layout = fragments.accumulator_layout(dtype, schedule.row_warps)
            return (plgpu.load(tile, layout=layout, optimized=False),)
        zeros = fragments.zeros((schedule.tile_m, schedule.tile_n), dtype, schedule.row_warps)
        return (zeros,) * plan.problem.parts

    def multiply(self, sums: tuple[Array, ...], k: Any, tokens: Any, weights: Any) -> tuple[Array, ...]:
        """Returns the sums plus the products of some elements of K of a stage."""
        plan, warps = self.plan, self.plan.schedule.row_warps
        left = fragments.load_left(tokens.at[:, k] if plan.tokens_contiguous_in_k else tokens.at[k].T, warps)

        def right(part: int) -> Array:
            ref = weights.at[part, :, k].T if plan.weights_contiguous_in_k else weights.at[part, k]
            return fragments.load_right(ref, warps)

        return tuple(fragments.multiply(total, left, right(part)) for part, total in enumerate(sums))

    def store(self, sums: Sequence[Array]) -> None:
        """Applies the epilogue, chunk by chunk, and writes the result."""
        plan, schedule = self.plan, self.plan.schedule
        layout = fragments.accumulator_layout(plan.problem.dtype, schedule.row_warps)
        rows, size = pl.ds(self.m, schedule.tile_m), plan.chunk
        for first in range(0, schedule.tile_n, size):
            columns = pl.ds(self.n + first, size)
            biased = [total[:, first : first + size] if size < schedule.tile_n else total for total in sums]
            if self.operands.bias is not None:
                for part, total in enumerate(biased):
                    source = self.operands.bias.at[self.weight(part), columns]
                    bias = plgpu.load(source, layout=layout.reduce(0), optimized=False).astype(ACCUMULATOR)
                    biased[part] = total + plgpu.layout_cast(lax.broadcast_in_dim(bias, total.shape, [1]), layout)
            # The backward pass takes the epilogue's derivative at these biased sums.
            for total, array in zip(biased, self.z, strict=False):
                array[rows, columns] = total.astype(plan.problem.out_dtype)
            y = activated(biased, self.epilogue, ACTIVATIONS)
            if self.operands.residual is not None:
                source = self.operands.residual.at[rows, columns]
                y = y + plgpu.load(source, layout=layout, optimized=False).astype(ACCUMULATOR)
            self.y[rows, columns] = y.astype(plan.problem.out_dtype)
