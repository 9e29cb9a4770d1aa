"""Proofs of certificates hold: signs of zeros, NaN, complex numbers, products in calls, programs of batches."""

import functools
import itertools
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
from detjax.audit.certification import signs
from detjax.audit.certification.certify import reading
from detjax.audit.certification.freedoms import Exclusion, Freedoms
from detjax.invariant import equations

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


def other_direction(x: Array) -> Array:
    return lax.cummax(jnp.abs(x), axis=1, reverse=x.shape[0] == 4)


def other_recall(x: Array) -> Array:
    return lax.approx_max_k(x, 3, recall_target=0.9 if x.shape[0] != 4 else 0.95)[0]


def other_stability(x: Array) -> Array:
    return lax.sort(x.astype(jnp.int32), dimension=1, is_stable=x.shape[0] == 4)


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
        other_direction,
        other_recall,
        other_stability,
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


# --- each rule, with and without its condition ------------------------------------------------------------------------

PRODUCT = 3.1


def free(fn: Callable[[Array], Array], x: Array = X, *, is_pinned: bool = True) -> set[str]:
    """The primitives whose bits the compiler may choose."""
    jaxpr = jax.make_jaxpr(fn)(x)
    known = {id(eqn): eqn.primitive.name for eqn in equations.all_equations(jaxpr)}
    return {known[path[-1]] for path in Freedoms(jaxpr, is_pinned=is_pinned).why}


FUSES: dict[str, Callable[[Array], Array]] = {
    "plainly": lambda x: x * PRODUCT + 1,
    "before": lambda x: 1 + x * PRODUCT,
    "subtracted": lambda x: 1 - x * PRODUCT,
    "a square": lambda x: jnp.square(x) + 1,
    "a power": lambda x: x**3 + 1,
    "a gradient's sum": jax.grad(lambda x: jnp.sum(x[:, 1:] * x[:, :-1])),
    "reshaped": lambda x: (x * PRODUCT).reshape(2, 3, 11) + 1,
    "squeezed": lambda x: lax.squeeze(x[:, :1] * PRODUCT, (1,)) + 1,
    "broadcast": lambda x: jnp.broadcast_to((x * PRODUCT)[:, None], (2, 3, 33)) + 1,
    "transposed": lambda x: (x[:, :, None] * PRODUCT).transpose(0, 2, 1) + 1,
    "sliced": lambda x: (x * PRODUCT)[:, 1:] + 1,
    "reversed": lambda x: lax.rev(x * PRODUCT, (1,)) + 1,
    "joined": lambda x: jnp.concatenate([x * PRODUCT, x], 1) + 1,
    "padded": lambda x: lax.pad(x * PRODUCT, np.float32(0), ((0, 0, 0), (0, 1, 0))) + 1,
    "split": lambda x: lax.split(x * PRODUCT, (3, 30), 1)[1] + 1,
    "stacked": lambda x: jnp.stack([x * PRODUCT, x], 1) + 1,
    "tiled": lambda x: lax.tile(x * PRODUCT, (1, 2)) + 1,
    "selected": lambda x: jnp.where(x > 0, x * PRODUCT, x) + 1,
    "negated": lambda x: -(x * PRODUCT) + 1,
    "without a gradient": lambda x: lax.stop_gradient(x * PRODUCT) + 1,
    "as parts of a complex number": lambda x: lax.real(lax.complex(x * PRODUCT, x)) + 1,
}
ROUNDED_BETWEEN: dict[str, Callable[[Array], Array]] = {
    "a sum": lambda x: (x * PRODUCT).astype(jnp.int32) + 1,
    "a maximum": lambda x: jnp.maximum(x * PRODUCT, -1) + 1,
    "a minimum": lambda x: jnp.minimum(x * PRODUCT, 1) + 1,
    "a root": lambda x: jnp.sqrt(jnp.abs(x)) + 1,
    "a whole number": lambda x: jnp.floor(x * PRODUCT) + jnp.ceil(x * PRODUCT) + jnp.sign(x * PRODUCT),
    "a narrow number": lambda x: (x * PRODUCT).astype(jnp.bfloat16).astype(jnp.float32) + 1,
    "a sum of a sum": lambda x: (x + 1) + 1,
    "a quotient on a CPU": lambda x: x / x[:, ::-1] + 1,
    "a sort": lambda x: lax.sort(x * PRODUCT, dimension=1) + 1,
}


@pytest.mark.parametrize("name", FUSES)
def test_a_product_may_fuse_with_a_sum_through_what_moves_it(name: str) -> None:
    assert free(FUSES[name]) & {"add", "sub", "add_any"}


@pytest.mark.parametrize("name", ROUNDED_BETWEEN)
def test_a_product_does_not_fuse_through_what_rounds_or_orders_it(name: str) -> None:
    assert free(ROUNDED_BETWEEN[name]) == set()


