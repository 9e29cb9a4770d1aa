"""Matmul on `mma.sync`: one kernel for a decode step's 16 tokens up to a training batch's tiles of 128.

Every output element has one float32 accumulator that takes K in ascending steps of 16, `fragments.STEP`: tokens are
the instruction's rows and weights its columns in every schedule. So no field of a schedule can change a bit.

A CTA has one tile of the result, and its warpgroups have equal parts of the tile's tokens. Its ring of stages (see
`mma.copies`) is filled ahead by the copies that the architecture has. Bias, residual and running sums are read by the
threads that add them.

Products of many tokens are bound by the L2 cache first: tiles of 128 x 128 read a byte for 64 floating-point
operations, and with two warpgroups, tiles of 256 x 128 do for 85. One such CTA fills a multiprocessor, so no second one
multiplies while it waits. Therefore warpgroups do not meet, and the operands of an instruction are in registers before
the previous ones are used up, across stages. Clusters that copy their common tokens once were not faster on an H200.
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
    operands: Operands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike | None = None,
    schedule: Schedule | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns `product`, by default in x's dtype, and for each part the biased sums `[M, N]` that it consumed.

    Raises the errors of `product`.
    """
    dtype = jnp.dtype(operands.x.dtype if out_dtype is None else out_dtype)
    plan, arrays, (m, n) = _prepared(operands, "mk", layout, dtype, schedule, keeps=True)
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

    def body(*refs: Any, tokens: Any, weights: Any, staged: Any = None, **barriers: Any) -> None:
        x, w, *rest = refs
        z = [rest.pop() for _ in range(problem.kept_sums)][::-1]
        y = rest.pop()
        experts = rest.pop() if problem.experts else None
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        cta = _Cta(plan, epilogue, Operands(x, w, bias, residual, experts=experts), (y, z), staged)
        if experts is None:
            cta.run(tokens, weights, barriers)
        else:
            # Only the device knows how many tiles of tokens have rows: the grid is sized for the worst case.
            pl.when(cta.tile[0] < experts[plan.grid[0]])(lambda: cta.run(tokens, weights, barriers))

    def stages(shape: tuple[int, ...], line: int) -> Any:
        # The matrix unit's loads read 8 lines at once, 16 bytes of each. The swizzle spreads them over all banks.
        transforms = swizzled_lines(line, problem.dtype.itemsize)
        return plgpu.SMEM((plan.stages, *shape), problem.dtype, transforms=transforms)

    results = 0 if problem.continues else 1 + problem.kept_sums
    schedule, kinds, staged = plan.schedule, {}, {}
    if plan.is_staged:
        transforms = swizzled_lines(plan.chunk, problem.out_dtype.itemsize)
        staged = {"staged": plgpu.SMEM(plan.staged_shape, problem.out_dtype, transforms=transforms)}
    if schedule.warpgroups > 1:
        kinds = {"num_threads": schedule.warpgroups, "thread_name": "warpgroup"}
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(plan.padded[:2], problem.out_dtype)] * results,
        grid=(math.prod(plan.grid),),
        grid_names=("tile",),
        **kinds,
        scratch_types={
            "tokens": stages((schedule.warpgroups, *plan.tokens_shape), plan.tokens_line),
            "weights": stages((problem.parts, *plan.weights_shape), plan.weights_line),
            **staged,
            **copies.barriers(plan.stages, plan.copies, warpgroups=schedule.warpgroups),
        },
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="mma_matmul",
    )


