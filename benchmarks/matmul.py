"""What matrix products cost on an H200 against XLA's own and PyTorch's, and that one row keeps one set of bits.

    python benchmarks/matmul.py [--out benchmarks/results/matmul-h200.json] [--models Qwen3-8B] [--tokens 1 64]
                                [--skip-bits] [--skip-torch] [--small]

Every linear layer of `detjax.bench.shapes`, bfloat16, weights [N, K], at every number of tokens. XLA's dot is compiled
with JAX's default options, so XLA has autotuned it. Times are medians over rounds in which all take turns, and weights
are rotated so that they come from memory. Beside the JSON file two pictures are written. `--small` runs in seconds on
a CPU. Slow cells are for the reader to judge; the exit code is 1 only if bits differ.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

# PyTorch needs room beside JAX.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

import detjax
from detjax import ops
from detjax.bench.shapes import MODELS, TOKENS, Widths
from detjax.bench.timing import device_time, rotations, torch_time, turns
from detjax.options import Epilogue, WeightLayout
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import default_schedule, key, table

OURS, XLA, TORCH = "detjax", "xla", "torch"
STOCK: Final = detjax.backends.STOCK
BF16: Final = jnp.dtype("bfloat16")
TIMING: Final = {
    OURS: "sum of the kernels' times by CUPTI, without the time between kernels",
    XLA: "sum of the kernels' times by CUPTI, without the time between kernels",
    TORCH: "replay of a CUDA graph between two events, the time between kernels included",
}
ROUNDS: Final = 2
LONG_ROUNDS: Final = 4
"""Rounds of programs that take longer than `LONG`. They reach the power limit, and the clock that it leaves them
changes by several percent with what ran before."""
LONG: Final = 500e-6
BUILDERS: Final = 4
"""Threads that compile our kernels while XLA autotunes its own."""
SHORT: Final = 0.93
"""Speed over XLA's below which a cell is listed."""
MOST_TRANSPOSED: Final = 110e6
"""Elements of the largest weight whose bits are compared in the layout [K, N] too."""
MOST_SCHEDULES: Final = 40
NEIGHBOURS: Final = {"zeros": 0.0, "3e38": 3e38, "inf": np.inf, "NaN": np.nan}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        linears: models and names of the linear layers of each [N, K].
        neighbours: numbers of tokens at which the anchor row's neighbours are not random.
        probe: [N, K] of repeated runs and of the comparison of schedules.
        epilogues: the model whose linear layers are measured with their epilogues.
    """

    linears: dict[tuple[int, int], list[str]]
    tokens: Sequence[int]
    neighbours: Sequence[int] = (16, 128, 1024)
    probe: tuple[int, int] = (4096, 12288)
    scheduled_tokens: Sequence[int] = (8, 64, 256, 1024)
    repeated_tokens: Sequence[int] = (128, 4096)
    repeats: int = 1000
    epilogues: Widths = MODELS["Qwen3-8B"]
    epilogue_tokens: Sequence[int] = (1, 64, 1024)

    @property
    def most_tokens(self) -> int:
        return max(*self.tokens, *self.scheduled_tokens, *self.repeated_tokens, *self.epilogue_tokens)


_SMALL = Widths(hidden=128, queries=128, keys=32, mlp=192, vocabulary=1000)


def small_sizes() -> Sizes:
    """What a CPU measures in seconds."""
    return Sizes(
        linears=unique_linears({"small": _SMALL}),
        tokens=(1, 3, 17),
        neighbours=(17,),
        probe=(128, 192),
        repeated_tokens=(17,),
        repeats=3,
        epilogues=_SMALL,
        epilogue_tokens=(1, 17),
    )


def unique_linears(models: dict[str, Widths]) -> dict[tuple[int, int], list[str]]:
    """Which models have a linear layer of each [N, K], by K and N."""
    linears: dict[tuple[int, int], list[str]] = {}
    for model, widths in models.items():
        for name, shape in widths.linears.items():
            linears.setdefault(shape, []).append(f"{model} {name}")
    return dict(sorted(linears.items(), key=lambda item: item[0][::-1]))


def operations(problem: Problem) -> int:
    """Multiplications and additions."""
    return 2 * problem.m * problem.n * problem.k * problem.parts


def traffic(problem: Problem) -> int:
    """Bytes that have to be read and written."""
    p = problem
    residual = 0 if p.residual_dtype is None else p.m * p.n * p.residual_dtype.itemsize
    read = (p.m + p.parts * p.n) * p.k * p.dtype.itemsize
    return read + residual + p.m * p.n * p.out_dtype.itemsize


def expected_seconds(problem: Problem) -> float:
    """About what a good kernel takes."""
    return max(operations(problem) / 700e12, traffic(problem) / 4e12)


def calls(problem: Problem) -> int:
    """How many calls a round measures: about 60 ms of them, as far as that is 7 to 25."""
    return min(25, max(7, int(0.06 / expected_seconds(problem))))


def rounds(problem: Problem) -> int:
    return LONG_ROUNDS if expected_seconds(problem) > LONG else ROUNDS


# --- inputs -----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def drawn(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Weights of variance 1/K."""
    return jax.random.normal(jax.random.key(seed), shape, BF16) * jnp.asarray(shape[-1] ** -0.5, BF16)


