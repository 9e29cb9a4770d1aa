"""Schedules of the matmul on `mma.sync`: a `Schedule` for a problem, and the `Plan` of sizes derived from both."""

import dataclasses
import math
from typing import Final

from jax.experimental import pallas as pl

from detjax.operands.numerics import round_up
from detjax.pallas import nvidia
from detjax.pallas.hopper.device import multiprocessors
from detjax.pallas.hopper.matmul.plan import Problem
from detjax.pallas.mma.fragments import STEP, RowWarps, column_unit, row_unit

MAX_ACCUMULATORS: Final = 128
"""Registers of a thread that may hold accumulators. Operands of 32 K take up to 80 more."""

_WHOLE_LINE: Final = 64
"""Elements of the longest swizzled line in shared memory: 128 bytes, a word in each bank."""

_MAX_STAGES: Final = 8


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of a product over the chip; no bit depends on it."""

    tile_m: int
    """Tokens of a CTA's tile."""
    tile_n: int
    """Outputs of each part in a CTA's tile."""
    row_warps: RowWarps = 2
    """Warps along the tokens; the others of the four lie along the outputs."""
    line: int = 32
    """Elements of K in a swizzled line, 32 or 64, and in the operands that a thread holds at once."""
    lines: int = 1
    """Lines of K in a stage."""
    panel: int = 1
    """Tiles along the tokens that are visited together, so that both operands stay in L2."""
    warpgroups: int = 1
    """Warpgroups of a CTA, which have equal parts of the tile's tokens and share its weights."""
    stages: int | None = None
    """Upper limit of the stages of several warpgroups; by default as many as fit."""

    def fits(self, problem: Problem) -> bool:
        """Returns True if a kernel of this schedule can compute the problem."""
        return not Plan(problem, self).unmet_requirements()

    def check(self, problem: Problem) -> None:
        """Raises ValueError, with the unmet requirements, if a kernel of this schedule cannot compute the problem."""
        if unmet := Plan(problem, self).unmet_requirements():
            raise ValueError(f"matmul: {self} for {problem}; accepted: {'; '.join(unmet)}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule applied to a problem: the sizes that a kernel is built from."""

    problem: Problem
    schedule: Schedule

    @property
    def tokens_contiguous_in_k(self) -> bool:
        """True if K is the last axis of the tokens."""
        return self.problem.token_layout == "mk"

    @property
    def weights_contiguous_in_k(self) -> bool:
        """True if K is the last axis of the weights."""
        return self.problem.layout == "nk"

    @property
    def tile_k(self) -> int:
        """Elements of K in a stage."""
        return self.schedule.line * self.schedule.lines

    @property
    def rows(self) -> int:
        """Tokens of a warpgroup."""
        return self.schedule.tile_m // self.schedule.warpgroups

    @property
    def fragment(self) -> int:
        """Elements of K that threads hold at once: whole lines where an operand's lines lie along K."""
        return self.schedule.line if self.tokens_contiguous_in_k or self.weights_contiguous_in_k else STEP

    @property
    def padded(self) -> tuple[int, int, int]:
        """M, N and K of whole tiles. Copies by threads read whole tiles, and threads write whole tiles."""
        problem, s = self.problem, self.schedule
        return round_up(problem.m, s.tile_m), s.tile_n * self.grid[1], round_up(problem.k, self.tile_k)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along tokens and along outputs."""
        s = self.schedule
        return pl.cdiv(self.problem.m, s.tile_m), pl.cdiv(self.problem.n, s.tile_n)

    @property
    def k_steps(self) -> int:
        """Stages of a tile."""
        return pl.cdiv(self.problem.k, self.tile_k)

    @property
    def tokens_shape(self) -> tuple[int, int]:
        """Shape of the tokens of a warpgroup in a stage."""
        m, k = self.rows, self.tile_k
        return (m, k) if self.tokens_contiguous_in_k else (k, m)

    @property
    def weights_shape(self) -> tuple[int, int]:
        """Shape of the tile of one part's weights in a stage."""
        n, k = self.schedule.tile_n, self.tile_k
        return (n, k) if self.weights_contiguous_in_k else (k, n)

    @property
    def tokens_line(self) -> int:
        """Elements in a swizzled line of the tokens."""
        return self.schedule.line if self.tokens_contiguous_in_k else math.gcd(_WHOLE_LINE, self.rows)

    @property
    def weights_line(self) -> int:
        """Elements in a swizzled line of the weights."""
        return self.schedule.line if self.weights_contiguous_in_k else math.gcd(_WHOLE_LINE, self.schedule.tile_n)

    @property
    def copies(self) -> int:
        """Copies that fill a stage."""
        return self.schedule.warpgroups * (1 + self.problem.parts)

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage in shared memory."""
        rows = self.schedule.tile_m + self.problem.parts * self.schedule.tile_n
        return rows * self.tile_k * self.problem.dtype.itemsize

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as leave room for a second CTA, or what one CTA can have if that is below 3.

        A second CTA multiplies while the first one starts or writes its tile. Registers have no room for a second CTA
        of several warpgroups.
        """
        if self.schedule.warpgroups > 1:
            fitting = (nvidia.shared_memory() - self.staged_bytes) // self.bytes_per_stage
            return min(_MAX_STAGES, max(2, self.k_steps), fitting, self.schedule.stages or fitting)
        halved = (nvidia.shared_memory_of_multiprocessor() // 2 - nvidia.SHARED_MEMORY_RESERVED) // self.bytes_per_stage
        alone = nvidia.shared_memory() // self.bytes_per_stage
        return min(_MAX_STAGES, max(2, self.k_steps), halved if halved >= 3 else min(3, alone))

    @property
    def chunk(self) -> int:
        """Columns of the accumulator that pass the epilogue together, so that its temporaries fit in registers."""
        return math.gcd(self.schedule.tile_n, max(32, column_unit(self.schedule.row_warps)))

    @property
    def is_staged(self) -> bool:
        """True if results pass through shared memory, from where the copy engine writes whole lines of them.

        Threads write 16 bytes of a row at once. Where one CTA fills a multiprocessor, nothing hides how long that takes
        for results of 2 bytes.
        """
        narrow = self.problem.out_dtype.itemsize == 2 and not self.problem.continues
        return self.schedule.warpgroups > 1 and narrow and nvidia.has_copy_engine()

    @property
    def staged_shape(self) -> tuple[int, int, int, int]:
        """Shape of the chunks of results in shared memory: a warpgroup has two."""
        return self.schedule.warpgroups, 2, self.rows, self.chunk

    @property
    def staged_bytes(self) -> int:
        """Bytes of the results in shared memory."""
        return math.prod(self.staged_shape) * self.problem.out_dtype.itemsize if self.is_staged else 0

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        s, problem = self.schedule, self.problem
        accumulators = problem.parts * s.tile_m * s.tile_n // (128 * s.warpgroups)
        requirements = {
            "row_warps 1, 2 or 4": s.row_warps in (1, 2, 4),
            "lines of 32 or 64": s.line in (32, 64) and s.lines >= 1,
            "1 or 2 warpgroups": s.warpgroups in (1, 2),
            "tile_m in multiples of 16 * row_warps for each warpgroup": s.tile_m > 0
            and s.tile_m % (s.warpgroups * row_unit(s.row_warps)) == 0,
            "tile_n in multiples of 32 / row_warps": s.tile_n > 0 and s.tile_n % column_unit(s.row_warps) == 0,
            f"up to {MAX_ACCUMULATORS} accumulators a thread": accumulators <= MAX_ACCUMULATORS,
            "tiles of 64 where K is not the last axis": (self.tokens_contiguous_in_k or self.rows % _WHOLE_LINE == 0)
            and (self.weights_contiguous_in_k or s.tile_n % _WHOLE_LINE == 0),
            # Each of the four warps copies blocks of 8 lines.
            "four blocks of 8 lines in a stage of each operand": all(
                (shape[0] // 8) % 4 == 0 or ((shape[0] // 8) % 2 == 0 and (shape[1] // line) % 2 == 0)
                for shape, line in (
                    (self.tokens_shape, self.tokens_line),
                    ((self.weights_shape[0] // s.warpgroups, self.weights_shape[1]), self.weights_line),
                )
            ),
        }
        unmet = [text for text, holds in requirements.items() if not holds]
        if not unmet and self.stages < 2:
            unmet.append("2 stages in shared memory")
        return unmet


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem, by a rule that knows the chip's multiprocessors and shared memory.

    Few tokens stream weights: tiles are narrow, so that there are enough of them for the chip, and have long lines.
    Many tokens are bound by the matrix unit: tiles are as large as registers allow.
    """
    m, n, parts = problem.m, problem.n, problem.parts
    columns_in_64s = problem.layout == "kn"
    rows_in_64s = problem.token_layout == "km"
    if m <= 16 and not rows_in_64s:
        narrow = 64 if columns_in_64s else 32
        return Schedule(16, narrow, 1, line=64, lines=2)
    if m <= 32 and not rows_in_64s:
        return Schedule(32, 64 if columns_in_64s else 32, 2, line=64)
    shared, chip = shared_stages(problem), multiprocessors()
    tiles = pl.cdiv(m, shared.tile_m) * pl.cdiv(n, shared.tile_n)
    # The last round of tiles may not leave much of the chip idle, nor may tiles of 256 tokens compute many more rows
    # than tiles of 128 would.
    fills_chip = 8 * tiles >= 7 * chip * pl.cdiv(tiles, chip)
    few_padded = 8 * (round_up(m, shared.tile_m) - round_up(m, 128)) <= m
    if m > 128 and few_padded and fills_chip and shared.fits(problem):
        return shared
    narrowest = 64 if columns_in_64s else 1
    if m > 128:
        width = max(narrowest, 64 // parts)
        one = Schedule(128, width, 2, line=_WHOLE_LINE, panel=8)
        two = dataclasses.replace(one, warpgroups=2)
        # Where a multiprocessor has one tile at most, two warpgroups share it.
        has_one = pl.cdiv(m, 128) * pl.cdiv(n, width) <= chip
        candidates = [two, one] if has_one else [one]
    else:
        widths = [max(narrowest, width // parts) for width in (128, 64, 32)]
        enough = [width for width in widths if pl.cdiv(m, 64) * pl.cdiv(n, width) >= chip]
        candidates = [Schedule(64, enough[0] if enough else widths[-1], 2, line=_WHOLE_LINE, panel=8)]
    fitting = (schedule for schedule in candidates if schedule.fits(problem))
    return next(fitting, Schedule(64, 64, 2, panel=8))


def shared_stages(problem: Problem) -> Schedule:
    """Returns the schedule of two warpgroups that read the least from the L2 cache, for enough tokens to fill tiles."""
    # Half lines where whole ones leave room for two stages only: the copies of one must not wait for the other's use.
    schedule = Schedule(256, 128 // problem.parts, 2, line=_WHOLE_LINE, panel=4, warpgroups=2)
    if Plan(problem, schedule).bytes_per_stage * 3 > nvidia.shared_memory():
        schedule = dataclasses.replace(schedule, line=_WHOLE_LINE // 2)
    return schedule
