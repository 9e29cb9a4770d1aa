"""Values and gradients against float64: every operation, with every argument that has a gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK, SOFTMAX_BLOCK
from tests.ops import references
from tests.ops.attention_cases import OPTIONS
from tests.ops.cases import DTYPES, ROPE_SCALINGS, in_dtype
from tests.support.bits import assert_same_bits

VALUE_TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 1.2e-3}
GRADIENT_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """An operation and its reference: functions of the same float arrays, all with gradients."""

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]

    def arrays(self, dtype: str) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        return {name: in_dtype(random.standard_normal(shape), dtype) for name, shape in self.shapes.items()}

    def __str__(self) -> str:
        return self.name


def _matmul(name: str, *, bias: bool = False, residual: bool = False, **options: Any) -> Case:
    rows, inputs, outputs = (3, 7), 80, 37
    stacked = (2,) if options.get("gated") else ()
    shapes = {"x": (*rows, inputs)}
    shapes["w"] = (*stacked, outputs, inputs) if options.get("layout") == "nk" else (*stacked, inputs, outputs)
    shapes |= {"bias": (*stacked, outputs)} if bias else {}
    shapes |= {"residual": (*rows, outputs)} if residual else {}

    def fn(**arrays: Any) -> Any:
        return ops.matmul(**arrays, **options)

    def reference(**arrays: Any) -> Any:
        return references.matmul(**arrays, **options)

    return Case(f"matmul {name}", fn, reference, shapes)


def _rms_norm(name: str, *, residual: bool, weight_offset: float, width: int) -> Case:
    options = {"eps": 1e-5, "weight_offset": weight_offset}
    shapes = {"x": (19, width), "weight": (width,)} | ({"residual": (19, width)} if residual else {})
    return Case(
        f"rms_norm {name}",
        lambda **arrays: ops.rms_norm(**arrays, **options),  # pyright: ignore[reportCallIssue]
        lambda **arrays: references.rms_norm(**arrays, **options),
        shapes,
    )


def _rope(name: str, scaling: dict[str, Any] | None) -> Case:
    # Small enough that a float32 angle has an error of 3e-6 at most.
    positions = np.random.default_rng(0).integers(0, 60, (2, 9)).astype(np.int32)
    embedding = ops.RotaryEmbedding(80, 10_000.0, ROPE_SCALINGS[name])
    turning, factor = references.frequencies(80, 10_000.0, scaling)
    return Case(
        f"rope {name}",
        lambda x: ops.rope(x, jnp.asarray(positions), embedding),
        lambda x: references.rope(x, positions, turning, factor),
        {"x": (2, 9, 3, 80)},
    )


def _qk_rope(offset: float = 0.0) -> Case:
    positions = np.random.default_rng(0).integers(0, 60, (2, 9)).astype(np.int32)
    embedding = ops.RotaryEmbedding(80, 10_000.0)
    turning, factor = references.frequencies(80, 10_000.0)

    def fn(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> Any:
        norms = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-5, "norm_offset": offset}
        return ops.qk_rope(qkv, jnp.asarray(positions), embedding, heads=3, kv_heads=2, **norms)

    def reference(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> Any:
        groups = (qkv[:, :, :3], q_norm), (qkv[:, :, 3:5], k_norm)
        normed = (references.rms_norm(x, weight, eps=1e-5, weight_offset=offset) for x, weight in groups)
        return tuple(references.rope(x, positions, turning, factor) for x in normed)

    name = f"qk_rope with an offset of {offset}"
    return Case(name, fn, reference, {"qkv": (2, 9, 7, 80), "q_norm": (80,), "k_norm": (80,)})


def _embed() -> Case:
    tokens = np.asarray([[3, 5, 3, 3, 0], [9, 5, 3, 0, 1]], np.int32)
    return Case(
        "embed with repeated tokens",
        lambda table: ops.embed(jnp.asarray(tokens), table),
        lambda table: table[tokens],
        {"table": (11, 24)},
    )


def _attention(
    name: str, heads: int = 4, kv_heads: int = 2, masks: tuple[int, int] | None = None, columns: int | None = None
) -> Case:
    # The first page belongs to two requests, the last to none; the third request sees nothing.
    requests = {
        "page_table": np.asarray([[0, 2], [0, 1], [1, 1]], np.int32),
        "q_start": np.asarray([129, 6, 0], np.int32),
        "kv_length": np.asarray([140, 17, 0], np.int32),
    }
    options = {option: value for option, value in OPTIONS[name].items() if option != "sinks"}
    if masks is not None:  # for keys up to the 200th
        mask = np.random.default_rng(4).random((*masks, 11, 200)) < 0.6
        mask[..., 5, :] = False
        options |= {"mask": mask}
    shapes = {"q": (3, 11, heads, 24), "k_pages": (4, kv_heads, KV_BLOCK, 24), "v_pages": (4, kv_heads, KV_BLOCK, 40)}
    shapes |= {"sinks": (heads,)} if "sinks" in OPTIONS[name] else {}
    if columns is not None:  # of keys, which are the values
        del shapes["v_pages"]

    def fn(**arrays: Any) -> Any:
        given = options | ({"mask": jnp.asarray(options["mask"])} if masks else {})
        values = arrays.pop("v_pages") if columns is None else ops.KeyColumns(columns)
        kv, queries = ops.KVPages(arrays.pop("k_pages"), values), ops.Queries(*requests.values())
        return ops.attention(arrays.pop("q"), kv, queries, **arrays, **given)

    def reference(**arrays: Any) -> Any:
        values = {} if columns is None else {"v_pages": arrays["k_pages"][..., :columns]}
        return references.attention(**arrays, **values, **requests, **options)

    about = (f" masks {masks}" if masks else "") + (f" values in {columns} columns of keys" if columns else "")
    return Case(f"attention {name} {heads}:{kv_heads}{about}", fn, reference, shapes)


VARIANTS = (
    *(_matmul(f"with {name}", bias=True, activation=name, residual=True) for name in ("gelu", "gelu_tanh", "relu")),
    _matmul("nk", layout="nk"),
    _matmul("gated", gated=True, activation="gelu_tanh"),
    _rms_norm("without residual", residual=False, weight_offset=0.0, width=80),
    _rms_norm("of a wide row", residual=False, weight_offset=0.0, width=4097),
    Case("softmax of a wide row", ops.softmax, references.softmax, {"x": (5, 4097)}),
    Case("log_softmax of a wide row", ops.log_softmax, references.log_softmax, {"x": (5, 9000)}),
    Case("logsumexp of a wide row", ops.logsumexp, references.logsumexp, {"x": (5, 9000)}),
    _rope("default", None),
    _qk_rope(),
    _qk_rope(1.0),
    _rope("linear", {"rope_type": "linear", "factor": 4.0}),
    _rope(
        "llama3",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192},
    ),
    # A window of one leaves scores no gradient but the noise of rounding.
    *(_attention(name) for name in OPTIONS if name not in ("causal", "everything", "window of one")),
    _attention("causal", heads=2),
    _attention("causal", kv_heads=1),
    *(_attention("not causal", masks=masks) for masks in ((1, 1), (3, 1), (1, 4), (3, 4))),
    _attention("everything", masks=(3, 4)),
)
SOME = np.arange(15).reshape(3, 5) % 4 > 1
"""Some of 3 times 5 rows."""
KINDS = (
    _matmul("alone"),
    _matmul("with silu", layout="nk", bias=True, activation="silu", residual=True),
    _matmul("gated nk", layout="nk", gated=True, activation="silu", bias=True, residual=True),
    _rms_norm("with residual", residual=True, weight_offset=1.0, width=257),
    Case("softmax", ops.softmax, references.softmax, {"x": (3, 6, 80)}),
    Case("log_softmax", ops.log_softmax, references.log_softmax, {"x": (3, 6, 80)}),
    Case("logsumexp", ops.logsumexp, references.logsumexp, {"x": (3, 6, 80)}),
    _rope("yarn", {"rope_type": "yarn", "factor": 4.0, "original": 4096}),
    _embed(),
    Case("add", ops.add, lambda x, y: x + y, {"x": (3, 5, 37), "y": (3, 5, 37)}),
    Case("multiply", ops.multiply, lambda x, y: x * y, {"x": (3, 5, 37), "y": (3, 5, 37)}),
    Case("multiply by a number", lambda x: ops.multiply(x, jnp.full(1, 6.5)), lambda x: x * 6.5, {"x": (3, 5, 37)}),
    Case(
        "add masked",
        lambda x, y: ops.add(x, y, mask=jnp.asarray(SOME)),
        lambda x, y: jnp.where(SOME[..., None], x + y, x),
        {"x": (3, 5, 37), "y": (3, 5, 37)},
    ),
    # The factor is a number of every dtype.
    Case("scale", lambda x: ops.scale(x, 6.5), lambda x: x * 6.5, {"x": (3, 5, 37)}),
    # The factor is a number of float32 alone.
    Case("scale exactly", lambda x: ops.scale(x, 6.55, factor_dtype="float32"), lambda x: x * 6.55, {"x": (3, 5, 37)}),
    _attention("causal"),
    _attention("everything"),
    _attention("causal", kv_heads=1, columns=16),
)
IN_16_BITS = {("matmul with silu", "bfloat16"), ("matmul gated nk", "float16"), ("softmax", "float16")}
IN_16_BITS |= {("rms_norm with residual", "bfloat16"), ("rope yarn", "bfloat16"), ("scale", "bfloat16")}
IN_16_BITS |= {("scale exactly", "bfloat16")}
IN_16_BITS |= {("attention everything 4:2", "bfloat16")}
SMALL = {"matmul with relu", "matmul with gelu", "matmul gated", "attention everything 4:2 masks (3, 4)"}
"""Cases that CI runs besides all kinds in float32. Widths and frequencies are also checked by the contract's tests."""


