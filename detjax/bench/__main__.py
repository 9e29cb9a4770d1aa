"""`python -m detjax.bench`: measures and tunes detjax on the current device."""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from rich.console import Console
from rich.progress import Progress

from detjax import models
from detjax.bench import cases, command_line, presets, provenance, random_codes, results, serve, shapes
from detjax.bench import compare as comparing
from detjax.bench import compile as compiling
from detjax.bench import run as running
from detjax.bench.tune import Search, Trial, tune
from detjax.cli.options import Fields, Option, UsageError, command, new_app, run, usage_errors
from detjax.engine import EngineConfig
from detjax.pallas.hopper.matmul import tuning as schedules
from detjax.pallas.hopper.matmul.plan import Problem
from detjax.runtime import backends, device_memory

app = new_app("python -m detjax.bench", help="Measures detjax on the current device.")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its code; see `detjax.cli.main`."""
    device_memory.use_most()
    run(app, arguments, (UsageError,))


_LIMITS = {name: Option(minimum=1) for name in ("tries", "processes", "seconds")}
_SEARCH = Fields(Search, without=("shared",), options=_LIMITS)


@app.command(name="tune")
@command
def tune_command(
    *,
    models: Annotated[list[str], Option("Measure this model's linear layers.", accepted=shapes.MODELS)],
    tokens: command_line.Tokens = None,
    search: Annotated[Search, _SEARCH] = Search(),  # noqa: B008 - it is frozen
    out: Path | None = None,
    log: Path | None = None,
    training: bool = False,
    devices: Annotated[int, Option(minimum=1)] = 1,
) -> None:
    """Searches for the fastest matmul schedules among those with the reference's bits, and writes the table.

    Args:
        out: the table to write; other products keep their schedules. Default: the package's table.
        log: write a line of JSON for each schedule tried.
        training: also tune the products of the backward pass.
        devices: tune what one of N devices computes that share the model; one device runs it.
    """
    if backends.backend() != "hopper":
        raise UsageError(f"tune: {backends.device_name()} is not a Hopper GPU; accepted: an H100 or H200.")
    console = Console()
    problems: dict[str, Problem] = {}
    for m, name in itertools.product(tokens or shapes.TOKENS, models):
        config = presets.config(name)
        products = [*shapes.products(config, m, devices), *(shapes.gradient_products(config, m) if training else ())]
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

        best = tune(list(problems.values()), dataclasses.replace(search, shared=devices > 1), report)
    kind = backends.device_kind()
    file = schedules.table_file(kind) if out is None else out
    heading = provenance.heading("python -m detjax.bench tune")
    file.write_text(schedules.table_text({**schedules.table(kind), **best}, heading))
    if log is not None:
        log.write_text("\n".join(lines) + "\n")
    console.print(f"{len(best)} of {len(problems)} products tuned, {len(lines)} schedules tried: {file}")


_LARGE_ENGINE = EngineConfig(max_samples=256, token_budget=2048, max_length=2048, top_logprobs=0)
_ENGINE = Fields(
    EngineConfig,
    without=("num_pages", "prefix_cache", "snapshot_bytes", "snapshot_tokens", "kv_cache_dtype", "top_logprobs"),
)
_RUNS = Fields(
    serve.Experiment,
    without=("workload", "engine"),
    options={"orders": Option(minimum=1), "background": Option(minimum=0)},
)


@app.command(name="serve")
@command
def serve_command(
    *,
    preset: Annotated[str | None, Option(accepted=presets.MODELS)] = None,
    model: Path | None = None,
    layers: Annotated[int | None, Option(minimum=1)] = None,
    weights: Annotated[str | None, Option(accepted=random_codes.FORMATS)] = None,
    workload: Annotated[serve.Workload, Fields(serve.Workload, options={"temperature": Option(minimum=0)})],
    runs: Annotated[dict[str, Any], _RUNS],
    engine: Annotated[EngineConfig, _ENGINE] = _LARGE_ENGINE,
    tensor_parallel: int = 1,
    backend: str | None = None,
    out: command_line.Out = None,
    plot: Path | None = None,
) -> int:
    """Throughput and latency of the engine. Runs in different orders must return the same answers, bit for bit.

    Args:
        preset: a model shape to fill with random weights.
        model: a checkpoint, instead of a preset.
        layers: the preset's number of layers. Default: the model's own.
        weights: the format of the preset's matrices: random codes of four bits, or of fp8 blocks with quantized
            activations. Default: bfloat16 numbers.
        tensor_parallel: shard the model over N devices; no bit depends on N.
        backend: the backend under contract to measure. Default: the device's best.
        plot: draw the times as PNG.
    """
    if (preset is None) == (model is None):
        raise UsageError("serve: needs a model; accepted: exactly one of --preset and --model")
    if model is not None and weights is not None:
        raise UsageError(f"serve: --weights {weights} with --model; accepted: --preset, as a checkpoint has its own")
    with usage_errors(), backends.use_backend(backend):
        experiment = serve.Experiment(workload, engine, **runs)
        mesh = models.mesh_of(tensor_parallel)
        if preset is not None:
            load = functools.partial(presets.decoder, preset, layers, mesh, weights=weights)
            result = {**experiment.run(load, preset), "weights": weights or "bfloat16"}
        else:
            result = experiment.run(lambda: models.load(str(model), mesh=mesh)[0], str(model))
    console = Console()
    console.print(serve.table(result))
    verdict = "the same bits" if result["same_bits"] else "DIFFERENT BITS"
    console.print(
        f"answers of {len(result['runs'])} runs: {verdict}; ready after {result['ready_after_seconds']:.1f} s"
    )
    for label, measured in result["runs"].items():
        if different := measured.get("different"):
            place = different["places"][0]
            console.print(
                f"{label}: {different['answers']} answers differ from the first run's; request {place['request']} from "
                f"its token {place['token']} on, in steps of {' and '.join(map(str, place['batches']))} sequences"
            )
    if out is not None:
        provenance.write(out, result)
    if plot is not None:
        serve.plot(result["runs"], plot)
    return int(not result["same_bits"] and experiment.numerics == "detjax")


_Only = Annotated[list[str], Option("The operations", accepted=cases.OPERATIONS)]
_Out = Annotated[Path | None, Option("Write JSON, which compare reads.")]


@app.command(name="run")
@command
def run_command(*, small: command_line.Small = False, only: _Only, backend: str | None = None, out: _Out = None) -> int:
    """Time, share of the chip's roofline, speed over XLA's own operations, error and bits of each operation.

    Args:
        backend: the backend to measure. Default: the device's best.
    """
    console = command_line.console()
    with usage_errors(), _progress(console, "measuring") as report:
        content = running.run(small=small, only=only, backend=backend, out=out, report=report)
    console.print(running.table(content))
    if (warning := results.spread_warning(content["rows"])) is not None:
        command_line.print_line(warning)
    failed = [row for row in content["rows"] if "failed" in row]
    for row in failed:
        command_line.print_line(f"{row['operation']} {row['name']}: {row['failed']}")
    changed = [row for row in content["rows"] if not row.get("same_bits_again", True)]
    if changed and content["fingerprint"]["backend"] != backends.STOCK:
        command_line.print_line(f"DIFFERENT BITS when called again: {', '.join(row['name'] for row in changed)}")
        return 1
    return int(any(not row["refused"] for row in failed))


@app.command(name="compile")
@command
def compile_command(
    *, chip: str, small: command_line.Small = False, only: _Only, backend: str = "tpu", out: _Out = None
) -> int:
    """Compiles the cases of `run` for a TPU without having one. Needs libtpu; nothing is executed.

    Args:
        chip: the TPU: v5e, v5p, v6e or tpu7x.
        backend: the backend whose programs are compiled.
    """
    console = command_line.console()
    try:
        with usage_errors(), _progress(console, f"compiling for {chip}") as report:
            content = compiling.compile_for(chip, small=small, only=only, backend=backend, out=out, report=report)
    except ModuleNotFoundError as error:
        raise UsageError(f"compile: {error}") from error
    console.print(compiling.table(content))
    return int(any("failed" in row and not row["refused"] for row in content["rows"]))


@app.command(name="compare")
@command
def compare_command(files: list[Path], /, *, html: Path | None = None, plots: Path | None = None) -> int:
    """Compares results side by side. The exit code is 1 if bits differ that must be equal.

    Args:
        files: two or more results of `run` or `compile`.
        html: write a self-contained HTML report.
        plots: write PNG files to this folder.
    """
    console = command_line.console()
    try:
        comparison = comparing.compare(files)
    except results.ResultError as error:
        raise UsageError(f"compare: {error}") from error
    console.print(comparing.report(comparison))
    if html is not None or plots is not None:
        from detjax.bench import report  # matplotlib takes a second

        if html is not None:
            html.write_text(report.html(comparison))
        if plots is not None:
            report.plot(comparison, plots)
    return int(bool(comparison.broken))


@contextlib.contextmanager
def _progress(console: Console, title: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that counts rows in a progress bar."""
    with Progress(*Progress.get_default_columns()[:1], "{task.completed} cases", console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda row: progress.update(task, advance=1, description=f"{row['operation']} {row['name']}")


if __name__ == "__main__":
    main()
