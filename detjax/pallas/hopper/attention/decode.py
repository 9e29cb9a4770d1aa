"""Attention of a few query tokens per request on Hopper (Pallas Mosaic GPU): decode and verification of drafts.

The columns of a tile are the queries of all heads that share keys, for up to 16 tokens. A *sequence* is one request,
one KV head and one tile. The key blocks of all sequences form one line, which is cut into *shares* of equal length, one
per CTA, so that requests of any lengths balance. A CTA merges the blocks of each sequence that begins in its share. If
a sequence began in an earlier share, it is *split*: the CTA stores each block's result unmerged, and a second kernel
merges them in order. No bit depends on where the cuts are.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.decode_kernel import DEQUANTIZING, Kernel, scratch_types
from detjax.pallas.hopper.attention.decode_line import Operands
from detjax.pallas.hopper.attention.decode_merge import SplitPartials, merge
from detjax.pallas.hopper.attention.decode_schedule import Problem, Schedule, default_schedule
from detjax.pallas.hopper.attention.warpgroups import launch
from detjax.pallas.hopper.mosaic.layouts import ROWS

MAX_TOKENS: Final = 16
"""Maximum number of query tokens per request."""


def serves(q: Array, kv: KVPages) -> bool:
    """Returns whether tokens are few, a tile can hold the heads that share keys, and values fill the matrix unit."""
    problem = Problem.from_operands(q, kv, 1)
    return problem.tokens <= MAX_TOKENS and problem.group <= problem.most_columns and problem.value_width >= ROWS


def forward(operands: AttentionOperands, *, masking: Masking, schedule: Schedule | None = None) -> Array:
    """Returns the output `[B, T, H, V]` of queries `[B, T, H, K]` that decode `serves`, without a mask.

    The schedule defaults to `default_schedule`.
    """
    q, kv, queries, sinks, _ = operands
    batch, tokens, heads, width = q.shape
    problem = Problem.from_operands(q, kv, queries.page_table.shape[1])
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    shape = batch, tokens, problem.kv_heads, problem.group
    pools = tuple(tuple(jax.tree.leaves(pages)) for pages in (kv.k, kv.v))
    slopes = None if masking.alibi_slopes is None else jnp.asarray(masking.alibi_slopes, ACCUMULATOR)
    arrays = Operands(
        q.reshape(*shape, width),
        pools,
        queries.page_table,
        queries.start,
        queries.length,
        None if sinks is None else _by_column(sinks.astype(ACCUMULATOR), problem),
        None if slopes is None else _by_column(slopes, problem),
    )
    splits = schedule.splits(problem)
    out = [jax.ShapeDtypeStruct((*shape, problem.value_width), q.dtype)]
    if schedule.cut:
        out += splits.out_types()

    def body(operands: Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        Kernel(problem, schedule, masking, operands, results, scratch).run()

    warpgroups = 2 if problem.quantization is None else 2 + DEQUANTIZING
    scratch = scratch_types(problem)
    o, *partials = launch("attention_decode", body, arrays, out, schedule.ctas, scratch, warpgroups=warpgroups)
    if schedule.cut:
        o = merge(splits, o, SplitPartials(*partials))
    return o.reshape(batch, tokens, heads, problem.value_width)


def _by_column(per_head: Array, problem: Problem) -> Array:
    """Expands one number per query head to the columns of a tile, `[h, n]`."""
    by_token = jnp.tile(per_head.reshape(problem.kv_heads, problem.group), (1, problem.tile_tokens))
    return jnp.pad(by_token, ((0, 0), (0, problem.columns - problem.rows)))
