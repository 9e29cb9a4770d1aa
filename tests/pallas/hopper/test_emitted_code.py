"""What kernels are compiled to computes what was meant: in Mosaic GPU's code, whose faults no interpreter has."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, layout
from tests.pallas.hopper.interpreter import lowered


@pytest.mark.parametrize("number_first", [False, True])
def test_an_integer_that_loses_its_sign_is_seen(number_first: bool) -> None:
    rows = layout(4, 32)

    def body(x: jax.Array, y: jax.Array) -> None:
        numbers = plgpu.load(x, layout=rows, optimized=False)
        y[...] = jnp.where(numbers < 3, -1, numbers) if number_first else jnp.where(numbers >= 3, numbers, -1)

    array = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    kernel = plgpu.kernel(body, out_type=array, compiler_params=NO_AUTO_BARRIERS)
    lower = functools.partial(lowered, kernel, array)
    if number_first:
        with pytest.raises(AssertionError, match=r"select_n: the emitted array of int32 has is_signed=False"):
            lower()
    else:
        assert "mosaic_gpu" in lower()
