"""Quantized pages have the contract's codes and scales, and attention has the bits of the dequantized numbers."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK, KV_LARGEST_CODE, KV_SMALLEST
from detjax.operands.quantized_pages import CODE_DTYPES
from detjax.ops.quantized_kv import KINDS
from tests.ops.attention_cases import OPTIONS, Pool, Request, attend, pool, sinks
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked

WIDTH = 32
DTYPES = ("float32", "bfloat16", "float16")
every_kind = pytest.mark.parametrize("kind", KINDS)


def quantized_row(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and scale or scales, of a row of finite numbers: float64, each step of the contract rounded by itself."""
    if kind == "q4_0":
        groups = [_group(group) for group in x.astype(np.float64).reshape(-1, 32)]
        return np.concatenate([codes for codes, _ in groups]), np.array([scale for _, scale in groups], np.float16)
    largest = KV_LARGEST_CODE[kind]
    x = x.astype(np.float64)
    if np.abs(x).max() < KV_SMALLEST:
        return np.zeros(len(x)).astype(CODE_DTYPES[kind]), np.float32(0)
    scale = np.float32(np.abs(x).max() * np.float64(np.float32(1 / largest)))
    t = np.float32(x * np.float64(np.float32(1 / np.float64(scale)))).clip(-largest, largest)
    return (np.rint(t).astype(np.int8) if kind == "int8" else _nearest_float8(t)), scale


def _group(x: np.ndarray) -> tuple[np.ndarray, np.float16]:
    scale = np.float16(x[np.abs(x).argmax()] / -8)
    codes = np.full(32, 8)
    if scale != 0:
        t = np.float32(x * np.float64(np.float32(1 / np.float64(scale)))).clip(-8, 8)
        codes = np.minimum(np.floor(np.float32(np.float64(t) + 8.5)), 15).astype(int)
    return (codes[:16] + 16 * codes[16:]).astype(np.uint8), scale


def _nearest_float8(t: np.ndarray) -> np.ndarray:
    """By looking through all of them; of two as near, the one whose last bit is 0."""
    every = np.arange(127, dtype=np.uint8)  # the magnitudes, ascending
    distance = np.abs(every.view("float8_e4m3fn").astype(np.float64) - np.abs(t.astype(np.float64))[:, None])
    nearest = np.array([min(every, key=lambda code: (row[code], code & 1)) for row in distance], np.uint8)
    return (nearest | (np.signbit(t) << 7).astype(np.uint8)).view("float8_e4m3fn")


def rows(dtype: str) -> np.ndarray:
    """Rows `[n, 64]`: of all sizes, on the line between two codes, of few values, with zeros, of zeros alone."""
    random = np.random.default_rng(0)
    sizes = (1e-38, 1e-30, 4e-8, 1e-4, 1.0, 1e4) if dtype != "float16" else (6e-8, 1e-6, 1e-4, 1.0, 1e3)
    result = [random.standard_normal((4, 64)) * size for size in sizes]
    halves = (random.integers(-253, 254, (4, 64)) / 2).astype(float)
    halves[:, 0] = 127
    few = random.integers(-16, 17, (8, 64)) / 2
    few[:, 32] = -8
    tenths = random.integers(-7200, 7201, (4, 64)) / 16
    tenths[:, 0] = 448
    sparse = np.where(random.random((4, 64)) < 0.1, few[:4], 0)
    ties = np.tile([[3.0, -3.0], [-3.0, 3.0]], (1, 32))
    return np.concatenate([*result, halves, few, tenths, sparse, ties, np.zeros((1, 64))]).astype(jnp.dtype(dtype))


def as_pages(x: np.ndarray) -> jax.Array:
    """Rows `[n, K]` as the first tokens of one page of one head."""
    return jnp.asarray(np.pad(x, ((0, KV_BLOCK - len(x)), (0, 0))))[None, None]


