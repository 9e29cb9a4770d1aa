"""Sums of a weight and first products of rows' adapters, for few rows: one launch instead of two.

The first product of an adapter, `u = rnd(x A^T)`, depends on the rows alone, like the sums of the weight. A decode step
has 128 tiles of a weight for 132 multiprocessors, and the CTAs after these compute the tiles of u:

    clusters of the weight's plan   sums[m, n] = x . w
    further ones                    u[p, r]    = rnd(x . a), for blocks p of 8 rows and up to 64 ranks

While the weight is read, copies wait for memory, and a tile of u takes about as long as the sums, however few bytes it
has: the sums hide a CTA's first tile, but not a second one. So if there are more blocks than idle multiprocessors, a
tile has several blocks. The ranks of their adapters are below each other on the matrix unit's rows, and their tokens
next to each other on its columns:

                  tokens of p   tokens of q
    ranks of p    u[p]          -
    ranks of q    -             u[q]

The unit also multiplies ranks and tokens of different blocks, but these products are not stored. If there are too many
blocks even so, tiles have one block, and the CTAs of the sums compute the remaining tiles when they are done.

All CTAs take the instructions of `kernel`, so bits do not differ from separate kernels'. A tile of u fills some of the
tokens and at most 64 weights of the stages. It has barriers of its own: where the CTAs of a cluster share operands, the
ones of the sums count arrivals of the whole cluster.
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
from detjax.pallas.hopper.mosaic.layouts import MATRIX

_MOST_ROWS: Final = 64
"""Most rows for which idle multiprocessors can compute the blocks of one adapter while the others read the weight.

