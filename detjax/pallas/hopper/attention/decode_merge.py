"""Merges the key blocks of sequences that decode split between CTAs, in order (Pallas Mosaic GPU for Hopper).

The CTA in which a split sequence begins has stored its sums, the *prefix*, and the others each block's result. Here a
CTA merges some columns of one query of such a sequence, one column per thread. It first computes the factors of 128
blocks at once, one block per thread, which leaves one fused multiply-add per block to do in order. Shared memory
bandwidth limits that loop, so the columns of few sequences are spread over several CTAs.
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
from detjax.pallas.hopper.mosaic.barriers import await_loads, meet
from detjax.pallas.hopper.mosaic.layouts import NUMBER, PER_THREAD
from detjax.pallas.hopper.mosaic.lines import in_warps, load_line, running_maxima, store_changes, store_line
from detjax.pallas.hopper.mosaic.tiles import fma

_BLOCKS_PER_LOAD: Final = 32
"""Blocks per load: as many as the threads of a warp, so that one of the flags of `store_changes` covers a load."""
_MAX_CTAS: Final = 4
"""Maximum number of CTAs per multiprocessor among which columns are spread."""
_BYTES_IN_FLIGHT: Final = 192 * 1024
"""Bytes of loads in flight, for all CTAs of a multiprocessor."""
_SUMMING_WARP: Final = 3
"""The warp that merges the sums: the last one, which has no columns if these are spread over CTAs."""


class _Factor(enum.IntEnum):
    """Rows of the factors in shared memory."""

    RUNNING = 0
    """Factor of the running sums before a block."""
    BLOCK = 1
    """Factor of the block's result."""
    SUM = 2
    """The block's sum times `BLOCK`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """Sizes of the partial results of split sequences.

    A sequence is one request, one KV head and one tile of queries. Query `t * group + g` of a tile is head `g` of the
    tile's token `t`. A *record* describes one split sequence and holds its prefix.

    Attributes:
        ctas: CTAs of the decode.
        blocks: maximum number of blocks that a CTA stores unmerged of a sequence that continues in the next CTA.
        batch: requests.
        sequences: sequences of a request.
        tokens: query tokens of a request.
        tiles: tiles of a request's query tokens.
        tile_tokens: query tokens of a tile.
        group: query heads per KV head.
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
        """True if each sequence has a record, because sequences are fewer than cuts. Otherwise each CTA has one, for
        the last sequence that begins in it."""
        return self.batch * self.sequences < self.ctas - 1

    @property
    def records(self) -> int:
        """Number of records."""
        return self.batch * self.sequences if self.by_sequence else self.ctas - 1

    def record(self, cta: Array, request: Array, sequence: Array) -> Array:
        """Returns the record of a sequence that begins in a CTA."""
        return request * self.sequences + sequence if self.by_sequence else cta

    @property
    def columns(self) -> int:
        """Columns that one CTA merges: whole warps, as few as `_MAX_CTAS` allows."""
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
        """Columns of a partial result, padded to equal parts."""
        return self.parts * self.columns

    @property
    def stages(self) -> int:
        """Loads in flight: as many as fit with all CTAs resident, although most have nothing to do and end at once."""
        ctas = ceil_div(self.records * self.rows * self.parts, device.multiprocessors())
        return max(3, min(16, _BYTES_IN_FLIGHT // ctas // (_BLOCKS_PER_LOAD * self.columns * 4)))

    @property
    def places(self) -> int:
        """Places of unmerged blocks: each CTA's, the last one's excess, and room for loads past the end."""
        return self.ctas * self.blocks + self.blocks + WARPGROUP

    @property
    def bytes(self) -> int:
        """Approximate bytes of all partial results."""
        return self.places * self.rows * self.width * 4

    def first_place(self, cta: Array, share: Array) -> Array:
        """Returns the place of a CTA's first unmerged block, from the usual size of shares.

        The blocks of one sequence are contiguous across CTAs: a share within a sequence has the usual size, and a
        sequence shorter than a share has unmerged blocks in one CTA only.
        """
        return cta * lax.min(share, jnp.int32(self.blocks))

    def out_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes and dtypes of the fields of `SplitPartials`."""
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
        statistics: maxima and sums of these, `[query, 2, place]`.
        prefixes: running sums of values of the beginnings of sequences, `[record, t, g, width]`.
        prefix_statistics: running maxima and sums, `[record, query, 2]`.
        splits: a `Split` per record, `[record, 4]`.
    """

    blocks: Any
    statistics: Any
    prefixes: Any
    prefix_statistics: Any
    splits: Any


class Split(NamedTuple):
    """A split sequence, all int32.

    Attributes:
        sequence: the sequence in the request, by KV head and then by tile.
        blocks: number of unmerged blocks; 0 if the sequence is not split.
        first_place: place of the first unmerged block.
    """

    request: Array
    sequence: Array
    blocks: Array
    first_place: Array


def merge(splits: Splits, o: Array, partials: SplitPartials) -> Array:
    """Writes the split sequences into the output `[B, T, h, G, V]` in place, and returns it."""
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
    """Repeats a number in every thread."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (WARPGROUP,), ()), PER_THREAD)


class _Merged(NamedTuple):
    """Running sums.

    Attributes:
        o: running sum of values of each thread's column.
        total: running sum of probabilities, in `_SUMMING_WARP` only.
    """

    o: Array
    total: Array


class _Group(NamedTuple):
    """The state before 128 blocks are merged.

    Attributes:
        m_b: the blocks' maxima, one per thread.
        total_b: the blocks' sums, one per thread.
    """

    merged: _Merged
    m: Array
    m_b: Array
    total_b: Array


class _Load(NamedTuple):
    """The blocks of one load.

    Attributes:
        slot: slot in shared memory.
        first: index of the first block's factors.
        blocks: number of blocks that belong to the sequence.
        steady: factor of the running sums, if all blocks have the same.
    """

    slot: Array
    first: Array
    blocks: Array | int
    steady: Array | None


class _Merge:
    """A CTA that merges some columns of one query of a split sequence.

    Two kinds of meetings order its threads. All threads load, compute and read factors, so `running_maxima` (which
    meets) separates the last reads of a group's factors from the next group's writes, and `meet` those writes from
    reads. A slot is loaded again only after all threads that read it have met.
    """

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
        # Blocks first: they arrive while the prefix and the first statistics are loaded and factors are computed.
        pl.loop(0, lax.min(self.loads, jnp.int32(self.splits.stages)))(self.load)
        statistics = self.partials.prefix_statistics.at[self.record]
        prefix = load_line(self.partials.prefixes.at[self.record, self.tile_token, self.head, self.columns])
        groups = lax.div(self.split.blocks + (WARPGROUP - 1), jnp.int32(WARPGROUP))
        merged = _Merged(prefix, statistics[self.row, 1])
        group = _Group(merged, statistics[self.row, 0], *self.load_statistics(jnp.int32(0)))
        group = lax.fori_loop(0, groups, self.merge_group, group)
        self.store(group.merged)

    def load(self, index: Array) -> None:
        """Starts the load of number `index` of blocks' results."""
        slot = lax.rem(index, jnp.int32(self.splits.stages))
        places = pl.ds(self.split.first_place + index * _BLOCKS_PER_LOAD, _BLOCKS_PER_LOAD)
        source = self.partials.blocks.at[places, self.tile_token, self.head, self.columns]
        plgpu.copy_gmem_to_smem(source, self.results.at[slot], self.loaded.at[slot])

    def load_statistics(self, first: Array) -> tuple[Array, Array]:
        """Loads maxima and sums of 128 blocks; undefined after the last block."""
        # Undefined ones harm no block before them, as maxima run from left to right, and no factor of theirs is used.
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
        # In flight while these blocks are merged.
        following = self.load_statistics(lax.min(first + WARPGROUP, self.split.blocks))
        loads_per_group = WARPGROUP // _BLOCKS_PER_LOAD
        end = lax.min((index + 1) * loads_per_group, self.loads)
        merged = lax.fori_loop(index * loads_per_group, end, self.merge_load, group.merged)
        return _Group(merged, self.maxima[WARPGROUP - 1], *following)

    def find_factors(self, group: _Group) -> None:
        """Stores the factors of 128 blocks, and which of them change the running maximum, to shared memory."""
        before, after = running_maxima(group.m_b, group.m, self.maxima_of_warps)
        b = jnp.exp2(group.m_b - after)
        factors = {_Factor.RUNNING: jnp.exp2(before - after), _Factor.BLOCK: b, _Factor.SUM: group.total_b * b}
        for row, factor in factors.items():
            self.factors.at[row][...] = factor
        self.maxima[...] = after
        store_changes(before, after, self.changes)
        meet()  # not `commit_smem`, which would also wait for the loads in flight

    def merge_load(self, index: Array, merged: _Merged) -> _Merged:
        """Merges the blocks of a load, and starts the next load into its slot."""
        slot, first = lax.rem(index, jnp.int32(self.splits.stages)), index * _BLOCKS_PER_LOAD
        plgpu.barrier_wait(self.loaded.at[slot])
        first_factor, remaining = lax.rem(first, jnp.int32(WARPGROUP)), self.split.blocks - first
        # Reads of factors limit the speed. A maximum seldom grows, so most loads need no running factors.
        is_steady = self.changes[lax.div(first_factor, jnp.int32(WARP))] == 0
        # Whole loads have a static number of blocks, so they are unrolled; the last one may be a loop.
        kind = jnp.where(remaining < _BLOCKS_PER_LOAD, 0, jnp.where(is_steady, 2, 1))
        kinds = [
            functools.partial(self.merge_blocks, slot, first_factor, remaining, False),
            functools.partial(self.merge_blocks, slot, first_factor, _BLOCKS_PER_LOAD, False),
            functools.partial(self.merge_blocks, slot, first_factor, _BLOCKS_PER_LOAD, True),
        ]
        merged = lax.switch(kind, kinds, merged)

        @pl.when(index + self.splits.stages < self.loads)
        def _() -> None:
            await_loads(*merged, layouts=(PER_THREAD, NUMBER))
            meet()  # all threads have read the slot
            self.load(index + self.splits.stages)

        return merged

    def merge_blocks(self, slot: Array, first: Array, count: Array | int, is_steady: bool, merged: _Merged) -> _Merged:
        """Merges the first `count` blocks of a slot; `is_steady` if none of them changes the running maximum."""
        # The factor is 1, but must not be a constant: `fma(o, 1, x * b)` would become an addition, which the compiler
        # fuses with the product, and the product would not be rounded.
        steady = self.factors[_Factor.RUNNING, first]
        load = _Load(slot, first, count, steady if is_steady else None)
        # Reading one number for all threads takes shared memory as long as reading one for each: only one warp reads
        # the sums' factors, and warps without columns read nothing.
        warps = self.splits.columns // WARP
        merge_sums = functools.partial(self.fold, load, self.merge_sum)
        total = in_warps(_SUMMING_WARP, _SUMMING_WARP + 1, merge_sums, merged.total)
        o = in_warps(0, warps, functools.partial(self.fold, load, self.merge_result), merged.o)
        return _Merged(o, total)

    def fold(self, load: _Load, step: Callable[[_Load, Any, Array], Array], x: Array) -> Array:
        """Folds `x = step(load, index, x)` over the load's blocks in order; unrolled if their number is static."""
        if isinstance(load.blocks, int):
            return functools.reduce(lambda x, index: step(load, index, x), range(load.blocks), x)
        return lax.fori_loop(0, load.blocks, functools.partial(step, load), x)

    def merge_result(self, load: _Load, index: Any, o: Array) -> Array:
        """Returns the running sum of values including a block."""
        x = load_line(self.results.at[load.slot, index])
        b = _spread(self.factors[_Factor.BLOCK, load.first + index])
        return fma(o, _spread(self.running_factor(load, index)), x * b, layout=PER_THREAD)

    def merge_sum(self, load: _Load, index: Any, total: Array) -> Array:
        """Returns the running sum of probabilities including a block, whose sum was already scaled."""
        a = self.running_factor(load, index)
        return fma(total, a, self.factors[_Factor.SUM, load.first + index], layout=NUMBER)

    def running_factor(self, load: _Load, index: Any) -> Array:
        """Returns the factor of the running sums before a block."""
        return self.factors[_Factor.RUNNING, load.first + index] if load.steady is None else load.steady

    def store(self, merged: _Merged) -> None:
        """Stores the CTA's columns of the query's result."""
        # The last thread belongs to `_SUMMING_WARP`: its number is the total.
        self.maxima[...] = plgpu.layout_cast(jnp.full((WARPGROUP,), merged.total), PER_THREAD)
        meet()
        total = _spread(self.maxima[WARPGROUP - 1])
        y = normalized(merged.o, total, self.splits.dtype, spread=lambda x, _: x)
        target = self.o_gmem.at[self.split.request, self.token, self.kv_head, self.head]
        store_line(y, target, self.part * self.splits.columns, count=self.splits.columns)
