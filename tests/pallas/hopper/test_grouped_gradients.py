"""Gradients of Hopper's grouped matmul: rows have the bits of the dense operation's, sums the contract's order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.options import Clamp, Epilogue
from detjax.operands.products import GroupedOperands
from detjax.ops import AccumulatedWeight
from detjax.pallas.hopper import group_stages, group_sums, grouped_matmul
from detjax.pallas.hopper import matmul as hopper_matmul
from detjax.pallas.hopper.group_stages import STAGE_STEPS, StagedSteps
from detjax.pallas.hopper.group_sums import Schedule
from detjax.portable import grouped_matmul as portable
from tests.pallas.hopper.interpreter import interpreted, lowered, normal
from tests.support.bits import assert_same_bits
from tests.support.products import grouped_matmul_gradients, matmul_gradients

EXPERTS, K, N = 4, 72, 40
GATED = Epilogue("silu", gated=True)
CLAMPED = Epilogue("silu", gated=True, clamp=Clamp(limit=4.0, slope=1.702))


def operands(rows: int, epilogue: Epilogue, layout: str = "nk") -> tuple[Any, ...]:
    """Rows, weights, biases, gradients of results, and sums of both weights' gradients."""
    stacked = (2,) if epilogue.gated else ()
    shape = (EXPERTS, *stacked, *((N, K) if layout == "nk" else (K, N)))
    arrays = [normal(*sizes, dtype="bfloat16") for sizes in ((rows, K), shape, (EXPERTS, *stacked, N), (rows, N))]
    return *arrays, normal(*shape), normal(EXPERTS, *stacked, N)


def gradients(
    x: Any, w: Any, bias: Any, dy: Any, w_sum: Any, bias_sum: Any, sizes: Any, sequences: Any = None, **options: Any
) -> Any:
    """The gradients of rows, and the next sums of weights and biases."""
    fn = grouped_matmul_gradients(
        grouped_matmul.backward, **{"layout": "nk", "epilogue": Epilogue(), "unit": 1} | options
    )
    given = x, w, bias, np.array(sizes, np.int32), sequences, dy, w_sum, bias_sum
    lowered(fn, *given)
    return interpreted(fn, *given)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
@pytest.mark.parametrize(
    ("unit", "sizes", "epilogue", "layout"),
    [
        (1, (0, 3, 0, 0), GATED, "kn"),
        (8, (0, 8, 0, 0), Epilogue(), "nk"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (8, (16, 0, 8, 24), GATED, "nk"),
                (32, (0, 64, 32, 0), Epilogue("gelu_tanh"), "kn"),
                (128, (0, 128, 0, 0), CLAMPED, "nk"),
                (1, (3, 0, 17, 1), GATED, "kn"),
                (1, (0, 0, 0, 5), Epilogue(), "nk"),
            )
        ),
    ],
)
def test_the_gradient_of_a_row_has_the_bits_of_its_experts_matmul(
    unit: int, sizes: tuple[int, ...], epilogue: Epilogue, layout: str
) -> None:
    count = sum(sizes)
    x, w, bias, dy, *sums = operands(count + 2 * unit, epilogue, layout)
    # Rows of nobody may hold anything, and have no gradient.
    x[count:], dy[count:] = np.nan, np.nan
    options: dict[str, Any] = {"layout": layout, "epilogue": epilogue}
    dx, *next_sums = gradients(x, w, bias, dy, *sums, sizes, **options, unit=unit)  # pyright: ignore[reportCallIssue]
    first = 0
    for expert, size in enumerate(sizes):
        rows = slice(first, first + size)
        if size:
            dense = matmul_gradients(hopper_matmul.backward, **options)
            before = [total[expert] for total in sums]
            expected = interpreted(dense, x[rows], w[expert], bias[expert], dy[rows], *before)
            assert_same_bits((dx[rows], *(total[expert] for total in next_sums)), expected)
        else:
            assert_same_bits([total[expert] for total in next_sums], [total[expert] for total in sums])
        first += size
    assert_same_bits(dx[count:], np.zeros_like(dx[count:]))


