"""The model runner: holds the model's state and the slots' state on the device, and runs the programs of steps."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, PyTree

from detjax.engine import pooling_programs, sampling_programs, sampling_variant, step_programs
from detjax.engine import sequence as sequences
from detjax.engine.batch import BatchShape, StepBatch
from detjax.engine.device_weights import DeviceWeights, committed
from detjax.engine.packed import Packed
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.pooling import PooledBatch, pooled_rows
from detjax.engine.program import Parameters, StepProgram, shapes_of
from detjax.engine.program_compiler import Compilation, ProgramCompiler
from detjax.engine.prompt_scores import empty_rows, scored_rows
from detjax.engine.sampled_tokens import PackedTokens
from detjax.engine.sampling_programs import ScoredRows, SlotState, none_seen, seen_entries
from detjax.engine.sampling_variant import SamplingVariant, most_likeliest
from detjax.engine.slot_table import no_adapters
from detjax.engine.step_programs import (
    USE_OF_BLOCKS,
    BeforeBlock,
    StepPrograms,
    UseOfBlocks,
    slot_rows,
    state_in_slots,
)
from detjax.engine.token_masks import all_allowed
from detjax.models import Adapter, Decoder
from detjax.models.adapters.pool import AdapterPool
from detjax.models.blocks import Blocks, equal_blocks
from detjax.models.cache import declarations
from detjax.models.decoder import ImageRows
from detjax.models.mesh import (
    device_buffers,
    empty_state,
    everywhere,
    replicate,
    spans_processes,
)
from detjax.models.network import Network, abstract, split
from detjax.models.parts.pooling import ChunkRows, PooledRows
from detjax.models.parts.state import StateSize
from detjax.models.parts.vision import Patches
from detjax.models.vision.images import VisualInput, empty_pack, rows_by, window_counts
from detjax.operands.options import KVQuantization
from detjax.runtime import compilation, transfers
from detjax.runtime.memory_gaps import leave_gaps


def bytes_of_page(model: Decoder, quantization: KVQuantization | None) -> int:
    """Returns the bytes of one page on each device.

    Raises:
        ValueError: the model does not support this quantization of keys and values.
    """
    return _bytes_of_state(model, 2, 1, quantization) - _bytes_of_state(model, 1, 1, quantization)


def bytes_of_slot(model: Decoder) -> int:
    """Returns the bytes of a slot on each device; 0 if all layers keep pages."""
    return _bytes_of_state(model, 1, 2, None) - _bytes_of_state(model, 1, 1, None)


def bytes_of_snapshot(model: Decoder) -> int:
    """Returns the bytes of a copy of a slot on the host, summed over the devices that share the model."""
    return _bytes(lambda: model.empty_state(1, None, 2)) - _bytes(lambda: model.empty_state(1, None, 1))


def _bytes_of_state(model: Decoder, num_pages: int, slots: int, quantization: KVQuantization | None) -> int:
    return _bytes(lambda: model.empty_state_of_a_device(num_pages, quantization, slots))


def _bytes(make: Callable[[], Any]) -> int:
    arrays = abstract(lambda: jax.tree.leaves(make()))
    return sum(array.size * array.dtype.itemsize for array in arrays)


class StateSizes(NamedTuple):
    """The sizes of a model's state: pages of the cache, sequences computed at the same time, and quantization."""

    num_pages: int
    slots: int
    kv_cache_dtype: KVQuantization | None


