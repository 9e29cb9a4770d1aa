"""Products of plain rows with packed weights on Hopper have the bits of products with the widened weights."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import E2M1, QuantizedFormat, QuantizedWeight, widened
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Problem, Schedule
from detjax.pallas.hopper.quantized import widening
from detjax.pallas.hopper.quantized.packed import codes_of, packed_plan, packed_product
from detjax.pallas.hopper.quantized.packed.plan import PackedPlan
from detjax.pallas.hopper.quantized.packed.tuning import candidates, default_plan
from detjax.pallas.hopper.quantized.widening import Codes
from tests.pallas.hopper import compiler, quantized_compiler
from tests.pallas.hopper.interpreter import interpreted, normal
from tests.support.bits import assert_same_bits


def packed_weight(
    n: int,
    k: int,
    numbers: Any,
    group: int,
    scales: str,
    *stack: int,
    zeros: bool = False,
    dtype: str = "bfloat16",
) -> QuantizedWeight:
    """A random weight; the codes of its second group are zeros."""
    random = np.random.default_rng([n, k, group])
    codes = random.integers(0, 256, (*stack, n, k // 2), dtype=np.uint8)
    if numbers == "e4m3":
        codes = random.standard_normal((*stack, n, k)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    width = group if numbers == "e4m3" else group // 2
    codes[..., width : 2 * width] = 0
    factors = random.uniform(0.1, 2, (*stack, n, -(-k // group))).astype(jnp.dtype(scales))
    points = random.integers(0, 17, factors.shape, dtype=np.uint8) if zeros else None
    weight = QuantizedWeight(codes, factors, points, format=QuantizedFormat(numbers, k, group, dtype))
    return jax.tree.map(jnp.asarray, weight)


def products(
    x: Any,
    w: QuantizedWeight,
    schedule: Schedule,
    *,
    takes_turns: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The product with the codes, and the plain product with the widened weight."""
    codes, x = codes_of(w), jnp.asarray(x)
    assert codes is not None
    *stack, n, k = w.shape
    problem = Problem(len(x), n, k, 2 if stack else 1, x.dtype, jnp.dtype("float32")).addressable
    plan = PackedPlan(problem, schedule, codes, takes_turns)

    def both(x: Any, w: QuantizedWeight) -> Any:
        epilogue = Epilogue("silu", True) if stack else Epilogue()
        options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": "float32"}
        packed = packed_product(MatmulOperands(x, w), plan, **options)
        return packed, product(Operands(x, widened(w)), layout="nk", schedule=Schedule(8, 16), **options)

    return interpreted(both, x, w)


CASES: dict[str, tuple[int, QuantizedWeight, Schedule]] = {
    # Rows that end within a tile, K that ends within a stage, groups that are shorter or longer than a stage. Rows are
    # in both places of a warp, or spread over one; gate and up are in one operand or two.
    "int4 of spread rows, K within a stage": (
        3,
        packed_weight(40, 320, "int4", 64, "bfloat16"),
        Schedule(8, 24, lines=2),
    ),
    "int4 of zeros": (9, packed_weight(56, 256, "int4", 128, "float16", zeros=True), Schedule(16, 40, lines=4)),
    "e2m1 for two warpgroups": (
        17,
        packed_weight(136, 192, "e2m1", 16, "float32", dtype="float16"),
        Schedule(24, 128, warpgroups=2),
    ),
    "e4m3 of spread rows": (2, packed_weight(16, 256, "e4m3", 128, "float32"), Schedule(8, 16, lines=2)),
    "int4 of whole rows": (9, packed_weight(136, 192, "int4", 64, "bfloat16"), Schedule(16, 128, warpgroups=2)),
    "int4 of spread rows": (
        3,
        packed_weight(72, 512, "int4", 64, "float16", zeros=True),
        Schedule(8, 72, warpgroups=3, lines=4),
    ),
    "e2m1 of gate and up, spread": (
        17,
        packed_weight(40, 192, "e2m1", 16, "float32", 2, dtype="float16"),
        Schedule(16, 32, lines=2),
    ),
    "e4m3 of gate and up": (2, packed_weight(56, 256, "e4m3", 128, "float32", 2), Schedule(8, 40, lines=2)),
}

