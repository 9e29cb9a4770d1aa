"""The pages of benchmarks: Jinja's templates in `benchmark_pages/`, filled from benchmarks/results/*.json.

No number on them is typed.
"""

import functools
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import matplotlib
from matplotlib.figure import Figure

from benchmarks import goals
from benchmarks.expressions import RESULTS, sources

TOPICS: Final = ("demo", "serving", "peers", "matmul", "rows", "attention", "experts", "training", "devices", "soak")
"""The pages in the order of the navigation."""

COLORS: Final = ("#2a7f8e", "#d1603d", "#e0a83e", "#8a79b5", "#8c8c8c")


@functools.cache
def result(name: str) -> Any:
    """Returns a result file's content."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def seconds(value: float | jinja2.Undefined | None) -> str:
    """Returns a duration with a suitable unit and three digits."""
    if value is None or isinstance(value, jinja2.Undefined):
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{_digits(value * factor)} {unit}"
    return ""


def _digits(value: float, digits: int = 3) -> str:
    if not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{decimals}f}"


def formatted(value: Any, spec: str) -> str:
    """Returns a number in a Python format, or an empty text if the result lacks it."""
    return "" if value is None or isinstance(value, jinja2.Undefined) else format(value, spec)


def listed(values: Iterable[float], spec: str, factor: float = 1) -> str:
    """Returns numbers separated by commas."""
    return ", ".join(format(factor * value, spec) for value in values)


def grouped(cells: Iterable[Mapping[str, Any]], form: str, key: str) -> Iterable[tuple[str, Sequence[Any]]]:
    """Groups cells by the name that `form` builds from a cell and its words at `key`."""
    groups: dict[str, list[Any]] = {}
    for cell in cells:
        groups.setdefault(form.format(cell, ", ".join(cell[key])), []).append(cell)
    return groups.items()


def device(name: str) -> str:
    """Returns the device of a result."""
    content = result(name)
    recorded = content.get("device")
    kind = recorded.get("kind", "CPU") if isinstance(recorded, dict) else "see the file"
    return content.get("fingerprint", {}).get("device_kind", kind)


def source(*names: str) -> str:
    """Returns a table of the sources of numbers: file, device, versions, date and command, as recorded in the files."""
    lines = [
        "**Sources**\n",
        "| file | device | contract | jax | date | command |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        content = result(name)
        fingerprint = content.get("fingerprint", {})
        cells = (
            f"[`{name}.json`](../../benchmarks/results/{name}.json)",
            device(name),
            fingerprint.get("contract_version", ""),
            content.get("versions", {}).get("jax", fingerprint.get("jax", "")),
            content.get("created", "")[:10],
            f"`{content['command']}`" if isinstance(content.get("command"), str) else "",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


@functools.cache
def pages() -> dict[str, str]:
    """Returns all benchmark pages by address on the site. The first page lists the others and all result files."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("benchmark_pages")),
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters |= {"seconds": seconds, "f": formatted, "listed": listed, "grouped": grouped}
    environment.filters |= {"mean": lambda values: statistics.geometric_mean(list(values)), "median": statistics.median}
    environment.globals |= {"result": result, "device": device, "source": source, "sources": sources}
    topics = {name: environment.get_template(f"{name}.md").render() for name in TOPICS}
    index = environment.get_template("index.md").render(
        topics={name: text.partition("\n")[0].removeprefix("# ") for name, text in topics.items()},
        goals=goals.read(),
        files=sorted(file.name for file in RESULTS.glob("*.json")),
    )
    return {f"benchmarks/{name}.md": text for name, text in {"index": index, **topics}.items()}


@functools.cache
def plots() -> dict[str, str]:
    """Returns the plots of benchmark pages by address, as SVG for light and dark pages."""
    content = result("peer-vllm-h200")["engines"]
    names = [engine["short"] for engine in content]
    images = {}
    for suffix, ink in (("", "#222222"), ("-dark", "#dddddd")):
        with matplotlib.rc_context(
            {
                "text.color": ink,
                "axes.labelcolor": ink,
                "xtick.color": ink,
                "ytick.color": ink,
                "axes.edgecolor": ink,
                "font.size": 9,
                "svg.hashsalt": "peers",
                "axes.spines.top": False,
                "axes.spines.right": False,
            }
        ):
            figure = Figure(figsize=(7, 2.6), layout="constrained")
            for axes, key, factor, title in zip(
                figure.subplots(1, 2),
                ("seconds_with_logprobs", "one_request_seconds_per_token"),
                (1, 1000),
                ("1000 requests with logprobs, s", "one request, ms a token"),
                strict=True,
            ):
                for place, engine in enumerate(content):
                    values = [factor * value for value in engine[key]]
                    axes.barh(place, statistics.median(values), color=COLORS[place], height=0.6)
                    axes.plot(values, [place] * len(values), ".", color=ink, markersize=4)
                axes.set_yticks(range(len(names)), names)
                axes.invert_yaxis()
                axes.set_title(title, loc="left", fontsize=9)
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
            images[f"benchmarks/peers{suffix}.svg"] = file.getvalue()
    return images
