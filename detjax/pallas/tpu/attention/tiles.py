"""The tiling of queries for the kernel, and the inverse for its results."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from detjax.contract import KV_BLOCK
from detjax.operands.options import Masking
from detjax.pallas.tpu.attention import kernel
from detjax.pallas.tpu.attention.kernel import Operands, Problem, Schedule, Tiles
from detjax.pallas.tpu.device import SMEM_LIMIT
from detjax.runtime import backends


class QueryTiles(NamedTuple):
    """The tokens of each tile of queries, int32 `[tiles]`.

    Attributes:
        position: the position of its first token.
        kv_length: tokens of its request.
        request: its request.
        tokens: the number of its tokens with queries.
    """

    position: Array
    kv_length: Array
    request: Array
    tokens: Array

    def visits(self, columns: int, group: int, masking: Masking) -> Tiles:
        """Returns the kernel's tiles, with the blocks of keys that some query of a tile sees.

        The page table has `columns` columns, and `group` query heads share a key head.
        """
        first, end = jnp.zeros_like(self.position), self.kv_length
        if masking.causal:
            end = jnp.minimum(end, self.position + self.tokens)
        if masking.window is not None:
            first = jnp.clip((self.position - (masking.window - 1)) // KV_BLOCK, 0, columns - 1)
        # Blocks that no query of the tile sees would add exact zeros, so skipping them changes no bit.
        blocks = jnp.where(self.tokens > 0, jnp.clip(-(-end // KV_BLOCK), 0, columns) - first, 0)
        return Tiles(
            table_row=self.request * columns,
            position=self.position,
            kv_length=self.kv_length,
            first_block=first,
            blocks=jnp.maximum(blocks, 0),
            rows=self.tokens * group,
        )


def attend(
    operands: Operands,
    page_table: Array,
    tiles: QueryTiles,
    *,
    masking: Masking,
    with_normalizers: bool,
    schedule: Schedule,
) -> tuple[Array, Array | None]:
    """Returns outputs `[tiles, tokens, H, V]` and, if requested, the log2 of normalizers `[tiles, tokens, H]`.

    Queries are `[tiles, tokens, H, K]`, the page table is `[B, p]`.

    Raises:
        NotImplementedError: the page table and the integers of tiles don't fit into scalar memory.
    """
    _check_scalars(page_table, tiles)
    problem, tokens = problem_of(operands.q, operands.k.shape[1]), operands.q.shape[1]
    rows = _rows_of_tokens(operands.q, problem, schedule)
    visits = tiles.visits(page_table.shape[1], problem.group, masking)
    # Entries beyond a request's length are undefined; clipping keeps them from fetching pages that don't exist.
    table = jnp.clip(page_table.reshape(-1), 0, operands.k.shape[0] - 1)
    o, log2_normalizers = kernel.attend(
        operands._replace(q=rows),
        table,
        visits,
        group=problem.group,
        masking=masking,
        with_normalizers=with_normalizers,
        schedule=schedule,
    )
    o = _tokens_of_rows(o, tokens, problem.group)
    if log2_normalizers is not None:
        log2_normalizers = _tokens_of_rows(log2_normalizers, tokens, problem.group)
    return o, log2_normalizers


def problem_of(q: Array, kv_heads: int) -> Problem:
    """Returns the kernel's problem for queries `[..., H, K]`."""
    return Problem(kv_heads, q.shape[-2] // kv_heads)


def mask_of_tiles(mask: Array, problem: Problem, schedule: Schedule, tiles: int, blocks: int) -> Array:
    """Returns a mask `[b, m, T, s]` in the kernel's layout: int8 `[b * tiles, h or 1, rows, keys]`, 1 for visible keys.

    The boolean mask has an m of 1 or the number of query heads, and keys from s on are hidden. `tiles` is the number of
    tiles of each request, `blocks` the number of blocks of keys in the result.
    """
    batch, masks, tokens, keys = mask.shape
    tile_tokens, group = schedule.tile_tokens(problem), problem.group
    padding = (0, 0), (0, 0), (0, tiles * tile_tokens - tokens), (0, blocks * KV_BLOCK - keys)
    mask = jnp.pad(mask.astype(jnp.int8), padding)
    heads = (1, 1) if masks == 1 else (problem.kv_heads, group)
    mask = mask.reshape(batch, *heads, -1, tile_tokens, blocks * KV_BLOCK).transpose(0, 3, 1, 4, 2, 5)
    mask = jnp.broadcast_to(mask, (*mask.shape[:4], group, mask.shape[5]))
    mask = mask.reshape(-1, mask.shape[2], tile_tokens * group, mask.shape[5])
    return jnp.pad(mask, ((0, 0), (0, 0), (0, schedule.rows - mask.shape[2]), (0, 0)))


def _check_scalars(page_table: Array, tiles: QueryTiles) -> None:
    count = tiles.position.shape[0]
    scalars = page_table.size + len(Tiles._fields) * count
    if scalars > SMEM_LIMIT:
        raise NotImplementedError(
            f"attention: a page table {page_table.shape} and {count} tiles of queries, {scalars} integers in all, on "
            f"{backends.device_name()}; accepted by the backend 'tpu': {SMEM_LIMIT}. Call it for fewer requests."
        )


def _rows_of_tokens(q: Array, problem: Problem, schedule: Schedule) -> Array:
    """Returns rows of tiles, `[tiles, h, rows, K]`, for queries `[tiles, tokens, H, K]`."""
    tiles, tokens, _, width = q.shape
    unused = schedule.rows - tokens * problem.group
    q = q.reshape(tiles, tokens, problem.kv_heads, problem.group, width).transpose(0, 2, 1, 3, 4)
    q = q.reshape(tiles, problem.kv_heads, tokens * problem.group, width)
    return jnp.pad(q, ((0, 0), (0, 0), (0, unused), (0, 0)))


def _tokens_of_rows(x: Array, tokens: int, group: int) -> Array:
    """Returns results `[tiles, tokens, H, ...]` for rows `[tiles, h, rows, ...]`."""
    tiles, kv_heads, _, *rest = x.shape
    x = x[:, :, : tokens * group].reshape(tiles, kv_heads, tokens, group, *rest)
    x = x.transpose(0, 2, 1, *range(3, x.ndim))
    return x.reshape(tiles, tokens, kv_heads * group, *rest)
