"""The choice of a plan for packed weights, by its estimated time."""

import functools
import math
from typing import Final

from jax.experimental import pallas as pl

from detjax.operands.numerics import round_up
from detjax.pallas.hopper import device
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Problem, Schedule
from detjax.pallas.hopper.quantized.packed.plan import REGISTERS, PackedPlan
from detjax.pallas.hopper.quantized.widening import LINE, Codes

_BYTES_RECEIVED_PER_CYCLE: Final = 58.0
_CYCLES_OF_A_LINE: Final = {"int4": 46.0, "e2m1": 54.0, "e4m3": 61.0}
"""Cycles in which a consumer widens a line of the rows that fill one place of every warp.

Measured for int4; the others' ratios to it are from measurements of an earlier kernel.
"""
_OWN_SHARE: Final = {1: 0.85, 2: 0.8, 3: 0.65, 4: 0.6}
"""The part of the cycles of widening and multiplying in all consumers that remains, by their number."""
_CYCLES_OF_A_STAGE: Final = {1: 170.0, 2: 160.0, 3: 430.0, 4: 900.0}
"""Cycles of a stage in addition, by the number of consumers."""
_CYCLES_OF_A_HANDED_COLUMN: Final = 8.0
"""Cycles instead for each column of the sums that are handed on, if warpgroups take turns.

Three or four of them take as long as two: only one multiplies at a time.
"""
_CYCLES_OF_A_GATHERED_COLUMN: Final = 24.0
"""Cycles of a tile in addition for each column of spread rows' sums, which are brought in order."""
_FEW_STAGES: Final = 3
_FACTOR_OF_FEW_STAGES: Final = 1.2
"""The factor of a step's cycles with fewer stages than that, which hide less of the latency of memory; a guess."""
_MIN_WGMMA_CYCLES: Final = 26.0
_CYCLES_PER_TILE: Final = 4200.0
_MOST_TOKENS_IN_TURNS: Final = 16
"""Most tokens for which warpgroups take turns: as many as a GPU has measured, with int4 weights in one wave of CTAs."""


@functools.cache
def default_plan(problem: Problem, codes: Codes) -> PackedPlan | None:
    """Returns the plan of the lowest estimated time, or None if none fits."""
    return min(candidates(problem, codes), key=estimated_seconds, default=None)


def candidates(problem: Problem, codes: Codes) -> list[PackedPlan]:
    """Returns the plans worth trying.

    Of plans with the same estimate the first is chosen. So a tile with more rows comes before one with fewer, which
    was never faster: more CTAs then read the same tokens.
    """
    tokens = round_up(min(problem.m, 256), 8)
    tiles_m = {8} if tokens == 8 else {tokens, *(size for size in (16, 32, 64, 96, 128, 192) if size < tokens)}
    plans = [
        PackedPlan(problem, Schedule(tile_m, rows * warpgroups, warpgroups=warpgroups, lines=lines, panel=panel), codes)
        for warpgroups in REGISTERS
        for rows in range(MATRIX_ROWS, 0, -8)
        for tile_m in sorted(tiles_m)
        for lines in (1, 2, 4)
        for panel in ((1,) if problem.m <= 512 else (8,))
    ]
    # The fewest rows of one wave: their warpgroups have the least to widen before a turn.
    rows = round_up(pl.cdiv(problem.n, device.multiprocessors()), 8)
    if problem.parts == 1 and problem.m <= _MOST_TOKENS_IN_TURNS and rows <= MATRIX_ROWS:
        plans += [
            PackedPlan(problem, Schedule(tokens, rows, warpgroups=warpgroups, lines=lines), codes, takes_turns=True)
            for warpgroups in (2, 3)
            for lines in (2, 4)
        ]
    return [plan for plan in plans if not plan.unmet_requirements()]


def estimated_seconds(plan: PackedPlan) -> float:
    """Returns the estimated seconds of a plan on an H200, only for ranking.

    Its constants were fitted to the times of int4 weights for up to 64 tokens in
    benchmarks/results/quantized-plans-h200.json. Most estimates agree with these within 10 %.
    """
    p, s = plan.problem, plan.schedule
    # A warp of each of the four schedulers has the same work, also for rows beyond the tile.
    places = 1 if plan.fill.is_spread and p.parts == 1 else 2
    line = places * _CYCLES_OF_A_LINE[plan.codes.numbers] + LINE / 16 * max(plan.columns / 2, _MIN_WGMMA_CYCLES)
    work = plan.row_shares * plan.accumulators * s.lines * line
    stage = _CYCLES_OF_A_HANDED_COLUMN * plan.columns if plan.takes_turns else _CYCLES_OF_A_STAGE[s.warpgroups]
    step = max(plan.bytes_per_stage / _BYTES_RECEIVED_PER_CYCLE, work * _OWN_SHARE[plan.row_shares] + stage)
    if plan.stages < _FEW_STAGES:
        step *= _FACTOR_OF_FEW_STAGES
    tile = _CYCLES_PER_TILE
    if plan.fill.is_spread:
        tile += p.parts * plan.columns * _CYCLES_OF_A_GATHERED_COLUMN
    waves = pl.cdiv(math.prod(plan.grid), plan.clusters)
    on_chip = waves * (plan.k_steps * step + tile) / device.CLOCK
    row = plan.codes.row_bytes(p.k) + plan.extra_bytes * plan.k_steps
    memory = (p.parts * p.n * row + 2 * p.m * p.k + p.m * p.n * p.out_dtype.itemsize) / device.MEMORY_BANDWIDTH
    return max(on_chip, memory) + 0.15 * min(on_chip, memory)
