"""Skips tests that need a device of a certain kind if it is not there."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hopper: runs kernels on a Hopper GPU; skipped without one")


def pytest_runtest_setup(item: pytest.Item) -> None:
    from detjax.runtime import backends  # The first import is the conftest's, which checks types.

    if item.get_closest_marker("hopper") and not backends.runs_here("hopper"):
        pytest.skip("needs a Hopper GPU")
