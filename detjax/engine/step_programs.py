"""The programs that compute steps, and the set of programs that a step loop may need.

A program is compiled for fixed array sizes. A few sizes serve all steps, so all programs can be compiled before the
first request; see `BatchShapes.for_serving`.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, UInt16, UInt32

from detjax.engine.batch import BatchShape, StepBatch, no_adjustments
from detjax.engine.request import TopLogprobs
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.token_masks import all_allowed
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
"""Prompt tokens that one program scores."""
RUN_STEPS: Final = 4
"""Steps of a run of decodes. The host prepares the next run while the device computes them."""
_SEEN_ENTRIES: Final = 1024
"""Tokens of a sequence that one program records as seen."""
_SLOT: Final = "slot"
"""The size of programs that copy one slot."""
COUNT: Final = np.uint16
"""The dtype of token counts. They saturate at its largest number, as the contract says."""


class Parameters(NamedTuple):
    """The leading arguments of every program.

    Attributes:
        weights: the model's weights.
        links: connections between devices that share the model; None: one device, or XLA's collectives.
    """

    weights: Weights
    links: DeviceLinks | None = None


class SampledTokens(NamedTuple):
    """Sampled tokens, one per row, with their logprobs and the likeliest tokens at their positions.

    The fields of the sampling distribution are None if the program does not compute them.
    """

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any
    sampling_logprob: Any = None
    sampling_top_tokens: Any = None
    sampling_top_logprobs: Any = None

    def start_copy(self) -> "SampledTokens":
        """Starts copying the arrays to the host, and returns them."""
        for x in self:
            if x is not None:
                x.copy_to_host_async()
        return self

    def read(self) -> "SampledTokens":
        """Waits for the arrays and returns them on the host; arrays of one number per row become lists."""
        read = type(self)(*jax.device_get(tuple(self)))
        sampling_logprob = None if read.sampling_logprob is None else read.sampling_logprob.tolist()
        # Reading a number from a list is five times as fast as from an array.
        return read._replace(
            token=read.token.tolist(), logprob=read.logprob.tolist(), sampling_logprob=sampling_logprob
        )

    def by_step(self) -> "list[SampledTokens]":
        """Splits the result of `read` for a run, `[steps, R]`, into its steps."""
        steps = range(len(self.token))
        return [type(self)(*(None if x is None else x[step] for x in self)) for step in steps]

    def read_tokens(self) -> list[int]:
        """Waits for the tokens, but not for the other arrays, and returns them."""
        return np.asarray(self.token).tolist()

    def at(self, row: int, params: SamplingParams) -> tuple[int, float, TopLogprobs, float | None, TopLogprobs]:
        """Returns one row of the result of `read` for a request with these parameters.

        The row is the token, its logprob, the likeliest tokens with their logprobs, and the token's sampling logprob
        and the likeliest tokens under the sampling distribution.
        """
        top, likeliest, sampling_logprob, sampling_top = params.top_logprobs, (), None, ()
        if top:  # few requests ask for them, and all requests wait here
            likeliest = zip(self.top_tokens[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
        if params.sampling_logprobs and self.sampling_logprob is not None:
            sampling_logprob = self.sampling_logprob[row]
            if top and self.sampling_top_tokens is not None:
                arrays = self.sampling_top_tokens[row, :top], self.sampling_top_logprobs[row, :top]
                sampling_top = zip(*(x.tolist() for x in arrays), strict=True)
        return self.token[row], self.logprob[row], tuple(likeliest), sampling_logprob, tuple(sampling_top)


class SamplingVariant(NamedTuple):
    """The capabilities of a sampling program. A program with fewer is faster, and no bit depends on the choice.

    Attributes:
        filtered: it can apply top-k, top-p and min-p.
        top_logprobs: number of likeliest tokens that it reports.
        adjusted: it can apply penalties and biases.
        constrained: it can apply masks of allowed tokens.
        distribution: it reports logprobs under the distribution that tokens are drawn from.
    """

    filtered: bool
    top_logprobs: int
    adjusted: bool = False
    constrained: bool = False
    distribution: bool = False

    @classmethod
    def needed_by(cls, params: Sequence[SamplingParams]) -> "SamplingVariant":
        """Returns the smallest variant that serves samples with these parameters."""
        # Hundreds of rows have few different needs.
        return cls(*map(max, zip(*{row.needs for row in params}, strict=True)))

    @classmethod
    def for_serving(cls, top_logprobs: int) -> "tuple[SamplingVariant, ...]":
        """Returns the variants of an engine whose requests may ask for `top_logprobs` likeliest tokens.

        Sorting the logits for filters and searching for the likeliest tokens each take longer than everything else.
        So common requests have programs without these, and the last program serves the rest.
        """
        plain = [cls(filtered, top) for filtered in (False, True) for top in dict.fromkeys((0, top_logprobs))]
        constrained = [cls(filtered, 0, constrained=True) for filtered in (False, True)]
        adjusted = [cls(False, 0, adjusted=True, constrained=True), cls(True, top_logprobs, True, True)]
        reported = [variant._replace(distribution=True) for variant in (plain[0], adjusted[-1])]
        return *plain, *constrained, *adjusted, *reported

    @property
    def description(self) -> str:
        """The capabilities in words."""
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
        """Returns whether a program of this variant has the capabilities that are needed."""
        return all(part >= wanted for part, wanted in zip(self, needed, strict=True))


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
        sampling: sampling parameters; seeds, positions and sample indices do not matter.
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


class StepProgram(NamedTuple):
    """A program and the arguments of a call.

    Attributes:
        fn: a function of `compilation.jit`; its first arguments are the network and its weights.
        size: the sizes that its arguments depend on.
        args: the arguments after the parameters: arrays, or their shapes and dtypes.
        static: the static keyword arguments.
        purpose: a description of the program.
        is_essential: whether some steps have no other essential program. The other programs only make smaller or
            simpler steps faster.
    """

    fn: Callable[..., Any]
    size: Hashable
    args: tuple[Any, ...]
    static: dict[str, Any]
    purpose: str
    is_essential: bool = True

    @property
    def key(self) -> Hashable:
        """The program's identity in its step loop, the same in all processes."""
        return self.fn.__name__, self.size, *self.static.values()