def _large(case: Case, dtype: str, is_small: bool) -> Any:
    return (case, dtype) if is_small else pytest.param(case, dtype, marks=pytest.mark.nightly)


ALL = [_large(case, "float32", case.name in SMALL) for case in VARIANTS]
ALL += [
    _large(case, dtype, dtype == "float32" or (case.name, dtype) in IN_16_BITS) for case in KINDS for dtype in DTYPES
]


def value_and_gradients(fn: Callable[..., Any], arrays: dict[str, Any], cotangents: Any) -> tuple[Any, Any]:
    value, pull = jax.vjp(lambda arrays: fn(**arrays), arrays)
    return value, pull(cotangents)[0]


def cotangents_of(case: Case, arrays: dict[str, np.ndarray]) -> Any:
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda arrays: case.fn(**arrays), arrays)
    return jax.tree.map(lambda leaf: random.standard_normal(leaf.shape).astype(leaf.dtype), shapes)


@pytest.mark.parametrize(("case", "dtype"), ALL, ids=str)
def test_values_and_gradients_are_those_of_float64(case: Case, dtype: str) -> None:
    arrays = case.arrays(dtype)
    cotangents = cotangents_of(case, arrays)
    value, gradients = detjax.jit(value_and_gradients, static_argnums=0)(case.fn, arrays, cotangents)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (arrays, cotangents))
        expected, expected_gradients = jax.jit(value_and_gradients, static_argnums=0)(case.reference, *wide)
        expected, expected_gradients = jax.tree.map(np.asarray, (expected, expected_gradients))

    assert {x.dtype.name for x in jax.tree.leaves(gradients)} == {dtype}
    assert relative_errors(value, expected, VALUE_TOLERANCE[dtype]) == {}
    assert gradients.keys() == case.shapes.keys()
    assert relative_errors(gradients, expected_gradients, GRADIENT_TOLERANCE[dtype]) == {}


