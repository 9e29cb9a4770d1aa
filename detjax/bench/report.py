"""A comparison as plots, and as a self-contained HTML file."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from detjax.bench.compare import COMPILED, Bits, Comparison, Line
from detjax.bench.results import MUCH_SPREAD, Result

COLORS: Final = ("#2a8f9e", "#d1603d", "#8e6fc7", "#b58a12", "#5d8f3a", "#c2568b", "#5b7fc4", "#8b7355")
_INK: Final = "#3a3f45"
_GREY: Final = "#87909a"
"""A grey that is readable on light and dark backgrounds."""
_THEMED: Final = "#010203"
"""A placeholder for the page's text colour in embedded plots."""


class Quantity(NamedTuple):
    """A quantity that a plot shows for each case.

    Attributes:
        title: the title of the plot.
        axis: the label of the axis.
        value: returns the quantity of a result's row; None if the row has none.
        logarithmic: whether the axis is logarithmic.
        line: the position of a reference line.
    """

    title: str
    axis: str
    value: Callable[[Mapping[str, Any]], float | None]
    logarithmic: bool = False
    line: float | None = None


def _error(row: Mapping[str, Any]) -> float | None:
    return row["error"]["relative"] if row.get("error") else None


QUANTITIES: Final = {
    "share": Quantity(
        "Share of each chip's peak", "share of the roofline", lambda row: row.get("share_of_peak"), line=1.0
    ),
    "time": Quantity("Time of a call", "microseconds", lambda row: row["seconds"]["median"] * 1e6, logarithmic=True),
    "over-stock": Quantity(
        "Speed over stock XLA on the same chip",
        "stock's time over this one's",
        lambda row: row.get("speed_over_stock"),
        logarithmic=True,
        line=1.0,
    ),
    "error": Quantity("Distance from float64", "relative error", _error, logarithmic=True),
}
"""Quantities by the names of their pictures."""


def pictures(comparison: Comparison) -> list[str]:
    """The quantities that the results have. Times are shown only if no device has a known peak to state shares of."""
    names = [name for name in QUANTITIES if _points(comparison, QUANTITIES[name])]
    return [name for name in names if name != "time" or "share" not in names]


