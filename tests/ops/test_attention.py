"""Attention's bits depend on a query, its position, and its request's keys: on no chunk, page, neighbour or phase."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from tests.ops.attention_cases import OPTIONS, Pool, Request, attend, in_chunks, pool, sinks, whole
from tests.support.bits import assert_same_bits, same_bits

every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])

SOME = ("everything", "causal")


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("everything", "bfloat16", (1, 61)),
        ("window", "float32", (1,)),
        ("not causal", "float16", (1,)),
        *(pytest.param(name, "float32", (1, 7, 64), marks=pytest.mark.nightly) for name in OPTIONS),
        *(
            pytest.param(name, dtype, (1, 7, 64), marks=pytest.mark.nightly)
            for name in SOME
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
def test_decode_and_chunked_prefill_give_the_bits_of_a_whole_prefill(
    name: str, dtype: str, sizes: tuple[int, ...]
) -> None:
    options = OPTIONS[name]
    request = Request.random(270, dtype)
    expected = whole(request, **options)
    for size in sizes:
        assert_same_bits(in_chunks(request, size, **options), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(2, 2, 8), (4, 1, 64), (6, 2, 80), (2, 2, 96), (5, 1, 16), (6, 2, 128)]
)
def test_heads_of_any_number_and_width_decode_to_the_bits_of_prefill(heads: int, kv_heads: int, width: int) -> None:
    request = Request.random(150, "bfloat16", heads=(heads, kv_heads), width=width)
    expected = whole(request)
    for size in (1, 40):
        assert_same_bits(in_chunks(request, size), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SOME)
def test_requests_packed_into_one_array_have_the_bits_of_each_alone(name: str) -> None:
    options = OPTIONS[name]
    requests = [Request.random(length) for length in (300, 17, 1, 129)]
    queries, first_rows = (40, 17, 1, 0), (0, 40, 64, 72)
    packed = np.full((80, *requests[0].q.shape[1:]), np.nan, np.float32)  # also where no request's queries are
    for request, count, row in zip(requests, queries, first_rows, strict=True):
        packed[row : row + count] = request.q[len(request) - count :]
    cached = pool(requests)
    starts = [len(request) - count for request, count in zip(requests, queries, strict=True)]
    stand = cached.queries(starts, [len(request) for request in requests], count=queries, first_row=first_rows)
    given = dict(options, sinks=sinks(packed.shape[1], "float32")) if options.get("sinks") else options
    o = np.asarray(ops.attention(jnp.asarray(packed), cached.kv, stand, **given))
    for index, (request, count, row) in enumerate(zip(requests, queries, first_rows, strict=True)):
        if count:
            q = request.q[None, len(request) - count :]
            alone = attend(q, cached.alone(index), [len(request) - count], [len(request)], **options)[0]
            assert_same_bits(o[row : row + count], alone)


@pytest.mark.sampled(1)
# The negative control; a window of one key leaves nothing to add in another order.
@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"window of one"}))
def test_xlas_own_attention_decodes_to_other_bits_than_prefill(name: str) -> None:
    request = Request.random(270)
    with detjax.use_backend("stock"):
        assert not same_bits(in_chunks(request, 1, **OPTIONS[name]), whole(request, **OPTIONS[name]))


@pytest.mark.sampled(1)
@every_dtype
def test_a_request_gives_the_same_bits_in_any_batch_slot_and_pages(dtype: str) -> None:
    options = OPTIONS["everything"]
    lengths = (300, 1, 129, 128, 17)
    requests = [Request.random(length, dtype) for length in lengths]
    q = np.zeros((len(requests), 300, *requests[0].q.shape[1:]), requests[0].q.dtype)
    for row, request in enumerate(requests):
        q[row, : len(request)] = request.q
    plain = pool(requests)
    alone = [attend(q[[row]], plain.alone(row), [0], [n], **options)[0, :n] for row, n in enumerate(lengths)]
    assert_same_bits(alone[0], whole(requests[0], **options))
    pools = {
        "in order": plain,
        "shuffled, and a longer page table": pool(requests, shuffled=True, columns=7),
        "NaN in all that is nobody's": pool(requests, shuffled=True, columns=7, rest=np.nan, beyond=10**6),
        "infinity, and pages that do not exist": pool(requests, shuffled=True, columns=7, rest=np.inf, beyond=-1),
    }
    for name, cached in pools.items():
        for order in (slice(None), slice(None, None, -1)):
            reordered = Pool(cached.k_pages, cached.v_pages, cached.page_table[order])
            together = attend(q[order], reordered, [0] * len(lengths), lengths[order], **options)[order]
            results = [same_bits(o[: len(e)], e) for o, e in zip(together, alone, strict=True)]
            assert results == [True] * len(lengths), name


@pytest.mark.parametrize(
    "batch", [1, 33, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in (2, 17, 128, 257, 1024))]
)
def test_a_decoded_token_is_the_same_at_every_batch_size_and_slot(batch: int) -> None:
    request = Request.random(140)
    last = len(request) - 1
    expected = whole(request)[last]
    crowd = Request.random(60, seed=1)
    cached = pool([request, crowd])
    for slot in sorted({0, batch // 2, batch - 1}):
        q = np.stack([crowd.q[-1]] * batch)[:, None]
        page_table = np.stack([cached.page_table[1]] * batch)
        start, length = np.full(batch, len(crowd) - 1), np.full(batch, len(crowd))
        q[slot], page_table[slot], start[slot], length[slot] = request.q[last], cached.page_table[0], last, last + 1
        together = attend(q, Pool(cached.k_pages, cached.v_pages, page_table), start, length)
        assert_same_bits(together[slot, 0], expected)


@pytest.mark.parametrize("content", [0.0, 3e38, np.inf, np.nan], ids=lambda x: f"{x:g}")
def test_a_request_does_not_see_what_its_neighbours_contain(content: float) -> None:
    request, neighbour = Request.random(140), Request.random(135)
    poisoned = Request(*(np.full_like(x, content) for x in (neighbour.q, neighbour.k, neighbour.v)))
    for requests in ([request, poisoned], [poisoned, request]):
        q = np.stack([np.pad(r.q, ((0, 140 - len(r)), (0, 0), (0, 0))) for r in requests])
        together = attend(q, pool(requests), [0, 0], [len(r) for r in requests])
        assert_same_bits(together[requests.index(request), :140], whole(request))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dtype"), [("causal", "float16"), ("everything", "bfloat16"), ("everything", "float32")]
)
def test_keys_and_values_in_pages_give_the_bits_of_contiguous_ones(name: str, dtype: str) -> None:
    options = OPTIONS[name]
    request = Request.random(200, dtype)
    arrays = [jnp.asarray(x)[None] for x in (request.q, request.k, request.v)]
    given = options | ({"sinks": sinks(4, dtype)} if "sinks" in options else {})
    expected = whole(request, **options)
    assert_same_bits(ops.dot_product_attention(*arrays, **given)[0], expected)
    last = ops.dot_product_attention(arrays[0][:, -16:], *arrays[1:], **given)
    assert_same_bits(last[0], expected[-16:])


def test_dot_product_attention_takes_lengths_and_starts_per_request() -> None:
    requests = [Request.random(length, seed=2) for length in (130, 40)]
    padded = [np.pad(r.k, ((0, 130 - len(r)), (0, 0), (0, 0)), constant_values=np.nan) for r in requests]
    k = jnp.asarray(np.stack(padded))
    q = jnp.asarray(np.stack([r.q[10:20] for r in requests]))
    o = ops.dot_product_attention(
        q, k, k, kv_length=jnp.asarray([130, 40], jnp.int32), q_start=jnp.asarray([10, 10], jnp.int32)
    )
    for row, request in enumerate(requests):
        assert_same_bits(o[row], whole(Request(request.q, request.k, request.k))[10:20])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_that_a_query_does_not_see_change_nothing(name: str) -> None:
    options = OPTIONS[name]
    request = Request.random(270)
    first, last = 130, 140
    expected = whole(request, **options)[first:last]
    seen = np.arange(270) < (270 if options.get("causal") is False else last)
    if "window" in options:
        seen &= np.arange(270) > first - options["window"]
    k, v = (np.where(seen[:, None, None], x, np.float32(1e3)) for x in (request.k, request.v))
    changed = Request(request.q, k, v)
    assert_same_bits(attend(request.q[None, first:last], pool([changed]), [first], [270], **options)[0], expected)


def test_blocks_that_are_skipped_change_nothing() -> None:
    request = Request.random(140)
    expected = whole(request)
    assert_same_bits(whole(request, window=140), expected)
    # The last query sees every key, so that masking leaves out nothing; its tile's padding rows follow it.
    last = request.q[None, -1:]
    assert_same_bits(attend(last, pool([request]), [139], [140], causal=False)[0], expected[-1:])
    # Entries of blocks before the window are not read either: the first key of query 138 is the second page's first.
    cached = pool([request], rest=np.nan)
    cached.page_table[0, 0] = -1
    assert_same_bits(attend(request.q[None, 138:], cached, [138], [140], window=11)[0], whole(request, window=11)[138:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "bfloat16"),
        ({}, "float16"),
        ({}, "float32"),
        *((given, "float32") for given in ({"sinks": True}, {"soft_cap": 2.0}, {"window": 3})),
    ],
    ids=str,
)
def test_a_query_that_sees_no_key_gives_zeros(given: dict[str, Any], dtype: str) -> None:
    request = Request.random(140, dtype)
    cached = pool([request, request], rest=np.nan)
    q = np.stack([request.q[:9], request.q[:9]])
    o = attend(q, cached, [0, -4], [0, 140], **given)
    assert_same_bits(o[0], np.zeros_like(o[0]))
    assert_same_bits(o[1, :4], np.zeros_like(o[1, :4]))
    assert np.any(o[1, 4:] != 0)


def test_a_window_behind_all_keys_gives_zeros() -> None:
    request = Request.random(140)
    o = attend(request.q[None, :5], pool([request]), [200], [140], window=3)
    assert_same_bits(o, np.zeros_like(o))


@pytest.mark.parametrize(
    ("mapped", "dtype"),
    [
        ("k v", "float32"),
        ("q k v sinks", "bfloat16"),
        *(pytest.param(mapped, "float32", marks=pytest.mark.nightly) for mapped in ("q", "sinks", "q k v sinks")),
    ],
)
def test_vmap_gives_the_bits_of_each(mapped: str, dtype: str) -> None:
    requests = [Request.random(140, dtype, seed=seed) for seed in range(3)]
    stacks = {name: jnp.stack([jnp.asarray(getattr(r, name))[None] for r in requests]) for name in "qkv"}
    stacks["sinks"] = jnp.stack([sinks(4, dtype) * factor for factor in (1, 2, 0)])
    operands = {name: x if name in mapped.split() else x[0] for name, x in stacks.items()}
    axes = {name: 0 if name in mapped.split() else None for name in stacks}

    @detjax.jit
    def f(operands: dict[str, jax.Array]) -> jax.Array:
        return ops.dot_product_attention(**operands, window=100)

    results = detjax.jit(jax.vmap(f, in_axes=(axes,)))(operands)
    for i in range(3):
        alone = f({name: np.asarray(x)[i] if axes[name] == 0 else x for name, x in operands.items()})
        assert_same_bits(np.asarray(results)[i], alone)


@pytest.mark.sampled(1)
@every_dtype
def test_a_program_with_the_cache_as_a_constant_gives_the_same_bits(dtype: str) -> None:
    request = Request.random(140, dtype)
    q, k, v = (jnp.asarray(x)[None] for x in (request.q, request.k, request.v))
    expected = whole(request)
    for _ in range(2):
        assert_same_bits(ops.dot_product_attention(q, k, v)[0], expected)
    assert_same_bits(jax.jit(lambda q: ops.dot_product_attention(q, k, v))(q)[0], expected)
    assert_same_bits(detjax.jit(lambda: ops.dot_product_attention(q, k, v) * 2)()[0] / 2, expected)
