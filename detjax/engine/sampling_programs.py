"""The programs that sample tokens, score prompts, and keep a record of the tokens of each slot."""

import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt16, UInt32

from detjax.engine.batch import DraftedRows, no_adjustments
from detjax.engine.packed import Packed
from detjax.engine.packed_batch import PackedBatch, RowArrays
from detjax.engine.program import Parameters, StepProgram, model_of
from detjax.engine.sampled_tokens import PackedTokens, SampledTokens
from detjax.engine.sampling_variant import SamplingVariant
from detjax.models.network import Network
from detjax.models.parts.logits import Logits
from detjax.operands.numerics import unique_scatter_indices
from detjax.operands.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays, SeenTokens
from detjax.runtime import compilation

SCORED_ROWS: Final = 64
"""Prompt tokens that one program scores."""
_SEEN_ENTRIES: Final = 1024
"""Tokens of a sequence that one program records as seen."""
COUNT: Final = np.uint16
"""The dtype of token counts. They saturate at its largest number, as the contract says."""


class SlotState(NamedTuple):
    """The device's record of the sequences in the slots.

    Attributes:
        last: the last sampled token.
        seen: the tokens so far, for sequences with penalties; None if no program needs them.
    """

    last: Int32[Array, "slots"]
    seen: SeenTokens | None


class SampledRows(NamedTuple):
    """The rows of a step that tokens are sampled from; fields as in `StepBatch`."""

    slot: Int32[Arrays, "R"]
    sampling: SamplingArrays
    adjustments: LogitAdjustments | None
    allowed: UInt32[Arrays, "R W"] | None = None
    """A bit per token that may be chosen; see `ops.adjust_logits`."""
    drafted: DraftedRows | None = None

    @property
    def number(self) -> int:
        """The number of rows."""
        return len(self.slot)

    def unpacked(self) -> "SampledRows":
        """Returns the rows, as for rows of a packed batch."""
        return self


class PackedRows(NamedTuple):
    """The rows of a packed batch that tokens are sampled from."""

    rows: Packed[RowArrays]
    adjustments: Packed[LogitAdjustments] | None
    allowed: UInt32[Arrays, "R W"] | None

    @property
    def number(self) -> int:
        """The number of rows."""
        return len(self.rows.layout.tree.slot)

    def unpacked(self) -> SampledRows:
        """Returns the rows, for tracing in a program."""
        adjustments = None if self.adjustments is None else self.adjustments.unpacked()
        slot, sampling, drafted = self.rows.unpacked()
        return SampledRows(slot, sampling, adjustments, self.allowed, drafted)


class SeenEntries(NamedTuple):
    """Distinct tokens of one sequence: how often each was generated, and whether it is in the prompt."""

    token: Int32[Arrays, "n"]
    generated: UInt16[Arrays, "n"]
    in_prompt: Bool[Arrays, "n"]


class ScoredRows(NamedTuple):
    """Given tokens of one sequence at consecutive positions, and what their sampling distributions depend on.

    Attributes:
        token: the tokens.
        is_generated: whether penalties on later tokens regard each of them as generated; otherwise as in the prompt.
        sampling: sampling parameters; keys of noise and positions do not matter.
        adjustments: logit adjustments.
        allowed: a bit per token that may be chosen.
        seen: the tokens before the first one, without a row axis.
    """

    token: Int32[Arrays, "n"]
    is_generated: Bool[Arrays, "n"]
    sampling: SamplingArrays
    adjustments: LogitAdjustments
    allowed: UInt32[Arrays, "n W"]
    seen: SeenTokens


def sample_key(count: int, variant: SamplingVariant) -> Hashable:
    """Returns the key of the result of `sample` for a batch that samples from `count` rows."""
    return _sample.__name__, count, variant


def sample(batch: PackedBatch, hidden: Any, slots: SlotState, variant: SamplingVariant, allowed: Any) -> StepProgram:
    """Returns the program that samples from hidden states. `allowed` is ignored by variants without constraints."""
    adjustments = batch.adjustments
    if not variant.adjusted:
        slots, adjustments = slots._replace(seen=None), None
    elif adjustments is None:
        adjustments = Packed.on_host(no_adjustments(batch.shape.sampled))
    assert batch.rows is not None
    rows = PackedRows(batch.rows, adjustments, allowed if variant.constrained else None)
    return sample_rows(rows, hidden, slots, variant)


def sample_rows(rows: SampledRows | PackedRows, hidden: Any, slots: SlotState, variant: SamplingVariant) -> StepProgram:
    """Returns the program that samples a token for each row from the hidden state of the same row."""
    count = rows.number
    purpose = f"sampling: up to {count} samples {variant.description}"
    return StepProgram(_sample, count, (hidden, slots, rows), {"variant": variant}, purpose)


