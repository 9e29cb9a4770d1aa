"""Random schedules on small models, for each kind of state that layers keep: no bit of a request depends on them.

To search for more: python -m tests.engine.state_schedules KIND [FIRST] END, a range of seeds.
"""

import dataclasses
import functools
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from flax import nnx

from detjax import SamplingParams
from detjax.engine.batch import BatchShape, BatchShapes
from detjax.engine.drafts.draft_lengths import DraftLengths
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.model_runner import ModelRunner, StateSizes
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.page_pool import PagePool, prefix_root
from detjax.engine.sampled_tokens import PackedTokens
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import ScheduledStep, Scheduler, StepLimits, pages_needed
from detjax.engine.sequence import RequestContext, Sequence, samples
from detjax.engine.slot_table import SlotTable
from detjax.engine.snapshots import SnapshotCache
from detjax.engine.step_loop import StepLoop
from detjax.models import Decoder, load
from detjax.operands.options import KVQuantization
from tests.engine.schedules import Oracle
from tests.models.shallow_models import cut
from tests.support.bits import assert_same_bits

FIXTURES: Final = Path(__file__).parents[1] / "fixtures"
_PAGES: Final = 12
"""Pages of the device's cache. Schedules let the scheduler have some of them, so that programs serve them all."""
_REQUESTS: Final = 24
BLOCK: Final = 8
"""Consecutive seeds whose schedules have the same shapes."""
_VARIANTS: Final = (
    SamplingVariant(filtered=True, top_logprobs=0),
    SamplingVariant(filtered=True, top_logprobs=2, adjusted=True, distribution=True),
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of state: a small model whose layers keep it, and the quantization of keys and values."""

    checkpoint: str
    quantization: KVQuantization | None = None
    layers: tuple[int, ...] | None = None


KINDS: Final[Mapping[str, Kind]] = {
    "slots": Kind("qwen3-next", layers=(1, 2)),
    "windows": Kind("gemma3"),
    "other layers' pages": Kind("gemma4", layers=(2, 3)),
    "latents": Kind("deepseek-v3"),
    "pages": Kind("qwen3"),
    "sinks": Kind("gpt-oss"),
    "int8": Kind("qwen3", "int8"),
    "fp8_e4m3": Kind("qwen3", "fp8_e4m3"),
    "sections": Kind("qwen2_5_vl-tiny"),
}


def few_shapes(drafts: int, *, decodes_guesses: bool) -> BatchShapes:
    """Returns few shapes, so that few programs are compiled. Steps cut prompts at other places if there are several."""
    sampled = 3 + 3 * drafts
    decodes = sampled if decodes_guesses else 3
    limits = StepLimits(
        slots=3,
        tokens=29,
        prefills=3,
        rows=32,
        prefill_chunk=29,
        drafts=3 * drafts,
        decodes_guesses=decodes_guesses,
    )
    alone = {BatchShape(count, 0, 0, count) for count in (3, decodes)}
    return BatchShapes([*alone, BatchShape(decodes, 32, 3, sampled)], limits)


SHAPES: Final = (
    BatchShapes.for_serving(4, 48),
    BatchShapes.for_chunks(3, 100),
    BatchShapes.for_serving(2, 150),
    BatchShapes.for_chunks(3, 29, mixes=True),
    BatchShapes.for_chunks(4, 1),
    BatchShapes.for_serving(3, 60, 7),
    BatchShapes.for_serving(3, 60, 7, decodes_guesses=True),
    BatchShapes.for_chunks(4, 50, mixes=True, drafts=3),
)


_NOTHING: Final[Mapping[Sequence, Sequence]] = {}


def model_of(kind: Kind) -> Decoder:
    """Returns the kind's model with only the layers that it names, because each takes long to compile."""
    model = load(FIXTURES / kind.checkpoint, dtype="bfloat16", progress=False)[0]
    if kind.layers is None:
        return model
    model.layers = nnx.List([model.layers[index] for index in kind.layers])
    model.config = cut(model.config, slice(kind.layers[0], kind.layers[-1] + 1))
    return model


class CountingRunner(ModelRunner):
    """A runner that counts its runs of decode steps."""

    runs = 0

    def decode_run(self, batch: PackedBatch, needed: SamplingVariant) -> PackedTokens:
        self.runs += 1
        return super().decode_run(batch, needed)


class Cases:
    """The requests of a kind of state, and their answers where each is alone."""

    def __init__(self, kind: Kind, is_small: bool = False, drafts: int = 0) -> None:
        """Small cases have one sampling program, short answers, and the same programs for requests that are alone.

        They may have up to `drafts` guesses of a sequence in a step.
        """
        self.kind, self.model, self.is_small = kind, model_of(kind), is_small
        self.few_shapes = few_shapes(drafts, decodes_guesses=drafts > 0 and not self.model.has_slots)
        self.longest = min(self.model.config.max_positions, 400)
        self.pages_per_sequence = -(-(self.longest - 1) // 128)
        self.requests = _small_requests() if is_small else [self._request(index) for index in range(_REQUESTS)]
        self._answers: dict[int, list[Sequence]] = {}

    def _request(self, index: int) -> tuple[tuple[int, ...], SamplingParams]:
        draw = random.Random(index)
        beginning = random.Random(index % 2).choices(range(100), k=300)
        shared = draw.choice([0, 0, 20, 128, 128, 140, 256, 290])
        rest = draw.choice([1, 2, 3, 30, 64, 100, 127])
        max_tokens = draw.choice([1, 2, 5, 8, 16])
        prompt = (*beginning[:shared], *draw.choices(range(100), k=rest))[: self.longest - max_tokens]
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=index,
            temperature=draw.choice([0.0, 0.8, 1.3]),
            top_k=draw.choice([0, 0, 20]),
            n=draw.choice([1, 1, 1, 3]),
            prompt_logprobs=draw.random() < 0.15,
            ignore_eos=True,
        )
        if index % 4 == 0:  # the others can be in runs
            params = dataclasses.replace(
                params,
                top_logprobs=draw.choice([0, 2]),
                frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
                sampling_logprobs=draw.random() < 0.3,
            )
        return prompt, params

    def answers(self, index: int) -> list[Sequence]:
        """Returns the samples of a request that is alone, each computed by itself, its prompt in one piece."""
        if index not in self._answers:
            self._answers[index] = samples(*self.requests[index], RequestContext())
            for sample in self._answers[index]:
                shapes = self.few_shapes if self.is_small else BatchShapes.for_chunks(1, self.longest)
                loop = self.loop(shapes, _PAGES, snapshots=None)
                loop.submit(sample)
                while not loop.is_idle:
                    loop.step()
        return self._answers[index]

    def loop(
        self,
        shapes: BatchShapes,
        num_pages: int,
        *,
        snapshots: int | None,
        runs_of: int = 0,
        expected: Mapping[Sequence, Sequence] = _NOTHING,
        guesses_always: bool = False,
        seed: int = 0,
    ) -> StepLoop:
        """Returns a step loop with an empty cache; the scheduler may use some of its pages.

        Args:
            shapes: the shapes of its batches.
            num_pages: pages that the scheduler has.
            snapshots: maximum number of snapshots, for models that need them for a prefix cache; None: no prefix cache.
            runs_of: maximum number of decodes of a run; 0: no runs.
            expected: the answers of sequences, for guesses if the shapes have room for them.
            guesses_always: whether all steps have guesses, and not just some of them.
            seed: of the random guesses.
        """
        slots, has_slots = shapes.limits.slots, self.model.has_slots
        cache = SnapshotCache(snapshots) if snapshots is not None and has_slots else None
        pool = PagePool(num_pages, keeps_prefixes=snapshots is not None, snapshots=cache)
        scheduler = Scheduler(pool, shapes.limits)
        sections = self.model.config.rope.sections
        coordinates = None if sections is None else len(sections)
        drafts = shapes.limits.drafts // slots
        table = SlotTable(
            slots, self.pages_per_sequence, named_in_queries=has_slots, coordinates=coordinates, drafts=drafts
        )
        runner = CountingRunner(
            self.model,
            StateSizes(_PAGES, slots, self.kind.quantization),
            variants=_VARIANTS[:1] if self.is_small else _VARIANTS,
            empty_batch=functools.partial(table.batch, ScheduledStep()),
            runs_of=runs_of,
        )
        numbers, drafting = random.Random(seed), None
        if expected is not _NOTHING:
            fewest = 1 if guesses_always else -3 * drafts
            lengths: DraftLengths = lambda sequences, acceptance: max(0, numbers.randint(fewest, drafts))  # noqa: E731
            oracle = Oracle(_Tokens(expected), numbers)
            drafting = Drafting(oracle, drafts, self.model.config.vocab_size, lengths) if drafts else None
        return StepLoop(scheduler, shapes, table, runner, drafting=drafting)


class _Tokens(Mapping[Sequence, list[int]]):
    """The tokens of sequences' answers."""

    def __init__(self, answers: Mapping[Sequence, Sequence]) -> None:
        self._answers = answers

    def __getitem__(self, sequence: Sequence) -> list[int]:
        return self._answers[sequence].generated

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)


