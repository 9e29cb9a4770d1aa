"""Attention's TPU kernel: in Pallas' interpreter, and as the text that a TPU's compiler is given."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # JAX has no public name for what races were found

import detjax
from detjax import ops
from detjax.bench.deviceless import kernels_of
from detjax.contract import KV_BLOCK
from detjax.pallas.tpu import attention
from detjax.pallas.tpu.attention import kernel as tpu_kernel
from detjax.portable import attention as portable_attention
from tests.pallas.tpu import attention_cases as tpu_attention_cases
from tests.support.attention_requests import OPTIONS, Requests
from tests.support.bits import assert_same_bits

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the TPU interpreter, a head of keys in each step."""
    monkeypatch.setattr(tpu_kernel, "MOST_HEADS", 1)
    monkeypatch.setattr(tpu_kernel, "_block_sum", _block_sum)
    with _interpreted():
        yield
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


def _block_sum(p: jax.Array) -> jax.Array:
    """The kernel's own takes XLA long to compile; of its result only the first lane means anything."""
    return jnp.pad(portable_attention.block_sum(p), ((0, 0), (0, KV_BLOCK - 1)), constant_values=np.nan)


def _interpreted(cores: int = 1) -> Any:
    parameters = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)
    return pltpu.force_tpu_interpret_mode(parameters)


def _requests(name: str, dtype: str, lengths: tuple[int, ...], **sizes: int) -> Requests:
    return Requests.random(lengths, **({"width": 16} | sizes), dtype=dtype, **OPTIONS[name])


def _forward(requests: Requests, **options: Any) -> Callable[..., Any]:
    return detjax.jit(functools.partial(attention.forward, masking=requests.masking, **options))


def _whole(requests: Requests) -> list[np.ndarray]:
    start = np.zeros(len(requests.lengths), int)
    return requests.own(_forward(requests)(*requests.operands(start, max(requests.lengths)))[0], start)


@pytest.mark.parametrize(("name", "dtype"), [("not causal", "float32"), ("everything", "bfloat16")])
def test_numbers_are_those_of_float64_and_of_the_portable_backend(name: str, dtype: str, interpreter: None) -> None:
    requests = _requests(name, dtype, (170, 129))
    operands = requests.operands(np.zeros(2, int), 170)
    o, normalizers = _forward(requests)(*operands)
    for actual, exact in zip(requests.own(o, np.zeros(2, int)), requests.exact(), strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    portable = detjax.jit(functools.partial(portable_attention.forward, masking=requests.masking))
    expected, expected_normalizers = portable(*operands)
    np.testing.assert_allclose(np.asarray(o, np.float32), np.asarray(expected, np.float32), atol=TOLERANCE[dtype])
    np.testing.assert_allclose(normalizers, expected_normalizers, rtol=1e-6, atol=1e-6)


def test_sums_of_a_block_have_the_contracts_order() -> None:
    p = np.random.default_rng(0).standard_normal((tpu_kernel.TPU_ATTENTION_ROWS, KV_BLOCK), np.float32)

    def kernel(p: Any, sums: Any) -> None:
        sums[...] = tpu_kernel._block_sum(p[...])

    with _interpreted():
        sums = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(p.shape, p.dtype))(p)
    assert_same_bits(sums[:, :1], portable_attention.block_sum(jnp.asarray(p)))


def test_decode_and_packed_requests_have_the_bits_of_prefill(interpreter: None) -> None:
    lengths = 160, 1, 70
    requests = _requests("everything", "bfloat16", lengths, heads=2, kv_heads=1)
    whole, forward = _whole(requests), _forward(requests, with_normalizers=False)
    for start in (0, 63, 64, 127, 128, 159):
        first = np.full(len(lengths), start)
        o = requests.own(forward(*requests.operands(first, 1))[0], first)
        assert_same_bits(o, [rows[start : start + 1] for rows in whole])

    counts, rows = (81, 0, 9), (0, 88, 88)
    start = np.array(lengths) - counts
    packed = np.full((104, *requests.q.shape[2:]), np.nan, requests.q.dtype)  # also where no request's queries are
    for q, first, count, row in zip(requests.q, start, counts, rows, strict=True):
        packed[row : row + count] = q[first : first + count]
    numbers = (jnp.asarray(x, jnp.int32) for x in (rows, counts, start, lengths))
    ragged = detjax.jit(functools.partial(attention.ragged, masking=requests.masking))
    pools = requests.k_pages, requests.v_pages, requests.page_table
    o = np.asarray(ragged(jnp.asarray(packed), *pools, *numbers, requests.sinks))
    for expected, first, count, row in zip(whole, start, counts, rows, strict=True):
        assert_same_bits(o[row : row + count], expected[first : first + count])