def score(rows: Any, first: int, tokens: np.ndarray, top: int) -> StepProgram:
    """Returns the program that computes logprobs of given tokens from hidden states in consecutive rows."""
    padded = np.zeros(SCORED_ROWS, np.int32)
    padded[: len(tokens)] = tokens
    purpose = f"logprobs of prompts: prefills of up to {len(rows)} rows"
    return StepProgram(_score, len(rows), (rows, np.int32(first), padded), {"top": top}, purpose)


def take_rows(rows: Any, first: int) -> StepProgram:
    """Returns the program that copies `SCORED_ROWS` hidden states in consecutive rows."""
    args = rows, np.int32(first)
    return StepProgram(_take_rows, len(rows), args, {}, f"sampling logprobs of prompts: up to {len(rows)} rows")


def score_drawn(hidden: Any, rows: ScoredRows, top: int) -> StepProgram:
    """Returns the program that computes logprobs of given tokens, also under the distribution they are drawn from."""
    return StepProgram(_score_drawn, len(rows.token), (hidden, rows), {"top": top}, "sampling logprobs of prompts")


def note_seen(seen: SeenTokens, slot: int, entries: SeenEntries, *, is_first: bool) -> StepProgram:
    """Returns the program that records tokens of the sequence in a slot."""
    args = seen, np.int32(slot), np.bool_(is_first), entries
    return StepProgram(_note_seen, len(entries.token), args, {}, "tokens of a sample with penalties that gets a slot")


def none_seen(slots: int, vocabulary: int) -> SeenTokens:
    """Returns the seen tokens of empty slots."""
    return SeenTokens(jnp.zeros((slots, vocabulary), COUNT), jnp.zeros((slots, vocabulary), bool))


def seen_entries(prompt: Sequence[int], generated: Sequence[int], vocabulary: int) -> Iterator[SeenEntries]:
    """Yields the distinct tokens of a sequence in batches of `_SEEN_ENTRIES`, at least one batch."""
    count = np.bincount(np.asarray(generated, np.int64), minlength=vocabulary)
    in_prompt = np.zeros(vocabulary, bool)
    in_prompt[np.asarray(prompt, np.int64)] = True
    tokens = np.flatnonzero(in_prompt | (count > 0)).astype(np.int32)
    count = np.minimum(count, np.iinfo(COUNT).max).astype(COUNT)
    for first in range(0, max(len(tokens), 1), _SEEN_ENTRIES):
        # Padding lies beyond the vocabulary, and all entries are distinct.
        token = np.arange(vocabulary, vocabulary + _SEEN_ENTRIES, dtype=np.int32)
        some = tokens[first : first + _SEEN_ENTRIES]
        token[: len(some)] = some
        yield SeenEntries(token, count[token % vocabulary], in_prompt[token % vocabulary])


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=3, static_argnames="variant")
def _sample(
    network: Network,
    parameters: Parameters,
    hidden: Float[Array, "R D"],
    slots: SlotState,
    rows: SampledRows | PackedRows,
    *,
    variant: SamplingVariant,
) -> tuple[SlotState, PackedTokens]:
    """Returns the state of the slots and the tokens sampled from the hidden states."""
    rows = rows.unpacked()
    seen_by_row, slot = None, jnp.asarray(rows.slot)
    if variant.adjusted:
        assert slots.seen is not None
        count = len(slots.seen.generated)
        if rows.drafted is None:
            slot = unique_scatter_indices(slot < count, slot, count)
        seen_by_row = SeenTokens(*(x.at[slot].get(mode="fill", fill_value=0) for x in slots.seen))
        if rows.drafted is not None:
            seen_by_row = _with_guesses(seen_by_row, rows.drafted)
    with model_of(network, parameters) as model:
        sampled = model.with_logits(sampled_from, hidden, rows, seen_by_row, variant=variant)
    if rows.drafted is not None:
        return _after_drafts(slots, rows, rows.drafted, seen_by_row, sampled.token), PackedTokens.in_program(sampled)
    seen = None
    if slots.seen is not None and seen_by_row is not None:
        seen = _with_tokens(slots.seen, seen_by_row, slot, sampled.token)
    last = with_last(slots.last, rows.slot, sampled.token)
    return SlotState(last, seen), PackedTokens.in_program(sampled)


def with_last(last: Int32[Array, "slots"], slot: Int32[Arrays, "R"], token: Int32[Array, "R"]) -> Int32[Array, "slots"]:
    """Returns the last token of each slot after tokens of distinct slots; rows without one have the number of slots."""
    index = unique_scatter_indices(slot < len(last), slot, len(last))
    return last.at[index].set(token, mode="drop", unique_indices=True)


