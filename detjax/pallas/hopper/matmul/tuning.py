"""The choice of a schedule for a Hopper matmul: tuned tables, and a cost model for problems that no table has."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from detjax.operands.numerics import ceil_div, round_up
from detjax.pallas.hopper.device import CLOCK, MEMORY_BANDWIDTH, SWIZZLE_BYTES
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, MAX_COLUMNS, Plan, Problem, Schedule
from detjax.runtime import backends

TABLES: Final = Path(__file__).parent / "tables"
"""Folder of the tuned tables, a file for each kind of device."""

BUCKETS: Final = (8, 16, 24, *(size for power in range(5, 13) for size in (2**power, 3 * 2 ** (power - 1))), 8192)
"""Numbers of tokens that schedules are tuned for: powers of two, and three halves of them."""

_MAX_SLOWDOWN: Final = 1.1
"""Largest estimated time, over the best candidate's, of a schedule that was measured with other numbers of tokens."""

_MIN_SHARED_TOKENS: Final = 128
"""Fewest tokens for which devices write results into each other's arrays as they compute them."""

_BYTES_EXCHANGED_PER_SECOND: Final = 3e11
"""Bytes that two H200s send each other in a separate exchange of many."""


def default_schedule(problem: Problem, device_kind: str | None = None) -> Schedule:
    """Returns the schedule for a problem.

    The table's schedule for this number of tokens comes first, then its schedules of the same weights for neighbouring
    numbers of tokens, from half to double, unless a candidate is clearly faster by the cost model: tiles for fewer
    tokens may not hold all of these, and the weights would be read twice. If no schedule of the table serves, the
    candidate with the lowest estimated time is taken.

    Args:
        problem: the problem, with sizes that the copy engine can address.
        device_kind: the kind of device whose table is used, such as "NVIDIA H200"; None: the traced device's.
    """
    tuned = table(backends.device_kind() if device_kind is None else device_kind)
    index = BUCKETS.index(bucket(problem.tokens))
    near = [index, *(i for step in (1, 2) for i in (index - step, index + step) if 0 <= i < len(BUCKETS))]
    for i in near:
        schedule = tuned.get(key(problem.with_tokens(BUCKETS[i])))
        if schedule is not None and _serves(schedule, problem) and (i == index or _competes(schedule, problem)):
            return schedule
    return _best_candidate(_padded(problem))


def shared_schedule(problem: Problem, device_kind: str | None = None) -> Schedule | None:
    """Returns the schedule of a product whose columns devices share, or None if a separate exchange is faster.

    Measured on two H100s for an MLP of 4096 and 12288 columns, kernels that write to both devices take 1.27 times as
    long as a separate exchange with 16 tokens, 0.93 with 257, and 0.81 with 1024.

    Args:
        problem: one device's part of the product.
        device_kind: see `default_schedule`.
    """
    if problem.m < _MIN_SHARED_TOKENS:
        return None
    default = default_schedule(problem, device_kind)
    if Plan(problem, default).can_be_shared:
        return default
    # Tiles have to end where a device's columns do. That may cost more than the exchange.
    exchanged = problem.m * problem.n * problem.out_dtype.itemsize / _BYTES_EXCHANGED_PER_SECOND
    limit = estimated_seconds(Plan(problem, default)) + exchanged
    best = _best_shared_candidate(_padded(problem))
    return best if best is not None and estimated_seconds(Plan(problem, best)) < limit else None


def _padded(problem: Problem) -> Problem:
    """Returns the problem whose candidates are ranked: similar numbers of tokens share one."""
    if problem.token_layout == "km":
        return problem
    return problem.with_tokens(min(bucket(problem.m), round_up(problem.m, 8)))


def _serves(schedule: Schedule, problem: Problem) -> bool:
    """Returns whether a schedule fits, with enough stages. A residual takes shared memory that tuning did not count."""
    return schedule.fits(problem) and Plan(problem, schedule).stages > _STAGES_IN_TURNS


