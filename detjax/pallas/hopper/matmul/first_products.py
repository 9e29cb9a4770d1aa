"""Sums of a weight and first products of rows' adapters, for few rows: one launch instead of two.

The first product of an adapter, `u = rnd(x A^T)`, depends on the rows alone, like the sums of the weight. A decode step
has 128 tiles of a weight for 132 multiprocessors, and the CTAs after these compute the tiles of u:

    clusters of the weight's plan       sums[m, n] = x . w
    further ones, a CTA for each tile   u[p, r]    = rnd(x . a), for blocks of 8 rows and up to 64 ranks

Both take the instructions of `kernel`, so bits do not differ from separate kernels'. A CTA of u fills 8 tokens and at
most 64 weights of the plan's stages. It has barriers of its own: where the CTAs of a cluster share operands, the ones
of the sums count arrivals of the whole cluster.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.pallas.hopper.device import DTYPES, resident_clusters
from detjax.pallas.hopper.matmul.kernel import (
    Cta,
    Operands,
    Output,
    Scratch,
    launched,
    padded_operands,
    problem_of,
    scratch_types,
)
from detjax.pallas.hopper.matmul.plan import BLOCK, MATRIX_ROWS, Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import default_schedule

_MOST_ROWS: Final = 64
"""Most rows for which idle multiprocessors can compute eight-row tiles of one adapter while the others read the weight.

An estimate: a tile takes 4 to 11 microseconds, a weight of 4096 x 4096 takes 8, and other weights take longer.
"""


class FirstFactors(NamedTuple):
    """The first factors of adapters, and the blocks of rows that have them; see `ops.adapter_places.BlocksOfRows`.

    Attributes:
        a: `[S, R, K]`.
        adapters: the adapter of each block, and at the end the number of blocks.
        blocks: the number of each block among the rows.
    """

    a: Float[Array, "S R K"]
    adapters: Int32[Array, "_"]
    blocks: Int32[Array, "P"]


@dataclasses.dataclass(frozen=True)
class SumsPlan(Plan):
    """The plan of a weight's sums, which leaves shared memory for a tile of first products."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory for a tile of first products."""
        return BLOCK * MATRIX_ROWS * self.problem.dtype.itemsize

    @property
    def stores(self) -> int:
        """Chunks that a warpgroup stages for a tile: the sums of all parts."""
        return self.chunks * self.problem.parts


@dataclasses.dataclass(frozen=True)
class FirstPlan(Plan):
    """The plan of first products, whose CTAs have the shared memory of the sums' plan."""

    sums: SumsPlan

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.sums.stages

    @functools.cached_property
    def clusters(self) -> int:
        """CTAs, which fill whole clusters of the sums' plan."""
        return round_up(min(math.prod(self.grid), resident_clusters(1)), self.sums.cluster_size)


def multiplies_first_factors(operands: MatmulOperands, a: Array) -> bool:
    """Returns whether products of a weight and of adapters should call `sums_and_first_products`."""
    x, w, bias, _ = operands
    if len(x) > _MOST_ROWS or not isinstance(w, jax.Array) or str(x.dtype) not in DTYPES:
        return False
    if w.dtype != x.dtype or a.dtype != x.dtype or (bias is not None and bias.shape != w.shape[:-1]):
        return False
    return not _sums_plan(Operands(x, w, bias)).unmet_requirements()


def sums_and_first_products(
    x: Float[Array, "M K"], w: Array, bias: Array | None, factors: FirstFactors
) -> tuple[list[Float32[Array, "M N"]], Float[Array, "_ R"]]:
    """Returns the biased sums of each part of a weight `[N, K]` or `[2, N, K]`, and rows `[P * BLOCK, R]`.

    These rows are `grouped_matmul.product_of_blocks`. `multiplies_first_factors` has to be true.
    """
    operands = Operands(x, w, bias)
    blocks = Operands(x, factors.a, experts=factors.adapters, blocks=factors.blocks)
    plan = _sums_plan(operands)
    first = _first_plan(problem_of(blocks, "mk", "nk", x.dtype).addressable, plan)
    arrays = _arrays(operands, plan.problem)
    _, *arrays_of_factors = _arrays(blocks, first.problem)  # the rows are the same
    *sums, u = _kernel(plan, first)(*arrays, *arrays_of_factors)
    return [part[: len(x), : w.shape[-2]] for part in sums], u[:, : factors.a.shape[1]]


def _arrays(operands: Operands, problem: Problem) -> list[Array]:
    return padded_operands(operands, problem, (problem.m, problem.n, problem.k))