class _Cta:
    """One warpgroup of a CTA, which computes its rows of one tile of the result."""

    def __init__(
        self, plan: Plan, epilogue: Epilogue, operands: Operands, results: tuple[Any, list[Any]], staged: Any = None
    ) -> None:
        self.plan, self.epilogue, self.operands, self.staged, self.written = plan, epilogue, operands, staged, 0
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
        self.warpgroup: Array | int = 0
        if schedule.warpgroups > 1:
            self.warpgroup = lax.axis_index("warpgroup")
            self.m = self.m + self.warpgroup * plan.rows

    def run(self, tokens: Any, weights: Any, barriers: dict[str, Any]) -> None:
        """Computes the warpgroup's rows of the tile."""
        plan, warpgroups = self.plan, self.plan.schedule.warpgroups

        def fill(step: Array | int, slot: Array | int) -> copies.Copies:
            return self.sources(step, tokens.at[slot, self.warpgroup], weights.at[slot])

        ring = copies.Ring(plan.k_steps, plan.stages, fill, **barriers, warpgroups=warpgroups)
        ring.start()
        multiply = self.multiplied if warpgroups == 1 else self.multiplied_ahead
        self.store(multiply(ring, lambda slot: (tokens.at[slot, self.warpgroup], weights.at[slot])))
        ring.finish()

    def multiplied(self, ring: copies.Ring, stage: Callable[[Array], tuple[Any, Any]]) -> tuple[Array, ...]:
        """Returns the sums of each part; `stage` returns the tokens and the weights in a slot."""
        plan = self.plan

        def add(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            tokens, weights = stage(ring.next(step))
            for k in range(0, plan.tile_k, plan.fragment):
                sums = self.added(sums, self.operands_of(tokens, weights, k, plan.fragment))
            return sums

        return lax.fori_loop(0, plan.k_steps, add, self.start())

    def multiplied_ahead(self, ring: copies.Ring, stage: Callable[[Array], tuple[Any, Any]]) -> tuple[Array, ...]:
        """Returns `multiplied`, whose operands are in registers a step of K before they are used."""
        plan = self.plan

        def load(stage: tuple[Any, Any], k: int) -> tuple[Array, ...]:
            return self.operands_of(*stage, k, fragments.STEP)

        def add(step: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            sums, ahead = state
            here = stage(lax.rem(step, jnp.int32(plan.stages)))
            for k in range(0, plan.tile_k, fragments.STEP):
                operands, following = ahead, k + fragments.STEP
                if following < plan.tile_k:
                    ahead = load(here, following)
                else:
                    if ring.consumed is not None:  # these operands are the last ones from here, and loads end in order
                        fragments.await_loads(operands, plan.schedule.row_warps)
                    # After the last step, the ring's next slot holds no new stage, and what is loaded is not used.
                    ahead = load(stage(ring.next(step + 1)), 0)
                sums = self.added(sums, operands)
            return sums, ahead

        first = load(stage(ring.next(jnp.int32(0))), 0)
        return lax.fori_loop(0, plan.k_steps, add, (self.start(), first))[0]

    def weight(self, part: int) -> Array | int:
        """Returns the index of a part of the tile's weight."""
        if self.operands.experts is None:
            return part
        return self.operands.experts[self.tile[0]] * self.plan.problem.parts + part

    def sources(self, step: Array | int, tokens: Any, weights: Any) -> copies.Copies:
        """Returns a warpgroup's copies that fill a stage: its tokens, and its share of the weights of each part."""
        plan, schedule = self.plan, self.plan.schedule
        x, w, first_k = self.operands.x, self.operands.w, step * plan.tile_k
        m, k = pl.ds(self.m, plan.rows), pl.ds(first_k, plan.tile_k)
        pairs = [(x.at[m, k] if plan.tokens_contiguous_in_k else x.at[k, m], tokens)]
        # Warpgroups share the lines of the weights.
        lines = plan.weights_shape[0] // schedule.warpgroups
        first = self.warpgroup * lines
        for part in range(plan.problem.parts):
            index, target = self.weight(part), weights.at[part]
            if schedule.warpgroups > 1:
                target = weights.at[part, pl.ds(first, lines)]
            if plan.weights_contiguous_in_k:
                source = w.at[index, pl.ds(self.n + first, lines), k]
            else:
                source = w.at[index, pl.ds(first_k + first, lines), pl.ds(self.n, schedule.tile_n)]
            pairs.append((source, target))
        return pairs

    def start(self) -> tuple[Array, ...]:
        """Returns the initial sums of each part: zeros, or running sums."""
        plan, schedule, dtype = self.plan, self.plan.schedule, self.plan.problem.dtype
        if plan.problem.continues:
            tile = self.y.at[pl.ds(self.m, plan.rows), pl.ds(self.n, schedule.tile_n)]
            layout = fragments.accumulator_layout(dtype, schedule.row_warps)
            return (plgpu.load(tile, layout=layout, optimized=False),)
        zeros = fragments.zeros((plan.rows, schedule.tile_n), dtype, schedule.row_warps)
        return (zeros,) * plan.problem.parts

    def operands_of(self, tokens: Any, weights: Any, first: int, size: int) -> tuple[Array, ...]:
        """Returns the instructions' operands for some elements of K of a stage: the tokens, and each part's weights.

        Lines along K can only be loaded whole; loads whose results are not used are removed by the compiler.
        """
        plan, warps = self.plan, self.plan.schedule.row_warps
        line = plan.schedule.line
        whole, part_of_line = pl.ds(first - first % line, max(line, size)), slice(first % line, first % line + size)

        def cut(x: Array, axis: int) -> Array:
            if size >= line:
                return x
            return x[:, part_of_line] if axis else x[part_of_line]

        if plan.tokens_contiguous_in_k:
            left = cut(fragments.load_left(tokens.at[:, whole], warps), 1)
        else:
            left = fragments.load_left(tokens.at[pl.ds(first, size)].T, warps)

        def right(part: int) -> Array:
            if plan.weights_contiguous_in_k and size == fragments.STEP:
                lines = weights.at[part, :, pl.ds(first - first % line, line)]
                return fragments.load_right_of_lines(lines, first % line, line=line, row_warps=warps)
            if plan.weights_contiguous_in_k:
                return fragments.load_right(weights.at[part, :, whole].T, warps)
            return fragments.load_right(weights.at[part, pl.ds(first, size)], warps)

        return left, *(right(part) for part in range(plan.problem.parts))

    def added(self, sums: tuple[Array, ...], operands: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns the sums plus the products of the operands."""
        left, *weights = operands
        return tuple(fragments.multiply(total, left, right) for total, right in zip(sums, weights, strict=True))

    def store(self, sums: Sequence[Array]) -> None:
        """Applies the epilogue, chunk by chunk, and writes the result."""
        plan, schedule = self.plan, self.plan.schedule
        layout = fragments.accumulator_layout(plan.problem.dtype, schedule.row_warps)
        rows, size = pl.ds(self.m, plan.rows), plan.chunk
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
                self.write(total.astype(plan.problem.out_dtype), array, first)
            y = activated(biased, self.epilogue, ACTIVATIONS)
            if self.operands.residual is not None:
                source = self.operands.residual.at[rows, columns]
                y = y + plgpu.load(source, layout=layout, optimized=False).astype(ACCUMULATOR)
            self.write(y.astype(plan.problem.out_dtype), self.y, first)
        if self.staged is not None:
            # Shared memory must outlive the copies out of it.
            plgpu.wait_smem_to_gmem(0)

    def write(self, x: Array, array: Any, first: int) -> None:
        """Writes a chunk of the warpgroup's rows from a column of the tile on to an array in memory."""
        place = array.at[pl.ds(self.m, self.plan.rows), pl.ds(self.n + first, x.shape[1])]
        if self.staged is None:
            place[...] = x
            return
        slots = self.plan.staged_shape[1]
        slot, self.written = self.staged.at[self.warpgroup, self.written % slots], self.written + 1
        # The slot is free as soon as the copy engine has read what was in it.
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        slot[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, place)
