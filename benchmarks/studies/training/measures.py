"""Training: a step against a good stock program, the cost of accumulated sums, gradients of operations, and bits."""

import dataclasses
import functools
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.studies.training import stock
from detjax import ops
from detjax.bench import presets, timing
from detjax.bench.failures import reason
from detjax.models.network import split
from detjax.operands.numerics import round_up
from detjax.operands.options import MODEL_DISTRIBUTION
from detjax.ops import AccumulatedWeight
from detjax.rl.trainer.gradients import completion_logprobs, empty_sums, next_sums
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Rows, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from detjax.runtime import compilation
from detjax.runtime.backends import use_backend

ANOTHER_ORDER: Final = "another order"
"""The control with sequences in reverse order."""

DETJAX: Final = "detjax"

HEAD_CHUNK: Final = 2048
"""Tokens per chunk of the stock program's head, if chunked."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of training.

    Attributes:
        preset: the model's shape.
        layers: its number of layers; None: the preset's own.
        sequences: sequences per microbatch.
        length: tokens per sequence.
        microbatches: microbatches per step.
        shards: the parts of a batch whose sums are added as a tree.
        rounds: measured steps of each rival, alternating.
    """

    preset: str = "Qwen3-0.6B"
    layers: int | None = None
    sequences: int = 8
    length: int = 1024
    microbatches: int = 4
    shards: int = 1
    rounds: int = 4


SMALL: Final = Sizes("tiny", 1, 2, 32, 2, 1, 1)


def samples(sizes: Sizes, vocabulary: int) -> list[Sample]:
    """Returns sequences of random tokens with weights of one over the number of tokens."""
    random, count = np.random.default_rng(0), sizes.sequences * sizes.microbatches
    weights = np.full(sizes.length - 1, 1 / (count * (sizes.length - 1)), np.float32)
    tokens = random.integers(0, vocabulary, (count, sizes.length)).astype(np.int32)
    return [Sample(row, weights, np.zeros_like(weights)) for row in tokens]


def _stock_microbatches(batch: Sequence[Sample], sizes: Sizes) -> list[tuple[Array, ...]]:
    tokens = np.stack([sample.tokens for sample in batch])
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    weights = np.pad(np.stack([sample.weights for sample in batch]), ((0, 0), (0, 1)))
    cut = [np.split(x, sizes.microbatches) for x in (tokens, targets, weights)]
    return [tuple(map(jnp.asarray, arrays)) for arrays in zip(*cut, strict=True)]


def rivals(sizes: Sizes) -> dict[str, Callable[[], Callable[[], None]]]:
    """Returns the rivals by name: functions that make a rival's state, and return its step."""
    config = presets.config(sizes.preset, sizes.layers)
    batch = samples(sizes, config.vocab_size)

    def detjax_step() -> Callable[[], None]:
        optimizer = adamw(stock.LEARNING_RATE, weight_decay=1e-4)
        plan = Plan(Rows(sizes.sequences, sizes.length), shards=sizes.shards)
        model = presets.decoder(sizes.preset, sizes.layers)
        trainer = Trainer(model, optimizer, LogLikelihood(), plan, max_norm=stock.MAX_NORM)

        def step() -> None:
            trainer.step(batch)
            jax.block_until_ready(trainer.weights)

        return step

    def stock_step(chunk: int | None) -> Callable[[], None]:
        training, microbatches = stock.Training(config, chunk), _stock_microbatches(batch, sizes)
        return lambda: training.step(microbatches)

    whole, chunk = "stock", min(HEAD_CHUNK, sizes.sequences * sizes.length)
    return {
        DETJAX: detjax_step,
        whole: functools.partial(stock_step, None),
        f"{whole}, head in chunks of {chunk}": functools.partial(stock_step, chunk),
    }


def steps(sizes: Sizes) -> dict[str, Any]:
    """Returns seconds of whole steps: gradients of all microbatches, update, and the next weights."""
    made = {name: functools.cache(make) for name, make in rivals(sizes).items()}
    runs = {name: lambda make=make: _seconds(make()) for name, make in made.items()}
    # The first two rounds compile and warm up.
    result = timing.in_turns(runs, sizes.rounds + 2, required=[DETJAX])
    medians = {name: statistics.median(seconds[2:]) for name, seconds in result.seconds.items()}
    return {
        "seconds": medians,
        "rounds": {name: seconds[2:] for name, seconds in result.seconds.items()},
        "missing": result.missing,
        "over_the_best_stock": _over_the_best_stock(medians),
    }


