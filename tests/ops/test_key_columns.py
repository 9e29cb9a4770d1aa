"""Values that are columns of their keys: the bits of pages of such values, and gradients that add both roles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import append
from tests.ops.attention_cases import OPTIONS, Request, pool, sinks
from tests.ops.cases import in_dtype
from tests.support.bits import assert_same_bits, same_bits

HEADS, WIDTH, VALUES = 5, 24, 16
LENGTHS, STARTS = (200, 17, 130), (0, 0, 0)


def pages(dtype: str, lengths: tuple[int, ...] = LENGTHS, width: int = WIDTH, shuffled: bool = True) -> Any:
    """One KV head of requests' keys, and the page table."""
    requests = [Request.random(length, dtype, seed, (HEADS, 1), width) for seed, length in enumerate(lengths)]
    return requests, pool(requests, shuffled=shuffled, rest=np.nan)


def both(k: jax.Array, width: int = VALUES) -> tuple[ops.KVPages, ops.KVPages]:
    """Pages whose values are columns of the keys, and pages with these columns as values of their own."""
    return ops.KVPages(k, ops.KeyColumns(width)), ops.KVPages(k, k[..., :width])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["causal", "window", "everything"])
def test_they_have_the_bits_of_pages_of_such_values(name: str, dtype: str) -> None:
    options = {key: value for key, value in OPTIONS[name].items() if key not in ("sinks", "alibi_slopes")}
    options |= {"sinks": sinks(HEADS, dtype)} if "sinks" in OPTIONS[name] else {}
    requests, cached = pages(dtype)
    q = np.stack([np.resize(request.q, (200, HEADS, WIDTH)) for request in requests])
    stand = cached.queries(STARTS, LENGTHS)
    columns, paged = (ops.attention(jnp.asarray(q), kv, stand, **options) for kv in both(jnp.asarray(cached.k_pages)))
    assert columns.shape == (3, 200, HEADS, VALUES)
    assert_same_bits(columns, paged)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("heads", "width", "values", "dtype"),
    [(3, 576, 512, "bfloat16"), (HEADS, WIDTH, VALUES, "float32"), (2, 80, 80, "float32")],
)
def test_chunks_and_decode_give_the_bits_of_a_whole_prefill(heads: int, width: int, values: int, dtype: str) -> None:
    request = Request.random(140, dtype, heads=(heads, 1), width=width)
    cached = pool([request]).on_device()
    kv = ops.KVPages(cached.kv.k, ops.KeyColumns(values))

    def attended(start: int, end: int) -> np.ndarray:
        q = jnp.asarray(request.q[None, start:end])
        return np.asarray(ops.attention(q, kv, cached.queries([start], [end])))[0]

    whole = attended(0, 140)
    assert_same_bits(np.concatenate([attended(start, start + 70) for start in (0, 70)]), whole)
    for token in (0, 127, 128, 139):
        assert_same_bits(attended(token, token + 1), whole[token : token + 1])
    with detjax.use_backend("stock"):  # the negative control; rounding to bfloat16 hides most differences
        assert dtype == "bfloat16" or not same_bits(attended(139, 140), attended(0, 140)[139:])


def test_rows_of_packed_queries_have_the_bits_of_each_request_alone() -> None:
    requests, cached = pages("float32")
    counts, first_rows = (40, 0, 1), (0, 40, 40)
    packed = np.full((64, HEADS, WIDTH), np.nan, np.float32)
    for request, count, row in zip(requests, counts, first_rows, strict=True):
        packed[row : row + count] = request.q[len(request) - count :]
    kv = both(jnp.asarray(cached.k_pages))[0]
    starts = [length - count for length, count in zip(LENGTHS, counts, strict=True)]
    o = ops.attention(jnp.asarray(packed), kv, cached.queries(starts, LENGTHS, count=counts, first_row=first_rows))
    for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
        if count:
            q, first = jnp.asarray(request.q[None, len(request) - count :]), first_rows[row]
            alone = ops.attention(q, kv, cached.alone(row).queries([len(request) - count], [len(request)]))
            assert_same_bits(o[first : first + count], alone[0])


def gradients(kv: ops.KVPages, q: jax.Array, stand: ops.Queries, dy: jax.Array) -> tuple[jax.Array, ops.KVPages]:
    program = detjax.jit(lambda q, kv: jax.vjp(lambda q, kv: ops.attention(q, kv, stand), q, kv)[1](dy))
    return program(q, kv)


