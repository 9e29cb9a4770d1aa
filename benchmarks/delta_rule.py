"""The gated delta rule of linear attention: decode and prefill against plain XLA, and the bits of cuts.

    python benchmarks/delta_rule.py --out benchmarks/results/delta-rule-h200.json

First the bits: a request of 700 tokens is decoded, cut at random, verified by drafts and put among others. Then the
time of a decode step of 1, 16 and 64 requests against the recurrence, which reads and writes the state at every token,
and of a prefill of 8192 tokens against chunks that begin where the call begins. Medians of device time, in turns;
beside those of decode stand the times by the clock on the wall.

`--small` takes a CPU seconds. The exit code is 1 if a bit differs.
"""

import time
from typing import Annotated, Any

import typer

from detjax import backends
from detjax.bench import command_line, delta_rule, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    calls: command_line.Calls = 12,
    limit: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Begin no measurement after so many seconds.")
    ] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    end = None if limit is None else time.monotonic() + limit
    models = delta_rule.SMALL_MODELS if small else delta_rule.MODELS
    sizes, calls = (delta_rule.SMALL, 2) if small else (delta_rule.Sizes(), calls)
    note = {"note": command_line.ON_A_CPU} if small and backends.backend() == "portable" else {}
    results: list[dict[str, Any]] = []
    body: dict[str, Any] = provenance.heading("python benchmarks/delta_rule.py") | note | {"results": results}
    different = []
    for name, widths in models.items():
        for result in delta_rule.measure(name, widths, sizes, calls):
            results.append(result)
            command_line.print_line(str(result))
            different += [way for way, same in result.get("same_bits", {}).items() if not same]
            if out is not None:
                provenance.write(out, body)
            if end is not None and time.monotonic() > end:
                command_line.print_line(f"the limit of {limit} seconds has passed")
                break
    if different:
        raise command_line.fail(f"bits differ from those of one call: {different}")


if __name__ == "__main__":
    app()
