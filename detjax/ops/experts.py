"""Mixtures of experts under contract: the choice of experts, and the sum of their results.

ids, weights = choose_experts(softmax(logits), 8)
rows = expert_rows(ids, experts=128)
y = grouped_matmul(rows.gather(x), w, rows.group_sizes, unit=rows.unit)
x = combine_experts(y, weights, rows, residual=x)
"""

import dataclasses
import functools
from typing import Any, Final, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from detjax.operands.numerics import ceil_div, round_down
from detjax.operands.options import Aggregation
from detjax.operands.pytrees import array_dataclass
from detjax.ops.checks import check_dtype, check_integers, check_shape
from detjax.ops.dispatch import Operation, one_by_one
from detjax.ops.grouped_kernels import group_unit
from detjax.portable import experts as portable
from detjax.runtime import compilation

_PLACES: Final = Operation("expert_rows", {"hopper": "detjax.pallas.hopper.expert_places"}, part_of=("grouped_matmul",))
"""The kernel of rows of few tokens."""
_GATHER: Final = Operation("gather_rows", {"hopper": "detjax.pallas.hopper.row_gather"}, part_of=("grouped_matmul",))
"""The kernel that gathers many rows."""
_BLOCK: Final = 256
"""Choices in a block that is searched for equal choices at once."""