def _sums_plan(operands: Operands) -> SumsPlan:
    problem = problem_of(operands, "mk", "nk", jnp.dtype(ACCUMULATOR)).addressable
    return SumsPlan(problem, default_schedule(problem))


def _first_plan(problem: Problem, plan: SumsPlan) -> FirstPlan:
    """Returns the plan of first products, in whose steps the stages of the sums' plan are filled.

    A tile waits for memory most of the time, however many ranks it has. So ranks are split, into up to four tiles, only
    if idle multiprocessors are enough for all tiles.
    """
    idle = resident_clusters(1) - plan.clusters * plan.cluster_size
    tiles = min(4, max(1, idle * BLOCK // problem.m))
    tile = min(MATRIX_ROWS, round_up(ceil_div(problem.n, tiles), 8))
    return FirstPlan(problem, Schedule(BLOCK, tile, lines=plan.schedule.lines), plan)


def _kernel(plan: SumsPlan, first: FirstPlan) -> Callable[..., list[Array]]:
    """Returns the kernel `x, w, bias?, a, adapters, blocks -> *sums, u`, with the sums of each part."""
    parts = plan.problem.parts

    def body(*refs: Any, **scratch: Any) -> None:
        x, w, *rest, u = refs
        rest, sums = rest[:-parts], rest[-parts:]
        *bias, a, adapters, blocks = rest
        buffers = [scratch.pop(name) for name in ("u", "u_loaded", "u_consumed")]
        shared = Scratch(**scratch)
        rows = shared.rows.at[:, pl.ds(0, 1), pl.ds(0, MATRIX_ROWS)]
        columns = shared.columns.at[:, pl.ds(0, 1), pl.ds(0, BLOCK)]
        factors = Operands(x, a, experts=adapters, blocks=blocks)
        tiles = FirstCta(first, Epilogue(), factors, (u, []), Scratch(rows, columns, *buffers))
        SumsCta(plan, Operands(x, w, *bias), sums, shared, tiles).run()

    scratch, buffers = scratch_types(plan), scratch_types(first)
    scratch |= {"u": buffers["out"], "u_loaded": buffers["loaded"], "u_consumed": buffers["consumed"]}
    problem = first.problem
    return launched(
        plan,
        body,
        scratch,
        "matmul_and_first_products",
        results=parts,
        further_results=[jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype)],
        further_clusters=first.clusters // plan.cluster_size,
    )


class FirstCta(Cta):
    """A CTA of first products, in a cluster after the ones of the sums."""

    plan: FirstPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    def cluster_index(self) -> Array:
        """Returns the CTA's number: CTAs of a cluster have tiles of their own."""
        sums = self.plan.sums
        cluster, schedule = lax.axis_index("cluster") - sums.clusters, sums.schedule
        return (cluster * schedule.cluster_m + lax.axis_index("cm")) * schedule.cluster_n + lax.axis_index("cn")


class SumsCta(Cta):
    """A CTA of a weight's sums, or in a cluster after theirs, one of first products."""

    plan: SumsPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, plan: SumsPlan, operands: Operands, sums: list[Any], scratch: Scratch, first: FirstCta) -> None:
        super().__init__(plan, Epilogue(), operands, (None, sums), scratch)
        self.first = first
        self.has_sums, self.has_first = self.cluster < plan.clusters, self.cluster >= plan.clusters

    def produce(self) -> None:
        """Fills the stages in order."""
        pl.when(self.has_sums)(super().produce)
        pl.when(self.has_first)(self.first.produce)

    def consume(self) -> None:
        """Computes this warpgroup's part of each tile. One warpgroup computes first products."""
        pl.when(self.has_sums)(super().consume)
        pl.when(self.has_first & (self.warpgroup == 0))(self.first.consume)

    def compute(self, tile: Array, output: Output) -> None:
        """Computes this warpgroup's part of a tile, and starts to store it."""
        super().compute(tile, SumsOutput(self, output.m, output.n, ()))


class SumsOutput(Output):
    """A warpgroup's part of a tile of the sums of each part, without an epilogue."""

    def store(self, sums: Sequence[Array]) -> None:
        """Adds the bias and starts the copies of the sums to device memory."""
        if self.bias is not None:
            plgpu.barrier_wait(self.scratch.bias_loaded.at[self.warpgroup])
        for chunk in range(self.plan.chunks):
            for part, array in enumerate(self.z):
                self._store_chunk(self._add_bias(sums[part], part, chunk), chunk, array)
