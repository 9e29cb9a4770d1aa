"""Structured output: random JSON schemas answered alone and in a crowd, and tokens per second with constraints.

    python -m benchmarks structured --part answers --out benchmarks/results/structured-answers-h200.json
    python -m benchmarks structured --part speeds --out benchmarks/results/structured-h200.json

A model of one layer answers 1000 random schemas in sequence, and then 64 at a time: every answer must be valid, and the
bits must be equal. A whole model with random weights alternately generates with and without constraints.

`--small` runs on a CPU in seconds. The exit code is 1 if an answer is not valid, or if bits differ.
"""

import dataclasses
from typing import Annotated, Any

from benchmarks import study as options
from benchmarks.studies.structured import measures
from benchmarks.study import Result, Run

PARTS = {"answers": measures.answers_to_schemas, "speeds": measures.speeds}


def study(run: Run, *, part: Annotated[list[str], options.names(PARTS)]) -> Result:
    sizes = measures.SMALL if run.small else measures.Sizes()
    content: dict[str, Any] = {"sizes": dataclasses.asdict(sizes)} | {name: PARTS[name](sizes) for name in part}
    return Result(content, "; ".join(measures.problems(content["answers"])) if "answers" in part else "")
