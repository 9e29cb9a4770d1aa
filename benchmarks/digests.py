"""What digests of layers, and of equations, cost: how much longer a transformer takes than without them.

    python benchmarks/digests.py --out benchmarks/results/digests-h200.json

The model has random bfloat16 weights and is written with Flax' own layers; see `benchmarks/invariant.py`.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from detjax.bench import command_line, digests, invariant, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 64,
    model: Annotated[str, typer.Option(metavar="NAME", help="Four layers (small), GPT-2 or Qwen3-0.6B.")] = "small",
    rounds: command_line.RoundCount = 5,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    shapes = {"small": digests.SMALL, **invariant.SHAPES}
    if model not in shapes:
        raise typer.BadParameter(f"{model!r} is given; accepted: {', '.join(shapes)}", param_hint="--model")
    shape, batches = (invariant.TINY, (1, 2)) if small else (shapes[model], (1, 8))
    length, rounds = (8, 1) if small else (length, rounds)
    table = Table("rows", "plain, ms", "layers, ms", "equations, ms", "layers over plain", "equations over plain")
    results = list(digests.costs(shape, length, batches, rounds))
    for one in results:
        ms = (f"{one[f'{name}_ms']:.2f}" for name in ("plain", "layers", "equations"))
        ratios = (f"{one[f'{name}_over_plain']:.2f}" for name in ("layers", "equations"))
        table.add_row(str(one["batch"]), *ms, *ratios)
    Console().print(table)
    if out is not None:
        heading = provenance.heading("python benchmarks/digests.py")
        provenance.write(out, heading | {"small": small, "model": model, "results": results})


if __name__ == "__main__":
    app()
