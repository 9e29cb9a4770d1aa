"""`python -m detjax.bench`: measures what is on the device at hand, and tunes it."""

import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from detjax import backends, fingerprints, models
from detjax.bench import cases, deviceless, presets, results, serve, shapes
from detjax.bench import compare as comparing
from detjax.bench import compile as compiling
from detjax.bench import run as running
from detjax.bench.tune import Trial, tune
from detjax.engine import Engine
from detjax.pallas.hopper.matmul import tuning as schedules

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _main() -> None:
    """Measures detjax on the device at hand."""


@app.command("tune")
def tune_command(
    names: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help="Whose linear layers; repeatable.", show_default="all"),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=1, metavar="M", help="Tokens in a call; repeatable.", show_default="1 to 8192"),
    ] = None,
    tries: Annotated[
        int, typer.Option(min=1, help="Schedules tried for each product, beside those of the table.")
    ] = 12,
    processes: Annotated[int, typer.Option(min=1, help="That build schedules side by side.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="After which the search ends with what it has.")] = 3600,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The table to write; what it names already stays.", show_default="the package's"
        ),
    ] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="A line of JSON for every schedule tried.")] = None,
) -> None:
    """Searches matmul schedules, accepts those with the reference schedule's bits, and writes the table."""
    console = Console()
    if backends.backend() != "hopper":
        console.print(f"tune: {backends.device_name()} is no Hopper GPU; accepted: an H100 or H200.")
        raise typer.Exit(2)
    names, tokens = names or list(shapes.MODELS), tokens or list(shapes.TOKENS)
    unknown = [name for name in names if name not in shapes.MODELS]
    if unknown:
        raise typer.BadParameter(f"--model {unknown[0]!r} is unknown; accepted: {', '.join(shapes.MODELS)}")
    kind = backends.device_kind()
    file = schedules.table_file(kind) if out is None else out
    problems = {schedules.key(p): p for m in tokens for name in names for p in shapes.products(shapes.MODELS[name], m)}
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
    origin = {"command": "python -m detjax.bench tune", **dataclasses.asdict(fingerprints.fingerprint())}
    file.write_text(schedules.table_text({**schedules.table(kind), **best}, origin))
    if log is not None:
        log.write_text("\n".join(lines) + "\n")
    console.print(f"{len(best)} of {len(problems)} products tuned, {len(lines)} schedules tried: {file}")


@app.command("serve")
def serve_command(
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"A shape with random weights: {', '.join(presets.MODELS)}.")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="A checkpoint, instead of a preset.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the preset.", show_default="the model's own")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
    prompt: Annotated[tuple[int, int], typer.Option(help="Tokens of the shortest and the longest prompt.")] = (16, 256),
    output: Annotated[tuple[int, int], typer.Option(help="Tokens generated, likewise.")] = (90, 110),
    rate: Annotated[float | None, typer.Option(help="Requests a second.", show_default="all at once")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token.")] = 0.0,
    orders: Annotated[int, typer.Option(min=1, help="Runs, each with the requests in another order.")] = 1,
    beside: Annotated[
        int, typer.Option(min=0, help="One run more, among so many others, every third of which is cancelled midway.")
    ] = 0,
    numerics: Annotated[
        str, typer.Option(help="detjax, or stock: the same engine on XLA's own operations, under no contract.")
    ] = "detjax",
    max_samples: Annotated[int, typer.Option(min=1, help="Computed at the same time.")] = 256,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2048,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of a request, prompt included.")] = 2048,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON of all that was measured.")] = None,
    chart: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="PNG of the times.")] = None,
) -> None:
    """Throughput and latency of the engine. Runs in different orders must have the same answers, bit for bit."""
    console = Console()
    if (preset is None) == (model is None):
        raise typer.BadParameter("accepted: one of --preset and --model")
    if preset is not None and preset not in presets.MODELS:
        raise typer.BadParameter(f"--preset {preset!r} is unknown; accepted: {', '.join(presets.MODELS)}")
    if numerics not in ("detjax", backends.STOCK):
        raise typer.BadParameter(f"--numerics is {numerics!r}; accepted: detjax, {backends.STOCK}")
    try:
        workload = serve.Workload(requests, prompt, output, rate, temperature)
        with backends.use_backend(backends.STOCK) if numerics == backends.STOCK else contextlib.nullcontext():
            decoder = presets.decoder(preset, layers) if preset is not None else models.load(str(model))[0]
            start = time.perf_counter()
            sizes: dict[str, Any] = {"max_samples": max_samples, "token_budget": token_budget, "max_tokens": max_tokens}
            with Engine(decoder, **sizes, top_logprobs=0) as engine:
                engine.warm_up(progress=True)
                warm = time.perf_counter() - start
                runs = {}
                for number in range(orders):
                    order = random.Random(number).sample(range(requests), requests) if number else None
                    runs[f"order {number + 1}"] = serve.measure(engine, workload, decoder.config.vocab_size, order)
                if beside:
                    others = serve.Workload.beside(beside, workload)
                    found = serve.measure(engine, workload, decoder.config.vocab_size, beside=others)
                    runs[f"among {beside} others"] = found
            fingerprint = dataclasses.asdict(fingerprints.fingerprint())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    same = len({run["digest"] for run in runs.values()}) == 1
    columns = "", "seconds", "tokens a second", "first token, ms", "a token, ms"
    table = Table(*columns, title=f"{requests} requests, p50 / p95 / p99, {numerics}")
    for label, run in runs.items():
        times = [
            " / ".join(f"{value * 1e3:.1f}" for value in run["percentiles"][name].values())
            for name in ("time_to_first_token", "time_per_token")
        ]
        table.add_row(label, f"{run['seconds']:.2f}", f"{run['generated_tokens_per_second']:.0f}", *times)
    console.print(table)
    verdict = "the same bits" if same else "DIFFERENT BITS"
    console.print(f"answers of {len(runs)} runs: {verdict}; ready after {warm:.1f} s")
    if out is not None:
        result = {"model": preset or str(model), "layers": decoder.config.layers, "numerics": numerics, "engine": sizes}
        result |= {"workload": dataclasses.asdict(workload), "ready_after_seconds": warm, "same_bits": same}
        out.write_text(json.dumps(result | {"fingerprint": fingerprint, "runs": runs}, indent=1) + "\n")
    if chart is not None:
        serve.plot(runs, chart)
    if not same and numerics == "detjax":
        raise typer.Exit(1)


