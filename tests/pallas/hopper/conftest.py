"""Fixtures of the kernels' tests: a model of the matrix unit, and other parts of a GPU that the interpreter lacks."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory  # JAX has no public names for these

from detjax.pallas.hopper import device, mosaic
from detjax.pallas.hopper.attention import decode_merge
from tests.pallas.hopper.interpreter import wgmma


class _Product:
    """`a @ b`, which meets the accumulator that it is added to one step of K after the other, in ascending order."""

    __array_ufunc__ = None  # so that NumPy leaves the addition to __radd__

    def __init__(self, a: np.ndarray, b: np.ndarray, dtype: Any) -> None:
        self.a, self.b = a.astype(dtype), b.astype(dtype)

    def __radd__(self, accumulator: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            for k in range(self.a.shape[1]):
                accumulator = accumulator + self.a[:, k : k + 1] * self.b[k]
        return accumulator


@pytest.fixture
def matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's `wgmma` adds in the order of the hardware's contract.

    Its own is a BLAS call for each stage, whose order of addition follows the tile: schedules would differ in bits that
    are equal on a device. Here each element of the accumulator adds product by product, K ascending, so that bits
    differ where, and only where, a schedule visits K in another order or starts a second sum.
    """
    numpy = SimpleNamespace(**vars(np) | {"matmul": lambda a, b, *, dtype: _Product(a, b, dtype)})
    monkeypatch.setattr(gpu_callbacks, "np", numpy)


@pytest.fixture
def matrix_unit_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but the products of 16 K are added before they meet the accumulator: bits show where steps begin."""

    class Product(_Product):
        def __radd__(self, accumulator: np.ndarray) -> np.ndarray:
            for first in range(0, self.a.shape[1], 16):
                step = _Product(self.a[:, first : first + 16], self.b[first : first + 16], accumulator.dtype)
                accumulator = accumulator + step.__radd__(np.zeros_like(accumulator))
            return accumulator

    numpy = SimpleNamespace(**vars(np) | {"matmul": lambda a, b, *, dtype: Product(a, b, dtype)})
    monkeypatch.setattr(gpu_callbacks, "np", numpy)


@pytest.fixture
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are built for a chip so small that each CTA takes several tiles."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 2)


@pytest.fixture
def attention_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention's kernels run in Pallas' interpreter, with the plain-JAX twins of all primitives.

    The interpreter learns to multiply a matrix that is in registers, and to let single warps meet warpgroups at a named
    barrier.
    """
    monkeypatch.setattr(gpu_callbacks, "wgmma", gpu_callbacks.fail_on_exception(wgmma))
    monkeypatch.setattr(gpu_callbacks, "_named_barrier", gpu_callbacks.fail_on_exception(_named_barrier))
    with mosaic.twins():
        yield


@pytest.fixture
def small_chip(two_multiprocessors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill has many tiles for each CTA, and merging has many loads of decode's partial results."""
    monkeypatch.setattr(decode_merge, "_BLOCKS_PER_LOAD", 2)


def _named_barrier(
    token: Any,
    mesh_location: Any,
    thread: Any,
    barrier_id: Any,
    *,
    num_threads: int,
    sync: bool,
    source_info: Any = None,
) -> Any:
    """The interpreter's own function counts warpgroups; this one counts warps."""
    memory = gpu_callbacks._get_shared_memory()
    barrier = memory.named_barrier(thread, int(barrier_id), num_threads // 32)
    clock = memory.incr_clock(thread) if memory.detect_races else None
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    for _ in range(1 if isinstance(thread, shared_memory.Warp) else 4):
        barrier.arrive(thread, clock, info)
    if sync:
        barrier.wait(thread, info)
    return token
