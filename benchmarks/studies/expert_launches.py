"""Decode steps with the kernels for the experts of few tokens, against the same steps without them.

    python -m benchmarks expert_launches --out benchmarks/results/expert-launches-h100.json

Each arm has a process; one replaces the kernels by the operations that they stand for. Both draw the same weights,
tokens and caches, and decode some tokens. Digests of all logits are compared, then steps are timed. Before that, the
process with the kernels compares its choices, its places of rows, and a layer's experts with the operations that the
kernels replace, and prints the first numbers that differ. The exit code is 1 if bits differ, or if both arms launch as
many kernels on Hopper GPUs.

Models have a few layers. One program of each batch is all that is compiled, in parallel.
`--small` takes seconds on a CPU, which has none of the kernels.
"""

import contextlib
import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

import detjax
from benchmarks import study as options
from benchmarks.study import Result, Run
from benchmarks.timing import kernel_names
from detjax import ops
from detjax.bench import command_line, presets, timing
from detjax.models import Decoder
from detjax.models.network import parameters, part_with
from detjax.models.parts.experts import Experts
from detjax.operands.kv_pages import Queries
from detjax.pallas.hopper import expert_places
from detjax.runtime import backends
from detjax.runtime.threads import in_threads

MODELS: Final[Mapping[str, int]] = {"Qwen3-30B-A3B": 8, "gpt-oss-20b": 6, "DeepSeek-V3": 4}
"""Presets and their layers. The first router is served by one kernel; the others' rows are only placed by one."""
ARMS: Final = {"on": "with the kernels", "off": "without the kernels"}


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
                command_line.print_line(f"{name}, {ARMS[arm]}: seconds by batch {seconds}")
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
                "parts": first["parts"],
                "same_bits": len({one["digest"] for measured_rows in arms.values() for one in measured_rows}) == 1,
                "rounds": {arm: [one["seconds"] for one in measured_rows] for arm, measured_rows in arms.items()},
                "digests": {arm: [one["digest"] for one in measured_rows] for arm, measured_rows in arms.items()},
            }
        )
    return rows


def problem(results: list[dict[str, Any]], *, has_kernels: bool) -> str:
    """Returns what is wrong with the rows of all models; empty: nothing."""
    parts = [
        f"{row['model']}, batch {row['batch']}, {part}: {difference}"
        for row in results
        for part, difference in row["parts"].items()
        if difference
    ]
    different = [f"{row['model']}, batch {row['batch']}" for row in results if not row["same_bits"]]
    if parts or different:
        return f"bits differ with the kernels: {'; '.join(parts + different)}"
    counts = [row["kernels"] for row in results if row["kernels"]["on"].endswith("kernels")]
    if has_kernels and counts and all(one["on"] == one["off"] for one in counts):
        return "both arms launch as many kernels"
    return ""


