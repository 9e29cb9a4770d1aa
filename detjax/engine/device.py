"""What runs on the device: the cache, the last token of each slot, and the programs that compute a step."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, PyTree

from detjax import backends, compilation, ops
from detjax.engine.inputs import Arrays, Choice, Inputs
from detjax.models import Decoder
from detjax.models.cache import Packed, Pages, empty_pages
from detjax.options import KVQuantization

SCORED_ROWS: Final = 64
"""Tokens of a prompt whose logprobs are computed at once."""
_COMPILERS: Final = 16
"""Threads that compile programs."""


type Weights = tuple[Array, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A decoder without its weights, for which programs are traced.

    It is compared as an object, and weights go without the tree that they have in it: to compare graphs, or to walk
    through that tree, would take a millisecond at each step.
    """

    graph: nnx.GraphDef[Decoder]
    tree: Any
    """Of its weights, as JAX has it."""

    def with_weights(self, weights: Weights) -> Decoder:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights))


def split(model: Decoder) -> tuple[Network, Weights]:
    """A model's network, the same object for the same one, and its weights."""
    graph, state = nnx.split(model)
    weights, tree = jax.tree.flatten(state)
    return _network(graph, tree), tuple(weights)


_network = functools.lru_cache(maxsize=64)(Network)


