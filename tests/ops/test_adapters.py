"""Products with adapters: a row has the bits that its own adapter alone gives, and gradients have an order."""

import fractions
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.adapted_weight import AdaptedWeight, at_rows
from detjax.portable.adapters import fma
from tests.support.bits import assert_same_bits, same_bits

K, N = 72, 40


def drawn(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def adapters(*ranks: int, padded: int = 64, outputs: int = N, lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Factors of adapters of several ranks, and their scales."""
    a = np.zeros((*lead, len(ranks), padded, K), np.float32)
    b = np.zeros((*lead, len(ranks), outputs, padded), np.float32)
    for slot, rank in enumerate(ranks):
        a[..., slot, :rank, :] = drawn(*lead, rank, K, seed=rank)
        b[..., slot, :, :rank] = drawn(*lead, outputs, rank, seed=rank)
    scales = np.array([2 / rank + 0.1 for rank in ranks], np.float32)
    return jnp.asarray(a), jnp.asarray(b), jnp.asarray(np.broadcast_to(scales[:, None], b.shape[:-1]))


@detjax.jit
def plain(x: Any, w: Any, bias: Any) -> jax.Array:
    return ops.matmul(x, w, layout="nk", bias=bias)


def test_rows_with_adapters_of_many_ranks_have_the_bits_that_they_have_alone() -> None:
    x, w, bias = drawn(37, K), drawn(N, K), drawn(N)
    rows = jnp.asarray(np.random.default_rng(1).integers(-1, 3, 37), jnp.int32)
    mixed = plain(x, AdaptedWeight(w, *adapters(3, 8, 64), rows=rows), bias)
    # Alone, in another pool, in another slot, with as many ranks as its own.
    for adapter, rank in enumerate((3, 8, 64)):
        factors = adapters(rank, padded=-(-rank // 16) * 16)
        one = plain(x, AdaptedWeight(w, *factors), bias)
        assert_same_bits(mixed[rows == adapter], one[rows == adapter])
        other = [jnp.concatenate([jnp.full_like(y, jnp.nan), y]) for y in factors]
        among_nan = plain(x[rows == adapter][:1], AdaptedWeight(w, *other, rows=jnp.ones(1, jnp.int32)), bias)
        assert_same_bits(among_nan, mixed[rows == adapter][:1])
    assert_same_bits(mixed[rows == -1], plain(x, w, bias)[rows == -1])
    assert not same_bits(mixed[rows == 0], plain(x, w, bias)[rows == 0])


def test_a_row_without_an_adapter_keeps_a_sum_of_minus_zero() -> None:
    x, w = jnp.zeros((2, 1)), -jnp.ones((N, 1))
    base = np.asarray(plain(x, w, None))
    assert (np.signbit(base) & (base == 0)).all()
    a, *rest = adapters(8)
    assert_same_bits(plain(x, AdaptedWeight(w, a[..., :1], *rest, rows=jnp.asarray([-1, 0])), None)[0], base[0])


def test_the_sum_is_the_base_sum_and_the_scaled_product_with_one_rounding() -> None:
    x, w = drawn(5, K), drawn(N, K)
    a, b, scales = adapters(8, padded=16)
    scales = scales * 0 + np.float32(1 / 3)
    base = np.asarray(plain(x, w, None))
    zero_scale = AdaptedWeight(jnp.zeros_like(w), a, b, jnp.ones_like(scales))
    products = np.asarray(plain(x, zero_scale, None), np.float64)
    expected = (products * np.float64(scales[0, 0]) + base).astype(np.float32)
    assert_same_bits(plain(x, AdaptedWeight(w, a, b, scales), None), expected)
    merged = plain(x, w + scales[0, 0] * (b[0] @ a[0]), None)
    assert not same_bits(merged, expected)
    np.testing.assert_allclose(merged, expected, atol=2e-4)


def test_a_gate_and_a_residual_follow_the_adapters_sums() -> None:
    x, w, residual = drawn(20, K), drawn(2, N, K), drawn(20, N)
    a, b, scales = adapters(8, 3, outputs=2 * N)
    weight = AdaptedWeight(w, a, b.reshape(2, 2, N, -1), scales.reshape(2, 2, N), jnp.asarray([0, -1, 1, 1] * 5))

    @detjax.jit
    def gated(x: Any, w: Any, residual: Any) -> jax.Array:
        return ops.matmul(x, w, layout="nk", activation="silu", gated=True, residual=residual)

    y, base = gated(x, weight, residual), gated(x, w, residual)
    assert_same_bits(y[1::4], base[1::4])
    dense = w + scales[1, 0] * jnp.einsum("pnr,rk->pnk", b.reshape(2, 2, N, -1)[1], a[1])
    np.testing.assert_allclose(y[2::4], gated(x, dense, residual)[2::4], atol=2e-4)


def test_rows_of_experts_have_their_tokens_adapters() -> None:
    experts, tokens = 4, 24
    w, (a, b, scales) = drawn(experts, N, K), adapters(3, 8, lead=(experts,))
    ids = jnp.asarray(np.random.default_rng(2).permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :2])
    slots = jnp.asarray(np.arange(tokens) % 3 - 1, jnp.int32)
    x = drawn(tokens, K)

    @detjax.jit
    def expert_products(x: Any, ids: Any, weight: Any) -> jax.Array:
        rows = ops.expert_rows(ids.astype(jnp.int32), experts)
        y = ops.grouped_matmul(rows.gather(x), at_rows(weight, rows.token), rows.group_sizes, layout="nk")
        return rows.results(y)

    mixed = expert_products(x, ids, AdaptedWeight(w, a, b, scales, slots))
    for token in (0, 1, 2, 23):
        for place in range(2):
            expert, slot = int(ids[token, place]), int(slots[token])
            row, weight = x[token : token + 1], w[expert]
            if slot >= 0:
                weight = AdaptedWeight(weight, *(y[expert, slot][None] for y in (a, b, scales)))
            assert_same_bits(mixed[token, place], plain(row, weight, None)[0])


def test_gradients_of_the_factors_are_close_to_those_of_a_merged_weight_and_the_weight_has_none() -> None:
    x, w, dy = drawn(33, K), drawn(2, N, K), drawn(33, N)
    a, b, scales = adapters(8, padded=16, outputs=2 * N)
    b, scales = b.reshape(1, 2, N, -1), scales.reshape(1, 2, N)
    options: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True}

    @detjax.jit
    def by_contract(x: Any, a: Any, b: Any) -> Any:
        def loss(x: Any, a: Any, b: Any) -> jax.Array:
            return jnp.vdot(ops.matmul(x, AdaptedWeight(w, a, b, scales), **options), dy)

        return jax.grad(loss, (0, 1, 2))(x, a, b)

    def merged(x: Any, a: Any, b: Any) -> jax.Array:
        z = jnp.einsum("mk,pnk->pmn", x, w + scales[0, 0, 0] * jnp.einsum("pnr,rk->pnk", b[0], a[0]))
        return jnp.vdot(jax.nn.silu(z[0]) * z[1], dy)

    for actual, expected in zip(by_contract(x, a, b), jax.grad(merged, (0, 1, 2))(x, a, b), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4 * float(jnp.abs(expected).max()))
    with pytest.raises(NotImplementedError, match="one adapter for all rows"):
        jax.grad(
            lambda x: ops.matmul(
                x, AdaptedWeight(w[0], a, b[:, 0], scales[:, 0], jnp.zeros(33, int)), layout="nk"
            ).sum()
        )(x)


def test_sums_of_gradients_continue_over_microbatches_with_the_same_bits() -> None:
    x, w = drawn(64, K), drawn(N, K)
    a, b, scales = adapters(8, padded=16)

    @detjax.jit
    def sums_after(x: Any, sums: Any) -> Any:
        def loss(sums: Any) -> jax.Array:
            factors = ops.AccumulatedWeight(a, sums[0]), ops.AccumulatedWeight(b, sums[1])
            return ops.matmul(x, AdaptedWeight(w, *factors, scales), layout="nk").sum()

        return jax.grad(loss)(sums)

    start = jnp.zeros_like(a), jnp.zeros_like(b)
    assert_same_bits(sums_after(x, start), sums_after(x[32:], sums_after(x[:32], start)))
    assert not same_bits(sums_after(x[::-1], start), sums_after(x, start))


def test_the_fused_multiply_add_rounds_once() -> None:
    rng, count = np.random.default_rng(3), 400
    x, y = ((rng.standard_normal(count) * np.exp2(rng.integers(-8, 8, count))).astype(np.float32) for _ in range(2))
    near = -(x * y) * (1 + rng.integers(-3, 3, count) * np.float32(2.0**-23))
    z = np.where(rng.random(count) < 0.5, near, rng.standard_normal(count) * 1e-3).astype(np.float32)
    for actual, *terms in zip(np.asarray(detjax.jit(fma)(x, y, z)), x, y, z, strict=True):
        exact = [fractions.Fraction(float(term)) for term in terms]
        error = abs(exact[0] * exact[1] + exact[2] - fractions.Fraction(float(actual)))
        neighbours = [np.nextafter(actual, np.float32(end), dtype=np.float32) for end in (-np.inf, np.inf)]
        assert all(error <= abs(exact[0] * exact[1] + exact[2] - fractions.Fraction(float(n))) for n in neighbours)


def test_factors_that_do_not_fit_and_other_backends_are_refused() -> None:
    x, w, (a, b, scales) = drawn(4, K), drawn(N, K), adapters(8, 8)
    for weight in (
        AdaptedWeight(w, a[:, :, 1:], b, scales, jnp.zeros(4, int)),
        AdaptedWeight(w, a[:, :8], b[..., :8], scales, jnp.zeros(4, int)),
        AdaptedWeight(w, a, b, scales),
        AdaptedWeight(w, a, b, scales, jnp.zeros(5, int)),
    ):
        with pytest.raises(ValueError, match="accepted"):
            ops.matmul(x, weight, layout="nk")
    with detjax.use_backend("stock"), pytest.raises(NotImplementedError, match="under contract"):
        ops.matmul(x, AdaptedWeight(w, a[:1], b[:1], scales[:1]), layout="nk")
