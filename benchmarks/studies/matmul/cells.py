"""Times of products, a cell of the result for each product and number of tokens."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import rivals, timing
from benchmarks.rivals import OURS, TORCH, XLA
from benchmarks.studies.matmul.cases import BF16, Sizes, expected_seconds, operations, token_rows, traffic, weight_sets
from benchmarks.studies.matmul.programs import Programs, build, matmul
from benchmarks.timing import kernel_names
from detjax.bench.timing import device_time, in_turns
from detjax.pallas.hopper.matmul.plan import Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import default_schedule, key, table
from detjax.runtime import backends


def schedule_name(schedule: Schedule) -> str:
    """Returns a schedule as a word: tile, the operand on the rows, warpgroups, cluster, lines, panel."""
    s = schedule
    cluster = f"c{s.cluster_m}x{s.cluster_n}"
    return f"{s.tile_m}x{s.tile_n}-{s.rows}-g{s.warpgroups}-{cluster}-l{s.lines}-p{s.panel}"


def cell(problem: Problem, seconds: dict[str, float]) -> dict[str, Any]:
    """Returns a cell: seconds, our speed over the rivals', rates, and the tuned schedule."""
    fields: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k}
    fields["seconds"] = {name: round(value, 9) for name, value in seconds.items()}
    fields["ratios"] = {name: round(value / seconds[OURS], 4) for name, value in seconds.items() if name != OURS}
    fields["gigabytes_per_second"] = round(traffic(problem) / seconds[OURS] / 1e9, 1)
    fields["teraflops"] = round(operations(problem) / seconds[OURS] / 1e12, 2)
    if backends.backend() == "hopper":
        kind = backends.device_kind()
        fields |= {"schedule": schedule_name(default_schedule(problem, kind)), "tuned": key(problem) in table(kind)}
    return fields


def measure(
    sizes: Sizes, linear: tuple[int, int], weights: Sequence[jax.Array], programs: Programs, with_torch: bool
) -> Iterator[dict[str, Any]]:
    """Yields the cells of one [N, K], one for each number of tokens."""
    n, k = linear
    for m in sizes.tokens:
        problem = Problem(m, n, k)
        expected = expected_seconds(problem)
        x = token_rows(m, k, sizes.most_tokens)
        sets = [(x, w) for w in weights]
        timed = functools.partial(device_time, argument_sets=sets, calls=timing.calls_for(expected))
        ours, xla = programs.ours["nk", m], programs.xla[m]
        runs: dict[str, Callable[[], float]] = {
            OURS: functools.partial(timed, ours),
            XLA: functools.partial(timed, xla),
        }
        rounds = timing.rounds_for(expected)
        if with_torch:
            runs[TORCH] = rivals.torch_product(sets, replays=3 if rounds == timing.ROUNDS else 1)
        seconds = in_turns(runs, rounds, required=runs).medians
        yield cell(problem, seconds) | {"linears": sizes.linears[n, k], "xla_kernels": kernel_names(xla, sets[0])}


def measure_epilogues(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields the cells of linear layers with a decoder's epilogues, against XLA's fusions."""
    linears = sizes.epilogues
    gated = (linears["gate+up"][0] // 2, linears["gate+up"][1])
    float32 = jax.numpy.dtype("float32")
    cases: tuple[tuple[str, tuple[int, int], dict[str, Any], dict[str, Any]], ...] = (
        ("gate+up, silu(gate) * up", gated, {"activation": "silu", "gated": True}, {"parts": 2}),
        ("o, + residual", linears["o"], {}, {"residual_dtype": BF16}),
        ("lm_head, float32 result", linears["lm_head"], {"out_dtype": float32}, {"out_dtype": float32}),
    )
    for name, (n, k), options, fields in cases:
        weights = weight_sets(*(2, n, k) if "parts" in fields else (n, k))
        for m in sizes.epilogue_tokens:
            problem = Problem(m, n, k, **fields)
            yield {"case": name, **_measure_epilogue(sizes, problem, options, weights)}


def _measure_epilogue(
    sizes: Sizes, problem: Problem, options: dict[str, Any], weights: Sequence[jax.Array]
) -> dict[str, Any]:
    x = token_rows(problem.m, problem.k, sizes.most_tokens)
    residual = () if problem.residual_dtype is None else (token_rows(problem.m, problem.n, sizes.most_tokens),)
    sets = [(x, w, *residual) for w in weights]
    expected = expected_seconds(problem)
    timed = functools.partial(device_time, argument_sets=sets, calls=timing.calls_for(expected))
    programs = {
        name: build(matmul("nk", **options), backend, *sets[0])
        for name, backend in ((OURS, backends.backend()), (XLA, backends.STOCK))
    }
    runs = {name: functools.partial(timed, program) for name, program in programs.items()}
    seconds = in_turns(runs, timing.rounds_for(expected), required=runs).medians
    return cell(problem, seconds) | {"xla_kernels": kernel_names(programs[XLA], sets[0])}
