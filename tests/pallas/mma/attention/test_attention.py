"""Attention on `mma.sync` in Pallas' interpreter has the bits of the contract as NumPy computes it, in every phase."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.pallas.hopper import mosaic
from detjax.pallas.mma import attention as mma_attention
from detjax.pallas.mma.attention import kernel
from detjax.pallas.mma.attention.schedule import Schedule
from tests.contract import emulation
from tests.contract.emulation import Products
from tests.pallas.mma.attention.requests import MmaRequests
from tests.support import attention_contract
from tests.support.attention_contract import as_read, narrow
from tests.support.attention_requests import INTERPRETER, assert_close, causal_mask, mask_of_heads
from tests.support.bits import assert_same_bits, same_bits


def in_steps(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Products of two matrices as the twin of `mma.sync` adds them: 16 of K, then their sum to the accumulator."""
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for first in range(0, x.shape[1], 16):
        total = total + emulation.matmul(x[:, first : first + 16], w[first : first + 16])
    return total


PRODUCTS = Products(in_steps, *[emulation.unfused] * 3)
assert_rows_have_the_contracts_bits = functools.partial(
    attention_contract.assert_rows_have_the_contracts_bits, products=PRODUCTS
)


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Kernels run in Pallas' interpreter, with the plain-JAX twins of all primitives."""
    with mosaic.twins(), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


in_the_interpreter = pytest.mark.usefixtures("interpreter")


# --- prefill ----------------------------------------------------------------------------------------------------------

PREFILL: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], dict[int, tuple[int, ...]]]] = {
    "causal": ((140, 9), (0, 0), {}, {0: (0, 63, 64, 127, 128, 139), 1: (0, 8)}),
    "not causal": ((129, 3), (60, 0), {"causal": False, "dtype": "bfloat16"}, {0: (60, 64, 128), 1: (0, 2)}),
    "window of two": (
        (129, 2),
        (0, 0),
        {"window": 2, "soft_cap": 1.0, "sinks": True, "alibi": True},
        {0: (0, 1, 64, 126, 127, 128), 1: (0, 1)},
    ),
    "chunk": ((129, 257), (112, 240), {"alibi": True}, {0: (126, 127, 128), 1: (254, 255, 256)}),
}
"""Lengths, first tokens of the call, options, and the tokens that are compared."""