class Found(NamedTuple):
    """Of each row that is sampled from: its next token and logprob, and the likeliest ones with theirs."""

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any

    def on_its_way(self) -> "Found":
        """The same, having begun to come to the host."""
        for x in self:
            x.copy_to_host_async()
        return self

    def read(self) -> "Found":
        """The same on the host, once it is there."""
        return Found(*jax.device_get(tuple(self)))

    def at(self, row: int, top: int) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """A row's, on the host; of the likeliest tokens the first `top`."""
        likeliest = zip(self.top_tokens[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
        return int(self.token[row]), float(self.logprob[row]), tuple(likeliest)


class Device:
    """The model, its cache, and the tokens that are sampled last."""

    def __init__(
        self, model: Decoder, *, pages: int, slots: int, top_logprobs: int, kv_cache_dtype: KVQuantization | None
    ) -> None:
        self._network, self._weights = split(model)
        width, dtype = model.config.hidden_size, model.dtype  # not the model: its weights may be exchanged
        self._hidden = lambda rows: jax.ShapeDtypeStruct((rows, width), dtype)
        self._top = top_logprobs
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        k, v = (empty_pages(model.config, pages, model.dtype, kv_cache_dtype) for _ in range(2))
        self._pools = k, v
        self._last = jnp.zeros(slots, jnp.int32)

    @property
    def state(self) -> PyTree[Array]:
        """The model's weights, as `nnx.split` has them."""
        return jax.tree.unflatten(self._network.tree, self._weights)

    @state.setter
    def state(self, state: PyTree[Array]) -> None:
        self._weights = tuple(jax.tree.leaves(state))

    def compute(self, inputs: Inputs, *, filtered: bool, with_top: bool) -> tuple[Found, Array]:
        """What is sampled, and the last hidden states of the rows that prefill, for `scores`."""
        inputs = jax.device_put(inputs)  # all at once: a program takes five times as long to bring them one by one
        self._pools, hidden, rows = self._run(_advance, inputs.shape, self._pools, self._last, inputs)
        static = {"filtered": filtered, "top": self._top if with_top else 0}
        choice = self._last, inputs.slot, inputs.choice
        self._last, found = self._run(_choose, len(inputs.slot), hidden, *choice, **static)
        return found, rows

    def scores(self, rows: Array, first: int, tokens: np.ndarray) -> Found:
        """Logprobs of up to `SCORED_ROWS` tokens, each under the hidden state of its own row, from row `first` on."""
        padded = np.zeros(SCORED_ROWS, np.int32)
        padded[: len(tokens)] = tokens
        return self._run(_score, len(rows), rows, np.int32(first), padded, top=self._top)

    def warm_up(self, steps: Sequence[Inputs], each: Callable[[Iterable[Any], int], Iterable[Any]]) -> None:
        """Compiles all that steps of the shapes given may need, and computes one of each.

        Args:
            steps: one of each shape, in which nothing is present.
            each: what is given programs as they are compiled, and their number, to yield them again.
        """
        backend = backends.backend()
        variants = [(filtered, top) for filtered in (False, True) for top in dict.fromkeys((0, self._top))]
        programs: dict[tuple[Any, ...], tuple[Any, ...]] = {}

        def add(fn: Callable[..., Any], size: Any, *args: Any, **static: Any) -> None:
            programs[fn, size, *static.values()] = fn, args, static

        for inputs in steps:
            add(_advance, inputs.shape, self._pools, self._last, inputs)
            hidden, rows = map(self._hidden, (inputs.shape.sampled, inputs.shape.rows))
            choice = self._last, inputs.slot, inputs.choice
            for filtered, top in variants:
                add(_choose, len(inputs.slot), hidden, *choice, filtered=filtered, top=top)
            if inputs.shape.rows:
                tokens = np.zeros(SCORED_ROWS, np.int32)
                add(_score, inputs.shape.rows, rows, np.int32(0), tokens, top=self._top)

        def compiled(fn: Callable[..., Any], args: tuple[Any, ...], static: dict[str, Any]) -> Callable[..., Any]:
            with backends.use_backend(backend):  # a choice of backend is each thread's own
                return compilation.compiled(fn, self._network, self._weights, *args, **static)

        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            keys = {pool.submit(compiled, *program): key for key, program in programs.items()}
            try:
                for future in each(as_completed(keys), len(keys)):
                    self._compiled[keys[future]] = future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        # What is done when a program runs for the first time is done now as well.
        for inputs in steps:
            rows = None
            for filtered, top in variants:
                _, rows = self.compute(inputs, filtered=filtered, with_top=top > 0)
            if inputs.shape.rows and rows is not None:
                jax.block_until_ready(self.scores(rows, 0, np.zeros(1, np.int32)))

    def _run(self, fn: Callable[..., Any], size: Any, *args: Any, **static: Any) -> Any:
        """`fn` of the model and these arguments, whose shapes `size` tells."""
        compiled = self._compiled.get((fn, size, *static.values()))
        return compiled(self._weights, *args) if compiled else fn(self._network, self._weights, *args, **static)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _advance(
    network: Network,
    weights: Weights,
    pools: tuple[tuple[Pages, ...], tuple[Pages, ...]],
    last: Int32[Array, "slots"],
    inputs: Inputs,
) -> tuple[tuple[tuple[Pages, ...], tuple[Pages, ...]], Float[Array, "R D"], Float[Array, "rows D"]]:
    """The cache with the step's tokens, and the hidden states of those that are sampled from, and that prefill."""
    decodes = inputs.held.shape[0]
    tokens = jnp.concatenate([last[inputs.held], inputs.token[decodes:]])
    where = Packed(**{of.name: jnp.asarray(getattr(inputs, of.name)) for of in dataclasses.fields(Packed)})
    hidden, k, v = network.with_weights(weights).through_layers(tokens, where, *pools)
    return (k, v), hidden[inputs.last_row], hidden[decodes:]


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=3, static_argnames=("filtered", "top"))
def _choose(
    network: Network,
    weights: Weights,
    hidden: Float[Array, "R D"],
    last: Int32[Array, "slots"],
    slot: Int32[Arrays, "R"],
    choice: Choice,
    *,
    filtered: bool,
    top: int,
) -> tuple[Int32[Array, "slots"], Found]:
    """The last token of each slot, and what is sampled."""
    found = chosen(network.with_weights(weights), hidden, choice, filtered=filtered, top=top)
    return last.at[slot].set(found.token, mode="drop"), found


def chosen(model: Decoder, hidden: Float[Array, "R D"], choice: Choice, *, filtered: bool, top: int) -> Found:
    """What is sampled behind tokens with the hidden states given; part of a program."""
    logits = model.logits(hidden)
    return Found(*ops.sample(logits, **choice._asdict(), filtered=filtered), *_likeliest(logits, top))


@functools.partial(compilation.jit, static_argnums=0, static_argnames="top")
def _score(
    network: Network,
    weights: Weights,
    rows: Float[Array, "rows D"],
    first: np.int32 | Int32[Array, ""],
    tokens: Int32[Arrays, "n"],
    *,
    top: int,
) -> Found:
    index = jnp.minimum(first + jnp.arange(tokens.shape[0], dtype=jnp.int32), rows.shape[0] - 1)
    logits = network.with_weights(weights).logits(rows[index])
    logprobs = jnp.take_along_axis(ops.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    return Found(jnp.asarray(tokens), logprobs, *_likeliest(logits, top))


def _likeliest(logits: Float[Array, "R V"], count: int) -> tuple[Int32[Array, "R n"], Float32[Array, "R n"]]:
    """`ops.top_logprobs`, or arrays without columns for none."""
    if count:
        return ops.top_logprobs(logits, count)
    none = jnp.zeros((logits.shape[0], 0))
    return none.astype(jnp.int32), none
