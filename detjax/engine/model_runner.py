"""What runs on the device: the cache, the last token of each slot, and the programs that compute a step."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, UInt16, UInt32

from detjax import backends, compilation, ops
from detjax.engine.batch import StepBatch, no_adjustments
from detjax.engine.constraints import all_allowed
from detjax.engine.sampling_params import SamplingParams
from detjax.models import Decoder
from detjax.models.cache import State
from detjax.models.network import Network, Weights, abstract, split
from detjax.options import KVQuantization
from detjax.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays, SeenTokens

SCORED_ROWS: Final = 64
"""Prompt tokens whose logprobs one program computes."""
_SEEN_ENTRIES: Final = 1024
"""Tokens of a sequence that one program notes as seen."""
_COUNT: Final = np.uint16
"""The dtype of counts of tokens. They end at its largest number, which the contract knows."""
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
        adjusted: it can apply penalties and biases.
        constrained: it can apply masks of allowed tokens.
    """

    filtered: bool
    top_logprobs: int
    adjusted: bool = False
    constrained: bool = False

    @classmethod
    def needed_by(cls, params: Sequence[SamplingParams]) -> "SamplingVariant":
        """Returns the smallest variant that serves samples with these parameters."""
        return cls(
            filtered=any(row.filtered for row in params),
            top_logprobs=max((row.top_logprobs for row in params), default=0),
            adjusted=any(row.adjusted or row.constraint is not None for row in params),
            constrained=any(row.constraint is not None for row in params),
        )

    @classmethod
    def for_serving(cls, top_logprobs: int) -> "tuple[SamplingVariant, ...]":
        """Returns the variants of an engine whose requests may ask for so many of the likeliest tokens.

        Few requests have penalties, biases or constraints, so one program serves all kinds of them, and one more those
        without a constraint, for which no mask need be copied.
        """
        tops = dict.fromkeys((0, top_logprobs))
        plain = (cls(filtered, top) for filtered in (False, True) for top in tops)
        return *plain, *(cls(True, top_logprobs, adjusted=True, constrained=masks) for masks in (False, True))

    def serves(self, needed: "SamplingVariant") -> bool:
        """Returns whether a program of this variant can do what is needed."""
        return all(part >= wanted for part, wanted in zip(self, needed, strict=True))


class SlotState(NamedTuple):
    """What the device knows of the sequences in the slots.

    Attributes:
        last: the last sampled token.
        seen: the tokens so far, of sequences with penalties; None where no program needs them.
    """

    last: Int32[Array, "slots"]
    seen: SeenTokens | None


class SampledRows(NamedTuple):
    """The rows of a step that tokens are sampled from; fields as in `StepBatch`."""

    slot: Int32[Arrays, "R"]
    sampling: SamplingArrays
    adjustments: LogitAdjustments | None
    allowed: UInt32[Arrays, "R W"] | None = None
    """A bit for each token that may be chosen; see `ops.adjust_logits`."""


