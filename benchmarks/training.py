"""Training: a step against a good stock program, the cost of carried sums, each operation's gradient, and bits.

    python benchmarks/training.py --out benchmarks/results/training-h200.json

A step is the gradients of all microbatches, the update of float32 masters by AdamW, and the weights of the next step.
Its rival is a JAX program that promises nothing: bfloat16 products with float32 sums, cuDNN's attention and backward
pass, XLA's fusions, with all logits at once and in chunks. Both take turns; seconds are until the weights are there.
The bits of a step are compared over microbatches, padding, packing and rematerialization, on a model of two layers.

`--small` takes a CPU seconds.
"""

import dataclasses
from typing import Annotated

import typer

from detjax import backends
from detjax.bench import command_line, presets, provenance, training

PARTS = ("steps", "carried", "gradients", "bits")
app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help=f"The model's shape: {', '.join(presets.MODELS)}.")
    ] = training.Sizes.preset,
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Measure this only; repeatable: {', '.join(PARTS)}.")
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="Parts of a batch that are added as a tree.")] = 1,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        command_line.check_names("--preset", [preset], presets.MODELS)
        parts = command_line.check_names("--part", part, PARTS)
    sizes = training.SMALL if small else training.Sizes(preset, shards=shards)
    result = provenance.heading("python benchmarks/training.py") | {"sizes": dataclasses.asdict(sizes)}
    if small and backends.backend() == "portable":
        result["note"] = command_line.ON_A_CPU
    few = dataclasses.replace(sizes, layers=1 if small else 2, length=32 if small else 256)
    measures = {
        "bits": lambda: training.bits(few, processes=2 if small else 8),
        "gradients": lambda: list(training.gradient_times(sizes)),
        "carried": lambda: training.carried_sums(sizes),
        "steps": lambda: training.steps(sizes),
    }
    for name, measure in measures.items():
        if name in parts:
            result[name] = measure()
            command_line.print_line(f"{name}: {result[name]}")
            if out is not None:
                provenance.write(out, result)
    equal = result.get("bits", {"equal": {}, "controls_differ": {}})
    if wrong := [
        name for name, is_equal in (equal["equal"] | equal["controls_differ"]).items() if is_equal is not True
    ]:
        raise command_line.fail(f"bits under these schedules, or controls, are not as they have to be: {wrong}")


if __name__ == "__main__":
    app()
