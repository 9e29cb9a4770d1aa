"""The plot of the attention benchmark: our speed over cuDNN's, a bar for each case."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks import plots
from benchmarks.studies.attention.cells import CUDNN
from benchmarks.studies.attention.summary import ratios


def draw(content: dict[str, Any], file: Path) -> bool:
    """Writes a PNG of prefill and decode, and returns False without cells to draw."""
    prefill, decode = content.get("prefill", []), content.get("decode", [])
    speeds = {"prefill": ratios(prefill, "kernels", CUDNN), "decode": ratios(decode, "step", CUDNN)}
    if not all(speeds.values()):
        return False
    means = " and ".join(f"{statistics.geometric_mean(values):.2f} ({name})" for name, values in speeds.items())
    device = content["fingerprint"]["device_kind"]
    height = 1.45 + 0.38 * max(len(prefill), len(decode))
    figure = plots.titled_figure(
        height,
        f"detjax's attention runs at {means} of the speed of cuDNN's",
        f"cuDNN's time over detjax's, requests × tokens; bfloat16, keys and values in pages; {device}",
    )
    bottom, share = 0.42 / height, (height - 1.42) / height
    axes = figure.add_axes((0.125, bottom, 0.35, share))
    _draw_panel(axes, "prefill, causal", prefill, [("kernels", "kernels", plots.OURS)])
    axes = figure.add_axes((0.62, bottom, 0.355, share))
    _draw_panel(axes, "decode", decode, [("kernels", "kernels alone", plots.LIGHT), ("step", "whole step", plots.OURS)])
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.01, 0.985),
        ncols=2,
        frameon=False,
        fontsize=9.5,
        labelcolor=plots.INK,
        columnspacing=1.2,
        handlelength=1.2,
    )
    plots.write_png(figure, file)
    return True


def _draw_panel(axes: Axes, title: str, cells: Sequence[dict[str, Any]], bars: Sequence[tuple[str, str, str]]) -> None:
    """Draws bars (kind of time, label, colour) for every cell, from top to bottom."""
    plots.clear_frame(axes)
    axes.set_title(title, fontsize=10.5, color=plots.INK, loc="left")
    height = 0.8 / len(bars)
    widest = max([1.0, *(ratio for kind, _, _ in bars for ratio in ratios(cells, kind, CUDNN))])
    for index, (kind, label, color) in enumerate(bars):
        for row, cell in enumerate(cells):
            y = row + (index - (len(bars) - 1) / 2) * height
            ratio = cell["ratios"].get(kind, {}).get(CUDNN)
            if ratio is None:
                axes.text(0.02 * widest, y, "not measured", va="center", fontsize=8.5, color=plots.GREY)
                continue
            axes.barh(y, ratio, height * 0.86, color=color, zorder=2, label=label if row == 0 else None)
            # At the bar's base, since at its end the number would often overlap the line at 1.
            ink = "white" if color == plots.OURS else plots.INK
            axes.text(0.02 * widest, y, f"{ratio:.2f}", va="center", fontsize=8.5, color=ink, zorder=4)
    axes.axvline(1, color=plots.INK, linewidth=1.2, zorder=3)
    axes.set_xlim(0, widest * 1.04)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.set_yticks(range(len(cells)), [cell["case"].replace(", ", "\n") for cell in cells])
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}×")
    axes.grid(axis="x", color=plots.GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
