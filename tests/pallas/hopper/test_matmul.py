"""The Hopper matmul: numbers, bits and gradients in Pallas' interpreter, and bits where there is a Hopper GPU."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.bench.shapes import TOKENS
from detjax.bench.tune import REFERENCES
from detjax.operands.options import Epilogue
from detjax.pallas.hopper.matmul import activations as hopper_activations
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import table
from detjax.runtime import compilation
from tests.ops.references import ACTIVATIONS
from tests.pallas.hopper.interpreter import normal
from tests.support.bits import assert_same_bits, same_bits

TOLERANCE = {"float32": 2e-6, "bfloat16": 5e-3, "float16": 7e-4}

# Schedules with either operand on the matrix unit's rows, with full and half-empty tiles, one and two warpgroups,
# clusters and long stages.
SCHEDULES = (
    Schedule(8, 24),
    Schedule(16, 40, lines=2),
    Schedule(24, 64, lines=4),
    Schedule(64, 48, warpgroups=2),
    Schedule(40, 128, warpgroups=2, panel=2),
    Schedule(16, 32, cluster_n=2),
    Schedule(16, 64, cluster_m=2, cluster_n=2),
    Schedule(32, 32, cluster_n=4),
    Schedule(64, 24, "tokens"),
    Schedule(128, 72, "tokens", warpgroups=2, lines=2),
    Schedule(40, 56, "tokens"),
    Schedule(64, 64, "tokens", cluster_m=4),
    Schedule(64, 32, "tokens", cluster_m=2, cluster_n=2, panel=2),
)
FEW_SCHEDULES = SCHEDULES[3], SCHEDULES[6], SCHEDULES[9], SCHEDULES[12]
# If K is not the last axis of an operand, its tiles come in 64s.
SCHEDULES_OF_64 = (
    Schedule(64, 64),
    Schedule(64, 64, "tokens", lines=2, cluster_n=2),
    Schedule(64, 128, warpgroups=2, cluster_m=2),
    Schedule(128, 64, "tokens", warpgroups=2),
)


def drawn(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> np.ndarray:
    return normal(*shape, dtype=dtype, seed=seed)


def name_of(value: Any) -> str:
    """The name of a test's parameter; a schedule's has its tile, row operand, warpgroups, cluster and lines."""
    if not isinstance(value, Schedule):
        return str(value)
    s = value
    tile, cluster = f"{s.tile_m}x{s.tile_n}", f"cluster{s.cluster_m}x{s.cluster_n}"
    return f"{tile}-{s.rows}-{s.warpgroups}wg-{cluster}-{s.lines}lines-panel{s.panel}"


def interpreted(
    *,
    schedule: Schedule | None = None,
    layout: str = "nk",
    token_layout: str = "mk",
    out_dtype: str = "float32",
    **epilogue: Any,
) -> Callable[..., np.ndarray]:
    """The interpreted kernel's product of `[M, K]` and `[N, K]`, which are transposed to the layouts given."""
    multiply = functools.partial(
        product,
        schedule=schedule,
        layout=layout,
        token_layout=token_layout,
        epilogue=Epilogue(**epilogue),
        out_dtype=out_dtype,
    )
    program = jax.jit(lambda *operands: multiply(Operands(*operands)))

    def call(x: Any, w: Any, bias: Any = None, residual: Any = None) -> np.ndarray:
        x = x if token_layout == "mk" else x.T
        w = w if layout == "nk" else w.swapaxes(-1, -2)
        with plgpu.force_gpu_interpret_mode():
            return np.asarray(program(*jax.tree.map(jnp.asarray, (x, w, bias, residual))))

    return call


def multiplied(*operands: Any, **options: Any) -> np.ndarray:
    return interpreted(**options)(*operands)


