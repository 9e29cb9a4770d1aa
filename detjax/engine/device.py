"""What runs on the device: the cache, the last token of each slot, and the programs that compute a step."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, PyTree

from detjax import ops, platform
from detjax.contract import KVQuantization
from detjax.engine.inputs import Arrays, Choice, Inputs, Shape
from detjax.models import Decoder
from detjax.models.cache import Packed, Pages, empty_pages

SCORED_ROWS = 64
"""Tokens of a prompt whose logprobs are computed at once."""


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
    """The model, its cache, and the tokens that are sampled last.

    Attributes:
        state: the model's weights.
    """

    def __init__(
        self, model: Decoder, *, pages: int, slots: int, top_logprobs: int, kv_cache_dtype: KVQuantization | None
    ) -> None:
        self._graph, self.state = nnx.split(model)
        self._top = top_logprobs
        k, v = (empty_pages(model.config, pages, model.dtype, kv_cache_dtype) for _ in range(2))
        self._pools = k, v
        self._last = jnp.zeros(slots, jnp.int32)

    def compute(self, inputs: Inputs, *, filtered: bool, with_top: bool) -> tuple[Found, Array]:
        """What is sampled, and the last hidden states of the rows that prefill, for `scores`."""
        self._pools, hidden, rows = _advance(self._graph, self.state, self._pools, self._last, inputs)
        self._last, *found = _choose(
            self._graph,
            self.state,
            hidden,
            self._last,
            inputs.slot,
            inputs.choice,
            filtered=filtered,
            top=self._top if with_top else 0,
        )
        return Found(*found), rows

    def scores(self, rows: Array, first: int, tokens: np.ndarray) -> Found:
        """Logprobs of up to `SCORED_ROWS` tokens, each under the hidden state of its own row, from row `first` on."""
        padded = np.zeros(SCORED_ROWS, np.int32)
        padded[: len(tokens)] = tokens
        return Found(*_score(self._graph, self.state, rows, np.int32(first), padded, top=self._top))

    def warm_up(self, shape: Shape, inputs: Inputs) -> None:
        """Compiles all that a step of the shape may need, by computing one in which nothing is present."""
        rows: Array | None = None
        for filtered in (False, True):
            for with_top in {False, self._top > 0}:
                _, rows = self.compute(inputs, filtered=filtered, with_top=with_top)
        if shape.rows and rows is not None:
            jax.block_until_ready(self.scores(rows, 0, np.zeros(1, np.int32)))


@functools.partial(platform.jit, static_argnums=0, donate_argnums=2)
def _advance(
    graph: nnx.GraphDef[Decoder],
    state: PyTree[Array],
    pools: tuple[tuple[Pages, ...], tuple[Pages, ...]],
    last: Int32[Array, "slots"],
    inputs: Inputs,
) -> tuple[tuple[tuple[Pages, ...], tuple[Pages, ...]], Float[Array, "R D"], Float[Array, "rows D"]]:
    """The cache with the step's tokens, and the hidden states of those that are sampled from, and that prefill."""
    decodes = inputs.held.shape[0]
    tokens = jnp.concatenate([last[inputs.held], inputs.token[decodes:]])
    fields = ("page_table", "request", "position", "present", "q_row", "q_length", "q_start")
    where = Packed(*pools, **{name: jnp.asarray(getattr(inputs, name)) for name in fields})
    hidden, k, v = nnx.merge(graph, state).packed_hidden(tokens, where)
    return (k, v), hidden[inputs.last_row], hidden[decodes:]


@functools.partial(platform.jit, static_argnums=0, donate_argnums=3, static_argnames=("filtered", "top"))
def _choose(
    graph: nnx.GraphDef[Decoder],
    state: PyTree[Array],
    hidden: Float[Array, "R D"],
    last: Int32[Array, "slots"],
    slot: Int32[Arrays, "R"],
    choice: Choice,
    *,
    filtered: bool,
    top: int,
) -> tuple[Array, Array, Array, Array, Array]:
    """The last token of each slot, and the fields of `Found`."""
    found = chosen(graph, state, hidden, choice, filtered=filtered, top=top)
    return last.at[slot].set(found.token, mode="drop"), *found


def chosen(
    graph: nnx.GraphDef[Decoder],
    state: PyTree[Array],
    hidden: Float[Array, "R D"],
    choice: Choice,
    *,
    filtered: bool,
    top: int,
) -> Found:
    """What is sampled behind tokens with the hidden states given; part of a program."""
    logits = nnx.merge(graph, state).logits(hidden)
    return Found(*ops.sample(logits, **vars(choice), filtered=filtered), *_likeliest(logits, top))


@functools.partial(platform.jit, static_argnums=0, static_argnames="top")
def _score(
    graph: nnx.GraphDef[Decoder],
    state: PyTree[Array],
    rows: Float[Array, "rows D"],
    first: np.int32 | Int32[Array, ""],
    tokens: Int32[Arrays, "n"],
    *,
    top: int,
) -> tuple[Array, Array, Array, Array]:
    index = jnp.minimum(first + jnp.arange(tokens.shape[0], dtype=jnp.int32), rows.shape[0] - 1)
    logits = nnx.merge(graph, state).logits(rows[index])
    logprobs = jnp.take_along_axis(ops.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    return jnp.asarray(tokens), logprobs, *_likeliest(logits, top)


def _likeliest(logits: Float[Array, "R V"], count: int) -> tuple[Int32[Array, "R n"], Float32[Array, "R n"]]:
    """`ops.top_logprobs`, or arrays without columns for none."""
    if count:
        return ops.top_logprobs(logits, count)
    none = jnp.zeros((logits.shape[0], 0))
    return none.astype(jnp.int32), none
