"""The program of portable attention separates products from the sums that use them, as the contract rounds both."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.options import Masking
from detjax.portable import attention


def sums_by_operands(jaxpr: Any) -> Iterator[list[str]]:
    """The operations whose results each addition of float32 takes."""
    made_by = {variable: equation.primitive.name for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "add" and equation.outvars[0].aval.dtype == jnp.float32:
            yield [made_by.get(x, "") for x in equation.invars if not hasattr(x, "val")]
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from sums_by_operands(inner)


def test_of_two_products_that_merge_blocks_only_the_running_one_can_be_fused_with_the_sum() -> None:
    kv = KVPages(*(jnp.zeros((2, 1, 128, 8)) for _ in range(2)))
    queries = Queries(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, 200, jnp.int32))

    def forward(q: jax.Array) -> Any:
        return attention.forward(AttentionOperands(q, kv, queries), masking=Masking(1.0))

    sums = list(sums_by_operands(jax.make_jaxpr(forward)(jnp.zeros((1, 200, 1, 8))).jaxpr))
    assert sums.count(["mul", "optimization_barrier"]) == 2  # the output, and the sum of the weights
    assert ["mul", "mul"] not in sums
