"""Continuous batching: chooses the tokens that each step computes. It changes no bit of any result."""

import bisect
import dataclasses
import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import UInt32

from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.engine.adapter_slots import AdapterSlots
from detjax.engine.page_pool import Digest, PagePool
from detjax.engine.sequence import Sequence
from detjax.engine.snapshots import MAX_PER_STEP, SlotCopies
from detjax.engine.waiting_queue import WaitingQueue
from detjax.operands.adapted_weight import NO_ADAPTER
from detjax.operands.numerics import ceil_div, round_up

_TURN = operator.attrgetter("turn")
_ADAPTER_SLOT = operator.attrgetter("adapter_slot")


@dataclasses.dataclass(slots=True)  # frozen ones would take three times as long to make
class ScheduledChunk:
    """Consecutive tokens of a sequence that a step computes.

    Attributes:
        sequence: the sequence.
        start: position of the first token.
        count: number of tokens.
        completes: whether the chunk ends with the sequence's last token, so that the step samples the next one.
        is_decode: whether each token is a decode, in a row of its own: the chunk is a single token, or has guesses that
            are decodes; see `StepLimits`. Other chunks are prefills, whose rows begin at multiples of `QUERY_UNIT`.
        later: further tokens that a run computes after the chunk, each sampled by the previous step of the run.
        drafted: the number of tokens at the chunk's end that are guesses. The step samples a token after the token
            before them, and after each of them; see `detjax.engine.drafts`.
        drafts: these guesses.
        masks: the tokens that may be chosen after each guess; empty: any.
    """

    sequence: Sequence
    start: int
    count: int
    completes: bool
    is_decode: bool
    later: int = 0
    drafted: int = 0
    drafts: Seq[int] = ()
    masks: Seq[UInt32[np.ndarray, "W"]] = ()

    @property
    def sampled(self) -> int:
        """Rows that the step samples from."""
        return 1 + self.drafted

    @property
    def tokens(self) -> Seq[int]:
        """The chunk's tokens, which the host must know."""
        known = self.sequence.tokens[self.start : self.start + self.count - self.drafted]
        return (*known, *self.drafts) if self.drafted else known

    def shorten(self, drafted: int) -> None:
        """Drops all guesses but the first ones."""
        self.count -= self.drafted - drafted
        self.drafted = drafted
        self.is_decode |= not drafted

    @property
    def end(self) -> int:
        """Position after the last token that the step or run computes."""
        return self.start + self.count + self.later

    @property
    def adapter_slot(self) -> int:
        """The slot of the sequence's adapter, or `NO_ADAPTER`."""
        slot = self.sequence.adapter_slot
        return NO_ADAPTER if slot is None else slot


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """The chunks that the device computes in one step.

    Attributes:
        decodes: chunks whose tokens are decodes.
        prefills: all other chunks.
    """

    decodes: tuple[ScheduledChunk, ...] = ()
    prefills: tuple[ScheduledChunk, ...] = ()

    @property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        """All chunks, decodes first."""
        return *self.decodes, *self.prefills

    @property
    def is_run(self) -> bool:
        """True if the device repeats the step with the tokens that it samples."""
        return any(chunk.later for chunk in self.decodes)

    @property
    def has_adapters(self) -> bool:
        """True if some sequence has an adapter."""
        return any(chunk.sequence.adapter_slot is not None for chunk in self.chunks)

    @property
    def verifies(self) -> bool:
        """True if guessed tokens are among the step's."""
        return any(chunk.drafted for chunk in self.chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Maximum sizes of a step.

    Attributes:
        slots: sequences that are computed at the same time.
        tokens: tokens of a step.
        prefills: prefill chunks of a step.
        rows: rows of a step's prefill chunks; see `padded_rows`.
        prefill_chunk: tokens of a chunk.
        mixes: whether a step may have both prefills and decodes. Otherwise all prefills come before the next decode.
        drafts: guessed tokens of a step.
        decodes_guesses: whether guesses are decodes: a sequence with guesses is as many requests of one query each.
            Otherwise it is a prefill. Layers with state in slots take no two requests with the same slot.
    """

    slots: int
    tokens: int
    prefills: int
    rows: int
    prefill_chunk: int
    mixes: bool = True
    drafts: int = 0
    decodes_guesses: bool = False


class Scheduler:
    """Plans steps for running sequences, which have a slot, and admits waiting ones.

    A step takes decoding sequences before sequences with more tokens to compute, each in the order in which they first
    got a slot. When pages run out, the latest running sequence is preempted: it returns its pages, waits again, and is
    recomputed later.
    """

    def __init__(self, pool: PagePool, limits: StepLimits, adapters: AdapterSlots | None = None) -> None:
        self.pool = pool
        self.adapters = adapters or AdapterSlots(0)
        self.limits = limits
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._slots = list(range(limits.slots - 1, -1, -1))

    @property
    def is_idle(self) -> bool:
        """True if no sequence is running or waiting."""
        return not self.waiting and not self.running

    @property
    def can_plan_ahead(self) -> bool:
        """True if a step can be planned while tokens of several steps are unread.

        Recomputing a preempted sequence requires that all its tokens were read.
        """
        return not self.waiting.has_preempted

    def submit(self, sequence: Sequence) -> None:
        """Appends a sequence to the waiting ones. The pool must be able to hold the sequence when it is alone."""
        assert pages_needed(sequence) <= self.pool.num_pages
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence, reason: str = "cancelled") -> None:
        """Ends a sequence early. Tokens that steps in flight sample for it are discarded."""
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
            self.release(sequence)

    def preempt_all(self) -> None:
        """Takes back the pages and slots of all running sequences. All their tokens must have been read."""
        for sequence in list(self.running):
            assert not sequence.unread
            self._evict(sequence)
            self.waiting.put_back(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the slot and the pages of an ended sequence."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._evict(sequence)

    def plan(self, drafts: Mapping[Sequence, int] | None = None) -> ScheduledStep:
        """Returns the next step. It has no chunks if all remaining work depends on unread tokens.

        All steps except the last planned one must have been read, unless `can_plan_ahead`.

        Args:
            drafts: the number of tokens to guess for some sequences, whose tokens have all been read. The step has room
                for at most this many.
        """
        chunks, preemptions = self._chunks_of_running(drafts or {}), self.preemptions
        for sequence in sorted(chunks, key=_TURN):
            while sequence in chunks and not self._has_pages(chunks[sequence]):
                if chunks[sequence].drafted:  # rather guess nothing than preempt a sequence
                    chunks[sequence].shorten(0)
                    continue
                victim = self.running[-1]
                chunks.pop(victim, None)
                self._evict(victim)
                self.preemptions += 1
                self.waiting.put_back(victim)
        if self.preemptions == preemptions:
            self._admit(chunks)
        decodes = tuple(chunk for chunk in chunks.values() if chunk.is_decode)
        if self.adapters.count:  # blocks of rows have fewer adapters if rows with the same one are neighbours
            decodes = tuple(sorted(decodes, key=_ADAPTER_SLOT))
        prefills = tuple(chunk for chunk in chunks.values() if not chunk.is_decode)
        if prefills and not self.limits.mixes:
            decodes = ()
        return ScheduledStep(decodes, prefills)

    def extend_to_run(self, step: ScheduledStep, most: int) -> None:
        """Turns a step from `plan` into a run, in which each decode takes up to `most` steps.

        It stays a single step if sequences wait, because they would wait for the whole run; if it prefills, or decodes
        tokens that the device does not hold; or if the run needs more pages than are available without preemption.
        """
        if self.waiting or step.prefills or not all(chunk.sequence.is_held for chunk in step.decodes):
            return
        for chunk in step.decodes:
            chunk.later = min(most, chunk.sequence.missing) - 1
        needed = sum(ceil_div(chunk.end, KV_BLOCK) - len(chunk.sequence.page_ids) for chunk in step.decodes)
        if needed <= self.pool.available:
            taken = [self._has_pages(chunk) for chunk in step.decodes]
            assert all(taken)
            return
        for chunk in step.decodes:
            chunk.later = 0

    def mark_submitted(self, step: ScheduledStep) -> SlotCopies:
        """Records that the step was launched: all later steps find its tokens in the cache.

        Returns:
            Copies to make before and after the step, for models with state in slots.
        """
        copies = SlotCopies([], [])
        for chunk in step.chunks:
            sequence = chunk.sequence
            self._restore(sequence, copies)
            sequence.computed = chunk.end
            if chunk.completes:
                sequence.unread += chunk.sampled + chunk.later
                sequence.is_held = True
            self._name_pages(sequence)
            self._take_snapshot(sequence, copies)
        return copies

    def accept_drafts(self, chunk: ScheduledChunk, accepted: int) -> None:
        """Records how many guesses of a chunk were right, before its tokens are accepted.

        The cache does not have the tokens of the other guesses. Their rows lie after the sequence's end, and are
        overwritten.
        """
        wrong = chunk.drafted - accepted
        chunk.sequence.unread -= wrong
        if chunk.sequence.slot is not None:  # otherwise it was preempted, and has nothing in the cache
            chunk.sequence.computed -= wrong

    def accept_tokens(self, sequence: Sequence, count: int = 1) -> None:
        """Records that sampled tokens were read and appended to their sequence."""
        sequence.unread -= count
        if sequence.finish_reason is None:
            self._name_pages(sequence)
        else:
            self.release(sequence)

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _chunks_of_running(self, drafts: Mapping[Sequence, int]) -> "_StepChunks":
        unfinished = [sequence for sequence in self.running if not sequence.has_all]
        chunks = _StepChunks(self.limits)
        for is_held in (True, False):
            for sequence in unfinished:
                if sequence.is_held == is_held:
                    chunks.add(sequence, drafts.get(sequence, 0))
        return chunks

    def _admit(self, chunks: "_StepChunks") -> None:
        """Gives slots to waiting sequences while there are slots, pages and room in the step."""
        restored = sum(sequence.restored is not None for sequence in chunks)
        while self._slots and (sequence := self.waiting.first(self._is_ready)) is not None:
            # The last token is always computed, because the next one is sampled from its hidden state.
            full_pages = (len(sequence.tokens) - 1) // KV_BLOCK
            prefix = sequence.digests()[:full_pages] if self._uses_prefix_cache(sequence) else []
            sequence.page_ids = self.pool.share(self._with_snapshot(sequence, prefix))
            sequence.named_pages = len(sequence.page_ids)
            sequence.computed = sequence.named_pages * KV_BLOCK
            missing = ceil_div(len(sequence.tokens), KV_BLOCK) - len(sequence.page_ids)
            has_room = self.adapters.has_room_for(sequence.context.adapter)
            if has_room and missing <= self.pool.available and (sequence.restored is None or restored < MAX_PER_STEP):
                chunks.add(sequence)
            if sequence not in chunks:
                self._return_pages(sequence)
                return
            self._has_pages(chunks[sequence])
            restored += sequence.restored is not None
            if sequence.turn is None:
                cached = min(sequence.computed, len(sequence.prompt))
                sequence.cached_tokens = cached if sequence.leader is None else sequence.leader.cached_tokens
            sequence.slot = self._slots.pop()
            if sequence.context.adapter is not None:
                sequence.adapter_slot = self.adapters.take(sequence.context.adapter)
            self.waiting.take(sequence)
            bisect.insort(self.running, sequence, key=_TURN)

    def most_cached_tokens(self, sequence: Sequence) -> int:
        """Returns the number of tokens of a waiting sequence that it would find in the cache now, at most."""
        return self.pool.known(sequence.digests()) * KV_BLOCK if self._uses_prefix_cache(sequence) else 0

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        # Logprobs of a prompt, and a mean, need the hidden states of all its tokens.
        return self.pool.keeps_prefixes and not sequence.reads_all_rows

    def _is_ready(self, sequence: Sequence) -> bool:
        """Returns False while the sequence waits for prompt pages that its leader computes."""
        leader = sequence.leader
        return (
            leader is None
            or leader.finish_reason is not None
            or leader.computed >= len(leader.prompt)
            or not self._uses_prefix_cache(sequence)
        )

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _with_snapshot(self, sequence: Sequence, prefix: list[Digest]) -> list[Digest]:
        """Returns the part of a prefix that the sequence can resume from, and plans its snapshots.

        It takes one at the end of its prompt, for requests that continue it, and one where it diverges from the pages
        of another sequence, since a third is likely to diverge there too. Snapshots that save few tokens are skipped.
        """
        snapshots = self.pool.snapshots
        if snapshots is None:
            return prefix
        known = self.pool.known(prefix)
        pages, sequence.restored = snapshots.newest(prefix[:known])
        ends = {known, len(sequence.prompt) // KV_BLOCK} if self._uses_prefix_cache(sequence) else set()
        digests = sequence.digests()
        sequence.snapshot_ends = [
            end * KV_BLOCK
            for end in sorted(ends)
            if (end - pages) * KV_BLOCK >= snapshots.fewest_tokens and digests[end - 1] not in snapshots
        ]
        return prefix[:pages]

    def _restore(self, sequence: Sequence, copies: SlotCopies) -> None:
        if sequence.restored is not None:
            assert sequence.slot is not None
            assert self.pool.snapshots is not None
            copies.restored.append((sequence.slot, sequence.restored))
            sequence.restored = None
            self.pool.snapshots.hits += 1

    def _take_snapshot(self, sequence: Sequence, copies: SlotCopies) -> None:
        """Takes a snapshot if the sequence has reached its position and no other sequence took it before."""
        if not sequence.snapshot_ends or sequence.computed < sequence.snapshot_ends[0]:
            return
        end, snapshots = sequence.snapshot_ends.pop(0), self.pool.snapshots
        assert sequence.computed == end
        assert sequence.slot is not None
        assert snapshots is not None
        digest = sequence.digests()[end // KV_BLOCK - 1]
        if len(copies.taken) < MAX_PER_STEP and digest not in snapshots:
            copies.taken.append((sequence.slot, snapshots.add(digest)))

    # --- pages --------------------------------------------------------------------------------------------------------

    def _has_pages(self, chunk: ScheduledChunk) -> bool:
        """Allocates the pages that a chunk writes to. Returns False if the pool ran out of pages."""
        pages = chunk.sequence.page_ids
        while len(pages) * KV_BLOCK < chunk.end:
            page = self.pool.take()
            if page is None:
                return False
            pages.append(page)
        return True

    def _name_pages(self, sequence: Sequence) -> None:
        """Makes the sequence's full pages whose tokens were read available to others."""
        named = sequence.named_pages
        if sequence.computed < (named + 1) * KV_BLOCK:  # fast path: called twice per token, and few steps fill a page
            return
        full = min(sequence.computed, len(sequence.tokens)) // KV_BLOCK
        if full > named and self.pool.keeps_prefixes and sequence.slot is not None:
            for page, digest in zip(sequence.page_ids[named:full], sequence.digests()[named:], strict=False):
                self.pool.name(page, digest)
            sequence.named_pages = full

    def _evict(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.is_held = None, False
        if sequence.context.adapter is not None:
            self.adapters.release(sequence.context.adapter)
            sequence.adapter_slot = None
        self._return_pages(sequence)

    def _return_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.page_ids)
        sequence.page_ids, sequence.computed = [], 0
        sequence.restored, sequence.snapshot_ends = None, []


class _StepChunks(dict[Sequence, ScheduledChunk]):
    """The chunks of a step while it is filled, by their sequences."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._free_tokens, self._free_rows, self._free_prefills = limits.tokens, limits.rows, limits.prefills
        self._free_drafts = limits.drafts

    def add(self, sequence: Sequence, drafts: int = 0) -> None:
        """Adds the sequence's next chunk, as long as fits; adds nothing if the step is full."""
        if drafts and self._add_with_drafts(sequence, drafts):
            return
        remaining = sequence.length - sequence.computed
        count = min(remaining, self._free_tokens, self._limits.prefill_chunk)
        if sequence.snapshot_ends:
            count = min(count, sequence.snapshot_ends[0] - sequence.computed)
        is_decode = count == 1 and (sequence.is_held or not sequence.needs_rows)
        if not is_decode:
            count = min(count, self._free_rows) if self._free_prefills > 0 else 0
            self._free_rows -= padded_rows(count)
            self._free_prefills -= 1
        self._free_tokens -= count
        if count > 0:
            self[sequence] = ScheduledChunk(sequence, sequence.computed, count, count == remaining, is_decode)

    def _add_with_drafts(self, sequence: Sequence, drafts: int) -> bool:
        """Adds a chunk of the sequence's last token and of guesses, if there is room for one."""
        assert sequence.is_held and not sequence.unread
        drafts, are_decodes = min(drafts, self._free_drafts, self._free_tokens - 1), self._limits.decodes_guesses
        if not are_decodes:
            drafts = min(drafts, self._free_rows // QUERY_UNIT * QUERY_UNIT - 1) if self._free_prefills > 0 else 0
        if drafts < 1:
            return False
        if not are_decodes:
            self._free_rows -= padded_rows(1 + drafts)
            self._free_prefills -= 1
        self._free_tokens -= 1 + drafts
        self._free_drafts -= drafts
        options = {"completes": True, "is_decode": are_decodes, "drafted": drafts}
        self[sequence] = ScheduledChunk(sequence, sequence.computed, 1 + drafts, **options)
        return True


def padded_rows(tokens: int) -> int:
    """Returns the rows of a prefill chunk, rounded up to a multiple of `QUERY_UNIT`."""
    return round_up(tokens, QUERY_UNIT)


def pages_needed(sequence: Sequence) -> int:
    """Returns the maximum pages of a sequence. Its last token is not computed."""
    return ceil_div(max(len(sequence.prompt) + sequence.params.max_tokens - 1, 1), KV_BLOCK)
