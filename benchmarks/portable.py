"""What the portable backend costs against XLA's own operations, and what it buys: one set of bits at every batch size.

    python benchmarks/portable.py [--output benchmarks/results/portable-cpu.json] [--scale 4]

Runs on the default device. Each operation is timed under both backends in one run, alternately, inputs rotated so that
they come from memory rather than from a cache; figures are medians. Beside the time stands at how many of the other
batch sizes row 0 has other bits than at the largest.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

import detjax
from detjax import models, ops

BACKENDS = ("stock", "portable")
ROWS = (1, 2, 3, 16, 64, 257, 1024)
ROTATED_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on `rows` rows: `run` gives an array whose first row belongs to the first row of the inputs."""

    name: str
    run: Callable[..., jax.Array]
    inputs: Callable[[int, np.random.Generator], tuple[Any, ...]]
    rows: Sequence[int] = ROWS


def cases(scale: int, dtype: str) -> Iterator[Case]:
    """Operations of a small model, sizes times `scale`; the first row's numbers are the same at every batch size."""
    width, vocabulary, heads, kv_heads, head_dim = 256 * scale, 4096 * scale, 2 * scale, scale, 128

    def rows_of(*shape: int, dtype: str = dtype) -> Callable[[int, np.random.Generator], jax.Array]:
        first = np.random.default_rng(0).standard_normal(shape, np.float32)

        def draw(rows: int, rng: np.random.Generator) -> jax.Array:
            others = rng.standard_normal((rows - 1, *shape), np.float32)
            return jnp.asarray(np.concatenate([first[None], others]), dtype)

        return draw

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32) / shape[-1] ** 0.5, dtype)

    x, w, gate_up, norm = rows_of(width), weight(width, width), weight(2, 3 * width, width), weight(width)
    yield Case("matmul", lambda x, w: ops.matmul(x, w, layout="nk"), lambda m, rng: (x(m, rng), w))
    yield Case(
        "matmul, silu(gate) * up",
        lambda x, w: ops.matmul(x, w, layout="nk", activation="silu", gated=True),
        lambda m, rng: (x(m, rng), gate_up),
    )
    yield Case("rms_norm", lambda x, w: ops.rms_norm(x, w, eps=1e-6), lambda m, rng: (x(m, rng), norm))
    logits = rows_of(vocabulary, dtype="float32")
    yield Case("log_softmax", ops.log_softmax, lambda m, rng: (logits(m, rng),))

    context = 512
    q, kv = rows_of(1, heads, head_dim), rows_of(context, kv_heads, head_dim)
    yield Case(
        f"attention, decode over {context} tokens",
        ops.dot_product_attention,
        lambda m, rng: (q(m, rng), kv(m, rng), kv(m, rng)),
        rows=(1, 2, 3, 16, 64),
    )
    q_all = rows_of(context, heads, head_dim)
    yield Case(
        f"attention, prefill of {context} tokens",
        ops.dot_product_attention,
        lambda m, rng: (q_all(m, rng), kv(m, rng), kv(m, rng)),
        rows=(1, 2, 8),
    )

    model, _ = models.load(Path(detjax.__file__).parent / "demo" / "checkpoint", dtype=dtype, progress=False)
    graphdef, state = nnx.split(model)
    prompt = np.random.default_rng(2).integers(1, model.config.vocab_size, 128)

    def tokens(m: int, rng: np.random.Generator) -> tuple[nnx.State, jax.Array]:
        others = rng.integers(1, model.config.vocab_size, (m - 1, len(prompt)))
        return state, jnp.asarray(np.concatenate([prompt[None], others]), jnp.int32)

    yield Case(
        f"whole model (1.3M), {len(prompt)} tokens",
        lambda state, tokens: nnx.merge(graphdef, state)(tokens),
        tokens,
        rows=(1, 2, 3, 16, 64),
    )


def measure(case: Case, rows: int, repeats: int) -> tuple[dict[str, float], dict[str, bytes]]:
    """Median seconds of a call, and the first row's bits, for each backend."""
    programs = {backend: detjax.jit(case.run) for backend in BACKENDS}
    sets = [case.inputs(rows, np.random.default_rng(seed)) for seed in range(8)]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(sets[0]))
    sets = sets[: max(1, min(len(sets), ROTATED_BYTES // max(size, 1)))]
    bits, seconds = {}, {backend: [] for backend in BACKENDS}
    for backend in BACKENDS:
        with detjax.use_backend(backend):
            bits[backend] = np.asarray(programs[backend](*sets[0])[0]).tobytes()
    for repeat in range(repeats):
        for backend in BACKENDS:
            with detjax.use_backend(backend):
                start = time.perf_counter()
                jax.block_until_ready(programs[backend](*sets[repeat % len(sets)]))
                seconds[backend].append(time.perf_counter() - start)
    return {backend: statistics.median(values) for backend, values in seconds.items()}, bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--scale", type=int, default=4, help="sizes of the operations; default: 4 (width 1024)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()

    table = Table(
        "operation", "rows", "stock XLA, ms", "detjax, ms", "ratio", "stock: other bits", "detjax: other bits"
    )
    results = []
    for case in track(list(cases(arguments.scale, arguments.dtype)), "measuring", console=Console(stderr=True)):
        measured = {rows: measure(case, rows, arguments.repeats) for rows in case.rows}
        other = {b: sum(measured[rows][1][b] != measured[case.rows[-1]][1][b] for rows in case.rows) for b in BACKENDS}
        for rows, (seconds, _) in measured.items():
            ratio = seconds["portable"] / seconds["stock"]
            results.append({"case": case.name, "rows": rows, "seconds": seconds, "ratio": ratio, "other_bits": other})
            counts = [f"{other[b]} of {len(case.rows) - 1}" for b in BACKENDS] if rows == case.rows[0] else ["", ""]
            name = case.name if rows == case.rows[0] else ""
            milliseconds = [f"{seconds[b] * 1e3:.3f}" for b in BACKENDS]
            table.add_row(name, str(rows), *milliseconds, f"{ratio:.2f}", *counts)
    ratios = [result["ratio"] for result in results]
    geometric_mean = statistics.geometric_mean(ratios)
    Console(width=130).print(table, f"time of detjax over stock XLA, geometric mean: {geometric_mean:.2f}")
    if arguments.output is not None:
        fingerprint = dataclasses.asdict(detjax.fingerprint())
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "fingerprint": fingerprint,
            "dtype": arguments.dtype,
            "scale": arguments.scale,
            "geometric_mean": geometric_mean,
            "results": results,
        }
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")
    if any(result["other_bits"]["portable"] for result in results):
        raise SystemExit("error: the portable backend gave other bits at some batch size")


if __name__ == "__main__":
    main()
