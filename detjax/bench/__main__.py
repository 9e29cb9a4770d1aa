"""`python -m detjax.bench tune`: searches schedules on the device at hand and writes their table."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from detjax import platform
from detjax.bench import shapes
from detjax.bench.tune import Trial, tune
from detjax.pallas.schedules import matmul_hopper as schedules

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _main() -> None:
    """Measures detjax on the device at hand."""


@app.command("tune")
def tune_command(
    models: Annotated[
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
    if platform.backend() != "hopper":
        console.print(f"tune: {platform.device_name()} is no Hopper GPU; accepted: an H100 or H200.")
        raise typer.Exit(2)
    models, tokens = models or list(shapes.MODELS), tokens or list(shapes.TOKENS)
    unknown = [name for name in models if name not in shapes.MODELS]
    if unknown:
        raise typer.BadParameter(f"--model {unknown[0]!r} is unknown; accepted: {', '.join(shapes.MODELS)}")
    kind = platform.device_kind()
    file = schedules.table_file(kind) if out is None else out
    problems = {schedules.key(p): p for m in tokens for name in models for p in shapes.products(shapes.MODELS[name], m)}
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
    origin = {"command": "python -m detjax.bench tune", **dataclasses.asdict(platform.fingerprint())}
    file.write_text(schedules.table_text({**schedules.table(kind), **best}, origin))
    if log is not None:
        log.write_text("\n".join(lines) + "\n")
    console.print(f"{len(best)} of {len(problems)} products tuned, {len(lines)} schedules tried: {file}")


if __name__ == "__main__":
    app()
