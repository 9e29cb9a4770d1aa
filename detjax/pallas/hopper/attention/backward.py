r"""Gradients of attention on Hopper (Pallas Mosaic GPU): one kernel for queries, one for keys and values.

Forward computes, for one head, with the scale $\sigma$, a soft cap $c$ and ALiBi's slope $\alpha$,

$$X = \sigma Q K^T, \quad T = \tanh(X / c), \quad Z_{ij} = c\,T_{ij} + \alpha (j - i), \quad
P_{ij} = 2^{\log_2(e) Z_{ij} - N_i}, \quad O = P V$$

where $N_i$ is the log2 of the row's normalizer, the sink's share included. Without a soft cap $Z_{ij}$ begins with
$X_{ij}$. From the output's gradient $dO$ follow

$$dP = dO\,V^T, \quad \delta_i = \sum_v dO_{iv} O_{iv}, \quad dS_{ij} = P_{ij} (dP_{ij} - \delta_i) (1 - T_{ij}^2)$$

$$dQ = \sigma\,dS\,K, \quad dK = \sigma\,dS^T Q, \quad dV = P^T dO, \quad
d\mathrm{sink} = -\sum_i 2^{\log_2(e)\,\mathrm{sink} - N_i} \delta_i$$

Without a soft cap the factor $1 - T^2$ is missing. $P$ and $dS$ are rounded to the operands' dtype before they are
multiplied.

Both kernels recompute the probabilities from the forward's normalizers, so that every sum has one owner and one order:

* `dq`: a CTA has 128 query rows of one head and adds keys in ascending order. It also stores each row's `delta` for the
  other kernel.
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
from detjax.kv_pages import KVPages, Queries
from detjax.numerics import ceil_div, round_up
from detjax.options import Masking
from detjax.pallas.hopper.attention.mask import load_words, pack_words
from detjax.pallas.hopper.attention.online_softmax import exponent_scale, soft_cap_tanh
from detjax.pallas.hopper.attention.queries_on_columns import along_columns
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, clear_tail, indices, row_indices, splat
from detjax.pallas.hopper.attention.warpgroups import (
    FIRST_BARRIER,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    TILE,
    WARPGROUPS,
    arrive_for_loader,
    launch,
    pass_turn,
    sync_with_consumers,
    take_turn,
)
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN, PER_ROW, ROWS, swizzled
from detjax.pallas.hopper.mosaic.tiles import fma, mask_bits, mask_columns, row_sums
from detjax.rounding import log2_scale

_FREE: Final = FIRST_BARRIER
"""Named barriers from here on: one for each slot of what is streamed."""
_MOST_STAGES: Final = 4
_MOST_COLUMNS_TOGETHER: Final = 256
"""Columns of keys and values whose sums fit into the registers of one kernel."""
_SQUARE: Final = (ROWS, ROWS)
_SUMS: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call.

    Attributes:
        batch: requests.
        tokens: query rows of each request, a multiple of `ROWS`.
        heads: query heads.
        kv_heads: heads of keys and values.
        blocks: pages of a request in the page table.
        width: columns of queries and keys.
        value_width: columns of values.
        dtype: the operands' dtype, of 2 bytes.
    """

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
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def widths(self) -> dict[str, int]:
        """Columns of keys ("k") and of values ("v")."""
        return {"k": self.width, "v": self.value_width}

    @property
    def most_stages(self) -> int:
        """The most stages that fit into shared memory beside 128 rows of two operands."""
        row = (self.width + self.value_width) * self.dtype.itemsize
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED - TILE * row
        return max(1, min(_MOST_STAGES, free // (ROWS * (row + 2 * np.dtype(ACCUMULATOR).itemsize))))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How work is spread over time; no bit depends on it.

    Attributes:
        stages: slots for what is streamed, 64 rows of two operands each.
        together: whether one kernel adds `dk` and `dv`; else each has its own, for want of registers.
        turns: whether the warpgroups take turns at the products that scores and their gradients are made of.
    """

    stages: int = _MOST_STAGES
    together: bool = True
    turns: bool = True

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"Schedule: stages is {self.stages}; accepted: at least 1")

    def check(self, problem: Problem) -> None:
        """Raises a ValueError if the problem's rows do not fit into so many stages."""
        if self.stages > problem.most_stages:
            raise ValueError(
                f"Schedule: stages is {self.stages} for rows of {problem.width} and {problem.value_width} columns; "
                f"accepted: at most {problem.most_stages}"
            )


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that serves a problem where none is given."""
    return Schedule(problem.most_stages, together=problem.width + problem.value_width <= _MOST_COLUMNS_TOGETHER)


class Residuals(NamedTuple):
    """What the gradients need of the forward call.

    Attributes:
        q: queries of all requests, `[N, H, K]`, N / B rows each, a multiple of 8. Rows that only fill up are finite.
        kv: pages of numbers.
        queries: page table, start and length of each request; no page is in the table twice within the requests'
            lengths, as each gradient has one owner.
        sinks: a score for each head, or None.
        mask: `[B or 1, H or 1, T, s]`, as `ops.attention` has it, or None.
        o: the output, `[N, H, V]`.
        log2_normalizers: log2 of each row's normalizer, `[H, N]` float32.
    """

    q: Array
    kv: KVPages
    queries: Queries
    sinks: Array | None
    mask: Array | None
    o: Array
    log2_normalizers: Array


class _Operands(NamedTuple):
    """Arrays in memory that both kernels read, and `o` or `delta`, which one of them does."""

    q: Any
    do: Any
    normalizers: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    q_start: Any
    kv_length: Any
    slopes: Any | None
    mask: Any | None
    o: Any | None = None
    delta: Any | None = None


def backward(
    residuals: Residuals, do: Array, *, masking: Masking, schedule: Schedule | None = None
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q `[N, H, K]`, of both page pools `[P, h, S, K]` and `[P, h, S, V]`, and of the sinks `[H]` float32.

    Pages that no request owns, and rows of a page after its request's length, get zeros.

    Args:
        residuals: the forward call.
        do: gradient of the output, `[N, H, V]`; zeros in rows that only fill up.
        masking: which keys a query sees, and how scores are shaped.
        schedule: default: `default_schedule`.
    """
    queries, (k_pages, v_pages) = residuals.queries, residuals.kv.numbers
    page_table, start, length = (jnp.asarray(x) for x in (queries.page_table, queries.start, queries.length))
    batch = start.shape[0]
    given = residuals.q.shape[0] // batch
    tokens = round_up(given, ROWS)
    q, o, do = (_filled_up(x, 0, batch, tokens) for x in (residuals.q, residuals.o, do))
    # A row that only fills up gives every key the probability 0.
    normalizers = _filled_up(residuals.log2_normalizers, 1, batch, tokens, jnp.inf)
    widths = q.shape[-1], v_pages.shape[-1]
    problem = Problem(batch, tokens, q.shape[1], k_pages.shape[1], page_table.shape[1], *widths, q.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    slopes = None if masking.alibi_slopes is None else jnp.asarray(masking.alibi_slopes, ACCUMULATOR)
    where = page_table, start, length
    operands = _Operands(q, do, normalizers, k_pages, v_pages, *where, slopes, None)
    words, transposed = _mask_words(problem, residuals.mask)
    dq, delta = _query_gradient(problem, schedule, masking, operands._replace(mask=words, o=o))
    gradients: dict[str, Array] = {}
    for names in ("kv",) if schedule.together else ("k", "v"):
        gradients |= _key_gradients(problem, schedule, masking, names, operands._replace(mask=transposed, delta=delta))
    dk, dv = _zeros_in_free_pages(problem, gradients, page_table, length)
    dsinks = None if residuals.sinks is None else _sink_gradient(problem, residuals.sinks, normalizers, delta)
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


def _mask_words(problem: Problem, mask: Array | None) -> tuple[Array | None, Array | None]:
    """Words of a mask for tiles of queries, and transposed ones for tiles of keys."""
    if mask is None:
        return None, None
    keys = problem.blocks * KV_BLOCK
    return pack_words(mask, problem.tokens, keys), pack_words(mask.swapaxes(2, 3), keys, problem.tokens)


def _zeros_in_free_pages(
    problem: Problem, gradients: dict[str, Array], page_table: Array, kv_length: Array
) -> tuple[Array, Array]:
    """Gradients of keys and values, with zeros in the pages that no request owns, which no kernel writes."""
    is_used = jnp.arange(problem.blocks, dtype=jnp.int32)[None] * KV_BLOCK < kv_length[:, None]
    pages = gradients["k"].shape[0]
    is_owned = jnp.zeros(pages, bool).at[jnp.where(is_used, page_table, pages)].set(True, mode="drop")
    is_owned = is_owned[:, None, None, None]
    dk, dv = (jnp.where(is_owned, gradients[name], jnp.zeros((), problem.dtype)) for name in "kv")
    return dk, dv


def _sink_gradient(problem: Problem, sinks: Array, normalizers: Array, delta: Array) -> Array:
    """`-sum(share of the sink * delta)`: neighbouring rows of a request in pairs, and so on; then request by request.

    So zeros that fill up change nothing, and the order is one that depends on no length.
    """
    share = jnp.exp2((sinks.astype(ACCUMULATOR) * log2_scale(1.0))[:, None] - normalizers)
    x = lax.optimization_barrier(share * delta).reshape(problem.heads, problem.batch, problem.tokens)
    while x.shape[-1] > 1:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[-1] % 2)))
        x = x[..., 0::2] + x[..., 1::2]
    return -functools.reduce(jnp.add, [x[:, request, 0] for request in range(problem.batch)])


