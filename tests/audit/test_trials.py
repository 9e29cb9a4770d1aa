"""The batches that certificates run, and the counterexamples that they find there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from detjax import audit
from detjax.audit import Outcome, Role
from detjax.audit.certification.trials import NEIGHBOURS, Rows, Runs, Trial, trials

X = jnp.arange(6.0).reshape(3, 2) + 1


def test_two_rows_stand_first_in_the_middle_and_last_among_all_neighbours() -> None:
    assert list(trials(1, 3)) == [Trial(1, row, 0, NEIGHBOURS[0]) for row in (0, 1)]
    assert list(trials(2, 1)) == [Trial(2, 0, at, others) for at in (0, 1) for others in NEIGHBOURS]
    places = [(one.row, one.position) for one in trials(5, 9) if one.neighbours == NEIGHBOURS[0]]
    assert places == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4)]


def test_neighbours_are_the_other_rows_large_numbers_or_the_row_itself() -> None:
    given = Rows([X, X.T, jnp.arange(3), jnp.ones(2)], [0, -1, 0, None])
    x, turned, numbers, shared = given.batch(Trial(4, 1, 2, NEIGHBOURS[0]))
    assert x[:, 0].tolist() == [X[k, 0] for k in (1, 2, 1, 1)]
    assert np.array_equal(turned, x.T) and numbers.tolist() == [1, 2, 1, 1] and shared.tolist() == [1.0, 1.0]
    large, turned, numbers, shared = given.batch(Trial(4, 1, 2, NEIGHBOURS[1]))
    assert np.array_equal(large, x * jnp.asarray([-1000.0, -1000.0, 1.0, -1000.0])[:, None])
    assert np.array_equal(turned, large.T) and numbers.tolist() == [1, 2, 1, 1] and shared.tolist() == [1.0, 1.0]
    alike, *_ = given.batch(Trial(4, 1, 2, NEIGHBOURS[2]))
    assert np.array_equal(alike, jnp.broadcast_to(X[1], (4, 2)))


def runs(fn: Any, *arrays: Array, smallest: int = 1, out_axes: Any = (0,)) -> Runs:
    return Runs(jax.jit(fn), Rows(arrays, [0] * len(arrays)), out_axes, smallest)


def test_a_counterexample_says_what_differs_and_how_far() -> None:
    def fn(x: Array) -> dict[str, Array]:
        moved = jnp.nextafter(x, jnp.full_like(x, jnp.inf))
        return {"a": x, "b": jnp.where((jnp.arange(2) == 1) & (x.shape[0] > 2), moved, x)}

    seen = runs(fn, X, smallest=2, out_axes=(0, 0))
    assert seen.counterexample(Trial(2, 1, 1, NEIGHBOURS[0])) is None
    difference = seen.counterexample(Trial(3, 1, 2, NEIGHBOURS[1]))
    assert difference is not None
    assert (difference.batch, difference.alone, difference.row, difference.position, difference.neighbours) == (
        3,
        2,
        1,
        2,
        NEIGHBOURS[1],
    )
    assert (difference.result, difference.element, difference.dtype) == ("['b']", (1,), "float32")
    assert (difference.expected, difference.given) == (4.0, np.nextafter(np.float32(4), np.float32(5)).item())
    assert (difference.ulps, difference.differing, difference.elements) == (1, 1, 2)
    assert "row 1 at position 2 of a batch of 3 (neighbours: large numbers): result['b'][1] is 4.0000004" in str(
        difference
    )
    assert "but 4.0 in a batch of 2: 1 ulp of float32; 1 of 2 elements of the row differ" in str(difference)


@pytest.mark.parametrize(
    ("fn", "ulps", "dtype"),
    [
        (lambda x: x.astype(jnp.int32) - 7 * (x.shape[0] > 1), 7, "int32"),
        (lambda x: jax.lax.complex(x, x * (1.0 if x.shape[0] == 1 else 2.0)), 2**23, "complex64"),
        (lambda x: x.astype(jnp.bfloat16) * (1 if x.shape[0] == 1 else 2), 2**7, "bfloat16"),
        (lambda x: jax.vmap(lambda k: jax.random.key(k))(jnp.arange(len(x)) + len(x)), 1, "uint32"),
        (lambda x: x > 0 if x.shape[0] == 1 else x < 0, 1, "bool"),
    ],
)
def test_numbers_of_every_kind_are_compared(fn: Any, ulps: int, dtype: str) -> None:
    difference = runs(fn, X).counterexample(Trial(2, 0, 0, NEIGHBOURS[0]))
    assert difference is not None and (difference.ulps, difference.dtype) == (ulps, dtype)


def test_results_without_rows_are_not_compared() -> None:
    fn = lambda x: (x, x.sum())  # noqa: E731
    assert runs(fn, X, out_axes=(0, None)).counterexample(Trial(2, 0, 0, NEIGHBOURS[0])) is None


# --- certificates -----------------------------------------------------------------------------------------------------


def test_a_certificate_counts_the_roles_of_equations() -> None:
    def fn(x: Array, w: Array) -> Array:
        shared = w[::-1]
        return jnp.exp(jnp.maximum(x[:, ::-1], shared[None]) + 1)

    certificate = audit.certify(fn, (X, X[0]), (0, None), batch_sizes=(1, 2))
    counts = {role: count for role, count in certificate.roles.items() if count}
    assert counts == {Role.SHARED: 2, Role.APART: 2, Role.EXACT: 1, Role.CHOSEN: 1}
    assert certificate.outcome is Outcome.OBSERVED and [risk.primitive for risk in certificate.risks] == ["exp"]
    assert str(certificate).endswith("is observed equal in 14 cases, batches of 1, 2; 1 equations have no proof")
    content = certificate.as_dict()
    assert content["roles"]["chosen"] == 1 and content["risks"][0]["role"] == "chosen" and content["cases"] == 14


def test_outcomes_are_ordered_by_what_they_promise() -> None:
    order = [Outcome.REFUTED, Outcome.OBSERVED, Outcome.PROVEN]
    assert [[a.is_at_least(b) for b in order] for a in order] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_sizes_are_run_once_in_ascending_order_and_those_between_are_tried() -> None:
    seen = []

    def fn(x: Array) -> Array:
        jax.debug.callback(lambda x: seen.append(len(x)), x)
        return x * (2 if x.shape[0] < 4 else 3)

    certificate = audit.certify(fn, (X,), batch_sizes=(6, 2, 2, 3))
    jax.effects_barrier()
    assert certificate.batch_sizes == (2, 3, 6)
    difference = certificate.counterexample
    assert difference is not None and (difference.batch, difference.alone) == (4, 2)
    assert list(dict.fromkeys(seen)) == [2, 3, 6, 4]


def test_mixed_rows_come_first_among_risks() -> None:
    def fn(x: Array) -> Array:
        return jnp.exp(x) - x.max(axis=0, keepdims=True)

    risks = audit.risks(fn, (X,), batch_sizes=(1, 2))
    assert [risk.role for risk in risks][:1] == [Role.MIXES] and {risk.primitive for risk in risks} >= {"exp"}
