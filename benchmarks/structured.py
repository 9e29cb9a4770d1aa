"""Structured output: random JSON schemas answered alone and in a crowd, and tokens a second with constraints.

    python benchmarks/structured.py --out benchmarks/results/structured-h200.json

A model of one layer answers 1000 random schemas one after the other, and then 64 at a time: every answer must be valid,
and the bits must be equal. Then a whole model with random weights generates with constraints and without, in turns.

`--small` takes a CPU seconds. The exit code is 1 if an answer is not valid, or if bits differ.
"""

import typer
from rich.console import Console

from detjax.bench import command_line, provenance, structured

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(small: command_line.Small = False, out: command_line.Out = None) -> None:
    """Measures structured output."""
    result = structured.measured(structured.SMALL if small else structured.Sizes(), "python benchmarks/structured.py")
    console, answers = Console(), result["answers"]
    console.print(f"{answers['valid']} of {answers['schemas']} answers are valid, {answers['tokens']} tokens")
    for speed in result["speeds"]:
        console.print(
            f"{speed['requests']} requests: {speed['tokens_per_second']:.0f} tokens a second with constraints, "
            f"{speed['unconstrained']:.0f} without: {speed['ratio']:.3f}"
        )
    if out is not None:
        provenance.write(out, result)
    if problems := structured.problems(result):
        console.print("; ".join(problems))
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
