"""The next token on Hopper GPUs (Mosaic GPU): logits are read once, noise is made where it is used, nothing is stored.

One kernel finds the best candidate and the statistics of each block of a row, a small one merges a row's blocks. Where
rows have filters, sorting and deciding what is kept are the portable backend's part. Tokens and logprobs come from the
same kernels in every case.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANES, SOFTMAX_BLOCK
from detjax.pallas.gumbel import NO_ID, beats, gumbel
from detjax.pallas.hopper import softmax
from detjax.pallas.hopper.row_stream import (
    PART,
    Ring,
    blocks_of_row,
    fold_blocks,
    for_each_row,
    layout,
    padded,
    stream_blocks,
)
from detjax.pallas.hopper.softmax import LOWEST, Schedule
from detjax.portable import sampling as portable


def sample(
    logits: Array,
    seed: Array,
    position: Array,
    sample_index: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    *,
    filtered: bool,
    schedule: Schedule | None = None,
) -> tuple[Array, Array]:
    """Tokens `[B]` int32 and their logprobs `[B]` float32; see `detjax.ops.sample`."""
    keys = jax.random.key_data(jax.vmap(portable.sample_key)(seed, position, sample_index))
    logits = padded(logits)
    schedule = schedule or softmax.streaming_schedule(logits)
    if not filtered:
        statistics, *candidates = _candidates(logits, keys, temperature, schedule)
    else:
        statistics = softmax.blocks_statistics(logits, schedule)
        kept = portable.masked(logits, temperature, top_k, top_p, min_p)
        _, *candidates = _candidates(kept, keys, temperature, schedule)
    return _chosen(logits, statistics, *candidates)


def _candidates(logits: Array, keys: Array, temperature: Array, schedule: Schedule) -> tuple[Array, Array, Array]:
    """Of every block of rows `[B, V]`: its statistics, its best value, float32, and the id of that, int32."""
    rows, width = logits.shape
    blocks = blocks_of_row(width)

    def step(ring: Ring, item: Any, row: Any, block: Any, *refs: Any) -> None:
        keys_gmem, temperature_gmem, statistics_gmem, value_gmem, token_gmem = refs

        def of_size(size: int) -> tuple[Array, ...]:
            m, total = softmax.block_statistics(ring.chunks(item, size))
            first = block * SOFTMAX_BLOCK
            warmth = temperature_gmem[row]

            def sampled() -> tuple[Array, Array]:
                key = keys_gmem[row, 0], keys_gmem[row, 1]
                inverse = 1 / warmth

                def noisy(x: Array, token: Array) -> Array:
                    # The maximum also keeps ptxas from contracting the product with the addition.
                    return jnp.maximum(x * inverse, LOWEST) + gumbel(key, token.astype(jnp.uint32))

                return _best(ring, item, size, first, noisy)

            greedy = lambda: _best(ring, item, size, first, lambda x, _: x)  # noqa: E731
            return m, total, *lax.cond(warmth == 0, greedy, sampled)

        m, total, value, token = ring.by_size(block, of_size)
        for part in range(ring.parts):
            ring.release(item, part)
        statistics_gmem[row, block, 0] = m
        statistics_gmem[row, block, 1] = total
        value_gmem[row, block] = value
        token_gmem[row, block] = token

    out = [
        jax.ShapeDtypeStruct((rows, blocks, 2), ACCUMULATOR),
        jax.ShapeDtypeStruct((rows, blocks), ACCUMULATOR),
        jax.ShapeDtypeStruct((rows, blocks), jnp.int32),
    ]
    schedule_of_blocks = {"slots": schedule.slots, "grid": schedule.grid}
    return tuple(stream_blocks("sample_blocks", logits, step, out, keys, temperature, **schedule_of_blocks))


def _best(ring: Ring, item: Any, size: int, first: Any, value_of: Any) -> tuple[Array, Array]:
    """The largest of an item's `value_of(elements, ids)` and its id, the lowest of equals; ids begin at `first`."""
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=layout(LANES)) + first
    best = plgpu.layout_cast(jnp.full((LANES,), -jnp.inf, ACCUMULATOR), layout(LANES)), lane
    for part in range(-(-size // PART)):

        def step(i: Any, best: tuple[Array, Array], part: int = part) -> tuple[Array, Array]:
            start = i * LANES
            token = lane + (part * PART + start)
            value = value_of(ring.elements(item, part, start, LANES), token)
            better = beats(value, best[0])
            return jnp.where(better, value, best[0]), jnp.where(better, token, best[1])

        chunks = -(-min(PART, size - part * PART) // LANES)
        best = lax.fori_loop(0, chunks, step, best)
    value, token = best
    top = jnp.max(value)
    return top, jnp.min(jnp.where((value == top) | (value != value), token, NO_ID))


def _chosen(logits: Array, statistics: Array, values: Array, tokens: Array) -> tuple[Array, Array]:
    """The best of each row's candidates, and its logprob."""
    rows, blocks = values.shape

    def body(row: Any, x: Any, statistics: Any, values: Any, tokens: Any, token_gmem: Any, logprob_gmem: Any) -> None:
        def step(block: Any, best: tuple[Array, Array]) -> tuple[Array, Array]:
            value = values[row, block]
            better = beats(value, best[0])
            return jnp.where(better, value, best[0]), jnp.where(better, tokens[row, block], best[1])

        _, token = fold_blocks(blocks, step, (jnp.float32(-jnp.inf), tokens[row, 0]))
        m, total = softmax.merged_statistics(lambda b: (statistics[row, b, 0], statistics[row, b, 1]), blocks)
        constant = softmax.row_constant("log_softmax", total)
        token_gmem[row] = token
        logprob_gmem[row] = softmax.finished("log_softmax", x[row, token].astype(ACCUMULATOR), m, constant)

    out = [jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), ACCUMULATOR)]
    token, logprob = for_each_row("sample_rows", rows, body, out, logits, statistics, values, tokens)
    return token, logprob