@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
def test_kept_sums_give_the_gradients_that_sums_computed_again_give() -> None:
    sizes = np.array((16, 0, 8, 24), np.int32)
    x, w, bias, dy, *_ = operands(64, CLAMPED)
    options: dict[str, Any] = {"layout": "nk", "epilogue": CLAMPED, "unit": 8}

    def fn(x: Any, w: Any, bias: Any, sizes: Any, dy: Any) -> Any:
        given = GroupedOperands(x, w, bias, sizes)
        y, z = grouped_matmul.forward_keeping_sums(given, **options)
        plain = grouped_matmul.forward(given, **options, out_dtype=x.dtype)
        kept, again = (grouped_matmul.backward(given, dy, z=z, **options) for z in (z, None))
        return (y[:48], *kept), (plain[:48], *again)

    assert_same_bits(*interpreted(fn, x, w, bias, sizes, dy))


# --- sums over tokens -------------------------------------------------------------------------------------------------

SEQUENCES = {
    "one sequence": np.zeros(70, np.int32),
    "sequences of many lengths": np.repeat(np.arange(6, dtype=np.int32), (1, 5, 30, 17, 2, 15)),
    "each row a sequence": np.arange(70, dtype=np.int32),
}
"""In the last case there are more steps than a piece has places for."""


def with_exact_steps(rows: int, layout: str = "nk") -> tuple[Any, ...]:
    """Operands whose steps have one sum in any order, which the sums so far round."""
    x, w, bias, dy, *sums = operands(rows, Epilogue(), layout)
    return np.round(4 * x), w, bias, np.round(4 * dy), *sums


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("matrix_unit_in_steps", "two_multiprocessors")
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize(("sizes", "layout"), [((0, 41, 0, 26), "nk"), ((70, 0, 0, 0), "kn"), ((1, 2, 3, 4), "nk")])
def test_sums_have_the_bits_of_the_portable_program(sizes: tuple[int, ...], layout: Any, sequences: np.ndarray) -> None:
    x, w, bias, dy, *sums = with_exact_steps(70, layout)
    count = sum(sizes)
    x[count:], dy[count:] = np.nan, np.nan
    # Bits that an addition would change.
    sums[0][:, ..., :3], sums[1][..., :3] = -0.0, -0.0
    sums[0][np.array(sizes) == 0] = np.nan
    _, *actual = gradients(x, w, bias, dy, *sums, sizes, sequences, layout=layout)  # pyright: ignore[reportCallIssue]
    program = grouped_matmul_gradients(portable.backward, layout=layout, epilogue=Epilogue())
    given = x, w, bias, np.array(sizes, np.int32), sequences, dy, *sums
    _, *expected = jax.tree.map(np.asarray, detjax.jit(program)(*given))
    idle = np.array(sizes) == 0
    for next_sum, total, want in zip(actual, sums, expected, strict=True):
        assert_same_bits(next_sum[idle], total[idle])
        # Steps of zeros make a -0 a 0, and a sum that begins with zeros never is one.
        assert_same_bits(next_sum[~idle] + 0, want[~idle] + 0)


