"""The usual sharding of a dense model over devices, as a plain JAX program: seconds of a step.

    python -m benchmarks usual_cut --out benchmarks/results/usual-cut-two-h100.json

This is the rival of `--tensor-parallel`. Each device has some heads and inner columns of a layer; the
projections back to the residual stream are cut by their inputs, and two all-reduces a layer add the parts
(Shoeybi et al. 2019). XLA computes everything, a step is one program, and no engine runs it: keys and values
are in one array, the likeliest token is chosen on the devices, and the next step takes it from there. A prefill
computes a whole prompt and its likeliest next token, with cuDNN's attention on GPUs. The shape is a preset's, with
random weights, on one device and on 2, 4 and so on up to `--devices`. `XLA_FLAGS` chooses XLA's form of the all-reduce.

A step is unrolled over layers, because loops are slower, and compiles in a time that grows with `--layers`.
`--small` takes seconds on a CPU with two devices simulated by `XLA_FLAGS=--xla_force_host_platform_device_count=2`.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Int32

from benchmarks import rivals
from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.bench import presets
from detjax.cli.options import Option, usage_errors
from detjax.models.configuration.config import DecoderConfig

AXIS: Final = "tensor"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        preset: the model's shape; a dense one of Qwen3's form.
        layers: number of layers; None: the preset's own.
        prompt: tokens in the cache before the first step.
        steps: timed steps of a round.
        requests: numbers of requests that decode together.
        prefill: tokens of a prompt to prefill; 0: no prefill.
    """

    preset: str = "Qwen3-8B"
    layers: int | None = None
    prompt: int = 1024
    steps: int = 200
    requests: tuple[int, ...] = (1,)
    prefill: int = 0


SMALL: Final = Sizes("tiny", 1, 16, 4, (1, 3), 24)


class Layer(NamedTuple):
    """A layer's weights, `[K, N]`, and its cache, `[requests, key heads, context, head_dim]`; or their shardings."""

    q: Any
    k: Any
    v: Any
    o: Any
    gate: Any
    up: Any
    down: Any
    keys: Any
    values: Any


class Model(NamedTuple):
    """All weights and caches, or their shardings."""

    embedding: Any
    head: Any
    layers: tuple[Layer, ...]


INPUTS, OUTPUTS, HEADS = P(AXIS, None), P(None, AXIS), P(None, AXIS, None, None)
LAYER: Final = Layer(OUTPUTS, OUTPUTS, OUTPUTS, INPUTS, OUTPUTS, OUTPUTS, INPUTS, HEADS, HEADS)
"""The sharding of a layer."""


def study(
    run: Run,
    *,
    preset: options.Preset = Sizes.preset,
    layers: options.Layers = None,
    devices: Annotated[int, Option("Devices that share the model.", minimum=2)] = 2,
    requests: Annotated[list[int] | None, Option("Requests that decode together.", minimum=1, default="1")] = None,
    prefill: Annotated[int, Option("Tokens of a prompt to prefill; 0: none.", minimum=0)] = Sizes.prefill,
    rounds: options.RoundCount = 5,
) -> Result:
    given = Sizes(preset, layers, requests=tuple(requests or Sizes.requests), prefill=prefill)
    sizes = SMALL if run.small else given
    with usage_errors():
        config = shape_of(sizes, devices)
    content: dict[str, Any] = {
        "sizes": dataclasses.asdict(sizes),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "seconds": {},
    }
    for count in options.counts(devices):
        for name, timed in timings(config, sizes, count, rounds):
            content["seconds"].setdefault(name, {})[str(count)] = timed
            run.save(content)
    medians = {
        name: {count: statistics.median(times) for count, times in by_count.items()}
        for name, by_count in content["seconds"].items()
    }
    over_one = {name: {count: x / by_count["1"] for count, x in by_count.items()} for name, by_count in medians.items()}
    return Result({**content, "time_over_one": over_one})


def shape_of(sizes: Sizes, devices: int) -> DecoderConfig:
    """Returns the model's shape; the tiny one gets enough heads for eight devices.

    Raises:
        ValueError: the shape is not one of a dense model of Qwen3's form, or its key heads do not divide.
    """
    config = presets.config(sizes.preset, sizes.layers)
    if sizes.preset == "tiny":
        config = dataclasses.replace(config, heads=8, kv_heads=8)
    if config.experts is not None or not sizes.preset.startswith(("Qwen3-", "tiny")):
        raise ValueError(f"usual_cut: the preset is {sizes.preset}; accepted: dense models of Qwen3's form")
    if config.kv_heads % devices:
        raise ValueError(f"usual_cut: devices is {devices}; accepted: divisors of {config.kv_heads}, the key heads")
    return config


