"""Softmax's Hopper kernels in Pallas' interpreter, which adds a block's lanes in an order of its own, and lowered."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import SOFTMAX_BLOCK
from detjax.pallas.hopper.row_stream import RowStream, fold_blocks
from detjax.pallas.hopper.softmax import (
    Problem,
    Schedule,
    default_schedule,
    log_softmax,
    logsumexp,
    row_sums,
    softmax,
)
from detjax.pallas.softmax_formulas import exp_difference
from tests.pallas.hopper.interpreter import interpreted, interpreted_without_races, lowered
from tests.support.bits import assert_same_bits

VOCABULARIES = (128256, 151936)


def logits(rows: int, width: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, width]).standard_normal((rows, width)) * 4, dtype)


def name_of(schedule: Schedule) -> str:
    """The name of a test's schedule."""
    return f"cluster{schedule.cluster}-slots{schedule.slots}-{schedule.exchange}"


def problem(x: Any, *, rewritten: bool = True) -> Problem:
    return Problem.for_rows(x, rewritten=rewritten)


def exact(x: Any) -> dict[str, np.ndarray]:
    """The results of the three operations in float64."""
    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        m = x.max(axis=-1)
        total = m + np.log(np.exp(x - m[..., None]).sum(axis=-1))
        logprobs = x - total[..., None]
    return {"softmax": np.exp(logprobs), "log_softmax": logprobs, "logsumexp": total}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fn", "width"),
    [(log_softmax, width) for width in (4097, 1, 5, 128, 4096, 10000)]
    + [(fn, width) for fn in (softmax, logsumexp) for width in (300, 1, 4097)],
)
def test_numbers_are_those_of_float64(fn: Callable[..., Any], width: int) -> None:
    x = logits(3, width)
    schedule = Schedule(0, 4, 3) if fn is logsumexp else Schedule(1, 8, 2)
    result = interpreted(functools.partial(fn, schedule=schedule), x)
    np.testing.assert_allclose(result, exact(x)[fn.__name__], rtol=1e-6, atol=4e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_logits_have_the_bits_of_the_same_logits_in_float32(dtype: str) -> None:
    x = logits(3, 4737, dtype)
    fn = functools.partial(log_softmax, schedule=Schedule(1, 4, 2))
    assert_same_bits(interpreted(fn, x), interpreted(fn, x.astype(jnp.float32)))


def test_exponentials_are_powers_of_two_of_a_rounded_product() -> None:
    # A CPU gives `exp2(rn(rn(x - m) * LOG2_E))` and `exp(x - m)` the same bits, so only the program shows which it is.
    jaxpr = str(jax.make_jaxpr(exp_difference)(np.float32(1), np.float32(2)))
    assert re.search(r"sub a b.*mul \S+ 1\.442695.*exp2", jaxpr, re.DOTALL), jaxpr


@pytest.mark.parametrize("blocks", [1, 63, 64, 127, 128, 193])
def test_blocks_are_folded_in_ascending_order(blocks: int) -> None:
    def step(block: Any, carry: jax.Array) -> jax.Array:
        return carry * jnp.uint32(31) + jnp.asarray(block).astype(jnp.uint32)

    expected = functools.reduce(lambda carry, block: (31 * carry + block) % 2**32, range(blocks), 1)
    assert int(jax.jit(lambda carry: fold_blocks(blocks, step, carry))(jnp.uint32(1))) == expected


BLOCKS = 5


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(2, 8, 2, "global"),
        Schedule(0, 4, 3),
        pytest.param(Schedule(1, 16, 2), marks=pytest.mark.nightly),
    ],
    ids=name_of,
)
def test_blocks_are_added_left_to_right(schedule: Schedule) -> None:
    # A block has its largest number some times and -inf else, so its sum is a whole number in any order of addition.
    random, rows = np.random.default_rng(0), 12
    maxima = random.uniform(-9, 0, (rows, BLOCKS)).astype(np.float32)
    maxima[np.arange(rows), random.integers(0, BLOCKS, rows)] = 0
    counts = random.integers(1, SOFTMAX_BLOCK, (rows, BLOCKS))
    x = np.where(np.arange(SOFTMAX_BLOCK) < counts[..., None], maxima[..., None], np.float32(-np.inf))
    factor = jax.jit(lambda difference: jnp.exp2(difference * np.float32(np.log2(np.e))))
    factors = np.array([[factor(m) for m in row] for row in maxima])
    terms = counts.astype(np.float32) * factors
    total, reversed_total = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    for block in range(BLOCKS):
        total, reversed_total = total + terms[:, block], reversed_total + terms[:, BLOCKS - 1 - block]
    largest, other = np.float32(1) / total, np.float32(1) / reversed_total
    assert (largest != other).sum() > 1
    y = interpreted(functools.partial(softmax, schedule=schedule), jnp.asarray(x.reshape(rows, -1)))
    assert_same_bits(y.reshape(rows, BLOCKS, SOFTMAX_BLOCK)[:, :, 0], factors * largest[:, None])


