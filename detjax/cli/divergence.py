"""Measure how far the logprobs of two engines are apart, and compare that with the thresholds that practitioners use.

The exit code is 1 if a threshold is not kept.
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
        a: logprobs of one engine: of detjax, vLLM, SGLang or OpenAI's API, one answer in each line.
        b: logprobs of another engine: of the same requests, in the same order.
        as_json: print JSON with all numbers.
    """
    comparison = audit.compare(audit.read_logprobs(a), audit.read_logprobs(b))
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        Console(highlight=False).print(comparisons.table(comparison))
    return int(bool(comparison.beyond()))
