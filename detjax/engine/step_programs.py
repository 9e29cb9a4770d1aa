"""The programs that compute steps: what each does, and which ones a step loop may need.

A program is compiled for arrays of certain sizes. Few sizes serve all steps, so that all programs can be compiled
before the first request; see `BatchShapes.for_serving`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, UInt16, UInt32

from detjax.engine.batch import BatchShape, StepBatch, no_adjustments
from detjax.engine.constraints import all_allowed
from detjax.engine.sampling_params import SamplingParams
from detjax.models.cache import State
from detjax.models.decoder import Decoder, ImageRows
from detjax.models.network import Network, Weights
from detjax.models.parts.logits import Logits
from detjax.models.parts.sharding import current_links, linked
from detjax.models.parts.vision import Patches
from detjax.operands.numerics import unique_scatter_indices
from detjax.operands.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays, SeenTokens
from detjax.runtime import compilation
from detjax.runtime.device_links import DeviceLinks

SCORED_ROWS: Final = 64
"""Prompt tokens whose logprobs one program computes."""
RUN_STEPS: Final = 4
"""Steps of a run of decodes. The host has the time of all of them to prepare the next one."""
_SEEN_ENTRIES: Final = 1024
"""Tokens of a sequence that one program notes as seen."""
_SLOT: Final = "slot"
"""The size of programs that copy one slot."""
_COUNT: Final = np.uint16
"""The dtype of counts of tokens. They end at its largest number, which the contract knows."""


class Parameters(NamedTuple):
    """What every program takes before its own arguments.

    Attributes:
        weights: the model's weights.
        links: how devices that share the model reach one another; None: there is one, or XLA's collectives are used.
    """

    weights: Weights
    links: DeviceLinks | None = None


class SampledTokens(NamedTuple):
    """One row per token: the token with its logprob, and the likeliest tokens in its place with theirs.

    The last field has the logprobs of the distribution that the tokens were drawn from; None where the program does not
    compute them.
    """

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any
    sampling_logprob: Any = None

    def start_copy(self) -> "SampledTokens":
        """Begins to copy the arrays to the host, and returns them."""
        for x in self:
            if x is not None:
                x.copy_to_host_async()
        return self

    def read(self) -> "SampledTokens":
        """Returns the arrays on the host, those with one number a row as lists, and waits for them if need be."""
        read = type(self)(*jax.device_get(tuple(self)))
        sampling_logprob = None if read.sampling_logprob is None else read.sampling_logprob.tolist()
        # Numbers of a list are read five times as fast as those of an array.
        return read._replace(
            token=read.token.tolist(), logprob=read.logprob.tolist(), sampling_logprob=sampling_logprob
        )

    def by_step(self) -> "list[SampledTokens]":
        """Returns what `read` returned of a run, `[steps, R]`, for each of its steps."""
        steps = range(len(self.token))
        return [type(self)(*(None if x is None else x[step] for x in self)) for step in steps]

    def read_tokens(self) -> list[int]:
        """Returns the tokens, and waits for them alone if need be."""
        return np.asarray(self.token).tolist()

    def at(self, row: int, params: SamplingParams) -> tuple[int, float, tuple[tuple[int, float], ...], float | None]:
        """Returns a row of what `read` returned, as far as a request with these parameters asks for it.

        These are the token, its logprob, the likeliest tokens with their logprobs, and the token's sampling logprob.
        """
        top, likeliest, sampling_logprob = params.top_logprobs, (), None
        if top:  # few requests ask for them, and all wait for this
            likeliest = zip(self.top_tokens[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
        if params.sampling_logprobs and self.sampling_logprob is not None:
            sampling_logprob = self.sampling_logprob[row]
        return self.token[row], self.logprob[row], tuple(likeliest), sampling_logprob


class SamplingVariant(NamedTuple):
    """Which parts a sampling program has. A program with fewer parts is faster, and no bit depends on the choice.

    Attributes:
        filtered: it can apply top-k, top-p and min-p.
        top_logprobs: how many of the likeliest tokens it reports.
        adjusted: it can apply penalties and biases.
        constrained: it can apply masks of allowed tokens.
        distribution: it reports logprobs of the distribution that tokens are drawn from.
    """

    filtered: bool
    top_logprobs: int
    adjusted: bool = False
    constrained: bool = False
    distribution: bool = False

    @classmethod
    def needed_by(cls, params: Sequence[SamplingParams]) -> "SamplingVariant":
        """Returns the smallest variant that serves samples with these parameters."""
        # Of hundreds of rows few differ in what they need.
        return cls(*map(max, zip(*{row.needs for row in params}, strict=True)))

    @classmethod
    def for_serving(cls, top_logprobs: int) -> "tuple[SamplingVariant, ...]":
        """Returns the variants of an engine whose requests may ask for so many of the likeliest tokens.

        Filters sort the logits, and the likeliest tokens are searched for: each takes longer than all the rest. So what
        is common has programs without them, and the last program serves what is left.
        """
        plain = [cls(filtered, top) for filtered in (False, True) for top in dict.fromkeys((0, top_logprobs))]
        constrained = [cls(filtered, 0, constrained=True) for filtered in (False, True)]
        adjusted = [cls(False, 0, adjusted=True, constrained=True), cls(True, top_logprobs, True, True)]
        reported = [variant._replace(distribution=True) for variant in (plain[0], adjusted[-1])]
        return *plain, *constrained, *adjusted, *reported

    @property
    def description(self) -> str:
        """What requests may ask for, in words."""
        parts = {
            "top-k, top-p and min-p": self.filtered,
            f"{self.top_logprobs} likeliest tokens": self.top_logprobs,
            "penalties and biases": self.adjusted,
            "constraints": self.constrained,
            "sampling logprobs": self.distribution,
        }
        return "with " + (
            ", ".join(name for name, is_there in parts.items() if is_there) or "nothing but a temperature"
        )

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


class SeenEntries(NamedTuple):
    """Some tokens of one sequence, each once: how often it was generated, and whether the prompt has it."""

    token: Int32[Arrays, "n"]
    generated: UInt16[Arrays, "n"]
    in_prompt: Bool[Arrays, "n"]


class StepProgram(NamedTuple):
    """A program, and the arguments of a call of it.

    Attributes:
        fn: a function of `compilation.jit`, whose first arguments are the network and its weights.
        size: the sizes that its arguments depend on.
        args: the arguments after the parameters: arrays, or their shapes and dtypes.
        static: the arguments by keyword, on which the program depends.
        purpose: what the program is for.
        is_essential: whether there are steps that no other essential program serves. The other programs make steps
            faster that are smaller, or that need less.
    """

    fn: Callable[..., Any]
    size: Hashable
    args: tuple[Any, ...]
    static: dict[str, Any]
    purpose: str
    is_essential: bool = True

    @property
    def key(self) -> Hashable:
        """What tells the program from the others of its step loop, in any process."""
        return self.fn.__name__, self.size, *self.static.values()


def forward_key(shape: BatchShape) -> Hashable:
    """Returns the key of what `forward` returns for a batch of a shape."""
    return _forward.__name__, shape


def sample_key(count: int, variant: SamplingVariant) -> Hashable:
    """Returns the key of what `sample` returns for a batch with so many rows to sample from."""
    return _sample.__name__, count, variant


def forward(batch: StepBatch, state: State, last: Any) -> StepProgram:
    """Returns the program that computes hidden states."""
    shape = batch.shape
    prefills = f", and prefills of up to {shape.rows} rows" if shape.rows else ""
    # How tokens are chosen does not matter to the layers: their program is the same with adjustments and without.
    args = state, last, batch._replace(adjustments=None)
    return StepProgram(_forward, shape, args, {}, f"layers: up to {shape.decodes} decodes{prefills}")


def has_runs(shape: BatchShape, most: int) -> bool:
    """Returns whether there are runs of steps of a shape, where runs have `most` decodes at most."""
    return not shape.rows and shape.sampled == shape.decodes <= most


def run_variants(variants: Sequence[SamplingVariant]) -> list[SamplingVariant]:
    """Returns the variants that runs have programs for: those whose samples ask for a token and its logprob alone."""
    return [variant for variant in variants if variant == SamplingVariant(variant.filtered, 0)]


def decode_run_key(count: int, variant: SamplingVariant) -> Hashable:
    """Returns the key of what `decode_run` returns for a batch with this number of decodes."""
    return _decode_run.__name__, count, variant, RUN_STEPS


def decode_run(batch: StepBatch, state: State, last: Any, variant: SamplingVariant) -> StepProgram:
    """Returns the program that computes several decode steps, where each takes the tokens of the step before."""
    count = batch.shape.decodes
    purpose = f"runs of {RUN_STEPS} steps: up to {count} decodes {variant.description}"
    args = state, last, batch._replace(adjustments=None)
    return StepProgram(_decode_run, count, args, {"variant": variant, "most": RUN_STEPS}, purpose, is_essential=False)


def sample(batch: StepBatch, hidden: Any, slots: SlotState, variant: SamplingVariant, allowed: Any) -> StepProgram:
    """Returns the program that samples after hidden states. A variant without constraints takes no masks, `allowed`."""
    count, adjustments = batch.shape.sampled, batch.adjustments
    if not variant.adjusted:
        slots, adjustments = slots._replace(seen=None), None
    elif adjustments is None:
        adjustments = no_adjustments(count)
    rows = SampledRows(batch.slot, batch.sampling, adjustments, allowed if variant.constrained else None)
    return sample_rows(rows, hidden, slots, variant)


def sample_rows(rows: SampledRows, hidden: Any, slots: SlotState, variant: SamplingVariant) -> StepProgram:
    """Returns the program that samples a token for each row, after the hidden state of the same row."""
    count = len(rows.slot)
    purpose = f"sampling: up to {count} samples {variant.description}"
    return StepProgram(_sample, count, (hidden, slots, rows), {"variant": variant}, purpose)


def score(rows: Any, first: int, tokens: np.ndarray, top: int) -> StepProgram:
    """Returns the program that computes logprobs of given tokens after hidden states in consecutive rows."""
    padded = np.zeros(SCORED_ROWS, np.int32)
    padded[: len(tokens)] = tokens
    purpose = f"logprobs of prompts: prefills of up to {len(rows)} rows"
    return StepProgram(_score, len(rows), (rows, np.int32(first), padded), {"top": top}, purpose)


def note_seen(seen: SeenTokens, slot: int, entries: SeenEntries, *, is_first: bool) -> StepProgram:
    """Returns the program that notes tokens of the sequence in a slot."""
    args = seen, np.int32(slot), np.bool_(is_first), entries
    return StepProgram(_note_seen, len(entries.token), args, {}, "tokens of a sample with penalties that gets a slot")


def image_rows_key(windows: int) -> Hashable:
    """Returns the key of what `image_rows` returns for patches with so many windows."""
    return _image_rows.__name__, windows


def image_rows(patches: Patches) -> StepProgram:
    """Returns the program that makes rows of the patches of images."""
    windows = len(patches.pixels)
    return StepProgram(_image_rows, windows, (patches,), {}, f"images: up to {windows} windows or pieces of them")


def take_slot(state: State, slot: int) -> StepProgram:
    """Returns the program that copies a slot's rows of the layers whose state lies in slots."""
    return StepProgram(_take_slot, _SLOT, (state, np.int32(slot)), {}, "snapshots: the rows of a slot")


