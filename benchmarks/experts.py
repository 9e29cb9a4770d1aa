"""Experts: both projections of the experts that tokens choose, against ragged dots and dense products, and bits.

    python benchmarks/experts.py --out benchmarks/results/experts-h200.json

Random tokens choose random experts, the same for all rivals: XLA's ragged dot, tokamax's if it is installed, and
products of all tokens with all experts. Device time, medians, in turns; the choice and the gather of rows are left out.
Beside the times stands whether tokens by themselves have the bits that they have among others.

`--small` takes a CPU seconds. The exit code is 1 if a bit differs.
"""

from typing import Annotated

import typer

from detjax import backends
from detjax.bench import command_line, experts, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Measure this shape; repeatable: {', '.join(experts.MODELS)}."),
    ] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        names = command_line.check_names("--model", model, experts.MODELS)
    chosen = experts.SMALL_MODELS if small else {name: experts.MODELS[name] for name in names}
    results = []
    for result in experts.measure(chosen, experts.SMALL_TOKENS if small else experts.TOKENS):
        results.append(result)
        command_line.print_line(f"{result['model']}, {result['tokens']} tokens: {result}")
    if out is not None:
        note = {"note": command_line.ON_A_CPU} if small and backends.backend() == "portable" else {}
        body = {"results": results, "summary": experts.summary(results)}
        provenance.write(out, provenance.heading("python benchmarks/experts.py") | note | body)
    if different := [(one["model"], one["tokens"]) for one in results if not one["same_bits_alone"]]:
        raise command_line.fail(f"tokens have other bits by themselves than among others: {different}")


if __name__ == "__main__":
    app()
