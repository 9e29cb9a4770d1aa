"""Primitives on lines: 128 numbers, one per thread of a warpgroup."""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir.dialects import arith, memref

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic import primitive, with_twin
from detjax.pallas.hopper.mosaic.layouts import NUMBER, PER_THREAD
from detjax.pallas.hopper.mosaic.registers import (
    array,
    as_index,
    element,
    empty_registers,
    i32,
    index,
    int32,
    packed,
    thread_of_warpgroup,
    warp_and_lane,
)
from detjax.pallas.hopper.mosaic.warps import from_lanes_below, warp

_LINE = plgpu.ShapeDtypeStruct((WARPGROUP,), ACCUMULATOR, layout=PER_THREAD)


def _plain_running_maxima(x: Array, start: Array, exchange: Any) -> tuple[Array, Array]:
    after = jnp.maximum(lax.cummax(x), start)
    return jnp.concatenate([start[None], after[:-1]]), after


@primitive(twin=_plain_running_maxima, args=(PER_THREAD, NUMBER, plgpu.RefType()), out=(_LINE, _LINE))
def running_maxima(x: Any, start: Any, exchange: Any) -> Any:
    """Returns the running maxima of `x [128]` from `start` on, before each element and including it.

    All threads meet once. Shared memory `exchange [4]` holds the maxima of the warps; before the next call with the
    same memory, all threads have to meet once more.
    """
    warp, lane = warp_and_lane()
    # First within each warp. The lowest lanes get their own numbers from `from_lanes_below`, which change no maximum.
    value = element(x.registers.item())
    for distance in (1, 2, 4, 8, 16):
        value = arith.maximumf(value, from_lanes_below(value, distance))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, int32(WARP - 1))):
        memref.store(value, exchange, [as_index(warp)])
    mgpu.warpgroup_barrier()
    # Then each thread takes in the maxima of earlier warps. All threads read all of them and select, without a branch.
    prior = start.registers.item()
    for other in range(WARPGROUP // WARP - 1):
        largest = arith.maximumf(prior, memref.load(exchange, [index(other)]))
        prior = arith.select(arith.cmpi(arith.CmpIPredicate.sgt, warp, int32(other)), largest, prior)
    after = arith.maximumf(value, prior)
    is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))
    before = arith.select(is_first, prior, from_lanes_below(after, 1))
    return _as_line(before), _as_line(after)


def _plain_store_changes(before: Array, after: Array, changes: Any) -> None:
    changes[...] = (before != after).reshape(changes.shape[0], -1).any(axis=1).astype(jnp.int32)


@primitive(twin=_plain_store_changes, args=(PER_THREAD, PER_THREAD, plgpu.RefType()))
def store_changes(before: Any, after: Any, changes: Any) -> None:
    """Stores to shared memory `[4]`, for each 32 of 128 elements, whether two arrays differ in any."""
    warp, lane = warp_and_lane()
    differs = arith.cmpf(arith.CmpFPredicate.UNE, element(before.registers.item()), element(after.registers.item()))
    differs = mgpu.redux(arith.extui(i32(), differs), int32(0xFFFFFFFF), mgpu.ReductionKind.OR)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))):
        memref.store(differs, changes, [as_index(warp)])


def _plain_load_line(source: Any) -> Array:
    return jnp.tile(source[...], WARPGROUP // source.shape[0])


@primitive(twin=_plain_load_line, args=(plgpu.RefType(),), out=_LINE)
def load_line(source: Any) -> Any:
    """Loads memory `[n]` into 128 threads: n threads have one number each, the next n the same again."""
    (count,) = source.type.shape
    return _as_line(memref.load(source, [as_index(arith.remui(mgpu.thread_idx(), int32(count)))]))


def _copy(x: Any, target: Any) -> None:
    target[...] = x[...]


def _plain_store_line(x: Array, target: Any, first: Array, *, count: int) -> None:
    for place in range(count):
        pl.when(first + place < target.shape[0])(functools.partial(_copy, x[place], target.at[first + place]))


@primitive(twin=_plain_store_line, args=(PER_THREAD, plgpu.RefType(), NUMBER))
def store_line(x: Any, target: Any, first: Any, *, count: int) -> None:
    """Stores the numbers of the first `count` threads to memory `[n]` from element `first` on, up to its end."""
    (size,) = target.type.shape
    thread = thread_of_warpgroup()
    position = arith.addi(first.registers.item(), thread)
    is_counted = arith.cmpi(arith.CmpIPredicate.ult, thread, int32(count))
    is_inside = arith.cmpi(arith.CmpIPredicate.ult, position, int32(size))
    with mgpu.when(arith.andi(is_counted, is_inside)):
        memref.store(element(x.registers.item()), target, [as_index(position)])


def _plain_in_warps(first: int, end: int, step: Callable[[Array], Array], x: Array) -> Array:
    return step(x)


@with_twin(_plain_in_warps)
def in_warps(first: int, end: int, step: Callable[[Array], Array], x: Array) -> Array:
    """Returns `step(x)` in the warps from `first` to before `end` of the warpgroup, `x` in the others."""
    # A whole warp branches, so its threads do not diverge. `step` must not meet other warps.
    if end - first == WARPGROUP // WARP:
        return step(x)
    number = warp()
    return lax.cond((number >= first) & (number < end), step, lambda x: x, x)


def _as_line(value: Any) -> Any:
    """Returns the array of each thread's number."""
    registers = empty_registers(PER_THREAD, (WARPGROUP,))
    registers[...] = packed([value])
    return array(registers, PER_THREAD)