def row_scales(pages: ops.QuantizedPages) -> np.ndarray:
    scales = np.asarray(pages.scales)[0, 0]
    return scales.T if pages.kind == "q4_0" else scales


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_the_contract(kind: str, dtype: str) -> None:
    x = rows(dtype)
    pages = ops.quantize_kv(as_pages(x), kind)
    expected = [quantized_row(row, kind) for row in x]
    assert_same_bits(row_scales(pages)[: len(x)], np.stack([scale for _, scale in expected]))
    assert_same_bits(np.asarray(pages.codes)[0, 0, : len(x)], np.stack([codes for codes, _ in expected]))


def test_the_rows_hold_numbers_between_two_codes() -> None:
    x = rows("float32").astype(np.float64)
    scale = np.float32(np.abs(x).max(axis=1) * np.float64(np.float32(1 / 127)))
    t = np.float32(x[scale > 0] * np.float64(1) / scale[scale > 0, None])  # pyright: ignore[reportCallIssue]
    assert np.sum(np.abs(t) % 1 == 0.5) > 50


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_the_product_rounded_to_float32_and_then_to_the_dtype(kind: str, dtype: str) -> None:
    x = rows(dtype)
    pages = ops.quantize_kv(as_pages(x), kind)
    codes, scales = np.asarray(pages.codes)[0, 0], row_scales(pages)
    if kind == "q4_0":
        halves = codes.reshape(KV_BLOCK, -1, 16)
        numbers = np.concatenate([halves & 15, halves >> 4], axis=-1).astype(np.float64) - 8
        products = (numbers * scales[..., None].astype(np.float64)).reshape(KV_BLOCK, -1)
    else:
        products = codes.astype(np.float64) * scales[:, None].astype(np.float64)
    expected = products.astype(np.float32).astype(jnp.dtype(dtype))
    result = np.asarray(ops.dequantize_kv(pages, dtype))[0, 0]
    assert_same_bits(result, expected)
    error = np.abs(result[: len(x)].astype(np.float64) - x.astype(np.float64)).max(axis=1)
    largest = np.abs(x.astype(np.float64)).max(axis=1)
    # Half a step of the coarsest code (of q4_0 a whole one at one end), the dtype's own rounding, and what small scales
    # lose in float16.
    step = {"int8": 1 / 254, "fp8_e4m3": 1 / 28, "q4_0": 1 / 8}[kind] + float(jnp.finfo(dtype).eps)
    assert np.all(error <= 1.01 * step * largest + (5e-7 if kind == "q4_0" or dtype == "float16" else KV_SMALLEST))


def test_a_group_of_q4_0_has_one_half_in_its_low_and_one_in_its_high_bits() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 1], x[0, 16], x[0, 33] = -8, 3, 5, -4  # of two groups
    pages = ops.quantize_kv(as_pages(x), "q4_0")
    assert pages.codes.shape == (1, 1, KV_BLOCK, 32) and pages.scales.shape == (1, 1, 2, KV_BLOCK)
    assert_same_bits(np.asarray(pages.scales)[0, 0, :, 0], np.float16([1, 0.5]))
    expected = np.full(32, 0x88, np.uint8)
    expected[0], expected[1], expected[17] = 0xD0, 0x8B, 0x80
    assert_same_bits(np.asarray(pages.codes)[0, 0, 0], expected)


