"""Hopper attention kernels in Pallas' interpreter have the bits of the contract as NumPy computes it.

Borders are where positions meet blocks of 128 keys, tiles of 128 queries and halves of 64: a query whose window begins
with the last key of a block, or one whose own key is the last but one of a block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.pallas.hopper import attention as hopper_attention
from detjax.pallas.hopper.attention import decode_kernel, prefill
from detjax.pallas.hopper.attention.decode import Schedule
from detjax.pallas.hopper.attention.prefill_schedule import default_schedule
from tests.support.attention_contract import as_read, assert_rows_have_the_contracts_bits, expected, narrow
from tests.support.attention_requests import INTERPRETER, Requests, in_the_interpreter
from tests.support.bits import same_bits

# --- prefill ----------------------------------------------------------------------------------------------------------

PREFILL: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], dict[int, tuple[int, ...]]]] = {
    "causal": ((140, 9, 260), (0, 0, 0), {}, {0: (0, 63, 64, 127, 128, 139), 1: (0, 8), 2: (1, 200, 256, 259)}),
    "not causal": ((129, 3), (0, 0), {"causal": False, "soft_cap": 1.0}, {0: (0, 63, 64, 128), 1: (0, 2)}),
    "window of two": (
        (129, 2),
        (0, 0),
        {"window": 2, "soft_cap": 1.0, "sinks": True, "alibi": True},
        {0: (0, 1, 64, 126, 127, 128), 1: (0, 1)},
    ),
    "window of 255": ((256,), (0,), {"window": 255, "sinks": True, "dtype": "bfloat16"}, {0: (0, 191, 192, 254, 255)}),
    "chunk": ((129, 257), (126, 254), {"alibi": True}, {0: (126, 127, 128), 1: (254, 255, 256)}),
}
"""Lengths, first tokens of the call, options, and the tokens that are compared."""


@in_the_interpreter
@pytest.mark.parametrize("name", PREFILL)
def test_prefill_has_the_bits_of_the_contract(name: str) -> None:
    lengths, start, options, tokens = PREFILL[name]
    requests, count = Requests.random(lengths, 2, 1, 16, **options), max(np.subtract(lengths, start))
    forward = detjax.jit(functools.partial(hopper_attention.forward, masking=requests.masking))
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        o, normalizers = map(np.asarray, forward(requests.operands(np.array(start), int(count))))
    assert_rows_have_the_contracts_bits(requests, o, start, tokens)
    normalizers = normalizers.reshape(2, len(lengths), -1)
    for request, chosen in tokens.items():
        _, normalizer = expected(requests, request, chosen[-1], 1)
        actual = normalizers[1, request, chosen[-1] - start[request]]
        np.testing.assert_allclose(actual, normalizer, rtol=1e-6, atol=1e-6)


@in_the_interpreter
def test_ragged_queries_have_the_bits_of_the_contract() -> None:
    requests, counts = Requests.random((260, 131, 1, 20), 2, 1, 16, sinks=True), (130, 3, 1, 0)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.ragged(counts)
    tokens = {0: (130, 131, 257, 258, 259), 1: (128, 129, 130), 2: (0,)}
    assert_rows_have_the_contracts_bits(requests, rows, np.subtract(requests.lengths, counts).tolist(), tokens)


@in_the_interpreter
@pytest.mark.parametrize(
    ("width", "persistent", "product_turns"),
    [
        (256, False, True),
        pytest.param(192, True, True, marks=pytest.mark.nightly),
        pytest.param(256, True, False, marks=pytest.mark.nightly),
        pytest.param(192, False, False, marks=pytest.mark.nightly),
    ],
)
def test_wide_rows_have_the_bits_of_the_contract_in_every_schedule(
    width: int, persistent: bool, product_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule(problem: prefill.Problem) -> prefill.Schedule:
        return dataclasses.replace(default_schedule(problem), persistent=persistent, product_turns=product_turns)

    monkeypatch.setattr(prefill, "default_schedule", schedule)
    requests = Requests.random((140, 5), 1, 1, width, sinks=True)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.whole()
    assert_rows_have_the_contracts_bits(requests, rows, (0, 0), {0: (0, 63, 64, 127, 128, 139), 1: (0, 4)})


@in_the_interpreter
@pytest.mark.parametrize(
    ("width", "value_width"),
    [
        (192, 128),
        pytest.param(192, 64, marks=pytest.mark.nightly),
        pytest.param(256, 128, marks=pytest.mark.nightly),
        pytest.param(256, 192, marks=pytest.mark.nightly),
    ],
)
def test_wide_keys_have_values_of_any_width(width: int, value_width: int) -> None:
    """Ragged queries: two requests that end within a tile, and one that is two tiles."""
    requests = narrow(Requests.random((130, 20, 1), 1, 1, width, window=2, sinks=True), value_width)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.ragged((130, 3, 1))
    tokens = {0: (0, 1, 64, 127, 128, 129), 1: (17, 19), 2: (0,)}
    assert_rows_have_the_contracts_bits(requests, rows, (0, 17, 0), tokens)


# --- decode -----------------------------------------------------------------------------------------------------------

WHOLE, SPLIT = Schedule(2, cut=False), Schedule(3, slack=0.0)

DECODE: dict[str, tuple[tuple[int, ...], int, Schedule, dict[str, Any]]] = {
    "causal": ((129, 1, 128, 260), 3, WHOLE, {"alibi": True}),
    "not causal": ((129, 3), 2, WHOLE, {"causal": False, "soft_cap": 1.0, "dtype": "bfloat16"}),
    # The first keys of the windows are the last, the first and the last one of a block.
    "window of two": ((129, 130, 257), 1, WHOLE, {"window": 2, "sinks": True}),
    # A window that begins with the last key of a block, and eight blocks on three CTAs: the second and the third one
    # leave five unmerged, which are two whole loads and a part of one. ALiBi would leave weight only in the last block.
    "split": ((9, 777), 2, SPLIT, {"window": 649, "soft_cap": 1.0, "sinks": True}),
    # The last pages are copied in parts of 32 rows.
    "parts of pages": ((32, 33, 96, 97), 1, WHOLE, {"causal": False}),
    # More CTAs than sequences; cuts move to the ends of sequences.
    "many CTAs": ((300, 17), 1, Schedule(5, slack=0.4), {"sinks": True}),
}
"""Lengths, last tokens of each request, schedule, options."""


@in_the_interpreter
@pytest.mark.parametrize("name", DECODE)
def test_decode_has_the_bits_of_the_contract(name: str) -> None:
    lengths, count, schedule, options = DECODE[name]
    requests = Requests.random(lengths, 2, 1, 64, **options)
    start = requests.last(count)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.decode(start, count, schedule)
    tokens = {i: range(first, length) for i, (first, length) in enumerate(zip(start, lengths, strict=True))}
    assert_rows_have_the_contracts_bits(requests, rows, start.tolist(), tokens)


@in_the_interpreter
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "count"),
    [
        (33, 1, 80, 80, 2),  # a tile for each token, which does not fill its columns; the chunks of values overlap
        (2, 2, 192, 128, 1),  # keys and values have rings of their own
        pytest.param(2, 1, 256, 256, 16, marks=pytest.mark.nightly),
        pytest.param(7, 1, 80, 80, 11, marks=pytest.mark.nightly),
        pytest.param(7, 1, 96, 96, 11, marks=pytest.mark.nightly),
    ],
)
def test_heads_of_any_number_and_width_decode_to_the_bits_of_the_contract(
    heads: int, kv_heads: int, width: int, value_width: int, count: int
) -> None:
    requests = narrow(Requests.random((140, 5), heads, kv_heads, width), value_width)
    start = requests.last(count)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.decode(start, count, WHOLE)
    tokens = {i: sorted({first, length - 1}) for i, (first, length) in enumerate(zip(start, (140, 5), strict=True))}
    assert_rows_have_the_contracts_bits(requests, rows, start.tolist(), tokens)


@in_the_interpreter
def test_another_rounding_of_the_factors_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the comparisons above can see a difference."""

    def rescaling(m: jax.Array, m_b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        m_new = jnp.maximum(m, m_b) + 0.3
        return m_new, jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)

    requests = Requests.random((300,), 2, 1)
    monkeypatch.setattr(decode_kernel, "rescaling", rescaling)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        (row,) = requests.decode(requests.last(1), 1, WHOLE)
    assert not same_bits(row[0, 0], expected(requests, 0, 299, 0)[0])


