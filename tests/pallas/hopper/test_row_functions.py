"""Hopper's kernels of functions of rows: the portable program's bits in Pallas' interpreter, and their schedules."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.pallas.hopper import row_functions
from detjax.pallas.hopper.row_functions import Problem, Schedule
from tests.ops.cases import at
from tests.pallas.hopper.interpreter import lowered
from tests.support.attention_requests import INTERPRETER
from tests.support.bits import assert_same_bits, same_bits

in_the_interpreter = pytest.mark.usefixtures("hopper_in_the_interpreter")

ROWS = 37
SHAPES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "gated_rms_norm": (functools.partial(ops.gated_rms_norm, eps=1e-6), ((ROWS, 128), (ROWS, 128), (128,)), 2),
    "l2_norm": (functools.partial(ops.l2_norm, eps=2.0), ((ROWS, 64),), 1),
    "l2_norm of wide rows": (functools.partial(ops.l2_norm, eps=1e-6), ((ROWS, 1536),), 1),
    "decay_and_rate": (ops.decay_and_rate, ((ROWS, 48), (ROWS, 48), (48,), (48,)), 2),
    "layer_norm": (functools.partial(ops.layer_norm, eps=1e-6), ((ROWS, 1152), (1152,), (1152,)), 1),
    "sigmoid_gated": (ops.sigmoid_gated, ((ROWS, 1024), (ROWS, 1024)), 2),
    "sigmoid_gated by a column": (ops.sigmoid_gated, ((ROWS, 256), (ROWS, 1)), 2),
    "weighted_sum": (
        lambda x, factors: ops.weighted_sum(x, factors.astype(jnp.float32)),
        ((ROWS, 4, 384), (ROWS, 4)),
        2,
    ),
}
"""Each with the shapes of its arguments, and how many of them are rows."""


@pytest.fixture
def hopper_in_the_interpreter(attention_in_the_interpreter: None) -> Iterator[None]:
    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


def arguments(name: str, dtype: str) -> list[jax.Array]:
    """Numbers whose sums, and whose squares' sums, are exact: the interpreter adds in an order of its own."""
    _, shapes, rows = SHAPES[name]
    random = np.random.default_rng(0)
    arrays = [random.integers(-63, 64, shape) / 16 for shape in shapes[:rows]]
    if name == "layer_norm":
        # Rows of mean 3 / 8, so that differences from it are exact too.
        half = random.integers(-63, 64, (ROWS, 576)) / 16
        arrays = [np.concatenate([half, 0.75 - half], axis=1)]
    arrays += [random.standard_normal(shape) for shape in shapes[rows:]]
    return [jnp.asarray(x.astype(jnp.dtype(dtype))) for x in arrays]


def on_portable(fn: Callable[..., Any], arrays: list[jax.Array]) -> Any:
    with detjax.use_backend("portable"):
        return jax.tree.map(np.asarray, fn(*arrays))


@in_the_interpreter
@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_functions_have_the_bits_of_the_portable_program(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, arrays = SHAPES[name][0], arguments(name, dtype)
    expected = on_portable(fn, arrays)
    monkeypatch.setattr(row_functions.portable, "forward", None)
    assert_same_bits(jax.tree.map(np.asarray, fn(*arrays)), expected)


@in_the_interpreter
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHAPES)
def test_neighbours_and_the_number_of_rows_change_no_bit(name: str) -> None:
    fn, _, rows = SHAPES[name]
    arrays = arguments(name, "bfloat16")
    whole = on_portable(fn, arrays)
    for first, count in ((36, 1), (3, 17)):
        part = fn(*(x[first : first + count] for x in arrays[:rows]), *arrays[rows:])
        assert_same_bits(jax.tree.map(np.asarray, part), at(whole, slice(first, first + count)))
    kept = np.delete(np.arange(ROWS), [7, 36])
    poisoned = (x.at[7].set(jnp.nan).at[36].set(jnp.inf) for x in arrays[:rows])
    assert_same_bits(at(jax.tree.map(np.asarray, fn(*poisoned, *arrays[rows:])), kept), at(whole, kept))


@in_the_interpreter
def test_every_schedule_gives_the_same_bits() -> None:
    x, gate, weight = arguments("gated_rms_norm", "bfloat16")
    expected = on_portable(SHAPES["gated_rms_norm"][0], [x, gate, weight])
    for turns in (2, 6):
        options: dict[str, Any] = {"function": "gated_rms_norm", "eps": 1e-6, "schedule": Schedule(turns)}
        assert_same_bits(np.asarray(row_functions.forward((x, gate), (weight,), **options)), expected)


