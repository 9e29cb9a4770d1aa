"""Recomputes completions by prefill: the tokens and logprobs that the engine must have sampled.

Prefill gives the bits of decode, so one forward pass over a prompt and its completion gives every logprob and, since a
token is a function of logits, seed and position, every token. The programs and caches are the engine's. Batching is a
schedule, on which no bit depends.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.engine import sampling_programs, step_programs
from detjax.engine import sequence as sequences
from detjax.engine.batch import BatchShape, BatchShapes, logit_adjustments, sampling_arrays
from detjax.engine.constraints import CompiledConstraint
from detjax.engine.page_pool import Digest, PagePool, digests
from detjax.engine.program import Parameters
from detjax.engine.sampled_tokens import PackedTokens, SampledTokens
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.sampling_programs import SampledRows, SlotState
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import ScheduledChunk, Scheduler, StepLimits, pages_needed
from detjax.engine.slot_table import SlotTable
from detjax.engine.token_masks import TokenRules, all_allowed, masks_of
from detjax.models import Decoder
from detjax.models.network import split
from detjax.operands.noise import noise_key
from detjax.operands.numerics import round_up
from detjax.operands.options import KVQuantization
from detjax.operands.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays, SeenTokens
from detjax.runtime import compilation

_MAX_ROWS: Final = 8192
"""Maximum number of tokens in a forward pass."""
_MIN_ROWS: Final = 64
"""Minimum number of tokens in a forward pass or a sampling program."""
_MAX_LOGITS: Final = 1 << 28
"""Maximum number of float32 logits in a sampling program, which holds a few copies of them."""
_MAX_SAMPLED: Final = 1024
"""Maximum number of tokens in a sampling program."""
_MIN_ENTRIES: Final = 64
"""Minimum number of seen tokens per row in a program."""
_MAX_IN_FLIGHT: Final = 4
"""Maximum number of sampling programs whose results the host has not read."""


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """A completion to recompute.

    Attributes:
        prompt: the prompt's tokens.
        tokens: the completion's tokens, at least one.
        params: the sampling parameters.
        index: the index of the sample in its request.
        end_tokens: tokens that end the sample, which `min_tokens` holds back.
        constraint: the constraint on the text.
        rules: the rules for single tokens.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    index: int = 0
    end_tokens: frozenset[int] = frozenset()
    constraint: CompiledConstraint | None = None
    rules: TokenRules | None = None


class Replayed(NamedTuple):
    """The tokens that the engine samples at some positions.

    Attributes:
        answer: the index of the completion for each token.
        position: the position of each token in its completion.
        sampled: tokens and logprobs, arrays with a row per token.
    """

    answer: Int32[np.ndarray, "n"]
    position: Int32[np.ndarray, "n"]
    sampled: SampledTokens


class _Known(sequences.Sequence):
    """A sequence whose tokens are all known. To the scheduler it looks preempted before its last token."""

    def __init__(self, number: int, answer: Answer, leader: "_Known | None") -> None:
        super().__init__(answer.prompt, SamplingParams(len(answer.tokens)), leader=leader)
        self.number, self.answer = number, answer
        self.generated.extend(answer.tokens[:-1])

    @property
    def needs_rows(self) -> bool:
        """True: tokens are sampled from the hidden states of prefills."""
        return True

    @functools.cached_property
    def noise_key(self) -> tuple[int, int, int, int]:
        """The key of the answer's noise."""
        return noise_key(self.answer.params.seed, self.prompt_digest, self.answer.index)

    def digests(self) -> list[Digest]:
        """Returns the digests of the pages before the prompt's last token, which other sequences may share."""
        return self._digests_of_prompt

    @functools.cached_property
    def _digests_of_prompt(self) -> list[Digest]:
        if self.leader is not None:
            return self.leader.digests()
        pages = (len(self.prompt) - 1) // KV_BLOCK
        return digests(self.prompt[: pages * KV_BLOCK])


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Consecutive tokens of a completion in a step: the first position, the count, and the row of the first token."""

    sequence: _Known
    first: int
    count: int
    row: int

    def part(self, start: int, count: int) -> "_Rows":
        """Returns `count` of the rows, from index `start`."""
        return _Rows(self.sequence, self.first + start, count, self.row + start)


class _SeenEntries(NamedTuple):
    """The distinct tokens of each row's sequence, with the count in the completion and whether the prompt has them."""

    token: Int32[Arrays, "R n"]
    generated: Arrays
    in_prompt: Arrays


