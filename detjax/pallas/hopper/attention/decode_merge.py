"""Merges the blocks of keys that several CTAs computed of one sequence, in order (Pallas Mosaic GPU for Hopper).

Where decode splits a sequence between CTAs, the CTA that has its beginning stores what it has merged, the *prefix*, and
the others store each block's result by itself. Here a CTA merges some columns of one query of such a sequence, a thread
for each column. It first finds the factors of 128 blocks, a thread for each: what is left to do in order is a fused
multiply-add a block. What shared memory delivers limits how fast that goes, so where sequences are few, their columns
are spread over several CTAs.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.online_softmax import normalized
from detjax.pallas.hopper.attention.warpgroups import COMPILER_PARAMS
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic.barriers import meet
from detjax.pallas.hopper.mosaic.layouts import NUMBER, PER_THREAD
from detjax.pallas.hopper.mosaic.lines import in_warps, load_line, running_maxima, store_changes, store_line
from detjax.pallas.hopper.mosaic.tiles import fma

_BLOCKS_PER_LOAD: Final = 32
"""Blocks that are loaded at once."""
_MAX_CTAS: Final = 4
"""Columns are spread over CTAs until each multiprocessor has so many of these."""
_BYTES_IN_FLIGHT: Final = 192 * 1024
"""Bytes of loads in flight, for all CTAs of a multiprocessor."""
_SUMMING_WARP: Final = 3
"""The warp that merges the sums. It has no columns where these are spread over CTAs."""


class _Factor(enum.IntEnum):
    """Rows of the factors in shared memory."""

    RUNNING = 0
    """The factor of what was merged before a block."""
    BLOCK = 1
    """The factor of the block's result."""
    SUM = 2
    """The block's sum times the factor of its result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """Sizes of the partial results of sequences that are split between CTAs.

    A sequence is one request, one head of keys and one tile of queries. Query `t * group + g` of a tile is head `g` of
    the tile's token `t`. A *record* describes one split sequence and holds its prefix.

    Attributes:
        ctas: CTAs of the decode.
        blocks: the most blocks that a CTA stores unmerged of a sequence that goes on in the next CTA.
        batch: requests.
        sequences: sequences of a request.
        tokens: query tokens of a request.
        tiles: tiles of a request's query tokens.
        tile_tokens: query tokens of a tile.
        group: query heads that share a head of keys.
        value_width: columns of values.
        dtype: dtype of the output.
    """

    ctas: int
    blocks: int
    batch: int
    sequences: int
    tokens: int
    tiles: int
    tile_tokens: int
    group: int
    value_width: int
    dtype: Any

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.tile_tokens * self.group

    @property
    def by_sequence(self) -> bool:
        """Whether sequences are fewer than the places where one may be split. Then each sequence has a record; else
        each CTA has one, for the sequence that it begins last."""
        return self.batch * self.sequences < self.ctas - 1

    @property
    def records(self) -> int:
        """Number of records."""
        return self.batch * self.sequences if self.by_sequence else self.ctas - 1

    def record(self, cta: Array, request: Array, sequence: Array) -> Array:
        """The record of a sequence that begins in a CTA."""
        return request * self.sequences + sequence if self.by_sequence else cta

    @property
    def columns(self) -> int:
        """Columns of a result that one CTA merges."""
        fits = (
            columns
            for columns in (WARP, 2 * WARP, 4 * WARP)
            if self.records * self.rows * ceil_div(self.value_width, columns) <= _MAX_CTAS * device.multiprocessors()
        )
        return next(fits, 4 * WARP)

    @property
    def parts(self) -> int:
        """CTAs that merge one query."""
        return ceil_div(self.value_width, self.columns)

    @property
    def width(self) -> int:
        """Columns of a partial result, the same number in each part."""
        return self.parts * self.columns

    @property
    def stages(self) -> int:
        """Loads in flight: as many as fit where all CTAs run at the same time, most of which have nothing to do."""
        ctas = ceil_div(self.records * self.rows * self.parts, device.multiprocessors())
        return max(3, min(16, _BYTES_IN_FLIGHT // ctas // (_BLOCKS_PER_LOAD * self.columns * 4)))

    @property
    def places(self) -> int:
        """Room for unmerged blocks: those of the CTAs, what the last CTA may have more, and a load after the last."""
        return self.ctas * self.blocks + self.blocks + WARPGROUP

    @property
    def bytes(self) -> int:
        """Approximate size of all partial results."""
        return self.places * self.rows * self.width * 4

    def first_place(self, cta: Array, share: Array) -> Array:
        """Where a CTA's unmerged blocks begin, most CTAs having a share of so many blocks.

        The blocks of one sequence are neighbours, whichever CTAs computed them. A sequence that is shorter than a share
        is unmerged in one CTA alone.
        """
        return cta * lax.min(share, jnp.int32(self.blocks))

    def out_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the fields of `SplitPartials`."""
        result = self.tile_tokens, self.group, self.width
        return (
            jax.ShapeDtypeStruct((self.places, *result), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.rows, 2, self.places), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.records + 1, *result), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.records + 1, self.rows, 2), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.records + 1, len(Split._fields)), jnp.int32),
        )


