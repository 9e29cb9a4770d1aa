"""The TPU kernel of the gated delta rule: in Pallas' interpreter, and as the text that a TPU's compiler is given."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import DELTA_CHUNK
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS, DeltaState, DeltaTokens, RequestRows
from detjax.pallas.tpu import delta_rule
from detjax.pallas.tpu.delta_rule.problem import Schedule
from detjax.pallas.tpu.delta_rule.visits import Visits
from tests.ops import delta_cases as cases
from tests.pallas.tpu import delta_cases as tpu_cases
from tests.pallas.tpu.interpreter import (
    assert_no_races,
    assert_products_in_float32,
    interpreting,
)
from tests.support.bits import assert_same_bits, same_bits
from tests.support.kernel_texts import kernel_texts

DTYPES = ("float32", "bfloat16")
SHAPE = cases.Shape(2, 4, 24, 40)
"""The scale `24^(-1/2)` rounds. A power of two could be moved from a sum to its terms without changing a bit."""
ROOM = 160
"""The rows of a call, mostly padding if it has few tokens: one program serves calls of all lengths."""


@pytest.fixture
def interpreter() -> Iterator[None]:
    with detjax.use_backend("tpu"), interpreting():
        yield


def call(request: cases.Tokens, state: DeltaState, start: int, end: int) -> tuple[np.ndarray, DeltaState]:
    """The outputs of some of a request's tokens, in a call filled up with NaN, and the next state."""
    count, padded = end - start, []
    for x in request.cut(start, end):
        filled = np.full((1, ROOM, *x.shape[1:]), np.nan, x.dtype)
        filled[0, :count] = x
        padded.append(jnp.asarray(filled))
    o, state = ops.gated_delta_rule(*padded, state, cases.queries([start], [count]))  # pyright: ignore[reportCallIssue]
    o = np.asarray(o)
    assert_no_races()
    assert not o[0, count:].any(), "padding rows are zeros"
    return o[0, :count], state


def in_calls(request: cases.Tokens, ends: Sequence[int]) -> np.ndarray:
    """The outputs of a request whose calls end at the positions given."""
    state, outputs = cases.empty_state(1, request.v.dtype.name, SHAPE), []
    for start, end in zip((0, *ends), ends, strict=False):
        o, state = call(request, state, start, end)
        outputs.append(o)
    return np.concatenate(outputs)


@functools.cache
def whole(dtype: str) -> tuple[cases.Tokens, np.ndarray]:
    """A request and its outputs in one call."""
    request = cases.tokens(ROOM, dtype=dtype, shape=SHAPE)
    return request, in_calls(request, [ROOM])


def error(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((y.astype(np.float64) - expected) ** 2).mean() / (expected**2).mean()))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_those_of_the_recurrence_and_of_the_portable_backend(dtype: str, interpreter: None) -> None:
    request, outputs = whole(dtype)
    exact = cases.recurrence(request)
    assert error(outputs, exact) < {"float32": 1e-6, "bfloat16": 4e-3}[dtype]
    with detjax.use_backend("portable"):
        portable = cases.in_calls(request, [ROOM])
    # Both round at the same places. The products of the matrix unit are the CPU's here, so last bits may differ: of
    # float32, 5% do on a CPU without AVX-512.
    assert np.mean(outputs != portable) < {"float32": 0.2, "bfloat16": 5e-3}[dtype]
    assert error(outputs, portable.astype(np.float64)) < {"float32": 1e-6, "bfloat16": 4e-4}[dtype]


@pytest.mark.parametrize(
    "shape",
    [cases.Shape(1, 2, 136, 136), cases.Shape(13, 65, 8, 8)],
    ids=["wide heads", "more heads than lanes have room"],
)
def test_heads_of_other_shapes(shape: cases.Shape, interpreter: None) -> None:
    request = cases.tokens(9, dtype="float32", shape=shape)
    state, outputs = cases.empty_state(1, "float32", shape), []
    for start, end in ((0, 8), (8, 9)):
        o, state = call(request, state, start, end)
        outputs.append(o)
    assert error(np.concatenate(outputs), cases.recurrence(request)) < 1e-6


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_and_verify_steps_have_the_bits_of_prefill(dtype: str, interpreter: None) -> None:
    request, outputs = whole(dtype)
    ends = [60, *range(61, 68), 71, 75, 125, *range(126, 131), ROOM]
    assert_same_bits(in_calls(request, ends), outputs)


CUTS = (64, 65, 71, 72, 127, 128)