@every_kind
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_read_as_nan_and_its_neighbours_are_not(kind: str, strange: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    clean = ops.quantize_kv(as_pages(x), kind)
    x[1, 40] = strange
    pages = ops.quantize_kv(as_pages(x), kind)
    result = np.isnan(np.asarray(ops.dequantize_kv(pages, "bfloat16"))[0, 0].astype(np.float32))
    expected = np.zeros_like(result)
    expected[1, 32 if kind == "q4_0" else 0 :] = True
    assert_same_bits(result, expected)
    assert np.all(np.asarray(pages.codes)[0, 0, 1, 16:].view(np.uint8) == (0x88 if kind == "q4_0" else 0))
    for row in (0, 2):
        assert_same_bits(pages.codes[0, 0, row], clean.codes[0, 0, row])
        assert_same_bits(row_scales(pages)[row], row_scales(clean)[row])


def test_the_largest_numbers() -> None:
    largest = float(jnp.finfo(jnp.bfloat16).max)
    x = np.tile([largest, -largest, 1.0, 0.0], (1, 8)).astype(jnp.bfloat16)
    for kind in ("int8", "fp8_e4m3"):
        result = np.asarray(ops.dequantize_kv(ops.quantize_kv(as_pages(x), kind), "bfloat16"))[0, 0, 0]
        assert_same_bits(result, np.tile([largest, -largest, 0.0, 0.0], 8).astype(jnp.bfloat16))
    assert np.isnan(ops.quantize_kv(as_pages(x), "q4_0").scales[0, 0, 0, 0])
    x = np.full((1, 32), 8 * 65504.0, np.float32)
    assert_same_bits(np.asarray(ops.dequantize_kv(ops.quantize_kv(as_pages(x), "q4_0"), "float32"))[0, 0, 0], x[0])


# --- attention --------------------------------------------------------------------------------------------------------


def quantized(cached: Pool, kind: str, garbage: bool = False) -> Pool:
    """The pool with quantized pages; `garbage` fills what holds NaN with other codes, and with scales of NaN."""
    pages = []
    for numbers in (cached.k_pages, cached.v_pages):
        made = ops.quantize_kv(jnp.asarray(numbers), kind)
        if garbage:
            codes = np.array(made.codes)
            codes.view(np.uint8)[np.isnan(numbers.astype(np.float32)).all(axis=-1)] = 0x7F  # pyright: ignore[reportAttributeAccessIssue]
            made = ops.QuantizedPages(jnp.asarray(codes), made.scales, kind)
        pages.append(made)
    return Pool(*pages, cached.page_table)  # pyright: ignore[reportArgumentType, reportCallIssue]


def read(cached: Pool, dtype: Any) -> Pool:
    """The pool with what its pages are read as."""
    return Pool(*(ops.dequantize_kv(x, dtype) for x in (cached.k_pages, cached.v_pages)), cached.page_table)  # pyright: ignore[reportCallIssue]


def attend_to(q: np.ndarray, cached: Pool, q_start: Any, kv_length: Any, **options: Any) -> np.ndarray:
    if options.get("sinks") is True:
        options["sinks"] = sinks(q.shape[2], str(q.dtype))
    return np.asarray(ops.attention(jnp.asarray(q), cached.kv, cached.queries(q_start, kv_length), **options))


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [("everything", "int8", "bfloat16"), ("causal", "q4_0", "float32")]
    + [
        pytest.param(name, kind, dtype, marks=pytest.mark.nightly)
        for name, kind, dtype in (
            *((name, "int8", "bfloat16") for name in ("causal", "not causal", "window", "alibi")),
            *(("everything", kind, dtype) for kind in ("fp8_e4m3", "q4_0") for dtype in ("bfloat16", "float32")),
            ("causal", "int8", "float16"),
        )
    ],
)
def test_attention_has_the_bits_of_what_the_pages_are_read_as(name: str, kind: str, dtype: str) -> None:
    options = OPTIONS[name]
    requests = [Request.random(length, dtype, width=WIDTH) for length in (270, 17, 128)]
    cached = quantized(pool(requests, shuffled=True, columns=4, rest=np.nan), kind, garbage=True)
    dense = read(cached, requests[0].q.dtype)
    q = np.stack([np.pad(r.q, ((0, 270 - len(r)), (0, 0), (0, 0))) for r in requests])
    lengths = np.array([len(r) for r in requests])
    whole = attend_to(q, cached, [0] * 3, lengths, **options)
    assert_same_bits(whole, attend_to(q, dense, [0] * 3, lengths, **options))
    for tokens in (1, 9):
        last = np.stack([r.q[len(r) - tokens :] for r in requests])
        result = attend_to(last, cached, lengths - tokens, lengths, **options)
        assert_same_bits(result, np.stack([o[n - tokens : n] for o, n in zip(whole, lengths, strict=True)]))
    plain = attend(q, pool(requests), [0] * 3, lengths, **options)[0]
    if name != "window of one":
        error = np.linalg.norm(whole[0].astype(np.float64) - plain) / np.linalg.norm(plain.astype(np.float64))
        assert 1e-4 < error < {"int8": 0.02, "fp8_e4m3": 0.1, "q4_0": 0.3}[kind]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_ragged_queries_have_the_bits_of_what_the_pages_are_read_as(kind: str) -> None:
    requests = [Request.random(length, "bfloat16", width=WIDTH) for length in (150, 20)]
    cached = quantized(pool(requests, rest=np.nan), kind)
    q = jnp.asarray(np.concatenate([requests[0].q[110:150], requests[1].q[:8]]))
    queries = cached.queries((110, 12), (150, 20), count=(40, 8), first_row=(0, 40))
    result, expected = (ops.attention(q, pages.kv, queries) for pages in (cached, read(cached, q.dtype)))
    assert_same_bits(result, expected)