@functools.cache
def gradients_of_both(dtype: str) -> tuple[Any, Any]:
    """The gradients of bfloat16 numbers in a dtype: of values that are columns, and of values that have pages."""
    lengths = (40, 130, 17)
    requests, cached = pages("bfloat16", lengths)
    q, dy = np.zeros((3, 130, HEADS, WIDTH), np.float32), np.zeros((3, 130, HEADS, VALUES), np.float32)
    for index, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        q[index, :length], dy[index, :length] = request.q, request.q[..., WIDTH - VALUES :] * 1.5
    k = jnp.asarray(np.nan_to_num(cached.k_pages.astype(np.float32)), dtype)
    stand = cached.queries(STARTS, lengths, count=lengths)
    columns, paged = (gradients(kv, jnp.asarray(q, dtype), stand, jnp.asarray(dy, dtype)) for kv in both(k))
    return columns, paged


def test_the_gradient_of_a_column_is_that_of_the_key_plus_that_of_the_value() -> None:
    columns, paged = gradients_of_both("float32")
    assert columns[1].v == ops.KeyColumns(VALUES)
    dk, dv = (np.array(x) for x in paged[1].numbers)
    dk[..., :VALUES] += dv
    assert_same_bits((columns[0], columns[1].k), (paged[0], dk))
    assert (dv != 0).any()


def test_the_gradient_of_a_column_is_rounded_once() -> None:
    (_, columns), (_, paged) = gradients_of_both("bfloat16")
    exact = np.asarray(gradients_of_both("float32")[0][1].k)
    summed, dv = (np.array(x.astype(jnp.float32)) for x in paged.numbers)
    summed[..., :VALUES] += dv
    twice = summed.astype(jnp.bfloat16)
    # The probabilities and their gradients are rounded to bfloat16 before the sums, which both have.
    error, error_of_two = (np.linalg.norm(np.asarray(x, np.float32) - exact) for x in (columns.k, twice))
    assert error < error_of_two
    assert not same_bits(columns.k, twice)


def test_packed_queries_have_the_gradients_of_rectangular_ones() -> None:
    lengths = (16, 48, 130)
    requests, cached = pages("float32", lengths)
    kv = both(jnp.where(jnp.isnan(jnp.asarray(cached.k_pages)), 0, jnp.asarray(cached.k_pages)))[0]
    first_rows, rows = (0, 16, 64), 208
    q, dy = np.zeros((rows, HEADS, WIDTH), np.float32), np.zeros((rows, HEADS, VALUES), np.float32)
    q_padded, dy_padded = np.zeros((3, 144, HEADS, WIDTH), np.float32), np.zeros((3, 144, HEADS, VALUES), np.float32)
    for index, (request, row) in enumerate(zip(requests, first_rows, strict=True)):
        length = len(request)
        gradient = Request.random(length, "float32", 9, (HEADS, 1), VALUES).q
        q[row : row + length], dy[row : row + length] = request.q, gradient
        q_padded[index, :length], dy_padded[index, :length] = request.q, gradient
    packed = cached.queries(STARTS, lengths, count=lengths, first_row=first_rows)
    dq, dkv = gradients(kv, jnp.asarray(q), packed, jnp.asarray(dy))
    rectangular = cached.queries(STARTS, lengths, count=lengths)
    dq_padded, dkv_padded = gradients(kv, jnp.asarray(q_padded), rectangular, jnp.asarray(dy_padded))
    assert_same_bits(dkv, dkv_padded)
    for index, (length, row) in enumerate(zip(lengths, first_rows, strict=True)):
        assert_same_bits(dq[row : row + length], dq_padded[index, :length])


# --- append_keys ------------------------------------------------------------------------------------------------------


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(in_dtype(np.random.default_rng(shape).standard_normal(shape), "float32"))


def test_keys_lie_where_keys_and_values_would_lie() -> None:
    k, kv = drawn(2, 9, 1, WIDTH), both(drawn(4, 1, KV_BLOCK, WIDTH))[0]
    table, start, count = (jnp.asarray(x, jnp.int32) for x in ([[3, 1], [0, 7]], [124, 126], [9, 7]))
    stand = ops.Queries(table, start, start + count, count)
    written = ops.append_keys(k, kv, stand)
    expected = append(ops.KVPages(kv.k, kv.k), k, k, stand)
    assert_same_bits(written, ops.KVPages(expected.k, ops.KeyColumns(VALUES)))
    assert not same_bits(written.k[3, :, 124:], kv.k[3, :, 124:])
    assert_same_bits(written.k[2], kv.k[2])