@functools.cache
def cases_of(kind: Kind, is_small: bool = False, drafts: int = 0) -> Cases:
    return Cases(kind, is_small, drafts)


def bits(sequence: Sequence, count: int | None = None) -> list[Any]:
    """Returns everything that was computed for a sample, up to a number of tokens, as arrays."""
    output = sequence.output
    lists = sequence.generated, output.logprobs, output.sampling_logprobs, output.top_logprobs
    arrays = [np.asarray(values[:count], np.float64) for values in lists]
    return arrays if count is not None else [*arrays, np.float64([x for x, _ in output.prompt_logprobs])]


@dataclasses.dataclass
class Findings:
    """Records the events of schedules, so that a test can check that all kinds occurred."""

    schedules: int = 0
    answers: int = 0
    cancelled: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    snapshot_hits: int = 0
    runs: int = 0
    guesses: int = 0
    right_guesses: int = 0


class Schedule:
    """Requests come and are cancelled, prefixes and snapshots are forgotten, and steps are made, in any order."""

    def __init__(self, kind: Kind, draw: random.Random, shapes: BatchShapes) -> None:
        self.cases, self.draw = cases_of(kind), draw
        num_pages = draw.randint(self.cases.pages_per_sequence, _PAGES)
        snapshots, runs_of = draw.choice([None, 1, 2, 5, 20]), draw.choice([0, 4])
        self.expected: dict[Sequence, Sequence] = {}
        options = {"snapshots": snapshots, "runs_of": runs_of, "expected": self.expected}
        self.loop = self.cases.loop(shapes, num_pages, **options)
        if num_pages % 2:  # steps of two and more samples are planned while two others are unread
            self.loop.samples_for_a_thread, self.loop.late_steps = 2, 0

    def submit(self) -> None:
        index, client = self.draw.randrange(_REQUESTS), self.draw.choice([None, None, "a", "b"])
        context = RequestContext(prefix_root=prefix_root(self.draw.choice([None, None, None, client])), client=client)
        for sample, alone in zip(samples(*self.cases.requests[index], context), self.cases.answers(index), strict=True):
            assert pages_needed(sample) <= self.loop.scheduler.pool.num_pages
            self.loop.submit(sample)
            self.expected[sample] = alone

    def act(self) -> None:
        match self.draw.choice(["submit", "submit", "step", "step", "cancel", "forget", "drop"]):
            case "submit":
                self.submit()
            case "step":
                for _ in range(self.draw.randint(1, 12)):
                    self.loop.step()
            case "cancel" if self.expected:
                self.loop.scheduler.cancel(self.draw.choice([*self.expected]))
            case "forget" if self.draw.random() < 0.3:
                self.loop.scheduler.pool.forget_prefixes()
            case "drop" if snapshots := self.loop.scheduler.pool.snapshots:
                del snapshots._kept[self.draw.choice([*snapshots._kept])]

    def end(self, findings: Findings) -> None:
        finish(self.loop, self.expected, findings)