@pytest.mark.sampled(1)
@every_kind
def test_a_key_that_is_nan_is_seen(kind: str) -> None:
    request = Request.random(140, "float32", width=WIDTH)
    request.k[20, 0, 3] = np.nan
    o = attend_to(request.q[None], quantized(pool([request]), kind), [0], [140])[0]
    assert_same_bits(np.isnan(o).any(axis=-1), np.pad(np.tile([[1, 1, 0, 0]], (120, 1)), ((20, 0), (0, 0))) == 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
def test_vmap_over_codes_or_scales_gives_the_bits_of_each(mapped: tuple[int | None, int | None]) -> None:
    requests = [Request.random(40, "float32", seed=seed, width=WIDTH) for seed in range(2)]
    pages = [ops.quantize_kv(jnp.asarray(pool([r]).k_pages), "int8") for r in requests]
    codes, scales = (jnp.stack([getattr(p, name) for p in pages]) for name in ("codes", "scales"))
    queries = ops.Queries(*(jnp.asarray(x, jnp.int32) for x in ([[0]], [0], [40])))

    def f(codes: jax.Array, scales: jax.Array) -> jax.Array:
        x = ops.QuantizedPages(codes, scales, "int8")
        return ops.attention(jnp.asarray(requests[0].q)[None], ops.KVPages(x, x), queries)

    arrays = [x if axis == 0 else x[0] for x, axis in zip((codes, scales), mapped, strict=True)]
    result = jax.vmap(f, in_axes=mapped)(*arrays)
    for i in range(2):
        example = [x[i] if axis == 0 else x for x, axis in zip(arrays, mapped, strict=True)]
        assert_same_bits(result[i], f(*example))


@every_kind
def test_xlas_own_attention_takes_quantized_pages(kind: str) -> None:
    request = Request.random(140, "float32", width=WIDTH)
    cached = quantized(pool([request]), kind)
    expected = attend_to(request.q[None], cached, [0], [140])
    with detjax.use_backend("stock"):
        result = attend_to(request.q[None], cached, [0], [140])
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
    assert not same_bits(result, expected)


@pytest.mark.sampled(2)
@every_kind
def test_tokens_are_written_as_whole_pages_are_quantized(kind: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, KV_BLOCK, 64)), jnp.bfloat16)
    page = jnp.broadcast_to(jnp.asarray([[2], [0], [1]]), (3, KV_BLOCK))
    slot = jnp.broadcast_to(jnp.arange(KV_BLOCK)[None], (3, KV_BLOCK))
    empty = ops.QuantizedPages.empty((3, 2, KV_BLOCK, 64), kind)
    assert_same_bits(ops.dequantize_kv(empty, "bfloat16"), jnp.zeros(empty.shape, jnp.bfloat16))
    written = empty.with_tokens(x[jnp.asarray([2, 0, 1])].swapaxes(1, 2), page, slot)
    assert_same_bits(written, ops.quantize_kv(x, kind))
    beyond = jnp.full_like(page, 3)
    nines = jnp.full((3, KV_BLOCK, 2, 64), 9, jnp.bfloat16)
    assert_same_bits(written.with_tokens(nines, beyond, slot), written)


