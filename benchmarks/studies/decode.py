"""Decode steps of whole models, by family: the bandwidth of a step's necessary reads as a share of a copy's.

    python -m benchmarks decode --out benchmarks/results/decode-h200.json

Models have random weights and fewer layers. Weights of experts count if a token of the batch chose the expert. Times
are wall-clock times of consecutive steps, including the time between kernels.
"""

import os

# A copy of as many bytes is measured while the model is in memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

import detjax
from benchmarks import study as options
from benchmarks.study import Result, Run
from benchmarks.timing import copy_time
from detjax import ops
from detjax.bench import presets, timing
from detjax.contract import DELTA_CHUNK, KV_BLOCK
from detjax.models import Decoder
from detjax.models.network import Network, parameters, part_with, split
from detjax.models.parts.experts import Experts
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.linear_attention_state import DeltaNetState
from detjax.operands.numerics import ceil_div
from detjax.runtime import compilation

MODELS: Final[Mapping[str, int]] = {
    "Qwen3-8B": 8,
    "Qwen3-30B-A3B": 12,
    "gpt-oss-20b": 8,
    "DeepSeek-V3": 4,
    "Qwen3.5-35B-A3B": 8,
}
"""Presets, and their measured layers by default: enough that the head takes only a few percent of a step."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        batches: numbers of requests. Each request decodes a token.
        context: cached tokens per request.
        steps: consecutive steps in a repetition.
        copied: bytes that the copy reads and writes.
    """

    batches: tuple[int, ...] = (1, 16, 64)
    context: int = 1056
    steps: int = 20
    copied: int = 2 << 30


SMALL: Final = Sizes((1, 2), 70, 2, 1 << 20)


