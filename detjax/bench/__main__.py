"""`python -m detjax.bench`: measures detjax on the device at hand, and tunes it."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from detjax import models
from detjax.bench import cases, command_line, deviceless, presets, provenance, results, serve, shapes
from detjax.bench import compare as comparing
from detjax.bench import compile as compiling
from detjax.bench import run as running
from detjax.bench.tune import Trial, tune
from detjax.cli import options as cli_options
from detjax.engine import EngineConfig
from detjax.pallas.hopper.matmul import tuning as schedules
from detjax.pallas.hopper.matmul.plan import Problem
from detjax.runtime import backends

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _main() -> None:
    """Measures detjax on the device at hand."""


@app.command("tune")
def tune_command(
    names: command_line.Models = None,
    tokens: command_line.Tokens = None,
    tries: Annotated[
        int, typer.Option(min=1, help="Schedules to try for each product, beside those of the table.")
    ] = 12,
    processes: Annotated[int, typer.Option(min=1, help="Processes that build schedules side by side.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds after which the search ends with what it has.")] = 3600,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The table to write; products that are not searched keep their schedules.",
            show_default="the package's",
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line of JSON for every schedule tried.")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Tune the products of the backward pass, too.")] = False,
) -> None:
    """Searches matmul schedules, accepts those with the reference schedule's bits, and writes the table."""
    console = Console()
    if backends.backend() != "hopper":
        console.print(f"tune: {backends.device_name()} is no Hopper GPU; accepted: an H100 or H200.")
        raise typer.Exit(2)
    with command_line.bad_parameters():
        names = command_line.check_names("--model", names or list(shapes.MODELS), presets.MODELS)
    problems: dict[str, Problem] = {}
    for m, name in itertools.product(tokens or shapes.TOKENS, names):
        widths = shapes.Widths.from_config(presets.config(name))
        products = [*shapes.products(widths, m), *(shapes.gradient_products(widths, m) if training else ())]
        problems |= {schedules.key(problem): problem for problem in products}
    done: set[str] = set()
    lines = []
    with Progress(console=console) as progress:
        task = progress.add_task("products", total=len(problems))

        def report(trial: Trial) -> None:
            lines.append(json.dumps(dataclasses.asdict(trial), default=str))
            if (name := schedules.key(trial.problem)) not in done:
                done.add(name)
                progress.advance(task)

        best = tune(list(problems.values()), tries=tries, processes=processes, seconds=seconds, report=report)
    kind = backends.device_kind()
    file = schedules.table_file(kind) if out is None else out
    heading = provenance.heading("python -m detjax.bench tune")
    file.write_text(schedules.table_text({**schedules.table(kind), **best}, heading))
    if log is not None:
        log.write_text("\n".join(lines) + "\n")
    console.print(f"{len(best)} of {len(problems)} products tuned, {len(lines)} schedules tried: {file}")


@app.command("serve")
def serve_command(
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"A shape to fill with random weights: {', '.join(presets.MODELS)}."),
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="A checkpoint, instead of a preset.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="The number of layers of the preset.", show_default="the model's own")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="The number of requests.")] = 1000,
    prompt: Annotated[tuple[int, int], typer.Option(help="Tokens of the shortest and the longest prompt.")] = (16, 256),
    output: Annotated[
        tuple[int, int], typer.Option(help="The fewest and the most tokens that a request generates.")
    ] = (90, 110),
    rate: Annotated[float | None, typer.Option(help="Requests a second.", show_default="all at once")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="The temperature of all requests; 0 takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The seed of lengths, tokens and times.")] = 0,
    orders: Annotated[int, typer.Option(min=1, help="Runs, each with the requests in another order.")] = 1,
    beside: Annotated[
        int,
        typer.Option(
            min=0,
            help="Further requests, every third of which is cancelled midway, to run the workload among once more.",
        ),
    ] = 0,
    numerics: Annotated[
        str, typer.Option(help="detjax, or stock: the same engine on XLA's own operations, under no contract.")
    ] = "detjax",
    max_samples: Annotated[int, typer.Option(min=1, help="Samples that are computed at the same time.")] = 256,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2048,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a request, its prompt included.")] = 2048,
    runs_of: cli_options.RunsOf = None,
    tensor_parallel: cli_options.TensorParallel = 1,
    out: command_line.Out = None,
    chart: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the times as PNG.")] = None,
) -> None:
    """Throughput and latency of the engine. Runs in different orders must have the same answers, bit for bit."""
    if (preset is None) == (model is None):
        raise typer.BadParameter("accepted: one of --preset and --model")
    if preset is not None and preset not in presets.MODELS:
        raise typer.BadParameter(f"--preset {preset!r} is unknown; accepted: {', '.join(presets.MODELS)}")
    with command_line.bad_parameters():
        engine = EngineConfig(
            max_samples=max_samples,
            token_budget=token_budget,
            max_length=max_length,
            top_logprobs=0,
            runs_of=runs_of,
        )
        workload = serve.Workload(requests, prompt, output, rate, temperature, seed)
        experiment = serve.Experiment(workload, engine, orders, beside, numerics)
        mesh = models.mesh_of(tensor_parallel)
        if preset is not None:
            result = experiment.run(functools.partial(presets.decoder, preset, layers, mesh), preset)
        else:
            result = experiment.run(lambda: models.load(str(model), mesh=mesh)[0], str(model))
    console = Console()
    console.print(serve.table(result))
    verdict = "the same bits" if result["same_bits"] else "DIFFERENT BITS"
    console.print(
        f"answers of {len(result['runs'])} runs: {verdict}; ready after {result['ready_after_seconds']:.1f} s"
    )
    if out is not None:
        provenance.write(out, result)
    if chart is not None:
        serve.plot(result["runs"], chart)
    if not result["same_bits"] and numerics == "detjax":
        raise typer.Exit(1)