def put_slot(state: State, slot: int, rows: PyTree) -> StepProgram:
    """Returns the program that gives a slot its rows of the layers whose state lies in slots."""
    return StepProgram(_put_slot, _SLOT, (state, np.int32(slot), rows), {}, "snapshots: a slot that gets its rows")


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """Every program that a step loop may need, as shapes and dtypes: another process can make them from a pickle.

    Attributes:
        network: the model without its weights.
        parameters: the weights, and how devices reach one another.
        state: what the layers keep.
        in_slots: for each layer, whether it keeps it in slots.
        slots: what the device knows of the sequences in the slots.
        batches: a batch of each shape.
        variants: the sampling programs that steps may use.
        hidden: one row of hidden states.
        vocabulary: the number of tokens.
        images: patches of each size that the vision tower may be given.
        everywhere: the sharding of what every device has that shares the model; None: there is one device.
        runs_of: decodes that a run of steps may have at most; 0: there are no runs.
    """

    network: Network
    parameters: Parameters
    state: State
    in_slots: tuple[bool, ...]
    slots: SlotState
    batches: tuple[StepBatch, ...]
    variants: tuple[SamplingVariant, ...]
    hidden: jax.ShapeDtypeStruct
    vocabulary: int
    images: tuple[Patches, ...] = ()
    everywhere: NamedSharding | None = None
    runs_of: int = 0

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model; None: there is one."""
        if self.everywhere is None:
            return None
        assert isinstance(self.everywhere.mesh, Mesh)
        return self.everywhere.mesh

    def by_key(self) -> dict[Hashable, StepProgram]:
        """Returns the programs: the essential ones first, and of these the longest to compile first."""
        # Programs of many rows take longer, and the layers longer than all others.
        batches = sorted(self.batches, key=lambda batch: -len(batch.token))
        by_size = {batch.shape.sampled: batch for batch in batches}
        programs = [
            *(self._layers(batch) for batch in batches),
            *(program for batch in by_size.values() for program in self._sampling(batch)),
            *(self._scoring(batch) for batch in batches if batch.shape.rows),
            *(
                decode_run(batch.as_empty_run(), self.state, self.slots.last, variant)
                for batch in batches
                if has_runs(batch.shape, self.runs_of)
                for variant in run_variants(self.variants)
            ),
        ]
        if self.slots.seen is not None:
            (entries,) = seen_entries((), (), self.vocabulary)
            programs.append(note_seen(self.slots.seen, 0, entries, is_first=True))
        if any(self.in_slots):
            state = state_in_slots(self.state, self.in_slots)
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
            programs += [take_slot(state, 0), put_slot(state, 0, rows)]
        # The largest serves smaller images, too.
        largest = max((len(patches.pixels) for patches in self.images), default=0)
        for patches in self.images:
            program = image_rows(patches)
            programs.append(program._replace(is_essential=program.size == largest))
        programs.sort(key=lambda program: not program.is_essential)
        return {program.key: program._replace(args=shapes_of(program.args, self.everywhere)) for program in programs}

    def _layers(self, batch: StepBatch) -> StepProgram:
        shape = batch.shape
        alike = [other.shape for other in self.batches if other.shape.rows == shape.rows]
        # Most steps only decode. Among those that prefill, a few decodes too many cost little.
        is_essential = not shape.rows or shape == max(alike)
        return forward(batch, self.state, self.slots.last)._replace(is_essential=is_essential)

    def _sampling(self, batch: StepBatch) -> Iterator[StepProgram]:
        count, essential = batch.shape.sampled, (self.variants[0], self.variants[-1])
        masks = all_allowed(count, self.vocabulary)
        for variant in self.variants[::-1]:
            program = sample(batch, self._rows(count), self.slots, variant, masks)
            yield program._replace(is_essential=variant in essential)

    def _scoring(self, batch: StepBatch) -> StepProgram:
        return score(self._rows(batch.shape.rows), 0, np.zeros(1, np.int32), most_likeliest(self.variants))

    def _rows(self, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *self.hidden.shape), self.hidden.dtype)


def state_in_slots(state: State, in_slots: Sequence[bool]) -> State:
    """Returns the state of the layers that keep it in slots."""
    return tuple(layer for layer, is_in_slots in zip(state, in_slots, strict=True) if is_in_slots)


def shapes_of[T](tree: T, everywhere: NamedSharding | None = None) -> T:
    """Returns shapes and dtypes in place of arrays.

    Args:
        tree: arrays, or shapes and dtypes.
        everywhere: the sharding of arrays that say none, where several devices share a model; None: there is one.
    """

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        if everywhere is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        given = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=given if isinstance(given, NamedSharding) else everywhere
        )

    return jax.tree.map(shape_of, tree)


def most_likeliest(variants: Sequence[SamplingVariant]) -> int:
    """Returns how many of the likeliest tokens the variants report at most."""
    return max(variant.top_logprobs for variant in variants)


@contextlib.contextmanager
def _model(network: Network[Decoder], parameters: Parameters) -> Iterator[Decoder]:
    """The model, within a context in which its devices exchange by the links of the parameters."""
    with linked(parameters.links):
        yield network.with_weights(parameters.weights)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _forward(
    network: Network, parameters: Parameters, state: State, last: Int32[Array, "slots"], batch: StepBatch
) -> tuple[State, Float[Array, "R D"], Float[Array, "rows D"]]:
    """Returns the state with the step's tokens, and hidden states: of each chunk's last token, and of prefill rows."""
    decodes = batch.held.shape[0]
    is_held = batch.held < last.shape[0]
    tokens = jnp.concatenate([jnp.where(is_held, last[batch.held], batch.token[:decodes]), batch.token[decodes:]])
    images = batch.images
    if images is not None:  # decodes come before them
        padding = (decodes, 0)
        images = ImageRows(jnp.pad(images.present, padding), jnp.pad(images.rows, (padding, (0, 0))))
    with _model(network, parameters) as model:
        hidden, state = model.hidden_states(tokens, batch.queries, state, images=images)
    return state, hidden[batch.last_row], hidden[decodes:]


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=(2, 3), static_argnames=("variant", "most"))
def _decode_run(
    network: Network,
    parameters: Parameters,
    state: State,
    last: Int32[Array, "slots"],
    batch: StepBatch,
    *,
    variant: SamplingVariant,
    most: int,
) -> tuple[State, Int32[Array, "slots"], SampledTokens]:
    """Returns the state and the last tokens after a run of decode steps, and the tokens of each, `[most, R]`."""
    with _model(network, parameters) as model:
        state, (last, sampled) = model.with_state(_decoded, state, last, batch, variant=variant, most=most)
    return state, last, sampled


def _decoded(
    model: Decoder,
    state: State,
    last: Int32[Array, "slots"],
    batch: StepBatch,
    *,
    variant: SamplingVariant,
    most: int,
) -> tuple[State, tuple[Int32[Array, "slots"], SampledTokens]]:
    """Computes what `_decode_run` returns, with the weights that the model has on this device."""
    links = current_links()

    def step(carried: tuple[State, Array], number: Array) -> tuple[tuple[State, Array], SampledTokens]:
        state, last = carried
        now = batch.at_step_of_run(number, last.shape[0])
        with linked(links):  # what was gathered outside of the loop cannot be used in it
            hidden, state = model.hidden_states(last[now.held], now.queries, state)
            rows = SampledRows(now.slot, now.sampling, None)
            sampled = model.with_logits(_sampled, hidden[now.last_row], rows, None, variant=variant)
        return (state, last.at[now.slot].set(sampled.token, mode="drop")), sampled

    (state, last), sampled = lax.scan(step, (state, last), jnp.arange(most, dtype=jnp.int32))
    return state, (last, sampled)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=3, static_argnames="variant")
def _sample(
    network: Network,
    parameters: Parameters,
    hidden: Float[Array, "R D"],
    slots: SlotState,
    rows: SampledRows,
    *,
    variant: SamplingVariant,
) -> tuple[SlotState, SampledTokens]:
    """Returns the state of the slots, and the tokens that are sampled after the given hidden states."""
    seen_by_row, slot = None, jnp.asarray(rows.slot)
    if variant.adjusted:
        assert slots.seen is not None
        count = len(slots.seen.generated)
        slot = unique_scatter_indices(slot < count, slot, count)
        seen_by_row = SeenTokens(*(x.at[slot].get(mode="fill", fill_value=0) for x in slots.seen))
    with _model(network, parameters) as model:
        sampled = model.with_logits(_sampled, hidden, rows, seen_by_row, variant=variant)
    seen = None
    if slots.seen is not None and seen_by_row is not None:
        seen = _with_tokens(slots.seen, seen_by_row, slot, sampled.token)
    return SlotState(slots.last.at[rows.slot].set(sampled.token, mode="drop"), seen), sampled


def _sampled(logits: Logits, rows: SampledRows, seen: SeenTokens | None, *, variant: SamplingVariant) -> SampledTokens:
    """Returns the tokens that are sampled by logits, given what is seen in the rows' slots where they are adjusted."""
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
    return SampledTokens(choice.token, logprob, *top, choice.sampling_logprob)


