"""The programs that compute steps, and the set of programs that a step loop may need.

A program is compiled for fixed array sizes. A few sizes serve all steps, so all programs can be compiled before the
first request; see `BatchShapes.for_serving`.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PyTree

from detjax.engine.batch import BatchShape, StepBatch, essential_shapes
from detjax.engine.drafts.draft_lengths import MOST_SEQUENCES
from detjax.engine.packed_batch import Batch, PackedBatch
from detjax.engine.pooling import pooled_rows
from detjax.engine.pooling_programs import carry, pool, pool_carried
from detjax.engine.program import ModelPart, Parameters, StepProgram, model_of, shapes_of
from detjax.engine.sampled_tokens import PackedTokens, SampledTokens
from detjax.engine.sampling_programs import (
    SCORED_ROWS,
    SampledRows,
    ScoredRows,
    SlotState,
    note_seen,
    sample,
    sampled_from,
    score,
    score_drawn,
    seen_entries,
    take_rows,
    with_last,
)
from detjax.engine.sampling_variant import SamplingVariant, most_likeliest, run_variants
from detjax.engine.token_masks import all_allowed
from detjax.models.blocks import Blocks
from detjax.models.cache import State
from detjax.models.decoder import Decoder, ImageRows
from detjax.models.network import Network
from detjax.models.parts.pooling import ChunkRows, PoolingOptions
from detjax.models.parts.sharding import current_links, linked
from detjax.models.parts.vision import Patches
from detjax.operands.adapted_weight import NO_ADAPTER
from detjax.operands.kv_pages import requests_of_tokens
from detjax.operands.sampling_arrays import Arrays
from detjax.runtime import compilation

RUN_STEPS: Final = 4
"""Steps of a run of decodes. The host prepares the next run while the device computes them."""
_ADAPTERS: Final = "adapters"
"""Part of the size of programs for rows with adapters."""
_SLOT: Final = "slot"
"""The size of programs that copy one slot."""


def forward_key(shape: BatchShape, *, has_adapters: bool = False, depths: tuple[int, ...] | None = None) -> Hashable:
    """Returns the key of the result of `forward` for a batch of a shape."""
    static = () if depths is None else (depths,)
    return _forward.__name__, _size_of_layers(shape, has_adapters), *static


def _size_of_layers(shape: BatchShape | int, has_adapters: bool) -> Hashable:
    return (shape, _ADAPTERS) if has_adapters else shape


def forward(batch: Batch, state: State, last: Any, depths: tuple[int, ...] | None = None) -> StepProgram:
    """Returns the program that computes hidden states.

    Args:
        batch: the step's arrays.
        state: the layers' state.
        last: the last token of each slot.
        depths: layers whose incoming residual streams the program returns too, with the hidden states of all rows.
            None: it returns neither.
    """
    shape, has_adapters = batch.shape, batch.adapters is not None
    # The layers do not depend on sampling: their program is the same with and without adjustments.
    args = state, last, batch.for_layers()
    adapters = ", with adapters" if has_adapters else ""
    purpose = f"layers: up to {_size_of(shape)}{adapters}"
    static = {} if depths is None else {"depths": depths}
    return StepProgram(_forward, _size_of_layers(shape, has_adapters), args, static, purpose)


def _size_of(shape: BatchShape) -> str:
    guesses = f", {shape.queries} of each sequence" if shape.queries > 1 else ""
    prefills = f", and prefills of up to {shape.rows} rows" if shape.rows else ""
    return f"{shape.decodes} decodes{guesses}{prefills}"


class UseOfBlocks(NamedTuple):
    """A choice of the steps that compute the layers in blocks, in a model that has equal ones.

    Attributes:
        guesses: whether the engine makes guesses.
        rows: the fewest rows of prefills that are always computed in blocks.
    """

    guesses: bool = False
    rows: int = 2048

    def ways(self, shape: BatchShape, *, has_adapters: bool, has_images: bool) -> tuple[bool, ...]:
        """Returns the ways to compute the layers of a step, the best one first.

        - True: in blocks, whose program compiles in less time. Many rows keep the device busy for longer than the host
          takes to launch several programs. Steps with guesses, and steps of as few decodes as an engine makes guesses
          for, may have to wait for the host, which can launch a block while the device computes the previous one.
        - False: all layers at once. Other steps are launched while the device computes the step before, and one program
          takes the host less time to launch than several. Until it is compiled, blocks are computed.

        Args:
            shape: the shape of the step's batch.
            has_adapters: whether rows may have adapters.
            has_images: whether prefills may have images.
        """
        if has_adapters or (shape.rows and has_images):
            return (False,)
        may_wait = not shape.rows and (shape.queries > 1 or shape.decodes <= MOST_SEQUENCES)
        if shape.rows >= self.rows or (self.guesses and may_wait):
            return (True,)
        return False, True


USE_OF_BLOCKS: Final = UseOfBlocks()
"""The choice in an engine without guesses."""


def keys_of_blocks(shape: BatchShape, *, depths: tuple[int, ...] | None = None) -> tuple[Hashable, ...]:
    """Returns the keys of the programs that compute the layers of a batch of a shape in blocks."""
    block = _forward_block.__name__, shape, depths
    return (block, (_embed.__name__, shape)) if shape.rows else (block,)


def embed(batch: Batch, last: Any, blocks: Blocks) -> StepProgram:
    """Returns the program that embeds the tokens of a step before the first block of layers.

    Args:
        batch: the step's arrays, without adapters and images.
        last: the last token of each slot.
        blocks: the blocks of the layers.
    """
    purpose = f"embeddings: up to {_size_of(batch.shape)}"
    part = ModelPart(blocks.embedding, blocks.embedding_weights)
    return StepProgram(_embed, batch.shape, (last, batch.for_layers()), {}, purpose, part=part)


def forward_block(
    batch: Batch,
    state: State,
    last: Any,
    before: Any,
    blocks: Blocks,
    number: int,
    depths: tuple[int, ...] | None = None,
) -> StepProgram:
    """Returns the program that computes a block of the layers.

    Args:
        batch: the step's arrays, without adapters and images.
        state: the state of all layers.
        last: the last token of each slot.
        before: the results before the block.
        blocks: the blocks of the layers.
        number: the number of the block.
        depths: see `forward`; an empty tuple or None.
    """
    block = blocks.blocks[number]
    args = block.part(state), last, batch.for_layers(), before
    purpose = f"a block of layers: up to {_size_of(batch.shape)}"
    part = ModelPart(blocks.network, block.weights)
    return StepProgram(_forward_block, batch.shape, args, {"depths": depths}, purpose, part=part)


def has_runs(shape: BatchShape, most: int) -> bool:
    """Returns whether steps of a shape can form runs, which have `most` decodes at most."""
    return not shape.rows and shape.queries == 1 and shape.sampled == shape.decodes <= most


def decode_run_key(
    count: int, variant: SamplingVariant, most: int = RUN_STEPS, *, has_adapters: bool = False
) -> Hashable:
    """Returns the key of the result of `decode_run` for a batch with `count` decodes."""
    return _decode_run.__name__, _size_of_layers(count, has_adapters), variant, most


def decode_run(
    batch: PackedBatch, state: State, last: Any, variant: SamplingVariant, most: int = RUN_STEPS
) -> StepProgram:
    """Returns the program that computes `most` decode steps, each from the tokens of the previous step."""
    count, has_adapters = batch.shape.decodes, batch.adapters is not None
    adapters = ", and adapters" if has_adapters else ""
    purpose = f"runs of {most} steps: up to {count} decodes {variant.description}{adapters}"
    args, static = (state, last, batch.for_runs()), {"variant": variant, "most": most}
    size = _size_of_layers(count, has_adapters)
    return StepProgram(_decode_run, size, args, static, purpose, is_essential=False)


def image_rows_key(windows: int) -> Hashable:
    """Returns the key of the result of `image_rows` for patches with `windows` windows."""
    return _image_rows.__name__, windows


def image_rows(patches: Patches) -> StepProgram:
    """Returns the program that runs the vision tower on image patches."""
    windows = len(patches.pixels)
    return StepProgram(_image_rows, windows, (patches,), {}, f"images: up to {windows} windows or pieces of them")


def take_slot(state: State, slot: int) -> StepProgram:
    """Returns the program that copies a slot's rows out of the layers with state in slots."""
    return StepProgram(_take_slot, _SLOT, (state, np.int32(slot)), {}, "snapshots: the rows of a slot")