FEW_CASES = "int4 of zeros", "e2m1 for two warpgroups", "int4 of spread rows", "e2m1 of gate and up, spread"


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW_CASES else pytest.mark.nightly) for name in CASES]
)
def test_codes_give_the_bits_of_widened_weights(name: str) -> None:
    m, w, schedule = CASES[name]
    x = normal(m, w.shape[-1], dtype=w.format.dtype)
    assert_same_bits(*products(x, w, schedule))


TURNS: dict[str, tuple[int, QuantizedWeight, Schedule]] = {
    # Three tiles for two CTAs, the last one not whole.
    "two warpgroups": (3, packed_weight(56, 256, "int4", 64, "bfloat16"), Schedule(8, 24, warpgroups=2)),
    "three warpgroups of gate and up": (
        3,
        packed_weight(24, 384, "int4", 64, "float16", 2, zeros=True),
        Schedule(8, 24, warpgroups=3),
    ),
    "full rows": (2, packed_weight(40, 512, "e2m1", 32, "float32"), Schedule(8, 40, warpgroups=2, lines=2)),
}


@pytest.mark.usefixtures("matrix_unit", "two_multiprocessors")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if "full" in name else ()) for name in TURNS]
)
def test_warpgroups_that_take_turns_add_in_the_same_order(name: str) -> None:
    m, w, schedule = TURNS[name]
    x = normal(m, w.shape[-1], dtype=w.format.dtype)
    assert_same_bits(*products(x, w, schedule, takes_turns=True))


def test_warpgroups_take_turns_where_a_gpu_has_measured_them() -> None:
    """For few tokens of a weight whose rows fill one wave of CTAs; gate and up have rows for several warpgroups."""
    codes = Codes("int4", 128, jnp.dtype("bfloat16"), False)
    for n, k, parts in ((6144, 4096, 1), (4096, 4096, 1), (12288, 4096, 2), (4096, 12288, 1), (151936, 4096, 1)):
        for m in (1, 16, 17, 64):
            plans = candidates(Problem(m, n, k, parts), codes)
            turns = [plan for plan in plans if plan.takes_turns]
            assert any(turns) == (m <= 16 and n <= 6144), (m, n)
            # One wave, on nearly all of the chip.
            assert all(120 <= plan.clusters == math.prod(plan.grid) for plan in turns)
            chosen = default_plan(Problem(m, n, k, parts), codes)
            assert chosen is not None
            assert chosen.takes_turns == any(turns), (m, n)


@pytest.mark.usefixtures("matrix_unit")
def test_operations_multiply_codes_and_rows_do_not_depend_on_each_other() -> None:
    w, x = packed_weight(24, 128, "int4", 64, "bfloat16", 2), jnp.asarray(normal(9, 128, dtype="bfloat16"))
    bias = jnp.asarray(normal(2, 24, dtype="bfloat16"))
    residual = jnp.asarray(normal(9, 24, dtype="bfloat16"))
    options: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True}

    def multiply(x: Any, w: Any, residual: Any) -> Any:
        with detjax.use_backend("hopper"):
            return ops.matmul(x, w, bias=bias, residual=residual, **options)

    assert packed_plan(MatmulOperands(x, w, bias, residual), out_dtype=x.dtype) is not None
    y = interpreted(multiply, x, w, residual)
    assert_same_bits(y, interpreted(multiply, x, widened(w), residual))
    changed = x.at[0].set(jnp.nan).at[5:].multiply(100)
    assert_same_bits(interpreted(multiply, changed, w, residual)[1:5], y[1:5])