class _Pending(NamedTuple):
    """Tokens that the device is sampling."""

    rows: list[_Rows]
    sampled: PackedTokens

    def read(self) -> Replayed:
        """Waits for the tokens."""
        count = sum(rows.count for rows in self.rows)
        answer = np.concatenate([np.full(rows.count, rows.sequence.number, np.int32) for rows in self.rows])
        position = np.concatenate(
            [np.arange(rows.first, rows.first + rows.count, dtype=np.int32) for rows in self.rows]
        )
        read = self.sampled.packed.read()
        return Replayed(answer, position, SampledTokens(*(None if x is None else x[:count] for x in read)))


def replayed(
    model: Decoder, answers: Sequence[Answer], kv_cache_dtype: KVQuantization | None = None
) -> Iterator[Replayed]:
    """Yields the tokens that the engine samples at every position of the completions, in any order.

    Raises:
        ValueError: the model's keys and values cannot be quantized to `kv_cache_dtype`.
    """
    if answers:
        yield from _Replay(model, answers, kv_cache_dtype).run()


class _Replay:
    """A run of completions through a model and its cache."""

    def __init__(self, model: Decoder, answers: Sequence[Answer], kv_cache_dtype: KVQuantization | None) -> None:
        self._network, self._weights = split(model)
        self._vocabulary = model.config.vocab_size
        leaders: dict[tuple[int, ...], _Known] = {}
        self._sequences: list[_Known] = []
        for number, answer in enumerate(answers):
            sequence = _Known(number, answer, leaders.get(answer.prompt))
            leaders.setdefault(answer.prompt, sequence)
            self._sequences.append(sequence)

        # Sizes are rounded up, so that calls of similar size share programs.
        tokens = sum(round_up(len(sequence.tokens), QUERY_UNIT) for sequence in self._sequences)
        rows = _size(_MIN_ROWS, tokens, _MAX_ROWS)
        slots = rows // QUERY_UNIT
        self._shape = BatchShape(0, rows, slots, slots)
        limits = StepLimits(slots=slots, tokens=rows, prefills=slots, rows=rows, prefill_chunk=rows)
        shapes = BatchShapes([self._shape], limits)
        longest = 1 << (max(map(pages_needed, self._sequences)) - 1).bit_length()
        # Upper bound on the pages of a step: the pages of its sequences, and the pages that its tokens fill.
        num_pages = longest + min(slots * longest, slots + rows // KV_BLOCK)
        self._scheduler = Scheduler(PagePool(num_pages, keeps_prefixes=not model.has_slots), shapes.limits)
        sections = model.config.rope.sections
        self._table = SlotTable(
            slots, longest, named_in_queries=model.has_slots, coordinates=None if sections is None else len(sections)
        )
        self._state = model.empty_state(num_pages, kv_cache_dtype, slots)
        self._last = jnp.zeros(slots, jnp.int32)
        wanted = sum(len(answer.tokens) for answer in answers)
        most = max(QUERY_UNIT, _MAX_LOGITS // self._vocabulary // QUERY_UNIT * QUERY_UNIT)
        self._sampled_rows = _size(_MIN_ROWS, wanted, min(_MAX_SAMPLED, most))
        # Filters sort the logits, and the other options are rare: four programs serve every mixture.
        rare = [answer.params.needs for answer in answers if _is_rare(answer.params)]
        self._rare = SamplingVariant(*map(max, zip(*rare, strict=True))) if rare else None
        self._masks: dict[int, Iterator[np.ndarray]] = {}

    def run(self) -> Iterator[Replayed]:
        """Yields the results of all steps."""
        for sequence in self._sequences:
            self._scheduler.submit(sequence)
        in_flight: deque[_Pending] = deque()
        while not self._scheduler.is_idle:
            in_flight.extend(self._step())
            while len(in_flight) > _MAX_IN_FLIGHT:
                yield in_flight.popleft().read()
        for pending in in_flight:
            yield pending.read()

    def _step(self) -> Iterator[_Pending]:
        """Submits one step to the device, and samples the tokens of completions after its rows."""
        plan = self._scheduler.plan()
        assert plan.prefills and not plan.decodes
        batch = self._table.batch(plan, self._shape)
        first_rows = batch.queries.first_row
        assert first_rows is not None
        self._scheduler.mark_submitted(plan)
        forward = step_programs.forward(jax.device_put(batch), self._state, self._last)
        self._state, _, hidden = forward.fn(self._network, Parameters(self._weights), *forward.args)
        rows = [_rows(chunk, int(row)) for chunk, row in zip(plan.prefills, first_rows, strict=False)]
        for chunk in plan.prefills:
            if chunk.completes:  # later steps on the device may reuse its pages
                chunk.sequence.finish_reason = "length"
                self._scheduler.accept_tokens(chunk.sequence)
        by_variant: dict[SamplingVariant, list[_Rows]] = {}
        for one in rows:
            if one.count:
                by_variant.setdefault(self._variant(one.sequence.answer.params), []).append(one)
        for variant, group in by_variant.items():
            for batch_rows in _batches(group, self._sampled_rows):
                yield self._sampled(hidden, batch_rows, variant)

    def _variant(self, params: SamplingParams) -> SamplingVariant:
        if _is_rare(params) and self._rare is not None:
            return self._rare._replace(filtered=params.filtered)
        return SamplingVariant(params.filtered, 0)

    def _sampled(self, hidden: Array, rows: list[_Rows], variant: SamplingVariant) -> _Pending:
        """Samples the tokens after some rows of hidden states."""
        size = self._sampled_rows
        index = _padded(np.concatenate([np.arange(one.row, one.row + one.count, dtype=np.int32) for one in rows]), size)
        adjustments, seen, allowed = None, None, None
        if variant.adjusted:
            adjustments = _adjustments(rows, size)
            seen = _seen_tokens(jax.device_put(_seen_entries(rows, size, self._vocabulary)), self._vocabulary)
        if variant.constrained:
            allowed = self._allowed(rows, size)
        slots = SlotState(jnp.zeros(size, jnp.int32), seen)
        sampled = SampledRows(np.arange(size, dtype=np.int32), _sampling(rows, size), adjustments, allowed)
        program = sampling_programs.sample_rows(jax.device_put(sampled), _rows_at(hidden, index), slots, variant)
        _, tokens = program.fn(self._network, Parameters(self._weights), *program.args, **program.static)
        return _Pending(rows, tokens.start_copy())

    def _allowed(self, rows: list[_Rows], size: int) -> np.ndarray:
        """Returns the masks of the rows' constraints and rules."""
        allowed, row = all_allowed(size, self._vocabulary), 0
        for one in rows:
            for position in range(one.first, one.first + one.count):
                if (mask := self._mask(one.sequence, position)) is not None:
                    allowed[row] = mask
                row += 1
        return allowed

    def _mask(self, sequence: _Known, position: int) -> np.ndarray | None:
        """Returns the mask of a token; None if it has none, and after a token that the constraint refuses."""
        answer = sequence.answer
        if not answer.params.masked:
            return None
        if position == 0 or sequence.number not in self._masks:
            masks = masks_of(answer.constraint, answer.rules, answer.tokens, self._vocabulary)
            self._masks[sequence.number] = masks
        return next(self._masks[sequence.number], None)


def _is_rare(params: SamplingParams) -> bool:
    """Returns whether the request uses more than a temperature and filters."""
    return any(SamplingVariant(*params.needs)._replace(filtered=False))


def _rows(chunk: ScheduledChunk, first_row: int) -> _Rows:
    """Returns the tokens of a completion that are sampled from a chunk's rows."""
    sequence = chunk.sequence
    assert isinstance(sequence, _Known)
    start = max(chunk.start, len(sequence.prompt) - 1)
    count = max(0, chunk.start + chunk.count - start)
    return _Rows(sequence, start + 1 - len(sequence.prompt), count, first_row + start - chunk.start)


def _batches(rows: list[_Rows], size: int) -> Iterator[list[_Rows]]:
    """Yields rows in batches of `size` tokens."""
    batch, room = list[_Rows](), size
    for one in rows:
        while one.count:
            count = min(one.count, room)
            batch.append(one.part(0, count))
            one, room = one.part(count, one.count - count), room - count
            if not room:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((size - len(values), *values.shape[1:]), values.dtype)])


