"""Find the first equation whose results differ between two runs, and how the difference grows from there.

The exit code is 1 if they differ.
"""

import contextlib
from pathlib import Path
from typing import Annotated

from rich.console import Console

from detjax import audit
from detjax.audit.bisection import bisect as bisection
from detjax.audit.bisection import traces
from detjax.cli.files import opened, write_json
from detjax.cli.loading import JSON_FILE, Backend
from detjax.cli.options import Option, command
from detjax.runtime import backends


@command
def bisect(
    a: str,
    b: str,
    /,
    *,
    rows: Annotated[tuple[int, int] | None, Option(default="all rows of batches of one size")] = None,
    isolate: bool = False,
    json_file: Annotated[Path | None, JSON_FILE] = None,
    plot: Path | None = None,
    backend: Backend = None,
) -> int:
    """Compares two runs.

    Args:
        a: a trace, or MODULE:FUNCTION as for detjax trace; only functions show values.
        b: the trace or function to compare with the first.
        rows: compare row I of the first run with row J of the second.
        isolate: also run each layer of B on the inputs that it had in A; requires functions.
        json_file: write the result to this file.
        plot: plot the growth of the difference to this PNG. Default: no plot.
    """
    with contextlib.ExitStack() as files, backends.use_backend(backend):
        json_part = opened(files, "--json", json_file)
        png = opened(files, "--plot", plot)
        runs = [audit.Trace.load(Path(run)) if Path(run).is_file() else traces.traced(run) for run in (a, b)]
        result = audit.bisect(*runs, rows=rows, isolate=isolate)
        if json_part is not None:
            write_json(json_part, result.as_dict())
        if png is not None:
            from detjax.audit.bisection import drift_plot  # importing matplotlib takes a second

            drift_plot.draw(result, png)
    print(result)
    console = Console(highlight=False)
    if result.first is not None:
        console.print(bisection.drift_table(result))
    if result.isolated is not None:
        console.print(bisection.isolation_table(result.isolated))
    return int(result.first is not None or bool(result.hidden))
