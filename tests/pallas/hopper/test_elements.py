"""Elementwise arithmetic on Hopper: it is lowered in every dtype, and has the bits of the portable program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.pallas.hopper.elements import PIECE, IndexedRows, map_elements
from tests.pallas.hopper import interpreter
from tests.support.bits import assert_same_bits

FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "add": (ops.add, 2),
    "scale": (lambda x: ops.scale(x, 0.7, factor_dtype="float32"), 1),
    "multiply": (ops.multiply, 2),
    "multiply by a number": (lambda x: ops.multiply(x, jnp.full(1, 0.7)), 1),
}
"""Operations, and how many arrays each takes."""
DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_kernel_is_lowered_in_every_dtype(name: str, dtype: str) -> None:
    fn, count = FUNCTIONS[name]
    with detjax.use_backend("hopper"):
        text = interpreter.lowered(lambda *arrays: fn(*arrays), *[jax.ShapeDtypeStruct((3, 37), dtype)] * count)
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("width", [2 * PIECE, 96])
def test_rows_are_read_by_their_numbers(width: int) -> None:
    x, table = interpreter.normal(5, width), interpreter.normal(7, width + 32, seed=1)
    index = np.array([3, -1, 0, 6, 2], np.int32)

    def added(x: Any, table: Any, index: Any) -> Any:
        return map_elements(jnp.subtract, x, rows=[IndexedRows(table, index, 0.0, first=32)])

    rows = np.where(index[:, None] < 0, np.float32(0), table[index, 32:])
    assert_same_bits(interpreter.interpreted(added, x, table, index), x - rows)


def test_a_row_that_is_missing_changes_no_bit_of_a_sum() -> None:
    x, index = np.full((1, PIECE), -0.0, np.float32), np.array([-1], np.int32)

    def added(x: Any, index: Any) -> Any:
        return map_elements(jnp.add, x, rows=[IndexedRows(jnp.ones((1, PIECE)), index, -0.0)])

    assert_same_bits(interpreter.interpreted(added, x, index), x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_are_those_of_the_portable_program(name: str) -> None:
    fn, count = FUNCTIONS[name]
    arrays = [jnp.asarray(interpreter.normal(3, PIECE // 2 + 1, dtype="bfloat16", seed=seed)) for seed in range(count)]
    with detjax.use_backend("portable"):
        expected = np.asarray(detjax.jit(lambda *arrays: fn(*arrays))(*arrays))
    with detjax.use_backend("hopper"):
        assert_same_bits(interpreter.interpreted(lambda *arrays: fn(*arrays), *arrays), expected)
