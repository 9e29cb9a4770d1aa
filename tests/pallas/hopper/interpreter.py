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
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.state.primitives import ref_set

from detjax.pallas.hopper import mosaic
from tests.support.integer_signs import signs_checked

_WITH_BARRIERS = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")
"""Parameters of the interpreter, so that it knows named barriers; see `barriers`."""
_RACES = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Random numbers of a normal distribution, the same for the same arguments."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


@contextlib.contextmanager
def kernels_interpreted() -> Iterator[None]:
    """Kernels run in the interpreter, with the twins of primitives.

    It learns to write to the accumulators of `wgmma`, and to multiply a matrix that is in registers.
    """
    with plgpu.force_gpu_interpret_mode(_WITH_BARRIERS), mosaic.twins(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "wgmma_accumulator_store", lambda ref, value: ref_set(ref, ..., value))
        patch.setattr(gpu_callbacks, "wgmma", gpu_callbacks.fail_on_exception(wgmma))
        yield


def interpreted(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn`, its kernels interpreted, as NumPy arrays."""
    with kernels_interpreted():
        return jax.tree.map(np.asarray, jax.jit(fn)(*args))


def interpreted_without_races(fn: Callable[..., Any], *args: Any) -> np.ndarray:
    """The result of `fn`, whose kernels neither race in the interpreter nor read what was not written."""
    with plgpu.force_gpu_interpret_mode(_RACES), mosaic.twins():
        result = np.asarray(jax.jit(fn)(*args))
    assert not gpu_callbacks.get_races().races_found
    assert not np.isnan(result).any()
    return result


def lowered(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of `fn` as it is given to the compiler of a GPU."""
    with signs_checked():
        return jax.jit(fn).trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()


def wgmma(*, token: Any, mesh_location: Any, thread: Any, source_info: Any = None, **operands: Any) -> Any:
    """The interpreter's own function, except that the left operand may be an array."""
    memory = gpu_callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)

    def place(name: str) -> tuple[Any, Any]:
        key = shared_memory.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(operands[f"{name}_transforms"])
        return key, memory.access(key, jax.tree.map(int, transforms))

    def content(name: str) -> Any:
        x = operands[f"{name}_allocation_key_as_array"]  # a key has one axis
        return np.asarray(x) if x.ndim == 2 else memory.get_buffer_content(*place(name), thread, logging_info=info)[0]

    accumulator = content("acc")
    # By the interpreter's own name for NumPy, which `matrix_unit` replaces.
    result = accumulator + gpu_callbacks.np.matmul(content("a"), content("b"), dtype=accumulator.dtype)  # pyright: ignore[reportPrivateImportUsage]
    memory.store_buffer_content(*place("acc"), result, thread, logging_info=info)
    return token
