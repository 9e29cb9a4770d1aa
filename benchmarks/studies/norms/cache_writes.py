"""Times of `qk_rope` and writing keys and values to a cache, in one step and in two."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks.inputs import normal
from benchmarks.studies.norms.cases import EPS, FREQUENCY_BASE, Sizes, norm_weights
from benchmarks.timing import copy_time
from detjax import ops
from detjax.bench.bits import same_bits
from detjax.bench.timing import device_time, rotations
from detjax.operands import kv_pages
from detjax.operands.kv_pages import KVPages, Queries
from detjax.runtime.backends import STOCK

FIRST_POSITION: Final = 100
"""The position of the first written token, so that a prompt crosses pages."""

type Step = Callable[[KVPages, jax.Array, Queries], tuple[jax.Array, KVPages]]


def steps(sizes: Sizes) -> dict[str, Step]:
    """Returns the write as one operation, and as rotary embedding followed by scatters, by name."""
    heads, kv_heads = sizes.heads, sizes.kv_heads
    q_norm, k_norm = norm_weights(sizes.head_dim, sizes.head_dim)
    options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": EPS}
    embedding = ops.RotaryEmbedding(sizes.head_dim, FREQUENCY_BASE)

    def in_one(kv: KVPages, qkv: jax.Array, queries: Queries) -> tuple[jax.Array, KVPages]:
        return ops.qk_rope_append_kv(qkv, kv, queries, embedding, **options)

    def in_two(kv: KVPages, qkv: jax.Array, queries: Queries) -> tuple[jax.Array, KVPages]:
        positions = jnp.asarray(queries.start)[:, None] + jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]
        q, k = ops.qk_rope(qkv, positions, embedding, heads=heads, kv_heads=kv_heads, **options)
        return q, kv_pages.append(kv, k, qkv[:, :, heads + kv_heads :], queries)

    return {"q/k norm, rope, KV append": in_one, "q/k norm, rope; then scatters": in_two}


def measure(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields a result for each way to write and number of rows: a token per request, or long prompts."""
    programs = steps(sizes)
    for name, step in track(list(programs.items()), "measuring the cache's writes", console=Console(stderr=True)):
        for count in sizes.rows:
            kv, sets = _arguments(sizes, count)
            size = 2 * sets[0][0].nbytes
            seconds = {"copy": copy_time(size, calls=sizes.calls)}
            for backend in (detjax.backend(), STOCK):
                with detjax.use_backend(backend):
                    seconds[backend] = device_time(_carrying(step, kv), sets, calls=sizes.calls)
            one, two = (detjax.jit(program)(kv, *sets[0]) for program in programs.values())
            same = bool(same_bits(one, two))
            yield {"case": name, "rows": count, "bytes": size, "seconds": seconds, "same_bits_as_in_steps": same}


def _arguments(sizes: Sizes, count: int) -> tuple[KVPages, list[tuple[jax.Array, Queries]]]:
    """Empty pages, and argument sets of `count` rows."""
    tokens = min(count, 1024) if count > 64 else 1
    batch = count // tokens
    page_table = ops.contiguous_page_table(batch, FIRST_POSITION + tokens)[:, ::-1]
    start, number = jnp.full(batch, FIRST_POSITION, jnp.int32), jnp.full(batch, tokens, jnp.int32)
    queries = Queries(page_table, start, start + number, number)
    kv = KVPages.empty(page_table.size, sizes.kv_heads, sizes.head_dim, "bfloat16")
    shape = (batch, tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    size = normal(shape, 0).nbytes
    return kv, [(normal(shape, seed), queries) for seed in range(rotations(size))]


def _carrying(step: Step, kv: KVPages) -> Callable[..., jax.Array]:
    """The step with its pages bound: each call takes them from the previous call, to write in place."""
    program = detjax.jit(step, donate_argnums=0)
    carry = [jax.tree.map(jnp.copy, kv)]

    def call(*arguments: Any) -> jax.Array:
        q, carry[0] = program(carry[0], *arguments)
        return q

    return call
