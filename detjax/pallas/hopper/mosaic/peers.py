"""Stores to the memory of other GPUs over NVLink, and waits for their stores to this one's.

A word is sent as a pair of 32 bits of data and 32 bits of a flag. A pair arrives whole, so the receiver needs neither a
fence nor a second message: it reads the pair until it has the expected flag.

Small arrays are sent entirely in pairs (`exchange`). Kernels with many results send pairs only at their beginning and
end (`open_results`, `close_results`), and write results directly into the other devices' arrays: chunks of a product
(`send_chunk`), or an array that is there already (`copy_piece`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import no_twin, primitive
from detjax.pallas.hopper.mosaic.layouts import NUMBER, swizzled_lines
from detjax.pallas.hopper.mosaic.registers import i32, int32, thread_of_warpgroup
from detjax.pallas.hopper.mosaic.registers import number as as_number
from detjax.runtime.device_links import CTA_BYTES, MAX_CTAS, PAIRED_UNIT, TURNS, UNIT

_PATIENCE: Final = 20 * 10**9
"""Nanoseconds after which a wait ends the program with an error, since the other GPU will not send any more."""

# Reads two pairs at a time. Each has a flag, because only pairs are sure to arrive whole, and both have to match.
# `volatile` makes every turn of the loop read memory. A thread that wants nothing leaves after one read.
_WAIT: Final = f"""{{
.reg .pred waits, late, wanted;
.reg .b64 begin, now;
setp.ne.u32 wanted, $6, 0;
mov.u64 begin, %globaltimer;
AGAIN:
ld.volatile.global.v4.u32 {{$0, $1, $2, $3}}, [$4];
setp.ne.u32 waits, $1, $5;
setp.ne.or.u32 waits, $3, $5, waits;
and.pred waits, waits, wanted;
@!waits bra DONE;
mov.u64 now, %globaltimer;
sub.u64 now, now, begin;
setp.gt.u64 late, now, {_PATIENCE};
@late trap;
bra AGAIN;
DONE:
}}"""

COPIED: Final = 16
"""Bytes of a result that a thread sends at a time."""


def _i64() -> Any:
    return ir.IntegerType.get_signless(64)


def _long(value: Any) -> Any:
    return mgpu.c(value, _i64()) if isinstance(value, int) else arith.extui(_i64(), value)


def _plus(address: Any, number: Any, size: int) -> Any:
    """Returns the address `number` elements of `size` bytes later."""
    return arith.addi(address, arith.muli(_long(number), _long(size)))


def _load(address: Any, dtype: Any, text: str) -> Any:
    return mgpu.inline_ptx(text, address, result_types=dtype, has_side_effects=True)


def _store(text: str, *operands: Any) -> None:
    mgpu.inline_ptx(text, *operands, has_side_effects=True)


def _equal(x: Any, y: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, x, y)


def _differ(x: Any, y: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ne, x, y)


class _Channel:
    """The connection of a CTA or warpgroup to its counterparts with the same number on the other devices.

    The flag of an exchange is its number, so a device recognizes data of the current exchange without any reset of
    buffers. All devices count the same exchanges, so their flags agree.

    Attributes:
        rank: the number of this device.
        bases: addresses of the devices' buffers; zeros if nothing is sent.
        is_linked: whether anything is sent.
        counter: address of the number of exchanges of this channel so far.
        flag: the flag of the next exchange.
    """

    def __init__(self, addresses: Any, device: Any, number: Any, *, devices: int, first: int) -> None:
        """Reads the channel's counter. Arguments are as in `exchange`; `number` is the channel's."""
        self.devices, self._number, self._first = devices, number, first
        self._somewhere = _address(device)  # valid memory to read if nothing is sent
        self.rank = _load(self._somewhere, i32(), "ld.global.u32 $0, [$1];")
        places = [_plus(_address(addresses), int32(d), 8) for d in range(devices)]
        self.bases = [_load(place, _i64(), "ld.global.u64 $0, [$1];") for place in places]
        base = self.bases[0]
        for other in range(1, devices):
            base = arith.select(_equal(self.rank, int32(other)), self.bases[other], base)
        self._base, self.is_linked = base, _differ(base, _long(0))
        counter = _plus(arith.addi(base, _long(first)), number, 4)
        self.counter = arith.select(self.is_linked, counter, self._somewhere)
        self.flag = arith.addi(_load(self.counter, i32(), "ld.volatile.global.u32 $0, [$1];"), int32(1))

    def others(self) -> Iterator[tuple[int, Any]]:
        """Yields each device, and whether it is a different one that data is sent to."""
        for other in range(self.devices):
            yield other, arith.andi(self.is_linked, _differ(self.rank, int32(other)))

    def _buffer(self, address: Any, sender: Any, unit: Any) -> Any:
        """Returns the address of the unit that a sender writes to in the buffers at `address`.

        Exchanges alternate between two buffers. A device starts the exchange after next only when all others have sent
        for the next one, and by then they have read this exchange's buffer. So no buffer needs an acknowledgement.
        """
        turn = arith.addi(arith.muli(self._number, int32(TURNS)), arith.andi(self.flag, int32(TURNS - 1)))
        place = arith.addi(arith.muli(turn, int32(self.devices)), sender)
        place = arith.addi(arith.muli(place, int32(CTA_BYTES // UNIT)), unit)
        return _plus(arith.addi(address, _long(self._first + MAX_CTAS * 4)), place, PAIRED_UNIT)

    def send(self, other: int, unit: Any, words: Any) -> None:
        """Sends two words to another device."""
        place = self._buffer(self.bases[other], self.rank, unit)
        _store("st.volatile.global.v4.u32 [$0], {$1, $3, $2, $3};", place, *words, self.flag)

    def receive(self, other: int, unit: Any, is_sent: Any) -> tuple[Any, Any]:
        """Waits for two words from another device, and returns them; undefined unless `is_sent`."""
        place = arith.select(is_sent, self._buffer(self._base, int32(other), unit), self._somewhere)
        wanted = arith.extui(i32(), is_sent)
        first, _, second, _ = mgpu.inline_ptx(
            _WAIT, place, self.flag, wanted, result_types=(i32(),) * 4, has_side_effects=True
        )
        return first, second

    def count(self, thread: Any) -> None:
        """Stores the number of exchanges, once all threads have read the previous one."""
        mgpu.warpgroup_barrier()
        with mgpu.when(arith.andi(self.is_linked, _equal(thread, int32(0)))):
            _store("st.volatile.global.u32 [$0], $1;", self.counter, self.flag)


@primitive(twin=no_twin("exchange"), args=(*(plgpu.RefType(),) * 4, NUMBER))
def exchange(  # noqa: PLR0913
    x: Any, y: Any, addresses: Any, device: Any, cta: Any, *, devices: int, line: int, first: int
) -> None:
    """Sends this CTA's units of `x` to the other devices, and stores the units of all devices in `y`.

    Args:
        x: this device's part, in lines of `line` units.
        y: all parts: each line concatenates the devices' lines.
        addresses: the address of each device's buffers, `[devices, 2]` int32, the lower half first. Zeros: nothing is
            sent, and this device's part takes the place of all parts.
        device: the number of this device, `[1]` int32.
        cta: the number of the CTA.
        devices: number of devices.
        line: units of a line of `x`.
        first: offset of the counters in a device's buffers, in bytes; see `detjax.pallas.hopper.exchange`.
    """
    total = int(np.prod(x.type.shape)) * mgpu.bitwidth(x.type.element_type) // (8 * UNIT)
    thread, cta = mgpu.thread_idx(), cta.registers.item()
    units = CTA_BYTES // UNIT

    def result(index: Any, sender: int) -> Any:
        row, column = arith.divui(index, int32(line)), arith.remui(index, int32(line))
        place = arith.addi(arith.muli(row, int32(line * devices)), arith.addi(int32(sender * line), column))
        return _plus(_address(y), place, UNIT)

    channel = _Channel(addresses, device, cta, devices=devices, first=first)

    def send(index: Any, unit: Any) -> None:
        words = mgpu.inline_ptx(
            "ld.global.v2.u32 {$0, $1}, [$2];",
            _plus(_address(x), index, UNIT),
            result_types=(i32(), i32()),
            has_side_effects=True,
        )
        for other, is_other in channel.others():
            with mgpu.when(arith.xori(is_other, mgpu.c(1, ir.IntegerType.get_signless(1)))):
                _store("st.global.v2.u32 [$0], {$1, $2};", result(index, other), *words)
            with mgpu.when(is_other):
                channel.send(other, unit, words)

    def receive(index: Any, unit: Any) -> None:
        for other, is_other in channel.others():
            with mgpu.when(is_other):
                words = channel.receive(other, unit, is_other)
                _store("st.global.v2.u32 [$0], {$1, $2};", result(index, other), *words)

    # A thread receives what the same thread of another device has sent, so threads need not wait for one another. It
    # sends all its units before it receives any, so that all are under way during the first wait.
    for step in (send, receive):
        for begin in range(0, units, WARPGROUP):
            unit = arith.addi(int32(begin), thread)
            index = arith.addi(arith.muli(cta, int32(units)), unit)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index, int32(total))):
                step(index, unit)
    channel.count(thread)


# --- results that a kernel writes into the arrays of all devices ------------------------------------------------------

_ARRAY, _DONE = 0, 1
"""The units of a channel's buffer for the address of the device's array, and for the end of the warpgroup's writes."""


