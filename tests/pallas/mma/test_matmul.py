"""Products on `mma.sync`: their numbers, and that no schedule, architecture, layout or neighbour changes a bit."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.options import Epilogue
from detjax.pallas import nvidia
from detjax.pallas.hopper.matmul.kernel import Operands
from detjax.pallas.hopper.matmul.plan import Problem
from detjax.pallas.mma.matmul.kernel import product, product_keeping_sums
from detjax.pallas.mma.matmul.plan import Plan, Schedule, default_schedule
from tests.pallas.hopper.interpreter import interpreted, kernels_interpreted, normal
from tests.support.bits import assert_same_bits

INTERPRETER = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")
"""The interpreter that knows named barriers."""
OLD, NEW = (8, 0), (9, 0)
"""Architectures whose threads copy, and whose copy engine does."""
M, K, N = 33, 96, 72
SCHEDULES = (
    Schedule(16, 32, 1, line=64, lines=2),
    Schedule(32, 32, 2, line=64),
    Schedule(64, 64, 2, panel=2),
    Schedule(64, 64, 4, lines=2),
    Schedule(32, 64, 1, lines=2),
)
SHARED_STAGES = (
    Schedule(128, 64, 2, warpgroups=2, stages=2),
    Schedule(128, 64, 4, line=64, panel=2, warpgroups=2),
    Schedule(64, 64, 1, line=64, warpgroups=2, stages=3),
)
"""Schedules of two warpgroups."""


def multiplied(
    operands: Sequence[Any], architecture: nvidia.Architecture = OLD, names: Sequence[str] = ("x", "w"), **options: Any
) -> Any:
    options = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": "float32"} | options
    with nvidia.tracing_for(architecture), kernels_interpreted(), plgpu.force_gpu_interpret_mode(INTERPRETER):
        return np.asarray(
            jax.jit(lambda *arrays: product(Operands(**dict(zip(names, arrays, strict=True))), **options))(*operands)
        )


@pytest.fixture(scope="module")
def gated() -> dict[str, Any]:
    """Operands of gate and up with bias and residual."""
    shapes = {"x": (M, K), "w": (2, N, K), "bias": (2, N), "residual": (M, N)}
    return {name: normal(*shape, dtype="bfloat16", seed=i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.fixture(scope="module")
def expected(gated: dict[str, Any]) -> np.ndarray:
    x, w, bias, residual = (array.astype(np.float64) for array in gated.values())
    gate, up = x @ w.transpose(0, 2, 1) + bias[:, None]
    return gate / (1 + np.exp(-gate)) * up + residual


def gated_result(gated: dict[str, Any], architecture: nvidia.Architecture, **options: Any) -> Any:
    return multiplied([*gated.values()], architecture, [*gated], epilogue=Epilogue("silu", gated=True), **options)


@pytest.mark.parametrize("architecture", [OLD, NEW])
def test_schedules_and_layouts_give_the_same_bits_and_the_right_numbers(
    gated: dict[str, Any], expected: np.ndarray, architecture: nvidia.Architecture
) -> None:
    first = gated_result(gated, OLD)
    np.testing.assert_allclose(first, expected, atol=2e-4)
    for schedule in SCHEDULES if architecture == OLD else SCHEDULES[::2]:
        assert_same_bits(gated_result(gated, architecture, schedule=schedule), first)
    turned = gated | {"w": gated["w"].transpose(0, 2, 1).copy()}
    if architecture == OLD:
        assert_same_bits(gated_result(turned, architecture, layout="kn"), first)
    turned |= {"x": gated["x"].T.copy()}
    assert_same_bits(gated_result(turned, architecture, layout="kn", token_layout="km"), first)


@pytest.mark.parametrize("architecture", [OLD, NEW])
def test_two_warpgroups_that_share_stages_give_the_same_bits(
    gated: dict[str, Any], architecture: nvidia.Architecture
) -> None:
    first = gated_result(gated, OLD)
    for schedule in SHARED_STAGES:
        assert_same_bits(gated_result(gated, architecture, schedule=schedule), first)
    schedule = SHARED_STAGES[1]
    if architecture == NEW:
        # The copy engine writes narrow results, two chunks at a time.
        narrow = {"out_dtype": "bfloat16", "schedule": dataclasses.replace(schedule, row_warps=2)}
        assert_same_bits(gated_result(gated, NEW, **narrow), gated_result(gated, OLD, out_dtype="bfloat16"))
    turned = gated | {"w": gated["w"].transpose(0, 2, 1).copy()}
    assert_same_bits(gated_result(turned, architecture, layout="kn", schedule=schedule), first)
    turned |= {"x": gated["x"].T.copy()}
    options: dict[str, Any] = {"layout": "kn", "token_layout": "km"}
    assert_same_bits(gated_result(turned, architecture, schedule=schedule, **options), first)


def test_a_row_has_the_same_bits_whatever_its_neighbours_are(gated: dict[str, Any]) -> None:
    first = gated_result(gated, OLD)
    for rows in (1, 17):
        others = gated | {
            "x": np.full((rows, K), np.nan, gated["x"].dtype),
            "residual": gated["residual"][:rows].copy(),
        }
        others["x"][-1], others["residual"][-1] = gated["x"][5], gated["residual"][5]
        assert_same_bits(gated_result(others, NEW)[-1], first[5])


def test_the_kept_sums_are_the_ones_that_the_epilogue_consumed(gated: dict[str, Any]) -> None:
    epilogue = Epilogue("silu", gated=True)
    x, w, bias = gated["x"], gated["w"], gated["bias"]
    with nvidia.tracing_for(OLD):
        y, z = interpreted(
            lambda *arrays: product_keeping_sums(Operands(*arrays), layout="nk", epilogue=epilogue), x, w, bias
        )
    assert_same_bits(y, multiplied([x, w, bias], OLD, ["x", "w", "bias"], epilogue=epilogue, out_dtype="bfloat16"))
    with nvidia.tracing_for(NEW), kernels_interpreted(), plgpu.force_gpu_interpret_mode(INTERPRETER):
        both = jax.jit(
            lambda *arrays: product_keeping_sums(
                Operands(*arrays), layout="nk", epilogue=epilogue, schedule=SHARED_STAGES[1]
            )
        )(x, w, bias)
    assert_same_bits(jax.tree.map(np.asarray, both), (y, z))
    for part in range(2):
        sums = multiplied([x, w[part], bias[part]], NEW, ["x", "w", "bias"], out_dtype="bfloat16")
        assert_same_bits(z[part], sums)


@pytest.mark.parametrize("architecture", [OLD, NEW])
def test_a_running_sum_does_not_show_where_microbatches_begin(architecture: nvidia.Architecture) -> None:
    """A weight gradient: tokens ascend in one accumulator, in steps of 16."""
    x, w = normal(80, M, dtype="float16"), normal(80, N, dtype="float16", seed=1)
    start = normal(M, N, seed=2)
    options: dict[str, Any] = {"names": ["x", "w", "start"], "layout": "kn", "token_layout": "km"}
    whole = multiplied([x, w, start], architecture, **options)
    np.testing.assert_allclose(whole, start + x.astype(np.float64).T @ w.astype(np.float64), atol=1e-4)
    for cut in (16, 48):
        half = multiplied([x[:cut], w[:cut], start], architecture, **options)
        assert_same_bits(multiplied([x[cut:], w[cut:], half], architecture, **options), whole)


def test_tiles_of_experts_have_their_weights_and_others_are_not_written(gated: dict[str, Any]) -> None:
    x, w = normal(64, K, dtype="bfloat16"), normal(3, N, K, dtype="bfloat16", seed=1)
    experts = np.array([2, 0, 0, 1, 3], np.int32)
    for schedule in (Schedule(16, 32, 1, line=64, lines=2),):
        y = multiplied([x, w, experts], OLD, ["x", "w", "experts"], schedule=schedule)
        for tile, expert in enumerate((2, 0, 0)):
            rows = slice(16 * tile, 16 * tile + 16)
            assert_same_bits(y[rows], multiplied([x[rows], w[expert]], NEW))
        assert np.isnan(y[48:]).all()


def test_gradients_have_the_right_numbers_and_follow_no_batch() -> None:
    x, w = normal(20, K, dtype="bfloat16"), normal(2, N, K, dtype="bfloat16", seed=1)

    def gradients(rows: slice) -> Any:
        def loss(x: Any, w: Any) -> Any:
            y = ops.matmul(x, w, layout="nk", activation="gelu", gated=True, out_dtype="float32")
            return jnp.sum(y * jnp.arange(1.0, N + 1)[None])

        interpreter = plgpu.force_gpu_interpret_mode(INTERPRETER)
        with detjax.use_backend("mma"), nvidia.tracing_for(OLD), kernels_interpreted(), interpreter:
            return [np.asarray(g) for g in detjax.jit(jax.grad(loss, (0, 1)))(x[rows], w)]

    dx, dw = gradients(slice(None))
    assert_same_bits(gradients(slice(3, 4))[0], dx[3:4])
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    gate, up = (wide_x @ part.T for part in wide_w)
    cdf, dy = (1 + np.vectorize(math.erf)(gate / np.sqrt(2))) / 2, np.arange(1.0, N + 1)
    slope = cdf + gate * np.exp(-gate * gate / 2) / np.sqrt(2 * np.pi)
    dz = dy * up * slope, dy * gate * cdf
    for ours, right in (
        (dx, dz[0] @ wide_w[0] + dz[1] @ wide_w[1]),
        (dw[0], dz[0].T @ wide_x),
        (dw[1], dz[1].T @ wide_x),
    ):
        np.testing.assert_allclose(ours.astype(np.float64), right, atol=0.03 * np.abs(right).max())


def test_a_dtype_that_the_matrix_unit_does_not_take_is_refused() -> None:
    x = normal(4, 32)
    with pytest.raises(NotImplementedError, match=r"x has dtype float32 .*backend 'mma': bfloat16, float16\. Cast"):
        multiplied([x, x])


PROBLEMS = [
    Problem(m, n, k, parts, layout=layout, token_layout=tokens)  # pyright: ignore
    for m, n, k in ((1, 4096, 4096), (16, 12288, 4096), (40, 96, 2880), (256, 4096, 512), (8192, 12288, 4096))
    for parts in (1, 2)
    for layout, tokens in (("nk", "mk"), ("kn", "mk"), ("kn", "km"))
]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (13, 0)])
def test_there_is_a_schedule_for_every_problem_that_fits_the_chip(capability: nvidia.Architecture) -> None:
    with nvidia.tracing_for(capability):
        for problem in PROBLEMS:
            plan = Plan(problem, default_schedule(problem))
            plan.schedule.check(problem)
            assert 2 <= plan.stages <= 8
            assert plan.stages * plan.bytes_per_stage <= nvidia.shared_memory() < 228 * 1024


def test_a_schedule_that_does_not_fit_is_refused_with_its_reasons() -> None:
    problem = Problem(64, 64, 64)
    for schedule, words in (
        (Schedule(24, 64), "tile_m in multiples of 16"),
        (Schedule(64, 24), "tile_n in multiples of 32"),
        (Schedule(128, 256), "up to 128 accumulators"),
        (Schedule(16, 32, 1, line=64), "four blocks of 8 lines"),
        (Schedule(64, 64, line=16), "lines of 32 or 64"),
    ):
        assert not schedule.fits(problem)
        with pytest.raises(ValueError, match=f"matmul: Schedule.* accepted: .*{words}"):
            schedule.check(problem)
    with pytest.raises(ValueError, match="tiles of 64 where K is not the last axis"):
        Schedule(64, 32).check(dataclasses.replace(problem, layout="kn"))
