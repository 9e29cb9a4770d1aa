"""Times of attention and its rivals, a cell of the result for each case.

Decode is timed twice: as the sum of its kernels, and as a step, that is, as a call in a replayed program of dependent
calls. Inputs are rotated so that they come from memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import jax

import detjax
from benchmarks import rivals
from benchmarks.rivals import CUDNN, OURS, TOKAMAX, TORCH
from benchmarks.studies.attention import inputs
from benchmarks.studies.attention.cases import Case, Sizes
from benchmarks.studies.attention.programs import gradients, layered, paged_attention
from benchmarks.timing import ROUNDS, copy_time, kernel_names
from detjax import ops
from detjax.bench import timing
from detjax.bench.timing import Rounds, device_time, in_turns
from detjax.operands.kv_pages import KeyColumns
from detjax.operands.options import KVQuantization

SHUFFLED: Final = "detjax, shuffled pages"
COPY: Final = "copy"
"""A copy that reads, and writes, as many bytes as the keys have."""
QUANTIZED: Final = get_args(KVQuantization)
RIVALS: Final = (CUDNN, TORCH, TOKAMAX, *QUANTIZED, COPY)
FORWARD, BOTH, BACKWARD = "forward", "forward and backward", "backward"
KINDS: Final = {
    "prefill": ("kernels",),
    "decode": ("kernels", "step"),
    "quantized": ("kernels",),
    "latents": ("kernels",),
    "backward": (FORWARD, BOTH, BACKWARD),
}
"""The kinds of time of a cell, by section of the result."""

type Run = Callable[[], float]


def cell(case: Case, times: dict[str, Rounds[str]]) -> dict[str, Any]:
    """Returns a cell: by kind of time, the seconds, our speed over each rival's, and the reasons for missing ones."""
    seconds = {kind: {name: round(s, 9) for name, s in rounds.medians.items()} for kind, rounds in times.items()}
    ratios = {
        kind: {name: round(value / rounds.medians[OURS], 4) for name, value in rounds.medians.items() if name in RIVALS}
        for kind, rounds in times.items()
        if OURS in rounds.seconds
    }
    missing = {kind: rounds.missing for kind, rounds in times.items()}
    return case.fields() | {"seconds": seconds, "ratios": ratios, "missing": missing}


def measure_prefill(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    """Measures a causal prefill."""
    del sizes
    q, pairs, queries = inputs.query_array(case), inputs.contiguous_sets(case), inputs.queries_of(case)
    contiguous = [(q, *pair) for pair in pairs]
    programs: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        OURS: (detjax.jit(paged_attention), [(q, *pool, queries) for pool in inputs.paged_sets(case)]),
        CUDNN: (jax.jit(rivals.cudnn(True)), contiguous),
        TOKAMAX: (jax.jit(rivals.tokamax(True)), contiguous),
    }
    runs: dict[str, Run] = {
        name: functools.partial(device_time, *program, calls=case.calls) for name, program in programs.items()
    }
    if with_torch:
        replays = 3 if case.rounds == ROUNDS else 1
        runs[TORCH] = lambda: rivals.torch_attention(True, q, pairs, ragged=case.ragged, replays=replays)
    times = in_turns(runs, case.rounds)
    rates = {name: round(case.operations / value / 1e12, 1) for name, value in times.medians.items()}
    return cell(case, {"kernels": times}) | {"teraflops": rates, "kernels": _names(programs, times)}


def _names(programs: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]], times: Rounds[str]) -> dict[str, str]:
    """The kernels of the measured programs."""
    return {name: kernel_names(program, sets[0]) for name, (program, sets) in programs.items() if name in times.seconds}


