"""Hopper's kernel of the causal convolution: the portable program's bits in Pallas' interpreter, in every phase."""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS, RequestRows, TokenLimits
from detjax.pallas.hopper import convolution
from detjax.pallas.hopper.convolution import Problem, Schedule
from tests.ops.delta_cases import queries
from tests.pallas.hopper.interpreter import lowered
from tests.support.attention_requests import INTERPRETER
from tests.support.bits import assert_same_bits

in_the_interpreter = pytest.mark.usefixtures("hopper_in_the_interpreter")

CHANNELS, TAPS, LENGTH, ROOM = 64, convolution.TAPS, 42, 24
"""`ROOM` is the rows of a call of several tokens, mostly padding if it has few: one program serves all lengths."""


@pytest.fixture
def hopper_in_the_interpreter(attention_in_the_interpreter: None) -> Iterator[None]:
    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


def arrays(
    dtype: str = "bfloat16", seed: int = 0, channels: int = CHANNELS, length: int = LENGTH
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and weights whose sums of products are exact, as the interpreter does not fuse."""
    random = np.random.default_rng(seed)
    x = random.integers(-31, 32, (length, channels)) / 8
    return x.astype(jnp.dtype(dtype)), (random.integers(-31, 32, (channels, 1, TAPS)) / 16).astype(jnp.dtype(dtype))


def empty(x: np.ndarray) -> jax.Array:
    return ops.empty_inputs(1, TAPS, x.shape[1], x.dtype)


def call(
    x: np.ndarray, weight: np.ndarray, kept: jax.Array, start: int, end: int, room: int = ROOM
) -> tuple[np.ndarray, jax.Array]:
    """The outputs of some tokens, and the next inputs. NaN fill up calls of several tokens."""
    rows = np.full((1, 1 if end - start == 1 else max(room, end - start), x.shape[1]), np.nan, x.dtype)
    rows[0, : end - start] = x[start:end]
    y, kept = ops.causal_convolution(jnp.asarray(rows), jnp.asarray(weight), kept, queries([start], [end - start]))
    return np.asarray(y[0, : end - start]), kept


def in_calls(x: np.ndarray, weight: np.ndarray, ends: Sequence[int], room: int = ROOM) -> tuple[np.ndarray, jax.Array]:
    kept, outputs = empty(x), []
    for start, end in itertools.pairwise((0, *ends)):
        y, kept = call(x, weight, kept, start, end, room)
        outputs.append(y)
    return np.concatenate(outputs), kept


def on_portable(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, jax.Array]:
    with detjax.use_backend("portable"):
        return call(x, weight, empty(x), 0, len(x))


@in_the_interpreter
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_calls_cut_anywhere_have_the_bits_of_the_portable_program(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = arrays(dtype)
    x[5:9] = 0  # Zeros have signs, too.
    whole, last = on_portable(x, weight)
    monkeypatch.setattr(convolution.portable, "forward", None)
    # Slots keep the last 19 inputs.
    for ends in ([ROOM, LENGTH], [1, 2, 3, 4, 8, 9, 31, 32, LENGTH], range(1, LENGTH + 1), [18, 37, LENGTH]):
        y, kept = in_calls(x, weight, ends)
        assert_same_bits(y, whole)
        assert_same_bits(kept, last)
    for cut in (5, 19):
        assert_same_bits(in_calls(x, weight, [cut, cut + 18, LENGTH])[0], whole)


@in_the_interpreter
def test_verify_steps_write_their_inputs_and_leave_no_trace_of_refused_drafts() -> None:
    """Calls of up to `DROPPABLE_TOKENS` rows write the slots in the kernel."""
    (x, weight), (other, _) = arrays(), arrays(seed=1)
    whole, _ = on_portable(x, weight)
    room = DROPPABLE_TOKENS
    _, kept = in_calls(x, weight, [16, 21], room)
    for accepted in (0, 3, room):
        position = 21 + accepted
        mixed = np.concatenate([x[:position], other[position:]])
        y, after = call(mixed, weight, kept, 21, 21 + room, room)
        assert_same_bits(y[:accepted], whole[21:position])
        assert_same_bits(call(x, weight, after, position, position + 4, room)[0], whole[position : position + 4])


@in_the_interpreter
@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [DROPPABLE_TOKENS, 40])
def test_packed_requests_slots_and_their_old_contents_change_no_bit(rows: int) -> None:
    """One request decodes, two have several tokens and one none; slots held NaN, and NaN stands between requests."""
    counts = [1, rows // 2, 0, 4]
    starts, slots, requests = [30, 0, 9, 2], [3, 0, 2, 5], [arrays(seed=seed)[0] for seed in range(4)]
    weight = arrays()[1]
    kept = jnp.full((6, TAPS - 1 + DROPPABLE_TOKENS, CHANNELS), jnp.nan, jnp.bfloat16)
    with detjax.use_backend("portable"):
        for request, start, slot in zip(requests, starts, slots, strict=True):
            if start:
                before = jnp.asarray(request[None, :start])
                _, kept = ops.causal_convolution(before, jnp.asarray(weight), kept, queries([0], [start], [slot]))
    packed = ops.Queries.packed(
        np.zeros((4, 1), np.int32), np.array(starts, np.int32), np.array(counts, np.int32), decodes=1, rows=rows
    )
    packed = ops.Queries(**{**vars(packed), "slots": np.array(slots, np.int32)})
    firsts = [0, *(1 + np.asarray(packed.first_row))]
    x = np.full((1 + rows, CHANNELS), np.nan, jnp.bfloat16)
    for request, first, start, count in zip(requests, firsts, starts, counts, strict=True):
        x[first : first + count] = request[start : start + count]
    operands = jnp.asarray(x), jnp.asarray(weight), kept, packed
    y, after = ops.causal_convolution(*operands)
    for request, first, start, count in zip(requests, firsts, starts, counts, strict=True):
        assert_same_bits(np.asarray(y[first : first + count]), on_portable(request, weight)[0][start : start + count])
    with detjax.use_backend("portable"):
        assert_same_bits(np.asarray(after), np.asarray(ops.causal_convolution(*operands)[1]))


@in_the_interpreter
def test_requests_without_a_slot_write_to_none() -> None:
    x, weight = arrays(length=3)
    kept = jnp.full((6, TAPS - 1 + DROPPABLE_TOKENS, CHANNELS), jnp.nan, jnp.bfloat16)
    operands = jnp.asarray(x[:, None]), jnp.asarray(weight), kept, queries([0] * 3, [1] * 3, [6, -1, 2])
    y, after = ops.causal_convolution(*operands)
    assert_same_bits(
        np.asarray(y[:, 0]), np.concatenate([on_portable(x[row : row + 1], weight)[0] for row in range(3)])
    )
    assert np.isnan(np.asarray(after[jnp.array([0, 1, 3, 4, 5])])).all()
    assert not np.isnan(np.asarray(after[2])).all()


@in_the_interpreter
@pytest.mark.parametrize("channels", [192, pytest.param(1024, marks=pytest.mark.nightly)])
def test_every_schedule_gives_the_same_bits(channels: int) -> None:
    x, weight = arrays(channels=channels, length=13)
    rows = RequestRows(*(jnp.array([n], jnp.int32) for n in (0, 0, 13, 0)), TokenLimits(0, 13))  # pyright: ignore[reportCallIssue]
    whole, last = on_portable(x, weight)
    for tokens in (2, 8):
        operands = jnp.asarray(x), jnp.asarray(weight), empty(x), rows
        y, kept = convolution.forward(*operands, schedule=Schedule(tokens))
        assert_same_bits(np.asarray(y), whole)
        assert_same_bits(kept, last)


def test_only_calls_in_which_no_token_overwrites_what_another_one_reads_write_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter runs CTAs in their order, so it does not show such a conflict."""
    written = []

    def kernel(problem: Problem, *_: object, writes: bool) -> jax.Array:
        written.append(writes)
        return jnp.zeros((problem.tokens, problem.blocks, problem.columns), problem.dtype)

    monkeypatch.setattr(convolution, "_kernel", kernel)
    for tokens in (1, DROPPABLE_TOKENS, DROPPABLE_TOKENS + 1, 100):
        x, weight = arrays(length=tokens)
        rows = RequestRows(*(jnp.array([n], jnp.int32) for n in (0, 0, tokens, 0)), most=TokenLimits(0, tokens))
        convolution.forward(jnp.asarray(x), jnp.asarray(weight), empty(x), rows)
    assert written == [True, True, False, False]


@in_the_interpreter
def test_the_portable_program_serves_what_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(8192, 4), (64, 4), (24, 4), (8192, 3), (96, 4)]
    assert [convolution.serves(*shape) for shape in shapes] == [True, True, False, False, False]
    monkeypatch.setattr(convolution.portable, "forward", lambda x, weight, inputs, rows: (x + 1, inputs))
    x, weight = arrays(channels=24)
    assert_same_bits(call(x, weight, empty(x), 0, ROOM)[0], np.asarray(jnp.asarray(x[:ROOM]) + 1))


