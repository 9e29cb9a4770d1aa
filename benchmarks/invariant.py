"""Models that know nothing of detjax under `batch_invariant`: their speed, whether bits change, and tracing.

    python benchmarks/invariant.py --out benchmarks/results/invariant-h200.json

The models have the shapes of GPT-2 and of Qwen3-0.6B and random bfloat16 weights, and are written with Flax' own
layers. A call computes the logits of the last token of each row. Tracing is that of a model of Qwen3-8B's shape.
"""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from detjax.bench import command_line, invariant, provenance

PARTS = ("speeds", "tracing", "bits")
app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 128,
    rounds: command_line.RoundCount = 5,
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Measure this only; repeatable: {', '.join(PARTS)}.")
    ] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        parts = command_line.check_names("--part", part, PARTS)
    names = ("GPT-2", "Qwen3-0.6B")
    shapes = {"tiny": invariant.TINY} if small else {name: invariant.SHAPES[name] for name in names}
    batches, compared = ((1, 2), (2, 3)) if small else (invariant.BATCHES, invariant.COMPARED)
    length, rounds = (8, 1) if small else (length, rounds)
    results: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    body = provenance.heading("python benchmarks/invariant.py") | {"small": small, "results": results}

    def save() -> None:
        if out is not None:
            provenance.write(out, body)

    console = Console()
    if "speeds" in parts:
        table = Table("model", "rows", "stock, ms", "invariant, ms", "speed over stock")
        for name, shape in shapes.items():
            speeds = results[name]["speeds"] = []
            for speed in invariant.speeds(shape, length, batches, rounds):
                speeds.append(speed)
                ms = (f"{speed[f'{kind}_ms']:.2f}" for kind in ("stock", "invariant"))
                table.add_row(name, str(speed["batch"]), *ms, f"{speed['speed_over_stock']:.2f}")
                save()
        console.print(table)
    if "tracing" in parts:
        tracing = invariant.tracing(invariant.TINY if small else invariant.SHAPES["Qwen3-8B"], length)
        body["tracing_seconds"] = tracing
        save()
        console.print(f"Tracing: stock {tracing['stock']:.1f} s, invariant {tracing['invariant']:.1f} s")
    if "bits" in parts:
        for name, shape in shapes.items():
            changed = results[name]["batches_with_other_bits"] = invariant.bits(shape, length, compared)
            console.print(f"{name}: a row has other bits than alone in batches of {changed}")
            save()


if __name__ == "__main__":
    app()