def put_slot(state: State, slot: int, rows: PyTree) -> StepProgram:
    """Returns the program that writes a slot's rows of the layers with state in slots."""
    return StepProgram(_put_slot, _SLOT, (state, np.int32(slot), rows), {}, "snapshots: a slot that gets its rows")


class BeforeBlock(NamedTuple):
    """The results before a block of layers.

    Attributes:
        x: the residual stream after the previous block; anything for the first block, unless another program embeds
            the tokens.
        is_first: whether the block is the first one; None: another program embeds the tokens.
    """

    x: Float[Array, "N D"]
    is_first: Bool[Array, ""] | None


class ComputedRows(NamedTuple):
    """The results of the layers for all rows of a step, for drafters that read them.

    Attributes:
        token: the token of each row.
        hidden: its normalized hidden state.
        features: the residual streams at some depths, side by side; None: at no depth.
    """

    token: Int32[Array, "N"]
    hidden: Float[Array, "N D"]
    features: Float[Array, "N F"] | None


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """All programs that a step loop may need, described by shapes and dtypes so that they can be pickled.

    Attributes:
        network: the model without its weights.
        parameters: the weights and device links.
        state: the state of the layers.
        in_slots: for each layer, whether its state lies in slots.
        slots: the state of the slots.
        batches: a batch of each shape.
        adapted: a batch of each shape with adapters; empty for an engine without adapters.
        variants: the sampling programs that steps may use.
        hidden: one row of hidden states.
        vocabulary: the number of tokens.
        images: patches of each size that the vision tower may get.
        everywhere: the replicated sharding over the devices that share the model; None: one device.
        runs_of: maximum number of decodes of a run; 0: no runs.
        scored: rows of prompts to score under sampling distributions; None if no variant reports these.
        pooling: the results of a model that pools; None: the model generates.
        carried: what slots carry from chunk to chunk in such a model; None: nothing.
        depths: see `forward`.
        run_steps: steps of a run.
        samples: whether steps sample tokens. A drafter's model samples in runs alone; it needs all of its programs.
        blocks: the blocks of layers that steps may compute one after another; None: all layers at once.
        use_of_blocks: which steps do.
    """

    network: Network
    parameters: Parameters
    state: State
    in_slots: tuple[bool, ...]
    slots: SlotState
    batches: tuple[PackedBatch, ...]
    variants: tuple[SamplingVariant, ...]
    hidden: jax.ShapeDtypeStruct
    vocabulary: int
    images: tuple[Patches, ...] = ()
    adapted: tuple[PackedBatch, ...] = ()
    everywhere: NamedSharding | None = None
    runs_of: int = 0
    scored: ScoredRows | None = None
    pooling: PoolingOptions | None = None
    carried: Any = None
    depths: tuple[int, ...] | None = None
    run_steps: int = RUN_STEPS
    samples: bool = True
    blocks: Blocks | None = None
    use_of_blocks: UseOfBlocks = USE_OF_BLOCKS

    @property
    def networks(self) -> tuple[Network, ...]:
        """The networks that the programs are traced for."""
        return (self.network, *(() if self.blocks is None else (self.blocks.network, self.blocks.embedding)))

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model; None: one device."""
        if self.everywhere is None:
            return None
        assert isinstance(self.everywhere.mesh, Mesh)
        return self.everywhere.mesh

    def by_key(self) -> dict[Hashable, StepProgram]:
        """Returns the programs: the essential ones, the ones that others bridge the time until, and all others.

        Within each kind, the slowest to compile come first.
        """
        # Compile times grow with rows, and layers take the longest.
        batches = sorted(self.batches, key=lambda batch: -(batch.shape.decodes + batch.shape.rows))
        by_size = {batch.shape.sampled: batch for batch in batches}
        pools = self.pooling is not None
        essential = essential_shapes(batch.shape for batch in batches)
        sampling, scoring = (self._pools, self._pools_rows) if pools else (self._sampling, self._scoring)
        programs = [
            program
            for batch in (*batches, *self.adapted)
            for program in self._layers(batch, is_essential=batch.shape in essential)
        ]
        if self.samples:
            programs += [program for batch in by_size.values() for program in sampling(batch)]
            programs += [program for batch in batches if batch.shape.rows for program in scoring(batch)]
        programs += [
            decode_run(batch, self.state, self.slots.last, variant, self.run_steps)
            for batch in (*batches, *self.adapted)
            if has_runs(batch.shape, self.runs_of)
            for variant in run_variants(self.variants)
        ]
        if self.slots.seen is not None:
            (entries,) = seen_entries((), (), self.vocabulary)
            programs.append(note_seen(self.slots.seen, 0, entries, is_first=True))
        if any(self.in_slots):
            state = state_in_slots(self.state, self.in_slots)
            programs += [take_slot(state, 0), put_slot(state, 0, slot_rows(state))]
        # The largest one also serves smaller images.
        largest = max((len(patches.pixels) for patches in self.images), default=0)
        for patches in self.images:
            program = image_rows(patches)
            programs.append(program._replace(is_essential=program.size == largest))
        if not self.samples:
            programs = [program._replace(is_essential=True) for program in programs]
        awaited = {program.until for program in programs}
        programs.sort(key=lambda program: (not program.is_essential, program.key not in awaited))
        return {program.key: program._replace(args=shapes_of(program.args, self.everywhere)) for program in programs}

    def _layers(self, batch: PackedBatch, *, is_essential: bool) -> Iterator[StepProgram]:
        shape, has_images = batch.shape, batch.images is not None
        ways = (False,)
        if self.blocks is not None:
            ways = self.use_of_blocks.ways(shape, has_adapters=batch.adapters is not None, has_images=has_images)
        at_once = forward(batch, self.state, self.slots.last, self.depths)
        bridges = is_essential and ways == (False, True)
        if bridges or ways == (True,):
            for program in self._in_blocks(batch):
                yield program._replace(is_essential=is_essential, until=at_once.key if bridges else None)
        if False in ways:
            yield at_once._replace(is_essential=is_essential and not bridges)

    def _in_blocks(self, batch: PackedBatch) -> Iterator[StepProgram]:
        assert self.blocks is not None
        shape, last = batch.shape, self.slots.last
        flag: Any = None if shape.rows else jax.ShapeDtypeStruct((), bool)
        before: Any = BeforeBlock(self._rows(shape.decodes + shape.rows), flag)  # pyright: ignore[reportArgumentType]
        yield forward_block(batch, self.state, last, before, self.blocks, 0, self.depths)
        if shape.rows:
            yield embed(batch, last, self.blocks)

    def _sampling(self, batch: PackedBatch) -> Iterator[StepProgram]:
        count, essential = batch.shape.sampled, (self.variants[0], self.variants[-1])
        masks = all_allowed(count, self.vocabulary)
        for variant in self.variants[::-1]:
            program = sample(batch, self._rows(count), self.slots, variant, masks)
            yield program._replace(is_essential=variant in essential)

    def _scoring(self, batch: PackedBatch) -> Iterator[StepProgram]:
        rows, top = self._rows(batch.shape.rows), most_likeliest(self.variants)
        yield score(rows, 0, np.zeros(1, np.int32), top)
        if self.scored is not None:
            yield take_rows(rows, 0)
            yield score_drawn(self._rows(SCORED_ROWS), self.scored, top)

    def _pools(self, batch: PackedBatch) -> Iterator[StepProgram]:
        count = batch.shape.sampled
        wanted, slots = pooled_rows([], count), np.zeros(count, np.int32)
        if self.carried is None:
            yield pool(self._rows(count), wanted)
        else:
            yield pool_carried(self.carried, slots, slots.astype(np.float32), wanted)

    def _pools_rows(self, batch: PackedBatch) -> Iterator[StepProgram]:
        assert self.pooling is not None
        rows, nothing = self._rows(batch.shape.rows), np.zeros(batch.shape.prefills, np.int32)
        yield take_rows(rows, 0)
        yield pool(self._rows(SCORED_ROWS), pooled_rows([], SCORED_ROWS))
        if self.carried is not None:
            yield carry(self.carried, rows, ChunkRows(*[nothing] * 4), self.pooling.method)

    def _rows(self, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *self.hidden.shape), self.hidden.dtype)


def state_in_slots(state: State, in_slots: Sequence[bool]) -> State:
    """Returns the state of the layers that have it in slots."""
    return tuple(layer for layer, is_in_slots in zip(state, in_slots, strict=True) if is_in_slots)


def slot_rows(state: State) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a slot's rows, with the shardings of the arrays that they are rows of."""

    def row(x: Array) -> jax.ShapeDtypeStruct:
        sharding = x.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(row, state)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2, static_argnames="depths")
