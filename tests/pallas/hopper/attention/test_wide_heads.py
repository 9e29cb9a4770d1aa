"""Heads that no kernel holds: the portable backend's program serves some widths, and others are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax import ops
from tests.pallas.hopper import interpreter
from tests.support.bits import assert_same_bits


def arrays(width: int, tokens: int) -> tuple[jax.Array, ...]:
    shapes = (2, tokens, 4, width), (2, 140, 2, width), (2, 140, 2, width)
    return tuple(
        jnp.asarray(interpreter.normal(*shape, dtype="bfloat16", seed=seed)) for seed, shape in enumerate(shapes)
    )


def attended(*operands: jax.Array) -> jax.Array:
    return ops.dot_product_attention(*operands, scale=0.1, window=29)


def value_and_gradients(*operands: jax.Array) -> Any:
    value, pull = jax.vjp(attended, *operands)
    return value, pull(value)


def on(backend: Any, fn: Any, operands: tuple[jax.Array, ...]) -> Any:
    with detjax.use_backend(backend):
        return detjax.jit(lambda *operands: fn(*operands))(*operands)


@pytest.mark.parametrize(("fn", "tokens"), [(attended, 1), (value_and_gradients, 7)])
def test_wide_heads_have_the_bits_of_the_portable_program(fn: Any, tokens: int) -> None:
    operands = arrays(512, tokens)
    assert_same_bits(on("hopper", fn, operands), on("portable", fn, operands))


@pytest.mark.parametrize("width", [288, 304, 576])
def test_other_widths_are_refused(width: int) -> None:
    with pytest.raises(
        NotImplementedError, match=f"q has {width} columns and v_pages has {width} columns on .*448, 512"
    ):
        on("hopper", attended, arrays(width, 1))
