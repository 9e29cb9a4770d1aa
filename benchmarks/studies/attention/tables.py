"""The tables and lines that the attention benchmark prints."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.studies.attention.cells import BOTH, FORWARD, KINDS, OURS, RIVALS, SHUFFLED


def ratios(cells: Iterable[dict[str, Any]], kind: str, rival: str) -> list[float]:
    """Our speed over the rival's, of the cells in which both were measured."""
    return [cell["ratios"][kind][rival] for cell in cells if rival in cell["ratios"].get(kind, {})]


def geometric_means(cells: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Geometric means of our speed over each rival's, by kind of time."""
    means = {}
    for kind in kinds:
        by_rival = {rival: ratios(cells, kind, rival) for rival in RIVALS}
        means[kind] = {rival: round(statistics.geometric_mean(r), 4) for rival, r in by_rival.items() if r}
    return means


def time_table(title: str, cells: Sequence[dict[str, Any]], kinds: Sequence[str], rates: str) -> Table:
    """A line for each cell and kind of time. A dash stands for what was not measured."""
    table = Table("requests × tokens", "time", title=title, padding=(0, 1), box=None)
    names = [name for name in (OURS, SHUFFLED, *RIVALS) if any(name in c["seconds"][k] for c in cells for k in kinds)]
    rivals = [name for name in names if name in RIVALS]
    headings = [f"{name}, µs" for name in names] + [f"/ {name}" for name in rivals] + [f"{n}, {rates}" for n in names]
    for heading in headings:
        table.add_column(heading, justify="right")
    for cell in cells:
        for kind in kinds:
            seconds, over = cell["seconds"][kind], cell["ratios"].get(kind, {})
            times = [_number(seconds[name] * 1e6 if name in seconds else None, ".1f") for name in names]
            quotients = [_number(over.get(name), ".3f") for name in rivals]
            speeds = [_number(_rates(cell, kind).get(name), ".0f") for name in names]
            table.add_row(cell["case"] if kind == kinds[0] else "", kind, *times, *quotients, *speeds)
    return table


def _rates(cell: dict[str, Any], kind: str) -> Mapping[str, float]:
    """Gigabytes or teraflops a second by implementation. Those of a backward cell belong to the difference alone."""
    rates = cell["gigabytes_per_second"][kind] if "gigabytes_per_second" in cell else cell["teraflops"]
    return {} if kind in (FORWARD, BOTH) else rates


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def missing_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What is missing from which cells, each reason once."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for missing in cell["missing"].values():
            for name, why in missing.items():
                cases = by_reason.setdefault((name, why), [])
                if cell["case"] not in cases:
                    cases.append(cell["case"])
    return [
        f"{name} is missing from {'all cells' if len(cases) == len(cells) else '; '.join(cases)}: {why}"
        for (name, why), cases in by_reason.items()
    ]


def show(content: dict[str, Any]) -> None:
    """Prints the tables, and the comparison of bits last."""
    console = Console(width=170, highlight=False)
    for section in KINDS:
        if section in content:
            _show_section(console, section, content[section], content["summary"][section])
    if "accuracy" in content:
        accuracy = content["accuracy"]
        listed = ", ".join(f"{name} {error:.3e}" for name, error in accuracy["relative_error"].items())
        missing = [f"{name} is missing: {why}" for name, why in accuracy["missing"].items()]
        console.print(f"relative error to float64, {accuracy['case']}: {listed}", *missing, sep="\n", markup=False)
    if "bits" in content:
        _show_bits(console, content["bits"])


def _show_section(
    console: Console, section: str, cells: Sequence[dict[str, Any]], summary: Mapping[str, Mapping[str, float]]
) -> None:
    kinds = KINDS[section]
    rates = "GB/s" if section in ("decode", "quantized", "latents") else "TFLOP/s"
    console.print(time_table(f"{section}; ratios are our speed over theirs", cells, kinds, rates))
    for line in missing_lines(cells):
        console.print(line, markup=False)
    for kind, means in summary.items():
        if means:
            listed = ", ".join(f"{mean:.3f} of {name}" for name, mean in means.items())
            console.print(f"geometric mean, {kind}: {listed}")
    orders = [cell["shuffled_over_contiguous"] for cell in cells if "shuffled_over_contiguous" in cell]
    for kind in kinds:
        over = [order[kind] for order in orders if kind in order]
        if over:
            console.print(f"shuffled pages over contiguous ones, {kind}: {min(over):.3f} to {max(over):.3f}")
    console.print("")


def _show_bits(console: Console, bits: dict[str, Any]) -> None:
    total = sum(bits["tokens"].values())
    compared = (
        f"{total} tokens in {len(bits['tokens'])} ways, {bits['repeats']} repeated runs, {bits['options']} options"
    )
    verdict = f"{len(bits['differences'])} with different bits" if bits["differences"] else "no bit differs"
    console.print(f"bits: {compared} compared in {bits['seconds']:.0f} s: {verdict}")
    for word in ("refused", "failed"):
        for what, why in bits[word].items():
            console.print(f"{word}: {what}: {why}", markup=False)
