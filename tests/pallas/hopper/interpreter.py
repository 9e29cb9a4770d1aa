"""Helpers of the Hopper kernels' tests: random arrays, Pallas' interpreter, and lowering for CUDA."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import primitives  # JAX has no public names for these
from jax._src.state.primitives import ref_set

from detjax.pallas.hopper import mosaic
from tests.support.integer_signs import signs_checked


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Random numbers of a normal distribution, the same for the same arguments."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


@contextlib.contextmanager
def kernels_interpreted() -> Iterator[None]:
    """Kernels run in the interpreter, with the twins of primitives. It learns to write to the accumulators of wgmma."""
    with plgpu.force_gpu_interpret_mode(), mosaic.twins(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "wgmma_accumulator_store", lambda ref, value: ref_set(ref, ..., value))
        yield


def interpreted(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn`, its kernels interpreted, as NumPy arrays."""
    with kernels_interpreted():
        return jax.tree.map(np.asarray, jax.jit(fn)(*args))


def lowered(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of `fn` as it is given to the compiler of a GPU."""
    with signs_checked():
        return jax.jit(fn).trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()
