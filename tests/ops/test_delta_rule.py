"""The gated delta rule: numbers against float64, and bits that no cut, batch, layout or neighbour changes."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import DELTA_CHUNK
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS
from tests.ops import delta_cases as cases
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked, without_checks

LENGTH = 200
DTYPES = ("float32", "bfloat16")
ROOM = 160
"""The rows of a call, mostly padding: one program serves calls of all lengths."""
SLOTS = 6
"""Slots of the state where requests have some."""


@pytest.fixture(autouse=True)
def portable_backend() -> Iterator[None]:
    with detjax.use_backend("portable"):
        yield


def in_padded_calls(request: cases.Tokens, ends: Sequence[int], state: ops.DeltaState | None = None) -> np.ndarray:
    """The outputs of a request whose calls end at the positions given, each of them filled up with NaN."""
    dtype = request.v.dtype.name
    state, outputs = cases.empty_state(1, dtype) if state is None else state, []
    for start, end in itertools.pairwise((0, *ends)):
        o, state = padded_call(request, state, start, end)
        outputs.append(o)
    return np.concatenate(outputs)


def padded_call(
    request: cases.Tokens, state: ops.DeltaState, start: int, end: int, slot: int = 0
) -> tuple[np.ndarray, ops.DeltaState]:
    count = end - start
    padded = []
    for x in request.cut(start, end):
        filled = np.full((1, ROOM, *x.shape[1:]), np.nan, x.dtype)
        filled[0, :count] = x
        padded.append(jnp.asarray(filled))
    o, state = ops.gated_delta_rule(*padded, state, cases.queries([start], [count], [slot]))  # pyright: ignore[reportCallIssue]
    return np.asarray(o)[0, :count], state


def error(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((y.astype(np.float64) - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["portable", "stock"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_those_of_the_recurrence(dtype: str, backend: str) -> None:
    request = cases.tokens(LENGTH, dtype=dtype)
    with detjax.use_backend(backend):
        outputs = cases.in_calls(request, [LENGTH])
    assert error(outputs, cases.recurrence(request)) < {"float32": 1e-6, "bfloat16": 4e-3}[dtype]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_gives_the_bits_of_prefill(dtype: str) -> None:
    request = cases.tokens(LENGTH, dtype=dtype)
    assert_same_bits(cases.in_calls(request, range(1, LENGTH + 1)), cases.in_calls(request, [LENGTH]))


C = DELTA_CHUNK


@pytest.mark.parametrize(
    ("dtype", "cuts"),
    [
        ("bfloat16", (C - 1, C, C + 1, C + 15, C + 16, C + 17, 2 * C - 1, 2 * C, 2 * C + 1)),
        *(pytest.param(dtype, tuple(range(C, 2 * C + 1)), marks=pytest.mark.nightly) for dtype in DTYPES),
    ],
    ids=["borders", *DTYPES],
)
def test_every_cut_of_a_chunk_gives_the_bits_of_one_call(dtype: str, cuts: tuple[int, ...]) -> None:
    request = cases.tokens(ROOM, dtype=dtype)
    whole = in_padded_calls(request, [ROOM])
    for cut in cuts:
        assert_same_bits(in_padded_calls(request, [cut, ROOM]), whole)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_cuts_give_the_bits_of_one_call(seed: int) -> None:
    request = cases.tokens(LENGTH)
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, LENGTH), 9, replace=False)).tolist()
    assert_same_bits(in_padded_calls(request, [*sorted({*cuts, ROOM}), LENGTH]), cases.in_calls(request, [LENGTH]))


@pytest.mark.parametrize(
    "ends", [[67, 134, LENGTH], pytest.param([1, 64, 129, 130, 199, LENGTH], marks=pytest.mark.nightly)], ids=str
)
def test_calls_of_other_lengths_are_other_programs_with_the_same_bits(ends: list[int]) -> None:
    request = cases.tokens(LENGTH)
    assert_same_bits(cases.in_calls(request, ends), cases.in_calls(request, [LENGTH]))


@pytest.mark.parametrize(
    "ends",
    [[*range(1, LENGTH + 1)], pytest.param([50, LENGTH], marks=pytest.mark.nightly)],
    ids=["decode", "two calls"],
)
def test_chunks_from_the_start_of_a_call_have_other_bits(ends: list[int]) -> None:
    request = cases.tokens(LENGTH)
    with detjax.use_backend("stock"):
        assert not same_bits(cases.in_calls(request, ends), cases.in_calls(request, [LENGTH]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kept", [63, 64, 128, 60, 120, 127])
def test_dropped_tokens_leave_no_trace(kept: int) -> None:
    request, drafts = cases.tokens(ROOM), cases.tokens(ROOM, seed=1)
    drafts = cases.Tokens(*(np.concatenate([x[:kept], y[kept:]]) for x, y in zip(request, drafts, strict=True)))
    whole = in_padded_calls(request, [ROOM])
    _, state = padded_call(request, cases.empty_state(1), 0, kept)
    for count in range(1, DROPPABLE_TOKENS + 1):
        _, state = padded_call(drafts, state, kept, kept + count)
    # Some of a call's tokens are kept, and the others dropped.
    _, after = padded_call(request, state, kept, kept + DROPPABLE_TOKENS)
    for count in (1, 7, DROPPABLE_TOKENS - 1, DROPPABLE_TOKENS):
        o, _ = padded_call(request, after, kept + count, ROOM)
        assert_same_bits(o, whole[kept + count :])
    _, state = padded_call(drafts, state, kept, kept + DROPPABLE_TOKENS)
    assert_same_bits(padded_call(request, state, kept, ROOM)[0], whole[kept:])


def test_tokens_dropped_after_a_prefill_leave_no_trace() -> None:
    request = cases.tokens(ROOM)
    whole = in_padded_calls(request, [ROOM])
    _, state = padded_call(request, cases.empty_state(1), 0, 133)
    for dropped in (1, 5, 6, DROPPABLE_TOKENS):
        assert_same_bits(padded_call(request, state, 133 - dropped, ROOM)[0], whole[133 - dropped :])


def test_the_batch_slots_their_old_contents_and_neighbours_of_nan_change_no_bit() -> None:
    requests = [cases.tokens(count, seed) for seed, count in enumerate([70, 130, 1, 97, 130])]
    requests[4] = cases.Tokens(*(np.full_like(x, np.nan) for x in requests[4]))
    alone = [in_padded_calls(request, [len(request.v)]) for request in requests[:4]]
    old = jax.tree.map(
        lambda x: np.full_like(x, np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 7), cases.empty_state(SLOTS + 1)
    )
    slots, counts, most = [4, 0, 5, 2, 6], [len(request.v) for request in requests], 130
    state, outputs = old, [[] for _ in requests]
    for start in (0, 65):
        part = [min(max(count - start, 0), 65) for count in counts]
        rows = [np.full((5, most, *x.shape[1:]), np.nan, x.dtype) for x in requests[0]]
        for index, request in enumerate(requests):
            for row, x in zip(rows, request.cut(start, start + part[index]), strict=True):
                row[index, : part[index]] = x
        starts = [min(start, count) for count in counts]
        o, state = ops.gated_delta_rule(*map(jnp.asarray, rows), state, cases.queries(starts, part, slots))  # pyright: ignore[reportCallIssue]
        for index, count in enumerate(part):
            outputs[index].append(np.asarray(o)[index, :count])
    *outputs, poisoned = [np.concatenate(parts) for parts in outputs]
    assert_same_bits(outputs, alone)
    assert np.isnan(poisoned.astype(np.float32)).all()
    assert_same_bits(*(jax.tree.map(lambda x: np.asarray(x)[[1, 3]], some) for some in (old, state)))
    assert not np.isnan(np.asarray(state.s)[slots[:4]]).any()


def test_packed_requests_have_the_bits_of_rectangular_ones() -> None:
    """Two requests decode, three prefill, and one of these has no tokens in the call."""
    requests = [cases.tokens(count, seed) for seed, count in enumerate([101, 64, 97, 40, 20])]
    starts, counts = [100, 63, 41, 40, 0], [1, 1, 56, 0, 20]
    state, expected = cases.empty_state(SLOTS), []
    for slot, (request, start, count) in enumerate(zip(requests, starts, counts, strict=True)):
        whole = in_padded_calls(request, [len(request.v)])
        expected.append(whole[start : start + count])
        if start:
            _, state = padded_call(request, state, 0, start, slot)
    parts = [request.cut(start, start + count) for request, start, count in zip(requests, starts, counts, strict=True)]
    arrays, firsts = cases.packed(parts, decodes=2, rows=88)
    queries = ops.Queries.packed(
        np.zeros((5, 1), np.int32), np.array(starts, np.int32), np.array(counts, np.int32), decodes=2, rows=88
    )
    o, state = ops.gated_delta_rule(*map(jnp.asarray, arrays), state, queries)  # pyright: ignore[reportCallIssue]
    given = [np.asarray(o)[first : first + count] for first, count in zip(firsts, counts, strict=True)]
    assert_same_bits(given, expected)
    # The request without tokens continues unchanged.
    more = cases.Tokens(*(np.concatenate([x, y]) for x, y in zip(requests[3], cases.tokens(9, 8), strict=True)))
    assert_same_bits(padded_call(more, state, 40, 49, 3)[0], in_padded_calls(more, [49])[40:])


def test_vmap_gives_the_bits_of_single_calls() -> None:
    requests = [cases.tokens(20, seed) for seed in range(2)]
    arrays = [np.stack(x)[:, None] for x in zip(*requests, strict=True)]

    def run(*x: jax.Array) -> jax.Array:
        return ops.gated_delta_rule(*x, cases.empty_state(1), cases.queries([0], [20]))[0]  # pyright: ignore[reportCallIssue]

    alone = [in_padded_calls(request, [20]) for request in requests]
    assert_same_bits(np.asarray(jax.vmap(run)(*arrays))[:, 0], np.stack(alone))


# --- gradients --------------------------------------------------------------------------------------------------------


GRADIENT_ROOM = 139
"""The rows of a call with gradients, for the same reason."""


@detjax.jit
def _gradients(arrays: Sequence[jax.Array], do: jax.Array, state: ops.DeltaState, queries: ops.Queries) -> Any:
    return jax.vjp(lambda *x: ops.gated_delta_rule(*x, state, queries)[0], *arrays)[1](do)  # pyright: ignore[reportCallIssue]


def gradients(request: cases.Tokens, do: np.ndarray) -> list[np.ndarray]:
    count, arrays = len(do), []
    for x in (*request, do):
        array = np.full((1, GRADIENT_ROOM, *x.shape[1:]), np.nan, x.dtype)
        array[0, :count] = x
        arrays.append(array)
    state = cases.empty_state(1, request.v.dtype.name)
    return [np.asarray(x)[0, :count] for x in _gradients(arrays[:5], arrays[5], state, cases.queries([0], [count]))]


def output_gradient(request: cases.Tokens) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(request.v.shape).astype(request.v.dtype)


def exact_gradients(request: cases.Tokens, do: np.ndarray) -> list[np.ndarray]:
    """The gradients of the recurrence in float64, by hand, from the last token to the first."""
    q, k, v, g, beta, do = (np.asarray(x).astype(np.float64) for x in (*request, do))
    group, scale = cases.HEADS // cases.KEY_HEADS, cases.KEY_DIM**-0.5
    q, k = (np.repeat(x, group, axis=1) for x in (q * scale, k))
    before, s = [], np.zeros((cases.HEADS, cases.KEY_DIM, cases.VALUE_DIM))
    for t in range(len(v)):
        before.append(s)
        s = s * np.exp(g[t])[:, None, None]
        rest = v[t] - np.einsum("hkv,hk->hv", s, k[t])
        s = s + k[t][:, :, None] * (beta[t][:, None] * rest)[:, None]
    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, v, g, beta))
    ds = np.zeros_like(s)
    for t in reversed(range(len(v))):
        faded = before[t] * np.exp(g[t])[:, None, None]
        rest = v[t] - np.einsum("hkv,hk->hv", faded, k[t])
        u = beta[t][:, None] * rest
        after = faded + k[t][:, :, None] * u[:, None]
        dq[t] = np.einsum("hkv,hv->hk", after, do[t])
        ds = ds + q[t][:, :, None] * do[t][:, None]
        du = np.einsum("hkv,hk->hv", ds, k[t])
        dk[t] = np.einsum("hkv,hv->hk", ds, u) - np.einsum("hkv,hv->hk", faded, beta[t][:, None] * du)
        dbeta[t] = (du * rest).sum(-1)
        dv[t] = beta[t][:, None] * du
        ds = ds - k[t][:, :, None] * dv[t][:, None]
        dg[t] = (ds * faded).sum((1, 2))
        ds = ds * np.exp(g[t])[:, None, None]
    dq, dk = (x.reshape(len(v), cases.KEY_HEADS, group, -1).sum(2) for x in (dq * scale, dk))
    return [dq, dk, dv, dg, dbeta]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["portable", "stock"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_recurrence(dtype: str, backend: str) -> None:
    request = cases.tokens(GRADIENT_ROOM, dtype=dtype)
    do = output_gradient(request)
    with detjax.use_backend(backend):
        given = gradients(request, do)
    for x, exact in zip(given, exact_gradients(request, do), strict=True):
        assert error(x, exact) < {"float32": 2e-6, "bfloat16": 1e-2}[dtype]


PACKED_ROWS = 256


def packed_gradients(
    parts: Sequence[cases.Tokens], dos: Sequence[np.ndarray], state: ops.DeltaState, starts: Sequence[int]
) -> list[list[np.ndarray]]:
    """The gradients of each of three requests, side by side in one call and in the last slots first."""
    arrays, firsts = cases.packed(parts, decodes=0, rows=PACKED_ROWS)
    do_rows, _ = cases.packed([cases.Tokens(*[do] * 5) for do in dos], decodes=0, rows=PACKED_ROWS)
    start, count = np.array(starts, np.int32), np.array([len(do) for do in dos], np.int32)
    queries = ops.Queries.packed(np.zeros((3, 1), np.int32), start, count, decodes=0, rows=PACKED_ROWS)
    queries = dataclasses.replace(queries, slots=np.array([SLOTS - 1, SLOTS - 2, SLOTS - 3], np.int32))
    given = [np.asarray(x) for x in _gradients(arrays, do_rows[0], state, queries)]
    return [[x[first : first + len(do)] for x in given] for first, do in zip(firsts, dos, strict=True)]


def test_gradients_depend_on_neither_padding_nor_packing_nor_neighbours() -> None:
    requests = [cases.tokens(count, seed) for seed, count in enumerate([70, 130, 40])]
    dos = [output_gradient(request) for request in requests]
    alone = [gradients(request, do) for request, do in zip(requests, dos, strict=True)]
    assert_same_bits(packed_gradients(requests, dos, cases.empty_state(SLOTS), [0, 0, 0]), alone)


@pytest.mark.parametrize(
    ("dtype", "start"),
    [
        *(("bfloat16", start) for start in (20, 63, 64, 128, 133)),
        pytest.param("float32", 63, marks=pytest.mark.nightly),
        pytest.param("float32", 64, marks=pytest.mark.nightly),
    ],
)
def test_gradients_of_a_part_of_a_request_are_those_of_the_whole(dtype: str, start: int) -> None:
    """The loss sees later tokens alone, so earlier ones are a constant to them. The slot held another request."""
    request = cases.tokens(139, dtype=dtype)
    do = output_gradient(request)
    do[:start] = 0
    whole = [x[start:] for x in gradients(request, do)]
    for x, exact in zip(whole, exact_gradients(request, do), strict=True):
        assert error(x, exact[start:]) < {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
    state = cases.empty_state(SLOTS, dtype)
    _, state = padded_call(cases.tokens(139, 1, dtype), state, 0, 139, SLOTS - 2)
    _, state = padded_call(request, state, 0, start, SLOTS - 2)
    # One more request, which begins, stands before it, and another one after it.
    others = [cases.tokens(count, 2, dtype) for count in (9, 17)]
    parts, dos = [others[0], request.cut(start, 139), others[1]], [others[0].v, do[start:], others[1].v]
    before, given, after = packed_gradients(parts, dos, state, [0, start, 0])
    assert_same_bits(given, whole)
    assert_same_bits([before, after], [gradients(other, other.v) for other in others])


def test_arguments_that_do_not_fit_are_refused() -> None:
    gated_delta_rule = unchecked(ops.gated_delta_rule)
    arrays, state = [jnp.asarray(x)[None] for x in cases.tokens(4)], cases.empty_state(1)
    queries = jax.tree.map(jnp.asarray, cases.queries([0], [4]))
    with pytest.raises(ValueError, match="v has 3 heads and q 2; accepted: a multiple of 2"):
        gated_delta_rule(*arrays[:2], *(x[:, :, :3] for x in arrays[2:]), state, queries)
    with pytest.raises(ValueError, match=r"g has shape \(1, 4, 3\); accepted: \(1, 4, 4\)"):
        gated_delta_rule(*arrays[:3], arrays[3][..., :3], arrays[4], state, queries)
    with pytest.raises(ValueError, match=r"state.keys has shape"):
        gated_delta_rule(*arrays, state._replace(keys=state.keys[:, :64]), queries)
    with pytest.raises(TypeError, match=r"state.updates has dtype float32"):
        gated_delta_rule(*arrays, state._replace(updates=state.updates.astype(jnp.float32)), queries)
    with pytest.raises(ValueError, match=r"queries.slots has shape \(2,\)"):
        gated_delta_rule(*arrays, state, without_checks(ops.Queries, **vars(queries) | {"slots": jnp.arange(2)}))
