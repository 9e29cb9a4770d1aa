"""Products of e4m3 codes on Hopper, in Pallas' interpreter, which multiplies the numbers of the codes instead."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.studies.fp8_products.products import composed_of_codes, product_cases
from benchmarks.studies.quantized import products_of_codes
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight
from detjax.pallas.hopper import quantized_matmul
from detjax.pallas.hopper.matmul.plan import Schedule
from detjax.pallas.hopper.quantized import codes
from tests.pallas.hopper.interpreter import interpreted, lowered
from tests.pallas.hopper.test_quantized_matmul import added_in_blocks
from tests.support.bits import assert_same_bits


def exact_operands(m: int, n: int, k: int, kind: Any, scale_dtype: str, parts: int = 1) -> tuple[Any, QuantizedWeight]:
    """Rows and a weight whose codes are small integers, so that the products of a block are exact in any order."""
    draw = np.random.default_rng(m)
    x = draw.integers(-7, 8, (m, k)).astype(np.float32)
    x[:, ::64] = 7  # the largest of each group, for scales that are powers of two
    group, lead = 128 if kind == "group" else k, (2,) if parts == 2 else ()
    x *= np.exp2(draw.integers(-3, 4, (m, -(-k // group)))).repeat(group, axis=1)[:, :k]
    numbers = draw.integers(-4, 5, (*lead, n, k)).astype(jnp.float8_e4m3fn).view(np.uint8)
    scales = draw.uniform(0.5, 2, (*lead, n, -(-k // group))).astype(jnp.dtype(scale_dtype))
    described = QuantizedFormat("e4m3", k, group, "float32", kind)
    return x, QuantizedWeight(jnp.asarray(numbers), jnp.asarray(scales), format=described)


def product(x: Any, w: QuantizedWeight, schedule: Schedule | None, epilogue: Epilogue, *addends: Any) -> jax.Array:
    operands = MatmulOperands(x, w, *(addends or (None, None)))
    plan = codes.codes_plan(operands, out_dtype="float32")
    assert plan is not None
    plan = plan if schedule is None else dataclasses.replace(plan, schedule=schedule)
    return codes.codes_product(operands, plan, epilogue=epilogue)


CASES: dict[str, tuple[tuple[int, int, int], str, str, Schedule | None]] = {
    # Tiles end beyond the last row and the last weight, and the last block has 64 of 128 columns.
    "group": ((11, 72, 448), "group", "float32", Schedule(8, 32, lines=2)),
    "group, two warpgroups of 24 rows": ((20, 136, 640), "group", "float32", Schedule(24, 48, warpgroups=2, lines=1)),
    "group, stages of eight blocks": ((5, 72, 2048), "group", "float32", Schedule(8, 16, lines=8)),
    "group, the default plan": ((9, 72, 384), "group", "bfloat16", None),
    "row": ((20, 136, 448), "row", "float32", Schedule(16, 128, warpgroups=2, lines=2)),
}


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_scaled_and_added_in_the_contracts_order(name: str) -> None:
    (m, n, k), kind, scale_dtype, schedule = CASES[name]
    x, w = exact_operands(m, n, k, kind, scale_dtype)
    draw = np.random.default_rng(1)
    bias, residual = draw.standard_normal(n).astype(np.float32), draw.standard_normal((m, n)).astype(np.float32)

    def fn(x: Any, w: Any, bias: Any, residual: Any) -> jax.Array:
        return product(x, w, schedule, Epilogue(), bias, residual)

    y = interpreted(fn, jnp.asarray(x), w, jnp.asarray(bias), jnp.asarray(residual))
    assert_same_bits(y, added_in_blocks(x, w) + bias + residual)


@pytest.mark.usefixtures("two_multiprocessors")
def test_gate_and_up_take_the_same_codes_of_a_row() -> None:
    x, w = exact_operands(9, 72, 384, "group", "float32", parts=2)
    y = interpreted(lambda x, w: product(x, w, None, Epilogue("relu", True)), jnp.asarray(x), w)
    gate, up = (added_in_blocks(x, jax.tree.map(lambda leaf, part=part: leaf[part], w)) for part in range(2))
    assert_same_bits(y, np.maximum(gate, 0) * up)


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize(("kind", "unit"), [("group", 8), ("row", 1)])
def test_a_row_of_an_expert_has_the_bits_of_its_own_product(kind: str, unit: int) -> None:
    """Groups of a unit that no tile size divides are padded. The second expert has no rows."""
    sizes = [16, 0, 8] if unit == 8 else [11, 0, 5]
    rows = sum(sizes) + unit
    x, w = exact_operands(rows, 72, 384, kind, "float32", parts=2)
    draw = np.random.default_rng(5)
    codes_of = [w.codes, w.codes[..., ::-1], w.codes[:, ::-1]]
    scales = jnp.asarray(draw.uniform(0.5, 2, (3, *w.scales.shape)), "float32")
    weights = dataclasses.replace(w, codes=jnp.stack(codes_of), scales=scales)
    bias = jnp.asarray(draw.standard_normal((3, 2, 72)), "float32")

    def grouped(x: Any, w: Any, bias: Any) -> jax.Array:
        operands = GroupedOperands(x, w, bias, jnp.int32(sizes))
        options: dict[str, Any] = {"epilogue": Epilogue("relu", True), "out_dtype": "float32", "unit": unit}
        y = codes.grouped_codes_product(operands, **options)
        assert y is not None
        return y

    y = interpreted(grouped, jnp.asarray(x), weights, bias)
    for expert, first in ((0, 0), (2, sizes[0])):
        some = slice(first, first + sizes[expert])
        one = jax.tree.map(lambda leaf, expert=expert: leaf[expert], weights)
        gate, up = (
            added_in_blocks(x[some], jax.tree.map(lambda leaf, part=part: leaf[part], one)) for part in range(2)
        )
        gate, up = gate + np.asarray(bias[expert, 0]), up + np.asarray(bias[expert, 1])
        assert_same_bits(y[some], np.maximum(gate, 0) * up)


def test_products_that_the_kernel_does_not_take_have_no_plan() -> None:
    def plan(n: int, k: int, group: int, m: int = 8) -> Any:
        described = QuantizedFormat("e4m3", k, group, "bfloat16", "group")
        w = QuantizedWeight(jnp.zeros((n, k), jnp.uint8), jnp.ones((n, -(-k // group))), format=described)
        x: Any = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
        return codes.codes_plan(MatmulOperands(x, w, None, None), out_dtype="bfloat16")

    assert plan(64, 256, 128) and plan(64, 256, 128, 4096)
    assert not plan(64, 256, 64) and not plan(64, 264, 128) and not plan(60, 256, 128) and not plan(64, 256, 128, 0)


def test_a_plan_that_cannot_be_built_says_what_is_accepted() -> None:
    x, w = exact_operands(9, 72, 384, "group", "float32")
    with pytest.raises(ValueError, match=r"lines=4.*accepted: K in whole stages"):
        product(jnp.asarray(x), w, Schedule(16, 64, lines=4), Epilogue())
    with pytest.raises(ValueError, match=r"accepted: .*stages that divide a unit of scales"):
        product(jnp.asarray(x), w, Schedule(16, 64, lines=3), Epilogue())


def test_products_of_the_studies_lower_for_cuda() -> None:
    """Also what their bits are compared with, and as a model's products."""
    for case in product_cases((17, 300), form="codes"):
        operands = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.operands)
        options: dict[str, Any] = {"epilogue": case.epilogue, "out_dtype": jnp.bfloat16}

        def multiply(operands: MatmulOperands, options: dict[str, Any] = options) -> jax.Array:
            with products_of_codes():
                return quantized_matmul.forward(operands, **options)

        def composed(operands: MatmulOperands, options: dict[str, Any] = options) -> jax.Array:
            return composed_of_codes(operands, **options)

        assert "codes_matmul" in lowered(multiply, operands), case.name
        assert "block_sums" in lowered(composed, operands), case.name
