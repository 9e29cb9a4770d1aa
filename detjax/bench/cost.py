"""A model of what a step costs that many devices share: by the cut along outputs, and by the usual cut with all-reduce.

A step takes the time of its kernels and of its exchanges, one after the other: nothing overlaps. A kernel takes what it
takes to start, and then the longer of its bytes and its operations. An exchange takes a latency that grows with the
number of devices, and its bytes. Rates and latencies are fitted to measurements; the module `step_work` says how many
there are of each.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from rich.table import Table

from detjax.bench import presets
from detjax.bench.shapes import Widths
from detjax.bench.step_work import Product, Work, preset_work

type Cut = Literal["outputs", "usual"]
type Growth = Literal["logarithm", "number"]

CUTS: Final[tuple[Cut, ...]] = ("outputs", "usual")
GROWTHS: Final[tuple[Growth, ...]] = ("logarithm", "number")
_FITTED_TO: Final = "Qwen3-8B"
_PEER_CONTEXT: Final = 128
"""Tokens in the cache of the measured steps on several devices, of which the record says nothing; few matter little."""
_FULL: Final = 0.9
"""The share of a device's memory that weights, keys and values may take."""
_TILE: Final = 64
"""The outputs of the narrowest tile: kernels compute as many, where a device has fewer."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of device, and how such devices are joined.

    Attributes:
        start: seconds that a kernel takes beside its bytes and operations.
        memory: bytes a second that products read.
        keys: bytes a second that attention reads in decode.
        flops: operations a second of products.
        attention_flops: operations a second of attention.
        latency: seconds of an exchange without its bytes, and seconds that it takes more as devices double in number,
            or for each further device; by the growth.
        link: bytes a second that a device gets from those of its host.
        network: bytes a second that a device gets from other hosts.
        host: devices of a host.
        capacity: bytes of a device's memory.
    """

    start: float
    memory: float
    keys: float
    flops: float
    attention_flops: float
    latency: Mapping[Growth, tuple[float, float]]
    link: float = 450e9
    network: float = 50e9
    host: int = 8
    capacity: float = 141e9

    def exchange_latency(self, devices: int, growth: Growth) -> float:
        """Returns the seconds of an exchange that has no bytes."""
        first, more = self.latency[growth]
        return 0.0 if devices == 1 else first + more * _steps(devices, growth)

    def gather_seconds(self, size: float, devices: int) -> float:
        """Returns the seconds in which every device gets so many bytes of each other one."""
        near = min(devices, self.host)
        # All devices of a host take in together what comes from others, while they pass on what they have.
        return max((devices - near) * size / (near * self.network), (devices - 1) * size / self.link)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a model.

    Attributes:
        tokens: tokens that it computes.
        answers: the last tokens of requests, which get logits.
        context: tokens that each of them looks at.
        is_prefill: whether the tokens are one prompt, of which each looks at those before it.
    """

    tokens: int
    answers: int
    context: int
    is_prefill: bool = False

    @property
    def pairs(self) -> float:
        """The pairs of a query and a key."""
        return self.tokens * self.context / (2 if self.is_prefill else 1)

    @property
    def kept(self) -> int:
        """The tokens whose keys and values are in memory."""
        return self.tokens if self.is_prefill else self.tokens * self.context


def decode(requests: int, context: int) -> Step:
    """Returns the step that gives each request a token."""
    return Step(requests, requests, context)


def prefill(tokens: int) -> Step:
    """Returns the step that computes a prompt."""
    return Step(tokens, 1, tokens, is_prefill=True)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step costs a device.

    Attributes:
        compute: seconds of kernels.
        latency: seconds of exchanges that have no bytes.
        transfer: seconds of their bytes.
        exchanges: how many there are.
        gathered: the bytes that the device gets in them.
        weights: the bytes of weights that it reads.
    """

    compute: float
    latency: float
    transfer: float
    exchanges: int
    gathered: float
    weights: float

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.compute + self.latency + self.transfer


