"""The frequency of Python's search for cycles in processes that serve a model."""

import gc
from collections.abc import Callable, Iterator

import pytest

from detjax import cli
from detjax.bench import __main__ as bench
from detjax.runtime.garbage_collection import OBJECTS, collect_rarely


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("before", "after"), [(700, OBJECTS), (OBJECTS - 1, OBJECTS), (90_000, 90_000), (0, 0)])
def test_a_threshold_is_raised_but_not_lowered_nor_switched_on(before: int, after: int) -> None:
    gc.set_threshold(before, 11, 12)
    collect_rarely()
    assert gc.get_threshold() == (after, 11, 12)


@pytest.mark.parametrize("main", [cli.main, bench.main], ids=["detjax", "detjax.bench"])
def test_commands_raise_it(main: Callable[[list[str]], None]) -> None:
    gc.set_threshold(700)
    with pytest.raises(SystemExit):
        main(["no such command"])
    assert gc.get_threshold()[0] == OBJECTS
