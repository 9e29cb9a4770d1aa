"""Loads from shared memory in PTX that are still queued when a thread says that their buffer may be overwritten.

An arrival at a barrier does not wait for earlier loads of the same thread, nor does the copy engine. A load has ended
once an instruction that leaves the thread's registers, or is predicated, has taken a number that depends on it: the
thread cannot issue that instruction before. Loads whose numbers nobody uses do not count, as the compiler removes them.
"""

import re
from collections.abc import Iterator

from tests.support.ptx import Instruction, Kernel

_LOADS = re.compile(r"ld\.shared|ldmatrix")
_TAKES_REGISTERS = re.compile(r"st\.|stmatrix|shfl|redux|bar\.red|red\.|atom|wgmma\.mma_async|mma\.")
_ARRIVALS = re.compile(r"mbarrier\.arrive\.(release|shared::cluster)")
_ENDS_BLOCK = re.compile(r"bra|ret|exit")


def queued_loads(kernel: Kernel) -> Iterator[list[Instruction]]:
    """Yields, for each arrival of a thread, the loads of the same basic block that may not have ended."""
    begins = {*kernel.labels.values()}
    # The first operand is a result, unless it is an address.
    sources = [text for one in kernel.code for i, text in enumerate(one.operands) if i > 0 or text[0] == "["]
    used = {register for text in sources for register in _names(text)}
    queued: dict[int, Instruction] = {}
    depends: dict[str, set[int]] = {}
    for place, instruction in enumerate(kernel.code):
        if place in begins:
            queued, depends = {}, {}
        name, operands = instruction.name, [_names(text) for text in instruction.operands]
        registers = {register for some in operands for register in some} | {instruction.guard.lstrip("!")}
        needed = {load for register in registers for load in depends.get(register, ())}
        if instruction.guard or _TAKES_REGISTERS.match(name):
            for load in needed:
                queued.pop(load, None)
        if _LOADS.match(name):
            if not used.isdisjoint(operands[0]):
                queued[place] = instruction
            depends |= {register: {place} for register in operands[0]}
        elif _ARRIVALS.match(name):
            yield list(queued.values())
        elif operands and not _TAKES_REGISTERS.match(name):
            depends |= {register: needed for register in operands[0]}
        if _ENDS_BLOCK.match(name):
            queued, depends = {}, {}


def _names(operand: str) -> list[str]:
    """The registers of an operand, also those that inline code declares."""
    return re.findall(r"%\w+|\b[a-z]\w*\b", operand)
