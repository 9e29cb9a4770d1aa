"""The tables and the summary of the matmul benchmark."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.rivals import OURS, TORCH, XLA

SHORT: Final = 0.93
"""Cells below this speed over XLA's are listed."""


def ratios(cells: Iterable[dict[str, Any]], rival: str) -> list[float]:
    """Our speed over the rival's, of the cells in which it was measured."""
    return [cell["ratios"][rival] for cell in cells if rival in cell["ratios"]]


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; NaN of nothing."""
    return statistics.geometric_mean(values) if values else float("nan")


def linear_name(cell: dict[str, Any]) -> str:
    """The name and shape of the linear layer that a cell measures."""
    return f"{cell['linears'][0].split()[-1]} {cell['n']}×{cell['k']}"


def by_linear(cells: Iterable[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Cells by name of the linear layer and number of tokens."""
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        lines.setdefault(linear_name(cell), {})[cell["m"]] = cell
    return lines


def cell_table(cells: Sequence[dict[str, Any]], rivals: Sequence[str]) -> Table:
    """A line for each cell."""
    table = Table("product", title="device time; ratios are our speed over theirs", padding=(0, 1), box=None)
    rivals = [rival for rival in rivals if any(rival in cell["seconds"] for cell in cells)]
    headings = ["M", *(f"{name}, µs" for name in (OURS, *rivals)), *(f"/ {name}" for name in rivals), "GB/s", "TFLOP/s"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    table.add_column("XLA's kernels", overflow="ellipsis", no_wrap=True)
    for cell in cells:
        seconds = [f"{cell['seconds'][name] * 1e6:.1f}" for name in (OURS, *rivals)]
        over = [f"{cell['ratios'][name]:.3f}" for name in rivals]
        rates = [f"{cell['gigabytes_per_second']:.0f}", f"{cell['teraflops']:.0f}"]
        schedule = cell.get("schedule", "") + ("" if cell.get("tuned", True) else " (by rule)")
        name = cell.get("case") or linear_name(cell)
        table.add_row(name, str(cell["m"]), *seconds, *over, *rates, schedule, cell["xla_kernels"])
    return table


def ratio_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Our speed over XLA's: a line for each product, a column for each number of tokens."""
    lines = by_linear(cells)
    sizes = sorted({cell["m"] for cell in cells})
    table = Table("/ xla", padding=(0, 1, 0, 0), box=None)
    for m in sizes:
        table.add_column(str(m), justify="right", no_wrap=True)
    for name, line in lines.items():
        table.add_row(name, *(f"{line[m]['ratios'][XLA]:.2f}" for m in sizes))
    for rival in (XLA, TORCH):
        means = [geometric_mean(ratios((line[m] for line in lines.values()), rival)) for m in sizes]
        if any(rival in cell["ratios"] for cell in cells):
            table.add_row(f"geometric mean / {rival}", *(f"{mean:.2f}" for mean in means))
    return table


def summarized(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means, the slowest cell, and the cells that fall short of XLA's speed."""
    ordered = sorted(cells, key=lambda cell: cell["ratios"][XLA])

    def line(cell: dict[str, Any]) -> str:
        rates = f"{cell['gigabytes_per_second']:.0f} GB/s, {cell['teraflops']:.0f} TFLOP/s"
        over = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in cell["ratios"].items())
        return f"{linear_name(cell)}, {cell['m']} tokens: {over}; {rates}; {cell.get('schedule', 'no schedule')}"

    means = {rival: geometric_mean(ratios(cells, rival)) for rival in (XLA, TORCH) if ratios(cells, rival)}
    short = [line(cell) for cell in ordered if cell["ratios"][XLA] < SHORT]
    return {"cells": len(cells), "geometric_means": means, "lowest": line(ordered[0]), "short": short}


def show(content: dict[str, Any]) -> None:
    """Prints the tables, the summary last."""
    console = Console(width=170, highlight=False)
    console.print(cell_table(content["cells"], (XLA, TORCH)), "", cell_table(content["epilogues"], (XLA,)), "")
    console.print(ratio_table(content["cells"]), "")
    summary, bits = content["summary"], content["bits"]
    means = ", ".join(f"{mean:.3f} of {name}" for name, mean in summary["geometric_means"].items())
    console.print(f"geometric mean of {summary['cells']} cells: {means}\nlowest: {summary['lowest']}")
    console.print(f"{len(summary['short'])} cells below {SHORT} of XLA's speed", *summary["short"], sep="\n  ")
    if bits is not None:
        compared = f"{bits['anchor_rows']} anchor rows, {bits['schedules']} schedules, {bits['repeats']} repeated runs"
        verdict = f"{len(bits['differences'])} with different bits" if bits["differences"] else "no bit differs"
        console.print(f"bits: {compared} compared in {bits['seconds']:.0f} s: {verdict}")