@compilation.jit(static_argnames=("count", "normalized", "eps"))
def choose_experts(
    scores: Float32[Array, "N E"],
    count: int,
    *,
    ranks: Float32[Array, "N E"] | None = None,
    normalized: bool = False,
    eps: float = 0.0,
) -> tuple[Int32[Array, "N count"], Float32[Array, "N count"]]:
    """Returns the experts that each token chooses, in ascending order, and their weights.

    A token chooses the experts of the highest ranks; among equals, the lower id wins. A row depends only on itself.

    Args:
        scores: each token's score of each expert, float32.
        count: number of experts that a token chooses.
        ranks: the ranks to choose by; default: the scores. They have no gradient.
        normalized: weights are scores times the rounded reciprocal of their sum, whose terms are added in ascending
            order of ids and then to `eps`; otherwise weights are the scores.
        eps: see `normalized`.

    Raises:
        TypeError: a dtype is not float32.
        ValueError: shapes do not fit together, or there are fewer experts than a token chooses.

    Example:
        >>> ids, weights = ops.choose_experts(jnp.array([[0.1, 0.6, 0.3]]), 2, normalized=True)
        >>> ids
        Array([[1, 2]], dtype=int32)
    """
    for name, array in {"scores": scores, "ranks": ranks}.items():
        if array is not None and array.dtype != jnp.float32:
            raise TypeError(f"choose_experts: {name} has dtype {array.dtype}; accepted: float32. Convert it first.")
    check_shape("choose_experts", "ranks", ranks, scores.shape, f"scores being {scores.shape}")
    if not 1 <= count <= scores.shape[1]:
        raise ValueError(f"choose_experts: count is {count}; accepted: 1 to {scores.shape[1]}, the number of experts")
    return _choose(scores, scores if ranks is None else ranks, count, normalized, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _choose(scores: Array, ranks: Array, count: int, normalized: bool, eps: float) -> tuple[Array, Array]:
    return portable.choose(scores, jax.lax.stop_gradient(ranks), count, normalized=normalized, eps=eps)


def _choose_forward(
    scores: Array, ranks: Array, count: int, normalized: bool, eps: float
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    chosen: tuple[Array, Array] = _choose(scores, ranks, count, normalized, eps)
    return chosen, (scores, chosen[0])


def _choose_backward(
    count: int, normalized: bool, eps: float, saved: tuple[Array, Array], gradients: tuple[Any, Array]
) -> tuple[Array, Array]:
    scores, ids = saved
    dscores = portable.choose_backward(scores, ids, gradients[1], normalized=normalized, eps=eps)
    return dscores, jnp.zeros_like(scores)


_choose.defvjp(_choose_forward, _choose_backward)


@array_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Rows of tokens sorted by expert: a token has one row for each expert that it chose.

    Attributes:
        group_sizes: number of rows of each expert, `[E]` int32, including padding.
        token: the token of each row, `[M]`, ascending within an expert; N for padding rows.
        place: the row of each token and each of its experts, `[N, count]`; M for an absent token.
        unit: M and all group sizes are multiples of this number, for `grouped_matmul`.
        tiles: the expert of each `unit` rows, and at the end how many such tiles have rows, `[M / unit + 1]`; for
            `grouped_matmul`, which computes it from the group sizes if it is None.

    Example:
        >>> rows = ops.expert_rows(jnp.array([[1, 0], [1, 2]], jnp.int32), experts=3)
        >>> rows.gather(jnp.array([[10.0], [20.0]]))[:, 0]
        Array([10., 10., 20., 20.], dtype=float32)
    """

    group_sizes: Int32[Array, "E"]
    token: Int32[Array, "M"]
    place: Int32[Array, "N count"]
    unit: int = dataclasses.field(metadata={"static": True})
    tiles: Int32[Array, "T"] | None = None

    def gather(self, x: Float[Array, "N D"]) -> Float[Array, "M D"]:
        """Gathers `x` into rows; padding rows are zeros.

        A token's gradient adds the gradients of its rows in ascending order of experts.
        """
        return _gather(x, self)

    def results(self, y: Float[Array, "M D"]) -> Float[Array, "N count D"]:
        """Returns the results of each token in the order of its experts, given the results of all rows.

        Absent tokens get zeros.
        """
        return portable.rows_at(y, self.place)


def expert_rows(ids: Int32[Array, "N count"], experts: int, present: Bool[Array, "N"] | None = None) -> ExpertRows:
    """Returns the rows of tokens that chose these experts.

    Groups are padded for the backend's kernels, so there may be more rows than choices.

    Args:
        ids: the distinct experts of each token. The id `experts` stands for experts of other devices: it may occur any
            number of times and has no rows.
        experts: number of experts.
        present: False for padding tokens, which have no rows. Default: all True.

    Example:
        >>> ops.expert_rows(jnp.array([[1, 0], [1, 2]], jnp.int32), experts=3).group_sizes
        Array([1, 2, 1], dtype=int32)
    """
    check_integers("expert_rows", ids=ids)
    tokens, unit = len(ids), group_unit(ids.size, experts)
    if _PLACES.is_served():
        problem = _PLACES.module().Problem(*ids.shape, experts, unit, most_rows(ids.size, experts, unit))
        if problem.served:
            placed: tuple[Array, ...] = _by_kernel(ids.astype(jnp.int32), present, problem)
            sizes, token, place, tiles = placed
            return ExpertRows(sizes, token, place, unit, tiles)
    keys = ids if present is None else jnp.where(present[:, None], ids, jnp.int32(experts))
    earlier, totals = _earlier_and_totals(keys.reshape(-1), experts)
    sizes, expert = -(-totals // unit) * unit, jnp.arange(experts, dtype=jnp.int32)
    firsts = jnp.where(expert[None] < expert[:, None], sizes[None], 0).sum(axis=1, dtype=jnp.int32)
    rows = most_rows(ids.size, experts, unit)
    place = jnp.where(keys < experts, firsts.at[keys].get(mode="clip") + earlier.reshape(keys.shape), jnp.int32(rows))
    chooser = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], place.shape)
    token = jnp.full(rows, tokens, jnp.int32).at[place].set(chooser, mode="drop", unique_indices=True)
    return ExpertRows(sizes, token, place, unit)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _by_kernel(ids: Array, present: Array | None, problem: Any) -> tuple[Array, ...]:
    places = functools.partial(_PLACES.module().place, problem=problem)
    return tuple(one_by_one(places, (ids, present)))


def _placed_forward(ids: Array, present: Array | None, problem: Any) -> tuple[tuple[Array, ...], None]:
    return _by_kernel(ids, present, problem), None


def _placed_backward(problem: Any, saved: None, gradients: Any) -> tuple[None, None]:
    """Places are integers, which have no gradients."""
    del problem, saved, gradients
    return None, None


_by_kernel.defvjp(_placed_forward, _placed_backward)


def most_rows(choices: int, experts: int, unit: int) -> int:
    """Returns the rows that a number of choices needs at most: each chosen expert may have `unit - 1` padding rows."""
    return round_down(choices + min(experts, choices) * (unit - 1), unit)


def _earlier_and_totals(keys: Int32[Array, "K"], experts: int) -> tuple[Int32[Array, "K"], Int32[Array, "E"]]:
    """Returns the number of earlier equal keys for each key that is an expert, and the count of each expert.

    Keys are compared within their block, and blocks are counted. A sort would give the same result, but XLA compiles
    the sort of each layer separately, in up to 15 kernels, whereas equal fusions share one kernel.
    """
    blocks = ceil_div(len(keys), _BLOCK)
    blocked = jnp.pad(keys, (0, blocks * _BLOCK - len(keys)), constant_values=experts).reshape(blocks, _BLOCK)
    place, expert = jnp.arange(_BLOCK, dtype=jnp.int32), jnp.arange(experts, dtype=jnp.int32)
    is_equal = blocked[:, None, :] == blocked[:, :, None]
    within = (is_equal & (place[None] < place[:, None])[None]).sum(axis=2, dtype=jnp.int32)
    by_block = (blocked[:, None, :] == expert[None, :, None]).sum(axis=2, dtype=jnp.int32)
    ends = jnp.cumsum(by_block, axis=0, dtype=jnp.int32)
    before = jnp.take_along_axis(ends - by_block, blocked, axis=1, mode="clip")
    return (before + within).reshape(-1)[: len(keys)], ends[-1]


@jax.custom_vjp
def _gather(x: Array, rows: ExpertRows) -> Array:
    if _GATHER.is_served() and _GATHER.module().serves(x, rows.token):
        gathered: Array = one_by_one(_GATHER.module().rows_at, (x, rows.token))
        return gathered
    return portable.rows_at(x, rows.token)


def _gather_forward(x: Array, rows: ExpertRows) -> tuple[Array, ExpertRows]:
    return _gather(x, rows), rows


def _gather_backward(rows: ExpertRows, dy: Array) -> tuple[Array, None]:
    return portable.add_rows(portable.rows_at(dy, rows.place)), None


_gather.defvjp(_gather_forward, _gather_backward)


@compilation.jit(static_argnames="aggregation")
def combine_experts(
    y: Float[Array, "M D"] | Float[Array, "N count D"],
    weights: Float32[Array, "N count"],
    rows: ExpertRows | None,
    *,
    shared: Float[Array, "N D"] | None = None,
    residual: Float[Array, "N D"] | None = None,
    aggregation: Aggregation = "contract",
) -> Float[Array, "N D"]:
    """Returns the weighted sum of each token's experts' results, rounded once.

    Products are float32 and rounded. They are added left to right in ascending order of experts, then the result of
    the shared experts and the residual.

    Args:
        y: the experts' results, in the order of the rows; bfloat16, float16 or float32.
        weights: the weights of each token's experts, in ascending order of experts.
        rows: the rows of `y`; None: `y` has the results by token, as from `ExpertRows.results`.
        shared: the result of experts that all tokens share.
        residual: rows of y's dtype that are added last.
        aggregation: the roundings and the order of the sum; "contract" is described above. The others match other
            implementations for comparison, and are functions of the token, too; they round the experts' sum before
            adding `shared`, and again before adding the residual:

            - "hf_eager": weights, products and all partial sums are rounded to y's dtype, in ascending order of
              experts; "hf_eager_float32": the same, but weights are not rounded;
            - "hf_grouped": weights and products are rounded, in descending order of weights;
            - "finalize": nothing is rounded before the whole sum, in descending order of weights;
            - "deepep": like "hf_eager", in descending order of weights.

            Gradients are always computed as for "contract".

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together, or the aggregation is unknown.

    Example:
        >>> rows = ops.expert_rows(jnp.array([[1, 0]], jnp.int32), experts=2)
        >>> y = rows.gather(jnp.array([[2.0]]))
        >>> ops.combine_experts(y, jnp.array([[0.25, 0.75]]), rows)
        Array([[2.]], dtype=float32)
    """
    if aggregation not in get_args(Aggregation):
        accepted = ", ".join(get_args(Aggregation))
        raise ValueError(f"combine_experts: aggregation is {aggregation!r}; accepted: {accepted}")
    check_dtype("combine_experts", y=y)
    check_dtype("combine_experts", like=y, shared=shared, residual=residual)
    if rows is None:
        check_shape("combine_experts", "y", y, (*weights.shape, y.shape[-1]), f"weights being {weights.shape}")
    else:
        check_shape("combine_experts", "weights", weights, rows.place.shape, f"rows.place being {rows.place.shape}")
    for name, array in {"shared": shared, "residual": residual}.items():
        check_shape("combine_experts", name, array, (len(weights), y.shape[-1]), f"y being {y.shape}")
    return _combine(y, weights, rows, (shared, residual), aggregation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _combine(
    y: Array, weights: Array, rows: ExpertRows | None, addends: tuple[Array | None, ...], aggregation: Aggregation
) -> Array:
    present = [x for x in addends if x is not None]
    if rows is not None and aggregation == "contract":
        return portable.combine_placed(y, rows.place, weights, present)
    return portable.combine(_by_token(y, rows), weights, present, aggregation)


def _by_token(y: Array, rows: ExpertRows | None) -> Array:
    return y if rows is None else rows.results(y)


def _combine_forward(
    y: Array, weights: Array, rows: ExpertRows | None, addends: tuple[Array | None, ...], aggregation: Aggregation
) -> tuple[Array, tuple[Any, ...]]:
    saved = y, weights, rows, tuple(x is not None for x in addends)
    return _combine(y, weights, rows, addends, aggregation), saved


def _combine_backward(aggregation: Aggregation, saved: tuple[Any, ...], dout: Array) -> tuple[Any, ...]:
    y, weights, rows, has_addend = saved
    dy, dweights = portable.combine_backward(_by_token(y, rows), weights, dout)
    daddends = tuple(dout if flag else None for flag in has_addend)
    if rows is None:
        return dy, dweights, None, daddends
    flat = dy.reshape(-1, y.shape[1])
    by_row = jnp.zeros_like(y).at[rows.place.reshape(-1)].set(flat, mode="drop", unique_indices=True)
    return by_row, dweights, None, daddends


_combine.defvjp(_combine_forward, _combine_backward)