def _forward(
    network: Network,
    parameters: Parameters,
    state: State,
    last: Int32[Array, "slots"],
    batch: Batch,
    *,
    depths: tuple[int, ...] | None = None,
) -> tuple[Any, ...]:
    """Returns the new state, the hidden state of each row to sample from, and the hidden states of prefill rows.

    With `depths`, it also returns the `ComputedRows`.
    """
    batch, images = batch.unpacked(), batch.images
    tokens = _tokens(batch, last)
    if images is not None:  # decodes come first
        padding = (batch.held.shape[0], 0)
        images = ImageRows(jnp.pad(images.present, padding), jnp.pad(images.rows, (padding, (0, 0))))
    with model_of(network, parameters) as model:
        model = _adapted(model, batch)
        if depths:
            hidden, streams, state = model.hidden_and_residual_states(
                tokens, batch.queries, state, images, depths=depths
            )
        else:
            hidden, state = model.hidden_states(tokens, batch.queries, state, images=images)
            streams = ()
    return state, *_results(batch, tokens, hidden, depths, streams)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2, static_argnames="depths")
def _forward_block(
    network: Network,
    parameters: Parameters,
    state: State,
    last: Int32[Array, "slots"],
    batch: Batch,
    before: BeforeBlock,
    *,
    depths: tuple[int, ...] | None,
) -> tuple[Any, ...]:
    """Returns the residual stream after a block and, as of all layers, the results of `_forward` for it."""
    batch = batch.unpacked()
    tokens = _tokens(batch, last)
    with model_of(network, parameters) as model:
        hidden, x, state = model.block(tokens, batch.queries, state, *before)
    return x, state, *_results(batch, tokens, hidden, depths)


