"""Stores to the memory of other GPUs over NVLink, and waits for what they store here.

A word that another GPU sends comes as a pair of 32 bits of data and 32 bits of a flag. A pair arrives whole, so the
receiver needs neither a fence nor a second message: it reads the pair until the flag is the one that it waits for.
"""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from detjax.device_links import MOST_CTAS, PAIRED_UNIT, TURNS, UNIT
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import no_twin, primitive
from detjax.pallas.hopper.mosaic.layouts import NUMBER
from detjax.pallas.hopper.mosaic.registers import int32

_PATIENCE: Final = 20 * 10**9
"""Nanoseconds after which a wait ends the program with an error: the other GPU will not send any more."""

_WAIT: Final = f"""{{
.reg .pred waits, late;
.reg .b64 begin, now;
mov.u64 begin, %globaltimer;
AGAIN:
ld.volatile.global.v4.u32 {{$0, $1, $2, $3}}, [$4];
setp.ne.u32 waits, $1, $5;
setp.ne.or.u32 waits, $3, $5, waits;
@!waits bra DONE;
mov.u64 now, %globaltimer;
sub.u64 now, now, begin;
setp.gt.u64 late, now, {_PATIENCE};
@late trap;
bra AGAIN;
DONE:
}}"""


@primitive(twin=no_twin("exchange"), args=(*(plgpu.RefType(),) * 4, NUMBER))
def exchange(
    x: Any, y: Any, addresses: Any, device: Any, cta: Any, *, devices: int, line: int, units: int, first: int
) -> None:
    """Sends this CTA's units of `x` to the other devices, and stores those of all devices in `y`.

    Args:
        x: this device's part, in lines of `line` units.
        y: all parts: each line has those of the devices one after the other.
        addresses: the address of each device's buffers, `[devices, 2]` int32, the lower half first. Zeros: nothing is
            sent, and this device's part stands in the place of all parts.
        device: the number of this device, `[1]` int32.
        cta: the number of the CTA.
        devices: how many devices there are.
        line: units of a line of `x`.
        units: units that a thread sends.
        first: where a device's counters begin in its buffers, in bytes; see `detjax.pallas.hopper.exchange`.
    """
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    total = int(np.prod(x.type.shape)) * _itemsize(x) // UNIT
    thread, cta = mgpu.thread_idx(), cta.registers.item()

    def long(value: Any) -> Any:
        return mgpu.c(value, i64) if isinstance(value, int) else arith.extui(i64, value)

    def plus(address: Any, number: Any, size: int) -> Any:
        """The address `number` things of a size later."""
        return arith.addi(address, arith.muli(long(number), long(size)))

    def load(address: Any, dtype: Any, text: str) -> Any:
        return mgpu.inline_ptx(text, address, result_types=dtype, has_side_effects=True)

    rank = load(_address(device), i32, "ld.global.u32 $0, [$1];")
    bases = [load(plus(_address(addresses), int32(d), 8), i64, "ld.global.u64 $0, [$1];") for d in range(devices)]
    base = bases[0]
    for other in range(1, devices):
        base = arith.select(arith.cmpi(arith.CmpIPredicate.eq, rank, int32(other)), bases[other], base)
    is_linked = arith.cmpi(arith.CmpIPredicate.ne, base, long(0))
    counter = plus(arith.addi(base, long(first)), cta, 4)
    counter = arith.select(is_linked, counter, _address(device))
    flag = arith.addi(load(counter, i32, "ld.volatile.global.u32 $0, [$1];"), int32(1))
    # Two turns of buffers: a device sends for the next turn but one only after all others have sent for the next turn,
    # and they have read those of this turn by then.
    turn = arith.addi(arith.muli(cta, int32(TURNS)), arith.andi(flag, int32(TURNS - 1)))

    def buffer(address: Any, sender: Any, unit: Any) -> Any:
        """Where a device has a unit of another one's."""
        place = arith.addi(arith.muli(turn, int32(devices)), sender)
        place = arith.addi(arith.muli(place, int32(units * WARPGROUP)), unit)
        return plus(arith.addi(address, long(first + MOST_CTAS * 4)), place, PAIRED_UNIT)

    def result(index: Any, sender: int) -> Any:
        row, column = arith.divui(index, int32(line)), arith.remui(index, int32(line))
        place = arith.addi(arith.muli(row, int32(line * devices)), arith.addi(int32(sender * line), column))
        return plus(_address(y), place, UNIT)

    def each_unit(step: Any) -> None:
        for number in range(units):
            unit = arith.addi(int32(number * WARPGROUP), thread)
            index = arith.addi(arith.muli(cta, int32(units * WARPGROUP)), unit)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index, int32(total))):
                step(index, unit)

    def send(index: Any, unit: Any) -> None:
        words = mgpu.inline_ptx(
            "ld.global.v2.u32 {$0, $1}, [$2];",
            plus(_address(x), index, UNIT),
            result_types=(i32, i32),
            has_side_effects=True,
        )
        for other in range(devices):
            is_other = arith.andi(is_linked, arith.cmpi(arith.CmpIPredicate.ne, rank, int32(other)))
            with mgpu.when(arith.xori(is_other, mgpu.c(1, ir.IntegerType.get_signless(1)))):
                mgpu.inline_ptx("st.global.v2.u32 [$0], {$1, $2};", result(index, other), *words, has_side_effects=True)
            with mgpu.when(is_other):
                mgpu.inline_ptx(
                    "st.volatile.global.v4.u32 [$0], {$1, $3, $2, $3};",
                    buffer(bases[other], rank, unit),
                    *words,
                    flag,
                    has_side_effects=True,
                )

    def receive(index: Any, unit: Any) -> None:
        for other in range(devices):
            with mgpu.when(arith.andi(is_linked, arith.cmpi(arith.CmpIPredicate.ne, rank, int32(other)))):
                first_word, _, second_word, _ = mgpu.inline_ptx(
                    _WAIT, buffer(base, int32(other), unit), flag, result_types=(i32,) * 4, has_side_effects=True
                )
                mgpu.inline_ptx(
                    "st.global.v2.u32 [$0], {$1, $2};",
                    result(index, other),
                    first_word,
                    second_word,
                    has_side_effects=True,
                )

    each_unit(send)
    each_unit(receive)
    mgpu.warpgroup_barrier()  # All threads have read the counter.
    with mgpu.when(arith.andi(is_linked, arith.cmpi(arith.CmpIPredicate.eq, thread, int32(0)))):
        mgpu.inline_ptx("st.volatile.global.u32 [$0], $1;", counter, flag, has_side_effects=True)


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.memref_ptr(ref))


def _itemsize(ref: Any) -> int:
    return mgpu.bitwidth(ref.type.element_type) // 8