def exact(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    soft_cap: float | None = None,
) -> np.ndarray:
    """The product and its epilogue in float64."""
    with jax.enable_x64(True):
        z = np.einsum("mk,pnk->pmn", x.astype(np.float64), w.astype(np.float64).reshape(-1, *w.shape[-2:]))
        if bias is not None:
            z = z + bias.astype(np.float64).reshape(len(z), 1, -1)
        y = z[0] if activation is None else np.asarray(ACTIVATIONS[activation](jnp.asarray(z[0])))
        y = y * z[1] if gated else y
        y = y if soft_cap is None else soft_cap * np.tanh(y / soft_cap)
        return y if residual is None else y + residual.astype(np.float64)


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert actual.dtype == jnp.dtype(dtype)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual.astype(np.float64) / scale, expected / scale, atol=TOLERANCE[dtype], rtol=0)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "schedule"),
    [
        (17, 1, 9, Schedule(24, 8)),
        (3, 129, 1, Schedule(8, 128, warpgroups=2)),
        (20, 41, 203, None),
        pytest.param(1, 70, 203, Schedule(8, 24), marks=pytest.mark.nightly),
        pytest.param(33, 70, 203, Schedule(40, 56, "tokens"), marks=pytest.mark.nightly),
        pytest.param(1, 70, 203, None, marks=pytest.mark.nightly),
    ],
    ids=name_of,
)
def test_products_have_the_values_of_float64(m: int, n: int, k: int, schedule: Schedule | None) -> None:
    dtype = "float16" if m == 20 else "bfloat16"
    x, w = drawn(m, k, dtype=dtype), drawn(n, k, dtype=dtype)
    out_dtype = "float32" if m == 17 else dtype
    assert_close(multiplied(x, w, schedule=schedule, out_dtype=out_dtype), exact(x, w), out_dtype)


EPILOGUES: dict[str, tuple[dict[str, Any], bool, str | None]] = {
    "plain": ({}, True, "float32"),
    "bias": ({}, True, None),
    "residual": ({}, False, "bfloat16"),
    "silu": ({"activation": "silu", "gated": True}, True, "float32"),
    "gelu": ({"activation": "gelu"}, True, "float32"),
    "gelu_tanh, capped": ({"activation": "gelu_tanh", "gated": True, "soft_cap": 2.0}, True, "float32"),
    "relu": ({"activation": "relu"}, True, "float32"),
    "capped": ({"soft_cap": 3.0}, True, "float32"),
}
"""Options of the epilogue, whether there is a bias, and the dtype of the residual, if there is one."""
ON_WEIGHTS, ON_TOKENS = Schedule(16, 24), Schedule(72, 24, "tokens")
FEW_EPILOGUES = ("gelu_tanh, capped", ON_WEIGHTS), ("bias", ON_WEIGHTS), ("residual", ON_TOKENS), ("silu", ON_TOKENS)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        case if case in FEW_EPILOGUES else pytest.param(*case, marks=pytest.mark.nightly)
        for case in itertools.product(EPILOGUES, (ON_WEIGHTS, ON_TOKENS))
    ],
    ids=name_of,
)
def test_epilogues_have_the_values_of_float64(name: str, schedule: Schedule) -> None:
    epilogue, has_bias, residual_dtype = EPILOGUES[name]
    parts = 2 if epilogue.get("gated") else 1
    x, w, bias = drawn(11, 72), drawn(parts, 30, 72) * jnp.bfloat16(0.125), drawn(parts, 30)
    w, bias = (w, bias) if parts == 2 else (w[0], bias[0])
    operands = bias if has_bias else None, None if residual_dtype is None else drawn(11, 30, dtype=residual_dtype)
    y = multiplied(x, w, *operands, schedule=schedule, **epilogue)
    # The activations' own approximations have errors of some units in the last place.
    np.testing.assert_allclose(y, exact(x, w, *operands, **epilogue), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", hopper_activations.ACTIVATIONS)
def test_activations_are_those_of_float64(name: Any) -> None:
    z = np.concatenate([np.linspace(-9, 9, 4001), [-20.0, 0.0, 20.0]])
    actual = np.asarray(jax.jit(hopper_activations.ACTIVATIONS[name])(z.astype(np.float32)))
    with jax.enable_x64(True):
        expected = np.asarray(ACTIVATIONS[name](jnp.asarray(z.astype(np.float32), jnp.float64)))
    np.testing.assert_allclose(actual, expected, atol=2e-6, rtol=2e-6)


# --- bits -------------------------------------------------------------------------------------------------------------


def in_order(x: np.ndarray, w: np.ndarray, bias: float = 0.0) -> np.ndarray:
    """The product in the order of the contract, plus a bias: one float32 sum per element, K ascending."""
    x, w = x.astype(np.float32), w.astype(np.float32)
    y = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        y = y + x[:, k : k + 1] * w[:, k]
    return y + np.asarray(bias, np.float32)


@functools.cache
def operands_of_bits() -> tuple[np.ndarray, np.ndarray]:
    return drawn(100, 203), drawn(72, 203)


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(
    "schedule",
    [s if s in FEW_SCHEDULES else pytest.param(s, marks=pytest.mark.nightly) for s in SCHEDULES],
    ids=name_of,
)
def test_every_schedule_gives_the_same_bits(schedule: Schedule) -> None:
    x, w = operands_of_bits()
    m = 40 if schedule.tile_m < 40 else 100
    assert_same_bits(multiplied(x[:m], w, schedule=schedule), in_order(x[:m], w))


LAYOUTS = ("kn", "mk"), ("nk", "km"), ("kn", "km")
FEW_LAYOUTS = (SCHEDULES_OF_64[0], *LAYOUTS[2]), (SCHEDULES_OF_64[1], *LAYOUTS[0]), (SCHEDULES_OF_64[3], *LAYOUTS[1])


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(
    ("schedule", "layout", "token_layout"),
    [
        case if case in FEW_LAYOUTS else pytest.param(*case, marks=pytest.mark.nightly)
        for case in ((schedule, *layouts) for schedule in SCHEDULES_OF_64 for layouts in LAYOUTS)
    ],
    ids=name_of,
)
def test_every_layout_gives_the_same_bits(schedule: Schedule, layout: str, token_layout: str) -> None:
    x, w = operands_of_bits()
    y = multiplied(x, w, schedule=schedule, layout=layout, token_layout=token_layout, out_dtype="bfloat16")
    assert_same_bits(y, in_order(x, w).astype(jnp.bfloat16))


@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(16, 24, panel=2),
        Schedule(64, 16, "tokens", cluster_m=2),
        pytest.param(Schedule(16, 40), marks=pytest.mark.nightly),
        pytest.param(Schedule(32, 24, cluster_n=2), marks=pytest.mark.nightly),
        pytest.param(Schedule(24, 64, "tokens", lines=2), marks=pytest.mark.nightly),
    ],
    ids=name_of,
)
def test_a_cta_that_takes_tile_after_tile_gives_the_same_bits(schedule: Schedule) -> None:
    x, w = operands_of_bits()
    plan = Plan(Problem(67, 72, 203, out_dtype=jnp.dtype("float32")), schedule)
    assert plan.grid[0] * plan.grid[1] > plan.clusters
    assert_same_bits(multiplied(x[:67], w, schedule=schedule), in_order(x[:67], w))


