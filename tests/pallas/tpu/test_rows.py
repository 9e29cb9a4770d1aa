"""Row sums of the TPU kernels, in the order of the contract, and what schedules of rows are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.pallas.tpu import rows as tpu_rows
from detjax.pallas.tpu.rows import Problem, Schedule
from detjax.portable.tiles import row_sum
from tests.pallas.tpu.interpreter import compiled, normal
from tests.support.bits import assert_same_bits


def pieces(x: np.ndarray) -> list[jax.Array]:
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % tpu_rows.PIECE)))
    return [jnp.asarray(piece) for piece in np.split(padded, padded.shape[1] // tpu_rows.PIECE, axis=1)]


def sum_in_512_lanes(row: np.ndarray) -> np.float32:
    """The sum of a row as `contract.LANES` states it, one addition after the other."""
    lanes = [np.float32(0)] * 512
    for index, element in enumerate(row):
        lanes[index % 512] = element if index < 512 else lanes[index % 512] + element
    sums = []
    for first in range(0, 512, 4):
        a, b, c, d = lanes[first : first + 4]
        sums.append(((a + b) + c) + d)
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
    return sums[0]


@pytest.mark.parametrize("width", [1, 128, 129, 300, 515, 1152, 4099])
def test_rows_are_added_in_the_contracts_order(width: int) -> None:
    x = normal(8, width)
    sums = compiled(tpu_rows.row_sum)(pieces(x))
    assert_same_bits(sums, np.array([[sum_in_512_lanes(row)] for row in x]))
    assert_same_bits(sums, compiled(row_sum)(x))
    squares = compiled(lambda parts: tpu_rows.row_sum([tpu_rows.squares(part) for part in parts]))(pieces(x))
    assert_same_bits(squares, compiled(row_sum)(x * x))


def test_schedules_that_do_not_fill_registers_are_refused() -> None:
    Schedule(16).check(Problem("rms_norm", 64, jnp.dtype("bfloat16")))
    with pytest.raises(ValueError, match="rms_norm: the schedule has tiles of 8 rows in bfloat16; accepted: multiples"):
        Schedule(8).check(Problem("rms_norm", 64, jnp.dtype("bfloat16")))
    with pytest.raises(ValueError, match="rows is 0; accepted: 1 or more"):
        Schedule(0)
