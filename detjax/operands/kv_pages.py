"""The pages of a KV cache, and the queries that read and extend them.

A page holds `contract.KV_BLOCK` consecutive tokens of one request: token `i` of request `b` is in slot `i % KV_BLOCK`
of page `page_table[b, i // KV_BLOCK]`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.operands.numerics import unique_scatter_indices
from detjax.operands.options import KVQuantization
from detjax.operands.pytrees import array_dataclass
from detjax.operands.quantized_pages import QuantizedPages as QuantizedPages
from detjax.operands.quantized_pages import quantized_layout as quantized_layout

if TYPE_CHECKING:
    Arrays = Array
else:
    # The host computes queries in NumPy; programs see JAX arrays.
    Arrays = np.ndarray | Array


type Pages = Float[Array, "P h S K"] | QuantizedPages
"""Pages of keys or values."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class KeyColumns:
    """Values that are the first columns of their keys and have no pages, as in latent attention.

    Attributes:
        width: number of columns.

    Example:
        >>> ops.KVPages(jnp.zeros((4, 1, 128, 24)), ops.KeyColumns(16)).v.width
        16
    """

    width: int


class KVPages(NamedTuple):
    """Keys and values of one layer, in pages of `contract.KV_BLOCK` tokens.

    It is a named tuple because each step of an engine flattens and rebuilds one per layer, which takes JAX less than
    half as long as for a dataclass.

    Attributes:
        k: pages of keys, of the queries' dtype or quantized.
        v: pages of values, of the same dtype or kind; or the number of key columns that are the values.

    Example:
        >>> pages = jnp.zeros((4, 2, 128, 8))  # 4 pages, 2 heads, 128 tokens
        >>> ops.KVPages(pages, pages).k.shape
        (4, 2, 128, 8)
    """

    k: Float[Array, "P h S K"] | QuantizedPages
    v: Float[Array, "P h S V"] | QuantizedPages | KeyColumns

    @classmethod
    def empty(
        cls,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        quantization: KVQuantization | None = None,
    ) -> "KVPages":
        """Returns `num_pages` pages of zeros, of the given dtype or quantized."""
        shape = (num_pages, kv_heads, KV_BLOCK, head_dim)

        def pages() -> Pages:
            return jnp.zeros(shape, dtype) if quantization is None else QuantizedPages.empty(shape, quantization)

        return cls(pages(), pages())

    @property
    def num_pages(self) -> int:
        """The number of pages of the pool."""
        return self.k.shape[0]

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.k.shape[1]

    @property
    def value_width(self) -> int:
        """The number of columns of values."""
        return self.v.width if isinstance(self.v, KeyColumns) else self.v.shape[3]

    @property
    def values_are_keys(self) -> bool:
        """True if the values are columns of the keys."""
        return isinstance(self.v, KeyColumns)

    @property
    def numbers(self) -> tuple[Array, Array]:
        """Unquantized keys and values. Values that are columns of the keys are sliced out of them."""
        k, v = self.k, self.v
        assert not isinstance(k, QuantizedPages) and not isinstance(v, QuantizedPages)
        return k, k[..., : v.width] if isinstance(v, KeyColumns) else v

    def page(self, index: Array, dtype: DTypeLike) -> tuple[Float[Array, "h S K"], Float[Array, "h S V"]]:
        """Returns the keys and values of one page as numbers; quantized pages are converted to `dtype`."""
        if self.quantized:
            k, v = (pages.page(index, dtype) for pages in self.quantized)
            return k, v
        k, v = self.k, self.v
        assert not isinstance(k, QuantizedPages) and not isinstance(v, QuantizedPages)
        k = k[index]
        return k, k[..., : v.width] if isinstance(v, KeyColumns) else v[index]

    @property
    def quantized(self) -> tuple[QuantizedPages, QuantizedPages] | None:
        """Quantized keys and values, or None if the pages hold numbers."""
        k, v = self.k, self.v
        return (k, v) if isinstance(k, QuantizedPages) and isinstance(v, QuantizedPages) else None