@pytest.mark.parametrize(
    "cut",
    [
        cut if cut in CUTS else pytest.param(cut, marks=pytest.mark.nightly)
        for cut in range(DELTA_CHUNK, 2 * DELTA_CHUNK + 1)
    ],
)
def test_every_cut_of_a_chunk_has_the_bits_of_one_call(cut: int, interpreter: None) -> None:
    request, outputs = whole("float32")
    assert_same_bits(in_calls(request, [cut, ROOM]), outputs)


@pytest.mark.parametrize(
    "kept", [60, 64, 127, *(pytest.param(kept, marks=pytest.mark.nightly) for kept in (63, 120, 128))]
)
def test_dropped_tokens_leave_no_trace(kept: int, interpreter: None) -> None:
    request, outputs = whole("float32")
    drafts = cases.tokens(ROOM, seed=1, dtype="float32", shape=SHAPE)
    drafts = cases.Tokens(*(np.concatenate([x[:kept], y[kept:]]) for x, y in zip(request, drafts, strict=True)))
    _, state = call(request, cases.empty_state(1, "float32", SHAPE), 0, kept)
    for count in (DROPPABLE_TOKENS, 5):
        _, state = call(drafts, state, kept, kept + count)
    _, after = call(request, state, kept, kept + DROPPABLE_TOKENS)
    for dropped in (DROPPABLE_TOKENS, 9):
        start = kept + DROPPABLE_TOKENS - dropped
        assert_same_bits(call(request, after, start, ROOM)[0], outputs[start:])


def test_tokens_dropped_after_a_prefill_leave_no_trace(interpreter: None) -> None:
    request, outputs = whole("float32")
    _, state = call(request, cases.empty_state(1, "float32", SHAPE), 0, 133)
    for dropped in (6, DROPPABLE_TOKENS):
        assert_same_bits(call(request, state, 133 - dropped, ROOM)[0], outputs[133 - dropped :])


def test_the_batch_slots_and_their_old_contents_and_nan_in_neighbours_change_no_bit(interpreter: None) -> None:
    """Two requests decode, four prefill; one of these is of NaN, and one has no tokens in the call."""
    requests = [cases.tokens(count, seed, shape=SHAPE) for seed, count in enumerate([37, 65, 133, 9, 20, 10])]
    starts, counts, slots = [36, 64, 73, 9, 0, 0], [1, 1, 60, 0, 20, 10], [4, 0, 7, 2, 5, 1]
    old = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 7),
        cases.empty_state(9, shape=SHAPE),
    )
    state, expected = old, []
    for request, start, count, slot in zip(requests, starts, counts, slots, strict=True):
        alone = cases.empty_state(1, shape=SHAPE)
        if start:
            _, alone = call(request, alone, 0, start)
            state = jax.tree.map(lambda x, y, slot=slot: x.at[slot].set(y[0]), state, alone)
        expected.append(call(request, alone, start, start + count)[0] if count else np.zeros((0, *request.v.shape[1:])))
    parts = [request.cut(start, start + count) for request, start, count in zip(requests, starts, counts, strict=True)]
    parts[4] = cases.Tokens(*(np.full_like(x, np.nan) for x in parts[4]))
    rows = 64 + 24 + 16
    arrays, firsts = cases.packed(parts, decodes=2, rows=rows)
    first_row = np.array(firsts[2:], np.int32) - 2
    length = np.array(starts, np.int32) + np.array(counts, np.int32)
    queries = ops.Queries(
        np.zeros((6, 1), np.int32),
        np.array(starts, np.int32),
        length,
        np.array(counts, np.int32),
        first_row=first_row,
        slots=np.array(slots, np.int32),
    )
    # Copies are made as soon as they are started, so that one into a buffer that is still in use would be seen.
    with interpreting(copies="eager"):
        o, after = ops.gated_delta_rule(*map(jnp.asarray, arrays), state, queries)  # pyright: ignore[reportCallIssue]
        o = np.asarray(o)
    assert_no_races()
    for index in (0, 1, 2, 3, 5):
        assert_same_bits(o[firsts[index] : firsts[index] + counts[index]], expected[index].astype(o.dtype))
    assert np.isnan(o[firsts[4]].astype(np.float32)).any() and not np.isnan(np.asarray(after.s[1])).any()
    untouched = np.array([2, 3, 6, 8])
    assert_same_bits(*(jax.tree.map(lambda x: np.asarray(x)[untouched], x) for x in (after, state)))


def test_a_call_without_tokens_changes_nothing(interpreter: None) -> None:
    request, _ = whole("float32")
    _, state = call(request, cases.empty_state(1, "float32", SHAPE), 0, 70)
    o, after = call(request, state, 70, 70)
    assert o.shape[0] == 0
    assert_same_bits(after, state)


