"""The frequency of Python's search for unreachable cycles of objects, chosen for processes that serve a model."""

import gc
from typing import Final

OBJECTS: Final = 20_000
"""New objects after which Python searches, more than a step of 1000 samples makes and drops."""


def collect_rarely() -> None:
    """Makes Python search for cycles after 20,000 new objects instead of 700, unless it is to search even less often.

    A step of many samples makes thousands of objects, and nearly all are freed when the next step's replace them. With
    Python's default, 1000 requests for 100 tokens each took 580 searches, which lasted half a second on a CPU host.
    With 20,000 they take fewer than 10. The threshold belongs to the process, so commands choose it, and an engine in
    somebody else's process does not.
    """
    first, *others = gc.get_threshold()
    if 0 < first < OBJECTS:
        gc.set_threshold(OBJECTS, *others)
