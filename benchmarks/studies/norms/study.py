"""Norms, rotary embedding, softmax and sampling on an H200: time against XLA's own and against a copy, and bits.

    python -m benchmarks norms --out benchmarks/results/norms-h200.json

Each operation is timed under the backend that serves and under `stock`, and so is a copy of as many bytes as it has to
read and write: device time, medians, inputs rotated so that large ones come from memory. Beside the time stands whether
the bits of one row are the same first, in the middle and last of every number of rows, and over repeated runs. The
write of keys and values to a cache, which is donated, is timed in one step with `qk_rope` and as scatters after it.

`--sweep` times the schedules of the Hopper kernels instead. `--small` takes a CPU seconds.
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
