"""Random schedules for the engine, over a device that remembers what was written where.

To search for more: python tests/engine/schedules.py [FIRST] BEHIND_LAST, which are seeds.
"""

import contextlib
import functools
import random
import sys
from collections import Counter
from collections.abc import Iterator

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

from detjax import SamplingParams
from detjax.engine import inputs, pages, scheduler
from detjax.engine.core import Core
from detjax.engine.device import Found
from detjax.engine.inputs import Inputs, Shapes, Slots
from detjax.engine.pages import PagePool
from detjax.engine.sample import Sample
from detjax.engine.scheduler import Scheduler, pages_of

VOCABULARY, END = 50, 7
PAGE = 4
"""Tokens; so few that sequences have many."""


def seen(before: int, token: int) -> int:
    """What the cache holds of a token: it depends on all those before it."""
    return hash((before, int(token)))


def following(state: int, seed: int, index: int) -> int:
    """The model: a token that depends on all those before it, and on the request."""
    return hash((state, seed, index)) % VOCABULARY


def alone(sample: Sample) -> list[int]:
    """What the sample has to be."""
    state, tokens = functools.reduce(seen, sample.prompt, 0), []
    while len(tokens) < sample.params.max_tokens and tokens[-1:] != [END]:
        tokens.append(following(state, sample.params.seed, sample.index))
        state = seen(state, tokens[-1])
    return tokens


