"""Decode steps with the kernels for the experts of few tokens switched on, against the same steps without them.

    python -m benchmarks expert_launches --out benchmarks/results/expert-launches-h100.json

`DETJAX_EXPERT_KERNELS` is read when a process begins, so each arm has a process. Both draw the same weights, tokens and
caches, and decode some tokens. Digests of all logits are compared, then steps are timed. The exit code is 1 if bits
differ, or if the switch changes no kernel on Hopper GPUs.

Models have a few layers. One program of each batch is all that is compiled, in parallel.
`--small` takes seconds on a CPU, which has none of the kernels.
"""

import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import numpy as np

from benchmarks import study as options
from benchmarks.study import Result, Run
from benchmarks.timing import kernel_names
from detjax.bench import command_line, presets, timing
from detjax.pallas.hopper.expert_places import SWITCH
from detjax.runtime import backends
from detjax.runtime.threads import in_threads

MODELS: Final[Mapping[str, int]] = {"Qwen3-30B-A3B": 8, "gpt-oss-20b": 6, "DeepSeek-V3": 4}
"""Presets and their layers. The first router is served by one kernel; the others' rows are only placed by one."""
ARMS: Final = {"on": "1", "off": "0"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        batches: numbers of requests, up to the kernels' 64 tokens; more show that nothing else changes.
        context: cached tokens of each request.
        compared: decode steps whose logits are compared.
        steps: consecutive steps of a timed repetition.
        rounds: processes of each arm, which alternate.
    """

    batches: tuple[int, ...] = (1, 8, 33, 64, 65)
    context: int = 1056
    compared: int = 4
    steps: int = 20
    rounds: int = 1


SMALL: Final = Sizes((1, 3), 70, 2, 2, 1)


def study(run: Run, *, preset: Annotated[list[str], options.names(MODELS)]) -> Result:
    sizes = SMALL if run.small else Sizes()
    models = {"tiny-experts": 1} if run.small else {name: MODELS[name] for name in preset}
    results: list[dict[str, Any]] = []
    for name, layers in models.items():
        rounds: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in ARMS}
        for _ in range(sizes.rounds):
            for arm in ARMS:
                rounds[arm].append(_in_process(arm, name, layers, small=run.small))
                seconds = {row["batch"]: row["seconds"] for row in rounds[arm][-1]}
                command_line.print_line(f"{name}, {SWITCH}={ARMS[arm]}: seconds by batch {seconds}")
        results += joined(name, layers, rounds)
        for row in results[-len(sizes.batches) :]:
            command_line.print_line(str(row))
    content = {"sizes": dataclasses.asdict(sizes), "results": results}
    # The children had the device, which the heading of the first save initializes.
    return Result(content, problem(results, has_kernels=backends.backend() == "hopper"))


def joined(name: str, layers: int, rounds: Mapping[str, list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Returns a row for each batch: what the arms have in common, and the seconds, kernels and digests of each."""
    rows = []
    for index, first in enumerate(rounds["on"][0]):
        arms = {arm: [one[index] for one in measured_rows] for arm, measured_rows in rounds.items()}
        seconds = {
            arm: statistics.median(one["seconds"] for one in measured_rows) for arm, measured_rows in arms.items()
        }
        rows.append(
            {
                "model": name,
                "layers": layers,
                "batch": first["batch"],
                "seconds": seconds,
                "speed": seconds["off"] / seconds["on"],
                "kernels": {arm: measured_rows[0]["kernels"] for arm, measured_rows in arms.items()},
                "same_bits": len({one["digest"] for measured_rows in arms.values() for one in measured_rows}) == 1,
                "rounds": {arm: [one["seconds"] for one in measured_rows] for arm, measured_rows in arms.items()},
                "digests": {arm: [one["digest"] for one in measured_rows] for arm, measured_rows in arms.items()},
            }
        )
    return rows


def problem(results: list[dict[str, Any]], *, has_kernels: bool) -> str:
    """Returns what is wrong with the rows of all models; empty: nothing."""
    if different := [f"{row['model']}, batch {row['batch']}" for row in results if not row["same_bits"]]:
        return f"bits differ with {SWITCH}: {'; '.join(different)}"
    counts = [row["kernels"] for row in results if row["kernels"]["on"].endswith("kernels")]
    if has_kernels and counts and all(one["on"] == one["off"] for one in counts):
        return f"{SWITCH} changes no kernel"
    return ""


def _in_process(arm: str, name: str, layers: int, *, small: bool) -> list[dict[str, Any]]:
    """The rows of an arm, which a process of its own measures."""
    words = [sys.executable, "-m", __name__, name, str(layers), str(int(small))]
    done = subprocess.run(words, env={**os.environ, SWITCH: ARMS[arm]}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"expert_launches: {name} with {SWITCH}={ARMS[arm]} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, layers: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Returns a row for each batch: a digest of the logits of some steps, seconds of a step, and its kernels."""
    from benchmarks.studies.decode import DecodeStep

    model, rows = presets.decoder(name, layers), []
    programs = in_threads(lambda batch: DecodeStep.compiled(model, batch, sizes.context), sizes.batches)
    for batch, compiled in zip(sizes.batches, programs, strict=True):
        step = DecodeStep.drawn(model, batch, sizes.context)
        program, hashed = step.program(compiled), hashlib.sha256()
        for _ in range(sizes.compared):
            hashed.update(np.asarray(program(step.tokens)).tobytes())
        seconds = timing.step_time(program, [(step.tokens,)], steps=sizes.steps)
        kernels = kernel_names(program, (step.tokens,))
        rows.append({"batch": batch, "digest": hashed.hexdigest(), "seconds": seconds, "kernels": kernels})
        print(f"{name}, batch {batch}: {seconds} s, {kernels}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    _, given, depth, is_small = sys.argv
    print(json.dumps(measured(given, int(depth), SMALL if int(is_small) else Sizes())))