def counted_rows(token: Int32[Array, "R"], drafted: DraftedRows) -> Bool[Array, "R"]:
    """Returns True for the rows whose sampled tokens count: all guesses before them equal the tokens sampled there."""
    offset, guesses = jnp.asarray(drafted.offset), jnp.asarray(drafted.guesses)
    guess = jnp.take_along_axis(guesses, jnp.maximum(offset - 1, 0)[:, None], axis=1)[:, 0]
    is_right = counted = (offset == 0) | (guess == jnp.roll(token, 1))
    for earlier in range(1, guesses.shape[1]):
        counted &= (offset <= earlier) | jnp.roll(is_right, earlier)
    return counted


def _with_guesses(seen: SeenTokens, drafted: DraftedRows) -> SeenTokens:
    """Adds the guesses before each row to its seen tokens."""
    row, generated = jnp.arange(len(drafted.offset), dtype=jnp.int32), seen.generated
    for guess in jnp.asarray(drafted.guesses).T:
        count = generated.at[row, guess].get(mode="fill", fill_value=0)
        count += (count < np.iinfo(COUNT).max).astype(COUNT)
        generated = generated.at[row, guess].set(count, mode="drop", unique_indices=True)
    return seen._replace(generated=generated)


def _after_drafts(
    slots: SlotState, rows: SampledRows, drafted: DraftedRows, by_row: SeenTokens | None, token: Int32[Array, "R"]
) -> SlotState:
    """Returns the state of the slots after the tokens that count."""
    offset, counted = jnp.asarray(drafted.offset), counted_rows(token, drafted)
    continues = jnp.roll(counted, -1) & (jnp.roll(offset, -1) == offset + 1)
    nowhere = len(slots.last)
    last = with_last(slots.last, jnp.where(counted & ~continues, rows.slot, nowhere), token)
    if slots.seen is None or by_row is None:
        return SlotState(last, None)
    count = by_row.generated[jnp.arange(len(token), dtype=jnp.int32), token]
    count += (count < np.iinfo(COUNT).max).astype(COUNT)
    # Several rows of a slot may have the same token. Each has counted those before it, so the last one has the most.
    slot = jnp.where(counted, rows.slot, nowhere)
    return SlotState(last, slots.seen._replace(generated=slots.seen.generated.at[slot, token].max(count, mode="drop")))


def sampled_from(
    logits: Logits, rows: SampledRows, seen: SeenTokens | None, *, variant: SamplingVariant
) -> SampledTokens:
    """Returns the tokens sampled from logits. `seen` holds the seen tokens of each row, for adjusted variants."""
    choices = logits
    if variant.adjusted:
        assert seen is not None and rows.adjustments is not None
        choices = logits.adjusted(seen, rows.adjustments, rows.allowed)
    elif rows.allowed is not None:
        choices = logits.constrained(rows.allowed)
    choice = _choice(choices, rows.sampling, variant)
    logprob = choice.logprob
    if choices is not logits or logprob is None:
        logprob = logits.logprobs(choice.token)
    top = logits.top_logprobs(variant.top_logprobs)
    return SampledTokens(choice.token, logprob, *top, choice.sampling_logprob, *choice.sampling_top)


class _Choice(NamedTuple):
    """The sampled tokens with the logprobs that were computed.

    Attributes:
        token: the tokens.
        logprob: their logprobs under the logits.
        sampling_logprob: their logprobs under the distribution they were drawn from.
        sampling_top: the likeliest tokens under it, with their logprobs.
    """

    token: Int32[Array, "R"]
    logprob: Float32[Array, "R"] | None
    sampling_logprob: Float32[Array, "R"] | None
    sampling_top: tuple[Int32[Array, "R n"], Float32[Array, "R n"]] | tuple[None, None]


def _choice(choices: Logits, sampling: SamplingArrays, variant: SamplingVariant) -> _Choice:
    """Returns tokens sampled from the logits."""
    if not variant.distribution:
        return _Choice(*choices.sample(sampling, filtered=variant.filtered), None, (None, None))
    # Filters sort the logits, which takes longer than everything else: apply them once for both.
    kept = choices.filtered(sampling) if variant.filtered else choices
    token, logprob = kept.sample(sampling, filtered=False)
    # In rows of temperature 0, the sampled token is the likeliest one.
    sampling_top = kept.sampling_top_logprobs(variant.top_logprobs, sampling, token)
    sampling_logprob = kept.sampling_logprobs(token, sampling)
    return _Choice(token, None if variant.filtered else logprob, sampling_logprob, sampling_top)


