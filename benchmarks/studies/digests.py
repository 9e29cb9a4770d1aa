"""The cost of digests of layers and equations in a transformer.

    python -m benchmarks digests --out benchmarks/results/digests-h200.json

The model has random bfloat16 weights and uses Flax' own layers; see `python -m benchmarks invariant`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks import study as options
from benchmarks.studies.invariant import SHAPES as INVARIANT_SHAPES
from benchmarks.studies.invariant import TINY, Shape, Transformer
from benchmarks.study import Result, Run
from detjax.audit import trace_digests
from detjax.bench import timing
from detjax.cli.options import Option

SHAPES = {"small": Shape(4, 512, 8, 8, 64, 2048, 4096, False), **INVARIANT_SHAPES}


def costs(shape: Shape, length: int, batches: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yields, for each batch, milliseconds of a call without digests and with digests of each level, alternating."""
    model = Transformer(shape, length, nnx.Rngs(0))

    def call(model: Transformer, tokens: Array) -> Array:
        return model(tokens)

    plain = jax.jit(call)
    traced = {level: trace_digests(call, (None, 0), level=level) for level in ("layers", "equations")}
    for batch in batches:
        draw = np.random.default_rng(batch)
        tokens = jnp.asarray(draw.integers(0, shape.vocabulary, (batch, length)), jnp.int32)
        programs = {"plain": plain, **{level: lambda *a, fn=fn: fn(*a)[0] for level, fn in traced.items()}}
        runs = {
            name: lambda program=program, tokens=tokens: timing.step_time(program, [(model, tokens)], steps=5)
            for name, program in programs.items()
        }
        medians = timing.in_turns(runs, rounds, required=tuple(runs)).medians
        yield {
            "batch": batch,
            "length": length,
            **{f"{name}_ms": seconds * 1e3 for name, seconds in medians.items()},
            **{f"{level}_over_plain": medians[level] / medians["plain"] for level in traced},
        }


def study(
    run: Run,
    *,
    length: Annotated[int, Option("Tokens per row.", minimum=1)] = 64,
    model: Annotated[str, Option("The model; small has four layers", accepted=SHAPES)] = "small",
    rounds: options.RoundCount = 5,
) -> Result:
    shape, batches = (TINY, (1, 2)) if run.small else (SHAPES[model], (1, 8))
    length, rounds = (8, 1) if run.small else (length, rounds)
    results = list(costs(shape, length, batches, rounds))
    return Result({"small": run.small, "model": model, "results": results})