def forward_key(shape: BatchShape) -> Hashable:
    """Returns the key of the result of `forward` for a batch of a shape."""
    return _forward.__name__, shape


def sample_key(count: int, variant: SamplingVariant) -> Hashable:
    """Returns the key of the result of `sample` for a batch that samples from `count` rows."""
    return _sample.__name__, count, variant


def forward(batch: StepBatch, state: State, last: Any) -> StepProgram:
    """Returns the program that computes hidden states."""
    shape = batch.shape
    prefills = f", and prefills of up to {shape.rows} rows" if shape.rows else ""
    # The layers do not depend on sampling: their program is the same with and without adjustments.
    args = state, last, batch._replace(adjustments=None)
    return StepProgram(_forward, shape, args, {}, f"layers: up to {shape.decodes} decodes{prefills}")


def has_runs(shape: BatchShape, most: int) -> bool:
    """Returns whether steps of a shape can form runs, which have `most` decodes at most."""
    return not shape.rows and shape.sampled == shape.decodes <= most


def run_variants(variants: Sequence[SamplingVariant]) -> list[SamplingVariant]:
    """Returns the variants that runs have programs for: they report only a token and its logprob."""
    return [variant for variant in variants if variant == SamplingVariant(variant.filtered, 0)]


def decode_run_key(count: int, variant: SamplingVariant) -> Hashable:
    """Returns the key of the result of `decode_run` for a batch with `count` decodes."""
    return _decode_run.__name__, count, variant, RUN_STEPS


def decode_run(batch: StepBatch, state: State, last: Any, variant: SamplingVariant) -> StepProgram:
    """Returns the program that computes several decode steps, each from the tokens of the previous step."""
    count = batch.shape.decodes
    purpose = f"runs of {RUN_STEPS} steps: up to {count} decodes {variant.description}"
    args = state, last, batch._replace(adjustments=None)
    return StepProgram(_decode_run, count, args, {"variant": variant, "most": RUN_STEPS}, purpose, is_essential=False)


def sample(batch: StepBatch, hidden: Any, slots: SlotState, variant: SamplingVariant, allowed: Any) -> StepProgram:
    """Returns the program that samples from hidden states. `allowed` is ignored by variants without constraints."""
    count, adjustments = batch.shape.sampled, batch.adjustments
    if not variant.adjusted:
        slots, adjustments = slots._replace(seen=None), None
    elif adjustments is None:
        adjustments = no_adjustments(count)
    rows = SampledRows(batch.slot, batch.sampling, adjustments, allowed if variant.constrained else None)
    return sample_rows(rows, hidden, slots, variant)


