"""The histogram of completions."""

import textwrap
import warnings
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from detjax.demo.experiment import LARGEST_BATCH, Result, Tally
from detjax.demo.report import as_text, counted
from detjax.models import Tokenizer

_STOCK: Final = "#d1603d"
_DETJAX: Final = "#2a7f8e"
_INK: Final = "#262626"
_GREY: Final = "#767676"
_MAX_TEXTS: Final = 4
"""Maximum number of bars in a panel that leaves room for the completions below them."""
_LINES: Final = 7
"""Maximum number of lines of a completion."""
_CHARACTERS: Final = 66
"""Characters in a line of text across a panel."""


def draw_histogram(result: Result, tokenizer: Tokenizer | None, path: Path) -> None:
    """Writes a PNG of the count of each unique completion, with stock XLA on the left and with detjax on the right."""
    figure = Figure(figsize=(11, 6), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.78, bottom=0.25, wspace=0.08)
    stock, detjax = len(result.stock.counts), len(result.detjax.counts)
    headline = f"To one question stock XLA gave {counted(stock, 'answer')}, detjax {detjax}"
    setting = (
        f"asked {counted(result.stock.asks, 'time')} at temperature 0, within the same "
        f"{counted(result.loads, 'batch', 'batches')} of 1 to {LARGEST_BATCH} requests\n"
        f"{result.fingerprint.device_kind}"
    )
    figure.text(0.07, 0.93, headline, fontsize=18, fontweight="bold", color=_INK)
    figure.text(0.07, 0.915, setting, fontsize=10.5, color=_GREY, va="top", linespacing=1.4)
    _draw_panel(panels[0], "stock XLA", result.stock, _STOCK, tokenizer)
    _draw_panel(panels[1], "detjax", result.detjax, _DETJAX, tokenizer)
    panels[0].set_ylabel("answers", fontsize=11.5, color=_INK)
    panels[0].set_ylim(0, 1.12 * max(result.stock.commonest, result.detjax.commonest))
    panels[0].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    with warnings.catch_warnings():
        # A model may answer in a script that matplotlib's fonts lack.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, format="png")


def _draw_panel(axes: Axes, name: str, tally: Tally, color: str, tokenizer: Tokenizer | None) -> None:
    """Draws bars with their counts above them and, if there is room, the completions below."""
    counts = [count for _, count in tally.counts]
    bars = axes.bar(range(len(counts)), counts, width=0.62 if len(counts) > 1 else 0.3, color=color, zorder=2)
    title = f"{name}: {counted(len(counts), 'completion')}, {counted(tally.bit_patterns, 'set')} of logprobs"
    labelled = len(counts) if len(counts) <= _MAX_TEXTS else 1
    labels = [f"{count} ×" for count in counts[:labelled]] + [""] * (len(counts) - labelled)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, labels=labels, fontsize=12.5, color=_INK, padding=4, bbox=background, zorder=1)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=color, pad=10)
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8, zorder=0)
    axes.tick_params(axis="y", length=0, labelsize=10.5, labelcolor=_GREY)
    if len(counts) > _MAX_TEXTS:
        axes.set_xlabel(f"{len(counts)} unique completions, most frequent first", fontsize=11.5, color=_INK, labelpad=8)
        axes.set_xticks([])
        return
    texts = [_verse(as_text(tokens, tokenizer), _CHARACTERS // max(len(counts), 2)) for tokens, _ in tally.counts]
    axes.set_xticks(
        range(len(counts)),
        texts,
        fontsize=8.5,
        color=_INK,
        fontfamily="DejaVu Serif",
        style="italic",
        parse_math=False,
    )
    axes.tick_params(axis="x", length=0, pad=7)


def _verse(text: str, width: int) -> str:
    """Returns the first `_LINES` lines of a text, wrapped to `width`."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    return "\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 1], "…"])