class _Choice(NamedTuple):
    """The tokens that are sampled, and their logprobs as far as these are known.

    Attributes:
        token: the tokens.
        logprob: their logprobs by the logits that were given.
        sampling_logprob: their logprobs by the distribution that they were drawn from.
    """

    token: Int32[Array, "R"]
    logprob: Float32[Array, "R"] | None
    sampling_logprob: Float32[Array, "R"] | None


def _choice(choices: Logits, sampling: SamplingArrays, variant: SamplingVariant) -> _Choice:
    """Returns tokens sampled by the given logits."""
    if not variant.distribution:
        return _Choice(*choices.sample(sampling, filtered=variant.filtered), None)
    # Filters sort the logits, which takes longer than all the rest: they are applied once for both.
    kept = choices.filtered(sampling) if variant.filtered else choices
    token, logprob = kept.sample(sampling, filtered=False)
    return _Choice(token, None if variant.filtered else logprob, kept.sampling_logprobs(token, sampling))


def _with_tokens(seen: SeenTokens, by_row: SeenTokens, slot: Int32[Array, "R"], token: Int32[Array, "R"]) -> SeenTokens:
    """Returns what is seen in the slots, with a further token of each row."""
    count = by_row.generated[jnp.arange(len(token), dtype=jnp.int32), token]
    count += (count < np.iinfo(_COUNT).max).astype(_COUNT)
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
    """Returns what is seen in the slots, with more tokens of one slot: with these alone if they are its first."""

    def written(rows: Array, values: Arrays) -> Array:
        row = jnp.where(is_first, jnp.zeros_like(rows[slot]), rows[slot])
        return rows.at[slot].set(row.at[entries.token].set(values, mode="drop", unique_indices=True))

    return SeenTokens(written(seen.generated, entries.generated), written(seen.in_prompt, entries.in_prompt))


