"""A whole decoder with random weights: which kernels serve it, and whether a request's bits depend on its batch.

    python benchmarks/decoder.py --out benchmarks/results/decoder-h200.json

Generates greedily for 64 requests of mixed lengths in one batch, which they enter one after the other, so that some are
prefilled, a chunk at a time, in the very steps in which others decode; then for some of them alone. Compares tokens and
logprobs bit by bit. Counts the kernels that a decode step is made of, and times it.

`--small` takes a CPU seconds: a tiny model and few requests. The exit code is 1 if bits differ.
"""

import os
from typing import Annotated, Any

# Two batches and the timed steps hold caches of their own.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import typer
from rich.console import Console
from rich.table import Table

from detjax import backends
from detjax.bench import command_line, presets, provenance
from detjax.bench.decoder import Load, compare_batches, kernels_of_step, step_seconds

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help=f"The model's shape: {', '.join(presets.MODELS)}.")
    ] = "Qwen3-0.6B",
    layers: Annotated[
        int | None, typer.Option(min=1, help="The number of layers.", show_default="the preset's own")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = Load.tokens,
    requests: Annotated[int, typer.Option(min=1, help="The number of requests.")] = Load.requests,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = Load.longest,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        command_line.check_names("--preset", [preset], presets.MODELS)
    load = Load(tokens, requests, longest, alone=min(Load.alone, requests))
    if small:
        preset, load = "tiny", Load(tokens=3, requests=3, longest=20, between=2, prefill_chunk=8, alone=2)
    console, backend = Console(), backends.backend()
    model = presets.decoder(preset, layers)
    kernels = kernels_of_step(preset, load.requests, layers)
    console.print(f"{preset}, {model.config.layers} layers, {backends.device_name()}, {backend}\n{kernels}")
    batches = compare_batches(model, load)
    console.print(batches)
    table = Table("batch", "backend", "ms a step")
    seconds: dict[str, float] = {}
    for batch in (1, load.requests):
        for name in dict.fromkeys((backend, backends.STOCK)):
            seconds[f"{name}, batch {batch}"] = value = step_seconds(preset, batch, name, layers, 2 if small else 10)
            table.add_row(str(batch), name, f"{value * 1e3:.2f}")
    console.print(table)
    if out is not None:
        result: dict[str, Any] = {"model": preset, "layers": model.config.layers, "kernels of a decode step": kernels}
        result |= {"batches": batches, "step seconds": seconds}
        note = {"note": command_line.ON_A_CPU} if small else {}
        provenance.write(out, provenance.heading("python benchmarks/decoder.py") | note | result)
    if batches["requests alone that differ"]:
        raise command_line.fail(f"requests alone have different bits: {batches['requests alone that differ']}")


if __name__ == "__main__":
    app()
