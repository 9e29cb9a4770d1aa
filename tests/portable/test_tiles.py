"""The loops over row tiles that every portable operation runs in."""

import re

import jax
import jax.numpy as jnp

from detjax.portable.tiles import fold_rows, map_rows


def values_past_the_entrance(text: str) -> list[str]:
    """The types of the values that pass a barrier just before the loop of a lowered program."""
    before_the_loop = text[: text.index("stablehlo.while")]
    barriers = re.findall(r"optimization_barrier .* : (.*)\n", before_the_loop)
    return re.findall(r"tensor<[^>]*>", " ".join(barriers))


def test_a_loops_trips_rows_and_shared_operands_enter_through_a_barrier() -> None:
    x, w = jnp.ones((17, 3)), jnp.ones(3)
    mapped = jax.jit(lambda x, w: map_rows(lambda x, w: x * w[None], x, w)).lower(x, w).as_text()
    assert values_past_the_entrance(mapped) == ["tensor<i32>", "tensor<32x3xf32>", "tensor<3xf32>"]

    def add(carry: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return carry + jnp.sum(x * w[None], axis=0)

    folded = jax.jit(lambda x, w: fold_rows(add, jnp.zeros(3), x, w, size=5)).lower(x, w).as_text()
    carry = "tensor<3xf32>"
    assert values_past_the_entrance(folded) == ["tensor<i32>", "tensor<20x3xf32>", "tensor<3xf32>", carry]


def test_a_tiles_results_leave_it_through_a_barrier() -> None:
    text = jax.jit(lambda x: map_rows(lambda x, _: x * 2, x, None)).lower(jnp.ones((17, 3))).as_text()
    assert re.search(r"optimization_barrier .* : tensor<16x3xf32>", text[text.index("stablehlo.while") :])
