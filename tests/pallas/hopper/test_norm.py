"""The Hopper kernels of RMS norm and rotary embedding: numbers and bits in Pallas' interpreter, lowering for CUDA, and
the order of additions where there is a Hopper GPU."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import FP8_BLOCK, LANE_GROUP, LANES
from detjax.pallas.hopper import norm as hopper_norm
from detjax.pallas.hopper import rope
from detjax.pallas.hopper import rows as hopper_rows
from detjax.pallas.hopper.quantized.rows import quantized_groups
from tests.pallas.hopper.interpreter import interpreted, lowered, normal
from tests.support.bits import assert_same_bits

TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 1.2e-3}
EPS = 1e-5


def normalized(x: Any, weight: Any, residual: Any = None, schedule: hopper_norm.Schedule | None = None) -> Any:
    def fn(x: jax.Array, weight: jax.Array, residual: jax.Array | None) -> Any:
        return hopper_norm.forward(x, weight, residual, eps=EPS, weight_offset=0.5, schedule=schedule)

    return interpreted(fn, x, weight, residual)


def rotated(
    x: Any,
    cos: Any,
    sin: Any,
    *weights: Any,
    heads: tuple[int, ...],
    schedule: rope.Schedule | None = None,
) -> Any:
    def fn(x: jax.Array, cos: jax.Array, sin: jax.Array, *weights: jax.Array) -> Any:
        return rope.forward(x, (cos, sin), *weights, heads=heads, eps=EPS, schedule=schedule)

    return interpreted(fn, x, cos, sin, *weights)


def whole_numbers(*shape: int, dtype: str) -> np.ndarray:
    """Random whole numbers: sums of their squares are exact, so the same in every order."""
    return np.random.default_rng(shape).integers(-7, 8, shape).astype(jnp.dtype(dtype))


def angles(tokens: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    x = 9 * np.random.default_rng(1).standard_normal((tokens, half))
    return np.cos(x).astype(np.float32), np.sin(x).astype(np.float32)


def reference_norm(x: np.ndarray, weight: np.ndarray, offset: float) -> np.ndarray:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * (weight + offset)


def reference_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual.astype(np.float64) / scale, expected / scale, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        *((7, 80, dtype) for dtype in TOLERANCE),
        *((rows, width, "float32") for rows, width in ((1, 1), (3, 1500), (2, 2304), (3, 4096))),
    ],
)
def test_norms_have_the_values_of_float64(rows: int, width: int, dtype: str) -> None:
    x, weight, residual = normal(rows, width, dtype=dtype), normal(width), normal(rows, width, dtype=dtype, seed=1)
    y, none = normalized(x, weight)
    assert none is None and y.dtype == x.dtype
    assert_close(y, reference_norm(x, weight, 0.5), dtype)
    y, h = normalized(x, weight, residual)
    assert_same_bits(h, (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype))
    assert_close(y, reference_norm(h, weight, 0.5), dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "threads"), [(64, 16), (512, 32), (512, 64), (512, 128)])
def test_a_norms_bits_do_not_depend_on_rows_position_or_neighbours(width: int, threads: int) -> None:
    row, weight = normal(width), normal(width, seed=1)
    expected = normalized(row[None], weight, schedule=hopper_norm.Schedule(threads, 1, True))[0][0]
    for count, in_cta, first in ((2, 2, True), (5, 1, False), (13, 8, True)):
        at_once = 128 // threads
        in_cta = in_cta if in_cta <= at_once else in_cta // at_once * at_once
        for position in {0, count // 2, count - 1}:
            x = normal(count, width, seed=count)
            x[position] = row
            y, _ = normalized(x, weight, schedule=hopper_norm.Schedule(threads, in_cta, first))
            assert_same_bits(y[position], expected)


@pytest.mark.parametrize(
    ("width", "dtype", "threads"), [(256, "float32", (4, 8, 16, 64)), (1024, "bfloat16", (16, 32, 64, 128))]
)
def test_every_schedule_of_a_norm_gives_the_same_bits(width: int, dtype: str, threads: tuple[int, ...]) -> None:
    x, residual = (whole_numbers(5, width, dtype=dtype)[:, ::step] for step in (1, -1))
    weight = normal(width, dtype=dtype)
    expected = normalized(x, weight, residual)
    for count in threads:
        schedule = hopper_norm.Schedule(count, min(4, max(1, 128 // count)), weight_first=count % 64 == 0)
        assert_same_bits(normalized(x, weight, residual, schedule), expected)


def test_rows_that_are_read_twice_have_the_same_bits() -> None:
    x, residual = normal(3, 4608, dtype="bfloat16"), normal(3, 4608, dtype="bfloat16", seed=1)
    schedules = [hopper_norm.Schedule(128, 1, weight_first=False, resident=resident) for resident in (True, False)]
    once, twice = (normalized(x, normal(4608), residual, schedule) for schedule in schedules)
    assert_same_bits(twice, once)


def operands_of_all_kinds(rows: int, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and factors of columns whose norms have groups of zeros, subnormal and large numbers, infinities and NaN."""
    draw = np.random.default_rng(rows)
    x, weight = draw.standard_normal((rows, width)), draw.standard_normal(width) * np.exp2(draw.integers(-9, 9, width))
    x[1:2], x[2:3, 5] = 0, np.nan
    weight[:FP8_BLOCK], weight[FP8_BLOCK + 3 : FP8_BLOCK + 4] = 0, np.inf
    weight[2 * FP8_BLOCK : 3 * FP8_BLOCK] *= 2.0 ** (100 if dtype == "bfloat16" else 6)
    weight[3 * FP8_BLOCK :] *= 2.0 ** (-134 if dtype == "bfloat16" else -20)
    return x.astype(jnp.dtype(dtype)), weight.astype(jnp.dtype(dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rows", "width", "schedule"),
    [
        *itertools.product((1, 3, 17), (1024, 4096, 5120), (None,)),
        *itertools.product((2, 9), (128, 640, 1536), (None,)),
        (13, 1024, hopper_norm.Schedule(32, 8, weight_first=True)),
        (3, 4608, hopper_norm.Schedule(128, 1, weight_first=False, resident=False)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_norm_gives_the_codes_that_its_product_would_compute(
    rows: int, width: int, schedule: hopper_norm.Schedule | None, dtype: str
) -> None:
    x, weight = operands_of_all_kinds(rows, width, dtype)
    options: dict[str, Any] = {"eps": EPS, "weight_offset": 0.5, "schedule": schedule}
    y, codes = interpreted(functools.partial(hopper_norm.forward_with_codes, **options), x, weight)
    assert_same_bits(y, normalized(x, weight, schedule=schedule)[0])
    numbers, scales = interpreted(quantized_groups, y)
    assert hopper_norm.gives_codes(width, dtype)
    assert_same_bits(codes.codes, numbers)
    assert_same_bits(codes.scales[:, :rows], scales[:, :rows])
    assert codes.scales.shape == scales.shape


def test_codes_of_padded_rows_are_left_to_the_product() -> None:
    assert [width for width in (64, 192, 4224, 8448) if hopper_norm.gives_codes(width, "bfloat16")] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [*((width, "float32") for width in (6, 64, 96, 256)), *((128, dtype) for dtype in TOLERANCE)],
)
def test_rotated_heads_have_the_values_of_float64(width: int, dtype: str) -> None:
    x, (cos, sin) = normal(3, 5, width, dtype=dtype), angles(3, width // 2)
    (alone,) = rotated(x, cos, sin, heads=(5,))
    assert_close(alone, reference_rope(x, cos, sin), dtype)
    q, k = rotated(x, cos, sin, heads=(2, 1))
    assert_same_bits(np.concatenate([q, k], axis=1), alone[:, :3])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [*((width, "bfloat16") for width in (20, 96, 128, 256)), (128, "float32")],
)
def test_norm_and_rope_together_give_the_bits_of_the_two_steps(width: int, dtype: str) -> None:
    x, (cos, sin) = whole_numbers(3, 7, width, dtype=dtype), angles(3, width // 2)
    weights = normal(width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    together = rotated(x, cos, sin, *weights, heads=(4, 2))

    def norm_alone(x: jax.Array, weight: jax.Array) -> jax.Array:
        return hopper_norm.forward(x, weight, None, eps=EPS, weight_offset=0.0)[0]

    for group, weight, y in zip((x[:, :4], x[:, 4:6]), weights, together, strict=True):
        assert_same_bits(y, rotated(interpreted(norm_alone, group, weight), cos, sin, heads=group.shape[1:2])[0])


def test_every_schedule_of_heads_gives_the_same_bits() -> None:
    x, (cos, sin) = whole_numbers(9, 6, 128, dtype="bfloat16"), angles(9, 64)
    weights = normal(128), normal(128, seed=1)
    expected = rotated(x, cos, sin, *weights, heads=(4, 2))
    for threads, tokens, heads in ((2, 8, 1), (16, 2, 2)):
        schedule = rope.Schedule(threads, tokens, heads)
        assert_same_bits(rotated(x, cos, sin, *weights, heads=(4, 2), schedule=schedule), expected)
    alone = rotated(x[4:5], cos[4:5], sin[4:5], *weights, heads=(4, 2))
    assert_same_bits(alone, [y[4:5] for y in expected])


def test_operations_reach_the_kernels_and_have_gradients() -> None:
    x, weight = jnp.asarray(whole_numbers(2, 3, 6, 64, dtype="float32")), jnp.asarray(normal(64))
    positions = jnp.asarray([[0, 5, 900], [3, 4, 5]])
    embedding = ops.RotaryEmbedding(64, 10_000.0)

    def together(x: jax.Array, weight: jax.Array) -> Any:
        norms = {"q_norm": weight, "k_norm": weight, "norm_eps": EPS}
        return ops.qk_rope(x, positions, embedding, heads=3, kv_heads=2, **norms)

    def both(x: jax.Array, weight: jax.Array) -> Any:
        y, pullback = jax.vjp(together, x, weight)
        given = jax.tree.map(lambda part: jnp.linspace(-1, 1, part.size).reshape(part.shape), y)
        return y, pullback(given)

    results = {}
    for backend in ("hopper", "portable"):
        with detjax.use_backend(backend), plgpu.force_gpu_interpret_mode():
            results[backend] = detjax.jit(both)(x, weight)
    for hopper, portable in zip(*map(jax.tree.leaves, results.values()), strict=True):
        assert_close(np.asarray(hopper), np.asarray(portable, np.float64), "float32")


def summed(rows: np.ndarray) -> np.ndarray:
    """Row sums in the order of `contract.LANES`."""
    lanes = np.zeros((len(rows), LANES), np.float32)
    for start in range(0, rows.shape[1], LANES):
        part = rows[:, start : start + LANES]
        lanes[:, : part.shape[1]] += part
    return summed_lanes(lanes)


def summed_lanes(lanes: np.ndarray) -> np.ndarray:
    sums = lanes[:, 0::LANE_GROUP]
    for lane in range(1, LANE_GROUP):
        sums = sums + lanes[:, lane::LANE_GROUP]
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


def cut(rows: Any, threads: int) -> list[Any]:
    columns = LANE_GROUP * threads
    return [rows[:, start : start + columns] for start in range(0, rows.shape[1], columns)]


@pytest.mark.parametrize("width", [16, 96, 384, 512, 1152, 4096])
def test_pieces_are_added_in_the_contracts_order(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    rows = jnp.asarray(normal(3, width))
    monkeypatch.setattr(hopper_rows, "_piece_sums", lambda piece: jnp.asarray(summed_lanes(np.asarray(piece))))
    for threads in (2, 4, 8, 16, 32, 64, 128):
        if width % (LANE_GROUP * threads) == 0:
            assert_same_bits(hopper_rows.row_sums(cut(rows, threads)), summed(np.asarray(rows)))


@pytest.mark.hopper
@pytest.mark.parametrize("threads", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("square", [False, True])
def test_the_device_adds_in_the_contracts_order(threads: int, square: bool) -> None:
    rows, width = 128 // threads, 4096 if threads >= 32 else 96 * threads
    x = normal(rows, width)
    in_rows = hopper_rows.layout(rows, threads)

    def body(x_ref: Any, y_ref: Any) -> None:
        pieces = [plgpu.load(piece, layout=in_rows, optimized=False) for piece in cut(_Columns(x_ref), threads)]
        total = hopper_rows.row_sums([hopper_rows.rounded_squares(p) for p in pieces] if square else pieces)
        y_ref[...] = hopper_rows.broadcast(total, (rows, LANE_GROUP * threads), 0, in_rows)

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct((rows, LANE_GROUP * threads), jnp.float32)
    y = plgpu.kernel(body, out_type=out, grid=(1,), grid_names=("cta",), compiler_params=params)(jnp.asarray(x))
    expected = summed(x * x if square else x)
    assert_same_bits(np.asarray(y), np.repeat(expected[:, None], y.shape[1], axis=1))


class _Columns:
    """A reference to a matrix, cut by columns like an array."""

    def __init__(self, ref: Any) -> None:
        self.ref, self.shape = ref, ref.shape

    def __getitem__(self, index: tuple[slice, slice]) -> Any:
        return self.ref.at[index]


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_device_has_one_set_of_bits(dtype: str) -> None:
    weights = jnp.asarray(normal(1024, dtype=dtype)), jnp.asarray(normal(128, dtype=dtype))
    rows = normal(257, 1024, dtype=dtype)
    norm = jax.jit(hopper_norm.forward, static_argnames=("eps", "weight_offset", "schedule"))
    expected = np.asarray(norm(rows, weights[0], rows[::-1], eps=EPS, weight_offset=0.0)[0])
    for threads, in_cta in ((16, 8), (16, 1), (32, 4), (32, 1), (64, 2), (128, 1), (128, 4)):
        for first in (False, True):
            schedule = hopper_norm.Schedule(threads, in_cta, first)
            y, _ = norm(rows, weights[0], rows[::-1], eps=EPS, weight_offset=0.0, schedule=schedule)
            assert_same_bits(np.asarray(y), expected)
    twice = hopper_norm.Schedule(128, 1, False, resident=False)
    y, _ = norm(rows, weights[0], rows[::-1], eps=EPS, weight_offset=0.0, schedule=twice)
    assert_same_bits(np.asarray(y), expected)
    for count in (1, 2, 17, 33, 128):
        y, _ = norm(rows[:count], weights[0], rows[::-1][:count], eps=EPS, weight_offset=0.0)
        assert_same_bits(np.asarray(y), expected[:count])

    x, turns = normal(33, 8, 128, dtype=dtype), angles(33, 64)
    heads = (4, 2)
    together = jax.jit(rope.forward, static_argnames=("heads", "eps", "schedule"))
    expected = together(x, turns, weights[1], weights[1], heads=heads, eps=EPS)
    alone, _ = norm(x[:, :6], weights[1], None, eps=EPS, weight_offset=0.0)
    (separate,) = together(alone, turns, heads=(6,), eps=None)
    assert_same_bits(np.concatenate(expected, axis=1), np.asarray(separate))
    for threads, tokens, count in ((2, 32, 1), (4, 16, 2), (8, 1, 1), (16, 8, 2), (16, 1, 1)):
        schedule = rope.Schedule(threads, tokens, count)
        y = together(x, turns, weights[1], weights[1], heads=heads, eps=EPS, schedule=schedule)
        assert_same_bits(y, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [128, 1024, 4096, 5120, 8192])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norms_lower_for_cuda(width: int, dtype: str) -> None:
    schedules: list[hopper_norm.Schedule | None] = [None]
    schedules += [hopper_norm.Schedule(32, rows, True) for rows in (1, 4, 8)] if width <= 1024 else []
    schedules += [hopper_norm.Schedule(128, 1, False, resident) for resident in (True, False)] if width >= 1024 else []
    for rows in (1, 64, 16384):
        for schedule in schedules if rows == 64 else (None,):
            x = jax.ShapeDtypeStruct((rows, width), dtype)

            def fn(x: jax.Array, weight: jax.Array, residual: jax.Array, schedule=schedule) -> Any:
                return hopper_norm.forward(x, weight, residual, eps=EPS, weight_offset=0.0, schedule=schedule)

            assert "mosaic_gpu" in lowered(fn, x, jax.ShapeDtypeStruct((width,), dtype), x)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("width", [20, 64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_heads_lower_for_cuda(width: int, tokens: int) -> None:
    x = jax.ShapeDtypeStruct((tokens, 48, width), "bfloat16")
    turns = (jax.ShapeDtypeStruct((tokens, width // 2), "float32"),) * 2
    weights = (jax.ShapeDtypeStruct((width,), "bfloat16"),) * 2
    together = lowered(lambda *a: rope.forward(*a, heads=(32, 8), eps=EPS), x, turns, *weights)
    alone = lowered(lambda *a: rope.forward(*a, heads=(48,), eps=None), x, turns)
    assert "mosaic_gpu" in together and "mosaic_gpu" in alone


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 130, 4096, 200_000])
def test_there_is_a_schedule_for_every_shape(rows: int, dtype: str) -> None:
    for width in (1, 80, 130, 513, 896, 1152, 2048, 2304, 2880, 5121, 12288, 40000):
        padded = hopper_norm.padded_width(width, dtype)
        assert width <= padded < width + LANES
        problem = hopper_norm.Problem(rows, padded, jnp.dtype(dtype))
        hopper_norm.default_schedule(problem).check(problem)
        if width % 16 == 0:
            heads = rope.Problem(rows, (8, 2), width, jnp.dtype(dtype))
            rope.default_schedule(heads).check(heads)


def rows_of(rows: int, width: int) -> hopper_norm.Problem:
    return hopper_norm.Problem(rows, width, jnp.dtype("float32"))


def heads_of(tokens: int, heads: tuple[int, ...], width: int) -> rope.Problem:
    return rope.Problem(tokens, heads, width, jnp.dtype("bfloat16"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hopper_norm.Schedule(48, 1, True), "threads is 48; accepted: 4, 8, 16, 32, 64, 128"),
        (lambda: hopper_norm.Schedule(32, 3, True), "rows is 3; accepted: multiples of 4"),
        (
            lambda: hopper_norm.Schedule(32, 4, True).check(rows_of(9, 130)),
            "on rows of 130; accepted: multiples of 128",
        ),
        (
            lambda: hopper_norm.Schedule(32, 4, True).check(rows_of(3, 128)),
            "4 rows of a CTA; accepted: at most the 3 rows",
        ),
        (
            lambda: hopper_norm.Schedule(32, 4, True, False).check(rows_of(9, 128)),
            "read twice with 32 threads; accepted: 128",
        ),
        (
            lambda: hopper_norm.Schedule(16, 16, True).check(rows_of(16, 1024)),
            "512 bytes of rows in the registers of a thread; accepted: at most 256",
        ),
        (lambda: rope.Schedule(64, 1, 1), "threads is 64; accepted: 2, 4, 8, 16, 32"),
        (lambda: rope.Schedule(16, 16, 1), "tokens is 16; accepted: powers of two up to 8"),
        (
            lambda: rope.Schedule(16, 8, 1).check(heads_of(9, (4,), 96)),
            "a head of 96; accepted: multiples of 128",
        ),
        (
            lambda: rope.Schedule(16, 8, 1).check(heads_of(7, (4,), 128)),
            "8 tokens of a CTA; accepted: at most the 7 tokens",
        ),
        (
            lambda: rope.Schedule(16, 8, 4).check(heads_of(9, (8, 2), 128)),
            "4 heads of a CTA; accepted: common divisors of",
        ),
    ],
)
def test_schedules_that_cannot_be_are_refused(make: Callable[[], Sequence[Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
