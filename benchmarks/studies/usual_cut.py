"""The usual sharding of a dense model over devices, as a plain JAX program: seconds of a decode step.

    python -m benchmarks usual_cut --out benchmarks/results/usual-cut-two-h100.json

This is the rival of `--tensor-parallel` for one request. Each device has some heads and inner columns of a layer; the
projections back to the residual stream are cut by their inputs, and two all-reduces a layer add the parts
(Shoeybi et al. 2019). XLA computes everything, a step is one program, and no engine runs it: keys and values
are in one array, the likeliest token is chosen on the devices, and the next step takes it from there. The shape is a
preset's, with random weights, on one device and on several. `XLA_FLAGS` chooses XLA's form of the all-reduce.

`--small` takes seconds on a CPU with two devices simulated by `XLA_FLAGS=--xla_force_host_platform_device_count=2`.
"""

import dataclasses
import functools
import os
import statistics
import time
from typing import Annotated, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Int32

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.bench import presets
from detjax.cli.options import Option
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
    """

    preset: str = "Qwen3-8B"
    layers: int | None = None
    prompt: int = 1024
    steps: int = 200


SMALL: Final = Sizes("tiny", 1, 16, 4)


class Layer(NamedTuple):
    """The weights of a layer, `[K, N]`, and its cache, `[context, key heads, head_dim]`; or their shardings."""

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


INPUTS, OUTPUTS, HEADS = P(AXIS, None), P(None, AXIS), P(None, AXIS, None)
LAYER: Final = Layer(OUTPUTS, OUTPUTS, OUTPUTS, INPUTS, OUTPUTS, OUTPUTS, INPUTS, HEADS, HEADS)
"""The sharding of a layer."""


def study(
    run: Run,
    *,
    preset: options.Preset = Sizes.preset,
    layers: options.Layers = None,
    devices: Annotated[int, Option("Devices that share the model.", minimum=2)] = 2,
    rounds: options.RoundCount = 5,
) -> Result:
    sizes = SMALL if run.small else Sizes(preset, layers)
    config = presets.config(sizes.preset, sizes.layers)
    seconds = {str(count): _seconds(config, sizes, count, rounds) for count in (1, devices)}
    content = {"sizes": dataclasses.asdict(sizes), "xla_flags": os.environ.get("XLA_FLAGS", ""), "seconds": seconds}
    return Result(
        {**content, "time_over_one": statistics.median(seconds[str(devices)]) / statistics.median(seconds["1"])}
    )


def _seconds(config: DecoderConfig, sizes: Sizes, devices: int, rounds: int) -> list[float]:
    """Returns the seconds of a step in each round."""
    mesh = Mesh(jax.devices()[:devices], (AXIS,))
    specs = Model(P(), OUTPUTS, (LAYER,) * config.layers)
    model = _random(config, sizes.prompt + sizes.steps, mesh)
    body = jax.shard_map(
        functools.partial(step, config), mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs), check_vma=False
    )
    compiled: Any = jax.jit(body, donate_argnums=0)
    token = jnp.zeros((), jnp.int32)
    timed = []
    for number in range(rounds + 1):  # the first round compiles
        begin = time.perf_counter()
        for position in range(sizes.prompt, sizes.prompt + sizes.steps):
            token, model = compiled(model, token, jnp.asarray(position, jnp.int32))
        token.block_until_ready()
        timed += [(time.perf_counter() - begin) / sizes.steps] * (number > 0)
    return timed


def _random(config: DecoderConfig, context: int, mesh: Mesh) -> Model:
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

    def layer() -> Layer:
        weights = [
            _weight(next(draw), shape, NamedSharding(mesh, spec)) for shape, spec in zip(shapes, LAYER, strict=False)
        ]
        cache = jnp.zeros((context, config.kv_heads, head), jnp.bfloat16)
        return Layer(*weights, *(jax.device_put(cache, NamedSharding(mesh, HEADS), may_alias=False) for _ in range(2)))

    embedding = _weight(next(draw), (config.vocab_size, width), NamedSharding(mesh, P()))
    head_weight = _weight(next(draw), (width, config.vocab_size), NamedSharding(mesh, OUTPUTS))
    return Model(embedding, head_weight, tuple(layer() for _ in range(config.layers)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _weight(key: Array, shape: tuple[int, int], sharding: NamedSharding) -> Array:
    """Returns random numbers. One program makes all weights of a shape, because the compiler needs long for many."""
    return lax.with_sharding_constraint(jax.random.normal(key, shape, jnp.bfloat16) * shape[0] ** -0.5, sharding)


def step(
    config: DecoderConfig, model: Model, token: Int32[Array, ""], position: Int32[Array, ""]
) -> tuple[Int32[Array, ""], Model]:
    """Returns the likeliest next token, and the model with the token's keys and values; runs on each device."""
    x, layers = model.embedding[token], []
    for weights in model.layers:
        q, k, v = (jnp.dot(_normed(x), one).reshape(-1, config.head_dim) for one in (weights.q, weights.k, weights.v))
        keys = lax.dynamic_update_index_in_dim(weights.keys, _turned(_normed(k), position), position, 0)
        values = lax.dynamic_update_index_in_dim(weights.values, v, position, 0)
        mixed = _attended(_turned(_normed(q), position), keys, values, position)
        x = x + lax.psum(jnp.dot(mixed.reshape(-1), weights.o), AXIS)
        inner = _normed(x)
        inner = jax.nn.silu(jnp.dot(inner, weights.gate)) * jnp.dot(inner, weights.up)
        x = x + lax.psum(jnp.dot(inner, weights.down), AXIS)
        layers.append(weights._replace(keys=keys, values=values))
    logits = jnp.dot(_normed(x), model.head, preferred_element_type=jnp.float32)
    best, first = jnp.argmax(logits), lax.axis_index(AXIS) * len(logits)
    # Each device's best logit and token, in one exchange. Token ids are exact in float32.
    logit, chosen = lax.all_gather(jnp.stack([logits[best], (first + best).astype(jnp.float32)]), AXIS).T
    return chosen[jnp.argmax(logit)].astype(jnp.int32), model._replace(layers=tuple(layers))


def _normed(x: BFloat16[Array, "*N D"]) -> BFloat16[Array, "*N D"]:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _turned(x: BFloat16[Array, "H d"], position: Int32[Array, ""]) -> BFloat16[Array, "H d"]:
    half = x.shape[-1] // 2
    angles = position.astype(jnp.float32) * 1e6 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[:, :half].astype(jnp.float32), x[:, half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _attended(
    q: BFloat16[Array, "H d"],
    keys: BFloat16[Array, "C h d"],
    values: BFloat16[Array, "C h d"],
    position: Int32[Array, ""],
) -> BFloat16[Array, "H d"]:
    grouped = q.reshape(keys.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("hgd,chd->hgc", grouped, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(len(keys)) <= position
    probabilities = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(q.dtype)
    return jnp.einsum("hgc,chd->hgd", probabilities, values).reshape(q.shape)
