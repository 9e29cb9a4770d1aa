"""Decode on Hopper has the bits of prefill, in Pallas' interpreter."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.pallas.hopper.attention import decode_kernel
from detjax.pallas.hopper.attention.decode import Schedule
from tests.support.attention_requests import INTERPRETER, OPTIONS, Requests, assert_close, in_the_interpreter, last_of
from tests.support.bits import assert_same_bits, same_bits


@pytest.mark.sampled(0)
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


@pytest.mark.sampled(0)
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
        monkeypatch.setattr(decode_kernel, "rescaling", rescaling)
        assert not same_bits(requests.decode(start, 1, Schedule(1, cut=False)), expected)


@pytest.mark.sampled(0)
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


@pytest.mark.sampled(0)
@in_the_interpreter
def test_where_the_line_of_blocks_is_cut_changes_no_bit() -> None:
    requests = Requests.random((1000, 17), 2, 1, sinks=True)
    start = requests.last(1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.prefill(start, 1)
        for schedule in (Schedule(2), Schedule(3, slack=0.0), Schedule(7, slack=0.4), Schedule(7, cut=False)):
            assert_same_bits(requests.decode(start, 1, schedule), expected)


@pytest.mark.sampled(0)
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
            rows = requests.decode(start, tokens, schedule)
            assert not any(np.isnan(x.astype(np.float32)).any() for x in rows)
            assert_same_bits(rows, dense.decode(start, tokens, schedule))
