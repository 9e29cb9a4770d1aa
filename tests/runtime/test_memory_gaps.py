"""Tests of the gaps that keep temporary memory at one address, with a model of the allocator."""

import weakref

import jax

from detjax.runtime.memory_gaps import GAPS, between_gaps, leave_gaps, sizes_of_gaps

UNIT = 256
"""Bytes that the allocator rounds to."""
HIDDEN = 1000 * 8192
"""Bytes of the hidden states of a step's decodes."""


class Block:
    """An array in the modelled memory, which ends with it."""

    def __init__(self, address: int) -> None:
        self.address = address


class Memory:
    """A best-fit allocator: it cuts an array off the beginning of the smallest free chunk, and joins free chunks."""

    def __init__(self, size: int) -> None:
        self.free = [(0, size)]

    def allocate(self, size: int) -> Block:
        size = -(-size // UNIT) * UNIT
        length, start = min((length, start) for start, length in self.free if length >= size)
        self.free.remove((start, length))
        if length > size:
            self.free.append((start + size, length - size))
        block = Block(start)
        weakref.finalize(block, self._release, start, size)
        return block

    def _release(self, start: int, size: int) -> None:
        chunks: list[tuple[int, int]] = []
        for chunk in sorted([*self.free, (start, size)]):
            if chunks and sum(chunks[-1]) == chunk[0]:
                chunks[-1] = chunks[-1][0], chunks[-1][1] + chunk[1]
            else:
                chunks.append(chunk)
        self.free = chunks


def addresses_of_temporary_memory(memory: Memory, steps: int = 12) -> set[int]:
    """Runs steps whose small arrays outlive the launch of the next step, and returns where temporary memory lay."""
    addresses, last = set[int](), list[Block]()
    for step in range(steps):
        batch = [memory.allocate(size) for size in (3000, 700 + 256 * (step % 3))]
        results = [memory.allocate(size) for size in (HIDDEN, 900)]
        addresses.add(memory.allocate(50_000_000).address)
        last = [*batch, *results]  # the arrays of the step before end here
    del last
    return addresses


def test_small_arrays_do_not_move_temporary_memory() -> None:
    memory = Memory(1 << 30)
    state = memory.allocate(1 << 28)
    assert len(addresses_of_temporary_memory(memory)) > 1
    too_small = between_gaps(memory.allocate, HIDDEN // 4)
    assert len(addresses_of_temporary_memory(memory)) > 1
    too_small.clear()
    between = between_gaps(memory.allocate, HIDDEN)
    assert len(addresses_of_temporary_memory(memory)) == 1
    assert len(memory.free) == GAPS * len(sizes_of_gaps(HIDDEN)) + 1
    between.clear()
    assert memory.free == [(1 << 28, (1 << 30) - (1 << 28))], "the arrays between the gaps are all there was"
    del state


def test_the_largest_gaps_hold_the_largest_array() -> None:
    assert sizes_of_gaps(1) == sizes_of_gaps(1 << 21) == [1 << power for power in range(8, 22)]
    assert sizes_of_gaps(1 + (1 << 21)) == [1 << power for power in range(8, 23)]


def test_a_cpu_gets_no_gaps() -> None:
    assert leave_gaps(jax.devices("cpu"), HIDDEN) == []