def finish(loop: StepLoop, expected: Mapping[Sequence, Sequence], findings: Findings) -> None:
    """Every answer has the bits that it has alone, and nothing stays in use."""
    while not loop.is_idle:
        loop.step()
    assert loop.scheduler.pool.in_use == 0
    for sample, alone in expected.items():
        is_cancelled = sample.finish_reason == "cancelled"
        count = len(sample.generated) if is_cancelled else None
        assert_same_bits(bits(sample, count), bits(alone, count))
        findings.cancelled += is_cancelled
        findings.answers += not is_cancelled
        findings.cached_tokens += sample.cached_tokens
    findings.preemptions += loop.scheduler.preemptions
    snapshots = loop.scheduler.pool.snapshots
    findings.snapshot_hits += 0 if snapshots is None else snapshots.hits
    assert isinstance(loop._runner, CountingRunner)
    findings.runs += loop._runner.runs
    if loop.drafting is not None:
        findings.guesses += loop.drafting.proposed
        findings.right_guesses += sum(loop.drafting.accepted_at)
    findings.schedules += 1


def play(kind: Kind, seed: int, shapes: BatchShapes, findings: Findings, actions: int = 12) -> None:
    """Plays the schedule of a seed.

    Raises:
        AssertionError: a bit differs; its note says in which schedule.
    """
    try:
        schedule = Schedule(kind, random.Random(seed), shapes)
        for _ in range(actions):
            schedule.act()
        schedule.end(findings)
    except Exception as failure:
        failure.add_note(f"in the schedule of {actions} actions with seed {seed}")
        raise