@primitive(
    twin=no_twin("open_results"),
    args=(*(plgpu.RefType(),) * 3, NUMBER),
    out=lambda *_, devices, first: (plgpu.ShapeDtypeStruct((), jnp.int32, layout=NUMBER),) * (2 * devices),
)
def open_results(y: Any, addresses: Any, device: Any, number: Any, *, devices: int, first: int) -> Any:
    """Sends the address of `y` to the other devices, and waits for the addresses of theirs.

    The wait is for the other kernels to begin as well: before that, their arrays may be memory that is still in use.

    Args:
        y: the array that all devices write to.
        addresses: the address of each device's buffers; see `exchange`.
        device: the number of this device.
        number: the number of the channel; each warpgroup has one.
        devices: number of devices.
        first: offset of the counters in a device's buffers.

    Returns:
        The address of each device's array, the lower half first; zeros: nothing is written to it.
    """
    channel = _Channel(addresses, device, number.registers.item(), devices=devices, first=first)
    here = _address(y)
    halves = arith.trunci(i32(), here), arith.trunci(i32(), arith.shrui(here, _long(32)))
    places = []
    for other, is_other in channel.others():
        with mgpu.when(arith.andi(is_other, _equal(thread_of_warpgroup(), int32(0)))):
            channel.send(other, int32(_ARRAY), halves)
    for other, is_other in channel.others():
        words = channel.receive(other, int32(_ARRAY), is_other)
        places += [as_number(arith.select(is_other, word, int32(0))) for word in words]
    return tuple(places)


