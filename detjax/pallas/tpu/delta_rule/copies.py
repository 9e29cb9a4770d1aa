"""Copies between HBM and VMEM that the kernel of the gated delta rule starts and waits for itself."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.operands.linear_attention_state import DELTA_ROWS
from detjax.pallas.tpu.delta_rule.problem import Problem
from detjax.pallas.tpu.delta_rule.units import UNITS, for_each, in_unit
from detjax.pallas.tpu.delta_rule.visits import Visits
from detjax.pallas.tpu.device import SUBLANES

type Act = Callable[[Any], None]
"""Starts a copy, or waits for it."""


class Arrays(NamedTuple):
    """Arrays in HBM from which the kernel copies.

    Attributes:
        q: queries `[N, h, K]`.
        k: keys `[N, h, K]`.
        v: values `[N, H, V]`.
        s: the slots' states `[R, H, K, V]`.
        keys: the slots' keys `[R, rows, h, K]`.
        updates: the slots' updates `[R, rows, H, V]`.
    """

    q: Any
    k: Any
    v: Any
    s: Any
    keys: Any
    updates: Any


class Results(NamedTuple):
    """Results in HBM, or references to them: outputs `[N, H, V]`, and the arrays of slots.

    They overwrite an array of zeros and the given arrays of slots.
    """

    o: Any
    s: Any
    keys: Any
    updates: Any


class Buffers(NamedTuple):
    """Sources and targets of copies in VMEM, two of each, so that the next visit's are loaded during computation.

    Attributes:
        q: queries `[2, DELTA_CHUNK, h, K]`.
        k: keys `[2, DELTA_CHUNK, h, K]`.
        v: values `[2, DELTA_CHUNK, H, V]`.
        keys: the slot's rows of keys, loaded and then stored.
        updates: the slot's rows of updates, loaded and then stored.
        s: states float32 `[2, H, K, V]`, alternating between requests.
        o: outputs `[DELTA_CHUNK, H, V]`.
        loaded: semaphores `[2]` of a visit's loads.
        stored: a semaphore of a visit's stores.
    """

    q: Any
    k: Any
    v: Any
    keys: Any
    updates: Any
    s: Any
    o: Any
    loaded: Any
    stored: Any

    @classmethod
    def scratch(cls, problem: Problem) -> "Buffers":
        """Returns the types of the buffers' scratch memory."""
        keys = DELTA_CHUNK, problem.key_heads, problem.key_width
        values = DELTA_CHUNK, problem.heads, problem.value_width
        key_rows, value_rows = (pltpu.VMEM((2, *shape), problem.dtype) for shape in (keys, values))
        s = pltpu.VMEM((2, problem.heads, problem.key_width, problem.value_width), ACCUMULATOR)
        o = pltpu.VMEM(values, problem.dtype)
        semaphores = pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA
        return cls(key_rows, key_rows, value_rows, key_rows, value_rows, s, o, *semaphores)


@dataclasses.dataclass(frozen=True, eq=False)
class Copies:
    """The loads and stores of a visit, with references to HBM and VMEM."""

    visits: Visits
    tokens: tuple[Any, ...]
    results: Results
    buffers: Buffers

    def load(self, visit: Array, act: Act) -> None:
        """Starts a visit's loads, or waits for them."""
        visits, results, buffers = self.visits, self.results, self.buffers
        place, slot = lax.rem(visit, 2), visits.slot[visit]
        arrived = buffers.loaded.at[place]

        def copy_tokens(first: Array, size: int) -> None:
            source, target = pl.ds(visits.row[visit] + first, size), pl.ds(first, size)
            for x, buffer in zip(self.tokens, buffers[:3], strict=True):
                act(pltpu.make_async_copy(x.at[source], buffer.at[place, target], arrived))

        def copy_rows(unit: Array) -> None:
            source, target = self.rows_of_slot(visit, unit), pl.ds(unit * SUBLANES, SUBLANES)
            for x, buffer in ((results.keys, buffers.keys), (results.updates, buffers.updates)):
                act(pltpu.make_async_copy(x.at[slot, source], buffer.at[place, target], arrived))

        _for_each_span(visits.low[visit], visits.high[visit], copy_tokens)
        for_each(UNITS, lambda unit: pl.when(unit * SUBLANES < visits.low[visit])(lambda: copy_rows(unit)))

        @pl.when(visits.loads[visit] > 0)
        def copy_state() -> None:
            act(pltpu.make_async_copy(results.s.at[slot], buffers.s.at[visits.buffer[visit]], arrived))

    def store(self, visit: Array, act: Act) -> None:
        """Starts the stores of outputs and of the rows that the slot keeps, or waits for them."""
        visits, results, buffers = self.visits, self.results, self.buffers
        place, slot, low, high = lax.rem(visit, 2), visits.slot[visit], visits.low[visit], visits.high[visit]

        def copy_outputs(first: Array, size: int) -> None:
            source, target = pl.ds(first, size), pl.ds(visits.row[visit] + first, size)
            act(pltpu.make_async_copy(buffers.o.at[source], results.o.at[target], buffers.stored))

        def copy_rows(unit: Array) -> None:
            # A unit may reach beyond the last token. It then overwrites rows of tokens so old that no call needs them.
            source, target = pl.ds(unit * SUBLANES, SUBLANES), self.rows_of_slot(visit, unit)
            for buffer, x in ((buffers.keys, results.keys), (buffers.updates, results.updates)):
                act(pltpu.make_async_copy(buffer.at[place, source], x.at[slot, target], buffers.stored))

        def copy_kept_rows(unit: Array) -> None:
            pl.when(in_unit(unit, low, high) & (visits.keeps_rows[visit] > 0))(lambda: copy_rows(unit))

        _for_each_span(low, high, copy_outputs)
        for_each(UNITS, copy_kept_rows)

    def store_state(self, visit: Array, state: Any, act: Act) -> None:
        """Starts the store of the state before the chunk, or waits for it, if the slot keeps that state."""
        target = self.results.s.at[self.visits.slot[visit]]
        pl.when(self.visits.keeps_state[visit] > 0)(
            lambda: act(pltpu.make_async_copy(state, target, self.buffers.stored))
        )

    def rows_of_slot(self, visit: Array, unit: Array) -> Any:
        """Returns a unit's rows in a slot. Units never wrap around, since the ring is a multiple of their size."""
        return pl.ds(lax.rem(self.visits.chunk[visit] * DELTA_CHUNK + unit * SUBLANES, DELTA_ROWS), SUBLANES)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


def _for_each_span(low: Array, high: Array, copy: Callable[[Array, int], None]) -> None:
    """Copies places from `low` to `high`: complete units at once, other places individually."""

    def copy_unit(unit: Array) -> None:
        first = unit * SUBLANES
        whole = (low <= first) & (first + SUBLANES <= high)
        pl.when(whole)(lambda: copy(first, SUBLANES))

        @pl.when(~whole & in_unit(unit, low, high))
        def copy_one_by_one() -> None:
            span = jnp.maximum(low, first), jnp.minimum(high, first + SUBLANES)
            lax.fori_loop(*span, lambda place, _: copy(place, 1), None)

    for_each(UNITS, copy_unit)
