"""The summary of the matmul benchmark."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from benchmarks.rivals import TORCH, XLA

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
