"""The programs of a head that guesses: rows before known tokens, and guesses one after another."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32

from detjax.contract import KV_BLOCK
from detjax.engine.batch import BatchShape, StepBatch
from detjax.engine.drafts.speculative_config import MOST_DRAFTED
from detjax.engine.packed import Packed
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.program import Parameters, StepProgram, model_of, shapes_of
from detjax.engine.sampling_programs import counted_rows
from detjax.engine.step_programs import ComputedRows
from detjax.models import Decoder
from detjax.models.drafts.head import DraftHead
from detjax.models.network import Network, Weights
from detjax.models.parts.logits import Logits, vocabulary_sharding
from detjax.operands.kv_pages import PackedRows, Queries
from detjax.operands.numerics import unique_scatter_indices
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


class Networks(NamedTuple):
    """A head and its model without weights."""

    head: Network[DraftHead]
    model: Network[Decoder]


class HeadArrays(NamedTuple):
    """The weights of a head and of its model."""

    head: Weights
    model: Parameters


class Chain(NamedTuple):
    """The sequences that get guesses: the slots of their last tokens, the number of guesses and where they begin."""

    held: Int32[Arrays, "decodes"]
    steps: Int32[Arrays, "decodes"]
    queries: Queries
    sampling: SamplingArrays


class Before(NamedTuple):
    """The results before a guess.

    Attributes:
        token: the guesses before; at first, the last token of each slot.
        hidden: the hidden states that the guesses before chain; at first None.
        number: how many guesses each sequence has; at first None.
        guesses: all of them, in the first columns; at first None.
    """

    token: Int32[Arrays, "_"]
    hidden: Float[Array, "decodes D"] | None = None
    number: Int32[Array, ""] | None = None
    guesses: Int32[Array, "decodes n"] | None = None


def follow(state: HeadState, batch: PackedBatch, computed: ComputedRows, token: Any) -> StepProgram:
    """Returns the program that computes a head's rows before the tokens of a step.

    Args:
        state: the head's state.
        batch: the step's arrays.
        computed: the model's results for its rows.
        token: the tokens sampled from its rows.
    """
    args = state, PackedBatch(batch.layers, batch.rows), computed, token
    shape = batch.shape
    purpose = f"head: up to {shape.decodes} decodes, and prefills of up to {shape.rows} rows"
    return StepProgram(_follow, shape, args, {}, purpose)


def chain(batch: StepBatch, steps: Int32[np.ndarray, "decodes"]) -> Packed[Chain]:
    """Returns the sequences that get guesses after each decode of a batch, given the number of guesses."""
    sampling = SamplingArrays(*(values[: len(steps)] for values in batch.sampling))
    return Packed.on_host(Chain(batch.held, steps, _page_queries(batch.queries), sampling))


def guess(
    state: HeadState, sequences: Packed[Chain], before: Before, numbers: Any, *, is_filtered: bool
) -> StepProgram:
    """Returns the program that computes the next guess of each sequence.

    Args:
        state: the head's state.
        sequences: the result of `chain`.
        before: the result of the guess before.
        numbers: the head's number of each token of the model, and the number of its tokens for those that it cannot
            guess; None: the tokens are the same.
        is_filtered: whether some sequences filter their tokens.
    """
    count, is_first = len(sequences.layout.tree.held), before.hidden is None
    purpose = f"head: {'the first' if is_first else 'a later'} guess of up to {count} sequences"
    args = state, sequences, before, numbers
    return StepProgram(_guess, (count, is_first), args, {"is_filtered": is_filtered}, purpose)


def has_guesses(shape: BatchShape, slots: int) -> bool:
    """Returns whether guesses can be made after steps of a shape, for each of up to `slots` sequences that decode."""
    return not shape.rows and shape.queries == 1 and shape.decodes <= slots


def _page_queries(queries: Queries) -> Queries:
    """Returns queries without what only the model has: slots and coordinates."""
    return dataclasses.replace(queries, slots=None, coordinates=None)


@dataclasses.dataclass(frozen=True)
class HeadPrograms:
    """All programs of a head, described by shapes and dtypes so that they can be pickled.

    Attributes:
        network: the head and its model without weights.
        parameters: their weights.
        state: the head's state.
        batches: an empty batch of each shape, on the host.
        last: the last token of each slot.
        hidden: one row of the model's hidden states.
        features: one row of features from residual streams; None: from no stream.
        chained: one row of the head's hidden states.
        numbers: see `guess`.
        everywhere: the replicated sharding over the devices that share the model; None: one device.
    """

    network: Networks
    parameters: HeadArrays
    state: HeadState
    batches: tuple[StepBatch, ...]
    last: Any
    hidden: jax.ShapeDtypeStruct
    features: jax.ShapeDtypeStruct | None
    chained: jax.ShapeDtypeStruct
    numbers: Any
    everywhere: NamedSharding | None

    @property
    def networks(self) -> tuple[Network, ...]:
        """The networks that the programs are traced for."""
        return tuple(self.network)

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model; None: one device."""
        if self.everywhere is None:
            return None
        assert isinstance(self.everywhere.mesh, Mesh)
        return self.everywhere.mesh

    def by_key(self) -> dict[Hashable, StepProgram]:
        """Returns the programs, all of them essential: guesses wait for them."""
        programs = [program for batch in self.batches for program in self._programs(batch)]
        return {program.key: program._replace(args=shapes_of(program.args, self.everywhere)) for program in programs}

    def _programs(self, batch: StepBatch) -> list[StepProgram]:
        shape, rows = batch.shape, len(batch.token)
        features = None if self.features is None else _rows(self.features, rows)
        computed = ComputedRows(_tokens(rows), _rows(self.hidden, rows), features)
        programs = [follow(self.state, PackedBatch.on_host(batch), computed, _tokens(shape.sampled))]
        if not has_guesses(shape, self.last.shape[0]):
            return programs
        count = shape.decodes
        guesses: Any = jax.ShapeDtypeStruct((count, MOST_DRAFTED), jnp.int32)
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        first, later = Before(self.last), Before(_tokens(count), _rows(self.chained, count), number, guesses)
        sequences = chain(batch, np.zeros(count, np.int32))
        return programs + [
            guess(self.state, sequences, before, self.numbers, is_filtered=is_filtered)
            for before in (first, later)
            for is_filtered in (False, True)
        ]


