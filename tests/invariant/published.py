"""Measures models that others published: `python -m tests.invariant.published [MODEL ...] [--out FILE]`.

It runs in an environment of its own, which `make test-models` makes. For each model, tiny and random, and each dtype it
prints a line of JSON: the batches among which a row has other bits than alone, under stock XLA and under
`batch_invariant`, those among which gradients have, what `detjax.certify` says of both, how far numbers are from the
original, and the version of the model's package. `--out` writes a result file, and keeps what it has of other models;
each model has the commit at which it was seen. `--table FILE` prints such a file as Markdown.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import detjax
from detjax.bench import provenance
from tests.invariant.published_models import MODELS, Inputs

BATCHES = (2, 3, 8, 17, 64)
CERTIFIED = (1, 2, 17)
"""The batches of `batch_invariant`'s certificates, which compile all programs again."""
DTYPES = ("float32", "bfloat16")
COMMAND = "python -m tests.invariant.published --out {out}"


@dataclasses.dataclass
class Result:
    """The measurements of a model.

    Attributes:
        model: its name in `MODELS`.
        title: its name in tables.
        package: the distribution that contains it.
        version: the version of the distribution, or the commit if it was installed from a repository.
        dtype: the dtype of its weights.
        stock: the batch sizes in which a row has other bits than alone under stock XLA.
        invariant: the same under `batch_invariant`.
        stock_gradients: the batch sizes in which gradients have other bits than for the row alone under stock XLA.
        invariant_gradients: the same under `batch_invariant`.
        distance: the largest difference from the original, relative to its largest result.
        gradient_distance: the same for the gradients of weights.
        stock_outcome: the outcome of `detjax.certify` for the model under `jax.jit`.
        stock_risks: the primitives that this certificate names.
        stock_batch: the smallest batch that refutes it; None if no batch does.
        invariant_outcome: what it says under `batch_invariant`.
    """

    model: str
    title: str
    package: str
    version: str
    dtype: str
    stock: list[int]
    invariant: list[int]
    stock_gradients: list[int]
    invariant_gradients: list[int]
    distance: float
    gradient_distance: float
    stock_outcome: str
    stock_risks: list[str]
    stock_batch: int | None
    invariant_outcome: str


