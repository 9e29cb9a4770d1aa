"""Plants each fault of `tests/mutants/*.toml` in a copy of the repository and checks that its tests catch it.

Run by `make mutants`. A test suite is only as good as the faults it catches, so the repository keeps a list of faults
that once survived, or that a new kernel or feature could have. An entry reads

    [[mutant]]
    name = "matmul: the residual is added after the rounding"
    file = "detjax/pallas/hopper/matmul/kernel.py"
    old = "text that stands in the file exactly once"
    new = "the text that replaces it"
    tests = ["tests/pallas/hopper/test_matmul.py", "-k", "residual"]

where `tests` has arguments of pytest, which runs the cases that CI runs. A fault is caught if pytest reports
a failed test (exit code 1). Any other outcome, such as a missing test, a failed import or a timeout, is an error of the
entry. The report ends with the rate of caught faults.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parents[1]
LISTS: Final = ROOT / "tests" / "mutants"

TESTS_FAILED: Final = 1
"""Pytest's exit code if tests ran and some failed."""

type Outcome = Literal["caught", "survived", "error"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: a text replacement in one file, and the tests that must catch it.

    Attributes:
        name: a description for the report.
        file: path of the file, relative to the repository.
        old: text that occurs in the file exactly once.
        new: its replacement.
        tests: arguments of pytest.
        source: the list with the entry.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    source: str

    def planted_in(self, text: str) -> str:
        """Returns the file's text with the fault.

        Raises:
            ValueError: `old` does not occur in the text exactly once, or equals `new`.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.source}: {self.name!r}: `old` occurs {count} times in {self.file}; accepted: once")
        if self.old == self.new:
            raise ValueError(f"{self.source}: {self.name!r}: `new` equals `old`; accepted: a different text")
        return text.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a mutant's tests."""

    mutant: Mutant
    outcome: Outcome
    output: str


def read_mutants(folder: Path = LISTS) -> list[Mutant]:
    """Returns the mutants of all lists in a folder, in the order of file names."""
    mutants = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text()).get("mutant", []):
            mutants.append(Mutant(**entry | {"tests": tuple(entry["tests"])}, source=file.name))
    return mutants


def copy_repository(target: Path) -> None:
    """Copies the files that git tracks or would track, and links compilers and compiled programs."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names = listing.stdout.splitlines()
    else:  # an unpacked archive
        folders = ("detjax", "tests", "tools", "benchmarks")
        names = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*")]
        names += ["pyproject.toml", "Makefile"]
    for name in names:
        if (ROOT / name).is_file() and "__pycache__" not in name:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name in (".ptxas", ".libtpu", ".jax_cache"):
        if (ROOT / name).exists():
            (target / name).symlink_to(ROOT / name)


def run_tests(tests: Sequence[str], checkout: Path, timeout: float) -> tuple[int | None, str]:
    """Runs pytest in a checkout, and returns its exit code, None after a timeout, and its output."""
    python_path = [str(checkout)]
    environment = dict(os.environ)
    if any(argument.startswith("tests/pallas/tpu") for argument in tests):
        python_path.append(str(checkout / ".libtpu"))
        environment["JAX_PLATFORMS"] = "cpu"
    if inherited := environment.get("PYTHONPATH"):
        python_path.append(inherited)
    if (checkout / ".ptxas").exists():
        environment["DETJAX_PTXAS"] = ".ptxas"
    environment["PYTHONPATH"] = os.pathsep.join(python_path)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # bytecode saves seconds per mutant
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--ci-cases", *tests]
    try:
        run = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return None, f"timeout after {timeout:.0f} s"
    return run.returncode, run.stdout[-3000:] + run.stderr[-1000:]


def try_mutant(mutant: Mutant, checkout: Path, timeout: float) -> Result:
    """Plants a mutant in a checkout, runs its tests, and removes it."""
    file = checkout / mutant.file
    text = file.read_text()
    try:
        _write(file, mutant.planted_in(text))
        code, output = run_tests(mutant.tests, checkout, timeout)
    except ValueError as error:
        return Result(mutant, "error", str(error))
    finally:
        _write(file, text)
    outcome: Outcome = "caught" if code == TESTS_FAILED else "survived" if code == 0 else "error"
    return Result(mutant, outcome, f"exit code {code}\n{output}")


def _write(file: Path, text: str) -> None:
    """Writes a module, and removes its bytecode, which would pass for current if size and second are the same."""
    file.write_text(text)
    Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)


def check_unchanged(tests: tuple[str, ...], checkout: Path, timeout: float) -> str | None:
    """Returns the failure of tests in the unchanged repository; None if they pass."""
    code, output = run_tests(tests, checkout, timeout)
    return None if code == 0 else f"exit code {code} in the unchanged repository\n{output}"


def try_all(mutants: Sequence[Mutant], jobs: int, timeout: float, with_baseline: bool) -> Iterable[Result]:
    """Yields each mutant's result when ready, from `jobs` copies of the repository in parallel."""
    with tempfile.TemporaryDirectory(prefix="detjax-mutants-") as folder:
        checkouts: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for index in range(jobs):
            copy_repository(Path(folder) / str(index))
            checkouts.put(Path(folder) / str(index))

        def with_checkout[Subject, Answer](fn: Callable[[Subject, Path, float], Answer], subject: Subject) -> Answer:
            checkout = checkouts.get()
            try:
                return fn(subject, checkout, timeout)
            finally:
                checkouts.put(checkout)

        with ThreadPoolExecutor(jobs) as pool:
            broken: dict[tuple[str, ...], str | None] = {}
            if with_baseline:
                distinct = list(dict.fromkeys(mutant.tests for mutant in mutants))
                outcomes = pool.map(lambda tests: with_checkout(check_unchanged, tests), distinct)
                broken = dict(zip(distinct, outcomes, strict=True))
            futures = []
            for mutant in mutants:
                if (reason := broken.get(mutant.tests)) is not None:
                    yield Result(mutant, "error", reason)
                else:
                    futures.append(pool.submit(with_checkout, try_mutant, mutant))
            for future in as_completed(futures):
                yield future.result()


def main() -> int:
    """Tries the mutants chosen on the command line, reports each, and returns 1 unless all are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name, file or list contains one of these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel copies of the repository")
    parser.add_argument("--timeout", type=float, default=1200, help="time limit for one mutant's tests, in seconds")
    parser.add_argument("--no-baseline", action="store_true", help="skip the run of the tests without the fault")
    arguments = parser.parse_args()
    mutants = [
        mutant
        for mutant in read_mutants()
        if not arguments.words or any(w in f"{mutant.name} {mutant.file} {mutant.source}" for w in arguments.words)
    ]
    results = []
    numbers = itertools.count(1)
    for result in try_all(mutants, arguments.jobs, arguments.timeout, not arguments.no_baseline):
        results.append(result)
        progress = f"[{next(numbers)}/{len(mutants)}]"
        print(f"{progress} {result.outcome:8} {result.mutant.source}: {result.mutant.name}", flush=True)
        if result.outcome != "caught":
            print(result.output, flush=True)
    caught = sum(result.outcome == "caught" for result in results)
    print(f"{caught} of {len(mutants)} planted faults were caught: {caught / max(len(mutants), 1):.1%}")
    return int(caught < len(mutants) or not mutants)


if __name__ == "__main__":
    sys.exit(main())
