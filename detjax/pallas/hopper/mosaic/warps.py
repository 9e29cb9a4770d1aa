"""Work that the 32 threads of a warp divide among them (Mosaic GPU): warp sums, and a search in a list of lengths.

Each thread of a kernel computes the kernel's scalars for itself. Scalars that depend on `lane()` therefore differ
between the threads of a warp, until `warp_sum` makes them equal again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir.dialects import arith, nvvm

from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.device import WARP
from detjax.pallas.hopper.mosaic import no_twin, primitive, with_twin
from detjax.pallas.hopper.mosaic.layouts import NUMBER
from detjax.pallas.hopper.mosaic.registers import i32, int32, number, warp_and_lane

_MAX_HELD: Final = 8
"""Maximum numbers that a thread holds in registers to avoid loading them a second time."""
_NUMBER: Final = plgpu.ShapeDtypeStruct((), jnp.int32, layout=NUMBER)


@primitive(twin=no_twin("lane"), out=_NUMBER)
def lane() -> Any:
    """Returns the number of a thread within its warp, int32."""
    return number(warp_and_lane()[1])


@primitive(twin=no_twin("warp"), out=_NUMBER)
def warp() -> Any:
    """Returns the number of a thread's warp within its warpgroup, int32."""
    return number(warp_and_lane()[0])


@primitive(twin=no_twin("warp_sum"), args=(NUMBER,), out=_NUMBER)
def warp_sum(x: Any) -> Any:
    """Returns the sum of the int32 numbers of a warp's threads."""
    return number(mgpu.redux(x.registers.item(), int32(0xFFFFFFFF), mgpu.ReductionKind.ADD))


@primitive(twin=no_twin("warp_prefix_sum"), args=(NUMBER,), out=_NUMBER)
def warp_prefix_sum(x: Any) -> Any:
    """Returns the inclusive prefix sum of the int32 numbers of a warp's threads."""
    x = x.registers.item()
    _, lane = warp_and_lane()
    for distance in (1, 2, 4, 8, 16):
        other = from_lanes_below(x, distance)
        has_other = arith.cmpi(arith.CmpIPredicate.uge, lane, int32(distance))
        x = arith.select(has_other, arith.addi(x, other), x)
    return number(x)


type Places = tuple[Array, list[tuple[Array, Array]]]


def _plain_find_places(length_of: Callable[[Array], Array], count: int, positions: Callable[..., Any]) -> Places:
    """Implements `find_places` by one comparison with all intervals."""
    lengths = jnp.stack([length_of(jnp.int32(index)) for index in range(count)])
    ends = jnp.cumsum(lengths)
    places = []
    for position in positions(ends[-1]):
        index = jnp.where(position < ends[-1], (ends <= position).sum(), 0)
        offset = jnp.where(position < ends[-1], position - (ends - lengths)[index], 0)
        places.append((index, offset))
    return ends[-1], places


@with_twin(_plain_find_places)
def find_places(
    length_of: Callable[[Array], Array], count: int, positions: Callable[[Array], Sequence[Array]]
) -> Places:
    """Finds the intervals that positions are in, among `count` adjacent intervals from 0 on.

    The threads of a warp look at 32 intervals at once.

    Args:
        length_of: returns the length of an interval.
        count: number of intervals.
        positions: returns the positions to find, given the sum of all lengths.

    Returns:
        The sum of all lengths, and for each position the index of its interval and the offset in it. Positions past the
        end are at offset 0 of interval 0.
    """
    groups = ceil_div(count, WARP)
    thread = lane()

    def length(group: Any) -> Array:
        """Returns the length of the thread's interval in a group of 32."""
        index = group * WARP + thread
        return jnp.where(index < count, length_of(jnp.minimum(index, count - 1)), 0)

    # With few groups, all lengths are loaded before the first one is needed.
    lengths = [length(group) for group in range(groups)] if groups <= _MAX_HELD else None

    def fold(step: Callable[[Any, Array, Any], Any], carry: Any) -> Any:
        if lengths is None:
            return lax.fori_loop(0, groups, lambda group, carry: step(group, length(group), carry), carry)
        for group, held in enumerate(lengths):
            carry = step(group, held, carry)
        return carry

    total = warp_sum(fold(lambda _, length, total: total + length, jnp.zeros_like(thread)))
    wanted = positions(total)

    def find(group: Any, length: Array, carry: tuple[Array, list[tuple[Array, Array]]]) -> Any:
        passed, places = carry
        end = passed + warp_prefix_sum(length)
        begin, index = end - length, group * WARP + thread

        def add_place(place: tuple[Array, Array], position: Array) -> tuple[Array, Array]:
            is_here = (begin <= position) & (position < end)
            here = jnp.where(is_here, index, 0), jnp.where(is_here, position - begin, 0)
            return place[0] + warp_sum(here[0]), place[1] + warp_sum(here[1])

        is_last = isinstance(group, int) and group + 1 == groups
        passed = passed if is_last else passed + warp_sum(length)
        return passed, [add_place(*pair) for pair in zip(places, wanted, strict=True)]

    nowhere = jnp.int32(0), jnp.int32(0)
    return total, fold(find, (jnp.int32(0), [nowhere for _ in wanted]))[1]


def from_lanes_below(x: Any, distance: int) -> Any:
    """Emits the 4-byte register of the lane `distance` below; the first lanes of a warp get their own."""
    bits = x if x.type == i32() else arith.bitcast(i32(), x)
    bits = nvvm.shfl_sync(int32(0xFFFFFFFF), bits, int32(distance), int32(0), nvvm.ShflKind.up)
    return bits if x.type == i32() else arith.bitcast(x.type, bits)