def relative_errors(actual: Any, expected: Any, tolerance: float) -> dict[str, float]:
    """By path, those largest errors that exceed the tolerance, relative to the largest element."""
    errors = {}
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        error = np.max(np.abs(np.asarray(a).astype(np.float64) - e)) / np.max(np.abs(e))
        if not error <= tolerance:
            errors[jax.tree_util.keystr(path)] = error
    return errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "dtype"), [(case, d) for case in KINDS for d in ("float32", "bfloat16")], ids=str)
def test_gradients_are_the_same_bits_in_every_run_and_program(case: Case, dtype: str) -> None:
    arrays = jax.tree.map(jnp.asarray, case.arrays(dtype))
    cotangents = jax.tree.map(jnp.asarray, cotangents_of(case, arrays))
    program = detjax.jit(value_and_gradients, static_argnums=0)
    expected = program(case.fn, arrays, cotangents)
    assert_same_bits(program(case.fn, arrays, cotangents), expected)
    if dtype == "float32":
        assert_same_bits(value_and_gradients(case.fn, arrays, cotangents), expected)

    def training_step(arrays: Any, cotangents: Any) -> Any:
        halved = jax.tree.map(lambda x: x / 2, arrays)
        value, gradients = value_and_gradients(case.fn, jax.tree.map(lambda x: x * 2, halved), cotangents)
        updated = jax.tree.map(lambda x, g: x - g / 8, arrays, gradients)
        return (value, gradients), updated

    assert_same_bits(detjax.jit(training_step)(arrays, cotangents)[0], expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_vmap_of_a_gradient_gives_the_bits_of_each(case: Case) -> None:
    arrays = case.arrays("float32")
    examples = [arrays, {name: x[..., ::-1].copy() for name, x in arrays.items()}]
    cotangents = cotangents_of(case, arrays)

    def gradients(arrays: Any) -> Any:
        return value_and_gradients(case.fn, arrays, cotangents)[1]

    mapped = jax.vmap(gradients)(jax.tree.map(lambda *x: jnp.stack(x), *examples))
    for i, example in enumerate(examples):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], mapped), gradients(jax.tree.map(jnp.asarray, example)))