def _query_gradient(problem: Problem, schedule: Schedule, masking: Masking, operands: _Operands) -> tuple[Array, Array]:
    """`dq` `[N, H, K]`, and `delta` `[H, N]` float32."""

    def rows(count: tuple[int, ...], width: int) -> Any:
        return plgpu.SMEM((*count, width), problem.dtype, transforms=swizzled(width))

    scratch: dict[str, Any] = {"q": rows((TILE,), problem.width), "do": rows((TILE,), problem.value_width)}
    for name, width in problem.widths.items():
        scratch[name] = rows((schedule.stages, ROWS), width)
        scratch[f"{name}_loaded"] = plgpu.Barrier(num_barriers=schedule.stages)
    scratch["rows_loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS)

    def body(operands: _Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        dq, delta = results
        _QueryGradient(problem, schedule, masking, operands, scratch).run(dq, delta)

    q, normalizers = operands.q, operands.normalizers
    out_type = jax.ShapeDtypeStruct(q.shape, problem.dtype), jax.ShapeDtypeStruct(normalizers.shape, ACCUMULATOR)
    ctas = problem.batch * ceil_div(problem.tokens, TILE) * problem.heads
    dq, delta = launch("attention_backward_queries", body, operands, out_type, ctas, scratch)
    return dq, delta


def _key_gradients(
    problem: Problem, schedule: Schedule, masking: Masking, names: str, operands: _Operands
) -> dict[str, Array]:
    """`dk` if "k" is among the names and `dv` if "v" is, in the pools' shapes.

    Pages that no request owns are not written.
    """

    def rows(count: tuple[int, ...], width: int) -> Any:
        return plgpu.SMEM((*count, width), problem.dtype, transforms=swizzled(width))

    widths = problem.widths
    scratch: dict[str, Any] = {name: rows((KV_BLOCK,), width) for name, width in widths.items()}
    for name, width in (("q", problem.width), ("do", problem.value_width)):
        scratch[name] = rows((schedule.stages, ROWS), width)
        scratch[f"{name}_loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=schedule.stages)
    for name in ("normalizers", "delta"):
        scratch[name] = plgpu.SMEM((schedule.stages, ROWS), ACCUMULATOR)
    scratch["page_loaded"] = plgpu.Barrier(num_arrivals=2)

    items = problem.batch * problem.blocks * problem.kv_heads
    pages = operands.k_pages.shape[0]
    out_type = [
        jax.ShapeDtypeStruct((pages, problem.kv_heads, KV_BLOCK, widths[name]), problem.dtype) for name in names
    ]
    if problem.group > 1:
        # The sums over the heads so far.
        out_type += [jax.ShapeDtypeStruct((items, KV_BLOCK, widths[name]), ACCUMULATOR) for name in names]

    def body(operands: _Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        gradients = dict(zip(names, results, strict=False))
        totals = dict(zip(names, results[len(names) :], strict=False))
        _KeyGradients(problem, schedule, masking, operands, scratch).run(gradients, totals)

    results = launch(f"attention_backward_{names}", body, operands, tuple(out_type), items, scratch)
    return dict(zip(names, results, strict=False))


def _everywhere(value: Array | int) -> Array:
    """The same integer at every row."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.int32), PER_ROW)


def _quotient(x: Array, divisor: int, *, up: bool = False) -> Array:
    """`x / divisor`, at least 0, rounded down or up."""
    return lax.div(lax.max(x + (divisor - 1 if up else 0), jnp.int32(0)), jnp.int32(divisor))


class _Tile(NamedTuple):
    """What the scores of a tile of queries and keys depend on, in the scores' orientation; all of it is recomputed or
    read again where it is used, as registers are few.

    Attributes:
        normalizers: returns the query's normalizer at every element.
        delta: returns the query's delta at every element.
        distances: returns how far each key is from its query, int32.
        mask: returns scores with -inf where a query does not see a key; None where it sees all.
    """

    normalizers: Callable[[], Array]
    delta: Callable[[], Array]
    distances: Callable[[], Array]
    mask: Callable[[Array], Array] | None


def _combined_mask(by_position: Callable[[Array], Array] | None, words: list[Array]) -> Callable[[Array], Array] | None:
    """Masks scores by positions and by the words of the call's mask; None if there is neither."""
    if not words:
        return by_position
    return lambda s: mask_bits(s if by_position is None else by_position(s), *words)


class _Kernel:
    """What both kernels share: operands, turns, and a tile's arithmetic."""

    def __init__(
        self, problem: Problem, schedule: Schedule, masking: Masking, operands: _Operands, scratch: dict[str, Any]
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        self.operands, self.scratch = operands, scratch
        self.warpgroup = lax.axis_index("warpgroup")
        self.cta = lax.axis_index("cta")
        self.stages = jnp.int32(schedule.stages)
        self.rows = pl.ds(self.warpgroup * ROWS, ROWS)

    def take_turn(self) -> None:
        """Waits for the matrix unit."""
        if self.schedule.turns:
            take_turn(self.warpgroup)

    def pass_turn(self) -> None:
        """Passes the matrix unit on."""
        if self.schedule.turns:
            pass_turn(self.warpgroup)

    def await_free(self, slot: Array) -> None:
        """A loading warp waits until a slot is free."""
        sync_with_consumers(_FREE + slot)

    def free(self, slot: Array | int) -> None:
        """Lets a slot be overwritten."""
        arrive_for_loader(_FREE + slot)

    def mask_words(self, request: Array, head: Array, row: Array, column: Array) -> list[Array]:
        """Words of the call's mask for a tile; none without a mask."""
        mask = self.operands.mask
        return [] if mask is None else [load_words(mask, request, head, row, column)]

    def head_slope(self, head: Array) -> Array | None:
        """ALiBi's slope at every element of a tile, or None."""
        slopes = self.operands.slopes
        return None if slopes is None else splat(slopes[head], _SQUARE)

    def probabilities(self, s: Array, tile: _Tile, slopes: Array | None) -> tuple[Array, Array | None]:
        """Probabilities of a tile of scores, and the slope of the soft cap."""
        cap, cap_slope = self.masking.soft_cap, None
        if cap is not None or slopes is not None:
            s = s * np.float32(self.masking.scale)
        if cap is not None:
            tanh = soft_cap_tanh(s, cap)
            s, cap_slope = np.float32(cap) * tanh, fma(-tanh, tanh, splat(1.0, _SQUARE))
        if slopes is not None:
            s = fma(slopes, tile.distances().astype(ACCUMULATOR), s)
        if tile.mask is not None:
            s = tile.mask(s)
        return jnp.exp2(fma(s, splat(exponent_scale(self.masking), _SQUARE), -tile.normalizers())), cap_slope

    def score_gradients(self, p: Array, dp: Array, tile: _Tile, cap_slope: Array | None) -> Array:
        """Gradients of the scaled scores before the soft cap, in the operands' dtype."""
        ds = p * (dp - tile.delta())
        return (ds if cap_slope is None else ds * cap_slope).astype(self.problem.dtype)

    def run_roles(self, multiply: Callable[[], None], load: Callable[[], None]) -> None:
        """Runs the warpgroup's role: `multiply` in two of them, `load` in one warp of the third."""

        def multiply_all() -> None:
            plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
            for slot in range(self.schedule.stages):
                self.free(slot)
            pl.when(self.warpgroup == 1)(self.pass_turn)
            multiply()
            pl.when(self.warpgroup == 0)(self.take_turn)
            plgpu.wait_smem_to_gmem(0)

        def load_all() -> None:
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(load)

        lax.cond(self.warpgroup < WARPGROUPS, multiply_all, load_all)


# --- queries ----------------------------------------------------------------------------------------------------------


class _QueryRows(NamedTuple):
    """A warpgroup's query rows.

    Attributes:
        rows: where they are in memory.
        q: the queries in shared memory.
        do: the output's gradients in shared memory.
        delta: row sums of `do * o`.
        normalizers: log2 of the rows' normalizers.
        slopes: ALiBi's slope at every element of a tile, or None.
    """

    rows: Any
    q: Any
    do: Any
    delta: Array
    normalizers: Array
    slopes: Array | None


class _QueryGradient(_Kernel):
    """A CTA with 128 query rows of one head. Keys are visited in tiles of `ROWS`."""

    def __init__(
        self, problem: Problem, schedule: Schedule, masking: Masking, operands: _Operands, scratch: dict[str, Any]
    ) -> None:
        super().__init__(problem, schedule, masking, operands, scratch)
        # Heads of one tile are neighbours, so that those that share keys run at the same time; the last tiles of the
        # requests see most keys, and come first.
        tile, self.head = lax.div(self.cta, problem.heads), lax.rem(self.cta, problem.heads)
        self.request = lax.rem(tile, problem.batch)
        self.offset = (ceil_div(problem.tokens, TILE) - 1 - lax.div(tile, problem.batch)) * TILE
        count = lax.min(jnp.int32(TILE), problem.tokens - self.offset)
        self.length, start = operands.kv_length[self.request], operands.q_start[self.request]
        self.position = start + self.row_in_request(self.warpgroup)
        end, self.first = self.length, jnp.int32(0)
        if masking.causal:
            end = lax.min(end, start + self.offset + count)
        if masking.window is not None:
            self.first = _quotient(start + self.offset - (masking.window - 1), ROWS)
        # In units of ROWS keys.
        self.end = lax.min(_quotient(end, ROWS, up=True), jnp.int32(problem.blocks * (KV_BLOCK // ROWS)))
        self.first = lax.min(self.first, self.end)
        self.is_stored = self.warpgroup * ROWS < count

    def row_in_request(self, warpgroup: Array | int) -> Array:
        """A warpgroup's first row in the request. Where the tile has no second half, the second warpgroup repeats the
        first one's."""
        return lax.min(self.offset + warpgroup * ROWS, jnp.int32(self.problem.tokens - ROWS))

    def row(self, warpgroup: Array | int) -> Array:
        """A warpgroup's first row in the arrays of all requests."""
        return self.request * self.problem.tokens + self.row_in_request(warpgroup)

    def run(self, dq_gmem: Any, delta_gmem: Any) -> None:
        """Runs the warpgroup's role."""
        self.run_roles(lambda: self.multiply(dq_gmem, delta_gmem), self.load)

    def load(self) -> None:
        """Loads queries and gradients of the output, then keys and values in tiles of `ROWS`."""
        operands = self.operands
        kv_head = lax.div(self.head, self.problem.group)
        for warpgroup in range(WARPGROUPS):
            source, target = pl.ds(self.row(warpgroup), ROWS), pl.ds(warpgroup * ROWS, ROWS)
            loaded = self.scratch["rows_loaded"].at[warpgroup]
            plgpu.copy_gmem_to_smem(operands.q.at[source, self.head], self.scratch["q"].at[target], loaded)
            plgpu.copy_gmem_to_smem(operands.do.at[source, self.head], self.scratch["do"].at[target], loaded)

        @pl.loop(self.first, self.end)
        def _(step: Array) -> None:
            slot = lax.rem(step - self.first, self.stages)
            parts = KV_BLOCK // ROWS
            page = operands.page_table[self.request, lax.div(step, parts)]
            keys = pl.ds(lax.rem(step, parts) * ROWS, ROWS)
            self.await_free(slot)
            for name, pages in (("k", operands.k_pages), ("v", operands.v_pages)):
                loaded = self.scratch[f"{name}_loaded"].at[slot]
                plgpu.copy_gmem_to_smem(pages.at[page, kv_head, keys], self.scratch[name].at[slot], loaded)

    def multiply(self, dq_gmem: Any, delta_gmem: Any) -> None:
        """Computes the warpgroup's rows of `delta` and `dq`."""
        rows = self.load_rows(delta_gmem)
        sums = _SUMS((ROWS, self.problem.width), ACCUMULATOR)
        dq = pl.run_scoped(functools.partial(self.visit_keys, rows), sums)
        rows.q[...] = (dq * np.float32(self.masking.scale)).astype(self.problem.dtype)
        plgpu.commit_smem()
        pl.when(self.is_stored)(lambda: plgpu.copy_smem_to_gmem(rows.q, dq_gmem.at[rows.rows, self.head]))

    def load_rows(self, delta_gmem: Any) -> _QueryRows:
        """Waits for the warpgroup's rows, and stores their `delta`."""
        operands = self.operands
        row = self.row(self.warpgroup)
        rows = pl.ds(row, ROWS)
        delta = self.row_products(operands.o.at[rows, self.head], operands.do.at[rows, self.head])
        delta_gmem[self.head, rows] = delta
        normalizers = plgpu.load(operands.normalizers.at[self.head, rows], layout=PER_ROW, optimized=False)
        slopes = self.head_slope(self.head)
        q, do = self.scratch["q"].at[self.rows], self.scratch["do"].at[self.rows]
        plgpu.barrier_wait(self.scratch["rows_loaded"].at[self.warpgroup])
        return _QueryRows(rows, q, do, delta, normalizers, slopes)

    def row_products(self, x: Any, y: Any) -> Array:
        """Row sums of `x * y`; the sums of pieces of the columns are added left to right."""
        total = None
        width = self.problem.value_width
        for first in range(0, width, ROWS):
            part = pl.ds(first, min(ROWS, width - first))
            a, b = (plgpu.load(z.at[:, part], layout=MATRIX, optimized=False).astype(ACCUMULATOR) for z in (x, y))
            # The product of two 16-bit numbers is exact: it makes no difference whether it is fused with the sum.
            piece = row_sums(a * b)
            total = piece if total is None else total + piece
        assert total is not None
        return total

    def visit_keys(self, rows: _QueryRows, dq: Any) -> Array:
        """Adds all tiles of keys to an accumulator, and returns its content."""

        def visit_all(first: Array, end: Array, is_masked: bool) -> None:
            pl.loop(first, end)(lambda step: self.visit(rows, step, dq, is_masked=is_masked))

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

    def visit(self, rows: _QueryRows, step: Array, dq: Any, *, is_masked: bool) -> None:
        """Adds a tile of keys to the gradient."""
        slot = lax.rem(step - self.first, self.stages)
        k, v = self.scratch["k"].at[slot], self.scratch["v"].at[slot]
        tile_row = lax.div(self.row_in_request(self.warpgroup), jnp.int32(ROWS))
        words = self.mask_words(self.request, self.head, tile_row, step)
        plgpu.barrier_wait(self.scratch["k_loaded"].at[slot])
        keys = step * ROWS
        if is_masked:
            # A phase of a barrier is waited for once.
            plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])

            @pl.when(keys + ROWS > self.length)
            def _() -> None:
                # Both warpgroups write the same zeros, so that neither waits for the other.
                clear_tail(k, self.length - keys)
                clear_tail(v, self.length - keys)

        by_position = functools.partial(self.mask_by_position, keys) if is_masked else None
        tile = _Tile(
            lambda: along_rows(rows.normalizers, _SQUARE),
            lambda: along_rows(rows.delta, _SQUARE),
            lambda: (indices(1, _SQUARE) + (keys - self.position)) - indices(0, _SQUARE),
            _combined_mask(by_position, words),
        )

        def multiply(s_sum: Any, dp_sum: Any) -> Array:
            self.take_turn()
            plgpu.wgmma(s_sum, rows.q, k.T)
            if not is_masked:
                plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])
            plgpu.wgmma(dp_sum, rows.do, v.T)
            self.pass_turn()
            p, cap_slope = self.probabilities(plgpu.wgmma_accumulator_load(s_sum, wait_n=1), tile, rows.slopes)
            return self.score_gradients(p, dp_sum[...], tile, cap_slope)

        ds = pl.run_scoped(multiply, _SUMS(_SQUARE, ACCUMULATOR), _SUMS(_SQUARE, ACCUMULATOR))
        plgpu.wgmma(dq, ds, k)
        plgpu.wgmma_wait(0)
        self.free(slot)

    def mask_by_position(self, keys: Array, s: Array) -> Array:
        """A tile with -inf where a key is hidden by the length, by causality or by the window."""
        # Columns of the tile, of each row.
        position = row_indices() + (self.position - keys)
        end = _everywhere(self.length - keys)
        if self.masking.causal:
            end = jnp.minimum(end, position + 1)
        if self.masking.window is None:
            return mask_columns(s, end)
        return mask_columns(s, end, position - (self.masking.window - 1))


# --- keys and values --------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """A query head that a warpgroup adds to the gradients of its keys.

    Attributes:
        index: the head's number in the group.
        keys: position of the warpgroup's first key.
        k: the keys in shared memory.
        v: the values in shared memory.
        first_step: the step of the head's first rows.
        slopes: ALiBi's slope at every element of a tile, or None.
    """

    index: Array
    keys: Array
    k: Any
    v: Any
    first_step: Array
    slopes: Array | None


class _KeyGradients(_Kernel):
    """A CTA with a page of one head of keys. Query rows are visited in blocks of `ROWS`."""

    def __init__(
        self, problem: Problem, schedule: Schedule, masking: Masking, operands: _Operands, scratch: dict[str, Any]
    ) -> None:
        super().__init__(problem, schedule, masking, operands, scratch)
        # The first blocks are seen by most rows, and come first.
        per_block = problem.batch * problem.kv_heads
        block, rest = lax.div(self.cta, per_block), lax.rem(self.cta, per_block)
        self.request, self.kv_head = lax.div(rest, problem.kv_heads), lax.rem(rest, problem.kv_heads)
        self.length, self.start = operands.kv_length[self.request], operands.q_start[self.request]
        self.keys = block * KV_BLOCK
        # In units of ROWS query rows of the request.
        self.end, self.first = jnp.int32(problem.tokens // ROWS), jnp.int32(0)
        if masking.window is not None:
            last = lax.min(self.keys + KV_BLOCK, self.length) - 1
            self.end = lax.min(self.end, _quotient(last + masking.window - self.start, ROWS, up=True))
        if masking.causal:
            self.first = lax.min(_quotient(self.keys - self.start, ROWS), self.end)
        self.page = operands.page_table[self.request, block]

    def run(self, gradients: dict[str, Any], totals: dict[str, Any]) -> None:
        """Runs the warpgroup's role, if the page has keys.

        Args:
            gradients: `dk` ("k") and `dv` ("v") in memory.
            totals: for groups of heads, the sums of the heads so far in memory.
        """
        pl.when(self.keys < self.length)(lambda: self.run_roles(lambda: self.multiply(gradients, totals), self.load))

    def load(self) -> None:
        """Loads the page, then, for each query head of the group, the rows that see it."""
        operands = self.operands
        for name, pages in (("k", operands.k_pages), ("v", operands.v_pages)):
            source = pages.at[self.page, self.kv_head]
            plgpu.copy_gmem_to_smem(source, self.scratch[name], self.scratch["page_loaded"])

        def load_head(index: Array, step: Array) -> Array:
            head = self.kv_head * self.problem.group + index
            return lax.fori_loop(self.first, self.end, functools.partial(self.load_rows, head), step)

        lax.fori_loop(0, self.problem.group, load_head, jnp.int32(0))

    def load_rows(self, head: Array, block: Array, step: Array) -> Array:
        """Loads a block of query rows, and returns the next step."""
        operands = self.operands
        slot = lax.rem(step, self.stages)
        rows = pl.ds(self.request * self.problem.tokens + block * ROWS, ROWS)
        self.await_free(slot)
        for name, source, name_of_numbers, numbers in (
            ("q", operands.q, "normalizers", operands.normalizers),
            ("do", operands.do, "delta", operands.delta),
        ):
            loaded = self.scratch[f"{name}_loaded"].at[slot]
            plgpu.copy_gmem_to_smem(source.at[rows, head], self.scratch[name].at[slot], loaded)
            plgpu.copy_gmem_to_smem(numbers.at[head, rows], self.scratch[name_of_numbers].at[slot], loaded)
        return step + 1

    def multiply(self, gradients: dict[str, Any], totals: dict[str, Any]) -> None:
        """Computes the gradients of the warpgroup's keys and values."""
        plgpu.barrier_wait(self.scratch["page_loaded"])
        count = self.length - (self.keys + self.warpgroup * ROWS)

        @pl.when(count < ROWS)
        def _() -> None:
            for name in "kv":
                clear_tail(self.scratch[name].at[self.rows], count)

        if self.problem.group == 1:
            for name, x in self.multiply_head(tuple(gradients), jnp.int32(0)).items():
                self.write(name, x, gradients[name])
            return

        @pl.loop(0, self.problem.group)
        def _(index: Array) -> None:
            for name, x in self.multiply_head(tuple(gradients), index).items():
                self.add_to_total(totals[name], x, index)

        # Apart from the loop, so that no address of this lives beside the sums.
        for name, totals_of_name in totals.items():
            self.write(name, self.load_total(self.total(totals_of_name)), gradients[name])

    def multiply_head(self, names: tuple[str, ...], index: Array) -> dict[str, Array]:
        """The sums of one query head for the gradients named."""
        keys = self.keys + self.warpgroup * ROWS
        k, v = self.scratch["k"].at[self.rows], self.scratch["v"].at[self.rows]
        first_step = index * (self.end - self.first)
        head = _Head(index, keys, k, v, first_step, self.head_slope(self.kv_head * self.problem.group + index))
        accumulators = {name: _SUMS((ROWS, self.problem.widths[name]), ACCUMULATOR) for name in names}
        return pl.run_scoped(functools.partial(self.visit_rows, head), **accumulators)

    def visit_rows(self, head: _Head, **sums: Any) -> dict[str, Array]:
        """Adds all blocks of query rows to accumulators, and returns their contents."""

        def visit_all(first: Array, end: Array, is_masked: bool) -> None:
            pl.loop(first, end)(lambda block: self.visit(head, block, sums, is_masked=is_masked))

        # Rows that see all of the warpgroup's keys need no mask.
        open_first, open_end = self.first, self.end
        if self.masking.causal:
            open_first = _quotient(head.keys + (ROWS - 1) - self.start, ROWS, up=True)
        if self.masking.window is not None:
            open_end = _quotient(head.keys + self.masking.window - self.start, ROWS)
        open_first = lax.select(head.keys + ROWS <= self.length, open_first, self.end)
        open_first = lax.min(lax.max(open_first, self.first), self.end)
        open_end = lax.min(lax.max(open_end, open_first), self.end)
        visit_all(self.first, open_first, True)
        visit_all(open_first, open_end, False)
        if self.masking.window is not None:
            visit_all(open_end, self.end, True)
        return {name: x[...] for name, x in sums.items()}

    def visit(self, head: _Head, block: Array, sums: dict[str, Any], *, is_masked: bool) -> None:
        """Adds a block of query rows to the gradients."""
        slot = lax.rem(head.first_step + (block - self.first), self.stages)
        q, do = self.scratch["q"].at[slot], self.scratch["do"].at[slot]
        position = self.start + block * ROWS
        query_head = self.kv_head * self.problem.group + head.index
        words = self.mask_words(self.request, query_head, lax.div(head.keys, jnp.int32(ROWS)), block)
        by_position = functools.partial(self.mask_by_position, head.keys, position) if is_masked else None
        tile = _Tile(
            lambda: self.numbers_of_queries("normalizers", slot),
            lambda: self.numbers_of_queries("delta", slot),
            lambda: (indices(0, _SQUARE) + (head.keys - position)) - indices(1, _SQUARE),
            _combined_mask(by_position, words),
        )
        plgpu.barrier_wait(self.scratch["q_loaded"].at[slot])
        if "k" in sums:
            p, ds = self.probabilities_and_score_gradients(head, slot, tile)
            if "v" in sums:
                plgpu.wgmma(sums["v"], p, do)
            plgpu.wgmma(sums["k"], ds, q)
        else:
            p = self.probabilities_alone(head, slot, tile)
            plgpu.barrier_wait(self.scratch["do_loaded"].at[slot])
            plgpu.wgmma(sums["v"], p, do)
        plgpu.wgmma_wait(0)
        self.free(slot)

    def numbers_of_queries(self, name: str, slot: Array) -> Array:
        """Numbers of the queries in a slot, at every element of a tile."""
        numbers = plgpu.load(self.scratch[name].at[slot], layout=PER_COLUMN, optimized=False)
        return along_columns(numbers, _SQUARE)

    def mask_by_position(self, keys: Array, position: Array, s: Array) -> Array:
        """A tile with -inf where a key is hidden by the length, by causality or by the window."""
        # Columns of the tile, of each row: positions of queries, which begin with the key's own if causal.
        key = row_indices() + (keys - position)
        end = _everywhere(ROWS) if self.masking.window is None else key + self.masking.window
        end = jnp.where(key < self.length - position, end, 0)
        return mask_columns(s, end, key if self.masking.causal else None)

    def probabilities_alone(self, head: _Head, slot: Array, tile: _Tile) -> Array:
        """Transposed probabilities of a tile, rounded."""
        q = self.scratch["q"].at[slot]

        def multiply(s_sum: Any) -> Array:
            self.take_turn()
            plgpu.wgmma(s_sum, head.k, q.T)
            self.pass_turn()
            return self.probabilities(s_sum[...], tile, head.slopes)[0].astype(self.problem.dtype)

        return pl.run_scoped(multiply, _SUMS(_SQUARE, ACCUMULATOR))

    def probabilities_and_score_gradients(self, head: _Head, slot: Array, tile: _Tile) -> tuple[Array, Array]:
        """Transposed probabilities of a tile and gradients of its scores, rounded."""
        q, do = self.scratch["q"].at[slot], self.scratch["do"].at[slot]

        def multiply(s_sum: Any, dp_sum: Any) -> tuple[Array, Array]:
            self.take_turn()
            plgpu.wgmma(s_sum, head.k, q.T)
            plgpu.barrier_wait(self.scratch["do_loaded"].at[slot])
            plgpu.wgmma(dp_sum, head.v, do.T)
            self.pass_turn()
            p, cap_slope = self.probabilities(plgpu.wgmma_accumulator_load(s_sum, wait_n=1), tile, head.slopes)
            return p.astype(self.problem.dtype), self.score_gradients(p, dp_sum[...], tile, cap_slope)

        return pl.run_scoped(multiply, _SUMS(_SQUARE, ACCUMULATOR), _SUMS(_SQUARE, ACCUMULATOR))

    def total(self, totals: Any) -> Any:
        """Where a warpgroup's sum over the heads so far lies: each thread reads what it has written itself."""
        return totals.at[self.cta, self.rows]

    def load_total(self, total: Any) -> Array:
        """The sum over the heads so far."""
        return plgpu.load(total, layout=MATRIX, optimized=False)

    def add_to_total(self, totals: Any, x: Array, index: Array) -> None:
        """Adds a head's sums to those of the heads before it."""
        total = self.total(totals)
        previous = lax.cond(index > 0, lambda: self.load_total(total), lambda: splat(0.0, x.shape))
        total[...] = previous + x

    def write(self, name: str, x: Array, target: Any) -> None:
        """Writes the gradients of the warpgroup's keys or values."""
        # Keys and values are not needed any more: the result waits for its copy in their place.
        staged = self.scratch[name].at[self.rows]
        y = x * np.float32(self.masking.scale) if name == "k" else x
        staged[...] = y.astype(self.problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, target.at[self.page, self.kv_head, self.rows])
