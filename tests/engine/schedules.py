"""Random schedules for the step loop, with a runner that remembers what was written where.

To search for more: python -m tests.engine.schedules [FIRST] END, a range of seeds.
"""

import contextlib
import dataclasses
import functools
import itertools
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from jaxtyping import Array

from detjax import SamplingParams
from detjax.engine import batch, page_pool, prompt_results, sampling_variant, scheduler, step_programs
from detjax.engine.batch import BatchShape, BatchShapes, StepBatch
from detjax.engine.constraint import Constraint
from detjax.engine.constraints import CompiledConstraint, ConstraintCompiler
from detjax.engine.drafts.draft_lengths import DraftLengths
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.launcher import Launcher
from detjax.engine.model_runner import ModelRunner
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.page_pool import PagePool, prefix_root
from detjax.engine.sampled_tokens import PackedTokens, SampledTokens
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import Scheduler, pages_needed
from detjax.engine.sequence import RequestContext, Sequence, samples
from detjax.engine.slot_table import SlotTable
from detjax.engine.snapshots import SnapshotCache
from detjax.engine.step_loop import StepLoop
from detjax.engine.step_programs import StepPrograms
from detjax.engine.token_masks import Masks, Matcher
from detjax.operands import kv_pages

VOCABULARY, END = 50, 7
PAGE = 4
"""Tokens of a page: so few that sequences have many pages."""
MOST_LIKELIEST = 3
"""Likeliest tokens that a program reports; requests ask for some of them."""
SCORED_ROWS = 3
"""Prompt tokens that are scored at once: so few that chunks have several parts."""
DROPPABLE = 7
"""Tokens that a slot can drop again."""
_ALL_ALLOWED = 0xFFFFFFFF


def content(before: int, token: int) -> int:
    """Returns what the cache holds for a token: it depends on the token and on all tokens before it."""
    return hash((before, int(token)))


def next_token(state: int, key: tuple[int, ...], position: int) -> int:
    """Returns the model's next token: it depends on all tokens before it, and on the noise of the request."""
    return hash((position, state, key)) % VOCABULARY


def prompt_logprob(state: int, token: int) -> float:
    """Returns the logprob of a prompt's token after others."""
    return float(hash((state, int(token), 1)) % 1000)


def likeliest(token: int, count: int) -> tuple[tuple[int, float], ...]:
    """Returns what stands for the likeliest tokens where a token was sampled or is in a prompt."""
    return tuple((token + number, -float(number)) for number in range(count))


def penalty(prompt: tuple[int, ...], generated: list[int]) -> int:
    """Returns what the tokens so far change in the choice of a sequence with penalties."""
    return hash((frozenset(prompt), frozenset(Counter(generated).items())))


def allowed_word(tokens: Seq[int]) -> int:
    """Returns what stands for the mask of a sequence with a constraint that has generated these tokens.

    Only numbers are hashed, since the hashes of strings differ from process to process.
    """
    return hash((2, *tokens)) & 0x7FFFFFFF


def expected_tokens(sequence: Sequence) -> list[int]:
    """Returns the tokens that a sequence must generate."""
    params, state, tokens = sequence.params, functools.reduce(content, sequence.prompt, 0), []
    while len(tokens) < params.max_tokens and tokens[-1:] != [END]:
        adjustment = penalty(sequence.prompt, tokens) if params.penalized else 0
        mask = allowed_word(tokens) if params.constraint is not None else _ALL_ALLOWED
        position = len(sequence.prompt) + len(tokens)
        token = next_token(state ^ adjustment ^ mask, sequence.noise_key, position)
        tokens.append(END + 1 if token == END and len(tokens) < params.min_tokens else token)
        state = content(state, tokens[-1])
    return tokens


def expected_prompt_logprobs(sequence: Sequence) -> list[tuple[float, Any]]:
    """Returns the logprobs of a prompt that a sequence must report."""
    result, state, top = [], 0, sequence.params.top_logprobs
    for before, token in itertools.pairwise(sequence.prompt):
        state = content(state, before)
        result.append((prompt_logprob(state, token), likeliest(token, top)))
    return result


