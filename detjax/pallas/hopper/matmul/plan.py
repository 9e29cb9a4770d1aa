"""Schedules of the Hopper matmul: a `Problem`, a `Schedule` for it, and the `Plan` of sizes derived from both."""

import dataclasses
import functools
import math
from typing import ClassVar, Final, Literal

import jax.numpy as jnp

from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import WeightLayout
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import SWIZZLE_BYTES

TokenLayout = Literal["mk", "km"]

MAX_COLUMNS: Final = 256
"""Columns of the widest `wgmma`."""

MAX_ACCUMULATORS: Final = 176
"""Registers of a thread that may hold accumulators. With 192, epilogues with bias and residual spill; with 208, all."""

MATRIX_ROWS: Final = 64
"""Rows of one `wgmma`."""

BLOCK: Final = 8
"""Tokens of the smallest tile."""

_CLUSTER_SIZES: Final = (1, 2, 3, 4, device.MAX_CLUSTER)
_BFLOAT16: Final = jnp.dtype("bfloat16")


def addressable_rows(rows: int) -> int:
    """Returns the rows that an array is padded to, so that the copy engine can address them in groups of 8."""
    return rows if rows < BLOCK else round_up(rows, BLOCK)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product `[m, k] x [k, n]`: its shape, its dtypes and its memory layouts."""

    m: int
    """Tokens."""
    n: int
    """Outputs of each part."""
    k: int
    """Elements of the contracted axis."""
    parts: int = 1
    """2 if the weight is gate and up, stacked; otherwise 1."""
    dtype: jnp.dtype = _BFLOAT16
    """Dtype of tokens and weights."""
    out_dtype: jnp.dtype = _BFLOAT16
    """Dtype of the result."""
    residual_dtype: jnp.dtype | None = None
    """Dtype of the array that is added to the result; None: no residual."""
    bias_dtype: jnp.dtype | None = None
    """Dtype of the bias; None: no bias."""
    token_layout: TokenLayout = "mk"
    """Axes of the tokens in memory; "km", K first, in weight gradients."""
    layout: WeightLayout = "nk"
    """Axes of the weights in memory."""
    continues: bool = False
    """True if accumulators start from running sums, which the result overwrites."""
    keeps: bool = False
    """True if the biased sums are also results, of the same dtype."""
    experts: int = 0
    """Weights, each for some tiles of tokens; 0: one weight for all tokens."""
    in_blocks: bool = False
    """True if a tile of tokens is any block of `BLOCK` rows of x, which several tiles may share."""

    @property
    def tokens(self) -> int:
        """Tokens of the call: M, or K in weight gradients, which sum over them."""
        return self.m if self.token_layout == "mk" else self.k

    def with_tokens(self, tokens: int) -> "Problem":
        """The same product for another number of tokens."""
        return dataclasses.replace(self, **{"m" if self.token_layout == "mk" else "k": tokens})

    @property
    def kept_sums(self) -> int:
        """Arrays of biased sums among the results."""
        return self.parts if self.keeps else 0

    @property
    def addressable(self) -> "Problem":
        """This problem, padded to the smallest sizes that the copy engine can address.

        The copy engine takes rows in groups of 8 and lines of at least 32 bytes. Lines have 128 bytes unless K is the
        last axis of both operands.
        """
        m, k_is_last = self.m, (self.token_layout, self.layout) == ("mk", "nk")
        return dataclasses.replace(
            self,
            m=round_up(m, 64) if self.token_layout == "km" else addressable_rows(m),
            n=round_up(self.n, 64 if self.layout == "kn" else 8),
            k=round_up(self.k, 16 if k_is_last else 64),
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of a product over the chip; no bit depends on it."""

    tile_m: int
    """Tokens of a CTA's tile, a multiple of 8."""
    tile_n: int
    """Outputs of each part in a CTA's tile, a multiple of 8."""
    rows: Literal["weights", "tokens"] = "weights"
    """The operand on the matrix unit's rows, which come in 64s; the other operand's columns come in 8s."""
    warpgroups: int = 1
    """Warpgroups that multiply, each with an equal share of the rows: 1 or 2, or up to 4 that also widen codes."""
    cluster_m: int = 1
    """CTAs of a cluster that load the same weights."""
    cluster_n: int = 1
    """CTAs of a cluster that load the same tokens."""
    lines: int = 1
    """Swizzled lines of K, of 128 bytes each, in a pipeline stage."""
    panel: int = 1
    """Tiles along the tokens that are visited together, so that both operands stay in L2."""

    def __post_init__(self) -> None:
        """Raises ValueError if the schedule fits no problem."""
        text = ""
        if self.rows not in ("weights", "tokens"):
            text = f"rows is {self.rows!r}; accepted: 'weights', 'tokens'"
        elif self.warpgroups not in range(1, 5):
            text = f"warpgroups is {self.warpgroups}; accepted: 1 to 4 warpgroups"
        elif self.cluster_m * self.cluster_n not in _CLUSTER_SIZES:
            sizes = f"{', '.join(map(str, _CLUSTER_SIZES[:-1]))} or {_CLUSTER_SIZES[-1]}"
            text = f"a cluster has {self.cluster_m} x {self.cluster_n} CTAs; accepted: clusters of {sizes} CTAs"
        elif min(self.lines, self.panel) < 1:
            text = f"lines is {self.lines} and panel is {self.panel}; accepted: 1 and more"
        if text:
            raise ValueError(f"matmul: Schedule: {text}")

    def fits(self, problem: Problem) -> bool:
        """Returns True if a kernel of this schedule can compute the problem."""
        return not Plan(problem, self).unmet_requirements()

    def check(self, problem: Problem) -> None:
        """Raises ValueError, with the unmet requirements, if a kernel of this schedule cannot compute the problem."""
        if unmet := Plan(problem, self).unmet_requirements():
            raise ValueError(f"matmul: {self} for {problem}; accepted: {'; '.join(unmet)}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule applied to a problem: the sizes that a kernel is built from.

    The row operand is on the matrix unit's rows, the column operand on its columns, and so are their tiles in an
    accumulator.
    """

    problem: Problem
    schedule: Schedule

    max_warpgroups: ClassVar[int] = 2

    @functools.cached_property
    def weights_on_rows(self) -> bool:
        """True if accumulators are [outputs, tokens] rather than [tokens, outputs]."""
        return self.schedule.rows == "weights"

    @functools.cached_property
    def row_tile(self) -> int:
        """Rows of a CTA's tile."""
        return self.schedule.tile_n if self.weights_on_rows else self.schedule.tile_m

    @functools.cached_property
    def columns(self) -> int:
        """Columns of a CTA's tile, and of a warpgroup's accumulator."""
        return self.schedule.tile_m if self.weights_on_rows else self.schedule.tile_n

    @property
    def rows(self) -> int:
        """Rows of a tile that one warpgroup computes."""
        return self.row_tile // self.schedule.warpgroups

    @functools.cached_property
    def padded_rows(self) -> int:
        """Rows of a warpgroup's accumulator. Rows beyond `rows` are neither loaded nor stored.

        So a tile may have as few as 8 weights, and N is split into as many tiles as the chip has multiprocessors.
        """
        return round_up(self.rows, MATRIX_ROWS)

    @property
    def rows_contiguous_in_k(self) -> bool:
        """True if K is the last axis of the row operand."""
        return self.problem.layout == "nk" if self.weights_on_rows else self.problem.token_layout == "mk"

    @property
    def columns_contiguous_in_k(self) -> bool:
        """True if K is the last axis of the column operand."""
        return self.problem.token_layout == "mk" if self.weights_on_rows else self.problem.layout == "nk"

    @property
    def row_parts(self) -> int:
        """Tiles of the row operand in a stage: 2 for gate and up."""
        return self.problem.parts if self.weights_on_rows else 1

    @property
    def column_parts(self) -> int:
        """Tiles of the column operand in a stage: 2 for gate and up."""
        return 1 if self.weights_on_rows else self.problem.parts

    @functools.cached_property
    def row_pieces(self) -> int:
        """Copies of a tile of the row operand: one, or one per warpgroup if padding separates their rows."""
        return 1 if self.rows == self.padded_rows else self.schedule.warpgroups

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage."""
        return self.row_parts * self.row_pieces + self.column_parts

    @property
    def rows_shared_by(self) -> int:
        """CTAs of a cluster that load the row operand together."""
        return self.schedule.cluster_m if self.weights_on_rows else self.schedule.cluster_n

    @property
    def columns_shared_by(self) -> int:
        """CTAs of a cluster that load the column operand together."""
        return self.schedule.cluster_n if self.weights_on_rows else self.schedule.cluster_m

    @functools.cached_property
    def line(self) -> int:
        """Elements in a swizzled line of an operand in shared memory."""
        whole = SWIZZLE_BYTES // self.problem.dtype.itemsize
        return math.gcd(whole, self.problem.k)

    @functools.cached_property
    def tile_k(self) -> int:
        """Elements of K in a stage."""
        return self.schedule.lines * self.line

    @functools.cached_property
    def k_steps(self) -> int:
        """Stages of a tile with numbers of K."""
        return ceil_div(self.problem.k, self.tile_k)

    @property
    def steps(self) -> int:
        """Stages of a tile: K's, and further ones that a kernel adds."""
        return self.k_steps

    @property
    def column_stages(self) -> int:
        """Stages of the column operand in shared memory."""
        return self.stages

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory for further buffers that a kernel adds."""
        return 0

    # --- the output -----------------------------------------------------------------------------------------------

    @property
    def chunk(self) -> int:
        """Columns of the accumulator that pass the epilogue together."""
        # 64 rows x 64 columns are 32 registers of a thread, which leaves room for an activation's temporaries.
        if not self.weights_on_rows:
            return math.gcd(self.columns, 64)
        # With padding rows, only tiles of 8 tokens are contiguous in shared memory.
        return min(64, self.columns) if self.rows == self.padded_rows else 8

    @property
    def chunks(self) -> int:
        """Chunks of an accumulator."""
        return ceil_div(self.columns, self.chunk)

    @property
    def slots(self) -> int:
        """Buffers for chunks: at least 2, so that one is filled while another is copied, and up to 64 columns."""
        return min(self.chunks, max(2, 64 // self.chunk))

    @property
    def stores(self) -> int:
        """Chunks that a warpgroup stages for a tile, of the result and of kept sums."""
        return self.chunks * (1 + self.problem.kept_sums)

    def copies_in_flight(self, store: int) -> int:
        """Returns how many copies out of shared memory may still read when a tile's chunk number `store` is staged.

        Every tile uses the slots in turn, from the first one on. The last copy out of the chunk's slot must have read
        it: `slots` chunks ago, or in the previous tile, whose last chunks may have ended with any slot.
        """
        if store >= self.slots:
            return self.slots - 1
        previous = store + (self.stores - 1 - store) // self.slots * self.slots
        return self.stores - 1 - previous + store

    @property
    def staged_shape(self) -> tuple[int, int]:
        """[tokens, outputs] of a chunk in shared memory."""
        return (self.chunk, self.padded_rows) if self.weights_on_rows else (self.padded_rows, self.chunk)

    def staged_line(self, dtype: jnp.dtype) -> int:
        """Outputs in a swizzled line of a chunk."""
        outputs = self.rows if self.weights_on_rows else self.chunk
        return math.gcd(outputs, SWIZZLE_BYTES // dtype.itemsize, self.problem.n)

    @property
    def bias_size(self) -> int:
        """Elements of the buffer for a warpgroup's biases. The copy engine writes to multiples of 128 bytes."""
        return round_up(self.padded_rows if self.weights_on_rows else self.columns, 64)

    @property
    def can_be_shared(self) -> bool:
        """True if devices can share the columns of a result.

        The copy engine clips at the end of the result, but not at the end of a device's columns, so tiles must end
        there.
        """
        problem, s = self.problem, self.schedule
        is_plain = not (problem.continues or problem.keeps)
        line = self.staged_line(problem.out_dtype) * problem.out_dtype.itemsize
        return is_plain and problem.n % (s.tile_n * s.cluster_n) == 0 and line % 16 == 0

    # --- stages, tiles and clusters -------------------------------------------------------------------------------

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage in shared memory."""
        rows = self.row_parts * self.schedule.warpgroups * self.padded_rows
        return (rows + self.column_parts * self.columns) * self.tile_k * self.problem.dtype.itemsize

    @property
    def stages(self) -> int:
        """Pipeline stages: as many as shared memory holds and a CTA's work can use, up to 16.

        Depth hides the latency of memory. A decode tile of 64 weights and 8 tokens has stages of 9 KiB for each line of
        K, so 16 stages keep 144 KiB in flight on each multiprocessor. A tile of 128 x 256 has stages of 48 KiB: only 3
        or 4 fit, but each also takes longest to multiply.
        """
        staged = [self.problem.out_dtype]
        staged += [] if self.problem.residual_dtype is None else [self.problem.residual_dtype]
        chunk = self.schedule.warpgroups * self.slots * math.prod(self.staged_shape)
        free = device.SHARED_MEMORY - device.SHARED_MEMORY_RESERVED - self.reserved_bytes
        free -= sum(chunk * dtype.itemsize for dtype in staged)
        if self.problem.bias_dtype is not None:
            free -= 4 * self.schedule.warpgroups * self.problem.parts * self.bias_size
        return min(16, free // self.bytes_per_stage, self.steps * (math.prod(self.grid) // self.clusters))

    @functools.cached_property
    def grid(self) -> tuple[int, int]:
        """Clusters of tiles along tokens and along outputs."""
        s = self.schedule
        return ceil_div(self.problem.m, s.tile_m * s.cluster_m), ceil_div(self.problem.n, s.tile_n * s.cluster_n)

    @property
    def all_warpgroups(self) -> int:
        """Warpgroups of a CTA: the schedule's, which multiply, and one that produces."""
        return self.schedule.warpgroups + 1

    @functools.cached_property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.schedule.cluster_m * self.schedule.cluster_n

    @functools.cached_property
    def clusters(self) -> int:
        """Clusters that are launched, at most as many as fit on the chip: one that had to wait would double the
        time."""
        return min(math.prod(self.grid), device.resident_clusters(self.cluster_size))

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        s = self.schedule
        accumulators = self.problem.parts * self.padded_rows * self.columns // device.WARPGROUP
        row_groups = (self.row_tile // self.row_pieces if self.rows_contiguous_in_k else self.tile_k) // 8
        column_groups = (self.columns if self.columns_contiguous_in_k else self.tile_k) // 8
        requirements = {
            f"up to {self.max_warpgroups} warpgroups": s.warpgroups <= self.max_warpgroups,
            f"8 to {MAX_COLUMNS} columns, in eights": 8 <= self.columns <= MAX_COLUMNS and self.columns % 8 == 0,
            f"up to {MAX_COLUMNS} rows": self.row_tile <= MAX_COLUMNS,
            "8 rows or more to a warpgroup, in eights": self.row_tile > 0 and self.row_tile % (8 * s.warpgroups) == 0,
            "row tiles in 64s where K is not the last axis": self.rows_contiguous_in_k or self.rows % 64 == 0,
            "column tiles in 64s where K is not the last axis": self.columns_contiguous_in_k or self.columns % 64 == 0,
            # A tile of 128 x 256 for two warpgroups takes 128 accumulators, gate and up of 128 x 128 as many.
            f"up to {MAX_ACCUMULATORS} accumulators a thread": accumulators <= MAX_ACCUMULATORS,
            # The copy engine ignores the coordinate along an axis with a single tile: a CTA beyond the end of such an
            # axis would silently access the start of the array.
            "tile_m 8 and cluster_m 1 for up to 8 tokens": self.problem.m > 8
            or not self.weights_on_rows
            or (s.tile_m == 8 and s.cluster_m == 1),
            "tiles of a cluster within up to 64 outputs": self.problem.n > 64
            or s.tile_n * s.cluster_n <= self.problem.n,
            # Threads read running sums themselves, without the copy engine's clipping at the end of the array.
            "tokens on the rows and clusters that divide the sums": not self.problem.continues
            or not (
                self.weights_on_rows
                or self.problem.m % (s.tile_m * s.cluster_m)
                or self.problem.n % (s.tile_n * s.cluster_n)
            ),
            "clusters of one CTA where tiles have weights of their own": not self.problem.experts
            or self.cluster_size == 1,
            f"tiles of {BLOCK} tokens where they are blocks of x": not self.problem.in_blocks or s.tile_m == BLOCK,
            # Each CTA of a cluster loads an equal share of a shared operand and multicasts it; swizzled rows come in
            # 8s.
            "shared operands in equal groups of 8 rows": row_groups % max(1, self.rows_shared_by) == 0
            and column_groups % max(1, self.columns_shared_by) == 0,
        }
        unmet = [text for text, holds in requirements.items() if not holds]
        if not unmet and self.stages < min(2, self.k_steps):
            unmet.append("2 stages in shared memory")
        return unmet