@primitive(
    twin=no_twin("send_chunk"),
    args=lambda chunk, *numbers, line, itemsize, **_: (
        plgpu.RefType(swizzled_lines(line, itemsize)),
        *(NUMBER,) * len(numbers),
    ),
)
def send_chunk(
    chunk: Any,
    row: Any,
    column: Any,
    *arrays: Any,
    line: int,
    itemsize: int,
    shape: tuple[int, int],
    bounds: tuple[int, int],
) -> None:
    """Writes a chunk of results from shared memory into the arrays of the other devices.

    Args:
        chunk: results in tiles of 8 lines, swizzled if a line has more than 16 bytes.
        row: the chunk's first row in the arrays.
        column: its first column there.
        arrays: addresses of the arrays; see `open_results`.
        line: elements of a line.
        itemsize: bytes of an element.
        shape: rows and columns of the chunk that are results.
        bounds: rows and columns of the arrays. Rows beyond them are not written.
    """
    (down, across, _, _), _ = chunk.type.get_strides_and_offset()
    place = llvm.ptrtoint(i32(), mgpu.memref_ptr(chunk))
    line_bytes = line * itemsize
    per_row = shape[1] * itemsize // COPIED
    row, column = row.registers.item(), column.registers.item()
    bases = _bases(arrays)
    # Neighbouring threads have neighbouring 16 bytes of a line, in shared memory as in the arrays.
    thread, vector = thread_of_warpgroup(), ir.VectorType.get((4,), i32())
    for begin in range(0, shape[0] * per_row, WARPGROUP):
        unit = arith.addi(thread, int32(begin))
        line_of_chunk, byte = (
            arith.divui(unit, int32(per_row)),
            arith.muli(arith.remui(unit, int32(per_row)), int32(COPIED)),
        )
        in_tile = arith.addi(
            arith.muli(arith.remui(line_of_chunk, int32(8)), int32(line_bytes)), arith.remui(byte, int32(line_bytes))
        )
        # The number of the 128-byte block is XORed into the number of the 16-byte unit within its line.
        mask = line_bytes // COPIED - 1
        swizzle = arith.muli(arith.andi(arith.shrui(in_tile, int32(7)), int32(mask)), int32(COPIED))
        source = arith.addi(place, arith.xori(in_tile, swizzle))
        source = arith.addi(source, arith.muli(arith.divui(line_of_chunk, int32(8)), int32(down * itemsize)))
        source = arith.addi(source, arith.muli(arith.divui(byte, int32(line_bytes)), int32(across * itemsize)))
        target_row = arith.addi(row, line_of_chunk)
        is_result = arith.cmpi(arith.CmpIPredicate.ult, target_row, int32(bounds[0]))
        if begin + WARPGROUP > shape[0] * per_row:
            is_result = arith.andi(is_result, arith.cmpi(arith.CmpIPredicate.ult, unit, int32(shape[0] * per_row)))
        with mgpu.when(is_result):
            words = llvm.load(vector, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), source))
            offset = arith.addi(
                arith.muli(_long(target_row), _long(bounds[1] * itemsize)),
                _long(arith.addi(arith.muli(column, int32(itemsize)), byte)),
            )
            for base in bases:
                with mgpu.when(_differ(base, _long(0))):
                    llvm.store(words, llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), arith.addi(base, offset)))


