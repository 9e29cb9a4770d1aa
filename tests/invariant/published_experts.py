"""Compares the experts that Gemma 4 chooses in bfloat16: `python -m tests.invariant.published_experts [--out FILE]`.

It runs in the environment of `make test-models`. In bfloat16 the output under `batch_invariant` is further from the
original's under `jax.jit` than other models' output. This shows why: two programs with other roundings give some tokens
other experts, those whose scores are nearly equal. Four programs are compared: `batch_invariant`; the original under
`jax.jit`, in which XLA leaves out roundings between operations that it fuses; the original called without `jit`, in
which each operation rounds its result as the model says; and the original in float32, with the same weights.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import detjax
from detjax.bench import provenance
from tests.invariant.published import distance
from tests.invariant.published_models import MODELS

MODEL = "tunix-gemma4-moe"
ROWS = 64
COMMAND = "python -m tests.invariant.published_experts --out {out}"


@dataclasses.dataclass
class Comparison:
    """The differences between two programs of the model.

    Attributes:
        program: the program.
        reference: the program that it is compared with.
        tokens: the number of compared tokens.
        chosen_otherwise: the number of tokens to which a layer gives other experts.
        reached: the number of tokens with other experts, or whose attention sees such a token.
        distance: the largest difference of results, relative to the reference's largest result.
        distance_of_others: the same for tokens that are not reached.
        distance_with_experts: the same for all tokens, when both programs get the experts of float32.
    """

    program: str
    reference: str
    tokens: int
    chosen_otherwise: int
    reached: int
    distance: float
    distance_of_others: float
    distance_with_experts: float


def with_experts(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns the model's results and each layer's experts, and takes experts that replace them."""
    moe: Any = importlib.import_module("tunix.models.gemma4.moe")
    router = moe.MoERagged._router

    def called(weights: Any, tokens: Any, *given: Any) -> tuple[Any, list[Any]]:
        wanted, chosen = iter(given), []

        def recording(self: Any, scores: Any) -> tuple[Any, Any]:
            shares, experts = router(self, scores)
            if (instead := next(wanted, None)) is not None:
                experts = instead
                all_shares = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
                shares = all_shares / moe._renormalization_factor(all_shares, experts)
            chosen.append(experts)
            return shares, experts

        moe.MoERagged._router = recording
        try:
            return fn(weights, tokens), chosen
        finally:
            moe.MoERagged._router = router

    return called


def comparisons(rows: int = ROWS) -> list[Comparison]:
    """All pairs of the four programs."""
    fn, weights, inputs = MODELS[MODEL].build(jnp.dtype("bfloat16"))
    wide, wide_weights, _ = MODELS[MODEL].build(jnp.dtype("float32"))
    wide_weights = jax.tree.map(lambda x, y: x.astype(y.dtype), weights, wide_weights)
    (tokens,) = inputs(rows, 0)
    exact, experts = jax.jit(with_experts(wide))(wide_weights, tokens)
    traced = with_experts(fn)
    programs = {
        "batch_invariant": lambda *given: detjax.batch_invariant(traced, (None, *[0] * len(given)))(weights, *given),
        "jit": lambda *given: jax.jit(traced)(weights, *given),
        "operations": lambda *given: traced(weights, *given),
    }
    seen = {name: program(tokens) for name, program in programs.items()} | {"float32": (exact, experts)}
    directed = {name: program(tokens, *experts)[0] for name, program in programs.items()} | {"float32": exact}
    return [
        Comparison(x, y, tokens.size, *_difference(seen[x], seen[y]), distance([directed[x]], [directed[y]]))
        for x, y in itertools.combinations(seen, 2)
    ]


def _difference(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> tuple[int, int, float, float]:
    """Returns the fields of `Comparison` from `chosen_otherwise` to `distance_of_others`."""
    *before, last = (_changed(*experts) for experts in zip(one[1], other[1], strict=True))
    # Attention is causal: later tokens see a layer's changes in the next layers. The last layer has no next one.
    reached = np.logical_or.accumulate(np.any(before, axis=0), axis=1) | last
    largest = np.abs(np.asarray(other[0], np.float64)).max()
    far = np.abs(np.asarray(one[0], np.float64) - np.asarray(other[0], np.float64)).max(axis=-1) / largest
    chosen_otherwise = np.any([*before, last], axis=0)
    return int(chosen_otherwise.sum()), int(reached.sum()), float(far.max()), float(far[~reached].max())


def _changed(one: Any, other: Any) -> np.ndarray:
    """The tokens that have other experts, in whatever order."""
    return (np.sort(np.asarray(one)) != np.sort(np.asarray(other))).any(axis=-1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints how the programs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    results = [dataclasses.asdict(one) for one in comparisons()]
    for one in results:
        print(json.dumps(one))
    if given.out is not None:
        provenance.write(given.out, provenance.heading(COMMAND.format(out=given.out)) | {"results": results})


if __name__ == "__main__":
    main()
