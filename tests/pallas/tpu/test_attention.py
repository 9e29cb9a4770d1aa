"""Attention's TPU kernel: in Pallas' interpreter, and as the text that a TPU's compiler is given."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.operands.attention import AttentionOperands
from detjax.operands.options import Masking
from detjax.pallas.tpu import attention
from detjax.pallas.tpu.attention import kernel as tpu_kernel
from detjax.pallas.tpu.attention import mask, online_softmax
from detjax.pallas.tpu.attention.kernel import Problem, Schedule
from detjax.portable import attention as portable_attention
from tests.pallas.tpu import attention_cases
from tests.pallas.tpu.interpreter import (
    assert_no_races,
    assert_products_in_float32,
    interpreted,
    interpreting,
    matrix_products,
)
from tests.support.attention_requests import OPTIONS, Requests
from tests.support.bits import assert_same_bits
from tests.support.kernel_texts import kernel_texts

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the TPU interpreter, with one head of keys in each step."""
    monkeypatch.setattr(tpu_kernel, "MAX_KV_HEADS", 1)
    monkeypatch.setattr(online_softmax, "block_sum", _block_sum)
    with interpreting():
        yield
    assert_no_races()


def _block_sum(p: jax.Array) -> jax.Array:
    """The portable backend's sums, as the kernel's own take XLA long to compile. Only the first lane has a meaning."""
    return jnp.pad(portable_attention.block_sum(p), ((0, 0), (0, KV_BLOCK - 1)), constant_values=np.nan)


def _requests(name: str, dtype: str, lengths: tuple[int, ...], **sizes: int) -> Requests:
    return Requests.random(lengths, **({"width": 16} | sizes), dtype=dtype, **OPTIONS[name])


def _forward(requests: Requests, **options: Any) -> Callable[..., Any]:
    return detjax.jit(functools.partial(attention.forward, masking=requests.masking, **options))


# --- numbers and the contract -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "kv_heads", "lengths"),
    [
        ("not causal", "float32", 4, 2, (170, 129)),
        ("everything", "bfloat16", 6, 2, (170, 129)),
        ("alibi", "float32", 3, 1, (129, 2)),
        ("soft cap", "float32", 3, 1, (129, 2)),
    ],
)
def test_numbers_are_those_of_float64_and_of_the_portable_backend(
    name: str, dtype: str, heads: int, kv_heads: int, lengths: tuple[int, ...], interpreter: None
) -> None:
    """Three query heads that share their keys fill 126 of a tile's 128 rows."""
    requests = _requests(name, dtype, lengths, heads=heads, kv_heads=kv_heads)
    operands = requests.operands(np.zeros(2, int), max(lengths))
    o, normalizers = _forward(requests)(operands)
    for actual, exact in zip(requests.rows_of_requests(o, np.zeros(2, int)), requests.exact(), strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    portable = detjax.jit(functools.partial(portable_attention.forward, masking=requests.masking))
    expected, expected_normalizers = portable(operands)
    np.testing.assert_allclose(np.asarray(o, np.float32), np.asarray(expected, np.float32), atol=TOLERANCE[dtype])
    np.testing.assert_allclose(normalizers, expected_normalizers, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "width", "values"), [("float32", 24, 16), ("bfloat16", 192, 128)])
def test_values_that_are_columns_of_their_keys_have_the_bits_of_pages_of_such_values(
    dtype: str, width: int, values: int, interpreter: None
) -> None:
    requests = _requests("causal", dtype, (140, 3), heads=5, kv_heads=1, width=width)
    start = np.array([0, 1])
    q, kv, queries, *_ = requests.operands(start, 140)
    assert not isinstance(kv.k, ops.QuantizedPages)
    attend = _forward(requests)
    columns, apart = (
        attend(AttentionOperands(q, ops.KVPages(kv.k, v), queries))
        for v in (ops.KeyColumns(values), kv.k[..., :values])
    )
    for row, length in enumerate(queries.length - start):
        for given, expected in zip(columns, apart, strict=True):
            assert_same_bits(given[row, :length], expected[row, :length])
    packed = jnp.concatenate([q[0, :140], q[1, :2]])
    packed_queries = dataclasses.replace(
        queries, count=jnp.array([140, 2], jnp.int32), first_row=jnp.array([0, 140], jnp.int32)
    )
    ragged = detjax.jit(functools.partial(attention.ragged, masking=requests.masking))
    o = ragged(AttentionOperands(packed, ops.KVPages(kv.k, ops.KeyColumns(values)), packed_queries))
    assert_same_bits(o, jnp.concatenate([columns[0][0], columns[0][1, :2]]))