@pytest.mark.usefixtures("matrix_unit")
def test_another_order_of_k_has_other_bits() -> None:
    # The negative control: the comparisons above must be able to see a difference.
    x, w = operands_of_bits()
    expected = in_order(x, w)
    schedule = Schedule(64, 24, "tokens")
    two_sums = in_order(x[:, :128], w[:, :128]) + in_order(x[:, 128:], w[:, 128:])
    stages_swapped = np.r_[64:128, :64, 128:203]
    assert not same_bits(two_sums, expected)
    assert not same_bits(multiplied(x[:, stages_swapped], w[:, stages_swapped], schedule=schedule), expected)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(
    ("m", "gated", "schedule"),
    [
        *((m, False, Schedule(128, 24, "tokens", warpgroups=2)) for m in (1, 17, 100)),
        *((m, True, Schedule(32, 24)) for m in (9, 33)),
        # The default schedule.
        (1, False, None),
        (3, True, None),
    ],
    ids=name_of,
)
def test_a_rows_bits_do_not_depend_on_how_many_there_are_nor_on_its_neighbours(
    m: int, gated: bool, schedule: Schedule | None
) -> None:
    parts = 2 if gated else 1
    anchor, w, bias, residual = drawn(1, 203, seed=1), drawn(parts, 24, 203), drawn(parts, 24), drawn(m, 24)
    z = [in_order(anchor, *pair) for pair in zip(w, bias, strict=True)]
    expected = np.maximum(z[0], 0) * z[1] if gated else z[0]
    options: dict[str, Any] = {"activation": "relu", "gated": True} if gated else {}
    program = interpreted(schedule=schedule, **options)
    for position in sorted({0, m // 2, m - 1}):
        for neighbours in (1e30, np.nan):
            x = np.full((m, 203), neighbours, jnp.bfloat16)
            x[position] = anchor[0]
            y = program(x, w if gated else w[0], bias if gated else bias[0], residual)
            assert_same_bits(y[position], expected[0] + residual[position].astype(np.float32))


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("schedule", [Schedule(16, 24), Schedule(64, 24, "tokens")], ids=name_of)
@pytest.mark.parametrize("gated", [False, True])
def test_the_epilogue_has_the_contracts_order_and_one_rounding(schedule: Schedule, gated: bool) -> None:
    # Numbers of many sizes: a step on a rounded value, or in another order, changes most results.
    parts = 2 if gated else 1
    x, w, bias, residual = drawn(17, 72), drawn(parts, 24, 72), drawn(parts, 24, seed=1), drawn(17, 24, seed=2)
    z = [in_order(x, *pair) for pair in zip(w, bias, strict=True)]
    y = np.maximum(z[0], np.float32(0))
    y = y * z[1] if gated else y
    expected = (y + residual.astype(np.float32)).astype(jnp.bfloat16)
    operands = (w, bias) if gated else (w[0], bias[0])
    result = multiplied(x, *operands, residual, schedule=schedule, out_dtype="bfloat16", activation="relu", gated=gated)
    assert_same_bits(result, expected)


# --- the public operation ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_are_those_of_float64(layout: str, gated: bool) -> None:
    parts = 2 if gated else 1
    x, w, bias = drawn(5, 3, 24), drawn(parts, 16, 24) * jnp.bfloat16(0.25), drawn(parts, 16)
    dy = drawn(5, 3, 16, seed=1)
    w, bias = (w, bias) if gated else (w[0], bias[0])
    options: dict[str, Any] = {"activation": "silu", "gated": gated} if gated else {}

    def operation(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return ops.matmul(x, w, bias=bias, layout=layout, **options)

    def textbook(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        z = jnp.einsum("btk,pnk->pbtn", x, w.reshape(parts, 16, 24)) + bias.reshape(parts, 1, 1, 16)
        return ACTIVATIONS["silu"](z[0]) * z[1] if gated else z[0]

    stored = w if layout == "nk" else w.swapaxes(-1, -2)
    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode():
        _, vjp = jax.vjp(operation, *map(jnp.asarray, (x, stored, bias)))
        gradients = [np.asarray(g) for g in vjp(jnp.asarray(dy))]
    gradients[1] = gradients[1] if layout == "nk" else gradients[1].swapaxes(-1, -2)
    with jax.enable_x64(True):
        _, vjp = jax.vjp(textbook, *(jnp.asarray(a.astype(np.float64)) for a in (x, w, bias)))
        expected = [np.asarray(g) for g in vjp(jnp.asarray(dy.astype(np.float64)))]
    for gradient, reference in zip(gradients, expected, strict=True):
        assert_close(gradient, reference, "bfloat16")


@pytest.mark.usefixtures("matrix_unit")
def test_vmap_gives_the_bits_of_one_call_after_another() -> None:
    x, w, many = drawn(3, 2, 72), drawn(16, 72), drawn(3, 16, 72)

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return ops.matmul(x, w, layout="nk", out_dtype="float32")

    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode():
        over_rows = jax.vmap(matmul, in_axes=(0, None))(x, w)
        over_both = jax.vmap(matmul)(x, many)
    assert_same_bits(np.asarray(over_rows), in_order(x.reshape(6, 72), w).reshape(3, 2, 16))
    assert_same_bits(np.asarray(over_both), np.stack([in_order(*pair) for pair in zip(x, many, strict=True)]))


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(("rows", "layout", "biased"), [(1, "kn", False), (9, "nk", True)])
def test_products_of_many_weights_have_the_bits_of_each(rows: int, layout: str, biased: bool) -> None:
    x, w, biases = drawn(rows, 3, 72), drawn(3, 16, 72, seed=1), drawn(3, 16, seed=2)
    stored = w if layout == "nk" else w.swapaxes(1, 2)

    def matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        return ops.matmul(x, w, bias=bias, layout=layout, out_dtype="float32")  # pyright: ignore[reportArgumentType]

    mapped = jax.vmap(matmul, in_axes=(-2, 0, 0 if biased else None), out_axes=-2)
    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode():
        together = np.asarray(mapped(x, stored, biases if biased else None))
        separate = [matmul(x[:, one], stored[one], biases[one] if biased else None) for one in range(3)]
    assert_same_bits(together, np.stack([np.asarray(one) for one in separate], axis=1))


def test_float32_is_refused_and_says_what_serves() -> None:
    x, w = jnp.ones((2, 8), jnp.float32), jnp.ones((8, 8), jnp.float32)
    words = r"x has dtype float32 .* 'hopper': bfloat16, float16\. Cast x and w, or choose the backend 'portable'"
    with detjax.use_backend("hopper"), pytest.raises(NotImplementedError, match=words):
        ops.matmul(x, w)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rows": "columns"}, "rows is 'columns'; accepted: 'weights', 'tokens'"),
        ({"warpgroups": 5}, "warpgroups is 5; accepted: 1 to 4"),
        ({"cluster_m": 5}, r"5 x 1 CTAs; accepted: clusters of 1, 2, 3, 4 or 8 CTAs"),
        ({"lines": 0}, "lines is 0 .*; accepted: 1 and more"),
    ],
)
def test_schedules_that_fit_no_problem_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(16, 64, **fields)


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (Schedule(12, 64), {}, "8 to 256 columns, in eights"),
        (Schedule(264, 64), {}, "8 to 256 columns, in eights"),
        (Schedule(64, 264, "tokens"), {}, "8 to 256 columns, in eights"),
        (Schedule(16, 320), {}, "up to 256 rows"),
        (Schedule(16, 24, warpgroups=2), {}, "8 rows or more to a warpgroup, in eights"),
        (Schedule(16, 0), {}, "8 rows or more to a warpgroup, in eights"),
        (Schedule(16, 24), {"layout": "kn"}, "row tiles in 64s where K is not the last axis"),
        (Schedule(24, 64), {"token_layout": "km"}, "column tiles in 64s where K is not the last axis"),
        (Schedule(256, 128), {}, "up to 176 accumulators a thread"),
        (Schedule(16, 64, cluster_n=4), {}, "shared operands in equal groups of 8 rows"),
        (Schedule(128, 168, "tokens", lines=4), {}, "2 stages in shared memory"),
    ],
    ids=name_of,
)
def test_schedules_that_do_not_fit_the_problem_are_refused(
    schedule: Schedule, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=rf"matmul: Schedule\(.*Problem\(.*; accepted: .*{words}"):
        multiplied(drawn(128, 512), drawn(512, 512), schedule=schedule, **options)


