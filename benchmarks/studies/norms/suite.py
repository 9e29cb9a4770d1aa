"""Times of operations on rows under the current backend, under stock and of a copy, and a comparison of bits."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks.bits import anchor_positions
from benchmarks.studies.norms.cases import Case, Sizes, cases
from benchmarks.timing import copy_time
from detjax.bench.bits import same_bits
from detjax.bench.timing import device_time, rotations
from detjax.runtime.backends import STOCK

MAX_BYTES: Final = 24 << 30
"""Device memory for argument sets, in bytes; cases that need a quarter of it or more are left out."""


def measure(sizes: Sizes) -> list[dict[str, Any]]:
    """Returns a result for every operation and number of rows."""
    results = []
    for case in track(cases(sizes), "measuring", console=Console(stderr=True)):
        bits = compare_bits(case, sizes.rows, sizes.repeats)
        results += [result | bits for result in _measure_case(sizes, case)]
    return results


def _measure_case(sizes: Sizes, case: Case) -> Iterator[dict[str, Any]]:
    for count in sizes.rows:
        rows = case.rows(count, 0)
        size = case.traffic(rows)
        if 4 * size > MAX_BYTES:
            continue
        sets = [(*case.rows(count, seed), *case.shared) for seed in range(rotations(sum(x.nbytes for x in rows)))]
        seconds: dict[str, float | None] = {"copy": copy_time(size, calls=sizes.calls)}
        for backend in (detjax.backend(), STOCK):
            with detjax.use_backend(backend):
                try:
                    seconds[backend] = device_time(detjax.jit(case.run), sets, calls=sizes.calls)
                except NotImplementedError:
                    seconds[backend] = None
        yield {"case": case.name, "rows": count, "bytes": size, "seconds": seconds}


def compare_bits(case: Case, rows: Sequence[int], repeats: int) -> dict[str, bool]:
    """Compares the bits of anchor rows and of repeated runs; returns nothing if the backend refuses the case."""
    program = detjax.jit(case.run)
    first, over_rows, over_runs = None, True, True
    try:
        for count in rows:
            arguments = (*case.rows(count, 0), *case.shared)
            out = program(*arguments)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(out)]
            anchors = [[leaf[i].tobytes() for leaf in leaves] for i in anchor_positions(count)]
            first = first or anchors[0]
            over_rows &= all(anchor == first for anchor in anchors)
            if count == rows[len(rows) // 2]:
                equal = [same_bits(out, program(*arguments)) for _ in range(repeats)]
                over_runs = bool(jnp.stack(equal).all())
    except NotImplementedError:
        return {}
    return {"same_bits_over_rows": over_rows, "same_bits_over_runs": over_runs}
