"""Launches of the kernel's plans at the widths of models, again and again.

What is expected comes from the same kernel for `CHUNK` rows at a time: only this kernel has these bits.
"""

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
from benchmarks.studies.fp8_products.products import described, epilogue_of, plans_by_time, shapes
from benchmarks.studies.fp8_products.sums import BLOCK
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedActivations, QuantizedWeight
from detjax.pallas.hopper import quantized_matmul
from detjax.pallas.hopper.matmul.plan import Schedule
from detjax.pallas.hopper.quantized.codes import codes_plan, codes_product
from detjax.pallas.hopper.quantized.codes.plan import CodesPlan

CHUNK: Final = 64
"""Rows of a product whose results are expected of others."""
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
            options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype}
            chunks = x.reshape(-1, min(len(x), CHUNK), x.shape[1])
            y = lax.map(lambda rows: quantized_matmul.forward(MatmulOperands(rows, w), **options), chunks)
            return y.reshape(len(x), -1)

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
    """Yields the products with the plans of numbers of rows; with groups, also the best ones of other tiles."""
    seen: set[Schedule] = set()
    for rows in sorted({*numbers_of_rows, *BETWEEN}):
        operands = shapes(rows, *shape, activations=activations)
        plans = [codes_plan(operands, out_dtype=out_dtype)]
        if rows in numbers_of_rows and activations == "group" and out_dtype != jnp.float32:
            plans += best_by_tile(plans[0])
        for plan in dict.fromkeys(plans):
            s = plan.schedule
            if rows not in numbers_of_rows and s in seen:
                continue
            seen.add(s)
            epilogue = epilogue_of(shape)

            def multiply(x: jax.Array, w: QuantizedWeight, plan: CodesPlan = plan, epilogue: Any = epilogue) -> Any:
                return codes_product(MatmulOperands(x, w), plan, epilogue=epilogue)

            yield Product(f"{name}, {rows} rows, {described(plan)}", rows, multiply)


def best_by_tile(default: CodesPlan) -> list[CodesPlan]:
    """Returns the plan of the lowest estimated time for each number of tokens in a tile."""
    return [*{plan.schedule.tile_m: plan for plan in reversed(plans_by_time(default))}.values()]


def _drawn(shape: tuple[int, ...], described: QuantizedWeight) -> QuantizedWeight:
    """Returns a random weight. With scales of groups, `BLOCK` rows share theirs, except in every fifth such block."""

    @jax.jit
    def drawn() -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        numbers = jax.random.normal(keys[0], shape).astype(jnp.float8_e4m3fn)
        scales = jax.random.uniform(keys[1], described.scales.shape, jnp.float32, 0.5e-2, 2e-2)
        if described.format.activations == "group":
            row = jnp.arange(shape[-2])
            scales = scales[..., jnp.where(row // BLOCK % 5 == 4, row, row // BLOCK * BLOCK), :]
        return lax.bitcast_convert_type(numbers, jnp.uint8), scales

    codes, scales = drawn()
    return dataclasses.replace(described, codes=codes, scales=scales)