@array_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The rows of packed queries.

    Attributes:
        request: the row's request, as a row of the page table; undefined for padding rows.
        position: the row's absolute position in its request.
        present: 1 for a query, 0 for a padding row.

    Example:
        >>> page_table = np.array([[0], [1]])  # request 0 decodes at position 5, request 1 prefills two tokens
        >>> start, count = np.array([5, 0]), np.array([1, 2])
        >>> rows = ops.Queries.packed(page_table, start, count, decodes=1, rows=4).rows
        >>> rows.request.tolist(), rows.position.tolist(), rows.present.tolist()
        ([0, 1, 1, 0, 0], [5, 0, 1, 0, 0], [1, 1, 1, 0, 0])
    """

    request: Int[Arrays, "N"]
    position: Int[Arrays, "N"]
    present: Int[Arrays, "N"]


@array_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """The positions of a call's queries in their requests, and the pages of the requests.

    Queries are *rectangular*, `[B, T, H, K]`, T per request, or *packed*, `[N, H, K]`: first `decode_queries` rows of
    each decoding request, then any number of queries of each prefilling request. `Queries.packed` makes packed queries.

    Attributes:
        page_table: the page of each block of tokens of each request. Entries after a request's length are not read.
        start: absolute position of each request's first query, in tokens.
        length: tokens of each request in the cache, including the queries' own.
        count: queries of each request; the rest is padding on the right. None, for rectangular queries: all T.
        first_row: for packed queries, the row of the first query of each prefilling request, counted from the end of
            the decode rows: ascending multiples of `contract.QUERY_UNIT`. Rows between requests are padding. None for
            rectangular queries.
        rows: for packed queries, the description of rows that appending keys and values needs.
        slots: the slot of each request's state, for layers with state in slots; None: request `b` has slot `b`. See
            `detjax.operands.linear_attention_state`.
        coordinates: the coordinates of each query for a rotary embedding with sections, `[B, T, A]` or packed
            `[N, A]`, as in prompts with images; None: its absolute position, in all sections.
        decode_queries: for packed queries, the rows of each decoding request: its queries, then padding. Attention
            reads the keys of a request once for all of them.

    Example:
        >>> queries = ops.Queries(ops.contiguous_page_table(1, 5), start=jnp.array([0]), length=jnp.array([5]))
        >>> queries.page_table.shape
        (1, 1)
    """

    page_table: Int[Arrays, "B p"]
    start: Int[Arrays, "B"]
    length: Int[Arrays, "B"]
    count: Int[Arrays, "B"] | None = None
    first_row: Int[Arrays, "prefills"] | None = None
    rows: PackedRows | None = None
    slots: Int[Arrays, "B"] | None = None
    coordinates: Int[Arrays, "*N A"] | None = None
    decode_queries: int = dataclasses.field(default=1, metadata={"static": True})

    @staticmethod
    def packed(
        page_table: Int[np.ndarray, "B p"],
        start: Int[np.ndarray, "B"],
        count: Int[np.ndarray, "B"],
        *,
        decodes: int,
        rows: int,
        decode_queries: int = 1,
    ) -> "Queries":
        """Returns packed queries whose own keys come last in the cache, computed on the host.

        Args:
            page_table: page table of the decoding requests, then of the prefilling ones.
            start: absolute position of each request's first query.
            count: queries of each request, which may be 0; at most `decode_queries` for decoding requests.
            decodes: number of decoding requests.
            rows: number of rows of the queries' array after the decode rows.
            decode_queries: number of rows of each decoding request.

        Raises:
            ValueError: the queries need more rows.
        """
        taken = -(-count[decodes:] // QUERY_UNIT) * QUERY_UNIT
        ends = np.cumsum(taken)
        first_row = (ends - taken).astype(np.int32)
        if len(taken) and first_row[-1] + count[-1] > rows:
            raise ValueError(
                f"Queries.packed: {rows} rows for prefills of {count[decodes:].tolist()} queries; accepted: at least "
                f"{first_row[-1] + count[-1]}, because each begins at a multiple of {QUERY_UNIT}"
            )
        decode_rows = decodes * decode_queries
        request, position, present = (np.zeros(decode_rows + rows, np.int32) for _ in range(3))
        firsts = np.concatenate([np.arange(0, decode_rows, decode_queries), decode_rows + first_row])
        # Vectorized, because a loop would take 2 ms of a step with a thousand requests.
        index, offset = members(count)
        row = firsts[index] + offset
        request[row], position[row], present[row] = index, start[index] + offset, 1
        requests: Any = {"page_table": page_table, "start": start, "length": start + count, "count": count}
        by_row: Any = {"request": request, "position": position, "present": present}
        return Queries(
            **requests,
            first_row=first_row,  # pyright: ignore[reportArgumentType]
            rows=PackedRows(**by_row),
            decode_queries=decode_queries,
        )

    @property
    def num_decodes(self) -> int:
        """The number of decoding requests of packed queries."""
        assert self.first_row is not None
        return self.page_table.shape[0] - self.first_row.shape[0]

    def later(self, tokens: Int[Array, ""], is_active: Bool[Array, "decodes"]) -> "Queries":
        """Advances packed queries that all decode by a number of tokens; inactive ones become padding."""
        assert self.rows is not None and self.count is not None and self.decode_queries == 1

        def moved(x: Arrays) -> Array:
            return jnp.where(is_active, jnp.asarray(x) + tokens, 0)

        rows: Any = {"position": moved(self.rows.position), "present": jnp.where(is_active, self.rows.present, 0)}
        changed: Any = {"start": moved(self.start), "length": moved(self.length)}
        if self.coordinates is not None:
            changed["coordinates"] = jnp.asarray(self.coordinates) + tokens
        count: Any = jnp.where(is_active, self.count, 0)
        return dataclasses.replace(self, count=count, rows=dataclasses.replace(self.rows, **rows), **changed)

    def decoding(self) -> "Queries":
        """Returns the decoding requests of packed queries as rectangular queries."""
        return self._select(slice(self.num_decodes), None)

    def prefilling(self) -> "Queries":
        """Returns the prefilling requests of packed queries, without `rows` and coordinates."""
        return self._select(slice(self.num_decodes, None), self.first_row)

    def _select(self, requests: slice, first_row: Arrays | None) -> "Queries":
        count = None if self.count is None or first_row is None else self.count[requests]
        slots = None if self.slots is None else self.slots[requests]
        table, start, length = (x[requests] for x in (self.page_table, self.start, self.length))
        changed: Any = {"count": count, "first_row": first_row, "rows": None, "slots": slots, "coordinates": None}
        changed["decode_queries"] = 1
        return dataclasses.replace(self, page_table=table, start=start, length=length, **changed)

    def row_by_row(self) -> "Queries":
        """Returns rectangular queries in which each packed row is a request of one query, for appending."""
        assert self.rows is not None
        position, present = self.rows.position, self.rows.present
        table = self.page_table[self.rows.request]
        return dataclasses.replace(
            self,
            page_table=table,
            start=position,
            length=position + 1,
            count=present,
            first_row=None,
            rows=None,
            slots=None,
            coordinates=None if self.coordinates is None else self.coordinates[:, None],
            decode_queries=1,
        )


def members(count: Int[np.ndarray, "B"]) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """Returns the group of each member, and its number in the group, for groups with these counts, on the host."""
    group = np.repeat(np.arange(len(count), dtype=np.int32), count)
    return group, np.arange(len(group), dtype=np.int32) - np.repeat(np.cumsum(count, dtype=np.int32) - count, count)


def request_of_rows(rows: int, first_row: Array) -> tuple[Array, Array]:
    """Returns, for each packed row, the last request that begins at or before it, and the offset from its first row."""
    row = jnp.arange(rows, dtype=jnp.int32)
    request = jnp.maximum(jnp.sum(first_row[None] <= row[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    return request, row - first_row[request]


def rows_as_requests(rows: int, queries: Queries) -> Queries:
    """Returns each packed row as a request of one query; padding rows see no key."""
    assert queries.first_row is not None and queries.count is not None
    request, index = request_of_rows(rows, queries.first_row)
    is_present = (index >= 0) & (index < queries.count[request])
    table, start = queries.page_table[request], queries.start[request] + index
    return Queries(table, start, jnp.where(is_present, queries.length[request], 0))


def requests_of_tokens(queries: Queries, shape: tuple[int, ...]) -> tuple[Int[Array, "N"], Bool[Array, "N"]]:
    """Returns the request of each of the tokens `[B, T]` or packed, `[N]`, flattened, and False for padding tokens."""
    if queries.first_row is not None:
        assert queries.rows is not None
        return jnp.asarray(queries.rows.request), jnp.asarray(queries.rows.present) > 0
    batch, tokens = shape
    request = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], shape).reshape(-1)
    if queries.count is None:
        return request, jnp.ones(batch * tokens, bool)
    present = jnp.arange(tokens, dtype=jnp.int32)[None] < jnp.asarray(queries.count)[:, None]
    return request, present.reshape(-1)


def positions_of_tokens(queries: Queries, tokens: int) -> Int[Array, "*N"]:
    """Returns the absolute position of each new token: `[B, T]`, or of packed queries `[N]`."""
    if queries.rows is not None:
        return jnp.asarray(queries.rows.position, jnp.int32)
    return jnp.asarray(queries.start, jnp.int32)[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]


def places(num_pages: int, tokens: int, queries: Queries) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns page and slot of the T new tokens of each request, at positions `start[b] + t`.

    Tokens from `count[b]` on, after the request's row of the page table, or whose page is not in the pool are dropped:
    they get distinct pages that do not exist. So slots are unique, and a scatter's gradient need not find out which
    token was written last.
    """
    page_table, start, count = queries.page_table, queries.start, queries.count
    assert count is not None
    index = jnp.arange(tokens, dtype=jnp.int32)[None]
    position = start[:, None] + index
    page = jnp.take_along_axis(page_table, position // KV_BLOCK, axis=1, mode="clip")
    written = (index < count[:, None]) & (position >= 0) & (position < page_table.shape[1] * KV_BLOCK)
    written = written & (page >= 0) & (page < num_pages)
    return unique_scatter_indices(written, page, num_pages), position % KV_BLOCK


def append(kv: KVPages, k: Float[Array, "B T h K"], v: Float[Array, "B T h V"] | None, queries: Queries) -> KVPages:
    """Writes new keys and values to their `places` in the pages, quantized if the pages are.

    `v` is None if values are columns of the keys.
    """
    page, slot = places(kv.num_pages, k.shape[1], queries)
    if v is None:
        assert isinstance(kv.v, KeyColumns) and not isinstance(kv.k, QuantizedPages)
        return KVPages(kv.k.at[page, :, slot].set(k, mode="drop", unique_indices=True), kv.v)
    if kv.quantized:
        pairs = zip(kv.quantized, (k, v), strict=True)
        return KVPages(*(pages.with_tokens(x, page, slot) for pages, x in pairs))
    pairs = zip(kv.numbers, (k, v), strict=True)
    return KVPages(*(pages.at[page, :, slot].set(x, mode="drop", unique_indices=True) for pages, x in pairs))
