"""How long a start takes until every request can be served, from nothing and with the cache of programs.

    python benchmarks/ready.py --out benchmarks/results/ready-h200.json

Two processes start one after the other: an engine with the shape of Qwen3-8B and 1024 samples. The result names every
program and says what it is for.

`--small` takes a CPU seconds.
"""

import dataclasses
from typing import Annotated

import typer
from rich.console import Console

from detjax.bench import command_line, presets, provenance, ready

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help=f"The model's shape: {', '.join(presets.MODELS)}.")
    ] = ready.Start.preset,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    """Measures two starts."""
    start = ready.SMALL if small else dataclasses.replace(ready.Start(), preset=preset)
    result = ready.measured(start, "python benchmarks/ready.py")
    console, programs = Console(), result["programs"]
    for name, seconds in result["seconds"].items():
        console.print(f"{name}: " + ", ".join(f"{step} after {seconds[step]:.1f} s" for step in ready.STEPS))
    before = sum(program["before_ready"] for program in programs)
    console.print(
        f"{before} of {len(programs)} programs are compiled first, {result['cache_bytes'] / 1e6:.0f} MB in all"
    )
    if out is not None:
        provenance.write(out, result)


if __name__ == "__main__":
    app()