def exact_power(exponent: jax.Array) -> jax.Array:
    """2 to the power of whole numbers, from the bits of a float32; 0 below its normal numbers."""
    whole = jnp.maximum(exponent, -127.0).astype(jnp.int32)
    return jnp.where(exponent < -126, 0.0, lax.bitcast_convert_type((whole + 127) << 23, jnp.float32))


@dataclasses.dataclass(frozen=True)
class ExactScores:
    """One request with a head of keys and two of queries, whose scores are whole numbers in the log2 domain.

    So the exponentials are powers of two, sums over a block are exact in every order, and no product is rounded: NumPy
    can state the contract. The blocks' maxima lie far apart, so that each addition of blocks is rounded.
    """

    length: int
    masking: Masking
    has_sinks: bool
    span: int = 0
    """Blocks that are merged among themselves before they are merged with others; 0: no spans."""

    @property
    def scores(self) -> np.ndarray:
        """Scores `[length]` of the keys, for every query of the first head; the second head has twice as much."""
        random = np.random.default_rng(0)
        maxima = np.array([0, 13, 6, 11])[np.arange(self.length) // KV_BLOCK]
        return maxima - random.integers(0, 5, self.length)

    @property
    def values(self) -> np.ndarray:
        return np.random.default_rng(1).integers(-7, 8, (self.length, 16)).astype(np.float32)

    def operands(self) -> AttentionOperands:
        """Returns the operands of `attention.forward`. Slots after the request's length are NaN."""
        blocks = -(-self.length // KV_BLOCK)
        k, v = np.full((2, blocks * KV_BLOCK, 16), np.nan, np.float32)
        k[: self.length], v[: self.length] = 0, self.values
        k[: self.length, 3] = self.scores
        q = np.zeros((1, self.length, 2, 16), np.float32)
        q[..., 3] = 1, 2
        pages = (jnp.asarray(x.reshape(blocks, 1, KV_BLOCK, 16)) for x in (k, v))
        table = jnp.arange(blocks, dtype=jnp.int32)[None]
        queries = ops.Queries(table, *(jnp.array([number], jnp.int32) for number in (0, self.length)))
        sinks = jnp.zeros(2, jnp.float32) if self.has_sinks else None
        return AttentionOperands(jnp.asarray(q), ops.KVPages(*pages), queries, sinks)

    def expected(self) -> np.ndarray:
        """Output `[1, length, 2, 16]` by the formulas of `detjax.contract`, block after block."""
        o = np.zeros((1, self.length, 2, 16), np.float32)
        for query in range(self.length):
            for head in range(2):
                o[0, query, head] = self._row(query, (1 + head) * self.scores)
        return o

    def _row(self, query: int, scores: np.ndarray) -> np.ndarray:
        state = np.zeros(16, np.float32), np.float32(self.has_sinks), 0.0 if self.has_sinks else -1e30
        empty, spans = (np.zeros(16, np.float32), np.float32(0), -1e30), {}
        for first in range(0, self.length, KV_BLOCK):
            keys = np.arange(first, min(first + KV_BLOCK, self.length))
            visible = keys <= query if self.masking.causal else keys >= 0
            if self.masking.window is not None:
                visible &= keys > query - self.masking.window
            if not visible.any():
                continue
            s, v = scores[keys[visible]], self.values[keys[visible]]
            m_b = float(s.max())
            p = np.exp2(s - m_b)
            block = (p @ v).astype(np.float32), np.float32(p.sum()), m_b
            if self.span:
                number = first // KV_BLOCK // self.span
                spans[number] = _merged(spans.get(number, empty), block)
            else:
                state = _merged(state, block)
        accumulator, total, _ = functools.reduce(_merged, spans.values(), state)
        return accumulator * (np.float32(1) / total)


def _merged(state: Any, part: Any) -> Any:
    m = max(state[2], part[2])
    a, b = np.float32(np.exp2(state[2] - m)), np.float32(np.exp2(part[2] - m))
    return state[0] * a + part[0] * b, state[1] * a + part[1] * b, m


@pytest.mark.parametrize("options", [{}, {"window": 194}], ids=str)
def test_blocks_of_wide_values_are_merged_within_spans(
    options: dict[str, Any], interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans begin at absolute positions, like blocks; a window may begin within one.

    The windows of the first tokens of tiles, at 320 and 448, begin with the last keys of blocks.
    """
    monkeypatch.setattr(tpu_kernel, "SPAN_WIDTH", 8)
    monkeypatch.setattr(tpu_kernel, "SPAN_BLOCKS", 2)
    monkeypatch.setattr(jnp, "exp2", exact_power)
    request = ExactScores(470, Masking(scale=float(np.log(2)), **options), has_sinks=True, span=2)
    o, _ = jax.jit(functools.partial(attention.forward, masking=request.masking))(request.operands())
    assert_same_bits(o, request.expected())
    without = dataclasses.replace(request, span=0)
    assert options or not np.array_equal(without.expected(), request.expected())


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 194}, {"causal": False}], ids=str)
def test_bits_are_those_of_the_contract(
    options: dict[str, Any], has_sinks: bool, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks begin at absolute positions, have accumulators of their own and are merged left to right.

    The windows of the first tokens of tiles, at 320 and 448, begin with the last keys of blocks.
    """
    request = ExactScores(470, Masking(scale=float(np.log(2)), **options), has_sinks)
    # The last places of exp2 are the device's own, so an exact one takes its place.
    monkeypatch.setattr(jnp, "exp2", exact_power)
    o, _ = jax.jit(functools.partial(attention.forward, masking=request.masking))(request.operands())
    assert_same_bits(o, request.expected())


def test_zeros_are_positive(interpreter: None) -> None:
    """The mean of 200 values, all zero but one, is a negative number that rounds to zero."""
    requests = _requests("not causal", "bfloat16", (200,), heads=2, kv_heads=1)
    q, kv, queries, *_ = requests.operands(np.zeros(1, int), 3)
    v = np.where(np.arange(KV_BLOCK)[:, None] == 5, -jnp.finfo(jnp.bfloat16).tiny, 0).astype(jnp.bfloat16)
    pages = jnp.broadcast_to(jnp.asarray(v), (*kv.k.shape[:2], KV_BLOCK, 16)).at[requests.page_table[0, 1]].set(0)
    o, _ = _forward(requests)(AttentionOperands(jnp.zeros_like(q), ops.KVPages(jnp.zeros_like(pages), pages), queries))
    assert_same_bits(o, np.zeros(o.shape, jnp.bfloat16))


@pytest.mark.parametrize("group", [1, 3, 7, 71, 128, 200, 257, 1000])
def test_rows_of_a_tile_belong_to_their_tokens(group: int) -> None:
    for rows in (attention.default_schedule(Problem(1, group)).rows, tpu_kernel.MAX_ROWS):
        positions = mask.query_positions(jnp.int32(0), rows, jnp.int32(5), group)
        assert_same_bits(positions[:, 0], np.arange(rows, dtype=np.int32) // group + 5)


def test_sums_of_a_block_have_the_contracts_order() -> None:
    p = np.random.default_rng(0).standard_normal((tpu_kernel.TPU_ATTENTION_ROWS, KV_BLOCK), np.float32)

    def kernel(p: Any, sums: Any) -> None:
        sums[...] = online_softmax.block_sum(p[...])

    sums = interpreted(lambda p: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(p.shape, p.dtype))(p))(p)
    assert_same_bits(sums[:, :1], portable_attention.block_sum(jnp.asarray(p)))
    # Key 64 u + 16 g + 8 e + r is in lane r of group g.
    keys = p.reshape(-1, 2, 4, 2, 8)
    lanes = ((keys[:, 0, :, 0] + keys[:, 0, :, 1]) + keys[:, 1, :, 0]) + keys[:, 1, :, 1]
    x = ((lanes[:, 0] + lanes[:, 1]) + lanes[:, 2]) + lanes[:, 3]
    x = x[:, 0::2] + x[:, 1::2]
    x = x[:, 0::2] + x[:, 1::2]
    assert_same_bits(sums[:, 0], x[:, 0] + x[:, 1])


# --- invariance -------------------------------------------------------------------------------------------------------


def test_decode_and_packed_requests_have_the_bits_of_prefill(interpreter: None) -> None:
    lengths = 160, 1, 70
    requests = _requests("everything", "bfloat16", lengths, heads=2, kv_heads=1)
    at_zero = np.zeros(len(lengths), int)
    results = _forward(requests)(requests.operands(at_zero, max(lengths)))
    whole, normalizers = (requests.rows_of_requests(x, at_zero) for x in results)
    forward = _forward(requests, with_normalizers=False)
    for start in (0, 63, 64, 127, 128, 159):
        first = np.full(len(lengths), start)
        o = requests.rows_of_requests(forward(requests.operands(first, 1))[0], first)
        assert_same_bits(o, [rows[start : start + 1] for rows in whole])

    counts, rows = (81, 0, 9), (0, 88, 88)
    start = np.array(lengths) - counts
    packed = np.full((104, *requests.q.shape[2:]), np.nan, requests.q.dtype)  # NaN in rows that belong to no request
    for q, first, count, row in zip(requests.q, start, counts, rows, strict=True):
        packed[row : row + count] = q[first : first + count]
    integers = {"start": start, "length": lengths, "count": counts, "first_row": rows}
    queries = ops.Queries(requests.page_table, **{name: jnp.asarray(x, jnp.int32) for name, x in integers.items()})
    ragged = detjax.jit(functools.partial(attention.ragged_with_normalizers, masking=requests.masking))
    kv = ops.KVPages(requests.k_pages, requests.v_pages)
    results = ragged(AttentionOperands(jnp.asarray(packed), kv, queries, requests.sinks))
    for x, expected in zip(results, (whole, normalizers), strict=True):
        for request, first, count, row in zip(expected, start, counts, rows, strict=True):
            assert_same_bits(x[row : row + count], request[first : first + count])


def test_a_request_has_the_bits_it_has_alone_whatever_its_neighbours_and_pages_are(interpreter: None) -> None:
    requests = _requests("everything", "float32", (140, 200))
    q, kv, queries, sinks, _ = requests.operands(np.array([100, 150]), 70)
    q, k, v, page_table = (np.array(x) for x in (q, *kv, queries.page_table))
    numbers = np.array(queries.start), np.array(queries.length)
    queries = ops.Queries(page_table[:1], *(x[:1] for x in numbers))
    alone = _forward(requests)(AttentionOperands(q[:1, :40], ops.KVPages(k, v), queries, sinks))
    assert np.isfinite(alone[0]).all()
    for pages in (k, v):
        pages[page_table[1]] = np.nan
    q[1] = np.inf
    order = np.random.default_rng(0).permutation(len(k))  # page `order[i]` becomes page i
    page_table = np.argsort(order).astype(np.int32)[page_table]
    page_table[:, -1] = 10**6, -1  # entries after the requests' lengths
    # The number of heads in a step, the rows of a tile and the core that serves it are schedules.
    forward = _forward(requests, schedule=Schedule(kv_heads=2, rows=192))
    kv = ops.KVPages(k[order], v[order])
    queries = ops.Queries(page_table[::-1], *(x[::-1] for x in numbers))
    with interpreting(cores=2):
        together = forward(AttentionOperands(q[::-1], kv, queries, sinks))
        for x, expected in zip(together, alone, strict=True):
            assert_same_bits(x[1, :40], expected[0])


@pytest.mark.parametrize(("masks", "step_heads"), [((1, 1), 1), ((2, 1), 2), ((1, 4), 2), ((2, 4), 1)], ids=str)
def test_each_query_of_each_head_and_request_has_its_row_of_a_mask(
    masks: tuple[int, int], step_heads: int, interpreter: None
) -> None:
    """Keys are random, and all are hidden from one query."""
    requests, start = _requests("not causal", "float32", (140, 60)), np.zeros(2, int)
    visible = np.random.default_rng(0).random((*masks, 140, 140)) < 0.3
    visible[..., 45, :] = False
    forward = _forward(requests, schedule=Schedule(kv_heads=step_heads, rows=128))
    o, normalizers = forward(requests.operands(start, 140)._replace(mask=jnp.asarray(visible)))
    whole = np.broadcast_to(visible, (2, 4, 140, 140))
    for row, (length, seen) in enumerate(zip(requests.lengths, whole, strict=True)):
        q, k, v = (np.asarray(x[row, :length], np.float64) for x in (requests.q, requests.k, requests.v))
        s = np.einsum("thk,shk->hts", q, np.repeat(k, 2, axis=1)) * requests.masking.scale
        p = np.where(seen[:, :length, :length], np.exp(s), 0)
        total = p.sum(axis=-1, keepdims=True)
        total[:, 45] = 1
        exact = np.einsum("hts,shk->thk", p / total, np.repeat(v, 2, axis=1))
        np.testing.assert_allclose(o[row, :length], exact, atol=2e-6, rtol=2e-6)
        np.testing.assert_allclose(normalizers[row, :length], np.log2(total)[..., 0].T, atol=2e-6, rtol=2e-6)
        assert_same_bits(normalizers[row, 45], np.zeros(4, np.float32))


def test_keys_after_the_end_of_a_mask_are_hidden(interpreter: None) -> None:
    """The mask ends within a block of keys that belong to the request."""
    requests = _requests("not causal", "float32", (140,), heads=2, kv_heads=1)
    forward, operands = _forward(requests), requests.operands(np.zeros(1, int), 140)
    short = np.ones((1, 1, 140, 100), bool)
    whole = np.pad(short, ((0, 0), (0, 0), (0, 0), (0, 40)))
    o = forward(operands._replace(mask=short))[0]
    assert_same_bits(o, forward(operands._replace(mask=whole))[0])
    first = dataclasses.replace(requests, lengths=(100,), q=requests.q[:, :100], k=requests.k[:, :100])
    exact = dataclasses.replace(first, v=requests.v[:, :100]).exact()[0]
    np.testing.assert_allclose(o[0, :100], exact, atol=2e-6, rtol=2e-6)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_attention_by_the_textbook(interpreter: None) -> None:
    requests = _requests("causal", "float32", (40,), heads=2, kv_heads=1)
    operands = requests.operands(np.zeros(1, int), 40)
    operands = operands._replace(kv=jax.tree.map(jnp.nan_to_num, operands.kv))
    do = jnp.asarray(np.random.default_rng(0).standard_normal(operands[0].shape), jnp.float32)

    def textbook(q: jax.Array, kv: ops.KVPages) -> jax.Array:
        k, v = (pages[requests.page_table[0, 0], 0, :40] for pages in kv.numbers)
        s = jnp.einsum("thk,sk->hts", q[0], k) * requests.masking.scale
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((40, 40), bool))[None], s, -jnp.inf))
        return (jnp.einsum("hts,sv->thv", p, v)[None] * do).sum()

    output = _forward(requests)(operands)
    backward = detjax.jit(functools.partial(attention.backward, masking=requests.masking))
    gradients = backward(operands, output, do)[:2]
    expected = jax.jit(jax.grad(textbook, argnums=(0, 1)))(*operands[:2])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), gradients, expected)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_pages_that_the_kernel_does_not_serve_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests("causal", "bfloat16", (3,), width=32)
    quantized, _ = requests.quantized("int8")
    with pytest.raises(NotImplementedError, match="quantized pages"):
        attention.forward(quantized.operands(np.zeros(1, int), 3), masking=requests.masking)
    with pytest.raises(NotImplementedError, match="with 12 columns"):
        narrow = _requests("causal", "bfloat16", (3,), width=12)
        attention.forward(narrow.operands(np.zeros(1, int), 3), masking=narrow.masking)
    for width, latent, accepted in ((264, False, 256), (584, True, 576)):
        case = attention_cases.forward(1, 1, heads=(2, 1), width=width, value_width=128, latent=latent)
        with pytest.raises(NotImplementedError, match=f"q with {width} columns and v_pages with 128 .* to {accepted}"):
            _text(case)
    with pytest.raises(NotImplementedError, match="attention: an argument or the result has dtype float16"):
        _text(attention_cases.forward(1, 1, "float16"))
    monkeypatch.setattr(attention_cases, "COLUMNS", 320)
    with pytest.raises(NotImplementedError, match=r"a page table \(1024, 320\)"):
        _text(attention_cases.forward(1024, 1))


