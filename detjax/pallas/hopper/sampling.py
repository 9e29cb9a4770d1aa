"""Sampling of the next token on Hopper GPUs (Mosaic GPU): logits are read once, and noise is never stored.

One kernel computes the best candidate and the statistics of each block of a row, and a small one merges a row's blocks.
If requests have filters, the portable backend sorts the logits and decides which are kept. Tokens and logprobs always
come from the same kernels.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANES, NOISE_LANES, NOISE_WORDS, SOFTMAX_BLOCK
from detjax.operands.numerics import LOWEST, ceil_div
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.gumbel import NO_ID, beats, lane_noise
from detjax.pallas.hopper import softmax
from detjax.pallas.hopper.mosaic.vectors import multiply_high
from detjax.pallas.hopper.row_stream import (
    PART,
    StreamedBlock,
    blocks_per_row,
    fold_blocks,
    for_each_block,
    for_each_row,
    layout,
    padded,
)
from detjax.pallas.hopper.softmax import Problem, Schedule, default_schedule
from detjax.pallas.softmax_formulas import finished, row_constant
from detjax.portable import sampling as portable


def sample(
    logits: Array, arrays: SamplingArrays, *, filtered: bool, schedule: Schedule | None = None
) -> tuple[Array, Array]:
    """Returns tokens `[B]` int32 and their logprobs `[B]` float32; see `detjax.ops.sample`."""
    logits = padded(logits)
    schedule = schedule or default_schedule(Problem.for_rows(logits, rewritten=False))
    if not filtered:
        statistics, *candidates = _candidates(logits, arrays, schedule)
    else:
        statistics = softmax.blocks_statistics(logits, schedule)
        kept = portable.masked(logits, arrays)
        _, *candidates = _candidates(kept, arrays, schedule)
    return _best_of_rows(logits, statistics, *candidates)


def sampling_logprobs(logits: Array, tokens: Array, temperature: Array, *, schedule: Schedule | None = None) -> Array:
    """Returns the logprobs of tokens, `[B]` float32, under the softmax of logits and temperature; see `detjax.ops`."""
    logits = padded(logits)
    schedule = schedule or default_schedule(Problem.for_rows(logits, rewritten=False))
    reciprocal = portable.reciprocal(temperature)

    def reduce_block(block: StreamedBlock, reciprocals: Any, statistics: Any) -> None:
        reciprocal = reciprocals[block.row]

        def reduce(size: int) -> tuple[Array, Array]:
            chunks = block.load_all(size)
            return softmax.block_statistics([portable.sampling_exponents(chunk, reciprocal) for chunk in chunks])

        m, total = block.with_size(reduce)
        block.release()
        statistics[block.row, block.index, 0] = m
        statistics[block.row, block.index, 1] = total

    def finish_row(row: Any, x: Any, tokens: Any, reciprocals: Any, statistics: Any, logprobs: Any) -> None:
        m, total = softmax.merged_statistics(lambda b: (statistics[row, b, 0], statistics[row, b, 1]), blocks)
        exponent = portable.sampling_exponents(x[row, tokens[row]].astype(ACCUMULATOR), reciprocals[row])
        logprobs[row] = finished("log_softmax", exponent, m, row_constant("log_softmax", total))

    rows, blocks = len(logits), blocks_per_row(logits.shape[1])
    out = jax.ShapeDtypeStruct((rows, blocks, 2), ACCUMULATOR)
    grid = {"slots": schedule.slots, "grid": schedule.grid}
    statistics = for_each_block("sampling_blocks", reduce_block, out, logits, reciprocal, **grid)
    out = jax.ShapeDtypeStruct((rows,), ACCUMULATOR)
    return for_each_row("sampling_logprobs", rows, finish_row, out, logits, tokens, reciprocal, statistics)


def block_candidates(
    logits: Array, arrays: SamplingArrays, first: Array, schedule: Schedule | None = None
) -> tuple[Array, Array]:
    """Returns the best value of every block of logits `[B, v]`, and its token id; ids start at `first`."""
    logits = padded(logits)
    schedule = schedule or default_schedule(Problem.for_rows(logits, rewritten=False))
    _, values, tokens = _candidates(logits, arrays, schedule, first)
    return values, tokens


def _candidates(
    logits: Array, arrays: SamplingArrays, schedule: Schedule, first: Array | None = None
) -> tuple[Array, Array, Array]:
    """Returns the statistics of every block of rows `[B, V]`, its best value, float32, and its best token id, int32.

    Token ids start at `first`, by default 0, for which the kernel takes no operand.
    """
    rows, width = logits.shape
    blocks = blocks_per_row(width)
    out = [
        jax.ShapeDtypeStruct((rows, blocks, 2), ACCUMULATOR),
        jax.ShapeDtypeStruct((rows, blocks), ACCUMULATOR),
        jax.ShapeDtypeStruct((rows, blocks), jnp.int32),
    ]
    grid = {"slots": schedule.slots, "grid": schedule.grid}
    operands = arrays.noise_key, arrays.position, arrays.temperature
    if first is None:
        return tuple(for_each_block("sample_blocks", _reduce_block, out, logits, *operands, **grid))

    def reduce_later_block(block: StreamedBlock, firsts: Any, *references: Any) -> None:
        _reduce_block(block, *references, offset=firsts[block.row])

    operands = jnp.broadcast_to(first, (rows,)), *operands
    return tuple(for_each_block("sample_later_blocks", reduce_later_block, out, logits, *operands, **grid))


def _reduce_block(block: StreamedBlock, *references: Any, offset: Any = None) -> None:
    """Stores a block's statistics and its best candidate. Token ids start at an offset, or at 0."""
    keys, positions, temperatures, statistics, best_values, best_tokens = references

    def reduce(size: int) -> tuple[Array, ...]:
        m, total = softmax.block_statistics(block.load_all(size))
        first = block.index * SOFTMAX_BLOCK
        first = first if offset is None else first + offset
        temperature = temperatures[block.row]

        def greedy() -> tuple[Array, Array]:
            return _best(block, size, first, lambda chunks, _: chunks)

        def sampled() -> tuple[Array, Array]:
            key = [keys[block.row, word] for word in range(4)]
            noisy = _add_noise(key, positions[block.row], 1 / temperature)
            return _best(block, size, first, noisy, NOISE_LANES, NOISE_WORDS)

        return m, total, *lax.cond(temperature == 0, greedy, sampled)

    m, total, value, token = block.with_size(reduce)
    block.release()
    statistics[block.row, block.index, 0] = m
    statistics[block.row, block.index, 1] = total
    best_values[block.row, block.index] = value
    best_tokens[block.row, block.index] = token


