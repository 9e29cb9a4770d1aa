"""Leaves out the tests that have not started by a time: `--until SECONDS`, since 1970.

A machine that is slower than usual then ends its run in time, and names each test that it has left out.
"""

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "skip the tests that have not started by this time, in seconds since 1970"
    parser.addoption("--until", type=float, metavar="SECONDS", help=text)


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may take long
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() >= until:
        pytest.skip(f"the time of this run is over before {item.nodeid}")
