"""Decode steps of whole models, by family: which share of a copy's bandwidth the bytes reach that a step must read.

    python benchmarks/decode.py --out benchmarks/results/decode-h200.json

Models have random weights and some of their layers. Weights of experts count if a token of the batch chose the expert.
The clock on the wall measures steps that follow each other, so the time between kernels counts.
"""

import os
from typing import Annotated, Any

# A copy of as many bytes is measured beside the model.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import typer
from rich.console import Console
from rich.table import Table

from detjax.bench import command_line, decode, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    preset: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Measure this only; repeatable: {', '.join(decode.MODELS)}."),
    ] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        names = command_line.check_names("--preset", preset, decode.MODELS)
    models = {"tiny": None} if small else {name: decode.MODELS[name] for name in names}
    note = {"note": command_line.ON_A_CPU} if small else {}
    results: dict[str, dict[str, Any]] = {}
    body = provenance.heading("python benchmarks/decode.py") | note | {"results": results}
    table = Table("model", "layers", "requests", "experts a layer", "GB", "ms", "of a copy's rate")
    for name, layers in models.items():
        batches: list[dict[str, Any]] = []
        results[name] = {"layers": layers, "batches": batches}
        for one in decode.bandwidths(name, layers, decode.SMALL if small else decode.Sizes()):
            batches.append(one)
            size, ms = sum(one["bytes"].values()) / 1e9, one["seconds"] * 1e3
            numbers = (f"{one['experts_a_layer']:.1f}", f"{size:.2f}", f"{ms:.3f}", f"{one['share_of_copy']:.2f}")
            table.add_row(name, str(layers), str(one["batch"]), *numbers)
            if out is not None:
                provenance.write(out, body)
    Console().print(table)


if __name__ == "__main__":
    app()
