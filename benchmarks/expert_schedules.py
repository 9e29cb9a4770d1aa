"""Schedules of the Hopper kernel for experts: whether every one gives the same bits, and how fast each is.

    python benchmarks/expert_schedules.py --out benchmarks/results/expert-schedules-h200.json

Random tokens choose random experts. Groups of rows begin at multiples of a tile's rows, so the result has the fastest
schedule for each number of rows in a tile, by the tokens of a call, for both projections of an expert.

`--small` compares the bits of a tiny size in Pallas' interpreter, which takes a CPU seconds, and measures no time.
"""

import dataclasses
import itertools
import os
from typing import Annotated

# The interpreter's threads wait for one another inside XLA's pool, which needs a worker for each.
os.environ.setdefault("PJRT_NPROC", "16")

import jax.experimental.pallas.mosaic_gpu as plgpu
import typer

from detjax import backends
from detjax.bench import command_line, expert_schedules, experts, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Measure this shape; repeatable: {', '.join(experts.MODELS)}."),
    ] = None,
    tokens: command_line.Tokens = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that build kernels side by side.")] = 8,
    seconds: Annotated[float, typer.Option(help="The time after which the search ends with what it has.")] = 600.0,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    if not small and backends.backend() != "hopper":
        raise typer.BadParameter(f"without --small on {backends.device_name()}; accepted: an H100 or H200")
    with command_line.bad_parameters():
        names = command_line.check_names("--model", model, experts.MODELS)
    note = "Pallas' interpreter: a check that the benchmark runs, not a measurement" if small else None
    if small:
        with plgpu.force_gpu_interpret_mode():
            trials = list(expert_schedules.small())
    else:
        sizes = itertools.product(tokens or expert_schedules.TOKENS, names, expert_schedules.PROJECTIONS)
        jobs = [expert_schedules.Job(experts.MODELS[name], count, projection) for count, name, projection in sizes]
        trials = list(expert_schedules.measure(jobs, processes=processes, seconds=seconds))
    different = [trial for trial in trials if trial.has_first_bits is False]
    summary = expert_schedules.fastest(trials)
    for row in summary:
        command_line.print_line(str(row))
    command_line.print_line(f"{len(trials)} trials, {len(different)} with other bits than the first")
    if out is not None:
        heading = provenance.heading("python benchmarks/expert_schedules.py")
        body = {"note": note, "fastest": summary, "trials": [dataclasses.asdict(trial) for trial in trials]}
        provenance.write(out, heading | body)
    if different:
        raise command_line.fail(f"schedules have different bits: {different}")


if __name__ == "__main__":
    app()
