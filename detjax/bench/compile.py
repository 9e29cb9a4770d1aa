"""Compiles operations and whole steps for TPUs without having one, and reports their memory."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.table import Column

from detjax.bench import deviceless, results
from detjax.bench.cases import OPERATIONS, SMALL, Case, Sizes, cases
from detjax.bench.fitting import FittedTable
from detjax.bench.peaks import PEAKS
from detjax.runtime import backends, fingerprints

_MEMORY: Final = ("argument", "output", "alias", "temp", "generated_code")


def compile_for(
    chip: str,
    *,
    small: bool = False,
    only: Sequence[str] = OPERATIONS,
    backend: str = "tpu",
    out: Path | None = None,
    sizes: Sizes | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Compiles each case for a chip.

    Args:
        chip: one of `deviceless.TPU_CHIPS`.
        small: whether to compile the sizes of `run --small`.
        out: a JSON file to write.
        sizes: the sizes to compile. Default: chosen by `small`.
        report: called with each row.

    Raises:
        ValueError: the chip, the operation or the backend is unknown.
        ModuleNotFoundError: libtpu is not installed.
    """
    device = deviceless.topology(chip).devices[0]
    sizes = sizes or (SMALL if small else Sizes())
    description = {"kind": device.device_kind, "jax_kind": device.device_kind, "platform": "tpu", "devices": 1}
    settings = {"chip": chip, "small": small, "only": list(only), "backend": backend}
    settings |= {"sizes": dataclasses.asdict(sizes)}
    command = f"python -m detjax.bench compile --chip {chip}"
    with backends.use_backend(backend):
        fingerprint, peak = fingerprints.fingerprint(device), PEAKS.get(device.device_kind)
        header = results.Header("compiled", command, fingerprint, description, peak, settings)
        measure = functools.partial(_compiled, chip, backend)
        return results.gather(out, header, cases(sizes, only), measure, report)


def _compiled(chip: str, backend: str, case: Case) -> dict[str, Any]:
    """The memory of a case's program, and the compiler's estimate of its cost."""
    start = time.perf_counter()
    donated = tuple(range(case.carried))
    program = deviceless.compiled_for(chip, case.run, *case.shapes, backend=backend, donate=donated)
    seconds = time.perf_counter() - start
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    return {
        "compile_seconds": seconds,
        "memory": {name: getattr(memory, f"{name}_size_in_bytes") for name in _MEMORY},
        # The names are the compiler's, which counts the reads of its fusions, not of memory.
        "cost": {name: cost[name] for name in ("flops", "bytes accessed") if name in cost},
    }


def table(content: dict[str, Any]) -> FittedTable:
    """Returns the rows of a result as a table."""
    title = f"{content['fingerprint']['backend']} for {content['device']['kind']}: compiled, not measured"
    numbers = "MB in", "MB temporary", "GFLOP", "by compiler", "seconds"
    columns = numbers, Column("compiles", overflow="fold")
    return results.table_by_operation(
        title, content["rows"], columns, _cells, ("by compiler", "MB temporary", "seconds")
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "failed" in row:
        return [*[""] * 5, escape(f"{'refused' if row['refused'] else 'FAILED'}: {row['failed']}")]
    memory, flops = row["memory"], row["cost"].get("flops")
    return [
        f"{memory['argument'] / 1e6:.2f}",
        f"{memory['temp'] / 1e6:.2f}",
        f"{row['flops'] / 1e9:.3g}" if row["flops"] else "",
        "none" if flops is None else f"{flops / 1e9:.3g}",
        f"{row['compile_seconds']:.1f}",
        "yes",
    ]
