"""The summary of the attention benchmark."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.studies.attention.cells import RIVALS


def ratios(cells: Iterable[dict[str, Any]], kind: str, rival: str) -> list[float]:
    """Returns our speed over the rival's in the cells that measured both."""
    return [cell["ratios"][kind][rival] for cell in cells if rival in cell["ratios"].get(kind, {})]


def geometric_means(cells: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns geometric means of our speed over each rival's, by kind of time."""
    means = {}
    for kind in kinds:
        by_rival = {rival: ratios(cells, kind, rival) for rival in RIVALS}
        means[kind] = {rival: round(statistics.geometric_mean(r), 4) for rival, r in by_rival.items() if r}
    return means
