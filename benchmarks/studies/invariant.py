"""Plain Flax models under `batch_invariant`: speed, bits, and tracing time.

    python -m benchmarks invariant --out benchmarks/results/invariant-h200.json

The models have the shapes of GPT-2 and Qwen3-0.6B and random bfloat16 weights, and use Flax' own layers. A call
computes the logits of the last token of each row. Tracing is measured with Qwen3-8B's shape.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax import invariant
from detjax.bench import timing
from detjax.cli.options import Option
from detjax.runtime import compilation


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a transformer.

    Attributes:
        layers: the number of layers.
        width: the width of hidden states.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: head size.
        hidden: the inner width of an MLP.
        vocabulary: the number of tokens.
        gated: whether it is built like Qwen3: RMS norms, also of queries and keys, rotary embedding, and gated MLPs
            without biases. Otherwise like GPT-2: layer norms, learned positions, GELU, and biases.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    gated: bool


SHAPES: Final[Mapping[str, Shape]] = {
    "GPT-2": Shape(12, 768, 12, 12, 64, 3072, 50257, False),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, True),
}
TINY: Final = Shape(1, 64, 4, 2, 16, 96, 128, True)
PARTS: Final = ("speeds", "tracing", "bits")
BATCHES: Final = (1, 16, 64)
COMPARED: Final = (2, 3, 8, 17, 64)
"""The batch sizes at which a row's bits are compared with the row alone."""


class _Layer(nnx.Module):
    """Attention and MLP of Flax' own layers."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        options: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        norm, bias = (nnx.RMSNorm if shape.gated else nnx.LayerNorm), not shape.gated
        self.shape = shape
        self.norm, self.second_norm = norm(shape.width, **options), norm(shape.width, **options)
        keys = shape.kv_heads * shape.head_dim
        self.query = nnx.Linear(shape.width, shape.heads * shape.head_dim, use_bias=bias, **options)
        self.key = nnx.Linear(shape.width, keys, use_bias=bias, **options)
        self.value = nnx.Linear(shape.width, keys, use_bias=bias, **options)
        self.out = nnx.Linear(shape.heads * shape.head_dim, shape.width, use_bias=bias, **options)
        self.up = nnx.Linear(shape.width, shape.hidden, use_bias=bias, **options)
        self.down = nnx.Linear(shape.hidden, shape.width, use_bias=bias, **options)
        if shape.gated:
            self.gate = nnx.Linear(shape.width, shape.hidden, use_bias=False, **options)
            self.query_norm, self.key_norm = (nnx.RMSNorm(shape.head_dim, **options) for _ in range(2))

    def __call__(self, x: Array) -> Array:
        h = self.norm(x)
        x = x + self.out(self._attend(self.query(h), self.key(h), self.value(h)))
        h = self.second_norm(x)
        h = jax.nn.silu(self.gate(h)) * self.up(h) if self.shape.gated else jax.nn.gelu(self.up(h))
        return x + self.down(h)

    def _attend(self, query: Array, key: Array, value: Array) -> Array:
        batch, length, _ = query.shape
        query, key, value = (x.reshape(batch, length, -1, self.shape.head_dim) for x in (query, key, value))
        if self.shape.gated:
            query, key = _rotated(self.query_norm(query)), _rotated(self.key_norm(key))
        query = query.reshape(batch, length, self.shape.kv_heads, -1, self.shape.head_dim)
        scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(causal, scores * self.shape.head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(batch, length, -1)


class Transformer(nnx.Module):
    """Logits of the last token."""

    def __init__(self, shape: Shape, length: int, rngs: nnx.Rngs) -> None:
        options: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.embed = nnx.Embed(shape.vocabulary, shape.width, **options)
        self.positions = None if shape.gated else nnx.Embed(length, shape.width, **options)
        self.layers = nnx.List([_Layer(shape, rngs) for _ in range(shape.layers)])
        self.norm = (nnx.RMSNorm if shape.gated else nnx.LayerNorm)(shape.width, **options)

    def __call__(self, tokens: Array) -> Array:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(tokens.shape[1])[None])
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x[:, -1]))


def _rotated(x: Array) -> Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e6 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None].astype(jnp.float32) for f in (jnp.sin, jnp.cos))
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def speeds(shape: Shape, length: int, batches: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yields, for each batch, milliseconds of a call with stock JAX and with `batch_invariant`, alternating."""
    model = Transformer(shape, length, nnx.Rngs(0))
    programs = _programs()
    for batch in batches:
        arguments = [(model, _tokens(shape, batch, length, seed)) for seed in range(2)]
        runs = {
            name: lambda program=program, arguments=arguments: timing.step_time(program, arguments, steps=10)
            for name, program in programs.items()
        }
        medians = timing.in_turns(runs, rounds, required=tuple(runs)).medians
        yield {
            "batch": batch,
            "length": length,
            **{f"{name}_ms": seconds * 1e3 for name, seconds in medians.items()},
            "speed_over_stock": medians["stock"] / medians["invariant"],
        }


