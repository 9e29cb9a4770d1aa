"""The plots of the matmul benchmark: our speed over XLA's by number of tokens, and in every cell."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize

from benchmarks import plots
from benchmarks.rivals import TORCH, XLA
from benchmarks.studies.matmul.summary import by_linear, geometric_mean, ratios


def draw_over_tokens(content: dict[str, Any], file: Path) -> None:
    """Writes a PNG of our speed over XLA's by number of tokens: a line per product, and the geometric means."""
    cells, device = content["cells"], content["fingerprint"]["device_kind"]
    lines = by_linear(cells)
    sizes = sorted({cell["m"] for cell in cells})
    mean = geometric_mean(ratios(cells, XLA))
    title = f"detjax's matmul runs at {mean:.2f} of the speed of XLA's autotuned dot"
    subtitle = f"geometric mean of {len(cells)} products of bfloat16 linear layers; {device}"
    figure = plots.titled_figure(5.2, title, subtitle)
    axes = figure.add_axes((0.075, 0.12, 0.905, 0.73))
    plots.clear_frame(axes)
    for index, line in enumerate(lines.values()):
        label = f"one linear layer ({len(lines)})" if index == 0 else None
        axes.plot(list(line), ratios(line.values(), XLA), color=plots.LIGHT, linewidth=1, label=label, zorder=2)
    for rival, color, style, width in ((XLA, plots.OURS, "-", 3.2), (TORCH, plots.THEIRS, "--", 2.0)):
        if ratios(cells, rival):
            means = [geometric_mean(ratios((line[m] for line in lines.values()), rival)) for m in sizes]
            name = {XLA: "over XLA", TORCH: "over torch.mm"}[rival]
            axes.plot(
                sizes, means, color=color, linestyle=style, linewidth=width, zorder=3, label=f"geometric mean {name}"
            )
    axes.axhline(1, color=plots.INK, linewidth=1.2, zorder=2.5)
    _scale_axes(axes, sizes, ratios(cells, XLA))
    axes.set_xlabel("tokens per call", fontsize=10.5, color=plots.INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=plots.INK, loc="best")
    plots.write_png(figure, file)


def _scale_axes(axes: Axes, sizes: Sequence[int], speeds: Sequence[float]) -> None:
    """Sets logarithmic axes with round numbers at the ticks."""
    axes.set_xscale("log", base=2)
    # Labels closer than powers of two would overlap.
    axes.set_xticks([m for m in sizes if m & (m - 1) == 0] or sizes, minor=False)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda m, _: f"{m:g}")
    axes.set_yscale("log")
    low, high = min(0.9, *speeds), max(1.2, *speeds)
    steps = (0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 6, 10)
    axes.set_ylim(low * 0.98, high * 1.02)
    axes.set_yticks([step for step in steps if low * 0.98 <= step <= high * 1.02], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}×")
    axes.grid(axis="y", color=plots.GRID, linewidth=0.8, zorder=0)


def draw_cells(content: dict[str, Any], file: Path) -> None:
    """Writes a PNG of our speed over XLA's in every cell, coloured by its distance from 1."""
    cells, device = content["cells"], content["fingerprint"]["device_kind"]
    lines = by_linear(cells)
    sizes = sorted({cell["m"] for cell in cells})
    grid = np.array([[line[m]["ratios"][XLA] for m in sizes] for line in lines.values()])
    height = 1.15 + 0.27 * len(lines)
    faster = int((grid >= 1).sum())
    title = f"detjax's matmul is as fast as XLA's autotuned dot or faster in {faster} of {grid.size} cells"
    figure = plots.titled_figure(
        height, title, f"XLA's time over detjax's; bfloat16 linear layers N×K by tokens per call; {device}"
    )
    axes = figure.add_axes((0.19, 0.08 / height, 0.8, 0.27 * len(lines) / height))
    colors = LinearSegmentedColormap.from_list("speed", [plots.THEIRS, "#ffffff", plots.OURS])
    # Logarithms put twice as fast and half as fast at equal distances from white.
    axes.imshow(np.log2(grid), cmap=colors, norm=Normalize(-0.5, 0.5), aspect="auto")
    for (i, j), ratio in np.ndenumerate(grid):
        color = "white" if abs(np.log2(ratio)) > 0.38 else plots.INK
        axes.text(j, i, f"{ratio:.2f}", ha="center", va="center", fontsize=8.5, color=color)
    plots.clear_frame(axes)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(sizes)), [str(m) for m in sizes])
    axes.set_yticks(range(len(lines)), list(lines))
    plots.write_png(figure, file)
