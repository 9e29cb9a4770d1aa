"""What norms, rotary embedding, softmax and sampling cost on an H200, against XLA's own and against a copy.

    python benchmarks/norms.py [--out benchmarks/results/norms-h200.json] [--sweep] [--small]

Each operation is timed under the backend that serves and under `stock`, and so is a copy of as many bytes as it has to
read and write: device time, medians, inputs rotated so that large ones come from memory. Beside the time stands whether
the bits of one row are the same first, in the middle and last of every number of rows, and over repeated runs. The
write of keys and values to a cache, which is donated, is timed in one step with `qk_rope` and as scatters behind it.
`--sweep` times the schedules of the Hopper kernels instead, `--small` runs in seconds on a CPU.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import detjax
from detjax import ops
from detjax.bench.timing import device_time, rotations
from detjax.contract import KV_BLOCK
from detjax.pallas.hopper import norm as hopper_norm
from detjax.pallas.hopper import rope as hopper_rope
from detjax.portable import pages

STOCK = "stock"
MOST_BYTES = 24 << 30
FIRST_POSITION = 100
"""Of what is appended to a cache: a prompt crosses pages."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: Sequence[int] = (1, 16, 64, 1024, 4096)
    swept_rows: Sequence[int] = (1, 16, 64, 256, 1024, 4096, 16384)
    width: int = 4096
    vocabulary: int = 151936
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    calls: int = 20
    repeats: int = 100


