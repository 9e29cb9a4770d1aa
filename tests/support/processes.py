"""Tests that need several processes run a module of theirs in each, with simulated devices."""

import contextlib
import os
import socket
import subprocess
from typing import Final

import jax

from tests.support.simulated_devices import ALL_HOLD, ROOT, command_of
from tests.support.waits import HANGS_AFTER

PROCESSES: Final = 2
DEVICES: Final = 4
"""The devices of each process."""


def run_in_processes(module: str, *arguments: str, flags: str = "") -> None:
    """Runs a module in several processes that `join` one another, and fails if one does not print that all holds.

    Args:
        module: the module's name, such as `__name__` of a test file that compares if it is called as a program.
        arguments: what each program is given, after the port and its process' number.
        flags: further XLA flags.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={DEVICES} {flags}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(PROCESSES):
            command = command_of(module, str(port), str(number), *arguments)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in running:
            output = process.communicate(timeout=3 * HANGS_AFTER)[0]  # each compiles for one device and for all
            assert process.returncode == 0, output
            assert ALL_HOLD in output.split("\n"), output


def join(port: str, process: str) -> None:
    """Makes the devices of all processes known to this one."""
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        PROCESSES,
        int(process),
        initialization_timeout=HANGS_AFTER,
        heartbeat_timeout_seconds=HANGS_AFTER,
    )
    assert (jax.device_count(), jax.local_device_count()) == (PROCESSES * DEVICES, DEVICES)
