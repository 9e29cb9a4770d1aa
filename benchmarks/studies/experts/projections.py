"""Projections of experts: matmul of rows sorted by expert, against XLA's and tokamax's ragged dots and dense ones."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from benchmarks import rivals
from detjax import ops
from detjax.bench import timing
from detjax.bench.bits import same_bits
from detjax.runtime import backends, compilation


@dataclasses.dataclass(frozen=True)
class Widths:
    """The shape of a layer's experts.

    Attributes:
        experts: the number of experts.
        chosen: experts per token.
        width: the width of hidden states.
        inner: the inner width of an expert.
    """

    experts: int
    chosen: int
    width: int
    inner: int


MODELS: Final = {
    "Qwen3-30B-A3B": Widths(128, 8, 2048, 768),
    "gpt-oss-20b": Widths(32, 4, 2880, 2880),
    "Mixtral-8x7B": Widths(8, 2, 4096, 14336),
}
TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 8192)

SMALL_MODELS: Final = {"tiny": Widths(6, 2, 64, 32)}
SMALL_TOKENS: Final = (1, 40)

_DENSE_BYTES: Final = 4 << 30
"""Maximum memory of the results of dense products, of all experts for all tokens."""


def measure(models: dict[str, Widths], tokens: tuple[int, ...], calls: int = 12) -> Iterator[dict[str, Any]]:
    """Yields each rival's device time of both projections of the chosen experts, and the result of comparing bits.

    All rivals get the same random choices. Routing and the gather of rows are not measured.
    """
    for name, widths in models.items():
        gate_up = random_array(0, widths.experts, 2, widths.inner, widths.width)
        down = random_array(1, widths.experts, widths.width, widths.inner)
        turned = jax.jit(turned_weights)(gate_up, down)
        for count in tokens:
            yield {"model": name, "tokens": count} | _measured(widths, count, gate_up, down, turned, calls)


def _measured(
    widths: Widths, tokens: int, gate_up: Array, down: Array, turned: tuple[Array, Array], calls: int
) -> dict[str, Any]:
    ids = chosen_experts(widths, tokens)
    x = random_array(2, tokens, widths.width)
    rows = compilation.jit(lambda ids: ops.expert_rows(ids, widths.experts))(ids)
    given = compilation.jit(lambda x, rows: rows.gather(x))(x, rows)
    with backends.use_backend("stock"):
        plain_rows = compilation.jit(lambda ids: ops.expert_rows(ids, widths.experts))(ids)
        plain = x[jnp.minimum(plain_rows.token, tokens - 1)]

    ours = functools.partial(_contracted, unit=rows.unit)
    runs: dict[str, Callable[[], float]] = {
        "detjax": _timed(compilation.jit(ours), (given, gate_up, down, rows.group_sizes), calls),
    }
    ragged = {
        "ragged dot": jax.lax.ragged_dot,
        "tokamax, mosaic": rivals.tokamax_ragged_dot("mosaic_gpu"),
        "tokamax, triton": rivals.tokamax_ragged_dot("triton"),
    }
    for name, dot in ragged.items():
        program = jax.jit(functools.partial(ragged_products, dot))
        runs[name] = _timed(program, (plain, *turned, plain_rows.group_sizes), calls)
    if 4 * tokens * widths.experts * (2 * widths.inner + widths.width) <= _DENSE_BYTES:
        runs["dense"] = _timed(jax.jit(_dense), (x, gate_up, down), calls)
    result = timing.in_turns(runs, 2, required=["detjax"])
    best = min((seconds for name, seconds in result.medians.items() if name != "detjax"), default=None)
    touched = len(np.unique(np.asarray(ids)))
    moved = 2 * touched * 3 * widths.inner * widths.width + 2 * ids.size * (2 * widths.width + 2 * widths.inner)
    return {
        "seconds": result.medians,
        "missing": result.missing,
        "over_the_best_rival": None if best is None else result.medians["detjax"] / best,
        "bytes": moved,
        "same_bits_alone": _alone(x, ids, gate_up, down, widths),
    }


def _contracted(x: Array, gate_up: Array, down: Array, sizes: Array, *, unit: int) -> Array:
    options: dict[str, Any] = {"layout": "nk", "unit": unit}
    y = ops.grouped_matmul(x, gate_up, sizes, activation="silu", gated=True, **options)
    return ops.grouped_matmul(y, down, sizes, **options)


def turned_weights(gate_up: Array, down: Array) -> tuple[Array, Array]:
    """Returns the weights in the layout of ragged dots: transposed, with gate and up concatenated."""
    joined = gate_up.reshape(gate_up.shape[0], -1, gate_up.shape[-1])
    return jnp.swapaxes(joined, 1, 2), jnp.swapaxes(down, 1, 2)


def ragged_products(dot: Callable[..., Array], x: Array, gate_up: Array, down: Array, sizes: Array) -> Array:
    """Returns the experts' results by a ragged dot, for `turned_weights`."""
    gate, up = jnp.split(dot(x, gate_up, sizes), 2, axis=1)
    return dot(jax.nn.silu(gate) * up, down, sizes)


def _dense(x: Array, gate_up: Array, down: Array) -> Array:
    """All experts for all tokens."""
    gate, up = jnp.einsum("td,epid->peti", x, gate_up)
    return jnp.einsum("eti,edi->etd", jax.nn.silu(gate) * up, down)


def _alone(x: Array, ids: Array, gate_up: Array, down: Array, widths: Widths) -> bool:
    """Compares the bits of some tokens alone."""

    @compilation.jit
    def results(x: Array, ids: Array, gate_up: Array, down: Array) -> Array:
        rows = ops.expert_rows(ids, widths.experts)
        y = _contracted(rows.gather(x), gate_up, down, rows.group_sizes, unit=rows.unit)
        return y.at[rows.place].get(mode="fill", fill_value=0)

    together = results(x, ids, gate_up, down)
    chosen = sorted({0, len(x) // 2, len(x) - 1})
    alone = [results(x[i : i + 1], ids[i : i + 1], gate_up, down)[0] for i in chosen]
    return all(bool(same_bits(one, together[i])) for i, one in zip(chosen, alone, strict=True))


def _timed(program: Callable[..., Any], arguments: tuple[Array, ...], calls: int) -> Callable[[], float]:
    return functools.partial(timing.device_time, program, [arguments], calls=calls)


def chosen_experts(widths: Widths, tokens: int) -> Int32[Array, "N count"]:
    """Returns random experts for each token, ascending; a function of the arguments."""
    scores = np.random.default_rng(tokens).random((tokens, widths.experts))
    return jnp.asarray(np.sort(np.argsort(scores, axis=1)[:, : widths.chosen], axis=1), jnp.int32)


def random_array(seed: int, *shape: int) -> Array:
    """Returns random bfloat16 numbers of variance 1 / K, where K is the last axis."""
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * shape[-1] ** -0.5).astype(jnp.bfloat16)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the geometric mean and the maximum of the ratios to the best rival, by model."""
    by_model: dict[str, list[float]] = {}
    for result in results:
        if result["over_the_best_rival"] is not None:
            by_model.setdefault(result["model"], []).append(result["over_the_best_rival"])
    return {
        model: {"geometric_mean": math.exp(statistics.fmean(map(math.log, ratios))), "largest": max(ratios)}
        for model, ratios in by_model.items()
    }
