"""Copies of host arrays on a device are what `jax.device_put` makes."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from detjax.runtime import transfers
from tests.support.compiled_programs import compiled_programs


@pytest.mark.parametrize("dtype", ["int32", "uint32", "float32"])
def test_copies_are_those_of_jax(dtype: str) -> None:
    arrays = [np.arange(7).astype(dtype), np.zeros((2, 0), dtype), np.ones((3, 2), dtype)]
    sharding = SingleDeviceSharding(jax.devices()[0])
    for copy, expected in zip(transfers.copies(arrays, sharding), jax.device_put(arrays), strict=True):
        np.testing.assert_array_equal(copy, expected)
        assert (copy.dtype, copy.shape, copy.sharding, copy.committed) == (
            expected.dtype,
            expected.shape,
            expected.sharding,
            expected.committed,
        )


def test_programs_for_copies_are_those_for_arrays_of_jax() -> None:
    sharding = SingleDeviceSharding(jax.devices()[0])
    fn = jax.jit(lambda x: x + np.int32(70_123))
    fn(jax.device_put(np.arange(3, dtype=np.int32)))
    with compiled_programs() as compiled:
        np.testing.assert_array_equal(
            fn(*transfers.copies([np.arange(3, dtype=np.int32)], sharding)), 70_123 + np.arange(3)
        )
    assert compiled == []