# --- quantized pages --------------------------------------------------------------------------------------------------


@in_the_interpreter
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("int8", {"window": 2, "sinks": True}),
        ("q4_0", {"causal": False, "dtype": "bfloat16"}),
        pytest.param("fp8_e4m3", {"dtype": "bfloat16"}, marks=pytest.mark.nightly),
    ],
)
def test_quantized_pages_decode_to_the_bits_of_what_they_are_read_as(kind: str, options: dict[str, Any]) -> None:
    quantized, dense = as_read(Requests.random((130, 1), 2, 1, 64, **options), kind)
    start = quantized.last(2)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = quantized.decode(start, 2, WHOLE)
    assert_rows_have_the_contracts_bits(dense, rows, start.tolist(), {0: (128, 129), 1: (0,)})


@in_the_interpreter
@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        ("fp8_e4m3", True),
        pytest.param("q4_0", False, marks=pytest.mark.nightly),
        pytest.param("int8", True, marks=pytest.mark.nightly),
    ],
)
def test_quantized_pages_prefill_to_the_bits_of_what_they_are_read_as(kind: str, packed: bool) -> None:
    """The windows begin with the last key of the first block; only the pages of two requests are dequantized."""
    quantized, dense = as_read(Requests.random((259, 17), 2, 1, 32, window=130, sinks=True), kind)
    pools = (quantized.k_pages, quantized.v_pages)
    k_pages, v_pages = (jax.tree.map(lambda x: jnp.concatenate([x] * 2), pages) for pages in pools)
    larger, start = dataclasses.replace(quantized, k_pages=k_pages, v_pages=v_pages), (256, 0)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = larger.ragged((3, 17)) if packed else larger.prefill(np.array(start), 17)
    assert_rows_have_the_contracts_bits(dense, rows, start, {0: (256, 257, 258), 1: (0, 16)})


