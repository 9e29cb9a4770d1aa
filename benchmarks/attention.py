"""What attention costs on an H200 against cuDNN, PyTorch and tokamax, and that one token keeps one set of bits.

    python benchmarks/attention.py [--out benchmarks/results/attention-h200.json] [--only prefill decode quantized
                                   backward accuracy bits] [--skip-torch] [--small]

Bfloat16, 32 query heads that share 8 key heads. Ours reads keys and values from pages, the others from arrays without
gaps; inputs are rotated so that they come from memory. Times are medians over rounds in which all take turns. Decode is
timed twice: the sum of its kernels, and the step: `Sizes.layers` calls in one jitted program that is replayed, each on
other pages and with the output of the one before as its queries, so that none can be removed or moved, divided by their
number. What cannot run is missing from the tables, and the JSON file says why. A picture is written beside it.
`--small` runs in seconds on a CPU. Slow cells are for the reader to judge; the exit code is 1 only if bits differ.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, get_args

# PyTorch needs room beside JAX.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

import detjax
from detjax import ops
from detjax.bench.timing import device_time, rotations, step_time, torch_time, turns
from detjax.contract import KV_BLOCK
from detjax.options import KVQuantization

OURS, SHUFFLED, CUDNN, TORCH, TOKAMAX = "detjax", "detjax, shuffled pages", "cudnn", "torch", "tokamax"
QUANTIZED: Final = get_args(KVQuantization)
RIVALS: Final = (CUDNN, TORCH, TOKAMAX, *QUANTIZED)
FORWARD, BOTH, BACKWARD = "forward", "forward and backward", "backward"
SECTIONS: Final = ("prefill", "decode", "quantized", "backward", "accuracy", "bits")
KINDS: Final = {
    "prefill": ("kernels",),
    "decode": ("kernels", "step"),
    "quantized": ("kernels",),
    "backward": (FORWARD, BOTH, BACKWARD),
}
"""Of time, by section."""
BF16: Final = jnp.dtype("bfloat16")
TIMING: Final = {
    "kernels": "sum of the kernels' times by CUPTI, without the time between kernels",
    "step": "wall clock of a replayed program of dependent calls, over their number; time between kernels included",
    TORCH: "replay of a CUDA graph between two events, the time between kernels included",
}
ROUNDS: Final = 2
LONG_ROUNDS: Final = 4
"""Rounds of calls that take longer than `LONG`: they reach the power limit, and the clock that it leaves them changes
with what ran before."""
LONG: Final = 500e-6
MOST_BYTES: Final = 12 << 30
"""Of the argument sets that one implementation rotates."""
BUILDERS: Final = 8
"""Threads that compile programs of options."""
ALONE: Final = 1

type Seconds = dict[str, float]
type Missing = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        prefill: (tokens, requests, head size) of causal calls.
        decode: (requests, tokens in the cache of each) of calls with one query.
        ragged: requests of one decode call, and the most tokens that one of them has; the fewest is 1.
        backward: (tokens, requests).
        layers: calls of attention in the program that is replayed.
        requests: how many have their bits compared.
        longest: tokens of the longest of them.
        tokens: of all of them together.
        chunks: tokens of a chunk, those of a request one after another.
        verified: queries of calls that verify drafted tokens, at sampled places.
        windows: such places in each request.
        sampled: positions of each request that are decoded.
        option_tokens: of the one request that every option is tried on.
    """

    prefill: Sequence[tuple[int, int, int]] = (
        (1024, 8, 128),
        (4096, 2, 128),
        (16384, 1, 128),
        (32768, 1, 128),
        (4096, 2, 64),
        (4096, 2, 96),
        (4096, 2, 256),
    )
    decode: Sequence[tuple[int, int]] = ((1, 4096), (1, 65536), (8, 8192), (16, 4096), (64, 4096), (64, 16384))
    ragged: tuple[int, int] = (64, 32768)
    backward: Sequence[tuple[int, int]] = ((4096, 2), (16384, 1))
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 20
    accuracy_tokens: int = 1024
    requests: int = 24
    longest: int = 8192
    tokens: int = 65536
    chunks: Sequence[int] = (7, 64, 100, 128, 1000)
    verified: Sequence[int] = tuple(range(2, 17))
    windows: int = 4
    sampled: int = 64
    repeated_decodes: int = 1000
    repeated_prefills: int = 100
    head_dims: Sequence[int] = (64, 80, 96, 112, 128, 192, 256)
    groups: Sequence[int] = (1, 2, 3, 4, 7, 8, 16)
    option_tokens: int = 300