@functools.partial(compilation.jit, static_argnums=0)
def _embed(network: Network, parameters: Parameters, last: Int32[Array, "slots"], batch: Batch) -> Float[Array, "N D"]:
    """Returns the embeddings of a step's tokens."""
    with model_of(network, parameters) as model:
        return model.embedded(_tokens(batch.unpacked(), last))


def _tokens(batch: StepBatch, last: Int32[Array, "slots"]) -> Int32[Array, "N"]:
    """Returns the token of each row: decodes may have the last one of a slot."""
    decodes, is_held = batch.held.shape[0], batch.held < last.shape[0]
    return jnp.concatenate([jnp.where(is_held, last[batch.held], batch.token[:decodes]), batch.token[decodes:]])


def _results(
    batch: StepBatch,
    tokens: Int32[Array, "N"],
    hidden: Float[Array, "N D"],
    depths: tuple[int, ...] | None,
    streams: Sequence[Float[Array, "N D"]] = (),
) -> tuple[Any, ...]:
    """Returns the results of `_forward` after the state."""
    result = hidden[batch.last_row], hidden[batch.held.shape[0] :]
    if depths is None:
        return result
    return *result, ComputedRows(tokens, hidden, jnp.concatenate(streams, axis=-1) if depths else None)


def _adapted(model: Decoder, batch: StepBatch) -> Decoder:
    """Returns the model for the rows of a batch, each with its adapter, if any."""
    if batch.adapters is None:
        return model
    assert batch.pool is not None
    request, present = requests_of_tokens(batch.queries, batch.token.shape)
    rows = jnp.where(present, jnp.asarray(batch.adapters)[request], NO_ADAPTER)
    return batch.pool.adapted(model, rows)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=(2, 3), static_argnames=("variant", "most"))
