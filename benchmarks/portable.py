"""What the portable backend costs against XLA's own operations, and what it buys: one set of bits at every batch size.

    python benchmarks/portable.py --out benchmarks/results/portable-cpu.json

Runs on the default device. Each operation is timed under both backends in turns, inputs rotated so that they come from
memory rather than from a cache; figures are medians. Beside the time stands at how many of the other batch sizes the
first row has different bits than at the largest.

`--small` measures the narrowest operations in few rounds.
"""

import statistics
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from detjax.bench import command_line, portable, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    scale: Annotated[int, typer.Option(min=1, help="Factor of the operations' widths; 4 is a width of 1024.")] = 4,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Dtype of the numbers.")] = (
        "bfloat16"
    ),
    rounds: command_line.RoundCount = 15,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    scale, rounds = (1, 2) if small else (scale, rounds)
    table = Table(
        "operation", "rows", "stock XLA, ms", "detjax, ms", "ratio", "stock: different bits", "detjax: different bits"
    )
    results = []
    cases = portable.small_cases(dtype) if small else list(portable.cases(scale, dtype))
    for case in track(cases, "measuring", console=Console(stderr=True)):
        for result in portable.measure(case, rounds):
            first = result["rows"] == case.rows[0]
            counts = [f"{result['other_bits'][b]} of {len(case.rows) - 1}" if first else "" for b in portable.BACKENDS]
            milliseconds = [f"{result['seconds'][b] * 1e3:.3f}" for b in portable.BACKENDS]
            name = case.name if first else ""
            table.add_row(name, str(result["rows"]), *milliseconds, f"{result['ratio']:.2f}", *counts)
            results.append(result)
    mean = statistics.geometric_mean(result["ratio"] for result in results)
    Console(width=130).print(table, f"time of detjax over stock XLA, geometric mean: {mean:.2f}")
    if out is not None:
        content = {"dtype": dtype, "scale": scale, "rounds": rounds, "geometric_mean": mean, "results": results}
        provenance.write(out, provenance.heading("python benchmarks/portable.py") | content)
    if any(result["other_bits"]["portable"] for result in results):
        raise command_line.fail("the portable backend gave different bits at some batch size")


if __name__ == "__main__":
    app()
