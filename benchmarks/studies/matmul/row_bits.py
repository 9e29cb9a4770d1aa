"""Comparison of the bits of products over numbers of tokens, positions, neighbours, layouts, schedules and runs."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bits import anchor_positions
from benchmarks.inputs import normal_weight
from benchmarks.studies.matmul.cases import Sizes, token_rows
from benchmarks.studies.matmul.programs import BUILDERS, Programs, build, matmul, scheduled
from detjax.bench.bits import same_bits
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.matmul.plan import Problem
from detjax.pallas.hopper.matmul.tuning import table
from detjax.runtime import backends

MAX_SCHEDULES: Final = 40
"""Maximum number of compared schedules of the table."""
MAX_TRANSPOSED: Final = 110e6
"""Maximum number of elements of weights that are also compared in the layout [K, N]."""
NEIGHBOURS: Final = {"random": None, "zeros": 0.0, "3e38": 3e38, "inf": np.inf, "NaN": np.nan}
"""The value of the anchor row's neighbours; None: random numbers."""


@dataclasses.dataclass
class Comparison:
    """The counts of compared results, and their differences from the first of their kind.

    Attributes:
        anchor_rows: results of the anchor row.
        schedules: results of schedules.
        repeats: repeated runs.
        seconds: duration of the comparison.
        differences: a line for each difference.
    """

    anchor_rows: int = 0
    schedules: int = 0
    repeats: int = 0
    seconds: float = 0.0
    differences: list[str] = dataclasses.field(default_factory=list)


@jax.jit
def _anchor_rows(y: jax.Array) -> jax.Array:
    return y[np.array(anchor_positions(len(y)))]


def compare_anchors(
    sizes: Sizes, linear: tuple[int, int], w: jax.Array, programs: Programs, comparison: Comparison
) -> None:
    """Compares the anchor row's result at every number of tokens, position and layout, with all neighbours."""
    n, k = linear
    first = None
    stored = {layout: w if layout == "nk" else w.T for layout in dict.fromkeys(layout for layout, _ in programs.ours)}
    for (layout, m), program in programs.ours.items():
        for name in NEIGHBOURS if m in sizes.neighbours else ["random"]:
            x = token_rows(m, k, sizes.most_tokens, NEIGHBOURS[name])
            rows = np.asarray(_anchor_rows(program(x, stored[layout])))
            for position, row in zip(anchor_positions(m), rows, strict=True):
                first = row.tobytes() if first is None else first
                comparison.anchor_rows += 1
                if row.tobytes() != first:
                    place = f"row {position} of {m}, weights {layout}, neighbours {name}"
                    comparison.differences.append(f"{n}x{k}: {place}")


def compare_schedules(sizes: Sizes, comparison: Comparison) -> None:
    """Compares the results of one product under a sample of the table's schedules, if a table exists."""
    known = sorted(set(table(backends.device_kind()).values()), key=repr)
    spread = known[:: max(1, ceil_div(len(known), MAX_SCHEDULES))]
    n, k = sizes.probe
    w = normal_weight((n, k), jnp.asarray(0))
    for m in sizes.scheduled_tokens if known else ():
        x = token_rows(m, k, sizes.most_tokens)
        fitting = [schedule for schedule in spread if schedule.fits(Problem(m, n, k))]
        with ThreadPoolExecutor(BUILDERS) as pool:
            built = pool.map(lambda schedule, x=x: build(scheduled(schedule), "hopper", x, w), fitting)
            results = [program(x, w) for program in built]
        for schedule, y in zip(fitting, results, strict=True):
            comparison.schedules += 1
            if not same_bits(results[0], y):
                comparison.differences.append(f"{n}x{k}, {m} tokens: schedules {fitting[0]} and {schedule}")


def compare_runs(sizes: Sizes, comparison: Comparison) -> None:
    """Compares the results of one product over repeated runs."""
    n, k = sizes.probe
    w = normal_weight((n, k), jnp.asarray(0))
    for m in sizes.repeated_tokens:
        x = token_rows(m, k, sizes.most_tokens)
        program = build(matmul("nk"), backends.backend(), x, w)
        want = program(x, w)
        # The host waits once, so that runs follow each other without gaps.
        equal = [same_bits(want, program(x, w)) for _ in range(sizes.repeats)]
        different = sizes.repeats - int(np.sum(jax.device_get(equal)))
        comparison.repeats += sizes.repeats
        if different:
            comparison.differences.append(f"{n}x{k}, {m} tokens: {different} of {sizes.repeats} repeated runs")
