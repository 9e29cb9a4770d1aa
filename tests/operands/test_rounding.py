"""Roundings that no compiler may drop, in the program that the compiler is given."""

import jax
import jax.numpy as jnp
import pytest

from detjax.operands.rounding import rounded


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", "reduce_precision"), ("float16", "optimization_barrier")])
def test_a_rounding_is_more_than_a_pair_of_casts(dtype: str, step: str) -> None:
    text = jax.jit(lambda x: rounded(x, dtype).astype(jnp.float32)).lower(jnp.ones(3)).as_text()
    assert f"stablehlo.{step}" in text
