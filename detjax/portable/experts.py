"""The choice of experts, and the addition of their results, in plain JAX on rows of one fixed shape."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.options import Aggregation
from detjax.operands.rounding import rounded
from detjax.portable.tiles import each_row, row_sum, sealed


def choose(scores: Array, ranks: Array, count: int, *, normalized: bool, eps: float) -> tuple[Array, Array]:
    """Returns ids `[N, count]` in ascending order, and weights; see `detjax.ops.experts.choose_experts`."""

    def tile(rows: tuple[Array, Array], _: None) -> tuple[Array, Array]:
        scores, ranks = rows
        # Among equal ranks the lower id comes first.
        ids = _ascending(lax.top_k(ranks, count)[1].astype(jnp.int32))
        chosen = jnp.take_along_axis(scores, ids, axis=1)
        return ids, chosen * _factor(chosen, eps)[:, None] if normalized else chosen

    return each_row(tile, (scores, ranks), None)


def _ascending(ids: Array) -> Array:
    """Sorts each row of few ids in ascending order by exchanging neighbors.

    XLA compiles a separate kernel for every sort of a program, layer by layer, while equal fusions share one.
    """
    columns = [ids[:, j] for j in range(ids.shape[1])]
    for turn in range(len(columns)):
        for j in range(turn % 2, len(columns) - 1, 2):
            low, high = jnp.minimum(*columns[j : j + 2]), jnp.maximum(*columns[j : j + 2])
            columns[j : j + 2] = low, high
    return jnp.stack(columns, axis=1)


def choose_backward(scores: Array, ids: Array, dweights: Array, *, normalized: bool, eps: float) -> Array:
    """Returns the gradient of the scores, which is zero for experts that were not chosen."""

    def tile(rows: tuple[Array, Array, Array], _: None) -> Array:
        scores, ids, dweights = rows
        dchosen = dweights
        if normalized:
            chosen = jnp.take_along_axis(scores, ids, axis=1)
            factor, products = _factor(chosen, eps), lax.optimization_barrier(chosen * dweights)
            # Every product is rounded before it is added or subtracted.
            along = lax.optimization_barrier(_sum(products) * factor)
            dchosen = factor[:, None] * (dweights - along[:, None])
        expert = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
        places = [jnp.where(ids[:, j : j + 1] == expert, dchosen[:, j : j + 1], 0.0) for j in range(ids.shape[1])]
        # An expert is chosen once, so at most one term of a sum is not zero.
        return functools.reduce(jnp.add, places)

    return each_row(tile, (scores, ids, dweights), None)


def _factor(chosen: Array, eps: float) -> Array:
    # XLA turns some divisions by broadcast values into products with the reciprocal, so all of them are written so.
    return sealed(1 / (_sum(chosen) + eps))


def _sum(x: Array) -> Array:
    """The sums `[N]` of rows `[N, count]`, left to right."""
    return functools.reduce(jnp.add, [x[:, j] for j in range(x.shape[1])])


@dataclasses.dataclass(frozen=True)
class _Mode:
    """The roundings and the order of additions of another implementation.

    Attributes:
        rounds_weights: whether weights are rounded to the results' dtype.
        rounds_terms: whether products are rounded to it.
        adds_rounded: whether every partial sum is rounded to it.
        ranked: whether experts are added in descending order of weights instead of ascending order of ids.
    """

    rounds_weights: bool = False
    rounds_terms: bool = False
    adds_rounded: bool = False
    ranked: bool = False


_MODES: Final[Mapping[Aggregation, _Mode]] = {
    "hf_eager_float32": _Mode(rounds_terms=True, adds_rounded=True),
    "hf_eager": _Mode(rounds_weights=True, rounds_terms=True, adds_rounded=True),
    "hf_grouped": _Mode(rounds_weights=True, rounds_terms=True, ranked=True),
    "finalize": _Mode(ranked=True),
    "deepep": _Mode(rounds_weights=True, rounds_terms=True, adds_rounded=True, ranked=True),
}


def combine(y: Array, weights: Array, addends: Sequence[Array], aggregation: Aggregation = "contract") -> Array:
    """Returns the weighted sums `[N, D]` of rows `[N, count, D]`; see `detjax.ops.experts.combine_experts`."""
    if aggregation == "contract":
        return _combined(y, weights, addends)
    mode, dtype = _MODES[aggregation], y.dtype

    def tile(rows: tuple[Array, Array, tuple[Array, ...]], _: None) -> Array:
        y, weights, addends = rows
        if mode.ranked:
            order = jnp.argsort(-weights, axis=1, stable=True)
            weights = jnp.take_along_axis(weights, order, axis=1)
            y = jnp.take_along_axis(y, order[..., None], axis=1)
        if mode.rounds_weights:
            weights = rounded(weights, dtype).astype(ACCUMULATOR)
        terms = lax.optimization_barrier(
            [y[:, j].astype(ACCUMULATOR) * weights[:, j : j + 1] for j in range(y.shape[1])]
        )
        if mode.rounds_terms:
            terms = [rounded(term, dtype).astype(ACCUMULATOR) for term in terms]

        def add(total: Array, term: Array) -> Array:
            total = total + term
            return rounded(total, dtype).astype(ACCUMULATOR) if mode.adds_rounded else total

        total = rounded(functools.reduce(add, terms), dtype)
        # These implementations add each addend in a separate step after the experts.
        for addend in addends:
            total = rounded(total.astype(ACCUMULATOR) + addend.astype(ACCUMULATOR), dtype)
        return total

    return each_row(tile, (y, weights, tuple(addends)), None)


def combine_placed(y: Array, place: Array, weights: Array, addends: Sequence[Array]) -> Array:
    """Returns the contract's weighted sums of rows `[M, D]` at indices `place`, `[N, count]`; missing rows add 0."""

    def tile(rows: tuple[Array, Array, tuple[Array, ...]], y: Array) -> Array:
        place, weights, addends = rows
        return _weighted_sum([rows_at(y, place[:, j]) for j in range(place.shape[1])], weights, addends)

    return each_row(tile, (place, weights, tuple(addends)), y)