def cost(machine: Machine, cut: Cut, growth: Growth, work: Work, whole: Work, step: Step) -> Cost:
    """Returns what a step costs.

    Args:
        machine: the devices.
        cut: how weights are cut.
        growth: how latency grows with the number of devices.
        work: a device's part of the work, cut by outputs.
        whole: the work of a single device.
        step: the step.
    """
    devices, rows = work.devices, {"tokens": step.tokens, "answers": step.answers}
    if cut == "outputs":
        parts = [(product, rows[product.rows], 1) for product in work.products]
        sizes = [gather.bytes * rows[gather.rows] for gather in work.gathers]
        gathers, exchanges = sizes, len(sizes)
    else:
        # It cuts every weight into as many pieces as there are devices, which is what it can do at best.
        parts = [(product, rows[product.rows], devices) for product in whole.products]
        added = step.tokens * work.hidden_bytes / devices
        (head,) = (product for product in whole.products if product.rows == "answers")
        # An all-reduce is two gathers of a device's share: one to add, one to give back. Two a layer and the embedding.
        sums = 2 * work.layers + 1
        gathers = [*[added] * (2 * sums), step.answers * head.outputs * 4 / devices]
        exchanges = sums + 1
    if devices == 1:
        gathers, exchanges = [], 0
    weights, compute = 0.0, 0.0
    for product, count, pieces in parts:
        size, flops = _product(product, count, pieces)
        weights += size
        compute += machine.start + max(size / machine.memory, flops / machine.flops)
    compute += machine.start * work.kernels + step.tokens * work.activation_bytes / machine.memory
    read = step.kept * work.key_bytes / machine.keys
    compute += max(read, step.pairs * work.attention_flops / machine.attention_flops)
    return Cost(
        compute=compute,
        latency=exchanges * machine.exchange_latency(devices, growth),
        transfer=sum(machine.gather_seconds(size, devices) for size in gathers),
        exchanges=exchanges,
        gathered=(devices - 1) * sum(gathers),
        weights=weights,
    )


def _product(product: Product, rows: int, pieces: int) -> tuple[float, float]:
    """The bytes and operations of a product of so many rows, of whose outputs a device has one of so many pieces."""
    share = product.chosen / product.experts
    # Tokens choose experts independently.
    met = product.experts * (1 - (1 - share) ** rows) if product.experts > 1 else 1
    outputs = product.outputs / pieces
    computed = math.ceil(outputs / _TILE) * _TILE
    return 2 * met * outputs * product.inputs, 2 * rows * product.chosen * computed * product.inputs


def _steps(devices: int, growth: Growth) -> float:
    return math.log2(devices) if growth == "logarithm" else devices - 1


# Fitting.


def fitted(single: Mapping[str, Any], several: Mapping[str, Any]) -> Machine:
    """Returns the machine that measurements describe.

    Args:
        single: a result of `python -m detjax.bench run` on one device.
        several: steps on several devices, as in `benchmarks/results/peer-tensor-parallel-h200.json`.
    """
    rows = [row for row in single["rows"] if row["name"].startswith(_FITTED_TO)]
    linears = Widths.from_config(presets.config(_FITTED_TO)).linears
    sizes = {f"{_FITTED_TO} {name}, M={m}": (m, n, k) for name, (n, k) in linears.items() for m in (1, 4096)}
    times = {row["name"]: row["seconds"]["median"] for row in rows if row["operation"] == "matmul"}
    reading = [(2 * n * k, times[name]) for name, (m, n, k) in sizes.items() if m == 1]
    # The least relative errors: seconds = start + bytes / memory.
    start, slope = _least_squares([((1.0, float(size)), seconds) for size, seconds in reading])
    computing = [(2 * m * n * k, times[name]) for name, (m, n, k) in sizes.items() if m > 1 and name in times]
    flops = statistics.median(count / (seconds - start) for count, seconds in computing)
    measured = {(row["operation"], row["name"]): row["seconds"]["median"] for row in rows}
    config = presets.config(_FITTED_TO)
    keys = 64 * 1024 * 2 * config.kv_heads * config.head_dim * 2
    pairs = 4096 * 4096 / 2 * 4 * config.heads * config.head_dim
    machine = Machine(
        start=start,
        memory=1 / slope,
        keys=keys / (measured["attention_decode", f"{_FITTED_TO}, 64 × 1024 keys"] - start),
        flops=flops,
        attention_flops=pairs / (measured["attention_prefill", f"{_FITTED_TO}, 1 × 4096 tokens"] - start),
        latency=dict.fromkeys(GROWTHS, (0.0, 0.0)),
    )
    return dataclasses.replace(machine, latency={growth: _latency(machine, several, growth) for growth in GROWTHS})


