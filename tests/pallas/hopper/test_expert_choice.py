"""The kernels that choose experts and place rows: the portable backend's bits in Pallas' interpreter, and lowered."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.ops.experts import most_rows
from detjax.pallas.hopper import expert_choice, expert_places
from detjax.pallas.hopper.expert_choice import Problem, Schedule, default_schedule
from detjax.runtime import backends
from tests.pallas.hopper.interpreter import lowered
from tests.support.attention_requests import INTERPRETER
from tests.support.bits import assert_same_bits, same_bits

LN2 = np.log(2)


@pytest.fixture
def hopper_in_the_interpreter(attention_in_the_interpreter: None) -> Iterator[None]:
    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


in_the_interpreter = pytest.mark.usefixtures("hopper_in_the_interpreter")


def problem(
    tokens: int, experts: int, count: int, *, normalized: bool = True, unit: int = 8, local: int | None = None
) -> Problem:
    local = experts if local is None else local
    rows = most_rows(tokens * count, local, unit)
    return Problem(tokens, count, local, unit, rows, experts=experts, normalized=normalized)


def logits(tokens: int, experts: int) -> jax.Array:
    """Logits of few different values: many are equal, and sums of their exponentials, powers of two, are exact.

    The interpreter adds in an order of its own.
    """
    x = np.float32(-np.random.default_rng([tokens, experts]).integers(0, 13, (tokens, experts)) * LN2)
    x[:, 1] = 0
    if tokens > 3:
        x[1], x[2, 3:], x[3] = np.nan, -np.inf, 0
    return jnp.asarray(x)


def steps(x: jax.Array, present: jax.Array | None, first: int | None, p: Problem) -> tuple[Any, ...]:
    """The results of the separate operations on the portable backend."""
    with detjax.use_backend("portable"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.experts, "group_unit", lambda rows, experts: p.unit)  # pyright: ignore[reportAttributeAccessIssue]

        @detjax.jit
        def fn(x: jax.Array, present: jax.Array | None) -> tuple[Any, ...]:
            ids, weights = ops.choose_experts(ops.softmax(x), p.count, normalized=p.normalized)
            local = ids
            if first is not None:
                local = jnp.where((ids >= first) & (ids < first + p.local), ids - first, p.local)
            rows = ops.expert_rows(local, p.local, present)
            ends, firsts = jnp.cumsum(rows.group_sizes), jnp.arange(0, len(rows.token), p.unit)
            tiles = jnp.minimum(jnp.searchsorted(ends, firsts, side="right"), p.local - 1)
            tiles = jnp.append(tiles, ends[-1] // p.unit).astype(jnp.int32)
            return ids, weights, rows.group_sizes, rows.token, rows.place, tiles

        return jax.tree.map(np.asarray, fn(x, present))


def by_kernel(
    x: jax.Array, present: jax.Array | None, first: int | None, p: Problem, schedule: Schedule | None = None
) -> tuple[Any, ...]:
    choose = functools.partial(expert_choice.choose, problem=p, schedule=schedule)
    return jax.tree.map(np.asarray, jax.jit(choose)(x, present, None if first is None else jnp.int32(first)))


@in_the_interpreter
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("p", "schedule", "absent", "first"),
    [
        (problem(37, 128, 8), Schedule(8, 2), True, None),
        (problem(5, 60, 4, normalized=False), None, True, None),
        (problem(7, 16, 3, unit=16, local=8), Schedule(4, 1), True, 3),
        (problem(1, 128, 8), None, False, None),
        (problem(1, 8, 1), None, False, None),
        (problem(34, 256, 7, normalized=False), Schedule(16, 2), False, None),
        (problem(64, 8, 2), Schedule(2, 1), False, None),
        (problem(9, 160, 6, unit=64), Schedule(8, 2), True, None),
        (problem(6, 512, 10, local=100), Schedule(32, 2), True, 200),
        (problem(4, 9, 5), Schedule(2, 2), True, None),
    ],
    ids=str,
)
def test_choices_and_rows_have_the_bits_of_the_separate_operations(
    p: Problem, schedule: Schedule | None, absent: bool, first: int | None
) -> None:
    x = logits(p.tokens, p.experts)
    present = jnp.arange(p.tokens) % 5 != 2 if absent else None
    expected = steps(x, present, first, p)
    actual = by_kernel(x, present, first, p, schedule)
    is_number = ~np.isnan(expected[1])
    assert_same_bits(np.isnan(actual[1]), ~is_number)
    assert_same_bits(np.where(is_number, actual[1], 0), np.where(is_number, expected[1], 0))
    assert_same_bits((actual[0], *actual[2:]), (expected[0], *expected[2:]))


@in_the_interpreter
@pytest.mark.parametrize(
    ("p", "schedule"),
    [
        (problem(131, 60, 4, normalized=False), None),
        (problem(65, 512, 10), None),
        (problem(200, 8, 1), Schedule(2, 3)),
        (problem(150, 128, 8), Schedule(8, 2)),
    ],
    ids=str,
)
def test_choices_of_many_tokens_have_the_bits_of_the_separate_operations(p: Problem, schedule: Schedule | None) -> None:
    x = logits(p.tokens, p.experts)
    ids, weights = by_kernel(x, None, None, p, schedule)
    expected = steps(x, None, None, p)
    assert_same_bits(ids, expected[0])
    assert_same_bits(np.isnan(weights), np.isnan(expected[1]))
    assert_same_bits(np.nan_to_num(weights), np.nan_to_num(expected[1]))


@in_the_interpreter
@pytest.mark.parametrize("tokens", [35, 65, 700])
def test_rows_of_given_choices_are_those_of_the_portable_backend(tokens: int) -> None:
    """Choices of experts on other devices, whose id is 9, occur several times."""
    ids = np.argsort(np.random.default_rng(0).standard_normal((tokens, 12)), axis=1)[:, :5]
    ids = jnp.asarray(np.sort(np.minimum(ids, 9)), jnp.int32)
    present = jnp.arange(tokens) % 4 != 1
    fields = ("group_sizes", "token", "place")

    def rows(ids: jax.Array, present: jax.Array) -> ops.ExpertRows:
        return ops.expert_rows(ids, 9, present)

    placed = jax.jit(rows)(ids, present)
    with detjax.use_backend("portable"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.experts, "group_unit", lambda rows, experts: placed.unit)  # pyright: ignore[reportAttributeAccessIssue]
        expected = detjax.jit(rows)(ids, present)
    assert expected.tiles is None and placed.tiles is not None
    assert_same_bits([getattr(placed, f) for f in fields], [getattr(expected, f) for f in fields])
    sizes, tiles = np.asarray(placed.group_sizes) // placed.unit, np.asarray(placed.tiles)
    assert tiles[-1] == sizes.sum()
    assert tiles[: tiles[-1]].tolist() == np.repeat(np.arange(9), sizes).tolist()
    assert tiles[tiles[-1] : -1].tolist() == [8] * (len(tiles) - 1 - tiles[-1])


@in_the_interpreter
def test_a_token_has_its_bits_whatever_the_schedule_and_its_neighbors() -> None:
    p, x = problem(6, 32, 4), jnp.asarray(np.random.default_rng(0).standard_normal((6, 32)), jnp.float32)
    ids, weights, *_ = by_kernel(x, None, None, p, Schedule(8, 2))
    reversed_ids, reversed_weights, *_ = by_kernel(x[::-1], None, None, p, Schedule(8, 1))
    assert_same_bits((reversed_ids[::-1], reversed_weights[::-1]), (ids, weights))
    assert not same_bits(reversed_weights, weights)


@in_the_interpreter
@pytest.mark.parametrize("tokens", [5, 70])
def test_the_operation_has_the_bits_and_the_gradients_of_its_steps(tokens: int) -> None:
    x, present = logits(tokens, 24), jnp.arange(tokens) % 4 != 2
    x = jnp.where(jnp.isnan(x), 0.0, x)
    dweights = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, 3)), jnp.float32)

    def routed(x: jax.Array) -> Any:
        ids, weights, rows = ops.route(x, 3, normalized=True, present=present)
        return weights, (ids, rows)

    def separate(x: jax.Array) -> Any:
        ids, weights = ops.choose_experts(ops.softmax(x), 3, normalized=True)
        return weights, (ids, ops.expert_rows(ids, 24, present))

    def both(fn: Any, x: jax.Array) -> Any:
        weights, pullback, rest = jax.vjp(fn, x, has_aux=True)
        return weights, rest, pullback(dweights)

    actual, expected = (jax.jit(functools.partial(both, fn))(x) for fn in (routed, separate))
    assert_same_bits(actual, expected)
    assert np.asarray(actual[2][0]).any()


def text(fn: Any, *args: Any, backend: str = "hopper", target: str = "gpu") -> str:
    """The program of a function."""
    with backends.tracing_for(target), detjax.use_backend(backend):
        return str(jax.make_jaxpr(fn)(*args))


def test_tokens_meet_the_kernel_on_hopper_alone() -> None:
    def route(x: jax.Array) -> Any:
        return ops.route(x, 2, normalized=True)

    def separate(x: jax.Array) -> Any:
        ids, weights = ops.choose_experts(ops.softmax(x), 2, normalized=True)
        return ids, weights, ops.expert_rows(ids, x.shape[1])

    few, many, wide = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 512), (65, 512), (64, 513)))
    assert "expert_choice" in text(route, few) and "top_k" not in text(route, few) and "cumsum" not in text(route, few)
    # Kernels of their own place the rows of many tokens.
    for name in ("expert_choice", "expert_counts", "expert_places"):
        assert name in text(route, many)
    assert "top_k" not in text(route, many) and "cumsum" not in text(route, many)
    assert text(route, wide) == text(separate, wide)
    most = jax.ShapeDtypeStruct((expert_places.MAX_BLOCKED_TOKENS + 1, 8), jnp.float32)
    assert text(route, most) == text(separate, most) and "cumsum" in text(route, most)
    assert text(route, few, backend="portable", target="cpu") == text(separate, few, backend="portable", target="cpu")
    with detjax.without_fusions("softmax"):
        assert text(route, few, target="cpu") == text(separate, few, target="cpu")


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="Schedule: 16 threads for rows of 32 columns; accepted: 2, 4, 8"):
        Schedule(16, 1).check(problem(4, 20, 2))
    with pytest.raises(ValueError, match="Schedule: warpgroups is 5; accepted: 1 to 4"):
        Schedule(8, 5).check(problem(4, 20, 2))


@pytest.mark.parametrize("experts", [1, 8, 9, 60, 64, 65, 128, 160, 256, 384, 512])
def test_default_schedules_fit(experts: int) -> None:
    for tokens in (1, 2, 3, 15, 16, 17, 33, 64):
        p = problem(tokens, experts, 1)
        schedule = default_schedule(p)
        schedule.check(p)
        assert schedule.rows_at_once(p) <= tokens
        assert p.width // schedule.threads <= 32
    default_schedule(problem(8192, experts, 1)).check(problem(8192, experts, 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "p", [problem(64, 512, 16, local=256), problem(1, 128, 8), problem(3, 60, 4), problem(8192, 128, 8)], ids=str
)
def test_choices_lower_for_cuda(p: Problem) -> None:
    def fn(x: Any, present: Any, first: Any) -> Any:
        return expert_choice.choose(x, present, first if p.local < p.experts else None, problem=p)

    types = ((p.tokens, p.experts), "float32"), ((p.tokens,), "bool"), ((), "int32")
    lowered(fn, *(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in types))


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("tokens", "experts", "count"),
    [(1, 128, 8), (8, 128, 8), (64, 128, 8), (33, 60, 4), (64, 512, 10), (17, 8, 2), (1000, 128, 8), (8192, 512, 10)],
)
def test_the_device_gives_the_bits_of_the_separate_operations(
    tokens: int, experts: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(tokens)
    x = jnp.asarray(random.standard_normal((tokens, experts)) * 3, jnp.float32)
    present = jnp.asarray(random.random(tokens) < 0.8)

    def results(x: jax.Array, present: jax.Array) -> tuple[Any, ...]:
        ids, weights, rows = ops.route(x, count, normalized=True, present=present)
        return ids, weights, rows.group_sizes, rows.token, rows.place

    actual = detjax.jit(lambda x, present: results(x, present))(x, present)
    monkeypatch.setattr(expert_places.Problem, "served", False)
    assert_same_bits(actual, detjax.jit(lambda x, present: results(x, present))(x, present))
