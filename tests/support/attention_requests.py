"""Requests whose attention the tests compare, and what they have in common."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.options import Masking
from detjax.pallas.hopper import attention
from detjax.pallas.hopper.attention import decode as hopper_decode
from detjax.pallas.hopper.attention.decode import Schedule

INTERPRETER = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")
WIDTHS = (64, 80, 96, 112, 128, 192, 256)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 100},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "everything": {"window": 150, "soft_cap": 5.0, "sinks": True, "alibi": True},
}


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """Requests of several lengths, with keys and values in shuffled pages; unused slots are NaN.

    With causal masking, the second half of the keys repeats the first half in another order, with negated values: the
    sum of a late query cancels except for roundings, so 16 bits show whether two kernels add in the same order.

    Queries are `[B, T, H, K]`, a token for each key, and garbage after a request's last; keys and values
    `[B, T, h, K]`.
    """

    kernels: ClassVar[Any] = attention
    """The backend's module whose `forward` and `ragged` are called."""

    lengths: tuple[int, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_pages: jax.Array | ops.QuantizedPages
    v_pages: jax.Array | ops.QuantizedPages | ops.KeyColumns
    page_table: jax.Array
    masking: Masking
    sinks: jax.Array | None

    @classmethod
    def random(
        cls,
        lengths: tuple[int, ...],
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 64,
        *,
        dtype: str = "float16",
        sinks: bool = False,
        alibi: bool = False,
        **options: Any,
    ) -> "Requests":
        random = np.random.default_rng([heads, width, *lengths])
        shape = len(lengths), max(lengths)
        q, k, v = (
            random.standard_normal((*shape, count, width), np.float32).astype(dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        for request, length in enumerate(lengths):
            half = length // 2 if options.get("causal", True) else 0
            first = random.permutation(half)
            for x, sign in ((k[request], 1), (v[request], -1)):
                x[length - half : length] = sign * x[first]
            if half and length % 2:
                v[request, half] = 0  # nothing balances the one in the middle
        is_key = np.arange(max(lengths)) < np.array(lengths)[:, None]
        k, v = (np.where(is_key[..., None, None], x, np.array(np.nan, x.dtype)) for x in (k, v))
        columns = -(-max(lengths) // KV_BLOCK) + 1
        order = random.permutation(len(lengths) * columns).astype(np.int32)

        def in_pages(x: np.ndarray) -> jax.Array:
            padding = [(0, 0), (0, columns * KV_BLOCK - x.shape[1]), (0, 0), (0, 0)]
            pages = np.pad(x, padding, constant_values=np.nan).reshape(-1, KV_BLOCK, kv_heads, width).swapaxes(1, 2)
            return jnp.asarray(pages[np.argsort(order)])

        slopes = tuple(2.0 ** -(1 + head) for head in range(heads)) if alibi else None
        masking = Masking(width**-0.5, alibi_slopes=slopes, **options)
        given = jnp.asarray(random.standard_normal(heads), dtype) if sinks else None
        page_table = jnp.asarray(order.reshape(len(lengths), columns))
        return cls(lengths, q, k, v, in_pages(k), in_pages(v), page_table, masking, given)

    def quantized(self, kind: str) -> tuple["Requests", "Requests"]:
        """The requests with quantized pages, and with pages of the numbers that these are read as.

        What is nobody's has scales of NaN, and codes that are NaN where a code can be.
        """
        pages = []
        for numbers in (self.k_pages, self.v_pages):
            made = ops.quantize_kv(numbers, kind)  # pyright: ignore[reportArgumentType]
            codes, is_foreign = np.array(made.codes), np.isnan(np.asarray(numbers, np.float32)).all(axis=-1)
            codes.view(np.uint8)[is_foreign] = 0x7F
            pages.append(ops.QuantizedPages(jnp.asarray(codes), made.scales, made.kind))
        k, v = (ops.dequantize_kv(x, self.q.dtype) for x in pages)
        with_pages = functools.partial(dataclasses.replace, self)
        return with_pages(k_pages=pages[0], v_pages=pages[1]), with_pages(k_pages=k, v_pages=v)

    def with_latents(self, width: int) -> "Requests":
        """Returns the requests with the keys' first `width` columns as values."""
        return dataclasses.replace(self, v=self.k[..., :width], v_pages=ops.KeyColumns(width))

    def last(self, tokens: int) -> np.ndarray:
        """The position of the first of each request's last tokens."""
        return np.maximum(np.array(self.lengths) - tokens, 0)

    @property
    def kv(self) -> KVPages:
        """The pages of all requests."""
        return KVPages(self.k_pages, self.v_pages)

    def queries(self, start: np.ndarray, tokens: int) -> Queries:
        """Returns the queries of tokens from `start` on. Later keys are not in the cache yet if no query sees them."""
        length = np.minimum(self.lengths, start + tokens) if self.masking.causal else np.array(self.lengths)
        return Queries(self.page_table, *(jnp.asarray(x, jnp.int32) for x in (start, length)))

    def operands(self, start: np.ndarray, tokens: int) -> AttentionOperands:
        """Returns the arguments of a kernel's `forward` for a number of tokens of each request from `start` on."""
        padded = np.pad(self.q, [(0, 0), (0, tokens), (0, 0), (0, 0)])
        q = np.stack([x[first : first + tokens] for x, first in zip(padded, start, strict=True)])
        return AttentionOperands(jnp.asarray(q), self.kv, self.queries(start, tokens), self.sinks)

    def rows_of_requests(self, o: Any, start: np.ndarray) -> list[np.ndarray]:
        """Each request's own tokens of a result."""
        return [np.asarray(x)[: max(n - first, 0)] for x, first, n in zip(o, start, self.lengths, strict=True)]

    def prefill(self, start: np.ndarray, tokens: int) -> list[np.ndarray]:
        forward = functools.partial(self.kernels.forward, masking=self.masking)
        return self.rows_of_requests(detjax.jit(forward)(self.operands(start, tokens))[0], start)

    def decode(self, start: np.ndarray, tokens: int, schedule: Schedule | None = None) -> list[np.ndarray]:
        forward = functools.partial(hopper_decode.forward, masking=self.masking, schedule=schedule)
        return self.rows_of_requests(detjax.jit(forward)(self.operands(start, tokens)), start)

    def whole(self) -> list[np.ndarray]:
        return self.prefill(np.zeros(len(self.lengths), int), max(self.lengths))

    def in_chunks(self, size: int, with_normalizers: bool) -> list[np.ndarray]:
        """Computes all queries in chunks: without normalizers, small chunks are served by decode."""
        options = {"masking": self.masking, "with_normalizers": with_normalizers}
        forward = detjax.jit(functools.partial(self.kernels.forward, **options))
        starts = [np.full(len(self.lengths), start) for start in range(0, max(self.lengths), size)]
        chunks = [self.rows_of_requests(forward(self.operands(start, size))[0], start) for start in starts]
        return [np.concatenate(rows) for rows in zip(*chunks, strict=True)]

    def ragged(self, counts: tuple[int, ...], gap: float = 0.0) -> list[np.ndarray]:
        """The last tokens of each request, as many as the counts say, packed into one array; `gap` between requests."""
        start = np.array(self.lengths) - counts
        rows = np.cumsum([0, *(-(-count // 8) * 8 for count in counts)])
        packed = np.full((rows[-1], *self.q.shape[2:]), gap, self.q.dtype)
        for q, first, count, row in zip(self.q, start, counts, rows[:-1], strict=True):
            packed[row : row + count] = q[first : first + count]
        numbers = (jnp.asarray(x, jnp.int32) for x in (start, self.lengths, counts, rows[:-1]))
        forward = detjax.jit(functools.partial(self.kernels.ragged, masking=self.masking))
        queries = Queries(self.page_table, *numbers)
        o = forward(AttentionOperands(jnp.asarray(packed), self.kv, queries, self.sinks))
        return [np.asarray(o)[row : row + count] for row, count in zip(rows[:-1], counts, strict=True)]

    def with_mask(self, mask: np.ndarray) -> list[np.ndarray]:
        """Every query, in a call with a mask `[B or 1, H or 1, T, T]` in place of the causal one."""
        start = np.zeros(len(self.lengths), int)
        masking = dataclasses.replace(self.masking, causal=False)
        forward = detjax.jit(functools.partial(self.kernels.forward, masking=masking))
        operands = self.operands(start, self.q.shape[1])._replace(mask=jnp.asarray(mask))
        return self.rows_of_requests(forward(operands)[0], start)

    def gradients(
        self, backend: str, subset: slice = slice(None), mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Gradients of queries, of each request's pages and of the sinks, from random gradients of the output."""
        lengths = np.array(self.lengths)[subset]
        q, kv, queries, sinks, _ = self.operands(np.zeros(len(self.lengths), int), self.q.shape[1])
        q, queries = q[subset], jax.tree.map(lambda x: x[subset], queries)
        do = np.random.default_rng(9).standard_normal(self.q.shape)[subset]
        do = jnp.asarray(np.where((np.arange(q.shape[1]) < lengths[:, None])[..., None, None], do, 0), jnp.float32)
        options = {"scale": self.masking.scale, "causal": self.masking.causal, "window": self.masking.window}
        options |= {"soft_cap": self.masking.soft_cap, "alibi_slopes": self.masking.alibi_slopes}
        options["mask"] = None if mask is None else jnp.asarray(mask)

        def loss(operands: dict[str, jax.Array]) -> jax.Array:
            pages = KVPages(operands["k"], operands["v"])
            o = ops.attention(operands["q"], pages, queries, sinks=operands.get("sinks"), **options)
            return (o.astype(jnp.float32) * do).sum()

        operands = {"q": q, "k": kv.k, "v": kv.v} | ({} if sinks is None else {"sinks": sinks})
        with detjax.use_backend(backend):
            gradients = detjax.jit(jax.grad(loss))(operands)
        pages = {name: gradients[name][queries.page_table] for name in "kv"}
        return {name: np.asarray(x) for name, x in (gradients | pages).items()}

    def exact(self) -> list[np.ndarray]:
        return [self._exact(request) for request in range(len(self.lengths))]

    def _exact(self, request: int) -> np.ndarray:
        """In float64, by the textbook."""
        masking, length = self.masking, self.lengths[request]
        q, k, v = (np.asarray(x[request, :length], np.float64) for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        s = np.einsum("thk,shk->hts", q, np.repeat(k, group, axis=1)) * masking.scale
        if masking.soft_cap is not None:
            s = masking.soft_cap * np.tanh(s / masking.soft_cap)
        distance = np.arange(length) - np.arange(length)[:, None]
        if masking.alibi_slopes is not None:
            s = s + np.array(masking.alibi_slopes)[:, None, None] * distance
        unseen = (distance > 0) & masking.causal
        if masking.window is not None:
            unseen |= distance <= -masking.window
        p = np.exp(np.where(unseen, -np.inf, s))
        total = p.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total += np.exp(np.asarray(self.sinks, np.float64))[:, None, None]
        return np.einsum("hts,shk->thk", p / total, np.repeat(v, group, axis=1))


def assert_close(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for o, e in zip(actual, expected, strict=True):
        error = np.linalg.norm(o.astype(np.float64) - e) / np.linalg.norm(e)
        assert error < 5e-3


def assert_gradients_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, x in expected.items():
        error = np.linalg.norm(np.asarray(actual[name], np.float64) - x) / np.linalg.norm(x.astype(np.float64))
        assert error < 1e-2, name


def last_of(rows: list[np.ndarray], start: np.ndarray) -> list[np.ndarray]:
    return [x[first:] for x, first in zip(rows, start, strict=True)]


in_the_interpreter = pytest.mark.usefixtures("matrix_unit", "attention_in_the_interpreter", "small_chip")


def causal_mask(requests: Requests) -> np.ndarray:
    return np.tri(requests.q.shape[1], dtype=bool)[None, None]


def mask_of_heads(requests: Requests) -> np.ndarray:
    """A mask of each head, in which a third is hidden, and all from one query."""
    tokens, heads = requests.q.shape[1:3]
    mask = np.random.default_rng(3).random((1, heads, tokens, tokens)) > 0.3
    mask[..., tokens // 2, :] = False
    return mask