_Only = Annotated[
    list[str] | None,
    typer.Option(metavar="OPERATION", help=f"Repeatable: {', '.join(cases.OPERATIONS)}.", show_default="all"),
]
_Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write JSON, which `compare` reads.")]


@app.command("run")
def run_command(
    small: command_line.Small = False,
    only: _Only = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The backend to measure.", show_default="the best of this device"),
    ] = None,
    out: _Out = None,
) -> None:
    """Time, share of what the chip can do, speed over XLA's own operations, error and bits of every operation."""
    console = command_line.console()
    with command_line.bad_parameters():
        chosen = command_line.check_names("--only", only, cases.OPERATIONS)
        with _Rows(console, "measuring") as report:
            content = running.run(small=small, only=chosen, backend=backend, out=out, report=report)
    console.print(running.table(content))
    if (warning := results.spread_warning(content["rows"])) is not None:
        command_line.print_line(warning)
    failed = [row for row in content["rows"] if "failed" in row]
    for row in failed:
        command_line.print_line(f"{row['operation']} {row['name']}: {row['failed']}")
    changed = [row for row in content["rows"] if not row.get("same_bits_again", True)]
    if changed and content["fingerprint"]["backend"] != backends.STOCK:
        command_line.print_line(f"DIFFERENT BITS when called again: {', '.join(row['name'] for row in changed)}")
        raise typer.Exit(1)
    if any(not row["refused"] for row in failed):
        raise typer.Exit(1)


@app.command("compile")
def compile_command(
    chip: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(deviceless.TPU_CHIPS)}.")],
    small: command_line.Small = False,
    only: _Only = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="The backend whose programs are compiled.")] = "tpu",
    out: _Out = None,
) -> None:
    """Compiles what `run` measures for an absent TPU. Needs libtpu; nothing is executed."""
    console = command_line.console()
    try:
        with command_line.bad_parameters():
            chosen = command_line.check_names("--only", only, cases.OPERATIONS)
            with _Rows(console, f"compiling for {chip}") as report:
                content = compiling.compile_for(chip, small=small, only=chosen, backend=backend, out=out, report=report)
    except ModuleNotFoundError as error:
        command_line.print_line(f"compile: {error}")
        raise typer.Exit(2) from error
    console.print(compiling.table(content))
    if any("failed" in row and not row["refused"] for row in content["rows"]):
        raise typer.Exit(1)


@app.command("compare")
def compare_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Two or more results of `run` or `compile`.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report that needs no other file.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write PNG files into this folder.")] = None,
) -> None:
    """Results side by side. The exit code is 1 if bits differ that are promised to be equal."""
    console = command_line.console()
    try:
        comparison = comparing.compare(files)
    except results.ResultError as error:
        command_line.print_line(f"compare: {error}")
        raise typer.Exit(2) from error
    console.print(comparing.report(comparison))
    if html is not None or plots is not None:
        from detjax.bench import report  # matplotlib takes a second

        if html is not None:
            html.write_text(report.html(comparison))
        if plots is not None:
            report.plot(comparison, plots)
    if comparison.broken:
        raise typer.Exit(1)


class _Rows:
    """Counts rows as they come, in a progress bar."""

    def __init__(self, console: Console, title: str) -> None:
        self._progress = Progress(*Progress.get_default_columns()[:1], "{task.completed} cases", console=console)
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> "_Rows":
        self._progress.start()
        return self

    def __call__(self, row: dict[str, Any]) -> None:
        self._progress.update(self._task, advance=1, description=f"{row['operation']} {row['name']}")

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


if __name__ == "__main__":
    app()