def separate(sizes: Sizes) -> dict[str, Any]:
    """Returns what `step_of` returns of each rival, in a process of its own, and the ratio of the steps' times.

    Rivals whose states do not fit into the memory together cannot alternate.
    """
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.93"  # of these processes
    measured: dict[str, Any] = {}
    for name in rivals(sizes):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                measured[name] = pool.submit(step_of, sizes, name).result()
            except jax.errors.JaxRuntimeError as error:
                measured[name] = {"missing": reason(error)}
    medians = {name: statistics.median(one["seconds"]) for name, one in measured.items() if "seconds" in one}
    return {"rivals": measured, "over_the_best_stock": _over_the_best_stock(medians)}


def step_of(sizes: Sizes, name: str) -> dict[str, Any]:
    """Returns the seconds of one rival's steps, of its first step, which compiles, and its most bytes of memory."""
    step = rivals(sizes)[name]()
    first, _, *seconds = [_seconds(step) for _ in range(sizes.rounds + 2)]
    memory = jax.local_devices()[0].memory_stats() or {}
    return {"first": first, "seconds": seconds, "bytes": memory.get("peak_bytes_in_use")}


def _over_the_best_stock(seconds: Mapping[str, float]) -> float | None:
    """The ratio of detjax's time to the time of the fastest rival; None without both."""
    best = min((value for name, value in seconds.items() if name != DETJAX), default=None)
    return None if best is None or DETJAX not in seconds else seconds[DETJAX] / best


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def carried_sums(sizes: Sizes) -> dict[str, float]:
    """Returns seconds of a microbatch's gradients with accumulation, and with rounded gradients that are discarded."""
    config = presets.config(sizes.preset, sizes.layers)
    network, weights = split(presets.decoder(sizes.preset, sizes.layers))
    (placed, *_) = Rows(sizes.sequences, sizes.length).microbatches(samples(sizes, config.vocab_size))
    microbatch = jax.tree.map(jnp.asarray, placed.arrays)
    loss = LogLikelihood()

    @functools.partial(compilation.jit, donate_argnums=1)
    def carried(weights: Any, sums: Any, microbatch: Any) -> Any:
        return next_sums(network, weights, sums, microbatch, loss)[0]

    @compilation.jit
    def fresh(weights: Any, microbatch: Any) -> Any:
        def logprobs(weights: Any) -> Array:
            return completion_logprobs(network.with_weights(weights), microbatch, MODEL_DISTRIBUTION)

        values, pullback = jax.vjp(logprobs, weights)
        return pullback(loss(values, microbatch))[0]

    sums = empty_sums(network, weights)
    seconds: dict[str, list[float]] = {"carried": [], "fresh": []}
    for index in range(sizes.rounds + 1):
        start = time.perf_counter()
        sums = jax.block_until_ready(carried(weights, sums, microbatch))
        middle = time.perf_counter()
        jax.block_until_ready(fresh(weights, microbatch))
        if index:
            seconds["carried"].append(middle - start)
            seconds["fresh"].append(time.perf_counter() - middle)
    return {name: statistics.median(values) for name, values in seconds.items()}


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of an operation, in detjax and stock.

    Attributes:
        name: the operation and its sizes.
        operands: the types of both functions' arguments, which are random.
        detjax: the gradients under contract.
        stock: the rival's.
        bytes: bytes that must be read and written.
    """

    name: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    detjax: Callable[..., Any]
    stock: Callable[..., Any]
    bytes: int


def _typed(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def gradients(sizes: Sizes) -> Iterator[Gradient]:
    """Yields the gradients of a decoder's operations, with accumulated sums, and with separate additions in float32."""
    config = presets.config(sizes.preset, sizes.layers)
    tokens, width, inner = sizes.sequences * sizes.length, config.hidden_size, config.intermediate_size
    heads, kv_heads, head = config.heads, config.kv_heads, config.head_dim
    f32 = functools.partial(_typed, dtype="float32")

    def linear(outputs: int, inputs: int) -> Gradient:
        def carried(x: Array, w: Array, total: Array, dy: Array) -> Any:
            def fn(x: Array, total: Array) -> Any:
                return ops.matmul(x, AccumulatedWeight(w, total), layout="nk")

            return jax.vjp(fn, x, total)[1](dy)

        def stock(x: Array, w: Array, total: Array, dy: Array) -> Any:
            dx, dw = jax.vjp(lambda x, w: jnp.dot(x, w.T), x, w)[1](dy)
            return dx, total + dw.astype(jnp.float32)

        size = 2 * (2 * tokens * inputs + inputs * outputs + tokens * outputs) + 8 * inputs * outputs
        operands = _typed(tokens, inputs), _typed(outputs, inputs), f32(outputs, inputs), _typed(tokens, outputs)
        return Gradient(f"matmul, {outputs} x {inputs}", operands, carried, stock, size)

    yield linear((heads + 2 * kv_heads) * head, width)
    yield linear(width, inner)

    def mlp_carried(x: Array, w: Array, total: Array, dy: Array) -> Any:
        def fn(x: Array, total: Array) -> Any:
            return ops.matmul(x, AccumulatedWeight(w, total), layout="nk", activation="silu", gated=True)

        return jax.vjp(fn, x, total)[1](dy)

    def mlp_stock(x: Array, w: Array, total: Array, dy: Array) -> Any:
        def fn(x: Array, w: Array) -> Any:
            return jax.nn.silu(jnp.dot(x, w[0].T)) * jnp.dot(x, w[1].T)

        dx, dw = jax.vjp(fn, x, w)[1](dy)
        return dx, total + dw.astype(jnp.float32)

    shape = 2, inner, width
    operands = _typed(tokens, width), _typed(*shape), f32(*shape), _typed(tokens, inner)
    size = 2 * (2 * tokens * width + 2 * inner * width + tokens * inner) + 16 * inner * width
    yield Gradient(f"gated matmul, 2 x {inner} x {width}", operands, mlp_carried, mlp_stock, size)

    eps = config.norm_eps

    def norm_carried(x: Array, w: Array, total: Array, dy: Array) -> Any:
        return jax.vjp(lambda x, total: ops.rms_norm(x, AccumulatedWeight(w, total), eps=eps), x, total)[1](dy)

    def norm_stock(x: Array, w: Array, total: Array, dy: Array) -> Any:
        dx, dw = jax.vjp(lambda x, w: stock.norm(x, w, eps), x, w)[1](dy)
        return dx, total + dw.astype(jnp.float32)

    operands = _typed(tokens, width), _typed(width), f32(width), _typed(tokens, width)
    yield Gradient(f"rms_norm, {width}", operands, norm_carried, norm_stock, 2 * 3 * tokens * width)

    shape = sizes.sequences, sizes.length
    all_heads = heads + 2 * kv_heads

    def rope_carried(qkv: Array, wq: Array, wk: Array, sq: Array, sk: Array, dq: Array, dk: Array) -> Any:
        positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)

        def fn(qkv: Array, sq: Array, sk: Array) -> Any:
            norms = {"q_norm": AccumulatedWeight(wq, sq), "k_norm": AccumulatedWeight(wk, sk), "norm_eps": eps}
            return ops.qk_rope(qkv, positions, config.rope, heads=heads, kv_heads=kv_heads, **norms)

        return jax.vjp(fn, qkv, sq, sk)[1]((dq, dk))

    def rope_stock(qkv: Array, wq: Array, wk: Array, sq: Array, sk: Array, dq: Array, dk: Array) -> Any:
        def fn(qkv: Array, wq: Array, wk: Array) -> Any:
            return stock.qkv_heads(qkv, wq, wk, config)[:2]

        dqkv, dwq, dwk = jax.vjp(fn, qkv, wq, wk)[1]((dq, dk))
        return dqkv, sq + dwq.astype(jnp.float32), sk + dwk.astype(jnp.float32)

    grads = _typed(*shape, heads, head), _typed(*shape, kv_heads, head)
    operands = _typed(*shape, all_heads, head), _typed(head), _typed(head), f32(head), f32(head), *grads
    size = 2 * tokens * head * (2 * (heads + kv_heads) + all_heads)
    yield Gradient(f"q/k norm and rope, {heads} and {kv_heads} heads", operands, rope_carried, rope_stock, size)

    def attention_carried(q: Array, k: Array, v: Array, do: Array) -> Any:
        return jax.vjp(ops.dot_product_attention, q, k, v)[1](do)

    def attention_stock(q: Array, k: Array, v: Array, do: Array) -> Any:
        return jax.vjp(stock.attention, q, k, v)[1](do)

    q, kv = _typed(*shape, heads, head), _typed(*shape, kv_heads, head)
    size = 2 * tokens * head * (3 * heads + 4 * kv_heads)
    yield Gradient("attention, with its forward pass", (q, kv, kv, q), attention_carried, attention_stock, size)

    table = _typed(config.vocab_size, width)
    sums = f32(config.vocab_size, width)

    def embedding_carried(ids: Array, table: Array, total: Array, dy: Array) -> Any:
        def fn(total: Array) -> Any:
            return ops.embed(ids, AccumulatedWeight(table, None, total))

        return jax.vjp(fn, total)[1](dy)

    def embedding_stock(ids: Array, table: Array, total: Array, dy: Array) -> Any:
        (dtable,) = jax.vjp(lambda table: table[ids], table)[1](dy)
        return total + dtable.astype(jnp.float32)

    operands = _typed(tokens, dtype="int32"), table, sums, _typed(tokens, width)
    yield Gradient("embedding", operands, embedding_carried, embedding_stock, tokens * width * (2 + 8))

    def head_carried(x: Array, head: Array, total: Array, ids: Array, g: Array) -> Any:
        return ops.token_logprobs_and_gradients(x, AccumulatedWeight(head, total), ids, _given, g)[1:]

    def head_stock(x: Array, head: Array, total: Array, ids: Array, g: Array) -> Any:
        def fn(x: Array, head: Array) -> Any:
            return stock.token_logprobs(x, head, ids, None)

        dx, dhead = jax.vjp(fn, x, head)[1](g)
        return dx, total + dhead.astype(jnp.float32)

    operands = _typed(tokens, width), table, sums, _typed(tokens, dtype="int32"), f32(tokens)
    size = 10 * config.vocab_size * width + 4 * tokens * width
    yield Gradient("head, with its forward pass", operands, head_carried, head_stock, size)