FREE: dict[str, tuple[Callable[[Array], Array], str, set[str]]] = {
    # A function, the primitive that is a risk, and the platforms on which it is one.
    "approximated": (jnp.exp, "exp", {"cpu"}),
    "by a broadcast number": (lambda x: x / jnp.abs(x).sum(1, keepdims=True), "div", {"cpu"}),
    "by a broadcast number, moved": (
        lambda x: x.reshape(2, 3, 11) / jnp.broadcast_to(x[:, :1], (2, 33)).reshape(2, 3, 11),
        "div",
        {"cpu"},
    ),
    "by numbers of its own": (lambda x: x / x[:, ::-1], "div", set()),
    "a quotient before a sum": (lambda x: x / x[:, ::-1] + 1, "add", {"gpu"}),
    "a quotient by a broadcast number before a sum": (
        lambda x: x / jnp.broadcast_to(x[:, :1], (2, 33)) + 1,
        "add",
        {"cpu", "gpu"},
    ),
    "sorted in no order": (lambda x: lax.sort(x, dimension=1, is_stable=False), "sort", {"cpu", "gpu"}),
    "sorted": (lambda x: lax.sort(x, dimension=1), "sort", set()),
    "sorted integers in no order": (
        lambda x: lax.sort(x.astype(jnp.int32), dimension=1, is_stable=False),
        "sort",
        set(),
    ),
    "likeliest of zeros": (lambda x: lax.top_k(zeros(x), 2)[0], "top_k", {"gpu"}),
    "likeliest of magnitudes": (lambda x: lax.top_k(jnp.abs(x), 2)[0], "top_k", set()),
    "a maximum of narrow numbers": (
        lambda x: jnp.max(jnp.abs(x.astype(jnp.bfloat16)), -1),
        "reduce_max",
        {"cpu"},
    ),
    "scattered": (lambda x: jnp.zeros((2, 9)).at[:, jnp.asarray([1, 1])].set(x[:, :2]), "scatter", {"cpu", "gpu"}),
    "integers scattered": (
        lambda x: jnp.zeros((2, 9), jnp.int32).at[:, jnp.asarray([1, 1])].set(x[:, :2].astype(jnp.int32)),
        "scatter",
        {"gpu"},
    ),
    "scattered at places of their own": (
        lambda x: jnp.zeros((2, 9)).at[:, jnp.asarray([1, 2])].set(x[:, :2], unique_indices=True),
        "scatter",
        set(),
    ),
    "scattered integers": (
        lambda x: jnp.zeros((2, 9), jnp.int32).at[:, jnp.asarray([1, 1])].add(x[:, :2].astype(jnp.int32)),
        "scatter-add",
        set(),
    ),
    "in the test of a loop": (
        lambda x: x + lax.while_loop(lambda k: jnp.exp(k) < 9, lambda k: k + 1, jnp.float32(0)),
        "exp",
        {"cpu"},
    ),
    "in the body of a scan": (lambda x: lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=2)[0], "tanh", {"cpu"}),
    "in a branch": (lambda x: lax.cond(jnp.arange(2).sum() > 0, jnp.abs, jnp.tanh, x), "tanh", {"cpu"}),
}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", FREE)
def test_a_choice_is_a_risk_where_the_compiler_has_it(
    name: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, primitive, platforms = FREE[name]
    monkeypatch.setattr("detjax.runtime.backends.target", lambda: platform)
    assert primitive in {eqn.primitive.name for eqn in equations.all_equations(jax.make_jaxpr(fn)(X))}
    assert (primitive in free(fn)) == (platform in platforms)


def test_narrow_numbers_may_keep_precision_only_where_they_are_rounded_and_options_are_not_pinned() -> None:
    narrow = X.astype(jnp.bfloat16)
    for fn, primitives in (
        (lambda x: x + x[:, ::-1], {"add"}),
        (lambda x: jnp.sqrt(x), {"sqrt"}),
        (lambda x: x[:, ::-1], set()),
        (lambda x: jnp.maximum(x, 0), set()),
    ):
        for is_pinned in (False, True):
            assert free(fn, narrow, is_pinned=is_pinned) == (set() if is_pinned else primitives)
    assert free(lambda x: x + x[:, ::-1], is_pinned=False) == set()


LARGEST_THEN: dict[str, tuple[Callable[[Array], Array], bool]] = {
    # What is done with a largest number, and whether the sign of zero shows in it.
    "an even power": (lambda m: m**2, False),
    "an odd power": (lambda m: m**3, True),
    "an inverse power": (lambda m: m**-2, False),
    "an inverse odd power": (lambda m: m**-1, True),
    "an integer": (lambda m: m.astype(jnp.int32), False),
    "a narrow number": (lambda m: m.astype(jnp.bfloat16), True),
    "its bits": (lambda m: lax.bitcast_convert_type(m, jnp.int32), True),
    "a power of numbers": (lambda m: jnp.power(m, m), True),
    "an angle": (lambda m: jnp.arctan2(m, -jnp.ones_like(m)), True),
    "a quotient": (lambda m: m / 3, True),
    "the remainder by it": (lambda m: lax.rem(jnp.ones_like(m), m), True),
    "a sum with -0.0": (lambda m: m + jnp.float32(-0.0), True),
    "a sum with what may be -0.0": (lambda m: m + m, True),
    "a comparison": (lambda m: m >= 0, False),
    "a cosine": (lambda m: jnp.cos(m), False),
    "a sine": (lambda m: jnp.sin(m), True),
    "a product of it": (lambda m: ops.matmul(m[None], jnp.ones((2, 3))), False),
    "a product with it as the weight": (lambda m: ops.matmul(jnp.ones((3, 2)), m[:, None]), True),
}


@pytest.mark.parametrize("name", LARGEST_THEN)
def test_the_sign_of_a_largest_zero_shows_in_what_keeps_it(name: str) -> None:
    then, shows = LARGEST_THEN[name]
    assert ("reduce_max" in free(lambda x: then(jnp.max(x, -1)))) == shows


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "max", "min"])
def test_kinds_of_results_contain_what_numbers_give(name: str) -> None:
    """Every pair of kinds, by NumPy's arithmetic on numbers of these kinds."""
    numbers = [-np.inf, -3e38, -1.5, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.5, 3e38, np.inf, np.nan]
    operation = {"max": np.maximum, "min": np.minimum, "add": np.add, "sub": np.subtract, "mul": np.multiply}.get(
        name, np.divide
    )
    for x, y in itertools.product(map(np.float32, numbers), repeat=2):
        with np.errstate(all="ignore"):
            made = signs.value_signs(operation(x, y))
        given = signs.pairs(signs._BINARY[name], signs.value_signs(x), signs.value_signs(y))
        # Zeros of both signs compare as equal, and NumPy returns either of them.
        ignored = signs.ZEROS if name in ("max", "min") and x == y == 0 else signs.NONE
        assert made & ~ignored & ~given == signs.NONE, (x, y, made, given)