_Small = Annotated[bool, typer.Option("--small", help="Sizes that take seconds on a CPU.")]
_Only = Annotated[
    list[str] | None,
    typer.Option(metavar="OPERATION", help=f"Repeatable: {', '.join(cases.OPERATIONS)}.", show_default="all"),
]
_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="JSON, which `compare` reads.")]


@app.command("run")
def run_command(
    small: _Small = False,
    only: _Only = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="That serves.", show_default="the best of this device")
    ] = None,
    out: _Out = None,
) -> None:
    """Time, share of what the chip can do, speed over XLA's own operations, error and bits of every operation."""
    console = Console()
    with _bad_parameters():
        chosen = _operations(only)
        with _Rows(console, "measuring") as note:
            found = running.run(small=small, only=chosen, backend=backend, out=out, report=note)
    console.print(running.table(found))
    failed = [row for row in found["rows"] if "failed" in row]
    for row in failed:
        _print_line(console, f"{row['operation']} {row['name']}: {row['failed']}")
    changed = [row for row in found["rows"] if not row.get("same_bits_again", True)]
    if changed and found["fingerprint"]["backend"] != backends.STOCK:
        _print_line(console, f"DIFFERENT BITS when called again: {', '.join(row['name'] for row in changed)}")
        raise typer.Exit(1)
    if any(not row["refused"] for row in failed):
        raise typer.Exit(1)


@app.command("compile")
def compile_command(
    chip: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(deviceless.TPU_CHIPS)}.")],
    small: _Small = False,
    only: _Only = None,
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help="Whose programs."),
    ] = "tpu",
    out: _Out = None,
) -> None:
    """Compiles what `run` measures for a TPU that is not there. It needs libtpu, and nothing is executed."""
    console = Console()
    try:
        with _bad_parameters():
            chosen = _operations(only)
            with _Rows(console, f"compiling for {chip}") as note:
                found = compiling.compile_for(chip, small=small, only=chosen, backend=backend, out=out, report=note)
    except ModuleNotFoundError as error:
        _print_line(console, f"compile: {error}")
        raise typer.Exit(2) from error
    console.print(compiling.table(found))
    if any("failed" in row and not row["refused"] for row in found["rows"]):
        raise typer.Exit(1)


@app.command("compare")
def compare_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Two or more, of `run` and `compile`.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="A report that needs no other file.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="For PNG files.")] = None,
) -> None:
    """Results beside each other. The exit code is 1 if bits differ that are promised to be equal."""
    console = Console()
    try:
        comparison = comparing.compare(files)
    except results.ResultError as error:
        _print_line(console, f"compare: {error}")
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
    """Counts rows as they come."""

    def __init__(self, console: Console, what: str) -> None:
        self._progress = Progress(*Progress.get_default_columns()[:1], "{task.completed} cases", console=console)
        self._task = self._progress.add_task(what, total=None)

    def __enter__(self) -> "_Rows":
        self._progress.start()
        return self

    def __call__(self, row: dict[str, Any]) -> None:
        self._progress.update(self._task, advance=1, description=f"{row['operation']} {row['name']}")

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


@contextlib.contextmanager
def _bad_parameters() -> Iterator[None]:
    """What is refused is a parameter that was given."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _operations(only: list[str] | None) -> list[str]:
    for name in only or ():
        if name not in cases.OPERATIONS:
            raise ValueError(f"--only {name!r} is unknown; accepted: {', '.join(cases.OPERATIONS)}")
    return only or list(cases.OPERATIONS)


def _print_line(console: Console, text: str) -> None:
    """As it is: nothing in it is markup, and it is cut nowhere."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
