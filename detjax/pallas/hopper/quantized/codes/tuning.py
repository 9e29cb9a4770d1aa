"""The choice of a plan for a product of codes, by its estimated time."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Final

import jax.numpy as jnp

from detjax.contract import FP8_BLOCK
from detjax.operands.numerics import ceil_div, round_up
from detjax.pallas.hopper import device
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Problem, Schedule
from detjax.pallas.hopper.quantized.codes.plan import CodesPlan

_FEW_TOKENS: Final = 64
"""Up to this many tokens are on the matrix unit's columns."""

_LINES: Final = (1, 2, 4, 8)
"""Numbers of blocks in a stage."""

_MIN_PRODUCT_CYCLES: Final = 20.0
"""Estimated cycles of an instruction of the matrix unit with few columns: it reads 64 rows of 32 bytes."""
_CYCLES_OF_A_STAGE: Final = 120.0
"""Estimated cycles in which a warpgroup waits for a stage and for its last product."""
_CYCLES_PER_TILE: Final = 3000.0
_CYCLES_OF_A_BLOCK: Final = {1: 250.0, 2: 200.0}
"""Cycles of a block with tokens on the rows, by the number of warpgroups; fitted to an H200's times."""
_CYCLES_PER_COLUMN: Final = 2.1
"""Cycles of such a block in addition, for each warpgroup and column; fitted to the same times."""
_BYTES_RECEIVED_PER_CYCLE: Final = 58.0


@functools.cache
def default_plan(
    problem: Problem, scale_dtype: jnp.dtype, by_rows: bool, tile_m: int | None = None
) -> CodesPlan | None:
    """Returns the plan of the lowest estimated time, or None if none fits."""
    return min(candidates(problem, scale_dtype, by_rows, tile_m), key=estimated_seconds, default=None)


def candidates(problem: Problem, scale_dtype: jnp.dtype, by_rows: bool, tile_m: int | None = None) -> list[CodesPlan]:
    """Returns the plans worth trying, which can all be built; `tile_m` asks for tiles of this many tokens."""
    is_few = problem.m <= _FEW_TOKENS if tile_m is None else tile_m < MATRIX_ROWS
    schedules = _schedules_for_few_tokens(problem, tile_m) if is_few else _schedules_for_many_tokens(problem, tile_m)
    blocks = problem.k // FP8_BLOCK
    plans = (CodesPlan(problem, one, scale_dtype, by_rows) for one in schedules if blocks % one.lines == 0)
    return [plan for plan in plans if not plan.unmet_requirements()]


def _schedules_for_few_tokens(problem: Problem, tile_m: int | None) -> Iterator[Schedule]:
    """Yields schedules with weights on the rows."""
    tokens = round_up(problem.m, 8)
    tiles_m = {8} if tokens == 8 else {tokens, *(size for size in (16, 32, 48) if size < tokens)}
    for warpgroups, tile in itertools.product((1, 2), sorted(tiles_m) if tile_m is None else [tile_m]):
        for rows, lines in itertools.product(range(8, MATRIX_ROWS + 8, 8), _LINES):
            yield Schedule(tile, rows * warpgroups, warpgroups=warpgroups, lines=lines)


def _schedules_for_many_tokens(problem: Problem, tile_m: int | None) -> Iterator[Schedule]:
    """Yields schedules with tokens on the rows. Tiles of tokens that run at the same time share weights in L2."""
    tiles_n = [size for size in (32, 48, 64, 96, 112, 128, 192) if size <= problem.n] or [problem.n]
    for warpgroups, tile_n, lines in itertools.product((1, 2), tiles_n, (1, 2)):
        tile = warpgroups * MATRIX_ROWS
        if tile_m in (None, tile):
            tiles = ceil_div(problem.m, tile)
            # Gate and up of Qwen3-8B do not fit in L2. For 256 tokens, an H200 took 44 us with CTAs that load them in
            # pairs, and 60 us without, by a first version of the kernel.
            is_shared = problem.parts == 2 and not problem.experts and tiles % 2 == 0 and tile_n % 16 == 0
            yield Schedule(
                tile,
                tile_n,
                "tokens",
                warpgroups=warpgroups,
                cluster_m=2 if is_shared else 1,
                lines=lines,
                panel=min(8, tiles // 2 if is_shared else tiles),
            )


def estimated_seconds(plan: CodesPlan) -> float:
    """Returns the estimated seconds of a plan on an H200, only for ranking."""
    p, s = plan.problem, plan.schedule
    jobs, waves = s.lines * p.parts, ceil_div(math.prod(plan.grid), plan.clusters)
    memory = (p.parts * p.n * p.k + 2 * p.m * p.k + p.m * p.n * p.out_dtype.itemsize) / device.MEMORY_BANDWIDTH
    if not plan.weights_on_rows:
        step = jobs * (_CYCLES_OF_A_BLOCK[s.warpgroups] + _CYCLES_PER_COLUMN * s.warpgroups * plan.columns)
        # Without a second product in flight, the matrix unit waits for additions.
        step *= 1.0 if plan.at_once > 1 else 1.1
        on_chip = waves * (plan.k_steps * step + _CYCLES_PER_TILE) / device.CLOCK
        return max(on_chip, memory) + 0.15 * min(on_chip, memory)
    products = jobs * FP8_BLOCK // 32 * max(plan.columns / 2, _MIN_PRODUCT_CYCLES)
    additions = jobs * 2.5 * plan.registers_of_a_product
    alone = products + additions + _CYCLES_OF_A_STAGE * ceil_div(jobs, plan.at_once)
    # A tile with few weights leaves the rest of the matrix unit's 64 rows empty.
    missing = p.parts * s.warpgroups * (plan.padded_rows - plan.rows) * plan.tile_k
    arrival = (plan.bytes_per_stage - missing) / _BYTES_RECEIVED_PER_CYCLE
    step = max(s.warpgroups * products, alone, arrival)
    on_chip = waves * (plan.k_steps * step + _CYCLES_PER_TILE) / device.CLOCK
    return max(on_chip, memory) + 0.15 * min(on_chip, memory)