def sample_rows(rows: SampledRows, hidden: Any, slots: SlotState, variant: SamplingVariant) -> StepProgram:
    """Returns the program that samples a token for each row from the hidden state of the same row."""
    count = len(rows.slot)
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
        variants: the sampling programs that steps may use.
        hidden: one row of hidden states.
        vocabulary: the number of tokens.
        images: patches of each size that the vision tower may get.
        everywhere: the replicated sharding over the devices that share the model; None: one device.
        runs_of: maximum number of decodes of a run; 0: no runs.
        scored: rows of prompts to score under sampling distributions; None if no variant reports these.
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
    scored: ScoredRows | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model; None: one device."""
        if self.everywhere is None:
            return None
        assert isinstance(self.everywhere.mesh, Mesh)
        return self.everywhere.mesh

    def by_key(self) -> dict[Hashable, StepProgram]:
        """Returns the programs, the essential ones first; within each kind, the slowest to compile come first."""
        # Compile times grow with rows, and layers take the longest.
        batches = sorted(self.batches, key=lambda batch: -len(batch.token))
        by_size = {batch.shape.sampled: batch for batch in batches}
        programs = [
            *(self._layers(batch) for batch in batches),
            *(program for batch in by_size.values() for program in self._sampling(batch)),
            *(program for batch in batches if batch.shape.rows for program in self._scoring(batch)),
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
            programs += [take_slot(state, 0), put_slot(state, 0, slot_rows(state))]
        # The largest one also serves smaller images.
        largest = max((len(patches.pixels) for patches in self.images), default=0)
        for patches in self.images:
            program = image_rows(patches)
            programs.append(program._replace(is_essential=program.size == largest))
        programs.sort(key=lambda program: not program.is_essential)
        return {program.key: program._replace(args=shapes_of(program.args, self.everywhere)) for program in programs}

    def _layers(self, batch: StepBatch) -> StepProgram:
        shape = batch.shape
        alike = [other.shape for other in self.batches if other.shape.rows == shape.rows]
        # Most steps only decode. In steps that prefill, unused room for decodes costs little.
        is_essential = not shape.rows or shape == max(alike)
        return forward(batch, self.state, self.slots.last)._replace(is_essential=is_essential)

    def _sampling(self, batch: StepBatch) -> Iterator[StepProgram]:
        count, essential = batch.shape.sampled, (self.variants[0], self.variants[-1])
        masks = all_allowed(count, self.vocabulary)
        for variant in self.variants[::-1]:
            program = sample(batch, self._rows(count), self.slots, variant, masks)
            yield program._replace(is_essential=variant in essential)

    def _scoring(self, batch: StepBatch) -> Iterator[StepProgram]:
        rows, top = self._rows(batch.shape.rows), most_likeliest(self.variants)
        yield score(rows, 0, np.zeros(1, np.int32), top)
        if self.scored is not None:
            yield take_rows(rows, 0)
            yield score_drawn(self._rows(SCORED_ROWS), self.scored, top)

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


def shapes_of[T](tree: T, everywhere: NamedSharding | None = None) -> T:
    """Returns shapes and dtypes of arrays, with `everywhere` as the sharding of arrays without one."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        if everywhere is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if isinstance(sharding, NamedSharding) else everywhere
        )

    return jax.tree.map(shape_of, tree)


def most_likeliest(variants: Sequence[SamplingVariant]) -> int:
    """Returns the largest number of likeliest tokens that a variant reports."""
    return max(variant.top_logprobs for variant in variants)


@contextlib.contextmanager
def _model(network: Network[Decoder], parameters: Parameters) -> Iterator[Decoder]:
    """Yields the model, whose devices exchange by the links of the parameters in this context."""
    with linked(parameters.links):
        yield network.with_weights(parameters.weights)


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _forward(
    network: Network, parameters: Parameters, state: State, last: Int32[Array, "slots"], batch: StepBatch
) -> tuple[State, Float[Array, "R D"], Float[Array, "rows D"]]:
    """Returns the new state, the hidden state of each chunk's last token, and the hidden states of prefill rows."""
    decodes = batch.held.shape[0]
    is_held = batch.held < last.shape[0]
    tokens = jnp.concatenate([jnp.where(is_held, last[batch.held], batch.token[:decodes]), batch.token[decodes:]])
    images = batch.images
    if images is not None:  # decodes come first
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
    """Returns the state and the last tokens after a run of decode steps, and the tokens of all steps, `[most, R]`."""
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
    """Computes the results of `_decode_run` with this device's weights."""
    links = current_links()

    def step(carried: tuple[State, Array], number: Array) -> tuple[tuple[State, Array], SampledTokens]:
        state, last = carried
        now = batch.at_step_of_run(number, last.shape[0])
        with linked(links):  # arrays gathered outside the loop cannot be used inside
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
    """Returns the state of the slots and the tokens sampled from the hidden states."""
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
    """Returns logprobs of given tokens, each from the hidden state of its own row."""
    index = jnp.minimum(first + jnp.arange(tokens.shape[0], dtype=jnp.int32), rows.shape[0] - 1)
    with _model(network, parameters) as model:
        return model.with_logits(_scored, rows[index], jnp.asarray(tokens), top=top)


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
) -> SampledTokens:
    """Returns logprobs of given tokens, each from the hidden state of its own row."""
    # Small integers decide what each row has seen; the scan adds no number that bits depend on.
    _, seen = lax.scan(_seen_after, SeenTokens(*map(jnp.asarray, rows.seen)), (rows.token, rows.is_generated))
    with _model(network, parameters) as model:
        token, _, *arrays, _ = rows
        return model.with_logits(_drawn, hidden, jnp.asarray(token), *arrays, seen, top=top)


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
