"""Diagrams as SVG, made from text.

    python -m tools.site.diagrams docs/diagrams/layers.txt > layers.svg

Each line of a diagram's file is a row of boxes, an arrow, or a comment:

    # Who calls whom
    engine: Engine / batches requests | rl: Trainer
    ops: Operations
    engine -> ops: a step
    rl -> ops

Boxes of a row are separated by `|`; each has a name, a colon, and its lines of text, separated by ` / `. The first line
is set in bold if there are several. An empty row (`-`) leaves space. Arrows go from box to box, in any direction.
"""

import html
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WIDTH: Final = 440
"""Pixels, at which the text is as large as the page's: narrow enough for a phone."""
MARGIN: Final = 4
GAP: Final = 14
LINE: Final = 16
ROW_GAP: Final = 34

STYLE: Final = """
.diagram rect { fill: var(--md-code-bg-color, #f5f5f5); stroke: var(--md-primary-fg-color, #2a7f8e); stroke-width: 1.2; }
.diagram text { fill: var(--md-default-fg-color, #222); font: 12px sans-serif; text-anchor: middle; }
.diagram .head { font-weight: bold; }
.diagram .label { font-size: 11px; font-style: italic; text-anchor: start; }
.diagram path { stroke: var(--md-default-fg-color--light, #777); stroke-width: 1.4; fill: none; }
.diagram .tip { fill: var(--md-default-fg-color--light, #777); stroke: none; }
"""


@dataclass(frozen=True)
class Box:
    """A box with its lines of text, and its place in pixels."""

    lines: tuple[str, ...]
    x: float
    y: float
    width: float
    height: float


def drawn(source: str, alt: str) -> str:
    """Returns a diagram as SVG.

    Args:
        source: the diagram's text.
        alt: what it shows, for readers who do not see it.

    Raises:
        ValueError: a line is neither a row of boxes nor an arrow between boxes that exist.
    """
    lines = [line.strip() for line in source.splitlines() if line.strip() and not line.startswith("#")]
    arrows = [line for line in lines if "->" in line]
    boxes, y = _boxes([line for line in lines if "->" not in line])
    parts = [_box(box) for box in boxes.values()]
    for arrow in arrows:
        match = re.fullmatch(r"(\w+) -> (\w+)(?:: (.*))?", arrow)
        if match is None or not {match[1], match[2]} <= set(boxes):
            raise ValueError(f"{arrow!r} is no arrow between two of the boxes {', '.join(boxes)}")
        parts.append(_arrow(boxes[match[1]], boxes[match[2]], match[3] or ""))
    return (
        f'<svg class="diagram" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        f'aria-label="{html.escape(alt, quote=True)}"><style>{STYLE}</style>{"".join(parts)}</svg>'
    )


def _boxes(rows: list[str]) -> tuple[dict[str, Box], float]:
    boxes: dict[str, Box] = {}
    y: float = MARGIN
    for row in rows:
        if row == "-":
            y += GAP
            continue
        cells = []
        for cell in row.split("|"):
            name, colon, text = cell.strip().partition(":")
            if not colon or not name.isidentifier():
                raise ValueError(f"{cell.strip()!r} is no box; accepted: a name, a colon and text")
            cells.append((name, tuple(line.strip() for line in text.split(" / "))))
        width = (WIDTH - 2 * MARGIN - GAP * (len(cells) - 1)) / len(cells)
        height = LINE * max(len(lines) for _, lines in cells) + 14
        for index, (name, lines) in enumerate(cells):
            boxes[name] = Box(lines, MARGIN + index * (width + GAP), y, width, height)
        y += height + ROW_GAP
    return boxes, y - ROW_GAP + MARGIN


def _box(box: Box) -> str:
    middle = box.x + box.width / 2
    top = box.y + (box.height - LINE * len(box.lines)) / 2 + 12
    texts = [
        f'<text x="{middle:.1f}" y="{top + LINE * index:.1f}"{" class=" + chr(34) + "head" + chr(34) if not index and len(box.lines) > 1 else ""}>'
        f"{html.escape(line)}</text>"
        for index, line in enumerate(box.lines)
    ]
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6"/>'
        + "".join(texts)
    )


def _arrow(start: Box, end: Box, label: str) -> str:
    if abs(start.y - end.y) < 1:
        forward = start.x < end.x
        x1, x2 = (start.x + start.width, end.x) if forward else (start.x, end.x + end.width)
        y1 = y2 = start.y + start.height / 2
    else:
        downward = start.y < end.y
        # Over the middle of what the two boxes have in common, if they have anything in common.
        left, right = max(start.x, end.x), min(start.x + start.width, end.x + end.width)
        common = (left + right) / 2 if left < right else None
        x1 = common or start.x + start.width / 2
        x2 = common or end.x + end.width / 2
        y1, y2 = (start.y + start.height, end.y) if downward else (start.y, end.y + end.height)
    dx, dy = x2 - x1, y2 - y1
    length = (dx * dx + dy * dy) ** 0.5
    ux, uy = dx / length, dy / length
    tip = f"{x2:.1f},{y2:.1f} {x2 - 8 * ux - 4 * uy:.1f},{y2 - 8 * uy + 4 * ux:.1f} {x2 - 8 * ux + 4 * uy:.1f},{y2 - 8 * uy - 4 * ux:.1f}"
    text = f'<text class="label" x="{(x1 + x2) / 2 + 7:.1f}" y="{(y1 + y2) / 2 + 4:.1f}">{html.escape(label)}</text>'
    return (
        f'<path d="M{x1:.1f},{y1:.1f} L{x2 - 6 * ux:.1f},{y2 - 6 * uy:.1f}"/><polygon class="tip" points="{tip}"/>'
        + (text if label else "")
    )


if __name__ == "__main__":
    print(drawn(Path(sys.argv[1]).read_text(), Path(sys.argv[1]).stem))
