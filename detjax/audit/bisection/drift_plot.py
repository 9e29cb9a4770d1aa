"""Plots the difference between two runs, layer by layer."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detjax.audit.bisection.bisect import Bisection


def draw(result: Bisection, file: Path) -> None:
    """Draws a PNG of the relative difference after each layer; for traces from files, the share of unequal blocks."""
    measured = [drift.relative for drift in result.drifts]
    known = [x for x in measured if x is not None]
    sizes = known if known else [drift.blocks for drift in result.drifts]
    names = [" ".join((drift.layer or "(no name)", *map(str, drift.iterations))) for drift in result.drifts]
    figure = Figure(figsize=(9, 1.5 + 0.25 * len(names)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(sizes, range(len(names)), marker="o")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    if known and max(known) > 0:
        axes.set_xscale("symlog", linthresh=min(x for x in known if x > 0))
    axes.set_xlabel("relative difference after the layer" if known else "share of blocks that differ")
    axes.grid(alpha=0.3)
    figure.savefig(file, format="png")
