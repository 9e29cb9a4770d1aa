"""Norms, rotary embedding, softmax and sampling on an H200: time against XLA's own and against a copy, and bits.

    python benchmarks/norms.py --out benchmarks/results/norms-h200.json

Each operation is timed under the backend that serves and under `stock`, and so is a copy of as many bytes as it has to
read and write: device time, medians, inputs rotated so that large ones come from memory. Beside the time stands whether
the bits of one row are the same first, in the middle and last of every number of rows, and over repeated runs. The
write of keys and values to a cache, which is donated, is timed in one step with `qk_rope` and as scatters after it.

`--sweep` times the schedules of the Hopper kernels instead. `--small` takes a CPU seconds.
"""

import dataclasses
from typing import Annotated

import typer
from rich.console import Console

from detjax import backends
from detjax.bench import command_line, provenance
from detjax.bench.rows import cache_writes, suite
from detjax.bench.rows.cases import SMALL, Sizes

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    sweep: Annotated[bool, typer.Option("--sweep", help="Time the schedules of the Hopper kernels.")] = False,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    sizes, backend = SMALL if small else Sizes(), backends.backend()
    if sweep:
        if backend != "hopper":
            raise typer.BadParameter(f"--sweep on {backends.device_name()}; accepted: an H100 or H200")
        from detjax.bench.rows import schedules

        results = []
        for result in schedules.measure(sizes):
            command_line.print_line(schedules.line(result))
            results.append(result)
    else:
        results = [*suite.measure(sizes), *cache_writes.measure(sizes)]
        Console(width=140).print(suite.table(results, backend))
    if out is not None:
        heading = provenance.heading("python benchmarks/norms.py" + (" --sweep" if sweep else ""))
        note = {"note": command_line.ON_A_CPU} if small else {}
        provenance.write(out, heading | note | {"sizes": dataclasses.asdict(sizes), "results": results})
    if not all(result.get(f"same_bits_over_{what}", True) for result in results for what in ("rows", "runs")):
        raise command_line.fail(f"backend {backend} gave different bits for other numbers of rows, or in other runs")
    if not all(result.get("same_bits_as_in_steps", True) for result in results):
        raise command_line.fail(f"backend {backend} wrote different bits in one step than in two")


if __name__ == "__main__":
    app()
