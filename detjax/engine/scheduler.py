"""Continuous batching: which tokens of which samples a step computes. No bit of a result depends on it."""

import dataclasses
from collections import deque

from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.engine.pages import PagePool
from detjax.engine.sample import Sample


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a sample that a step computes, from position `start` on."""

    sample: Sample
    start: int
    count: int
    completes: bool
    """Whether they are all that there are, so that the token behind them is sampled."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What the device computes at once."""

    decodes: tuple[Piece, ...]
    """Samples whose last token, which the device holds, is computed and followed by another."""
    prefills: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return *self.decodes, *self.prefills


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step has room for.

    Attributes:
        samples: that have a slot at the same time.
        tokens: of a step.
        prefills: samples of a step of which more than their last token is computed.
        rows: of prefills, each of which takes `rows_taken`.
    """

    samples: int
    tokens: int
    prefills: int
    rows: int


class Scheduler:
    """Samples in the order of their arrival: those that have a slot, and those that wait for one.

    Those that decode come before those with more tokens to compute, the earliest first. Where pages run out, the latest
    one that has a slot gives its own back, waits again, and is computed anew.
    """

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.preemptions = 0
        self._slots = list(range(limits.samples - 1, -1, -1))
        self._arrivals: dict[Sample, int] = {}
        self._arrived = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, sample: Sample) -> None:
        """Puts a sample behind all others. It must fit into the pool when it is alone there."""
        assert pages_of(sample) <= self.pool.pages
        self._arrivals[sample] = self._arrived
        self._arrived += 1
        self.waiting.append(sample)

    def cancel(self, sample: Sample) -> None:
        """Ends a sample, wherever it is; its tokens that are on their way are not read."""
        if sample.finish_reason is None:
            sample.finish_reason = "cancelled"
            self.drop(sample)

    def drop(self, sample: Sample) -> None:
        """Takes back all that an ended sample has."""
        if sample.slot is None:
            self.waiting.remove(sample)
        else:
            self._evict(sample)
        del self._arrivals[sample]

    def plan(self) -> Step:
        """The next step. One without pieces: all that there is to do depends on tokens that nobody has read.

        What has been sampled has to be read before the next but one is planned: a sample whose pages are taken away
        must know all its tokens when it is computed anew.
        """
        pieces, before = self._of_running(), self.preemptions
        for sample in sorted(pieces, key=self._arrivals.__getitem__):
            while sample in pieces and not self._has_pages(sample, pieces[sample]):
                victim = self.running[-1]
                pieces.pop(victim, None)
                self._preempt(victim)
        if self.preemptions == before:
            self._admit(pieces)
        decodes = [piece for piece in pieces.values() if piece.sample.is_held]
        prefills = [piece for piece in pieces.values() if not piece.sample.is_held]
        return Step(tuple(decodes), tuple(prefills))

    def given(self, step: Step) -> None:
        """The device has been given the step: what it computes is in the cache for all later ones."""
        for piece in step.pieces:
            piece.sample.computed += piece.count
            if piece.completes:
                piece.sample.unread += 1
                piece.sample.is_held = True
            self._name_pages(piece.sample)

    def read(self, sample: Sample) -> None:
        """A sample has got the token that it had been waiting for."""
        sample.unread -= 1
        if sample.finish_reason is None:
            self._name_pages(sample)
        else:
            self.drop(sample)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _of_running(self) -> "_Pieces":
        going = [sample for sample in self.running if not sample.has_all]
        pieces = _Pieces(self.limits)
        for sample in (*(s for s in going if s.is_held), *(s for s in going if not s.is_held)):
            pieces.add(sample)
        return pieces

    def _admit(self, pieces: "_Pieces") -> None:
        """Gives slots to samples that wait, as long as there are slots, pages and room in the step."""
        for sample in tuple(self.waiting):
            if not self._slots:
                return
            if self._waits_for_leader(sample):
                continue
            # At least one token is computed: the next one is sampled from what comes of it.
            known = sample.digests()[: (len(sample.tokens) - 1) // KV_BLOCK] if self._shares(sample) else []
            sample.pages = self.pool.share(known)
            sample.named = len(sample.pages)
            sample.computed = sample.named * KV_BLOCK
            missing = -(-len(sample.tokens) // KV_BLOCK) - len(sample.pages)
            if missing <= self.pool.available:
                pieces.add(sample)
            if sample not in pieces:
                self._give_back(sample)
                return
            self._has_pages(sample, pieces[sample])
            sample.slot = self._slots.pop()
            self.waiting.remove(sample)
            self.running.append(sample)
            self.running.sort(key=self._arrivals.__getitem__)

    def _shares(self, sample: Sample) -> bool:
        """Logprobs of a prompt need all of its tokens computed."""
        return self.pool.keeps_prefixes and not sample.params.prompt_logprobs

    def _waits_for_leader(self, sample: Sample) -> bool:
        leader = sample.leader
        return (
            self._shares(sample)
            and leader is not None
            and leader.finish_reason is None
            and leader.computed < len(leader.prompt)
        )

    # --- pages --------------------------------------------------------------------------------------------------------

    def _has_pages(self, sample: Sample, piece: Piece) -> bool:
        """Takes the pages that a piece writes to, as far as there are any."""
        while len(sample.pages) * KV_BLOCK < piece.start + piece.count:
            page = self.pool.take()
            if page is None:
                return False
            sample.pages.append(page)
        return True

    def _name_pages(self, sample: Sample) -> None:
        full = min(sample.computed, len(sample.tokens)) // KV_BLOCK
        if self.pool.keeps_prefixes and sample.slot is not None and full > sample.named:
            for page, digest in zip(sample.pages[sample.named : full], sample.digests()[sample.named :], strict=False):
                self.pool.name(page, digest)
            sample.named = full

    def _preempt(self, sample: Sample) -> None:
        self._evict(sample)
        self.preemptions += 1
        ahead = (index for index, other in enumerate(self.waiting) if self._is_behind(other, sample))
        self.waiting.insert(next(ahead, len(self.waiting)), sample)

    def _is_behind(self, sample: Sample, other: Sample) -> bool:
        return self._arrivals[sample] > self._arrivals[other]

    def _evict(self, sample: Sample) -> None:
        assert sample.slot is not None
        self.running.remove(sample)
        self._slots.append(sample.slot)
        sample.slot, sample.is_held = None, False
        self._give_back(sample)

    def _give_back(self, sample: Sample) -> None:
        self.pool.release(sample.pages)
        sample.pages, sample.computed = [], 0


class _Pieces(dict[Sample, Piece]):
    """Those of a step, as long as it has room."""

    def __init__(self, limits: Limits) -> None:
        self._tokens, self._rows, self._prefills = limits.tokens, limits.rows, limits.prefills

    def add(self, sample: Sample) -> None:
        """The next piece of the sample, as much of it as there is room for."""
        left = sample.length - sample.computed
        count = min(left, self._tokens)
        if not sample.is_held:
            count = min(count, self._rows) if self._prefills else 0
            self._rows -= rows_taken(count)
            self._prefills -= 1
        self._tokens -= count
        if count > 0:
            self[sample] = Piece(sample, sample.computed, count, completes=count == left)


def rows_taken(tokens: int) -> int:
    """Rows of a step that so many tokens of a sample take, since the next one begins at a multiple of `QUERY_UNIT`."""
    return -(-tokens // QUERY_UNIT) * QUERY_UNIT


def pages_of(sample: Sample) -> int:
    """The most pages that a sample needs; its last token is not computed."""
    return -(-max(len(sample.prompt) + sample.params.max_tokens - 1, 1) // KV_BLOCK)
