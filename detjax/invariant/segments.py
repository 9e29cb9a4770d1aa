"""Segments of a program between the products that all examples share, with their gradients.

A segment has one program for one example, and so has its gradient. Both are run for all examples in the same way.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from detjax.invariant import batched, equations, loops
from detjax.invariant.equations import Program, aval, is_inexact
from detjax.operands.rounding import rounded
from detjax.ops.dispatch import with_vmap_rule
from detjax.runtime import backends, varying


def run(
    program: Program, rows: Sequence[Array], shared: Sequence[Array], varies: frozenset[str] = frozenset()
) -> list[Array]:
    """Returns the results `[B, ...]` of a program for one example.

    The gradient of a shared array is the sum over examples in ascending order, in float32, rounded once. The backward
    pass keeps only the operands and recomputes the rest.

    Args:
        program: a function of one example's values, then of shared values.
        rows: arrays `[B, ...]`, at least one.
        shared: arrays that all examples share.
        varies: the axes of a surrounding mesh along which devices have different examples.
    """
    forward = with_vmap_rule(
        functools.partial(_forward, program, len(rows)), rows=(True,) * len(rows) + (False,) * len(shared)
    )

    @jax.custom_vjp
    def call(*operands: Array) -> list[Array]:
        return forward(*operands)

    def keep(*operands: Array) -> tuple[list[Array], tuple[Array, ...]]:
        return call(*operands), operands

    def gradients(
        operands: Sequence[Array], cotangents: Sequence[Any], fixed: frozenset[core.Var] = frozenset()
    ) -> tuple[Array | None, ...]:
        wanted = [c for c, v in zip(cotangents, program.results, strict=True) if is_inexact(v)]
        backward = functools.partial(_backward, program, len(rows), len(operands), fixed)
        computed = iter(with_vmap_rule(backward, rows=(False,) * (len(operands) + len(wanted)))(*operands, *wanted))
        # A gradient of zeros is typed as varying over no axis; it must get the type of its operand.
        return tuple(
            varying.over(next(computed), varying.axes(x)) if is_inexact(v) and v not in fixed else None
            for v, x in zip(program.inputs, operands, strict=True)
        )

    # JAX refuses derivatives with respect to values that a function with its own derivative closes over, so they are
    # requested only where they are wanted.
    constant = {v for v in equations.closed_over(program) & set(program.inputs) if is_inexact(v)}

    def keep_marked(*operands: Any) -> tuple[list[Array], tuple[list[Array], list[tuple[()] | None]]]:
        values = [x.value for x in operands]
        return call(*values), (values, [() if x.perturbed else None for x in operands])

    def marked_gradients(kept: Any, cotangents: Sequence[Any]) -> tuple[Array | None, ...]:
        operands, marks = kept
        fixed = {v for v, mark in zip(program.inputs, marks, strict=True) if mark is None and v in constant}
        return gradients(operands, list(map(_instantiated, cotangents)), frozenset(fixed))

    if constant:
        call.defvjp(keep_marked, marked_gradients, symbolic_zeros=True)
    else:
        call.defvjp(keep, gradients)
    # No collective may run within a segment, because devices may take different branches there: weights' gradients
    # are added outside. Functions with their own derivatives get the types that they were traced for.
    if not varies:
        return call(*rows, *shared)
    calls = [eqn for eqn in program.eqns if equations.contains(eqn, equations.OWN_RULES)]
    kept = {v for eqn in calls for v in eqn.invars if isinstance(v, core.Var)}
    given = zip(shared, program.inputs[len(rows) :], strict=True)
    return call(*rows, *(x if v in kept else varying.over(x, varies) for x, v in given))


def _forward(program: Program, rows: int, *operands: Array) -> list[Array]:
    """Returns the results for rows that may have leading axes added by `jax.vmap`."""
    ndim = getattr(aval(program.inputs[0]), "ndim", 0)
    leading = operands[0].shape[: operands[0].ndim - ndim]
    flat = [x.reshape(math.prod(leading), *x.shape[len(leading) :]) for x in operands[:rows]]
    return [x.reshape(*leading, *x.shape[1:]) for x in _schedule()(program, flat, operands[rows:])]


def _instantiated(cotangent: Any) -> Array:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        like: Any = cotangent.aval
        return jnp.zeros(like.shape, like.dtype)
    return cotangent


def _backward(program: Program, rows: int, inputs: int, fixed: frozenset[core.Var], *operands: Array) -> list[Array]:
    """Returns the gradients of the differentiable inputs that are not fixed, in order."""
    given, cotangents = operands[:inputs], operands[inputs:]
    differentiable = [is_inexact(v) and v not in fixed for v in program.inputs]
    weights = sum(differentiable[rows:])

    def pulled_back(*values: Array) -> list[Array]:
        """Returns the gradients of one example, given its rows, its cotangents and the shared values."""
        mapped, cotangents, shared = values[:rows], values[rows : rows + wanted], values[rows + wanted :]
        primals = [*mapped, *shared]

        def results(*numbers: Array) -> list[Array]:
            given = iter(numbers)
            full = [next(given) if d else x for x, d in zip(primals, differentiable, strict=True)]
            return [y for y, v in zip(program(*full), program.results, strict=True) if is_inexact(v)]

        given = [x for x, d in zip(primals, differentiable, strict=True) if d]
        _, pull = jax.vjp(results, *given)
        return list(pull(list(cotangents)))

    wanted = len(cotangents)
    examples = [*given[:rows], *cotangents]
    shapes = [varying.shape(x, x.shape[1:]) for x in examples] + [varying.shape(x, x.shape) for x in given[rows:]]
    gradient = Program.from_jaxpr(equations.without_types(jax.make_jaxpr(pulled_back)(*shapes)))
    outputs = _schedule()(gradient, examples, given[rows:], weights)
    totals = [aval(v).dtype for v in gradient.results[len(outputs) - weights :]]
    return [*outputs[: len(outputs) - weights], *map(rounded, outputs[len(outputs) - weights :], totals)]


def _schedule() -> Any:
    """Returns the function that runs a program for all examples on this platform.

    A CPU runs the examples in sequence. On accelerators, where every element of an array goes through the same
    instructions, the examples are one more axis.
    """
    return loops.run if backends.target() == "cpu" else batched.run
