"""Random programs of rows, certified and then run in batches: no proof may be false.

    python -m benchmarks random_programs --out benchmarks/results/random-programs-cpu.json

A certificate proves a program or names its risks. Programs that are proven, or would be if every maximum and minimum
were exact, run in a small batch and in one of 1000 rows, compiled by `detjax.jit` and by `jax.jit`. Programs that would
be proven under that assumption, but whose bits change, are the control.
"""

import collections
import multiprocessing
from collections.abc import Iterator
from typing import Annotated, Any

from rich.console import Console

from benchmarks.studies.random_programs.programs import BATCHES, COMPILATIONS, MAX_ROWS, Program, Verdict, judged
from benchmarks.study import Result, Run
from detjax.cli.options import Option
from detjax.runtime import backends

_TOGETHER = 10
"""Number of programs that are compiled together."""
_OUTCOMES = ("proven", "observed", "refuted", "unproven")


def study(
    run: Run,
    *,
    programs: Annotated[int, Option("Number of programs, with seeds from 0.", minimum=1)] = 10_000,
    processes: Annotated[int, Option("Processes that run them.", minimum=1)] = 2,
) -> Result:
    programs, processes = (20, 0) if run.small else (programs, processes)
    waiting = [range(first, min(first + _TOGETHER, programs)) for first in range(0, programs, _TOGETHER)]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    false_proofs: list[dict[str, Any]] = []
    for verdicts in _all(waiting, processes):
        for compilation, outcome, moves_by_old_rule, false_proof in verdicts:
            counts[compilation, outcome] += 1
            counts[compilation, "control"] += moves_by_old_rule
            false_proofs += [] if false_proof is None else [false_proof]
    results = {
        name: {outcome: counts[name, outcome] for outcome in _OUTCOMES}
        | {
            "false_proofs": sum(one["compilation"] == name for one in false_proofs),
            "false_proofs_if_largest_numbers_were_exact": counts[name, "control"],
        }
        for name in COMPILATIONS
    }
    content = {
        "small": run.small,
        "device": backends.device_name(),
        "programs": programs,
        "most_rows": MAX_ROWS,
        "batches": BATCHES,
        "results": results,
        "false_proofs": false_proofs,
    }
    return Result(content, f"{len(false_proofs)} proofs are false" if false_proofs else "")


type _Summary = tuple[str, str, bool, dict[str, Any] | None]


def _all(waiting: list[range], processes: int) -> Iterator[list[_Summary]]:
    """Yields the summaries of all programs. Processes are replaced after a while, since compilers leak memory.

    Without any, this process runs them.
    """
    if not processes:
        yield from map(_judged, waiting)
        return
    console = Console(stderr=True)
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=20) as pool:
        for done, verdicts in enumerate(pool.imap_unordered(_judged, waiting), 1):
            console.print(f"{done} of {len(waiting)} groups of programs", end="\r")
            yield verdicts


def _judged(seeds: range) -> list[_Summary]:
    programs = list(map(Program.from_seed, seeds))
    verdicts = [v for name in COMPILATIONS for v in judged(programs, name)]
    return [_summary(verdict) for verdict in verdicts]


def _summary(verdict: Verdict) -> _Summary:
    false_proof = None
    if verdict.is_false_proof:
        false_proof = {"program": str(verdict.program), "compilation": verdict.compilation, "batch": verdict.batch}
    return verdict.compilation, verdict.outcome, verdict.by_old_rule and verdict.batch is not None, false_proof