ROWS = [case for case in KINDS if case.name.split()[0] in ("matmul", "rms_norm", "softmax", "log_softmax")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_a_rows_gradient_is_the_same_at_every_batch_size(case: Case, dtype: str) -> None:
    arrays = case.arrays(dtype)
    rows = {name: arrays[name].reshape(-1, arrays[name].shape[-1]) for name in {"x", "residual"} & arrays.keys()}
    cotangents = cotangents_of(case, arrays | rows)
    program = detjax.jit(value_and_gradients, static_argnums=0)
    together = program(case.fn, arrays | rows, cotangents)[1]
    last, last_cotangents = jax.tree.map(lambda x: x[-1:], (rows, cotangents))
    alone = program(case.fn, arrays | last, last_cotangents)[1]
    assert_same_bits(alone["x"], together["x"][-1:])


def test_large_positions_turn_by_the_float32_angle() -> None:
    positions = np.asarray([0, 1, 4095, 131_071, 2**24 - 1], np.int32)
    embedding = ops.RotaryEmbedding(64, 500_000.0)
    angles = (positions.astype(np.float32)[:, None] * embedding.inverse_frequencies).astype(np.float64)
    x = np.concatenate([np.ones((5, 1, 32), np.float32), np.zeros((5, 1, 32), np.float32)], axis=-1)
    turned = ops.rope(jnp.asarray(x), jnp.asarray(positions), embedding)
    np.testing.assert_allclose(turned[:, 0, :32], np.cos(angles), atol=2e-7)
    np.testing.assert_allclose(turned[:, 0, 32:], np.sin(angles), atol=2e-7)


def test_softmax_of_extreme_rows_is_finite() -> None:
    x = np.asarray([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [-np.inf, 0.0, 0.0], [88.0, 89.0, 1000.0]], np.float32)
    expected = np.asarray([[1, 0, 0], [1 / 3] * 3, [0, 0.5, 0.5], [0, 0, 1]])
    np.testing.assert_allclose(ops.softmax(jnp.asarray(x)), expected, rtol=1e-6)
    np.testing.assert_allclose(np.exp(ops.log_softmax(jnp.asarray(x))), expected, rtol=1e-6)
    np.testing.assert_allclose(ops.logsumexp(jnp.asarray(x[2:])), [np.log(2), 1000.0], rtol=1e-6)
    blocks_of_nothing = np.full((1, 3 * SOFTMAX_BLOCK), -np.inf, np.float32)
    blocks_of_nothing[0, SOFTMAX_BLOCK + 5] = -1.0
    assert ops.logsumexp(jnp.asarray(blocks_of_nothing)) == -1.0
