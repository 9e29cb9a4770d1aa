"""Attacks that once succeeded, each with a verdict: what the server answers, and what it costs the others."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Final

from tools.soak.attacks import Attack, Verdict, attacks
from tools.soak.operator_faults import operator_faults
from tools.soak.probes import alone, differences, few_probes
from tools.soak.report import Report
from tools.soak.server_process import SMALL, ServerProcess
from tools.soak.watch import Watch, watching

_BETWEEN: Final = 1.0
"""Seconds between two attacks, in which memory comes to rest."""


def run(report: Report, folder: Path, cache: Path, is_small: bool, *, health: float, margin: float) -> None:
    """Runs all attacks, one after the other, and the faults of operators.

    Args:
        report: gets a bar for each.
        folder: for logs and files.
        cache: the directory of compiled programs.
        is_small: whether they are small; then there are no faults of operators.
        health: seconds that an answer of /health may take meanwhile.
        margin: MiB that the server may have more than when it was idle.
    """
    options = (*SMALL, "--header-seconds", 2, "--idle-seconds", 2) if is_small else ()
    with ServerProcess(folder, options, cache=cache) as server:
        server.ready()
        probes = few_probes()
        expected = asyncio.run(alone(server.port, probes))
        with watching(server) as watch:
            idle = watch.memory_now()
            report.figures["idle memory (MiB: server, workers)"] = idle
            for attack in attacks():
                _attack(report, server, watch, attack, is_small, idle, health, margin)
            watch.phase("afterwards")
            differing = asyncio.run(differences(server.port, probes, expected))
            report.nothing("answers that differ after all attacks", differing)
            report.figures["watch"] = watch.report()
        report.bar("exit code", (code := server.stop()) == 0, accepted=0, seen=code)
        log = server.log()
        report.bar("tracebacks in the log", "Traceback" not in log, accepted="none", seen=log.count("Traceback"))
        report.figures["log"] = log[-5000:]
    if is_small:
        return
    for name, accepted, (is_met, seen) in operator_faults(folder, cache):
        report.bar(name, is_met, accepted=accepted, seen=seen)


def _attack(
    report: Report,
    server: ServerProcess,
    watch: Watch,
    attack: Attack,
    is_small: bool,
    idle: tuple[float, float],
    health: float,
    margin: float,
) -> None:
    start = watch.phase(attack.name)
    try:
        verdict: Verdict = asyncio.run(attack.run(server.port, is_small))
    except (OSError, ValueError, KeyError, TypeError) as error:
        verdict = False, f"{type(error).__name__}: {error}"
    taken = time.monotonic() - start
    watch.settle()
    time.sleep(_BETWEEN / 10 if is_small else _BETWEEN)
    seen = watch.seen(start)
    grown = round(seen.server_mib - idle[0], 1)
    most = margin + attack.more_memory
    is_quick = seen.health_seconds <= health and not seen.health_failures
    report.bar(
        attack.name,
        verdict[0] and is_quick and grown <= most,
        accepted=f"{attack.accepted}; /health within {health:g} s; up to {most:g} MiB more than idle",
        seen={
            "answer": verdict[1],
            "seconds": round(taken, 1),
            "MiB more than idle": grown,
            "MiB more of the text workers": round(seen.workers_mib - idle[1], 1),
            "MiB more afterwards": [
                round(now - before, 1) for now, before in zip(watch.memory_now(), idle, strict=True)
            ],
            **{name: value for name, value in dataclasses.asdict(seen).items() if name.startswith(("health", "late"))},
        },
    )