@in_the_interpreter
def test_gradients_are_those_of_the_portable_program() -> None:
    x, weight = arrays("float32", length=20)

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        y, kept = ops.causal_convolution(x[None], weight, empty(np.asarray(arrays("float32")[0])), queries([0], [20]))
        return (y * y).sum() + kept.sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    operands = jnp.asarray(x), jnp.asarray(weight)
    with detjax.use_backend("portable"):
        expected = gradients(*operands)
    assert_same_bits(gradients(*operands), expected)


@pytest.mark.parametrize("tokens", [1, 5, 64, 8192])
def test_there_is_a_schedule_for_every_number_of_tokens(tokens: int) -> None:
    for channels in (64, 192, 8192, 10240):
        problem = Problem(tokens, channels, jnp.dtype("bfloat16"))
        convolution.default_schedule(problem).check(problem)


def test_schedules_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens is 3; accepted: 1, 2, 4, 8"):
        Schedule(3)
    with pytest.raises(ValueError, match="4 tokens of a CTA; accepted: at most the 3 tokens"):
        Schedule(4).check(Problem(3, 128, jnp.dtype("bfloat16")))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("channels", [8192, 10240, 192])
def test_convolutions_lower_for_cuda(channels: int, tokens: int) -> None:
    x, weight = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, tokens, channels), (channels, 1, TAPS)))
    kept = jax.eval_shape(lambda: ops.empty_inputs(3, TAPS, channels, "bfloat16"))
    starts, counts = [0, 4, 9], [tokens, tokens, 1]
    with detjax.use_backend("hopper"):
        text = lowered(lambda *operands: ops.causal_convolution(*operands, queries(starts, counts)), x, weight, kept)  # pyright: ignore[reportCallIssue]
    assert text.count("@mosaic_gpu") == 1


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels", [8192, 64])
def test_every_phase_has_the_same_bits_on_the_device(channels: int, dtype: str) -> None:
    random = np.random.default_rng(0)
    x, weight = (
        random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in ((300, channels), (channels, 1, 4))
    )
    with detjax.use_backend("hopper"):
        whole, last = in_calls(x, weight, [300], 300)
        for step in (1, 2, 5, 16, 17, 64, 100):
            for room in (step, 300):
                y, kept = in_calls(x, weight, [*range(step, 300, step), 300], room)
                assert_same_bits(y, whole)
                assert_same_bits(kept, last)
    with detjax.use_backend("portable"):
        tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
        y = in_calls(x, weight, [300], 300)[0].astype(np.float32)
        np.testing.assert_allclose(whole.astype(np.float32), y, rtol=tolerance, atol=tolerance)
