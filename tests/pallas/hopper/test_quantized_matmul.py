"""Products of quantized activations on Hopper: numbers and bits in Pallas' interpreter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from benchmarks.studies.fp8_products.products import Case, product_cases
from detjax import ops
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight, numbers_of
from detjax.pallas.hopper import quantized_matmul
from detjax.pallas.hopper.matmul.plan import Problem, Schedule
from detjax.pallas.hopper.quantized.scaled import FORMS, ScaledPlan, scaled_plan, scaled_product
from detjax.pallas.hopper.quantized.widening import Codes
from detjax.portable.quantized_matmul import quantized_rows
from tests.pallas.hopper.interpreter import interpreted, lowered
from tests.pallas.hopper.test_decoder import kernel_counts
from tests.support.bits import assert_same_bits
from tests.support.quantized_weights import X, e4m3_weight

GATE: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True}


def on_hopper(x: np.ndarray, w: QuantizedWeight, **options: Any) -> np.ndarray:
    def product(x: Any, w: Any) -> Any:
        with detjax.use_backend("hopper"):
            if w.ndim == 3:
                return ops.matmul(x, w, bias=jnp.ones(w.shape[:-1], x.dtype), **GATE)
            return ops.matmul(x, w, layout="nk")

    return interpreted(product, jnp.asarray(x), w)


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("kind", ["group", "static of two"])
def test_products_are_the_contracts_and_rows_do_not_depend_on_each_other(kind: str) -> None:
    w, x = e4m3_weight(kind), X[:20]
    y = on_hopper(x, w)
    portable = np.asarray(ops.matmul(jnp.asarray(x), w, layout="nk"))
    assert np.abs(y - portable).max() <= 1e-6 * np.abs(portable).max()
    assert_same_bits(on_hopper(x[:1], w), y[:1])
    changed = np.concatenate([x[:10], np.full_like(x[:1], np.nan), 1e4 * x[11:]])
    assert_same_bits(on_hopper(changed, w)[:10], y[:10])


@pytest.mark.parametrize(
    ("kind", "dtype", "kernels"),
    [
        ("group", "bfloat16", {"quantized_groups": 1, "scaled_matmul": 1}),
        ("row", "bfloat16", {"scaled_matmul": 1}),
        ("row", "float32", {"scaled_matmul": 1}),
        ("static of two", "bfloat16", {"scaled_matmul": 2, "map_elements": 1}),
    ],
)
def test_a_kernel_widens_codes_and_scales_the_products(kind: str, dtype: str, kernels: dict[str, int]) -> None:
    """Outputs with two static scales take a product for each, in float32."""
    w, x = e4m3_weight(kind), jnp.asarray(X, dtype)

    def product(x: Any, w: Any) -> jax.Array:
        options: dict[str, Any] = {"epilogue": Epilogue(), "out_dtype": x.dtype}
        return quantized_matmul.forward(MatmulOperands(x, w), **options)

    with detjax.use_backend("hopper"):
        assert kernel_counts(jax.make_jaxpr(product)(x, w).jaxpr) == kernels


@pytest.mark.usefixtures("matrix_unit")
def test_a_row_of_an_expert_has_the_bits_of_its_own_product() -> None:
    w, x, sizes = e4m3_weight("group", 2, 2), X[:16], jnp.int32([8, 8])

    def product(x: Any, w: Any) -> Any:
        with detjax.use_backend("hopper"):
            return ops.grouped_matmul(x, w, sizes, bias=jnp.ones(w.shape[:-1], x.dtype), unit=8, **GATE)

    y = interpreted(product, jnp.asarray(x), w)
    for expert in (0, 1):
        rows = slice(8 * expert, 8 * expert + 8)
        assert_same_bits(y[rows], on_hopper(x[rows], jax.tree.map(lambda leaf, at=expert: leaf[at], w)))


def added_in_blocks(x: np.ndarray, w: QuantizedWeight) -> np.ndarray:
    """The contract's sums in NumPy, each fma rounded twice like `fma`'s twin."""
    group = 128 if w.format.activations == "group" else x.shape[1]
    static = None if w.input_scales is None else w.input_scales[0]
    numbers, scales = (np.asarray(a) for a in quantized_rows(jnp.asarray(x), group, static))
    weights, weight_scales = np.asarray(numbers_of(w)), np.asarray(w.scales, np.float32)
    numbers, acc = numbers.reshape(len(x), -1)[:, : w.shape[1]], np.zeros((len(x), len(weights)), np.float32)
    for block, first in enumerate(range(0, w.shape[1], 128)):
        product = np.zeros_like(acc)
        for k in range(first, min(first + 128, w.shape[1])):
            product += numbers[:, k : k + 1] * weights[:, k]
        if group == 128:
            product *= scales[:, block : block + 1] * weight_scales[:, block]
        acc = acc + product
    return acc if group == 128 else scales * (weight_scales[:, 0] * acc)


def with_scales(w: QuantizedWeight, dtype: str) -> QuantizedWeight:
    """The weight with scales of another dtype."""
    return dataclasses.replace(w, scales=w.scales.astype(dtype))


def tall(w: QuantizedWeight) -> QuantizedWeight:
    """The weight three times, one after the other."""
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 3), w)


CASES: dict[str, tuple[int, QuantizedWeight, Schedule | None, int]] = {
    # Products pass shared memory.
    "group, products": (11, e4m3_weight("group"), Schedule(8, 24, lines=2), 2),
    "group, products of full rows": (20, with_scales(e4m3_weight("group"), "bfloat16"), Schedule(24, 48, lines=2), 3),
    "group, products in float16": (3, e4m3_weight("group"), Schedule(8, 32, lines=2), 1),
    "row, products": (5, e4m3_weight("row"), Schedule(8, 32, lines=2), 1),
    # Tiles end beyond the last row and the last weight; the last block has 64 of 128 columns.
    "group": (11, e4m3_weight("group"), Schedule(8, 32, lines=2), 2),
    "group, two warpgroups": (
        20,
        tall(with_scales(e4m3_weight("group"), "bfloat16")),
        Schedule(24, 128, warpgroups=2, lines=2),
        1,
    ),
    "group, own rows, one slot": (20, tall(e4m3_weight("group")), Schedule(24, 48, warpgroups=2, lines=2), 0),
    "row, own rows": (9, tall(e4m3_weight("row")), Schedule(16, 128, warpgroups=2, lines=2), 0),
    "row": (5, e4m3_weight("row"), Schedule(8, 40, lines=2), 1),
    "static": (19, e4m3_weight("static"), None, 0),
}


@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_scaled_and_added_in_the_contracts_order(name: str) -> None:
    m, w, schedule, wideners = CASES[name]
    random = np.random.default_rng(2)
    bias, residual = random.standard_normal(w.shape[0]), random.standard_normal((m, w.shape[0]))
    bias, residual = jnp.asarray(bias, "float32"), jnp.asarray(residual, "float32")

    def product(x: Any, w: QuantizedWeight) -> Any:
        operands = MatmulOperands(x, w, bias, residual)
        dtype = "float16" if "float16" in name else "bfloat16"
        plan = scaled_plan(operands, out_dtype="float32", dtype=dtype)
        assert plan is not None
        if schedule is not None:
            sends = "products" in name
            changes: dict[str, Any] = {"sends_products": sends, "one_slot": "one slot" in name}
            plan = dataclasses.replace(plan, schedule=schedule, wideners=wideners, **changes)
        return scaled_product(operands, plan, epilogue=Epilogue())

    y = interpreted(product, jnp.asarray(X[:m]), w)
    assert_same_bits(y, added_in_blocks(X[:m], w) + np.asarray(bias) + np.asarray(residual))


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("kind", ["row", pytest.param("static of two", marks=pytest.mark.nightly)])
def test_one_kernel_has_the_bits_of_a_product_for_each_block(kind: str) -> None:
    w, x = e4m3_weight(kind, 2), jnp.asarray(X[:9])
    residual = jnp.asarray(np.random.default_rng(3).standard_normal((9, w.shape[1])), "float32")

    def products(x: Any, w: Any, residual: Any) -> list[Any]:
        operands = MatmulOperands(x, w, jnp.ones(w.shape[:-1], x.dtype), residual)
        options: dict[str, Any] = {"epilogue": Epilogue("relu", True), "out_dtype": x.dtype}
        return [quantized_matmul.forward(operands, is_composed=composed, **options) for composed in (False, True)]

    assert_same_bits(*interpreted(products, x, w, residual))


def test_products_of_the_study_lower_for_cuda() -> None:
    """Their last block is not whole."""
    cases = [case for form in FORMS for case in product_cases((17 if form == "sent" else 300,), form=form)]
    for case in cases:

        def product(operands: MatmulOperands, case: Case = case) -> Any:
            plan = scaled_plan(operands, out_dtype="bfloat16", form=case.form)
            assert plan is not None
            return scaled_product(operands, plan, epilogue=case.epilogue)

        operands = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.operands)
        assert "scaled_matmul" in lowered(product, operands), case.name


def test_shapes_that_the_kernel_does_not_take_are_composed_of_blocks() -> None:
    def plan(n: int, k: int, group: int, m: int = 8, **changes: Any) -> Any:
        described = QuantizedFormat("e4m3", k, group, "bfloat16", changes.pop("activations", "group"))
        w = QuantizedWeight(jnp.zeros((n, k), jnp.uint8), jnp.ones((n, -(-k // group))), format=described)
        x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
        return scaled_plan(MatmulOperands(x, dataclasses.replace(w, **changes)), out_dtype="bfloat16")

    assert plan(64, 256, 128) and plan(64, 256, 64) and plan(64, 256, 128, 4096)
    assert plan(64, 144, 144, activations="row")
    assert not plan(64, 256, 32) and not plan(64, 264, 128) and not plan(60, 256, 128) and not plan(64, 256, 128, 0)
    assert not plan(64, 256, 128, groups=jnp.zeros((1, 256), jnp.int32))


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({"schedule": Schedule(8, 24)}, "blocks of one stage"),
        ({"schedule": Schedule(192, 64, lines=2), "wideners": 1}, "sums and products that leave registers"),
        ({"by_rows": True, "problem": Problem(200, 64, 192)}, "K in whole blocks"),
    ],
)
def test_plans_that_cannot_be_built_are_refused(change: dict[str, Any], accepted: str) -> None:
    codes = Codes("e4m3", 128, jnp.dtype("float32"), False)
    plan = ScaledPlan(Problem(200, 64, 256), Schedule(8, 24, lines=2), codes, 2)
    assert not plan.unmet_requirements()
    with pytest.raises(ValueError, match=f"quantized_matmul: .*accepted: .*{accepted}"):
        dataclasses.replace(plan, **change).check()
