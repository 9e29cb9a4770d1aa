"""Experts: both projections of the chosen experts, against ragged dots and dense products, and bits.

    python -m benchmarks experts --out benchmarks/results/experts-h200.json

Random tokens choose random experts, the same for all rivals: XLA's ragged dot, tokamax's if it is installed, and
products of all tokens with all experts. Times are medians of device time over alternating rounds, without routing and
the gather of rows. The bits of tokens among others are compared with the same tokens alone.
`--part gradients` measures the projections with their gradients, which accumulate float32 sums in place, by wall clock,
and compares the bits of one microbatch with two.

`--small` runs on a CPU in seconds. The exit code is 1 if a bit differs.
"""

from typing import Annotated, Any

from benchmarks import study as options
from benchmarks.studies.experts import gradients, projections
from benchmarks.study import Result, Run
from detjax.bench import command_line

PARTS = ("projections", "gradients")


def study(
    run: Run,
    *,
    model: Annotated[list[str], options.names(projections.MODELS, "Measure this shape")],
    part: Annotated[list[str], options.names(PARTS)],
) -> Result:
    shapes = projections.SMALL_MODELS if run.small else {name: projections.MODELS[name] for name in model}
    content: dict[str, Any] = {}
    different = []
    for name in part:
        measures, key, promise = {
            "projections": (projections, "results", "same_bits_alone"),
            "gradients": (gradients, "gradients", "same_bits_in_microbatches"),
        }[name]
        results = content[key] = []
        for result in measures.measure(shapes, measures.SMALL_TOKENS if run.small else measures.TOKENS):
            results.append(result)
            run.save(content)
            command_line.print_line(f"{name}, {result['model']}, {result['tokens']} tokens: {result}")
            if not result[promise]:
                different.append((name, result["model"], result["tokens"]))
        if name == "projections":
            content["summary"] = projections.summary(results)
    problem = f"bits differ from tokens alone, or between microbatches: {different}"
    return Result(content, problem if different else "")
