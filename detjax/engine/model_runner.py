"""What runs on the device: the cache, the last token of each slot, and the programs that compute a step."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, PyTree

from detjax import backends, compilation, ops
from detjax.engine.batch import Arrays, SamplingArrays, StepBatch
from detjax.engine.sampling_params import SamplingParams
from detjax.models import Decoder
from detjax.models.cache import State
from detjax.models.network import Network, Weights, abstract, split
from detjax.options import KVQuantization

SCORED_ROWS: Final = 64
"""Prompt tokens whose logprobs one program computes."""
_COMPILERS: Final = 16
"""Threads that compile programs."""


def bytes_of_page(model: Decoder, quantization: KVQuantization | None) -> int:
    """Returns the bytes that one page takes in the state of a model.

    Raises:
        ValueError: the model's keys and values cannot be quantized like this.
    """
    arrays = abstract(lambda: jax.tree.leaves(model.empty_state(1, quantization)))
    return sum(array.size * array.dtype.itemsize for array in arrays)


class SampledTokens(NamedTuple):
    """One row per token: the token with its logprob, and the likeliest tokens in its place with theirs."""

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any

    def start_copy(self) -> "SampledTokens":
        """Begins to copy the arrays to the host, and returns them."""
        for x in self:
            x.copy_to_host_async()
        return self

    def read(self) -> "SampledTokens":
        """Returns the arrays on the host, and waits for them if need be."""
        return type(self)(*jax.device_get(tuple(self)))

    def at(self, row: int, top: int) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """Returns a row of arrays on the host: token, logprob, and the `top` likeliest tokens with their logprobs."""
        likeliest = zip(self.top_tokens[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
        return int(self.token[row]), float(self.logprob[row]), tuple(likeliest)


class SamplingVariant(NamedTuple):
    """Which parts a sampling program has. A program with fewer parts is faster, and no bit depends on the choice.

    Attributes:
        filtered: it can apply top-k, top-p and min-p.
        top_logprobs: how many of the likeliest tokens it reports.
    """

    filtered: bool
    top_logprobs: int

    @classmethod
    def needed_by(cls, params: Sequence[SamplingParams]) -> "SamplingVariant":
        """Returns the smallest variant that serves samples with these parameters."""
        return cls(any(row.filtered for row in params), max((row.top_logprobs for row in params), default=0))

    @classmethod
    def for_serving(cls, top_logprobs: int) -> "tuple[SamplingVariant, ...]":
        """Returns the variants of an engine whose requests may ask for so many of the likeliest tokens."""
        tops = dict.fromkeys((0, top_logprobs))
        return tuple(cls(filtered, top) for filtered in (False, True) for top in tops)

    def serves(self, needed: "SamplingVariant") -> bool:
        """Returns whether a program of this variant can do what is needed."""
        return self.filtered >= needed.filtered and self.top_logprobs >= needed.top_logprobs


class _Program(NamedTuple):
    """A function of `compilation.jit`, its arguments after the network and the weights, and the sizes it depends on."""

    fn: Callable[..., Any]
    size: Any
    args: tuple[Any, ...]
    static: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        return self.fn, self.size, *self.static.values()


class ModelRunner:
    """The model, its state, and the last sampled token of each slot."""

    def __init__(
        self,
        model: Decoder,
        *,
        num_pages: int,
        slots: int,
        variants: Sequence[SamplingVariant],
        kv_cache_dtype: KVQuantization | None,
    ) -> None:
        """A runner with an empty cache.

        Args:
            model: the decoder.
            num_pages: pages of the cache.
            slots: sequences that are computed at the same time.
            variants: sampling programs that steps may use, the fastest first.
            kv_cache_dtype: how keys and values are quantized in the cache.
        """
        self._network, self._weights = split(model)
        width, dtype = model.config.hidden_size, model.dtype  # not the model: its weights may be replaced
        self._hidden = lambda rows: jax.ShapeDtypeStruct((rows, width), dtype)
        self._variants = tuple(variants)
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._state = model.empty_state(num_pages, kv_cache_dtype)
        self._last = jnp.zeros(slots, jnp.int32)
        self._copies: dict[tuple[np.dtype, tuple[int, ...], bytes], Array] = {}

    def update_weights(self, params: PyTree[Array]) -> None:
        """Replaces the model's weights.

        Args:
            params: what `nnx.split(model)[1]` returns, of the same shapes and dtypes.

        Raises:
            ValueError: the weights do not fit the model.
        """
        _check_weights(self._network.state(self._weights), params)
        self._weights = self._network.weights(params)

    def compute(self, batch: StepBatch, needed: SamplingVariant | None) -> tuple[SampledTokens | None, Array]:
        """Computes a step.

        Args:
            batch: the step.
            needed: what the sampling program must be able to do; None if no token is sampled.

        Returns:
            The sampled tokens, and the last hidden states of the rows that prefill, for `score`.
        """
        batch = self._on_device(batch)
        self._state, hidden, rows = self._run(self._forward(batch))
        if needed is None:
            return None, rows
        variant = next(variant for variant in self._variants if variant.serves(needed))
        self._last, sampled = self._run(self._sample(batch, hidden, variant))
        return sampled, rows

    def _on_device(self, batch: StepBatch) -> StepBatch:
        """Copies a batch to the device. Arrays that the step before had too, as most decodes have, are not copied."""
        arrays, tree = jax.tree.flatten(batch)
        contents = [(x.dtype, x.shape, x.tobytes()) for x in arrays]
        new = {content: x for content, x in zip(contents, arrays, strict=True) if content not in self._copies}
        # All at once: a program takes five times as long to copy its arguments itself.
        copies = self._copies | dict(zip(new, jax.device_put(list(new.values())), strict=True))
        self._copies = {content: copies[content] for content in contents}
        return jax.tree.unflatten(tree, [copies[content] for content in contents])

    def score(self, rows: Array, first: int, tokens: np.ndarray) -> SampledTokens:
        """Returns logprobs of up to `SCORED_ROWS` given tokens.

        Args:
            rows: hidden states.
            first: the row of the first token. Each token has a row of its own.
            tokens: their ids.
        """
        padded = np.zeros(SCORED_ROWS, np.int32)
        padded[: len(tokens)] = tokens
        return self._run(self._score(rows, first, padded))

    def warm_up(self, batches: Sequence[StepBatch], track: Callable[[Iterable[Any], int], Iterable[Any]]) -> None:
        """Compiles every program that steps of the given shapes may need, and runs each of them once.

        Args:
            batches: one batch of each shape, without chunks.
            track: is given the compiled programs as they come, and their number, and yields them.
        """
        backend = backends.backend()

        def compiled(program: _Program) -> Callable[..., Any]:
            with backends.use_backend(backend):  # every thread chooses its own backend
                return compilation.compiled(program.fn, self._network, self._weights, *program.args, **program.static)

        programs = {program.key: program for batch in batches for program in self._programs(batch)}
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            keys = {pool.submit(compiled, program): key for key, program in programs.items()}
            try:
                for future in track(as_completed(keys), len(keys)):
                    self._compiled[keys[future]] = future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        # A program does some work when it runs for the first time. That is done now as well.
        for batch in batches:
            rows = None
            for variant in self._variants:
                _, rows = self.compute(batch, variant)
            if batch.shape.rows and rows is not None:
                jax.block_until_ready(self.score(rows, 0, np.zeros(1, np.int32)))

    # --- programs -----------------------------------------------------------------------------------------------------

    def _programs(self, batch: StepBatch) -> Iterator[_Program]:
        """Yields every program that a step of a batch's shape may need."""
        shape = batch.shape
        yield self._forward(batch)
        for variant in self._variants:
            yield self._sample(batch, self._hidden(shape.sampled), variant)
        if shape.rows:
            yield self._score(self._hidden(shape.rows), 0, np.zeros(SCORED_ROWS, np.int32))

    def _forward(self, batch: StepBatch) -> _Program:
        return _Program(_forward, batch.shape, (self._state, self._last, batch), {})

    def _sample(self, batch: StepBatch, hidden: Any, variant: SamplingVariant) -> _Program:
        args = hidden, self._last, batch.slot, batch.sampling
        return _Program(_sample, batch.shape.sampled, args, {"variant": variant})

    def _score(self, rows: Any, first: int, tokens: np.ndarray) -> _Program:
        top = max(variant.top_logprobs for variant in self._variants)
        return _Program(_score, len(rows), (rows, np.int32(first), tokens), {"top": top})

    def _run(self, program: _Program) -> Any:
        compiled = self._compiled.get(program.key)
        if compiled is None:
            return program.fn(self._network, self._weights, *program.args, **program.static)
        return compiled(self._weights, *program.args)


