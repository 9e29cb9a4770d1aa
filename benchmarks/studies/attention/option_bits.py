"""Every option of attention at every head size: decode and chunks compared with prefill."""

import functools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks.bits import differing_tokens
from benchmarks.inputs import normal
from benchmarks.studies.attention import inputs
from benchmarks.studies.attention.cases import Sizes
from benchmarks.studies.attention.comparison import Comparison
from benchmarks.studies.attention.programs import paged_attention
from detjax import ops
from detjax.operands.kv_pages import Queries
from detjax.operands.numerics import ceil_div

KV_HEADS: Final = 2
CHUNK: Final = 7
BUILDERS: Final = 8
"""Compiler threads per process."""


class OptionCase(NamedTuple):
    """A combination of head size, query heads per key head, and options of `ops.attention`."""

    name: str
    head_dim: int
    group: int
    options: dict[str, Any]


def option_cases(sizes: Sizes) -> list[OptionCase]:
    """Returns all combinations."""
    heads = 4 * KV_HEADS
    options = {
        "window 100": {"window": 100},
        "soft cap 30": {"soft_cap": 30.0},
        "sinks": {"sinks": np.linspace(-1, 4, heads, dtype=np.float32)},
        "ALiBi": {"alibi_slopes": tuple(2.0 ** (-8 * (head + 1) / heads) for head in range(heads))},
        "not causal": {"causal": False},
    }
    cases = []
    for head_dim in sizes.head_dims:
        for group in sizes.groups:
            cases.append(OptionCase(f"head size {head_dim}, group of {group}", head_dim, group, {}))
        for name, option in options.items():
            cases.append(OptionCase(f"head size {head_dim}, {name}", head_dim, 4, option))
    return cases


def count_differences(tokens: int, case: OptionCase) -> np.ndarray:
    """Returns how many tokens of one request differ when they are decoded, and when they come in chunks.

    One call decodes all tokens, and another computes all chunks: each is a request on the same pages.
    """
    causal = case.options.get("causal", True)
    q = normal((1, tokens, case.group * KV_HEADS, case.head_dim), jnp.asarray(7))
    k, v = inputs.keys_and_values((1, tokens, KV_HEADS, case.head_dim), 1)[0]

    @detjax.jit
    def program(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        pages, table = (ops.in_pages(k), ops.in_pages(v)), ops.contiguous_page_table(1, tokens)

        def attend(width: int) -> jax.Array:
            count = ceil_div(tokens, width)
            starts = width * jnp.arange(count, dtype=jnp.int32)
            padded = jnp.pad(q[0], ((0, count * width - tokens), (0, 0), (0, 0)))
            # Without a causal mask, a query attends to all cached keys, so every phase needs all of them.
            ends = jnp.minimum(starts + width, tokens) if causal else jnp.full(count, tokens, jnp.int32)
            chunks = padded.reshape(count, width, *q.shape[2:])
            queries = Queries(jnp.repeat(table, count, axis=0), starts, ends)
            o = paged_attention(chunks, *pages, queries, **case.options)
            return o.reshape(1, count * width, *q.shape[2:])[:, :tokens]

        want = attend(tokens)
        return jnp.stack([differing_tokens(attend(width), want).sum() for width in (1, CHUNK)])

    return np.asarray(program(q, k, v))


def compare_cases(tokens: int, backend: str, cases: Sequence[OptionCase]) -> Comparison:
    """Compares combinations in threads of this process."""
    comparison = Comparison()

    def compare(case: OptionCase) -> None:
        # Threads do not inherit the chosen backend.
        with detjax.use_backend(backend):
            counts = count_differences(tokens, case)
        comparison.options += 1
        for kind, different in zip(("decode", f"chunks of {CHUNK}"), counts.tolist(), strict=True):
            if different:
                comparison.differences.append(f"{case.name}: {different} of {tokens} tokens by {kind}")

    with ThreadPoolExecutor(BUILDERS) as pool:
        list(pool.map(lambda case: comparison.attempt(case.name, functools.partial(compare, case)), cases))
    return comparison


def compare_options(sizes: Sizes, backend: str, comparison: Comparison, processes: int = 1) -> None:
    """Compares all combinations in several processes, since compiling in Python takes most of the time."""
    cases, tokens = option_cases(sizes), sizes.option_tokens
    compare = functools.partial(compare_cases, tokens, backend)
    if processes == 1:
        comparison.include([compare(cases)])
        return
    # One case per task, since programs of large heads take longer to compile.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        results = pool.map(compare, [[case] for case in cases])
        comparison.include(track(results, "comparing options", len(cases), console=Console(stderr=True)))