def _latency(machine: Machine, several: Mapping[str, Any], growth: Growth) -> tuple[float, float]:
    equations = []
    for row in several["steps"]:
        if row["devices"] > 1:
            base = _peer_cost(machine, row, growth)
            latency = row["seconds"] - base.seconds
            counts = base.exchanges, base.exchanges * _steps(row["devices"], growth)
            equations.append((counts, latency, row["seconds"]))
    scaled = [(np.array(counts) / seconds, latency / seconds) for counts, latency, seconds in equations]
    solution, *_ = np.linalg.lstsq(np.array([a for a, _ in scaled]), np.array([b for _, b in scaled]))
    return float(solution[0]), float(solution[1])


def _least_squares(equations: Iterable[tuple[tuple[float, ...], float]]) -> list[float]:
    """The factors whose sums have the least relative errors."""
    scaled = [(np.array(terms) / total, 1.0) for terms, total in equations]
    solution, *_ = np.linalg.lstsq(np.array([a for a, _ in scaled]), np.array([b for _, b in scaled]))
    return [float(x) for x in solution]


def _peer_cost(machine: Machine, row: Mapping[str, Any], growth: Growth) -> Cost:
    work, whole = preset_work(_FITTED_TO, row["devices"]), preset_work(_FITTED_TO, 1)
    return cost(machine, row["cut"], growth, work, whole, decode(row["requests"], _PEER_CONTEXT))