class TokensSoFar(list[int]):
    """Stands for llguidance's matcher: it remembers the tokens that it consumed."""

    consume_token = list.append

    def is_error(self) -> bool:
        """Returns False: it accepts any token."""
        return False

    def compute_ff_tokens(self) -> list[int]:
        """Returns no tokens: none is forced."""
        return []


class RememberingCompiler(ConstraintCompiler):
    """A compiler whose matchers remember the tokens they consumed. It computes masks as late as possible."""

    def __init__(self) -> None: ...

    def free(self, matcher: Matcher) -> None: ...

    def masks_after(self, state: Any, guesses: Seq[int]) -> Iterator[np.ndarray]:
        for count in range(1, len(guesses) + 1):
            yield np.array([allowed_word([*state, *guesses[:count]])], np.uint32)

    def start_masks(
        self,
        rows: int,
        matchers: Mapping[int, Matcher],
        accepted: Callable[[], Iterable[tuple[Matcher, int]]],
        after_guesses: Mapping[int, Seq[np.ndarray]] = types.MappingProxyType({}),
    ) -> Future[Masks]:
        def masks() -> Masks:
            for matcher, token in accepted():
                matcher.state.append(token)  # pyright: ignore[reportAttributeAccessIssue]
            allowed = np.full((rows, 1), _ALL_ALLOWED, np.uint32)
            for row, matcher in matchers.items():
                allowed[row] = allowed_word(matcher.state)
            for row, words in after_guesses.items():
                allowed[row + 1 : row + 1 + len(words)] = words
            return Masks(jnp.asarray(allowed), {})

        return _LateFuture(masks)


class _LateFuture[T](Future[T]):
    """A future that begins to compute when it is asked for its result."""

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self.set_result(self._compute())
        return super().result(timeout)


class LateLauncher(Launcher):
    """A launcher that calls a function when its result is asked for, after those that were submitted before it."""

    def __init__(self) -> None:
        self._newest: Future[Any] | None = None

    def submit[T](self, fn: Callable[[], T], /) -> Future[T]:
        previous = self._newest

        def compute() -> T:
            if previous is not None:
                previous.result()
            return fn()

        future = self._newest = _LateFuture(compute)
        return future

    def close(self) -> None:
        pass