@functools.partial(compilation.jit, static_argnums=0)
def _image_rows(network: Network[Decoder], parameters: Parameters, patches: Patches) -> Float[Array, "W U D"]:
    """Returns a row for each token of each window."""
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


def none_seen(slots: int, vocabulary: int) -> SeenTokens:
    """Returns what the device knows of empty slots."""
    return SeenTokens(jnp.zeros((slots, vocabulary), _COUNT), jnp.zeros((slots, vocabulary), bool))


def seen_entries(prompt: Sequence[int], generated: Sequence[int], vocabulary: int) -> Iterator[SeenEntries]:
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
        yield SeenEntries(token, count[token % vocabulary], in_prompt[token % vocabulary])


@functools.partial(compilation.jit, static_argnums=0, static_argnames="top")
def _score(
    network: Network,
    parameters: Parameters,
    rows: Float[Array, "rows D"],
    first: np.int32 | Int32[Array, ""],
    tokens: Int32[Arrays, "n"],
    *,
    top: int,
) -> SampledTokens:
    """Returns logprobs of given tokens, each after the hidden state in a row of its own."""
    index = jnp.minimum(first + jnp.arange(tokens.shape[0], dtype=jnp.int32), rows.shape[0] - 1)
    with _model(network, parameters) as model:
        return model.with_logits(_scored, rows[index], jnp.asarray(tokens), top=top)


def _scored(logits: Logits, tokens: Int32[Array, "n"], *, top: int) -> SampledTokens:
    """Returns given tokens with their logprobs, and the likeliest tokens in their places."""
    return SampledTokens(tokens, logits.logprobs(tokens), *logits.top_logprobs(top))