SMALL = Sizes(rows=(1, 3, 17), width=256, vocabulary=1000, heads=4, kv_heads=2, head_dim=64, calls=3, repeats=3)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on rows: `run(*rows, *shared)`, whose results have a leading axis of rows."""

    name: str
    run: Callable[..., Any]
    row_shapes: tuple[tuple[int, ...], ...]
    shared: tuple[Any, ...] = ()
    dtype: str = "bfloat16"

    def rows(self, count: int, seed: int) -> tuple[jax.Array, ...]:
        """Inputs drawn from the seed, but for the first, the middle and the last row, which are always the same."""
        return _drawn(self, count, seed)


def _drawn(case: Case, count: int, seed: int) -> tuple[jax.Array, ...]:
    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        out = []
        for index, shape in enumerate(case.row_shapes):
            anchor = jax.random.normal(jax.random.fold_in(jax.random.key(0), index), shape, jnp.float32)
            x = jax.random.normal(jax.random.fold_in(key, index), (count, *shape), jnp.float32)
            out.append(x.at[jnp.asarray(_anchored(count))].set(anchor[None]).astype(case.dtype))
        return tuple(out)

    return _draw_program(case.name, count, draw)(jax.random.key(1 + seed))


_programs: dict[tuple[str, int], Callable[[jax.Array], tuple[jax.Array, ...]]] = {}


def _draw_program(name: str, count: int, draw: Callable[[jax.Array], tuple[jax.Array, ...]]):
    return _programs.setdefault((name, count), jax.jit(draw))


def _anchored(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def cases(sizes: Sizes) -> Iterator[Case]:
    """The operations of a decoder layer of Qwen3-8B that are bound by memory, and of its sampler."""
    D, V, H, h, K = sizes.width, sizes.vocabulary, sizes.heads, sizes.kv_heads, sizes.head_dim
    rng = np.random.default_rng(0)
    weight, q_norm, k_norm = (jnp.asarray(1 + rng.standard_normal(n) / 4, "bfloat16") for n in (D, K, K))
    embedding = ops.RotaryEmbedding(K, 1e6)
    yield Case("rms_norm", lambda x, w: ops.rms_norm(x, w, eps=1e-6), ((D,),), (weight,))
    yield Case("rms_norm, residual", lambda x, r, w: ops.rms_norm(x, w, eps=1e-6, residual=r), ((D,), (D,)), (weight,))

    def qk_rope(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> Any:
        # All rows at one position, as all have one content; the barrier keeps the compiler from turning it by itself.
        positions = jax.lax.optimization_barrier(jnp.full(len(qkv), 1234, jnp.int32))
        norms = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-6}
        return ops.qk_rope(qkv, positions, embedding, heads=H, kv_heads=h, **norms)

    yield Case("q/k norm, rope", qk_rope, ((H + 2 * h, K),), (q_norm, k_norm))
    yield Case("log_softmax", ops.log_softmax, ((V,),), dtype="float32")
    yield Case("logsumexp", ops.logsumexp, ((V,),), dtype="float32")
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):

        def sample(logits: jax.Array, temperature: float = temperature) -> Any:
            ones = jnp.ones(len(logits), jnp.int32)
            whole = ones.astype(jnp.float32)
            seeds = jnp.stack([ones, ones], axis=1).astype(jnp.uint32)
            return ops.sample(
                logits, seeds, ones, ones, whole * temperature, 0 * ones, whole, 0 * whole, filtered=False
            )

        yield Case(f"sample, {name}", sample, ((V,),), dtype="float32")


def traffic(case: Case, rows: tuple[jax.Array, ...], heads_read: float) -> int:
    """Bytes that have to be read and written, results included."""
    read = sum(x.nbytes for x in rows) * (heads_read if case.name.startswith("q/k") else 1)
    shapes = jax.eval_shape(case.run, *rows, *case.shared)
    return int(read) + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def copy_time(size: int, calls: int) -> float:
    """Seconds that reading half of `size` bytes and writing the other half takes."""
    count = max(1, size // 8)
    sets = [(jnp.full(count, i, jnp.int32),) for i in range(rotations(size // 2))]
    return device_time(jax.jit(lambda x: x + 1), sets, calls=calls)


def same_bits_throughout(case: Case, rows: Sequence[int], repeats: int) -> tuple[bool, bool]:
    """Whether the anchored rows have one set of bits, and whether repeated runs have."""
    program = detjax.jit(case.run)
    first, over_rows, over_runs = None, True, True
    for count in rows:
        arguments = (*case.rows(count, 0), *case.shared)
        out = jax.tree.leaves(program(*arguments))
        found = [[np.asarray(leaf[i]).tobytes() for leaf in out] for i in _anchored(count)]
        first = found[0] if first is None else first
        over_rows &= all(row == first for row in found)
        if count == rows[len(rows) // 2]:
            equal = [_equal(out, jax.tree.leaves(program(*arguments))) for _ in range(repeats)]
            over_runs = bool(jnp.stack(equal).all())
    return over_rows, over_runs


@jax.jit
def _equal(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    return jnp.stack([(bits(x) == bits(y)).all() for x, y in zip(a, b, strict=True)]).all()


def compare(sizes: Sizes) -> list[dict[str, Any]]:
    """Every operation at every number of rows, under both backends."""
    results = []
    heads_read = (sizes.heads + sizes.kv_heads) / (sizes.heads + 2 * sizes.kv_heads)
    for case in track(list(cases(sizes)), "measuring", console=Console(stderr=True)):
        for count in sizes.rows:
            one = case.rows(count, 0)
            size = traffic(case, one, heads_read)
            read = sum(x.nbytes for x in one)
            if 4 * size > MOST_BYTES:
                continue
            sets = [(*case.rows(count, seed), *case.shared) for seed in range(rotations(read))]
            seconds: dict[str, float | None] = {"copy": copy_time(size, sizes.calls)}
            for backend in (detjax.backends.backend(), STOCK):
                with detjax.use_backend(backend):
                    try:
                        seconds[backend] = device_time(detjax.jit(case.run), sets, calls=sizes.calls)
                    except NotImplementedError:
                        seconds[backend] = None
            results.append({"case": case.name, "rows": count, "bytes": size, "seconds": seconds})
        try:
            over_rows, over_runs = same_bits_throughout(case, sizes.rows, sizes.repeats)
        except NotImplementedError:
            continue
        for result in results:
            if result["case"] == case.name:
                result |= {"same_bits_over_rows": over_rows, "same_bits_over_runs": over_runs}
    return results


def appends(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """`qk_rope` and the write of keys and values, in one step and in two: a token a request, or long prompts."""
    H, h, K = sizes.heads, sizes.kv_heads, sizes.head_dim
    rng = np.random.default_rng(0)
    q_norm, k_norm = (jnp.asarray(1 + rng.standard_normal(K) / 4, "bfloat16") for _ in range(2))
    options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-6}
    embedding = ops.RotaryEmbedding(K, 1e6)

    def in_one(k_pages: jax.Array, v_pages: jax.Array, qkv: jax.Array, *where: jax.Array) -> Any:
        return ops.qk_rope_append_kv(qkv, k_pages, v_pages, *where, embedding=embedding, **options)

    def in_two(k_pages: jax.Array, v_pages: jax.Array, qkv: jax.Array, *where: jax.Array) -> Any:
        positions = where[1][:, None] + jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]
        q, k = ops.qk_rope(qkv, positions, embedding, heads=H, kv_heads=h, **options)
        return q, *pages.append((k_pages, v_pages), (k, qkv[:, :, H + h :]), *where)

    steps = {"q/k norm, rope, KV append": in_one, "q/k norm, rope; then scatters": in_two}
    for name, fn in track(list(steps.items()), "measuring the cache's writes", console=Console(stderr=True)):
        for count in sizes.rows:
            tokens = min(count, 1024) if count > 64 else 1
            batch = count // tokens
            page_table = ops.contiguous_page_table(batch, FIRST_POSITION + tokens)[:, ::-1]
            where = page_table, jnp.full(batch, FIRST_POSITION), jnp.full(batch, tokens)
            pool = jnp.zeros((page_table.size, h, KV_BLOCK, K), "bfloat16")

            def drawn(seed: int, shape: tuple[int, ...] = (batch, tokens, H + 2 * h, K)) -> jax.Array:
                return jax.random.normal(jax.random.key(seed), shape, "bfloat16")

            size = 2 * drawn(0).nbytes
            sets = [(drawn(seed), *where) for seed in range(rotations(size // 2))]
            seconds = {"copy": copy_time(size, sizes.calls)}
            for backend in (detjax.backends.backend(), STOCK):
                with detjax.use_backend(backend):
                    seconds[backend] = device_time(_carrying(fn, (pool, pool)), sets, calls=sizes.calls)
            made = [detjax.jit(step)(pool, pool, *sets[0]) for step in steps.values()]
            same = bool(_equal(*map(jax.tree.leaves, made)))
            yield {"case": name, "rows": count, "bytes": size, "seconds": seconds, "same_bits_as_in_steps": same}


def _carrying(fn: Callable[..., Any], pools: tuple[jax.Array, jax.Array]) -> Callable[..., jax.Array]:
    """`fn` of all arguments but the pools, which every call takes from the one before, to write where they lie."""
    program = detjax.jit(fn, donate_argnums=(0, 1))
    held = [jnp.copy(pool) for pool in pools]

    def call(*arguments: jax.Array) -> jax.Array:
        q, *held[:] = program(*held, *arguments)
        return q

    return call


def sweep(sizes: Sizes) -> list[dict[str, Any]]:
    """The schedules of the Hopper kernels for norms and rotary embedding, each at every number of rows."""
    results = []
    chosen = {case.name: case for case in cases(sizes)}
    D, K, groups = sizes.width, sizes.head_dim, (sizes.heads, sizes.kv_heads)
    for count in sizes.swept_rows:
        case = chosen["rms_norm, residual"]
        sets = [(*case.rows(count, seed), *case.shared) for seed in range(rotations(4 * D * count))]
        best = copy_time(8 * D * count, sizes.calls)
        for threads, rows, first in ((128, 1, False), (128, 1, True), (128, 2, False), (128, 2, True), (64, 2, False)):
            schedule = hopper_norm.Schedule(threads, rows, first)
            if rows <= count:

                def norm(x: jax.Array, r: jax.Array, w: jax.Array, schedule=schedule) -> Any:
                    return hopper_norm.forward(x, w, r, eps=1e-6, weight_offset=0.0, schedule=schedule)

                seconds = device_time(detjax.jit(norm), sets, calls=sizes.calls)
                results.append(_swept(case.name, count, schedule, seconds, best))

        case = chosen["q/k norm, rope"]
        sets = [
            (*case.rows(count, seed), *(jnp.full((count, K // 2), 0.5 + i) for i in range(2)), *case.shared)
            for seed in range(rotations(2 * count * K * sum(groups)))
        ]
        best = copy_time(4 * count * K * sum(groups), sizes.calls)
        for tokens in (1, 2, 4, 8):
            for heads in (1, 2, 4, 8):
                schedule = hopper_rope.Schedule(K // 8, tokens, heads)
                if tokens <= count and (tokens == 8 or tokens * 2 > count or heads == 1):

                    def rope(x: jax.Array, c: jax.Array, s: jax.Array, *w: jax.Array, schedule=schedule) -> Any:
                        return hopper_rope.forward(x, c, s, *w, heads=groups, eps=1e-6, schedule=schedule)

                    seconds = device_time(detjax.jit(rope), sets, calls=sizes.calls)
                    results.append(_swept(case.name, count, schedule, seconds, best))
    return results


def _swept(name: str, count: int, schedule: Any, seconds: float, best: float) -> dict[str, Any]:
    result = {"case": name, "rows": count, "schedule": dataclasses.asdict(schedule), "seconds": seconds, "copy": best}
    Console().print(f"{name}, {count} rows, {schedule}: {seconds * 1e6:.2f} µs, {best / seconds:.0%} of a copy")
    return result


def table(results: Sequence[dict[str, Any]], backend: str) -> Table:
    """The results of `compare`."""
    out = Table("operation", "rows", "MB", "copy, µs", "stock XLA, µs", f"{backend}, µs")
    for name in ("share of copy", "time over stock", "same bits over rows, runs"):
        out.add_column(name)
    name = None
    for result in results:
        seconds = result["seconds"]
        own, stock, copy = seconds[backend], seconds[STOCK], seconds["copy"]
        microseconds = ["none" if s is None else f"{s * 1e6:.1f}" for s in (copy, stock, own)]
        ratios = ["", ""] if own is None else [f"{copy / own:.0%}", f"{own / stock:.2f}"]
        kept = [result.get(f"same_bits_over_{what}") for what in ("rows", "runs")]
        shown = ", ".join("yes" if k else "NO" for k in kept) if name != result["case"] and None not in kept else ""
        title = result["case"] if name != result["case"] else ""
        name = result["case"]
        out.add_row(title, str(result["rows"]), f"{result['bytes'] / 1e6:.2f}", *microseconds, *ratios, shown)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="time the schedules of the Hopper kernels")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    arguments = parser.parse_args()

    sizes = SMALL if arguments.small else Sizes()
    backend = detjax.backends.backend()
    if arguments.sweep:
        results = sweep(sizes)
    else:
        results = [*compare(sizes), *appends(sizes)]
        Console(width=140).print(table(results, backend))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        fingerprint = dataclasses.asdict(detjax.fingerprint())
        content = {"fingerprint": fingerprint, "sizes": dataclasses.asdict(sizes), "results": results}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    if not all(result.get(f"same_bits_over_{what}", True) for result in results for what in ("rows", "runs")):
        raise SystemExit(f"error: backend {backend} gave other bits for other numbers of rows, or in other runs")
    if not all(result.get("same_bits_as_in_steps", True) for result in results):
        raise SystemExit(f"error: backend {backend} wrote other bits in one step than in two")


if __name__ == "__main__":
    main()
