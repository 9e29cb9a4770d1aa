"""Shared values as segments of a program read them."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from detjax.invariant import interpreter
from detjax.invariant.equations import Program


def _computed(fn: object, *shapes: jax.ShapeDtypeStruct) -> core.Jaxpr:
    """The program that runs a function of examples and of what they share, the last argument."""
    program = Program.from_jaxpr(jax.make_jaxpr(fn)(*shapes))  # pyright: ignore[reportCallIssue]
    flags = [True] * (len(shapes) - 1) + [False]
    batch = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes[:-1]]
    return jax.make_jaxpr(lambda *values: interpreter.run(program, values, flags, 3)[0])(*batch, shapes[-1])


def _makers(jaxpr: core.Jaxpr) -> dict[core.Var, core.JaxprEqn]:
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


X, W = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.bfloat16)


def test_what_was_moved_or_widened_is_not_behind_a_barrier_but_what_it_was_made_of_is() -> None:
    jaxpr = _computed(lambda x, w: x * w[::-1].astype(jnp.float32), X, W)
    makers = _makers(jaxpr)
    (widened,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type")
    (moved,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "rev")
    assert widened.invars[0] is moved.outvars[0]
    assert makers[moved.invars[0]].primitive.name == "optimization_barrier"
    readers = [eqn.primitive.name for eqn in jaxpr.eqns if widened.outvars[0] in eqn.invars]
    assert "optimization_barrier" not in readers


@pytest.mark.parametrize("fn", [jnp.sin, lambda w: w * w, lambda w: w.astype(jnp.float16)])
def test_what_was_computed_is_behind_a_barrier(fn: object) -> None:
    jaxpr = _computed(lambda x, w: x * fn(w).astype(jnp.float32), X, W)  # pyright: ignore
    makers = _makers(jaxpr)
    (widened,) = (
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.float32  # pyright: ignore[reportAttributeAccessIssue]
    )
    assert makers[widened.invars[0]].primitive.name == "optimization_barrier"
