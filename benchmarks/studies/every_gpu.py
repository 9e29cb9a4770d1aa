"""The backend `mma` on the GPU at hand: its bits, products against the matrix unit's peak, and steps of a model.

    python -m benchmarks every_gpu --out benchmarks/results/every-gpu-h100.json

Products of Qwen3-8B are timed against the peak of `mma.sync`, a loop that reads no memory. Steps of the model decode a
token of each request, with fewer layers than the model has. On an H100 the backend `hopper` runs the same. The exit
code is 1 if the bits of `mma` follow the batch, the position, the schedule or the phase.

`--small` takes seconds on a CPU, where `portable` is in the place of both.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import detjax
from benchmarks.studies.decode import DecodeStep
from benchmarks.study import Result, Run
from detjax import ops
from detjax.bench import command_line, presets, timing
from detjax.cli.options import Option
from detjax.models import Decoder, KVCache
from detjax.runtime import backends

PRODUCTS: Final[Mapping[str, tuple[int, int]]] = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (24576, 4096),
    "down": (4096, 12288),
}
"""Outputs and inputs of Qwen3-8B's products."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        products: outputs and inputs of products, by name.
        tokens: tokens of timed products.
        compared: tokens of products whose rows are compared.
        batches: requests of a timed step.
        context: cached tokens of each request.
        prompt: tokens of compared requests. The last one is also decoded.
        rounds: timed rounds, in which backends take turns.
    """

    products: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=lambda: PRODUCTS)
    tokens: int = 4096
    compared: tuple[int, ...] = (1, 2, 17, 33, 128, 257, 1024, 4096)
    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1056
    prompt: int = 200
    rounds: int = 3


SMALL: Final = Sizes({"small": (64, 32)}, 8, (1, 2, 17), (1, 2), 5, 6, 1)


def study(run: Run, *, layers: Annotated[int, Option("Layers of the model.", minimum=1)] = 6) -> Result:
    sizes = SMALL if run.small else Sizes()
    arms = [name for name in ("mma", "hopper") if backends.runs_here(name)]
    if not arms and not run.small:
        return Result(
            {}, f"every_gpu: {backends.device_name()} does not run 'mma'; accepted: {backends.DEVICES['mma']}"
        )
    arms = arms or ["portable"]
    content: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "bits": {}}
    model = presets.decoder("tiny" if run.small else "Qwen3-8B", 1 if run.small else layers)
    with detjax.use_backend(arms[0]):
        content["bits"] = {**product_bits(sizes, arms[0]), **model_bits(model, sizes)}
    command_line.print_line(str(content["bits"]))
    run.save(content)
    if arms[0] == "mma":
        content["peak_flops"] = peak()
    for part, rows in (("products", product_times(sizes, arms)), ("steps", step_times(model, sizes, arms))):
        content[part] = []
        for row in rows:
            content[part].append(row)
            command_line.print_line(str(row))
            run.save(content)
    different = [name for name, same in content["bits"].items() if not same]
    return Result(content, f"bits of {arms[0]} differ: {', '.join(different)}" if different else "")


def product_bits(sizes: Sizes, backend: str) -> dict[str, bool]:
    """Returns, for each product, whether a row's bits are the same in any batch, at any place, by any schedule."""
    same = {}
    for name, (n, k) in sizes.products.items():
        x, w = _drawn(max(sizes.compared), k), _drawn(n, k)
        multiply = detjax.jit(lambda x, w: ops.matmul(x, w, layout="nk", out_dtype="float32"))
        whole = np.asarray(multiply(x, w))
        batches = [np.asarray(multiply(x[-m:], w)) for m in sizes.compared]
        same[f"{name}, batches"] = all(rows.tobytes() == whole[-len(rows) :].tobytes() for rows in batches)
        if backend == "mma":
            results = [np.asarray(product)[:64] for product in _by_schedules(x[:256], w)]
            same[f"{name}, schedules"] = {one.tobytes() for one in results} == {whole[:64].tobytes()}
    return same


def _by_schedules(x: Array, w: Array) -> Iterator[Array]:
    """Yields float32 products by schedules of every kind."""
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
    ):
        fixed = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": "float32", "schedule": schedule}
        yield detjax.jit(lambda x, w, fixed=fixed: product(Operands(x, w), **fixed))(x, w)


def model_bits(model: Decoder, sizes: Sizes) -> dict[str, bool]:
    """Returns whether a request's logits are the same alone, at other places of a batch, and in another phase."""
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(0, model.config.vocab_size, (5, sizes.prompt)), jnp.int32)
    logits = detjax.jit(lambda tokens: model(tokens)[:, -1])
    alone = np.asarray(logits(tokens[:1])).tobytes()
    batch = np.asarray(logits(tokens[::-1]))
    step = detjax.jit(lambda tokens, cache: model(tokens, cache))
    cache = KVCache.empty(model.config, 1, sizes.prompt, jnp.bfloat16)
    _, cache = step(tokens[:1, :-1], cache)
    decoded = np.asarray(step(tokens[:1, -1:], cache)[0][:, -1])
    return {"model, batch and place": batch[-1:].tobytes() == alone, "model, phase": decoded.tobytes() == alone}


def product_times(sizes: Sizes, arms: list[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each product: its floating-point operations per second by each backend."""
    m = sizes.tokens
    for name, (n, k) in sizes.products.items():
        x, w = _drawn(m, k), _drawn(n, k)

        def run(arm: str, x: Array = x, w: Array = w) -> float:
            with detjax.use_backend(arm):
                program = detjax.jit(lambda x, w: ops.matmul(x, w, layout="nk"))
                return timing.step_time(program, [(x, w)], steps=5 if m < 64 else 30)

        medians = timing.in_turns({arm: lambda arm=arm: run(arm) for arm in arms}, sizes.rounds).medians
        yield {"product": name, "m": m, "n": n, "k": k} | {
            f"{arm}_flops": 2 * m * n * k / seconds for arm, seconds in medians.items()
        }


def step_times(model: Decoder, sizes: Sizes, arms: list[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each batch: seconds of a decode step by each backend."""
    for batch in sizes.batches:
        seconds = {}
        for arm in arms:
            with detjax.use_backend(arm):
                step = DecodeStep.drawn(model, batch, sizes.context)
                seconds[arm] = timing.step_time(step.program(), [(step.tokens,)], steps=20)
        yield {"batch": batch, "context": sizes.context, "seconds": seconds}


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


def _drawn(rows: int, columns: int) -> Array:
    return jax.random.normal(jax.random.key(rows), (rows, columns), jnp.bfloat16)
