"""Numbers of a program that come from the number of rows: those that differ in the program of one row more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.sizes import Sizes, _differ

pytestmark = pytest.mark.usefixtures("lenient_promotion")


def compared(fn: Callable[[Array], Any]) -> tuple[core.Jaxpr, Sizes]:
    first, second = (jax.make_jaxpr(fn)(jnp.ones((rows, 4))) for rows in (3, 4))
    return first, Sizes.between(first, second)


def first_of(jaxpr: core.Jaxpr, primitive: str) -> core.JaxprEqn:
    return next(eqn for eqn in equations.all_equations(jaxpr) if eqn.primitive.name == primitive)


@pytest.mark.parametrize("inside", [False, True])
def test_a_literal_that_differs_comes_from_the_number_of_rows(inside: bool) -> None:
    call = jax.jit if inside else lambda fn: fn
    jaxpr, sizes = compared(lambda x: call(lambda x: jnp.sin(x * len(x)) + 3.0)(x))
    assert sizes.is_same
    assert [sizes.is_literal(first_of(jaxpr, "mul"), at) for at in (0, 1)] == [False, True]
    assert not sizes.is_literal(first_of(jaxpr, "add"), 1)


def test_parameters_and_lengths_that_differ_come_from_the_number_of_rows() -> None:
    jaxpr, sizes = compared(lambda x: (x ** len(x), x**3))
    powers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "integer_pow"]
    assert [sizes.is_parameter(eqn) for eqn in powers] == [True, False]
    for length, comes in ((len, True), (lambda x: x.shape[1], False)):
        jaxpr, sizes = compared(lambda x, length=length: lax.fori_loop(0, length(x), lambda _, y: y * 2, x))
        assert sizes.is_parameter(first_of(jaxpr, "scan")) == comes


def test_axes_that_grow_are_those_of_the_first_operand() -> None:
    jaxpr, sizes = compared(lambda x: jnp.broadcast_to(x[:, None], (len(x), len(x), 4)).sum(1))
    assert sizes.axes(first_of(jaxpr, "reduce_sum")) == {0, 1}
    assert sizes.axes(first_of(jaxpr, "broadcast_in_dim")) == {0}


def test_constants_that_differ_where_they_overlap_come_from_the_number_of_rows() -> None:
    for fn, comes in (
        (lambda x: x * np.full((1, 4), 1 / len(x), np.float32), True),
        (lambda x: x * np.full((len(x), 4), 2, np.float32), False),
        (lambda x: x * np.arange(len(x), dtype=np.float32)[::-1, None], True),
    ):
        jaxpr, sizes = compared(fn)
        assert bool(sizes.constants(jaxpr)) == comes


def test_programs_with_other_equations_are_compared_line_by_line() -> None:
    def unrolled(x: Array) -> Array:
        for row in range(len(x)):
            x = x * row
        return x + 5.0

    jaxpr, sizes = compared(unrolled)
    assert not sizes.is_same
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "mul"]
    assert all(sizes.is_literal(eqn, 1) for eqn in products)
    assert not sizes.is_literal(first_of(jaxpr, "add"), 1)


@pytest.mark.parametrize(
    ("one", "two", "differ"),
    [
        (np.float32(1), np.float32(1), False),
        (np.float32(1), np.float32(2), True),
        (np.float32(0.0), np.float32(-0.0), True),
        (np.float32(np.nan), np.float32(np.nan), False),
        (np.float32(1), np.int32(1), True),
        (np.float32(1), np.float32([1]), True),
        (np.float32([1, 2]), np.float32([1, 2, 3]), False),
        (np.float32([1, 2]), np.float32([1, 3, 3]), True),
    ],
)
def test_numbers_differ_by_their_bits(one: Any, two: Any, differ: bool) -> None:
    assert _differ(one, two) == differ
    assert not _differ(one, one)