@pytest.mark.parametrize("schedule", [Schedule(0, 2, 1), Schedule(0, 5, 4)], ids=name_of)
def test_blocks_are_added_left_to_right_for_gradients(schedule: Schedule) -> None:
    # One number in each block: its sum is exact.
    numbers = np.random.default_rng(0).standard_normal((3, BLOCKS)).astype(np.float32)
    x = np.zeros((3, BLOCKS, SOFTMAX_BLOCK), np.float32)
    x[:, :, 1234] = numbers
    total = np.zeros(3, np.float32)
    for block in range(BLOCKS):
        total = total + numbers[:, block]
    assert (total != numbers[:, ::-1].cumsum(axis=1, dtype=np.float32)[:, -1]).any()
    sums = interpreted(functools.partial(row_sums, schedule=schedule), jnp.asarray(x.reshape(3, -1)))
    assert_same_bits(sums, total[:, None])


SCHEDULES = (
    Schedule(1, 9, 2),
    Schedule(2, 4, 2, "global"),
    Schedule(3, 3, 1, "global"),
    Schedule(0, 2, 1),
    Schedule(0, 5, 4),
)


@pytest.mark.parametrize(
    ("fn", "schedules"),
    [
        (log_softmax, SCHEDULES[::2]),
        pytest.param(log_softmax, SCHEDULES, marks=pytest.mark.nightly),
        pytest.param(softmax, SCHEDULES[::3], marks=pytest.mark.nightly),
    ],
)
def test_every_schedule_gives_the_same_bits(fn: Callable[..., Any], schedules: tuple[Schedule, ...]) -> None:
    x = logits(2, 2 * SOFTMAX_BLOCK + 300)
    expected = interpreted(functools.partial(fn, schedule=schedules[0]), x)
    for schedule in schedules[1:]:
        assert_same_bits(interpreted(functools.partial(fn, schedule=schedule), x), expected)


def test_every_schedule_of_logsumexp_gives_the_same_bits() -> None:
    x = logits(3, SOFTMAX_BLOCK + 1)
    expected = interpreted(functools.partial(logsumexp, schedule=Schedule(0, 2, 1)), x)
    # With more CTAs than blocks.
    assert_same_bits(interpreted(functools.partial(logsumexp, schedule=Schedule(0, 8, 100)), x), expected)


def test_sums_for_gradients_have_the_same_bits_in_every_schedule_and_for_a_row_alone() -> None:
    x = logits(3, SOFTMAX_BLOCK + 700)
    expected = interpreted(functools.partial(row_sums, schedule=Schedule(0, 2, 1)), x)
    np.testing.assert_allclose(expected[:, 0], np.asarray(x, np.float64).sum(axis=1), atol=1e-3)
    assert_same_bits(interpreted(functools.partial(row_sums, schedule=Schedule(0, 5, 4)), x), expected)
    assert_same_bits(interpreted(row_sums, x[1:2]), expected[1:2])


def test_a_row_does_not_depend_on_how_many_there_are_nor_on_its_neighbours() -> None:
    fn = functools.partial(log_softmax, schedule=Schedule(1, 5, 2))
    anchor = logits(1, 4300, seed=1)
    expected = interpreted(fn, anchor)
    batch = logits(3, 4300, seed=3)
    for position in (0, 2):
        assert_same_bits(interpreted(fn, batch.at[position].set(anchor[0]))[position], expected[0])


