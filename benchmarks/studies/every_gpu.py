"""The backend `mma` on the GPU at hand: its bits, its products and attention, and steps of a model.

    python -m benchmarks every_gpu --out benchmarks/results/every-gpu-h100.json

Products of Qwen3-8B are timed against the peak of `mma.sync`, a loop that reads no memory, and attention of a token
against the bandwidth of a copy. Steps of the model decode a token of each request. On an H100 the backend `hopper` runs
the same. The exit code is 1 if the bits of `mma` follow the batch, the position, the chunk, the schedule or the phase.
Products are compared on the device; `comparisons` is how many pairs of numbers were.

Programs of a part are compiled in parallel, and a layer's program serves all layers. `every-gpu-serve` in
`benchmarks/measurements.toml` measures 1000 requests, by `python -m detjax.bench serve` with `DETJAX_BACKEND=mma`.

`--small` takes seconds on a CPU, where `portable` is in the place of both.
"""

import os

# A copy of many bytes and the steps of large batches are measured while the model is in memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import detjax
from benchmarks import study as options
from benchmarks.studies.decode import DecodeStep
from benchmarks.study import Result, Run
from benchmarks.timing import copy_time
from detjax import ops
from detjax.bench import command_line, presets, timing
from detjax.cli.options import Option
from detjax.contract import KV_BLOCK
from detjax.models import Decoder, KVCache
from detjax.models.network import split
from detjax.operands.numerics import ceil_div
from detjax.runtime import backends, compilation
from detjax.runtime.threads import in_threads

PRODUCTS: Final[Mapping[str, tuple[int, int]]] = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (24576, 4096),
    "down": (4096, 12288),
}
"""Outputs and inputs of Qwen3-8B's products."""
SHARE_OF_MEMORY: Final = 0.6
"""The share of the memory for the model and the cache of the largest batch, which decide the number of layers."""