def _given(logprobs: Array, gradients: Array) -> Array:
    """A derivative that does not depend on the logprobs."""
    del logprobs
    return gradients


def gradient_times(sizes: Sizes, calls: int = 8) -> Iterator[dict[str, Any]]:
    """Yields the device time of each operation's gradients, of the rival's, and of a copy of as many bytes."""
    config = presets.config(sizes.preset, sizes.layers)
    for case in gradients(sizes):
        arguments = tuple(_random(operand, index, config.vocab_size) for index, operand in enumerate(case.operands))
        runs = {
            "detjax": functools.partial(timing.device_time, compilation.jit(case.detjax), [arguments], calls=calls),
            "stock": functools.partial(timing.device_time, jax.jit(case.stock), [arguments], calls=calls),
        }
        result = timing.in_turns(runs, 2)
        seconds = result.medians
        ratio = seconds["detjax"] / seconds["stock"] if len(seconds) == len(runs) else None
        yield {
            "name": case.name,
            "seconds": seconds,
            "missing": result.missing,
            "over_stock": ratio,
            "bytes": case.bytes,
        }


def _random(operand: jax.ShapeDtypeStruct, seed: int, most: int) -> Array:
    key = jax.random.key(seed)
    if jnp.issubdtype(operand.dtype, jnp.integer):
        return jax.random.randint(key, operand.shape, 0, most, operand.dtype)
    return jax.random.normal(key, operand.shape, jnp.float32).astype(operand.dtype)