def test_a_request_has_the_bits_it_has_alone_whatever_its_neighbours_and_pages_are(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _requests("causal", "float32", (140, 200))
    *arrays, sinks = requests.operands(np.array([100, 150]), 70)
    q, k, v, page_table, *where = map(np.array, arrays)
    alone = np.asarray(_forward(requests)(q[:1, :40], k, v, page_table[:1], *(x[:1] for x in where), sinks)[0])
    assert np.isfinite(alone).all()
    for pages in (k, v):
        pages[page_table[1]] = np.nan
    q[1] = np.inf
    order = np.random.default_rng(0).permutation(len(k))  # page `order[i]` becomes page i
    page_table = np.argsort(order).astype(np.int32)[page_table]
    page_table[:, -1] = 10**6, -1  # behind the lengths
    # How many heads a step has, and which of two cores takes it, is a schedule.
    monkeypatch.setattr(tpu_kernel, "MOST_HEADS", 8)
    with _interpreted(cores=2):
        together = _forward(requests)(q[::-1], k[order], v[order], page_table[::-1], *(x[::-1] for x in where), sinks)
        assert_same_bits(np.asarray(together[0])[1, :40], alone[0])


def test_a_mask_stands_for_the_option_that_it_spells_out(interpreter: None) -> None:
    requests, start = _requests("causal", "float32", (140, 60)), np.zeros(2, int)
    uncausal = dataclasses.replace(requests, masking=dataclasses.replace(requests.masking, causal=False))
    forward, operands = _forward(uncausal), requests.operands(start, 140)
    mask = np.tril(np.ones((140, 140), bool))
    one, many = (
        requests.own(forward(*operands, np.broadcast_to(mask, (b, h, 140, 140)))[0], start) for b, h in ((1, 1), (2, 4))
    )
    assert_same_bits(one, many)
    for actual, exact in zip(one, requests.exact(), strict=True):
        np.testing.assert_allclose(actual, exact, atol=2e-6, rtol=2e-6)


def test_gradients_are_those_of_attention_by_the_textbook(interpreter: None) -> None:
    requests = _requests("causal", "float32", (40,), heads=2, kv_heads=1)
    operands = requests.operands(np.zeros(1, int), 40)
    operands[1:3] = (jnp.nan_to_num(x) for x in operands[1:3])
    do = jnp.asarray(np.random.default_rng(0).standard_normal(operands[0].shape), jnp.float32)

    def textbook(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> jax.Array:
        k, v = (pages[requests.page_table[0, 0], 0, :40] for pages in (k_pages, v_pages))
        s = jnp.einsum("thk,sk->hts", q[0], k) * requests.masking.scale
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((40, 40), bool))[None], s, -jnp.inf))
        return (jnp.einsum("hts,sv->thv", p, v)[None] * do).sum()

    o, normalizers = _forward(requests)(*operands)
    backward = detjax.jit(functools.partial(attention.backward, masking=requests.masking))
    found = backward(*operands, None, o, normalizers, do)[:3]
    expected = jax.jit(jax.grad(textbook, argnums=(0, 1, 2)))(*operands[:3])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


def test_pages_that_no_kernel_serves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests("causal", "bfloat16", (3,), width=32)
    quantized = dataclasses.replace(requests, k_pages=ops.quantize_kv(requests.k_pages, "int8"))
    with pytest.raises(NotImplementedError, match="quantized pages"):
        attention.forward(*quantized.operands(np.zeros(1, int), 3), masking=requests.masking)
    with pytest.raises(NotImplementedError, match="with 12 columns"):
        narrow = _requests("causal", "bfloat16", (3,), width=12)
        attention.forward(*narrow.operands(np.zeros(1, int), 3), masking=narrow.masking)
    monkeypatch.setattr(tpu_attention_cases, "COLUMNS", 320)
    with pytest.raises(NotImplementedError, match=r"a page table \(1024, 320\)"):
        _text(tpu_attention_cases.forward(1024, 1))


def _text(case: tuple[Callable[..., Any], tuple[Any, ...]]) -> str:
    fn, arguments = case
    (text,) = kernels_of(fn, *arguments)
    return text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_is_one_text_for_every_number_of_tokens(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"dtype": dtype, "heads": (8, 2)}
    expected = _text(tpu_attention_cases.forward(1, 1, **sizes))
    for batch, tokens in ((8, 1), (500, 1), (4, 4), (1, 128), (1, 500), (1, 4096)):
        assert _text(tpu_attention_cases.forward(batch, tokens, **sizes)) == expected
    monkeypatch.setattr(tpu_kernel, "TPU_ATTENTION_ROWS", 32)
    assert _text(tpu_attention_cases.forward(1, 1, **sizes)) != expected


def test_packed_requests_have_the_kernel_of_prefill() -> None:
    expected = _text(tpu_attention_cases.forward(1, 512))
    for rows, requests in ((8, 1), (512, 16)):
        assert _text(tpu_attention_cases.ragged(rows, requests)) == expected