type Program = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        preset: the model's shape.
        products: outputs and inputs of products, by name.
        tokens: tokens of timed products.
        compared: tokens of products whose rows are compared.
        attended: requests and cached tokens of timed attention.
        copied: bytes that the copy reads and writes.
        batches: requests of a timed step.
        context: cached tokens of each request.
        prompt: tokens of compared requests. The last one is also decoded.
        rounds: timed rounds, in which backends take turns.
    """

    preset: str = "Qwen3-8B"
    products: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=lambda: PRODUCTS)
    tokens: int = 4096
    compared: tuple[int, ...] = (1, 2, 17, 33, 128, 257, 1024, 4096)
    attended: tuple[tuple[int, int], ...] = ((1, 32768), (16, 8192), (64, 1056), (256, 1056))
    copied: int = 2 << 30
    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1056
    prompt: int = 200
    rounds: int = 3


SMALL: Final = Sizes("tiny", {"small": (64, 32)}, 8, (1, 2, 17), ((2, 130),), 1 << 20, (1, 2), 5, 6, 1)


def study(
    run: Run, *, layers: Annotated[int | None, Option("Layers.", minimum=1, default="as many as fit")] = None
) -> Result:
    sizes = SMALL if run.small else Sizes()
    arms = [name for name in ("mma", "hopper") if backends.runs_here(name)]
    if not arms and not run.small:
        return Result(
            {}, f"every_gpu: {backends.device_name()} does not run 'mma'; accepted: {backends.DEVICES['mma']}"
        )
    arms = arms or ["portable"]
    if run.small or layers is None:
        layers = 1 if run.small else layers_that_fit(sizes)
    content: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "layers": layers, "bits": {}, "comparisons": {}}

    def add(part: str, value: Any) -> None:
        """Adds a number, some entries or a row, prints it and saves the result so far."""
        if part in ("products", "attention", "steps"):
            content.setdefault(part, []).append(value)
        else:
            content[part] = {**content[part], **value} if part in content else value
        command_line.print_line(f"{part}: {value}")
        run.save(content)

    if arms[0] == "mma":
        add("peak_flops", peak())
    add("copied_bytes_a_second", sizes.copied / copy_time(sizes.copied, calls=7))
    comparisons = 0
    for name in sizes.products:
        same, compared = product_bits(sizes, name, arms[0])
        comparisons += compared
        add("bits", same)
        add("comparisons", {"products": comparisons})
    for part, rows in (("products", product_times(sizes, arms)), ("attention", attention_times(sizes, arms))):
        for row in rows:
            add(part, row | _shares(row, arms, content))
    model = presets.decoder(sizes.preset, layers)
    add("bits", model_bits(model, sizes, arms[0]))
    for row in step_times(model, sizes, arms):
        add("steps", row)
    different = [name for name, same in content["bits"].items() if not same]
    return Result(content, f"bits of {arms[0]} differ: {', '.join(different)}" if different else "")


def layers_that_fit(sizes: Sizes) -> int:
    """Returns the layers whose weights and caches of the largest batch fit into a share of the memory."""
    config = presets.config(sizes.preset)
    tokens = max(sizes.batches) * KV_BLOCK * ceil_div(sizes.context + 1, KV_BLOCK)
    return options.layers_that_fit(sizes.preset, SHARE_OF_MEMORY, 2 * 2 * config.kv_heads * config.head_dim * tokens)


def _shares(row: Mapping[str, Any], arms: Sequence[str], content: Mapping[str, Any]) -> dict[str, float]:
    """The rates of a row as shares of the measured limits."""
    limits = {"flops": ("peak", "peak_flops"), "bytes_a_second": ("copy", "copied_bytes_a_second")}
    return {
        f"{arm}_share_of_{limit}": row[f"{arm}_{unit}"] / content[field]
        for unit, (limit, field) in limits.items()
        for arm in arms
        if f"{arm}_{unit}" in row and field in content
    }


def product_bits(sizes: Sizes, name: str, backend: str) -> tuple[dict[str, bool], int]:
    """Returns whether rows of a product have the same bits in any batch, at any place, in chunks, and by any schedule.

    The second result is the number of compared pairs of numbers.
    """
    n, k = sizes.products[name]
    x, w = _drawn(max(sizes.compared), k), _drawn(n, k)
    multiply = detjax.jit(lambda x, w: ops.matmul(x, w, layout="nk", out_dtype="float32"))
    schedules = [*_by_schedules()] if backend == "mma" else []
    chunk = len(x) // 3 + 1
    lengths = sorted({*sizes.compared, chunk, len(x) - 2 * chunk})

    def compiled(job: tuple[Program, int]) -> Program:
        with detjax.use_backend(backend):
            return compilation.compiled(job[0], x[: job[1]], w)

    jobs = [(multiply, m) for m in lengths] + [(program, len(x)) for program in schedules]
    programs = [*in_threads(compiled, jobs)]
    by_length, by_schedule = dict(zip(lengths, programs, strict=False)), programs[len(lengths) :]
    whole = by_length[len(x)](x, w)
    comparisons, same = 0, {}

    def compare(kind: str, rows: Array, expected: Array) -> None:
        nonlocal comparisons
        comparisons += rows.size
        kind = f"{name}, {kind}"
        same[kind] = same.get(kind, True) and bool(_are_same(rows, expected))

    for m, program in by_length.items():
        compare("batches", program(x[-m:], w), whole[-m:])
    compare("positions", by_length[len(x)](x[::-1], w), whole[::-1])
    for first in range(0, len(x), chunk):
        rows = x[first : first + chunk]
        compare("chunks", by_length[len(rows)](rows, w), whole[first : first + chunk])
    for program in by_schedule:
        compare("schedules", program(x, w), whole)
    return same, comparisons


@jax.jit
def _are_same(a: Array, b: Array) -> Array:
    return jnp.all(lax.bitcast_convert_type(a, jnp.uint32) == lax.bitcast_convert_type(b, jnp.uint32))


def _by_schedules() -> Iterator[Program]:
    """Yields functions of float32 products by schedules of every kind."""
    from detjax.operands.options import Epilogue
    from detjax.pallas.hopper.matmul.kernel import Operands
    from detjax.pallas.mma.matmul.kernel import product
    from detjax.pallas.mma.matmul.plan import Schedule

    for schedule in (
        Schedule(16, 32, 1, line=64, lines=2),
        Schedule(32, 32, 2, line=64),
        Schedule(64, 64, 2),
        Schedule(64, 64, 4, lines=2),
        Schedule(128, 128, 2, panel=8),
        Schedule(128, 128, 4),
        Schedule(256, 128, 2, panel=4, warpgroups=2),
        Schedule(256, 128, 2, line=64, panel=4, warpgroups=2),
        Schedule(128, 64, 2, line=64, panel=8),
        Schedule(128, 64, 2, line=64, warpgroups=2),
    ):
        fixed = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": "float32", "schedule": schedule}
        yield detjax.jit(lambda x, w, fixed=fixed: product(Operands(x, w), **fixed))


def model_bits(model: Decoder, sizes: Sizes, backend: str) -> dict[str, bool]:
    """Returns whether a request's logits are the same alone, at other places of a batch, and in another phase."""
    network, weights = split(model)
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(0, model.config.vocab_size, (5, sizes.prompt)), jnp.int32)
    empty, tree = jax.tree.flatten(KVCache.empty(model.config, 1, sizes.prompt, jnp.bfloat16))

    def last(weights: Any, tokens: Array) -> Array:
        return network.with_weights(weights)(tokens)[:, -1]

    def step(weights: Any, tokens: Array, cache: list[Array]) -> tuple[Array, list[Array]]:
        logits, moved = network.with_weights(weights)(tokens, jax.tree.unflatten(tree, cache))
        return logits[:, -1], jax.tree.leaves(moved)

    jobs = (last, tokens[:1]), (last, tokens[::-1]), (step, tokens[:1, :-1], empty), (step, tokens[:1, -1:], empty)

    def compiled(job: tuple[Any, ...]) -> Program:
        with detjax.use_backend(backend):
            return functools.partial(compilation.compiled(detjax.jit(job[0]), weights, *job[1:]), weights)

    one, several, prefill, decode = in_threads(compiled, jobs)
    alone, batch = np.asarray(one(tokens[:1])).tobytes(), np.asarray(several(tokens[::-1]))
    _, cache = prefill(tokens[:1, :-1], empty)
    decoded = np.asarray(decode(tokens[:1, -1:], cache)[0])
    return {"model, batch and place": batch[-1:].tobytes() == alone, "model, phase": decoded.tobytes() == alone}