class RememberingRunner(ModelRunner):
    """A runner whose cache holds what was written to it, and which samples from what it reads there."""

    def __init__(self, slots: int, run_steps: int = 1, are_ready: Callable[[], bool] = lambda: False) -> None:
        """A runner with an empty cache.

        Args:
            slots: how many.
            run_steps: steps of a run of decodes; 1: no runs.
            are_ready: returns whether sampled tokens are ready when the next step's layers have been launched.
        """
        self.run_steps, self.runs = run_steps, 0
        self._are_ready = are_ready
        self.cache: dict[tuple[int, int], int] = {}
        self.last = np.full(slots, -1)
        self.seen: list[tuple[tuple[int, ...], list[int]]] = [((), [])] * slots
        self.held: list[list[tuple[int, int]]] = [[]] * slots
        """For models with state in slots: how many tokens a slot has seen, and what it holds of them; also before the
        last few of them."""

    @property
    def last_tokens(self) -> Any:
        return self.last

    def copy(self, batch: StepBatch) -> PackedBatch:
        return _BatchOnTheHost(batch)

    def forward(self, batch: PackedBatch) -> tuple[list[int], list[int]]:
        """Computes a step. Returns what the cache holds at each chunk's last token, and at each prefill row."""
        return self._forward(batch.read())

    def _forward(self, batch: StepBatch) -> tuple[list[int], list[int]]:
        queries, decodes = batch.queries, len(batch.held)
        held = batch.held < len(self.last)
        decoded = np.where(held, self.last[np.where(held, batch.held, 0)], batch.token[:decodes])
        tokens = np.concatenate([decoded, batch.token[decodes:]])
        present = np.flatnonzero(queries.rows.present).tolist()

        def place(row: int, position: int) -> tuple[int, int]:
            return int(queries.page_table[queries.rows.request[row], position // PAGE]), position % PAGE

        places = {row: place(row, int(queries.rows.position[row])) for row in present}
        assert len({*places.values()}) == len(places), "two tokens are written to one place"
        for row in present:  # the tokens of a sequence come in order
            position = int(queries.rows.position[row])
            before = self.cache[place(row, position - 1)] if position else 0
            if queries.slots is not None:
                slot = queries.slots[queries.rows.request[row]]
                if position:
                    held = [one for one in self.held[slot] if one[0] <= position]
                    assert held[-1:] == [(position, before)]
                else:
                    held = []
                # The last tokens of a call can be dropped.
                self.held[slot] = [*held, (position + 1, content(before, tokens[row]))][-1 - DROPPABLE :]
            self.cache[places[row]] = content(before, tokens[row])
        held_at = [self.cache[places[row]] if row in places else 0 for row in range(len(tokens))]
        return [held_at[row] for row in batch.last_row.tolist()], held_at[decodes:]

    def sample(
        self, batch: PackedBatch, hidden: list[int], needed: SamplingVariant, allowed: Array | None
    ) -> PackedTokens:
        return _on_the_host(self._sample(batch.read(), hidden, needed, allowed), self._are_ready())

    def _sample(
        self, batch: StepBatch, hidden: list[int], needed: SamplingVariant, allowed: Array | None
    ) -> SampledTokens:
        queries = batch.queries
        assert needed.constrained == (allowed is not None)
        words = None if allowed is None else np.asarray(allowed)[:, 0].tolist()
        sampled = np.zeros(len(batch.slot), np.int32)
        chunks = np.flatnonzero(batch.slot < len(self.last))
        assert len(chunks)
        counts = False
        for chunk in chunks:
            row = batch.last_row[chunk]
            position = int(batch.sampling.position[chunk])
            assert position == queries.rows.position[row] + 1
            if batch.drafted is not None and (offset := batch.drafted.offset[chunk]):
                # Tokens after a wrong guess are never used.
                counts &= batch.drafted.guesses[chunk, offset - 1] == sampled[chunk - 1]
                if not counts:
                    continue
            counts = True
            slot, adjustment, barred = batch.slot[chunk], 0, ()
            if (adjustments := batch.adjustments) is not None:
                barred = adjustments.biased[chunk][np.isneginf(adjustments.bias[chunk])]
                adjustment = penalty(*self.seen[slot]) if adjustments.frequency[chunk] else 0
            mask = _ALL_ALLOWED if words is None else words[chunk]
            key = tuple(batch.sampling.noise_key[chunk].tolist())
            token = next_token(hidden[chunk] ^ adjustment ^ mask, key, position)
            sampled[chunk] = token + 1 if token in barred else token
            self.last[slot] = sampled[chunk]
            self.seen[slot][1].append(int(sampled[chunk]))
        logprobs = sampled.astype(np.float32)
        distribution = (-logprobs).tolist() if needed.distribution else None
        top = _likeliest_arrays(sampled, needed.top_logprobs)
        return SampledTokens(sampled.tolist(), logprobs.tolist(), *top, distribution)

    def steps_of_run(self, shape: BatchShape, needed: SamplingVariant, *, has_adapters: bool = False) -> int:
        has_run = step_programs.has_runs(shape, len(self.last)) and sampling_variant.run_variants([needed])
        return self.run_steps if has_run else 1

    def decode_run(self, batch: PackedBatch, needed: SamplingVariant) -> PackedTokens:
        """Computes the steps of a run in sequence, and checks the writes of each."""
        return _on_the_host(self._decode_run(batch.read(), needed), self._are_ready())

    def _decode_run(self, batch: StepBatch, needed: SamplingVariant) -> SampledTokens:
        assert self.steps_of_run(batch.shape, needed) == self.run_steps > 1
        assert batch.steps is not None
        assert max(batch.steps) in range(2, self.run_steps + 1)
        self.runs += 1
        written, steps = set[tuple[int, int]](), []
        for number in range(self.run_steps):
            now = jax.tree.map(np.asarray, batch.at_step_of_run(jnp.int32(number), len(self.last)))
            rows, taking_part = now.queries.rows, np.flatnonzero(number < batch.steps)
            assert np.flatnonzero(rows.present).tolist() == taking_part.tolist()
            for row in taking_part:
                position = int(rows.position[row])
                assert position == batch.queries.rows.position[row] + number
                assert now.queries.length[row] == now.queries.start[row] + 1 == position + 1
                assert now.slot[row] == now.held[row] == batch.slot[row]
                written.add((int(now.queries.page_table[row, position // PAGE]), position % PAGE))
            if len(taking_part):
                steps.append(self._sample(now, self._forward(now)[0], needed, None))
            else:
                steps.append(steps[-1]._replace(token=[-1] * len(now.slot)))
        assert len(written) == batch.steps.sum(), "two tokens of a run are written to one place"
        return SampledTokens(*(None if parts[0] is None else [*parts] for parts in zip(*steps, strict=True)))

    def note_seen(self, slot: int, prompt: Seq[int], generated: Seq[int]) -> None:
        self.seen[slot] = tuple(prompt), [*generated]

    def take_slot(self, slot: int) -> list[tuple[int, int]]:
        return self.held[slot]

    def put_slot(self, slot: int, rows: list[tuple[int, int]]) -> None:
        self.held[slot] = rows

    def score(self, rows: list[int], first: int, tokens: np.ndarray) -> PackedTokens:
        return _on_the_host(self._score(rows, first, tokens))

    def _score(self, rows: list[int], first: int, tokens: np.ndarray) -> SampledTokens:
        assert 0 < len(tokens) <= SCORED_ROWS
        logprobs = [prompt_logprob(rows[first + index], token) for index, token in enumerate(tokens.tolist())]
        return SampledTokens(tokens.tolist(), logprobs, *_likeliest_arrays(tokens, MOST_LIKELIEST))

    def score_drawn(self, rows: list[int], first: int, sequence: Sequence, position: int, count: int) -> PackedTokens:
        tokens = np.asarray(sequence.prompt[position : position + count], np.int32)
        scored = self._score(rows, first, tokens)
        top = _likeliest_arrays(tokens, MOST_LIKELIEST)
        drawn = scored._replace(
            sampling_logprob=[-logprob for logprob in scored.logprob],
            sampling_top_tokens=top[0],
            sampling_top_logprobs=top[1],
        )
        return _on_the_host(drawn)

    def programs(self, batches: Any) -> StepPrograms:
        raise AssertionError("there is nothing to compile")

    def warm_up(self, batches: Any, compiler: Any) -> None:
        raise AssertionError("there is nothing to compile")

    def has_layers(self, shape: BatchShape) -> bool:
        return True

    def image_rows(self, images: Any) -> list[np.ndarray]:
        raise AssertionError("no request has images")

    def wait_for_programs(self) -> None:
        pass

    def close(self) -> None:
        pass

    def update_weights(self, params: Any) -> None:
        raise AssertionError("there are no weights")


def _likeliest_arrays(tokens: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the likeliest tokens in the form of a program's results."""
    number = np.arange(count)
    return tokens[:, None] + number, np.broadcast_to(-number.astype(np.float64), (len(tokens), count))


class _BatchOnTheHost(PackedBatch):
    """A batch that is not packed, which would take longer than all else here."""

    def __init__(self, batch: StepBatch) -> None:
        object.__setattr__(self, "given", batch)

    @property
    def shape(self) -> BatchShape:
        return self.read().shape

    def read(self) -> StepBatch:
        return vars(self)["given"]


class _TokensOnTheHost(PackedTokens):
    ready = False

    @property
    def is_ready(self) -> bool:
        return self.ready

    def start_copy(self) -> PackedTokens:
        return self

    def read(self) -> SampledTokens:
        packed: Any = self.packed
        return packed

    def read_tokens(self) -> list[int]:
        return self.token


def _on_the_host(sampled: SampledTokens, is_ready: bool = False) -> PackedTokens:
    given: Any = sampled
    tokens = _TokensOnTheHost(sampled.token, given)
    tokens.ready = is_ready
    return tokens


def shapes_for(
    slots: int,
    tokens: int,
    chunk: int | None = None,
    mixes: bool = True,
    drafts: int = 0,
    *,
    decodes_guesses: bool = False,
) -> BatchShapes:
    """Returns an engine's shapes, or with `chunk` the shapes of `generate`."""
    if chunk:
        mixes |= drafts > 0
        return BatchShapes.for_chunks(slots, chunk, mixes=mixes, drafts=drafts, decodes_guesses=decodes_guesses)
    return BatchShapes.for_serving(slots, tokens, drafts, decodes_guesses=decodes_guesses)


class Oracle(Drafter):
    """Guesses tokens that are right, wrong, or none of the vocabulary's, as numbers decide."""

    def __init__(self, expected: Mapping[Sequence, list[int]], numbers: random.Random) -> None:
        self._expected, self._numbers = expected, numbers

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        guesses = {}
        for sequence, most in wanted.items():
            assert not sequence.unread
            right = self._expected[sequence][len(sequence.generated) :][:most]
            right += [0] * (most - len(right))
            wrong = self._numbers.choice([1, 1, VOCABULARY, -VOCABULARY])
            first = self._numbers.choice([0, 1, 2, most, most])
            guesses[sequence] = [token if number < first else token + wrong for number, token in enumerate(right)]
        return guesses


class Schedule:
    """Requests come and are cancelled, and steps are made, in any order."""

    def __init__(
        self,
        shapes: BatchShapes,
        num_pages: int,
        keeps_prefixes: bool,
        launches_late: bool,
        snapshots: int | None,
        run_steps: int,
        drafts: int,
    ) -> None:
        slots, keeps_slots = shapes.limits.slots, snapshots is not None
        cache = SnapshotCache(snapshots) if snapshots else None
        keeps_prefixes = keeps_prefixes and (cache is not None or not keeps_slots)
        self.pool = PagePool(num_pages, keeps_prefixes=keeps_prefixes, snapshots=cache)
        self.scheduler = Scheduler(self.pool, shapes.limits)
        launcher = LateLauncher() if launches_late else Launcher()
        table = SlotTable(slots, num_pages, named_in_queries=keeps_slots, drafts=drafts)
        readiness = random.Random(num_pages)
        self.runner = RememberingRunner(slots, run_steps, lambda: readiness.random() < 0.5)
        self.expected: dict[Sequence, list[int]] = {}
        drafting, numbers = None, random.Random(num_pages)
        if drafts:
            lengths: DraftLengths = lambda sequences, acceptance: numbers.randint(0, drafts)  # noqa: E731
            drafting = Drafting(Oracle(self.expected, numbers), drafts, VOCABULARY, lengths)
        self.loop = StepLoop(self.scheduler, shapes, table, self.runner, launcher, drafting)
        if launches_late:
            self.loop.samples_for_a_thread, self.loop.late_steps = 1 + num_pages % 2, 1
        start: Any = TokensSoFar
        self.constraint = CompiledConstraint(RememberingCompiler(), start)
        self.sequences: list[Sequence] = []
        self.read: Counter[Sequence] = Counter()

    def submit(self, first_pages: list[int], more_tokens: int, max_tokens: int, n: int, client: str | None) -> None:
        # Some requests begin with the same pages, some have equal pages after different ones.
        prompt = tuple(token for page in first_pages for token in [page] * PAGE) + tuple(range(more_tokens))
        if len(prompt) + max_tokens - 1 > self.pool.num_pages * PAGE:
            return
        has_minimum = more_tokens % 3 == 0
        # A constraint gives the tokens of a prompt no sampling logprobs.
        is_constrained = max_tokens % 3 == 0 and not has_minimum and more_tokens != 5
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=more_tokens << 40 | max_tokens, n=n)
        if self.runner.run_steps == 1 or more_tokens % 3 == 2:  # most of the others can be in runs
            params = dataclasses.replace(
                params,
                frequency_penalty=0.5 if more_tokens % 2 else 0.0,
                min_tokens=max_tokens // 2 if has_minimum else 0,
                sampling_logprobs=more_tokens % 4 == 1,
                top_logprobs=max_tokens % 3,
                constraint=Constraint.choice(["x"]) if is_constrained else None,
            )
        is_resumed = more_tokens % 4 == 2
        params = dataclasses.replace(params, prompt_logprobs=more_tokens in (4, 5))
        context = RequestContext(
            end_tokens=frozenset([END]),
            prefix_root=prefix_root(client),
            client=client,
            constraint=None if params.constraint is None else self.constraint,
        )
        together = samples(prompt, params, context)
        if is_resumed:  # another engine has sampled some tokens of each sample, or all of them
            known = [expected_tokens(one)[: max_tokens // 2 + index] for index, one in enumerate(together)]
            together = samples(prompt, params, context, known)
        for sequence in together:
            assert pages_needed(sequence) <= self.pool.num_pages
            self.expected[sequence], self.read[sequence] = expected_tokens(sequence), sequence.given
            if sequence.finish_reason is None:
                self.loop.submit(sequence)
            self.sequences.append(sequence)

    def cancel(self, index: int) -> None:
        if self.sequences:
            self.scheduler.cancel(self.sequences[index % len(self.sequences)])

    def step(self, steps: int) -> None:
        for _ in range(steps):
            for sequence, token in self.loop.step():
                assert token.token == self.expected[sequence][self.read[sequence]]
                self.read[sequence] += 1

    def forget(self) -> None:
        if self.loop.is_idle:
            self.pool.forget_prefixes()

    def drop(self, index: int) -> None:
        if snapshots := self.pool.snapshots:
            del snapshots._kept[[*snapshots._kept][index % len(snapshots)]]

    def check_pages(self) -> None:
        """Every page is accounted for."""
        references = Counter(page for sequence in self.scheduler.running for page in sequence.page_ids)
        assert self.pool.in_use == len(references)
        assert all(self.pool._references[page] == references[page] for page in range(self.pool.num_pages))
        assert len({*self.pool._free, *self.pool._kept, *references}) == self.pool.num_pages
        assert not any(sequence.page_ids for sequence in self.scheduler.waiting)

    def end(self) -> None:
        """Every sequence is served as if it were alone, and no page stays in use."""
        for _ in range(10_000):
            if self.loop.is_idle:
                break
            self.step(1)
        self.check_pages()
        assert self.pool.in_use == 0
        for sequence, expected in self.expected.items():
            assert sequence.finish_reason is not None
            assert sequence.finish_reason == "cancelled" or sequence.generated == expected
            new, params, output = sequence.generated[sequence.given :], sequence.params, sequence.output
            assert output.logprobs == new
            assert output.sampling_logprobs == [-token for token in new if params.sampling_logprobs]
            assert output.top_logprobs == [likeliest(token, params.top_logprobs) for token in new]
            scored = expected_prompt_logprobs(sequence) if params.prompt_logprobs else []
            assert output.prompt_logprobs == scored[: len(output.prompt_logprobs)]
            assert sequence.finish_reason == "cancelled" or len(output.prompt_logprobs) == len(scored)
            drawn = [(-logprob, top) for logprob, top in output.prompt_logprobs if params.sampling_logprobs]
            assert output.prompt_sampling_logprobs == drawn


def play(draw: random.Random, actions: int) -> int:
    """Plays a random schedule of a number of actions, and returns how many runs of steps it had."""
    chunk, drafts = draw.choice([None, None, 1, 3, 8]), draw.choice([0, 0, 0, 1, 7])
    snapshots = draw.choice([None, None, 0, 1, 3, 20])
    are_decodes, sizes = snapshots is None and draw.random() < 0.7, (draw.randint(1, 4), draw.randint(1, 24))
    shapes = shapes_for(*sizes, chunk, draw.random() < 0.5, drafts, decodes_guesses=are_decodes)
    sizes = draw.randint(6, 14), draw.random() < 0.5, draw.random() < 0.5
    schedule = Schedule(shapes, *sizes, snapshots, draw.choice([1, 2, 4]), drafts)
    for _ in range(actions):
        match draw.choice(["submit", "submit", "step", "step", "cancel", "forget", "drop"]):
            case "submit":
                first_pages = draw.choices([0, 1], k=draw.randint(0, 4))
                lengths, n = (draw.randint(1, 6), draw.randint(1, 8)), draw.choice([1, 1, 1, 3])
                schedule.submit(first_pages, *lengths, n, draw.choice([None, None, "a", "b"]))
            case "step":
                schedule.step(draw.randint(1, 6))
            case "cancel":
                schedule.cancel(draw.randint(0, 100))
            case "forget":
                schedule.forget()
            case "drop":
                schedule.drop(draw.randint(0, 100))
        schedule.check_pages()
    schedule.end()
    return schedule.runner.runs


class Schedules(RuleBasedStateMachine):
    """The same schedules for Hypothesis, which finds the shortest one that fails and takes four times as long."""

    @initialize(
        slots=st.integers(1, 4),
        tokens=st.integers(1, 24),
        chunk=st.sampled_from([None, None, 1, 3, 8]),
        mixes=st.booleans(),
        num_pages=st.integers(6, 14),
        keeps_prefixes=st.booleans(),
        launches_late=st.booleans(),
        snapshots=st.sampled_from([None, None, 0, 1, 3, 20]),
        run_steps=st.sampled_from([1, 2, 4]),
        drafts=st.sampled_from([0, 0, 1, 7]),
        decodes_guesses=st.booleans(),
    )
    def begin(
        self,
        slots: int,
        tokens: int,
        chunk: int | None,
        mixes: bool,
        num_pages: int,
        keeps_prefixes: bool,
        launches_late: bool,
        snapshots: int | None,
        run_steps: int,
        drafts: int,
        decodes_guesses: bool,
    ):
        has_slots = snapshots is not None
        decodes_guesses = decodes_guesses and not has_slots
        shapes = shapes_for(slots, tokens, chunk, mixes, drafts, decodes_guesses=decodes_guesses)
        self.schedule = Schedule(shapes, num_pages, keeps_prefixes, launches_late, snapshots, run_steps, drafts)

    @rule(
        first_pages=st.lists(st.sampled_from([0, 1]), max_size=4),
        more_tokens=st.integers(1, 6),
        max_tokens=st.integers(1, 8),
        n=st.sampled_from([1, 1, 1, 3]),
        client=st.sampled_from([None, None, "a", "b"]),
    )
    def submit(self, first_pages: list[int], more_tokens: int, max_tokens: int, n: int, client: str | None) -> None:
        self.schedule.submit(first_pages, more_tokens, max_tokens, n, client)

    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        self.schedule.cancel(index)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        self.schedule.step(steps)

    @rule()
    def forget(self) -> None:
        self.schedule.forget()

    @rule(index=st.integers(0, 100))
    def drop(self, index: int) -> None:
        self.schedule.drop(index)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.check_pages()

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.end()


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """A context with pages of few tokens, and shapes of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (page_pool, scheduler):
            patch.setattr(module, "KV_BLOCK", PAGE)
        for module in (batch, scheduler, kv_pages):
            patch.setattr(module, "QUERY_UNIT", 2)
        patch.setattr(batch, "_MIN_ROWS", 8)
        patch.setattr(batch, "_MIN_DRAFTED_ROWS", 4)
        patch.setattr(prompt_results, "SCORED_ROWS", SCORED_ROWS)
        yield


def shrink(examples: int) -> None:
    """Looks for the shortest schedule that breaks a promise among a number of schedules."""
    with small_pages():
        run_state_machine_as_test(
            Schedules,
            settings=settings(
                max_examples=examples,
                stateful_step_count=10,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


def search(seeds: range, actions: int = 8) -> int:
    """Plays a schedule for each seed, and returns how many runs of steps they had.

    Raises:
        AssertionError: one breaks a promise; its note says which.
    """
    runs = 0
    with small_pages():
        for seed in seeds:
            try:
                runs += play(random.Random(seed), actions)
            except Exception as failure:
                failure.add_note(f"in the schedule of {actions} actions with seed {seed}")
                raise
    return runs


if __name__ == "__main__":
    print(search(range(*map(int, sys.argv[1:]))))
