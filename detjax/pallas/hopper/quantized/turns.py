"""The turn of a warpgroup that adds a stage's products to sums, which it takes over from another and hands on.

What others wait for is as short as possible: a barrier, a load, products, a store and a barrier. All that does not
depend on the sums is computed before, and the compiler must leave it there.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import no_twin, primitive, with_twin
from detjax.pallas.hopper.mosaic.barriers import arrive, sync
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, ROWS, swizzled
from detjax.pallas.hopper.mosaic.products import descriptor_of_rows, started
from detjax.pallas.hopper.mosaic.registers import (
    array,
    element,
    empty_registers,
    int32,
    packed,
    plus,
    shared_address,
    shared_pointer,
    thread_of_warpgroup,
    times,
)
from detjax.pallas.hopper.mosaic.tiles import load_by_thread, store_by_thread

_THREADS = 2 * WARPGROUP
"""Threads that meet at a turn's barrier: those that hand the sums on, and those that take them over."""
_FOUR_BYTES = 16
"""Bytes of a thread's four numbers of 8 columns."""


def _plain_take_turn(
    weights: Array, tokens: Any, taken: Any, handed: Any, turn: Array, following: Array, *conditions: Array
) -> Array:
    is_awaited, has_sums, is_handed_on = (condition > 0 for condition in conditions)
    pl.when(is_awaited)(lambda: sync(turn, _THREADS))
    zeros = jnp.zeros((ROWS, tokens.shape[0]), ACCUMULATOR)
    sums = lax.cond(has_sums, lambda: load_by_thread(taken), lambda: zeros)

    def multiply(total: Any) -> Array:
        total[...] = sums
        plgpu.wgmma(total, weights, tokens.T)
        return total[...]

    sums = pl.run_scoped(multiply, plgpu.ACC(zeros.shape, ACCUMULATOR))  # pyright: ignore
    store_by_thread(sums, handed)
    pl.when(is_handed_on)(lambda: arrive(following, _THREADS))
    return sums


@primitive(
    twin=no_twin("_take_turn"),
    args=(MATRIX, plgpu.RefType(swizzled(64)), plgpu.RefType(), plgpu.RefType(), *(NUMBER,) * 5),
    out=lambda weights, tokens, *_: plgpu.ShapeDtypeStruct((ROWS, tokens.shape[0]), ACCUMULATOR, layout=MATRIX),
)
def _take_turn(weights: Any, tokens: Any, taken: Any, handed: Any, *numbers: Any) -> Any:
    turn, following, is_awaited, has_sums, is_handed_on = (number.registers.item() for number in numbers)
    descriptor, offsets, width = descriptor_of_rows(tokens, weights.shape[1])
    thread = times(thread_of_warpgroup(), _FOUR_BYTES)
    addresses = [plus(shared_address(ref), thread) for ref in (taken, handed)]
    # The asm below keeps its place among barriers, and so do its operands.
    weights = fragmented_array.optimization_barrier(weights)
    descriptor, *addresses = _kept(descriptor, *addresses)
    with mgpu.when(_is_positive(is_awaited)):
        # The compiler moves nothing into a loop. That this one ends at once is more than it knows.
        wait = f"AGAIN: bar.sync $0, {_THREADS}; setp.gt.u32 again, $0, 15; @again bra AGAIN;"
        mgpu.inline_ptx("{ .reg .pred again; " + wait + " }", turn, has_side_effects=True)
    four, zero = ir.VectorType.get((4,), ir.F32Type.get()), mgpu.c(0.0, ir.F32Type.get())
    before = empty_registers(MATRIX, (ROWS, width))
    groups = before.reshape(-1, 2)
    for group in range(len(groups)):
        # Nobody has stored the first stage's sums, but they have an address.
        loaded = llvm.load(four, shared_pointer(plus(addresses[0], int32(group * WARPGROUP * _FOUR_BYTES))))
        sums = [arith.select(_is_positive(has_sums), element(loaded, i), zero) for i in range(4)]
        groups[group] = [packed(sums[:2]), packed(sums[2:])]
    total = started(
        weights,
        descriptor,
        offsets,
        width=width,
        is_transposed=False,
        before=array(groups.reshape(before.shape), MATRIX),
    )
    mgpu.inline_ptx("wgmma.wait_group.sync.aligned 0;", has_side_effects=True)
    # To the compiler the products are final once they are started.
    total = fragmented_array.optimization_barrier(total)
    for group, pair in enumerate(total.registers.reshape(-1, 2)):
        place = plus(addresses[1], int32(group * WARPGROUP * _FOUR_BYTES))
        llvm.store(packed([element(register, i) for register in pair for i in range(2)]), shared_pointer(place))
    with mgpu.when(_is_positive(is_handed_on)):
        mgpu.inline_ptx(f"bar.arrive $0, {_THREADS};", following, has_side_effects=True)
    return total


@with_twin(_plain_take_turn)
def take_turn(
    weights: Array, tokens: Any, taken: Any, handed: Any, turn: Array, following: Array, *conditions: Array
) -> Array:
    """Returns sums plus `weights @ tokens.T`, `[ROWS, N]`, after handing them on.

    Args:
        weights: a stage's row operand, `[ROWS, K]`, in registers.
        tokens: `[N, K]` in shared memory, swizzled in lines of 128 bytes.
        taken: the sums that are taken over, in the shape of `by_thread`.
        handed: where the sums are handed on, in the same shape.
        turn: the named barrier at which this warpgroup awaits its turn.
        following: the named barrier of the next warpgroup.
        conditions: int32 numbers that are 1 or 0: whether the turn must be awaited; whether there are sums, which
            otherwise begin with zeros; and whether another turn follows.
    """
    return _take_turn(weights, tokens, taken, handed, turn, following, *conditions)


def _is_positive(number: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.sgt, number, int32(0))


def _kept(descriptor: Any, *addresses: Any) -> list[Any]:
    """Returns a descriptor and addresses that are computed by now."""
    types = [value.type for value in (descriptor, *addresses)]
    kinds = ["l", *["r"] * len(addresses)]
    constraints = ",".join([*(f"={kind}" for kind in kinds), *(str(i) for i in range(len(kinds)))])
    struct = llvm.StructType.get_literal(types)
    result = llvm.inline_asm(struct, [descriptor, *addresses], "", constraints, asm_dialect=0, has_side_effects=True)
    return [llvm.extractvalue(one, result, [i]) for i, one in enumerate(types)]