def weight_sets(*shape: int) -> list[jax.Array]:
    """As many weights as keep a call from finding its own in the cache."""
    count = rotations(2 * int(np.prod(shape)))
    return jax.block_until_ready([drawn(shape, jnp.asarray(seed)) for seed in range(count)])


@functools.lru_cache(maxsize=1)
def _pool(k: int, rows: int) -> np.ndarray:
    return np.random.default_rng(k).standard_normal((rows + 1, k), np.float32).astype(BF16)


def tokens(m: int, k: int, most: int, neighbours: float | None = None) -> jax.Array:
    """`[m, k]`, of which the first, the middle and the last row are always the same; the rest random or one number."""
    pool = _pool(k, most)
    x = pool[1 : m + 1].copy() if neighbours is None else np.full((m, k), neighbours, BF16)
    x[anchored(m)] = pool[0]
    return jnp.asarray(x)


def anchored(m: int) -> list[int]:
    return sorted({0, m // 2, m - 1})


@jax.jit
def anchor_rows(y: jax.Array) -> jax.Array:
    return y[np.array(anchored(len(y)))]


# --- programs ---------------------------------------------------------------------------------------------------------


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def matmul(layout: WeightLayout, **epilogue: Any) -> Callable[..., jax.Array]:
    """`ops.matmul` of x, w and perhaps a residual."""

    def call(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        return ops.matmul(x, w, layout=layout, residual=residual, **epilogue)

    return call


def build(fn: Callable[..., Any], backend: str, *arguments: Any) -> Callable[..., Any]:
    """`fn` compiled for arguments of these shapes: with the pinned options, or with JAX's defaults under `stock`."""
    options = None if backend == STOCK else detjax.compilation.compiler_options()
    with detjax.use_backend(backend):
        return jax.jit(fn, compiler_options=options).lower(*arguments).compile()


@dataclasses.dataclass(frozen=True)
class Programs:
    """Of one [N, K]: ours by layout and number of tokens, XLA's by number of tokens."""

    ours: dict[tuple[WeightLayout, int], Callable[..., Any]]
    xla: dict[int, Callable[..., Any]]


def build_all(sizes: Sizes, n: int, k: int, layouts: Iterable[WeightLayout], backend: str) -> Programs:
    """All programs of one [N, K]. XLA's are built one at a time, since building them is to time candidates."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=BF16)
    ours: dict[tuple[WeightLayout, int], Future] = {}
    with ThreadPoolExecutor(BUILDERS) as pool:
        for layout in layouts:
            w = shape((n, k) if layout == "nk" else (k, n))
            for m in sizes.tokens:
                ours[layout, m] = pool.submit(build, matmul(layout), backend, shape((m, k)), w)
        xla = {m: build(dot, STOCK, shape((m, k)), shape((n, k))) for m in sizes.tokens}
    return Programs({name: future.result() for name, future in ours.items()}, xla)


# --- time -------------------------------------------------------------------------------------------------------------


def in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each, over rounds in which all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name in turns(runs, rounds):
        seconds[name].append(runs[name]())
    return {name: statistics.median(values) for name, values in seconds.items()}


def torch_run(sets: Sequence[tuple[jax.Array, jax.Array]], replays: int) -> Callable[[], float]:
    """A measurement of `torch.mm` on the very arrays that JAX holds."""
    import torch

    shared = [tuple(torch.from_dlpack(array) for array in arguments) for arguments in sets]
    return lambda: torch_time(lambda x, w: torch.mm(x, w.t()), shared, replays=replays)


def free_torch_memory() -> None:
    import torch

    torch.cuda.empty_cache()


def kernel_names(program: Any, arguments: tuple[Any, ...]) -> str:
    """The kernels that a call launches; "" on devices other than GPUs."""
    if jax.default_backend() != "gpu":
        return ""
    from jax.experimental.mosaic.gpu import profiler

    _, timings = profiler.measure(program, aggregate=False)(*arguments)
    return " + ".join(name.split("(")[0][:60] for name, _ in timings or ())


def schedule_name(schedule: Schedule) -> str:
    """A schedule in one word: tile, the operand on the rows, warpgroups, cluster, lines, panel."""
    s = schedule
    cluster = f"c{s.cluster_m}x{s.cluster_n}"
    return f"{s.tile_m}x{s.tile_n}-{s.rows}-g{s.warpgroups}-{cluster}-l{s.lines}-p{s.panel}"


def result(problem: Problem, seconds: dict[str, float], backend: str) -> dict[str, Any]:
    """What a cell's report and its place in the JSON file have in common."""
    own = seconds[OURS]
    out: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k}
    out["seconds"] = {name: round(value, 9) for name, value in seconds.items()}
    out["ratios"] = {name: round(value / own, 4) for name, value in seconds.items() if name != OURS}
    out["gigabytes_per_second"] = round(traffic(problem) / own / 1e9, 1)
    out["teraflops"] = round(operations(problem) / own / 1e12, 2)
    if backend == "hopper":
        kind = detjax.backends.device_kind()
        out |= {"schedule": schedule_name(default_schedule(problem, kind)), "tuned": key(problem) in table(kind)}
    return out


def measure(
    sizes: Sizes, n: int, k: int, weights: Sequence[jax.Array], programs: Programs, backend: str, with_torch: bool
) -> Iterator[dict[str, Any]]:
    """The cells of one [N, K], one to a number of tokens."""
    for m in sizes.tokens:
        problem = Problem(m, n, k)
        x = tokens(m, k, sizes.most_tokens)
        sets = [(x, w) for w in weights]
        timed = functools.partial(device_time, argument_sets=sets, calls=calls(problem))
        ours, xla = programs.ours["nk", m], programs.xla[m]
        runs = {OURS: functools.partial(timed, ours), XLA: functools.partial(timed, xla)}
        if with_torch:
            runs[TORCH] = torch_run(sets, replays=3 if rounds(problem) == ROUNDS else 1)
        cell = result(problem, in_turns(runs, rounds(problem)), backend)
        yield cell | {"linears": sizes.linears[n, k], "xla_kernels": kernel_names(xla, sets[0])}


def measure_epilogues(sizes: Sizes, backend: str) -> Iterator[dict[str, Any]]:
    """Linear layers with what a decoder does to their results, against XLA's fusion of the same."""
    linears = sizes.epilogues.linears
    f32, silu = jnp.dtype("float32"), {"activation": "silu", "gated": True}
    gated = (linears["gate+up"][0] // 2, linears["gate+up"][1])
    cases = (
        ("gate+up, silu(gate) * up", gated, silu, {"parts": 2}),
        ("o, + residual", linears["o"], {}, {"residual_dtype": BF16}),
        ("lm_head, float32 result", linears["lm_head"], {"out_dtype": f32}, {"out_dtype": f32}),
    )
    for name, (n, k), options, fields in cases:
        weights = weight_sets(*(2, n, k) if "parts" in fields else (n, k))
        for m in sizes.epilogue_tokens:
            problem = Problem(m, n, k, **fields)
            operands = (tokens(m, n, sizes.most_tokens),) if "residual_dtype" in fields else ()
            x = tokens(m, k, sizes.most_tokens)
            sets = [(x, w, *operands) for w in weights]
            timed = functools.partial(device_time, argument_sets=sets, calls=calls(problem))
            programs = [build(matmul("nk", **options), which, *sets[0]) for which in (backend, STOCK)]
            runs = {which: functools.partial(timed, p) for which, p in zip((OURS, XLA), programs, strict=True)}
            cell = {"case": name, **result(problem, in_turns(runs, rounds(problem)), backend)}
            yield cell | {"xla_kernels": kernel_names(programs[1], sets[0])}


# --- bits -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bits:
    """How many results were compared, and which of them had other bits than the first of their kind."""

    anchor_rows: int = 0
    schedules: int = 0
    repeats: int = 0
    seconds: float = 0.0
    differences: list[str] = dataclasses.field(default_factory=list)


def compare_anchors(sizes: Sizes, n: int, k: int, w: jax.Array, programs: Programs, bits: Bits) -> None:
    """The anchor row's result at every number of tokens, position and layout, and beside every kind of neighbour."""
    first = None
    for layout in dict.fromkeys(layout for layout, _ in programs.ours):
        stored = w if layout == "nk" else w.T
        for m in sizes.tokens:
            odd = NEIGHBOURS if m in sizes.neighbours else {}
            for name, number in {"random": None, **odd}.items():
                x = tokens(m, k, sizes.most_tokens, number)
                rows = np.asarray(anchor_rows(programs.ours[layout, m](x, stored)))
                for position, row in zip(anchored(m), rows, strict=True):
                    first = row.tobytes() if first is None else first
                    bits.anchor_rows += 1
                    if row.tobytes() != first:
                        where = f"row {position} of {m}, weights {layout}, neighbours {name}"
                        bits.differences.append(f"{n}x{k}: {where}")


@jax.jit
def equal_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    unsigned = f"uint{8 * a.dtype.itemsize}"
    return (lax.bitcast_convert_type(a, unsigned) == lax.bitcast_convert_type(b, unsigned)).all()


def compare_schedules(sizes: Sizes, bits: Bits) -> None:
    """Every result of one product by schedules of the table, where there is one, spread over all that it has."""
    known = sorted(set(table(detjax.backends.device_kind()).values()), key=repr)
    spread = known[:: -(-len(known) // MOST_SCHEDULES) or 1]
    n, k = sizes.probe
    w = drawn((n, k), jnp.asarray(0))
    for m in sizes.scheduled_tokens if known else ():
        x = tokens(m, k, sizes.most_tokens)
        fitting = [s for s in spread if s.fits(Problem(m, n, k))]
        with ThreadPoolExecutor(BUILDERS) as pool:
            built = pool.map(lambda s, x=x: build(by_schedule(s), "hopper", x, w), fitting)
            results = [program(x, w) for program in built]
        for schedule, y in zip(fitting, results, strict=True):
            bits.schedules += 1
            if not equal_bits(results[0], y):
                bits.differences.append(f"{n}x{k}, {m} tokens: schedules {fitting[0]} and {schedule}")


def by_schedule(schedule: Schedule) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        options = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": BF16}
        return product(Operands(x, w), schedule=schedule, **options)

    return call


def compare_runs(sizes: Sizes, backend: str, bits: Bits) -> None:
    """Every result of one product over repeated runs."""
    n, k = sizes.probe
    w = drawn((n, k), jnp.asarray(0))
    for m in sizes.repeated_tokens:
        x = tokens(m, k, sizes.most_tokens)
        program = build(matmul("nk"), backend, x, w)
        want = program(x, w)
        # The host waits once, so that runs follow each other closely.
        equal = [equal_bits(want, program(x, w)) for _ in range(sizes.repeats)]
        other = sizes.repeats - int(np.sum(jax.device_get(equal)))
        bits.repeats += sizes.repeats
        if other:
            bits.differences.append(f"{n}x{k}, {m} tokens: {other} of {sizes.repeats} repeated runs")


# --- reports ----------------------------------------------------------------------------------------------------------


def ratios(cells: Iterable[dict[str, Any]], rival: str) -> list[float]:
    """Our speed over the rival's, where it was measured."""
    return [cell["ratios"][rival] for cell in cells if rival in cell["ratios"]]


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def linear_name(cell: dict[str, Any]) -> str:
    return f"{cell['linears'][0].split()[-1]} {cell['n']}×{cell['k']}"


def by_linear(cells: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Cells by name and number of tokens."""
    out: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        out.setdefault(linear_name(cell), {})[cell["m"]] = cell
    return out


def cell_table(cells: Sequence[dict[str, Any]], rivals: Sequence[str]) -> Table:
    """A line a cell."""
    out = Table("product", title="device time; ratios are our speed over theirs", padding=(0, 1), box=None)
    rivals = [rival for rival in rivals if any(rival in cell["seconds"] for cell in cells)]
    headings = ["M", *(f"{name}, µs" for name in (OURS, *rivals)), *(f"/ {name}" for name in rivals), "GB/s", "TFLOP/s"]
    for heading in headings:
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("schedule", no_wrap=True)
    out.add_column("XLA's kernels", overflow="ellipsis", no_wrap=True)
    for cell in cells:
        seconds = [f"{cell['seconds'][name] * 1e6:.1f}" for name in (OURS, *rivals)]
        over = [f"{cell['ratios'][name]:.3f}" for name in rivals]
        rates = [f"{cell['gigabytes_per_second']:.0f}", f"{cell['teraflops']:.0f}"]
        schedule = cell.get("schedule", "") + ("" if cell.get("tuned", True) else " (by rule)")
        name = cell.get("case") or linear_name(cell)
        out.add_row(name, str(cell["m"]), *seconds, *over, *rates, schedule, cell["xla_kernels"])
    return out


def ratio_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Our speed over XLA's: a line a product, a column a number of tokens."""
    lines = by_linear(cells)
    sizes = sorted({cell["m"] for cell in cells})
    out = Table("/ xla", padding=(0, 1, 0, 0), box=None)
    for m in sizes:
        out.add_column(str(m), justify="right", no_wrap=True)
    for name, line in lines.items():
        out.add_row(name, *(f"{line[m]['ratios'][XLA]:.2f}" for m in sizes))
    for rival in (XLA, TORCH):
        means = [geometric_mean(ratios((line[m] for line in lines.values()), rival)) for m in sizes]
        if any(rival in cell["ratios"] for cell in cells):
            out.add_row(f"geometric mean / {rival}", *(f"{mean:.2f}" for mean in means))
    return out


def summarized(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means, the slowest cell, and the cells that fall short of XLA's speed."""
    ordered = sorted(cells, key=lambda cell: cell["ratios"][XLA])

    def line(cell: dict[str, Any]) -> str:
        rates = f"{cell['gigabytes_per_second']:.0f} GB/s, {cell['teraflops']:.0f} TFLOP/s"
        over = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in cell["ratios"].items())
        return f"{linear_name(cell)}, {cell['m']} tokens: {over}; {rates}; {cell.get('schedule', 'no schedule')}"

    means = {rival: geometric_mean(ratios(cells, rival)) for rival in (XLA, TORCH) if ratios(cells, rival)}
    short = [line(cell) for cell in ordered if cell["ratios"][XLA] < SHORT]
    return {"cells": len(cells), "geometric_means": means, "lowest": line(ordered[0]), "short": short}


# --- pictures ---------------------------------------------------------------------------------------------------------

_OURS: Final = "#2a7f8e"
_THEIRS: Final = "#d1603d"
_INK: Final = "#262626"
_GREY: Final = "#767676"
_LIGHT: Final = "#b9d3d7"


def _figure(height: float, title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(9, height), dpi=150, facecolor="white")
    figure.text(0.02, 1 - 0.14 / height, title, fontsize=13, fontweight="bold", color=_INK, va="top")
    figure.text(0.02, 1 - 0.44 / height, subtitle, fontsize=9.5, color=_GREY, va="top")
    return figure


def _write(figure: Figure, path: Path) -> None:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # A palette takes a third of the bytes.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128).save(path, optimize=True)


def _plain(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9.5, labelcolor=_INK)


def draw_over_tokens(cells: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """Writes a PNG: our speed over XLA's by number of tokens, a line a product, and the geometric means."""
    lines = by_linear(cells)
    sizes = sorted({cell["m"] for cell in cells})
    mean = geometric_mean(ratios(cells, XLA))
    title = f"detjax's matmul runs at {mean:.2f} of the speed of XLA's autotuned dot"
    subtitle = f"geometric mean of {len(cells)} products of bfloat16 linear layers; {device}"
    figure = _figure(5.2, title, subtitle)
    axes = figure.add_axes((0.075, 0.12, 0.905, 0.73))
    _plain(axes)
    for index, line in enumerate(lines.values()):
        label = f"one linear layer ({len(lines)})" if index == 0 else None
        axes.plot(list(line), ratios(line.values(), XLA), color=_LIGHT, linewidth=1, label=label, zorder=2)
    for rival, color, style, width in ((XLA, _OURS, "-", 3.2), (TORCH, _THEIRS, "--", 2.0)):
        if ratios(cells, rival):
            means = [geometric_mean(ratios((line[m] for line in lines.values()), rival)) for m in sizes]
            name = {XLA: "over XLA", TORCH: "over torch.mm"}[rival]
            axes.plot(
                sizes, means, color=color, linestyle=style, linewidth=width, zorder=3, label=f"geometric mean {name}"
            )
    axes.axhline(1, color=_INK, linewidth=1.2, zorder=2.5)
    axes.set_xscale("log", base=2)
    # Names of sizes that lie closer together than powers of two would run into each other.
    axes.set_xticks([m for m in sizes if m & (m - 1) == 0] or sizes, minor=False)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda m, _: f"{m:g}")
    axes.set_yscale("log")
    low, high = min(0.9, *ratios(cells, XLA)), max(1.2, *ratios(cells, XLA))
    steps = (0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 6, 10)
    axes.set_ylim(low * 0.98, high * 1.02)
    axes.set_yticks([step for step in steps if low * 0.98 <= step <= high * 1.02], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}×")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8, zorder=0)
    axes.set_xlabel("tokens in a call", fontsize=10.5, color=_INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=_INK, loc="best")
    _write(figure, path)


def draw_cells(cells: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """Writes a PNG: our speed over XLA's in every cell, coloured by how far it lies from 1."""
    lines = by_linear(cells)
    sizes = sorted({cell["m"] for cell in cells})
    grid = np.array([[line[m]["ratios"][XLA] for m in sizes] for line in lines.values()])
    height = 1.15 + 0.27 * len(lines)
    faster = int((grid >= 1).sum())
    title = f"detjax's matmul is as fast as XLA's autotuned dot or faster in {faster} of {grid.size} cells"
    figure = _figure(
        height, title, f"XLA's time over detjax's; bfloat16 linear layers N×K by tokens in a call; {device}"
    )
    axes = figure.add_axes((0.19, 0.08 / height, 0.8, 0.27 * len(lines) / height))
    colors = LinearSegmentedColormap.from_list("speed", [_THEIRS, "#ffffff", _OURS])
    # In logarithms, so that twice as fast and half as fast lie equally far from white.
    axes.imshow(np.log2(grid), cmap=colors, norm=Normalize(-0.5, 0.5), aspect="auto")
    for (i, j), ratio in np.ndenumerate(grid):
        color = "white" if abs(np.log2(ratio)) > 0.38 else _INK
        axes.text(j, i, f"{ratio:.2f}", ha="center", va="center", fontsize=8.5, color=color)
    _plain(axes)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(sizes)), [str(m) for m in sizes])
    axes.set_yticks(range(len(lines)), list(lines))
    _write(figure, path)


# --- the whole --------------------------------------------------------------------------------------------------------


def run(sizes: Sizes, backend: str, *, with_bits: bool, with_torch: bool, save: Callable[[Any], None]) -> dict:
    """All measurements; `save` gets what there is after every [N, K]."""
    cells, epilogues, bits = [], [], Bits()
    timing = TIMING if jax.default_backend() == "gpu" else "time until the result is there"
    content = {
        "fingerprint": dataclasses.asdict(detjax.fingerprint()),
        "timing": timing,
        "rounds": [ROUNDS, LONG_ROUNDS],
    }
    content |= {"sizes": dataclasses.asdict(sizes) | {"linears": [f"{n}x{k}" for n, k in sizes.linears]}}
    content |= {"cells": cells, "epilogues": epilogues}

    def compared(compare: Callable[..., None], *arguments: Any) -> None:
        if with_bits:
            start = time.perf_counter()
            compare(*arguments, bits)
            bits.seconds += time.perf_counter() - start

    for n, k in track(list(sizes.linears), "measuring", console=Console(stderr=True)):
        weights = weight_sets(n, k)
        transposed = with_bits and n * k <= MOST_TRANSPOSED
        programs = build_all(sizes, n, k, ("nk", "kn") if transposed else ("nk",), backend)
        cells.extend(measure(sizes, n, k, weights, programs, backend, with_torch))
        compared(compare_anchors, sizes, n, k, weights[0], programs)
        # Before the next weights are drawn.
        del weights, programs
        if with_torch:
            free_torch_memory()
        save(content)
    epilogues.extend(measure_epilogues(sizes, backend))
    content["summary"] = summarized(cells)
    save(content)
    compared(compare_schedules, sizes)
    compared(compare_runs, sizes, backend)
    content["bits"] = dataclasses.asdict(bits) if with_bits else None
    save(content)
    return content


def show(content: dict[str, Any]) -> None:
    """Prints the tables, the summary last."""
    console = Console(width=170, highlight=False)
    console.print(cell_table(content["cells"], (XLA, TORCH)), "", cell_table(content["epilogues"], (XLA,)), "")
    console.print(ratio_table(content["cells"]), "")
    summary, bits = content["summary"], content["bits"]
    means = ", ".join(f"{mean:.3f} of {name}" for name, mean in summary["geometric_means"].items())
    console.print(f"geometric mean of {summary['cells']} cells: {means}\nlowest: {summary['lowest']}")
    console.print(f"{len(summary['short'])} cells below {SHORT} of XLA's speed", *summary["short"], sep="\n  ")
    if bits is not None:
        compared = f"{bits['anchor_rows']} anchor rows, {bits['schedules']} schedules, {bits['repeats']} repeated runs"
        verdict = f"{len(bits['differences'])} with other bits" if bits["differences"] else "no bit differs"
        console.print(f"bits: {compared} compared in {bits['seconds']:.0f} s: {verdict}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/matmul-h200.json"), help="file to write")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="whose linear layers")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="numbers of tokens")
    parser.add_argument("--skip-bits", action="store_true", help="measure time alone")
    parser.add_argument("--skip-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, and the portable backend")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    start = time.perf_counter()
    models = {name: MODELS[name] for name in chosen.models}
    sizes = small_sizes() if chosen.small else Sizes(unique_linears(models), chosen.tokens)
    with_torch = not (chosen.small or chosen.skip_torch) and importlib.util.find_spec("torch") is not None
    out: Path = chosen.out
    out.parent.mkdir(parents=True, exist_ok=True)

    def save(content: dict[str, Any]) -> None:
        out.write_text(json.dumps(content, indent=1) + "\n")

    backend = "portable" if chosen.small else "hopper"
    with detjax.use_backend(backend):
        content = run(sizes, backend, with_bits=not chosen.skip_bits, with_torch=with_torch, save=save)
    show(content)
    device = content["fingerprint"]["device_kind"]
    draw_over_tokens(content["cells"], device, out.with_name(f"{out.stem}-over-tokens.png"))
    draw_cells(content["cells"], device, out.with_name(f"{out.stem}-cells.png"))
    Console().print(f"{time.perf_counter() - start:.0f} s; written to {out}")
    if content["bits"] is not None and content["bits"]["differences"]:
        raise SystemExit("error: other bits\n" + "\n".join(content["bits"]["differences"][:20]))


if __name__ == "__main__":
    main()