def product_times(sizes: Sizes, arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each product: its floating-point operations per second by each backend."""
    m = sizes.tokens
    multiply = detjax.jit(lambda x, w: ops.matmul(x, w, layout="nk"))

    def compiled(job: tuple[str, tuple[int, int]]) -> Program:
        arm, (n, k) = job
        with detjax.use_backend(arm):
            return compilation.compiled(multiply, _bfloat16(m, k), _bfloat16(n, k))

    jobs = [(arm, shape) for shape in sizes.products.values() for arm in arms]
    programs = dict(zip(jobs, in_threads(compiled, jobs), strict=True))
    for name, (n, k) in sizes.products.items():
        arguments = [(_drawn(m, k), _drawn(n, k))]
        runs = {
            arm: functools.partial(timing.step_time, programs[arm, (n, k)], arguments, steps=5 if m < 64 else 30)
            for arm in arms
        }
        medians = timing.in_turns(runs, sizes.rounds, required=arms).medians
        yield {"product": name, "m": m, "n": n, "k": k} | {
            f"{arm}_flops": 2 * m * n * k / seconds for arm, seconds in medians.items()
        }


def attention_times(sizes: Sizes, arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each batch: bytes of keys and values that attention of a token reads per second."""
    config = presets.config(sizes.preset)
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim

    @detjax.jit
    def attend(q: Array, k: Array, v: Array, queries: ops.Queries) -> Array:
        return ops.attention(q, ops.KVPages(k, v), queries)

    def drawn(batch: int, context: int, seed: int = 0) -> tuple[Any, ...]:
        pages = ceil_div(context, KV_BLOCK)
        table = np.random.default_rng(seed).permutation(batch * pages).reshape(batch, pages)
        length = jnp.full(batch, context, jnp.int32)
        shapes = (batch, 1, heads, width), *[(batch * pages, kv_heads, KV_BLOCK, width)] * 2
        keys = jax.random.split(jax.random.key(seed), 3)
        arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        return *arrays, ops.Queries(jnp.asarray(table, jnp.int32), length - 1, length)

    def compiled(job: tuple[str, tuple[int, int]]) -> Program:
        arm, (batch, context) = job
        shapes = jax.eval_shape(lambda: drawn(batch, context))
        with detjax.use_backend(arm):
            return compilation.compiled(attend, *shapes)

    jobs = [(arm, one) for one in sizes.attended for arm in arms]
    programs = dict(zip(jobs, in_threads(compiled, jobs), strict=True))
    for batch, context in sizes.attended:
        size = 2 * 2 * batch * context * kv_heads * width
        sets = [drawn(batch, context, seed) for seed in range(min(8, timing.rotations(size)))]
        runs = {
            arm: functools.partial(timing.device_time, programs[arm, (batch, context)], sets, calls=20) for arm in arms
        }
        medians = timing.in_turns(runs, sizes.rounds, required=arms).medians
        yield {"batch": batch, "context": context, "bytes": size} | {
            f"{arm}_bytes_a_second": size / seconds for arm, seconds in medians.items()
        }


def step_times(model: Decoder, sizes: Sizes, arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each batch: seconds of a decode step by each backend."""

    def compiled(job: tuple[str, int]) -> Program:
        arm, batch = job
        with detjax.use_backend(arm):
            return DecodeStep.compiled(model, batch, sizes.context)

    jobs = [(arm, batch) for batch in sizes.batches for arm in arms]
    programs = dict(zip(jobs, in_threads(compiled, jobs), strict=True))
    for batch in sizes.batches:
        # Backends share the state: the memory may not have room for two.
        step = DecodeStep.drawn(model, batch, sizes.context)
        runs = {
            arm: functools.partial(timing.step_time, step.program(programs[arm, batch]), [(step.tokens,)], steps=20)
            for arm in arms
        }
        seconds = timing.in_turns(runs, sizes.rounds, required=arms).medians
        del step, runs
        row: dict[str, Any] = {"batch": batch, "context": sizes.context, "seconds": seconds}
        yield row | ({"time_over_hopper": seconds["mma"] / seconds["hopper"]} if len(arms) == 2 else {})


def peak(steps: int = 4096) -> float:
    """Returns the floating-point operations per second of a loop of `mma.sync` that reads no memory."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from detjax.pallas.hopper.device import multiprocessors
    from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
    from detjax.pallas.mma import fragments

    ctas, (rows, columns, k) = 2 * multiprocessors(), (128, 128, fragments.STEP)

    def body(start: Any, out: Any) -> None:
        here = out.at[lax.axis_index("cta")]
        layouts = fragments.left_layout("bfloat16", 2), fragments.right_layout("bfloat16", 2)
        a = plgpu.load(start, layout=layouts[0], optimized=False)
        b = plgpu.load(start.T, layout=layouts[1], optimized=False)
        zeros = fragments.zeros((rows, columns), "bfloat16", 2)
        here[...] = lax.fori_loop(0, steps, lambda _, sums: fragments.multiply(sums, a, b), zeros)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((ctas, rows, columns), jnp.float32),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=NO_AUTO_BARRIERS,
        kernel_name="mma_peak",
    )
    seconds = timing.step_time(jax.jit(kernel), [(_drawn(rows, k),)], steps=10)
    return 2 * ctas * steps * rows * columns * k / seconds


def _bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _drawn(rows: int, columns: int) -> Array:
    return jax.random.normal(jax.random.key(rows), (rows, columns), jnp.bfloat16)
