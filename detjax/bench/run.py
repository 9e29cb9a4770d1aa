"""Measures operations and whole steps on the current device, and records their bits."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from rich.table import Column

from detjax.bench import results, timing
from detjax.bench.cases import OPERATIONS, SMALL, Case, Sizes, cases
from detjax.bench.fitting import FittedTable
from detjax.bench.inputs import checksum
from detjax.bench.peaks import PEAKS, Peak
from detjax.runtime import backends, compilation, fingerprints

_TIMERS: Final = {
    "gpu": "kernels of a call, by CUPTI, without the time between them",
    "tpu": "wall clock of consecutive calls, divided by their number",
    "cpu": "wall clock of a call",
}

_SMALL_BYTES: Final = 64 << 20


def run(
    *,
    small: bool = False,
    only: Sequence[str] = OPERATIONS,
    backend: str | None = None,
    out: Path | None = None,
    sizes: Sizes | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures each case under the backend and XLA's own operations in alternating rounds.

    Args:
        small: whether to measure sizes that run on a CPU in seconds.
        backend: the backend to measure. Default: the device's best.
        out: a JSON file to write.
        sizes: the sizes to measure. Default: chosen by `small`.
        report: called with each row.

    Raises:
        ValueError: the operation or the backend is unknown.
    """
    sizes = sizes or (SMALL if small else Sizes())
    device = jax.devices()[0]
    peak = PEAKS.get(device.device_kind)
    memory = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    description = {
        "kind": backends.device_kind(),
        "jax_kind": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "memory_bytes": memory.get("bytes_limit"),
    }
    settings = {"small": small, "only": list(only), "backend": backend, "timer": _TIMERS.get(device.platform)}
    settings |= {"sizes": dataclasses.asdict(sizes)}
    with backends.use_backend(backend or backends.backend()):
        fingerprint = fingerprints.fingerprint()
        header = results.Header("measured", "python -m detjax.bench run", fingerprint, description, peak, settings)
        measure = functools.partial(measured, sizes=sizes, peak=peak)
        return results.gather(out, header, cases(sizes, only), measure, report)


def measured(case: Case, sizes: Sizes, peak: Peak | None) -> dict[str, Any]:
    """Returns a case's time, speed, errors and bits under the current backend."""
    program = compilation.jit(case.run, donate_argnums=tuple(range(case.carried)))
    count = min(timing.rotations(case.bytes), sizes.calls) if case.rotated else 1
    sets = [case.draw(seed) for seed in range(count)]
    row: dict[str, Any] = {"inputs": int(checksum(sets[0])), "error": None}
    first = _outputs(case, program, sets[0])
    row["outputs"] = [results.output(np.asarray(x)) for x in first]
    if case.exact is not None:
        # Small arrays are copied to the host as a whole, so that no slice of them compiles a program.
        checked: tuple[Any, Any] = (sets[0], first) if case.bytes > _SMALL_BYTES else jax.device_get((sets[0], first))
        row["error"] = error(case.exact(*checked))
    seconds = _in_turns(case, program, sets, sizes)
    row |= seconds | _speeds(case, seconds, peak)
    again = [results.output(np.asarray(x)) for x in _outputs(case, program, sets[0])]
    row["same_bits_again"] = again == row["outputs"]
    return row


def error(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Returns the distance from float64 numbers: the largest difference, and the relative error in norm."""
    computed, exact = (np.concatenate([pair[i].reshape(-1) for pair in pairs]) for i in range(2))
    difference = computed - exact
    norm = float(np.linalg.norm(exact))
    return {
        "max_absolute": float(np.abs(difference).max()),
        "relative": float(np.linalg.norm(difference)) / norm if norm else 0.0,
        "elements": computed.size,
    }


def _outputs(case: Case, program: Callable[..., Any], arguments: tuple[Any, ...]) -> list[jax.Array]:
    """The results without the carried ones. The arguments are not donated."""
    donated = jax.tree.map(jax.numpy.copy, arguments[: case.carried])
    outputs = program(*donated, *arguments[case.carried :])
    return list(outputs[: len(outputs) - case.carried])


def _in_turns(case: Case, program: Callable[..., Any], sets: list[Any], sizes: Sizes) -> dict[str, Any]:
    """Seconds of the current backend and of stock, or the reason why stock failed."""
    backend = backends.backend()

    def seconds_on(name: str) -> float:
        with backends.use_backend(name):
            return _seconds(case.carrying(program, sets[0]), [a[case.carried :] for a in sets], sizes)

    names = dict.fromkeys((backend, backends.STOCK))
    runs = {name: functools.partial(seconds_on, name) for name in names}
    rounds = timing.in_turns(runs, sizes.rounds, required=(backend,))
    fields: dict[str, Any] = {"seconds": _spread(rounds.seconds[backend]), "stock_seconds": None}
    if rounds.missing:
        return fields | {"stock_failed": rounds.missing[backends.STOCK]}
    if backend != backends.STOCK:
        fields["stock_seconds"] = _spread(rounds.seconds[backends.STOCK])
    return fields


def _seconds(program: Callable[..., Any], sets: Sequence[tuple[Any, ...]], sizes: Sizes) -> float:
    # Blocking on each call to a TPU would measure the round trip.
    if jax.default_backend() == "tpu":
        return timing.step_time(program, sets, steps=sizes.calls, repetitions=3)
    return timing.device_time(program, sets, calls=sizes.calls)


def _spread(rounds: Sequence[float]) -> dict[str, Any]:
    """The rounds, their median, and their spread as a share of it."""
    median = statistics.median(rounds)
    return {"median": median, "spread": (max(rounds) - min(rounds)) / median, "rounds": list(rounds)}


def _speeds(case: Case, seconds: dict[str, Any], peak: Peak | None) -> dict[str, Any]:
    median, stock = seconds["seconds"]["median"], seconds["stock_seconds"]
    return {
        "bytes_per_second": case.bytes / median,
        "flops_per_second": case.flops / median if case.flops else None,
        "share_of_peak": None if peak is None else peak.roofline_seconds(case.flops, case.bytes) / median,
        "speed_over_stock": None if stock is None else stock["median"] / median,
    }


def table(content: dict[str, Any]) -> FittedTable:
    """Returns the rows of a result as a table."""
    peak, kind = content["peak"], content["device"]["kind"]
    share = f"shares of {peak['chip']}'s roofline" if peak else "unknown peak of this device, so no shares"
    title = f"{content['fingerprint']['backend']} on {kind}\n{share}"
    numbers = "µs", "rounds", "GB/s", "TFLOP/s", "share", "× stock", "error"
    columns = numbers, Column("bits", no_wrap=True)
    optional = "TFLOP/s", "GB/s", "error", "rounds", "share"
    return results.table_by_operation(title, content["rows"], columns, _cells, optional)


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "failed" in row:
        return [*[""] * 7, "refused" if row["refused"] else "FAILED"]
    share, stock, flops = row["share_of_peak"], row["speed_over_stock"], row["flops_per_second"]
    return [
        f"{row['seconds']['median'] * 1e6:.1f}",
        results.spread_text(row),
        f"{row['bytes_per_second'] / 1e9:.1f}",
        "" if flops is None else f"{flops / 1e12:.3g}",
        "" if share is None else f"{share:.0%}",
        "none" if stock is None else f"{stock:.2f}",
        "" if row["error"] is None else f"{row['error']['relative']:.1e}",
        row["outputs"][0]["sha256"][:8] + ("" if row["same_bits_again"] else " CHANGED"),
    ]