def _competes(schedule: Schedule, problem: Problem) -> bool:
    """Returns whether a schedule tuned for other numbers of tokens is about as fast as the best candidate."""
    problem = _padded(problem)
    best = Plan(problem, _best_candidate(problem))
    return estimated_seconds(Plan(problem, schedule)) <= _MAX_SLOWDOWN * estimated_seconds(best)


@functools.cache
def _best_candidate(problem: Problem) -> Schedule:
    return candidates(problem)[0]


@functools.cache
def _best_shared_candidate(problem: Problem) -> Schedule | None:
    return next((schedule for schedule in candidates(problem) if Plan(problem, schedule).can_be_shared), None)


# --- the tables -------------------------------------------------------------------------------------------------------


def bucket(m: int) -> int:
    """Returns the least of `BUCKETS` that is at least m, or the last one."""
    return next((size for size in BUCKETS if m <= size), BUCKETS[-1])


def key(problem: Problem) -> str:
    """Returns the problem's name in a table, made of everything that a schedule is tuned for."""
    layouts = (
        "" if (problem.token_layout, problem.layout) == ("mk", "nk") else f"-{problem.token_layout}-{problem.layout}"
    )
    gated = "2x" if problem.parts == 2 else ""
    out = "" if problem.out_dtype == problem.dtype else f"-{problem.out_dtype}"
    tokens = bucket(problem.tokens)
    m, k = (tokens, problem.k) if problem.token_layout == "mk" else (problem.m, tokens)
    # Residual and bias are left out: the little shared memory that they take calls for no other schedule.
    return f"{problem.dtype}-{gated}{problem.n}x{k}{layouts}{out}-m{m}"


@functools.cache
def table(device_kind: str) -> dict[str, Schedule]:
    """Returns the tuned schedules of a kind of device, by `key`; empty without a table."""
    file = table_file(device_kind)
    if not file.is_file():
        return {}
    return {name: Schedule(**fields) for name, fields in json.loads(file.read_text())["schedules"].items()}


def table_file(device_kind: str) -> Path:
    """Returns the path of a device kind's table."""
    return TABLES / f"{device_kind.replace(' ', '_')}.json"


def table_text(schedules: dict[str, Schedule], origin: dict[str, Any]) -> str:
    """Returns the text of a table's file: one line per schedule, without fields that have their default."""
    defaults = {f.name: f.default for f in dataclasses.fields(Schedule)}
    lines = []
    for name in sorted(schedules):
        fields = {k: v for k, v in dataclasses.asdict(schedules[name]).items() if defaults[k] != v}
        lines.append(f"    {json.dumps(name)}: {json.dumps(fields)}")
    body = ",\n".join(lines)
    return f'{{\n  "origin": {json.dumps(origin)},\n  "schedules": {{\n{body}\n  }}\n}}\n'


# --- the search space -------------------------------------------------------------------------------------------------

_ON_ROWS: Final = (*range(8, 65, 8), 80, 96, 112, 128, 160, 192, 256)
_ON_COLUMNS: Final = (*range(8, 65, 8), *range(80, MAX_COLUMNS + 1, 16))
_TOKENS_ON_ROWS: Final = (64, 128, 192, 256)
_CLUSTERS: Final = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (4, 1), (1, 4), (1, 8))
_MAX_STAGE_BYTES: Final = 44 * 1024


def candidates(problem: Problem) -> list[Schedule]:
    """Returns every schedule worth trying for the problem, in ascending order of estimated time."""
    plans = (Plan(problem, schedule) for schedule in _schedules(problem))
    fitting = [plan for plan in plans if not plan.unmet_requirements()]
    return [plan.schedule for plan in sorted(fitting, key=estimated_seconds)]


