"""Compiles operations and whole steps for TPUs that are not there: are they accepted, and what memory do they take?"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.markup import escape
from rich.table import Table

from detjax import backends, fingerprints
from detjax.bench import deviceless, results
from detjax.bench.cases import OPERATIONS, SMALL, Case, Sizes, cases
from detjax.bench.peaks import PEAKS

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
    """Compiles every case for a chip.

    Args:
        chip: one of `deviceless.TPU_CHIPS`.
        small: the sizes of `run --small`.
        only: operations.
        backend: whose programs.
        out: JSON of the result.
        sizes: instead of those that `small` chooses.
        report: is called with every row.

    Raises:
        ValueError: there is no such chip, operation or backend.
        ModuleNotFoundError: libtpu is not installed.
    """
    device = deviceless.topology(chip).devices[0]
    sizes = sizes or (SMALL if small else Sizes())
    of_device = {"kind": device.device_kind, "jax_kind": device.device_kind, "platform": "tpu", "devices": 1}
    settings = {"chip": chip, "small": small, "only": list(only), "backend": backend}
    settings |= {"sizes": dataclasses.asdict(sizes)}
    command = f"python -m detjax.bench compile --chip {chip}"
    with backends.use_backend(backend):
        about = command, fingerprints.fingerprint(device), of_device, PEAKS.get(device.device_kind), settings
        found = functools.partial(_compiled, chip, backend)
        return results.gathered(out, "compiled", about, cases(sizes, only), found, report)


def _compiled(chip: str, backend: str, case: Case) -> dict[str, Any]:
    """What memory the program takes and what the compiler thinks it costs."""
    start = time.perf_counter()
    donated = tuple(range(case.carried))
    program = deviceless.compiled_for(chip, case.run, *case.shapes, backend=backend, donate=donated)
    seconds = time.perf_counter() - start
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    return {
        "compile_seconds": seconds,
        "memory": {name: getattr(memory, f"{name}_size_in_bytes") for name in _MEMORY},
        # The compiler's own names. It counts what its fusions read, not what memory is asked for.
        "cost": {name: cost[name] for name in ("flops", "bytes accessed") if name in cost},
    }


def table(content: dict[str, Any]) -> Table:
    """The rows of a result."""
    title = f"{content['fingerprint']['backend']} for {content['device']['kind']}: compiled, not measured"
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column("", overflow="fold")
    for name in ("MB in", "MB temporary", "GFLOP", "by compiler", "seconds"):
        out.add_column(name, justify="right")
    out.add_column("compiles", overflow="fold")
    for operation, of in itertools.groupby(content["rows"], lambda row: row["operation"]):
        out.add_section()
        out.add_row(f"[bold]{operation}")
        for row in of:
            out.add_row(f"  {row['name']}", *_cells(row))
    return out


def _cells(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [
            *[""] * 5,
            escape(f"refused: {row['failed']}") if row["refused"] else escape(f"FAILED: {row['failed']}"),
        ]
    memory, flops = row["memory"], row["cost"].get("flops")
    return [
        f"{memory['argument'] / 1e6:.2f}",
        f"{memory['temp'] / 1e6:.2f}",
        f"{row['flops'] / 1e9:.3g}" if row["flops"] else "",
        "none" if flops is None else f"{flops / 1e9:.3g}",
        f"{row['compile_seconds']:.1f}",
        "yes",
    ]
