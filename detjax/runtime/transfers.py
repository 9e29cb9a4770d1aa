"""Copies of host arrays on a device, made at every step of an engine."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src.interpreters.pxla import batched_device_put  # what `jax.device_put` calls after 30 µs of Python
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array


def copies(arrays: Sequence[np.ndarray], sharding: SingleDeviceSharding) -> list[Array]:
    """Returns copies of arrays on a device, not committed to it, as `jax.device_put` without a device does.

    The arrays must not change afterwards: copying may take longer than the call, and on a CPU it may copy nothing.
    """
    (device,) = sharding.device_set
    return [batched_device_put(_type(x.shape, x.dtype), sharding, [x], [device], committed=False) for x in arrays]


@functools.cache
def _type(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return ShapedArray(shape, dtype)
