"""The plot style of all benchmarks."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

OURS: Final = "#2a7f8e"
THEIRS: Final = "#d1603d"
LIGHT: Final = "#b9d3d7"
INK: Final = "#262626"
GREY: Final = "#767676"
GRID: Final = "#e4e4e4"


def titled_figure(height: float, title: str, subtitle: str) -> Figure:
    """Returns a figure 9 inches wide and `height` inches high, with a title and a subtitle."""
    figure = Figure(figsize=(9, height), dpi=150, facecolor="white")
    figure.text(0.02, 1 - 0.14 / height, title, fontsize=13, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.44 / height, subtitle, fontsize=9.5, color=GREY, va="top")
    return figure


def clear_frame(axes: Axes) -> None:
    """Removes the frame and tick marks, and sets the size and colour of tick labels."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9.5, labelcolor=INK)


def write_png(figure: Figure, file: Path) -> None:
    """Writes a figure as PNG with a palette of 128 colours, a third of the size."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128).save(file, optimize=True)
