"""A cache of compiled programs on a full disk: answers are right, and the cache mends once there is room."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.soak.probes import all_probes, alone, differences, few_probes
from tools.soak.report import Report
from tools.soak.server_process import SMALL, ServerProcess

_FULL, _LARGE = "400k", "256m"
_MOST_LINES = 3
"""Lines of a server's log about a full disk, the one that it serves apart."""


def run(report: Report, folder: Path, is_small: bool) -> None:
    """Starts servers with a cache on a full disk, and then on one with room."""
    probes = few_probes() if is_small else all_probes()
    options = SMALL if is_small else ()
    disk = folder / "disk"
    with _mounted(disk) as problem:
        if problem is not None:
            report.figures["skipped"] = problem
            print(f"skipped: {problem}")
            return
        with ServerProcess(folder, options) as server:
            expected = asyncio.run(alone(server.ready().port, probes))
        starts = list[dict[str, Any]]()
        differing = list[str]()
        states = ("full", "full again", "with room", "with room again")
        for state in states[::2] if is_small else states:
            if state == states[2]:
                subprocess.run(["mount", "-o", f"remount,size={_LARGE}", str(disk)], check=True)
            with ServerProcess(folder, options, cache=disk / "cache") as server:
                different = asyncio.run(differences(server.ready().port, probes, expected))
                differing += [f"{state}: {one}" for one in different]
                lines = [line for line in server.log().splitlines() if not line.startswith("chatty on ")]
                code = server.stop()
            programs = {path.name: path.stat().st_mtime_ns for path in disk.glob("cache/*/*.program")}
            left = [path.name for path in disk.rglob(".*") if path.name != ".lock"]
            starts.append(
                {"disk": state, "seconds": round(server.seconds, 1), "programs": programs, "log": lines, "code": code}
                | {"left over": left}
            )
            print(f"{state}: {len(programs)} programs, {len(different)} of {len(probes)} differ", flush=True)
    report.figures["starts"] = [start | {"programs": len(start["programs"])} for start in starts]
    report.nothing("answers that differ", differing)
    full = [start for start in starts if start["disk"] in states[:2]]
    most = max(len(start["log"]) for start in full)
    report.bar("lines of the log about the full disk", 1 <= most <= _MOST_LINES, accepted="1 to 3", seen=most)
    sizes = [len(start["programs"]) for start in starts]
    report.bar("programs kept on the full disk and with room", sizes[0] < sizes[-1], accepted="more", seen=sizes)
    if not is_small:
        same = starts[-1]["programs"] == starts[-2]["programs"] and not starts[-1]["log"]
        report.bar("the start after that finds them all", same, accepted=True, seen=same)
    report.nothing("what servers leave over", [name for start in starts for name in start["left over"]])
    report.bar("exit codes", all(start["code"] == 0 for start in starts), accepted=0, seen=[s["code"] for s in starts])


@contextlib.contextmanager
def _mounted(disk: Path) -> Iterator[str | None]:
    """A small file system in memory, or why there is none."""
    disk.mkdir(parents=True)
    if os.geteuid() != 0:
        yield "only root can mount a small disk"
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={_FULL},mode=700", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"mounting a small disk is not allowed: {done.stderr.strip()}"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", str(disk)], check=True)
