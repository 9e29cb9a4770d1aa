"""The choice of a plan for packed weights, by its estimated time."""

import dataclasses
import functools
import math
from typing import Final

from jax.experimental import pallas as pl

from detjax.operands.numerics import round_up
from detjax.pallas.hopper import device
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Problem, Schedule
from detjax.pallas.hopper.quantized.packed.plan import REGISTERS_OF_WIDENING_CONSUMERS, PackedPlan
from detjax.pallas.hopper.quantized.widening import LINE, Codes

_CLOCK: Final = 1.7e9
_MEMORY_BANDWIDTH: Final = 4.6e12
_BYTES_RECEIVED_PER_CYCLE: Final = 58.0
_WIDENED_PER_CYCLE: Final = {1: 14.0, 2: 24.0, 3: 30.0}
"""Estimated numbers that one, two or three warpgroups widen per cycle."""
_CYCLES_OF_A_LINE: Final = {"int4": 90.0, "e2m1": 105.0, "e4m3": 119.0}
"""Cycles in which a consumer widens a line of the rows that fill one place of every warp."""
_OWN_SHARE: Final = {1: 0.85, 2: 0.6, 3: 0.6, 4: 0.6}
"""The part of the cycles of widening and multiplying in all consumers that remains, by their number."""
_CYCLES_OF_A_STAGE: Final = {1: 170.0, 2: 400.0, 3: 600.0, 4: 900.0}
"""Cycles of a stage in addition, by the number of consumers."""
_FEW_STAGES: Final = 3
_FACTOR_OF_FEW_STAGES: Final = 1.2
"""The factor of a step's cycles with fewer stages than that, which hide less of the latency of memory; a guess."""
_SHARED_BYTES_PER_CYCLE: Final = 110.0
_MIN_WGMMA_CYCLES: Final = 26.0
_CYCLES_PER_STEP: Final = 12.0
_CYCLES_PER_TILE: Final = 5000.0


@functools.cache
def default_plan(problem: Problem, codes: Codes) -> PackedPlan | None:
    """Returns the plan of the lowest estimated time, or None if none fits."""
    return min(candidates(problem, codes), key=estimated_seconds, default=None)


def candidates(problem: Problem, codes: Codes) -> list[PackedPlan]:
    """Returns the plans worth trying, of warpgroups that widen their own rows."""
    tokens = round_up(min(problem.m, 256), 8)
    tiles_m = {8} if tokens == 8 else {tokens, *(size for size in (16, 32, 64, 96, 128, 192) if size < tokens)}
    plans = [
        PackedPlan(
            problem, Schedule(tile_m, rows * warpgroups, warpgroups=warpgroups, lines=lines, panel=panel), codes, 0
        )
        for warpgroups in REGISTERS_OF_WIDENING_CONSUMERS
        for rows in range(8, MATRIX_ROWS + 8, 8)
        for tile_m in sorted(tiles_m)
        for lines in (1, 2, 4)
        for panel in ((1,) if problem.m <= 512 else (8,))
    ]
    return [plan for plan in plans if not plan.unmet_requirements()]


def estimated_seconds(plan: PackedPlan) -> float:
    """Returns the estimated seconds of a plan on an H200, only for ranking.

    Constants of plans without wideners were fitted to measured times. Most estimates agree with these within 15 %.
    """
    p, s = plan.problem, plan.schedule
    weights = p.parts * plan.row_tile * plan.tile_k
    received = plan.bytes_per_stage / _BYTES_RECEIVED_PER_CYCLE
    if plan.wideners:
        matrix_rows = p.parts * s.warpgroups * plan.padded_rows
        wgmma = matrix_rows / MATRIX_ROWS * plan.tile_k / 16 * max(plan.columns / 2, _MIN_WGMMA_CYCLES)
        # Copied, read and stored by the wideners, and read by the matrix unit with padded rows.
        shared = 2 * plan.bytes_per_stage + 2 * weights + 2 * matrix_rows * plan.tile_k
        widened = weights / _WIDENED_PER_CYCLE[plan.wideners]
        step = max(wgmma, received, widened, shared / _SHARED_BYTES_PER_CYCLE) + _CYCLES_PER_STEP
    else:
        # A warp of each of the four schedulers has the same work, also for rows beyond the tile.
        places = 1 if plan.fill.is_spread and p.parts == 1 else 2
        line = places * _CYCLES_OF_A_LINE[plan.codes.numbers] + LINE / 16 * max(plan.columns / 2, _MIN_WGMMA_CYCLES)
        work = s.warpgroups * plan.accumulators * s.lines * line
        step = max(received, work * _OWN_SHARE[s.warpgroups] + _CYCLES_OF_A_STAGE[s.warpgroups])
        if plan.stages < _FEW_STAGES:
            step *= _FACTOR_OF_FEW_STAGES
    waves = pl.cdiv(math.prod(plan.grid), plan.clusters)
    on_chip = waves * (plan.k_steps * step + _CYCLES_PER_TILE) / _CLOCK
    row = plan.codes.row_bytes(p.k) + plan.extra_bytes * plan.k_steps
    memory = (p.parts * p.n * row + 2 * p.m * p.k + p.m * p.n * p.out_dtype.itemsize) / _MEMORY_BANDWIDTH
    return max(on_chip, memory) + 0.15 * min(on_chip, memory)


def further_candidates(problem: Problem, codes: Codes) -> list[PackedPlan]:
    """Returns plans for few tokens that no GPU has measured, and which `candidates` therefore leaves out.

    They are the default plan with one thread for the arrivals of a warpgroup, then with scales that are loaded once,
    and the plans whose warpgroups take turns on tiles of at least as many rows as one wave of CTAs needs.
    """
    default = default_plan(problem, codes)
    if default is None:
        return []
    plans = [dataclasses.replace(default, meets=True), dataclasses.replace(default, holds_scales=True, meets=True)]
    tile_m = round_up(min(problem.m, MATRIX_ROWS), 8)
    rows = [rows for rows in range(8, MATRIX_ROWS + 8, 8) if rows * device.multiprocessors() >= problem.n][:1]
    plans += [
        PackedPlan(
            problem,
            Schedule(tile_m, tile_n, warpgroups=warpgroups, lines=lines),
            codes,
            0,
            takes_turns=True,
            holds_scales=holds_scales,
            meets=meets,
        )
        for tile_n in rows
        for warpgroups in (2, 3, 4)
        for lines in (4, 2)
        for holds_scales, meets in ((False, False), (True, True))
    ]
    return [plan for plan in dict.fromkeys(plans) if not plan.unmet_requirements()]
