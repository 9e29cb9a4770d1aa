"""The times of products with quantized activations, and of plain ones."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

import detjax
from benchmarks.studies.fp8_products.products import Case, epilogue_of, shapes
from detjax.bench import command_line
from detjax.bench.failures import reason
from detjax.bench.timing import device_time, rotations
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.pallas.hopper import matmul, quantized_matmul
from detjax.runtime import compilation
from detjax.runtime.threads import in_threads

QWEN3_8B: Final = {
    "queries, keys and values": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (2, 12288, 4096),
    "down": (4096, 12288),
}
"""Shapes of the weights of a layer, in the order of their products."""
TIMED: Final = (1, 16, 64, 256, 4096)
"""Numbers of rows of the timed products."""
ARMS: Final = ("plain", "codes")
"""The timed products."""


def times() -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Yields, by product and number of rows, the seconds of the product of codes and of the plain one of bfloat16.

    Rows are quantized by the kernel that does only this; its time counts. Weights come from memory.
    """
    jobs = [
        (arm, Case(name, shapes(rows, *shape), epilogue_of(shape)))
        for name, shape in QWEN3_8B.items()
        for rows in TIMED
        for arm in ARMS
    ]
    compiled = zip(jobs, in_threads(_timed, jobs), strict=True)
    for name, group in itertools.groupby(compiled, lambda job: job[0][1].name):
        by_rows: dict[str, dict[str, float]] = {}
        quantized, plain = _weights(QWEN3_8B[name])
        for (arm, case), program in group:
            shape = case.operands.x.shape
            seconds = by_rows.setdefault(str(shape[0]), {})
            if isinstance(program, str):
                continue
            x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
            sets: list[Any] = [(MatmulOperands(x, w),) for w in (plain if arm == "plain" else quantized)]
            seconds[arm] = device_time(program, sets, calls=2 * len(sets))
        for seconds in by_rows.values():
            arms = [arm for arm in seconds if arm != "plain" and "plain" in seconds]
            seconds.update({f"{arm} / plain": seconds[arm] / seconds["plain"] for arm in arms})
        yield name, by_rows


def _timed(job: tuple[str, Case]) -> Callable[[MatmulOperands], jax.Array] | str:
    """Returns the program of a timed product, or why it cannot be compiled."""
    (arm, case), options = job, {"epilogue": job[1].epilogue, "out_dtype": jnp.bfloat16}
    dense: Any = jax.ShapeDtypeStruct(case.operands.w.shape, jnp.bfloat16)

    def multiply(operands: MatmulOperands) -> jax.Array:
        if arm == "codes":
            return quantized_matmul.forward(operands, **options)
        return matmul.forward(operands, layout="nk", **options)

    try:
        operands = case.operands if arm == "codes" else case.operands._replace(w=dense)
        return compilation.compiled(detjax.jit(multiply), operands)
    except Exception as failure:
        command_line.print_line(f"{case.name}, {arm}: {reason(failure)}")
        return reason(failure)


def _weights(shape: tuple[int, ...]) -> tuple[list[QuantizedWeight], list[jax.Array]]:
    """Returns quantized and plain weights of a shape, more than a cache holds."""
    size = math.prod(shape)
    described = shapes(1, *shape).w

    @jax.jit
    def drawn(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint8) & 0xF7  # no NaN
        return bits, 1e-3 * jnp.ones(described.scales.shape, jnp.float32)

    pairs = [drawn(jnp.int32(seed)) for seed in range(rotations(size))]
    quantized = [dataclasses.replace(described, codes=codes, scales=scales) for codes, scales in pairs]
    plain = [
        lax.bitcast_convert_type(w.codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
        for w in quantized[: rotations(2 * size)]
    ]
    return quantized, plain