def plot(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes a PNG of each quantity and returns the paths.

    Raises:
        OSError: the folder cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in pictures(comparison):
        figure = _drawn(comparison, QUANTITIES[name], _INK)
        figure.set_facecolor("white")
        figure.suptitle(QUANTITIES[name].title, x=0.02, ha="left", fontsize=14, fontweight="bold", color=_INK)
        files.append(folder / f"compare-{name}.png")
        FigureCanvasAgg(figure)
        figure.savefig(files[-1], format="png", dpi=160)
    return files


def html(comparison: Comparison) -> str:
    """Returns the report as a self-contained page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("detjax.bench", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    results = [_result(label, result) for label, result in comparison.results.items()]
    operations = {name: [_line(comparison, line) for line in lines] for name, lines in comparison.operations.items()}
    *others, last = dict.fromkeys(result.chip for result in comparison.results.values())
    return environment.get_template("report.html").render(
        title=f"{', '.join(others)} and {last}" if others else last,
        verdict=comparison.verdict,
        broken=[f"{line.operation} {line.name}: {bits.first} and {bits.second}" for line, bits in comparison.broken],
        results=results,
        counts=_counts(comparison),
        pictures=[(QUANTITIES[name].title, _svg(comparison, QUANTITIES[name])) for name in pictures(comparison)],
        operations=operations,
        fields=_fields(comparison),
        missing=comparison.missing,
        warnings=comparison.warnings,
    )


def _result(label: str, result: Result) -> dict[str, Any]:
    failed = sum("failed" in row for row in result.rows.values())
    return {
        "label": label,
        "color": _color(label),
        "compiled": COMPILED if result.kind == "compiled" else None,
        "has_peak": result.peak is not None,
        "file": Path(result.file).name,
        "chip": result.chip,
        "facts": {
            "device": result.device["kind"],
            "backend": result.backend,
            "fingerprint": result.digest,
            "cases": f"{len(result.rows)}" + (f", {failed} without a result" if failed else ""),
            "sizes": "small" if result.settings.get("small") else "popular models",
            "created": result.created.replace("T", " ").replace("+00:00", " UTC"),
            "commit": result.commit,
            "time": result.settings.get("timer") if result.kind == "measured" else None,
            "peak": _peak(result),
        },
    }


def _peak(result: Result) -> str:
    if result.peak is None:
        return "unknown for this device, so no shares"
    flops, size = result.peak["flops"] / 1e12, result.peak["bytes"] / 1e9
    return f"{flops:,.0f} TFLOP/s in bfloat16, {size:,.0f} GB/s"


def _counts(comparison: Comparison) -> list[tuple[str, str]]:
    """The headline numbers at the top, each with its label."""
    pairs = [bits for _, bits in comparison.pairs]
    promised = [bits for bits in pairs if bits.promised]
    counts = [(f"{sum(bits.equal for bits in promised)} of {len(promised)}", "promised bits equal")] if promised else []
    rest = [bits for bits in pairs if not bits.promised]
    if rest:
        counts.append((f"{sum(bits.equal for bits in rest)} of {len(rest)}", "equal without a promise"))
        largest = [bits.ulp for bits in rest if bits.ulp is not None]
        counts += [(f"{max(largest)} ulp", "largest distance")] if largest else []
    for label, result in comparison.measured.items():
        ratios = [row["speed_over_stock"] for row in result.rows.values() if row.get("speed_over_stock")]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            counts.append((f"{mean:.2f} ×", f"{label}: of stock's speed, geometric mean"))
    return counts


def _line(comparison: Comparison, line: Line) -> dict[str, Any]:
    cells = {label: _cell(result, line.cells.get(label)) for label, result in comparison.results.items()}
    return {"name": line.name, "cells": cells, "bits": [_chip(bits) for bits in line.bits]}


def _cell(result: Result, row: Mapping[str, Any] | None) -> dict[str, Any]:
    if row is None:
        return {"missing": "missing"}
    if "failed" in row:
        return {"missing": "refused" if row.get("refused") else "failed", "why": row["failed"]}
    if result.kind == "compiled":
        memory = sum(row["memory"].get(name) or 0 for name in ("argument", "temp"))
        return {"compiled": f"compiled; {_size(memory)}"}
    share, stock, error = row.get("share_of_peak"), row.get("speed_over_stock"), _error(row)
    return {
        "time": _time(row["seconds"]["median"]),
        "spread": f"spread of rounds: {row['seconds']['spread']:.0%}",
        "disturbed": row["seconds"]["spread"] > MUCH_SPREAD,
        "share": None if share is None else f"{share:.0%}",
        "width": 0 if share is None else f"{min(share, 1) * 100:.1f}",
        "stock": None if stock is None else f"{stock:.2f}",
        "slow": stock is not None and stock < 0.93,
        "error": None if error is None else f"{error:.0e}" if error else "0",
    }


def _chip(bits: Bits) -> dict[str, str]:
    kind = "none" if bits.missing else "bad" if bits.broken else "good" if bits.promised else "far"
    # The chip shows the pair before the text.
    text = "equal" if bits.equal else bits.text.removesuffix(f" from {bits.first}").replace(f" to {bits.first}:", ":")
    return {"kind": kind, "pair": f"{bits.first} {bits.second}", "text": text, "why": bits.missing or bits.text}


def _fields(comparison: Comparison) -> dict[str, list[tuple[str, list[str]]]]:
    """The fingerprints' fields with their values, split into different and equal ones."""
    fields: dict[str, list[tuple[str, list[str]]]] = {"differ": [], "equal": []}
    values = [result.fingerprint for result in comparison.results.values()]
    for name in values[0]:
        kind = "differ" if name in comparison.differing_fields else "equal"
        shown = [str(fingerprint[name]) for fingerprint in values]
        fields[kind].append((name, shown if kind == "differ" else shown[:1]))
    return fields


def _time(seconds: float) -> str:
    microseconds = seconds * 1e6
    return f"{microseconds:,.0f}" if microseconds >= 1000 else f"{microseconds:.3g}"


def _size(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def _color(label: str) -> str:
    return COLORS[(ord(label) - ord("A")) % len(COLORS)]


def _points(comparison: Comparison, quantity: Quantity) -> list[tuple[str, str, float]]:
    """The operation, result label and value of each case that has a value."""
    points = []
    for line in comparison.lines:
        for label in comparison.measured:
            row = line.cells.get(label)
            value = None if row is None or "failed" in row else quantity.value(row)
            if value is not None and (value > 0 or not quantity.logarithmic):
                points.append((line.operation, label, value))
    return points


def _drawn(comparison: Comparison, quantity: Quantity, ink: str) -> Figure:
    """A strip for each operation, with a dot for each case."""
    points = _points(comparison, quantity)
    operations = list(dict.fromkeys(operation for operation, _, _ in points))
    labels = list(dict.fromkeys(label for _, label, _ in points))
    height = 0.5 * len(operations) + 1.25
    figure = Figure(figsize=(5.6, height), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    for place, operation in enumerate(operations):
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color=_GREY, alpha=0.09, linewidth=0)
        for index, label in enumerate(labels):
            values = [value for *key, value in points if key == [operation, label]]
            y = place + (index - (len(labels) - 1) / 2) * min(0.24, 0.8 / len(labels))
            axes.plot(values, [y] * len(values), "o", color=_color(label), markersize=6, alpha=0.75, markeredgewidth=0)
    axes.set_ylim(len(operations) - 0.5, -0.5)
    axes.set_yticks(range(len(operations)), [name.replace("_", " ") for name in operations])
    axes.set_xlabel(quantity.axis)
    _scaled(axes, quantity, [value for _, _, value in points])
    if quantity.line is not None:
        axes.axvline(quantity.line, color=ink, linewidth=1, alpha=0.7)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=_GREY, alpha=0.3, linewidth=0.7)
    axes.tick_params(length=0, colors=ink, labelsize=11)
    axes.xaxis.label.set_color(ink)
    handles = [Line2D([], [], marker="o", linestyle="", color=_color(label), markersize=7) for label in labels]
    chips = {label: comparison.results[label].chip for label in labels}
    names = [f"{label}: {chip if len(chip) <= 34 else chip[:33] + '…'}" for label, chip in chips.items()]
    figure.legend(handles, names, loc="outside upper left", ncols=3, frameon=False, labelcolor=ink, fontsize=11)
    return figure


def _scaled(axes: Any, quantity: Quantity, values: Sequence[float]) -> None:
    if not quantity.logarithmic:
        axes.set_xlim(0, max(1.05, *values))
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        return
    if quantity.line is None:
        axes.set_xscale("log")
        return
    axes.set_xscale("log", base=2)
    reach = max(2.0, *(max(value, 1 / value) for value in values)) * 1.15
    axes.set_xlim(1 / reach, reach)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ×" if value >= 1 else f"1/{1 / value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _svg(comparison: Comparison, quantity: Quantity) -> Markup:
    """The plot as an SVG element in the page's text colour."""
    buffer = io.StringIO()
    # Keep text as text, and make the file reproducible.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": quantity.title, "font.family": "sans-serif"}):
        _drawn(comparison, quantity, _THEMED).savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace(_THEMED, "currentColor")
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1))
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{quantity.title}"', 1)
    return Markup(svg)
