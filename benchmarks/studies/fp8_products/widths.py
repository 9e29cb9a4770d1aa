"""Launches of the kernel's plans at the widths of models, again and again."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from benchmarks.repeated_products import ROWS, WIDTHS, Group, Product
from benchmarks.studies.fp8_products.products import epilogue_of, shapes
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedActivations, QuantizedWeight
from detjax.pallas.hopper import quantized_matmul
from detjax.pallas.hopper.quantized.scaled import FORMS, Form, ScaledPlan, scaled_plan, scaled_product

BETWEEN: Final = (8, 24, 32, 40, 48, 96, 128, 512, 2048)
"""Further numbers of rows whose default plans are launched, if no other number has that schedule."""


def wide_groups(widths: Mapping[str, tuple[int, ...]] = WIDTHS, rows: Sequence[int] = ROWS) -> Iterator[Group]:
    """Yields the products at the widths of models, with scales of activations by group and by row.

    Results are bfloat16, and also float32 where the weight is a single matrix: gradients and scales of several sources
    need sums of single matrices.
    """
    kinds = itertools.product(widths.items(), ("group", "row"), (jnp.bfloat16, jnp.float32))
    for (name, shape), activations, out_dtype in kinds:
        described, epilogue = shapes(1, *shape, activations=activations).w, epilogue_of(shape)
        if out_dtype == jnp.float32 and described.ndim > 2:
            continue

        def expected(
            x: jax.Array, w: QuantizedWeight, epilogue: Epilogue = epilogue, out_dtype: Any = out_dtype
        ) -> jax.Array:
            operands = MatmulOperands(x, w)
            return quantized_matmul.forward(operands, epilogue=epilogue, out_dtype=out_dtype, is_composed=True)

        name = f"{name}, {activations}" + (", float32" if out_dtype == jnp.float32 else "")
        products = list(wide_products(name, shape, activations, rows, out_dtype))
        draw = functools.partial(_drawn, shape, described)
        yield Group(name, shape[-1], shape[-2], described, draw, expected, products)


def wide_products(
    name: str,
    shape: tuple[int, ...],
    activations: QuantizedActivations,
    numbers_of_rows: Sequence[int],
    out_dtype: DTypeLike,
) -> Iterator[Product]:
    """Yields the products with the default plans of numbers of rows; with groups, also the other forms' best plans."""
    seen: set[tuple[Any, ...]] = set()
    for rows in sorted({*numbers_of_rows, *BETWEEN}):
        operands = shapes(rows, *shape, activations=activations)
        has_all_forms = rows in numbers_of_rows and activations == "group" and out_dtype != jnp.float32
        forms: tuple[Form | None, ...] = (None, *FORMS) if has_all_forms else (None,)
        plans = [scaled_plan(operands, out_dtype=out_dtype, form=form) for form in forms]
        for plan in dict.fromkeys(plan for plan in plans if plan is not None):
            schedule = plan.schedule, plan.wideners, plan.sends_products
            if rows not in numbers_of_rows and schedule in seen:
                continue
            seen.add(schedule)
            epilogue = epilogue_of(shape)

            def multiply(x: jax.Array, w: QuantizedWeight, plan: ScaledPlan = plan, epilogue: Any = epilogue) -> Any:
                return scaled_product(MatmulOperands(x, w), plan, epilogue=epilogue)

            tile = f"{plan.schedule.tile_m} x {plan.schedule.tile_n}"
            threads = f"{plan.schedule.warpgroups} and {plan.wideners} warpgroups"
            yield Product(f"{name}, {rows} rows, {plan.form}, tiles of {tile}, {threads}", rows, multiply)


def _drawn(shape: tuple[int, ...], described: QuantizedWeight) -> QuantizedWeight:
    @jax.jit
    def drawn() -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        numbers = jax.random.normal(keys[0], shape).astype(jnp.float8_e4m3fn)
        scales = jax.random.uniform(keys[1], described.scales.shape, jnp.float32, 0.5e-2, 2e-2)
        return lax.bitcast_convert_type(numbers, jnp.uint8), scales

    codes, scales = drawn()
    return dataclasses.replace(described, codes=codes, scales=scales)