@pytest.mark.parametrize("cluster", [0, 2, pytest.param(1, marks=pytest.mark.nightly)])
def test_infinities_and_nans_stay_in_their_row(cluster: int) -> None:
    x = np.array(logits(6, 4200))
    x[1, 4100] = np.nan
    x[2, 7] = np.inf
    x[3] = -np.inf
    x[4, :4096] = -np.inf
    x[5, 1::2] = -np.inf
    fn = functools.partial(log_softmax, schedule=Schedule(cluster, 4, 2, "global"))
    result = interpreted(fn, jnp.asarray(x))
    assert np.isnan(result[1:4]).all()
    kept = [0, 4, 5]
    np.testing.assert_allclose(result[kept], exact(x)["log_softmax"][kept], rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(
    ("fn", "schedule"),
    [
        (log_softmax, Schedule(2, 3, 2, "global")),
        (logsumexp, Schedule(0, 3, 2)),
        pytest.param(log_softmax, Schedule(1, 4, 2), marks=pytest.mark.nightly),
        pytest.param(log_softmax, Schedule(0, 3, 2), marks=pytest.mark.nightly),
    ],
)
def test_no_part_is_read_before_it_arrives_or_overwritten_before_it_is_read(
    fn: Callable[..., Any], schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = RowStream.release

    def fenced(self: RowStream, item: Any, part: int) -> None:
        # The interpreter does not know the barrier that the compiler puts before every copy.
        plgpu.commit_smem()
        release(self, item, part)

    monkeypatch.setattr(RowStream, "release", fenced)
    interpreted_without_races(functools.partial(fn, schedule=schedule), logits(3, 4700))


def test_the_public_operations_and_their_gradients_run_on_these_kernels() -> None:
    x = logits(4, 300).reshape(2, 2, 300)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32)
    for name in ("log_softmax", "logsumexp"):

        def weighted(x: jax.Array, name: str = name) -> jax.Array:
            y = getattr(ops, name)(x)
            return (y * (weights if y.ndim == x.ndim else weights[..., 0])).sum()

        with plgpu.force_gpu_interpret_mode(), detjax.use_backend("hopper"):
            value, gradient = detjax.jit(jax.value_and_grad(weighted))(x)
        with detjax.use_backend("portable"):
            expected, expected_gradient = detjax.jit(jax.value_and_grad(weighted))(x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", VOCABULARIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_schedules_lower_for_cuda(width: int, dtype: str) -> None:
    for rows in (1, 64, 1024):
        x = jax.ShapeDtypeStruct((rows, width), jnp.dtype(dtype))
        lowered(log_softmax, x)
    lowered(softmax, x)
    lowered(logsumexp, x)
    lowered(row_sums, jax.ShapeDtypeStruct(x.shape, jnp.float32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", VOCABULARIES)
def test_every_schedule_lowers_for_cuda(width: int) -> None:
    x = jax.ShapeDtypeStruct((64, width), jnp.bfloat16)
    for cluster in (2, 3, 8):
        slots = 2 * -(-(width // SOFTMAX_BLOCK + 1) // cluster)
        if slots <= 26:
            lowered(functools.partial(log_softmax, schedule=Schedule(cluster, slots, 3)), x)
    lowered(functools.partial(softmax, schedule=default_schedule(problem(x, rewritten=False))), x)


@pytest.mark.parametrize("width", [1, 1_000_001, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4096, 50257))])
def test_other_widths_lower_for_cuda(width: int) -> None:
    x = jax.ShapeDtypeStruct((300, width), jnp.float32)
    lowered(log_softmax, x)
    lowered(logsumexp, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_of_a_usual_vocabulary_is_held_by_a_cluster(dtype: str) -> None:
    for width in (32000, *VOCABULARIES, 262144):
        for rows in (1, 16, 64, 1000):
            schedule = default_schedule(problem(jax.ShapeDtypeStruct((rows, width), jnp.dtype(dtype))))
            assert schedule.cluster >= 1
            assert schedule.grid <= rows
    assert default_schedule(problem(jax.ShapeDtypeStruct((4, 2_000_000), jnp.dtype(dtype)))).cluster == 0


def test_schedules_that_do_not_fit_are_refused() -> None:
    x = jax.ShapeDtypeStruct((4, 151936), jnp.float32)
    with pytest.raises(
        ValueError, match=r"4 CTAs with 13 slots each for rows of 38 blocks; accepted: .* least 20 slots"
    ):
        lowered(functools.partial(log_softmax, schedule=Schedule(4, 13, 4)), x)
    with pytest.raises(ValueError, match="cluster is 9; accepted: 0 to 8"):
        Schedule(9, 13, 4)
    with pytest.raises(ValueError, match="slots is 1; accepted: 2 to 32"):
        Schedule(1, 1, 4)
    with pytest.raises(ValueError, match="grid is 0; accepted: 1 and more"):
        Schedule(1, 4, 0)
    with pytest.raises(ValueError, match="exchange is 'none'; accepted: 'shared', 'global'"):
        Schedule(1, 4, 1, "none")  # pyright: ignore
