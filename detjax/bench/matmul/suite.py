"""The whole matmul benchmark."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

import jax
from rich.console import Console
from rich.progress import track

import detjax
from detjax.bench import provenance, rivals, timing
from detjax.bench.matmul import row_bits
from detjax.bench.matmul.cases import Sizes, weight_sets
from detjax.bench.matmul.cells import measure, measure_epilogues
from detjax.bench.matmul.programs import build_all
from detjax.bench.matmul.tables import summarized

TIMING: Final = {rivals.OURS: timing.KERNELS, rivals.XLA: timing.KERNELS, rivals.TORCH: timing.REPLAY}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        sizes: the sizes of all measurements.
        with_bits: whether bits are compared.
        with_torch: whether PyTorch is measured too.
    """

    sizes: Sizes
    with_bits: bool = True
    with_torch: bool = True


def run(plan: Plan, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The result of a plan; `save` is called with what there is after every [N, K]."""
    sizes, comparison = plan.sizes, row_bits.Comparison()
    cells: list[dict[str, Any]] = []
    content = provenance.heading("python benchmarks/matmul.py") | {
        "timing": TIMING if jax.default_backend() == "gpu" else timing.UNTIL_READY,
        "rounds": [timing.ROUNDS, timing.LONG_ROUNDS],
        "sizes": dataclasses.asdict(sizes) | {"linears": [f"{n}x{k}" for n, k in sizes.linears]},
        "cells": cells,
        "epilogues": [],
    }

    def compare(comparison_of_bits: Callable[..., None], *arguments: Any) -> None:
        if plan.with_bits:
            start = time.perf_counter()
            comparison_of_bits(sizes, *arguments, comparison)
            comparison.seconds += time.perf_counter() - start

    for linear in track(list(sizes.linears), "measuring", console=Console(stderr=True)):
        weights = weight_sets(*linear)
        transposed = plan.with_bits and linear[0] * linear[1] <= row_bits.MOST_TRANSPOSED
        programs = build_all(sizes, linear, ("nk", "kn") if transposed else ("nk",), detjax.backend())
        cells.extend(measure(sizes, linear, weights, programs, plan.with_torch))
        compare(row_bits.compare_anchors, linear, weights[0], programs)
        # Before the next weights are drawn.
        del weights, programs
        rivals.free_torch_memory()
        save(content)
    content["epilogues"] = list(measure_epilogues(sizes))
    content["summary"] = summarized(cells)
    save(content)
    compare(row_bits.compare_schedules)
    compare(row_bits.compare_runs)
    content["bits"] = dataclasses.asdict(comparison) if plan.with_bits else None
    save(content)
    return content