def _check_weights(current: PyTree[Array], new: PyTree[Array]) -> None:
    expected, given = (
        {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (current, new)
    )
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"Engine.update_weights: {name} is {given.get(name, 'missing')}; accepted: "
                f"{expected.get(name, 'no such weight')}"
            )


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _forward(
    network: Network, weights: Weights, state: State, last: Int32[Array, "slots"], batch: StepBatch
) -> tuple[State, Float[Array, "R D"], Float[Array, "rows D"]]:
    """Returns the state with the step's tokens, and hidden states: of each chunk's last token, and of prefill rows."""
    decodes = batch.held.shape[0]
    is_held = batch.held < last.shape[0]
    tokens = jnp.concatenate([jnp.where(is_held, last[batch.held], batch.token[:decodes]), batch.token[decodes:]])
    hidden, state = network.with_weights(weights).hidden_states(tokens, batch.queries, state)
    return state, hidden[batch.last_row], hidden[decodes:]


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=3, static_argnames="variant")
def _sample(
    network: Network,
    weights: Weights,
    hidden: Float[Array, "R D"],
    last: Int32[Array, "slots"],
    slot: Int32[Arrays, "R"],
    sampling: SamplingArrays,
    *,
    variant: SamplingVariant,
) -> tuple[Int32[Array, "slots"], SampledTokens]:
    """Returns the last token of each slot, and the tokens that are sampled after the given hidden states."""
    logits = network.with_weights(weights).logits(hidden)
    token, logprob = ops.sample(logits, **sampling._asdict(), filtered=variant.filtered)
    sampled = SampledTokens(token, logprob, *_likeliest(logits, variant.top_logprobs))
    return last.at[slot].set(token, mode="drop"), sampled


@functools.partial(compilation.jit, static_argnums=0, static_argnames="top")
def _score(
    network: Network,
    weights: Weights,
    rows: Float[Array, "rows D"],
    first: np.int32 | Int32[Array, ""],
    tokens: Int32[Arrays, "n"],
    *,
    top: int,
) -> SampledTokens:
    """Returns logprobs of given tokens, each after the hidden state in a row of its own."""
    index = jnp.minimum(first + jnp.arange(tokens.shape[0], dtype=jnp.int32), rows.shape[0] - 1)
    logits = network.with_weights(weights).logits(rows[index])
    logprobs = jnp.take_along_axis(ops.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    return SampledTokens(jnp.asarray(tokens), logprobs, *_likeliest(logits, top))


def _likeliest(logits: Float[Array, "R V"], count: int) -> tuple[Int32[Array, "R n"], Float32[Array, "R n"]]:
    """Returns the likeliest tokens with their logprobs; arrays without columns for a count of 0."""
    if count:
        return ops.top_logprobs(logits, count)
    none = jnp.zeros((logits.shape[0], 0))
    return none.astype(jnp.int32), none