def _tokens(count: int) -> Any:
    return jax.ShapeDtypeStruct((count,), jnp.int32)


def _rows(row: jax.ShapeDtypeStruct, count: int) -> Any:
    return jax.ShapeDtypeStruct((count, *row.shape), row.dtype)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _follow(
    networks: Networks,
    arrays: HeadArrays,
    state: HeadState,
    batch: PackedBatch,
    computed: ComputedRows,
    token: Int32[Array, "R"],
) -> HeadState:
    """Returns a head's state after the rows before the tokens of a step."""
    step = batch.unpacked()
    queries = _page_queries(step.queries)
    head = networks.head.with_weights(arrays.head)
    features = computed.hidden if computed.features is None else computed.features
    mapped = head.mapped(rounded(features, head.dtype))
    request, position, present = _rows_of(queries)
    begins = jnp.asarray(queries.start) == 0  # these sequences have no row before their first token
    is_first_chunk = begins[request]

    def page_of(position: Array) -> Array:
        return jnp.asarray(queries.page_table)[request, jnp.maximum(position, 0) // KV_BLOCK]

    # A sequence's rows may be requests of their own. No two sequences write to a page, so it tells whose rows they are.
    page, page_before = page_of(position), page_of(position - 1)
    continues = (jnp.roll(page, 1) == page_before) & (jnp.roll(position, 1) == position - 1) & (present > 0)
    continues &= jnp.roll(present, 1) > 0
    before = jnp.where(continues[:, None], jnp.roll(mapped, 1, axis=0), state.mapped[page_before])
    hidden = jnp.where(is_first_chunk[:, None], mapped, before)
    tokens = jnp.where(is_first_chunk, jnp.roll(computed.token, -1), computed.token)
    embedded = _embedded(head, networks, arrays, tokens)
    _, pages = head(embedded, hidden, _one_earlier(queries), state.pages)

    counts = (present > 0) & _counted(len(position), step, token)
    # A page has one row that no row of the same page follows.
    following = jnp.roll(counts & continues & (page == page_before), -1)
    kept = unique_scatter_indices(counts & ~following, page, len(state.mapped))
    return HeadState(pages, state.mapped.at[kept].set(mapped, mode="drop", unique_indices=True))


def _rows_of(queries: Queries) -> tuple[Int32[Array, "N"], Int32[Array, "N"], Int32[Array, "N"]]:
    """Returns the request of each row, its position there, and 0 for padding rows."""
    assert queries.rows is not None
    return jnp.asarray(queries.rows.request), jnp.asarray(queries.rows.position), jnp.asarray(queries.rows.present)


def _counted(rows: int, step: StepBatch, token: Int32[Array, "R"]) -> Bool[Array, "N"]:
    """Returns False for the rows of wrong guesses and of guesses after them."""
    if step.drafted is None:
        return jnp.ones(rows, bool)
    counted = counted_rows(token, step.drafted).astype(jnp.int32)
    return jnp.ones(rows, jnp.int32).at[step.last_row].min(counted) > 0


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


def _embedded(
    head: DraftHead, networks: Networks, arrays: HeadArrays, tokens: Int32[Array, "N"]
) -> Float[Array, "N D"]:
    """Returns the embedding of tokens, the head's own or the model's."""
    if head.embedding is not None:
        return head.embedding.rows(tokens)
    with model_of(networks.model, arrays.model) as model:
        return rounded(model.on_each_device(_embedding_rows, tokens), head.dtype)


def _embedding_rows(model: Decoder, tokens: Int32[Array, "N"]) -> Float[Array, "N D"]:
    return model.embedding.rows(tokens)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2, static_argnames="is_filtered")
