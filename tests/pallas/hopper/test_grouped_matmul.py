"""Hopper's matmul of rows sorted by expert: each row has the bits of its expert's matmul, in every layout of groups."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.options import Clamp, Epilogue
from detjax.pallas.hopper import grouped_matmul
from detjax.pallas.hopper import matmul as hopper_matmul
from tests.pallas.hopper.interpreter import interpreted, lowered
from tests.support.bits import assert_same_bits
from tests.support.products import grouped_matmul_call, matmul_call

EXPERTS, K, N = 4, 96, 72


def drawn(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def options(gated: bool, layout: str) -> dict[str, Any]:
    epilogue = Epilogue("silu", gated=True) if gated else Epilogue()
    return {"layout": layout, "epilogue": epilogue, "out_dtype": jnp.dtype("bfloat16")}


def operands(rows: int, gated: bool, layout: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    stacked = (2,) if gated else ()
    shape = (*stacked, N, K) if layout == "nk" else (*stacked, K, N)
    return drawn(rows, K), drawn(EXPERTS, *shape), drawn(EXPERTS, *stacked, N)


def by_expert(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, sizes: Any, **given: Any) -> np.ndarray:
    """The rows of all groups, each by its expert's matmul."""
    first, parts = 0, []
    for expert, size in enumerate(sizes):
        if size:
            one = None if bias is None else bias[expert]
            fn = matmul_call(hopper_matmul.forward, **given)
            parts.append(interpreted(fn, x[first : first + size], w[expert], one, None))
        first += size
    return np.concatenate(parts)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
@pytest.mark.parametrize(
    ("unit", "sizes", "gated", "layout"),
    [
        (1, (3, 0, 17, 1), True, "nk"),
        (32, (0, 64, 32, 0), False, "kn"),
        (8, (16, 0, 8, 24), True, "nk"),
        (128, (128, 0, 0, 256), False, "nk"),
        (128, (0, 0, 128, 0), True, "nk"),
    ],
)
def test_each_row_has_the_bits_of_its_experts_matmul(
    unit: int, sizes: tuple[int, ...], gated: bool, layout: str
) -> None:
    count = sum(sizes)
    rows = count + 2 * unit
    x, w, bias = operands(rows, gated, layout)
    fn = grouped_matmul_call(grouped_matmul.forward, **options(gated, layout), unit=unit)
    lowered(fn, x, w, bias, np.array(sizes, np.int32))
    actual = interpreted(fn, x, w, bias, np.array(sizes, np.int32))
    assert_same_bits(actual[:count], by_expert(x, w, bias, sizes, **options(gated, layout)))


@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
def test_clamped_rows_have_the_bits_of_their_experts_matmul_and_the_numbers_of_float64() -> None:
    sizes, clamp = (16, 0, 8, 24), Clamp(limit=4.0, slope=1.702)
    x, w, bias = operands(64, True, "nk")
    epilogue = Epilogue("silu", gated=True, clamp=clamp)
    given: dict[str, Any] = {"layout": "nk", "epilogue": epilogue, "out_dtype": jnp.dtype("bfloat16")}
    fn = grouped_matmul_call(grouped_matmul.forward, **given, unit=8)
    lowered(fn, x, w, bias, np.array(sizes, np.int32))
    actual = interpreted(fn, x, w, bias, np.array(sizes, np.int32))[:48]
    assert_same_bits(actual, by_expert(x, w, bias, sizes, **given))
    experts = np.repeat(np.arange(EXPERTS), sizes)
    wide = x[:48].astype(np.float64), w[experts].astype(np.float64)
    z = np.einsum("mk,mpnk->mpn", *wide) + bias[experts].astype(np.float64)
    gate, up = np.minimum(z[:, 0], clamp.limit), np.clip(z[:, 1], -clamp.limit, clamp.limit)
    assert (z[:, 0] > clamp.limit).any() and (np.abs(z[:, 1]) > clamp.limit).any()
    expected = (up + 1) * gate / (1 + np.exp(-clamp.slope * gate))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=2**-8, atol=1e-4)


def test_there_may_be_no_rows_at_all() -> None:
    x, w, _ = operands(16, False, "nk")
    fn = grouped_matmul_call(grouped_matmul.forward, **options(False, "nk"), unit=8)
    assert interpreted(fn, x, w, None, np.zeros(EXPERTS, np.int32)).shape == (16, N)


def test_units_fit_the_rows_of_a_group() -> None:
    units = {8: 8, 512: 8, 1024: 16, 4096: 64, 65536: 128}
    assert {rows: grouped_matmul.group_unit(rows, 128) for rows in units} == units
    with detjax.use_backend("hopper"):
        rows = jax.eval_shape(lambda ids: ops.expert_rows(ids, 128), jax.ShapeDtypeStruct((64, 8), jnp.int32))
    assert rows.token.shape == (512 + 128 * 7,)


@pytest.mark.hopper
@pytest.mark.parametrize(("tokens", "experts"), [(1, 128), (64, 128), (4096, 32)])
def test_the_device_gives_the_bits_of_each_experts_matmul(tokens: int, experts: int) -> None:
    width, inner = 2048, 768
    ids = np.sort(np.argsort(np.random.default_rng(0).random((tokens, experts)), axis=1)[:, :8], axis=1)
    x = jax.random.normal(jax.random.key(0), (tokens, width), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (experts, 2, inner, width), jnp.bfloat16) / 45

    @detjax.jit
    def mixture(x: jax.Array, w: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = ops.expert_rows(ids, experts)
        y = ops.grouped_matmul(
            rows.gather(x), w, rows.group_sizes, layout="nk", activation="silu", gated=True, unit=rows.unit
        )
        return y, rows.place

    y, place = mixture(x, w, jnp.asarray(ids, jnp.int32))
    one = detjax.jit(functools.partial(ops.matmul, layout="nk", activation="silu", gated=True))
    for expert in range(0, experts, max(1, experts // 8)):
        chosen = np.argwhere(ids == expert)
        if len(chosen):
            expected = one(x[chosen[:, 0]], w[expert])
            assert_same_bits(np.asarray(y)[np.asarray(place)[chosen[:, 0], chosen[:, 1]]], expected)