class _SeenEntries(NamedTuple):
    """Some tokens of one sequence, each once: how often it was generated, and whether the prompt has it."""

    token: Int32[Arrays, "n"]
    generated: UInt16[Arrays, "n"]
    in_prompt: Bool[Arrays, "n"]


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
        self._vocabulary = model.config.vocab_size
        self._hidden = lambda rows: jax.ShapeDtypeStruct((rows, width), dtype)
        self._variants = tuple(variants)
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._state = model.empty_state(num_pages, kv_cache_dtype)
        adjusts = any(variant.adjusted for variant in variants)
        self._slots = SlotState(jnp.zeros(slots, jnp.int32), _none_seen(slots, self._vocabulary) if adjusts else None)
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

    def compute(
        self, batch: StepBatch, needed: SamplingVariant | None, allowed: Callable[[], np.ndarray] | None = None
    ) -> tuple[SampledTokens | None, Array]:
        """Computes a step.

        Args:
            batch: the step.
            needed: what the sampling program must be able to do; None if no token is sampled.
            allowed: returns the masks of the step's constraints. It is called while the device computes hidden states.

        Returns:
            The sampled tokens, and the last hidden states of the rows that prefill, for `score`.
        """
        batch = self._on_device(batch)
        self._state, hidden, rows = self._run(self._forward(batch))
        if needed is None:
            return None, rows
        variant = next(variant for variant in self._variants if variant.serves(needed))
        masks = None if allowed is None else jax.device_put(allowed())
        return self._choose(batch, hidden, variant, masks), rows

    def _choose(
        self, batch: StepBatch, hidden: Array, variant: SamplingVariant, masks: Array | None = None
    ) -> SampledTokens:
        """Samples after hidden states, and notes the tokens in their slots."""
        slots, sampled = self._run(self._sample(batch, hidden, variant, masks))
        self._slots = slots if variant.adjusted else self._slots._replace(last=slots.last)
        return sampled

    def note_seen(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Tells the device all tokens of the sequence in a slot. From then on it counts what it samples for the slot.

        Args:
            slot: the slot.
            prompt: the prompt's tokens.
            generated: the generated tokens.
        """
        assert self._slots.seen is not None, "no variant has penalties"
        vocabulary = self._slots.seen.generated.shape[1]
        for index, entries in enumerate(_seen_entries(prompt, generated, vocabulary)):
            seen = self._run(self._note_seen(slot, entries, is_first=index == 0))
            self._slots = self._slots._replace(seen=seen)

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
        self._run_all(batches)

    def _run_all(self, batches: Sequence[StepBatch]) -> None:
        """Runs every program once, because it does some work when it runs for the first time."""
        sizes = set[tuple[str, int]]()
        for batch in map(self._on_device, batches):
            shape = batch.shape
            self._state, hidden, rows = self._run(self._forward(batch))
            if ("sampled", shape.sampled) not in sizes:
                for variant in self._variants:
                    self._choose(batch, hidden, variant)
            if shape.rows and ("rows", shape.rows) not in sizes:
                self.score(rows, 0, np.zeros(1, np.int32))
            sizes |= {("sampled", shape.sampled), ("rows", shape.rows)}
        if self._slots.seen is not None:
            self.note_seen(0, (), ())
        jax.block_until_ready(self._slots)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _programs(self, batch: StepBatch) -> Iterator[_Program]:
        """Yields every program that a step of a batch's shape may need."""
        shape = batch.shape
        yield self._forward(batch)
        for variant in self._variants:
            yield self._sample(batch, self._hidden(shape.sampled), variant)
        if shape.rows:
            yield self._score(self._hidden(shape.rows), 0, np.zeros(SCORED_ROWS, np.int32))
        if self._slots.seen is not None:
            (entries,) = _seen_entries((), (), self._slots.seen.generated.shape[1])
            yield self._note_seen(0, entries, is_first=True)

    def _forward(self, batch: StepBatch) -> _Program:
        # How tokens are chosen does not matter to the layers: their program is the same with adjustments and without.
        return _Program(_forward, batch.shape, (self._state, self._slots.last, batch._replace(adjustments=None)), {})

    def _sample(
        self, batch: StepBatch, hidden: Any, variant: SamplingVariant, allowed: Array | None = None
    ) -> _Program:
        slots, adjustments = self._slots, batch.adjustments
        if not variant.adjusted:
            slots, adjustments = slots._replace(seen=None), None
        elif adjustments is None:
            adjustments = no_adjustments(batch.shape.sampled)
        if variant.constrained and allowed is None:
            allowed = jax.device_put(all_allowed(batch.shape.sampled, self._vocabulary))
        rows = SampledRows(batch.slot, batch.sampling, adjustments, allowed)
        return _Program(_sample, batch.shape.sampled, (hidden, slots, rows), {"variant": variant})

    def _note_seen(self, slot: int, entries: _SeenEntries, *, is_first: bool) -> _Program:
        args = self._slots.seen, np.int32(slot), np.bool_(is_first), entries
        return _Program(_note_seen, len(entries.token), args, {})

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
    slots: SlotState,
    rows: SampledRows,
    *,
    variant: SamplingVariant,
) -> tuple[SlotState, SampledTokens]:
    """Returns the state of the slots, and the tokens that are sampled after the given hidden states."""
    logits = network.with_weights(weights).logits(hidden)
    if variant.adjusted:
        seen, (token, logprob) = _sample_adjusted(logits, slots.seen, rows, filtered=variant.filtered)
    else:
        seen, (token, logprob) = None, ops.sample(logits, rows.sampling, filtered=variant.filtered)
    sampled = SampledTokens(token, logprob, *_likeliest(logits, variant.top_logprobs))
    return SlotState(slots.last.at[rows.slot].set(token, mode="drop"), seen), sampled