SMALL: Final = Sizes(
    prefill=((48, 2, 64), (200, 1, 64)),
    decode=((1, 100), (3, 130)),
    ragged=(4, 200),
    backward=((40, 2),),
    heads=4,
    kv_heads=2,
    head_dim=64,
    layers=3,
    accuracy_tokens=200,
    requests=4,
    longest=270,
    tokens=360,
    chunks=(7, 64),
    verified=(2, 5),
    windows=2,
    sampled=4,
    repeated_decodes=3,
    repeated_prefills=3,
    head_dims=(64,),
    groups=(1, 3, 4),
    option_tokens=140,
)


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A causal call of attention: the last `queries` tokens of each request look at all of it.

    Attributes:
        lengths: tokens of each request in the cache, the queries' own included.
    """

    name: str
    queries: int
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, in the half of the square that a causal prefill needs."""
        share = 2 if self.queries == self.longest else 1
        return 4 * self.heads * self.head_dim * sum(self.queries * length for length in self.lengths) // share

    @property
    def kv_read(self) -> int:
        """Bytes of keys and values that the requests have."""
        return 2 * sum(self.lengths) * self.kv_heads * self.head_dim * BF16.itemsize

    @property
    def allocated(self) -> int:
        """Bytes of one argument set where every request takes the room of the longest."""
        queries = self.batch * self.queries * self.heads * self.head_dim * BF16.itemsize
        return queries + 2 * self.batch * self.longest * self.kv_heads * self.head_dim * BF16.itemsize

    @property
    def expected_seconds(self) -> float:
        """About what a good kernel takes."""
        return max(self.operations / 600e12, self.kv_read / 4e12, 5e-6)

    @property
    def calls(self) -> int:
        """How many calls a round measures: about 60 ms of them, as far as that is 7 to 25."""
        return min(25, max(7, int(0.06 / self.expected_seconds)))

    @property
    def rounds(self) -> int:
        return LONG_ROUNDS if self.expected_seconds > LONG else ROUNDS

    @property
    def sets(self) -> int:
        """How many argument sets keep a call from finding its own in the cache, as far as there is room for them."""
        queries = self.batch * self.queries * self.heads * self.head_dim * BF16.itemsize
        return max(1, min(rotations(self.kv_read + queries), MOST_BYTES // self.allocated))

    def fields(self) -> dict[str, Any]:
        """What identifies the cell in the JSON file."""
        lengths = {"lengths": list(self.lengths)} if self.ragged else {}
        return {
            "case": self.name,
            "batch": self.batch,
            "queries": self.queries,
            "tokens": self.longest,
            "head_dim": self.head_dim,
            **lengths,
        }


def prefill_case(sizes: Sizes, tokens: int, batch: int, head_dim: int) -> Case:
    name = f"{batch} × {tokens}" + ("" if head_dim == sizes.head_dim else f", head size {head_dim}")
    return Case(name, tokens, (tokens,) * batch, sizes.heads, sizes.kv_heads, head_dim)


def decode_cases(sizes: Sizes) -> Iterator[Case]:
    for batch, tokens in sizes.decode:
        yield Case(f"{batch} × {tokens}", 1, (tokens,) * batch, sizes.heads, sizes.kv_heads, sizes.head_dim)
    batch, longest = sizes.ragged
    # Each factor of two between 1 and the longest has about as many requests as the next.
    exponents = np.random.default_rng(0).permutation(np.arange(batch) / (batch - 1))
    lengths = tuple(round(longest**exponent) for exponent in exponents.tolist())
    yield Case(f"{batch} × 1 to {longest}", 1, lengths, sizes.heads, sizes.kv_heads, sizes.head_dim)


def request_lengths(sizes: Sizes) -> np.ndarray:
    """Tokens of the requests whose bits are compared, from 1 to the longest, in a fixed random order."""
    rng, count, longest = np.random.default_rng(1), sizes.requests, sizes.longest
    # The mean of the squares of numbers spread over [0, 1) is 1/3.
    lengths = np.ceil(longest * ((np.arange(count) + rng.random(count)) / count) ** 2).astype(np.int32)
    lengths[0], lengths[-1] = 1, longest
    lengths[count // 2] += sizes.tokens - lengths.sum()
    assert lengths.min() == 1 and lengths.max() == longest, "sizes.tokens is too far from a third of requests * longest"
    return rng.permutation(lengths)


# --- inputs -----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def drawn(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def keys_and_values(shape: tuple[int, ...], count: int) -> list[tuple[jax.Array, jax.Array]]:
    pairs = [(drawn(shape, jnp.asarray(2 * i)), drawn(shape, jnp.asarray(2 * i + 1))) for i in range(count)]
    return jax.block_until_ready(pairs)


def queries(case: Case) -> jax.Array:
    return drawn((case.batch, case.queries, case.heads, case.head_dim), jnp.asarray(1 << 20))


def dense(case: Case) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values [B, S, h, K] without gaps, as cuDNN, PyTorch and tokamax take them."""
    return keys_and_values((case.batch, case.longest, case.kv_heads, case.head_dim), case.sets)


def paged(case: Case) -> list[tuple[jax.Array, jax.Array]]:
    """Pools [P, h, S, K] that have room for the requests and no more."""
    pages = sum(pages_of(case.lengths))
    return keys_and_values((pages, case.kv_heads, KV_BLOCK, case.head_dim), case.sets)


def pages_of(lengths: Iterable[int]) -> list[int]:
    return [-(-length // KV_BLOCK) for length in lengths]


def page_table(lengths: Iterable[int], shuffled: bool = False) -> np.ndarray:
    """The pages of requests that lie one behind the other, or of a pool in random order."""
    counts = pages_of(lengths)
    pool = np.arange(sum(counts), dtype=np.int32)
    if shuffled:
        pool = np.random.default_rng(2).permutation(pool)
    table = np.zeros((len(counts), max(counts)), np.int32)
    for row, pages in zip(table, np.split(pool, np.cumsum(counts)[:-1]), strict=True):
        row[: len(pages)] = pages
    return table


def places(case: Case, shuffled: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Page table, position of the first query and length of each request."""
    lengths = np.asarray(case.lengths, np.int32)
    table = page_table(case.lengths, shuffled)
    return jnp.asarray(table), jnp.asarray(lengths - case.queries), jnp.asarray(lengths)


def key_lengths(case: Case) -> tuple[jax.Array, ...]:
    """What cuDNN and tokamax need to know of requests that do not fill their array."""
    return (jnp.asarray(case.lengths, jnp.int32),) if case.ragged else ()


# --- programs ---------------------------------------------------------------------------------------------------------


def cudnn(causal: bool) -> Callable[..., jax.Array]:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=lengths, implementation="cudnn"
        )

    return call


def tokamax(causal: bool) -> Callable[..., jax.Array]:
    """Its kernels alone: XLA's attention, to which it falls back, holds all scores in memory."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        import tokamax  # pyright: ignore[reportMissingImports]
        from absl import flags

        if not flags.FLAGS.is_parsed():
            # Else it would parse this script's arguments as its own.
            flags.FLAGS(sys.argv[:1])
        return tokamax.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=lengths, implementation=("mosaic", "triton")
        )

    return call


def torch_run(
    causal: bool, q: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array]], ragged: bool, replays: int
) -> float:
    """Seconds of PyTorch's attention on the very arrays that JAX holds."""
    import torch  # pyright: ignore[reportMissingImports]

    if ragged:
        raise NotImplementedError("scaled_dot_product_attention takes no lengths of requests, only a mask of all keys")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    # [B, S, H, K] seen as [B, H, S, K], which is how the kernels behind it like to have their arrays in memory.
    shared = [tuple(torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v)) for k, v in pairs]
    return torch_time(attend, shared, replays=replays)


def free_torch_memory() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def layered(attend: Callable[..., jax.Array], layers: int) -> Callable[..., jax.Array]:
    """A program of many calls, each on the next keys and values of a rotation and on the output of the one before."""

    attend = jax.jit(attend)  # traced once

    def program(q: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array]], *rest: jax.Array) -> jax.Array:
        for layer in range(layers):
            q = attend(q, *pairs[layer % len(pairs)], *rest)
        return q

    return program


def gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Gradients of queries, keys and values, given that of the output."""

    def weighted(
        q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, rest: tuple[jax.Array, ...] = ()
    ) -> jax.Array:
        return (attend(q, k, v, *rest) * do).sum()

    return jax.grad(weighted, argnums=(0, 1, 2))


# --- time -------------------------------------------------------------------------------------------------------------


def reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:240]}"
    parts = getattr(error, "exceptions", ())
    return text + (f" [{'; '.join(map(reason, parts))}]" if parts else "")


def in_turns[Name](runs: dict[Name, Callable[[], float]], rounds: int) -> tuple[dict[Name, float], dict[Name, str]]:
    """Median seconds of each, over rounds in which all take turns, and why the others have none."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    missing: dict[Name, str] = {}
    for name in turns(runs, rounds):
        if name in missing:
            continue
        try:
            seconds[name].append(runs[name]())
        except Exception as error:
            missing[name] = reason(error)
    return {name: statistics.median(values) for name, values in seconds.items() if name not in missing}, missing


def kernel_names(program: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """The kernels that a call launches; "" on devices other than GPUs, and where there are too many to name."""
    if jax.default_backend() != "gpu":
        return ""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, timings = profiler.measure(program, aggregate=False)(*arguments)
    except Exception as error:
        return reason(error)
    names = [name.split("(")[0][:80] for name, _ in timings or ()]
    return " + ".join(names) if len(names) <= 12 else f"{len(names)} kernels"


def rounded(values: Seconds) -> Seconds:
    return {name: round(value, 9) for name, value in values.items()}


def cell(case: Case, measured: dict[str, tuple[Seconds, Missing]]) -> dict[str, Any]:
    """A cell of the JSON file: by kind of time, seconds, our speed over the others', and why some are missing."""
    out = case.fields()
    out["seconds"] = {kind: rounded(seconds) for kind, (seconds, _) in measured.items()}
    out["ratios"] = {
        kind: {name: round(value / seconds[OURS], 4) for name, value in seconds.items() if name in RIVALS}
        for kind, (seconds, _) in measured.items()
        if OURS in seconds
    }
    out["missing"] = {kind: missing for kind, (_, missing) in measured.items()}
    return out


def measure_prefill(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    q, pools, pairs = queries(case), paged(case), dense(case)
    ours, theirs, third = detjax.jit(ops.attention), jax.jit(cudnn(True)), jax.jit(tokamax(True))
    timed = functools.partial(device_time, calls=case.calls)
    paged_sets = [(q, *pool, *places(case)) for pool in pools]
    dense_sets = [(q, *pair) for pair in pairs]
    runs = {
        OURS: lambda: timed(ours, paged_sets),
        CUDNN: lambda: timed(theirs, dense_sets),
        TOKAMAX: lambda: timed(third, dense_sets),
    }
    if with_torch:
        runs[TORCH] = lambda: torch_run(True, q, pairs, case.ragged, 3 if case.rounds == ROUNDS else 1)
    seconds, missing = in_turns(runs, case.rounds)
    rates = {name: round(case.operations / value / 1e12, 1) for name, value in seconds.items()}
    names = {OURS: (ours, paged_sets), CUDNN: (theirs, dense_sets), TOKAMAX: (third, dense_sets)}
    kernels = {name: kernel_names(program, sets[0]) for name, (program, sets) in names.items() if name in seconds}
    return cell(case, {"kernels": (seconds, missing)}) | {"teraflops": rates, "kernels": kernels}


def measure_decode(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    q, pools, pairs = queries(case), paged(case), dense(case)
    straight, shuffled, lengths = places(case), places(case, shuffled=True), key_lengths(case)
    timed = functools.partial(device_time, calls=case.calls)
    single = {OURS: detjax.jit(ops.attention), CUDNN: jax.jit(cudnn(False)), TOKAMAX: jax.jit(tokamax(False))}
    dense_sets = [(q, *pair, *lengths) for pair in pairs]
    # Times do not depend on what is in a page, so another page table shuffles them.
    orders = {OURS: straight, SHUFFLED: shuffled}
    sets = {name: [(q, *pool, *where) for pool in pools] for name, where in orders.items()}
    sets |= {CUDNN: dense_sets, TOKAMAX: dense_sets}
    runs = {name: functools.partial(timed, single[OURS if name == SHUFFLED else name], sets[name]) for name in sets}
    kernel_times = in_turns(runs, case.rounds)
    kernels = {
        name: kernel_names(program, sets[name][0]) for name, program in single.items() if name in kernel_times[0]
    }

    repeated = {
        OURS: detjax.jit(layered(ops.attention, sizes.layers)),
        CUDNN: jax.jit(layered(cudnn(False), sizes.layers)),
        TOKAMAX: jax.jit(layered(tokamax(False), sizes.layers)),
    }
    steps = min(200, max(5, int(0.1 / (sizes.layers * case.expected_seconds))))
    if jax.default_backend() != "gpu":
        steps = 2

    def step(name: str, pairs: Sequence[tuple[jax.Array, jax.Array]], *rest: jax.Array) -> float:
        return step_time(repeated[name], [(q, pairs, *rest)], steps=steps) / sizes.layers

    runs = {
        OURS: lambda: step(OURS, pools, *straight),
        SHUFFLED: lambda: step(OURS, pools, *shuffled),
        CUDNN: lambda: step(CUDNN, pairs, *lengths),
        TOKAMAX: lambda: step(TOKAMAX, pairs, *lengths),
    }
    if with_torch:
        runs[TORCH] = lambda: torch_run(False, q, pairs, case.ragged, 3)
    measured = {"kernels": kernel_times, "step": in_turns(runs, case.rounds)}
    rates = {
        kind: {name: round(case.kv_read / value / 1e9, 1) for name, value in seconds.items()}
        for kind, (seconds, _) in measured.items()
    }
    over = {
        kind: round(seconds[SHUFFLED] / seconds[OURS], 4)
        for kind, (seconds, _) in measured.items()
        if {OURS, SHUFFLED} <= seconds.keys()
    }
    return cell(case, measured) | {"gigabytes_per_second": rates, "shuffled_over_contiguous": over, "kernels": kernels}


def measure_quantized(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    """Decode over quantized pages, beside that over bfloat16's; the bytes are those of codes and scales."""
    del sizes, with_torch
    q, pools, where, attend = queries(case), paged(case), places(case), detjax.jit(ops.attention)
    pages: dict[str, list[Any]] = {OURS: list(pools)}
    pages |= {kind: [tuple(ops.quantize_kv(x, kind) for x in pool) for pool in pools] for kind in QUANTIZED}
    sets = {name: [(q, *pool, *where) for pool in of] for name, of in pages.items()}
    runs = {name: functools.partial(device_time, attend, of, calls=case.calls) for name, of in sets.items()}
    seconds, missing = in_turns(runs, case.rounds)
    read = {name: sum(x.nbytes for x in jax.tree.leaves(of[0])) for name, of in pages.items()}
    rates = {name: round(read[name] / value / 1e9, 1) for name, value in seconds.items()}
    return cell(case, {"kernels": (seconds, missing)}) | {"gigabytes_per_second": {"kernels": rates}}


def measure_backward(sizes: Sizes, case: Case, with_torch: bool) -> dict[str, Any]:
    """Forward alone, and all gradients with the forward that they need; their difference is the backward's time."""
    q, pools, pairs = queries(case), paged(case), dense(case)
    do, where = drawn(q.shape, jnp.asarray(3 << 20)), places(case)
    programs: dict[tuple[str, str], tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        (FORWARD, OURS): (detjax.jit(ops.attention), [(q, *pool, *where) for pool in pools]),
        (FORWARD, CUDNN): (jax.jit(cudnn(True)), [(q, *pair) for pair in pairs]),
        (BOTH, OURS): (detjax.jit(gradients(ops.attention)), [(q, *pool, do, where) for pool in pools]),
        (BOTH, CUDNN): (jax.jit(gradients(cudnn(True))), [(q, *pair, do) for pair in pairs]),
    }
    runs = {key: functools.partial(device_time, *program, calls=case.calls) for key, program in programs.items()}
    seconds, missing = in_turns(runs, case.rounds)
    measured: dict[str, tuple[Seconds, Missing]] = {
        kind: (
            {name: value for (of, name), value in seconds.items() if of == kind},
            {name: why for (of, name), why in missing.items() if of == kind},
        )
        for kind in (FORWARD, BOTH)
    }
    forward, both = (measured[kind][0] for kind in (FORWARD, BOTH))
    backward = {name: both[name] - forward[name] for name in both.keys() & forward.keys()}
    # Five products where the forward has two.
    rates = {name: round(2.5 * case.operations / value / 1e12, 1) for name, value in backward.items() if value > 0}
    kernels = {name: kernel_names(programs[BOTH, name][0], programs[BOTH, name][1][0]) for name in both}
    return cell(case, measured | {BACKWARD: (backward, {})}) | {"teraflops": rates, "kernels": kernels}


# --- accuracy ---------------------------------------------------------------------------------------------------------


def measure_accuracy(sizes: Sizes) -> dict[str, Any]:
    """Frobenius norm of the error over that of the result, of one causal prefill, against float64."""
    case = prefill_case(sizes, sizes.accuracy_tokens, 1, sizes.head_dim)
    q, (k, v) = queries(case), dense(case)[0]
    want = exact(*(np.asarray(x[0], np.float64) for x in (q, k, v)))
    table = ops.contiguous_page_table(1, case.longest)
    ours_arguments = (q, ops.in_pages(k), ops.in_pages(v), table, *places(case)[1:])
    runs: dict[str, Callable[[], jax.Array]] = {
        OURS: lambda: detjax.jit(ops.attention)(*ours_arguments),
        CUDNN: lambda: jax.jit(cudnn(True))(q, k, v),
        TOKAMAX: lambda: jax.jit(tokamax(True))(q, k, v),
    }
    errors, missing = {}, {}
    for name, run in runs.items():
        try:
            error = np.asarray(run()[0], np.float64) - want
            errors[name] = float(np.linalg.norm(error) / np.linalg.norm(want))
        except Exception as error:
            missing[name] = reason(error)
    rounding = np.asarray(want.astype(BF16), np.float64) - want
    errors["rounding of the exact result"] = float(np.linalg.norm(rounding) / np.linalg.norm(want))
    return case.fields() | {"relative_error": errors, "missing": missing}


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention [T, H, K] of one request, in float64."""
    tokens, heads, width = q.shape
    group = heads // k.shape[1]
    hidden = np.triu(np.ones((tokens, tokens), bool), 1)
    out = np.empty_like(q)
    for head in range(heads):
        s = q[:, head] @ k[:, head // group].T / math.sqrt(width)
        s[hidden] = -np.inf
        p = np.exp(s - s.max(axis=1, keepdims=True))
        out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, head // group]
    return out


# --- bits -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bits:
    """How many tokens' outputs were compared with those of a prefill of their request alone, and which differ.

    Attributes:
        tokens: by kind of call.
        options: combinations of head size and option.
        refused: what our attention says it does not do.
        failed: what could not be compared for any other reason.
    """

    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    repeats: int = 0
    options: int = 0
    seconds: float = 0.0
    differences: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def attempt(self, what: str, compare: Callable[[], None]) -> bool:
        """Whether `compare` came to its end."""
        try:
            compare()
        except NotImplementedError as error:
            self.refused[what] = reason(error)
        except Exception as error:
            self.failed[what] = reason(error)
        return what not in self.refused and what not in self.failed


def differing(a: jax.Array, b: jax.Array) -> jax.Array:
    """Which tokens `[B, T]` of two outputs `[B, T, H, K]` have other bits."""
    unsigned = f"uint{8 * a.dtype.itemsize}"
    return (lax.bitcast_convert_type(a, unsigned) != lax.bitcast_convert_type(b, unsigned)).any((2, 3))


@functools.partial(detjax.jit, static_argnames=("tokens", "training"))
def chunk(
    tokens: int,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    requests: jax.Array,
    starts: jax.Array,
    training: bool = False,
) -> jax.Array:
    """Attention of some requests' tokens from `starts` on; what lies behind the chunk is not in the cache yet.

    In training it is the forward pass that gradients are taken of.
    """
    where = table[requests], starts, jnp.minimum(starts + tokens, lengths[requests])

    def attend(q: jax.Array) -> jax.Array:
        return ops.attention(q, k_pages, v_pages, *where)

    q = taken(q, tokens, requests, starts)
    return jax.vjp(attend, q)[0] if training else attend(q)


def taken(x: jax.Array, tokens: int, requests: jax.Array, starts: jax.Array) -> jax.Array:
    def one(request: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (request, start, 0, 0), (1, tokens, *x.shape[2:]))[0]

    return jax.vmap(one)(requests, starts)


@functools.partial(jax.jit, static_argnames="tokens")
def other_tokens(
    tokens: int, o: jax.Array, want: jax.Array, lengths: jax.Array, requests: jax.Array, starts: jax.Array
) -> jax.Array:
    """How many tokens of each request differ; queries behind its end are not looked at."""
    own = starts[:, None] + jnp.arange(tokens) < lengths[requests][:, None]
    return (differing(o, taken(want, tokens, requests, starts)) & own).sum(axis=1)


@jax.jit
def with_nan(pages: jax.Array, kept: jax.Array) -> jax.Array:
    """The pool with NaN wherever `kept` [P, S] is false."""
    return jnp.where(kept[:, None, :, None], pages, jnp.nan)


@dataclasses.dataclass
class Requests:
    """Ragged requests, and what a prefill of each alone gives.

    Attributes:
        q: [R, L, H, K], L so large that the last chunk of the longest does not reach behind it.
        lengths: tokens of each.
        want: as q.
    """

    sizes: Sizes
    bits: Bits
    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    table: np.ndarray
    lengths: np.ndarray
    want: jax.Array

    @classmethod
    def drawn(cls, sizes: Sizes, bits: Bits) -> "Requests":
        lengths = request_lengths(sizes)
        room = max(bucket(sizes.longest), sizes.longest + max(*sizes.chunks, *sizes.verified))
        q = drawn((len(lengths), room, sizes.heads, sizes.head_dim), jnp.asarray(5))
        table = page_table(lengths)
        shape = (sum(pages_of(lengths)), sizes.kv_heads, KV_BLOCK, sizes.head_dim)
        k_pages, v_pages = keys_and_values(shape, 1)[0]
        return cls(sizes, bits, q, k_pages, v_pages, table, lengths, q)

    def call(
        self,
        tokens: int,
        requests: Sequence[int],
        starts: Sequence[int],
        pool: tuple[jax.Array, jax.Array] | None = None,
        table: np.ndarray | None = None,
        training: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs, and the number of tokens of each request that differ from what is wanted."""
        where = jnp.asarray(requests, jnp.int32), jnp.asarray(starts, jnp.int32)
        pool, table = pool or (self.k_pages, self.v_pages), self.table if table is None else table
        lengths = jnp.asarray(self.lengths)
        o = chunk(tokens, self.q, *pool, jnp.asarray(table), lengths, *where, training=training)
        return o, other_tokens(tokens, o, self.want, lengths, *where)

    def prefill_alone(self) -> None:
        """Sets `want`. Lengths are padded to powers of two, so that few programs are compiled."""
        rows = []
        for request, length in enumerate(self.lengths.tolist()):
            o = self.call(bucket(length), [request], [0])[0][0, :length]
            rows.append(jnp.pad(o, ((0, self.q.shape[1] - length), (0, 0), (0, 0))))
        self.want = jnp.stack(rows)
        if not bool(jnp.isfinite(self.want).all()):
            self.bits.differences.append("prefill: outputs are not finite")

    def compare(self, kind: str, calls: Iterable[tuple[int, Sequence[int], Sequence[int]]], **options: Any) -> None:
        """Compares what the calls (tokens, requests, starts) give; the host waits once."""
        made = [(arguments, self.call(*arguments, **options)[1]) for arguments in calls]
        counts = jax.device_get([count for _, count in made])
        other: dict[int, int] = {}
        for ((tokens, requests, starts), _), count in zip(made, counts, strict=True):
            for request, start, differ in zip(requests, starts, count.tolist(), strict=True):
                compared = min(tokens, int(self.lengths[request]) - start)
                self.bits.tokens[kind] = self.bits.tokens.get(kind, 0) + compared
                other[request] = other.get(request, 0) + differ
        for request, differ in other.items():
            if differ:
                self.bits.differences.append(
                    f"{kind}: {differ} tokens of request {request}, which has {self.lengths[request]}"
                )

    def in_chunks(self, tokens: int) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
        for request, length in enumerate(self.lengths.tolist()):
            for start in range(0, length, tokens):
                yield tokens, [request], [start]

    def sampled(self) -> np.ndarray:
        """Positions [R, sampled], the first and the last among them."""
        rng, count = np.random.default_rng(3), self.sizes.sampled
        picked = [np.concatenate([[0, n - 1], rng.integers(0, n, count - 2)]) for n in self.lengths.tolist()]
        return np.stack(picked).astype(np.int32)

    def verified(self, tokens: int) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
        """Of all requests in one call, at places that leave room for the tokens, or from 0 on."""
        rng = np.random.default_rng(tokens)
        for _ in range(self.sizes.windows):
            starts = [int(rng.integers(0, max(1, length - tokens + 1))) for length in self.lengths.tolist()]
            yield tokens, range(len(starts)), starts

    def kept(self, request: int, whole_pages: bool) -> np.ndarray:
        """Which tokens [P, S] of the pool a request may see, or which stand in its pages."""
        length = int(self.lengths[request])
        pages = self.table[request, : pages_of([length])[0]]
        out = np.zeros((len(self.k_pages), KV_BLOCK), bool)
        out[pages] = True
        if not whole_pages and length % KV_BLOCK:
            out[pages[-1], length % KV_BLOCK :] = False
        return out

    def among_nan(self, kind: str, whole_pages: bool) -> None:
        positions = self.sampled()
        for request, length in enumerate(self.lengths.tolist()):
            kept = self.kept(request, whole_pages)
            pool = with_nan(self.k_pages, kept), with_nan(self.v_pages, kept)
            calls = [(bucket(length), [request], [0]), *((1, [request], [p]) for p in positions[request, :4].tolist())]
            self.compare(kind, calls, pool=pool)

    def shuffled(self) -> None:
        order = np.random.default_rng(4).permutation(len(self.k_pages))
        place = np.argsort(order).astype(np.int32)
        moved = {"pool": (self.k_pages[order], self.v_pages[order]), "table": place[self.table]}
        lengths = self.lengths.tolist()
        self.compare("shuffled pages, prefill", ((bucket(n), [i], [0]) for i, n in enumerate(lengths)), **moved)
        self.compare("shuffled pages, decode together", self.decoded_together(), **moved)

    def decoded_together(self) -> list[tuple[int, Sequence[int], Sequence[int]]]:
        return [(ALONE, range(len(self.lengths)), starts) for starts in self.sampled().T.tolist()]

    def decoded_alone(self) -> list[tuple[int, Sequence[int], Sequence[int]]]:
        return [(ALONE, [request], [p]) for request, row in enumerate(self.sampled().tolist()) for p in row]

    def repeated(self, kind: str, call: tuple[int, Sequence[int], Sequence[int]], times: int) -> None:
        runs = jax.device_get([self.call(*call)[1].sum() for _ in range(times)])
        other = sum(bool(count) for count in runs)
        self.bits.repeats += times
        if other:
            self.bits.differences.append(f"{kind}: {other} of {times} repeated runs")


def bucket(length: int) -> int:
    """The number of queries that a prefill of so many tokens is padded to."""
    return max(KV_BLOCK, 1 << (length - 1).bit_length())


def compare_requests(sizes: Sizes, bits: Bits) -> None:
    """Every way in which the tokens of ragged requests can be computed, against a prefill of each request alone."""
    requests = Requests.drawn(sizes, bits)
    if not bits.attempt("prefill", requests.prefill_alone):
        return
    everyone, longest = range(len(requests.lengths)), int(requests.lengths.argmax())
    stages: dict[str, Callable[[], None]] = {}

    def stage(kind: str, calls: Callable[[], Iterable[tuple[int, Sequence[int], Sequence[int]]]]) -> None:
        stages[kind] = lambda: requests.compare(kind, calls())

    stage("prefill padded to the longest", lambda: requests.in_chunks(bucket(sizes.longest)))
    whole = [(bucket(length), [request], [0]) for request, length in enumerate(requests.lengths.tolist())]
    stages["training forward"] = lambda: requests.compare("training forward", whole, training=True)
    for tokens in sizes.chunks:
        stage(f"chunks of {tokens}", functools.partial(requests.in_chunks, tokens))
    stage("decode alone", requests.decoded_alone)
    stage("decode together", requests.decoded_together)
    for tokens in sizes.verified:
        stage(f"verify {tokens}", functools.partial(requests.verified, tokens))
    stages["shuffled pages"] = requests.shuffled
    for kind, whole_pages in (("NaN in others' pages", True), ("NaN behind the last token", False)):
        stages[kind] = functools.partial(requests.among_nan, kind, whole_pages)
    decode = (ALONE, everyone, (requests.lengths - 1).tolist())
    stages["repeated decode"] = lambda: requests.repeated("repeated decode", decode, sizes.repeated_decodes)
    prefill = (bucket(sizes.longest), [longest], [0])
    stages["repeated prefill"] = lambda: requests.repeated("repeated prefill", prefill, sizes.repeated_prefills)
    for kind, compare in track(stages.items(), "comparing bits", len(stages), console=Console(stderr=True)):
        bits.attempt(kind, compare)


def option_cases(sizes: Sizes) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Name, head size, query heads per key head and options."""
    heads = 4 * OPTION_KV_HEADS
    slopes = tuple(2.0 ** (-8 * (head + 1) / heads) for head in range(heads))
    options = {
        "window 100": {"window": 100},
        "soft cap 30": {"soft_cap": 30.0},
        "sinks": {"sinks": np.linspace(-1, 4, heads, dtype=np.float32)},
        "ALiBi": {"alibi_slopes": slopes},
        "not causal": {"causal": False},
    }
    for head_dim in sizes.head_dims:
        for group in sizes.groups:
            yield f"head size {head_dim}, group of {group}", head_dim, group, {}
        for name, option in options.items():
            yield f"head size {head_dim}, {name}", head_dim, 4, option


OPTION_KV_HEADS: Final = 2
OPTION_CHUNK: Final = 7


def compare_option(sizes: Sizes, head_dim: int, group: int, options: dict[str, Any]) -> np.ndarray:
    """How many tokens of one request differ when they are decoded, and when they come in chunks of 7.

    All its tokens are decoded in one call, and so are all its chunks: each is a request on the same pages.
    """
    tokens, causal = sizes.option_tokens, options.get("causal", True)
    q = drawn((1, tokens, group * OPTION_KV_HEADS, head_dim), jnp.asarray(7))
    k, v = keys_and_values((1, tokens, OPTION_KV_HEADS, head_dim), 1)[0]

    @detjax.jit
    def program(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        pages, table = (ops.in_pages(k), ops.in_pages(v)), ops.contiguous_page_table(1, tokens)

        def attend(width: int) -> jax.Array:
            count = -(-tokens // width)
            starts = width * jnp.arange(count, dtype=jnp.int32)
            padded = jnp.pad(q[0], ((0, count * width - tokens), (0, 0), (0, 0)))
            # Without a causal mask, a query sees all keys in the cache, so they have to be there in every phase.
            ends = jnp.minimum(starts + width, tokens) if causal else jnp.full(count, tokens, jnp.int32)
            split = padded.reshape(count, width, *q.shape[2:])
            o = ops.attention(split, *pages, jnp.repeat(table, count, axis=0), starts, ends, **options)
            return o.reshape(1, count * width, *q.shape[2:])[:, :tokens]

        want = attend(tokens)
        return jnp.stack([differing(attend(width), want).sum() for width in (1, OPTION_CHUNK)])

    return np.asarray(program(q, k, v))


def compare_options(sizes: Sizes, backend: str, bits: Bits) -> None:
    """Every option at every head size."""

    def one(name: str, head_dim: int, group: int, options: dict[str, Any]) -> None:
        def compare() -> None:
            # Threads do not inherit the choice.
            with detjax.use_backend(backend):
                counts = compare_option(sizes, head_dim, group, options)
            bits.options += 1
            for kind, other in zip(("decode", f"chunks of {OPTION_CHUNK}"), counts.tolist(), strict=True):
                if other:
                    bits.differences.append(f"{name}: {other} of {sizes.option_tokens} tokens by {kind}")

        bits.attempt(name, compare)

    cases = list(option_cases(sizes))
    with ThreadPoolExecutor(BUILDERS) as pool:
        done = pool.map(lambda case: one(*case), cases)
        list(track(done, "comparing options", len(cases), console=Console(stderr=True)))


# --- reports ----------------------------------------------------------------------------------------------------------


def ratios(cells: Iterable[dict[str, Any]], kind: str, rival: str) -> list[float]:
    """Our speed over the rival's, where both were measured."""
    return [cell["ratios"][kind][rival] for cell in cells if rival in cell["ratios"].get(kind, {})]


def summarized(cells: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Geometric means of our speed over each rival's, by kind of time."""
    means = {}
    for kind in kinds:
        found = {rival: ratios(cells, kind, rival) for rival in RIVALS}
        means[kind] = {rival: round(statistics.geometric_mean(r), 4) for rival, r in found.items() if r}
    return means


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def time_table(title: str, cells: Sequence[dict[str, Any]], kinds: Sequence[str], rates: str) -> Table:
    """A line for each cell and kind of time. A dash stands for what was not measured."""
    out = Table("requests × tokens", "time", title=title, padding=(0, 1), box=None)
    names = [name for name in (OURS, SHUFFLED, *RIVALS) if any(name in c["seconds"][k] for c in cells for k in kinds)]
    rivals = [name for name in names if name in RIVALS]
    headings = [f"{name}, µs" for name in names] + [f"/ {name}" for name in rivals] + [f"{n}, {rates}" for n in names]
    for heading in headings:
        out.add_column(heading, justify="right")
    for cell in cells:
        for kind in kinds:
            seconds, over = cell["seconds"][kind], cell["ratios"].get(kind, {})
            work = cell["gigabytes_per_second"][kind] if "gigabytes_per_second" in cell else cell["teraflops"]
            # Those of backward cells belong to the difference alone.
            work = {} if kind in (FORWARD, BOTH) else work
            times = [shown(seconds[name] * 1e6 if name in seconds else None, ".1f") for name in names]
            quotients = [shown(over.get(name), ".3f") for name in rivals]
            speeds = [shown(work.get(name), ".0f") for name in names]
            out.add_row(cell["case"] if kind == kinds[0] else "", kind, *times, *quotients, *speeds)
    return out


def missing_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What is missing, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for missing in cell["missing"].values():
            for name, why in missing.items():
                cases = found.setdefault((name, why), [])
                if cell["case"] not in cases:
                    cases.append(cell["case"])
    return [
        f"{name} is missing from {'all cells' if len(cases) == len(cells) else '; '.join(cases)}: {why}"
        for (name, why), cases in found.items()
    ]


# --- picture ----------------------------------------------------------------------------------------------------------

_OURS: Final = "#2a7f8e"
_INK: Final = "#262626"
_GREY: Final = "#767676"
_LIGHT: Final = "#b9d3d7"


def _panel(axes: Axes, title: str, cells: Sequence[dict[str, Any]], bars: Sequence[tuple[str, str, str]]) -> None:
    """Bars (kind of time, label, color) of every cell, from the top down."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9.5, labelcolor=_INK)
    axes.set_title(title, fontsize=10.5, color=_INK, loc="left")
    height = 0.8 / len(bars)
    widest = max([1.0, *(ratio for kind, _, _ in bars for ratio in ratios(cells, kind, CUDNN))])
    for index, (kind, label, color) in enumerate(bars):
        for row, cell in enumerate(cells):
            y = row + (index - (len(bars) - 1) / 2) * height
            ratio = cell["ratios"].get(kind, {}).get(CUDNN)
            if ratio is None:
                axes.text(0.02 * widest, y, "not measured", va="center", fontsize=8.5, color=_GREY)
                continue
            axes.barh(y, ratio, height * 0.86, color=color, zorder=2, label=label if row == 0 else None)
            # At the bar's foot, since at its end the number would often lie on the line at 1.
            ink = "white" if color == _OURS else _INK
            axes.text(0.02 * widest, y, f"{ratio:.2f}", va="center", fontsize=8.5, color=ink, zorder=4)
    axes.axvline(1, color=_INK, linewidth=1.2, zorder=3)
    axes.set_xlim(0, widest * 1.04)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.set_yticks(range(len(cells)), [cell["case"].replace(", ", "\n") for cell in cells])
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}×")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def draw(content: dict[str, Any], path: Path) -> None:
    """Writes a PNG: our speed over cuDNN's in every cell of prefill and of decode, where there is any."""
    prefill, decode = content.get("prefill", []), content.get("decode", [])
    found = {"prefill": ratios(prefill, "kernels", CUDNN), "decode": ratios(decode, "step", CUDNN)}
    if not all(found.values()):
        return
    means = {name: statistics.geometric_mean(values) for name, values in found.items()}
    height = 1.45 + 0.38 * max(len(prefill), len(decode))
    figure = Figure(figsize=(9, height), dpi=150, facecolor="white")
    speeds = f"{means['prefill']:.2f} (prefill) and {means['decode']:.2f} (decode)"
    title = f"detjax's attention runs at {speeds} of the speed of cuDNN's"
    device = content["fingerprint"]["device_kind"]
    subtitle = f"cuDNN's time over detjax's, requests × tokens; bfloat16, keys and values in pages; {device}"
    figure.text(0.02, 1 - 0.14 / height, title, fontsize=13, fontweight="bold", color=_INK, va="top")
    figure.text(0.02, 1 - 0.44 / height, subtitle, fontsize=9.5, color=_GREY, va="top")
    bottom, share = 0.42 / height, (height - 1.42) / height
    axes = figure.add_axes((0.125, bottom, 0.35, share))
    _panel(axes, "prefill, causal", prefill, [("kernels", "kernels", _OURS)])
    axes = figure.add_axes((0.62, bottom, 0.355, share))
    _panel(axes, "decode", decode, [("kernels", "kernels alone", _LIGHT), ("step", "whole step", _OURS)])
    place = {"loc": "lower right", "bbox_to_anchor": (1.01, 0.985), "ncols": 2}
    axes.legend(frameon=False, fontsize=9.5, labelcolor=_INK, columnspacing=1.2, handlelength=1.2, **place)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # A palette takes a third of the bytes.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128).save(path, optimize=True)


# --- the whole --------------------------------------------------------------------------------------------------------


def run(
    sizes: Sizes, backend: str, sections: Sequence[str], *, with_torch: bool, save: Callable[[Any], None]
) -> dict[str, Any]:
    """The sections chosen; `save` gets what there is after every cell."""
    on_gpu = jax.default_backend() == "gpu"
    content: dict[str, Any] = {
        "fingerprint": dataclasses.asdict(detjax.fingerprint()),
        "timing": TIMING if on_gpu else "time until the result is there",
        "rounds": [ROUNDS, LONG_ROUNDS],
        "sizes": dataclasses.asdict(sizes),
    }
    timed: dict[str, tuple[Callable[[Sizes, Case, bool], dict[str, Any]], list[Case]]] = {
        "prefill": (measure_prefill, [prefill_case(sizes, *shape) for shape in sizes.prefill]),
        "decode": (measure_decode, list(decode_cases(sizes))),
        "quantized": (measure_quantized, list(decode_cases(sizes))),
        "backward": (measure_backward, [prefill_case(sizes, *shape, sizes.head_dim) for shape in sizes.backward]),
    }
    for section, (measure, cases) in timed.items():
        if section not in sections:
            continue
        cells = content[section] = []
        for case in track(cases, section, console=Console(stderr=True)):
            try:
                cells.append(measure(sizes, case, with_torch))
            except Exception as error:
                # Not even the inputs could be made, or they leave no room.
                cells.append(
                    cell(case, {kind: ({}, {"all": reason(error)}) for kind in KINDS[section]}) | {"teraflops": {}}
                )
            free_torch_memory()
            save(content)
        content.setdefault("summary", {})[section] = summarized(cells, KINDS[section])
        save(content)
    if "accuracy" in sections:
        content["accuracy"] = measure_accuracy(sizes)
        save(content)
    if "bits" in sections:
        bits, start = Bits(), time.perf_counter()
        for compare in (compare_requests, functools.partial(compare_options, backend=backend)):
            compare(sizes, bits=bits)
            bits.seconds = time.perf_counter() - start
            content["bits"] = dataclasses.asdict(bits)
            save(content)
    return content


def show(content: dict[str, Any]) -> None:
    """Prints the tables, the bits last."""
    console = Console(width=170, highlight=False)
    for section, kinds in KINDS.items():
        if section in content:
            cells = content[section]
            rates = "GB/s" if section in ("decode", "quantized") else "TFLOP/s"
            title = f"{section}; ratios are our speed over theirs"
            console.print(time_table(title, cells, kinds, rates), *missing_lines(cells), sep="\n")
            for kind, means in content["summary"][section].items():
                if means:
                    listed = ", ".join(f"{mean:.3f} of {name}" for name, mean in means.items())
                    console.print(f"geometric mean, {kind}: {listed}")
            orders = [cell["shuffled_over_contiguous"] for cell in cells if "shuffled_over_contiguous" in cell]
            for kind in kinds:
                found = [order[kind] for order in orders if kind in order]
                if found:
                    console.print(f"shuffled pages over contiguous ones, {kind}: {min(found):.3f} to {max(found):.3f}")
            console.print("")
    if "accuracy" in content:
        accuracy = content["accuracy"]
        listed = ", ".join(f"{name} {error:.3e}" for name, error in accuracy["relative_error"].items())
        console.print(f"relative error to float64, {accuracy['case']}: {listed}", *missing_lines_of(accuracy), sep="\n")
    if "bits" in content:
        bits = content["bits"]
        total = sum(bits["tokens"].values())
        compared = (
            f"{total} tokens in {len(bits['tokens'])} ways, {bits['repeats']} repeated runs, {bits['options']} options"
        )
        verdict = f"{len(bits['differences'])} with other bits" if bits["differences"] else "no bit differs"
        console.print(f"bits: {compared} compared in {bits['seconds']:.0f} s: {verdict}")
        for word in ("refused", "failed"):
            for what, why in bits[word].items():
                console.print(f"{word}: {what}: {why}")


def missing_lines_of(accuracy: dict[str, Any]) -> list[str]:
    return [f"{name} is missing: {why}" for name, why in accuracy["missing"].items()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/attention-h200.json"), help="file to write"
    )
    parser.add_argument("--only", nargs="+", action="extend", choices=SECTIONS, help="what to measure; default: all")
    parser.add_argument("--skip-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, and the portable backend")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    start = time.perf_counter()
    out: Path = chosen.out
    out.parent.mkdir(parents=True, exist_ok=True)

    def save(content: dict[str, Any]) -> None:
        out.write_text(json.dumps(content, indent=1) + "\n")

    backend = "portable" if chosen.small else "hopper"
    with detjax.use_backend(backend):
        content = run(
            SMALL if chosen.small else Sizes(),
            backend,
            chosen.only or SECTIONS,
            with_torch=not chosen.skip_torch,
            save=save,
        )
    show(content)
    draw(content, out.with_name(f"{out.stem}-prefill-decode.png"))
    Console().print(f"{time.perf_counter() - start:.0f} s; written to {out}")
    differences = content.get("bits", {}).get("differences")
    if differences:
        raise SystemExit("error: other bits\n" + "\n".join(differences[:20]))


if __name__ == "__main__":
    main()