class Remembering:
    """A device whose cache holds what there has been, and which samples from what it finds there."""

    def __init__(self, slots: int) -> None:
        self.cache: dict[tuple[int, int], int] = {}
        self.last = np.full(slots, -1)

    def compute(self, given: Inputs, *, filtered: bool, with_top: bool) -> tuple[Found, None]:
        decodes = len(given.held)
        tokens = np.concatenate([self.last[given.held], given.token[decodes:]])
        own = np.flatnonzero(given.present).tolist()

        def place(n: int, position: int) -> tuple[int, int]:
            return int(given.page_table[given.request[n], position // PAGE]), position % PAGE

        places = {n: place(n, int(given.position[n])) for n in own}
        assert len({*places.values()}) == len(places), "two tokens are written to one place"
        for n in own:  # of a request they are in order
            position = int(given.position[n])
            before = self.cache[place(n, position - 1)] if position else 0
            self.cache[places[n]] = seen(before, tokens[n])
        found = np.zeros(len(given.slot), np.int32)
        for row in np.flatnonzero(given.slot < len(self.last)):
            n = given.last_row[row]
            assert given.choice.position[row] == given.position[n] + 1
            seed = int(given.choice.seed[row, 0]) << 32 | int(given.choice.seed[row, 1])
            found[row] = following(self.cache[places[n]], seed, int(given.choice.sample_index[row]))
            self.last[given.slot[row]] = found[row]
        none = np.zeros((len(found), 0))
        return _Here(found, found.astype(np.float32), none, none), None

    def scores(self, rows: None, first: int, tokens: np.ndarray) -> Found:
        raise AssertionError("nobody asks for the logprobs of a prompt")


class _Here(Found):
    def on_its_way(self) -> Found:
        return self

    def read(self) -> Found:
        return self


class Schedule:
    """Requests come, are cancelled, and steps are made, in any order."""

    def __init__(self, slots: int, tokens: int, count: int, keeps: bool) -> None:
        shapes = Shapes(slots, tokens)
        self.pool = PagePool(count, keeps_prefixes=keeps)
        self.scheduler = Scheduler(self.pool, shapes.limits)
        self.core = Core(self.scheduler, shapes, Slots(slots, count), Remembering(slots))
        self.samples: list[Sample] = []
        self.expected: dict[Sample, list[int]] = {}
        self.found: Counter[Sample] = Counter()

    def submit(self, begun: list[int], own: int, more: int, n: int) -> None:
        # Pages that others have too, behind the same ones or other ones.
        prompt = tuple(token for page in begun for token in [page] * PAGE) + tuple(range(own))
        if len(prompt) + more - 1 > self.pool.pages * PAGE:
            return
        params = SamplingParams(max_tokens=more, seed=own << 40 | more, n=n)
        samples: list[Sample] = []
        for index in range(n):
            samples.append(Sample(prompt, index, params, frozenset([END]), None, samples[0] if samples else None))
            assert pages_of(samples[-1]) <= self.pool.pages
            self.expected[samples[-1]] = alone(samples[-1])
            self.scheduler.submit(samples[-1])
        self.samples += samples

    def cancel(self, which: int) -> None:
        if self.samples:
            self.scheduler.cancel(self.samples[which % len(self.samples)])

    def step(self, steps: int) -> None:
        for _ in range(steps):
            for sample, token in self.core.step():
                assert token.token == self.expected[sample][self.found[sample]]
                self.found[sample] += 1

    def forget(self) -> None:
        if self.core.is_idle:
            self.pool.forget_prefixes()

    def check_pages(self) -> None:
        """Every page is accounted for."""
        held = Counter(page for sample in self.scheduler.running for page in sample.pages)
        assert self.pool.in_use == len(held)
        assert all(self.pool._references[page] == held[page] for page in range(self.pool.pages))
        assert len({*self.pool._free, *self.pool._kept, *held}) == self.pool.pages
        assert not any(sample.pages for sample in self.scheduler.waiting)

    def end(self) -> None:
        """All that came have been served as if alone, and nothing is left."""
        for _ in range(10_000):
            if self.core.is_idle:
                break
            self.step(1)
        self.check_pages()
        assert self.pool.in_use == 0
        for sample, expected in self.expected.items():
            assert sample.finish_reason is not None
            assert sample.finish_reason == "cancelled" or sample.generated == expected


def play(draw: random.Random, actions: int) -> None:
    """A random schedule of so many actions."""
    schedule = Schedule(draw.randint(1, 4), draw.randint(1, 24), draw.randint(6, 14), draw.random() < 0.5)
    for _ in range(actions):
        match draw.choice(["submit", "submit", "step", "step", "cancel", "forget"]):
            case "submit":
                begun = draw.choices([0, 1], k=draw.randint(0, 4))
                schedule.submit(begun, draw.randint(1, 6), draw.randint(1, 8), draw.choice([1, 1, 1, 3]))
            case "step":
                schedule.step(draw.randint(1, 6))
            case "cancel":
                schedule.cancel(draw.randint(0, 100))
            case "forget":
                schedule.forget()
        schedule.check_pages()
    schedule.end()


class Schedules(RuleBasedStateMachine):
    """The same for Hypothesis, which finds the shortest schedule that fails, at four times the time for each."""

    @initialize(slots=st.integers(1, 4), tokens=st.integers(1, 24), count=st.integers(6, 14), keeps=st.booleans())
    def begin(self, slots: int, tokens: int, count: int, keeps: bool) -> None:
        self.schedule = Schedule(slots, tokens, count, keeps)

    @rule(
        begun=st.lists(st.sampled_from([0, 1]), max_size=4),
        own=st.integers(1, 6),
        more=st.integers(1, 8),
        n=st.sampled_from([1, 1, 1, 3]),
    )
    def submit(self, begun: list[int], own: int, more: int, n: int) -> None:
        self.schedule.submit(begun, own, more, n)

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.schedule.cancel(which)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        self.schedule.step(steps)

    @rule()
    def forget(self) -> None:
        self.schedule.forget()

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.check_pages()

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.end()


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """Pages of few tokens, and shapes of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pages, scheduler):
            patch.setattr(module, "KV_BLOCK", PAGE)
        for module in (inputs, scheduler):
            patch.setattr(module, "QUERY_UNIT", 2)
        patch.setattr(inputs, "_LEAST_ROWS", 8)
        yield


def shrink(examples: int) -> None:
    """Looks for a schedule that breaks a promise among so many, and for the shortest one."""
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


def search(seeds: range, actions: int = 8) -> None:
    """Plays a schedule for each seed.

    Raises:
        AssertionError: one breaks a promise; its note says which.
    """
    with small_pages():
        for seed in seeds:
            try:
                play(random.Random(seed), actions)
            except Exception as failure:
                failure.add_note(f"in the schedule of {actions} actions with seed {seed}")
                raise


if __name__ == "__main__":
    search(range(*map(int, sys.argv[1:])))