def _schedules(problem: Problem) -> Iterator[Schedule]:
    tokens = round_up(problem.m, 8)
    panel = 1 if tokens <= 512 else 8
    for rows in ("weights", "tokens") if tokens > 64 or problem.continues else ("weights",):
        tiles_m, tiles_n = (_ON_COLUMNS, _ON_ROWS) if rows == "weights" else (_TOKENS_ON_ROWS, _ON_COLUMNS)
        for tile_m, tile_n in itertools.product(tiles_m, tiles_n):
            if tile_m >= 2 * tokens and tile_m > 8:
                continue
            bytes_per_line = (tile_m + problem.parts * tile_n) * SWIZZLE_BYTES
            # Two warpgroups with half-empty rows each were slow when measured.
            warpgroup_counts = (1, 2) if (tile_n if rows == "weights" else tile_m) >= 128 else (1,)
            for warpgroups, (cluster_m, cluster_n), lines in itertools.product(warpgroup_counts, _CLUSTERS, (1, 2, 4)):
                if tile_m * (cluster_m - 1) < tokens and (lines == 1 or lines * bytes_per_line <= _MAX_STAGE_BYTES):
                    yield Schedule(tile_m, tile_n, rows, warpgroups, cluster_m, cluster_n, lines, panel)


# --- the cost model, fitted to schedules of this kernel as measured on an H200 ----------------------------------------

_BYTES_RECEIVED_PER_CYCLE: Final = 62.0
"""Bytes that a multiprocessor receives per cycle."""
_BYTES_SENT_BY_L2_PER_CYCLE: Final = 58.0
"""Bytes that L2 sends to a multiprocessor per cycle."""
_MIN_WGMMA_CYCLES: Final = 26.0
"""Fewest cycles of a `wgmma`, whatever its number of columns."""
_STAGES_IN_TURNS: Final = 2
"""Stages with which copies and products take turns: the products of the previous step still read the other stage.

Three are enough: at 8192 tokens, an H200 reached 406 Tflop/s with two (2048 x 12288) and 694 with three (3072 x 4096).
"""
_CYCLES_OF_A_COPY: Final = 500.0
"""Cycles until a copy begins to arrive, where it is waited for."""
_CYCLES_PER_STEP: Final = 6.0
"""Cycles of a step of K in addition to its copies and products."""
_CYCLES_PER_TILE: Final = 4500.0
"""Cycles of a tile in addition to its steps."""
_LAUNCH: Final = 1.5e-6
"""Seconds of a launch."""


def estimated_seconds(plan: Plan) -> float:
    """Returns the estimated seconds of a plan on an H200, from the bottleneck of each step of K; only for ranking."""
    p, s = plan.problem, plan.schedule
    waves = ceil_div(math.prod(plan.grid), plan.clusters)
    wgmma = 4 * s.lines * max(plan.columns / 2, _MIN_WGMMA_CYCLES) * plan.column_parts
    matrix_unit = s.warpgroups * plan.row_parts * plan.padded_rows / MATRIX_ROWS * wgmma
    line = s.lines * SWIZZLE_BYTES
    weights, tokens = p.parts * s.tile_n * line, s.tile_m * line
    received = (weights + tokens) / _BYTES_RECEIVED_PER_CYCLE
    sent_by_l2 = (weights / s.cluster_m + tokens / s.cluster_n) / _BYTES_SENT_BY_L2_PER_CYCLE
    copied = max(received, sent_by_l2)
    is_in_turns = plan.stages <= _STAGES_IN_TURNS
    step = _CYCLES_OF_A_COPY + copied + matrix_unit if is_in_turns else max(matrix_unit, copied)
    step += _CYCLES_PER_STEP
    written = s.tile_m * s.tile_n * p.out_dtype.itemsize / _BYTES_RECEIVED_PER_CYCLE
    on_chip = waves * (plan.k_steps * step + written + _CYCLES_PER_TILE) / CLOCK
    # Weights that several clusters request at the same time are partly fetched more than once.
    weight_reads = 1 + 0.3 * (min(plan.grid[0], 4) - 1)
    elements_read = weight_reads * p.parts * p.n * p.k + p.m * p.k
    bytes_moved = elements_read * p.dtype.itemsize + p.m * p.n * p.out_dtype.itemsize
    memory = bytes_moved / MEMORY_BANDWIDTH
    # The longer of the two hides the shorter one only in part.
    return max(on_chip, memory) + 0.15 * min(on_chip, memory) + _LAUNCH