# --- on the device ----------------------------------------------------------------------------------------------------


def programs(
    problems: Sequence[tuple[Problem, Schedule]], epilogue: Epilogue, operands: Sequence[jax.ShapeDtypeStruct | None]
) -> list[Any]:
    """A compiled program of `x, w, bias, residual` for each problem; ptxas runs while the next one is traced."""

    def lowered(problem: Problem, schedule: Schedule) -> Any:
        multiply = functools.partial(
            product,
            layout=problem.layout,
            token_layout=problem.token_layout,
            epilogue=epilogue,
            out_dtype=problem.out_dtype,
            schedule=schedule,
        )
        x = (problem.m, problem.k) if problem.token_layout == "mk" else (problem.k, problem.m)
        residual = None
        if problem.residual_dtype is not None:
            residual = jax.ShapeDtypeStruct((problem.m, problem.n), problem.residual_dtype)
        arguments = (jax.ShapeDtypeStruct(x, problem.dtype), *operands, residual)
        program = jax.jit(
            lambda *operands: multiply(Operands(*operands)), compiler_options=compilation.compiler_options("gpu")
        )
        return program.lower(*arguments)

    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda program: program.compile(), (lowered(*pair) for pair in problems)))


@jax.jit
def differing(y: jax.Array, expected: jax.Array) -> jax.Array:
    word = {2: jnp.uint16, 4: jnp.uint32}[y.dtype.itemsize]
    bits, expected_bits = (jax.lax.bitcast_convert_type(a, word) for a in (y, expected))
    return (bits != expected_bits).sum()


