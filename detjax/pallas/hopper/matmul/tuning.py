"""Which schedule serves a Hopper matmul: the tuned tables, and a cost model for problems that no table has."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from jax.experimental import pallas as pl

from detjax.operands.numerics import round_up
from detjax.pallas.hopper.device import SWIZZLE_BYTES
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, MAX_COLUMNS, Plan, Problem, Schedule
from detjax.runtime import backends

TABLES: Final = Path(__file__).parent / "tables"
"""The folder of the tuned tables, a file for each kind of device."""

BUCKETS: Final = (8, 16, 24, *(size for power in range(5, 13) for size in (2**power, 3 * 2 ** (power - 1))), 8192)
"""Numbers of tokens that schedules are tuned for: powers of two, and three halves of them."""


_FEWEST_SHARED: Final = 128
"""Tokens from which on devices write their results to one another as they compute them."""


def default_schedule(problem: Problem, device_kind: str | None = None) -> Schedule:
    """The schedule that serves the problem.

    That is the table's schedule for the problem's number of tokens. If the table has none, or if it does not fit, it is
    the table's schedule of the same weights for the next smaller or larger numbers of tokens, up to half and double.
    Without any of these, it is the candidate of least estimated time.

    Args:
        problem: what is computed, with sizes that the copy engine can address.
        device_kind: whose table serves, as "NVIDIA H200"; None: that of the device that programs are traced for.
    """
    tuned = table(backends.device_kind() if device_kind is None else device_kind)
    index = BUCKETS.index(bucket(problem.tokens))
    near = [index, *(i for step in (1, 2) for i in (index - step, index + step) if 0 <= i < len(BUCKETS))]
    for size in (BUCKETS[i] for i in near):
        schedule = tuned.get(key(problem.with_tokens(size)))
        if schedule is not None and schedule.fits(problem):
            return schedule
    if problem.token_layout == "km":
        return _best_candidate(problem)
    return _best_candidate(problem.with_tokens(min(bucket(problem.m), round_up(problem.m, 8))))


def shared_schedule(problem: Problem, device_kind: str | None = None) -> Schedule | None:
    """The schedule of a product whose columns several devices compute, each writing to the arrays of all.

    That is the default one; None where an exchange by a kernel of its own is faster. Measured on two H100s for an MLP
    of 4096 and 12288 columns, kernels that write to both take 1.27 times as long with 16 tokens, 0.93 with 257, and
    0.81 with 1024. With 8448 the schedule whose tiles end where a device's columns do costs more than the exchange.

    Args:
        problem: what one of the devices computes.
        device_kind: see `default_schedule`.
    """
    if problem.m < _FEWEST_SHARED:
        return None
    schedule = default_schedule(problem, device_kind)
    return schedule if Plan(problem, schedule).can_be_shared else None


@functools.cache
def _best_candidate(problem: Problem) -> Schedule:
    return candidates(problem)[0]


# --- the tables -------------------------------------------------------------------------------------------------------


def bucket(m: int) -> int:
    """The number of tokens whose schedule serves m tokens: the least of `BUCKETS` from m on, or the last one."""
    return next((size for size in BUCKETS if m <= size), BUCKETS[-1])


def key(problem: Problem) -> str:
    """The problem's name in a table, which has all that a schedule is tuned for."""
    layouts = (
        "" if (problem.token_layout, problem.layout) == ("mk", "nk") else f"-{problem.token_layout}-{problem.layout}"
    )
    gated = "2x" if problem.parts == 2 else ""
    out = "" if problem.out_dtype == problem.dtype else f"-{problem.out_dtype}"
    tokens = bucket(problem.tokens)
    m, k = (tokens, problem.k) if problem.token_layout == "mk" else (problem.m, tokens)
    # Residual and bias take a little shared memory, which is no reason for a different schedule.
    return f"{problem.dtype}-{gated}{problem.n}x{k}{layouts}{out}-m{m}"


@functools.cache
def table(device_kind: str) -> dict[str, Schedule]:
    """The tuned schedules of a kind of device, by `key`; empty if none were tuned."""
    file = table_file(device_kind)
    if not file.is_file():
        return {}
    return {name: Schedule(**fields) for name, fields in json.loads(file.read_text())["schedules"].items()}


def table_file(device_kind: str) -> Path:
    """The file of the table of a kind of device."""
    return TABLES / f"{device_kind.replace(' ', '_')}.json"


