"""The choice of experts by the softmax of logits, together with the places of tokens' rows."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from detjax.ops.dispatch import Operation, one_by_one
from detjax.ops.experts import ExpertRows, choose_experts, expert_rows, most_rows
from detjax.ops.grouped_kernels import group_unit
from detjax.ops.softmax import softmax

_ROUTE: Final = Operation("route", {"hopper": "detjax.pallas.hopper.expert_choice"}, part_of=("softmax",))


def route(
    logits: Float32[Array, "N E"],
    count: int,
    *,
    normalized: bool = False,
    present: Bool[Array, "N"] | None = None,
    first: Int32[Array, ""] | None = None,
    experts: int | None = None,
) -> tuple[Int32[Array, "N count"], Float32[Array, "N count"], ExpertRows]:
    """Returns the experts that each token chooses by the softmax of its logits, their weights, and the tokens' rows.

    `softmax`, `choose_experts` and `expert_rows` give the same bits in sequence. Hopper GPUs have one kernel for the
    first two and, for few tokens, as in decode steps of few requests, for all three.

    Args:
        logits: each token's logit of each expert, float32.
        count: number of experts that a token chooses.
        normalized: see `choose_experts`.
        present: see `expert_rows`.
        first: the first expert that has rows here; experts before it and after the last one are on other devices.
            Default: the first expert of all.
        experts: number of experts that have rows here; default: all.

    Raises:
        TypeError: logits are not float32.
        ValueError: there are fewer experts than a token chooses.

    Example:
        >>> ids, weights, rows = ops.route(jnp.array([[0.0, 2.0, 1.0]]), 2, normalized=True)
        >>> ids, rows.group_sizes
        (Array([[1, 2]], dtype=int32), Array([0, 1, 1], dtype=int32))
    """
    (tokens, known), local = logits.shape, logits.shape[1] if experts is None else experts
    if _ROUTE.is_served() and logits.dtype == jnp.float32 and 1 <= count <= known:
        kernels, choices = _ROUTE.module(), tokens * count
        unit = group_unit(choices, local)
        shape = tokens, count, local, unit, most_rows(choices, local, unit)
        problem = kernels.Problem(*shape, experts=known, normalized=normalized)
        if problem.chooses:
            results: tuple[Array, ...] = _by_kernel(logits, present, first, problem)
            ids, weights, *placed = results
            if placed:
                sizes, token, place, tiles = placed
                return ids, weights, ExpertRows(sizes, token, place, unit, tiles)
            return ids, weights, expert_rows(_local(ids, first, local), local, present)
    ids, weights = choose_experts(softmax(logits), count, normalized=normalized)
    return ids, weights, expert_rows(_local(ids, first, local), local, present)


def _local(ids: Array, first: Array | None, experts: int) -> Array:
    """Returns each expert's index among those that have rows, and their number for all others."""
    if first is None:
        return ids
    is_local = (ids >= first) & (ids < first + experts)
    return jnp.where(is_local, ids - first, jnp.int32(experts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_kernel(logits: Array, present: Array | None, first: Array | None, problem: Any) -> tuple[Array, ...]:
    choose = functools.partial(_ROUTE.module().choose, problem=problem)
    return tuple(one_by_one(choose, (logits, present, first)))


def _forward(
    logits: Array, present: Array | None, first: Array | None, problem: Any
) -> tuple[tuple[Array, ...], tuple[Array]]:
    return _by_kernel(logits, present, first, problem), (logits,)


def _backward(problem: Any, saved: tuple[Array], gradients: tuple[Any, ...]) -> tuple[Any, None, None]:
    """Returns the gradients of the separate steps, whose bits are the contract's."""

    def weights(logits: Array) -> Array:
        return choose_experts(softmax(logits), problem.count, normalized=problem.normalized)[1]

    return *jax.vjp(weights, *saved)[1](gradients[1]), None, None


_by_kernel.defvjp(_forward, _backward)