def placed(random: np.random.Generator, m: int, among: int) -> list[np.ndarray]:
    """Three choices of m rows, with row 0 first, in the middle and last, and with different neighbours."""
    chosen = []
    for position in (0, m // 2, m - 1):
        rows = 1 + random.permutation(among - 1)[np.arange(m) % (among - 1)]
        rows[position] = 0
        chosen.append(rows)
    return chosen


ROWS = 1024
DEVICE_TOKENS = [m for m in TOKENS if m <= ROWS] + [17, 33, 257]


def fitting(problem: Problem, tokens: Sequence[int]) -> list[tuple[Problem, Schedule]]:
    """Each schedule of the table that fits the problem, with one of the numbers of tokens, which take turns."""
    pairs = []
    for i, schedule in enumerate(dict.fromkeys(table("NVIDIA H200").values())):
        in_turn = [*tokens[i % len(tokens) :], *tokens[: i % len(tokens)]]
        smaller = (dataclasses.replace(problem, m=m) for m in in_turn)
        fits = (one for one in smaller if schedule.fits(one.addressable))
        pairs += [(one, schedule) for one in itertools.islice(fits, 1)]
    return pairs


@pytest.mark.hopper
@pytest.mark.parametrize(("layout", "token_layout"), [("nk", "mk"), ("kn", "mk"), ("kn", "km")])
def test_the_device_gives_the_same_bits_with_every_schedule_of_the_table(layout: Any, token_layout: Any) -> None:
    n, k = 1288, 1096
    x = jnp.asarray(drawn(ROWS, k))
    w = jnp.asarray(drawn(n, k).T if layout == "kn" else drawn(n, k))
    problem = Problem(ROWS, n, k, token_layout=token_layout, layout=layout)
    problems = fitting(problem, [m for m in DEVICE_TOKENS if token_layout == "mk" or m % 8 == 0])
    assert len(problems) > 8
    shapes = jax.ShapeDtypeStruct(w.shape, w.dtype), None
    # The reference schedule's tile of 8 tokens needs them as rows.
    (reference,) = programs([(dataclasses.replace(problem, token_layout="mk"), REFERENCES[0])], Epilogue(), shapes)
    expected = reference(x, w, None, None)
    assert_close(np.asarray(expected), exact(np.asarray(x), drawn(n, k)), "bfloat16")
    random = np.random.default_rng(0)
    counts = {}
    for (one, schedule), program in zip(problems, programs(problems, Epilogue(), shapes), strict=True):
        for rows in placed(random, one.m, ROWS):
            y = program(x[rows] if token_layout == "mk" else x[rows].T, w, None, None)
            counts[schedule, one.m, int(rows[0])] = differing(y, expected[rows])
    assert {name: int(count) for name, count in counts.items() if count} == {}


@pytest.mark.hopper
@pytest.mark.parametrize(
    "epilogue",
    [Epilogue("silu", gated=True), Epilogue("gelu"), Epilogue("gelu_tanh"), Epilogue(soft_cap=2.0)],
    ids=name_of,
)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_the_device_gives_the_same_bits_with_every_epilogue(epilogue: Epilogue, out_dtype: str) -> None:
    n, k, parts = 712, 520, 2 if epilogue.gated else 1
    x, w, bias = drawn(ROWS, k), drawn(parts, n, k) * jnp.bfloat16(k**-0.5), drawn(parts, n)
    residual = drawn(ROWS, n)
    w, bias = (w, bias) if epilogue.gated else (w[0], bias[0])
    problem = Problem(
        ROWS,
        n,
        k,
        parts,
        out_dtype=jnp.dtype(out_dtype),
        residual_dtype=jnp.dtype("bfloat16"),
        bias_dtype=jnp.dtype("bfloat16"),
    )
    problems = fitting(problem, DEVICE_TOKENS)
    problems = problems[:: max(1, len(problems) // 10)]
    reference, *others = programs(
        [(problem, REFERENCES[0]), *problems], epilogue, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, bias)]
    )
    x, w, bias, residual = map(jnp.asarray, (x, w, bias, residual))
    expected = reference(x, w, bias, residual)
    numbers = exact(*map(np.asarray, (x, w, bias, residual)), **dataclasses.asdict(epilogue))
    assert_close(np.asarray(expected), numbers, "bfloat16" if out_dtype == "bfloat16" else "float32")
    random = np.random.default_rng(0)
    counts = {}
    for (one, schedule), program in zip(problems, others, strict=True):
        for rows in placed(random, one.m, ROWS):
            y = program(x[rows], w, bias, residual[rows])
            counts[schedule, one.m, int(rows[0])] = differing(y, expected[rows])
    assert {name: int(count) for name, count in counts.items() if count} == {}


@pytest.mark.hopper
def test_the_device_gives_the_same_bits_a_thousand_times() -> None:
    x, w, residual = (jnp.asarray(drawn(*shape)) for shape in ((100, 4096), (4096, 4096), (100, 4096)))
    fn = detjax.jit(functools.partial(ops.matmul, layout="nk", out_dtype="float32"))
    expected = fn(x, w, residual=residual)
    total = jnp.int32(0)
    for _ in range(1000):
        total = total + differing(fn(x, w, residual=residual), expected)
    assert int(total) == 0


@pytest.mark.hopper
def test_the_device_sees_another_order_of_k() -> None:
    x, w = jnp.asarray(drawn(64, 4096)), jnp.asarray(drawn(512, 4096))
    fn = detjax.jit(functools.partial(ops.matmul, layout="nk", out_dtype="float32"))
    halves = fn(x[:, :2048], w[:, :2048]) + fn(x[:, 2048:], w[:, 2048:])
    assert int(differing(halves, fn(x, w))) > 0