class SplitPartials(NamedTuple):
    """Partial results of split sequences in memory.

    Attributes:
        blocks: results of unmerged blocks, `[place, t, g, width]`.
        statistics: their maxima and sums, `[query, 2, place]`.
        prefixes: merged blocks of the beginnings of sequences, `[record, t, g, width]`.
        prefix_statistics: their maxima and sums, `[record, query, 2]`.
        splits: a `Split` for each record, `[record, 4]`.
    """

    blocks: Any
    statistics: Any
    prefixes: Any
    prefix_statistics: Any
    splits: Any


class Split(NamedTuple):
    """A sequence that is split, all int32.

    Attributes:
        request: the request.
        sequence: the sequence of the request: heads of keys, and for each head its tiles.
        blocks: number of unmerged blocks; 0 if the sequence is not split.
        first_place: the first block's place.
    """

    request: Array
    sequence: Array
    blocks: Array
    first_place: Array


def merge(splits: Splits, o: Array, partials: SplitPartials) -> Array:
    """The output `[B, T, h, G, V]`, with the split sequences written into it."""
    columns, stages = splits.columns, splits.stages

    def body(o_gmem: Any, *refs: Any, **scratch: Any) -> None:
        _Merge(splits, o_gmem, SplitPartials(*refs), scratch).run()

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(splits.records, splits.rows, splits.parts),
        grid_names=("record", "row", "part"),
        scratch_types={
            "changes": plgpu.SMEM((WARPGROUP // WARP,), jnp.int32),
            "factors": plgpu.SMEM((len(_Factor), WARPGROUP), ACCUMULATOR),
            "loaded": plgpu.Barrier(num_barriers=stages),
            "maxima": plgpu.SMEM((WARPGROUP,), ACCUMULATOR),
            "maxima_of_warps": plgpu.SMEM((WARPGROUP // WARP,), ACCUMULATOR),
            "results": plgpu.SMEM((stages, _BLOCKS_PER_LOAD, columns), ACCUMULATOR),
        },
        compiler_params=COMPILER_PARAMS,
        kernel_name="attention_merge",
    )
    result = jax.new_ref(o)
    kernel(result, *partials)
    return jax.freeze(result)


def _spread(x: Array) -> Array:
    """A number in every thread."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (WARPGROUP,), ()), PER_THREAD)


class _Merged(NamedTuple):
    """What is merged so far.

    Attributes:
        o: a running sum of values for each thread's column.
        total: running sum of probabilities.
    """

    o: Array
    total: Array


class _Group(NamedTuple):
    """The state before 128 blocks are merged.

    Attributes:
        merged: what is merged so far.
        m: running maximum.
        m_b: the blocks' maxima, one for each thread.
        total_b: the blocks' sums, one for each thread.
    """

    merged: _Merged
    m: Array
    m_b: Array
    total_b: Array


class _Load(NamedTuple):
    """Blocks that were loaded at once, or as many of these as the sequence has.

    Attributes:
        slot: where they are in shared memory.
        first: place of the first block's factors.
        blocks: number of blocks.
        steady: the running sums' factor, if it is the same for all blocks.
    """

    slot: Array
    first: Array
    blocks: Array | int
    steady: Array | None


class _Merge:
    """A CTA that merges some columns of one query of a split sequence."""

    def __init__(self, splits: Splits, o_gmem: Any, partials: SplitPartials, scratch: dict[str, Any]) -> None:
        self.splits, self.o_gmem, self.partials = splits, o_gmem, partials
        self.results, self.loaded, self.factors = scratch["results"], scratch["loaded"], scratch["factors"]
        self.maxima, self.maxima_of_warps = scratch["maxima"], scratch["maxima_of_warps"]
        self.changes = scratch["changes"]
        self.record, self.row, self.part = (lax.axis_index(name) for name in ("record", "row", "part"))
        self.split = Split(*(partials.splits[self.record, index] for index in range(len(Split._fields))))
        tiles, group = jnp.int32(splits.tiles), jnp.int32(splits.group)
        self.kv_head, tile = lax.div(self.split.sequence, tiles), lax.rem(self.split.sequence, tiles)
        self.tile_token, self.head = lax.div(self.row, group), lax.rem(self.row, group)
        self.token = tile * splits.tile_tokens + self.tile_token

    def run(self) -> None:
        """Merges the query's blocks, if the sequence is split and the query exists."""
        pl.when((self.split.blocks > 0) & (self.token < self.splits.tokens))(self.merge)

    def merge(self) -> None:
        """Loads, merges and stores."""
        self.loads = lax.div(self.split.blocks + (_BLOCKS_PER_LOAD - 1), jnp.int32(_BLOCKS_PER_LOAD))
        self.columns = pl.ds(self.part * self.splits.columns, self.splits.columns)
        pl.loop(0, lax.min(self.loads, jnp.int32(self.splits.stages)))(self.load)
        statistics = self.partials.prefix_statistics.at[self.record]
        prefix = load_line(self.partials.prefixes.at[self.record, self.tile_token, self.head, self.columns])
        groups = lax.div(self.split.blocks + (WARPGROUP - 1), jnp.int32(WARPGROUP))
        merged = _Merged(prefix, statistics[self.row, 1])
        group = _Group(merged, statistics[self.row, 0], *self.load_statistics(jnp.int32(0)))
        group = lax.fori_loop(0, groups, self.merge_group, group)
        self.store(group.merged)

    def load(self, index: Array) -> None:
        """Starts to load so many blocks' results."""
        slot = lax.rem(index, jnp.int32(self.splits.stages))
        places = pl.ds(self.split.first_place + index * _BLOCKS_PER_LOAD, _BLOCKS_PER_LOAD)
        source = self.partials.blocks.at[places, self.tile_token, self.head, self.columns]
        plgpu.copy_gmem_to_smem(source, self.results.at[slot], self.loaded.at[slot])

    def load_statistics(self, first: Array) -> tuple[Array, Array]:
        """Maxima and sums of 128 blocks; anything for those after the last one."""
        places = pl.ds(self.split.first_place + first, WARPGROUP)
        m_b, total_b = (
            plgpu.load(self.partials.statistics.at[self.row, index, places], layout=PER_THREAD, optimized=False)
            for index in range(2)
        )
        return m_b, total_b

    def merge_group(self, index: Array, group: _Group) -> _Group:
        """Merges 128 blocks."""
        first = index * WARPGROUP
        self.find_factors(group)
        # The next statistics are on their way while these blocks are merged.
        following = self.load_statistics(lax.min(first + WARPGROUP, self.split.blocks))
        loads_per_group = WARPGROUP // _BLOCKS_PER_LOAD
        end = lax.min((index + 1) * loads_per_group, self.loads)
        merged = lax.fori_loop(index * loads_per_group, end, self.merge_load, group.merged)
        return _Group(merged, self.maxima[WARPGROUP - 1], *following)

    def find_factors(self, group: _Group) -> None:
        """Leaves the factors of 128 blocks in shared memory, and which of them change the running maximum."""
        before, after = running_maxima(group.m_b, group.m, self.maxima_of_warps)
        b = jnp.exp2(group.m_b - after)
        factors = {
            _Factor.RUNNING: jnp.exp2(before - after),
            _Factor.BLOCK: b,
            _Factor.SUM: group.total_b * b,
        }
        for row, factor in factors.items():
            self.factors.at[row][...] = factor
        self.maxima[...] = after
        store_changes(before, after, self.changes)
        meet()

    def merge_load(self, index: Array, merged: _Merged) -> _Merged:
        """Merges what was loaded at once, and starts the load that takes its slot."""
        slot, first = lax.rem(index, jnp.int32(self.splits.stages)), index * _BLOCKS_PER_LOAD
        plgpu.barrier_wait(self.loaded.at[slot])
        first_factor, remaining = lax.rem(first, jnp.int32(WARPGROUP)), self.split.blocks - first
        # What is loaded for all threads limits the speed, and a maximum seldom grows.
        is_steady = self.changes[lax.div(first_factor, jnp.int32(WARP))] == 0
        kind = jnp.where(remaining < _BLOCKS_PER_LOAD, 0, jnp.where(is_steady, 2, 1))
        kinds = [
            functools.partial(self.merge_blocks, slot, first_factor, remaining, False),
            functools.partial(self.merge_blocks, slot, first_factor, _BLOCKS_PER_LOAD, False),
            functools.partial(self.merge_blocks, slot, first_factor, _BLOCKS_PER_LOAD, True),
        ]
        merged = lax.switch(kind, kinds, merged)

        @pl.when(index + self.splits.stages < self.loads)
        def _() -> None:
            meet()  # all have read the slot
            self.load(index + self.splits.stages)

        return merged

    def merge_blocks(self, slot: Array, first: Array, count: Array | int, is_steady: bool, merged: _Merged) -> _Merged:
        """Merges the first blocks of a slot, whose factors begin at `first`.

        Args:
            slot: where the blocks are.
            first: place of the first block's factors.
            count: number of blocks.
            is_steady: whether no block changes the running maximum.
            merged: what is merged so far.
        """
        # It is 1, which the compiler must not know: it would add products unrounded.
        steady = self.factors[_Factor.RUNNING, first]
        load = _Load(slot, first, count, steady if is_steady else None)
        # What is broadcast from shared memory takes as long as what is not: one warp looks at the sums, and those that
        # have no columns at nothing.
        warps = self.splits.columns // WARP
        merge_sums = functools.partial(self.fold, load, self.merge_sum)
        total = in_warps(_SUMMING_WARP, _SUMMING_WARP + 1, merge_sums, merged.total)
        o = in_warps(0, warps, functools.partial(self.fold, load, self.merge_result), merged.o)
        return _Merged(o, total)

    def fold(self, load: _Load, step: Callable[[_Load, Any, Array], Array], x: Array) -> Array:
        """The last `x = step(load, index, x)` of the load's blocks in order."""
        if isinstance(load.blocks, int):
            return functools.reduce(lambda x, index: step(load, index, x), range(load.blocks), x)
        return lax.fori_loop(0, load.blocks, functools.partial(step, load), x)

    def merge_result(self, load: _Load, index: Any, o: Array) -> Array:
        """The running sum of values with a block's."""
        x = load_line(self.results.at[load.slot, index])
        b = _spread(self.factors[_Factor.BLOCK, load.first + index])
        return fma(o, _spread(self.running_factor(load, index)), x * b, layout=PER_THREAD)

    def merge_sum(self, load: _Load, index: Any, total: Array) -> Array:
        """The running sum of probabilities with a block's, which has its factor already."""
        a = self.running_factor(load, index)
        return fma(total, a, self.factors[_Factor.SUM, load.first + index], layout=NUMBER)

    def running_factor(self, load: _Load, index: Any) -> Array:
        """The factor of what was merged before a block."""
        return self.factors[_Factor.RUNNING, load.first + index] if load.steady is None else load.steady

    def store(self, merged: _Merged) -> None:
        """Stores the CTA's columns of the query's result."""
        # One warp has the sum, in its last thread too.
        self.maxima[...] = plgpu.layout_cast(jnp.full((WARPGROUP,), merged.total), PER_THREAD)
        meet()
        total = _spread(self.maxima[WARPGROUP - 1])
        y = normalized(merged.o, total, self.splits.dtype, spread=lambda x, _: x)
        target = self.o_gmem.at[self.split.request, self.token, self.kv_head, self.head]
        store_line(y, target, self.part * self.splits.columns, count=self.splits.columns)
