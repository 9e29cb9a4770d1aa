"""Chooses the cases that run: all of them with `--all-cases`, otherwise those that CI runs.

CI runs every test: all cases of a test, or the cases that `sampled(n)` chooses, without the cases marked `nightly`.
`--share I/N` adds the I-th of N parts of the other cases, so N runs have every case.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run every case, also those that are nightly or left out by a sample"
    parser.addoption("--all-cases", action="store_true", help=text)
    text = "run CI's cases of a test that is named with ::, which otherwise runs whole"
    parser.addoption("--ci-cases", action="store_true", help=text)
    text = "also run part I of N, counted from 0, of the cases that CI leaves out"
    parser.addoption("--share", type=share, metavar="I/N", help=text)


def share(text: str) -> tuple[int, int]:
    """Returns the part and the number of parts that `I/N` stands for.

    Raises:
        argparse.ArgumentTypeError: there is no such part.
    """
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: I/N, such as 0/12, with I below N")
    return int(part), int(parts)


def pytest_configure(config: pytest.Config) -> None:
    text = "sampled(n): in CI, n of the test's cases run, at least one, which cover as many values as possible"
    config.addinivalue_line("markers", text)
    config.addinivalue_line("markers", "nightly: a large case, which CI leaves out; the test has a small one as well")


@pytest.hookimpl(tryfirst=True)  # before the choices of -k and -m, to see all cases of a test
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = any("::" in str(argument) for argument in config.args) and not config.getoption("--ci-cases")
    if config.getoption("--all-cases") or is_named:
        return
    chosen = ci_cases(items)
    left_out = [item for item in items if item not in chosen]
    if (given := config.getoption("--share")) is not None:
        part, parts = given
        shared = set(left_out[part::parts])
        left_out = [item for item in left_out if item not in shared]
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
    unwanted = set(left_out)
    items[:] = [item for item in items if item not in unwanted]


def ci_cases(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases that CI runs.

    Raises:
        pytest.UsageError: a test has no such case.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("sampled")
        # On a machine with the device, all tests that need it run.
        if any(cases[0].get_closest_marker(device) for device in ("hopper", "mma")):
            chosen.update(cases)
            continue
        small = [case for case in cases if not case.get_closest_marker("nightly")]
        if mark is not None:
            small = [small[index] for index in sample([_values(case) for case in small], mark.args[0])]
        if not small:
            raise pytest.UsageError(f"{name} has no case in CI; accepted: at least one that is not nightly, sampled(1)")
        chosen.update(small)
    return chosen


def sample(cases: Sequence[Mapping[str, str]], count: int) -> set[int]:
    """Returns the indices of `count` cases that together cover as many of the parameters' values as possible.

    Each step takes the case with the most values that no chosen case has; among equal ones the case whose values are
    rarest so far, then the first.
    """
    chosen: list[int] = []
    used: Counter[tuple[str, str]] = Counter()
    while len(chosen) < min(count, len(cases)):
        remaining = (index for index in range(len(cases)) if index not in chosen)
        counts = {index: [used[value] for value in cases[index].items()] for index in remaining}
        best = min(counts, key=lambda index: (-counts[index].count(0), sum(counts[index]), index))
        chosen.append(best)
        used.update(cases[best].items())
    return set(chosen)


def _values(item: pytest.Item) -> dict[str, str]:
    call = getattr(item, "callspec", None)
    return {} if call is None else {name: repr(value) for name, value in call.params.items()}
