"""Training: a step against a good stock program, the cost of accumulated sums, gradients of operations, and bits.

    python -m benchmarks training --out benchmarks/results/training-h200.json

A step computes the gradients of all microbatches, updates float32 masters by AdamW, and rounds the next weights. Its
rival is a JAX program without contracts: bfloat16 products with float32 sums, cuDNN's attention and backward pass,
XLA's fusions, with all logits at once and in chunks. Both alternate; a step ends when the weights are ready. Large
models are measured by `--part separate`, where each rival has a process of its own:

    python -m benchmarks training --part separate --preset Qwen3-8B --layers 12 --microbatches 2 \\
      --sequences 4 --length 2048

It reports the first step, which compiles, and the most memory, too. The bits of a step are compared over microbatches,
padding, packing and rematerialization, on a model of two layers.

`--small` runs on a CPU in seconds.
"""

import dataclasses
from typing import Annotated, Any

from benchmarks import study as options
from benchmarks.studies.training import measures
from benchmarks.study import Result, Run
from detjax.bench import command_line
from detjax.cli.options import Option

PARTS = ("separate", "steps", "carried", "gradients", "bits")


def study(
    run: Run,
    *,
    preset: options.Preset = measures.Sizes.preset,
    layers: options.Layers = None,
    sequences: Annotated[int, Option("Sequences per microbatch.", minimum=1)] = measures.Sizes.sequences,
    length: Annotated[int, Option("Tokens per sequence.", minimum=2)] = measures.Sizes.length,
    microbatches: Annotated[int, Option("Microbatches per step.", minimum=1)] = measures.Sizes.microbatches,
    part: Annotated[list[str], options.names(PARTS)],
    shards: Annotated[int, Option("Parts of a batch that are added as a tree.", minimum=1)] = 1,
) -> Result:
    sizes = measures.SMALL if run.small else measures.Sizes(preset, layers, sequences, length, microbatches, shards)
    few = dataclasses.replace(sizes, layers=1 if run.small else 2, length=32 if run.small else 256)
    parts = {
        "separate": lambda: measures.separate(sizes),
        "bits": lambda: measures.bits(few, processes=2 if run.small else 8),
        "gradients": lambda: list(measures.gradient_times(sizes)),
        "carried": lambda: measures.carried_sums(sizes),
        "steps": lambda: measures.steps(sizes),
    }
    content: dict[str, Any] = {"sizes": dataclasses.asdict(sizes)}
    for name, measure in parts.items():  # processes of their own first, while this one has no memory of the device
        if name in part:
            content[name] = measure()
            command_line.print_line(f"{name}: {content[name]}")
            run.save(content)
    compared = content.get("bits", {"equal": {}, "controls_differ": {}})
    wrong = [name for name, equal in (compared["equal"] | compared["controls_differ"]).items() if equal is not True]
    problem = f"bits under these schedules differ, or controls do not: {wrong}"
    return Result(content, problem if wrong else "")
