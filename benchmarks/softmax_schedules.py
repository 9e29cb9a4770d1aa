"""Log-softmax and sampling on an H200: whether every schedule gives the same bits, and how fast each is.

    python benchmarks/softmax_schedules.py [--bits] [--rows 64 1024] [--dtype float32 bfloat16] [--calls 20]

First the bits: log_softmax and softmax of every schedule against one another, logprobs and tokens of the sampler
against log_softmax and against the portable backend. Then, unless `--bits` is given, device time of each schedule
beside the time of a copy of as many bytes; the one that is chosen by default is marked.
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import detjax
from detjax.bench.timing import device_time, rotations
from detjax.pallas.hopper import device, sampling, softmax
from detjax.pallas.hopper.row_stream import PART, SMEM_OF_CTA, SMEM_OF_SM, SMEM_RESERVED, blocks_of_row, parts_of_block
from detjax.pallas.hopper.softmax import MOST_CTAS, MOST_SLOTS, Schedule, schedule_for
from detjax.portable import sampling as portable_sampling
from detjax.portable import softmax as portable_softmax

VOCABULARY = 151936
OTHER_WIDTHS = (5, 4097, 32000, 50257)

console = Console(width=140)


def logits(rows: int, width: int, dtype: str, seed: int) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), (rows, width), jnp.float32) * 4).astype(dtype)


def schedules(x: Any, around: tuple[int, ...] = (0,)) -> Iterator[Schedule]:
    """Those that hold rows, at 1 to 6 CTAs on an SM, with about as many clusters as run at once; then the others."""
    rows, width = x.shape
    blocks = blocks_of_row(width)
    for ctas_of_sm in (1, 2, 3, 4, 6):
        free = min(SMEM_OF_SM // ctas_of_sm, SMEM_OF_CTA) - SMEM_RESERVED
        slots = min(free // (PART * x.dtype.itemsize), MOST_SLOTS)
        for cluster in range(1, min(blocks, MOST_CTAS) + 1):
            if -(-blocks // cluster) * parts_of_block(width) <= slots:
                resident = device.resident_clusters(cluster, ctas_of_sm)
                for grid in sorted({min(rows, max(1, resident + more)) for more in around}):
                    yield Schedule(cluster, slots, grid)
    for slots, ctas_of_sm in ((4, 6), (8, 3), (8, 6)):
        yield Schedule(0, slots, min(rows * blocks, 132 * ctas_of_sm))


def check_bits() -> None:
    """Raises unless every schedule gives the same bits."""
    for width, rows, dtype in [(VOCABULARY, 37, "float32"), (VOCABULARY, 70, "bfloat16")] + [
        (width, 5, "float32") for width in OTHER_WIDTHS
    ]:
        x = logits(rows, width, dtype, 0)
        padded = softmax.padded(x)
        for name in ("log_softmax", "softmax"):
            fn = getattr(softmax, name)
            tried = {}
            for schedule in dict.fromkeys(schedules(padded)):
                program = detjax.jit(functools.partial(fn, schedule=schedule))
                for _ in range(3):
                    tried[schedule] = np.asarray(program(x)).view(np.uint32)
                    first = next(iter(tried.values()))
                    if not np.array_equal(tried[schedule], first):
                        different = np.argwhere((tried[schedule] != first).any(axis=1))[:, 0].tolist()
                        raise SystemExit(f"{name}, width {width}, {schedule}: other bits in rows {different}")
            alone = np.asarray(detjax.jit(fn)(x[3:4])).view(np.uint32)
            if not np.array_equal(alone[0], first[3]):
                raise SystemExit(f"{name}, width {width}: row 3 alone has other bits")
            exact = np.asarray(x, np.float64)
            exact -= exact.max(axis=1, keepdims=True)
            exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
            error = np.abs(first.view(np.float32) - (exact if name == "log_softmax" else np.exp(exact))).max()
            with detjax.use_backend("portable"):
                portable = np.asarray(detjax.jit(getattr(portable_softmax, name))(x)).view(np.uint32)
            same = "the portable backend's" if np.array_equal(portable, first) else "not the portable backend's"
            title = f"{name} {x.shape} {dtype}"
            console.print(f"{title}: {len(tried)} schedules, one set of bits, {same}; error {error:.1e}")


def check_sampling() -> None:
    """Raises unless logprobs have log_softmax's bits, and rows their own whatever is beside them."""
    for width, dtype in [(VOCABULARY, "float32"), (VOCABULARY, "bfloat16"), (50257, "float32"), (5, "float32")]:
        arguments = sampler_arguments(logits(64, width, dtype, 1), np.resize([0.0, 1.0, 0.7, 2.0], 64))
        tokens, logprobs = detjax.jit(functools.partial(sampling.sample, filtered=False))(*arguments)
        expected = detjax.jit(softmax.log_softmax)(arguments[0])[np.arange(64), tokens]
        if np.asarray(logprobs).tobytes() != np.asarray(expected).tobytes():
            raise SystemExit(f"sample, width {width}: logprobs have other bits than log_softmax")
        alone = detjax.jit(functools.partial(sampling.sample, filtered=False))(*(x[9:10] for x in arguments))
        filtered = detjax.jit(functools.partial(sampling.sample, filtered=True))(*arguments)
        cases = {"alone": (alone, (tokens[9:10], logprobs[9:10])), "among filters": (filtered, (tokens, logprobs))}
        for name, (other, own) in cases.items():
            if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in zip(other, own, strict=True)):
                raise SystemExit(f"sample, width {width}: {name}, a row has other bits")
        with detjax.use_backend("portable"):
            portable, _ = detjax.jit(functools.partial(portable_sampling.sample, filtered=False))(*arguments)
        equal = int((portable == tokens).sum())
        console.print(f"sample {width} {dtype}: bits kept; {equal} of 64 tokens are the portable backend's")


