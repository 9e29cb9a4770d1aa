"""Attention of many query tokens on Hopper (Pallas Mosaic GPU): prefill, chunked prefill and the training forward.

A CTA has 128 query rows of one head, 64 for each of two warpgroups that take turns at the matrix unit: one multiplies
while the other exponentiates. A third warpgroup loads: one of its warps copies pages of keys and values, and another
the queries.

Rows of more than 128 columns are *wide*. Shared memory cannot hold two pages of keys and two of values, nor registers a
block's product next to all running sums. So wide pages are loaded in parts that share one ring of slots, and values are
multiplied in pieces: while one is multiplied, the previous one is merged.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.attention import AttentionOperands
from detjax.operands.numerics import ceil_div
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.prefill_kernel import Operands
from detjax.pallas.hopper.attention.prefill_narrow import NarrowKernel
from detjax.pallas.hopper.attention.prefill_schedule import Problem, Schedule, Tiles, default_schedule
from detjax.pallas.hopper.attention.prefill_wide import WideKernel
from detjax.pallas.hopper.attention.warpgroups import TILE, WARPGROUPS, launch
from detjax.pallas.hopper.mosaic.layouts import ROWS


def forward(
    operands: AttentionOperands, *, masking: Masking, tiles: Tiles | None = None, schedule: Schedule | None = None
) -> tuple[Array, Array]:
    """Returns the output `[N, H, V]` and the log2 of each row's normalizer, `[H, N]` float32.

    Args:
        operands: packed queries `[N, H, K]`, with N and each request's first row a multiple of 8; pages of numbers;
            page table, start and length of each request; instead of the mask its words from `pack_words` for whole
            tiles of 128 rows and all pages, or None. There is no mask with `tiles`.
        masking: which keys a query sees, and how scores are shaped.
        tiles: the tiles of 128 rows; default: tiles of requests of N / B rows each. Rows after a request's last one are
            written up to the next multiple of 8.
        schedule: default: `default_schedule`.
    """
    q, kv, queries, sinks, mask = operands
    (k_pages, v_pages), start = kv.numbers, jnp.asarray(queries.start)
    batch, (rows, heads, width) = start.shape[0], q.shape
    count = batch * ceil_div(rows, batch * TILE) if tiles is None else tiles.request.shape[0]
    problem = Problem(batch, rows, count, heads, k_pages.shape[1], width, v_pages.shape[-1], q.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    kind = WideKernel if problem.is_wide else NarrowKernel
    scratch = kind.scratch_types(problem, schedule) | {
        "normalizers": plgpu.SMEM((WARPGROUPS, ROWS), ACCUMULATOR),
        "q_loaded": plgpu.Barrier(num_barriers=WARPGROUPS),
    }
    for ring in kind.ring_names:
        scratch[f"{ring}_loaded"] = plgpu.Barrier(num_barriers=schedule.stages)
    sinks = None if sinks is None else sinks.astype(ACCUMULATOR)
    slopes = None if masking.alibi_slopes is None else jnp.asarray(masking.alibi_slopes, ACCUMULATOR)
    places = queries.page_table, start, queries.length
    arrays = Operands(q, k_pages, v_pages, *places, tiles, sinks, slopes, mask)

    def body(operands: Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        kind(problem, schedule, masking, operands, results, scratch).run()

    out_type = (
        jax.ShapeDtypeStruct((rows, heads, problem.value_width), q.dtype),
        jax.ShapeDtypeStruct((heads, rows), ACCUMULATOR),
    )
    o, normalizers = launch("attention_prefill", body, arrays, out_type, schedule.ctas(problem), scratch)
    return o, normalizers