# --- errors -----------------------------------------------------------------------------------------------------------

X = jnp.ones((2, 2, KV_BLOCK, 48))
INT8 = ops.QuantizedPages(jnp.zeros(X.shape, jnp.int8), jnp.zeros(X.shape[:3]), "int8")


def attention(k_pages: Any, v_pages: Any, **options: Any) -> jax.Array:
    queries = ops.Queries(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, 3, jnp.int32))
    kv = ops.KVPages(k_pages, v_pages)
    return unchecked(ops.attention)(jnp.ones((1, 3, 4, 48)), kv, queries, **options)


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: unchecked(ops.quantize_kv)(X, "int4"),
        ValueError,
        "quantize_kv: the quantization is 'int4'; accepted: int8, fp8_e4m3, q4_0",
    ),
    (lambda: ops.quantize_kv(X, "q4_0"), ValueError, "quantize_kv: q4_0 of 48 numbers; accepted: multiples of 32."),
    (
        lambda: ops.quantize_kv(X[:, :, :7], "int8"),
        ValueError,
        "quantize_kv: x has shape (2, 2, 7, 48); accepted: (2, 2, 128, 48)",
    ),
    (
        lambda: unchecked(ops.quantize_kv)(X.astype(jnp.int32), "int8"),
        TypeError,
        "quantize_kv: x has dtype int32",
    ),
    (
        lambda: ops.dequantize_kv(INT8, "int8"),
        TypeError,
        "dequantize_kv: dtype is int8; accepted: bfloat16, float16, float32",
    ),
    (
        lambda: attention(INT8, X),
        TypeError,
        "accepted: both of one dtype, or both quantized in the same way. Quantize the other with quantize_kv.",
    ),
    (
        lambda: attention(INT8, ops.quantize_kv(X, "fp8_e4m3")),
        TypeError,
        "accepted: both of one dtype, or both quantized in the same way",
    ),
    (
        lambda: attention(ops.QuantizedPages(INT8.codes, INT8.scales.astype(jnp.float16), "int8"), INT8),
        TypeError,
        "attention: kv.k.scales has dtype float16; accepted: float32, the kind being int8",
    ),
    (
        lambda: attention(INT8, ops.QuantizedPages(INT8.codes, INT8.scales, "fp8_e4m3")),
        TypeError,
        "attention: kv.v.codes has dtype int8; accepted: float8_e4m3fn, the kind being fp8_e4m3",
    ),
    (
        lambda: attention(ops.QuantizedPages(INT8.codes, INT8.scales[..., None], "int8"), INT8),
        ValueError,
        "attention: kv.k.scales has shape (2, 2, 128, 1); accepted: (2, 2, 128), kv.k.codes being",
    ),
    (
        lambda: attention(INT8, ops.QuantizedPages(INT8.codes[:1], INT8.scales[:1], "int8")),
        ValueError,
        "attention: kv.v has shape (1, 2, 128, 48); accepted: (2, 2, 128, 48), kv.k being (2, 2, 128, 48)",
    ),
    (
        lambda: jax.grad(lambda scale: attention(INT8, INT8, sinks=scale).sum())(jnp.ones(4)),
        NotImplementedError,
        "attention: gradients through pages that are quantized (int8); accepted: pages of q's dtype.",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[message for _, _, message in ERRORS])
def test_bad_input_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
