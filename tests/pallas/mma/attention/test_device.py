"""Attention on `mma.sync` on a GPU: `pytest tests/pallas/mma -m mma -n 14` on any of compute capability 8.0 or above.

Compiling takes most of the time, seconds for each kernel. So a case has few programs, and cases of several widths or
options alternate between the dtypes. On an H100, 45 cases of an earlier selection have passed, and none has failed.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.ops.quantized_kv import KINDS
from detjax.pallas.hopper.device import DTYPES
from detjax.pallas.mma import attention as mma_attention
from detjax.pallas.mma.attention.schedule import Schedule
from tests.pallas.mma.attention.requests import MmaRequests
from tests.support.attention_requests import (
    OPTIONS,
    WIDTHS,
    assert_close,
    assert_gradients_close,
    causal_mask,
    last_of,
    mask_of_heads,
)
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.mma


CHUNKS = (1, False), (7, False), (100, True)
"""Tokens of a chunk, and whether it has normalizers, which only the kernel of many tokens computes."""


def alternating(cases: Iterable[Any]) -> list[Any]:
    """Returns the cases, each with one of the dtypes."""
    return [(case, dtype) for case, dtype in zip(cases, itertools.cycle(DTYPES))]


@pytest.mark.parametrize(("width", "dtype"), alternating((16, 48, *WIDTHS)))
def test_prefill_decode_and_chunks_of_any_width_have_the_same_bits(width: int, dtype: str) -> None:
    requests = MmaRequests.random((300, 129, 1, 128), 8, 2, width, dtype=dtype)
    assert_chunks_have_the_bits_of_a_whole_prefill(requests)


@pytest.mark.parametrize(("name", "dtype"), [*alternating(OPTIONS), ("everything", DTYPES[-1])])
def test_prefill_decode_and_chunks_have_the_same_bits(name: str, dtype: str) -> None:
    requests = MmaRequests.random((300, 129, 1, 128), 8, 2, 128, dtype=dtype, **OPTIONS[name])
    assert_chunks_have_the_bits_of_a_whole_prefill(requests)


def assert_chunks_have_the_bits_of_a_whole_prefill(requests: MmaRequests) -> None:
    expected = requests.whole()
    assert_close(expected, requests.exact())
    for size, with_normalizers in CHUNKS:
        assert_same_bits(requests.in_chunks(size, with_normalizers), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1), (14, 2), (6, 2), (16, 1), (64, 1), (65, 1)])
def test_groups_of_any_number_have_the_same_bits(heads: int, kv_heads: int) -> None:
    requests = MmaRequests.random((300, 129, 1, 128), heads, kv_heads, 80)
    expected = requests.whole()
    assert_close(expected, requests.exact())
    for size in (1, 16):
        assert_same_bits(requests.in_chunks(size, with_normalizers=False), expected)


def test_packed_queries_have_the_bits_of_a_whole_prefill() -> None:
    requests, counts = MmaRequests.random((3000, 129, 1, 700), 8, 2, 128), (2000, 7, 1, 0)
    expected = [x[len(x) - n :] for x, n in zip(requests.whole(), counts, strict=True)]
    assert_same_bits(requests.ragged(counts), expected)


SCHEDULES = None, Schedule(2), Schedule(3, 2), Schedule(4, 7), Schedule(2, 40)


@pytest.mark.parametrize("width", [128, 256])
def test_no_schedule_changes_a_bit(width: int) -> None:
    requests = MmaRequests.random((10000, 17, 1, 4096), 8, 2, width, sinks=True)
    for tokens in (1, 5):
        start = requests.last(tokens)
        expected = requests.prefill(start, tokens)
        for schedule in SCHEDULES if tokens == 1 else SCHEDULES[::3]:
            assert_same_bits(requests.decode(start, tokens, schedule), expected)


@pytest.mark.parametrize(("width", "dtype"), alternating((64, 96, 128, 192, 256)))
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_pages_give_the_bits_of_what_they_are_read_as(kind: str, width: int, dtype: str) -> None:
    options = OPTIONS["everything"] if width == 128 else {}
    requests, dense = MmaRequests.random((3000, 300, 129, 1, 128), 8, 2, width, dtype=dtype, **options).quantized(kind)
    expected = dense.whole()
    assert not any(np.isnan(x.astype(np.float32)).any() for x in expected)
    assert_same_bits(requests.whole(), expected)
    for tokens, schedule in ((1, None), (1, Schedule(2)), (5, Schedule(3, 5))):
        start = requests.last(tokens)
        assert_same_bits(requests.decode(start, tokens, schedule), last_of(expected, start))
    if width == 128:
        assert_same_bits(requests.ragged((40, 7, 1, 0, 128)), dense.ragged((40, 7, 1, 0, 128)))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_mask(width: int) -> None:
    requests = MmaRequests.random((300, 129, 1, 128), 8, 2, width, dtype="bfloat16")
    assert_same_bits(requests.with_mask(causal_mask(requests)), requests.whole())


def test_gradients_under_a_mask_are_close_to_gradients_of_plain_jax() -> None:
    requests = MmaRequests.random((300, 129, 1, 128), 8, 2, 128, dtype="bfloat16")
    gradients = requests.gradients("mma", mask=mask_of_heads(requests))
    assert_gradients_close(gradients, requests.gradients("portable", mask=mask_of_heads(requests)))


def test_a_decode_gives_the_same_bits_a_thousand_times() -> None:
    requests = MmaRequests.random((5000, 300, 129, 1), 32, 8, 128)
    decode = functools.partial(mma_attention.forward, masking=requests.masking, with_normalizers=False)
    forward, operands = detjax.jit(decode), requests.operands(requests.last(1), 1)
    expected = forward(operands)[0]
    differing = sum((forward(operands)[0] != expected).any().astype(jnp.int32) for _ in range(1000))
    assert int(differing) == 0
