"""Inline Mosaic GPU code for what Pallas cannot express, each primitive next to its plain-JAX twin.

A *primitive* is a function that emits MLIR for the registers of one thread. Pallas' interpreter, which runs kernels on
a CPU, cannot run MLIR. So every primitive has a *twin*: a function of the same signature in plain JAX that computes the
same numbers in the same order. The decorator `primitive` connects the two, and kernels that are traced within `twins()`
use the twins.

    def _plain_double(x: Array) -> Array:
        return x + x

    @primitive(twin=_plain_double, args=(MATRIX,), out=like(MATRIX))
    def double(x: Any) -> Any:
        return x._pointwise(arith.addf, x)

Positional arguments of a primitive are its operands: arrays, references, or Python integers, which become int32 arrays.
Keyword arguments are constants of the program and reach the emitting function as they are.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

_uses_twins = False


@contextlib.contextmanager
def twins() -> Iterator[None]:
    """Kernels that are traced within this context use the plain-JAX twins of all primitives."""
    global _uses_twins
    before, _uses_twins = _uses_twins, True
    try:
        yield
    finally:
        _uses_twins = before


def primitive[**P, R](
    *, twin: Callable[P, R], args: Any = (), out: Any = None
) -> Callable[[Callable[..., Any]], Callable[P, R]]:
    """Makes a function that emits MLIR into one that kernels call with arrays and references.

    Args:
        twin: the primitive in plain JAX. Its signature is the primitive's.
        args: for each operand the layout of its registers, or `plgpu.RefType` of a reference; or a function of the
            primitive's arguments that returns these. Operands that are None are left out.
        out: the result's `plgpu.ShapeDtypeStruct`, a tuple of these, or None; or a function that returns one of these.
    """

    def decorate(emit: Callable[..., Any]) -> Callable[P, R]:
        @functools.wraps(emit)
        def call(*operands: Any, **constants: Any) -> Any:
            operands = tuple(np.int32(x) if isinstance(x, int) else x for x in operands if x is not None)
            arg_types = args(*operands, **constants) if callable(args) else args
            return_type = out(*operands, **constants) if callable(out) else out

            def inlined(_: Any, *values: Any) -> Any:
                return emit(*values, **constants)

            inline: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)
            return inline(inlined)(*operands)

        return with_twin(twin)(cast(Callable[P, R], call))

    return decorate


def with_twin[**P, R](twin: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Gives a twin to a function whose primitives the interpreter cannot model one by one."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (twin if _uses_twins else fn)(*args, **kwargs)

        return cast(Callable[P, R], call)

    return decorate


def no_twin(name: str) -> Callable[..., Any]:
    """Returns the twin of a primitive that the interpreter cannot model, because its threads hold different numbers.

    Functions that use such primitives have twins themselves, see `with_twin`.
    """

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"mosaic: {name} has no twin in plain JAX; accepted: a caller that is `with_twin`")

    return missing


def like(layout: Any, dtype: Any = jnp.float32) -> Callable[..., Any]:
    """Declares a result of the first operand's shape in a layout, for the argument `out` of `primitive`."""
    return lambda x, *_, **__: plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)
