"""Requests whose keys and values are appended to a cache, and the three steps that `ops.qk_rope_append_kv` is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax import ops
from detjax.contract import KV_BLOCK


@dataclasses.dataclass(frozen=True, eq=False)
class Append:
    """Arguments of `ops.qk_rope_append_kv`: shuffled pages full of NaN, and some that belong to nobody."""

    arrays: dict[str, jax.Array]
    options: dict[str, Any]

    @classmethod
    def random(
        cls,
        starts: tuple[int, ...],
        counts: tuple[int, ...],
        tokens: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 32,
        columns: int = 2,
        dtype: str = "bfloat16",
        norms: bool = True,
        offset: float = 0.0,
        exact: bool = False,
    ) -> "Append":
        """Exact: whole numbers, whose squares have the same sum in every order."""
        random = np.random.default_rng([*starts, *counts, tokens, heads, kv_heads, width])
        batch = len(starts)
        shape = batch, tokens, heads + 2 * kv_heads, width
        qkv = random.integers(-7, 8, shape) if exact else random.standard_normal(shape)
        pages = batch * columns + 2
        empty = jnp.full((pages, kv_heads, KV_BLOCK, width), np.nan, dtype)
        arrays = {
            "qkv": jnp.asarray(qkv, dtype),
            "k_pages": empty,
            "v_pages": empty,
            "page_table": jnp.asarray(random.permutation(pages)[: batch * columns].reshape(batch, columns), jnp.int32),
            "q_start": jnp.asarray(starts, jnp.int32),
            "q_length": jnp.asarray(counts, jnp.int32),
        }
        options: dict[str, Any] = {"embedding": ops.RotaryEmbedding(width, 10_000.0)}
        if norms:
            options |= {"norm_eps": 1e-6, "norm_offset": offset}
            arrays |= {n: jnp.asarray(1 + random.standard_normal(width) / 4, dtype) for n in ("q_norm", "k_norm")}
        return cls(arrays, options)

    def changed(self, **arrays: jax.Array) -> "Append":
        return dataclasses.replace(self, arrays=self.arrays | arrays)

    def __call__(self, **arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        given = self.arrays | arrays
        qkv, k_pages, v_pages, page_table, start, count = (given.pop(name) for name in tuple(self.arrays)[:6])
        queries = ops.Queries(page_table, start, start + count, count)
        q, kv = ops.qk_rope_append_kv(qkv, ops.KVPages(k_pages, v_pages), queries, **given, **self.options)
        return q, kv.k, kv.v

    def in_steps(self, **arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`qk_rope`, and a scatter of the keys and one of the values, as models wrote their caches before."""
        given = self.arrays | arrays
        qkv, k_pages, v_pages, page_table, start, count = (given.pop(name) for name in tuple(given)[:6])
        tokens, kv_heads = qkv.shape[1], k_pages.shape[1]
        heads = qkv.shape[2] - 2 * kv_heads
        positions = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        q, k = ops.qk_rope(qkv, positions, heads=heads, kv_heads=kv_heads, **given, **self.options)
        new = (jnp.arange(tokens)[None] < count[:, None]) & (positions < page_table.shape[1] * KV_BLOCK)
        page = jnp.take_along_axis(page_table, positions // KV_BLOCK, axis=1, mode="clip")
        page = jnp.where(new, page, k_pages.shape[0])
        slot = positions % KV_BLOCK
        k_pages = k_pages.at[page, :, slot].set(k, mode="drop")
        return q, k_pages, v_pages.at[page, :, slot].set(qkv[:, :, heads + kv_heads :], mode="drop")

    def slots(self) -> set[tuple[int, int]]:
        """Page and slot of every token that is written, one at a time."""
        table, starts, counts = (np.asarray(self.arrays[name]) for name in ("page_table", "q_start", "q_length"))
        positions = [
            (request, position)
            for request, (start, count) in enumerate(zip(starts, counts, strict=True))
            for position in range(start, min(start + count, table.shape[1] * KV_BLOCK))
        ]
        return {(int(table[request, p // KV_BLOCK]), p % KV_BLOCK) for request, p in positions}

    def written(self, pages: jax.Array) -> set[tuple[int, int]]:
        """Page and slot of all numbers in a pool; no row of one head is there in part."""
        there = ~np.isnan(np.asarray(pages, np.float32))
        assert (there == there[:, :1, :, :1]).all()
        return {(int(page), int(slot)) for page, slot in np.argwhere(there[:, 0, :, 0])}


CASES = {
    "decode": Append.random((0, 5, 127, 128, 200), (1, 1, 1, 1, 1), 1),
    "decode, some ended": Append.random((17, 3, 140), (1, 0, 1), 1),
    "a chunk": Append.random((0, 30, 100), (40, 40, 40), 40),
    "ragged": Append.random((0, 120, 251, 128), (0, 20, 3, 11), 20),
    "at capacity": Append.random((255, 256, 254, 120), (1, 4, 4, 4), 4),
    "beyond the capacity": Append.random((256, 300), (1, 1), 1),
    "one page": Append.random((126, 0), (3, 3), 3, columns=1),
    "no norms": Append.random((120, 7), (20, 9), 20, norms=False),
    "norms with an offset": Append.random((120, 7), (20, 9), 20, offset=1.0),
    "one key head": Append.random((120, 7), (9, 2), 9, heads=5, kv_heads=1, width=64),
    "odd heads": Append.random((127, 7), (2, 1), 2, heads=6, kv_heads=3, width=96),
    "many heads": Append.random((127, 7), (2, 1), 2, heads=20, kv_heads=20, width=128),
    "a narrow odd half": Append.random((127, 7), (2, 1), 2, width=20),
    "float32": Append.random((127, 7), (2, 1), 2, dtype="float32"),
    "float16": Append.random((127, 7), (2, 1), 2, dtype="float16"),
}
