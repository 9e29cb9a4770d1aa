"""What the tests of kernels share: a mark for those that need the GPU, and a model of its matrix unit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # JAX has no public name for it

from detjax import platform
from detjax.pallas import hopper


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hopper: runs kernels on a Hopper GPU; skipped where there is none")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hopper") and not platform._is_hopper():
        pytest.skip("needs a Hopper GPU")


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

    Its own is a BLAS call for each stage, whose order of addition follows the tile: bits would tell schedules apart
    that a device does not. Here each element of the accumulator adds one product after another, K ascending, so that
    bits differ where, and only where, a schedule visits K in another order or starts a second sum.
    """
    numpy = SimpleNamespace(**vars(np) | {"matmul": lambda a, b, *, dtype: _Product(a, b, dtype)})
    monkeypatch.setattr(gpu_callbacks, "np", numpy)


@pytest.fixture
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are built for a chip so small that each CTA takes several tiles."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 2)
