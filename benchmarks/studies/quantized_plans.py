"""Plans of Hopper's kernels for quantized weights: equality of their bits, and their times.

    python -m benchmarks quantized_plans --out benchmarks/results/quantized-plans-h200.json

The products of a layer of Qwen3-8B run with int4 weights by the plans of the packed kernel, and with e4m3 weights by
the plans of the kernel that multiplies codes. The plans with the lowest estimated times are tried, and the result has
the time of each, in the order of the estimates, next to the plain product's. All plans of a product must have the same
bits; exit code 1 if one has not, or cannot be compiled.

`--small` compares a few plans of a tiny product of e4m3 codes in Pallas' interpreter, and measures no time.
"""

import os

# The interpreter's threads wait for each other in XLA's pool, which needs a worker per thread.
os.environ.setdefault("PJRT_NPROC", "16")

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

import detjax
from benchmarks import study as options
from benchmarks.studies.fp8_products.products import described, epilogue_of, plans_by_time
from benchmarks.studies.fp8_products.speeds import QWEN3_8B
from benchmarks.study import Result, Run
from detjax.bench import command_line
from detjax.bench.bits import same_bits
from detjax.bench.failures import reason
from detjax.bench.random_codes import drawn_weight
from detjax.bench.timing import device_time, rotations
from detjax.cli.options import UsageError
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight, widened
from detjax.pallas.hopper import matmul, mosaic
from detjax.pallas.hopper.quantized import codes, packed
from detjax.pallas.hopper.quantized.packed import tuning
from detjax.runtime import backends, compilation
from detjax.runtime.threads import in_threads

ROWS: Final[Mapping[str, tuple[int, ...]]] = {"int4": (1, 16, 64), "fp8": (1, 16, 64, 256, 4096)}
"""Numbers of rows, by format."""
MOST: Final = 8
"""Plans that are tried: those with the lowest estimated times."""

type Multiply = Callable[[jax.Array, QuantizedWeight], jax.Array]


class Arm(NamedTuple):
    """A plan of a product, or the plain product."""

    name: str
    multiply: Multiply


def arms(format_name: str, rows: int, w: QuantizedWeight, most: int = MOST) -> Iterator[Arm]:
    """Yields the plans of a product of bfloat16 rows.

    Args:
        format_name: "int4" or "fp8".
        rows: the number of rows.
        w: the weight, or its shapes.
        most: number of plans, which have the lowest estimated times.
    """
    x: Any = jax.ShapeDtypeStruct((rows, w.shape[-1]), jnp.bfloat16)
    operands, epilogue = MatmulOperands(x, w), epilogue_of(w.shape)
    plans: list[Any]
    if format_name == "fp8":
        plans = plans_by_time(codes.codes_plan(operands, out_dtype=jnp.bfloat16))[:most]
    else:
        chosen = packed.packed_plan(operands, out_dtype=jnp.bfloat16)
        assert chosen is not None
        plans = sorted(tuning.candidates(chosen.problem, chosen.codes), key=tuning.estimated_seconds)[:most]
    for plan in plans:

        def multiply(x: jax.Array, w: QuantizedWeight, plan: Any = plan) -> jax.Array:
            if format_name == "fp8":
                return codes.codes_product(MatmulOperands(x, w), plan, epilogue=epilogue)
            return packed.packed_product(MatmulOperands(x, w), plan, epilogue=epilogue, out_dtype=x.dtype)

        yield Arm(described(plan), multiply)


def study(run: Run) -> Result:
    if not run.small and backends.backend() != "hopper":
        raise UsageError(f"without --small on {backends.device_name()}; accepted: an H100 or H200")
    times: dict[str, Any] = {}
    different: list[str] = []
    content = {"note": options.INTERPRETED if run.small else None, "different": different, "seconds": times}
    shapes: Mapping[str, tuple[int, ...]] = {"a tiny product": (32, 256)} if run.small else QWEN3_8B
    with interpreted() if run.small else contextlib.nullcontext():
        # The interpreter multiplies no widened codes in registers.
        for name in ("fp8",) if run.small else ROWS:
            for product, weight_shape in shapes.items():
                copies = 1 if run.small else rotations(math.prod(weight_shape) // (1 if name == "fp8" else 2))
                weights = [drawn_weight(weight_shape, name, "bfloat16", seed) for seed in range(copies)]
                for rows in (3,) if run.small else ROWS[name]:
                    x = jax.random.normal(jax.random.key(1), (rows, weight_shape[-1]), jnp.bfloat16)
                    by_plan = times.setdefault(name, {}).setdefault(product, {}).setdefault(str(rows), {})
                    some = [*arms(name, rows, weights[0], 2 if run.small else MOST)]
                    for arm, same, seconds in _measured(some, x, weights, is_timed=not run.small):
                        by_plan[arm] = seconds
                        if not same:
                            different.append(f"{name}, {product}, {rows} rows: {arm}")
                    if not run.small:
                        by_plan["plain"] = _plain_seconds(x, weights)
                    command_line.print_line(f"{name}, {product}, {rows} rows: {by_plan}")
                    run.save(content)
                del weights
    return Result(content, f"plans without the first one's bits: {'; '.join(different)}" if different else "")


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """A context where kernels run in Pallas' interpreter."""
    with mosaic.twins(), plgpu.force_gpu_interpret_mode():
        yield


def _measured(
    some: list[Arm], x: jax.Array, weights: list[QuantizedWeight], *, is_timed: bool
) -> Iterator[tuple[str, bool, float | str | None]]:
    """Yields for each plan its name, whether it has the first plan's bits, and its seconds or why it has no program."""

    def program(arm: Arm) -> Any:
        try:
            return compilation.compiled(detjax.jit(arm.multiply), x, weights[0])
        except Exception as failure:  # the other plans still have to be measured
            return reason(failure)

    first = None
    # The context of the interpreter belongs to a thread.
    programs = in_threads(program, some) if is_timed else map(program, some)
    for arm, compiled in zip(some, programs, strict=True):
        if isinstance(compiled, str):
            yield arm.name, False, compiled
            continue
        y = compiled(x, weights[0])
        first = y if first is None else first
        seconds = device_time(compiled, [(x, w) for w in weights], calls=2 * len(weights)) if is_timed else None
        yield arm.name, bool(same_bits(y, first)), seconds


def _plain_seconds(x: jax.Array, weights: list[QuantizedWeight]) -> float:
    """Returns the seconds of the product with widened weights."""
    epilogue, widen = epilogue_of(weights[0].shape), jax.jit(widened)
    dense = [widen(w) for w in itertools.islice(weights, rotations(2 * math.prod(weights[0].shape)))]

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul.forward(MatmulOperands(x, w), layout="nk", epilogue=epilogue, out_dtype=x.dtype)

    program = compilation.compiled(detjax.jit(multiply), x, dense[0])
    return device_time(program, [(x, w) for w in dense], calls=2 * len(dense))
