"""A head over the model's hidden states that guesses tokens: EAGLE-3, or a layer that predicts further tokens.

The head has a page of keys and values for each page of the model. Its row for position `p` needs the model's features
there and the token at `p + 1`, so a step that computes tokens of a sequence lets the head compute the rows just before
them. The row before a step's first token has its features from an earlier step: each page keeps the mapped features of
its last token that counts.

A guess takes the place of the next token, and the head's own hidden states the place of features. The keys and values
of such rows come after the ones of known tokens. The step that verifies the guesses computes the rows of the tokens
that it accepts again, from the model's features.
"""

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from detjax.contract import KV_BLOCK
from detjax.engine.batch import BatchShape, BatchShapes, DraftedRows, SlotTable
from detjax.engine.drafts.drafter import Drafter, SampledStep
from detjax.engine.model_runner import ModelRunner
from detjax.engine.program import Parameters, model_of
from detjax.engine.sampling_programs import counted_rows
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep
from detjax.engine.sequence import Sequence
from detjax.engine.step_programs import ComputedRows
from detjax.models import Decoder, Draft
from detjax.models.cache import declarations
from detjax.models.drafts.head import DraftHead
from detjax.models.network import Network, Weights, split
from detjax.models.parts.logits import Logits, vocabulary_sharding
from detjax.models.parts.state import StateSize
from detjax.operands.kv_pages import PackedRows, Queries
from detjax.operands.rounding import rounded
from detjax.operands.sampling_arrays import Arrays, SamplingArrays
from detjax.runtime import compilation


class HeadState(NamedTuple):
    """The memory of a head.

    Attributes:
        pages: its layer's keys and values.
        mapped: for each page, the mapped features of the last token in it that counts.
    """

    pages: Any
    mapped: Float[Array, "P D"]


