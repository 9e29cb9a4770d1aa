"""A check of the code that is emitted for kernels: whether their integers are signed where JAX's are.

Mosaic GPU keeps apart from an array's registers whether its integers are signed, and maxima, minima, comparisons,
divisions, shifts and conversions follow that. Its `select` takes it from the condition, so from no sign at all, if the
first case is one number for the whole array and the condition is not: `jnp.where(condition, -1, x)` has unsigned
integers, whose maximum is -1. Pallas' interpreter has no such arrays, so it computes what was meant.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering  # JAX has no public names for these
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray


@contextlib.contextmanager
def signs_checked() -> Iterator[None]:
    """Kernels that are lowered within this context raise AssertionError if an array's integers have another sign."""
    with pytest.MonkeyPatch.context() as patch:
        for rules in lowering.mosaic_lowering_rules.values():
            for primitive, rule in list(rules.items()):
                patch.setitem(rules, primitive, _checked(rule))
        yield


def _checked(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def call(context: Any, *operands: Any, **options: Any) -> Any:
        results = rule(context, *operands, **options)
        for result, aval in zip(
            results if context.prim.multiple_results else [results], context.avals_out, strict=True
        ):
            if isinstance(result, FragmentedArray) and jnp.issubdtype(aval.dtype, jnp.integer):
                is_signed = jnp.issubdtype(aval.dtype, jnp.signedinteger)
                assert result.is_signed == is_signed, (
                    f"{context.prim}: the emitted array of {aval.dtype} has is_signed={result.is_signed}; expected: "
                    f"{bool(is_signed)}. If this is `where` with a number as its first case, exchange the cases"
                )
        return results

    return call