def _guess(
    networks: Networks,
    arrays: HeadArrays,
    state: HeadState,
    sequences: Packed[Chain],
    before: Before,
    numbers: Int32[Array, "V"] | None,
    *,
    is_filtered: bool,
) -> tuple[Before, HeadState]:
    """Returns the results after one more guess of each sequence, and the head's state."""
    head = networks.head.with_weights(arrays.head)
    chain = sequences.unpacked()
    token, hidden, number, guesses = before
    start = jnp.asarray(chain.queries.start)[: len(chain.held)]
    if hidden is None:
        token = token[chain.held]
        table = jnp.asarray(chain.queries.page_table)[: len(chain.held)]
        page = jnp.take_along_axis(table, jnp.maximum(start - 1, 0)[:, None] // KV_BLOCK, axis=1)[:, 0]
        hidden = state.mapped[page]
    if number is None or guesses is None:
        number, guesses = jnp.int32(0), jnp.zeros((len(chain.held), MOST_DRAFTED), jnp.int32)
    queries = _one_earlier(chain.queries).later(number, number < chain.steps)
    output, pages = head(_embedded(head, networks, arrays, token), hidden, queries, state.pages)
    logits = _logits(head, networks, arrays, output, numbers)
    sampling = chain.sampling._replace(position=chain.sampling.position + number)
    sharding = vocabulary_sharding(logits.shape[-1], 1)
    token, _ = Logits(logits, sharding).sample(sampling, filtered=is_filtered)
    after = Before(
        token,
        head.chained(output),
        number + 1,
        lax.dynamic_update_slice_in_dim(guesses, token[:, None], number, axis=1),
    )
    return after, HeadState(pages, state.mapped)


def _logits(
    head: DraftHead,
    networks: Networks,
    arrays: HeadArrays,
    hidden: Float[Array, "R D"],
    numbers: Int32[Array, "V"] | None,
) -> Float32[Array, "R V"]:
    """Returns logits of the model's tokens; tokens that the head cannot guess have -inf."""
    with model_of(networks.model, arrays.model) as model:
        if head.lm_head is None:
            return model.logits(rounded(head.normalized(hidden), model.dtype))
        logits = head.own_logits(hidden)
    if numbers is None:
        return logits
    # Writing the logits to their tokens would sort these on a GPU, to be deterministic.
    count = logits.shape[1]
    return jnp.where(numbers < count, logits[:, jnp.minimum(numbers, count - 1)], -jnp.inf)