def sampler_arguments(x: jax.Array, temperature: Any) -> tuple[jax.Array, ...]:
    rows = len(x)
    seeds = jnp.stack([jnp.arange(rows), jnp.arange(rows) + 5], axis=1).astype(jnp.uint32)
    ids, ones = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.float32)
    return x, seeds, ids, 0 * ids, jnp.asarray(temperature, jnp.float32), 0 * ids, ones, 0 * ones


def time_all(rows: int, dtype: str, calls: int) -> None:
    """Prints device times of every schedule of log_softmax, and of the sampler."""
    one = jax.ShapeDtypeStruct((rows, VOCABULARY), jnp.dtype(dtype))
    read, written = one.size * one.dtype.itemsize, 4 * one.size
    sets = [(logits(rows, VOCABULARY, dtype, seed),) for seed in range(rotations(read))]

    def copied(size: int) -> float:
        arrays = [(jnp.full(size // 8, i, jnp.int32),) for i in range(rotations(size // 2))]
        return device_time(jax.jit(lambda x: x + 1), arrays, calls=calls)

    copy = copied(read + written)
    console.print(f"\n{rows} rows, {dtype}: a copy of {(read + written) / 1e6:.0f} MB takes {copy * 1e6:.1f} µs")
    chosen, found = schedule_for(one), []
    for schedule in dict.fromkeys([chosen, *schedules(one, around=(-2, 0, 2, rows))]):
        program = detjax.jit(functools.partial(softmax.log_softmax, schedule=schedule))
        found.append((device_time(program, sets, calls=calls), schedule))
    for seconds, schedule in [*sorted(found, key=lambda result: result[0])[:12], found[0]]:
        mark = "  <- chosen" if schedule == chosen else ""
        console.print(
            f"log_softmax cluster {schedule.cluster} slots {schedule.slots:2} grid {schedule.grid:4}: "
            f"{seconds * 1e6:7.1f} µs, {(read + written) / seconds / 1e12:.2f} TB/s, "
            f"{copy / seconds:4.0%} of a copy{mark}"
        )
    reading = copied(2 * read) / 2
    for slots, grid in ((4, 6), (8, 3), (4, 4), (8, 6)):
        schedule = Schedule(0, slots, min(rows * blocks_of_row(VOCABULARY), 132 * grid))
        program = detjax.jit(functools.partial(softmax.logsumexp, schedule=schedule))
        times = [device_time(program, sets, calls=calls)]
        for temperature in (0.0, 1.0):
            sampler = detjax.jit(functools.partial(sampling.sample, filtered=False, schedule=schedule))
            all_sets = [sampler_arguments(x, np.full(rows, temperature)) for (x,) in sets]
            times.append(device_time(sampler, all_sets, calls=calls))
        shown = ", ".join(
            f"{name} {seconds * 1e6:.1f} µs ({reading / seconds:.0%} of reading)"
            for name, seconds in zip(("logsumexp", "greedy", "sampled"), times, strict=True)
        )
        console.print(f"slots {slots}, {grid} CTAs on an SM: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", action="store_true", help="check bits alone")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--calls", type=int, default=20)
    arguments = parser.parse_args()
    check_bits()
    check_sampling()
    if not arguments.bits:
        for dtype in arguments.dtype:
            for rows in arguments.rows:
                time_all(rows, dtype, arguments.calls)


if __name__ == "__main__":
    main()