def _in_process(arm: str, name: str, layers: int, *, small: bool) -> list[dict[str, Any]]:
    """The rows of an arm, which a process of its own measures."""
    words = [sys.executable, "-m", __name__, arm, name, str(layers), str(int(small))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"expert_launches: {name} {ARMS[arm]} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, layers: int, sizes: Sizes, *, compares: bool) -> list[dict[str, Any]]:
    """Returns a row for each batch: differences of parts, a digest of some logits, seconds of a step, its kernels.

    Args:
        compares: whether parts are compared with and without the kernels.
    """
    from benchmarks.studies.decode import DecodeStep

    model, rows = presets.decoder(name, layers), []
    # On other devices than Hopper GPUs, these are the same operations twice.
    parts = differences(model, sizes.batches) if compares else [{} for _ in sizes.batches]
    for batch, by_part in zip(sizes.batches, parts, strict=True):
        for part, difference in by_part.items():
            print(f"{name}, batch {batch}, {part}: {difference or 'same bits'}", file=sys.stderr, flush=True)
    programs = in_threads(lambda batch: DecodeStep.compiled(model, batch, sizes.context), sizes.batches)
    for batch, by_part, compiled in zip(sizes.batches, parts, programs, strict=True):
        step = DecodeStep.drawn(model, batch, sizes.context)
        program, hashed = step.program(compiled), hashlib.sha256()
        for _ in range(sizes.compared):
            hashed.update(np.asarray(program(step.tokens)).tobytes())
        seconds = timing.step_time(program, [(step.tokens,)], steps=sizes.steps)
        kernels = kernel_names(program, (step.tokens,))
        measured_row = {"batch": batch, "digest": hashed.hexdigest(), "seconds": seconds, "kernels": kernels}
        rows.append(measured_row | {"parts": by_part})
        print(f"{name}, batch {batch}: {seconds} s, {kernels}", file=sys.stderr, flush=True)
    return rows


def without_kernels() -> AbstractContextManager[object]:
    """A context in which the operations that the kernels stand for are compiled."""
    return mock.patch.object(expert_places.Problem, "served", False)


def differences(model: Decoder, batches: Sequence[int]) -> list[dict[str, str]]:
    """Returns what differs first with the kernels and without, for each batch and part; empty: nothing."""

    def results(batch: int) -> dict[str, dict[str, np.ndarray]]:
        # New functions, so that no program of the other arm serves.
        return {part: jax.tree.map(np.asarray, detjax.jit(fn)(*given)) for part, fn, given in parts_of(model, batch)}

    with_kernels = list(in_threads(results, batches))
    with without_kernels():
        without = list(in_threads(results, batches))
    return [
        {part: first_difference(actual[part], expected[part]) for part in actual}
        for actual, expected in zip(with_kernels, without, strict=True)
    ]


def parts_of(model: Decoder, batch: int) -> list[tuple[str, Callable[..., dict[str, Array]], tuple[Any, ...]]]:
    """Returns the parts that are compared: a name, a function of arrays that returns arrays by name, and the arrays.

    The parts are a choice of experts by softmax, the places of rows of given choices, and the first layer with experts.
    """
    experts = next(part for path in parameters(model) if isinstance(part := part_with(model, path), Experts))
    options, random = experts.options, np.random.default_rng(batch)
    # Quarters: some logits of a token are equal, so the lower id has to win.
    logits = jnp.asarray(np.round(random.standard_normal((batch, options.experts)) * 12) / 4, jnp.float32)
    ids = np.argsort(random.random((batch, options.experts)), axis=1)[:, : options.chosen]
    present = jnp.asarray(random.random(batch) < 0.8)
    graph, state = nnx.split(experts)
    x = jnp.asarray(random.standard_normal((batch, 1, experts.width)), experts.down[...].dtype)
    zeros, ones = jnp.zeros(batch, jnp.int32), jnp.ones(batch, jnp.int32)

    def arrays(rows: ops.ExpertRows) -> dict[str, Array]:
        return {"group_sizes": rows.group_sizes, "token": rows.token, "place": rows.place, "tiles": tiles(rows)}

    def choose(logits: Array, present: Array) -> dict[str, Array]:
        ids, weights, rows = ops.route(logits, options.chosen, normalized=options.normalized, present=present)
        return {"ids": ids, "weights": weights, **arrays(rows)}

    def place(ids: Array, present: Array) -> dict[str, Array]:
        return arrays(ops.expert_rows(ids, options.experts, present))

    def layer(state: Any, x: Array, queries: Queries) -> dict[str, Array]:
        return {"y": nnx.merge(graph, state)(x, queries, residual=x)}

    queries = Queries(jnp.zeros((batch, 1), jnp.int32), zeros, ones, ones)
    return [
        ("choice", choose, (logits, present)),
        ("places", place, (jnp.asarray(np.sort(ids), jnp.int32), present)),
        ("layer", layer, (state, x, queries)),
    ]


def tiles(rows: ops.ExpertRows) -> Array:
    """Returns the experts of tiles, and their number; from group sizes if no kernel gave them."""
    if rows.tiles is not None:
        return rows.tiles
    ends, first = jnp.cumsum(rows.group_sizes), jnp.arange(0, len(rows.token), rows.unit, dtype=jnp.int32)
    experts = jnp.minimum(jnp.searchsorted(ends, first, side="right"), len(rows.group_sizes) - 1)
    return jnp.append(experts, ends[-1] // rows.unit).astype(jnp.int32)


def first_difference(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> str:
    """Returns the first array that differs in bits, with its first such number; empty: none does."""
    for name, array in expected.items():
        bits = f"u{array.itemsize}"
        differs = np.ascontiguousarray(actual[name]).view(bits) != np.ascontiguousarray(array).view(bits)
        if differs.any():
            place = tuple(int(i) for i in np.argwhere(differs)[0])
            values = f"{actual[name][place]} with the kernels, {array[place]} without"
            return f"{name}{list(place)} is {values}; {differs.sum()} of {differs.size} numbers differ"
    return ""


if __name__ == "__main__":
    _, arm, given, depth, is_small = sys.argv
    has_kernels = arm == "on"
    with contextlib.nullcontext() if has_kernels else without_kernels():
        rows = measured(given, int(depth), SMALL if int(is_small) else Sizes(), compares=has_kernels)
    print(json.dumps(rows))