@in_the_interpreter
def test_rows_of_nan_and_infinities_are_those_of_the_portable_program() -> None:
    x = np.ones((4, 128), np.float32)
    x[0, 5], x[1, 5], x[2, 5], x[3] = np.nan, np.inf, -np.inf, -0.0
    weight, bias = np.ones(128, np.float32), np.arange(128, dtype=np.float32)
    for fn, *weights in (
        (functools.partial(ops.layer_norm, eps=1e-6), weight, bias),
        (functools.partial(ops.l2_norm, eps=1e-6),),
        (lambda x: ops.decay_and_rate(x, x, jnp.asarray(weight), jnp.asarray(weight)),),
    ):
        arrays = [jnp.asarray(array) for array in (x, *weights)]
        assert same_numbers(fn(*arrays), on_portable(fn, arrays))


def same_numbers(x: Any, y: Any) -> bool:
    """Returns True if the numbers have the same bits, and NaN stand at the same places."""
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(same_bits(*(np.where(np.isnan(part), 0, part) + np.isnan(part) for part in pair)) for pair in leaves)


@in_the_interpreter
def test_the_portable_program_serves_what_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(function: str, *shapes: tuple[int, ...]) -> bool:
        return row_functions.problem_of(tuple(jnp.zeros(shape) for shape in shapes), function) is not None

    assert [served("l2_norm", (5, width)) for width in (1, 24, 80, 128, 6144, 8192)] == [
        False,
        False,
        *[True] * 3,
        False,
    ]
    # The mean of 80 numbers is a product that XLA may fuse.
    assert [served("gated_rms_norm", *[(5, width)] * 2) for width in (80, 128)] == [False, True]
    assert served("weighted_sum", (5, 4, 1152), (5, 4)) and served("sigmoid_gated", (5, 4096), (5, 1))
    for rows in (1, 1000):
        assert not served("layer_norm", (rows, 1140)) and served("layer_norm", (rows, 1152))
    monkeypatch.setattr(row_functions.portable, "forward", lambda rows, weights, **_: rows[0])
    x = jnp.ones((5, 24))
    assert ops.l2_norm(x, eps=1e-6).tolist() == x.tolist()


@in_the_interpreter
def test_gradients_are_those_of_the_portable_program() -> None:
    a, b, log_rate, bias = arguments("decay_and_rate", "float32")

    def loss(*arrays: jax.Array) -> jax.Array:
        g, beta = ops.decay_and_rate(*arrays)
        return (g * g).sum() + beta.sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))
    with detjax.use_backend("portable"):
        expected = gradients(a, b, log_rate, bias)
    assert_same_bits(gradients(a, b, log_rate, bias), expected)


@pytest.mark.parametrize("rows", [1, 3, 64, 200_000])
def test_there_is_a_schedule_for_every_number_of_rows(rows: int) -> None:
    for width in (16, 48, 80, 128, 1152, 1280, 4096):
        for arrays in (1, 2, 4):
            for cut in (False, True):
                if (problem := Problem(rows, width, arrays, cut)).served:
                    row_functions.default_schedule(problem).check(problem)


def test_schedules_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="turns is 0; accepted: 1 or more"):
        Schedule(0)
    with pytest.raises(ValueError, match="8 rows of a CTA; accepted: at most the 7 rows"):
        Schedule(2).check(Problem(7, 128, 1))
    with pytest.raises(ValueError, match="56 elements of rows in the registers of a thread; accepted: at most 48"):
        Schedule(7).check(Problem(64, 128, 2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_functions_lower_for_cuda(name: str, dtype: str) -> None:
    fn, shapes, rows = SHAPES[name]
    for count in (1, 2048):
        operands = [
            jax.ShapeDtypeStruct((count, *shape[1:]) if index < rows else shape, dtype)
            for index, shape in enumerate(shapes)
        ]
        with detjax.use_backend("hopper"):
            assert "mosaic_gpu" in lowered(fn, *operands)


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_have_their_bits_among_any_others_on_the_device(name: str, dtype: str) -> None:
    fn, shapes, rows = SHAPES[name]
    arrays = [
        jnp.asarray(np.random.default_rng(index).standard_normal((4096, *shape[1:]) if index < rows else shape))
        for index, shape in enumerate(shapes)
    ]
    arrays = [x.astype(dtype) for x in arrays]
    with detjax.use_backend("hopper"):
        whole = jax.tree.map(np.asarray, fn(*arrays))
        for first, count in ((0, 1), (4095, 1), (3, 2), (5, 17), (1000, 64), (7, 3001)):
            part = fn(*(x[first : first + count] for x in arrays[:rows]), *arrays[rows:])
            assert_same_bits(jax.tree.map(np.asarray, part), at(whole, slice(first, first + count)))
    # XLA may fuse what the contract leaves open.
    with detjax.use_backend("portable"):
        for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(fn(*arrays)), strict=True):
            tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
            np.testing.assert_allclose(x.astype(np.float32), np.asarray(y, np.float32), rtol=tolerance, atol=tolerance)