def some_nightly(names: Iterable[str], chosen: Sequence[str]) -> list[Any]:
    """The names as parameters; every run tests the chosen ones."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@in_the_interpreter
@pytest.mark.parametrize("name", some_nightly(PREFILL, ["window of two", "chunk"]))
def test_prefill_has_the_bits_of_the_contract(name: str) -> None:
    lengths, start, options, tokens = PREFILL[name]
    requests, count = MmaRequests.random(lengths, 2, 1, 16, **options), max(np.subtract(lengths, start))
    forward = detjax.jit(functools.partial(mma_attention.forward, masking=requests.masking))
    o, normalizers = map(np.asarray, forward(requests.operands(np.array(start), int(count))))
    rows = [x[: n - first] for x, n, first in zip(o, lengths, start, strict=True)]
    assert_rows_have_the_contracts_bits(requests, rows, start, tokens)
    exact = requests.exact()
    assert_close(rows, [x[first:] for x, first in zip(exact, start, strict=True)])
    for request, chosen in tokens.items():
        for token in chosen:
            _, normalizer = attention_contract.expected(requests, request, token, 1, PRODUCTS)
            actual = normalizers[request, token - start[request], 1]
            np.testing.assert_allclose(actual, normalizer, rtol=1e-6, atol=1e-6)


@in_the_interpreter
@pytest.mark.parametrize(
    ("width", "value_width"),
    [(192, 80), pytest.param(256, 256, marks=pytest.mark.nightly), pytest.param(48, 128, marks=pytest.mark.nightly)],
)
def test_packed_queries_of_any_width_have_the_bits_of_the_contract(width: int, value_width: int) -> None:
    """Parts of 64 columns and less; a request of two tiles, one that ends within a tile, and one without queries."""
    requests = narrow(MmaRequests.random((131, 20, 1), 1, 1, width, sinks=True), value_width)
    rows = requests.ragged((70, 3, 0))
    tokens = {0: (61, 64, 124, 125, 127, 128, 130), 1: (17, 19)}
    assert_rows_have_the_contracts_bits(requests, rows, (61, 17, 1), tokens)


@in_the_interpreter
def test_padding_rows_of_packed_queries_are_zeros() -> None:
    requests = MmaRequests.random((9, 3), 1, 1, 16)
    start, length, count = jnp.array([0, 0]), jnp.array([9, 3]), jnp.array([9, 3])
    queries = ops.Queries(requests.page_table, start, length, count, jnp.array([0, 16]))
    q = jnp.full((32, 1, 16), jnp.nan, requests.q.dtype)
    operands = requests.operands(requests.last(1), 1)._replace(q=q, queries=queries)
    forward = detjax.jit(functools.partial(mma_attention.ragged_with_normalizers, masking=requests.masking))
    o, _ = map(np.asarray, forward(operands))
    is_given = np.zeros(32, bool)
    is_given[:9] = is_given[16:19] = True
    assert np.isnan(o[is_given]).all()
    assert_same_bits(o[~is_given], np.zeros_like(o[~is_given]))


# --- decode -----------------------------------------------------------------------------------------------------------

DECODE: dict[str, tuple[tuple[int, ...], int, Schedule, dict[str, Any]]] = {
    "causal": ((129, 1, 128), 3, Schedule(2), {"alibi": True}),
    "not causal": ((129, 3), 2, Schedule(5), {"causal": False, "soft_cap": 1.0, "dtype": "bfloat16"}),
    # The first keys of the windows are the last, the first and the last one of a block.
    "window of two": ((129, 130, 257), 1, Schedule(), {"window": 2, "sinks": True}),
    # A window that begins with the last key of a block, and six blocks on three CTAs: four of them are unmerged.
    # One sequence has fewer blocks than CTAs.
    "split": ((9, 777), 2, Schedule(splits=3), {"window": 649, "soft_cap": 1.0, "sinks": True}),
}
"""Lengths, last tokens of each request, schedule, options."""


@in_the_interpreter
@pytest.mark.parametrize("name", some_nightly(DECODE, ["window of two", "split"]))
def test_decode_has_the_bits_of_the_contract(name: str) -> None:
    lengths, count, schedule, options = DECODE[name]
    requests = MmaRequests.random(lengths, 2, 1, 64, **options)
    start = requests.last(count)
    rows = requests.decode(start, count, schedule)
    tokens = {i: range(first, length) for i, (first, length) in enumerate(zip(start, lengths, strict=True))}
    assert_rows_have_the_contracts_bits(requests, rows, start.tolist(), tokens)


@in_the_interpreter
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "count"),
    [
        (33, 1, 80, 16, 2),  # a tile for each token, and rows that fill no unit of 8
        pytest.param(14, 2, 64, 192, 11, marks=pytest.mark.nightly),
        pytest.param(65, 1, 16, 16, 2, marks=pytest.mark.nightly),
    ],
)
def test_heads_of_any_number_decode_to_the_bits_of_the_contract(
    heads: int, kv_heads: int, width: int, value_width: int, count: int
) -> None:
    requests = narrow(MmaRequests.random((20,), heads, kv_heads, width, sinks=True), value_width)
    start = requests.last(count)
    rows = requests.decode(start, count)
    tokens = {i: sorted({first, length - 1}) for i, (first, length) in enumerate(zip(start, (20,), strict=True))}
    assert_rows_have_the_contracts_bits(requests, rows, start.tolist(), tokens)


@in_the_interpreter
def test_more_than_a_group_of_blocks_at_once_are_merged_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first CTA merges one block of twelve; the others are a group of eight, and three more."""
    monkeypatch.setattr(importlib.import_module("detjax.pallas.mma.attention.merge"), "_AT_ONCE", 8)
    requests = MmaRequests.random((1500,), 1, 1, 64, sinks=True)
    start = requests.last(4)
    rows = requests.decode(start, 4, Schedule(splits=12))
    assert_rows_have_the_contracts_bits(requests, rows, start.tolist(), {0: range(1496, 1500)})


