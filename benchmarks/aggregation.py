"""Aggregation of experts: how far other ways to add what experts give are from the contract, in logprobs.

    python benchmarks/aggregation.py --out benchmarks/results/aggregation-tiny-cpu.json
    python benchmarks/aggregation.py --preset Qwen3-30B-A3B --layers 8 --out benchmarks/results/aggregation-h200.json

k3 is the mean of exp(d) - 1 - d over tokens, d being the difference of logprobs. Without a preset, the tiny checkpoint
of the tests is measured. See `detjax.ops.combine_experts` for the aggregations.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from detjax.bench import aggregation, command_line, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A shape to fill with random weights.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="The number of layers of the preset.", show_default="the preset's own")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of random tokens.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 128,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        model = aggregation.tiny() if preset is None else aggregation.preset(preset, layers)
    results = list(aggregation.measure(model, *((2, 16) if small else (sequences, length))))
    table = Table("aggregation", "k3", "unequal tokens", "likeliest token the same")
    for one in results:
        share, agreement = f"{one['unequal_share']:.1%}", f"{one['top_1_agreement']:.1%}"
        table.add_row(one["aggregation"], f"{one['k3']:.1e}", share, agreement)
    Console().print(table)
    if out is not None:
        sizes = {"preset": preset, "layers": layers, "sequences": sequences, "length": length}
        heading = provenance.heading("python benchmarks/aggregation.py")
        provenance.write(out, heading | {"sizes": sizes, "results": results})


if __name__ == "__main__":
    app()
