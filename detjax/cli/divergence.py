"""Measure how much the logprobs of two engines diverge, and compare that with common thresholds.

The exit code is 1 if a threshold is exceeded.
"""

import json
from pathlib import Path
from typing import Annotated

from rich.console import Console

from detjax import audit
from detjax.audit.comparison import compare as comparisons
from detjax.cli.options import Option, command


@command
def divergence(a: Path, b: Path, /, *, as_json: Annotated[bool, Option(name="--json")] = False) -> int:
    """Compares logprobs.

    Args:
        a: logprobs from detjax, vLLM, SGLang or OpenAI's API, one answer per line.
        b: logprobs from another engine, for the same requests in the same order.
        as_json: print all numbers as JSON.
    """
    comparison = audit.compare(audit.read_logprobs(a), audit.read_logprobs(b))
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        Console(highlight=False).print(comparisons.table(comparison))
    return int(bool(comparison.beyond()))
