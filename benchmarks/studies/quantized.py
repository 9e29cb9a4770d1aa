"""Decode steps of a model with quantized weights against the same model with plain weights: seconds, bits and memory.

    python -m benchmarks quantized --out benchmarks/results/quantized-h200.json

The weights of the layers are random codes of four bits and scales, then random codes of fp8 blocks with quantized
activations. Logits of four bits must equal, in every bit, the logits of the widened weights, which are also the plain
model whose time is compared. Before that, products with weights of every packed format are compared in the same way.
Exit code 1 if a bit differs.

`--part widths` launches products with the default plans 20 times for 1 to 1024 rows of the widths of models, among rows
that are larger, zero or NaN, and counts the numbers that differ from products with widened weights.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import detjax
from benchmarks import repeated_products
from benchmarks import study as options
from benchmarks.studies.decode import DecodeStep
from benchmarks.study import Result, Run
from detjax import ops
from detjax.bench import command_line, presets, random_codes, timing
from detjax.models import Decoder
from detjax.models.network import parameters
from detjax.operands.quantized_weight import CodeNumbers, QuantizedFormat, QuantizedWeight, widened
from detjax.runtime import compilation
from detjax.runtime.threads import in_threads

PACKED: Final[tuple[tuple[CodeNumbers, str, int, bool, str], ...]] = (
    ("int4", "bfloat16", 64, False, "bfloat16"),
    ("e2m1", "bfloat16", 32, False, "bfloat16"),
    ("e4m3", "float32", 64, False, "bfloat16"),
    ("e2m1", "float32", 32, False, "float16"),
    ("e2m1", "float32", 16, False, "bfloat16"),
    ("int4", "float16", 64, True, "float16"),
    ("int4", "float16", 32, True, "bfloat16"),
)
"""Packed formats whose products are compared: numbers, scales, columns of a group, zero points, dtype. Simple ones are
first."""

ROWS: Final = 1, 17, 64, 300, 1000
"""Rows of these products."""

PARTS: Final = ("products", "widths", "steps")
"""The parts of the study; without a choice all but the launches at the widths of models."""

WIDE: Final = PACKED[:3]
"""Formats that are launched at the widths of models."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        batches: numbers of requests. Each request decodes a token.
        context: cached tokens per request.
        steps: consecutive steps in a repetition.
    """

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1056
    steps: int = 20


SMALL: Final = Sizes((1, 3), 70, 2)


def products_with_same_bits(small: bool) -> Iterator[tuple[str, bool]]:
    """Yields, by format and rows, whether products with codes have the bits of products with widened weights.

    Each is named before it runs, because an error of the device ends the process.
    """
    n, k = (24, 128) if small else (1544, 1088)
    draw, multiply = np.random.default_rng(0), detjax.jit(lambda x, w: ops.matmul(x, w, layout="nk"))
    for numbers, scale_dtype, group, has_zeros, dtype in PACKED:
        codes = draw.integers(0, 256, (n, k // 2), np.uint8)
        if numbers == "e4m3":
            codes = draw.standard_normal((n, k)).astype(jnp.float8_e4m3fn).view(np.uint8)
        scales = draw.uniform(0.1, 2, (n, -(-k // group))).astype(jnp.dtype(scale_dtype))
        zeros = draw.integers(0, 17, scales.shape, np.uint8) if has_zeros else None
        described = QuantizedFormat(numbers, k, group, dtype)
        w = jax.tree.map(jnp.asarray, QuantizedWeight(codes, scales, zeros, format=described))
        both = w, jax.jit(widened)(w)
        xs = [jnp.asarray(draw.standard_normal((rows, k)), dtype) for rows in ROWS[: 2 if small else None]]
        jobs = [(x, weight) for x in xs for weight in both]
        programs = iter(zip(jobs, in_threads(lambda job: compilation.compiled(multiply, *job), jobs), strict=True))
        zeros_name = ", zero points" if has_zeros else ""
        for x in xs:
            name = f"{numbers} in {group}s, {scale_dtype} scales{zeros_name}, {dtype}, {len(x)} rows"
            command_line.print_line(f"product of {name}")
            packed, dense = (np.asarray(program(*job)) for job, program in itertools.islice(programs, 2))
            yield name, packed.tobytes() == dense.tobytes()


def wide_groups(
    widths: Mapping[str, tuple[int, ...]] = repeated_products.WIDTHS,
    rows: Sequence[int] = repeated_products.ROWS[:-1],
) -> Iterator[repeated_products.Group]:
    """Yields the products with codes at the widths of models; more rows take widened weights anyway."""
    for (name, shape), (numbers, scale_dtype, group, _, dtype) in itertools.product(widths.items(), WIDE):
        *stack, n, k = shape
        codes = jax.ShapeDtypeStruct((*stack, n, k if numbers == "e4m3" else k // 2), jnp.uint8)
        scales = jax.ShapeDtypeStruct((*stack, n, k // group), jnp.dtype(scale_dtype))
        described = QuantizedWeight(codes, scales, format=QuantizedFormat(numbers, k, group, dtype))
        gate: dict[str, Any] = {"activation": "silu", "gated": True} if stack else {}
        multiply = functools.partial(ops.matmul, layout="nk", **gate)

        def expected(x: jax.Array, w: QuantizedWeight, multiply: Any = multiply) -> jax.Array:
            return multiply(x, widened(w))

        full_name = f"{name}, {numbers} in {group}s"
        products = [repeated_products.Product(f"{full_name}, {count} rows", count, multiply) for count in rows]
        draw = functools.partial(random_codes.drawn, described, 0)
        yield repeated_products.Group(full_name, k, n, described, draw, expected, products)


def measured(model: Decoder, sizes: Sizes) -> tuple[dict[str, Any], dict[int, np.ndarray]]:
    """Returns the seconds of a step for each batch and the bytes of weights, and the logits of each batch."""
    seconds, logits = {}, {}
    programs = in_threads(lambda batch: DecodeStep.compiled(model, batch, sizes.context), sizes.batches)
    for batch, compiled in zip(sizes.batches, programs, strict=True):
        step = DecodeStep.drawn(model, batch, sizes.context)
        program = step.program(compiled)
        logits[batch] = np.asarray(program(step.tokens))
        seconds[batch] = timing.step_time(program, [(step.tokens,)], steps=sizes.steps)
        del step, program  # before the next state is drawn
    size = sum(weight.nbytes for weight in parameters(model).values())
    return {"seconds": seconds, "weight_bytes": size}, logits


def study(
    run: Run,
    *,
    preset: options.Preset = "Qwen3-8B",
    layers: options.Layers = None,
    part: Annotated[list[str], options.names(PARTS)],
) -> Result:
    sizes, results, problems = SMALL if run.small else Sizes(), {}, []
    parts = set(part or PARTS) - (set() if part else {"widths"})
    preset, layers = ("tiny", 1) if run.small else (preset, layers)
    products: dict[str, bool] = {}
    widths: dict[str, Any] = {}
    content = {"preset": preset, "layers": layers, "same_bits": products, "widths": widths, "results": results}
    for product, is_same in products_with_same_bits(run.small) if "products" in parts else ():
        products[product] = is_same
        run.save(content)
    if different := [product for product, is_same in products.items() if not is_same]:
        problems.append(f"bits of products differ: {'; '.join(different)}")
    if "widths" in parts and not run.small:
        repeated_products.compare(run, content, widths, wide_groups())
        problems += repeated_products.problems(widths)
    for name, fields in random_codes.FORMATS.items() if "steps" in parts else ():
        kinds = {name: False} | ({} if "activations" in fields else {f"{name}, widened": True})
        logits = {}
        for kind, plain in kinds.items():
            model = random_codes.with_codes(presets.decoder(preset, layers), name, plain=plain)
            results[kind], logits[kind] = measured(model, sizes)
            command_line.print_line(f"{kind}: {results[kind]}")
            run.save(content)
            del model
        first, *others = logits.values()
        for other in others:
            equal = all(first[batch].tobytes() == other[batch].tobytes() for batch in sizes.batches)
            results[name]["bits_of_widened"] = equal
            problems += [] if equal else [f"{name}: bits differ from the bits of widened weights"]
    return Result(content, "; ".join(problems))