def changed(fn: Callable[..., Any], weights: Any, inputs: Inputs, batches: Sequence[int]) -> list[int]:
    """The batches among which a row has other bits than alone, wherever it stands."""
    alone, among = inputs(1, 0), []
    expected = np.asarray(fn(weights, *alone))[0].tobytes()
    for batch in batches:
        others = inputs(batch, 100 + batch)
        for place in sorted({0, batch // 2, batch - 1}):
            rows = tuple(x.at[place].set(y[0]) for x, y in zip(others, alone, strict=True))
            if np.asarray(fn(weights, *rows))[place].tobytes() != expected:
                among.append(batch)
    return sorted(set(among))


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of cotangents, weights and inputs that gives the gradients of all floating-point arrays, as a list."""

    def made(cotangents: Any, weights: Any, *inputs: Any) -> list[Any]:
        def loss(weights: Any, inputs: Any) -> Any:
            return jnp.sum(fn(weights, *inputs).astype(jnp.float32) * cotangents)

        leaves = jax.tree.leaves(jax.grad(loss, argnums=(0, 1), allow_int=True)(weights, inputs))
        return [x for x in leaves if x.dtype != jax.dtypes.float0]

    return made


def changed_gradients(
    made: Callable[..., Any], weights: Any, inputs: Inputs, shape: Sequence[int], batches: Sequence[int]
) -> list[int]:
    """Returns the batch sizes in which gradients have other bits than for a row alone.

    Only the first row has a cotangent, since weights' gradients are sums over rows. The other rows must add nothing to
    them, whatever they hold, and must not change the first row's gradient of its inputs.
    """
    alone, among = inputs(1, 0), []
    has_rows = sum(jnp.issubdtype(x.dtype, jnp.floating) for x in alone)
    cotangents = jax.random.normal(jax.random.key(2), (1, *shape))

    def bits(batch: int) -> list[bytes]:
        rows = tuple(x.at[0].set(y[0]) for x, y in zip(inputs(batch, 100 + batch), alone, strict=True))
        padded = jnp.concatenate([cotangents, jnp.zeros((batch - 1, *shape))])
        leaves = [np.asarray(x) for x in made(padded, weights, *rows)]
        shared, mapped = leaves[: len(leaves) - has_rows], leaves[len(leaves) - has_rows :]
        # Zeros of either sign are one number, which sums of nothing end as.
        return [(x + 0).tobytes() for x in (*shared, *(x[0] for x in mapped))]

    expected = bits(1)
    for batch in batches:
        if bits(batch) != expected:
            among.append(batch)
    return among


def distance(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference between arrays, over the largest number that is expected."""
    wanted = [np.asarray(x, np.float64) for x in expected]
    largest = max(np.abs(x).max(initial=0) for x in wanted)
    differences = [np.abs(np.asarray(x, np.float64) - y).max(initial=0) for x, y in zip(actual, wanted, strict=True)]
    # `max` would pass over what is not a number.
    return float(np.max(differences) / largest)


def result(name: str, dtype: str, batches: Sequence[int]) -> Result:
    """Returns the measurements of a model."""
    model = MODELS[name]
    fn, weights, inputs = model.build(jnp.dtype(dtype))
    axes = (None, *[0] * len(inputs(1, 0)))
    stock, invariant = jax.jit(fn), detjax.batch_invariant(fn, axes)
    rows = inputs(3, 0)
    original = np.asarray(stock(weights, *rows))
    if all((row == original[0]).all() for row in original):
        raise ValueError(f"{name}: rows of different inputs have the same results, so comparing them says nothing")
    given = 2, *original.shape[1:]
    cotangents, few = jax.random.normal(jax.random.key(3), given), inputs(2, 0)
    stock_gradients, invariant_gradients = jax.jit(gradients(fn)), detjax.jit(gradients(invariant))
    certificates = [
        detjax.certify(f, (weights, *few), axes, batch_sizes=sizes)
        for f, sizes in ((stock, [1, *batches]), (invariant, CERTIFIED))
    ]
    refutation = certificates[0].counterexample
    return Result(
        model=name,
        title=model.title,
        package=model.package,
        version=_version(model.package),
        dtype=dtype,
        stock=changed(stock, weights, inputs, batches),
        invariant=changed(invariant, weights, inputs, batches),
        stock_gradients=changed_gradients(stock_gradients, weights, inputs, given[1:], batches),
        invariant_gradients=changed_gradients(invariant_gradients, weights, inputs, given[1:], batches),
        distance=distance([invariant(weights, *rows)], [original]),
        gradient_distance=distance(
            invariant_gradients(cotangents, weights, *few), stock_gradients(cotangents, weights, *few)
        ),
        stock_outcome=certificates[0].outcome.value,
        stock_risks=sorted({risk.primitive for risk in certificates[0].risks}),
        stock_batch=None if refutation is None else refutation.batch,
        invariant_outcome=certificates[1].outcome.value,
    )


def _version(package: str) -> str:
    distribution = importlib.metadata.distribution(package)
    source = json.loads(distribution.read_text("direct_url.json") or "{}")
    return source.get("vcs_info", {}).get("commit_id", distribution.version)


def _write(file: Path, new: dict[str, Any]) -> None:
    """Adds what was seen of a model to a file, and keeps what the file has of others under the same versions."""
    heading = provenance.heading(COMMAND.format(out=file))
    old = json.loads(file.read_text()) if file.exists() else {}
    is_kept = old.get("versions") == heading["versions"]
    results = [one for one in (old["results"] if is_kept else []) if _order(one) != _order(new)]
    results = sorted([*results, new | {"commit": heading["commit"]}], key=_order)
    provenance.write(file, heading | {"batches": [1, *BATCHES], "results": results})


def _order(one: dict[str, Any]) -> tuple[int, int]:
    return list(MODELS).index(one["model"]), DTYPES.index(one["dtype"])


def table(results: Sequence[dict[str, Any]], file: str) -> str:
    """Results as a table in Markdown, whose distances in float32 are links into their file."""
    rows = [
        "| model | stock: batches that change a row's bits | and its gradients' bits | `certify` | `batch_invariant` |"
        " `certify` | distance | of gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one["model"] for one in results):
        seen = {one["dtype"]: one for one in results if one["model"] == name}
        first = next(iter(seen.values()))
        kept = (
            "other bits" if one["invariant"] or one["invariant_gradients"] else "same bits" for one in seen.values()
        )
        links = (
            f"[{_short(seen['float32'][key])}]({file}#/results/model={name}&dtype=float32/{key})"
            if "float32" in seen
            else "not measured"
            for key in ("distance", "gradient_distance")
        )
        cells = (
            f"{first['title']} ({first['package']} {first['version'][:8]})",
            _by_dtype(seen, lambda one: _batches(one["stock"], BATCHES)),
            _by_dtype(seen, lambda one: _batches(one["stock_gradients"], BATCHES)),
            _by_dtype(seen, lambda one: one["stock_outcome"]),
            ", ".join(dict.fromkeys(kept)),
            _by_dtype(seen, lambda one: one["invariant_outcome"]),
        )
        rows.append(f"| {' | '.join((*cells, *links))} |")
    return "\n".join(rows)


def _short(number: float) -> str:
    digits, _, exponent = f"{number:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if number else "0"


def _by_dtype(seen: dict[str, dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> str:
    texts = {dtype: text(one) for dtype, one in seen.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{dtype}: {text}" for dtype, text in texts.items())


def _batches(changed: Sequence[int], compared: Sequence[int]) -> str:
    if list(changed) == list(compared):
        return "all"
    return f"of {', '.join(map(str, changed))}" if changed else "none"


def _results(models: Sequence[str], dtypes: Sequence[str], batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        for name in models:
            yield dataclasses.asdict(result(name, dtype, batches))
            jax.clear_caches()


def main() -> None:
    """Prints what is seen of the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; default: both")
    parser.add_argument("--batch", type=int, action="append", help=f"repeatable; default: {BATCHES}")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--table", type=Path, help="a file that --out wrote")
    given = parser.parse_args()
    if given.table is not None:
        print(table(json.loads(given.table.read_text())["results"], f"../{given.table.as_posix()}"))
        return
    warnings.filterwarnings("ignore")
    for one in _results(given.models or list(MODELS), given.dtype or DTYPES, given.batch or BATCHES):
        print(json.dumps(one), flush=True)
        if given.out is not None:
            _write(given.out, one)


if __name__ == "__main__":
    main()
