"""Compiles operations and whole steps for TPUs that are not there: are they accepted, and what memory do they take?"""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
from rich import box
from rich.markup import escape
from rich.table import Table

from detjax import platform
from detjax.bench import deviceless, results
from detjax.bench.cases import OPERATIONS, SMALL, Case, Sizes, cases
from detjax.bench.peaks import PEAKS
from detjax.bench.run import said
from detjax.contract import CONTRACT_VERSION
from detjax.version import __version__

_MEMORY: Final = ("argument", "output", "alias", "temp", "generated_code")


def default_backend() -> str:
    """The backend that serves on TPUs; stock while this release has none for them."""
    return "tpu" if "tpu" in platform.BACKENDS else platform.STOCK


def compile_for(
    chip: str,
    *,
    small: bool = False,
    only: Sequence[str] = OPERATIONS,
    backend: str | None = None,
    out: Path | None = None,
    sizes: Sizes | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Compiles every case for a chip.

    Args:
        chip: one of `deviceless.TPU_CHIPS`.
        small: the sizes of `run --small`.
        only: operations.
        backend: whose programs; default: see `default_backend`.
        out: JSON of the result.
        sizes: instead of those that `small` chooses.
        report: is called with every row.

    Raises:
        ValueError: there is no such chip, operation or backend.
        ModuleNotFoundError: libtpu is not installed.
    """
    device = deviceless.topology(chip).devices[0]
    backend, sizes = backend or default_backend(), sizes or (SMALL if small else Sizes())
    options = {} if backend == platform.STOCK else platform.compiler_options("tpu")
    flags = {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name)}
    fingerprint = platform.Fingerprint(
        contract_version=CONTRACT_VERSION,
        detjax=__version__,
        backend=backend,
        device_kind=device.device_kind,
        driver="none",
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        plugin=device.client.platform_version.strip(),
        flags=json.dumps(flags, sort_keys=True),
        compiler_options=json.dumps(options, sort_keys=True),
    )
    of_device = {"kind": device.device_kind, "jax_kind": device.device_kind, "platform": "tpu", "devices": 1}
    settings = {"chip": chip, "small": small, "only": list(only), "backend": backend}
    settings |= {"sizes": dataclasses.asdict(sizes)}
    command = f"python -m detjax.bench compile --chip {chip}"
    about = command, fingerprint, of_device, PEAKS.get(device.device_kind), settings
    rows: list[dict[str, Any]] = []
    with platform.use_backend(backend):
        for case in cases(sizes, only):
            rows.append(_compiled(chip, case, options))
            report(rows[-1])
            results.written(out, "compiled", *about, rows)  # what was compiled outlives a run that is cut short
    return results.written(out, "compiled", *about, rows)


def _compiled(chip: str, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """A row: what memory the program takes and what the compiler thinks it costs; or why there is none."""
    row: dict[str, Any] = {"operation": case.operation, "name": case.name, "arguments": case.arguments}
    row |= {"bytes": case.bytes, "flops": case.flops}
    start = time.perf_counter()
    try:
        donated = tuple(range(case.carried))
        program = deviceless.compiled_for(chip, case.run, *case.shapes, options=options, donate=donated)
        row["compile_seconds"] = time.perf_counter() - start
        memory, cost = program.memory_analysis(), program.cost_analysis() or {}
        row["memory"] = {name: getattr(memory, f"{name}_size_in_bytes") for name in _MEMORY}
        # The compiler's own names. It counts what its fusions read, not what memory is asked for.
        row["cost"] = {name: cost[name] for name in ("flops", "bytes accessed") if name in cost}
    except Exception as failure:  # what one program lacks says nothing of the others
        row |= {"failed": said(failure), "refused": isinstance(failure, NotImplementedError | TypeError)}
    return row


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
