"""Proofs of certificates hold: signs of zeros, NaN, complex numbers, products in calls, programs of batches."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import detjax
from detjax import audit, ops
from detjax.audit import Outcome, Role
from detjax.audit.certification.certify import reading
from detjax.audit.certification.freedoms import Exclusion, Freedoms

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 33)), jnp.float32)
IMAGES = jnp.asarray(np.random.default_rng(1).standard_normal((2, 8, 8, 3)), jnp.float32)
Z = lax.complex(X, X[:, ::-1])
QUICK = (1, 2)


def zeros(x: Array) -> Array:
    return jnp.where(x > 0, jnp.zeros_like(x), -jnp.zeros_like(x))


def named(fn: Callable[..., Any], x: Array, sizes: tuple[int, ...] = QUICK) -> list[str]:
    return [risk.primitive for risk in audit.risks(fn, (x,), batch_sizes=sizes)]


SIGNS_ARE_SEEN: dict[str, tuple[Callable[[Array], Array], Array, str]] = {
    "the sign is read": (lambda x: jnp.copysign(jnp.ones_like(x[:, 0]), jnp.max(-jax.nn.relu(x), -1)), X, "reduce_max"),
    "negated": (lambda x: jnp.max(-jax.nn.relu(x), -1), X, "reduce_max"),
    "negated bfloat16": (lambda x: jnp.max(-jax.nn.relu(x), -1), X.astype(jnp.bfloat16), "reduce_max"),
    "global pool": (lambda x: jnp.max(x, (1, 2)), IMAGES, "reduce_max"),
    "pool": (lambda x: nn.max_pool(x, (2, 2), (2, 2)), IMAGES, "reduce_window_max"),
    "zeros of both signs": (lambda x: jnp.max(zeros(x), -1), X, "reduce_max"),
    "smallest of rounded": (lambda x: jnp.min(jnp.floor(zeros(x)), -1), X, "reduce_min"),
    "several axes": (lambda x: jnp.max(x.reshape(-1, 3, 11), 1), X, "reduce_max"),
    "so far largest": (lambda x: lax.cummax(x, axis=1), X, "cummax"),
    "segments": (lambda x: jax.vmap(lambda r: jax.ops.segment_max(r, jnp.arange(33) % 4, 4))(x), X, "scatter-max"),
    "divided by": (lambda x: 1 / jnp.max(x, -1), X, "reduce_max"),
    "subtracted": (lambda x: x - jnp.max(x, -1, keepdims=True), X, "reduce_max"),
    "0.0 is left out of a sum": (lambda x: jnp.max(x, -1) + 0.0, X, "reduce_max"),
    "in a loop": (lambda x: lax.fori_loop(0, 2, lambda _, y: y.max(-1, keepdims=True) - y, x), X, "reduce_max"),
    "in a branch": (
        lambda x: lax.cond(jnp.arange(2).sum() > 0, lambda x: x.max(-1), lambda x: x.min(-1), x),
        X,
        "reduce_min",
    ),
    "in a called function": (lambda x: jax.jit(lambda x: x.max(-1))(x) * 2, X, "reduce_max"),
    "through an operation": (
        lambda x: ops.rms_norm(x.max(-1, keepdims=True) * x, jnp.ones(33), eps=1e-6),
        X,
        "reduce_max",
    ),
}


@pytest.mark.parametrize("name", SIGNS_ARE_SEEN)
def test_a_largest_zero_whose_sign_is_seen_is_a_risk(name: str) -> None:
    fn, x, primitive = SIGNS_ARE_SEEN[name]
    assert primitive in named(fn, x)
    assert audit.certify(fn, (x,), batch_sizes=QUICK).outcome is not Outcome.PROVEN


SIGNS_ARE_NOT_SEEN: dict[str, tuple[Callable[[Array], Array], Array]] = {
    "softmax": (jax.nn.softmax, X),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), X),
    "exp": (lambda x: jnp.exp(x - jnp.max(x, -1, keepdims=True)), X),
    "compared": (lambda x: jnp.max(x, -1) > 0, X),
    "absolute": (lambda x: jnp.max(jnp.abs(x), -1), X),
    "absolute afterwards": (lambda x: jnp.abs(jnp.max(x, -1)), X),
    "squares": (lambda x: jnp.max(x * x, -1), X),
    "after relu": (lambda x: jnp.max(jax.nn.relu(x), -1), X),
    "pool after relu": (lambda x: nn.max_pool(jax.nn.relu(x), (2, 2), (2, 2)), IMAGES),
    "whole numbers": (lambda x: jnp.max(x.astype(jnp.int32).astype(jnp.float32), -1), X),
    "added to what is never -0.0": (lambda x: jnp.max(x, -1) + jnp.abs(x[:, 0]), X),
    "sorted": (lambda x: jnp.sort(zeros(x), -1), X),
    "place of the largest": (lambda x: jnp.argmax(zeros(x), -1), X),
    "largest of a loop": (
        lambda x: lax.fori_loop(0, 2, lambda _, y: jnp.abs(y).max(-1, keepdims=True) + jnp.abs(x), x),
        X,
    ),
    "an operation that is blind": (lambda x: ops.softmax(x * jnp.max(x, -1, keepdims=True)), X),
    "a product under contract": (lambda x: ops.matmul(x * jnp.max(x, -1, keepdims=True), jnp.ones((33, 4))), X),
}


@pytest.mark.parametrize("name", SIGNS_ARE_NOT_SEEN)
def test_a_largest_zero_whose_sign_is_not_seen_is_no_risk(name: str) -> None:
    fn, x = SIGNS_ARE_NOT_SEEN[name]
    assert not {"reduce_max", "reduce_window_max"} & set(named(fn, x))


def test_operations_that_are_called_blind_give_the_same_bits_for_zeros_of_both_signs() -> None:
    x = np.where(np.arange(66).reshape(2, 33) % 3 == 0, np.asarray(X), np.float32(0))
    negative = np.where(x == 0, np.float32(-0.0), x)
    weight = jnp.asarray(np.random.default_rng(2).standard_normal((33, 4)), jnp.float32)
    for fn in (ops.softmax, lambda x: ops.matmul(x, weight), lambda x: ops.matmul(x * 0, weight)):
        made, other = (np.asarray(detjax.jit(fn)(jnp.asarray(given))) for given in (x, negative))
        assert made.tobytes() == other.tobytes()


def test_proofs_say_what_they_leave_out() -> None:
    cases: list[tuple[Callable[[Array], Array], set[Exclusion]]] = [
        (lambda x: x[:, ::-1], set()),
        (lambda x: jnp.argsort(x, -1), set()),
        (lambda x: x + x[:, ::-1], {Exclusion.NAN}),
        (lambda x: lax.bitcast_convert_type(x * 2, jnp.int32), {Exclusion.NAN}),
        (lambda x: jnp.max(jnp.abs(x), -1) > 0, {Exclusion.NAN, Exclusion.SUBNORMAL}),
        (lambda x: jnp.where(x > x[:, ::-1], x, x[:, ::-1]), {Exclusion.SUBNORMAL}),
        (lambda x: jnp.max(x.astype(jnp.int32), -1), set()),
    ]
    for fn, exclusions in cases:
        risks, left_out = reading(fn, (X,), batch_sizes=QUICK)
        assert (risks, set(left_out)) == ((), exclusions)
    certificate = audit.certify(lambda x: jnp.max(jnp.abs(x), -1), (X,), batch_sizes=QUICK)
    assert "as compiled by detjax.jit is proven by construction except for rows that meet NaN and" in str(certificate)
    assert certificate.as_dict()["exclusions"] == ["nan", "subnormal"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda z: z * (1.3 + 0.7j),
        lambda z: z / (z + 2),
        lambda z: z**3,
        lambda z: z * z,
        jnp.square,
        jnp.abs,
        jnp.sqrt,
        jnp.sign,
        jnp.log,
        jnp.exp,
        jnp.tanh,
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_complex_arithmetic_is_a_risk(
    fn: Callable[[Array], Array], platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("detjax.runtime.backends.target", lambda: platform)
    assert any(
        "complex numbers with several roundings" in risk.why for risk in audit.risks(fn, (Z,), batch_sizes=QUICK)
    )


def test_complex_numbers_that_do_not_meet_themselves_are_proven() -> None:
    for fn in (
        lambda z: jnp.conj(z)[:, ::-1],
        lambda z: z + z[:, ::-1],
        lambda z: lax.complex(z.imag, z.real),
        lambda z: -z,
    ):
        assert named(fn, Z) == []


def test_a_product_before_a_sum_is_found_through_calls_loops_and_signs() -> None:
    product = jax.jit(lambda x: x * 3.1)
    for fn in (
        lambda x: product(x) + 1,
        lambda x: -(x * 3.1) + 1,
        lambda x: jnp.where(x > 0, x * 3.1, x) + 1,
        lambda x: jax.jit(lambda y: y + 1)(x * 3.1),
        lambda x: lax.fori_loop(0, 3, lambda _, y: (y + 1) * 3.1, x),
        lambda x: lax.cond(jnp.arange(2).sum() > 0, lambda x: x * 3.1, lambda x: x, x) - 1,
    ):
        assert named(fn, X) == ["sub" if "cond" in str(jax.make_jaxpr(fn)(X)) else "add"]
    assert named(lambda x: lax.optimization_barrier(x * 3.1) + 1, X) == []


def test_a_reduction_of_what_rounds_to_a_narrow_type_is_a_risk_on_a_cpu() -> None:
    narrow = X.astype(jnp.bfloat16)
    assert named(lambda x: jnp.max(jnp.abs(x) * jnp.bfloat16(3.1), -1), narrow) == ["reduce_max"]
    assert named(lambda x: jnp.max(jnp.abs(x), -1), narrow) == []


def test_generators_that_draw_for_all_rows_at_once_are_a_risk() -> None:
    def drawn(impl: str, x: Array) -> Array:
        keys = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(jnp.arange(x.shape[0]) * 0)
        return jax.vmap(lambda key: jax.random.bits(key, (3,)))(keys)

    for impl, is_risk in (("rbg", True), ("threefry2x32", False)):
        assert any("a generator" in risk.why for risk in audit.risks(functools.partial(drawn, impl), (X,))) == is_risk


def test_reductions_by_a_function_of_the_users_own_are_a_risk_for_integers() -> None:
    def folded(x: Array) -> Array:
        return lax.reduce(x.astype(jnp.int32), jnp.int32(0), lambda a, b: a * 3 + b, (1,))

    (why,) = Freedoms(jax.make_jaxpr(folded)(X), is_pinned=True).why.values()
    assert "adds in an order" in why or "reduces" in why


def test_printing_is_no_risk() -> None:
    def printed(x: Array) -> Array:
        jax.debug.print("{}", jnp.arange(3))
        return x[:, ::-1]

    assert named(printed, X) == []


def longer(x: Array) -> Array:
    return x * 2 if x.shape[0] != 4 else x * 2 + 0 * jnp.cumsum(x * 2, axis=0)


def shorter(x: Array) -> Array:
    return jnp.maximum(x[:, ::-1], x) if x.shape[0] != 4 else x[:, ::-1]


def other_wiring(x: Array) -> Array:
    y, z = x[:, ::-1], jnp.abs(x)
    return y - z if x.shape[0] != 4 else z - y


def other_literal(x: Array) -> Array:
    return x * (2.0 if x.shape[0] != 4 else 3.0)


def number_of_rows(x: Array) -> Array:
    return x / x.shape[0]


def number_of_rows_as_an_integer(x: Array) -> Array:
    return jnp.argmax(x, axis=-1) + x.shape[0]


def other_axis(x: Array) -> Array:
    return lax.rev(x.reshape(-1, 11, 3), (1,) if x.shape[0] != 4 else (2,))


def other_constant(x: Array) -> Array:
    return jnp.maximum(x, np.full((1, 33), 1 / x.shape[0], np.float32))


def other_result(x: Array) -> Array:
    y, z = x[:, ::-1], jnp.abs(x)
    w = jnp.maximum(y, z)
    return w if x.shape[0] != 4 else jnp.where(w > 0, y, y)


def other_branch(x: Array) -> Array:
    step = (lambda y: y * 2) if x.shape[0] != 4 else (lambda y: y * 3)
    return lax.fori_loop(0, 3, lambda _, y: step(y), x)


@pytest.mark.parametrize(
    "fn",
    [
        longer,
        shorter,
        other_wiring,
        other_literal,
        number_of_rows,
        number_of_rows_as_an_integer,
        other_axis,
        other_constant,
        other_result,
        other_branch,
    ],
)
def test_a_program_that_changes_with_the_batch_is_a_risk(fn: Callable[[Array], Array]) -> None:
    (risk, *_) = audit.risks(fn, (X,), batch_sizes=(1, 2, 4))
    assert risk.role is Role.MIXES
    assert "for a batch of" in risk.why or "for 4 rows" in risk.why or "for 2 rows" in risk.why


def test_sizes_that_follow_the_batch_are_no_risk() -> None:
    def sized(x: Array) -> Array:
        both = jnp.concatenate([x[:, None], jnp.broadcast_to(x[:, :1, None], (x.shape[0], 1, 33))], axis=1)
        picked = jnp.take_along_axis(x, jnp.argsort(x, axis=-1), axis=-1)
        return jnp.abs(both).max(1) + jnp.abs(picked) + jnp.zeros((x.shape[0], 1))

    assert audit.risks(sized, (X,), batch_sizes=(2, 3, 8)) == ()