def ragged_samples(sizes: Sizes) -> tuple[list[Sample], int]:
    """Returns sequences of mixed lengths, and the smallest multiple of 16 that fits all of them."""
    config, random = presets.config(sizes.preset, sizes.layers), np.random.default_rng(1)
    lengths = random.integers(2, sizes.length + 1, 2 * sizes.sequences)
    batch = []
    for length in lengths:
        tokens = random.integers(0, config.vocab_size, length).astype(np.int32)
        weights = random.standard_normal(length - 1).astype(np.float32)
        batch.append(Sample(tokens, weights / length, np.zeros(length - 1, np.float32)))
    return batch, round_up(int(lengths.max()), 16)


def plans(sizes: Sizes, length: int) -> tuple[dict[str, Plan], dict[str, Plan]]:
    """Returns plans with equal bits, and controls with different bits."""
    row = functools.partial(Rows, length=length)
    equal = {f"microbatches of {n}": Plan(row(n), shards=2) for n in (sizes.sequences, 1, 2, 4)}
    equal |= {f"rows padded by {n}": Plan(Rows(2, length + n), shards=2) for n in (16, 112)}
    equal |= {f"packed into {n} tokens": Plan(Packed(n), shards=2) for n in (length, 4 * length)}
    equal["rematerialized"] = Plan(row(4), shards=2, rematerialized=True)
    return equal, {"4 shards": Plan(row(4), shards=4), ANOTHER_ORDER: Plan(row(4), shards=2)}


