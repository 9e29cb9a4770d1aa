"""Schedules of the Hopper matmul: what may be chosen, what a choice costs, and which choice serves a problem."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import jax.numpy as jnp
from jax.experimental import pallas as pl

from detjax.options import WeightLayout
from detjax.pallas.hopper import device

TokenLayout = Literal["mk", "km"]

TABLES: Final = Path(__file__).parent / "tables"
"""Tuned schedules, a file for each kind of device."""
MAX_COLUMNS: Final = 256
"""Widest second operand of one `wgmma`."""
MAX_ACCUMULATORS: Final = 176
"""Registers of a thread that may hold sums. With 192, epilogues with bias and residual spill; with 208, all do."""
SWIZZLE_BYTES: Final = 128
"""Length of a line in shared memory; a stage holds one line of K."""


_BFLOAT16: Final = jnp.dtype("bfloat16")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product `[m, k] x [k, n]`: its shape and how its operands lie in memory.

    Attributes:
        parts: 2 if the weight is gate and up, stacked, of n outputs each; else 1.
        dtype: of tokens and weights.
        residual_dtype: of the array that is added to the result, or None.
        bias_dtype: of the bias, or None.
        token_layout: "mk", or "km" where K is the first axis, as in weight gradients.
        layout: of the weights.
    """

    m: int
    n: int
    k: int
    parts: int = 1
    dtype: jnp.dtype = _BFLOAT16
    out_dtype: jnp.dtype = _BFLOAT16
    residual_dtype: jnp.dtype | None = None
    bias_dtype: jnp.dtype | None = None
    token_layout: TokenLayout = "mk"
    layout: WeightLayout = "nk"

    @property
    def addressable(self) -> "Problem":
        """The least one around this one that the copy engine can address.

        It takes rows in groups of 8, and lines of at least 32 bytes; of 128 where K is not the last axis of both.
        """
        m, inference = self.m, (self.token_layout, self.layout) == ("mk", "nk")
        return dataclasses.replace(
            self,
            m=round_up(m, 64) if self.token_layout == "km" else m if m < 8 else round_up(m, 8),
            n=round_up(self.n, 64 if self.layout == "kn" else 8),
            k=round_up(self.k, 16 if inference else 64),
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a product is spread over the chip.

    Attributes:
        tile_m: tokens of a CTA's tile, a multiple of 8.
        tile_n: outputs of a CTA's tile, a multiple of 8; of gate and of up each.
        rows: the operand on the matrix unit's 64 rows. Its tile is cut into 64s, the other one's into 8s.
        warpgroups: 1 or 2 that multiply; they share out the row operand's tile.
        cluster_m: CTAs of a cluster that have the weights in common.
        cluster_n: CTAs of a cluster that have the tokens in common.
        lines: of 128 bytes of K that a stage holds.
        panel: tiles along the tokens that are walked together, so that both operands stay in L2.
    """

    tile_m: int
    tile_n: int
    rows: Literal["weights", "tokens"] = "weights"
    warpgroups: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    lines: int = 1
    panel: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule applied to a problem: the sizes that a kernel is built from."""

    problem: Problem
    schedule: Schedule

    @property
    def weights_on_rows(self) -> bool:
        """Whether accumulators are [outputs, tokens] rather than [tokens, outputs]."""
        return self.schedule.rows == "weights"

    @property
    def row_tile(self) -> int:
        return self.schedule.tile_n if self.weights_on_rows else self.schedule.tile_m

    @property
    def columns(self) -> int:
        """Of a warpgroup's accumulator."""
        return self.schedule.tile_m if self.weights_on_rows else self.schedule.tile_n

    @property
    def rows(self) -> int:
        """Of the row tile that are a warpgroup's own."""
        return self.row_tile // self.schedule.warpgroups

    @property
    def padded_rows(self) -> int:
        """Of a warpgroup's accumulator. What lies beyond `rows` is never loaded nor stored."""
        return round_up(self.rows, 64)

    @property
    def rows_contiguous_in_k(self) -> bool:
        return self.problem.layout == "nk" if self.weights_on_rows else self.problem.token_layout == "mk"

    @property
    def columns_contiguous_in_k(self) -> bool:
        return self.problem.token_layout == "mk" if self.weights_on_rows else self.problem.layout == "nk"

    @property
    def row_parts(self) -> int:
        return self.problem.parts if self.weights_on_rows else 1

    @property
    def column_parts(self) -> int:
        return 1 if self.weights_on_rows else self.problem.parts

    @property
    def row_pieces(self) -> int:
        """Copies that load the row operand: one, or one to a warpgroup where padding lies between their rows."""
        return 1 if self.rows == self.padded_rows else self.schedule.warpgroups

    @property
    def loads_per_stage(self) -> int:
        return self.row_parts * self.row_pieces + self.column_parts

    @property
    def rows_shared_by(self) -> int:
        """CTAs of a cluster that load the row operand together."""
        return self.schedule.cluster_m if self.weights_on_rows else self.schedule.cluster_n

    @property
    def columns_shared_by(self) -> int:
        return self.schedule.cluster_n if self.weights_on_rows else self.schedule.cluster_m

    @property
    def line(self) -> int:
        """Elements in a swizzled line of an operand in shared memory."""
        whole = SWIZZLE_BYTES // self.problem.dtype.itemsize
        return math.gcd(whole, self.problem.k)

    @property
    def tile_k(self) -> int:
        return self.schedule.lines * self.line

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.problem.k, self.tile_k)

    # --- the output -----------------------------------------------------------------------------------------------

    @property
    def chunk(self) -> int:
        """Columns of the accumulator that leave together."""
        if not self.weights_on_rows:
            return math.gcd(self.columns, 64)
        # Where the rows are not full, only tiles of 8 tokens lie contiguous in shared memory.
        return min(64, self.columns) if self.rows == self.padded_rows else 8

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.columns, self.chunk)

    @property
    def slots(self) -> int:
        """Chunks that may be on their way at the same time."""
        return min(self.chunks, max(2, 64 // self.chunk))

    @property
    def staged_shape(self) -> tuple[int, int]:
        """[tokens, outputs] of a chunk."""
        return (self.chunk, self.padded_rows) if self.weights_on_rows else (self.padded_rows, self.chunk)

    def staged_line(self, dtype: jnp.dtype) -> int:
        """Outputs in one swizzled line of a chunk."""
        outputs = self.rows if self.weights_on_rows else self.chunk
        return math.gcd(outputs, SWIZZLE_BYTES // dtype.itemsize, self.problem.n)

    @property
    def bias_size(self) -> int:
        """Room for the biases that a warpgroup's sums meet; the copy engine writes to multiples of 128 bytes."""
        return round_up(self.padded_rows if self.weights_on_rows else self.columns, 64)

    # --- work and where it goes -----------------------------------------------------------------------------------

    @property
    def bytes_per_stage(self) -> int:
        rows = self.row_parts * self.schedule.warpgroups * self.padded_rows
        return (rows + self.column_parts * self.columns) * self.tile_k * self.problem.dtype.itemsize

    @property
    def stages(self) -> int:
        """Lines of K in flight: all that shared memory holds and a CTA's work can use."""
        staged = [self.problem.out_dtype]
        staged += [] if self.problem.residual_dtype is None else [self.problem.residual_dtype]
        chunk = self.schedule.warpgroups * self.slots * math.prod(self.staged_shape)
        left = device.SHARED_MEMORY - device.SHARED_MEMORY_RESERVED
        left -= sum(chunk * dtype.itemsize for dtype in staged)
        if self.problem.bias_dtype is not None:
            left -= 4 * self.schedule.warpgroups * self.problem.parts * self.bias_size
        return min(16, left // self.bytes_per_stage, self.k_steps * (math.prod(self.grid) // self.clusters))

    @property
    def grid(self) -> tuple[int, int]:
        """Clusters of tiles along tokens and outputs."""
        s = self.schedule
        return pl.cdiv(self.problem.m, s.tile_m * s.cluster_m), pl.cdiv(self.problem.n, s.tile_n * s.cluster_n)

    @property
    def cluster_size(self) -> int:
        return self.schedule.cluster_m * self.schedule.cluster_n

    @property
    def clusters(self) -> int:
        """Clusters that run, each taking tile after tile. A cluster that found no room would double the time."""
        return min(math.prod(self.grid), device.resident_clusters(self.cluster_size))

    # --- what is possible, and what it costs ----------------------------------------------------------------------

    def faults(self) -> list[str]:
        """What would have to hold for this plan to be built, and does not."""
        s = self.schedule
        accumulators = self.problem.parts * self.padded_rows * self.columns // 128
        row_groups = (self.row_tile // self.row_pieces if self.rows_contiguous_in_k else self.tile_k) // 8
        column_groups = (self.columns if self.columns_contiguous_in_k else self.tile_k) // 8
        needed = {
            "rows is 'weights' or 'tokens'": s.rows in ("weights", "tokens"),
            f"8 to {MAX_COLUMNS} columns, in eights": 8 <= self.columns <= MAX_COLUMNS and self.columns % 8 == 0,
            f"up to {MAX_COLUMNS} rows": self.row_tile <= MAX_COLUMNS,
            "1 or 2 warpgroups": s.warpgroups in (1, 2),
            "8 rows or more to a warpgroup, in eights": self.row_tile > 0 and self.row_tile % (8 * s.warpgroups) == 0,
            "row tiles in 64s where K is not the last axis": self.rows_contiguous_in_k or self.rows % 64 == 0,
            "column tiles in 64s where K is not the last axis": self.columns_contiguous_in_k or self.columns % 64 == 0,
            f"up to {MAX_ACCUMULATORS} accumulators a thread": accumulators <= MAX_ACCUMULATORS,
            "clusters of 1, 2, 3, 4 or 8 CTAs": self.cluster_size in (1, 2, 3, 4, 8),
            # The copy engine's coordinate along an axis of one tile is dropped, wherever a CTA's own tile begins.
            "tile_m 8 and cluster_m 1 for up to 8 tokens": self.problem.m > 8
            or not self.weights_on_rows
            or (s.tile_m == 8 and s.cluster_m == 1),
            "tiles of a cluster within up to 64 outputs": self.problem.n > 64
            or s.tile_n * s.cluster_n <= self.problem.n,
            "shared operands in equal groups of 8 rows": row_groups % max(1, self.rows_shared_by) == 0
            and column_groups % max(1, self.columns_shared_by) == 0,
        }
        faults = [text for text, holds in needed.items() if not holds]
        if not faults and self.stages < min(2, self.k_steps):
            faults.append("2 stages in shared memory")
        return faults

    def estimate(self) -> float:
        """Seconds this plan should take on an H200, from what limits each step of K; used to rank, never to report."""
        p, s = self.problem, self.schedule
        waves = pl.cdiv(math.prod(self.grid), self.clusters)
        wgmma = 4 * s.lines * max(self.columns / 2, _LEAST_WGMMA_CYCLES) * self.column_parts
        matrix_unit = s.warpgroups * self.row_parts * self.padded_rows / 64 * wgmma
        line = s.lines * SWIZZLE_BYTES
        weights, tokens = p.parts * s.tile_n * line, s.tile_m * line
        received = (weights + tokens) / _BYTES_RECEIVED_PER_CYCLE
        sent_by_l2 = (weights / s.cluster_m + tokens / s.cluster_n) / _BYTES_SENT_BY_L2_PER_CYCLE
        step = max(matrix_unit, received, sent_by_l2) + _CYCLES_PER_STEP
        written = s.tile_m * s.tile_n * p.out_dtype.itemsize / _BYTES_RECEIVED_PER_CYCLE
        on_chip = waves * (self.k_steps * step + written + _CYCLES_PER_TILE) / _CLOCK
        # Weights that several clusters ask for at the same time are partly fetched again.
        weight_reads = 1 + 0.3 * (min(self.grid[0], 4) - 1)
        elements_read = weight_reads * p.parts * p.n * p.k + p.m * p.k
        bytes_moved = elements_read * p.dtype.itemsize + p.m * p.n * p.out_dtype.itemsize
        memory = bytes_moved / _MEMORY_BANDWIDTH
        # The smaller of the two is not hidden whole behind the larger.
        return max(on_chip, memory) + 0.15 * min(on_chip, memory) + _LAUNCH


# Of an H200, as schedules of this kernel were measured on it.
_CLOCK = 1.7e9
_MEMORY_BANDWIDTH = 4.6e12
_BYTES_RECEIVED_PER_CYCLE = 62.0
_BYTES_SENT_BY_L2_PER_CYCLE = 58.0
_LEAST_WGMMA_CYCLES = 26.0
_CYCLES_PER_STEP = 6.0
_CYCLES_PER_TILE = 4500.0
_LAUNCH = 1.5e-6


def round_up(size: int, multiple: int) -> int:
    """The least multiple from `size` on."""
    return -(-size // multiple) * multiple


def candidates(problem: Problem) -> list[Schedule]:
    """Every schedule worth trying for the problem, the one of least estimated time first."""
    plans = [plan for s in _schedules(problem) if not (plan := Plan(problem, s)).faults()]
    return [plan.schedule for plan in sorted(plans, key=Plan.estimate)]


def _schedules(problem: Problem) -> Iterator[Schedule]:
    tokens = round_up(problem.m, 8)
    panel = 1 if tokens <= 512 else 8
    for rows in ("weights", "tokens") if tokens > 64 else ("weights",):
        tiles_m, tiles_n = (_ON_COLUMNS, _ON_ROWS) if rows == "weights" else ((64, 128, 192, 256), _ON_COLUMNS)
        for tile_m, tile_n in itertools.product(tiles_m, tiles_n):
            if tile_m >= 2 * tokens and tile_m > 8:
                continue
            bytes_per_line = (tile_m + problem.parts * tile_n) * SWIZZLE_BYTES
            # Two warpgroups on half-empty rows each were slow.
            warpgroup_counts = (1, 2) if (tile_n if rows == "weights" else tile_m) >= 128 else (1,)
            for warpgroups, (cluster_m, cluster_n), lines in itertools.product(warpgroup_counts, _CLUSTERS, (1, 2, 4)):
                if tile_m * (cluster_m - 1) < tokens and (lines == 1 or lines * bytes_per_line <= _LONGEST_STAGE):
                    yield Schedule(tile_m, tile_n, rows, warpgroups, cluster_m, cluster_n, lines, panel)


_ON_ROWS = (*range(8, 65, 8), 80, 96, 112, 128, 160, 192, 256)
_ON_COLUMNS = (*range(8, 65, 8), *range(80, MAX_COLUMNS + 1, 16))
_LONGEST_STAGE = 44 * 1024
_CLUSTERS = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (4, 1), (1, 4), (1, 8))


# --- the tables -------------------------------------------------------------------------------------------------------


BUCKETS: Final = (8, 16, 24, *(size for power in range(5, 13) for size in (2**power, 3 * 2 ** (power - 1))), 8192)
"""Numbers of tokens that schedules are tuned for: powers of two, and three halves of them."""


def bucket(m: int) -> int:
    """The number of tokens whose schedule serves m: the next one of `BUCKETS`."""
    return next((size for size in BUCKETS if m <= size), BUCKETS[-1])


def key(problem: Problem) -> str:
    """The problem's name in a table: what a schedule is tuned for."""
    layouts = (
        "" if (problem.token_layout, problem.layout) == ("mk", "nk") else f"-{problem.token_layout}-{problem.layout}"
    )
    gated = "2x" if problem.parts == 2 else ""
    out = "" if problem.out_dtype == problem.dtype else f"-{problem.out_dtype}"
    # A bit more or less of shared memory for residual and bias is no reason for another schedule.
    return f"{problem.dtype}-{gated}{problem.n}x{problem.k}{layouts}{out}-m{bucket(problem.m)}"


def choose(problem: Problem, device_kind: str) -> Schedule:
    """The schedule that serves the problem.

    The table's for its number of tokens; else the one that the table names for the next smaller or larger number of
    tokens with the same weights, up to half and double; else the one of least estimated time.
    """
    named = table(device_kind)
    index = BUCKETS.index(bucket(problem.m))
    near = [index, *(i for step in (1, 2) for i in (index - step, index + step) if 0 <= i < len(BUCKETS))]
    for size in (BUCKETS[i] for i in near):
        schedule = named.get(key(dataclasses.replace(problem, m=size)))
        if schedule is not None and not Plan(problem, schedule).faults():
            return schedule
    return _by_rule(dataclasses.replace(problem, m=min(bucket(problem.m), round_up(problem.m, 8))))


@functools.cache
def _by_rule(problem: Problem) -> Schedule:
    return candidates(problem)[0]


@functools.cache
def table(device_kind: str) -> dict[str, Schedule]:
    """The tuned schedules of a kind of device, by `key`; empty where none were tuned."""
    file = table_file(device_kind)
    if not file.is_file():
        return {}
    return {name: Schedule(**fields) for name, fields in json.loads(file.read_text())["schedules"].items()}


def table_file(device_kind: str) -> Path:
    """Where a kind of device has its table."""
    return TABLES / f"{device_kind.replace(' ', '_')}.json"


def table_text(schedules: dict[str, Schedule], origin: dict[str, Any]) -> str:
    """A table as it is stored: a line a schedule, fields at their default left out."""
    defaults = {f.name: f.default for f in dataclasses.fields(Schedule)}
    lines = []
    for name in sorted(schedules):
        fields = {k: v for k, v in dataclasses.asdict(schedules[name]).items() if defaults[k] != v}
        lines.append(f"    {json.dumps(name)}: {json.dumps(fields)}")
    body = ",\n".join(lines)
    return f'{{\n  "origin": {json.dumps(origin)},\n  "schedules": {{\n{body}\n  }}\n}}\n'