def timings(config: DecoderConfig, sizes: Sizes, devices: int, rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Yields the name of each step and its seconds in each round, on a number of devices.

    The largest batch comes first, so that what does not fit into memory shows at once.
    """
    mesh = Mesh(jax.devices()[:devices], (AXIS,))
    for requests in sorted(sizes.requests, reverse=True):
        yield f"decode of {requests}", _decode(config, sizes, requests, mesh, rounds)
    if sizes.prefill:
        yield f"prefill of {sizes.prefill}", _prefill(config, sizes.prefill, mesh, rounds)


def _decode(config: DecoderConfig, sizes: Sizes, requests: int, mesh: Mesh, rounds: int) -> list[float]:
    """Returns the seconds of a step in each round."""
    specs = Model(P(), OUTPUTS, (LAYER,) * config.layers)
    model = _random(config, requests, sizes.prompt + sizes.steps, mesh)
    body = jax.shard_map(
        functools.partial(step, config), mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs), check_vma=False
    )
    compiled: Any = jax.jit(body, donate_argnums=0)
    token = jnp.zeros(requests, jnp.int32)
    timed = []
    for number in range(rounds + 1):  # the first round compiles
        begin = time.perf_counter()
        for position in range(sizes.prompt, sizes.prompt + sizes.steps):
            token, model = compiled(model, token, jnp.asarray(position, jnp.int32))
        token.block_until_ready()
        timed += [(time.perf_counter() - begin) / sizes.steps] * (number > 0)
    return timed


def _prefill(config: DecoderConfig, tokens: int, mesh: Mesh, rounds: int) -> list[float]:
    """Returns the seconds of the prefill of a prompt in each round."""
    specs = Model(P(), OUTPUTS, (LAYER,) * config.layers)
    model = _random(config, 1, 1, mesh)
    body = jax.shard_map(
        functools.partial(prefill_step, config), mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False
    )
    compiled: Any = jax.jit(body)
    prompt, timed = jnp.arange(tokens, dtype=jnp.int32) % config.vocab_size, []
    for number in range(rounds + 1):
        begin = time.perf_counter()
        compiled(model, prompt).block_until_ready()
        timed += [time.perf_counter() - begin] * (number > 0)
    return timed


def _random(config: DecoderConfig, requests: int, context: int, mesh: Mesh) -> Model:
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, keys = config.heads * head, config.kv_heads * head
    draw = iter(jax.random.split(jax.random.key(0), 2 + 7 * config.layers))
    shapes = (
        (width, heads),
        (width, keys),
        (width, keys),
        (heads, width),
        (width, inner),
        (width, inner),
        (inner, width),
    )

    cache = requests, config.kv_heads, context, head

    def layer() -> Layer:
        weights = [
            _weight(next(draw), shape, NamedSharding(mesh, spec)) for shape, spec in zip(shapes, LAYER, strict=False)
        ]
        return Layer(*weights, *(_empty(cache, NamedSharding(mesh, HEADS)) for _ in range(2)))

    embedding = _weight(next(draw), (config.vocab_size, width), NamedSharding(mesh, P()))
    head_weight = _weight(next(draw), (width, config.vocab_size), NamedSharding(mesh, OUTPUTS))
    return Model(embedding, head_weight, tuple(layer() for _ in range(config.layers)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _weight(key: Array, shape: tuple[int, int], sharding: NamedSharding) -> Array:
    """Returns random numbers. One program makes all weights of a shape, because the compiler needs long for many."""
    return lax.with_sharding_constraint(jax.random.normal(key, shape, jnp.bfloat16) * shape[0] ** -0.5, sharding)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty(shape: tuple[int, ...], sharding: NamedSharding) -> Array:
    """Returns a cache, made on the devices that share it."""
    return lax.with_sharding_constraint(jnp.zeros(shape, jnp.bfloat16), sharding)


def step(
    config: DecoderConfig, model: Model, token: Int32[Array, "B"], position: Int32[Array, ""]
) -> tuple[Int32[Array, "B"], Model]:
    """Returns the likeliest next tokens, and the model with the tokens' keys and values; runs on each device."""
    x, layers = model.embedding[token], []
    places = jnp.broadcast_to(position, token.shape)
    for weights in model.layers:
        q, k, v = _heads(config, weights, x, places)
        keys = lax.dynamic_update_index_in_dim(weights.keys, k, position, 2)
        values = lax.dynamic_update_index_in_dim(weights.values, v, position, 2)
        x = _after_attention(weights, x, _attended(q, keys, values, places))
        layers.append(weights._replace(keys=keys, values=values))
    return _likeliest(model, x), model._replace(layers=tuple(layers))


def prefill_step(config: DecoderConfig, model: Model, prompt: Int32[Array, "T"]) -> Int32[Array, "1"]:
    """Returns the likeliest token after a prompt; runs on each device."""
    x, places = model.embedding[prompt], jnp.arange(len(prompt), dtype=jnp.int32)
    for weights in model.layers:
        q, k, v = _heads(config, weights, x, places)
        if jax.default_backend() == "gpu":
            mixed = rivals.cudnn(causal=True)(q[None], k[None], v[None])[0]
        else:  # each token as a request of the whole prompt
            keys, values = (jnp.repeat(jnp.swapaxes(part, 0, 1)[None], len(x), axis=0) for part in (k, v))
            mixed = _attended(q, keys, values, places)
        x = _after_attention(weights, x, mixed)
    return _likeliest(model, x[-1:])


def _heads(
    config: DecoderConfig, weights: Layer, x: BFloat16[Array, "N D"], places: Int32[Array, "N"]
) -> tuple[BFloat16[Array, "N H d"], BFloat16[Array, "N h d"], BFloat16[Array, "N h d"]]:
    """Returns this device's queries, keys and values."""
    x = _normed(x)
    q, k, v = (jnp.dot(x, one).reshape(len(x), -1, config.head_dim) for one in (weights.q, weights.k, weights.v))
    return _turned(_normed(q), places), _turned(_normed(k), places), v


def _after_attention(
    weights: Layer, x: BFloat16[Array, "N D"], mixed: BFloat16[Array, "N H d"]
) -> BFloat16[Array, "N D"]:
    """Returns the residual stream after the rest of a layer, with its two all-reduces."""
    x = x + lax.psum(jnp.dot(mixed.reshape(len(x), -1), weights.o), AXIS)
    inner = _normed(x)
    inner = jax.nn.silu(jnp.dot(inner, weights.gate)) * jnp.dot(inner, weights.up)
    return x + lax.psum(jnp.dot(inner, weights.down), AXIS)


def _likeliest(model: Model, x: BFloat16[Array, "N D"]) -> Int32[Array, "N"]:
    logits = jnp.dot(_normed(x), model.head, preferred_element_type=jnp.float32)
    best, first = jnp.argmax(logits, -1), lax.axis_index(AXIS) * logits.shape[-1]
    # Each device's best logit and token, in one exchange. Token ids are exact in float32.
    pairs = jnp.stack([logits.max(-1), (first + best).astype(jnp.float32)])
    logit, chosen = jnp.moveaxis(lax.all_gather(pairs, AXIS), 1, 0)
    return jnp.take_along_axis(chosen, jnp.argmax(logit, 0)[None], 0)[0].astype(jnp.int32)


def _normed(x: BFloat16[Array, "*N D"]) -> BFloat16[Array, "*N D"]:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _turned(x: BFloat16[Array, "N H d"], places: Int32[Array, "N"]) -> BFloat16[Array, "N H d"]:
    half = x.shape[-1] // 2
    angles = jnp.outer(places.astype(jnp.float32), 1e6 ** (-jnp.arange(half, dtype=jnp.float32) / half))
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _attended(
    q: BFloat16[Array, "B H d"],
    keys: BFloat16[Array, "B h C d"],
    values: BFloat16[Array, "B h C d"],
    positions: Int32[Array, "B"],
) -> BFloat16[Array, "B H d"]:
    grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("bhgd,bhcd->bhgc", grouped, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(keys.shape[2])[None] <= positions[:, None]
    probabilities = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf)).astype(q.dtype)
    return jnp.einsum("bhgc,bhcd->bhgd", probabilities, values).reshape(q.shape)
