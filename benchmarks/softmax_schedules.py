"""Log-softmax and sampling on an H200: whether every schedule gives the same bits, and how fast each is.

    python benchmarks/softmax_schedules.py [--bits] [--rows 64 --rows 1024] [--dtype float32]

First the bits: log_softmax and softmax of every schedule against one another, logprobs and tokens of the sampler
against log_softmax and against the portable backend. Then, unless `--bits` is given, device time of each schedule
beside the time of a copy of as many bytes; the schedule that serves by default is marked.

`--small` compares the bits of tiny sizes in Pallas' interpreter, which takes a CPU seconds, and measures no time.
"""

import contextlib
import os
from typing import Annotated

# The interpreter's threads wait for one another inside XLA's pool, which needs a worker for each.
os.environ.setdefault("PJRT_NPROC", "16")

import jax.experimental.pallas.mosaic_gpu as plgpu
import typer

from detjax import backends
from detjax.bench import command_line, provenance
from detjax.bench.rows import vocabulary_schedules

VOCABULARY = 151936

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    bits: Annotated[bool, typer.Option("--bits", help="Compare bits, and measure no time.")] = False,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.", show_default="64, 1024")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default="float32, bfloat16")] = None,
    calls: command_line.Calls = 20,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    if not small and backends.backend() != "hopper":
        raise typer.BadParameter(f"without --small on {backends.device_name()}; accepted: an H100 or H200")
    sizes = vocabulary_schedules.SMALL if small else vocabulary_schedules.Sizes()
    note = "Pallas' interpreter: a check that the benchmark runs, not a measurement" if small else None
    lines, results = [], []
    try:
        with plgpu.force_gpu_interpret_mode() if small else contextlib.nullcontext():
            for compare in (vocabulary_schedules.compare_softmax, vocabulary_schedules.compare_sampling):
                for line in compare(sizes):
                    command_line.print_line(line)
                    lines.append(line)
    except vocabulary_schedules.DifferentBits as error:
        raise command_line.fail(f"different bits: {error}") from error
    if not bits and not small:
        for name in dtype or ["float32", "bfloat16"]:
            for count in rows or [64, 1024]:
                for result in vocabulary_schedules.measure(count, VOCABULARY, name, calls):
                    command_line.print_line(vocabulary_schedules.line(result))
                    results.append(result)
    if out is not None:
        heading = provenance.heading("python benchmarks/softmax_schedules.py")
        provenance.write(out, heading | {"note": note, "bits": lines, "results": results})


if __name__ == "__main__":
    app()
