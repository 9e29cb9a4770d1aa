"""The summary of the matmul benchmark."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from benchmarks.rivals import TORCH, XLA

SHORT: Final = 0.93
"""Cells below this speed over XLA's are listed."""


def ratios(cells: Iterable[dict[str, Any]], rival: str) -> list[float]:
    """Returns our speed over the rival's in the cells that measured it."""
    return [cell["ratios"][rival] for cell in cells if rival in cell["ratios"]]


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean; NaN without values."""
    return statistics.geometric_mean(values) if values else float("nan")


def linear_name(cell: dict[str, Any]) -> str:
    """Returns the name and shape of a cell's linear layer."""
    return f"{cell['linears'][0].split()[-1]} {cell['n']}×{cell['k']}"


def by_linear(cells: Iterable[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Returns cells by the linear layer's name and the number of tokens."""
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        lines.setdefault(linear_name(cell), {})[cell["m"]] = cell
    return lines


def summarized(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns geometric means, the slowest cell, and the cells slower than XLA."""
    ordered = sorted(cells, key=lambda cell: cell["ratios"][XLA])

    def line(cell: dict[str, Any]) -> str:
        rates = f"{cell['gigabytes_per_second']:.0f} GB/s, {cell['teraflops']:.0f} TFLOP/s"
        over = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in cell["ratios"].items())
        return f"{linear_name(cell)}, {cell['m']} tokens: {over}; {rates}; {cell.get('schedule', 'no schedule')}"

    means = {rival: geometric_mean(ratios(cells, rival)) for rival in (XLA, TORCH) if ratios(cells, rival)}
    short = [line(cell) for cell in ordered if cell["ratios"][XLA] < SHORT]
    return {"cells": len(cells), "geometric_means": means, "lowest": line(ordered[0]), "short": short}
