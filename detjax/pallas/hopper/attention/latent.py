"""Latent attention on Hopper in every phase (Pallas Mosaic GPU): attention whose values are key columns.

All query heads share one key per token, so the rows of a tile are the heads of one token, or of a few consecutive ones.
Decode, verification of drafts and prefill differ only in the number of tiles. As in decode, the key blocks of all tiles
form one line, which is cut into one share per CTA. If values are wider than `SPAN_WIDTH` and tiles are few, sequences
may be cut between spans: a CTA stores the spans of a sequence that began in an earlier CTA unmerged, and a second
kernel merges them in order.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array

from detjax.contract import ACCUMULATOR, QUERY_UNIT
from detjax.operands.kv_pages import KVPages, Queries, request_of_rows
from detjax.operands.numerics import round_up
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.decode_schedule import Schedule
from detjax.pallas.hopper.attention.latent_kernel import Kernel, Operands, Results, scratch_types
from detjax.pallas.hopper.attention.latent_merge import merge, out_types
from detjax.pallas.hopper.attention.latent_schedule import (
    Problem,
    default_schedule,
    padded_heads,
    partial_results,
    tokens_of_a_tile,
)
from detjax.pallas.hopper.attention.warpgroups import launch
from detjax.pallas.hopper.mosaic.layouts import ROWS

VALUE_WIDTHS: Final = (128, 256, 384, 512)
"""Columns of values. Keys have `PART` columns more."""


def forward(
    q: Array,
    kv: KVPages,
    queries: Queries,
    *,
    masking: Masking,
    with_normalizers: bool = True,
    schedule: Schedule | None = None,
) -> tuple[Array, Array | None]:
    """Returns the output `[B, T, H, V]` of queries `[B, T, H, K]`, and the log2 of rows' normalizers or None.

    Args:
        q: the queries.
        kv: pages of keys, whose first columns are the values.
        queries: page table, start and length of each request.
        masking: whether attention is causal, and the scale.
        with_normalizers: whether to return normalizers, float32 `[B, T, H]`. No sequence is split then.
        schedule: default: `default_schedule`.
    """
    batch, tokens, heads, _ = q.shape
    size = tokens_of_a_tile(tokens, padded_heads(heads))
    padded = round_up(tokens, size)
    q = jnp.pad(q, ((0, 0), (0, padded - tokens), (0, 0), (0, 0)))
    first = jnp.tile(jnp.arange(0, padded, size, dtype=jnp.int32), batch)
    request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), padded // size)
    places = request, jnp.asarray(queries.start)[request] + first, jnp.asarray(queries.length)[request]
    call = _Call(kv, queries.page_table, masking, with_normalizers, schedule)
    results = call.attend(q.reshape(-1, *q.shape[2:]), places)
    o, normalizers = (x.reshape(batch, padded, *x.shape[1:])[:, :tokens] for x in results)
    return o, normalizers if with_normalizers else None


def ragged(
    q: Array,
    kv: KVPages,
    queries: Queries,
    *,
    masking: Masking,
    with_normalizers: bool = True,
    schedule: Schedule | None = None,
) -> tuple[Array, Array]:
    """Returns the output `[N, H, V]` of packed queries `[N, H, K]`, and log2 of normalizers `[N, H]`; see `forward`.

    The normalizers are undefined unless `with_normalizers`.
    """
    assert queries.first_row is not None and queries.count is not None
    rows, heads, _ = q.shape
    padded = round_up(rows, QUERY_UNIT)
    q = jnp.pad(q, ((0, padded - rows), (0, 0), (0, 0)))
    size = tokens_of_a_tile(padded, padded_heads(heads))
    # Requests begin at multiples of QUERY_UNIT, so no tile has rows of two.
    request, index = (x[::size] for x in request_of_rows(padded, jnp.asarray(queries.first_row)))
    is_present = (index >= 0) & (index < jnp.asarray(queries.count)[request])
    length = jnp.where(is_present, jnp.asarray(queries.length)[request], 0)
    places = request, jnp.asarray(queries.start)[request] + index, length
    o, normalizers = _Call(kv, queries.page_table, masking, with_normalizers, schedule).attend(q, places)
    return o[:rows], normalizers[:rows]


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call, with rectangular or packed queries; see `forward`."""

    kv: KVPages
    page_table: Array
    masking: Masking
    with_normalizers: bool
    schedule: Schedule | None

    def attend(self, q: Array, places: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        """Returns output `[N, H, V]` and normalizers `[N, H]` of the tokens of all tiles.

        Args:
            q: queries `[N, H, K]`, tile by tile.
            places: request, position of the first token, and number of the request's keys of each tile.
        """
        (tokens, heads, width), tiles, blocks = q.shape, places[0].shape[0], self.page_table.shape[1]
        padded = padded_heads(heads)
        problem = Problem(tiles, tokens // tiles, padded, width, self.kv.value_width, blocks, q.dtype)
        schedule = self.schedule or default_schedule(problem)
        if self.with_normalizers:
            schedule = dataclasses.replace(schedule, cut=False)
        rows = jnp.pad(q, ((0, 0), (0, padded - heads), (0, 0))).reshape(tokens * padded, width)
        # Every tile is read as `ROWS` rows, the last one too.
        rows = jnp.pad(rows, ((0, ROWS - problem.rows), (0, 0)))
        operands = Operands(rows, self.kv.k, self.page_table, *(x.astype(jnp.int32) for x in places))
        out = [
            jax.ShapeDtypeStruct((tiles, problem.sequences, ROWS, problem.value_width), q.dtype),
            jax.ShapeDtypeStruct((tiles, problem.sequences, ROWS), ACCUMULATOR),
            *out_types(problem, partial_results(problem, schedule)),
        ]

        def body(operands: Operands, results: list[Any], scratch: dict[str, Any]) -> None:
            Kernel(problem, schedule, self.masking, operands, Results(*results), scratch).run()

        results = launch("attention_latent", body, operands, out, schedule.ctas, scratch_types(problem))
        o, normalizers, *partials = results
        if schedule.cut:
            o = merge(problem, o, *partials)
        # A tile has several tokens, or several sequences, but not both.
        return (
            o[:, :, : problem.rows].reshape(tokens, padded, problem.value_width)[:, :heads],
            normalizers[:, :, : problem.rows].reshape(tokens, padded)[:, :heads],
        )
