"""Matrix products on an H200: time against XLA's and PyTorch's, and bits.

    python -m benchmarks matmul --out benchmarks/results/matmul-h200.json

Every linear layer of `detjax.bench.shapes`, bfloat16, weights [N, K], at every number of tokens. XLA's dot is compiled
with JAX's default options, that is, autotuned. Times are medians over alternating rounds, and weights are rotated so
that they come from memory. Two plots are written next to the JSON file.

`--small` takes seconds on a CPU, with the portable backend. The exit code is 1 if bits differ.
"""

import os

# PyTorch needs memory in addition to JAX.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import dataclasses
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import jax
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks import rivals, timing
from benchmarks import study as options
from benchmarks.studies.matmul import pictures, row_bits
from benchmarks.studies.matmul.cases import Sizes, full_sizes, small_sizes, weight_sets
from benchmarks.studies.matmul.cells import measure, measure_epilogues
from benchmarks.studies.matmul.programs import build_all
from benchmarks.studies.matmul.summary import summarized
from benchmarks.study import Result, Run
from detjax.bench.shapes import MODELS, TOKENS
from detjax.cli.options import Option

TIMING: Final = {rivals.OURS: timing.KERNELS, rivals.XLA: timing.KERNELS, rivals.TORCH: timing.REPLAY}


def _measure(run: Run, sizes: Sizes, with_bits: bool, with_torch: bool) -> dict[str, Any]:
    """The content of the result, saved after every [N, K]."""
    comparison = row_bits.Comparison()
    cells: list[dict[str, Any]] = []
    content: dict[str, Any] = {
        "timing": TIMING if jax.default_backend() == "gpu" else timing.UNTIL_READY,
        "rounds": [timing.ROUNDS, timing.LONG_ROUNDS],
        "sizes": dataclasses.asdict(sizes) | {"linears": [f"{n}x{k}" for n, k in sizes.linears]},
        "cells": cells,
        "epilogues": [],
    }

    def compare(comparison_of_bits: Callable[..., None], *arguments: Any) -> None:
        if with_bits:
            start = time.perf_counter()
            comparison_of_bits(sizes, *arguments, comparison)
            comparison.seconds += time.perf_counter() - start

    for linear in track(list(sizes.linears), "measuring", console=Console(stderr=True)):
        weights = weight_sets(*linear)
        transposed = with_bits and linear[0] * linear[1] <= row_bits.MAX_TRANSPOSED
        programs = build_all(sizes, linear, ("nk", "kn") if transposed else ("nk",), detjax.backend())
        cells.extend(measure(sizes, linear, weights, programs, with_torch))
        compare(row_bits.compare_anchors, linear, weights[0], programs)
        # Frees memory before the next weights are drawn.
        del weights, programs
        rivals.free_torch_memory()
        run.save(content)
    content["epilogues"] = list(measure_epilogues(sizes))
    content["summary"] = summarized(cells)
    run.save(content)
    compare(row_bits.compare_schedules)
    compare(row_bits.compare_runs)
    content["bits"] = dataclasses.asdict(comparison) if with_bits else None
    run.save(content)
    return content


def study(
    run: Run,
    *,
    model: Annotated[list[str], options.names(MODELS, "Measure this model's linear layers")],
    tokens: options.Tokens = None,
    bits: Annotated[bool, Option("Also compare bits.", name="--bits/--skip-bits")] = True,
    torch: options.Torch = True,
) -> Result:
    sizes = small_sizes() if run.small else full_sizes(model, tokens or TOKENS)
    with_torch = torch and not run.small and rivals.torch_is_installed()
    with detjax.use_backend("portable" if run.small else "hopper"):
        content = _measure(run, sizes, bits, with_torch)
    differences = content["bits"]["differences"] if bits else []
    return Result(content, "different bits\n" + "\n".join(differences[:20]) if differences else "")


PICTURES = {"-over-tokens": pictures.draw_over_tokens, "-cells": pictures.draw_cells}
