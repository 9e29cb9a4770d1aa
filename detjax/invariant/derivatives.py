"""Restricts derivatives to reverse mode; any other derivative raises an error that names `batch_invariant`.

Arrays pass through `reverse_only` before an invariant function. It returns them unchanged. Its derivative is an
equation that can be transposed, which is all that reverse mode needs, but not evaluated.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.interpreters.ad import LinearizeTracer  # JAX has no public name for reverse mode's tracer
from jax.extend import core
from jax.interpreters import ad, batching, mlir


class ForwardMode(TypeError):
    """A derivative was requested that `batch_invariant` does not support."""

    def __init__(self) -> None:
        super().__init__(
            "detjax.batch_invariant: forward-mode derivatives (jax.jvp, jax.jacfwd, jax.linearize, jax.hessian) and "
            "gradients of gradients have no bits under contract; accepted: jax.grad, jax.vjp or jax.jacrev, once"
        )


JAX_REFUSES = ("forward-mode autodiff (jvp) to a custom_vjp", "Linearization failed to produce known values")
"""Prefixes of JAX's own errors for the same cause."""


def reverse_only(arrays: Sequence[Array]) -> list[Array]:
    """Returns arrays unchanged, with derivatives in reverse mode only."""
    inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    passed = iter(_passed([x for x, passes in zip(arrays, inexact, strict=True) if passes]))
    return [next(passed) if passes else x for x, passes in zip(arrays, inexact, strict=True)]


@jax.custom_jvp
def _passed(arrays: list[Array]) -> list[Array]:
    return list(arrays)


def _derivative(primals: tuple[list[Array]], tangents: tuple[list[Any]]) -> tuple[list[Array], list[Any]]:
    if any(isinstance(x, (ad.JVPTracer, LinearizeTracer)) for x in primals[0]):  # a derivative of this derivative
        raise ForwardMode
    varied = [t if isinstance(t, jax.custom_derivatives.SymbolicZero) else _tangent.bind(t) for t in tangents[0]]
    return _passed(primals[0]), varied


_passed.defjvp(_derivative, symbolic_zeros=True)


def _refuse(*_: Any, **__: Any) -> Any:
    raise ForwardMode


_tangent = core.Primitive("tangent_of_batch_invariant")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x: x)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.defvectorized(_tangent)
mlir.register_lowering(_tangent, _refuse)
