"""Norms, rotary embedding, softmax and sampling on an H200: time against XLA's own and a copy, and bits.

    python -m benchmarks norms --out benchmarks/results/norms-h200.json

Times each operation under the current backend and under `stock`, and a copy of as many bytes: medians of device time,
with inputs rotated so that large ones come from memory. Compares the bits of one row as first, middle and last row of
every number of rows, and over repeated runs. Writing keys and values to a donated cache is timed in one step with
`qk_rope` and as separate scatters.

`--sweep` times the schedules of the Hopper kernels instead. `--small` runs on a CPU in seconds.
"""

import dataclasses
from typing import Annotated

from benchmarks.studies.norms import cache_writes, suite
from benchmarks.studies.norms.cases import SMALL, Sizes
from benchmarks.study import Result, Run
from detjax.cli.options import Option, UsageError
from detjax.runtime import backends


def study(
    run: Run,
    *,
    sweep: Annotated[bool, Option("Time the schedules of the Hopper kernels.")] = False,
) -> Result:
    sizes, backend = SMALL if run.small else Sizes(), backends.backend()
    if sweep:
        if backend != "hopper":
            raise UsageError(f"--sweep on {backends.device_name()}; accepted: an H100 or H200")
        from benchmarks.studies.norms import schedules

        results = list(schedules.measure(sizes))
    else:
        results = [*suite.measure(sizes), *cache_writes.measure(sizes)]
    problems = {
        "gave different bits for other numbers of rows, or in other runs": (
            "same_bits_over_rows",
            "same_bits_over_runs",
        ),
        "wrote different bits in one step than in two": ("same_bits_as_in_steps",),
    }
    wrong = [text for text, keys in problems.items() if not all(row.get(key, True) for row in results for key in keys)]
    content = {"sizes": dataclasses.asdict(sizes), "results": results}
    return Result(content, f"backend {backend} {' and '.join(wrong)}" if wrong else "")
