"""`python -m benchmarks`: the studies that produce the numbers of the documentation, and the performance goals."""

import ast
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from benchmarks import goals
from benchmarks.display import display
from benchmarks.study import Run
from detjax.bench.command_line import Out, Small, console, print_line

STUDIES: Final = Path(__file__).parent / "studies"

_Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw as PNG.", show_default="beside the result of --out"),
]


def studies() -> dict[str, Path]:
    """The module of each study, by name."""
    files = {file.stem: file for file in STUDIES.glob("[!_]*.py")}
    return dict(sorted((files | {file.parent.name: file for file in STUDIES.glob("*/study.py")}).items()))


class _Studies(TyperGroup):
    """Commands, among them all studies, of which only the one that runs is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *studies()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (file := studies().get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        first, *_ = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()
        return TyperCommand(cmd_name, short_help=first)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        cmd_name, command, rest = super().resolve_command(ctx, args)
        return cmd_name, _command(cmd_name, rest) if cmd_name in studies() else command, rest


app = typer.Typer(
    cls=_Studies,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _main() -> None:
    """Runs a study, or checks the performance goals."""


@app.command("goals")
def _goals(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compares the results with the performance goals. The exit code is 1 if one is missed or cannot be read."""
    checked = goals.read()
    if as_json:
        print(json.dumps(goals.as_json(checked), indent=1))
    else:
        goals.shown(checked, console())
    if not all(goal.is_met for goal in checked):
        raise typer.Exit(1)


def _command(name: str, arguments: Sequence[str]) -> TyperCommand:
    """The command of a study: its own options, and those that all studies have."""
    module = importlib.import_module(".".join(studies()[name].relative_to(STUDIES.parents[1]).with_suffix("").parts))
    pictures = getattr(module, "PICTURES", {})
    command_line = shlex.join(["python", "-m", "benchmarks", name, *_without_files(arguments)])

    def run_study(small: bool, out: Path | None, plot: Path | None = None, **options: Any) -> None:
        run = Run(command_line, small, out)
        result = module.study(run, **options)
        run.save(result.content)
        display(result.content)
        if plot := plot or (out and out.with_suffix(".png")):
            for suffix, draw in pictures.items():
                draw({**run.heading, **result.content}, plot.with_name(f"{plot.stem}{suffix}.png"))
        if result.problem:
            print_line(f"error: {result.problem}")
            raise typer.Exit(1)

    def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    _, *options = inspect.signature(module.study, eval_str=True).parameters.values()
    shared = [option("small", Small, False), option("out", Out, None)]
    shared += [option("plot", _Plot, None)] if pictures else []
    run_study.__signature__ = inspect.Signature([*options, *shared])  # pyright: ignore[reportFunctionMemberAccess]
    run_study.__annotations__ = {parameter.name: parameter.annotation for parameter in [*options, *shared]}
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    # The commands in the text stay on lines of their own.
    single.command(name, help=re.sub(r"\n\n(?= )", "\n\n\b\n", module.__doc__ or ""))(run_study)
    command = typer.main.get_command(single)
    assert isinstance(command, TyperCommand)
    return command


def _without_files(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--out FILE` and `--plot FILE`."""
    pairs = zip(arguments, ("", *arguments), strict=False)
    return [
        argument
        for argument, before in pairs
        if {argument, before}.isdisjoint({"--out", "--plot"}) and not argument.startswith(("--out=", "--plot="))
    ]


if __name__ == "__main__":
    app()