def test_packed_keys_lie_where_rectangular_ones_do() -> None:
    kv = both(drawn(6, 1, KV_BLOCK, WIDTH))[0]
    table, start, count = (
        np.asarray([[3, 1], [0, 2], [4, 5]], np.int32),
        np.asarray([130, 125, 0]),
        np.asarray([1, 9, 3]),
    )
    packed = ops.Queries.packed(table, start.astype(np.int32), count.astype(np.int32), decodes=1, rows=24)
    k = drawn(25, 1, WIDTH)
    written = ops.append_keys(k, kv, jax.tree.map(jnp.asarray, packed))
    for request, row in ((0, 0), (1, 1), (2, 17)):
        some = slice(request, request + 1)
        stand = ops.Queries(*(jnp.asarray(x[some], jnp.int32) for x in (table, start, start + count, count)))
        kv = ops.append_keys(k[None, row : row + int(count[request])], kv, stand)
    assert_same_bits(written, kv)


def test_gradients_of_appended_keys_are_those_of_their_slots() -> None:
    k, kv = drawn(1, 5, 1, WIDTH), both(drawn(2, 1, KV_BLOCK, WIDTH))[0]
    one = [jnp.asarray(x, jnp.int32) for x in ([[1]], [3], [7], [4])]
    dpages = drawn(2, 1, KV_BLOCK, WIDTH)[::-1]
    dk, dkv = jax.vjp(lambda k, kv: ops.append_keys(k, kv, ops.Queries(*one)), k, kv)[1](ops.KVPages(dpages, kv.v))
    assert_same_bits(dk[0, :4], dpages[1, 0, 3:7, None])
    assert_same_bits(dk[0, 4], jnp.zeros((1, WIDTH)))
    assert_same_bits(dkv.k, dpages.at[1, 0, 3:7].set(0.0))


# --- refusals ---------------------------------------------------------------------------------------------------------


def stand_of_one() -> ops.Queries:
    return ops.Queries(*(jnp.asarray(x, jnp.int32) for x in ([[0]], [0], [1], [1])))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q, k: ops.attention(q, ops.KVPages(k, ops.KeyColumns(25)), stand_of_one()),
            ValueError,
            r"attention: kv.v is KeyColumns\(width=25\); accepted: from 1 to 24 columns",
        ),
        (
            lambda q, k: ops.attention(q, ops.KVPages(ops.quantize_kv(k, "int8"), ops.KeyColumns(8)), stand_of_one()),
            TypeError,
            r"attention: kv.k is quantized \(int8\) and the values are its columns; accepted: pages of numbers",
        ),
        (
            lambda q, k: ops.attention(q, ops.KVPages(k.astype(jnp.bfloat16), ops.KeyColumns(8)), stand_of_one()),
            TypeError,
            "attention: kv.k has dtype bfloat16",
        ),
        (
            lambda q, k: ops.append_keys(q[:, :, :1], ops.KVPages(k, k), stand_of_one()),
            TypeError,
            "append_keys: kv has pages of values; accepted: KeyColumns",
        ),
        (
            lambda q, k: ops.append_keys(q, ops.KVPages(k, ops.KeyColumns(8)), stand_of_one()),
            ValueError,
            r"append_keys: kv.k has shape \(1, 1, 128, 24\); accepted: \(1, 5, 128, 24\)",
        ),
        (
            lambda q, k: ops.qk_rope_append_kv(
                q, ops.KVPages(k, ops.KeyColumns(8)), stand_of_one(), ops.RotaryEmbedding(WIDTH, 1e4)
            ),
            TypeError,
            r"qk_rope_append_kv: kv.v is KeyColumns\(width=8\); accepted: pages of values",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(drawn(1, 1, HEADS, WIDTH), drawn(1, 1, KV_BLOCK, WIDTH))


def test_kernels_that_do_not_serve_their_widths_say_so() -> None:
    q, k = drawn(1, 1, HEADS, 64).astype(jnp.bfloat16), drawn(1, 1, KV_BLOCK, 64).astype(jnp.bfloat16)
    message = "keys of 64 columns whose values are the first 32 on .*; accepted by the backend 'hopper': 128, 256, 384"
    with detjax.use_backend("hopper"), pytest.raises(NotImplementedError, match=message):
        ops.attention(q, ops.KVPages(k, ops.KeyColumns(32)), stand_of_one())