def digest(sizes: Sizes, name: str) -> str:
    """Returns a digest of state, weights and logprobs after a step under one of `plans`, or the reason of a failure."""
    batch, length = ragged_samples(sizes)
    equal, controls = plans(sizes, length)
    model = presets.decoder(sizes.preset, sizes.layers)
    optimizer, plan = adamw(1e-3, weight_decay=0.1), (equal | controls)[name]
    trainer = Trainer(model, optimizer, LogLikelihood(), plan)
    try:
        report = trainer.step(batch[::-1] if name == ANOTHER_ORDER else batch)
    except NotImplementedError as error:
        return reason(error)
    arrays = [*jax.tree.leaves(trainer.state), *trainer.weights, *sorted(report.logprobs, key=len)]
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in arrays)).hexdigest()


def bits(sizes: Sizes, processes: int) -> dict[str, Any]:
    """Compares a step's bits under other schedules, and its gradients with stock's in float32.

    Args:
        sizes: the sizes of the model; sequences have mixed lengths.
        processes: plans that are compiled in parallel, each in a separate process.
    """
    equal, controls = plans(sizes, ragged_samples(sizes)[1])
    names = [*equal, *controls]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # of these processes
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        errors = pool.submit(relative_errors, sizes)
        digests = dict(zip(names, pool.map(functools.partial(digest, sizes), names), strict=True))
        reference = digests[names[0]]
        return {
            "digests": digests,
            "equal": {name: digests[name] == reference for name in equal},
            "controls_differ": {name: digests[name] != reference for name in controls},
            "relative_errors": errors.result(),
        }


def relative_errors(sizes: Sizes) -> dict[str, float]:
    """Returns each leaf's largest error relative to its largest gradient, against stock numerics in float32."""
    batch, length = ragged_samples(sizes)
    network, weights = split(presets.decoder(sizes.preset, sizes.layers))
    loss, layout = LogLikelihood(), Rows(4, length)
    sums = empty_sums(network, weights)
    for placed in layout.microbatches(batch):
        microbatch = jax.tree.map(jnp.asarray, placed.arrays)
        sums = compilation.jit(lambda w, s, m: next_sums(network, w, s, m, loss)[0])(weights, sums, microbatch)
    with use_backend("stock"):
        wide = tuple(weight.astype(jnp.float32) for weight in weights)
        exact = empty_sums(network, wide)
        for placed in layout.microbatches(batch):
            microbatch = jax.tree.map(jnp.asarray, placed.arrays)
            exact = compilation.jit(lambda w, s, m: next_sums(network, w, s, m, loss)[0])(wide, exact, microbatch)
    errors: dict[str, float] = {}
    for path, total, reference in zip(network.paths, sums, exact, strict=True):
        for a, b in zip(total, reference, strict=True):
            if a is not None and b is not None:
                name = str(path[-2:])
                error = float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
                errors[name] = max(error, errors.get(name, 0.0))
    return errors
