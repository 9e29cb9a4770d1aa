"""Skips tests that need a device of a certain kind if it is not there."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hopper: runs kernels on a Hopper GPU; skipped without one")
    config.addinivalue_line("markers", "mma: runs kernels on an NVIDIA GPU of 8.0 or above; skipped without one")


def pytest_runtest_setup(item: pytest.Item) -> None:
    from detjax.runtime import backends  # The first import is the conftest's, which checks types.

    if item.get_closest_marker("hopper") and not backends.runs_here("hopper"):
        pytest.skip("needs a Hopper GPU")
    if item.get_closest_marker("mma") and not backends.runs_here("mma"):
        pytest.skip("needs an NVIDIA GPU of compute capability 8.0 or above")
