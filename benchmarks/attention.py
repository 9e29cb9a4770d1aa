"""Attention on an H200: time against cuDNN, PyTorch and tokamax, accuracy, and whether a token keeps its bits.

    python benchmarks/attention.py --out benchmarks/results/attention-h200.json \
                                   --only prefill --only decode --only backward --only accuracy
    python benchmarks/attention.py --out benchmarks/results/attention-bits-h200.json --only bits

Bfloat16, 32 query heads on 8 key heads. detjax reads keys and values from pages, the rivals from arrays without pages;
inputs are rotated so that they come from memory. Times are medians over rounds in which all take turns. Decode is timed
twice: as the sum of its kernels, and as a step, which is one of 20 dependent calls in a program that is replayed. What
cannot run is missing from the tables, and the JSON file says why. A picture of the times is written beside it.

`--small` takes a CPU seconds, on the portable backend. The exit code is 1 if bits differ; slow cells do not change it.
"""

import os
import time
from typing import Annotated, Any

# PyTorch and the processes of `--processes` need memory beside JAX.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import typer

import detjax
from detjax.bench import command_line, provenance
from detjax.bench.attention import picture, suite, tables
from detjax.bench.attention.cases import SMALL, Sizes

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION", help=f"Repeatable: {', '.join(suite.SECTIONS)}.", show_default="all"),
    ] = None,
    torch: command_line.Torch = True,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that compare the bits of options.", show_default="12, or 1 with --small"),
    ] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    start = time.perf_counter()
    with command_line.bad_parameters():
        sections = command_line.check_names("--only", only, suite.SECTIONS)
    plan = suite.Plan(SMALL if small else Sizes(), sections, torch and not small, processes or (1 if small else 12))
    note = {"note": command_line.ON_A_CPU} if small else {}

    def save(content: dict[str, Any]) -> None:
        if out is not None:
            provenance.write(out, content | note)

    with detjax.use_backend("portable" if small else "hopper"):
        content = suite.run(plan, save)
    tables.show(content)
    if out is not None:
        picture.draw(content, out.with_name(f"{out.stem}-prefill-decode.png"))
    command_line.print_line(f"{time.perf_counter() - start:.0f} s; written to {out or 'no file'}")
    differences = content.get("bits", {}).get("differences", [])
    if differences:
        raise command_line.fail("different bits\n" + "\n".join(differences[:20]))


if __name__ == "__main__":
    app()