@in_the_interpreter
@pytest.mark.parametrize("fault", some_nightly(["factors", "statistics of a split", "sums"], ["factors"]))
def test_a_fault_gives_other_bits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the comparisons above can see a difference."""
    requests = MmaRequests.random((300,), 2, 1)
    start = requests.last(1)
    exact = attention_contract.expected(requests, 0, 299, 0, PRODUCTS)[0]
    schedule = Schedule(splits=3) if fault == "statistics of a split" else Schedule()
    (row,) = requests.decode(start, 1, schedule)
    assert same_bits(row[0, 0], exact)

    def rescaling(m: jax.Array, m_b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        m_new = jnp.maximum(m, m_b) + 0.3
        return m_new, jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)

    def row_sums(p: jax.Array) -> jax.Array:
        return p[:, ::2].sum(axis=1) + p[:, 1::2].sum(axis=1) + 1e-3

    def merged_twice(refs: Any, *rest: Any) -> Any:
        return store_statistics(refs, rest[0], (rest[1][0], rest[1][1] * 1.001))

    store_statistics = functools.partial(kernel.Kernel.store_statistics, None)
    faults: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "factors": (kernel, "rescaling", rescaling),
        "sums": (kernel, "row_sums", row_sums),
        "statistics of a split": (kernel.Kernel, "store_statistics", lambda _, *args: merged_twice(*args)),
    }
    monkeypatch.setattr(*faults[fault])
    (row,) = requests.decode(start, 1, schedule)
    assert not same_bits(row[0, 0], exact)


# --- quantized pages --------------------------------------------------------------------------------------------------


@in_the_interpreter
@pytest.mark.parametrize(
    ("kind", "phase", "copies"),
    [
        ("int8", "decode", 1),
        pytest.param("q4_0", "decode", 1, marks=pytest.mark.nightly),
        pytest.param("fp8_e4m3", "decode", 1, marks=pytest.mark.nightly),
        pytest.param("q4_0", "packed", 3, marks=pytest.mark.nightly),
        pytest.param("fp8_e4m3", "prefill", 1, marks=pytest.mark.nightly),
    ],
)
def test_quantized_pages_have_the_bits_of_what_they_are_read_as(kind: str, phase: str, copies: int) -> None:
    """Pools with as many pages as the page tables have, and with more."""
    quantized, dense = as_read(MmaRequests.random((130, 9), 2, 1, 32, window=100, sinks=True), kind)
    pools = (quantized.k_pages, quantized.v_pages)
    k_pages, v_pages = (jax.tree.map(lambda x: jnp.concatenate([x] * copies), pages) for pages in pools)
    requests, start = dataclasses.replace(quantized, k_pages=k_pages, v_pages=v_pages), np.array([127, 6])
    rows = {
        "decode": lambda: requests.decode(start, 3),
        "prefill": lambda: requests.prefill(start, 3),
        "packed": lambda: requests.ragged((3, 3)),
    }[phase]()
    assert_rows_have_the_contracts_bits(dense, rows, start.tolist(), {0: (127, 128, 129), 1: (6, 8)})


# --- masks ------------------------------------------------------------------------------------------------------------


@in_the_interpreter
def test_a_causal_mask_has_the_bits_of_causal_attention() -> None:
    requests = MmaRequests.random((129,), 1, 1, 16, sinks=True)
    rows = requests.with_mask(causal_mask(requests))
    assert_rows_have_the_contracts_bits(requests, rows, [0], {0: (0, 1, 63, 64, 127, 128)})


@in_the_interpreter
def test_every_head_has_its_own_mask() -> None:
    requests = MmaRequests.random((70, 66), 2, 1, 16, causal=False)
    mask = mask_of_heads(requests)
    rows = requests.with_mask(mask)
    for request, length in enumerate(requests.lengths):
        for head in range(2):
            q, k, v = (
                np.asarray(x[request, :length, index], np.float64)
                for x, index in ((requests.q, head), (requests.k, 0), (requests.v, 0))
            )
            s = np.where(mask[0, head, :length, :length], q @ k.T * requests.masking.scale, -np.inf)
            p = np.exp(s - np.maximum(s.max(axis=1, keepdims=True), -1e30))
            exact = p / np.maximum(p.sum(axis=1, keepdims=True), 1e-30) @ v
            np.testing.assert_allclose(rows[request][:, head].astype(np.float64), exact, atol=4e-3)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "width", "words"),
    [
        (
            "float32",
            64,
            r"attention: q has dtype float32 on .*; accepted by the backend 'mma': bfloat16, float16. Cast",
        ),
        ("bfloat16", 72, r"attention: q has 72 columns and v_pages has 72 columns on .*; accepted .*: 16, .* 512. Pad"),
        ("bfloat16", 160, r"'portable', which takes them"),
    ],
)
def test_what_no_kernel_serves_is_refused(dtype: str, width: int, words: str) -> None:
    requests = MmaRequests.random((3,), 2, 2, width, dtype=dtype)
    operands = requests.operands(requests.last(3), 3)
    with pytest.raises(NotImplementedError, match=words):
        mma_attention.forward(operands, masking=requests.masking)
    with pytest.raises(NotImplementedError, match=words):
        mma_attention.ragged(operands._replace(q=operands.q[0]), masking=requests.masking)


def test_a_schedule_without_a_slot_to_load_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="stages is 1 and splits 1; accepted: at least 2 and at least 1"):
        Schedule(1)


def test_ctas_may_be_more_than_cuda_allows_in_its_other_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, grids, kernel_of_pallas = MmaRequests.random((64,), 32, 8, 16), [], plgpu.kernel

    def seen(body: Any, **options: Any) -> Any:
        grids.append(options["grid"])
        return kernel_of_pallas(body, **options)

    monkeypatch.setattr(plgpu, "kernel", seen)
    operands = requests.operands(np.zeros(1, int), 64)._replace(kv=None)  # pyright: ignore[reportArgumentType]
    operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4096, *x.shape[1:]), x.dtype), operands)
    jax.eval_shape(
        lambda operands: mma_attention.forward(operands._replace(kv=requests.kv), masking=requests.masking), operands
    )
    assert grids == [(1, 4096 * 32)]


def test_sequences_are_split_where_ctas_are_few() -> None:
    def splits(batch: int, blocks: int) -> int:
        problem = kernel.Problem(
            tiles=batch, tile_rows=8, heads=8, heads_per_key_head=1, group=4, blocks=blocks, width=128,
            value_width=128, dtype=jnp.bfloat16,
        )  # fmt: skip
        return mma_attention.default_schedule(problem, may_split=True).splits

    assert (splits(1, 16), splits(1, 1000), splits(33, 16), splits(1000, 16)) == (16, 33, 1, 1)
