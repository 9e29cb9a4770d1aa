"""Attention on an H200: time against cuDNN, PyTorch and tokamax, accuracy, and whether a token keeps its bits.

    python -m benchmarks attention --out benchmarks/results/attention-h200.json \
                                   --only prefill --only decode --only backward --only accuracy
    python -m benchmarks attention --out benchmarks/results/attention-bits-h200.json --only bits

Bfloat16, 32 query heads on 8 key heads. detjax reads keys and values from pages, the rivals from arrays without pages;
inputs are rotated so that they come from memory. Times are medians over rounds in which all take turns. Decode is timed
twice: as the sum of its kernels, and as a step, which is one of 20 dependent calls in a program that is replayed. What
cannot run is missing from the tables, and the JSON file says why. A picture of the times is written beside it.

`--small` takes a CPU seconds, on the portable backend. The exit code is 1 if bits differ; slow cells do not change it.
"""

import os

# PyTorch and the processes of `--processes` need memory beside JAX.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import jax
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks import rivals
from benchmarks import study as options
from benchmarks.studies.attention import cells, picture, tables
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
from benchmarks.studies.attention.tables import geometric_means
from benchmarks.study import Result, Run
from detjax.bench import timing
from detjax.bench.failures import reason
from detjax.cli.options import Option

SECTIONS: Final = ("prefill", "decode", "quantized", "latents", "backward", "accuracy", "bits")
TIMING: Final = {
    "kernels": timing.KERNELS,
    "step": "wall clock of a replayed program of dependent calls, over their number; time between kernels included",
    rivals.TORCH: timing.REPLAY,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        sizes: the sizes of all measurements.
        sections: some of `SECTIONS`.
        with_torch: whether PyTorch is measured too.
        processes: how many processes compare the bits of options.
    """

    sizes: Sizes
    sections: Sequence[str] = SECTIONS
    with_torch: bool = True
    processes: int = 1


def measure_all(plan: Plan, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The result of a plan; `save` is called with what there is after every cell."""
    content: dict[str, Any] = {
        "timing": TIMING if jax.default_backend() == "gpu" else timing.UNTIL_READY,
        "rounds": [timing.ROUNDS, timing.LONG_ROUNDS],
        "sections": list(plan.sections),
        "sizes": dataclasses.asdict(plan.sizes),
    }
    for section in plan.sections:
        if section == "accuracy":
            content["accuracy"] = measure_accuracy(plan.sizes)
        elif section == "bits":
            _compare_bits(plan, content, save)
        else:
            _measure_section(plan, section, content, save)
        save(content)
    return content


def _measure_section(plan: Plan, section: str, content: dict[str, Any], save: Callable[[Any], None]) -> None:
    sections: dict[str, tuple[Callable[[Sizes, Case, bool], dict[str, Any]], list[Case]]] = {
        "prefill": (cells.measure_prefill, prefill_cases(plan.sizes)),
        "decode": (cells.measure_decode, list(decode_cases(plan.sizes))),
        "quantized": (cells.measure_quantized, list(decode_cases(plan.sizes))),
        "latents": (cells.measure_latents, latent_cases(plan.sizes)),
        "backward": (cells.measure_backward, backward_cases(plan.sizes)),
    }
    measure, cases = sections[section]
    results = content[section] = []
    for case in track(cases, section, console=Console(stderr=True)):
        try:
            results.append(measure(plan.sizes, case, plan.with_torch))
        except Exception as failure:
            # Not even the inputs could be made, or they leave no room.
            missing = {kind: timing.Rounds[str]({}, {"all": reason(failure)}) for kind in cells.KINDS[section]}
            results.append(cells.cell(case, missing) | {"teraflops": {}})
        rivals.free_torch_memory()
        save(content)
    content.setdefault("summary", {})[section] = geometric_means(results, cells.KINDS[section])


def _compare_bits(plan: Plan, content: dict[str, Any], save: Callable[[Any], None]) -> None:
    comparison, start = Comparison(), time.perf_counter()
    options = functools.partial(compare_options, plan.sizes, detjax.backend(), comparison, plan.processes)
    for compare in (functools.partial(compare_requests, plan.sizes, comparison), options):
        compare()
        comparison.seconds = time.perf_counter() - start
        content["bits"] = dataclasses.asdict(comparison) | {"processes": plan.processes}
        save(content)


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
    plan = Plan(sizes, only, torch and not small, processes or (1 if small else 12))
    with detjax.use_backend("portable" if small else "hopper"):
        content = measure_all(plan, run.save)
    tables.show(content)
    differences = content.get("bits", {}).get("differences", [])
    return Result(content, "different bits\n" + "\n".join(differences[:20]) if differences else "")


PICTURES = {"-prefill-decode": picture.draw}
