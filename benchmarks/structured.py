"""Structured output: random JSON schemas answered alone and in a crowd, and tokens a second with constraints.

    python benchmarks/structured.py --part answers --out benchmarks/results/structured-answers-h200.json
    python benchmarks/structured.py --part speeds --out benchmarks/results/structured-h200.json

A model of one layer answers 1000 random schemas one after the other, and then 64 at a time: every answer must be valid,
and the bits must be equal. A whole model with random weights generates with constraints and without, in turns.

`--small` takes a CPU seconds. The exit code is 1 if an answer is not valid, or if bits differ.
"""

import dataclasses
from typing import Annotated, Any

import typer
from rich.console import Console

from detjax.bench import command_line, provenance, structured

PARTS = {"answers": structured.answers_to_schemas, "speeds": structured.speeds}
app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Measure this only; repeatable: {', '.join(PARTS)}.")
    ] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    """Measures structured output."""
    with command_line.bad_parameters():
        parts = command_line.check_names("--part", part, PARTS)
    sizes = structured.SMALL if small else structured.Sizes()
    heading = provenance.heading("python benchmarks/structured.py")
    result: dict[str, Any] = heading | {"sizes": dataclasses.asdict(sizes)} | {one: PARTS[one](sizes) for one in parts}
    console, answers = Console(), result.get("answers")
    if answers is not None:
        console.print(f"{answers['valid']} of {answers['schemas']} answers are valid, {answers['tokens']} tokens")
    for speed in result.get("speeds", ()):
        console.print(
            f"{speed['requests']} requests: {speed['tokens_per_second']:.0f} tokens a second with constraints, "
            f"{speed['unconstrained']:.0f} without: {speed['ratio']:.3f}"
        )
    if out is not None:
        provenance.write(out, result)
    if answers is not None and (problems := structured.problems(answers)):
        console.print("; ".join(problems))
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