An estimate: 8 blocks of 16 ranks fit into 4 tiles of 2.
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

    @property
    def slots(self) -> int:
        """Buffers for chunks: as a chunk has twice the bytes of a product's, half as many, so that no stage is lost."""
        return min(self.chunks, max(2, 32 // self.chunk))

    @property
    def ctas(self) -> int:
        """CTAs of sums."""
        return self.clusters * self.cluster_size


@dataclasses.dataclass(frozen=True)
class FirstPlan(Plan):
    """The plan of first products, whose CTAs have the shared memory of the sums' plan.

    The grid counts blocks, as many as there can be. A tile has neighbouring blocks. Their number is chosen on the
    device, which knows how many blocks there are.
    """

    sums: SumsPlan
    further_ctas: int
    """CTAs that only compute first products, on multiprocessors without sums."""
    most_blocks: int
    """Most blocks of a tile."""

    @functools.cached_property
    def columns(self) -> int:
        """Columns of the accumulator."""
        return self.most_blocks * BLOCK

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage: the ranks and the tokens of each block."""
        return 2 * self.most_blocks

    @property
    def chunks(self) -> int:
        """Chunks of a tile: as different blocks have different rows of the accumulator, one chunk holds all of u."""
        return 1

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.sums.stages

    @property
    def tiles_follow_sums(self) -> bool:
        """True if there can be more blocks than the further CTAs have tiles for."""
        return math.prod(self.grid) > self.most_blocks * self.further_ctas


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
    # The tables have a layer's products with results of the rows' dtype. The sums read the same operands.
    plan = SumsPlan(problem, default_schedule(dataclasses.replace(problem, out_dtype=problem.dtype)))
    return SumsPlan(problem, default_schedule(problem)) if plan.unmet_requirements() else plan


def _first_plan(problem: Problem, plan: SumsPlan) -> FirstPlan:
    """Returns the plan of first products, in whose steps the stages of the sums' plan are filled.

    A tile waits for memory most of the time, however many ranks and blocks it has. So ranks are split, into up to four
    tiles, only if idle multiprocessors are enough for all tiles, and blocks share tiles only if they are not.
    """
    size, blocks = plan.cluster_size, problem.m // BLOCK
    idle = resident_clusters(size) * size - plan.ctas
    ranks = min(MATRIX_ROWS, round_up(ceil_div(problem.n, min(4, max(1, idle // blocks))), 8))
    tiles = blocks * ceil_div(problem.n, ranks)
    most_blocks = min(MATRIX_ROWS // ranks, plan.columns // BLOCK, ceil_div(tiles, idle)) if idle else 1
    schedule = Schedule(BLOCK, ranks, lines=plan.schedule.lines)
    return FirstPlan(problem, schedule, plan, min(idle, round_up(tiles, size)), most_blocks)


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
        columns = shared.columns.at[:, pl.ds(0, 1), pl.ds(0, first.columns)]
        factors = Operands(x, a, experts=adapters, blocks=blocks)
        tiles = functools.partial(FirstCta, first, factors, u, Scratch(rows, columns, *buffers))
        SumsCta(plan, Operands(x, w, *bias), sums, shared, first.tiles_follow_sums, tiles).run()

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
        further_clusters=first.further_ctas // plan.cluster_size,
    )


class FirstCta(Cta):
    """A CTA that computes first products: only these, or tiles that are left when its sums are done."""

    plan: FirstPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, plan: FirstPlan, factors: Operands, u: Any, scratch: Scratch) -> None:
        super().__init__(plan, Epilogue(), factors, (u, []), scratch)
        most_blocks, pieces = plan.grid
        self.end = factors.experts[most_blocks]
        """The number of blocks."""
        further = jnp.int32(max(1, plan.further_ctas))
        needed = jnp.maximum(lax.div(self.end * pieces + (further - 1), further), 1)
        is_hidden = needed <= (plan.most_blocks if plan.further_ctas else 0)
        self.blocks = jnp.where(is_hidden, needed, 1)
        """Blocks of a tile; the last tile may have fewer."""
        self.ctas = jnp.where(is_hidden, further, plan.further_ctas + plan.sums.ctas)
        """CTAs that have tiles: these are the first ones in the order of their numbers."""
        tiles = lax.div(self.end + (self.blocks - 1), self.blocks) * pieces
        taken = lax.div(tiles - self.cluster + (self.ctas - 1), self.ctas)
        self.tiles = jnp.where(self.cluster < self.ctas, jnp.maximum(taken, 0), 0)

    def cluster_index(self) -> Array:
        """Returns the CTA's number: CTAs of a cluster have different tiles, and the ones of the sums come last."""
        sums, further = self.plan.sums, self.plan.further_ctas
        schedule = sums.schedule
        cluster = lax.axis_index("cluster") * schedule.cluster_m + lax.axis_index("cm")
        cta = cluster * schedule.cluster_n + lax.axis_index("cn")
        return lax.rem(cta + further, jnp.int32(sums.ctas + further))

    def origin(self, tile: Array | int) -> tuple[Array, Array]:
        """Returns the first row of u and the first rank of a tile of this CTA."""
        index, pieces = self.cluster + tile * self.ctas, jnp.int32(self.plan.grid[1])
        return lax.div(index, pieces) * self.blocks * BLOCK, lax.rem(index, pieces) * self.plan.rows

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of one step of K: ranks and tokens of each block."""
        ranks, loaded = self.plan.rows, self.scratch.loaded.at[slot]

        def load(number: int) -> None:
            first = m + number * BLOCK
            weights = self.scratch.rows.at[slot, 0, pl.ds(number * ranks, ranks)]
            tokens = self.scratch.columns.at[slot, 0, pl.ds(number * BLOCK, BLOCK)]
            plgpu.copy_gmem_to_smem(self.source(first, k_step, 0, n, ranks, weights=True), weights, loaded)
            plgpu.copy_gmem_to_smem(self.source(first, k_step, 0, first, BLOCK, weights=False), tokens, loaded)

        def arrive() -> None:
            # In place of the copies: the barrier waits for two of each block that a tile can have.
            plgpu.barrier_arrive(loaded)
            plgpu.barrier_arrive(loaded)

        load(0)
        for number in range(1, self.plan.most_blocks):
            lax.cond(self.has_block(m, number), functools.partial(load, number), arrive)

    def has_block(self, m: Array, number: int) -> Array:
        """Returns whether the tile that starts at m has a block of this number."""
        return (number < self.blocks) & (lax.div(m, jnp.int32(BLOCK)) + number < self.end)

    def compute(self, tile: Array, output: Output) -> None:
        """Computes a tile, and starts to store the product of each block."""
        plan, ranks, m = self.plan, self.plan.rows, output.m
        (sums,) = self.accumulate(tile, None)
        row = plgpu.broadcasted_iota(jnp.int32, (MATRIX_ROWS, BLOCK), 0, layout=MATRIX)
        u = sums[:, :BLOCK]
        for number in range(1, plan.most_blocks):
            u = jnp.where(row < number * ranks, u, sums[:, number * BLOCK : (number + 1) * BLOCK])
        # The copies of the previous tile must have read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = self.scratch.out.at[0, 0]
        out.T[...] = u.astype(plan.problem.out_dtype)
        plgpu.commit_smem()
        for number in range(plan.most_blocks):

            @pl.when(self.has_block(m, number))
            def _(number: int = number) -> None:
                rows, place = pl.ds(m + number * BLOCK, BLOCK), pl.ds(number * ranks, ranks)
                plgpu.copy_smem_to_gmem(out.at[:, place], self.y.at[rows, pl.ds(output.n, ranks)])


class SumsCta(Cta):
    """A CTA of a weight's sums and of first products that are left, or in a further cluster only of first products."""

    plan: SumsPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        plan: SumsPlan,
        operands: Operands,
        sums: list[Any],
        scratch: Scratch,
        tiles_follow_sums: bool,
        first: Callable[[], FirstCta],
    ) -> None:
        super().__init__(plan, Epilogue(), operands, (None, sums), scratch)
        self.first = first
        self.has_sums = self.cluster < plan.clusters
        self.has_first = tiles_follow_sums | (self.cluster >= plan.clusters)

    def produce(self) -> None:
        """Fills the stages in order."""
        pl.when(self.has_sums)(super().produce)
        # The producer of the sums has waited until its stages are consumed. The number of blocks is read only now: the
        # first copies of the sums need not wait for it.
        pl.when(self.has_first)(lambda: self.first().produce())

    def consume(self) -> None:
        """Computes this warpgroup's part of each tile. One warpgroup computes first products."""
        first = self.first()  # reads the number of blocks, which has arrived when the sums are done
        pl.when(self.has_sums)(super().consume)
        pl.when(self.has_first & (self.warpgroup == 0))(first.consume)

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
