"""Attention on every NVIDIA GPU of compute capability 8.0 and above: one kernel on `mma.sync` serves every phase.

A call with few tokens has the heads of a group on the rows of a tile, and may split sequences among CTAs; any other has
tokens of one head there. A row's bits are the same in both, and so in prefill, decode, verified drafts and training:
see `kernel`. Calls with few tokens dequantize pages in the kernel; for others, whose tiles share pages, plain JAX
dequantizes each page once, with the same product and rounding. Gradients,
calls whose values are key columns, and heads of more than 256 columns come from the portable backend's program,
whatever the phase.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from detjax.contract import ACCUMULATOR, KV_BLOCK, QUERY_UNIT
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, QuantizedPages, Queries, request_of_rows
from detjax.operands.numerics import round_up
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.mask import pack_words
from detjax.pallas.hopper.attention.warpgroups import COMPILER_PARAMS
from detjax.pallas.hopper.device import DTYPES
from detjax.pallas.hopper.mosaic.layouts import ROWS
from detjax.pallas.mma.attention.kernel import Kernel, Operands, Partials, Whole, scratch_types
from detjax.pallas.mma.attention.merge import merge, partial_types
from detjax.pallas.mma.attention.schedule import (
    GroupedRows,
    Problem,
    Schedule,
    Tiles,
    default_schedule,
    ragged_tiles,
    rectangular_tiles,
)
from detjax.portable import attention as portable_attention
from detjax.runtime import backends

WIDTHS: Final = (*range(16, 129, 16), 192, 256)
"""Columns of keys and of values in kernels."""
WIDER: Final = range(320, 513, 64)
"""Columns of keys and of values that no kernel holds: calls with either go to the portable backend's program."""
MAX_GROUPED_TOKENS: Final = 16
"""Maximum number of tokens per request whose heads of a group are rows of one tile."""


def forward(
    operands: AttentionOperands,
    *,
    masking: Masking,
    with_normalizers: bool = True,
    schedule: Schedule | None = None,
) -> tuple[Array, Array | None]:
    """Returns the output `[B, T, H, V]` and, if asked for, the log2 of rows' normalizers, float32 `[B, T, H]`.

    See `ops.attention` for the mask, `[B or 1, H or 1, T, s]`.

    Args:
        operands: queries `[B, T, H, K]`, pages, and the rest.
        masking: which keys a query sees, and how scores are shaped.
        with_normalizers: whether normalizers are returned.
        schedule: default: `default_schedule`.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    q, kv, queries, sinks, mask = operands
    if _is_portable(q, kv):
        return portable_attention.forward(operands, masking=masking, with_normalizers=with_normalizers)
    _check(q, kv)
    (batch, tokens, heads, _), group = q.shape, q.shape[2] // kv.kv_heads
    if not with_normalizers and mask is None and tokens <= MAX_GROUPED_TOKENS and group <= ROWS:
        rows = GroupedRows(batch, tokens, group)
        call = _Call(kv, queries, sinks, None, masking, schedule)
        return rows.unpacked(call.grouped(rows.packed(q), rows)), None
    kv, queries = _dequantized(kv, queries, q.dtype)
    padded = round_up(tokens, QUERY_UNIT)
    packed = jnp.pad(q, ((0, 0), (0, padded - tokens), (0, 0), (0, 0))).reshape(batch * padded, heads, -1)
    words = None if mask is None else pack_words(mask, round_up(tokens, ROWS), queries.page_table.shape[1] * KV_BLOCK)
    call = _Call(kv, queries, sinks, words, masking, schedule)
    results = call.by_head(packed, rectangular_tiles(batch, tokens, padded))
    o, normalizers = (x.reshape(batch, padded, *x.shape[1:])[:, :tokens] for x in results)
    return o, normalizers if with_normalizers else None


def ragged(operands: AttentionOperands, *, masking: Masking) -> Array:
    """Returns the output `[N, H, V]` of packed queries `[N, H, K]`.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    if _is_portable(operands.q, operands.kv):
        return portable_attention.ragged(operands, masking=masking)
    return _ragged(operands, masking)[0]