class HeadDrafter(Drafter):
    """Guesses what a head would sample with the noise of the request."""

    follows = True

    def __init__(
        self, draft: Draft, table: SlotTable, shapes: BatchShapes, num_pages: int, runner: ModelRunner
    ) -> None:
        """A drafter with an empty cache.

        Args:
            draft: the head. Its target is not read: the model's current weights are the runner's.
            table: the sequences in the slots.
            shapes: the shapes of the step loop's batches.
            num_pages: the number of pages of the model.
            runner: runs the model.
        """
        config = draft.head.config
        self._network, weights = split(draft.head)
        self._weights: Any = weights
        self._size = StateSize(num_pages, draft.dtype)
        self._declared, self._width = declarations(config)[0], config.hidden_size
        self._ids = None if draft.target_ids is None else jnp.asarray(draft.target_ids, jnp.int32)
        self._table, self._shapes, self._runner = table, shapes, runner
        self.make_state()

    def make_state(self) -> None:
        """Allocates the cache, and puts the weights back on the devices."""
        mapped = jnp.zeros((self._size.num_pages, self._width), self._size.dtype)
        self._state = self._runner.replicate(HeadState(self._declared.empty(self._size), mapped))
        self._weights = self._runner.replicate(self._weights)

    def drop_state(self) -> None:
        """Releases the cache, and copies the weights to the host."""
        jax.block_until_ready(self._state)
        del self._state
        self._weights = jax.device_get(self._weights)

    def note_sampled(self, step: SampledStep) -> None:
        """Computes the head's rows before the tokens of a step."""
        batch = step.batch
        queries = dataclasses.replace(batch.queries, slots=None, coordinates=None)
        # A step that samples nothing verifies nothing, so any tokens serve.
        token = jnp.zeros(len(batch.slot), jnp.int32) if step.sampled is None else step.sampled.token
        verified = _Verified(batch.last_row, batch.drafted, token)
        self._state = _follow(self._networks, self._arrays, self._state, queries, step.computed, verified)

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Returns tokens that the head samples one after another."""
        step = ScheduledStep(tuple(ScheduledChunk(sequence, sequence.computed, 1, True, True) for sequence in wanted))
        steps = np.zeros(self._shapes.smallest(step).decodes, np.int32)
        steps[: len(wanted)] = list(wanted.values())
        is_filtered = any(sequence.params.filtered for sequence in wanted)
        tokens = [np.asarray(token).tolist() for token in self._guesses(step, steps, is_filtered=is_filtered)]
        return {
            sequence: [tokens[number][row] for number in range(count)]
            for row, (sequence, count) in enumerate(wanted.items())
        }

    def _guesses(
        self, step: ScheduledStep, steps: Int32[np.ndarray, "decodes"], *, is_filtered: bool
    ) -> list[Int32[Array, "decodes"]]:
        """Returns the guesses after each decode of a step: as many arrays as the highest number in `steps`."""
        batch = self._table.batch(step, self._shapes.smallest(step))
        assert not batch.shape.rows
        rows = len(steps)
        queries = dataclasses.replace(batch.queries, slots=None, coordinates=None)
        sampling = SamplingArrays(*(values[:rows] for values in batch.sampling))
        arrays: Any = self._runner.replicate((_Chain(batch.held, steps, queries, sampling), self._ids))
        chain, ids = arrays
        guesses, hidden, token = [], None, self._runner.last_tokens
        for number in range(int(steps.max(initial=0))):
            before, index = (token, hidden, ids), np.int32(number)
            token, hidden, self._state = _guess(
                self._networks, self._arrays, self._state, chain, before, index, is_filtered=is_filtered
            )
            guesses.append(token)
        return guesses

    @property
    def _networks(self) -> "_Networks":
        return _Networks(self._network, self._runner.model_arrays[0])

    @property
    def _arrays(self) -> "_Arrays":
        return _Arrays(self._weights, self._runner.model_arrays[1])

    def warm_up(self, shapes: Seq[BatchShape]) -> None:
        """Compiles and runs the programs that batches of these shapes need."""
        nobody = ScheduledStep()
        for shape in shapes:
            batch = self._runner.copy(self._table.batch(nobody, shape))
            self._runner.forward(batch)
            assert self._runner.computed is not None
            self.note_sampled(SampledStep(batch, self._runner.computed, None))
            if shape == self._shapes.smallest(nobody):
                for is_filtered in (False, True):
                    # The first guess and a later one are separate programs.
                    self._guesses(nobody, np.full(shape.decodes, 2, np.int32), is_filtered=is_filtered)


class _Verified(NamedTuple):
    """The tokens that a step sampled, and the guesses that they verify; see `StepBatch` and `SampledStep`."""

    last_row: Int32[Arrays, "R"]
    drafted: DraftedRows | None
    token: Int32[Arrays, "R"]


class _Chain(NamedTuple):
    """The sequences that get guesses: the slots of their last tokens, the number of guesses and where they begin."""

    held: Int32[Arrays, "decodes"]
    steps: Int32[Arrays, "decodes"]
    queries: Queries
    sampling: SamplingArrays


class _Networks(NamedTuple):
    """A head and its model without weights."""

    head: Network[DraftHead]
    model: Network[Decoder]


class _Arrays(NamedTuple):
    """The weights of a head and of its model."""

    head: Weights
    model: Parameters


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _follow(
    networks: _Networks,
    arrays: _Arrays,
    state: HeadState,
    queries: Queries,
    computed: ComputedRows,
    verified: _Verified,
) -> HeadState:
    """Returns a head's state after the rows before the tokens of a step."""
    head = networks.head.with_weights(arrays.head)
    features = computed.hidden if computed.features is None else computed.features
    mapped = head.mapped(rounded(features, head.dtype))
    request, position, present = _rows_of(queries)
    begins = jnp.asarray(queries.start) == 0  # these sequences have no row before their first token
    is_first_chunk, is_first_row = begins[request], position == jnp.asarray(queries.start)[request]
    page = jnp.asarray(queries.page_table)[request, jnp.maximum(position - 1, 0) // KV_BLOCK]
    before = jnp.where(is_first_row[:, None], state.mapped[page], jnp.roll(mapped, 1, axis=0))
    hidden = jnp.where(is_first_chunk[:, None], mapped, before)
    tokens = jnp.where(is_first_chunk, jnp.roll(computed.token, -1), computed.token)
    embedded = _embedded(head, networks, arrays, tokens)
    _, pages = head(embedded, hidden, _one_earlier(queries), state.pages)

    page = jnp.asarray(queries.page_table)[request, position // KV_BLOCK]
    counts = (present > 0) & _counted(len(position), verified)
    following = jnp.roll(counts & (present > 0), -1) & (jnp.roll(request, -1) == request)
    following &= (jnp.roll(position, -1) == position + 1) & (jnp.roll(position, -1) // KV_BLOCK == position // KV_BLOCK)
    kept = jnp.where(counts & ~following, page, len(state.mapped))
    return HeadState(pages, state.mapped.at[kept].set(mapped, mode="drop"))


def _rows_of(queries: Queries) -> tuple[Int32[Array, "N"], Int32[Array, "N"], Int32[Array, "N"]]:
    """Returns the request of each row, its position there, and 0 for padding rows."""
    assert queries.rows is not None
    return jnp.asarray(queries.rows.request), jnp.asarray(queries.rows.position), jnp.asarray(queries.rows.present)


def _counted(rows: int, verified: _Verified) -> Bool[Array, "N"]:
    """Returns False for the rows of wrong guesses and of guesses after them."""
    if verified.drafted is None:
        return jnp.ones(rows, bool)
    counted = counted_rows(verified.token, verified.drafted).astype(jnp.int32)
    return jnp.ones(rows, jnp.int32).at[verified.last_row].min(counted) > 0


def _one_earlier(queries: Queries) -> Queries:
    """Returns queries at the positions before; requests that begin have one row less, and no row before their first."""
    start, count = jnp.asarray(queries.start), jnp.asarray(queries.count)
    begins = (start == 0) & (count > 0)
    count = jnp.where(begins, count - 1, count)
    earlier = jnp.maximum(start - 1, 0)
    request, position, present = _rows_of(queries)
    position = jnp.where(begins[request], position, jnp.maximum(position - 1, 0))
    present = jnp.where(position < (earlier + count)[request], present, 0)
    return dataclasses.replace(
        queries,
        start=earlier,
        length=earlier + count,
        count=count,
        rows=PackedRows(request, position, present),
    )


def _embedded(head: DraftHead, networks: _Networks, arrays: _Arrays, tokens: Int32[Array, "N"]) -> Float[Array, "N D"]:
    """Returns the embedding of tokens, the head's own or the model's."""
    if head.embedding is not None:
        return head.embedding.rows(tokens)
    with model_of(networks.model, arrays.model) as model:
        return rounded(model.on_each_device(_embedding_rows, tokens), head.dtype)


def _embedding_rows(model: Decoder, tokens: Int32[Array, "N"]) -> Float[Array, "N D"]:
    return model.embedding.rows(tokens)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2, static_argnames="is_filtered")
def _guess(
    networks: _Networks,
    arrays: _Arrays,
    state: HeadState,
    chain: _Chain,
    before: tuple[Int32[Array, "_"], Float[Array, "decodes D"] | None, Int32[Array, "v"] | None],
    number: Int32[Any, ""],
    *,
    is_filtered: bool,
) -> tuple[Int32[Array, "decodes"], Float[Array, "decodes D"], HeadState]:
    """Returns guess `number` of each sequence, the hidden states for the next one, and the head's state.

    `before` has the guesses before and their hidden states, and the model's token of each token of the head. At first,
    it has the last token of each slot and no hidden states.
    """
    head = networks.head.with_weights(arrays.head)
    token, hidden, ids = before
    start = jnp.asarray(chain.queries.start)[: len(chain.held)]
    if hidden is None:
        token = token[chain.held]
        table = jnp.asarray(chain.queries.page_table)[: len(chain.held)]
        page = jnp.take_along_axis(table, jnp.maximum(start - 1, 0)[:, None] // KV_BLOCK, axis=1)[:, 0]
        hidden = state.mapped[page]
    queries = _one_earlier(chain.queries).later(number, number < chain.steps)
    output, pages = head(_embedded(head, networks, arrays, token), hidden, queries, state.pages)
    logits = _logits(head, networks, arrays, output, ids)
    sampling = chain.sampling._replace(position=chain.sampling.position + number)
    sharding = vocabulary_sharding(logits.shape[-1], 1)
    token, _ = Logits(logits, sharding).sample(sampling, filtered=is_filtered)
    return token, head.chained(output), HeadState(pages, state.mapped)


def _logits(
    head: DraftHead,
    networks: _Networks,
    arrays: _Arrays,
    hidden: Float[Array, "R D"],
    ids: Int32[Array, "v"] | None,
) -> Float32[Array, "R V"]:
    """Returns logits of the model's tokens; tokens that the head cannot guess have -inf."""
    with model_of(networks.model, arrays.model) as model:
        if head.lm_head is None:
            return model.logits(rounded(head.normalized(hidden), model.dtype))
        logits, vocabulary = head.own_logits(hidden), model.config.vocab_size
    if ids is None:
        return logits
    return jnp.full((len(logits), vocabulary), -jnp.inf).at[:, ids].set(logits)
