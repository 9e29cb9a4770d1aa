"""The whole attention benchmark, section by section."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from rich.console import Console
from rich.progress import track

import detjax
from detjax.bench import provenance, rivals, timing
from detjax.bench.attention import cells
from detjax.bench.attention.accuracy import measure_accuracy
from detjax.bench.attention.cases import Case, Sizes, backward_cases, decode_cases, latent_cases, prefill_cases
from detjax.bench.attention.comparison import Comparison
from detjax.bench.attention.option_bits import compare_options
from detjax.bench.attention.request_bits import compare_requests
from detjax.bench.attention.tables import geometric_means
from detjax.bench.failures import reason

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


def run(plan: Plan, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The result of a plan; `save` is called with what there is after every cell."""
    content = provenance.heading("python benchmarks/attention.py") | {
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
