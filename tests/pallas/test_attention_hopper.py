"""Attention's Hopper kernels: in Pallas' interpreter, lowered, and on a GPU where there is one."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
import test_ptxas
from bits import assert_same_bits, same_bits
from test_ptxas import ROOT, VARIABLE, Program, attention

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK, Masking
from detjax.ops.quantized_kv import KINDS
from detjax.pallas import (
    attention_decode_hopper,
    attention_hopper,
    attention_merge_hopper,
    attention_prefill_hopper,
    warps_hopper,
)
from detjax.pallas.attention_decode_hopper import Schedule

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
    """Requests of several lengths, their keys and values in shuffled pages; whatever is nobody's is NaN.

    If each query sees what was before it, the second half of the keys are those of the first in another order, with
    values of the other sign: what a late query sees cancels but for roundings, so that 16 bits show whether two kernels
    add in the same order.

    Queries are `[B, T, H, K]`, a token for each key, and garbage behind a request's last; keys and values
    `[B, T, h, K]`.
    """

    lengths: tuple[int, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_pages: jax.Array | ops.QuantizedPages
    v_pages: jax.Array | ops.QuantizedPages
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
        own = np.arange(max(lengths)) < np.array(lengths)[:, None]
        k, v = (np.where(own[..., None, None], x, np.array(np.nan, x.dtype)) for x in (k, v))
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

    def last(self, tokens: int) -> np.ndarray:
        """The position of the first of each request's last tokens."""
        return np.maximum(np.array(self.lengths) - tokens, 0)

    def operands(self, start: np.ndarray, tokens: int) -> list[Any]:
        """What a kernel's `forward` takes, for so many tokens of each request from position `start` on.

        Keys behind them are not there yet where none is seen.
        """
        padded = np.pad(self.q, [(0, 0), (0, tokens), (0, 0), (0, 0)])
        q = np.stack([x[first : first + tokens] for x, first in zip(padded, start, strict=True)])
        kv_length = np.minimum(self.lengths, start + tokens) if self.masking.causal else np.array(self.lengths)
        where = start.astype(np.int32), kv_length.astype(np.int32)
        return [jnp.asarray(q), self.k_pages, self.v_pages, self.page_table, *map(jnp.asarray, where), self.sinks]

    def own(self, o: Any, start: np.ndarray) -> list[np.ndarray]:
        """Of a result, each request's own tokens."""
        return [np.asarray(x)[: max(n - first, 0)] for x, first, n in zip(o, start, self.lengths, strict=True)]

    def prefill(self, start: np.ndarray, tokens: int) -> list[np.ndarray]:
        forward = functools.partial(attention_hopper.forward, masking=self.masking)
        return self.own(detjax.jit(forward)(*self.operands(start, tokens))[0], start)

    def decode(self, start: np.ndarray, tokens: int, schedule: Schedule | None = None) -> list[np.ndarray]:
        forward = functools.partial(attention_decode_hopper.forward, masking=self.masking, schedule=schedule)
        return self.own(detjax.jit(forward)(*self.operands(start, tokens)), start)

    def whole(self) -> list[np.ndarray]:
        return self.prefill(np.zeros(len(self.lengths), int), max(self.lengths))

    def in_chunks(self, size: int, with_normalizers: bool) -> list[np.ndarray]:
        """Every query, so many tokens at a time: without the normalizers few tokens are served by decode."""
        options = {"masking": self.masking, "with_normalizers": with_normalizers}
        forward = detjax.jit(functools.partial(attention_hopper.forward, **options))
        starts = [np.full(len(self.lengths), start) for start in range(0, max(self.lengths), size)]
        chunks = [self.own(forward(*self.operands(start, size))[0], start) for start in starts]
        return [np.concatenate(rows) for rows in zip(*chunks, strict=True)]

    def ragged(self, counts: tuple[int, ...]) -> list[np.ndarray]:
        """The last tokens of each request, as many as the counts say, packed into one array."""
        start = np.array(self.lengths) - counts
        rows = np.cumsum([0, *(-(-count // 8) * 8 for count in counts)])
        packed = np.zeros((rows[-1], *self.q.shape[2:]), self.q.dtype)
        for q, first, count, row in zip(self.q, start, counts, rows[:-1], strict=True):
            packed[row : row + count] = q[first : first + count]
        numbers = (jnp.asarray(x, jnp.int32) for x in (rows[:-1], counts, start, self.lengths))
        forward = detjax.jit(functools.partial(attention_hopper.ragged, masking=self.masking))
        o = forward(jnp.asarray(packed), self.k_pages, self.v_pages, self.page_table, *numbers, self.sinks)
        return [np.asarray(o)[row : row + count] for row, count in zip(rows[:-1], counts, strict=True)]

    def with_mask(self, mask: np.ndarray) -> list[np.ndarray]:
        """Every query, in a call with a mask `[B or 1, H or 1, T, T]` in place of the causal one."""
        start = np.zeros(len(self.lengths), int)
        masking = dataclasses.replace(self.masking, causal=False)
        forward = detjax.jit(functools.partial(attention_hopper.forward, masking=masking))
        return self.own(forward(*self.operands(start, self.q.shape[1]), jnp.asarray(mask))[0], start)

    def gradients(
        self, backend: str, which: slice = slice(None), mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Of queries, of each request's pages and of the sinks, from random gradients of the output."""
        lengths = np.array(self.lengths)[which]
        q, k_pages, v_pages, page_table, q_start, kv_length, sinks = self.operands(
            np.zeros(len(self.lengths), int), self.q.shape[1]
        )
        q, page_table, q_start, kv_length = (x[which] for x in (q, page_table, q_start, kv_length))
        do = np.random.default_rng(9).standard_normal(self.q.shape)[which]
        do = jnp.asarray(np.where((np.arange(q.shape[1]) < lengths[:, None])[..., None, None], do, 0), jnp.float32)
        options = {"scale": self.masking.scale, "causal": self.masking.causal, "window": self.masking.window}
        options |= {"soft_cap": self.masking.soft_cap, "alibi_slopes": self.masking.alibi_slopes}

        def loss(of: dict[str, jax.Array]) -> jax.Array:
            where = page_table, q_start, kv_length
            given = None if mask is None else jnp.asarray(mask)
            o = ops.attention(of["q"], of["k"], of["v"], *where, sinks=of.get("sinks"), mask=given, **options)
            return (o.astype(jnp.float32) * do).sum()

        of = {"q": q, "k": k_pages, "v": v_pages} | ({} if sinks is None else {"sinks": sinks})
        with detjax.use_backend(backend):
            found = detjax.jit(jax.grad(loss))(of)
        pages = {name: found[name][page_table] for name in "kv"}
        return {name: np.asarray(x) for name, x in (found | pages).items()}

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


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for o, e in zip(found, expected, strict=True):
        error = np.linalg.norm(o.astype(np.float64) - e) / np.linalg.norm(e)
        assert error < 5e-3


def last_of(rows: list[np.ndarray], start: np.ndarray) -> list[np.ndarray]:
    return [x[first:] for x, first in zip(rows, start, strict=True)]


@pytest.fixture
def small_chip(two_multiprocessors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill's tiles are many to a CTA, and decode's partial results many loads to a merge."""
    monkeypatch.setattr(attention_merge_hopper, "_AT_ONCE", 2)


in_the_interpreter = pytest.mark.usefixtures("matrix_unit", "attention_in_the_interpreter", "small_chip")


@in_the_interpreter
@pytest.mark.parametrize("name", ["causal", "not causal", "window", "alibi", "everything"])
def test_decode_has_the_bits_of_prefill(name: str) -> None:
    requests = Requests.random((129, 1, 300, 128), 2, 1, **OPTIONS[name])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.whole()
        assert_close(expected, requests.exact())
        for tokens, schedule in ((1, Schedule(3, cut=False)), (3, Schedule(3))):
            start = requests.last(tokens)
            assert_same_bits(requests.decode(start, tokens, schedule), last_of(expected, start))


@in_the_interpreter
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        ("int8", "everything", "float16"),
        ("fp8_e4m3", "window", "bfloat16"),
        ("q4_0", "not causal", "bfloat16"),
    ],
)
def test_quantized_pages_decode_to_the_bits_of_what_they_are_read_as(kind: str, name: str, dtype: str) -> None:
    requests, dense = Requests.random((129, 1, 300, 128), 2, 1, 64, dtype=dtype, **OPTIONS[name]).quantized(kind)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        for tokens, schedule in ((1, Schedule(3, cut=False)), (3, Schedule(3))):
            start = requests.last(tokens)
            found = requests.decode(start, tokens, schedule)
            assert not any(np.isnan(x.astype(np.float32)).any() for x in found)
            assert_same_bits(found, dense.decode(start, tokens, schedule))


@in_the_interpreter
@pytest.mark.parametrize(("kind", "name"), [("fp8_e4m3", "everything"), ("q4_0", "not causal")])
def test_quantized_pages_prefill_to_the_bits_of_what_they_are_read_as(kind: str, name: str) -> None:
    requests, dense = Requests.random((300, 17), 2, 1, 32, dtype="bfloat16", **OPTIONS[name]).quantized(kind)
    # Of many pages only those of two requests become numbers.
    pools = (jax.tree.map(lambda x: jnp.concatenate([x] * 2), x) for x in (requests.k_pages, requests.v_pages))
    k_pages, v_pages = pools
    larger = dataclasses.replace(requests, k_pages=k_pages, v_pages=v_pages)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = dense.whole()
        assert not any(np.isnan(x.astype(np.float32)).any() for x in expected)
        assert_same_bits(requests.whole(), expected)
        start = np.array([260, 0])  # of which the window leaves out the first page
        assert_same_bits(larger.prefill(start, 40), dense.prefill(start, 40))
        assert_same_bits(larger.ragged((150, 3)), dense.ragged((150, 3)))


@in_the_interpreter
def test_another_rounding_of_the_factors_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def rescaling(m: jax.Array, m_b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        m_new = jnp.maximum(m, m_b) + 0.3
        return m_new, jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)

    requests = Requests.random((300,), 2, 1)
    start = requests.last(1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.prefill(start, 1)
        assert_same_bits(requests.decode(start, 1, Schedule(1, cut=False)), expected)
        monkeypatch.setattr(attention_decode_hopper, "rescaling", rescaling)
        assert not same_bits(requests.decode(start, 1, Schedule(1, cut=False)), expected)


@in_the_interpreter
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 80), (7, 1, 96)])
def test_heads_of_any_number_and_width_decode_to_the_bits_of_prefill(heads: int, kv_heads: int, width: int) -> None:
    requests = Requests.random((300, 5), heads, kv_heads, width)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.whole()
        assert_close(expected, requests.exact())
        # Eleven tokens of seven heads are two tiles.
        for tokens, schedule in ((1, Schedule(2)), (11, Schedule(4))):
            start = requests.last(tokens)
            assert_same_bits(requests.decode(start, tokens, schedule), last_of(expected, start))


@in_the_interpreter
@pytest.mark.parametrize(
    ("width", "persistent", "product_turns"), [(192, True, True), (256, True, False), (256, False, True)]
)
def test_no_schedule_of_wide_rows_changes_a_bit(
    width: int, persistent: bool, product_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = attention_prefill_hopper.Problem.schedule

    def schedule(problem: attention_prefill_hopper.Problem) -> attention_prefill_hopper.Schedule:
        return dataclasses.replace(own(problem), persistent=persistent, product_turns=product_turns)

    requests = Requests.random((300, 5), 2, 1, width)
    monkeypatch.setattr(attention_prefill_hopper.Problem, "schedule", schedule)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.whole()
        assert_close(expected, requests.exact())
        start = requests.last(3)
        assert_same_bits(requests.decode(start, 3, Schedule(3)), last_of(expected, start))


@in_the_interpreter
@pytest.mark.parametrize(("width", "options"), [(192, {}), (256, OPTIONS["everything"])])
def test_wide_rows_in_ragged_queries_have_the_bits_of_a_whole_prefill(width: int, options: dict[str, Any]) -> None:
    requests, counts = Requests.random((300, 140, 1), 2, 1, width, **options), (150, 3, 1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected, found = requests.whole(), requests.ragged(counts)
        assert_close(expected, requests.exact())
    assert_same_bits(found, [x[len(x) - count :] for x, count in zip(expected, counts, strict=True)])


@in_the_interpreter
@pytest.mark.parametrize(("width", "value_width"), [(192, 64), (192, 128), (256, 128), (256, 192)])
def test_a_column_of_the_result_does_not_depend_on_how_many_there_are(width: int, value_width: int) -> None:
    requests = Requests.random((200,), 2, 1, width)
    narrow = dataclasses.replace(requests, v_pages=requests.v_pages[..., :value_width])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected, found = requests.whole(), narrow.whole()
    assert_same_bits(found, [x[..., :value_width] for x in expected])


def test_rows_of_wide_keys_and_odd_values_are_refused() -> None:
    q, v = jnp.ones((1, 3, 2, 256), "bfloat16"), jnp.ones((1, 3, 2, 80), "bfloat16")
    words = "q has 256 columns and v_pages has 80 columns on .*; accepted .*: multiples of 64 where either is above 128"
    with detjax.use_backend("hopper"), pytest.raises(NotImplementedError, match=words):
        ops.dot_product_attention(q, q, v)


@in_the_interpreter
def test_where_the_line_of_blocks_is_cut_changes_no_bit() -> None:
    requests = Requests.random((1000, 17), 2, 1, sinks=True)
    start = requests.last(1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.prefill(start, 1)
        for schedule in (Schedule(2), Schedule(3, slack=0.0), Schedule(7, slack=0.4), Schedule(7, cut=False)):
            assert_same_bits(requests.decode(start, 1, schedule), expected)


@pytest.mark.parametrize("tokens", [1, 1024], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("width", "options"),
    [(width, {}) for width in WIDTHS] + [(128, options) for name, options in OPTIONS.items() if name != "causal"],
    ids=[*map(str, WIDTHS), *list(OPTIONS)[1:]],
)
def test_attention_lowers(tokens: int, width: int, options: dict[str, Any]) -> None:
    fn, operands = attention(tokens, width, **options)
    jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("tokens", [1, 1024], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("kind", "width"),
    [(kind, width) for kind in ("int8", "fp8_e4m3") for width in (16, 80, 256)]
    + [("q4_0", width) for width in (32, 128)],
)
def test_attention_over_quantized_pages_lowers(tokens: int, kind: str, width: int) -> None:
    fn, operands = attention(tokens, width, kind=kind)
    jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",))


@in_the_interpreter
def test_ragged_queries_have_the_bits_of_a_whole_prefill() -> None:
    requests, counts = Requests.random((300, 140, 1, 20), 2, 1, sinks=True), (150, 3, 1, 0)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected, found = requests.whole(), requests.ragged(counts)
    assert_same_bits(found, [x[len(x) - count :] for x, count in zip(expected, counts, strict=True)])


@in_the_interpreter
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_gradients_are_those_of_the_portable_backend(name: str) -> None:
    requests = Requests.random((150, 40), 2, 1, dtype="bfloat16", **OPTIONS[name])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        found, alone = requests.gradients("hopper"), requests.gradients("hopper", slice(1, 2))
    assert_gradients_close(found, requests.gradients("portable"))
    for of in ("q", "k", "v"):
        assert_same_bits(alone[of], found[of][1:2])


@pytest.mark.parametrize(
    ("dtype", "width", "words"),
    [
        (
            "float32",
            64,
            r"attention: q has dtype float32 on .*; accepted by the backend 'hopper': bfloat16, float16. Cast",
        ),
        (
            "bfloat16",
            72,
            r"attention: q has 72 columns and v_pages has 72 columns on .*; accepted .*: 16, 32, .* 256. Pad",
        ),
        ("bfloat16", 160, r"'portable', which takes them"),
    ],
)
def test_what_no_kernel_serves_is_refused(dtype: str, width: int, words: str) -> None:
    x = jnp.ones((1, 3, 2, width), dtype)
    with detjax.use_backend("hopper"), pytest.raises(NotImplementedError, match=words):
        ops.dot_product_attention(x, x, x)


def causal_mask(requests: Requests) -> np.ndarray:
    return np.tri(requests.q.shape[1], dtype=bool)[None, None]


def mask_of_heads(requests: Requests) -> np.ndarray:
    """A mask of each head, in which a third is hidden, and all from one query."""
    tokens, heads = requests.q.shape[1:3]
    mask = np.random.default_rng(3).random((1, heads, tokens, tokens)) > 0.3
    mask[..., tokens // 2, :] = False
    return mask


@in_the_interpreter
@pytest.mark.parametrize("width", [64, 256])
def test_a_causal_mask_has_the_bits_of_causal_attention(width: int) -> None:
    requests = Requests.random((150, 40), 2, 1, width, sinks=True)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.whole()
        assert_same_bits(requests.with_mask(causal_mask(requests)), expected)
        assert not same_bits(requests.with_mask(mask_of_heads(requests)), expected)


@in_the_interpreter
def test_gradients_with_a_mask_are_those_of_the_portable_backend() -> None:
    requests = Requests.random((150, 40), 2, 1, dtype="bfloat16")
    mask = mask_of_heads(requests)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        found = requests.gradients("hopper", mask=mask)
    assert_gradients_close(found, requests.gradients("portable", mask=mask))


def assert_gradients_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for of, x in expected.items():
        error = np.linalg.norm(np.asarray(found[of], np.float64) - x) / np.linalg.norm(x.astype(np.float64))
        assert error < 1e-2, of


@pytest.mark.parametrize("count", [1, 5, 32, 33, 300])
def test_32_lanes_find_places_among_neighbours(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A warp's lanes are an array's elements here.
    lanes = {"lane": lambda: jnp.arange(32), "warp_sum": jnp.sum, "warp_sums_up_to": jnp.cumsum}
    for name, replacement in lanes.items():
        monkeypatch.setattr(warps_hopper, name, replacement)
    lengths = np.random.default_rng(count).integers(1, 9, count).astype(np.int32)
    owners = np.repeat(np.arange(count), lengths)
    offsets = np.concatenate([np.arange(length) for length in lengths])
    positions = np.unique(np.linspace(0, len(owners), 7).astype(np.int32))
    total, found = warps_hopper.find_places(
        lambda index: jnp.asarray(lengths)[index], count, lambda _: [jnp.asarray(x) for x in positions]
    )
    assert total == len(owners)
    expected = [(owners[x], offsets[x]) if x < len(owners) else (0, 0) for x in positions]
    assert [tuple(map(int, place)) for place in found] == [tuple(map(int, place)) for place in expected]


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", attention_hopper.DTYPES)
@pytest.mark.parametrize(
    ("width", "options"),
    [(width, {}) for width in WIDTHS] + [(128, options) for options in OPTIONS.values()],
    ids=[*map(str, WIDTHS), *OPTIONS],
)
def test_prefill_decode_and_chunks_have_the_same_bits_on_the_device(
    width: int, options: dict[str, Any], dtype: str
) -> None:
    requests = Requests.random((300, 129, 1, 128), 8, 2, width, dtype=dtype, **options)
    expected = requests.whole()
    assert_close(expected, requests.exact())
    for size in (1, 7, 100):
        for with_normalizers in (False, True):
            assert_same_bits(requests.in_chunks(size, with_normalizers), expected)


@pytest.mark.hopper
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1), (14, 2), (6, 2), (16, 1), (64, 1)])
@pytest.mark.parametrize("width", [80, 128])
def test_groups_of_any_number_have_the_same_bits_on_the_device(heads: int, kv_heads: int, width: int) -> None:
    requests = Requests.random((300, 129, 1, 128), heads, kv_heads, width)
    expected = requests.whole()
    assert_close(expected, requests.exact())
    for size in (1, 16):
        assert_same_bits(requests.in_chunks(size, with_normalizers=False), expected)


@pytest.mark.hopper
def test_ragged_queries_have_the_bits_of_a_whole_prefill_on_the_device() -> None:
    requests, counts = Requests.random((3000, 129, 1, 700), 8, 2, 128), (2000, 7, 1, 0)
    expected = requests.whole()
    assert_same_bits(requests.ragged(counts), [x[len(x) - n :] for x, n in zip(expected, counts, strict=True)])


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("width", "options"),
    [(width, {}) for width in WIDTHS] + [(128, options) for options in OPTIONS.values()],
    ids=[*map(str, WIDTHS), *OPTIONS],
)
def test_gradients_on_the_device(width: int, options: dict[str, Any]) -> None:
    requests = Requests.random((300, 129, 1, 128), 8, 2, width, dtype="bfloat16", **options)
    found = requests.gradients("hopper")
    assert_gradients_close(found, requests.gradients("portable"))
    for _ in range(10):
        assert_same_bits(requests.gradients("hopper"), found)
    alone = requests.gradients("hopper", slice(1, 2))
    for of in ("q", "k", "v"):
        assert_same_bits(alone[of], found[of][1:2])


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", attention_hopper.DTYPES)
@pytest.mark.parametrize(
    ("kind", "width", "options"),
    [(kind, width, {}) for kind in KINDS for width in (64, 96, 192, 256)]
    + [(kind, 80, {}) for kind in ("int8", "fp8_e4m3")]
    + [(kind, 128, OPTIONS[name]) for kind in KINDS for name in ("causal", "not causal", "everything")],
)
def test_quantized_pages_give_the_bits_of_what_they_are_read_as_on_the_device(
    kind: str, width: int, options: dict[str, Any], dtype: str
) -> None:
    lengths = (3000, 300, 129, 1, 128)
    requests, dense = Requests.random(lengths, 8, 2, width, dtype=dtype, **options).quantized(kind)
    expected = dense.whole()
    assert not any(np.isnan(x.astype(np.float32)).any() for x in expected)
    assert_same_bits(requests.whole(), expected)
    for tokens in (1, 5, 100):
        start = requests.last(tokens)
        assert_same_bits(requests.prefill(start, tokens), last_of(expected, start))
        if tokens <= 16:
            for schedule in (None, Schedule(7), Schedule(132, cut=False)):
                assert_same_bits(requests.decode(start, tokens, schedule), last_of(expected, start))
    assert_same_bits(requests.ragged((40, 7, 1, 0, 128)), dense.ragged((40, 7, 1, 0, 128)))


@pytest.mark.hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", *attention_hopper.DTYPES])
def test_codes_and_scales_on_the_device_are_the_contracts(kind: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((40, 8, KV_BLOCK, 128), np.float32) * np.exp2(
        random.integers(-12, 12, (40, 8, KV_BLOCK, 1))
    )
    x = jnp.asarray(x, dtype)
    whole = ops.quantize_kv(x, kind)  # pyright: ignore
    for page in (0, 39):
        alone = ops.quantize_kv(x[page : page + 1], kind)  # pyright: ignore
        assert_same_bits(jax.tree.map(lambda leaf, page=page: leaf[page : page + 1], whole), alone)
    error = np.abs(np.asarray(ops.dequantize_kv(whole, "float32") - x.astype(jnp.float32))).max(axis=-1)
    largest = np.abs(np.asarray(x, np.float32)).max(axis=-1)
    assert np.all(error <= 1.01 * {"int8": 1 / 254, "fp8_e4m3": 1 / 28, "q4_0": 1 / 8}[kind] * largest)


@pytest.mark.hopper
def test_where_the_line_of_blocks_is_cut_changes_no_bit_on_the_device() -> None:
    requests = Requests.random((40000, 17, 1, 4096), 8, 2, 128, sinks=True)
    for tokens in (1, 5):
        start = requests.last(tokens)
        expected = requests.prefill(start, tokens)
        schedules = Schedule(2), Schedule(7, slack=0.4), Schedule(131, slack=0.0), Schedule(1000)
        for schedule in (None, *schedules, Schedule(132, cut=False)):
            assert_same_bits(requests.decode(start, tokens, schedule), expected)


@pytest.mark.hopper
@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_mask_on_the_device(width: int) -> None:
    requests = Requests.random((300, 129, 1, 128), 8, 2, width, dtype="bfloat16")
    causal, of_heads = causal_mask(requests), mask_of_heads(requests)
    assert_same_bits(requests.with_mask(causal), requests.whole())
    found = requests.gradients("hopper", mask=of_heads)
    assert_gradients_close(found, requests.gradients("portable", mask=of_heads))
    assert_same_bits(requests.gradients("hopper", mask=of_heads), found)
    assert_same_bits(requests.gradients("hopper", mask=causal), requests.gradients("hopper"))


@pytest.mark.hopper
def test_three_hundred_requests_have_the_bits_of_prefill_on_the_device() -> None:
    requests = Requests.random(tuple(1 + 37 * i % 290 for i in range(300)), 4, 1, 64)
    start = requests.last(1)
    assert_same_bits(requests.decode(start, 1), requests.prefill(start, 1))


@pytest.mark.hopper
def test_a_decode_gives_the_same_bits_a_thousand_times() -> None:
    requests = Requests.random((5000, 300, 129, 1), 32, 8, 128)
    forward = detjax.jit(functools.partial(attention_decode_hopper.forward, masking=requests.masking))
    operands = requests.operands(requests.last(1), 1)
    expected = forward(*operands)
    differing = sum((forward(*operands) != expected).any().astype(jnp.int32) for _ in range(1000))
    assert int(differing) == 0


# --- what the compiler is given ---------------------------------------------------------------------------------------


def programs() -> dict[str, Program]:
    everything = OPTIONS["everything"]
    return {
        f"{phase}, head size {width}{', everything' if options else ''}": attention(tokens, width, **options)
        for phase, tokens in (("prefill", 1024), ("decode", 1))
        for width, options in ((96, {}), (128, {}), (128, everything), (192, {}), (256, {}))
    } | {f"decode, {kind}": attention(1, 128, kind=kind) for kind in KINDS}


def products_in_sums(ptx: str) -> list[str]:
    """Additions and subtractions of a product or a quotient in PTX: a compiler may make one instruction of the two."""
    found = []
    for entry in re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]:
        lines = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]*);", entry, re.MULTILINE)
        instructions = [(operation, re.split(r",\s*", operands.strip())) for operation, operands in lines]
        products = {operands[0] for operation, operands in instructions if _is(operation, "mul", "div")}
        moves = [operands for operation, operands in instructions if re.match(r"(mov|neg|abs)\.", operation)]
        count = 0
        while count < len(products):
            count = len(products)
            products |= {target for target, source, *_ in moves if source in products}
        sums = [(operation, operands) for operation, operands in instructions if _is(operation, "add", "sub")]
        found += [f"{operation} {', '.join(operands)}" for operation, operands in sums if products & {*operands[1:]}]
    return found


def _is(operation: str, *names: str) -> bool:
    parts = operation.split(".")
    return parts[0] in names and parts[-1] == "f32"


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """By program, what Mosaic gives ptxas, from a process of its own."""
    folder = ROOT / os.environ.get(VARIABLE, ".ptxas")
    if not (folder / "nvidia" / "cu13" / "bin" / "ptxas").is_file():
        pytest.skip(f"CUDA's compiler is not in {folder}: `make test` installs it")
    environment = {
        **os.environ,
        "CUDA_ROOT": str(folder / "nvidia" / "cu13"),
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests"))),
    }
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    _, *sections = re.split(r"^# (.*)\n", run.stdout, flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True))


def test_no_product_meets_a_sum_in_the_kernels(ptx: dict[str, str]) -> None:
    assert list(ptx) == list(programs())
    for name, text in ptx.items():
        kernels = re.findall(r"^\.visible \.entry attention_([a-z]+)", text, re.MULTILINE)
        assert kernels == (["prefill"] if name.startswith("prefill") else ["decode", "merge"]), name
        assert text.count("fma.rn.f32") > 50 * len(kernels) and "add.rn.f32" in text, name
        assert products_in_sums(text) == [], name


def test_a_product_in_a_sum_is_seen() -> None:
    text = """
.visible .entry one(
	mul.f32 	%r1, %r2, %r3;
	add.f32 	%r4, %r5, %r2;
	mov.b32 	%r6, %r1;
	neg.f32 	%r7, %r6;
	@%p1 sub.rn.f32 	%r8, %r7, %r5;
	fma.rn.f32 	%r9, %r1, %r1, %r1;
	max.f32 	%r10, %r1, 0f00000000;
	add.f32 	%r4, %r10, %r9;
.visible .entry two(
	add.f32 	%r4, %r5, %r1;
	div.full.f32 	%r1, %r2, %r3;
"""
    assert products_in_sums(text) == ["sub.rn.f32 %r8, %r7, %r5", "add.f32 %r4, %r5, %r1"]


if __name__ == "__main__":
    test_ptxas.programs = programs
    test_ptxas.compile_all()