@pytest.mark.parametrize(
    ("backend", "activation"), [("hopper", "silu"), pytest.param("portable", None, marks=pytest.mark.nightly)]
)
def test_gradients_are_the_gradients_with_widened_weights(backend: Any, activation: Any) -> None:
    """Also if the backward pass is traced for another backend than the forward pass."""
    w, x = packed_weight(24, 128, "int4", 64, "bfloat16"), jnp.asarray(normal(9, 128, dtype="bfloat16"))
    bias = jnp.asarray(normal(24, dtype="bfloat16"))

    def gradients(x: Any, bias: Any, w: Any) -> Any:
        def multiply(x: Any, bias: Any) -> Any:
            return ops.matmul(x, w, bias=bias, layout="nk", activation=activation)

        with detjax.use_backend("hopper"):
            y, backward = jax.vjp(multiply, x, bias)
        with detjax.use_backend(backend):
            return backward(jnp.ones_like(y))

    def both(x: Any, bias: Any, w: Any) -> Any:
        return gradients(x, bias, w), gradients(x, bias, widened(w))

    for packed, dense in zip(*interpreted(both, x, bias, w), strict=True):
        assert_same_bits(packed, dense)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bits_of_a_byte_become_its_two_numbers(dtype: str) -> None:
    """The instructions that the interpreter's twin replaces, in NumPy."""
    constants = {"bfloat16": widening._BF16, "float16": widening._F16}[dtype]
    byte = np.arange(256, dtype=np.uint32)

    def numbers(bits: Any) -> np.ndarray:
        return np.asarray(bits, np.uint32).view(jnp.dtype(dtype)).astype(np.float64).reshape(-1, 2)

    nibbles = np.stack([byte & 15, byte >> 4], axis=1).astype(np.float64)
    powered = byte & 15 | (byte >> 4) << 16 | np.uint32(constants.power)
    for zero in range(17):
        negative = np.uint32(constants.power | 0x80008000 | zero * 0x00010001)
        np.testing.assert_array_equal(numbers(powered) + numbers([negative]), nibbles - zero)
    magnitudes = byte * np.uint32(constants.e2m1_shifts) & np.uint32(constants.e2m1_mask)
    signs = byte * np.uint32(0x01001000) & np.uint32(0x80008000)
    expected = E2M1[nibbles.astype(int)]
    actual = numbers(magnitudes | signs) * numbers([constants.e2m1_power])
    assert_same_bits(actual.astype(np.float32), expected)


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({"schedule": Schedule(8, 24, "tokens")}, "weights on the rows"),
        ({"schedule": Schedule(8, 24, cluster_n=2)}, "clusters of one CTA"),
        ({"schedule": Schedule(8, 72)}, "64 rows or fewer for each warpgroup"),
        ({"takes_turns": True}, "to take turns"),
        ({"schedule": Schedule(8, 24, lines=3)}, "1, 2 or 4 lines"),
        ({"codes": Codes("int4", 96, jnp.dtype("float32"), False)}, "groups and stages that divide each other"),
    ],
)
def test_plans_that_cannot_be_built_are_refused(change: dict[str, Any], accepted: str) -> None:
    plan = PackedPlan(Problem(8, 64, 256), Schedule(8, 24), Codes("int4", 64, jnp.dtype("bfloat16"), False))
    assert not plan.unmet_requirements()
    with pytest.raises(ValueError, match=f"quantized_matmul: .*accepted: .*{accepted}"):
        dataclasses.replace(plan, **change).check()


@pytest.mark.parametrize(("lines", "gated", "in_flight"), [(1, False, 0), (1, True, 1), (2, False, 1), (4, False, 1)])
def test_registers_are_not_written_while_the_matrix_unit_reads_them(lines: int, gated: bool, in_flight: int) -> None:
    """A stage of one operand writes the registers of the last stage's."""
    problem = Problem(8, 64, 256, 2 if gated else 1)
    plan = PackedPlan(problem, Schedule(8, 64, lines=lines), Codes("int4", 64, jnp.dtype("bfloat16"), False))
    assert not plan.unmet_requirements()
    assert plan.operands_in_flight == in_flight


def test_weights_that_the_kernel_does_not_read_are_widened_ahead() -> None:
    x, w = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), packed_weight(64, 256, "int4", 64, "bfloat16")

    def is_packed(x: Any, w: QuantizedWeight) -> bool:
        return packed_plan(MatmulOperands(x, w), out_dtype="bfloat16") is not None

    assert is_packed(x, w)
    assert not is_packed(jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16), w)
    assert not is_packed(x, dataclasses.replace(w, groups=jnp.zeros((1, 256), jnp.int32)))
    assert not is_packed(x, dataclasses.replace(w, tables=jnp.ones((1, 256)), scales=w.scales.astype(jnp.uint8)))


def test_kernels_compile_for_an_h200_and_nothing_spills() -> None:
    reports = compiler.compiled(Path(quantized_compiler.__file__), dump="MOSAIC_GPU_DUMP_PTXAS")
    assert {*reports} == {*quantized_compiler.programs()}
    for name, text in reports.items():
        kernels = [kernel for kernel in compiler.reported_kernels(text) if re.search("matmul|rms_norm", kernel.name)]
        assert [kernel.spilled_bytes for kernel in kernels] == [0], name
        # The compiler would wait for each product before the next one's operand is widened.
        assert "serialized" not in text, name
