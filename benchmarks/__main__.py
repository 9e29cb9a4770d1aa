"""`python -m benchmarks`: the studies that produce the numbers of the documentation, and the performance goals."""

import ast
import importlib
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

from benchmarks import goals
from benchmarks.display import display
from benchmarks.study import Run
from detjax.bench.command_line import Out, Small, console, print_line
from detjax.cli.options import Option, UsageError, command, new_app, run, unwrapped

STUDIES: Final = Path(__file__).parent / "studies"

_Plot = Annotated[Path | None, Option("Draw as PNG.", default="next to the result of --out")]


def studies() -> dict[str, Path]:
    """Returns the module of each study, by name."""
    files = {file.stem: file for file in STUDIES.glob("[!_]*.py")}
    return dict(sorted((files | {file.parent.name: file for file in STUDIES.glob("*/study.py")}).items()))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a study or checks the goals, and exits with the exit code; see `detjax.cli.main`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    app = new_app("python -m benchmarks", help="Runs a study, or checks the performance goals.")
    app.command(command(_goals), name="goals")
    for name, file in studies().items():
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        # Only the study that runs is imported.
        app.command(
            _command(name, arguments[1:]) if arguments[:1] == [name] else _goals, name=name, help=unwrapped(text)
        )
    run(app, arguments, (UsageError,))


def _goals(*, as_json: Annotated[bool, Option(name="--json")] = False) -> int:
    """Compares the results with the performance goals. The exit code is 1 if one is missed or cannot be read.

    Args:
        as_json: print JSON.
    """
    checked = goals.read()
    if as_json:
        print(json.dumps(goals.as_json(checked), indent=1))
    else:
        goals.shown(checked, console())
    return int(not all(goal.is_met for goal in checked))


def _command(name: str, arguments: Sequence[str]) -> Callable[..., int | None]:
    """The command of a study, with its own options and the shared ones."""
    module = importlib.import_module(".".join(studies()[name].relative_to(STUDIES.parents[1]).with_suffix("").parts))
    pictures = getattr(module, "PICTURES", {})
    command_line = shlex.join(["python", "-m", "benchmarks", name, *_without_files(arguments)])

    def run_study(small: bool, out: Path | None, plot: Path | None = None, **options: Any) -> int:
        run = Run(command_line, small, out)
        result = module.study(run, **options)
        run.save(result.content)
        display(result.content)
        if plot := plot or (out and out.with_suffix(".png")):
            for suffix, draw in pictures.items():
                draw({**run.heading, **result.content}, plot.with_name(f"{plot.stem}{suffix}.png"))
        if result.problem:
            print_line(f"error: {result.problem}")
        return int(bool(result.problem))

    def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    _, *options = inspect.signature(module.study, eval_str=True).parameters.values()
    shared = [option("small", Small, False), option("out", Out, None)]
    shared += [option("plot", _Plot, None)] if pictures else []
    run_study.__signature__ = inspect.Signature([*options, *shared])  # pyright: ignore[reportFunctionMemberAccess]
    return command(run_study)


def _without_files(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--out FILE` and `--plot FILE`."""
    pairs = zip(arguments, ("", *arguments), strict=False)
    return [
        argument
        for argument, before in pairs
        if {argument, before}.isdisjoint({"--out", "--plot"}) and not argument.startswith(("--out=", "--plot="))
    ]


if __name__ == "__main__":
    main()