def _sampling(rows: list[_Rows], size: int) -> SamplingArrays:
    params = [one.sequence.answer.params for one in rows]
    by_answer = sampling_arrays(params, [one.sequence.noise_key for one in rows])
    counts = [one.count for one in rows]
    arrays = SamplingArrays(*(_padded(np.repeat(x, counts, axis=0), size) for x in by_answer))
    firsts = [len(one.sequence.prompt) + one.first for one in rows]
    positions = [np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=True)]
    return arrays._replace(position=_padded(np.concatenate(positions), size))


def _adjustments(rows: list[_Rows], size: int) -> LogitAdjustments:
    """Returns penalties and biases. End tokens are barred before `min_tokens`, as in the engine's steps."""
    parts = []
    for one in rows:
        params, answer = one.sequence.answer.params, one.sequence.answer
        barred = min(max(params.min_tokens - one.first, 0), one.count)
        parts += [(logit_adjustments(params, answer.end_tokens), barred)] * bool(barred)
        parts += [(logit_adjustments(params), one.count - barred)]
    parts.append((logit_adjustments(SamplingParams()), size - sum(count for _, count in parts)))
    fields = zip(*(row for row, _ in parts), strict=True)
    return LogitAdjustments(*(np.repeat(np.concatenate(x), [count for _, count in parts], axis=0) for x in fields))