def errors(machine: Machine, single: Mapping[str, Any], several: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what was measured beside what the model says of it; arguments as in `fitted`."""
    checks = []
    for row in several["steps"]:
        what = f"{row['cut']}, {row['kernels']}, decode of {row['requests']} on {row['devices']}"
        predicted = _peer_cost(machine, row, "logarithm").seconds
        checks.append(_error(what, _FITTED_TO, row["seconds"], predicted, fitted_to=row["devices"] > 1))
    steps = {
        ("decode_step", "1 × 1024 tokens in the cache"): decode(1, 1024),
        ("decode_step", "64 × 1024 tokens in the cache"): decode(64, 1024),
        ("prefill_step", "1 × 1024 tokens"): prefill(1024),
    }
    for row in single["rows"]:
        model, _, name = row["name"].partition(", ")
        step = steps.get((row["operation"], name))
        if step is not None:
            work = preset_work(model, 1)
            predicted = cost(machine, "outputs", "logarithm", work, work, step).seconds
            what = f"{row['operation']}, {name}"
            checks.append(_error(what, model, row["seconds"]["median"], predicted, fitted_to=False))
    return checks


def _error(what: str, model: str, measured: float, predicted: float, *, fitted_to: bool) -> dict[str, Any]:
    error = predicted / measured - 1
    return {
        "what": what,
        "model": model,
        "measured": measured,
        "predicted": predicted,
        "error": error,
        "size": abs(error),
        "fitted": fitted_to,
    }


# Predictions.


def predictions(
    machine: Machine, models: Sequence[str], steps: Mapping[str, Step], devices: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns a row for every model, step and number of devices whose memory holds the model and its requests."""
    rows = []
    for name in models:
        works = {count: preset_work(name, count) for count in {1, *devices}}
        for label, step in steps.items():
            for count in devices:
                work = works[count]
                if work.weight_bytes + step.kept * work.key_bytes > _FULL * machine.capacity:
                    continue
                costs: list[tuple[Cut, Growth, Cost]] = [
                    (cut, growth, cost(machine, cut, growth, work, works[1], step))
                    for cut in CUTS
                    for growth in GROWTHS
                ]
                rows.append({"model": name, "step": label, "devices": count, **_row(costs, work)})
    return rows


def _row(costs: Sequence[tuple[Cut, Growth, Cost]], work: Work) -> dict[str, Any]:
    row: dict[str, Any] = {"weight_bytes": work.weight_bytes}
    for cut, growth, one in costs:
        fields = {
            "exchanges": one.exchanges,
            "gathered_bytes": one.gathered,
            "gathered_bytes_per_layer": one.gathered / work.layers,
            "weight_bytes_read": one.weights,
            "compute_seconds": one.compute,
            "transfer_seconds": one.transfer,
            "seconds": dict[str, float](),
        }
        row.setdefault(cut, fields)["seconds"][growth] = one.seconds
    return row


def fastest(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns for every model and step the number of devices after which the cut by outputs stops paying.

    More devices give no faster step. Beside it stands the same of the usual cut, and the ratio of the two.
    """
    summary = []
    for model, step in dict.fromkeys((row["model"], row["step"]) for row in rows):
        same = [row for row in rows if (row["model"], row["step"]) == (model, step)]
        one: dict[str, Any] = {"model": model, "step": step, "fewest": same[0]["devices"]}
        for growth in GROWTHS:
            best = {cut: min(same, key=lambda row: row[cut]["seconds"][growth]) for cut in CUTS}
            one[growth] = {
                cut: {"devices": row["devices"], "seconds": row[cut]["seconds"][growth]} for cut, row in best.items()
            }
            one[growth]["ratio"] = one[growth]["outputs"]["seconds"] / one[growth]["usual"]["seconds"]
        summary.append(one)
    return summary


# Tables.


def tables(content: Mapping[str, Any]) -> list[Table]:
    """Returns the errors, the predictions, and where more devices stop paying."""
    checks = Table("what", "model", "measured, ms", "predicted, ms", "error", title="the model and measurements")
    for row in content["errors"]:
        times = [f"{row[name] * 1e3:.2f}" for name in ("measured", "predicted")]
        checks.add_row(row["what"], row["model"], *times, f"{row['error']:+.0%}")
    columns = ["model", "step", "devices", "weights, GB", "exchanges", "MB gathered a layer"]
    columns += ["outputs, ms", "usual, ms", "ratio"]
    title = "predicted; in parentheses where latency grows with the number of devices"
    steps = Table(*columns, title=title)
    for row in content["predictions"]:
        outputs, usual = row["outputs"], row["usual"]
        sizes = [f"{row['weight_bytes'] / 1e9:.1f}", f"{outputs['exchanges']}"]
        sizes.append(f"{outputs['gathered_bytes_per_layer'] / 1e6:.2f}")
        both = [_times(cut["seconds"]) for cut in (outputs, usual)]
        ratio = outputs["seconds"]["logarithm"] / usual["seconds"]["logarithm"]
        steps.add_row(row["model"], row["step"], str(row["devices"]), *sizes, *both, f"{ratio:.2f}")
    best = Table("model", "step", "outputs: devices", "ms", "usual: devices", "ms", "ratio", title="the fastest step")
    for row in content["fastest"]:
        one = row["logarithm"]
        cells = [(str(one[cut]["devices"]), f"{one[cut]['seconds'] * 1e3:.1f}") for cut in CUTS]
        best.add_row(row["model"], row["step"], *cells[0], *cells[1], f"{one['ratio']:.2f}")
    return [checks, steps, best]


def _times(seconds: Mapping[str, float]) -> str:
    return f"{seconds['logarithm'] * 1e3:.2f} ({seconds['number'] * 1e3:.2f})"