def _small_requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Two prompts that share a page, a short one, and one whose answer needs a second page."""
    shared = random.Random(0).choices(range(90), k=128)
    prompts = (*shared, 3, 4, 5), (7, 8, 9), tuple(range(3, 95)) + tuple(range(30)), (*shared, *[9] * 9)
    params = (
        SamplingParams(max_tokens=6, ignore_eos=True),
        SamplingParams(max_tokens=11, temperature=0.8, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.3, seed=2, top_k=20, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True),
    )
    return [*zip(prompts, params, strict=True)]


def play_small(name: str, drafts: int = 0) -> Findings:
    """Plays schedules in which everything happens that may happen to a sequence, with few programs and steps.

    Guesses decide when sequences need their pages. Up to ten schedules with other guesses are played until one of them
    has preempted a sequence.
    """
    findings, cases = Findings(), cases_of(KINDS[name], is_small=True, drafts=drafts)
    for seed in range(10 if drafts else 1):
        _play_small(cases, seed, findings)
        if findings.preemptions and findings.runs:
            break
    if drafts:
        expected = dict[Sequence, Sequence]()
        loop = cases.loop(cases.few_shapes, 6, snapshots=5, expected=expected, guesses_always=True)
        for index in (2, 1, 0, 3):
            _submit(cases, loop, index, expected, steps=1)
        finish(loop, expected, findings)
    return findings


def _play_small(cases: Cases, seed: int, findings: Findings) -> None:
    expected = dict[Sequence, Sequence]()
    loop = cases.loop(cases.few_shapes, 4, snapshots=5, runs_of=3, expected=expected, seed=seed)
    _submit(cases, loop, 2, expected, steps=4)
    _submit(cases, loop, 1, expected, steps=1)
    preempted = _submit(cases, loop, 0, expected, steps=5)
    loop.scheduler.cancel(_submit(cases, loop, 1, expected, steps=3))
    finish(loop, {}, Findings())
    assert preempted.finish_reason is not None
    _submit(cases, loop, 3, expected, steps=1)
    finish(loop, expected, findings)


def _submit(cases: Cases, loop: StepLoop, index: int, expected: dict[Sequence, Sequence], steps: int) -> Sequence:
    """Submits a request, makes steps, and returns the request's sequence."""
    (sample,), (alone,) = samples(*cases.requests[index], RequestContext()), cases.answers(index)
    expected[sample] = alone
    loop.submit(sample)
    for _ in range(steps):
        loop.step()
    return sample


def search(name: str, seeds: range, findings: Findings) -> None:
    """Runs the schedules of seeds. Schedules of a block share shapes, so that few programs serve them."""
    has_slots = cases_of(KINDS[name]).model.has_slots
    served = [shapes for shapes in SHAPES if not (has_slots and shapes.limits.decodes_guesses)]
    for seed in seeds:
        play(KINDS[name], seed, served[seed // BLOCK % len(served)], findings)


def main(name: str, *bounds: str) -> None:
    """Plays the schedules of a range of seeds, and prints after each block what they went through."""
    seeds, findings = range(*map(int, bounds)), Findings()
    for first in range(0, len(seeds), BLOCK):
        search(name, seeds[first : first + BLOCK], findings)
        print(name, findings, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