def test_schedules_change_no_bit(interpreter: None) -> None:
    request, outputs = whole("float32")
    rows = RequestRows.from_queries((1, 20), cases.queries([0], [20]))
    forward = detjax.jit(functools.partial(delta_rule.forward, schedule=Schedule(1)))
    state = cases.empty_state(1, "float32", SHAPE)
    o, _ = forward(DeltaTokens(*map(jnp.asarray, request.cut(0, 20))), state, rows)
    assert_same_bits(np.asarray(o), outputs[:20])


@pytest.mark.parametrize(
    ("starts", "counts", "visits"),
    [
        ([64, 65, 200], [1, 1, 1], 6),  # decode: each state stands before the previous chunk
        ([127, 191, 319, 255], [2, 2, 2, 2], 12),
        ([0, 0], [63, 65], 3),
        ([1, 0, 100], [127, 0, 28], 4),
        ([64 + 63], [66], 4),
    ],
)
def test_all_chunks_of_all_requests_are_visited(starts: list[int], counts: list[int], visits: int) -> None:
    """The arrays of visits are as long as their longest use needs."""
    total = sum(counts)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    start, count = np.array(starts, np.int32), np.array(counts, np.int32)
    rows = RequestRows(*map(jnp.asarray, (first, start, count, np.arange(len(starts), dtype=np.int32))), None)  # pyright: ignore[reportCallIssue]
    chunks = jnp.asarray(np.maximum(start // DELTA_CHUNK - 1, 0))
    plan, number = Visits.from_rows(rows, chunks, total)
    assert number == visits <= plan.slot.size
    tokens = [[] for _ in starts]
    for slot, chunk, low, high in zip(*(x.tolist() for x in (plan.slot, plan.chunk, plan.low, plan.high)), strict=True):
        tokens[slot] += range(chunk * DELTA_CHUNK + low, chunk * DELTA_CHUNK + high)
    assert tokens == [list(range(a, a + n)) for a, n in zip(starts, counts, strict=True)]


def test_chunks_from_the_start_of_a_call_would_have_other_bits(interpreter: None) -> None:
    """The negative control: the same tokens at other positions, after tokens of zeros, which change no state."""
    request, outputs = whole("float32")
    count = ROOM - 10
    zeros = (np.zeros((10, *x.shape[1:]), x.dtype) for x in request)
    shifted = cases.Tokens(*(np.concatenate([x, y[:count]]) for x, y in zip(zeros, request, strict=True)))
    moved = in_calls(shifted, [ROOM])[10:]
    assert error(moved, outputs[:count].astype(np.float64)) < 1e-6 and not same_bits(moved, outputs[:count])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_the_kernel_does_not_serve_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="gated_delta_rule: an argument or the result has dtype float16"):
        _text(tpu_cases.forward(8, 1, "float16"))
    with pytest.raises(
        NotImplementedError, match="gated_delta_rule: 128 heads of values, 128 of keys, in float32 need"
    ):
        _text(tpu_cases.forward(8, 1, "float32", heads=(128, 128)))
    with pytest.raises(NotImplementedError, match="2000000 tokens of 1 requests are 31253 visits"):
        _text(tpu_cases.forward(2_000_000, 1))
    fn, arguments = tpu_cases.forward(8, 1)
    with pytest.raises(ValueError, match="the schedule has 5 heads side by side, with 32 heads of values; accepted"):
        jax.eval_shape(functools.partial(fn, schedule=Schedule(5)), *arguments)


# --- kernel texts -----------------------------------------------------------------------------------------------------


def _text(case: Any) -> str:
    """A kernel's text without the lengths of arrays in the device's memory, which it cuts."""
    fn, arguments = case
    (text,) = kernel_texts(lambda *args: fn(*args), *arguments)  # JAX keeps what it lowered by function
    return re.sub(r"(?<=memref<)\d+(?=x[^<>]*, #tpu.memory_space<any>>)", "", text)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_one_text_for_every_number_of_tokens_and_requests(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _text(tpu_cases.forward(1, 1, dtype))
    monkeypatch.setattr(tpu_cases, "SLOTS", 9)
    for rows, requests in ((8, 8), (64, 64), (256, 64), (500, 1), (4096, 3)):
        assert _text(tpu_cases.forward(rows, requests, dtype)) == expected


def test_float32_is_multiplied_in_float32() -> None:
    assert_products_in_float32(_text(tpu_cases.forward(64, 64, "float32")))
