"""The cost of the portable backend against XLA's own operations, and its gain: equal bits at every batch size.

    python -m benchmarks portable --out benchmarks/results/portable-cpu.json

Runs on the default device. Times each operation under both backends in alternating rounds, with inputs rotated so that
they come from memory; figures are medians. Counts the batch sizes at which the first row's bits differ from the largest
batch.

`--small` measures the narrowest operations in few rounds.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax import models, ops
from detjax.bench.timing import in_turns
from detjax.cli.options import Option
from detjax.models.network import Weights, split
from detjax.runtime.backends import STOCK

BACKENDS: Final = (STOCK, "portable")
ROWS: Final = (1, 2, 3, 16, 64, 257, 1024)
ROTATED_BYTES: Final = 256 << 20
"""Maximum size of the argument sets to rotate, in bytes."""

type Draw = Callable[[int, np.random.Generator], Any]
"""Draws a number of rows. The first one is the same for every generator."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on rows.

    Attributes:
        name: the operation's name in tables.
        run: returns an array whose first row belongs to the inputs' first row.
        inputs: draws the arguments of `run`.
        rows: numbers of rows.
    """

    name: str
    run: Callable[..., jax.Array]
    inputs: Callable[[int, np.random.Generator], tuple[Any, ...]]
    rows: Sequence[int] = ROWS


def _rows_of(*shape: int, dtype: str) -> Draw:
    first = np.random.default_rng(0).standard_normal(shape, np.float32)

    def draw(rows: int, rng: np.random.Generator) -> jax.Array:
        others = rng.standard_normal((rows - 1, *shape), np.float32)
        return jnp.asarray(np.concatenate([first[None], others]), dtype)

    return draw


def _weight(*shape: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32) / shape[-1] ** 0.5, dtype)


def cases(scale: int, dtype: str, context: int = 512) -> Iterator[Case]:
    """Yields the operations of a small model, and the demo's model.

    Args:
        scale: a factor of the operations' widths.
        dtype: the dtype of the numbers.
        context: tokens per request in attention.
    """
    width, weight = 256 * scale, functools.partial(_weight, dtype=dtype)
    x, w, gate_up, norm = _rows_of(width, dtype=dtype), weight(width, width), weight(2, 3 * width, width), weight(width)
    yield Case("matmul", lambda x, w: ops.matmul(x, w, layout="nk"), lambda m, rng: (x(m, rng), w))
    yield Case(
        "matmul, silu(gate) * up",
        lambda x, w: ops.matmul(x, w, layout="nk", activation="silu", gated=True),
        lambda m, rng: (x(m, rng), gate_up),
    )
    yield Case("rms_norm", lambda x, w: ops.rms_norm(x, w, eps=1e-6), lambda m, rng: (x(m, rng), norm))
    logits = _rows_of(4096 * scale, dtype="float32")
    yield Case("log_softmax", ops.log_softmax, lambda m, rng: (logits(m, rng),))
    heads, head_dim = 2 * scale, 128
    kv = _rows_of(context, scale, head_dim, dtype=dtype)
    for name, queries, rows in (
        (f"attention, decode over {context} tokens", 1, (1, 2, 3, 16, 64)),
        (f"attention, prefill of {context} tokens", context, (1, 2, 8)),
    ):
        q = _rows_of(queries, heads, head_dim, dtype=dtype)
        inputs = functools.partial(_attention_inputs, q, kv)
        yield Case(name, ops.dot_product_attention, inputs, rows)
    yield _model_case(dtype)


def small_cases(dtype: str) -> list[Case]:
    """Returns the narrowest operations on short requests, at two batch sizes each, which run on a CPU in seconds."""
    return [dataclasses.replace(case, rows=(1, 3)) for case in cases(1, dtype, context=64)]


def _attention_inputs(q: Draw, kv: Draw, rows: int, rng: np.random.Generator) -> tuple[Any, ...]:
    return q(rows, rng), kv(rows, rng), kv(rows, rng)


def _model_case(dtype: str) -> Case:
    model, _ = models.load(Path(detjax.__file__).parent / "demo" / "checkpoint", dtype=dtype, progress=False)
    network, weights = split(model)
    prompt = np.random.default_rng(2).integers(1, model.config.vocab_size, 128)

    def inputs(rows: int, rng: np.random.Generator) -> tuple[Weights, jax.Array]:
        others = rng.integers(1, model.config.vocab_size, (rows - 1, len(prompt)))
        return weights, jnp.asarray(np.concatenate([prompt[None], others]), jnp.int32)

    def run(weights: Weights, tokens: jax.Array) -> jax.Array:
        return network.with_weights(weights)(tokens)

    return Case(f"whole model (1.3M), {len(prompt)} tokens", run, inputs, rows=(1, 2, 3, 16, 64))


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Returns a result per number of rows: times, and the count of batch sizes at which the first row's bits differ."""
    measured = {rows: _measure_rows(case, rows, rounds) for rows in case.rows}
    last = measured[case.rows[-1]][1]
    different = {name: sum(bits[name] != last[name] for _, bits in measured.values()) for name in BACKENDS}
    return [
        {
            "case": case.name,
            "rows": rows,
            "seconds": seconds,
            "ratio": seconds["portable"] / seconds[STOCK],
            "other_bits": different,
        }
        for rows, (seconds, _) in measured.items()
    ]


def _measure_rows(case: Case, rows: int, rounds: int) -> tuple[dict[str, float], dict[str, bytes]]:
    """Median seconds of a call and the first row's bits, by backend."""
    programs = {backend: detjax.jit(case.run) for backend in BACKENDS}
    sets = [case.inputs(rows, np.random.default_rng(seed)) for seed in range(min(8, rounds))]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(sets[0]))
    sets = sets[: max(1, min(len(sets), ROTATED_BYTES // max(size, 1)))]

    def call(backend: str, arguments: tuple[Any, ...]) -> jax.Array:
        with detjax.use_backend(backend):
            return jax.block_until_ready(programs[backend](*arguments))

    counts: dict[str, int] = dict.fromkeys(BACKENDS, 0)

    def seconds(backend: str) -> float:
        arguments = sets[counts[backend] % len(sets)]
        counts[backend] += 1
        start = time.perf_counter()
        call(backend, arguments)
        return time.perf_counter() - start

    bits = {backend: np.asarray(call(backend, sets[0])[0]).tobytes() for backend in BACKENDS}
    runs = {backend: functools.partial(seconds, backend) for backend in BACKENDS}
    return in_turns(runs, rounds, required=BACKENDS).medians, bits


def study(
    run: Run,
    *,
    scale: Annotated[int, Option("Factor of the operations' widths; 4 is a width of 1024.", minimum=1)] = 4,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], Option("Dtype of the numbers.")] = ("bfloat16"),
    rounds: options.RoundCount = 15,
) -> Result:
    scale, rounds = (1, 2) if run.small else (scale, rounds)
    results = []
    chosen = small_cases(dtype) if run.small else list(cases(scale, dtype))
    for case in track(chosen, "measuring", console=Console(stderr=True)):
        results += measure(case, rounds)
    mean = statistics.geometric_mean(result["ratio"] for result in results)
    changed = any(result["other_bits"]["portable"] for result in results)
    return Result(
        {"dtype": dtype, "scale": scale, "rounds": rounds, "geometric_mean": mean, "results": results},
        "the portable backend gave different bits at some batch size" if changed else "",
    )
