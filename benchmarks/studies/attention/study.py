"""Attention on an H200: time against cuDNN, PyTorch and tokamax, accuracy, and bits.

    python -m benchmarks attention --out benchmarks/results/attention-h200.json \
                                   --only prefill --only decode --only backward --only accuracy
    python -m benchmarks attention --out benchmarks/results/attention-bits-h200.json --only bits

Bfloat16, 32 query heads on 8 key heads. detjax reads keys and values from pages, the rivals from arrays without pages;
inputs are rotated so that they come from memory. Times are medians over alternating rounds. Decode is timed twice: as
the sum of its kernels, and as a step, that is, one of 20 dependent calls in a replayed program. Cases that cannot run
are missing from the tables; the JSON file has the reasons. A plot of the times is written next to it.

`--small` takes seconds on a CPU, with the portable backend. The exit code is 1 if bits differ.
"""

import os

# PyTorch and the processes of `--processes` need memory in addition to JAX.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import jax
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks import rivals, timing
from benchmarks import study as options
from benchmarks.studies.attention import cells, picture
from benchmarks.studies.attention.accuracy import measure_accuracy
from benchmarks.studies.attention.cases import (
    SMALL,
    Case,
    Sizes,
    backward_cases,
    decode_cases,
    latent_cases,
    prefill_cases,
)
from benchmarks.studies.attention.comparison import Comparison
from benchmarks.studies.attention.option_bits import compare_options
from benchmarks.studies.attention.request_bits import compare_requests
from benchmarks.studies.attention.summary import geometric_means
from benchmarks.study import Result, Run
from detjax.bench.failures import reason
from detjax.bench.timing import Rounds
from detjax.cli.options import Option

SECTIONS: Final = ("prefill", "decode", "quantized", "latents", "backward", "accuracy", "bits")
TIMING: Final = {
    "kernels": timing.KERNELS,
    "step": "wall clock of a replayed program of dependent calls, per call, including the time between kernels",
    rivals.TORCH: timing.REPLAY,
}


def _measure_section(run: Run, sizes: Sizes, torch: bool, section: str, content: dict[str, Any]) -> None:
    sections: dict[str, tuple[Callable[[Sizes, Case, bool], dict[str, Any]], list[Case]]] = {
        "prefill": (cells.measure_prefill, prefill_cases(sizes)),
        "decode": (cells.measure_decode, list(decode_cases(sizes))),
        "quantized": (cells.measure_quantized, list(decode_cases(sizes))),
        "latents": (cells.measure_latents, latent_cases(sizes)),
        "backward": (cells.measure_backward, backward_cases(sizes)),
    }
    measure, cases = sections[section]
    results = content[section] = []
    for case in track(cases, section, console=Console(stderr=True)):
        try:
            results.append(measure(sizes, case, torch))
        except Exception as failure:
            # The inputs could not be created, or leave no room.
            missing = {kind: Rounds[str]({}, {"all": reason(failure)}) for kind in cells.KINDS[section]}
            results.append(cells.cell(case, missing) | {"teraflops": {}})
        rivals.free_torch_memory()
        run.save(content)
    content.setdefault("summary", {})[section] = geometric_means(results, cells.KINDS[section])


def _compare_bits(run: Run, sizes: Sizes, processes: int, content: dict[str, Any]) -> None:
    comparison, start = Comparison(), time.perf_counter()
    options = functools.partial(compare_options, sizes, detjax.backend(), comparison, processes)
    for compare in (functools.partial(compare_requests, sizes, comparison), options):
        compare()
        comparison.seconds = time.perf_counter() - start
        content["bits"] = dataclasses.asdict(comparison) | {"processes": processes}
        run.save(content)


def study(
    run: Run,
    *,
    only: Annotated[list[str], options.names(SECTIONS)],
    torch: options.Torch = True,
    processes: Annotated[
        int | None,
        Option("Processes that compare the bits of options.", minimum=1, default="12, or 1 with --small"),
    ] = None,
) -> Result:
    sizes, small = SMALL if run.small else Sizes(), run.small
    content: dict[str, Any] = {
        "timing": TIMING if jax.default_backend() == "gpu" else timing.UNTIL_READY,
        "rounds": [timing.ROUNDS, timing.LONG_ROUNDS],
        "sections": only,
        "sizes": dataclasses.asdict(sizes),
    }
    with detjax.use_backend("portable" if small else "hopper"):
        for section in only:
            if section == "accuracy":
                content["accuracy"] = measure_accuracy(sizes)
            elif section == "bits":
                _compare_bits(run, sizes, processes or (1 if small else 12), content)
            else:
                _measure_section(run, sizes, torch and not small, section, content)
            run.save(content)
    differences = content.get("bits", {}).get("differences", [])
    return Result(content, "different bits\n" + "\n".join(differences[:20]) if differences else "")


PICTURES = {"-prefill-decode": picture.draw}
