"""Experts: both projections of the experts that tokens choose, against ragged dots and dense products, and bits.

    python benchmarks/experts.py --out benchmarks/results/experts-h200.json

Random tokens choose random experts, the same for all rivals: XLA's ragged dot, tokamax's if it is installed, and
products of all tokens with all experts. Device time, medians, in turns; the choice and the gather of rows are left out.
Beside the times stands whether tokens by themselves have the bits that they have among others.
`--part gradients` measures the projections with their gradients, which continue float32 sums in place, by the clock on
the wall, and compares the bits of one microbatch with those of two.

`--small` takes a CPU seconds. The exit code is 1 if a bit differs.
"""

from typing import Annotated, Any

import typer

from detjax import backends
from detjax.bench import command_line, expert_gradients, experts, provenance

PARTS = ("projections", "gradients")
app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Measure this shape; repeatable: {', '.join(experts.MODELS)}."),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Measure this only; repeatable: {', '.join(PARTS)}.")
    ] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        names = command_line.check_names("--model", model, experts.MODELS)
        parts = command_line.check_names("--part", part, PARTS)
    chosen = experts.SMALL_MODELS if small else {name: experts.MODELS[name] for name in names}
    measures = {
        "projections": (experts.measure, experts.SMALL_TOKENS if small else experts.TOKENS),
        "gradients": (expert_gradients.measure, expert_gradients.SMALL_TOKENS if small else expert_gradients.TOKENS),
    }
    note = {"note": command_line.ON_A_CPU} if small and backends.backend() == "portable" else {}
    body: dict[str, Any] = provenance.heading("python benchmarks/experts.py") | note
    different = []
    for name in parts:
        measure, tokens = measures[name]
        results = body["results" if name == "projections" else name] = []
        for result in measure(chosen, tokens):
            results.append(result)
            if out is not None:  # a lease may end before the last one
                provenance.write(out, body)
            command_line.print_line(f"{name}, {result['model']}, {result['tokens']} tokens: {result}")
            if not result["same_bits_alone" if name == "projections" else "same_bits_in_microbatches"]:
                different.append((name, result["model"], result["tokens"]))
        if name == "projections":
            body["summary"] = experts.summary(results)
        if out is not None:
            provenance.write(out, body)
    if different:
        raise command_line.fail(f"bits differ from those of tokens by themselves, or in microbatches: {different}")


if __name__ == "__main__":
    app()
