"""Tests that need several devices run a module of theirs in a process that simulates them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.waits import HANGS_AFTER

ROOT: Final = Path(__file__).parents[2]
ALL_HOLD: Final = "all hold"
"""The last line that a module prints when everything it compares is equal."""


def command_of(module: str, *arguments: str, keeps_programs: bool = True) -> list[str]:
    """A command that runs a module as a program, which finds the programs that earlier runs have kept, or none."""
    runner = ["-m", "tests.support.kept_programs"] if keeps_programs else ["-m"]
    return [sys.executable, *runner, module, *arguments]


def run_on_devices(module: str, *arguments: str, devices: int = 8, keeps_programs: bool = True) -> str:
    """Runs a module as a program with simulated devices, fails if it does, and returns what it prints.

    Args:
        module: its name, such as `__name__` of a test file that compares if it is called as a program.
        arguments: what the program is given.
        devices: how many it sees.
        keeps_programs: whether it may find programs that an earlier run compiled, which it cannot serialize.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command_of(module, *arguments, keeps_programs=keeps_programs),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_AFTER,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split("\n")[-2] == ALL_HOLD
    return run.stdout