PIECE_BYTES: Final = WARPGROUP * 8 * COPIED
"""Bytes that `copy_piece` copies."""


@primitive(
    twin=no_twin("copy_piece"),
    args=lambda *_, devices, **__: (*(plgpu.RefType(),) * 3, *(NUMBER,) * (1 + 2 * devices)),
)
def copy_piece(x: Any, y: Any, device: Any, piece: Any, *arrays: Any, devices: int) -> None:
    """Copies a piece of this device's columns into its own array and the arrays of the other devices.

    Args:
        x: this device's columns, in rows of whole `COPIED` bytes.
        y: this device's array of all columns.
        device: the number of this device, `[1]` int32.
        piece: the number of the piece, of `PIECE_BYTES` each.
        arrays: addresses of the other devices' arrays; see `open_results`.
        devices: number of devices.
    """
    rows, columns = x.type.shape
    line = columns * mgpu.bitwidth(x.type.element_type) // (8 * COPIED)
    rank = _load(_address(device), i32(), "ld.global.u32 $0, [$1];")
    copied, begin = [], arith.muli(piece.registers.item(), int32(PIECE_BYTES // COPIED))
    # All loads are under way before the first store. Beyond the end, threads copy the last unit once more.
    for number in range(0, PIECE_BYTES // COPIED, WARPGROUP):
        unit = arith.addi(begin, arith.addi(thread_of_warpgroup(), int32(number)))
        unit = arith.minui(unit, int32(rows * line - 1))
        row, column = arith.divui(unit, int32(line)), arith.remui(unit, int32(line))
        place = arith.addi(arith.muli(row, int32(line * devices)), arith.addi(arith.muli(rank, int32(line)), column))
        words = mgpu.inline_ptx(
            "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];",
            _plus(_address(x), unit, COPIED),
            result_types=(i32(),) * 4,
            has_side_effects=True,
        )
        copied.append((place, words))

    def store(base: Any) -> None:
        for place, words in copied:
            _store("st.global.v4.u32 [$0], {$1, $2, $3, $4};", _plus(base, place, COPIED), *words)

    store(_address(y))
    for base in _bases(arrays):
        with mgpu.when(_differ(base, _long(0))):
            store(base)


@primitive(twin=no_twin("close_results"), args=(*(plgpu.RefType(),) * 2, NUMBER))
def close_results(addresses: Any, device: Any, number: Any, *, devices: int, first: int) -> None:
    """Signals the other devices that this warpgroup has written its results, and waits for their signals.

    It takes the arguments of `open_results`.
    """
    channel = _Channel(addresses, device, number.registers.item(), devices=devices, first=first)
    thread = thread_of_warpgroup()
    # After the barrier, one thread's fence covers the writes of all threads, and all of them have read the counter.
    mgpu.warpgroup_barrier()
    # One thread signals, but all wait below: the compiler may duplicate a barrier after a branch, and a warp whose
    # threads reach different copies of it hangs.
    with mgpu.when(arith.andi(channel.is_linked, _equal(thread, int32(0)))):
        _store("fence.acq_rel.sys;")
        for other, is_other in channel.others():
            with mgpu.when(is_other):
                channel.send(other, int32(_DONE), (channel.flag, channel.flag))
        _store("st.volatile.global.u32 [$0], $1;", channel.counter, channel.flag)
    for other, is_other in channel.others():
        channel.receive(other, int32(_DONE), is_other)
    # The counterpart of the other devices' fences: their results are visible to whatever reads them after this.
    _store("fence.acq_rel.sys;")


def _bases(arrays: Sequence[Any]) -> list[Any]:
    """Returns the addresses of arrays, which are given in halves, the lower ones first."""
    halves = [x.registers.item() for x in arrays]
    return [
        arith.addi(_long(low), arith.shli(_long(high), _long(32)))
        for low, high in zip(halves[::2], halves[1::2], strict=True)
    ]


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(_i64(), mgpu.memref_ptr(ref))
