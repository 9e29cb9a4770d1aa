"""Chooses the cases that run: all of them with `--all-cases`, otherwise a sample of each costly test's cases.

`--share I/N` adds the I-th of N parts of the cases that the sample leaves out, and a case of every tenth test without a
case in the sample. So N runs have every case, and ten consecutive runs have every test.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest

_UNSEEN = 10
"""A share has a case of one in this many tests without a case in the sample. These tests are the most costly ones, and
together they take longer than all others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case, also of tests marked sampled")
    text = "also run a case of every tenth other test, and part I of N, counted from 0, of the remaining cases"
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
    text = (
        "sampled(n): without --all-cases, n of the test's cases run, which cover as many values as possible; "
        "with 0, the test runs with every tenth --share"
    )
    config.addinivalue_line("markers", text)
    config.addinivalue_line("markers", "nightly: a large case, which runs with --all-cases only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-cases") or any("::" in str(argument) for argument in config.args):
        return  # a test that is named on the command line runs whole
    costly: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        # On a machine with the device, all tests that need it run.
        if item.get_closest_marker("sampled") and not item.get_closest_marker("hopper"):
            costly[item.nodeid.partition("[")[0]].append(item)
    left_out: list[pytest.Item] = []
    unseen: list[pytest.Item] = []
    for cases in costly.values():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        chosen = sample([_values(case) for case in cases], mark.args[0])
        left_out += [case for index, case in enumerate(cases) if index not in chosen]
        if not chosen:
            unseen.append(cases[0])
    if (given := config.getoption("--share")) is not None:
        part, parts = given
        shared = {*left_out[part::parts], *unseen[part % _UNSEEN :: _UNSEEN]}
        left_out = [case for case in left_out if case not in shared]
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
    unwanted = set(left_out)
    items[:] = [item for item in items if item not in unwanted]


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