def bits(shape: Shape, length: int, batches: Sequence[int]) -> dict[str, list[int]]:
    """Returns, for stock JAX and `batch_invariant`, the batch sizes at which a row has other bits than alone."""
    model, alone = Transformer(shape, length, nnx.Rngs(0)), _tokens(shape, 1, length, 0)
    changed: dict[str, list[int]] = {}
    for name, program in _programs().items():
        expected = np.asarray(program(model, alone))[0].tobytes()
        changed[name] = []
        for batch in batches:
            places = sorted({0, batch // 2, batch - 1})
            others = [_tokens(shape, batch, length, batch).at[place].set(alone[0]) for place in places]
            rows = [np.asarray(program(model, tokens))[place] for tokens, place in zip(others, places, strict=True)]
            if any(row.tobytes() != expected for row in rows):
                changed[name].append(batch)
    return changed


def tracing(shape: Shape, length: int) -> dict[str, float]:
    """Returns the seconds to trace a model without weights, for stock JAX and `batch_invariant`."""
    model = nnx.eval_shape(lambda: Transformer(shape, length, nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((16, length), jnp.int32)
    seconds = {}
    for name, fn in {"stock": _call, "invariant": invariant.batch_invariant(_call, (None, 0))}.items():
        start = time.perf_counter()
        with compilation.under_contract():
            jax.make_jaxpr(fn)(model, tokens)
        seconds[name] = time.perf_counter() - start
    return seconds


def _call(model: Transformer, tokens: Array) -> Array:
    return model(tokens)


def _programs() -> dict[str, Any]:
    return {"stock": jax.jit(_call), "invariant": compilation.jit(invariant.batch_invariant(_call, (None, 0)))}


def _tokens(shape: Shape, batch: int, length: int, seed: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, shape.vocabulary, (batch, length)), jnp.int32)


def study(
    run: Run,
    *,
    length: Annotated[int, Option("Tokens per row.", minimum=1)] = 128,
    rounds: options.RoundCount = 5,
    part: Annotated[list[str], options.names(PARTS)],
) -> Result:
    shapes = {"tiny": TINY} if run.small else {name: SHAPES[name] for name in ("GPT-2", "Qwen3-0.6B")}
    batches, compared = ((1, 2), (2, 3)) if run.small else (BATCHES, COMPARED)
    length, rounds = (8, 1) if run.small else (length, rounds)
    results: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    content: dict[str, Any] = {"small": run.small, "results": results}
    if "speeds" in part:
        for name, shape in shapes.items():
            measured = results[name]["speeds"] = []
            for speed in speeds(shape, length, batches, rounds):
                measured.append(speed)
                run.save(content)
    if "tracing" in part:
        content["tracing_seconds"] = tracing(TINY if run.small else SHAPES["Qwen3-8B"], length)
        run.save(content)
    if "bits" in part:
        for name, shape in shapes.items():
            results[name]["batches_with_other_bits"] = bits(shape, length, compared)
            run.save(content)
    return Result(content)
