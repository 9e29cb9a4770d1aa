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
        a: a trace, or MODULE:FUNCTION as detjax trace takes it, which shows values.
        b: another one, to be compared with the first.
        rows: compare row I of the first run with row J of the second.
        isolate: also run each layer of B with the inputs that it had in A; this needs functions.
        json_file: write the result here.
        plot: draw how the difference grows, as PNG. Default: do not.
    """
    with contextlib.ExitStack() as files, backends.use_backend(backend):
        json_part = opened(files, "--json", json_file)
        png = opened(files, "--plot", plot)
        runs = [audit.Trace.load(Path(place)) if Path(place).is_file() else traces.traced(place) for place in (a, b)]
        result = audit.bisect(*runs, rows=rows, isolate=isolate)
        if json_part is not None:
            write_json(json_part, result.as_dict())
        if png is not None:
            from detjax.audit.bisection import drift_plot  # matplotlib takes a second, which other commands do not need

            drift_plot.draw(result, png)
    print(result)
    console = Console(highlight=False)
    if result.first is not None:
        console.print(bisection.drift_table(result))
    if result.isolated is not None:
        console.print(bisection.isolation_table(result.isolated))
    return int(result.first is not None or bool(result.hidden))
