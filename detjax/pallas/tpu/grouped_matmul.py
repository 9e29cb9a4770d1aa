"""Matmul of rows sorted by expert on TPUs, for mixture-of-experts models.

Each row has the bits of `matmul.forward` with its expert's weight. A tile of rows is visited once for each expert with
rows in it, and each visit writes only its expert's rows. So no row is moved, and the sizes of groups affect only how
often a tile is visited.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike, Float

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import activated, ceil_div
from detjax.operands.options import Epilogue, WeightLayout
from detjax.operands.products import GroupedOperands
from detjax.pallas.tpu import matmul
from detjax.pallas.tpu.device import LANES, SUBLANES, VMEM_LIMIT, check_dtypes
from detjax.pallas.tpu.matmul import ACTIVATIONS, EPILOGUE_ROWS, TOKEN_STEP, Contraction, Problem, padded
from detjax.portable import grouped_matmul as portable_grouped_matmul
from detjax.portable.matmul import apply_epilogue as apply_epilogue

ROWS: Final = TOKEN_STEP.rows
"""Rows of a tile."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The number of outputs of a tile, a multiple of 128. No bit depends on it."""

    outputs: int

    def check(self, problem: Problem) -> None:
        """Raises ValueError if the outputs are not whole registers."""
        if self.outputs < 1 or self.outputs % LANES:
            raise ValueError(
                f"grouped_matmul: the schedule has {self.outputs} outputs, with N being {problem.n}; accepted: "
                f"positive multiples of {LANES}. Round it up."
            )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule of a product with one expert's weight.

    Raises:
        NotImplementedError: blocks with all of K don't fit into VMEM.
    """
    schedule = matmul.default_schedule(problem)
    if schedule.slab != problem.k:
        raise NotImplementedError(
            f"grouped_matmul: K is {problem.k} in {problem.dtype}; accepted: tiles with all of K that fit into a TPU's "
            f"VMEM. Use one matmul for each expert, or a narrower dtype."
        )
    return Schedule(schedule.outputs)


def forward(
    operands: GroupedOperands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    unit: int = 1,
    schedule: Schedule | None = None,
) -> Float[Array, "M N"]:
    """Returns the epilogue of `x[m] @ w[e] + bias[e]` for the expert e of row m; zeros in rows after the last group.

    Args:
        operands: see `GroupedOperands`; group sizes add up to at most M.
        layout: the layout of each weight.
        epilogue: applied to the biased float32 sums.
        out_dtype: dtype of the result.
        unit: not used.
        schedule: default: `default_schedule`'s.

    Raises:
        NotImplementedError: a dtype is not one of `device.DTYPES`, or all of K does not fit into VMEM at once.
        ValueError: the schedule does not fit the problem.
    """
    del unit
    x, w, bias, group_sizes, _ = operands
    m, out_dtype = x.shape[0], jnp.dtype(out_dtype)
    check_dtypes("grouped_matmul", x, w, jax.ShapeDtypeStruct((), out_dtype))
    contraction = Contraction("mk", layout, TOKEN_STEP)
    k_axis = 1 + contraction.w_axis
    w = padded(w.reshape(w.shape[0], -1, *w.shape[-2:]), k_axis, LANES)
    x = padded(padded(x, 1, LANES), 0, SUBLANES)
    problem = Problem(contraction, w.shape[1], w.shape[5 - k_axis], x.shape[1], x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)

    if bias is not None:
        bias = bias.reshape(bias.shape[0], problem.parts, problem.n)

    def kernel(visits: _Visits, x: Any, w: Any, bias: Any, out: Any, accumulators: Any) -> None:
        _Kernel(problem, epilogue, visits, x, w, bias, out, accumulators).run()

    visits = _Visits.from_sizes(group_sizes, x.shape[0])
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], problem.n), out_dtype),
        grid_spec=_grid_spec(problem, schedule, visits, has_bias=bias is not None),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="grouped_matmul",
    )(visits, x, w, bias)[:m]


# Groups may start at any row. The gradients are the portable backend's program.
group_unit: Final = portable_grouped_matmul.group_unit
backward: Final = portable_grouped_matmul.backward


class _Visits(NamedTuple):
    """Visits of tiles, in ascending order of tiles and experts; int32 `[visits]` each.

    Attributes:
        tile: the tile.
        expert: the expert whose weight multiplies the tile.
        first: the first row of that expert.
        end: the end of its rows. A visit without rows has `first == end`.
    """

    tile: Any
    expert: Any
    first: Any
    end: Any

    @classmethod
    def from_sizes(cls, group_sizes: Array, rows: int) -> "_Visits":
        """Returns the visits for experts with these numbers of rows.

        Rows after the last group are treated as one more group. Its visits have no rows, and neither have the padding
        visits at the end of the arrays, whose length depends only on the shapes.
        """
        experts = group_sizes.shape[0]
        sizes = jnp.append(group_sizes.astype(jnp.int32), rows - jnp.sum(group_sizes, dtype=jnp.int32))
        ends = jnp.cumsum(sizes)
        firsts = ends - sizes
        first_tiles = firsts // ROWS
        counts = jnp.where(sizes > 0, (ends - 1) // ROWS - first_tiles + 1, 0)
        visited = jnp.cumsum(counts)
        # Each tile has a visit, and every group after the first adds at most one.
        index = jnp.arange(ceil_div(rows, ROWS) + experts, dtype=jnp.int32)
        last = jnp.minimum(index, visited[-1] - 1)
        group = jnp.searchsorted(visited, last, side="right").astype(jnp.int32)
        tile = first_tiles[group] + last - (visited - counts)[group]
        empty = (group == experts) | (index >= visited[-1])
        first = jnp.where(empty, 0, firsts[group])
        return cls(tile, jnp.minimum(group, experts - 1), first, jnp.where(empty, 0, ends[group]))


def _grid_spec(
    problem: Problem, schedule: Schedule, visits: _Visits, *, has_bias: bool
) -> pltpu.PrefetchScalarGridSpec:
    """Returns a grid of tiles of outputs, then visits, so that successive visits of one expert reuse its weights.

    Pallas copies a block only if its index differs from the previous step's.
    """
    k, outputs, parts = problem.k, schedule.outputs, problem.parts
    if problem.contraction.w_layout == "kn":
        w = pl.BlockSpec((None, parts, k, outputs), lambda n, v, visits: (visits.expert[v], 0, 0, n))
    else:
        w = pl.BlockSpec((None, parts, outputs, k), lambda n, v, visits: (visits.expert[v], 0, n, 0))
    bias = pl.BlockSpec((None, parts, outputs), lambda n, v, visits: (visits.expert[v], 0, n)) if has_bias else None
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(ceil_div(problem.n, outputs), visits.tile.shape[0]),
        in_specs=[pl.BlockSpec((ROWS, k), lambda n, v, visits: (visits.tile[v], 0)), w, bias],
        out_specs=pl.BlockSpec((ROWS, outputs), lambda n, v, visits: (visits.tile[v], n)),
        scratch_shapes=[pltpu.VMEM((parts, ROWS, outputs), ACCUMULATOR)],
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """One visit of a tile of rows, with references to the blocks in VMEM."""

    problem: Problem
    epilogue: Epilogue
    visits: _Visits
    x: Any
    w: Any
    bias: Any
    out: Any
    accumulators: Any

    def run(self) -> None:
        visit, tile = pl.program_id(1), self.visits.tile
        first, end = self.visits.first[visit], self.visits.end[visit]
        pl.when((visit == 0) | (tile[visit] != tile[jnp.maximum(visit - 1, 0)]))(self.clear_rows)

        @pl.when(first < end)
        def multiply() -> None:
            self.accumulators[...] = jnp.zeros(self.accumulators.shape, ACCUMULATOR)
            self.add_steps()
            lax.fori_loop(0, ROWS // EPILOGUE_ROWS, lambda chunk, _: self.store_rows(chunk, first, end), None)

    def clear_rows(self) -> None:
        """Zeros the tile on its first visit, for rows without an expert."""
        self.out[...] = jnp.zeros(self.out.shape, self.out.dtype)

    def add_steps(self) -> None:
        contraction, k = self.problem.contraction, self.problem.k
        assert k is not None
        step = contraction.step.k

        def add(index: Array, _: None) -> None:
            contraction.add_step(self.accumulators, self.x, self.w, pl.multiple_of(index * step, step), step)

        lax.fori_loop(0, k // step, add, None)
        if k % step:
            contraction.add_step(self.accumulators, self.x, self.w, k // step * step, k % step)

    def store_rows(self, chunk: Array, first: Array, end: Array) -> None:
        """Writes the rows of a chunk that belong to the visit's expert."""
        start = pl.multiple_of(chunk * EPILOGUE_ROWS, EPILOGUE_ROWS)
        place = pl.ds(start, EPILOGUE_ROWS), slice(None)
        sums = [self.accumulators[part, *place] for part in range(self.problem.parts)]
        if self.bias is not None:
            sums = [z + self.bias[part : part + 1, :].astype(ACCUMULATOR) for part, z in enumerate(sums)]
        y = activated(sums, self.epilogue, ACTIVATIONS)
        row = self.visits.tile[pl.program_id(1)] * ROWS + start + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        # Other experts' rows are kept by a selection: after a product with a mask of zeros, a NaN would remain a NaN.
        kept = self.out[place].astype(ACCUMULATOR)
        self.out[place] = jnp.where((row >= first) & (row < end), y, kept).astype(self.out.dtype)
