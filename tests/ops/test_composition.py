"""An operation inside a larger program gives the bits it gives alone: no fusion, constant or option reaches into it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from tests.support.bits import assert_same_bits, same_bits

M, D = 24, 64
ROPE = ops.RotaryEmbedding(32, 10_000.0)


def _weights(dtype: Any) -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    shapes = {"table": (40, D), "w": (D, D), "gate_up": (2, D, D), "bias": (D,), "scale": (D,), "x": (M, D)}
    return {name: jnp.asarray(random.standard_normal(shape) / 4, dtype) for name, shape in shapes.items()}


def _attention(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (x.reshape(1, M, 2, 32) for _ in range(3))
    return ops.dot_product_attention(q, k, v).reshape(M, D)


def _sample(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    ids = jnp.arange(M, dtype=jnp.int32)
    keys, whole = jnp.stack([ids] * 4, axis=1).astype(jnp.uint32), jnp.ones(M)
    return ops.sample(x, ops.SamplingArrays(keys, ids, whole, 0 * ids, whole, 0 * whole), filtered=False)


def _sampling_logprobs(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    ids, whole = jnp.arange(M, dtype=jnp.int32), jnp.ones(M)
    arrays = ops.SamplingArrays(jnp.zeros((M, 4), jnp.uint32), ids, whole * 0.7, 9 + 0 * ids, whole, 0 * whole)
    return ops.sampling_logprobs(x, jnp.argmax(x, axis=1).astype(jnp.int32), arrays)


def _tokens(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return _sample(x, w)[0] % 40


# Every operation of the decoder on [M, D], with its weights in the dtype of what it is given.
ON_ROWS: dict[str, Callable[[jax.Array, dict[str, jax.Array]], Any]] = {
    "rms_norm": lambda x, w: ops.rms_norm(x, w["scale"], eps=1e-6),
    "matmul residual": lambda x, w: ops.matmul(x, w["w"], layout="nk", bias=w["bias"], residual=w["x"]),
    "residual of matmul": lambda x, w: ops.matmul(w["x"], w["w"], residual=x),
    "matmul gated": lambda x, w: ops.matmul(x, w["gate_up"], layout="nk", gated=True, activation="silu"),
    "rope": lambda x, w: ops.rope(x.reshape(M, 2, 32), jnp.arange(M), ROPE).reshape(M, D),
    "attention": _attention,
    "log_softmax": lambda x, w: ops.log_softmax(x),
}
FIRST = {"embed": lambda x, w: ops.embed(jnp.arange(M) * 7 % 40, w["table"]), **ON_ROWS, "sample": _tokens}
LAST = {
    **ON_ROWS,
    "sample": _sample,
    "sampling_logprobs": _sampling_logprobs,
    "top_logprobs": lambda x, w: ops.top_logprobs(x, 5),
}

PROGRAMS = {name: detjax.jit(fn) for name, fn in (FIRST | LAST).items()}

PAIRS = [(g, f) for g in FIRST if g != "sample" for f in LAST]


@pytest.mark.sampled(2)
# In float32, where XLA's own operations do move; bfloat16's pairs are compared below, where roundings may be dropped.
@pytest.mark.parametrize(("g", "f"), PAIRS)
def test_a_program_of_two_operations_gives_the_bits_of_two_programs(g: str, f: str) -> None:
    w = _weights("float32")
    between = PROGRAMS[g](w["x"], w)
    v = _weights(between.dtype)

    def both(x: jax.Array, w: dict[str, jax.Array], v: dict[str, jax.Array]) -> Any:
        return LAST[f](FIRST[g](x, w), v)

    assert_same_bits(detjax.jit(both)(w["x"], w, v), PROGRAMS[f](between, v))


@pytest.mark.parametrize(
    ("g", "lasts"),
    [
        ("matmul gated", ("rms_norm", "residual of matmul", "log_softmax")),
        *(pytest.param(g, tuple(LAST), marks=pytest.mark.nightly, id=g) for g in FIRST if g != "sample"),
    ],
)
def test_roundings_stay_where_the_compiler_may_drop_them(g: str, lasts: tuple[str, ...]) -> None:
    w = _weights("bfloat16")
    between = PROGRAMS[g](w["x"], w)
    v = _weights(between.dtype)

    def followed_by_each(x: jax.Array, w: dict[str, jax.Array], v: dict[str, jax.Array]) -> Any:
        y = FIRST[g](x, w)
        return {f: LAST[f](y, v) for f in lasts}

    # Not what detjax.jit would compile with: that the bits stay does not hang on this option alone.
    excess = jax.jit(followed_by_each, compiler_options={"xla_allow_excess_precision": True})
    assert_same_bits(excess(w["x"], w, v), {f: PROGRAMS[f](between, v) for f in lasts})


def test_a_sampled_token_is_embedded_in_the_same_program() -> None:
    w = _weights("bfloat16")
    tokens = detjax.jit(_tokens)(w["x"], w)
    expected = ops.embed(tokens, w["table"])
    assert_same_bits(detjax.jit(lambda x, w: ops.embed(_tokens(x, w), w["table"]))(w["x"], w), expected)
    assert len(set(np.asarray(tokens).tolist())) > 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in FIRST if name not in ("rope", "log_softmax")])
def test_weights_that_are_constants_give_the_bits_of_weights_that_are_arguments(name: str, dtype: str) -> None:
    op, w = FIRST[name], _weights(dtype)
    expected = detjax.jit(op)(w["x"], w)
    assert_same_bits(detjax.jit(lambda x: op(x, w))(w["x"]), expected)
    assert_same_bits(jax.jit(lambda: op(w["x"], w))(), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_whole_block_in_one_program_gives_the_bits_of_its_operations(dtype: str) -> None:
    w = _weights(dtype)
    chain = ("rms_norm", "matmul residual", "rope", "attention", "residual of matmul", "matmul gated", "rms_norm")

    def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        for name in chain:
            x = ON_ROWS[name](x, w)
        return x

    step_by_step = w["x"]
    for name in chain * 2:
        step_by_step = PROGRAMS[name](step_by_step, w)
    scanned = detjax.jit(lambda x, w: jax.lax.scan(lambda x, _: (block(x, w), None), x, length=2)[0])(w["x"], w)
    assert_same_bits(scanned, step_by_step)


# The negative control. Of all pairs these are where XLA's own operations move on a CPU; not one does in bfloat16.
@pytest.mark.parametrize(
    ("g", "f"),
    [
        ("rms_norm", "residual of matmul"),
        ("rms_norm", "log_softmax"),
        ("rms_norm", "top_logprobs"),
        ("matmul gated", "residual of matmul"),
    ],
)
def test_xlas_own_operations_change_bits_when_they_are_compiled_together(g: str, f: str) -> None:
    first, last, w = FIRST[g], LAST[f], _weights("float32")
    with detjax.use_backend("stock"):
        expected = detjax.jit(last)(detjax.jit(first)(w["x"], w), w)
        assert not same_bits(detjax.jit(lambda x, w: last(first(x, w), w))(w["x"], w), expected)