def _with_tokens(seen: SeenTokens, by_row: SeenTokens, slot: Int32[Array, "R"], token: Int32[Array, "R"]) -> SeenTokens:
    """Adds a token of each row to the seen tokens of the slots."""
    count = by_row.generated[jnp.arange(len(token), dtype=jnp.int32), token]
    count += (count < np.iinfo(COUNT).max).astype(COUNT)
    return seen._replace(generated=seen.generated.at[slot, token].set(count, mode="drop", unique_indices=True))


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _note_seen(
    network: Network,
    parameters: Parameters,
    seen: SeenTokens,
    slot: Int32[Arrays, ""],
    is_first: Bool[Arrays, ""],
    entries: SeenEntries,
) -> SeenTokens:
    """Adds tokens to the seen tokens of one slot; `is_first` clears the slot before."""

    def written(rows: Array, values: Arrays) -> Array:
        row = jnp.where(is_first, jnp.zeros_like(rows[slot]), rows[slot])
        return rows.at[slot].set(row.at[entries.token].set(values, mode="drop", unique_indices=True))

    return SeenTokens(written(seen.generated, entries.generated), written(seen.in_prompt, entries.in_prompt))


@functools.partial(compilation.jit, static_argnums=0, static_argnames="top")
def _score(
    network: Network,
    parameters: Parameters,
    rows: Float[Array, "rows D"],
    first: np.int32 | Int32[Array, ""],
    tokens: Int32[Arrays, "n"],
    *,
    top: int,
) -> PackedTokens:
    """Returns logprobs of given tokens, each from the hidden state of its own row."""
    index = jnp.minimum(first + jnp.arange(tokens.shape[0], dtype=jnp.int32), rows.shape[0] - 1)
    with model_of(network, parameters) as model:
        return PackedTokens.in_program(model.with_logits(_scored, rows[index], jnp.asarray(tokens), top=top))


def _scored(logits: Logits, tokens: Int32[Array, "n"], *, top: int) -> SampledTokens:
    """Returns given tokens with their logprobs and the likeliest tokens at their positions."""
    return SampledTokens(tokens, logits.logprobs(tokens), *logits.top_logprobs(top))


@functools.partial(compilation.jit, static_argnums=0)
def _take_rows(
    network: Network, parameters: Parameters, rows: Float[Array, "rows D"], first: np.int32 | Int32[Array, ""]
) -> Float[Array, "n D"]:
    """Returns the hidden states of `SCORED_ROWS` consecutive rows. Beyond the end, the last one repeats."""
    return rows[jnp.minimum(first + jnp.arange(SCORED_ROWS, dtype=jnp.int32), rows.shape[0] - 1)]


@functools.partial(compilation.jit, static_argnums=0, static_argnames="top")
def _score_drawn(
    network: Network, parameters: Parameters, hidden: Float[Array, "n D"], rows: ScoredRows, *, top: int
) -> PackedTokens:
    """Returns logprobs of given tokens, each from the hidden state of its own row."""
    # Small integers decide what each row has seen; the scan adds no number that bits depend on.
    _, seen = lax.scan(_seen_after, SeenTokens(*map(jnp.asarray, rows.seen)), (rows.token, rows.is_generated))
    with model_of(network, parameters) as model:
        token, _, *arrays, _ = rows
        drawn = model.with_logits(_drawn, hidden, jnp.asarray(token), *arrays, seen, top=top)
        return PackedTokens.in_program(drawn)


def _seen_after(seen: SeenTokens, row: tuple[Array, Array]) -> tuple[SeenTokens, SeenTokens]:
    """Returns the tokens that are seen after a row's token, and before it."""
    token, is_generated = row
    count, in_prompt = seen.generated[token], seen.in_prompt[token]
    count += (is_generated & (count < np.iinfo(COUNT).max)).astype(COUNT)
    in_prompt |= ~is_generated
    after = SeenTokens(seen.generated.at[token].set(count), seen.in_prompt.at[token].set(in_prompt))
    return after, seen


def _drawn(
    logits: Logits,
    token: Int32[Array, "n"],
    sampling: SamplingArrays,
    adjustments: LogitAdjustments,
    allowed: UInt32[Arrays, "n W"],
    seen: SeenTokens,
    *,
    top: int,
) -> SampledTokens:
    """Returns given tokens with their logprobs under the model and under the distribution they are drawn from."""
    kept = logits.adjusted(seen, adjustments, allowed).filtered(sampling)
    return SampledTokens(
        token,
        logits.logprobs(token),
        *logits.top_logprobs(top),
        kept.sampling_logprobs(token, sampling),
        *kept.sampling_top_logprobs(top, sampling, jnp.argmax(kept.whole, axis=1).astype(jnp.int32)),
    )