def test_schedules_are_checked() -> None:
    problem = Problem(kv_heads=6, group=4)
    assert attention.default_schedule(problem) == Schedule(kv_heads=6, rows=128)
    assert attention.default_schedule(Problem(kv_heads=1, group=130)) == Schedule(kv_heads=1, rows=192)
    with pytest.raises(ValueError, match=r"4 key heads in a step .* for 6 key heads .*; accepted: a divisor of 6"):
        Schedule(kv_heads=4, rows=128).check(problem)
    with pytest.raises(ValueError, match="at least 70 rows"):
        Schedule(kv_heads=1, rows=64).check(Problem(kv_heads=1, group=70))
    accepted = "accepted: 1 head or more, and multiples of 64 rows up to 1024"
    for rows in (0, 100, 1088):
        with pytest.raises(ValueError, match=f"tiles of {rows} rows; {accepted}"):
            Schedule(kv_heads=1, rows=rows)
    with pytest.raises(ValueError, match="0 key heads in a step"):
        Schedule(kv_heads=0, rows=64)


# --- kernel texts -----------------------------------------------------------------------------------------------------


def _text(case: tuple[Callable[..., Any], tuple[Any, ...]]) -> str:
    fn, arguments = case
    (text,) = kernel_texts(fn, *arguments)
    return text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_is_one_text_for_every_number_of_tokens(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"dtype": dtype, "heads": (8, 2)}
    expected = _text(attention_cases.forward(1, 1, **sizes))
    for batch, tokens in ((8, 1), (500, 1), (4, 4), (1, 128), (1, 500), (1, 4096)):
        assert _text(attention_cases.forward(batch, tokens, **sizes)) == expected
    monkeypatch.setattr(tpu_kernel, "TPU_ATTENTION_ROWS", 32)
    assert _text(attention_cases.forward(1, 1, **sizes)) != expected


def test_packed_requests_have_the_kernel_of_prefill() -> None:
    expected = _text(attention_cases.forward(1, 512))
    for rows, requests in ((8, 1), (512, 16)):
        assert _text(attention_cases.ragged(rows, requests)) == expected


def test_float32_is_multiplied_in_float32() -> None:
    text = _text(attention_cases.forward(1, 512, "float32", heads=(8, 2), with_normalizers=True))
    assert_products_in_float32(text)
    assert len(matrix_products(text)) == 4, "two heads of keys, each with a product for scores and one for values"
