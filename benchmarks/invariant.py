"""Models that know nothing of detjax under `batch_invariant`: their speed, whether bits change, and tracing.

    python benchmarks/invariant.py --out benchmarks/results/invariant-h200.json

The models have the shapes of GPT-2 and of Qwen3-0.6B and random bfloat16 weights, and are written with Flax' own
layers. A call computes the logits of the last token of each row. Tracing is that of a model of Qwen3-8B's shape.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from detjax.bench import command_line, invariant, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 128,
    rounds: command_line.RoundCount = 5,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    names = ("GPT-2", "Qwen3-0.6B")
    shapes = {"tiny": invariant.TINY} if small else {name: invariant.SHAPES[name] for name in names}
    batches, compared = ((1, 2), (2, 3)) if small else (invariant.BATCHES, invariant.COMPARED)
    length, rounds = (8, 1) if small else (length, rounds)
    table = Table("model", "rows", "stock, ms", "invariant, ms", "speed over stock", "other bits: stock", "invariant")
    results = {}
    for name, shape in shapes.items():
        changed = invariant.bits(shape, length, compared)
        speeds = list(invariant.speeds(shape, length, batches, rounds))
        results[name] = {"batches_with_other_bits": changed, "speeds": speeds}
        for speed in speeds:
            bits = (str(changed[kind] or "none") for kind in ("stock", "invariant"))
            ms = (f"{speed[f'{kind}_ms']:.2f}" for kind in ("stock", "invariant"))
            table.add_row(name, str(speed["batch"]), *ms, f"{speed['speed_over_stock']:.2f}", *bits)
    tracing = invariant.tracing(invariant.TINY if small else invariant.SHAPES["Qwen3-8B"], length)
    console = Console()
    console.print(table)
    console.print(f"Tracing: stock {tracing['stock']:.1f} s, invariant {tracing['invariant']:.1f} s")
    if out is not None:
        heading = provenance.heading("python benchmarks/invariant.py")
        provenance.write(out, heading | {"small": small, "tracing_seconds": tracing, "results": results})


if __name__ == "__main__":
    app()