class ModelRunner:
    """The model, its state, and the last sampled token of each slot.

    Attributes:
        weights: the model's weights.
        computed: all rows of the last step, if somebody reads them.
        everywhere: the replicated sharding over the devices that share the model; None: one device.
    """

    computed: step_programs.ComputedRows | None = None

    def __init__(  # noqa: PLR0913
        self,
        model: Decoder,
        sizes: StateSizes,
        *,
        variants: Sequence[SamplingVariant],
        empty_batch: Callable[[BatchShape], StepBatch],
        image_tokens: int = 0,
        runs_of: int = 0,
        run_steps: int = step_programs.RUN_STEPS,
        samples: bool = True,
        depths: tuple[int, ...] | None = None,
        adapters: AdapterPool | None = None,
        layers_at_once: int | None = None,
        use_of_blocks: UseOfBlocks = USE_OF_BLOCKS,
    ) -> None:
        """A runner with an empty cache.

        Args:
            model: the decoder.
            sizes: the sizes of its state.
            variants: sampling programs that steps may use, the fastest first.
            empty_batch: returns a batch of a shape without chunks.
            image_tokens: tokens of the largest image for which a program is compiled in advance.
            runs_of: maximum number of decodes of a run; 0: no runs.
            run_steps: steps of a run.
            samples: whether steps sample tokens; False: runs alone do, and the model sees nothing but text.
            depths: layers whose incoming residual streams `computed` has, with the hidden states of all rows. None:
                nobody reads these.
            adapters: the slots of adapters; None: no row has one.
            layers_at_once: maximum number of layers that a program computes if it computes a block of them; see
                `blocks.equal_blocks`. None: there are no blocks.
            use_of_blocks: which steps compute blocks, if there are any.
        """
        self._adapters = adapters
        self._network, weights = split(model)
        self._buffers = device_buffers(model.mesh)
        self.weights = DeviceWeights(model, weights)
        self._empty_batch = empty_batch
        self._primed = set[Hashable]()
        """Keys of programs that have run without links, alone or with the others of the same step."""
        self.everywhere = everywhere(model.mesh)
        self._spans_processes = spans_processes(model.mesh)
        self._vocabulary = model.config.vocab_size
        self._hidden = jax.ShapeDtypeStruct((model.config.hidden_size,), model.dtype)
        self._variants, self._runs_of, self._run_steps = tuple(variants), runs_of, run_steps
        self._samples = samples
        self._depths = depths
        # Streams within a block would make programs of their own.
        self._blocks = None if layers_at_once is None or depths else equal_blocks(model, layers_at_once)
        # On several devices, it was not measured how long the host takes to launch blocks of few decodes.
        self._use_of_blocks = use_of_blocks._replace(guesses=use_of_blocks.guesses and model.mesh is None)
        self._before_first: dict[int, BeforeBlock] = {}
        """The argument `before` of the first block in steps that only decode, by the number of decodes."""
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._compilation: Compilation | None = None
        self._free: dict[int, Array] = {}
        self._in_slots = model.layers_in_slots
        # Not `model.empty_state`, because the model would keep its weights in memory.
        size = StateSize(sizes.num_pages, model.dtype, sizes.kv_cache_dtype, sizes.slots)
        self._empty_state = functools.partial(empty_state, model.mesh, declarations(model.config), size)
        self._num_slots = sizes.slots
        self._pooling = model.config.pooling
        self.make_state()
        self._copies: dict[str, tuple[Packed[Any], Packed[Any]]] = {}
        """Parts of batches that steps share, on the host and as the last copy on the device."""
        self._vision = model.config.vision
        self._windows = [] if self._vision is None or not image_tokens else window_counts(self._vision, image_tokens)
        self._without_images: dict[int, ImageRows] = {}

    @property
    def _parameters(self) -> Parameters:
        """The arrays that all programs of the model take."""
        return Parameters(self.weights.arrays, None if self._buffers is None else self._buffers.links)

    @property
    def model_arrays(self) -> tuple[Network[Decoder], Parameters]:
        """The model's static graph and its current weights, for programs that use no links."""
        return self._network, Parameters(self.weights.arrays)

    def replicate(self, tree: PyTree) -> Any:
        """Returns arrays on all devices of the model."""
        return replicate(tree, self.everywhere)

    # --- memory -------------------------------------------------------------------------------------------------------

    def make_state(self) -> None:
        """Allocates an empty cache, and empty slots for adapters."""
        if self._adapters is not None and self._adapters.arrays is None:
            self._adapters.make()
        adjusts = any(variant.adjusted for variant in self._variants)
        seen = none_seen(self._num_slots, self._vocabulary) if adjusts else None
        empty = SlotState(jnp.zeros(self._num_slots, jnp.int32), seen)
        self._state, self._slots = committed((self._empty_state(), replicate(empty, self.everywhere)))
        # What the slots' prompts so far add up to, if a result does not follow from their last hidden state.
        self._carried: Array | None = None
        if self._pooling is not None and self._pooling.method != "last":
            zeros = jnp.zeros((self._num_slots, *self._hidden.shape), jnp.float32)
            self._carried = committed(replicate(zeros, self.everywhere))
        # Arrays that stay are allocated. The ones of single steps come and go in the gaps.
        jax.block_until_ready((self._state, self._slots, self._carried))
        # The largest of these are the hidden states of as many decodes as there are slots.
        largest = self._num_slots * self._hidden.size * self._hidden.dtype.itemsize
        self._between_gaps = leave_gaps(self._slots.last.sharding.addressable_devices, largest)

    def drop_state(self) -> None:
        """Releases the cache and all other arrays on the devices but the weights. Then no step can run."""
        jax.block_until_ready((self._state, self._slots, self._carried))
        del self._state, self._slots, self._carried, self._between_gaps
        if self._adapters is not None:
            self._adapters.drop()
        for kept in (self._copies, self._free, self._without_images, self._before_first):
            kept.clear()

    def update_weights(self, params: PyTree[Array]) -> None:
        """Replaces the weights; see `DeviceWeights.update`."""
        self.weights.update(self._network, params)

    def image_rows(self, images: Sequence[VisualInput]) -> list[np.ndarray]:
        """Returns the vision tower's rows of each image, on the host."""
        assert self._vision is not None, "the model takes no images"
        most = self._windows[-1] if self._windows else None
        return rows_by(
            lambda patches: self._run(step_programs.image_rows(patches)),
            self._vision,
            images,
            windows=self._windows_for,
            most_windows=most,
        )

    def _windows_for(self, needed: int) -> int:
        """Returns the smallest number of windows, at least `needed`, whose program is ready."""
        size = 1 << (needed - 1).bit_length()
        while not self._is_ready(step_programs.image_rows_key(size)):
            size *= 2
        return size

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises unless a slot can hold an adapter; see `AdapterPool.check`."""
        if self._adapters is None:
            raise ValueError("Engine: it has no slots for adapters; accepted: max_loras of at least 1")
        self._adapters.check(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Writes an adapter into a slot for later steps."""
        assert self._adapters is not None
        self._adapters.put(slot, adapter)

    def _with_adapters(self, batch: PackedBatch) -> PackedBatch:
        """Returns a batch with adapters, and with the arrays that they lie in."""
        assert self._adapters is not None
        return dataclasses.replace(batch, pool=self._adapters.arrays)

    def _empty_adapted(self, shape: BatchShape) -> StepBatch:
        """Returns an empty batch of the programs for rows with adapters."""
        return self._empty_batch(shape)._replace(adapters=no_adapters(shape))

    def forward(self, batch: PackedBatch) -> tuple[Array, Array]:
        """Returns the hidden states of each chunk's last token, for `sample`, and of the prefill rows, for `score`.

        The batch must be on the device; see `copy`.
        """
        batch = batch if self._samples else batch.for_text()
        has_adapters = batch.adapters is not None
        in_blocks = self._in_blocks(batch.shape, has_adapters)
        if self._needs_priming(self._layer_keys(batch.shape, has_adapters, in_blocks)):
            empty = self._empty_adapted if has_adapters else self._empty_batch
            self._forward(self.copy(empty(batch.shape)), in_blocks, is_linked=False)
        return self._forward(batch, in_blocks)

    @property
    def last_tokens(self) -> Array:
        """The last sampled token of each slot."""
        return self._slots.last

    def adopt_last_tokens(self, last: Array) -> None:
        """Takes the last sampled tokens of another runner, whose slots hold the same sequences."""
        self._slots = self._slots._replace(last=jnp.copy(last))  # programs of both runners consume the array

    def _forward(self, batch: PackedBatch, in_blocks: bool, *, is_linked: bool = True) -> tuple[Array, Array]:
        if in_blocks:
            return self._forward_in_blocks(batch, is_linked=is_linked)
        batch = self._with_adapters(batch) if batch.adapters is not None else batch
        program = step_programs.forward(batch, self._state, self._slots.last, self._depths)
        self._state, hidden, rows, *computed = self._run(program, is_linked=is_linked)
        self.computed = computed[0] if computed else None
        return hidden, rows

    def _forward_in_blocks(self, batch: PackedBatch, *, is_linked: bool) -> tuple[Array, Array]:
        blocks = self._blocks
        assert blocks is not None
        before, state = self._before(batch, blocks, is_linked=is_linked), list[Any]()
        results: Any = None  # of the last block
        for number in range(len(blocks.blocks)):
            args = self._state, self._slots.last, before, blocks, number, self._depths
            x, written, *results = self._run(step_programs.forward_block(batch, *args), is_linked=is_linked)
            state += written
            before = BeforeBlock(x, None if before.is_first is None else self._is_later)
        self._state = tuple(state)
        hidden, rows, *computed = results
        self.computed = computed[0] if computed else None
        return hidden, rows

    def _before(self, batch: PackedBatch, blocks: Blocks, *, is_linked: bool) -> BeforeBlock:
        """Returns the argument `before` of the first block of a step."""
        if batch.shape.rows:
            program = step_programs.embed(batch, self._slots.last, blocks)
            return BeforeBlock(self._run(program, is_linked=is_linked), None)
        # One launch fewer: the blocks embed the tokens themselves.
        decodes = batch.shape.decodes
        if decodes not in self._before_first:
            nothing = jnp.zeros((decodes, *self._hidden.shape), self._hidden.dtype)
            self._before_first[decodes] = self._everywhere_now(BeforeBlock(nothing, jnp.asarray(True)))
        return self._before_first[decodes]

    @functools.cached_property
    def _is_later(self) -> Array:
        """The flag of blocks that follow another one, on the devices."""
        return self._everywhere_now(jnp.asarray(False))

    def _everywhere_now(self, arrays: PyTree[Array]) -> Any:
        """Returns arrays on all devices of the model, committed like the results of a program."""
        return committed(replicate(arrays, self.everywhere))

    def _layer_keys(self, shape: BatchShape, has_adapters: bool, in_blocks: bool) -> tuple[Hashable, ...]:
        """Returns the keys of the programs that compute the layers of a shape in blocks, or all at once."""
        if in_blocks:
            return step_programs.keys_of_blocks(shape, depths=self._depths)
        return (step_programs.forward_key(shape, has_adapters=has_adapters, depths=self._depths),)

    def _ways(self, shape: BatchShape, has_adapters: bool) -> tuple[bool, ...]:
        """Returns the ways to compute the layers of a shape, the best one first; see `UseOfBlocks`."""
        if self._blocks is None:
            return (False,)
        has_images = self._vision is not None and self._samples
        return self._use_of_blocks.ways(shape, has_adapters=has_adapters, has_images=has_images)

    def _ready_ways(self, shape: BatchShape, has_adapters: bool) -> Iterator[bool]:
        """Yields the ways whose programs are ready. Programs of others than the best way may not be compiled at all."""
        best, *others = self._ways(shape, has_adapters)
        if all(map(self._is_ready, self._layer_keys(shape, has_adapters, best))):
            yield best
        for way in others:
            if all(key in self._compiled for key in self._layer_keys(shape, has_adapters, way)):
                yield way

    def _in_blocks(self, shape: BatchShape, has_adapters: bool) -> bool:
        """Returns whether blocks compute the layers: in the best way whose programs are ready."""
        return next(self._ready_ways(shape, has_adapters), self._ways(shape, has_adapters)[0])

    def steps_of_run(self, shape: BatchShape, needed: SamplingVariant, *, has_adapters: bool = False) -> int:
        """Returns the number of steps of a shape that one launch can compute: 1 unless a run's program serves them."""
        has_variant = self._variant_of_run(shape, needed, has_adapters=has_adapters) is not None
        return self._run_steps if has_variant else 1

    def _variant_of_run(
        self, shape: BatchShape, needed: SamplingVariant, *, has_adapters: bool
    ) -> SamplingVariant | None:
        """Returns the sampling variant of a run of a shape; None if no run is possible."""
        if not step_programs.has_runs(shape, self._runs_of):
            return None
        for variant in sampling_variant.run_variants(self._variants):
            if variant.serves(needed) and self._is_ready(self._decode_run_key(shape, variant, has_adapters)):
                return variant
        return None

    def _decode_run_key(self, shape: BatchShape, variant: SamplingVariant, has_adapters: bool) -> Hashable:
        return step_programs.decode_run_key(shape.decodes, variant, self._run_steps, has_adapters=has_adapters)

    def decode_run(self, batch: PackedBatch, needed: SamplingVariant) -> PackedTokens:
        """Computes a run of steps, each from the tokens that the previous step sampled.

        The batch is the first step, with the `steps` of each decode. `steps_of_run` must have returned more than 1.

        Returns:
            The tokens of each step, `[steps, R]`; undefined in steps that a decode takes no part in.
        """
        variant = self._variant_of_run(batch.shape, needed, has_adapters=batch.adapters is not None)
        assert variant is not None
        return self._decode_run(batch, variant)

    def _decode_run(self, batch: PackedBatch, variant: SamplingVariant) -> PackedTokens:
        has_adapters = batch.adapters is not None

        def run(batch: PackedBatch, *, is_linked: bool) -> PackedTokens:
            batch = self._with_adapters(batch) if has_adapters else batch
            program = step_programs.decode_run(batch, self._state, self._slots.last, variant, self._run_steps)
            self._state, last, sampled = self._run(program, is_linked=is_linked)
            self._slots = self._slots._replace(last=last)
            return sampled

        if self._needs_priming(self._decode_run_key(batch.shape, variant, has_adapters)):
            empty = self._empty_adapted if has_adapters else self._empty_batch
            run(self.copy(empty(batch.shape).as_empty_run()), is_linked=False)
        return run(batch, is_linked=True)

    def sample(self, batch: PackedBatch, hidden: Array, needed: SamplingVariant, allowed: Array | None) -> PackedTokens:
        """Samples the tokens of a step and records them in their slots; `allowed` has the masks of constraints."""
        variant = next(
            variant
            for variant in self._variants
            if variant.serves(needed) and self._is_ready(sampling_programs.sample_key(batch.shape.sampled, variant))
        )
        return self._sample(batch, hidden, variant, allowed)

    def _sample(
        self, batch: PackedBatch, hidden: Array, variant: SamplingVariant, allowed: Array | None = None
    ) -> PackedTokens:
        masks = None
        if variant.constrained:
            masks = self._all_allowed(batch.shape.sampled) if allowed is None else self._reachable(allowed)

        def run(batch: PackedBatch, *, is_linked: bool) -> PackedTokens:
            program = sampling_programs.sample(batch, hidden, self._slots, variant, masks)
            slots, sampled = self._run(program, is_linked=is_linked)
            self._slots = slots if variant.adjusted else self._slots._replace(last=slots.last)
            return sampled

        if self._needs_priming(sampling_programs.sample_key(batch.shape.sampled, variant)):
            run(self.copy(self._empty_batch(batch.shape)), is_linked=False)
        return run(batch, is_linked=True)

    def _all_allowed(self, count: int) -> Array:
        """Returns masks on the device that allow every token, cached by size."""
        if count not in self._free:
            self._free[count] = replicate(all_allowed(count, self._vocabulary), self.everywhere)
        return self._free[count]

    def _reachable(self, tree: PyTree) -> Any:
        """Returns this process's arrays in a form that programs spanning several processes accept."""
        return replicate(tree, self.everywhere) if self._spans_processes else tree

    def note_seen(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Sends all tokens of the sequence in a slot to the device, which then counts the tokens it samples itself."""
        assert self._slots.seen is not None, "no variant has penalties"
        seen = self._slots.seen
        for index, entries in enumerate(seen_entries(prompt, generated, self._vocabulary)):
            seen = self._run(sampling_programs.note_seen(seen, slot, entries, is_first=index == 0))
        self._slots = self._slots._replace(seen=seen)

    def take_slot(self, slot: int) -> PyTree[Array]:
        """Returns an exact copy of the layers' state in a slot, and starts copying it to the host."""
        rows = self._run(step_programs.take_slot(state_in_slots(self._state, self._in_slots), slot))
        jax.tree.map(lambda x: x.copy_to_host_async(), rows)
        return rows

    def put_slot(self, slot: int, rows: PyTree[Array | np.ndarray]) -> None:
        """Restores a slot from the result of `take_slot`, on the device or on the host."""
        state = state_in_slots(self._state, self._in_slots)
        rows = jax.tree.map(lambda row, like: jax.device_put(row, like.sharding), rows, slot_rows(state))
        put = iter(self._run(step_programs.put_slot(state, slot, rows)))
        layers = zip(self._state, self._in_slots, strict=True)
        self._state = tuple(next(put) if is_in_slots else layer for layer, is_in_slots in layers)

    def copy(self, batch: StepBatch) -> PackedBatch:
        """Copies a batch to the device: two arrays, and others that differ from the ones of the last copy."""
        # Rows of images are large and always new.
        images, packed = batch.images, PackedBatch.on_host(batch)
        if not self._samples:
            packed = packed.for_text()
        assert packed.rows is not None
        names = [name for name in ("adjustments", "adapters") if getattr(packed, name) is not None]
        new = [name for name in names if not self._is_copied(name, getattr(packed, name))]
        parts = [packed.layers, packed.rows, *(getattr(packed, name) for name in new)]
        # Copying them is five times as fast as passing host arrays to a program.
        words, sharding = [part.words for part in parts], self._slots.last.sharding
        is_alone = isinstance(sharding, SingleDeviceSharding)
        words = transfers.copies(words, sharding) if is_alone else replicate(words, self.everywhere)
        layers, rows, *copies = (Packed(x, part.layout) for part, x in zip(parts, words, strict=True))
        self._copies |= dict(zip(new, zip(parts[2:], copies, strict=True), strict=True))
        settled = {name: self._copies[name][1] for name in names}
        images = None if images is None else replicate(images, self.everywhere)
        return self._with_images(dataclasses.replace(packed, layers=layers, rows=rows, images=images, **settled))

    def _is_copied(self, name: str, part: Packed[Any]) -> bool:
        """Returns whether the last copy of a part of a batch has the same numbers."""
        copied = self._copies.get(name)
        return copied is not None and np.array_equal(copied[0].words, part.words)

    def _with_images(self, batch: PackedBatch) -> PackedBatch:
        """Adds absent image rows to a batch without images, so that one program serves all prefills of its shape."""
        rows = batch.shape.rows
        if self._vision is None or not rows or batch.images is not None:
            return batch
        if rows not in self._without_images:
            zeros = jnp.zeros((rows, self._vision.row_width), self._hidden.dtype)
            self._without_images[rows] = self._reachable(ImageRows(jnp.zeros(rows, bool), zeros))
        return dataclasses.replace(batch, images=self._without_images[rows])

    def score(self, rows: Array, first: int, tokens: np.ndarray) -> PackedTokens:
        """Returns logprobs of up to `sampling_programs.SCORED_ROWS` tokens, from consecutive `rows` beginning at
        `first`."""
        program = sampling_programs.score(rows, first, tokens, most_likeliest(self._variants))
        if self._needs_priming(program.key):
            self._run(program, is_linked=False)
        return self._run(program)

    def score_drawn(
        self, rows: Array, first: int, sequence: sequences.Sequence, position: int, count: int
    ) -> PackedTokens:
        """Returns the result of `score` for `count` tokens of a sequence's prompt from a position on.

        It includes their logprobs under the request's sampling distribution.
        """
        return self._score_drawn(rows, first, scored_rows(sequence, position, count, self._vocabulary))

    def _score_drawn(self, rows: Array, first: int, scored: ScoredRows) -> PackedTokens:
        take, top = sampling_programs.take_rows(rows, first), most_likeliest(self._variants)
        is_new = self._needs_priming(take.key)
        hidden = self._run(take, is_linked=not is_new)  # a copy of rows exchanges nothing
        program = sampling_programs.score_drawn(hidden, scored, top)
        if self._needs_priming(program.key):
            self._run(program, is_linked=False)
        return self._run(program)

    # --- pooling ------------------------------------------------------------------------------------------------------

    @property
    def averages(self) -> bool:
        """True if the mean of all hidden states stands for a prompt."""
        return self._pooling is not None and self._pooling.method == "mean"

    @property
    def carries(self) -> bool:
        """True if `carry` needs the rows of all chunks."""
        return self._carried is not None

    def carry(self, rows: Array, chunks: ChunkRows) -> None:
        """Adds the hidden states of prefill chunks to what their slots carry."""
        assert self._pooling is not None and self._carried is not None
        self._carried = self._primed_run(pooling_programs.carry(self._carried, rows, chunks, self._pooling.method))

    def pool(self, hidden: Array, wanted: PooledRows) -> PooledBatch:
        """Returns the results for hidden states."""
        return PooledBatch(self._primed_run(pooling_programs.pool(hidden, wanted)))

    def pool_carried(self, slots: np.ndarray, factors: np.ndarray, wanted: PooledRows) -> PooledBatch:
        """Returns the results for what slots carry, times factors."""
        return PooledBatch(self._primed_run(pooling_programs.pool_carried(self._carried, slots, factors, wanted)))

    def pool_rows(self, rows: Array, first: int, wanted: PooledRows) -> PooledBatch:
        """Returns the results for `sampling_programs.SCORED_ROWS` consecutive rows, beginning at `first`."""
        return self.pool(self._primed_run(sampling_programs.take_rows(rows, first)), wanted)

    def _primed_run(self, program: StepProgram) -> Any:
        if self._needs_priming(program.key):
            self._run(program, is_linked=False)
        return self._run(program)

    def _run_all_pooling(self, batches: Iterable[StepBatch]) -> None:
        """Runs all programs of a model that pools once."""
        for batch in map(self.copy, batches):
            hidden, rows = self.forward(batch)
            shape, wanted = batch.shape, pooled_rows([], batch.shape.sampled)
            nobody = np.full(shape.sampled, self._num_slots, np.int32)
            if self._carried is None:
                self.pool(hidden, wanted)
            else:
                self.pool_carried(nobody, np.zeros(shape.sampled, np.float32), wanted)
            if shape.rows:
                self.pool_rows(rows, 0, pooled_rows([], sampling_programs.SCORED_ROWS))
            if shape.rows and self._carried is not None:
                nothing = np.zeros(shape.prefills, np.int32)
                self.carry(rows, ChunkRows(nothing, nothing, nothing, nothing + self._num_slots))

    @functools.cached_property
    def _scored(self) -> ScoredRows | None:
        """Rows for compiling `score_drawn`; None if no variant reports sampling logprobs."""
        return empty_rows(self._vocabulary) if any(variant.distribution for variant in self._variants) else None

    def programs(self, batches: Iterable[StepBatch]) -> StepPrograms:
        """Returns all programs that steps of these shapes may need, given an empty batch of each shape."""
        return StepPrograms(
            network=self._network,
            parameters=shapes_of(self._parameters, self.everywhere),
            state=shapes_of(self._state, self.everywhere),
            in_slots=self._in_slots,
            slots=shapes_of(self._slots),
            batches=tuple(map(self._shapes_of_batch, batches)),
            variants=self._variants,
            hidden=self._hidden,
            vocabulary=self._vocabulary,
            images=tuple(shapes_of(patches) for patches in self._empty_packs()),
            adapted=() if self._adapters is None else tuple(map(self._adapted_shapes, batches)),
            everywhere=self.everywhere,
            runs_of=self._runs_of,
            scored=None if self._scored is None else shapes_of(self._scored),
            pooling=self._pooling,
            carried=None if self._carried is None else shapes_of(self._carried),
            depths=self._depths,
            run_steps=self._run_steps,
            samples=self._samples,
            blocks=self._blocks,
            use_of_blocks=self._use_of_blocks,
        )

    def _shapes_of_batch(self, batch: StepBatch) -> PackedBatch:
        """Returns the shapes of a batch that programs take, given an empty one."""
        packed = PackedBatch.on_host(batch)
        return shapes_of(self._with_images(packed if self._samples else packed.for_text()))

    def _adapted_shapes(self, batch: StepBatch) -> PackedBatch:
        """Returns the shapes of a batch of the programs for rows with adapters, given an empty one without."""
        with_slots = self._with_images(PackedBatch.on_host(batch._replace(adapters=no_adapters(batch.shape))))
        return shapes_of(self._with_adapters(with_slots), self.everywhere)

    def _empty_packs(self) -> list[Patches]:
        """Returns empty image patches of each size that is compiled in advance."""
        return [] if self._vision is None else [empty_pack(self._vision, windows) for windows in self._windows]

    def warm_up(self, batches: Sequence[StepBatch], compiler: ProgramCompiler) -> None:
        """Compiles the programs that steps may need, given an empty batch of each shape, and runs each of them once.

        Programs that the compiler defers serve steps as soon as they are ready.
        """
        self.compile(batches, compiler)
        self._run_all([batch for batch in batches if self.has_layers(batch.shape)])

    def compile(self, batches: Sequence[StepBatch], compiler: ProgramCompiler) -> None:
        """Compiles the programs that steps may need, given an empty batch of each shape, and runs none."""
        self.close()
        with compilation.chained(self._buffers is not None):
            self._compilation = compiler.start(self.programs(batches), self._compiled.__setitem__)

    def has_layers(self, shape: BatchShape, *, has_adapters: bool = False) -> bool:
        """Returns whether programs for the layers of this shape are ready."""
        return next(self._ready_ways(shape, has_adapters), None) is not None

    def wait_for_programs(self) -> None:
        """Waits until all programs are compiled."""
        if self._compilation is not None:
            self._compilation.wait()

    def close(self) -> None:
        """Cancels compilations."""
        if self._compilation is not None:
            self._compilation.close()

    def _is_ready(self, key: Hashable) -> bool:
        return self._compilation is None or key not in self._compilation.pending

    def _run_all(self, batches: Sequence[StepBatch]) -> None:
        """Runs all programs once, because the first run does one-time work."""
        sizes = set[tuple[str, int]]()
        if self._pooling is not None:
            self._run_all_pooling(batches)
            batches = ()
        for batch in map(self.copy, batches):
            shape = batch.shape
            if self._adapters is not None and self.has_layers(shape, has_adapters=True):
                self.forward(self.copy(self._empty_adapted(shape)))
            hidden, rows = self.forward(batch)
            if ("sampled", shape.sampled) not in sizes:
                for variant in self._variants:
                    if self._is_ready(sampling_programs.sample_key(shape.sampled, variant)):
                        self._sample(batch, hidden, variant)
            for has_adapters, empty in self._kinds_of_batches():
                for variant in sampling_variant.run_variants(self._variants):
                    if self._variant_of_run(shape, variant, has_adapters=has_adapters) == variant:
                        self._decode_run(self.copy(empty(shape).as_empty_run()), variant)
            if shape.rows and ("rows", shape.rows) not in sizes:
                self.score(rows, 0, np.zeros(1, np.int32))
                if self._scored is not None:
                    self._score_drawn(rows, 0, self._scored)
            sizes |= {("sampled", shape.sampled), ("rows", shape.rows)}
        if self._slots.seen is not None:
            self.note_seen(0, (), ())
        if any(self._in_slots) and not self._spans_processes:  # then there are no snapshots
            self.put_slot(0, self.take_slot(0))
        for patches in self._empty_packs():
            if self._is_ready(step_programs.image_rows_key(len(patches.pixels))):
                jax.block_until_ready(self._run(step_programs.image_rows(patches)))
        jax.block_until_ready(self._slots)

    def _kinds_of_batches(self) -> list[tuple[bool, Callable[[BatchShape], StepBatch]]]:
        """Returns whether batches have adapters, and what makes empty ones, for each kind that steps may have."""
        plain = (False, self._empty_batch)
        return [plain] if self._adapters is None else [plain, (True, self._empty_adapted)]

    def _needs_priming(self, key: Hashable) -> bool:
        """Returns True on the first call for a program that uses links: it must then run once without links.

        The first run of a program loads its kernels. A GPU cannot load them while another GPU waits for it, so the
        devices would deadlock.
        """
        if self._buffers is None or key in self._primed:
            return False
        self._primed.add(key)
        return True

    def _run(self, program: StepProgram, *, is_linked: bool = True) -> Any:
        parameters = self._parameters
        if not is_linked:
            assert self._buffers is not None
            parameters = parameters._replace(links=self._buffers.nowhere)
        network, parameters = program.leading(self._network, parameters)
        compiled = self._compiled.get(program.key)
        if compiled is not None:
            return compiled(parameters, *program.args)
        with compilation.chained(self._buffers is not None):
            return program.fn(network, parameters, *program.args, **program.static)