@pytest.mark.usefixtures("matrix_unit_in_steps", "two_multiprocessors")
def test_microbatches_and_padding_are_schedules() -> None:
    """A sequence in groups that are padded, then another one, have the sums of both at once by the portable program."""
    x, w, bias, dy, *sums = with_exact_steps(38)
    expert_of = np.random.default_rng(0).integers(0, EXPERTS, 38)
    sequence_of = (np.arange(38) >= 17).astype(np.int32)

    def sorted_rows(chosen: np.ndarray, unit: int) -> tuple[np.ndarray, list[int]]:
        """Returns chosen rows by expert, with -1 to a multiple of `unit` in each group, and the groups' sizes."""
        members = [chosen[expert_of[chosen] == expert] for expert in range(EXPERTS)]
        sizes = [-(-len(rows) // unit) * unit for rows in members]
        filled = [np.pad(r, (0, s - len(r)), constant_values=-1) for r, s in zip(members, sizes, strict=True)]
        return np.concatenate(filled), sizes

    actual = sums
    for chosen, unit in ((np.arange(17), 16), (np.arange(17, 38), 1)):
        place, sizes = sorted_rows(chosen, unit)
        here = place >= 0
        # What fills up a group may hold anything.
        rows, grads = (np.where(here[:, None], array[place], array.dtype.type(np.nan)) for array in (x, dy))
        sequences = np.where(here, sequence_of[place], -1).astype(np.int32)
        _, *actual = gradients(rows, w, bias, grads, *actual, sizes, sequences, unit=unit)  # pyright: ignore[reportCallIssue]
    place, sizes = sorted_rows(np.arange(38), 1)
    program = grouped_matmul_gradients(portable.backward, layout="nk", epilogue=Epilogue())
    given = x[place], w, bias, np.array(sizes, np.int32), sequence_of[place], dy[place], *sums
    _, *expected = jax.tree.map(np.asarray, detjax.jit(program)(*given))
    assert_same_bits([total + 0 for total in actual], [total + 0 for total in expected])


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
@pytest.mark.parametrize("schedule", [Schedule(64, 64), Schedule(128, 64), Schedule(64, 192)], ids=str)
def test_tiles_are_schedules(schedule: Schedule) -> None:
    x, w, sums = normal(256, 128, dtype="bfloat16"), normal(256, 192, dtype="bfloat16"), normal(3, 128, 192)
    stages = [np.array(numbers, np.int32) for numbers in ((2, 0, 1), (1, 0, 4), (3, 1, 0))]

    def fn(sums: Any, x: Any, w: Any, *stages: Any) -> jax.Array:
        return group_sums.product_sums(sums, x, w, group_stages.Stages(*stages), schedule)

    lowered(fn, sums, x, w, *stages)
    expected = sums.copy()
    for group, first, number in zip(*stages, strict=True):
        for token in range(64 * first, 64 * (first + number)):
            expected[group] = expected[group] + x[token, :, None].astype(np.float32) * w[token].astype(np.float32)
    assert_same_bits(interpreted(fn, sums, x, w, *stages), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [40, 200])
def test_rows_are_added_left_to_right_step_by_step(width: int) -> None:
    sums, x = normal(3, width), normal(256, width)
    stages = [np.array(numbers, np.int32) for numbers in ((2, 0, 1), (1, 0, 4), (3, 1, 0))]

    def fn(sums: Any, x: Any, *stages: Any) -> jax.Array:
        return group_sums.row_sums(sums, x, group_stages.Stages(*stages))

    lowered(fn, sums, x, *stages)
    expected = sums.copy()
    for group, first, number in zip(*stages, strict=True):
        for token in range(64 * first, 64 * (first + number), 16):
            expected[group] = expected[group] + functools.reduce(np.add, x[token : token + 16])
    assert_same_bits(interpreted(fn, sums, x, *stages), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rows", "columns", "schedule"), [(1536, 2048, (128, 128)), (2048, 768, (128, 128)), (5760, 2880, (64, 192))]
)
def test_tiles_divide_the_sums(rows: int, columns: int, schedule: tuple[int, int]) -> None:
    assert group_sums.default_schedule(rows, columns) == Schedule(*schedule)


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("sizes", [(0, 41, 0, 26), (70, 0, 0, 0), (0, 0, 0, 0), (1, 2, 3, 4)])
def test_every_row_has_one_place_in_its_groups_stages(sizes: tuple[int, ...], sequences: np.ndarray) -> None:
    steps = StagedSteps.from_sizes(jnp.array(sizes, jnp.int32), 70, jnp.asarray(sequences))
    rows_of_groups: list[list[int]] = [[] for _ in sizes]
    for index in range(int(steps.pieces)):
        rows, stages = jax.tree.map(np.asarray, steps.piece(jnp.int32(index)))
        by_step = rows.reshape(-1, 16)
        assert sorted(stages[0]) == [0, 1, 2, 3]
        assert (np.diff(stages[2]) <= 0).all()
        for group, first, number in zip(*stages, strict=True):
            for step in by_step[STAGE_STEPS * first : STAGE_STEPS * (first + number)]:
                present = step[step < 70]
                assert len({int(sequences[row]) for row in present}) <= 1
                rows_of_groups[group] += present.tolist()
    ends = np.cumsum(sizes)
    assert rows_of_groups == [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


# --- the device -------------------------------------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("tokens", "experts", "count", "width", "inner", "clamp"),
    [(1024, 128, 8, 2048, 768, None), (8192, 128, 8, 2048, 768, None), (2048, 32, 4, 2880, 2880, CLAMPED.clamp)],
)
def test_the_device_gives_the_bits_of_each_experts_matmul(
    tokens: int, experts: int, count: int, width: int, inner: int, clamp: Clamp | None
) -> None:
    random, sequence_length = np.random.default_rng(0), 300
    ids = np.sort(np.argsort(random.random((tokens, experts - 1)), axis=1)[:, :count], axis=1).astype(np.int32)
    x, dy = (jax.random.normal(jax.random.key(i), (tokens, width), jnp.bfloat16) for i in range(2))
    shapes = (experts, 2, inner, width), (experts, width, inner)
    weights = [jax.random.normal(jax.random.key(2), shape, jnp.bfloat16) / shape[-1] ** 0.5 for shape in shapes]
    biases = [jax.random.normal(jax.random.key(3), shape[:-1], jnp.bfloat16) for shape in shapes]
    sums = [jax.random.normal(jax.random.key(4), array.shape, jnp.float32) for array in (*weights, *biases)]
    gate: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True, "clamp": clamp}

    @detjax.jit
    def grouped(x: jax.Array, ids: jax.Array, dy: jax.Array, sums: Any) -> Any:
        rows = ops.expert_rows(ids, experts)
        sequences = (rows.token // sequence_length).astype(jnp.int32)
        options: dict[str, Any] = {"sequences": sequences, "unit": rows.unit}

        def fn(given: jax.Array, sums: Any) -> jax.Array:
            w, v, b, c = map(AccumulatedWeight, (*weights, *biases), sums)
            y = ops.grouped_matmul(given, w, rows.group_sizes, bias=b, **gate, **options)
            return ops.grouped_matmul(y, v, rows.group_sizes, bias=c, layout="nk", **options)

        by_row = dy.at[rows.token].get(mode="fill", fill_value=0)
        return rows.place, *jax.vjp(fn, rows.gather(x), sums)[1](by_row)

    @detjax.jit
    def dense(x: jax.Array, dy: jax.Array, expert: jax.Array, sums: Any) -> Any:
        def fn(x: jax.Array, sums: Any) -> jax.Array:
            w, v, b, c = (AccumulatedWeight(a[expert], s) for a, s in zip((*weights, *biases), sums, strict=True))
            return ops.matmul(ops.matmul(x, w, bias=b, **gate), v, bias=c, layout="nk")

        return jax.vjp(fn, x, sums)[1](dy)

    place, dx, next_sums = grouped(x, jnp.asarray(ids), dy, sums)
    assert_same_bits([total[-1] for total in next_sums], [total[-1] for total in sums])
    for expert in (0, 1, experts // 2, experts - 2):
        chosen = np.flatnonzero((ids == expert).any(axis=1))
        slots = (ids[chosen] == expert).argmax(axis=1)
        # Each sequence begins a step.
        index = np.full(16 * (len(chosen) // 16 + tokens // sequence_length + 2), -1)
        end = 0
        for sequence in range(tokens // sequence_length + 1):
            members = np.flatnonzero(chosen // sequence_length == sequence)
            index[end : end + len(members)] = members
            end += -(-len(members) // 16) * 16
        here = jnp.asarray(index >= 0)[:, None]
        given = (jnp.where(here, array[chosen[index]], jnp.zeros((), array.dtype)) for array in (x, dy))
        expected, expected_sums = dense(*given, jnp.int32(expert), [total[expert] for total in sums])  # pyright: ignore[reportCallIssue]
        rows = np.asarray(place)[chosen, slots]
        assert_same_bits(np.asarray(dx)[rows], np.asarray(expected)[np.flatnonzero(index >= 0)])
        assert_same_bits([total[expert] for total in next_sums], expected_sums)
