"""Prefill on Hopper, ragged, masked, and with any schedule, in Pallas' interpreter."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.pallas.hopper.attention import prefill
from detjax.pallas.hopper.attention.decode import Schedule
from detjax.pallas.hopper.attention.prefill_schedule import default_schedule
from tests.support.attention_requests import (
    INTERPRETER,
    OPTIONS,
    Requests,
    assert_close,
    causal_mask,
    in_the_interpreter,
    last_of,
    mask_of_heads,
)
from tests.support.bits import assert_same_bits, same_bits


@in_the_interpreter
def test_ragged_queries_have_the_bits_of_a_whole_prefill() -> None:
    requests, counts = Requests.random((300, 140, 1, 20), 2, 1, sinks=True), (150, 3, 1, 0)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected, rows = requests.whole(), requests.ragged(counts)
    assert_same_bits(rows, [x[len(x) - count :] for x, count in zip(expected, counts, strict=True)])


@pytest.mark.sampled(0)
@in_the_interpreter
@pytest.mark.parametrize(
    ("width", "persistent", "product_turns"), [(192, True, True), (256, True, False), (256, False, True)]
)
def test_no_schedule_of_wide_rows_changes_a_bit(
    width: int, persistent: bool, product_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule(problem: prefill.Problem) -> prefill.Schedule:
        return dataclasses.replace(default_schedule(problem), persistent=persistent, product_turns=product_turns)

    requests = Requests.random((300, 5), 2, 1, width)
    monkeypatch.setattr(prefill, "default_schedule", schedule)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.whole()
        assert_close(expected, requests.exact())
        start = requests.last(3)
        assert_same_bits(requests.decode(start, 3, Schedule(3)), last_of(expected, start))


@pytest.mark.sampled(0)
@in_the_interpreter
@pytest.mark.parametrize(("width", "options"), [(192, {}), (256, OPTIONS["everything"])])
def test_wide_rows_in_ragged_queries_have_the_bits_of_a_whole_prefill(width: int, options: dict[str, Any]) -> None:
    requests, counts = Requests.random((300, 140, 1), 2, 1, width, **options), (150, 3, 1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected, rows = requests.whole(), requests.ragged(counts)
        assert_close(expected, requests.exact())
    assert_same_bits(rows, [x[len(x) - count :] for x, count in zip(expected, counts, strict=True)])


@pytest.mark.sampled(0)
@in_the_interpreter
@pytest.mark.parametrize(("width", "value_width"), [(192, 64), (192, 128), (256, 128), (256, 192)])
def test_a_column_of_the_result_does_not_depend_on_how_many_there_are(width: int, value_width: int) -> None:
    requests = Requests.random((200,), 2, 1, width)
    narrow = dataclasses.replace(requests, v_pages=requests.v_pages[..., :value_width])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected, rows = requests.whole(), narrow.whole()
    assert_same_bits(rows, [x[..., :value_width] for x in expected])


@pytest.mark.sampled(0)
@in_the_interpreter
@pytest.mark.parametrize("width", [64, 256])
def test_a_causal_mask_has_the_bits_of_causal_attention(width: int) -> None:
    requests = Requests.random((150, 40), 2, 1, width, sinks=True)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.whole()
        assert_same_bits(requests.with_mask(causal_mask(requests)), expected)
        assert not same_bits(requests.with_mask(mask_of_heads(requests)), expected)


@pytest.mark.sampled(0)
@in_the_interpreter
@pytest.mark.parametrize(("kind", "name"), [("fp8_e4m3", "everything"), ("q4_0", "not causal")])
def test_quantized_pages_prefill_to_the_bits_of_what_they_are_read_as(kind: str, name: str) -> None:
    requests, dense = Requests.random((300, 17), 2, 1, 32, dtype="bfloat16", **OPTIONS[name]).quantized(kind)
    # Only the pages of two requests are dequantized.
    pools = (jax.tree.map(lambda x: jnp.concatenate([x] * 2), x) for x in (requests.k_pages, requests.v_pages))
    k_pages, v_pages = pools
    larger = dataclasses.replace(requests, k_pages=k_pages, v_pages=v_pages)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = dense.whole()
        assert not any(np.isnan(x.astype(np.float32)).any() for x in expected)
        assert_same_bits(requests.whole(), expected)
        start = np.array([260, 0])  # the window excludes the first page
        assert_same_bits(larger.prefill(start, 40), dense.prefill(start, 40))
        assert_same_bits(larger.ragged((150, 3)), dense.ragged((150, 3)))