def _seen_entries(rows: list[_Rows], size: int, vocabulary: int) -> _SeenEntries:
    """Returns the tokens that each row's sequence had seen before its token."""
    parts = [_seen_of(one) if one.sequence.answer.params.penalized else None for one in rows]
    most = max((len(part[0]) for part in parts if part is not None), default=0)
    width = _size(_MIN_ENTRIES, most)
    # Padding lies beyond the vocabulary, and all entries of a row are distinct.
    token = np.tile(np.arange(vocabulary, vocabulary + width, dtype=np.int32), (size, 1))
    generated, in_prompt = np.zeros((size, width), np.uint16), np.zeros((size, width), bool)
    row = 0
    for one, part in zip(rows, parts, strict=True):
        if part is not None:
            tokens, counts, is_prompt = part
            index = slice(row, row + one.count), slice(len(tokens))
            token[index], generated[index], in_prompt[index] = tokens, counts, is_prompt
        row += one.count
    return _SeenEntries(token, generated, in_prompt)


def _seen_of(rows: _Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a sequence's distinct tokens, their generated counts before each row, and which are in the prompt."""
    answer, end = rows.sequence.answer, rows.first + rows.count
    completion = np.asarray(answer.tokens[: end - 1], np.int32)
    tokens, index = np.unique(np.concatenate([np.asarray(answer.prompt, np.int32), completion]), return_inverse=True)
    is_prompt = np.zeros(len(tokens), bool)
    is_prompt[index[: len(answer.prompt)]] = True
    generated = index[len(answer.prompt) :]
    before = np.bincount(generated[: rows.first], minlength=len(tokens))
    later = np.zeros((rows.count, len(tokens)), np.int64)
    later[np.arange(1, rows.count), generated[rows.first :]] = 1
    counts = np.minimum(before + np.cumsum(later, axis=0), np.iinfo(np.uint16).max)
    return tokens, counts.astype(np.uint16), is_prompt


@functools.partial(compilation.jit, static_argnums=1)
def _seen_tokens(entries: _SeenEntries, vocabulary: int) -> SeenTokens:
    rows = jnp.arange(len(entries.token), dtype=jnp.int32)[:, None]

    def written(values: Array) -> Array:
        zeros = jnp.zeros((len(values), vocabulary), values.dtype)
        return zeros.at[rows, entries.token].set(values, mode="drop", unique_indices=True)

    return SeenTokens(written(entries.generated), written(entries.in_prompt))


@compilation.jit
def _rows_at(hidden: Float[Array, "rows D"], index: Int32[Arrays, "R"]) -> Float[Array, "R D"]:
    return hidden[index]


def _size(least: int, needed: int, most: int | None = None) -> int:
    """Returns the smallest sufficient size among `least`, four times as much, and so on, limited to `most`."""
    size = least
    while size < needed:
        size *= 4
    return size if most is None else min(size, most)
