"""Formulas as SVG: the site loads no JavaScript for them, and nothing from a network."""

import functools
import html
import re
from typing import Final

from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.path import Path
from matplotlib.textpath import TextPath

_ARITHMATEX = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<formula>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
_FONT: Final = FontProperties(size=10, math_fontfamily="cm")
_COMMANDS: Final = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
_OTHER_NAMES: Final = {r"\lVert": r"\|", r"\rVert": r"\|", r"\tfrac": r"\frac", r"\dfrac": r"\frac"}
"""Commands of LaTeX that matplotlib knows by another name."""


@functools.cache
def svg(formula: str) -> str:
    """Returns a formula in LaTeX as an SVG image whose color is the text's, and whose size follows the text's.

    Raises:
        ValueError: matplotlib cannot read the formula.
    """
    source = " ".join(formula.split())
    for name, known in _OTHER_NAMES.items():
        source = re.sub(re.escape(name) + r"(?![a-zA-Z])", lambda _, known=known: known, source)
    source = re.sub(r"\\sqrt\s+(\w)", r"\\sqrt{\1}", source)  # LaTeX takes one letter without braces, too
    source = f"${source}$"
    width, height, depth, _, _ = MathTextParser("path").parse(source, dpi=72, prop=_FONT)
    outline = TextPath((0, 0), source, prop=_FONT)
    parts = []
    for vertices, code in outline.iter_segments(curves=True, simplify=False):
        if code == Path.CLOSEPOLY:
            parts.append("Z")
        else:
            points = " ".join(f"{x:.2f},{-y:.2f}" for x, y in vertices.reshape(-1, 2))
            parts.append(f"{_COMMANDS[code]}{points}")
    label = html.escape(formula, quote=True)
    return (
        f'<svg class="formula" role="img" aria-label="{label}" fill="currentColor" '
        f'viewBox="-0.3 {-height + depth - 0.3:.2f} {width + 0.6:.2f} {height + 0.6:.2f}" '
        f'style="width:{(width + 0.6) / 10:.3f}em;height:{(height + 0.6) / 10:.3f}em;'
        f'vertical-align:{-depth / 10:.3f}em">'
        f'<path d="{"".join(parts)}"/></svg>'
    )


def with_images(page: str, *, strict: bool = True) -> str:
    """Returns HTML with an image for each formula that the extension arithmatex marked.

    Raises:
        ValueError: matplotlib cannot read a formula, and `strict` is true; else its LaTeX is shown.
    """

    def replaced(match: re.Match[str]) -> str:
        # What is made of a notebook's text is escaped twice.
        formula = html.unescape(html.unescape(match["formula"])).strip()
        try:
            image = svg(formula)
        except ValueError:
            if strict:
                raise
            image = f"<code>{html.escape(formula)}</code>"
        return f'<{match["tag"]} class="math">{image}</{match["tag"]}>'

    return _ARITHMATEX.sub(replaced, page)
