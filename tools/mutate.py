"""Mutates modules of plain Python with mutmut, and shows the mutants that survive the named tests.

Run by `make mutate MODULE=detjax/engine/page_pool.py TESTS=tests/engine/test_scheduler.py`, in an environment with
mutmut. It works in a copy of the repository. A surviving mutant means a missing test or an unobservable change, so it
is not a failure.

mutmut is used rather than cosmic-ray, which starts a process per mutant and thus imports JAX a hundred times.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.mutants import copy_repository

CONFIG = """
[tool.mutmut]
source_paths = ["detjax"]
only_mutate = {modules}
also_copy = ["benchmarks", "tests", "tools", "docs", "examples", "README.md", "Makefile"]
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
# JAX does not survive a fork after running a program, so mutants are forked from a process that only imported it.
process_isolation = "forkserver"
timeout_multiplier = 5.0
"""


def mutmut(*arguments: str, checkout: Path, capture: bool = False) -> str:
    """Runs a command of mutmut in a checkout, and returns its output if captured."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    run = subprocess.run(command, cwd=checkout, check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return run.stdout or ""


def main() -> None:
    """Mutates the modules named on the command line and prints the surviving mutants as diffs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="files of detjax")
    parser.add_argument("--tests", nargs="+", required=True, help="arguments of pytest")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants to try in parallel")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="detjax-mutate-") as folder:
        checkout = Path(folder)
        copy_repository(checkout)
        with (checkout / "pyproject.toml").open("a") as file:
            # A Python list of strings without quotes or escapes is also valid TOML.
            file.write(CONFIG.format(modules=arguments.modules, tests=arguments.tests))
        mutmut("run", "--max-children", str(arguments.jobs), checkout=checkout)
        living = [line.strip().split(": ") for line in mutmut("results", checkout=checkout, capture=True).splitlines()]
        for name, outcome in (entry for entry in living if len(entry) == 2):
            print(f"\n{outcome}: {mutmut('show', name, checkout=checkout, capture=True)}", flush=True)
        print(f"{len(living)} mutants survived")


if __name__ == "__main__":
    main()