def ragged_with_normalizers(operands: AttentionOperands, *, masking: Masking) -> tuple[Array, Array]:
    """Returns the output of packed queries, and the log2 of each row's normalizer, float32 `[N, H]`.

    The output is 0 in padding rows: gradients of weights sum over all rows, and uninitialized memory may be NaN.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    if _is_portable(operands.q, operands.kv):
        o, normalizers = portable_attention.ragged_with_normalizers(operands, masking=masking)
    else:
        o, normalizers = _ragged(operands, masking)
    queries = operands.queries
    assert queries.first_row is not None and queries.count is not None
    request, offset = request_of_rows(o.shape[0], queries.first_row)
    is_given = (offset >= 0) & (offset < queries.count[request])
    return jnp.where(is_given[:, None, None], o, jnp.zeros((), o.dtype)), normalizers


backward = portable_attention.backward
ragged_backward = portable_attention.ragged_backward


def _ragged(operands: AttentionOperands, masking: Masking) -> tuple[Array, Array]:
    """Returns the output of packed queries and their normalizers, both undefined in padding rows."""
    q, kv, queries, sinks, _ = operands
    _check(q, kv)
    kv, queries = _dequantized(kv, queries, q.dtype)
    assert queries.first_row is not None and queries.count is not None
    rows = q.shape[0]
    packed = jnp.pad(q, ((0, round_up(rows, QUERY_UNIT) - rows), (0, 0), (0, 0)))
    tiles = ragged_tiles(rows, jnp.asarray(queries.first_row), jnp.asarray(queries.count))
    o, normalizers = _Call(kv, queries, sinks, None, masking, None).by_head(packed, tiles)
    return o[:rows], normalizers[:rows]


def _dequantized(kv: KVPages, queries: Queries, dtype: DTypeLike) -> tuple[KVPages, Queries]:
    """Returns pages of numbers and their page table; only the requests' pages are dequantized."""
    if kv.quantized is None:
        return kv, queries
    table = jnp.asarray(queries.page_table)
    if kv.num_pages <= table.size:
        k, v = (pages.numbers(dtype) for pages in kv.quantized)
        return KVPages(k, v), queries
    # A large pool would need memory for pages that no request has.
    ids = table.reshape(-1)
    k, v = (QuantizedPages(x.codes[ids], x.scales[ids], x.kind).numbers(dtype) for x in kv.quantized)
    numbers = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
    return KVPages(k, v), dataclasses.replace(queries, page_table=numbers)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of the kernel; see `kernel.Operands` for the mask."""

    kv: KVPages
    queries: Queries
    sinks: Array | None
    mask: Array | None
    masking: Masking
    schedule: Schedule | None

    def by_head(self, q: Array, tiles: Tiles) -> tuple[Array, Array]:
        """Returns output `[N, H, V]` and normalizers `[N, H]` of queries `[N, H, K]`, whose tiles are of one head."""
        heads = q.shape[1]
        per_row = self._per_row(heads, 1)
        problem = self._problem(q, tiles, ROWS, heads // self.kv.kv_heads, 1)
        schedule = self.schedule or default_schedule(problem, may_split=False)
        results = self._run(problem, dataclasses.replace(schedule, splits=1), q, tiles, per_row)
        assert isinstance(results, Whole)
        return results.o, results.normalizers.T

    def grouped(self, q: Array, rows: GroupedRows) -> Array:
        """Returns the output `[N, h, V]` of rows `[N, h, K]`, whose tiles have the heads of a group."""
        tiles = rows.positions()
        problem = self._problem(q, tiles, rows.tile_rows, 1, rows.group)
        schedule = self.schedule or default_schedule(problem, may_split=True)
        results = self._run(problem, schedule, q, tiles, self._per_row(q.shape[1], rows.group))
        return results.o if isinstance(results, Whole) else merge(problem, tiles, results)

    def _problem(self, q: Array, tiles: Tiles, tile_rows: int, heads_per_key_head: int, group: int) -> Problem:
        return Problem(
            tiles=tiles.rows.shape[0],
            tile_rows=tile_rows,
            heads=q.shape[1],
            heads_per_key_head=heads_per_key_head,
            group=group,
            blocks=self.queries.page_table.shape[1],
            width=q.shape[2],
            value_width=self.kv.value_width,
            dtype=q.dtype,
            quantization=self.kv.quantized[0].kind if self.kv.quantized else None,
        )

    def _per_row(self, heads: int, group: int) -> tuple[Array | None, Array | None]:
        """Returns the sinks and slopes of the rows of a tile, float32 `[heads, 64]` or None."""
        slopes = self.masking.alibi_slopes
        head = jnp.arange(heads)[:, None] * group + jnp.arange(ROWS)[None] % group
        values = self.sinks, None if slopes is None else jnp.asarray(slopes, ACCUMULATOR)
        sinks, slopes = (None if x is None else x.astype(ACCUMULATOR)[head] for x in values)
        return sinks, slopes

    def _run(
        self,
        problem: Problem,
        schedule: Schedule,
        q: Array,
        tiles: Tiles,
        per_row: tuple[Array | None, Array | None],
    ) -> Whole | Partials:
        """Runs the kernel."""
        quantized = self.kv.quantized
        k, v = ((x.codes, x.scales) for x in quantized) if quantized else ((x,) for x in self.kv.numbers)
        integers = self.queries.page_table, self.queries.start, self.queries.length
        table, start, length = (jnp.asarray(x, jnp.int32) for x in integers)
        leaves, tree = jax.tree.flatten(Operands(q, (k, v), table, start, length, tiles, *per_row, self.mask))
        kind, out_type = (
            Whole,
            (
                jax.ShapeDtypeStruct((q.shape[0], problem.heads, problem.value_width), q.dtype),
                jax.ShapeDtypeStruct((problem.heads, q.shape[0]), ACCUMULATOR),
            ),
        )
        if schedule.splits > 1:
            kind, out_type = Partials, tuple(partial_types(problem))

        def body(*refs: Any, **scratch: Any) -> None:
            operands, results = jax.tree.unflatten(tree, refs[: len(leaves)]), kind(*refs[len(leaves) :])
            Kernel(problem, schedule, self.masking, operands, results, scratch).run()

        kernel = plgpu.kernel(
            body,
            out_type=out_type,
            # CUDA's first dimension, which is not limited to 65535, is the last one here.
            grid=(schedule.splits, problem.items),
            grid_names=("split", "item"),
            scratch_types=scratch_types(problem, schedule),
            compiler_params=COMPILER_PARAMS,
            kernel_name="attention",
        )
        return kind(*kernel(*leaves))


def _is_portable(q: Array, kv: KVPages) -> bool:
    """Returns whether values are key columns, or keys or values have more columns than a kernel holds."""
    sizes = q.shape[-1], kv.value_width
    return kv.values_are_keys or (max(sizes) in WIDER and all(size in (*WIDTHS, *WIDER) for size in sizes))


def _check(q: Array, kv: KVPages) -> None:
    sizes = {"q": q.shape[-1], "v_pages": kv.value_width}
    if str(q.dtype) not in DTYPES:
        given, accepted = f"q has dtype {q.dtype}", f"{', '.join(DTYPES)}. Cast q and the pages"
    elif not all(size in WIDTHS for size in sizes.values()):
        given = " and ".join(f"{name} has {size} columns" for name, size in sizes.items())
        accepted = f"{', '.join(map(str, (*WIDTHS, *WIDER)))}. Pad them with zeros"
    else:
        return
    raise NotImplementedError(
        f"attention: {given} on {backends.device_name()}; accepted by the backend 'mma': {accepted}, or choose the "
        "backend 'portable', which takes them."
    )