def _decode_run(
    network: Network,
    parameters: Parameters,
    state: State,
    last: Int32[Array, "slots"],
    batch: Batch,
    *,
    variant: SamplingVariant,
    most: int,
) -> tuple[State, Int32[Array, "slots"], PackedTokens]:
    """Returns the state and the last tokens after a run of decode steps, and the tokens of all steps, `[most, R]`."""
    batch = batch.unpacked()
    with model_of(network, parameters) as model:
        # The rows of decodes that have ended keep their adapters: nothing reads them.
        model, batch = _adapted(model, batch), batch._replace(adapters=None, pool=None, drafted=None)
        state, (last, sampled) = model.with_state(_decoded, state, last, batch, variant=variant, most=most)
    return state, last, PackedTokens.in_program(sampled)


def _decoded(
    model: Decoder,
    state: State,
    last: Int32[Array, "slots"],
    batch: StepBatch,
    *,
    variant: SamplingVariant,
    most: int,
) -> tuple[State, tuple[Int32[Array, "slots"], SampledTokens]]:
    """Computes the results of `_decode_run` with this device's weights."""
    links = current_links()

    def step(carried: tuple[State, Array], number: Array) -> tuple[tuple[State, Array], SampledTokens]:
        state, last = carried
        now = batch.at_step_of_run(number, last.shape[0])
        with linked(links):  # arrays gathered outside the loop cannot be used inside
            hidden, state = model.hidden_states(last[now.held], now.queries, state)
            rows = SampledRows(now.slot, now.sampling, None)
            sampled = model.with_logits(sampled_from, hidden[now.last_row], rows, None, variant=variant)
        return (state, with_last(last, now.slot, sampled.token)), sampled

    (state, last), sampled = lax.scan(step, (state, last), jnp.arange(most, dtype=jnp.int32))
    return state, (last, sampled)


@functools.partial(compilation.jit, static_argnums=0)
def _image_rows(network: Network[Decoder], parameters: Parameters, patches: Patches) -> Float[Array, "W U R"]:
    """Returns the rows of each token of each window."""
    tower = network.with_weights(parameters.weights).vision
    assert tower is not None, "the model takes no images"
    return tower(patches)


@functools.partial(compilation.jit, static_argnums=0)
def _take_slot(network: Network, parameters: Parameters, state: State, slot: Int32[Arrays, ""]) -> PyTree:
    """Returns a slot's rows of each array."""
    return jax.tree.map(lambda x: x[slot], state)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _put_slot(network: Network, parameters: Parameters, state: State, slot: Int32[Arrays, ""], rows: PyTree) -> State:
    """Returns the state with other rows in a slot."""
    return jax.tree.map(lambda x, row: x.at[slot].set(row), state, rows)
