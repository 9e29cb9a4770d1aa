"""Which cases of a test run: all of them with `--all-cases`, else of a costly test as many as it says are enough."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case of every test, those marked sampled too")


def pytest_configure(config: pytest.Config) -> None:
    text = "sampled(n): n of its cases run, unless --all-cases is given; together they have as many values as they can"
    config.addinivalue_line("markers", text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-cases") or any("::" in str(argument) for argument in config.args):
        return  # who names a test wants it
    costly: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        # Where there is the device, the tests that need it are all that it is there for.
        if item.get_closest_marker("sampled") and not item.get_closest_marker("hopper"):
            costly[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for cases in costly.values():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        chosen = sample([_values(case) for case in cases], mark.args[0])
        left_out |= {case for index, case in enumerate(cases) if index not in chosen}
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
    items[:] = [item for item in items if item not in left_out]


def sample(cases: Sequence[Mapping[str, str]], count: int) -> set[int]:
    """Indices of so many cases that have, together, as many of the parameters' values as can be.

    The next one has most values that none has yet; of equal ones, that whose values are rarest so far; then the first.
    """
    chosen: list[int] = []
    used: Counter[tuple[str, str]] = Counter()
    while len(chosen) < min(count, len(cases)):
        left = (index for index in range(len(cases)) if index not in chosen)
        counts = {index: [used[value] for value in cases[index].items()] for index in left}
        best = min(counts, key=lambda index: (-counts[index].count(0), sum(counts[index]), index))
        chosen.append(best)
        used.update(cases[best].items())
    return set(chosen)


def _values(item: pytest.Item) -> dict[str, str]:
    call = getattr(item, "callspec", None)
    return {} if call is None else {name: repr(value) for name, value in call.params.items()}