def _combined(y: Array, weights: Array, addends: Sequence[Array]) -> Array:
    """The weighted sums under contract."""

    def tile(rows: tuple[Array, Array, tuple[Array, ...]], _: None) -> Array:
        y, weights, addends = rows
        return _weighted_sum([y[:, j] for j in range(y.shape[1])], weights, addends)

    return each_row(tile, (y, weights, tuple(addends)), None)


def _weighted_sum(results: Sequence[Array], weights: Array, addends: Sequence[Array]) -> Array:
    terms = sealed([y.astype(ACCUMULATOR) * weights[:, j : j + 1] for j, y in enumerate(results)])
    return rounded(functools.reduce(jnp.add, [*terms, *(x.astype(ACCUMULATOR) for x in addends)]), results[0].dtype)


def rows_at(x: Array, index: Array) -> Array:
    """Returns the rows of an array, and zeros for an index beyond its end."""
    return x.at[index].get(mode="fill", fill_value=0)


def combine_backward(y: Array, weights: Array, dout: Array) -> tuple[Array, Array]:
    """Returns the gradients of rows `[N, count, D]` and of weights `[N, count]`."""

    def tile(rows: tuple[Array, Array, Array], _: None) -> tuple[Array, Array]:
        y, weights, dout = rows
        wide = dout.astype(ACCUMULATOR)[:, None]
        dy = rounded(wide * weights[..., None], y.dtype)
        return dy, row_sum(lax.optimization_barrier(y.astype(ACCUMULATOR) * wide))[..., 0]

    return each_row(tile, (y, weights, dout), None)


def add_rows(rows: Array) -> Array:
    """Returns the sums `[N, D]` of rows `[N, count, D]`, added left to right in float32 and rounded once."""

    def tile(rows: Array, _: None) -> Array:
        wide = rows.astype(ACCUMULATOR)
        return rounded(functools.reduce(jnp.add, [wide[:, j] for j in range(wide.shape[1])]), rows.dtype)

    return each_row(tile, rows, None)
