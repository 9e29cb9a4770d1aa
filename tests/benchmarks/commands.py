"""The commands that measure."""

import re

from benchmarks.__main__ import studies
from detjax.bench.__main__ import app

_COMMANDS = {
    "benchmarks": studies().keys(),
    "detjax.bench": set(app),
}


def is_command(text: str) -> bool:
    """Returns whether a text begins with a command that measures."""
    match = re.match(r"python -m (benchmarks|detjax\.bench) (\w+)", text)
    return match is not None and match[2] in _COMMANDS[match[1]]
