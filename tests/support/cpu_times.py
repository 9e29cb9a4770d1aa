"""Records the CPU seconds of each test: `--cpu-times FILE`, to which every test adds a line of JSON.

Unlike elapsed time, CPU time hardly depends on the machine's load. A test's seconds include its fixtures, in the test
that sets them up first, and processes that ended during the test.

To sum the seconds by file, the slowest first: python -m tests.support.cpu_times FILE
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "add each test's seconds of processor time to FILE"
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help=text)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _seconds()
    result = yield
    # Appended by every process of the run: a line is short enough to be written at once.
    if (file := item.config.getoption("--cpu-times")) is not None:
        with file.open("a") as lines:
            lines.write(json.dumps({"test": item.nodeid, "seconds": round(_seconds() - before, 3)}) + "\n")
    return result


def _seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def by_file(file: Path) -> dict[str, float]:
    """Returns the seconds of each file of tests, the largest first."""
    total: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        one = json.loads(line)
        total[one["test"].partition("::")[0]] += one["seconds"]
    return dict(total.most_common())


if __name__ == "__main__":
    seconds = by_file(Path(sys.argv[1]))
    for name, some in seconds.items():
        print(f"{some:8.1f}  {name}")
    print(f"{sum(seconds.values()):8.1f}  in all")