def _sample_adjusted(
    logits: Float32[Array, "R V"], seen: SeenTokens | None, rows: SampledRows, *, filtered: bool
) -> tuple[SeenTokens, tuple[Int32[Array, "R"], Float32[Array, "R"]]]:
    """Returns what is seen in the slots, tokens chosen by adjusted logits, and their logprobs by the model's own."""
    assert seen is not None
    assert rows.adjustments is not None
    # Rows whose token belongs to no slot get slots of their own beyond the last, so that the scatter may rely on every
    # index being there once.
    row, slots = jnp.arange(len(logits), dtype=jnp.int32), len(seen.generated)
    slot = jnp.where(rows.slot < slots, rows.slot, slots + row)
    seen_by_row = SeenTokens(*(x.at[slot].get(mode="fill", fill_value=0) for x in seen))
    adjusted = ops.adjust_logits(logits, seen_by_row, rows.adjustments, rows.allowed)
    token, _ = ops.sample(adjusted, rows.sampling, filtered=filtered)
    count = seen_by_row.generated[row, token]
    count += (count < np.iinfo(_COUNT).max).astype(_COUNT)
    seen = seen._replace(generated=seen.generated.at[slot, token].set(count, mode="drop", unique_indices=True))
    logprob = jnp.take_along_axis(ops.log_softmax(logits), token[:, None], axis=1)[:, 0]
    return seen, (token, logprob)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _note_seen(
    network: Network,
    weights: Weights,
    seen: SeenTokens,
    slot: Int32[Arrays, ""],
    is_first: Bool[Arrays, ""],
    entries: _SeenEntries,
) -> SeenTokens:
    """Returns what is seen in the slots, with more tokens of one slot: with these alone if they are its first."""

    def written(rows: Array, values: Arrays) -> Array:
        row = jnp.where(is_first, jnp.zeros_like(rows[slot]), rows[slot])
        return rows.at[slot].set(row.at[entries.token].set(values, mode="drop", unique_indices=True))

    return SeenTokens(written(seen.generated, entries.generated), written(seen.in_prompt, entries.in_prompt))


def _none_seen(slots: int, vocabulary: int) -> SeenTokens:
    """Returns what the device knows of empty slots."""
    return SeenTokens(jnp.zeros((slots, vocabulary), _COUNT), jnp.zeros((slots, vocabulary), bool))


def _seen_entries(prompt: Sequence[int], generated: Sequence[int], vocabulary: int) -> Iterator[_SeenEntries]:
    """Yields the tokens of a sequence, each once, in pieces of `_SEEN_ENTRIES`: one piece at least."""
    count = np.bincount(np.asarray(generated, np.int64), minlength=vocabulary)
    in_prompt = np.zeros(vocabulary, bool)
    in_prompt[np.asarray(prompt, np.int64)] = True
    tokens = np.flatnonzero(in_prompt | (count > 0)).astype(np.int32)
    count = np.minimum(count, np.iinfo(_COUNT).max).astype(_COUNT)
    for first in range(0, max(len(tokens), 1), _SEEN_ENTRIES):
        # Padding is beyond the vocabulary, and every entry is another number.
        token = np.arange(vocabulary, vocabulary + _SEEN_ENTRIES, dtype=np.int32)
        some = tokens[first : first + _SEEN_ENTRIES]
        token[: len(some)] = some
        yield _SeenEntries(token, count[token % vocabulary], in_prompt[token % vocabulary])


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