@pytest.mark.parametrize(
    "name", ["neg", "abs", "square", "sqrt", "log", "sign", "floor", "ceil", "round", "exp", "tanh"]
)
def test_kinds_of_a_function_contain_what_numbers_give(name: str) -> None:
    functions = {"neg": np.negative, "round": np.rint}
    for x in map(np.float32, [-np.inf, -1.5, -1.0, -0.3, -1e-45, -0.0, 0.0, 1e-45, 0.3, 1.0, 1.5, np.inf, np.nan]):
        with np.errstate(all="ignore"):
            made = signs.value_signs(np.float32(functions.get(name, getattr(np, name, None))(x)))
        assert made & ~signs._UNARY[name](signs.value_signs(x)) == signs.NONE, x


def test_kinds_of_values_are_read_up_to_subnormal_numbers() -> None:
    tiny = float(jnp.finfo(jnp.float32).tiny)
    cases = (
        (tiny, signs.Signs.POSITIVE),
        (tiny / 2, signs.Signs.POSITIVE | signs.Signs.SUBNORMAL),
        (-tiny / 2, signs.Signs.NEGATIVE | signs.Signs.SUBNORMAL),
        (0.0, signs.Signs.PLUS_ZERO),
        (-0.0, signs.Signs.MINUS_ZERO),
        (-np.inf, signs.Signs.NEGATIVE),
        (np.nan, signs.Signs.NAN),
    )
    for value, kinds in cases:
        assert signs.value_signs(np.float32(value)) == kinds
    assert signs.value_signs(np.float32([1, -0.0])) == signs.Signs.POSITIVE | signs.Signs.MINUS_ZERO
    assert signs.value_signs(np.int32(-3)) == signs.NOT_NEGATIVE | signs.Signs.NEGATIVE
    assert signs.value_signs(np.uint8(3)) == signs.NOT_NEGATIVE
    assert signs.value_signs(np.zeros(2**20 + 1, np.float32)) == signs.ANY
    assert signs.value_signs(np.zeros(2**20, np.float32)) == signs.Signs.PLUS_ZERO


def test_subnormal_numbers_of_one_sign_count_as_zeros_of_that_sign() -> None:
    tiny, positive, negative = signs.Signs.SUBNORMAL, signs.Signs.POSITIVE, signs.Signs.NEGATIVE
    plus, minus = signs.Signs.PLUS_ZERO, signs.Signs.MINUS_ZERO
    both = [plus | minus, tiny | positive | negative, tiny | positive | minus, tiny | negative | plus]
    one = [
        plus,
        minus,
        positive | negative,
        positive | minus,
        tiny | positive | plus,
        tiny | negative | minus,
        signs.NONE,
    ]
    assert [signs.has_zeros_of_both_signs(kinds) for kinds in (*both, *one)] == [True] * 4 + [False] * 7