def measure_decode(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    """Measures a decode: its kernels and a step, with pages in order and shuffled."""
    q, pools, pairs = inputs.query_array(case), inputs.paged_sets(case), inputs.contiguous_sets(case)
    # Times do not depend on the content of pages, so another page table shuffles them.
    orders = {OURS: (inputs.queries_of(case),), SHUFFLED: (inputs.queries_of(case, shuffled=True),)}
    lengths = inputs.key_lengths(case)
    rotated: dict[str, Rotation] = {name: (pools, order) for name, order in orders.items()}
    rotated |= {CUDNN: (pairs, lengths), TOKAMAX: (pairs, lengths)}
    kernel_times, names = _decode_kernels(case, q, rotated)
    steps = _decode_steps(sizes, case, q, rotated)
    if with_torch:
        steps[TORCH] = lambda: rivals.torch_attention(False, q, pairs, ragged=case.ragged, replays=3)
    times = {"kernels": kernel_times, "step": in_turns(steps, case.rounds)}
    rates = {
        kind: {name: round(case.kv_read / value / 1e9, 1) for name, value in rounds.medians.items()}
        for kind, rounds in times.items()
    }
    over = {
        kind: round(rounds.medians[SHUFFLED] / rounds.medians[OURS], 4)
        for kind, rounds in times.items()
        if {OURS, SHUFFLED} <= rounds.seconds.keys()
    }
    return cell(case, times) | {"gigabytes_per_second": rates, "shuffled_over_contiguous": over, "kernels": names}


type Rotation = tuple[Sequence[inputs.Pair], tuple[Any, ...]]
"""Pairs of keys and values, and the remaining arguments of a call."""


def _decode_kernels(case: Case, q: jax.Array, rotated: dict[str, Rotation]) -> tuple[Rounds[str], dict[str, str]]:
    """Times of the kernels of one call, and the kernels' names."""
    ours = detjax.jit(paged_attention)
    single = {OURS: ours, SHUFFLED: ours, CUDNN: jax.jit(rivals.cudnn(False)), TOKAMAX: jax.jit(rivals.tokamax(False))}
    programs = {name: (single[name], [(q, *pair, *rest) for pair in pairs]) for name, (pairs, rest) in rotated.items()}
    times = in_turns(
        {name: functools.partial(device_time, *program, calls=case.calls) for name, program in programs.items()},
        case.rounds,
    )
    return times, _names({name: program for name, program in programs.items() if name != SHUFFLED}, times)


def _decode_steps(sizes: Sizes, case: Case, q: jax.Array, rotated: dict[str, Rotation]) -> dict[str, Run]:
    """Measurements of a call in a replayed program of dependent calls."""
    ours = detjax.jit(layered(paged_attention, sizes.layers))
    programs = {
        OURS: ours,
        SHUFFLED: ours,
        CUDNN: jax.jit(layered(rivals.cudnn(False), sizes.layers)),
        TOKAMAX: jax.jit(layered(rivals.tokamax(False), sizes.layers)),
    }
    steps = min(200, max(5, int(0.1 / (sizes.layers * case.expected_seconds))))
    if jax.default_backend() != "gpu":
        steps = 2

    def step(name: str) -> float:
        pairs, rest = rotated[name]
        return timing.step_time(programs[name], [(q, pairs, *rest)], steps=steps) / sizes.layers

    return {name: functools.partial(step, name) for name in rotated}


def measure_quantized(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    """Measures a decode over bfloat16 and quantized pages; bytes count codes and scales."""
    del sizes, with_torch
    q, pools = inputs.query_array(case), inputs.paged_sets(case)
    queries, attend = inputs.queries_of(case), detjax.jit(paged_attention)
    pages: dict[str, list[Any]] = {OURS: list(pools)}
    pages |= {kind: [tuple(ops.quantize_kv(x, kind) for x in pool) for pool in pools] for kind in QUANTIZED}
    sets = {name: [(q, *pool, queries) for pool in rotated] for name, rotated in pages.items()}
    times = in_turns(
        {name: functools.partial(device_time, attend, rotated, calls=case.calls) for name, rotated in sets.items()},
        case.rounds,
    )
    read = {name: sum(x.nbytes for x in jax.tree.leaves(rotated[0])) for name, rotated in pages.items()}
    rates = {name: round(read[name] / value / 1e9, 1) for name, value in times.medians.items()}
    return cell(case, {"kernels": times}) | {"gigabytes_per_second": {"kernels": rates}}


def measure_latents(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    """Measures attention over latents, and a copy, whose rate counts reads and writes."""
    del sizes, with_torch
    assert case.key_columns is not None
    q, queries, values = inputs.query_array(case), inputs.queries_of(case), KeyColumns(case.key_columns)
    sets = [(q, k, values, queries) for pool in inputs.paged_sets(case) for k in pool]
    runs: dict[str, Run] = {
        OURS: functools.partial(device_time, detjax.jit(paged_attention), sets, calls=case.calls),
        COPY: functools.partial(copy_time, 2 * case.kv_read, calls=case.calls),
    }
    times = in_turns(runs, case.rounds)
    moved = {OURS: case.kv_read, COPY: 2 * case.kv_read}
    rates = {name: round(moved[name] / value / 1e9, 1) for name, value in times.medians.items()}
    operations = {OURS: round(case.operations / times.medians[OURS] / 1e12, 1)} if OURS in times.medians else {}
    return cell(case, {"kernels": times}) | {"gigabytes_per_second": {"kernels": rates}, "teraflops": operations}


def measure_backward(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    """Measures the forward pass, alone and with all gradients; the difference is the backward's time."""
    del sizes, with_torch
    q, do, queries = inputs.query_array(case), inputs.output_gradient(case), inputs.queries_of(case)
    pools, pairs = inputs.paged_sets(case), inputs.contiguous_sets(case)
    cudnn = rivals.cudnn(True)
    programs: dict[tuple[str, str], tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        (FORWARD, OURS): (detjax.jit(paged_attention), [(q, *pool, queries) for pool in pools]),
        (FORWARD, CUDNN): (jax.jit(cudnn), [(q, *pair) for pair in pairs]),
        (BOTH, OURS): (detjax.jit(gradients(paged_attention)), [(q, *pool, do, queries) for pool in pools]),
        (BOTH, CUDNN): (jax.jit(gradients(cudnn)), [(q, *pair, do) for pair in pairs]),
    }
    runs = {key: functools.partial(device_time, *program, calls=case.calls) for key, program in programs.items()}
    rounds = in_turns(runs, case.rounds)
    times = {
        kind: Rounds(
            {name: values for (pass_, name), values in rounds.seconds.items() if pass_ == kind},
            {name: why for (pass_, name), why in rounds.missing.items() if pass_ == kind},
        )
        for kind in (FORWARD, BOTH)
    }
    forward, both = times[FORWARD].medians, times[BOTH].medians
    backward = {name: both[name] - forward[name] for name in both.keys() & forward.keys()}
    # Five products instead of the forward's two.
    rates = {name: round(2.5 * case.operations / value / 1e12, 1) for name, value in backward.items() if value > 0}
    names = _names({name: programs[BOTH, name] for name in both}, times[BOTH])
    times[BACKWARD] = Rounds({name: [value] for name, value in backward.items()}, {})
    return cell(case, times) | {"teraflops": rates, "kernels": names}
