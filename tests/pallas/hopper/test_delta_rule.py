"""Hopper's kernels of the gated delta rule: the bits of the contract in every phase, in Pallas' interpreter."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS, DeltaTokens, RequestRows
from detjax.pallas.hopper import delta_rule
from tests.contract.test_delta_rule import CHANGES, Places, differing, emulated
from tests.ops import delta_cases as cases
from tests.ops.delta_cases import Shape, Tokens
from tests.support.attention_requests import INTERPRETER
from tests.support.bits import assert_same_bits

in_the_interpreter = pytest.mark.usefixtures("hopper_in_the_interpreter")

SHAPE = Shape(key_heads=1, heads=2, key_dim=64, value_dim=64)
ROOM = 96
"""The rows of a call of several tokens, mostly padding if it has few: one program serves calls of all lengths."""
LENGTH = 133


@pytest.fixture
def hopper_in_the_interpreter(matrix_unit: None, attention_in_the_interpreter: None) -> Iterator[None]:
    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


def in_calls(
    request: Tokens, ends: Sequence[int], state: ops.DeltaState | None = None, start: int = 0, room: int = ROOM
) -> tuple[np.ndarray, ops.DeltaState]:
    """The outputs of calls that end at these positions, and the state. NaN fill up calls of several tokens."""
    state = empty_state(request) if state is None else state
    outputs = []
    for first, end in itertools.pairwise((start, *ends)):
        o, state = call(request, state, first, end, room)
        outputs.append(o)
    return np.concatenate(outputs), state


def call(request: Tokens, state: ops.DeltaState, start: int, end: int, room: int) -> tuple[np.ndarray, ops.DeltaState]:
    if end - start == 1:
        return cases.call(request, state, start, end)
    rows = [np.full((1, room, *x.shape[1:]), np.nan, x.dtype) for x in request]
    for row, x in zip(rows, request.cut(start, end), strict=True):
        row[0, : end - start] = x
    o, state = ops.gated_delta_rule(*map(jnp.asarray, rows), state, cases.queries([start], [end - start]))  # pyright: ignore[reportCallIssue]
    return np.asarray(o[0, : end - start]), state


def empty_state(request: Tokens) -> ops.DeltaState:
    return cases.empty_state(1, request.v.dtype.name, cases.shape_of(request))


def error(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((y.astype(np.float64) - expected) ** 2).mean() / (expected**2).mean()))


@in_the_interpreter
def test_decode_verify_steps_and_prefill_have_the_bits_of_the_contract() -> None:
    request = cases.tokens(LENGTH, shape=SHAPE)
    whole, _ = in_calls(request, [ROOM, LENGTH])
    assert error(whole, cases.recurrence(request)) < 4e-3
    assert differing(whole, emulated(request, Places())) < 2e-3
    for name in ("state", "weights in one term"):
        assert differing(whole, emulated(request, CHANGES[name])) > 5e-2

    o, _ = in_calls(request, [61, *range(62, 68), 72, 73, 89, 105, 126, *range(127, 132), LENGTH])
    assert_same_bits(o, whole)


@in_the_interpreter
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kept", [63, 79, 124])
def test_dropped_tokens_leave_no_trace(kept: int) -> None:
    """Drafts are refused, some of them or all, before and after the end of a chunk."""
    request, drafts = (cases.tokens(LENGTH, seed, shape=SHAPE) for seed in range(2))
    whole, _ = in_calls(request, [ROOM, LENGTH])
    _, state = in_calls(request, [60, kept])
    for accepted in (0, 7):
        mixed = Tokens(
            *(
                np.concatenate([x[: kept + accepted], y[kept + accepted :]])
                for x, y in zip(request, drafts, strict=True)
            )
        )
        _, after = in_calls(mixed, [kept + DROPPABLE_TOKENS], state, kept)
        position = kept + accepted
        o, _ = in_calls(request, [position + 1, position + 2, LENGTH], after, position)
        assert_same_bits(o, whole[position:])


@in_the_interpreter
def test_packed_requests_slots_and_their_old_contents_change_no_bit() -> None:
    """Two requests decode, and one of them comes to a chunk; of two others one begins, and one has no tokens."""
    requests = [cases.tokens(count, seed, shape=SHAPE) for seed, count in enumerate([65, 1, 40, 20])]
    starts, counts, slots = [64, 0, 40, 0], [1, 1, 0, 20], [4, 0, 1, 5]
    state = cases.empty_state(6, shape=SHAPE)
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 7), state)
    _, before = in_calls(requests[0], [64])
    state = jax.tree.map(lambda x, one: x.at[4].set(one[0]), state, before)
    expected = [
        in_calls(requests[0], [65], before, 64)[0],
        in_calls(requests[1], [1])[0],
        in_calls(requests[3], [20])[0],
    ]
    parts = [request.cut(start, start + count) for request, start, count in zip(requests, starts, counts, strict=True)]
    arrays, firsts = cases.packed(parts, decodes=2, rows=32)
    queries = ops.Queries.packed(
        np.zeros((4, 1), np.int32), np.array(starts, np.int32), np.array(counts, np.int32), decodes=2, rows=32
    )
    queries = dataclasses.replace(queries, slots=np.array(slots, np.int32))
    o, after = ops.gated_delta_rule(*map(jnp.asarray, arrays), state, queries)  # pyright: ignore[reportCallIssue]
    assert_same_bits([np.asarray(o[firsts[i] : firsts[i] + counts[i]]) for i in (0, 1, 3)], expected)
    # The slots of others and of the request without tokens are unchanged.
    untouched = jax.tree.map(lambda x: x[jnp.array([1, 2, 3])], (state, after))
    assert_same_bits(*untouched)
    assert not np.isnan(np.asarray(after.s[jnp.array(slots)[jnp.array([0, 1, 3])]])).any()


@in_the_interpreter
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float16", Shape(1, 1, 128, 128)),
        pytest.param("bfloat16", Shape(2, 4, 128, 64), marks=pytest.mark.nightly),
        pytest.param("float16", Shape(1, 1, 64, 128), marks=pytest.mark.nightly),
    ],
)
def test_heads_of_all_widths_are_right(dtype: str, shape: Shape) -> None:
    request = cases.tokens(ROOM, dtype=dtype, shape=shape)
    whole, state = in_calls(request, [ROOM])
    assert error(whole, cases.recurrence(request)) < {"bfloat16": 4e-3, "float16": 5e-4}[dtype]
    o, after = in_calls(request, [62, 63, 64, 65, 79, 80, 81, ROOM])
    assert_same_bits(o, whole)
    assert_same_bits(after, state)


def test_the_portable_program_serves_what_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(128, 128, "bfloat16"), (64, 192, "float16"), (128, 128, "float32"), (96, 128, "bfloat16")]
    served = [delta_rule.serves(*widths, jnp.dtype(dtype)) for *widths, dtype in shapes]  # pyright: ignore[reportCallIssue]
    assert served == [True, True, False, False]
    monkeypatch.setattr(delta_rule.portable, "forward", lambda *operands: operands)
    request, state = cases.tokens(9), cases.empty_state(1)
    rows = RequestRows.from_queries((1, 9), cases.queries([0], [9]))
    operands = DeltaTokens(*map(jnp.asarray, request)), state, rows
    assert delta_rule.forward(*operands) == operands


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [Shape(16, 32, 128, 128), Shape(1, 2, 64, 64)])
def test_every_phase_has_the_same_bits_on_the_device(shape: Shape, dtype: str) -> None:
    request, drafts = (cases.tokens(300, seed, dtype, shape) for seed in range(2))
    with detjax.use_backend("hopper"):
        whole, _ = in_calls(request, [300], room=300)
        assert error(whole, cases.recurrence(request)) < {"bfloat16": 4e-3, "float16": 5e-4}[dtype]
        assert_same_bits(in_calls(request, range(1, 301))[0], whole)
        for step in (2, 5, 16, 63, 64, 65, 100):
            assert_same_bits(in_calls(request, [*range(step, 300, step), 300], room=300)[0], whole)
        # Programs of other shapes.
        assert_same_bits(cases.in_calls(request, [130, *range(135, 300, 5), 300]), whole)
        for kept in range(48, 130, 9):
            _, state = in_calls(request, [kept], room=300)
            for accepted in (0, 3, 15):
                position = kept + accepted
                mixed = [np.concatenate([x[:position], y[position:]]) for x, y in zip(request, drafts, strict=True)]
                _, after = in_calls(Tokens(*mixed), [kept + DROPPABLE_TOKENS], state, kept, room=300)
                assert_same_bits(in_calls(request, [300], after, position, room=300)[0], whole[position:])


@pytest.mark.hopper
def test_requests_among_others_have_their_bits_a_hundred_times_on_the_device() -> None:
    shape, counts = Shape(16, 32, 128, 128), [64 + 5 * index for index in range(40)]
    requests = [cases.tokens(count, seed, shape=shape) for seed, count in enumerate(counts)]
    with detjax.use_backend("hopper"):
        alone = [in_calls(request, [len(request.v)], room=300)[0] for request in requests]
        most = max(counts) - 1
        rows = [np.full((len(counts), most, *x.shape[1:]), np.nan, x.dtype) for x in requests[0]]
        for index, request in enumerate(requests):
            for row, x in zip(rows, request, strict=True):
                row[index, : counts[index] - 1] = x[:-1]
        before = [count - 1 for count in counts]
        slots = np.random.default_rng(0).permutation(len(counts)).tolist()
        state = cases.empty_state(len(counts), shape=shape)
        queries = cases.queries([0] * len(counts), before, slots)
        o, state = ops.gated_delta_rule(*map(jnp.asarray, rows), state, queries)  # pyright: ignore[reportCallIssue]
        assert_same_bits([np.asarray(o[i, :n]) for i, n in enumerate(before)], [x[:-1] for x in alone])
        last = [jnp.asarray(np.stack([np.asarray(x)[-1:] for x in column])) for column in zip(*requests, strict=True)]
        for _ in range(100):
            o, _ = ops.gated_delta_rule(*last, state, cases.queries(before, [1] * len(counts), slots))  # pyright: ignore[reportCallIssue]
            assert_same_bits(np.asarray(o), np.stack([x[-1:] for x in alone]))