def bandwidths(preset: str, layers: int | None, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields, for each batch, the bytes that a step must read, its seconds, and its share of a copy's rate.

    A step reads all weights except for unchosen experts and other tokens' embeddings, and the cache that a query sees.
    Tokens, positions and therefore experts are the same in each step.
    """
    copy = sizes.copied / copy_time(sizes.copied, calls=7)
    model = presets.decoder(preset, layers)
    for batch in sizes.batches:
        step = DecodeStep.drawn(model, batch, sizes.context)
        chosen = step.experts()
        size = {"weights": _bytes_of_weights(model, batch, chosen), "cache": _bytes_of_cache(model, step)}
        seconds = step.seconds(sizes.steps)
        rate = sum(size.values()) / seconds
        yield {
            "batch": batch,
            "context": sizes.context,
            "experts_a_layer": chosen,
            "bytes": size,
            "seconds": seconds,
            "bytes_a_second": rate,
            "share_of_copy": rate / copy,
        }


@dataclasses.dataclass
class DecodeStep:
    """A decode step of requests, with random weights, tokens and state.

    Attributes:
        model: the decoder.
        tokens: the requests' tokens.
        queries: their positions.
        state: the layers' state, which each step updates.
    """

    model: Decoder
    tokens: Array
    queries: Queries
    state: Any

    @classmethod
    def drawn(cls, model: Decoder, batch: int, context: int) -> "DecodeStep":
        """Returns the step of `batch` requests with `context` cached tokens."""
        return cls(model, *_drawn_arguments(model, batch, context))

    @classmethod
    def compiled(cls, model: Decoder, batch: int, context: int) -> Callable[..., Any]:
        """Returns the program of the steps that `drawn` returns, without drawing one; for `program`.

        It is compiled for the backend of the calling thread, so several threads can compile several programs.
        """
        tokens, queries, state = jax.eval_shape(lambda: _drawn_arguments(model, batch, context))
        network, weights = split(model)
        return compilation.compiled(_jitted(network), state, weights, tokens, queries)

    def program(self, compiled: Callable[..., Any] | None = None) -> Callable[[Array], Array]:
        """Returns the step: a function of tokens that returns logits, and moves on the state.

        Model and state are arguments of the compiled program. The function cannot be part of another program.

        Args:
            compiled: a result of `compiled` for such steps. Default: the first call compiles.
        """
        network, weights = split(self.model)
        run = compiled or _jitted(network)

        def call(tokens: Array) -> Array:
            if isinstance(tokens, Tracer):
                raise TypeError(
                    "DecodeStep: its program was called while another one is traced, which would capture all weights "
                    "as constants; accepted: calls outside of jit"
                )
            logits, self.state = run(self.state, weights, tokens, self.queries)
            return logits

        return call

    def experts(self) -> float:
        """Returns the mean number of experts that the tokens choose per layer; 0 for a model without experts."""
        with _counted_experts() as counts:
            jax.block_until_ready(self.program()(self.tokens))
            jax.effects_barrier()
        if not counts:
            return 0.0
        jax.clear_caches()  # programs traced in the context count experts
        return float(np.mean(counts))

    def seconds(self, steps: int) -> float:
        """Returns the seconds of a step in a sequence of `steps`."""
        return timing.step_time(self.program(), [(self.tokens,)], steps=steps)


def _drawn_arguments(model: Decoder, batch: int, context: int) -> tuple[Array, Queries, Any]:
    """Random tokens, their positions and a random state."""
    draw = np.random.default_rng(batch)
    pages = ceil_div(context + 1, KV_BLOCK)
    table = jnp.asarray(draw.permutation(batch * pages).reshape(batch, pages), jnp.int32)
    tokens = jnp.asarray(draw.integers(0, model.config.vocab_size, (batch, 1)), jnp.int32)
    start = jnp.full(batch, context, jnp.int32)
    # Shapes alone: the memory may not have room for an empty state and a drawn one.
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: model.empty_state(batch * pages, None, batch)))
    keys = jax.random.split(jax.random.key(batch), len(leaves))
    filled = [
        jax.random.normal(key, x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.full(x.shape, context // DELTA_CHUNK, x.dtype)
        for key, x in zip(keys, leaves, strict=True)
    ]
    return tokens, Queries(table, start, start + 1, jnp.ones_like(start)), jax.tree.unflatten(tree, filled)


def _jitted(network: Network[Decoder]) -> Callable[..., Any]:
    """The function of a step: state, weights, tokens and positions to logits and the next state."""

    def run(state: Any, weights: Any, tokens: Array, queries: Queries) -> tuple[Array, Any]:
        decoder = network.with_weights(tuple(weights))
        hidden, state = decoder.hidden_states(tokens, queries, state)
        return decoder.logits(hidden[:, -1]), state

    return detjax.jit(run, donate_argnums=0)


@contextlib.contextmanager
def _counted_experts() -> Iterator[list[int]]:
    """A context in which programs append the number of each layer's chosen experts to a list."""
    counts: list[int] = []
    rows, route = ops.expert_rows, ops.route

    def count(ids: Array) -> None:
        jax.debug.callback(lambda ids: counts.append(np.unique(ids).size), ids)

    def counted(ids: Array, *args: Any, **kwargs: Any) -> Any:
        count(ids)
        return rows(ids, *args, **kwargs)

    def counted_route(*args: Any, **kwargs: Any) -> Any:
        ids, *rest = route(*args, **kwargs)
        count(ids)
        return ids, *rest

    with mock.patch.object(ops, "expert_rows", counted), mock.patch.object(ops, "route", counted_route):
        yield counts


def _bytes_of_weights(model: Decoder, batch: int, chosen: float) -> int:
    total = 0.0
    for path, weight in parameters(model).items():
        part = part_with(model, path)
        if path[0] == "embedding" and model.lm_head is not None:
            total += batch * weight.nbytes / weight.shape[0]
        elif isinstance(part, Experts) and weight.shape[0] == part.options.experts:
            total += weight.nbytes * chosen / part.options.experts
        else:
            total += weight.nbytes
    return round(total)


def _bytes_of_cache(model: Decoder, step: DecodeStep) -> int:
    pages = step.queries.page_table.shape[1]
    context = int(step.queries.start[0])
    total = 0.0
    for layer, state in zip(model.layers, step.state, strict=True):
        if isinstance(state, DeltaNetState):
            rule = state.rule
            rows = (rule.keys.nbytes + rule.updates.nbytes + rule.decays.nbytes) / rule.keys.shape[1]
            total += state.inputs.nbytes + rule.s.nbytes + rows * (context % DELTA_CHUNK)
        elif isinstance(state, KVPages):
            seen = min(context, getattr(layer.attention.options, "window", None) or context)
            total += sum(x.nbytes for x in jax.tree.leaves(state)) * seen / (pages * KV_BLOCK)
        else:
            raise TypeError(f"a layer's state is {type(state).__name__}; accepted: KVPages, DeltaNetState")
    return round(total)


def study(run: Run, *, preset: Annotated[list[str], options.names(MODELS)]) -> Result:
    models = {"tiny": None} if run.small else {name: MODELS[name] for name in preset}
    results: dict[str, dict[str, Any]] = {}
    for name, layers in models.items():
        batches: list[dict[str, Any]] = []
        results[name] = {"layers": layers, "batches": batches}
        for one in bandwidths(name, layers, SMALL if run.small else Sizes()):
            batches.append(one)
            run.save({"results": results})
    return Result({"results": results})
