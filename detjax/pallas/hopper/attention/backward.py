"""Gradients of attention on Hopper (Pallas Mosaic GPU): one kernel for queries, one for keys and values.

Both recompute the probabilities from the forward's normalizers, so that every sum has one owner and one order:

* `dq`: a CTA has 128 query rows of one head and adds keys in ascending order. It also leaves each row's `delta`, the
  row sum of `do * o`, for the other kernel.
* `dk` and `dv`: a CTA has a page of one head of keys. It adds query rows in ascending order, `ROWS` in one step, and
  does so for each query head of the group from zeros; the heads' sums are added left to right. Scores are transposed
  here: keys are the matrix unit's rows, so that probabilities are the next product's operand where they were computed.

In both, two warpgroups multiply, 64 rows each, and take turns at the matrix unit, so that one multiplies while the
other exponentiates. A third one loads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.options import Masking
from detjax.pallas.hopper.attention.mask import bits_kept, tile_words, words_of
from detjax.pallas.hopper.attention.queries_on_rows import (
    MATRIX,
    ROWS,
    VECTOR,
    along_rows,
    bent_scores,
    columns_kept,
    exponent_scale,
    fma,
    indices,
    row_sums,
    rows_of_tile,
    scrub,
    splat,
    swizzled,
)
from detjax.pallas.hopper.attention.warpgroups import (
    CONSUMERS,
    FIRST_BARRIER,
    TILE,
    WARPGROUPS,
    arrive,
    launch,
    pass_turn,
    sync,
    take_turn,
)
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED
from detjax.rounding import log2_scale

_FREE: Final = FIRST_BARRIER
"""Named barriers from here on: one for each slot of what is streamed."""
_MOST_STAGES: Final = 4
_SQUARE: Final = (ROWS, ROWS)
_SUMS: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_COLUMN_VECTOR: Final = plgpu.Layout.WGMMA.reduce(0)
"""One number for each column of a tile."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How work is spread over time; no bit depends on it.

    Attributes:
        stages: slots for what is streamed, 64 rows of two operands each.
        together: one kernel adds `dk` and `dv`; else each has its own, for want of registers.
        turns: the warpgroups take turns at the products that scores and their gradients are made of.
    """

    stages: int = _MOST_STAGES
    together: bool = True
    turns: bool = True


class Problem(NamedTuple):
    """Sizes: requests, query rows of each (a multiple of `ROWS`), heads, heads of keys, pages of a request in the page
    table, widths of keys and of values."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    blocks: int
    width: int
    value_width: int
    dtype: Any

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def schedule(self) -> Schedule:
        row = (self.width + self.value_width) * self.dtype.itemsize
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED - TILE * row
        stage = ROWS * (row + 2 * np.dtype(ACCUMULATOR).itemsize)
        return Schedule(max(1, min(_MOST_STAGES, free // stage)), self.width + self.value_width <= 256)


def backward(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    o: Array,
    log2_normalizer: Array,
    do: Array,
    *,
    masking: Masking,
    mask: Array | None = None,
    schedule: Schedule | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q `[N, H, K]`, of both page pools `[P, h, S, K]` and `[P, h, S, V]`, and of the sinks `[H]` float32.

    Pages that no request owns, and rows of a page behind its request's length, get zeros.

    Args:
        q: queries of all requests, `[N, H, K]`, N / B rows each, a multiple of 8. Rows that only fill up are finite,
            and zeros in `do`.
        page_table: `[B, p]`; no page is in it twice within the requests' lengths, as each gradient has one owner.
        o: the forward's output, `[N, H, V]`.
        log2_normalizer: of each row, `[H, N]` float32.
        do: gradient of the output, `[N, H, V]`.
        mask: `[B or 1, H or 1, T, s]`, as `ops.attention` has it.
        schedule: default: the problem's own.
    """
    batch, given = q_start.shape[0], q.shape[0] // q_start.shape[0]
    tokens = -(-given // ROWS) * ROWS
    q, o, do = (_filled_up(x, 0, batch, tokens) for x in (q, o, do))
    # A row that only fills up gives every key the probability 0.
    log2_normalizer = _filled_up(log2_normalizer, 1, batch, tokens, jnp.inf)
    widths = q.shape[-1], v_pages.shape[-1]
    problem = Problem(batch, tokens, q.shape[1], k_pages.shape[1], page_table.shape[1], *widths, q.dtype)
    schedule = schedule or problem.schedule()
    where = page_table, q_start, kv_length
    slopes = () if masking.alibi_slopes is None else (jnp.asarray(masking.alibi_slopes, ACCUMULATOR),)
    operands = (q, do, log2_normalizer, k_pages, v_pages, *where, *slopes)
    words, transposed = (), ()
    if mask is not None:
        keys = problem.blocks * KV_BLOCK
        words, transposed = (words_of(mask, tokens, keys),), (words_of(mask.swapaxes(2, 3), keys, tokens),)
    dq, delta = _query_gradient(problem, schedule, masking, (*operands, *words), o)
    parts = (("k", "v"),) if schedule.together else (("k",), ("v",))
    gradients: dict[str, Array] = {}
    for part in parts:
        gradients |= _key_gradients(problem, schedule, masking, part, (*operands, *transposed), delta)
    own = jnp.arange(problem.blocks, dtype=jnp.int32)[None] * KV_BLOCK < kv_length[:, None]
    pages = k_pages.shape[0]
    owned = jnp.zeros(pages, bool).at[jnp.where(own, page_table, pages)].set(True, mode="drop")[:, None, None, None]
    dk, dv = (jnp.where(owned, gradients[name], jnp.zeros((), problem.dtype)) for name in "kv")
    dsinks = None if sinks is None else _sink_gradient(problem, sinks, log2_normalizer, delta)
    dq = dq.reshape(batch, tokens, *dq.shape[1:])[:, :given].reshape(batch * given, *dq.shape[1:])
    return dq, dk, dv, dsinks


def _filled_up(x: Array, axis: int, batch: int, tokens: int, value: float = 0.0) -> Array:
    """Rows of each request, along the axis, filled up to `tokens`."""
    shape = x.shape
    given = shape[axis] // batch
    if given == tokens:
        return x
    x = x.reshape(*shape[:axis], batch, given, *shape[axis + 1 :])
    x = jnp.pad(x, [(0, tokens - given if i == axis + 1 else 0) for i in range(x.ndim)], constant_values=value)
    return x.reshape(*shape[:axis], batch * tokens, *shape[axis + 1 :])


def _sink_gradient(problem: Problem, sinks: Array, log2_normalizer: Array, delta: Array) -> Array:
    """`-sum(share of the sink * delta)`: neighbouring rows of a request in pairs, and so on; then request by request.

    So zeros that fill up change nothing, and the order is one that depends on no length.
    """
    share = jnp.exp2((sinks.astype(ACCUMULATOR) * log2_scale(1.0))[:, None] - log2_normalizer)
    x = lax.optimization_barrier(share * delta).reshape(problem.heads, problem.batch, problem.tokens)
    while x.shape[-1] > 1:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[-1] % 2)))
        x = x[..., 0::2] + x[..., 1::2]
    return -functools.reduce(jnp.add, [x[:, request, 0] for request in range(problem.batch)])


def _query_gradient(
    problem: Problem, schedule: Schedule, masking: Masking, operands: tuple[Array, ...], o: Array
) -> tuple[Array, Array]:
    """`dq` `[N, H, K]`, and `delta` `[H, N]` float32."""
    q, dtype = operands[0], problem.dtype
    widths = {"q": problem.width, "do": problem.value_width}
    scratch: dict[str, Any] = {
        name: plgpu.SMEM((TILE, width), dtype, transforms=swizzled(width)) for name, width in widths.items()
    }
    for name, width in (("k", problem.width), ("v", problem.value_width)):
        scratch[name] = plgpu.SMEM((schedule.stages, ROWS, width), dtype, transforms=swizzled(width))
        scratch[f"{name}_loaded"] = plgpu.Barrier(num_barriers=schedule.stages)
    scratch["rows_loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS)

    def body(*refs: Any, **scratch: Any) -> None:
        *operands, o_gmem, dq_gmem, delta_gmem = refs
        _QueryGradient(problem, schedule, masking, operands, scratch).run(o_gmem, dq_gmem, delta_gmem)

    out_type = jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct(operands[2].shape, ACCUMULATOR)
    ctas = problem.batch * -(-problem.tokens // TILE) * problem.heads
    dq, delta = launch("attention_backward_queries", body, out_type, ctas, scratch)(*operands, o)
    return dq, delta


def _key_gradients(
    problem: Problem,
    schedule: Schedule,
    masking: Masking,
    wanted: tuple[str, ...],
    operands: tuple[Array, ...],
    delta: Array,
) -> dict[str, Array]:
    """Those wanted of `dk` ("k") and `dv` ("v"), in the pools' shapes. Pages that no request owns are not written."""
    dtype = problem.dtype
    widths = {"k": problem.width, "v": problem.value_width}
    scratch: dict[str, Any] = {
        name: plgpu.SMEM((KV_BLOCK, width), dtype, transforms=swizzled(width)) for name, width in widths.items()
    }
    for name, width in (("q", problem.width), ("do", problem.value_width)):
        scratch[name] = plgpu.SMEM((schedule.stages, ROWS, width), dtype, transforms=swizzled(width))
        scratch[f"{name}_loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=schedule.stages)
    for name in ("normalizers", "delta"):
        scratch[name] = plgpu.SMEM((schedule.stages, ROWS), ACCUMULATOR)
    scratch["page_loaded"] = plgpu.Barrier(num_arrivals=2)

    items = problem.batch * problem.blocks * problem.kv_heads
    pages = operands[3].shape[0]
    out_type = [jax.ShapeDtypeStruct((pages, problem.kv_heads, KV_BLOCK, widths[name]), dtype) for name in wanted]
    if problem.group > 1:
        # The sums over the heads so far.
        out_type += [jax.ShapeDtypeStruct((items, KV_BLOCK, widths[name]), ACCUMULATOR) for name in wanted]

    def body(*refs: Any, **scratch: Any) -> None:
        refs, results = refs[: -len(out_type)], refs[-len(out_type) :]
        gradients = dict(zip(wanted, results, strict=False))
        totals = dict(zip(wanted, results[len(wanted) :], strict=False))
        _KeyGradients(problem, schedule, masking, list(refs[:-1]), scratch).run(refs[-1], gradients, totals)

    kernel = launch(f"attention_backward_{''.join(wanted)}", body, tuple(out_type), items, scratch)
    return dict(zip(wanted, kernel(*operands, delta), strict=False))


def _along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """A number per column at every row."""
    return lax.broadcast_in_dim(x, shape, [1])


def _everywhere(value: Array | int) -> Array:
    """The same integer at every row."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.int32), VECTOR)


def _quotient(x: Array, divisor: int, *, up: bool = False) -> Array:
    """`x / divisor`, at least 0, rounded down or up."""
    return lax.div(lax.max(x + (divisor - 1 if up else 0), jnp.int32(0)), jnp.int32(divisor))


class _Tile(NamedTuple):
    """What the scores of a tile of queries and keys depend on, in the scores' orientation; all of it recomputed or read
    again where it is used, as registers are few.

    Attributes:
        normalizers: of the queries, at every element.
        delta: of the queries, at every element.
        distance: of each key from its query, int32.
        kept: scores with -inf where a query does not see a key; None where it sees all.
    """

    normalizers: Callable[[], Array]
    delta: Callable[[], Array]
    distance: Callable[[], Array]
    kept: Callable[[Array], Array] | None


def _kept_by(in_sight: Callable[[Array], Array] | None, words: list[Array]) -> Callable[[Array], Array] | None:
    """What both, positions and the call's mask, leave of scores; None if that is all."""
    if not words:
        return in_sight
    return lambda s: bits_kept(s if in_sight is None else in_sight(s), *words)


class _Kernel:
    """What both kernels share: operands, turns, and a tile's arithmetic."""

    def __init__(
        self, problem: Problem, schedule: Schedule, masking: Masking, refs: list[Any], scratch: dict[str, Any]
    ) -> None:
        self.problem, self.schedule, self.masking, self.scratch = problem, schedule, masking, scratch
        self.q_gmem, self.do_gmem, self.normalizers_gmem, self.k_gmem, self.v_gmem, *refs = refs
        self.page_table, self.q_start, self.kv_length, *refs = refs
        self.slopes = refs.pop(0) if masking.alibi_slopes is not None else None
        self.mask = refs.pop(0) if refs else None
        self.warpgroup = lax.axis_index("warpgroup")
        self.cta = lax.axis_index("cta")
        self.stages = jnp.int32(schedule.stages)
        self.own = pl.ds(self.warpgroup * ROWS, ROWS)

    def take_turn(self) -> None:
        if self.schedule.turns:
            take_turn(self.warpgroup)

    def pass_turn(self) -> None:
        if self.schedule.turns:
            pass_turn(self.warpgroup)

    def await_free(self, slot: Array) -> None:
        sync(_FREE + slot, CONSUMERS + 32)

    def free(self, slot: Array | int) -> None:
        arrive(_FREE + slot, CONSUMERS + 32)

    def mask_words(self, request: Array, head: Array, row: Array, column: Array) -> list[Array]:
        """Which scores of a tile the call's mask leaves; nothing without one."""
        return [] if self.mask is None else [tile_words(self.mask, request, head, row, column)]

    def head_slope(self, head: Array) -> Array | None:
        return None if self.slopes is None else splat(self.slopes[head], _SQUARE)

    def probabilities(self, s: Array, tile: _Tile, slopes: Array | None) -> tuple[Array, Array | None]:
        """Probabilities of a tile of scores, and the slope of the soft cap."""
        cap, cap_slope = self.masking.soft_cap, None
        if cap is not None or slopes is not None:
            s = s * np.float32(self.masking.scale)
        if cap is not None:
            bent = bent_scores(s, cap)
            s, cap_slope = np.float32(cap) * bent, fma(-bent, bent, splat(1.0, _SQUARE))
        if slopes is not None:
            s = fma(slopes, tile.distance().astype(ACCUMULATOR), s)
        if tile.kept is not None:
            s = tile.kept(s)
        return jnp.exp2(fma(s, splat(exponent_scale(self.masking), _SQUARE), -tile.normalizers())), cap_slope

    def score_gradients(self, p: Array, dp: Array, tile: _Tile, cap_slope: Array | None) -> Array:
        """Gradients of the scaled scores before the soft cap, in the operands' dtype."""
        ds = p * (dp - tile.delta())
        return (ds if cap_slope is None else ds * cap_slope).astype(self.problem.dtype)

    def run_roles(self, multiply: Callable[[], None], load: Callable[[], None]) -> None:
        def multiply_all() -> None:
            plgpu.set_max_registers(240, action="increase")
            for slot in range(self.schedule.stages):
                self.free(slot)
            pl.when(self.warpgroup == 1)(self.pass_turn)
            multiply()
            pl.when(self.warpgroup == 0)(self.take_turn)
            plgpu.wait_smem_to_gmem(0)

        def load_all() -> None:
            plgpu.set_max_registers(24, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(load)

        lax.cond(self.warpgroup < WARPGROUPS, multiply_all, load_all)


class _QueryGradient(_Kernel):
    """128 query rows of one head."""

    def run(self, o_gmem: Any, dq_gmem: Any, delta_gmem: Any) -> None:
        problem = self.problem
        # Heads of one tile are neighbours, so that those that share keys run at the same time; the last tiles of the
        # requests see most keys, and come first.
        tile, self.head = lax.div(self.cta, problem.heads), lax.rem(self.cta, problem.heads)
        self.request = lax.rem(tile, problem.batch)
        offset = (-(-problem.tokens // TILE) - 1 - lax.div(tile, problem.batch)) * TILE
        count = lax.min(jnp.int32(TILE), problem.tokens - offset)
        self.length, start = self.kv_length[self.request], self.q_start[self.request]
        # Where the tile has no second half, the second warpgroup repeats the first one's.
        self.half = lambda part: lax.min(offset + part * ROWS, jnp.int32(problem.tokens - ROWS))
        self.row = lambda part: self.request * problem.tokens + self.half(part)
        self.position = start + self.half(self.warpgroup)
        end, self.first = self.length, jnp.int32(0)
        if self.masking.causal:
            end = lax.min(end, start + offset + count)
        if self.masking.window is not None:
            self.first = _quotient(start + offset - (self.masking.window - 1), ROWS)
        # In units of ROWS keys.
        self.end = lax.min(_quotient(end, ROWS, up=True), jnp.int32(problem.blocks * (KV_BLOCK // ROWS)))
        self.first = lax.min(self.first, self.end)
        self.is_own = self.warpgroup * ROWS < count
        self.run_roles(lambda: self.multiply(o_gmem, dq_gmem, delta_gmem), self.load)

    def load(self) -> None:
        kv_head = lax.div(self.head, self.problem.group)
        for part in range(WARPGROUPS):
            rows, own = pl.ds(self.row(part), ROWS), pl.ds(part * ROWS, ROWS)
            loaded = self.scratch["rows_loaded"].at[part]
            plgpu.copy_gmem_to_smem(self.q_gmem.at[rows, self.head], self.scratch["q"].at[own], loaded)
            plgpu.copy_gmem_to_smem(self.do_gmem.at[rows, self.head], self.scratch["do"].at[own], loaded)

        @pl.loop(self.first, self.end)
        def _(step: Array) -> None:
            slot = lax.rem(step - self.first, self.stages)
            parts = KV_BLOCK // ROWS
            page = self.page_table[self.request, lax.div(step, parts)]
            keys = pl.ds(lax.rem(step, parts) * ROWS, ROWS)
            self.await_free(slot)
            for name, pages in (("k", self.k_gmem), ("v", self.v_gmem)):
                loaded = self.scratch[f"{name}_loaded"].at[slot]
                plgpu.copy_gmem_to_smem(pages.at[page, kv_head, keys], self.scratch[name].at[slot], loaded)

    def multiply(self, o_gmem: Any, dq_gmem: Any, delta_gmem: Any) -> None:
        row = self.row(self.warpgroup)
        rows = pl.ds(row, ROWS)
        delta = self.row_products(o_gmem.at[rows, self.head], self.do_gmem.at[rows, self.head])
        delta_gmem[self.head, rows] = delta
        normalizers = plgpu.load(self.normalizers_gmem.at[self.head, rows], layout=VECTOR, optimized=False)
        slopes = self.head_slope(self.head)
        q, do = self.scratch["q"].at[self.own], self.scratch["do"].at[self.own]
        plgpu.barrier_wait(self.scratch["rows_loaded"].at[self.warpgroup])

        def visit(step: Array, dq: Any, *, masked: bool) -> None:
            slot = lax.rem(step - self.first, self.stages)
            k, v = self.scratch["k"].at[slot], self.scratch["v"].at[slot]
            half = lax.div(self.half(self.warpgroup), jnp.int32(ROWS))
            words = self.mask_words(self.request, self.head, half, step)
            plgpu.barrier_wait(self.scratch["k_loaded"].at[slot])
            keys = step * ROWS
            if masked:
                # A phase of a barrier is waited for once.
                plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])

                @pl.when(keys + ROWS > self.length)
                def _() -> None:
                    # Both warpgroups write the same zeros, so that neither waits for the other.
                    scrub(k, self.length - keys)
                    scrub(v, self.length - keys)

            def in_sight(s: Array) -> Array:
                # Columns of the tile, of each row.
                position = rows_of_tile() + (self.position - keys)
                end = _everywhere(self.length - keys)
                if self.masking.causal:
                    end = jnp.minimum(end, position + 1)
                if self.masking.window is None:
                    return columns_kept(s, end)
                return columns_kept(s, end, position - (self.masking.window - 1))

            tile = _Tile(
                lambda: along_rows(normalizers, _SQUARE),
                lambda: along_rows(delta, _SQUARE),
                lambda: (indices(1, _SQUARE) + (keys - self.position)) - indices(0, _SQUARE),
                _kept_by(in_sight if masked else None, words),
            )

            def products(s_sum: Any, dp_sum: Any) -> Array:
                self.take_turn()
                plgpu.wgmma(s_sum, q, k.T)
                if not masked:
                    plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])
                plgpu.wgmma(dp_sum, do, v.T)
                self.pass_turn()
                p, cap_slope = self.probabilities(plgpu.wgmma_accumulator_load(s_sum, wait_n=1), tile, slopes)
                return self.score_gradients(p, dp_sum[...], tile, cap_slope)

            ds = pl.run_scoped(products, _SUMS(_SQUARE, ACCUMULATOR), _SUMS(_SQUARE, ACCUMULATOR))
            plgpu.wgmma(dq, ds, k)
            plgpu.wgmma_wait(0)
            self.free(slot)

        def add(dq: Any) -> Array:
            def visit_all(first: Array, end: Array, masked: bool) -> None:
                pl.loop(first, end)(lambda step: visit(step, dq, masked=masked))

            # Keys that every row of the warpgroup sees need no mask.
            open_end = _quotient(self.length, ROWS)
            if self.masking.causal:
                open_end = lax.min(open_end, _quotient(self.position + 1, ROWS))
            open_end = lax.max(lax.min(open_end, self.end), self.first)
            open_first = self.first
            if self.masking.window is not None:
                open_first = _quotient(self.position + (ROWS - self.masking.window), ROWS, up=True)
                open_first = lax.max(lax.min(open_first, open_end), self.first)
                visit_all(self.first, open_first, True)
            visit_all(open_first, open_end, False)
            visit_all(open_end, self.end, True)
            return dq[...]

        dq = pl.run_scoped(add, _SUMS((ROWS, self.problem.width), ACCUMULATOR))
        q[...] = (dq * np.float32(self.masking.scale)).astype(self.problem.dtype)
        plgpu.commit_smem()
        pl.when(self.is_own)(lambda: plgpu.copy_smem_to_gmem(q, dq_gmem.at[rows, self.head]))

    def row_products(self, x: Any, y: Any) -> Array:
        """Row sums of `x * y`; the sums of pieces of the columns are added left to right."""
        total = None
        width = self.problem.value_width
        for first in range(0, width, 64):
            part = pl.ds(first, min(64, width - first))
            a, b = (plgpu.load(z.at[:, part], layout=MATRIX, optimized=False).astype(ACCUMULATOR) for z in (x, y))
            # The product of two 16-bit numbers is exact: it makes no difference whether it is fused with the sum.
            piece = row_sums(a * b)
            total = piece if total is None else total + piece
        assert total is not None
        return total


class _KeyGradients(_Kernel):
    """A page of one head of keys."""

    def run(self, delta_gmem: Any, gradients: dict[str, Any], totals: dict[str, Any]) -> None:
        problem = self.problem
        self.delta_gmem, self.gradients, self.totals = delta_gmem, gradients, totals
        # The first blocks are seen by most rows, and come first.
        per_block = problem.batch * problem.kv_heads
        block, rest = lax.div(self.cta, per_block), lax.rem(self.cta, per_block)
        self.request, self.kv_head = lax.div(rest, problem.kv_heads), lax.rem(rest, problem.kv_heads)
        self.length, self.start = self.kv_length[self.request], self.q_start[self.request]
        self.keys = block * KV_BLOCK
        # In units of ROWS query rows of the request.
        self.end, self.first = jnp.int32(problem.tokens // ROWS), jnp.int32(0)
        if self.masking.window is not None:
            last = lax.min(self.keys + KV_BLOCK, self.length) - 1
            self.end = lax.min(self.end, _quotient(last + self.masking.window - self.start, ROWS, up=True))
        if self.masking.causal:
            self.first = lax.min(_quotient(self.keys - self.start, ROWS), self.end)

        self.page = self.page_table[self.request, block]
        pl.when(self.keys < self.length)(lambda: self.run_roles(self.multiply, self.load))

    def load(self) -> None:
        for name, pages in (("k", self.k_gmem), ("v", self.v_gmem)):
            source = pages.at[self.page, self.kv_head]
            plgpu.copy_gmem_to_smem(source, self.scratch[name], self.scratch["page_loaded"])

        def load_head(index: Array, step: Array) -> Array:
            head = self.kv_head * self.problem.group + index

            def load_rows(block: Array, step: Array) -> Array:
                slot = lax.rem(step, self.stages)
                rows = pl.ds(self.request * self.problem.tokens + block * ROWS, ROWS)
                self.await_free(slot)
                for name, source, beside, numbers in (
                    ("q", self.q_gmem, "normalizers", self.normalizers_gmem),
                    ("do", self.do_gmem, "delta", self.delta_gmem),
                ):
                    loaded = self.scratch[f"{name}_loaded"].at[slot]
                    plgpu.copy_gmem_to_smem(source.at[rows, head], self.scratch[name].at[slot], loaded)
                    plgpu.copy_gmem_to_smem(numbers.at[head, rows], self.scratch[beside].at[slot], loaded)
                return step + 1

            return lax.fori_loop(self.first, self.end, load_rows, step)

        lax.fori_loop(0, self.problem.group, load_head, jnp.int32(0))

    def multiply(self) -> None:
        plgpu.barrier_wait(self.scratch["page_loaded"])
        left = self.length - (self.keys + self.warpgroup * ROWS)

        @pl.when(left < ROWS)
        def _() -> None:
            for name in "kv":
                scrub(self.scratch[name].at[self.own], left)

        if self.problem.group == 1:
            for name, x in self.multiply_head(jnp.int32(0)).items():
                self.write(name, x)
            return

        @pl.loop(0, self.problem.group)
        def _(index: Array) -> None:
            for name, x in self.multiply_head(index).items():
                self.add_to_total(name, x, index)

        # Apart from the loop, so that no address of this lives beside the sums.
        for name in self.totals:
            self.write(name, self.total(name))

    def multiply_head(self, index: Array) -> dict[str, Array]:
        """The sums of one query head."""
        problem = self.problem
        keys = self.keys + self.warpgroup * ROWS
        k, v = self.scratch["k"].at[self.own], self.scratch["v"].at[self.own]
        first_step = index * (self.end - self.first)
        slopes = self.head_slope(self.kv_head * problem.group + index)

        def visit(block: Array, sums: dict[str, Any], *, masked: bool) -> None:
            slot = lax.rem(first_step + (block - self.first), self.stages)
            q, do = self.scratch["q"].at[slot], self.scratch["do"].at[slot]
            position = self.start + block * ROWS
            head = self.kv_head * problem.group + index
            words = self.mask_words(self.request, head, lax.div(keys, jnp.int32(ROWS)), block)

            def spread(name: str) -> Array:
                numbers = plgpu.load(self.scratch[name].at[slot], layout=_COLUMN_VECTOR, optimized=False)
                return _along_columns(numbers, _SQUARE)

            def in_sight(s: Array) -> Array:
                # Columns of the tile, of each row: positions of queries, which begin with the key's own if causal.
                key = rows_of_tile() + (keys - position)
                end = _everywhere(ROWS) if self.masking.window is None else key + self.masking.window
                end = jnp.where(key < self.length - position, end, 0)
                return columns_kept(s, end, key if self.masking.causal else None)

            tile = _Tile(
                lambda: spread("normalizers"),
                lambda: spread("delta"),
                lambda: (indices(0, _SQUARE) + (keys - position)) - indices(1, _SQUARE),
                _kept_by(in_sight if masked else None, words),
            )

            def values_alone(s_sum: Any) -> Array:
                self.take_turn()
                plgpu.wgmma(s_sum, k, q.T)
                self.pass_turn()
                return self.probabilities(s_sum[...], tile, slopes)[0].astype(problem.dtype)

            def products(s_sum: Any, dp_sum: Any) -> tuple[Array, Array]:
                self.take_turn()
                plgpu.wgmma(s_sum, k, q.T)
                plgpu.barrier_wait(self.scratch["do_loaded"].at[slot])
                plgpu.wgmma(dp_sum, v, do.T)
                self.pass_turn()
                p, cap_slope = self.probabilities(plgpu.wgmma_accumulator_load(s_sum, wait_n=1), tile, slopes)
                return p.astype(problem.dtype), self.score_gradients(p, dp_sum[...], tile, cap_slope)

            plgpu.barrier_wait(self.scratch["q_loaded"].at[slot])
            square = _SUMS(_SQUARE, ACCUMULATOR)
            if "k" in sums:
                p, ds = pl.run_scoped(products, square, square)
                if "v" in sums:
                    plgpu.wgmma(sums["v"], p, do)
                plgpu.wgmma(sums["k"], ds, q)
            else:
                p = pl.run_scoped(values_alone, square)
                plgpu.barrier_wait(self.scratch["do_loaded"].at[slot])
                plgpu.wgmma(sums["v"], p, do)
            plgpu.wgmma_wait(0)
            self.free(slot)

        def add(**sums: Any) -> dict[str, Array]:
            def visit_all(first: Array, end: Array, masked: bool) -> None:
                pl.loop(first, end)(lambda block: visit(block, sums, masked=masked))

            # Rows that see all of the warpgroup's keys need no mask.
            open_first, open_end = self.first, self.end
            if self.masking.causal:
                open_first = _quotient(keys + (ROWS - 1) - self.start, ROWS, up=True)
            if self.masking.window is not None:
                open_end = _quotient(keys + self.masking.window - self.start, ROWS)
            open_first = lax.select(keys + ROWS <= self.length, open_first, self.end)
            open_first = lax.min(lax.max(open_first, self.first), self.end)
            open_end = lax.min(lax.max(open_end, open_first), self.end)
            visit_all(self.first, open_first, True)
            visit_all(open_first, open_end, False)
            if self.masking.window is not None:
                visit_all(open_end, self.end, True)
            return {name: x[...] for name, x in sums.items()}

        widths = {"k": problem.width, "v": problem.value_width}
        accumulators = {name: _SUMS((ROWS, widths[name]), ACCUMULATOR) for name in self.gradients}
        return pl.run_scoped(add, **accumulators)

    def total_of(self, name: str) -> Any:
        """Where a warpgroup's sum over the heads so far lies: each thread reads what it has written itself."""
        return self.totals[name].at[self.cta, self.own]

    def total(self, name: str) -> Array:
        return plgpu.load(self.total_of(name), layout=MATRIX, optimized=False)

    def add_to_total(self, name: str, x: Array, index: Array) -> None:
        total = self.total_of(name)
        previous = lax.cond(
            index > 0,
            lambda: plgpu.load(total, layout=MATRIX, optimized=False),
            lambda: splat(0.0, x.shape),
        )
        total[...] = previous + x

    def write(self, name: str, x: Array) -> None:
        # Keys and values are not needed any more: the result waits for its copy in their place.
        staged = self.scratch[name].at[self.own]
        y = x * np.float32(self.masking.scale) if name == "k" else x
        staged[...] = y.astype(self.problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, self.gradients[name].at[self.page, self.kv_head, self.own])