def table_text(schedules: dict[str, Schedule], origin: dict[str, Any]) -> str:
    """A table as it is stored: one line per schedule, without the fields that have their default."""
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
    """Every schedule worth trying for the problem, in ascending order of estimated time."""
    schedules = [schedule for schedule in _schedules(problem) if schedule.fits(problem)]
    return sorted(schedules, key=lambda schedule: estimated_seconds(Plan(problem, schedule)))


def _schedules(problem: Problem) -> Iterator[Schedule]:
    tokens = round_up(problem.m, 8)
    panel = 1 if tokens <= 512 else 8
    for rows in ("weights", "tokens") if tokens > 64 or problem.continues else ("weights",):
        tiles_m, tiles_n = (_ON_COLUMNS, _ON_ROWS) if rows == "weights" else (_TOKENS_ON_ROWS, _ON_COLUMNS)
        for tile_m, tile_n in itertools.product(tiles_m, tiles_n):
            if tile_m >= 2 * tokens and tile_m > 8:
                continue
            bytes_per_line = (tile_m + problem.parts * tile_n) * SWIZZLE_BYTES
            # Two warpgroups with half-empty rows each were slow.
            warpgroup_counts = (1, 2) if (tile_n if rows == "weights" else tile_m) >= 128 else (1,)
            for warpgroups, (cluster_m, cluster_n), lines in itertools.product(warpgroup_counts, _CLUSTERS, (1, 2, 4)):
                if tile_m * (cluster_m - 1) < tokens and (lines == 1 or lines * bytes_per_line <= _MAX_STAGE_BYTES):
                    yield Schedule(tile_m, tile_n, rows, warpgroups, cluster_m, cluster_n, lines, panel)


# --- the cost model, fitted to schedules of this kernel as measured on an H200 ----------------------------------------

_CLOCK: Final = 1.7e9
"""Cycles per second."""
_MEMORY_BANDWIDTH: Final = 4.6e12
"""Bytes per second."""
_BYTES_RECEIVED_PER_CYCLE: Final = 62.0
"""Bytes that a multiprocessor receives per cycle."""
_BYTES_SENT_BY_L2_PER_CYCLE: Final = 58.0
"""Bytes that L2 sends to a multiprocessor per cycle."""
_MIN_WGMMA_CYCLES: Final = 26.0
"""Cycles of a `wgmma`, however few columns it has."""
_CYCLES_PER_STEP: Final = 6.0
"""Cycles of a step of K beyond its copies and products."""
_CYCLES_PER_TILE: Final = 4500.0
"""Cycles of a tile beyond its steps."""
_LAUNCH: Final = 1.5e-6
"""Seconds of a launch."""


def estimated_seconds(plan: Plan) -> float:
    """Seconds that this plan should take on an H200, by what limits each step of K; used to rank, never to report."""
    p, s = plan.problem, plan.schedule
    waves = pl.cdiv(math.prod(plan.grid), plan.clusters)
    wgmma = 4 * s.lines * max(plan.columns / 2, _MIN_WGMMA_CYCLES) * plan.column_parts
    matrix_unit = s.warpgroups * plan.row_parts * plan.padded_rows / MATRIX_ROWS * wgmma
    line = s.lines * SWIZZLE_BYTES
    weights, tokens = p.parts * s.tile_n * line, s.tile_m * line
    received = (weights + tokens) / _BYTES_RECEIVED_PER_CYCLE
    sent_by_l2 = (weights / s.cluster_m + tokens / s.cluster_n) / _BYTES_SENT_BY_L2_PER_CYCLE
    step = max(matrix_unit, received, sent_by_l2) + _CYCLES_PER_STEP
    written = s.tile_m * s.tile_n * p.out_dtype.itemsize / _BYTES_RECEIVED_PER_CYCLE
    on_chip = waves * (plan.k_steps * step + written + _CYCLES_PER_TILE) / _CLOCK
    # Weights that several clusters ask for at the same time are partly fetched again.
    weight_reads = 1 + 0.3 * (min(plan.grid[0], 4) - 1)
    elements_read = weight_reads * p.parts * p.n * p.k + p.m * p.k
    bytes_moved = elements_read * p.dtype.itemsize + p.m * p.n * p.out_dtype.itemsize
    memory = bytes_moved / _MEMORY_BANDWIDTH
    # The larger time does not hide the smaller one completely.
    return max(on_chip, memory) + 0.15 * min(on_chip, memory) + _LAUNCH
