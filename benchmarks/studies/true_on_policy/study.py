"""One run of reinforcement learning five times, with samplers that increasingly differ from the trainer.

    python -m benchmarks true_on_policy --out benchmarks/results/true-on-policy-cpu.json

detjax's small policy learns prompts that it solves 20 to 80% of the time: with stock numerics on both sides, without
and with truncated importance weights; with detjax; and with detjax and a 4-bit KV cache in the sampler only, without
and with truncated weights. Every step's reward, divergences, gradient norm and entropy are recorded, and the share of
prompts that the exact model solves greedily. A plot is written next to the result. On a GPU `--processes` runs several
arms concurrently, since one leaves the GPU mostly idle; XLA then compiles stock programs without autotuning, which
would take longer than the runs.

The exit code is 1 if sampler and trainer differ in a bit with detjax, or if they do not with stock numerics.
"""

import math
from typing import Annotated

from benchmarks.studies.true_on_policy.experiment import SMALL, Sizes, draw, measured, problems
from benchmarks.study import Result, Run
from detjax.bench import command_line
from detjax.cli.options import Option, usage_errors


def study(
    run: Run,
    *,
    seeds: Annotated[int, Option("Runs of each arm.", minimum=1)] = 1,
    steps: Annotated[int, Option("Steps of a run.", minimum=1)] = 150,
    samples: Annotated[int, Option("Rollouts of a step.", minimum=1)] = 64,
    learning_rate: Annotated[float, Option("Step size of AdamW.")] = 1e-4,
    processes: Annotated[int, Option("Processes that share the runs.", minimum=1)] = 1,
    seconds: Annotated[float, Option("Time limit after which runs end early, in seconds.")] = math.inf,
) -> Result:
    with usage_errors():
        sizes = Sizes(seeds=seeds, steps=steps, samples=samples, learning_rate=learning_rate)
    sizes = SMALL if run.small else sizes
    result = measured(sizes, processes=processes, seconds=seconds, report=command_line.print_line)
    return Result(result, "; ".join(problems(result)))


PICTURES = {"": draw}
