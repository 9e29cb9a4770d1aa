"""The line of key blocks that decode on Hopper distributes over its CTAs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention import decode_schedule, latent_schedule
from detjax.pallas.hopper.attention.decode_schedule import Schedule
from detjax.pallas.hopper.mosaic.warps import find_places


class Operands(NamedTuple):
    """Input arrays of the kernel.

    Attributes:
        q: queries by KV head, `[B, T, h, G, K]`.
        pools: the arrays of the pages of keys and of values: numbers, or codes and scales.
        page_table: page ids of each request's blocks.
        q_start: position of each request's first query.
        kv_length: number of each request's keys.
        sinks: sink of each column of a tile, `[h, n]`, or None.
        slopes: ALiBi slope of each column of a tile, `[h, n]`, or None.
    """

    q: Any
    pools: tuple[tuple[Any, ...], ...]
    page_table: Any
    q_start: Any
    kv_length: Any
    sinks: Any | None
    slopes: Any | None


class _Place(NamedTuple):
    """A block on the line.

    Attributes:
        sequence: the sequence in the request, by KV head and then by tile.
        skipped: number of the sequence's blocks before this one.
    """

    request: Array
    sequence: Array
    skipped: Array


class Share(NamedTuple):
    """The blocks of a CTA.

    Attributes:
        start: the first block.
        usual: number of blocks of most CTAs, before cuts move.
    """

    start: _Place
    blocks: Array
    usual: Array


class Segment(NamedTuple):
    """The blocks of one sequence that belong to one CTA.

    Attributes:
        sequence: the sequence in the request.
        skipped: number of the sequence's blocks in earlier CTAs.
        first_block: index of the sequence's first block in the request.
        visits: number of the sequence's blocks that the CTA visits.
    """

    request: Array
    sequence: Array
    skipped: Array
    first_block: Array
    blocks: Array
    visits: Array


class Line:
    """The blocks of all sequences in a line, and its cuts."""

    def __init__(
        self,
        problem: decode_schedule.Problem | latent_schedule.Problem,
        schedule: Schedule,
        masking: Masking,
        q_start: Any,
        kv_length: Any,
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        self.q_start, self.kv_length = q_start, kv_length

    def blocks_of(self, request: Array) -> tuple[Array, Array]:
        """Returns the first block that any query token of the request sees, and the number of blocks, at least 1."""
        length = self.kv_length[request]
        first, end = jnp.int32(0), length
        if self.masking.causal or self.masking.window is not None:
            position = self.q_start[request]
            if self.masking.causal:
                end = lax.min(end, position + self.problem.tokens)
            if self.masking.window is not None:
                first = lax.div(lax.max(position - (self.masking.window - 1), 0), jnp.int32(KV_BLOCK))
        end = lax.min(lax.div(end + (KV_BLOCK - 1), jnp.int32(KV_BLOCK)), jnp.int32(self.problem.most_blocks))
        end = lax.max(end, 1)
        first = lax.min(first, end - 1)
        return first, end - first

    def share(self, cta: Array) -> Share:
        """Returns the blocks of a CTA."""
        # Each CTA derives its share from the requests' lengths by itself, so that no kernel has to run before.

        def amount(request: Array) -> Array:
            _, blocks = self.blocks_of(request)
            return blocks * self.problem.sequences

        def cuts(total: Array) -> tuple[Array, ...]:
            size = lax.div(total + (self.schedule.ctas - 1), jnp.int32(self.schedule.ctas))
            return size, lax.min(cta * size, total), lax.min((cta + 1) * size, total)

        total, places = find_places(amount, self.problem.batch, lambda total: cuts(total)[1:])
        size, *ends = cuts(total)
        slack = (size.astype(ACCUMULATOR) * self.schedule.slack).astype(jnp.int32)
        (begin, start), (end, _) = (self.adjusted(*cut, slack) for cut in zip(ends, places, strict=True))
        return Share(start, end - begin, size)

    def adjusted(self, position: Array, place: tuple[Array, Array], slack: Array) -> tuple[Array, _Place]:
        """Moves a cut to where the schedule allows one; returns its position and the block after it.

        Args:
            position: position of the cut on the line.
            place: request of the block after the cut, and the number of the request's blocks before it.
            slack: maximum number of blocks that the cut moves.
        """
        request, offset = place
        _, blocks = self.blocks_of(request)
        sequence = lax.div(offset.astype(jnp.uint32), blocks.astype(jnp.uint32)).astype(jnp.int32)
        skipped = offset - sequence * blocks
        moved = self.moved(skipped, blocks, slack)
        place_in_sequence = _Place(request, sequence, moved)
        pairs = zip(place_in_sequence, self.following(place_in_sequence), strict=True)
        return position + (moved - skipped), _Place(*(jnp.where(moved < blocks, *pair) for pair in pairs))

    def moved(self, skipped: Array, blocks: Array, slack: Array) -> Array:
        """Returns where a cut after `skipped` blocks of a sequence moves: 0 is its beginning, `blocks` its end."""
        if not self.schedule.cut:
            # A sequence belongs to the CTA in whose share it begins.
            return jnp.where(skipped > 0, blocks, 0)
        unit = self.problem.cut_unit
        if unit > 1:
            before = lax.div(skipped, jnp.int32(unit)) * unit
            after = lax.min(before + unit, blocks)
            skipped = jnp.where(skipped - before > after - skipped, after, before)
        return jnp.where(skipped <= slack, 0, jnp.where(blocks - skipped <= slack, blocks, skipped))

    def following(self, place: _Place) -> _Place:
        """Returns the first block of the next sequence."""
        is_last = place.sequence + 1 == self.problem.sequences
        request = jnp.where(is_last, place.request + 1, place.request)
        return _Place(request, jnp.where(is_last, 0, place.sequence + 1), jnp.zeros_like(place.skipped))

    def fold(self, share: Share, step: Callable[[Segment, Array], Array], carry: Array) -> Array:
        """Folds `carry = step(segment, carry)` over a share's segments in order."""

        def body(state: tuple[_Place, Array, Array]) -> tuple[_Place, Array, Array]:
            place, remaining, carry = state
            first_block, blocks = self.blocks_of(place.request)
            count = lax.min(blocks - place.skipped, remaining)
            segment = Segment(place.request, place.sequence, place.skipped, first_block, blocks, count)
            carry = step(segment, carry)
            return self.following(place), remaining - count, carry

        return lax.while_loop(lambda state: state[1] > 0, body, (share.start, share.blocks, carry))[-1]