_ValuesOf = Callable[[list[Array], Any], list[Array]]
"""A function of the elements of consecutive chunks, and of the first one's first token id, that returns the values to
maximize."""


def _add_noise(key: list[Array], position: Array, inverse_temperature: Array) -> _ValuesOf:
    """Returns the function of up to `NOISE_WORDS` chunks of `NOISE_LANES` logits whose largest value is sampled."""
    lanes = layout(NOISE_LANES)
    lane = plgpu.broadcasted_iota(jnp.int32, (NOISE_LANES,), 0, layout=lanes)
    row = [*key[:2], plgpu.layout_cast(jnp.full((NOISE_LANES,), key[2], jnp.uint32), lanes), key[3]]

    def high(word: Array, factor: np.uint32) -> Array:
        return multiply_high(word, factor=int(factor), layout=lanes)

    def noisy(chunks: list[Array], first: Any) -> list[Array]:
        # `operands.noise.group` of the chunks' tokens, whose first one is a multiple of the tokens of all words.
        groups = (lane + lax.div(first, np.int32(NOISE_WORDS))).astype(jnp.uint32)
        noise = lane_noise(groups, row, position.astype(jnp.uint32), high)
        # The contract's maximum also keeps ptxas from fusing the product with the addition.
        pairs = zip(chunks, noise, strict=False)
        return [jnp.maximum(x * inverse_temperature, LOWEST) + gumbel for x, gumbel in pairs]

    return noisy


def _best(
    block: StreamedBlock, size: int, first: Any, values_of: _ValuesOf, lanes: int = LANES, together: int = 1
) -> tuple[Array, Array]:
    """Returns the largest of the values of a block's elements and its token id, the lowest in case of a tie.

    The block's token ids start at `first`. Each of the lanes keeps the best of its elements, in ascending order.

    Args:
        block: the block.
        size: its number of elements.
        first: its first token id.
        values_of: the values to maximize.
        lanes: elements of a chunk.
        together: chunks that `values_of` is called with; the last call may have fewer.
    """
    lane = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout(lanes)) + first
    best = plgpu.layout_cast(jnp.full((lanes,), -jnp.inf, ACCUMULATOR), layout(lanes)), lane
    for part in range(ceil_div(size, PART)):

        def step(start: Any, count: int, best: tuple[Array, Array], part: int = part) -> tuple[Array, Array]:
            starts = [start + chunk * lanes for chunk in range(count)]
            values = values_of([block.load(part, x, lanes) for x in starts], first + (part * PART + start))
            for x, value in zip(starts, values, strict=True):
                token = lane + (part * PART + x)
                better = beats(value, best[0])
                best = jnp.where(better, value, best[0]), jnp.where(better, token, best[1])
            return best

        whole, rest = divmod(ceil_div(min(PART, size - part * PART), lanes), together)
        best = lax.fori_loop(0, whole, lambda i, best, step=step: step(i * together * lanes, together, best), best)
        if rest:
            best = step(whole * together * lanes, rest, best)
    value, token = best
    top = jnp.max(value)
    return top, jnp.min(jnp.where((value == top) | (value != value), token, NO_ID))


def _best_of_rows(logits: Array, statistics: Array, values: Array, tokens: Array) -> tuple[Array, Array]:
    """Returns the best of each row's candidates, and its logprob."""
    rows, blocks = values.shape

    def body(row: Any, x: Any, statistics: Any, values: Any, tokens: Any, *results: Any) -> None:
        token_gmem, logprob_gmem = results

        def step(block: Any, best: tuple[Array, Array]) -> tuple[Array, Array]:
            value = values[row, block]
            better = beats(value, best[0])
            return jnp.where(better, value, best[0]), jnp.where(better, tokens[row, block], best[1])

        _, token = fold_blocks(blocks, step, (jnp.float32(-jnp.inf), tokens[row, 0]))
        m, total = softmax.merged_statistics(lambda b: (statistics[row, b, 0], statistics[row, b, 1]), blocks)
        constant = row_constant("log_softmax", total)
        token_gmem[row] = token
        logprob_gmem[row] = finished("log_softmax", x[row, token].astype(ACCUMULATOR), m, constant)

    out = [jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), ACCUMULATOR)]
    token, logprob = for_each_row("sample_rows", rows, body, out, logits, statistics, values, tokens)
    return token, logprob