# --- masks ------------------------------------------------------------------------------------------------------------


@in_the_interpreter
@pytest.mark.parametrize(("width", "lengths"), [(16, (129,)), pytest.param(256, (140, 66), marks=pytest.mark.nightly)])
def test_a_causal_mask_has_the_bits_of_causal_attention(width: int, lengths: tuple[int, ...]) -> None:
    requests = Requests.random(lengths, 1, 1, width, sinks=True)
    mask = np.tri(lengths[0], dtype=bool)[None, None]
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.with_mask(mask)
    tokens = {0: (0, 1, 63, 64, 127, 128)}
    assert_rows_have_the_contracts_bits(requests, rows, [0] * len(lengths), tokens)


@in_the_interpreter
def test_every_request_and_head_has_its_own_mask() -> None:
    requests = Requests.random((70, 66), 2, 1, 16, causal=False)
    mask = np.random.default_rng(3).random((2, 2, 70, 70)) > 0.4
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.with_mask(mask)
    for request, length in enumerate(requests.lengths):
        for head in range(2):
            q, k, v = (
                np.asarray(x[request, :length, index], np.float64)
                for x, index in ((requests.q, head), (requests.k, 0), (requests.v, 0))
            )
            s = np.where(mask[request, head, :length, :length], q @ k.T * requests.masking.scale, -np.inf)
            p = np.exp(s - s.max(axis=1, keepdims=True))
            exact = p / p.sum(axis=1, keepdims=True) @ v
            np.testing.assert_allclose(rows[request][:, head].astype(np.float64), exact, atol=4e-3)
